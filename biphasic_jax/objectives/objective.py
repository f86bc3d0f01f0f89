"""What an objective is: a host transform, an attention mode and a loss.

`transform` corrupts rows and says by position what is to be predicted; `collate` lays that out for the
device; `loss` turns features into sums. All three are pure. An objective never divides: the loss sum and
the weight sum stay apart until the step has added micro-batches and devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from biphasic_jax.data.rows import RowBatch
from biphasic_jax.data.vocabulary import Vocabulary


@dataclass
class Examples:
    """Rows after an objective's host transform, by position.

    tokens_BxL: int32, as fed. targets_BxL: int32, the token that position i must predict; anything where
    the weight is 0. weights_BxL: float32. counts: name -> (B,) int32, added up over the step as metrics.
    """

    tokens_BxL: np.ndarray
    targets_BxL: np.ndarray
    weights_BxL: np.ndarray
    counts: dict[str, np.ndarray] = field(default_factory=dict)


DEFINED: "list[type[Objective]]" = []  # all of them: nothing else holds on to a class of a config file


class Objective:
    """Base of all objectives. A subclass in a module of this package is found by its `name`.

    Class attributes: `name`; `causal`, the attention mode of the phase; `defaults`, its settings in a
    phase with their default values. An instance belongs to one phase.
    """

    name: ClassVar[str] = ""
    causal: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        DEFINED.append(cls)

    def __init__(self, settings: Mapping[str, Any], vocabulary: Vocabulary, seed: int, steps: tuple[int, int]):
        """`seed` is the run's (or the evaluation's); `steps` the phase's first update and its end."""
        self.settings = {**self.defaults, **settings}
        self.vocabulary = vocabulary
        self.seed = seed
        self.steps = steps

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Raises `UserError("key=value: mend")` for settings that make no sense."""

    def transform(self, rows: RowBatch, step: int) -> Examples:
        """Corrupts `rows` for update `step`. A row's result depends on (seed, its global index, step) alone."""
        raise NotImplementedError

    def predictions(self, positions: int) -> int | None:
        """Room for targets among `positions` positions; None where every position is a target."""
        return None

    def rate(self, step: int) -> float | None:
        """The mask rate of update `step`; None where there is none."""
        return None

    def loss(self, model: Any, params: Any, batch: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """(loss sum, weight sum, further sums), float32 scalars, of a device batch from `collate`."""
        from biphasic_jax.model.head import prediction_loss

        return prediction_loss(model, params, batch, causal=self.causal)


def collate(examples: Examples, rows: RowBatch, room: int | None, groups: int) -> dict[str, np.ndarray]:
    """The device batch: every leaf has a leading axis that `groups` divides.

    Always: tokens (B, L) int32, segments (B, L) int32, counts/NAME (B,) int32. With `room` None: targets
    and weights (B, L). Else the B rows are taken as `groups` runs of B / groups rows, each with room for
    `room` predictions: predict (groups, room) int32, positions in the flattened run; targets and weights
    (groups, room), weight 0 in empty room; counts/overflow (groups,) int32, the targets that found no room.
    """
    batch = {"tokens": examples.tokens_BxL, "segments": rows.segments_BxL}
    batch |= {f"counts/{name}": count for name, count in examples.counts.items()}
    if room is None:
        return batch | {"targets": examples.targets_BxL, "weights": examples.weights_BxL}
    weights_GxM = examples.weights_BxL.reshape(groups, -1)
    targets_GxM = examples.targets_BxL.reshape(groups, -1)
    predict_GxP = np.zeros((groups, room), np.int32)
    targets_GxP = np.zeros((groups, room), np.int32)
    weights_GxP = np.zeros((groups, room), np.float32)
    overflow_G = np.zeros(groups, np.int32)
    for g in range(groups):
        where = np.flatnonzero(weights_GxM[g] != 0)
        overflow_G[g] = max(0, len(where) - room)
        where = where[:room]
        predict_GxP[g, : len(where)] = where
        targets_GxP[g, : len(where)] = targets_GxM[g, where]
        weights_GxP[g, : len(where)] = weights_GxM[g, where]
    return batch | {
        "predict": predict_GxP,
        "targets": targets_GxP,
        "weights": weights_GxP,
        "counts/overflow": overflow_G,
    }


def documents_of(segments_BxL: np.ndarray, target_BxL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(documents_B, without_B) int32: segments of each row, and those in which `target_BxL` is nowhere true."""
    rows, length = segments_BxL.shape
    start_N = np.flatnonzero(segment_starts(segments_BxL))
    row_N, document_N = start_N // length, segments_BxL.ravel()[start_N] > 0
    with_target_N = np.maximum.reduceat(target_BxL.ravel(), start_N)
    documents_B = np.bincount(row_N[document_N], minlength=rows)
    without_B = np.bincount(row_N[document_N & ~with_target_N], minlength=rows)
    return documents_B.astype(np.int32), without_B.astype(np.int32)


def segment_starts(segments_BxL: np.ndarray) -> np.ndarray:
    """Where a segment, or padding, begins, (B, L) bool."""
    starts_BxL = np.ones(segments_BxL.shape, bool)
    np.not_equal(segments_BxL[:, 1:], segments_BxL[:, :-1], out=starts_BxL[:, 1:])
    return starts_BxL
