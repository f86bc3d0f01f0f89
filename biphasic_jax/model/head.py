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
    has the largest logit, and "z_loss", the part of the first that is z-loss. Only the first is
    differentiable, in x and kernel. Where the weight is 0, the target may be anything.
    """
    return _chunks(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss, gradients=False)[0]


def _forward(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss):
    return _chunks(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss, gradients=True)


def _backward(chunk, z_loss, gradients, cotangents):
    scale = cotangents[0]
    dx_GxPxD, dkernel_DxV = gradients
    return (dx_GxPxD * scale).astype(dx_GxPxD.dtype), dkernel_DxV * scale, None, None


chunked_cross_entropy.defvjp(_forward, _backward)


def _chunks(x_GxPxD, kernel_DxV, targets_GxP, weights_GxP, chunk, z_loss, gradients):
    """((loss, sums), (dx, dkernel) or None), one chunk after the other."""
    G, P, D = x_GxPxD.shape
    # Gathered over the axis that splits D, once, rather than in every chunk.
    kernel = nn.with_logical_constraint(kernel_DxV.astype(x_GxPxD.dtype), (None, "vocab"))
    chunks = max(1, math.ceil(P / chunk))
    size = math.ceil(P / chunks)
    if pad := chunks * size - P:  # empty positions have weight 0
        x_GxPxD = jnp.pad(x_GxPxD, ((0, 0), (0, pad), (0, 0)))
        targets_GxP, weights_GxP = (jnp.pad(a, ((0, 0), (0, pad))) for a in (targets_GxP, weights_GxP))

    def part(i):
        x, targets, weights = (
            jax.lax.dynamic_slice_in_dim(a, i * size, size, axis=1) for a in (x_GxPxD, targets_GxP, weights_GxP)
        )
        return _chunk(x, kernel, targets, weights, z_loss, gradients)

    def add(totals, i):
        new, dx_GxCxD = part(i)
        return jax.tree.map(jnp.add, totals, new), dx_GxCxD

    if chunks == 1:  # no loop, and no sum that begins with zeros: 1.1 times as fast on CPU
        (sums, dkernel_GxDxV), dx_GxPxD = part(0)
    else:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(part, 0)[0])
        (sums, dkernel_GxDxV), dx = jax.lax.scan(add, zeros, jnp.arange(chunks))
        dx_GxPxD = dx.swapaxes(0, 1).reshape(G, chunks * size, D)[:, :P] if gradients else None
    value = (sums.pop("loss"), sums)
    return value, (dx_GxPxD, dkernel_GxDxV.sum(0).astype(kernel_DxV.dtype)) if gradients else None


def _chunk(x_GxCxD, kernel_DxV, targets_GxC, weights_GxC, z_loss, gradients):
    """((sums, dkernel), dx) of one chunk, for a loss of weight 1; dkernel and dx are None without `gradients`.

    dkernel is (G, D, V): devices that hold different groups are summed once, after the last chunk. All else
    runs over the R = G C rows of a matrix, whose logits XLA overwrites with their exponentials.
    """
    (G, C, D), V = x_GxCxD.shape, kernel_DxV.shape[1]
    x_RxD, targets_R, weights_R = x_GxCxD.reshape(-1, D), targets_GxC.reshape(-1), weights_GxC.reshape(-1)
    logits_RxV = nn.with_logical_constraint(project(x_RxD, kernel_DxV), ("predictions", "vocab"))
    top_R = logits_RxV.max(-1)
    exp_RxV = jnp.exp(logits_RxV - top_R[:, None])
    total_R = exp_RxV.sum(-1)
    log_z_R = top_R + jnp.log(total_R)
    target_R = jnp.take_along_axis(logits_RxV, targets_R[:, None], axis=-1, mode="clip")[:, 0]
    # A model that says the same of all tokens is right about none. (To count ties would take one more pass,
    # and keep the logits beside their exponentials.)
    correct_R = (target_R >= top_R) & (total_R < V)
    z_R = z_loss * log_z_R**2
    sums = {
        "loss": jnp.sum(weights_R * (log_z_R - target_R + z_R)),
        "correct": jnp.sum(weights_R * correct_R),
        "z_loss": jnp.sum(weights_R * z_R),
    }
    if not gradients:
        return (sums, None), None
    share_R = weights_R * (1 + 2 * z_loss * log_z_R) / total_R
    hit_RxV = jnp.arange(V) == targets_R[:, None]
    dlogits_RxV = (exp_RxV * share_R[:, None] - jnp.where(hit_RxV, weights_R[:, None], 0)).astype(x_GxCxD.dtype)
    dx_RxD = dlogits_RxV @ kernel_DxV.T
    # The small factor is turned beforehand: XLA on CPU is slower at a product that reads it by columns.
    x_GxDxC = jax.lax.optimization_barrier(x_GxCxD.swapaxes(1, 2))
    dlogits_GxCxV = dlogits_RxV.reshape(G, C, V)
    dkernel_GxDxV = jnp.einsum("gdc,gcv->gdv", x_GxDxC, dlogits_GxCxV, preferred_element_type=jnp.float32)
    return (sums, dkernel_GxDxV), dx_RxD.reshape(G, C, D)


def shards_of(axis: str) -> int:
    """Into how many parts the mesh in use splits a logical axis by the rules in use; 1 without a mesh."""
    axes = nn.logical_to_mesh_axes((axis,))
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
    x, targets, weights = x_BxLxD, batch["targets"], batch["weights"]
    if "predict" in batch:  # positions within each group's own run of rows, so that a device gathers from itself
        predict_GxP = batch["predict"]
        x_GxMxD = x_BxLxD.reshape(predict_GxP.shape[0], -1, x_BxLxD.shape[-1])
        x = jnp.take_along_axis(x_GxMxD, predict_GxP[..., None], axis=1)
    x, targets, weights = (spread(a) for a in (x, targets, weights))
    x = nn.with_logical_constraint(x, ("predictions", None, "embed"))
    loss, sums = chunked_cross_entropy(x, head_kernel(params), targets, weights, config.loss_chunk, config.z_loss)
    return loss, weights.sum(), sums


def spread(a_NxPx: Array) -> Array:
    """(n, P, ...) as (devices that split predictions, positions of each, ...): each keeps the positions that it has.

    Positions are filled up with zeros, which weigh nothing, where the devices along `length` do not divide them.
    """
    batch, length = shards_of("batch"), shards_of("length")
    batch = batch if a_NxPx.shape[0] % batch == 0 else a_NxPx.shape[0]
    if length == 1:
        return a_NxPx.reshape(batch, -1, *a_NxPx.shape[2:])
    n, P, *rest = a_NxPx.shape
    a_NxPx = jnp.pad(a_NxPx, ((0, 0), (0, -P % length), *((0, 0) for _ in rest)))
    parts = a_NxPx.reshape(batch, n // batch, length, -1, *rest).swapaxes(1, 2)
    return parts.reshape(batch * length, -1, *rest)
