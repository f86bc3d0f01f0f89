"""An encoder from your own corpus, in two phases: a quarter of the steps CLM, the rest MLM at 40 %.

    python -m biphasic_jax train --config=configs/pretrain.py:210m --workdir=runs/mine \\
        --config.data.sources='("corpus",)' --config.budget_tokens=10e9

The argument is a size: tiny, 210m (the default), 610m or 1b. The tokenizer is trained on the corpus unless
`--config.data.tokenizer=FILE` names one. Documents do not attend to each other, and none is cut that fits a row.
The split is the best of the paper's (arXiv 2507.00994, figure 6: 25 % CLM and 75 % MLM at 42,000 steps).
"""

from ml_collections import ConfigDict

from biphasic_jax.config import default_config, phase
from biphasic_jax.model.presets import preset


def get_config(size: str = "210m") -> ConfigDict:
    c = default_config()
    c.model.update(preset(size))
    c.model.dtype = "bfloat16"
    c.model.remat = "dots"
    c.data.sources = ()
    c.data.vocab_size = 32_768
    c.data.row_length = 1024
    c.data.segments = "documents"
    c.batch.rows = 512
    c.budget_tokens = 10_000_000_000
    c.phases = (phase("clm", share=0.25), phase("mlm", share=0.75, mask_rate=0.4))
    c.schedule.warmup = 0.05
    c.schedule.decay = 0.05
    c.checkpoint.every = 500
    c.evaluation.every = 500
    return c
