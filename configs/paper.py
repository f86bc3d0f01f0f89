"""The 38 models of "Should We Still Pretrain Encoders with Masked Language Modeling?" (arXiv 2507.00994).

    python -m biphasic_jax prepare --source=FINEWEB_EDU --tokenizer=LLAMA3/tokenizer.json \\
        --mask-token='<|reserved_special_token_0|>' --row-length=2048 --segments=random_split --out=rows/fineweb_edu
    python -m biphasic_jax train --config=configs/paper.py:610m-clm-10k-mlm40-42k --workdir=runs/610m-clm-10k-mlm40-42k

The argument is the model's public name. Sizes, optimizer, schedule and batch are the paper's: 1,152 rows of
2,048 tokens a step, each row two blocks of random length that do not attend to each other, 2,359,296 tokens.
One warmup, constant, decay spans a plan; a name with `dec` continues a decayed model, and its second phase
keeps the peak rate until a decay of its own over the last 2,000 steps (the paper does not state that rate).
"""

import difflib
import re

from ml_collections import ConfigDict

from biphasic_jax.config import default_config, phase
from biphasic_jax.errors import UserError
from biphasic_jax.model.presets import PRESETS

SIZES = ("210m", "610m", "1b")
RATES = (20, 30, 40, 50)
WARMUP, DECAY = 2000, 2000  # steps

NAMES = (
    *(f"{size}-{objective}-42k" for size in SIZES for objective in ("clm", *(f"mlm{rate}" for rate in RATES))),
    *("610m-mlm40-12k", *(f"610m-clm-{first}k-mlm40-12k" for first in (3, 6, 9)), "610m-clm-12k"),
    *("610m-mlm40-22k", *(f"610m-clm-{first}k-mlm40-22k" for first in (5, 11, 17)), "610m-clm-22k"),
    *(f"610m-clm-{first}k-mlm40-42k" for first in (10, 21, 32)),
    *(f"610m-clm-40k-mlm{rate}-42k" for rate in RATES),
    *(f"610m-{base}-dec42k-mlm40-{total}k" for base in ("clm", "mlm40") for total in (44, 54, 64)),
)


def get_config(name: str = "610m-clm-10k-mlm40-42k") -> ConfigDict:
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=5, cutoff=0.3) or list(NAMES)
        raise UserError(f"--config=configs/paper.py:{name}: no model has that name; near it are {', '.join(near)}")
    size = name.split("-")[0]
    c = default_config()
    c.seed = 42
    c.model.update(PRESETS[size])
    c.model.dtype = "bfloat16"
    c.model.remat = "dots"
    c.data.rows = "rows/fineweb_edu"
    c.data.row_length = 2048
    c.data.segments = "random_split"
    c.data.mask_token = "<|reserved_special_token_0|>"
    c.batch.rows = 1152
    c.optimizer.learning_rate = 5e-4
    c.optimizer.eps = 1e-5
    c.optimizer.decay = "all"
    c.checkpoint.every = 1000
    c.checkpoint.keep_every = 10_000
    c.evaluation.every = 1000
    c.evaluation.mask_rates = (0.2, 0.3, 0.4, 0.5)

    stages = re.findall(r"(clm|mlm\d\d)(?:-(dec)?(\d+)k)?", name)
    ends = [1000 * int(end) for _, _, end in stages]
    decayed = stages[0][1] == "dec"
    c.phases = tuple(
        _phase(objective, end - start) for (objective, _, _), start, end in zip(stages, [0, *ends], ends, strict=False)
    )
    c.schedule.update({"warmup": WARMUP, "decay": DECAY} if not decayed else {"span": "phase", "decay": DECAY})
    if decayed:
        c.phases[0].warmup, c.phases[1].warmup = WARMUP, 0
    return c


def _phase(objective: str, steps: int) -> ConfigDict:
    if objective == "clm":
        return phase("clm", steps=steps)
    return phase("mlm", steps=steps, mask_rate=int(objective[3:]) / 100)
