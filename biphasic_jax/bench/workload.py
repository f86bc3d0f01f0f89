"""The work that all variants of a comparison do: one set of shapes, one set of batches."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from biphasic_jax.config import default_config, phase, resolve
from biphasic_jax.data.randomness import generator
from biphasic_jax.data.rows import RowBatch
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.objectives import Examples, Objective, registry

BATCHES = 4  # different ones, taken in turn


@dataclass(frozen=True)
class Workload:
    """Sizes in tokens, rows, and the units of config.model."""

    objective: str = "mlm"
    mask_rate: float = 0.3
    rows: int = 8
    row_length: int = 512
    vocab_size: int = 32_768
    layers: int = 6
    width: int = 384
    ff_width: int = 1024
    heads: int = 6
    kv_heads: int = 6
    head_size: int = 64
    dtype: str = "float32"
    loss_chunk: int = 1024
    scan_layers: bool = False

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.rows * self.row_length

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def config(self) -> ConfigDict:
        """The config under which `train` would do this work."""
        c = default_config()
        c.data.sources = ("none",)  # a resolved config names some; the rows here are drawn by `batches`
        c.data.row_length = self.row_length
        for key in c.model:
            if hasattr(self, key):
                c.model[key] = getattr(self, key)
        c.batch.rows = self.rows
        settings = {"mask_rate": self.mask_rate} if self.objective == "mlm" else {}
        c.phases = (phase(self.objective, steps=1_000_000, **settings),)
        return resolve(c, registry())


def workload(settings: Mapping[str, Any]) -> Workload:
    """The workload among a variant's settings; other keys are the variant's own."""
    return Workload(**{key: settings[key] for key in settings if key in Workload.__dataclass_fields__})


def vocabulary(size: int) -> Vocabulary:
    """A vocabulary of `size` ids of which the first four are special."""
    special_V = np.arange(size) < 4
    return Vocabulary(
        size=size,
        bos=0,
        eos=1,
        pad=3,
        mask=2,
        special_V=special_V,
        word_start_V=np.ones(size, bool),
        bytes_V=np.where(special_V, 0, 4).astype(np.int32),
    )


def make_objective(work: Workload, cls: type[Objective] | None = None) -> Objective:
    """The workload's objective, or `cls` with its settings."""
    cls = cls or registry()[work.objective]
    settings = {"mask_rate": work.mask_rate} if work.objective == "mlm" else {}
    return cls({**cls.defaults, **settings}, vocabulary(work.vocab_size), 0, (0, 1_000_000))


def batches(work: Workload) -> list[tuple[RowBatch, Examples]]:
    """Full rows of ids with natural-looking frequencies (1 / rank), and what the objective makes of them."""
    objective = make_objective(work)
    ordinary = objective.vocabulary.ordinary
    frequency = 1.0 / np.arange(1, len(ordinary) + 1)
    found = []
    for i in range(BATCHES):
        draws = generator(0, "bench rows", i).choice(
            len(ordinary), size=(work.rows, work.row_length), p=frequency / frequency.sum()
        )
        index_B = np.arange(i * work.rows, (i + 1) * work.rows, dtype=np.int64)
        rows = RowBatch(ordinary[draws].astype(np.int32), np.ones(draws.shape, np.int32), index_B, index_B)
        found.append((rows, objective.transform(rows, i)))
    return found
