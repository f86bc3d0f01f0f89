"""The verb `inspect`: the rows of a run's batches, as the device would get them."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict

from biphasic_jax.data.batches import train_batches
from biphasic_jax.data.order import Order
from biphasic_jax.data.prepare import ensure_rows
from biphasic_jax.data.shards import Rows
from biphasic_jax.data.tokenizer import vocabulary_of
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.plan import Phase, Plan, make_plan
from biphasic_jax.recipe import load_config

DESCRIPTION = """\
Shows the rows of a run's batches: text, segments, what is hidden and what is to be predicted; then how full the rows
are, how long the segments, how much is said twice. Prepares the rows if they are missing; trains nothing.

  the first batch:                       inspect --config=configs/tiny.py
  the first one of the second phase:     inspect --config=configs/tiny.py --steps=70:71
  more rows of it, at a higher rate:     inspect --config=configs/tiny.py --steps=70:71 --rows=20 \\
                                             --config.phases[1].mask_rate=0.5
  everything, for a program:             inspect --config=configs/tiny.py --steps=0:10 --format=json

JSON is one object a row: step, index (global example index), tokens (as fed), segments (0 = padding), positions
(they restart in each segment), original (before corruption), targets and weights by position. --process, --processes
and --workers serve what one of several processes would get, through that many grain workers."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--config", required=True, metavar="FILE[:ARG]", help="a recipe, see configs/; any key by --config.KEY=VALUE")
    add("--steps", default="", metavar="A:B", help="the updates A to B, B excluded (the first one)")
    add("--start", type=int, default=0, metavar="K", help="step of the checkpoint that init.checkpoint goes on from "
        "in full (0)")  # fmt: skip
    add("--format", choices=("text", "json"), default="text", help="for people, or an object a line (text)")
    add("--rows", type=int, default=4, help="rows of each step that text shows; 0: all (4)")
    add("--process", type=int, default=0, metavar="I", help="whose slice of each batch (0)")
    add("--processes", type=int, default=1, metavar="N", help="how many processes share a batch (1)")
    add("--workers", type=int, default=0, metavar="W", help="grain worker processes; no row depends on it (0)")


@dataclass(frozen=True)
class ServedRow:
    """One row of a batch. Arrays have length L; targets are 0 where the weight is."""

    phase: Phase
    step: int
    index: int
    row: int
    tokens_L: np.ndarray
    segments_L: np.ndarray
    original_L: np.ndarray
    targets_L: np.ndarray
    weights_L: np.ndarray

    @property
    def positions_L(self) -> np.ndarray:
        """The position of each token in its segment; 0 in padding."""
        begins_L = np.diff(self.segments_L, prepend=-1) != 0
        place_L = np.arange(len(self.segments_L))
        start_L = np.maximum.accumulate(np.where(begins_L, place_L, 0))
        return np.where(self.segments_L > 0, place_L - start_L, 0)

    def as_dict(self) -> dict[str, int | list[int] | list[float]]:
        return {
            "step": self.step,
            "index": self.index,
            "tokens": self.tokens_L.tolist(),
            "segments": self.segments_L.tolist(),
            "positions": self.positions_L.tolist(),
            "original": self.original_L.tolist(),
            "targets": self.targets_L.tolist(),
            "weights": self.weights_L.tolist(),
        }


def main(args: argparse.Namespace) -> int:
    from biphasic_jax.objectives import registry

    config = load_config(args.config, args.overrides, registry)
    plan = make_plan(config, args.start)
    start, stop = parse_steps(args.steps or str(plan.start), plan)
    if not 0 <= args.process < args.processes:
        raise UserError(f"--process={args.process} must be one of 0 to {args.processes - 1}; see --processes")
    if args.workers < 0 or args.rows < 0:
        raise UserError(f"--workers={args.workers} and --rows={args.rows} must be 0 or more")
    folder = ensure_rows(config)
    rows, vocabulary = Rows(folder, "train"), vocabulary_of(folder)
    served = served_rows(rows, vocabulary, config, plan, start, stop, args.process, args.processes, args.workers)
    if args.format == "json":
        for row in served:
            sys.stdout.write(json.dumps(row.as_dict()) + "\n")
        return 0
    from biphasic_jax.data.row_display import Display

    Display(folder, rows, vocabulary).show(served, args.rows)
    return 0


def parse_steps(text: str, plan: Plan) -> tuple[int, int]:
    """(A, B) of "A:B", or (A, A + 1) of "A"; both inside the plan."""
    first, colon, last = text.partition(":")
    try:
        start = int(first)
        stop = int(last) if colon else start + 1
    except ValueError:
        raise UserError(f"--steps={text}: write A:B, two whole numbers") from None
    if not plan.start <= start < stop <= plan.end:
        raise UserError(
            f"--steps={text}: the plan has the updates {plan.start} to {plan.end - 1}; "
            f"write A:B with {plan.start} <= A < B <= {plan.end}"
        )
    return start, stop


def served_rows(
    rows: Rows,
    vocabulary: Vocabulary,
    config: ConfigDict,
    plan: Plan,
    start: int,
    stop: int,
    process: int = 0,
    processes: int = 1,
    workers: int = 0,
) -> Iterator[ServedRow]:
    """The rows of the batches `start` to `stop` (excluded) that this process gets, taken off the real pipeline."""
    from biphasic_jax.objectives import registry

    order = Order(rows.sources, config.seed)
    mine = config.batch.rows // processes
    for phase in plan.phases:
        first, last = max(start, phase.start), min(stop, phase.end)
        if first >= last:
            continue
        span = (phase.start, phase.end)
        objective = registry()[phase.objective](phase.settings, vocabulary, config.seed, span)
        batches = train_batches(
            rows, objective, config,
            start=first, stop=last, groups=1, process=process, processes=processes, workers=workers,
        )  # fmt: skip
        for step, batch in batches:
            index_B = step * config.batch.rows + process * mine + np.arange(mine)
            row_B, _ = order.locate(index_B)
            original_BxL, _ = rows.read(row_B)
            targets_BxL, weights_BxL = by_position(batch)
            for i in range(mine):
                yield ServedRow(
                    phase, step, int(index_B[i]), int(row_B[i]), batch["tokens"][i], batch["segments"][i],
                    original_BxL[i], targets_BxL[i], weights_BxL[i],
                )  # fmt: skip


def by_position(batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(targets_BxL, weights_BxL) of a device batch of one group, whose predictions may be a list of positions."""
    weights_BxL = np.zeros(batch["tokens"].shape, np.float32)
    targets_BxL = np.zeros(batch["tokens"].shape, np.int32)
    if "predict" not in batch:
        weights_BxL[:] = batch["weights"]
        targets_BxL[:] = batch["targets"]
    else:
        used_P = np.flatnonzero(batch["weights"][0])
        place_P = batch["predict"][0, used_P]
        weights_BxL.reshape(-1)[place_P] = batch["weights"][0, used_P]
        targets_BxL.reshape(-1)[place_P] = batch["targets"][0, used_P]
    return np.where(weights_BxL > 0, targets_BxL, 0), weights_BxL
