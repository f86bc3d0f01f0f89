"""Pretraining of text encoders in phases: causal language modelling, then masked language modelling.

    from biphasic_jax import load
    model, params, tokenizer = load("runs/smoke")
    logits_BxLxV = model.apply({"params": params}, tokens_BxL, segments_BxL, causal=False)

Importing this package touches no device.
"""

from typing import Any

__all__ = ["build", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import biphasic_jax.train.checkpoint as checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module 'biphasic_jax' has no attribute {name!r}")
