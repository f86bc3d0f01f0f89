"""From features to logits and to the loss, without the logits of a whole batch ever existing.

The loss runs over chunks of positions. Its gradient is made in the same pass, while a chunk's logits are
at hand, and scaled in the backward pass: three matrix products where recomputing takes four, and nothing
of size (positions, V) is kept.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array


def head_kernel(params: Mapping[str, Any]) -> Array:
    """(D, V): the head's own matrix, or the embedding's transpose if they are tied."""
    return params["head"] if "head" in params else params["embedding"].T


def project(x_xD: Array, kernel_DxV: Array) -> Array:
    """Logits (..., V) f32, multiplied in the type of x."""
    return jnp.einsum("...d,dv->...v", x_xD, kernel_DxV.astype(x_xD.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def chunked_cross_entropy(
    x_GxPxD: Array, kernel_DxV: Array, targets_GxP: Array, weights_GxP: Array, chunk: int, z_loss: float
) -> tuple[Array, dict[str, Array]]:
    """Weighted softmax cross-entropy in nats, summed over all positions.

    G groups of P positions; the logits of `chunk` positions of each group exist at one time. Products
    are taken in the type of x and accumulated in f32. Returns the f32 scalar

        sum of w * (log Z - logit[target] + z_loss * log(Z)^2)

    (z-loss: arXiv 2204.02311, section 5), and f32 sums: "correct", the weight of positions whose target
    has the one largest logit, and "z_loss", the part of the first that is z-loss. Only the first is
    differentiable, in x and kernel.
    """
    return _scan_chunks(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss, gradients=False)[0]


def _forward(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss):
    return _scan_chunks(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss, gradients=True)


def _backward(chunk, z_loss, gradients, cotangents):
    scale = cotangents[0]
    dx_GxPxD, dkernel_DxV = gradients
    return (dx_GxPxD * scale).astype(dx_GxPxD.dtype), dkernel_DxV * scale, None, None


chunked_cross_entropy.defvjp(_forward, _backward)


def _scan_chunks(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss, gradients):
    """((loss, sums), (dx, dkernel) or None), one chunk after the other."""
    G, P, D = x_GxPxD.shape
    # Gathered over the axis that splits D, once, rather than in every chunk.
    kernel = nn.with_logical_constraint(kernel_DxV.astype(x_GxPxD.dtype), (None, "vocab"))
    chunks = max(1, math.ceil(P / chunk))
    size = math.ceil(P / chunks)
    if pad := chunks * size - P:  # empty positions have weight 0
        x_GxPxD = jnp.pad(x_GxPxD, ((0, 0), (0, pad), (0, 0)))
        targets_GxP, weights_GxP = (jnp.pad(a, ((0, 0), (0, pad))) for a in (targets_GxP, weights_GxP))
    # A group's own gradient of the kernel: devices that hold other groups are summed once, at the end.
    zeros: Any = jnp.zeros((G, *kernel.shape), jnp.float32) if gradients else None

    def body(carry, i):
        sums, dkernel_GxDxV = carry
        x_GxCxD, targets_GxC, weights_GxC = (
            jax.lax.dynamic_slice_in_dim(a, i * size, size, axis=1) for a in (x_GxPxD, targets_GxP, weights_GxP)
        )
        new, dlogits_GxCxV = _chunk(x_GxCxD, kernel, targets_GxC, weights_GxC, z_loss, gradients)
        sums = jax.tree.map(jnp.add, sums, new)
        if not gradients:
            return (sums, None), None
        dx_GxCxD = jnp.einsum("gcv,dv->gcd", dlogits_GxCxV, kernel)
        dkernel_GxDxV += jnp.einsum("gcd,gcv->gdv", x_GxCxD, dlogits_GxCxV, preferred_element_type=jnp.float32)
        return (sums, dkernel_GxDxV), dx_GxCxD

    nothing = {name: jnp.zeros((), jnp.float32) for name in ("loss", "correct", "z_loss")}
    (sums, dkernel_GxDxV), dx = jax.lax.scan(body, (nothing, zeros), jnp.arange(chunks))
    loss = sums.pop("loss")
    if not gradients:
        return (loss, sums), None
    dx_GxPxD = dx.transpose(1, 0, 2, 3).reshape(G, chunks * size, D)[:, :P]
    return (loss, sums), (dx_GxPxD, dkernel_GxDxV.sum(0).astype(kernel_DxV.dtype))


def _chunk(x_GxCxD, kernel_DxV, targets_GxC, weights_GxC, z_loss, gradients):
    """(sums, the gradient of the loss with respect to the logits or None) of one chunk."""
    logits_GxCxV = nn.with_logical_constraint(project(x_GxCxD, kernel_DxV), ("batch", None, "vocab"))
    hit_GxCxV = jnp.arange(kernel_DxV.shape[1]) == targets_GxC[..., None]
    top_GxC = logits_GxCxV.max(-1)
    exp_GxCxV = jnp.exp(logits_GxCxV - top_GxC[..., None])
    total_GxC = exp_GxCxV.sum(-1)
    log_z_GxC = top_GxC + jnp.log(total_GxC)
    target_GxC = jnp.where(hit_GxCxV, logits_GxCxV, 0).sum(-1)
    # No other logit reaches the target's: a model that says the same of all tokens is right about none.
    correct_GxC = (logits_GxCxV >= target_GxC[..., None]).sum(-1) == 1
    z_GxC = z_loss * log_z_GxC**2
    sums = {
        "loss": jnp.sum(weights_GxC * (log_z_GxC - target_GxC + z_GxC)),
        "correct": jnp.sum(weights_GxC * correct_GxC),
        "z_loss": jnp.sum(weights_GxC * z_GxC),
    }
    if not gradients:
        return sums, None
    share_GxC = weights_GxC * (1 + 2 * z_loss * log_z_GxC) / total_GxC
    dlogits_GxCxV = exp_GxCxV * share_GxC[..., None] - jnp.where(hit_GxCxV, weights_GxC[..., None], 0)
    return sums, dlogits_GxCxV.astype(x_GxCxD.dtype)


def batch_shards() -> int:
    """Into how many parts the mesh in use splits the batch by the logical rules in use; 1 without a mesh."""
    axes = nn.logical_to_mesh_axes(("batch",))
    mesh = jax.sharding.get_abstract_mesh()
    if axes is None or axes[0] is None or mesh.empty:
        return 1
    names = (axes[0],) if isinstance(axes[0], str) else axes[0]
    return math.prod(mesh.shape[name] for name in names)


def prediction_loss(
    model: Any, params: Mapping[str, Any], batch: Mapping[str, Array], causal: bool
) -> tuple[Array, Array, dict[str, Array]]:
    """(loss sum, weight sum, sums "correct" and "z_loss"), f32 scalars, of a batch from `objectives.collate`.

    The loss sum holds the z-loss that `model.config.z_loss` asks for; less sums["z_loss"] it is the
    cross-entropy in nats. With "predict" in the batch only those positions reach the head.
    """
    config = model.config
    x_BxLxD = model.features({"params": params}, batch["tokens"], batch["segments"], causal=causal)
    targets, weights = batch["targets"], batch["weights"]
    D, shards = x_BxLxD.shape[-1], batch_shards()
    if "predict" in batch:  # positions within each group's own run of rows, so that a device gathers from itself
        predict_GxP = batch["predict"]
        x_GxMxD = x_BxLxD.reshape(predict_GxP.shape[0], -1, D)
        x = jnp.take_along_axis(x_GxMxD, predict_GxP[..., None], axis=1)
    else:
        x = x_BxLxD
    groups = shards if x.shape[0] % shards == 0 else x.shape[0]
    x = nn.with_logical_constraint(x.reshape(groups, -1, D), ("batch", None, "embed"))
    targets, weights = (a.reshape(groups, -1) for a in (targets, weights))
    loss, sums = chunked_cross_entropy(x, head_kernel(params), targets, weights, config.loss_chunk, config.z_loss)
    return loss, weights.sum(), sums
