"""Who sees whom, and the kernels that compute it.

The attention mode and the segments are arguments of every call: a phase flips the mode, and a row says
what it is made of. Segment 0 is padding: nobody sees it, and what it sees is exactly zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from biphasic_jax.errors import UserError

Array = jax.Array

MASKED = -1e30  # finite, so that a row without a key stays free of NaN


def positions_from_segments(segments_BxL: Array) -> Array:
    """Positions that restart at 0 wherever the segment changes; (B, L) int32."""
    index_L = jnp.arange(segments_BxL.shape[1], dtype=jnp.int32)
    begins_BxL = jnp.diff(segments_BxL, axis=1, prepend=segments_BxL[:, :1]) != 0
    return index_L - jax.lax.cummax(jnp.where(begins_BxL, index_L, 0), axis=1)


def attention_mask(segments_BxL: Array | None, length: int, causal: bool) -> Array | None:
    """What query i may see of key j: (B or 1, L, L) bool, or None where all see all.

    A key is seen from its own segment alone, padding from nowhere, a later one not if `causal`.
    """
    mask = None
    if causal:
        mask = jnp.tril(jnp.ones((1, length, length), bool))
    if segments_BxL is not None:
        same_BxLxL = (segments_BxL[:, :, None] == segments_BxL[:, None, :]) & (segments_BxL[:, None, :] != 0)
        mask = same_BxLxL if mask is None else mask & same_BxLxL
    return mask


def attention(
    q_BxLxHxh: Array,
    k_BxLxKxh: Array,
    v_BxLxKxh: Array,
    segments_BxL: Array | None,
    *,
    causal: bool,
    backend: str = "xla",
) -> Array:
    """softmax(q k^T / sqrt(h)) v over what each query may see; (B, L, H, h) in the type of q.

    K divides H: query head i reads key/value head i // (H / K). `segments_BxL` None means one segment
    without padding. The output of padding is 0.
    """
    return BACKENDS[backend](q_BxLxHxh, k_BxLxKxh, v_BxLxKxh, segments_BxL, causal)


def xla_attention(
    q_BxLxHxh: Array, k_BxLxKxh: Array, v_BxLxKxh: Array, segments_BxL: Array | None, causal: bool
) -> Array:
    """Plain batched matrix products; logits and softmax in f32. Runs everywhere, memory O(L^2)."""
    B, L, H, h = q_BxLxHxh.shape
    K = k_BxLxKxh.shape[2]
    # The query heads that share a key head become more rows of one product, so keys are not repeated. Length
    # is the slower axis of those rows: devices that split it keep their part.
    q_BxKxLGxh = q_BxLxHxh.reshape(B, L, K, H // K, h).transpose(0, 2, 1, 3, 4).reshape(B, K, L * (H // K), h)
    k_BxKxLxh, v_BxKxLxh = (x.transpose(0, 2, 1, 3) for x in (k_BxLxKxh, v_BxLxKxh))
    scores = jnp.einsum("bkqh,bkmh->bkqm", q_BxKxLGxh, k_BxKxLxh, preferred_element_type=jnp.float32)
    mask = attention_mask(segments_BxL, L, causal)
    if mask is not None:
        scores_BxKxLxGxL = scores.reshape(B, K, L, H // K, L)
        scores = jnp.where(mask[:, None, :, None], scores_BxKxLxGxL, MASKED).reshape(scores.shape)
    # The softmax is divided by its sum after the second product, which spares passes over (L, L), forward
    # and backward; attention takes 0.7 times as long on CPU.
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp((scores - top) * h**-0.5)
    out = jnp.einsum("bkqm,bkmh->bkqh", weights.astype(q_BxLxHxh.dtype), v_BxKxLxh)
    out = (out / weights.sum(-1, keepdims=True)).astype(q_BxLxHxh.dtype)
    out_BxLxHxh = out.reshape(B, K, L, H // K, h).transpose(0, 2, 1, 3, 4).reshape(B, L, H, h)
    if segments_BxL is not None:
        out_BxLxHxh = jnp.where((segments_BxL != 0)[:, :, None, None], out_BxLxHxh, 0)
    return out_BxLxHxh


BACKENDS: dict[str, Callable[[Array, Array, Array, Array | None, bool], Array]] = {"xla": xla_attention}


def choose_backend(requested: str) -> tuple[str, str]:
    """(name of the backend, why it was taken) for a config's `model.attention`.

    "auto" takes the best that is available. Raises `UserError` for a backend that is not.
    """
    if requested == "auto":
        return "xla", "auto: plain XLA, which runs on every platform"
    if requested in BACKENDS:
        return requested, "as configured"
    choices = ", ".join(["auto", *BACKENDS])
    raise UserError(f"config.model.attention={requested!r} is not available here: take one of {choices}")
