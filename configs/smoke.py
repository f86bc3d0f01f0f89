"""The main job on two cores: CLM, then MLM from its checkpoint, on real text (CC0), in a few minutes.

    bash launch/smoke.sh

does all of it; by hand, with the same budget of MLM alone as the second run:

    python -m biphasic_jax train --config=configs/smoke.py --workdir=runs/smoke
    python -m biphasic_jax train --config=configs/smoke.py:mlm --workdir=runs/smoke-mlm
    python -m biphasic_jax report --workdir=runs/smoke --baseline=runs/smoke-mlm

Both held-out losses end below the unigram entropy of the held-out text. A mask rate of 0.3: at this size the
paper's 0.4 leaves too little to read.
"""

from ml_collections import ConfigDict

from biphasic_jax.config import default_config, phase
from biphasic_jax.errors import UserError

STEPS = 500


def get_config(plan: str = "biphasic") -> ConfigDict:
    if plan not in ("biphasic", "mlm"):
        raise UserError(f"--config=configs/smoke.py:{plan}: the plans are biphasic and mlm")
    c = default_config()
    c.data.sources = ("vendored:corpus_cc0",)
    c.data.vocab_size = 2048
    c.data.row_length = 128
    c.data.validation = 0.02
    c.model.update(layers=3, width=128, ff_width=352, heads=4, kv_heads=4, head_size=32)
    c.model.scan_layers = False
    c.model.loss_chunk = 2048
    c.batch.rows = 16
    first = STEPS * 2 // 5 if plan == "biphasic" else 0
    c.phases = (phase("clm", steps=first),) if first else ()
    c.phases += (phase("mlm", steps=STEPS - first, mask_rate=0.3),)
    c.optimizer.learning_rate = 3e-3
    c.schedule.warmup = 50
    c.schedule.decay = 0.25
    c.checkpoint.every = 150
    c.evaluation.every = 100
    c.evaluation.rows = 256
    c.evaluation.mask_rates = (0.15, 0.3)
    return c
