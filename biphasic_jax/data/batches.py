"""Batches as a function of the step: row numbers, rows, the objective's transform, this process's slice; through grain.

Nothing is remembered from one batch to the next. So a resume is arithmetic, and the number of processes, workers
and devices may change between two steps without a row being lost, repeated or corrupted otherwise.
"""

import contextlib
import dataclasses
import gc
import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grain
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from biphasic_jax.data.order import Order
from biphasic_jax.data.rows import RowBatch
from biphasic_jax.data.shards import Rows
from biphasic_jax.errors import UserError

if TYPE_CHECKING:
    from biphasic_jax.objectives import Examples, Objective

Batch = dict[str, np.ndarray]
AHEAD = 2  # batches that wait for the device, and for each worker
CHUNK = 32_768  # tokens that are read and corrupted at a time: their arrays stay in the processor's cache


def train_batches(
    rows: Rows,
    objective: "Objective",
    config: ConfigDict,
    *,
    start: int,
    stop: int,
    groups: int,
    process: int = 0,
    processes: int = 1,
    workers: int = 0,
) -> Iterator[tuple[int, Batch]]:
    """(step, this process's slice of batch `step`) for the steps `start` to `stop` (excluded).

    A batch is what `objectives.collate` makes of config.batch.rows / processes rows in `groups` groups. With
    `workers` = 0 a thread works ahead; else that many processes do. Batches do not depend on it. Close the
    iterator (or let go of it) to end them. Raises `UserError` for a batch that cannot be divided so, and
    `RuntimeError` if a worker dies.
    """
    slice_ = _Slice(rows, objective, Order(rows.sources, config.seed), config.batch.rows, process, processes, groups)
    slice_.check()
    steps = grain.MapDataset.range(start, stop).map(slice_)
    # Threads inside grain's reader only slow local files down; one thread or process ahead is what pays.
    batches = steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    workers = min(workers, stop - start)
    if workers > 0:
        if not flags.FLAGS.is_parsed():  # grain's workers read absl flags, and a library cannot expect app.run
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD)
        batches = batches.mp_prefetch(options, worker_init_fn=_settle_worker)
    else:
        batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=AHEAD)
    return _closing(batches, workers)


def _closing(batches: grain.IterDataset, workers: int) -> Iterator[tuple[int, Batch]]:
    iterator = iter(batches)
    try:
        for step, batch in iterator:
            yield step, {name: np.array(array) for name, array in batch.items()} if workers else batch
    except RuntimeError as error:
        if workers and "terminated unexpectedly" in str(error):
            raise RuntimeError(
                f"one of {workers} data workers died: {str(error).partition('.')[0]}. The usual cause is that memory "
                f"or /dev/shm is full: lower config.data.workers; the batches stay the same"
            ) from error
        raise
    finally:
        with contextlib.suppress(AssertionError):  # of a worker that is just being started; it ends with us
            iterator.close()
        if workers:  # a worker's arrays lie in shared memory: copied above, and let go of here, out of grain's cycles
            batch = None
            gc.collect()


