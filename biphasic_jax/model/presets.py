"""Sizes by name: the paper's three, and small ones for a CPU; and what a size counts in parameters."""

from typing import Any

from biphasic_jax.errors import UserError
from biphasic_jax.model.transformer import ModelConfig
from biphasic_jax.overrides import nearest

PAPER_VOCABULARY = 128_256  # Llama 3's tokenizer

# Keys of `config.model`. The paper's names count the encoder without its head (arXiv 2507.00994, table 1).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "width": 64, "ff_width": 128, "heads": 4, "kv_heads": 2, "head_size": 16},
    "small": {"layers": 6, "width": 384, "ff_width": 1024, "heads": 6, "kv_heads": 6, "head_size": 64},
    "210m": {"layers": 12, "width": 768, "ff_width": 3072, "heads": 12, "kv_heads": 12, "head_size": 64},
    "610m": {"layers": 26, "width": 1152, "ff_width": 4096, "heads": 18, "kv_heads": 6, "head_size": 64},
    "1b": {"layers": 28, "width": 1728, "ff_width": 5120, "heads": 18, "kv_heads": 6, "head_size": 96},
}


def preset(name: str) -> dict[str, Any]:
    """The keys of `config.model` that the size `name` sets; `UserError` names the near ones, or all."""
    if name not in PRESETS:
        raise UserError(f"size {name!r}: there is no such size{nearest(name, list(PRESETS))}")
    return dict(PRESETS[name])


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part: "blocks" (all norms included), "embedding", "encoder" (both), "head", "total"."""
    c = config
    attention = c.width * c.head_size * (2 * c.heads + 2 * c.kv_heads)
    mlp = 3 * c.width * c.ff_width
    blocks = c.layers * (attention + mlp + 2 * c.width) + c.width
    embedding = c.vocab_size * c.width
    head = 0 if c.tied else embedding
    encoder = blocks + embedding
    return {"blocks": blocks, "embedding": embedding, "encoder": encoder, "head": head, "total": encoder + head}
