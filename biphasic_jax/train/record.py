"""A finished or running run as its folder tells it: what the report is made of."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from biphasic_jax.data.shards import Rows
from biphasic_jax.errors import UserError

DATA_FACTS = "data.json"
Line = dict[str, Any]


def data_facts(rows: Rows) -> dict[str, Any]:
    """What `data.json` of a run says of its held-out rows; `rows` is the validation split.

    fingerprint: of the prepared rows. validation_tokens: those that the entropy is of.
    unigram_entropy: -sum p log p of the tokens of all rows, nats a token, padding and special tokens left out. It
    is the lowest loss on these very rows without a look at any context: what is below it has learnt more than
    how frequent tokens are.
    """
    count_V = _token_counts(rows)
    return {
        "fingerprint": rows.manifest.fingerprint,
        "validation_rows": len(rows),
        "validation_tokens": int(count_V.sum()),
        "unigram_entropy": _entropy(count_V),
    }


def _token_counts(rows: Rows, batch_rows: int = 256) -> np.ndarray:
    """(V,) int64: how often each ordinary token occurs."""
    facts = rows.manifest.vocabulary
    count_V = np.zeros(facts["size"], np.int64)
    for first in range(0, len(rows), batch_rows):
        tokens_BxL, segments_BxL = rows.read(np.arange(first, min(first + batch_rows, len(rows))))
        count_V += np.bincount(tokens_BxL[segments_BxL > 0], minlength=len(count_V))
    count_V[[facts[role] for role in ("bos", "eos", "pad", "mask") if facts[role] is not None]] = 0
    return count_V


def _entropy(count_V: np.ndarray) -> float:
    share_V = count_V[count_V > 0] / max(int(count_V.sum()), 1)
    return float(-(share_V * np.log(share_V)).sum())


@dataclass(frozen=True)
class PhaseOf:
    """A phase of the plan: the updates `start` to `end` (excluded)."""

    objective: str
    mask_rate: Any  # a number, a schedule, or None
    start: int
    end: int

    @property
    def label(self) -> str:
        if isinstance(self.mask_rate, int | float):
            return f"{self.objective.upper()} {self.mask_rate:.0%}"
        return self.objective.upper()


@dataclass(frozen=True)
class Record:
    """The files of a run's folder, read. Lines are in the order of their steps."""

    folder: str
    config: dict[str, Any]
    phases: tuple[PhaseOf, ...]
    train: list[Line]
    validation: list[Line]
    data: dict[str, Any]
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        return os.path.basename(os.path.abspath(self.folder))

    @property
    def end(self) -> int:
        """The plan's last step."""
        return self.phases[-1].end

    @property
    def step(self) -> int:
        """The last step of which a line tells."""
        return max((line["step"] for line in (*self.train[-1:], *self.validation[-1:])), default=self.phases[0].start)

    @property
    def entropy(self) -> float | None:
        """Unigram entropy of the held-out tokens, nats a token."""
        return self.data.get("unigram_entropy")

    @property
    def mask_rates(self) -> list[float]:
        """The rates at which MLM was measured, ascending."""
        return sorted({line["mask_rate"] for line in self.validation if line["objective"] == "mlm"})

    @property
    def main_rate(self) -> float | None:
        """The measured rate that is nearest to the one the run trains at."""
        trained = [p.mask_rate for p in self.phases if isinstance(p.mask_rate, int | float)]
        if not self.mask_rates:
            return None
        return min(self.mask_rates, key=lambda rate: abs(rate - trained[-1]) if trained else rate)

    def measured(self, objective: str, mask_rate: float | None = None) -> list[Line]:
        """The held-out lines of one measure."""
        return [v for v in self.validation if v["objective"] == objective and v["mask_rate"] == mask_rate]

    def at(self, step: int, objective: str, mask_rate: float | None = None) -> Line | None:
        """The last held-out line of a measure at or before `step`."""
        return next((v for v in reversed(self.measured(objective, mask_rate)) if v["step"] <= step), None)

    def trained_until(self, objective: str) -> int | None:
        """The last step reached of the last phase of an objective; None where it has not begun."""
        ends = [min(p.end, self.step) for p in self.phases if p.objective == objective and p.start < self.step]
        return ends[-1] if ends else None


def read_record(folder: str) -> Record:
    """Reads a run's folder; `UserError` where it is none, or nothing was trained in it yet."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: there is no such folder; give the --workdir of a run")
    plan = _read_json(folder, "plan.json")
    phases = tuple(
        PhaseOf(p["objective"], p.get("settings", {}).get("mask_rate"), p["start"], p["end"]) for p in plan["phases"]
    )
    lines = _read_lines(os.path.join(folder, "metrics.jsonl"))
    if not lines:
        raise UserError(f"{folder}: metrics.jsonl holds nothing yet; run `train --workdir={folder}` first")
    train, validation = ([line for line in lines if line["split"] == split] for split in ("train", "validation"))
    return Record(
        folder=folder,
        config=_read_json(folder, "config.json"),
        phases=phases,
        train=train,
        validation=validation,
        data=_read_json(folder, DATA_FACTS, needed=False),
        environment=_read_json(folder, "environment.json", needed=False),
    )


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """The mean of the last `window` values at each place, of fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)


def _read_json(folder: str, name: str, needed: bool = True) -> dict[str, Any]:
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        if needed:
            raise UserError(f"{folder}: there is no {name} in it; give the --workdir of a run") from None
        return {}
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None


def _read_lines(path: str) -> list[Line]:
    """The objects of a JSON lines file; a last line that is still being written is left out."""
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{path}: a line is not JSON ({error})") from None
