"""What a run says of itself while it goes: metrics.jsonl, TensorBoard events, and the clock behind the rates."""

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from biphasic_jax.errors import UserError

Line = dict[str, Any]


class MetricsFile:
    """metrics.jsonl: one object a line, flushed as written. Opening it at `offset` drops what lies behind.

    A checkpoint stores `position()`; a resume opens the file there, so that no step stands twice.
    """

    def __init__(self, path: str, offset: int = 0):
        self.path = path
        with self._explained():
            size = os.path.getsize(path) if os.path.exists(path) else 0
            self._file = open(path, "ab")  # noqa: SIM115
            self._file.truncate(min(offset, size))
        if size < offset:
            warnings.warn(
                f"{path} holds {size} bytes, {offset} at the checkpoint: earlier lines are lost", stacklevel=2
            )

    def write(self, line: Line) -> None:
        plain = {key: _plain(value) for key, value in line.items()}
        with self._explained():
            self._file.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def position(self) -> int:
        """Bytes so far, all of them on disk."""
        with self._explained():
            os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); free some space there") from error


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class TensorBoard:
    """The curves among a line's numbers as TensorBoard scalars; events behind `step` of an earlier try are hidden."""

    CURVES = (
        *("loss", "accuracy", "perplexity", "bits_per_byte", "grad_norm", "learning_rate", "mask_rate"),
        *("realised_rate", "tokens_total", "tokens_per_second", "mfu", "data_wait"),
    )

    def __init__(self, folder: str, step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=step or None)

    def write(self, line: Line) -> None:
        name = line["split"] if line["split"] == "train" else f"{line['split']}/{line['objective']}"
        if line["split"] != "train" and line.get("mask_rate") is not None:
            name += f"_{line['mask_rate']:g}"
        for key in self.CURVES:
            value = line.get(key)
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(f"{name}/{key}", value, line["step"])

    def close(self) -> None:
        self._writer.close()


class Clock:
    """Seconds of each step and the share of them spent waiting for data; pauses count for no step."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A step begins now: call it after an evaluation, a save, a compilation."""
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap or restart."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return max(seconds, 1e-9)


def train_line(values: Mapping[str, Any], seconds: float, waited: float, mfu: float) -> Line:
    """What a train line says of one update, from the step's fetched metrics.

    loss: cross-entropy in nats a target, without the z-loss; 0 where there was no target. tokens: real ones.
    Counts of the objective keep their names; where it corrupts, realised_rate is selected over candidates,
    and masked_share, random_share, kept_share are of the selected.
    """
    targets = float(values["weight_sum"])
    counts = {name.removeprefix("counts/"): int(v) for name, v in values.items() if name.startswith("counts/")}
    line: Line = {
        "loss": (float(values["loss_sum"]) - float(values.get("sums/z_loss", 0))) / (targets or 1.0),
        "targets": round(targets),
        "grad_norm": float(values["grad_norm"]),
        "learning_rate": float(values["learning_rate"]),
        "tokens": int(values["tokens"]),
        "tokens_per_second": int(values["tokens"]) / seconds,
        "mfu": mfu,
        "data_wait": min(1.0, waited / seconds),
    }
    if "sums/correct" in values:
        line["accuracy"] = float(values["sums/correct"]) / targets if targets else None
    if "candidates" in counts:
        line["realised_rate"] = _share(counts["selected"], counts["candidates"])
        line |= {f"{name}_share": _share(counts[name], counts["selected"]) for name in ("masked", "random", "kept")}
    return counts | line


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
