"""The data pipeline alone: how many tokens a second become batches, and documents become rows."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from biphasic_jax.bench.harness import Variant, interleave, spread
from biphasic_jax.config import default_config, phase, resolve
from biphasic_jax.data.batches import train_batches
from biphasic_jax.data.build import Settings, build_rows
from biphasic_jax.data.prepare import available_cores
from biphasic_jax.data.shards import Rows
from biphasic_jax.data.tokenizer import vocabulary_of
from biphasic_jax.objectives import registry

# name -> (what it is, the phase); MLM at 30 %, each token by itself if nothing is said
MASKINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "clm": ("CLM", {"objective": "clm"}),
    "mask": ("MLM 100/0/0", {"objective": "mlm"}),
    "bert": ("MLM 80/10/10", {"objective": "mlm", "mask_share": 0.8, "random_share": 0.1,
                                             "keep_share": 0.1}),
    "exact": ("MLM exact count", {"objective": "mlm", "counting": "exact"}),
}  # fmt: skip
VOCAB_SIZE = 8192


class Batches:
    """Draws `steps` batches a step from `train_batches`, as the loop does; they are thrown away."""

    def __init__(self, folder: str, masking: str, batch_rows: int, workers: int, steps: int):
        rows = Rows(folder, "train")
        config = default_config()
        config.data.rows = folder
        config.data.row_length = rows.manifest.row_length
        config.data.segments = rows.manifest.segments
        config.batch.rows = batch_rows
        settings = dict(MASKINGS[masking][1])
        if settings["objective"] == "mlm":
            settings["mask_rate"] = 0.3
        config.phases = (phase(settings.pop("objective"), steps=1_000_000_000, **settings),)
        config = resolve(config, registry())
        p = config.phases[0]
        cls = registry()[p.objective]
        objective = cls({key: p[key] for key in cls.defaults}, vocabulary_of(folder), 0, (0, p.steps))
        self.batches = train_batches(rows, objective, config, start=0, stop=p.steps, groups=1, workers=workers)
        self.steps, self.tokens = steps, steps * batch_rows * rows.manifest.row_length
        self.facts = {"rows": len(rows), "row_length": rows.manifest.row_length}

    def step(self) -> dict[str, float]:
        for _ in range(self.steps):
            next(self.batches)
        return {"tokens": self.tokens}


def build_batches(settings: Mapping[str, Any]) -> Batches:
    return Batches(**settings)


class Preparing:
    """Tokenises and packs a source anew at every step, with a tokenizer that is there already."""

    def __init__(self, source: str, tokenizer: str, row_length: int, workers: int):
        self.settings = Settings((source,), tokenizer, 0, row_length, "documents", 0.01, 0, "auto")
        self.workers = workers
        self.facts = {"workers": workers, "row_length": row_length}

    def step(self) -> dict[str, float]:
        folder = tempfile.mkdtemp()
        try:
            manifest, _ = build_rows(self.settings, os.path.join(folder, "rows"), self.workers)
        finally:
            shutil.rmtree(folder)
        return {"tokens": manifest.accounting.tokens_in, "bytes": manifest.accounting.bytes}


def build_preparing(settings: Mapping[str, Any]) -> Preparing:
    return Preparing(**settings)


def measure(
    source: str,
    row_length: int,
    batch_rows: int,
    workers: int,
    rounds: int,
    steps: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Prepares `source` in a temporary folder, then times both; the record of it, JSON."""
    cores = available_cores()
    with tempfile.TemporaryDirectory() as folder:
        rows = os.path.join(folder, "rows")
        tell("training a tokenizer and preparing rows")
        manifest, _ = build_rows(
            Settings((source,), "", VOCAB_SIZE, row_length, "documents", 0.01, 0, "auto"), rows, cores
        )
        module = "biphasic_jax.bench.pipeline"
        variants = []
        for name, (label, _) in MASKINGS.items():
            for count in sorted({0, workers}):
                settings = {"folder": rows, "masking": name, "batch_rows": batch_rows, "workers": count, "steps": steps}
                what = f"batches, {label}" + (f", {count} workers" if count else "")
                variants.append(Variant(f"{name}-{count}", f"{module}:build_batches", settings, {}, what))
        settings = {
            "source": source,
            "tokenizer": os.path.join(rows, "tokenizer.json"),
            "row_length": row_length,
            "workers": cores,
        }
        what = f"prepare, {cores} processes"
        variants.append(Variant("prepare", f"{module}:build_preparing", settings, {}, what))
        timings = interleave(variants, rounds, tell=tell)
    lines = []
    for name, t in timings.items():
        line: dict[str, Any] = {"name": name, "label": t.variant.label, "failure": t.failure}
        if not t.failure:
            line["tokens_per_second"] = spread([step["tokens"] / step["seconds"] for step in t.steps])
            line["memory_bytes"] = t.memory_bytes
            if name.endswith("-0"):  # no other process works for it
                line["tokens_per_core_second"] = spread([step["tokens"] / step["core_seconds"] for step in t.steps])
            if "bytes" in t.steps[0]:
                line["bytes_per_second"] = spread([step["bytes"] / step["seconds"] for step in t.steps])
        lines.append(line)
    return {
        "source": source,
        "documents": manifest.accounting.documents,
        "tokens": manifest.accounting.tokens_in,
        "row_length": row_length,
        "batch_rows": batch_rows,
        "rounds": rounds,
        "lines": lines,
    }
