"""The whole way in under a minute on two cores: CLM, then MLM, over more than two epochs of a small text.

    python -m biphasic_jax train --config=configs/tiny.py --workdir=runs/tiny

Trains a tokenizer and prepares the rows by itself. What it learns is next to nothing; it is there to try
commands on, and to test with.
"""

from ml_collections import ConfigDict

from biphasic_jax.config import default_config, phase


def get_config() -> ConfigDict:
    c = default_config()
    c.data.sources = ("vendored:tiny",)
    c.data.vocab_size = 1024
    c.data.row_length = 64
    c.data.validation = 0.1
    c.model.update(layers=2, width=64, ff_width=128, heads=4, kv_heads=2, head_size=16, loss_chunk=512)
    c.batch.rows = 32
    c.phases = (phase("clm", steps=70), phase("mlm", steps=90, mask_rate=0.3))
    c.optimizer.learning_rate = 3e-3
    c.schedule.warmup = 10
    c.schedule.decay = 30
    c.checkpoint.every = 20
    c.evaluation.every = 40
    c.evaluation.rows = 64
    c.evaluation.mask_rates = (0.15, 0.3)
    return c
