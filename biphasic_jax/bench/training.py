"""The comparison of training steps: which variants there are, and what their timings say."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from biphasic_jax.bench.harness import Timings, Variant, interleave, speed_ratio, spread
from biphasic_jax.bench.reference import missing
from biphasic_jax.bench.workload import Workload
from biphasic_jax.model.flops import training_flops
from biphasic_jax.model.transformer import ModelConfig

# Safe on every model tried, and the fastest there: a library of fused matrix products for XLA's CPU backend.
CPU_FLAGS = "--xla_cpu_experimental_ynn_fusion_type=dot"

OURS, FLAGGED = "ours", "ours-flags"
# name -> (what it is, the objectives in which it makes sense)
LABELS = {
    OURS: ("as trained: only masked positions reach the head (MLM), whose loss runs in chunks", ("clm", "mlm")),
    FLAGGED: ("the same under the recommended XLA flags", ("clm", "mlm")),
    "no-gather": ("ours, but every position reaches the head, in chunks", ("mlm",)),
    "full-logits": ("ours, but every position reaches the head, and all logits exist at once", ("clm", "mlm")),
    "torch": ("PyTorch, the model of transformers as it ships, fused AdamW", ("clm", "mlm")),
    "torch-gather": ("the same, but only masked positions reach the head", ("mlm",)),
}
PRODUCTS = "product-"


def variants(work: Workload, names: Sequence[str], xla_flags: str, threads: int, size: int) -> list[Variant]:
    """The variants `names` that make sense for `work`, and the matrix products beside them."""
    shapes = work.as_dict()
    head = {OURS: "gathered", FLAGGED: "gathered", "no-gather": "all", "full-logits": "full"}
    found = []
    for name in names:
        label, objectives = LABELS[name]
        if work.objective not in objectives:
            continue
        if name in head:
            flags = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
            environment = {"XLA_FLAGS": flags} if name == FLAGGED else {}
            settings = {**shapes, "head": head[name]}
            found.append(Variant(name, "biphasic_jax.bench.ours:build", settings, environment, label))
        else:
            settings = {**shapes, "gathered": name == "torch-gather", "threads": threads}
            found.append(Variant(name, "biphasic_jax.bench.reference:build", settings, {}, label))
    libraries = ("jax", "numpy") if work.dtype == "float32" else ("jax",)
    for library in libraries:
        settings = {"library": library, "size": size, "dtype": work.dtype}
        label = f"{library}, product of {size} x {size} matrices, {work.dtype}"
        found.append(Variant(PRODUCTS + library, "biphasic_jax.bench.product:build", settings, {}, label))
    return found


def predicted_speedup(flops: float, saved_flops: float) -> float:
    """How many times as fast a step is that does `saved_flops` less than `flops`, if all FLOPs cost the same."""
    return flops / (flops - saved_flops)


def flops_of(work: Workload, predictions: int) -> int:
    """FLOPs of a step of `work` that sends `predictions` positions to the head (model/flops.py)."""
    model = ModelConfig.from_config(work.config().model, work.vocab_size)
    return training_flops(model, work.rows, work.row_length, predictions)


def measure(work: Workload, variants: Sequence[Variant], rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs the variants interleaved; the record of it, JSON."""
    absent = missing()
    runnable = [v for v in variants if not (absent and v.name.startswith("torch"))]
    timings = interleave(runnable, rounds, tell=tell)
    for variant in variants:
        if variant.name not in timings:
            timings[variant.name] = Timings(variant, failure=absent)
    return summarise(work, {variant.name: timings[variant.name] for variant in variants}, rounds)


def summarise(work: Workload, timings: Mapping[str, Timings], rounds: int) -> dict[str, Any]:
    """What the timings of one interleaved run say; a variant without timings keeps its failure alone."""
    products = {name: t for name, t in timings.items() if name.startswith(PRODUCTS)}
    rates = {
        name: [step["flops"] / step["seconds"] for step in t.steps] for name, t in products.items() if not t.failure
    }
    best_rate = [max(rates_of_round) for rates_of_round in zip(*rates.values(), strict=True)]
    lines = [_line(work, name, t, timings, best_rate) for name, t in timings.items() if not name.startswith(PRODUCTS)]
    return {
        "workload": {**work.as_dict(), "tokens": work.tokens},
        "rounds": rounds,
        "products": [
            {"name": name, "label": t.variant.label, "failure": t.failure}
            | ({"flops_per_second": spread(rates[name])} if name in rates else {})
            for name, t in products.items()
        ],
        "variants": lines,
    }


def _line(
    work: Workload, name: str, t: Timings, timings: Mapping[str, Timings], best_rate: Sequence[float]
) -> dict[str, Any]:
    line: dict[str, Any] = {"name": name, "label": t.variant.label, "failure": t.failure, "facts": t.facts}
    if t.failure:
        return line
    expected = round(work.mask_rate * work.tokens) if name == "torch-gather" else work.tokens
    flops = t.facts.get("flops") or flops_of(work, expected)
    shares = [flops / seconds / rate for seconds, rate in zip(t.seconds, best_rate, strict=False)]
    line |= {
        "step_seconds": spread(t.seconds),
        "tokens_per_second": work.tokens / statistics.median(t.seconds),
        "flops": flops,
        "mfu": spread(shares) if shares else None,
        "memory_bytes": t.memory_bytes,
        "start_seconds": t.start_seconds,
        "losses": [step["loss"] for step in t.steps],
        "seconds": t.seconds,
        "core_seconds": t.core_seconds,
    }
    for base in (OURS, FLAGGED):  # how many times as fast as this variant is ours?
        if base in timings and not timings[base].failure and base != name:
            line[f"{base}_faster"] = speed_ratio(timings[base].seconds, t.seconds)
            line[f"{base}_cheaper"] = speed_ratio(timings[base].core_seconds, t.core_seconds)
    ours = timings.get(OURS)
    if ours and not ours.failure and name in ("no-gather", "full-logits") and flops > ours.facts["flops"]:
        line["predicted"] = predicted_speedup(flops, flops - ours.facts["flops"])
    return line
