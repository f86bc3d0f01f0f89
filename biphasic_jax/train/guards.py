"""The probe of causality: does the compiled step of this phase see what it must, and nothing else?

An attention mode can get lost between a config and a compiled program, and the loss does not tell. So at
the start of every phase the very executable that will train answers two batches of the phase's shapes in
which only one early position of each row has weight, and whose later tokens differ. A causal loss must be
the same, a bidirectional one must not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from biphasic_jax.data.randomness import generator
from biphasic_jax.data.rows import RowBatch
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.objectives import Examples, Objective, collate
from biphasic_jax.train.state import TrainState

WATCHED = 1  # the position with weight
TOLERANCE = 1e-6  # relative: a masked position adds exactly zero, a visible one far more than this


class GuardError(RuntimeError):
    """The program, not the user's input, is wrong: the run stops."""


def probe_batches(
    objective: Objective, vocabulary: Vocabulary, rows: int, length: int, groups: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two host batches, equal but for the tokens after WATCHED in its segment; weight 1 there alone.

    Every other row holds two segments and padding, the rest are one segment.
    """
    random = generator(0, "causality probe", 0)
    ordinary = vocabulary.ordinary
    choice_BxL = random.integers(len(ordinary), size=(rows, length))
    segments_BxL = np.ones((rows, length), np.int32)
    segments_BxL[1::2, length // 2 :] = 2
    segments_BxL[1::2, length - length // 8 :] = 0
    tokens_BxL = np.where(segments_BxL > 0, ordinary[choice_BxL], vocabulary.pad).astype(np.int32)
    later_BxL = (segments_BxL == 1) & (np.arange(length) > WATCHED)
    other_BxL = np.where(later_BxL, ordinary[(choice_BxL + 1) % len(ordinary)], tokens_BxL).astype(np.int32)

    index_B = np.arange(rows, dtype=np.int64)
    row_batch = RowBatch(tokens_BxL, segments_BxL, index_B, index_B)
    counts = objective.transform(row_batch, objective.steps[0]).counts  # for the shapes of the phase
    weights_BxL = np.zeros((rows, length), np.float32)
    weights_BxL[:, WATCHED] = 1
    targets_BxL = np.roll(tokens_BxL, 1, axis=1)
    room = objective.predictions(rows * length // groups)

    def batch(fed_BxL: np.ndarray) -> dict[str, np.ndarray]:
        return collate(Examples(fed_BxL, targets_BxL, weights_BxL, counts), row_batch, room, groups)

    return batch(tokens_BxL), batch(other_BxL)


def probe_causality(
    losses: Callable[[TrainState, dict[str, np.ndarray]], tuple[TrainState, Any]],
    state: TrainState,
    objective: Objective,
    batches: tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
) -> TrainState:
    """The state as it was; raises `GuardError` where the attention mode is not the objective's.

    `losses(state, batch)` gives (state unchanged, metrics) from the compiled step. A loss that is not finite
    tells nothing of attention, and is left to the guard that watches every update.
    """
    sums = []
    for batch in batches:
        state, metrics = losses(state, batch)
        sums.append(float(metrics["loss_sum"]))
    if not np.isfinite(sums).all():
        return state
    change = abs(sums[1] - sums[0]) / abs(sums[0])
    if objective.causal and not change <= TOLERANCE:
        raise GuardError(
            f"the compiled step of {objective.name} sees the future: the loss of position {WATCHED} moved by "
            f"{change:.1e} of itself when only later tokens changed; nothing was trained with it"
        )
    if not objective.causal and not change > TOLERANCE:
        raise GuardError(
            f"the compiled step of {objective.name} is causal: the loss of position {WATCHED} did not move "
            f"({change:.1e}) when later tokens changed; nothing was trained with it"
        )
    return state
