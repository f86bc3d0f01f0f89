"""Held-out figures of a model: CLM and MLM on the same fixed rows, with masks that never change.

Both objectives are measured whatever phase is running, so that their curves cross a phase switch. Sums
are taken over all targets and divided once: no figure depends on the batch size.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from biphasic_jax.data.batches import evaluation_batches
from biphasic_jax.data.shards import Rows
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.objectives import Objective, registry

Batch = dict[str, Any]
Line = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Measure:
    """One thing to measure: an objective with its evaluation settings."""

    name: str  # clm, mlm
    mask_rate: float | None
    objective: Objective

    def __str__(self) -> str:
        return self.name if self.mask_rate is None else f"{self.name} at mask rate {self.mask_rate:g}"


def measures(config: ConfigDict, vocabulary: Vocabulary) -> list[Measure]:
    """CLM, then MLM at every rate of `evaluation.mask_rates`.

    The corruption is the objective's default one at each rate, not the running phase's, so that any two
    runs are measured alike. Only what changes which position answers for a token (`shifted`) is taken
    over from the config's MLM phases.
    """
    seed, objectives = config.evaluation.seed, registry()
    found = [Measure("clm", None, objectives["clm"]({}, vocabulary, seed, (0, 1)))]
    for rate in config.evaluation.mask_rates:
        settings = {"mask_rate": float(rate), "shifted": predicts_shifted(config)}
        found.append(Measure("mlm", float(rate), objectives["mlm"](settings, vocabulary, seed, (0, 1))))
    return found


def predicts_shifted(config: ConfigDict) -> bool:
    """Whether the model answers for token i at position i - 1 in MLM, as its last MLM phase learnt."""
    phase = last_mlm_phase(config)
    return bool(phase and phase.shifted)


def last_mlm_phase(config: ConfigDict) -> ConfigDict | None:
    """The last phase of a resolved config that learns MLM; None where none does."""
    return next((p for p in reversed(config.phases) if p.objective == "mlm"), None)


class Evaluator:
    """Measures one model on fixed held-out rows, as often as asked; compiles once.

    `rows` are usually `Rows(folder, "validation")`. `groups` divides this process's rows of a batch into runs
    with room for predictions of their own, `share` is the (part, parts) of a batch that it feeds, and `place`
    puts them on the devices; all are for a mesh.
    Raises `UserError` where there is nothing to predict: a loss over no target would look perfect.
    """

    def __init__(
        self,
        model: Any,
        config: ConfigDict,
        vocabulary: Vocabulary,
        rows: Rows,
        *,
        groups: int = 1,
        share: tuple[int, int] = (0, 1),
        place: Callable[[Batch], Batch] | None = None,
    ):
        self.vocabulary = vocabulary
        self.rows = rows
        self.limit = config.evaluation.rows
        self.groups = groups
        self.place = place or (lambda batch: batch)
        wanted = config.evaluation.batch_rows or config.batch.rows // config.batch.accumulation
        most = min(wanted, self.row_count)  # a batch larger than the rows would only be padding
        self.share = share
        least = groups * share[1]
        self.batch_rows = max(1, math.ceil(most / least)) * least
        self.measures = measures(config, vocabulary)
        for measure in self.measures:
            if not any(np.any(batch["weights"]) for batch in self._batches(measure)):
                raise _no_target(measure, self.row_count)
        self._sums = {
            measure: jax.jit(lambda params, batch, o=measure.objective: o.loss(model, params, batch))
            for measure in self.measures
        }

    @property
    def row_count(self) -> int:
        """The held-out rows that are measured."""
        return min(self.limit, len(self.rows)) if self.limit else len(self.rows)

    def run(
        self, params: Any, *, step: int, phase: int, should_stop: Callable[[], bool] = lambda: False
    ) -> list[Line] | None:
        """One metrics line a measure; None where `should_stop()` became true between two batches.

        Every line: step, phase (index of the running one), objective (the measured one), split, loss (nats
        a target), targets (their count), accuracy, perplexity, mask_rate (None for CLM); for CLM also
        bits_per_byte, the loss in bits over the UTF-8 bytes of the targets.
        """
        lines = []
        for measure in self.measures:
            totals = self._total(params, measure, should_stop)
            if totals is None:
                return None
            where = {"step": step, "phase": phase, "objective": measure.name, "split": "validation"}
            lines.append({**where, **_figures(measure, totals, self.row_count)})
        return lines

    def _batches(self, measure: Measure) -> Iterator[Batch]:
        return evaluation_batches(
            self.rows, measure.objective, rows_limit=self.limit, batch_rows=self.batch_rows, groups=self.groups
        )

    def _total(self, params: Any, measure: Measure, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        """Sums over all rows, added on the host in float64: a float32 running sum would drift with its length."""
        totals = dict.fromkeys(("loss", "targets", "correct", "bytes"), 0.0)
        pending = None  # the device's answer is fetched one batch late, so that it never waits for the host
        for batch in self._batches(measure):
            if should_stop():
                return None
            if np.sum(batch.get("counts/overflow", 0)):
                raise UserError(
                    f"evaluation of {measure}: a batch has more targets than room; raise evaluation.batch_rows"
                )
            weighted = batch["weights"] > 0
            totals["bytes"] += float(self.vocabulary.bytes_V[batch["targets"][weighted]].sum())
            arrays = {name: array for name, array in batch.items() if not name.startswith("counts/")}
            answer = self._sums[measure](params, self.place(arrays))
            if pending is not None:
                _add(totals, pending)
            pending = answer
        if pending is not None:
            _add(totals, pending)
        return totals


def _add(totals: dict[str, float], answer: tuple[Any, Any, Mapping[str, Any]]) -> None:
    loss_sum, weight_sum, sums = jax.device_get(answer)
    totals["loss"] += float(loss_sum) - float(sums.get("z_loss", 0.0))  # a penalty, no part of the figure
    totals["targets"] += float(weight_sum)
    totals["correct"] += float(sums["correct"])


def _figures(measure: Measure, totals: Mapping[str, float], row_count: int) -> Line:
    targets = totals["targets"]
    if not targets:
        raise _no_target(measure, row_count)
    loss = totals["loss"] / targets
    figures: Line = {
        "loss": loss,
        "targets": round(targets),
        "accuracy": totals["correct"] / targets,
        "perplexity": math.exp(loss) if loss < 700 else None,  # None: beyond float64, or not a number
        "mask_rate": measure.mask_rate,
    }
    if measure.name == "clm":
        size = totals["bytes"]
        figures["bits_per_byte"] = totals["loss"] / math.log(2) / size if size else None
    return figures


def _no_target(measure: Measure, row_count: int) -> UserError:
    mend = "raise data.validation or give more text"
    if measure.mask_rate is not None:
        mend = f"raise evaluation.rows or the rate in evaluation.mask_rates, or {mend}"
    return UserError(f"evaluation of {measure}: {row_count} held-out rows hold no target; {mend}")
