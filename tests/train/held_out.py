"""Real rows and a tiny model for the tests of evaluation: prepared once a session, in a folder that goes with it."""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

from biphasic_jax.config import default_config, phase, resolve
from biphasic_jax.data.build import Settings, build_rows
from biphasic_jax.data.shards import Rows
from biphasic_jax.data.tokenizer import load_tokenizer, vocabulary_of
from biphasic_jax.model.transformer import ModelConfig, Transformer
from biphasic_jax.objectives import registry


@dataclass(frozen=True)
class Tiny:
    folder: str
    rows: Rows
    vocabulary: Any
    tokenizer: Any
    model: Transformer
    params: Any


def tiny_config(**evaluation):
    c = default_config()
    c.data.sources = ("vendored:tiny",)
    c.data.vocab_size = 512
    c.data.row_length = 32
    c.data.validation = 0.05
    c.model.update(layers=1, width=32, ff_width=64, heads=2, kv_heads=1, head_size=16, loss_chunk=128)
    c.model.init_std = 0.3  # far from uniform, so that the figures differ
    c.batch.rows = 16
    c.phases = (phase("clm", steps=2), phase("mlm", steps=2, mask_rate=0.3))
    c.evaluation.rows = 19
    c.evaluation.update(evaluation)
    return resolve(c, registry())


def tiny_settings() -> Settings:
    d = tiny_config().data
    return Settings(
        tuple(d.sources), d.tokenizer, d.vocab_size, d.row_length, d.segments, d.validation, d.seed, d.mask_token
    )


@functools.cache
def tiny() -> Tiny:
    folder = tempfile.mkdtemp(prefix="biphasic-rows-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build_rows(tiny_settings(), folder, 1)
    vocabulary = vocabulary_of(folder)
    model = Transformer(ModelConfig.from_config(tiny_config().model, vocabulary.size))
    return Tiny(
        folder,
        Rows(folder, "validation"),
        vocabulary,
        load_tokenizer(folder),
        model,
        model.init_params(3),
    )
