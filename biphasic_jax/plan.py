"""A run's phases, the schedule over them, and content keys: which steps of which plan are the same work.

"Step k" is the state after k updates. Update k takes the state of step k to that of step k + 1, reads
batch k, and uses the learning rate `learning_rate(plan, k)`. A plan that continues a checkpoint in full
begins at the checkpoint's step, so `Plan.start` need not be 0.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from biphasic_jax.config import PHASE_KEYS, to_dict


@dataclass(frozen=True)
class Phase:
    """An objective for the updates `start` (included) to `end` (excluded)."""

    index: int
    objective: str
    settings: dict[str, Any]  # the objective's own
    start: int
    end: int
    optimizer: str  # "carry" or "reset" when the phase begins


@dataclass(frozen=True)
class Span:
    """One warm-up, constant, decay of the learning rate over the updates `start` to `end`."""

    start: int
    end: int
    peak: float
    warmup: int  # updates
    decay: int  # updates
    shape: str  # of the decay: linear, cosine, sqrt


@dataclass(frozen=True)
class Plan:
    phases: tuple[Phase, ...]
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        """The step at which the plan begins: 0, or that of the checkpoint it continues."""
        return self.phases[0].start

    @property
    def end(self) -> int:
        """The last step: the state after every update."""
        return self.phases[-1].end

    def phase_of_update(self, step: int) -> Phase:
        """The phase whose update takes step `step` to `step + 1`."""
        for phase in self.phases:
            if phase.start <= step < phase.end:
                return phase
        raise ValueError(f"update {step} is outside the plan's {self.start} to {self.end}")


def make_plan(config: ConfigDict, start: int = 0) -> Plan:
    """The plan of a resolved config, beginning at step `start`."""
    phases, spans, step = [], [], start
    schedule = config.schedule
    for i, p in enumerate(config.phases):
        settings = {key: to_dict(value) for key, value in p.items() if key not in PHASE_KEYS}
        phases.append(Phase(i, p.objective, settings, step, step + p.steps, p.optimizer))
        if schedule.span == "phase":
            spans.append(Span(step, step + p.steps, p.learning_rate, p.warmup, p.decay, schedule.shape))
        step += p.steps
    if schedule.span == "plan":
        peak = config.optimizer.learning_rate
        spans.append(Span(start, step, peak, schedule.warmup, schedule.decay, schedule.shape))
    return Plan(tuple(phases), tuple(spans))


def learning_rate(plan: Plan, step: Any, xp: Any = np) -> Any:
    """The learning rate of update `step`, float32; `xp` is numpy, or jax.numpy for a traced step.

    Warm-up: peak * (t + 1) / warmup. Decay over the last `decay` updates, with
    f = (t - decay_start + 1) / decay: linear 1 - f, cosine (1 + cos(pi f)) / 2, sqrt 1 - sqrt(f);
    each ends at exactly 0 (arXiv 2507.00994, section 2; 1-sqrt: arXiv 2405.18392, section 3).
    """
    t = xp.asarray(step, dtype="int32")
    rate = xp.zeros((), "float32")
    for span in plan.spans:
        value = xp.asarray(span.peak, "float32")
        if span.warmup:
            done = (t - span.start + 1).astype("float32") / span.warmup
            value = value * xp.minimum(done, 1.0)
        if span.decay:
            f = (t - (span.end - span.decay) + 1).astype("float32") / span.decay
            f = xp.clip(f, 0.0, 1.0)
            if span.shape == "linear":
                value = value * (1 - f)
            elif span.shape == "cosine":
                value = value * (0.5 * (1 + xp.cos(np.float32(np.pi) * f)))
            else:
                value = value * (1 - xp.sqrt(f))
        inside = (t >= span.start) & (t < span.end)
        rate = xp.where(inside, value, rate)
    return rate.astype("float32")


def stretches(plan: Plan, until: int) -> list[dict[str, Any]]:
    """The work of the updates `plan.start` to `until`, as the fewest pieces with one description each.

    A piece names its objective with settings and the formula of its learning rate, and nothing that
    lies behind `until`: a constant piece of a long plan equals that of a short one.
    """
    pieces: list[dict[str, Any]] = []
    for phase in plan.phases:
        for span in plan.spans:
            warm_end, decay_start = span.start + span.warmup, span.end - span.decay
            peak, anchor = span.peak, span.start
            for begin, end, rate in (
                (span.start, warm_end, {"kind": "warmup", "peak": peak, "from": anchor, "steps": span.warmup}),
                (warm_end, decay_start, {"kind": "constant", "peak": peak}),
                (decay_start, span.end, {"kind": span.shape, "peak": peak, "from": decay_start, "steps": span.decay}),
            ):
                lo, hi = max(begin, phase.start), min(end, phase.end, until)
                if lo >= hi:
                    continue
                work: dict[str, Any] = {"objective": phase.objective, "settings": phase.settings, "rate": rate}
                if any(isinstance(value, dict) for value in phase.settings.values()):
                    work["phase"] = [phase.start, phase.end]  # a schedule over the phase depends on its length
                if phase.optimizer == "reset":
                    work["reset"] = phase.start
                if pieces and {k: v for k, v in pieces[-1].items() if k not in ("start", "end")} == work:
                    pieces[-1]["end"] = hi
                else:
                    pieces.append({"start": lo, "end": hi, **work})
    return pieces


def content_key(config: ConfigDict, plan: Plan, step: int, data_fingerprint: str, parent: str = "") -> str:
    """The hash (64 hex digits) of everything that decides the weights at `step`.

    `parent` is the content key of the checkpoint that the plan starts from, or "". Two plans with one
    key at a step share all work up to it.
    """
    c = to_dict(config)
    optimizer = {k: v for k, v in c["optimizer"].items() if k != "learning_rate"}
    model = {k: v for k, v in c["model"].items() if k not in ("vocab_size", "attention")}
    facts = {
        "seed": c["seed"],
        "data": data_fingerprint,
        "model": model,
        "batch": c["batch"],
        "optimizer": optimizer,
        "loss": c["loss"],
        "guards": c["guards"]["non_finite"],
        "parent": [parent, c["init"]["mode"]] if parent else [],
        "work": stretches(plan, step),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
