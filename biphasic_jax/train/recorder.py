"""Where a run's numbers go: metrics.jsonl, TensorBoard, the terminal; and the guard over them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from biphasic_jax.data.batches import row_hash
from biphasic_jax.errors import UserError
from biphasic_jax.train.metrics import Clock, Line, MetricsFile, TensorBoard, train_line
from biphasic_jax.train.progress import Progress

if TYPE_CHECKING:
    from biphasic_jax.train.program import Program
    from biphasic_jax.train.setup import Run


class Recorder:
    """Writes lines, and counts what a run adds up over its whole life: tokens, empty and skipped updates.

    `meta`: of the run's own checkpoint that it goes on from, or empty. Every number of a line but the
    rates (tokens_per_second, mfu, data_wait) is the same however often the run was stopped.
    """

    def __init__(self, run: "Run", meta: Mapping[str, Any], quiet: bool):
        self.run = run
        self.totals = {"tokens_total": 0, "empty": 0, "skipped": 0} | dict(meta.get("totals", {}))
        self.file = MetricsFile(run.folder.file("metrics.jsonl"), meta.get("metrics_bytes", 0))
        self.sinks: list[Any] = [self.file]
        if run.config.log.tensorboard:
            self.sinks.append(TensorBoard(run.folder.file("tensorboard"), run.start.step))
        self.progress = Progress(run.plan, run.start.step, show=run.config.log.progress and not quiet)
        self.clock = Clock()

    def train(self, program: "Program", step: int, metrics: Any, waited: float) -> None:
        """Fetches the metrics of the update that led to `step`, which waits for it, and writes its line."""
        values = jax.device_get(metrics)
        seconds = self.clock.lap()
        line = self._line(program, step, train_line(values, seconds, waited, program.flops / seconds / self.run.peak))
        finite = bool(values["finite"])
        self.totals["tokens_total"] += line["tokens"]
        self.totals["empty"] += line["targets"] == 0
        self.totals["skipped"] += not finite
        line |= self.totals
        phase_end = step == program.phase.end
        if step % self.run.config.log.every == 0 or phase_end or not finite:
            self._write(line)
        self.progress.train(line)
        if not finite and self.run.config.guards.non_finite == "stop":
            raise UserError(
                f"step {step}: the loss or its gradient is not finite; the newest checkpoint is of before. Lower "
                f"optimizer.learning_rate, or set guards.non_finite='skip', with --override-schedule to go on"
            )

    def validation(self, lines: list[Line]) -> None:
        for line in lines:
            self._write(line)
        self.progress.validation(lines)

    def meta(self) -> dict[str, Any]:
        """What the next start needs so that no line is lost or stands twice."""
        return {"totals": self.totals, "metrics_bytes": self.file.position()}

    def close(self) -> None:
        self.progress.close()
        for sink in self.sinks:
            sink.close()

    def _write(self, line: Line) -> None:
        for sink in self.sinks:
            sink.write(line)

    def _line(self, program: "Program", step: int, numbers: Line) -> Line:
        where = {"step": step, "phase": program.phase.index, "objective": program.phase.objective, "split": "train"}
        rows = row_hash(self.run.rows, self.run.config, step - 1)
        return {**where, **numbers, "mask_rate": program.objective.rate(step - 1), "rows": rows}