def _settle_worker(index: int, count: int) -> None:
    """A worker lives as long as its parent: the parent decides on a signal, and if it is killed nobody else would."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@dataclass(frozen=True, eq=False)
class _Slice:
    """step -> (step, batch): what grain maps over the steps, in this process or in workers."""

    rows: Rows
    objective: "Objective"
    order: Order
    batch_rows: int
    process: int
    processes: int
    groups: int

    def check(self) -> None:
        if self.batch_rows % (self.processes * self.groups):
            raise UserError(
                f"config.batch.rows={self.batch_rows} must be a multiple of {self.processes * self.groups}: "
                f"{self.processes} processes, each with {self.groups} micro-batches and devices that share its rows"
            )

    def __call__(self, step: int) -> tuple[int, Batch]:
        from biphasic_jax.objectives import collate

        row_batch, examples = self.examples(step)
        room = self.objective.predictions(row_batch.tokens_BxL.size // self.groups)
        return step, collate(examples, row_batch, room, self.groups)

    def examples(self, step: int) -> tuple[RowBatch, "Examples"]:
        mine = self.batch_rows // self.processes
        first = step * self.batch_rows + self.process * mine
        index_B = np.arange(first, first + mine, dtype=np.int64)
        row_B, _ = self.order.locate(index_B)
        chunk = max(1, CHUNK // self.rows.manifest.row_length)
        parts = []
        for begin in range(0, mine, chunk):
            some = slice(begin, begin + chunk)
            row_batch = RowBatch(*self.rows.read(row_B[some]), index_B[some], row_B[some])
            parts.append((row_batch, self.objective.transform(row_batch, step)))
        return _joined(parts)


def _joined(parts: list[tuple[RowBatch, "Examples"]]) -> tuple[RowBatch, "Examples"]:
    """Parts of a batch, one after the other."""
    if len(parts) == 1:
        return parts[0]
    batches, examples = zip(*parts, strict=True)
    return _fields_joined(batches), _fields_joined(examples)


def _fields_joined(parts: Any) -> Any:
    """Dataclasses of arrays, or of dicts of arrays, with each field concatenated over rows."""
    fields = [[getattr(part, field.name) for part in parts] for field in dataclasses.fields(parts[0])]
    return type(parts[0])(
        *(
            {name: np.concatenate([value[name] for value in values]) for name in values[0]}
            if isinstance(values[0], dict)
            else np.concatenate(values)
            for values in fields
        )
    )


def examples(
    rows: Rows, objective: "Objective", config: ConfigDict, step: int, process: int = 0, processes: int = 1
) -> tuple[RowBatch, "Examples"]:
    """This process's slice of batch `step` before `collate`: targets and weights by position."""
    slice_ = _Slice(rows, objective, Order(rows.sources, config.seed), config.batch.rows, process, processes, 1)
    slice_.check()
    return slice_.examples(step)


def row_hash(rows: Rows, config: ConfigDict, step: int) -> str:
    """8 hex digits over the global example indices and row numbers of batch `step`, whatever the processes."""
    index_B = np.arange(step * config.batch.rows, (step + 1) * config.batch.rows, dtype=np.int64)
    row_B, _ = Order(rows.sources, config.seed).locate(index_B)
    return hashlib.blake2b(np.stack([index_B, row_B]).astype("<i8").tobytes(), digest_size=4).hexdigest()


def evaluation_batches(
    rows: Rows,
    objective: "Objective",
    *,
    rows_limit: int,
    batch_rows: int,
    groups: int,
    process: int = 0,
    processes: int = 1,
) -> Iterator[Batch]:
    """This process's slices of fixed batches of held-out rows, at most `rows_limit` of them (0: all).

    Give it an objective with the evaluation's seed: a row's number stands for its global example index, so that
    its mask never changes. The last batch is filled up with rows of padding, of weight 0; a process has as many
    batches as any other. `batch_rows` must be a multiple of `processes * groups`.
    """
    from biphasic_jax.objectives import collate

    if batch_rows % (processes * groups):
        raise ValueError(f"batch_rows={batch_rows} is not a multiple of {processes} processes x {groups} groups")
    row_N = evaluation_order(rows)
    row_N = row_N[:rows_limit] if rows_limit else row_N
    mine = batch_rows // processes
    for start in range(process * mine, len(row_N) + process * mine, batch_rows):
        row_B = row_N[start : start + mine]
        row_batch = _padded(*rows.read(row_B), row_B, mine, objective.vocabulary.pad)
        transformed = objective.transform(row_batch, objective.steps[0])
        room = objective.predictions(row_batch.tokens_BxL.size // groups)
        yield collate(transformed, row_batch, room, groups)


def evaluation_order(rows: Rows) -> np.ndarray:
    """All row numbers, those of each source in their order, so interleaved that any prefix holds its share of each."""
    row_N = np.arange(len(rows))
    first_S, rows_S = np.array([(source.first, source.rows) for source in rows.sources if source.rows]).T
    source_N = np.searchsorted(first_S, row_N, side="right") - 1
    return np.argsort((row_N - first_S[source_N] + 0.5) / rows_S[source_N], kind="stable")


def _padded(tokens_BxL: np.ndarray, segments_BxL: np.ndarray, row_B: np.ndarray, count: int, pad: int) -> RowBatch:
    """The rows, and rows of padding (index and row number 0) up to `count`."""
    below: Any = ((0, count - len(row_B)), (0, 0))
    filled_B = np.pad(row_B, below[0])
    tokens_BxL = np.pad(tokens_BxL, below, constant_values=pad)
    return RowBatch(tokens_BxL, np.pad(segments_BxL, below), filled_B, filled_B)
