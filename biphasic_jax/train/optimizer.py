"""The optimizers: AdamW as the paper has it, and Muon. The learning rate is applied by the step, not here.

An update is `params -= learning_rate * update`, with decay inside `update`: decoupled from the gradient's
scale and multiplied by the learning rate (arXiv 1711.05101, as PyTorch's AdamW does).
"""

from typing import Any

import jax
import optax
from ml_collections import ConfigDict
from optax import contrib

from biphasic_jax.train.state import flatten, unflatten

# Muon's update is made as large as AdamW's usually is, so that one learning rate and one decay serve
# both kinds of parameters (arXiv 2502.16982, section 2.2).
MUON_RMS = 0.2
MUON_MOMENTUM = 0.95


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Of a resolved config: clipping by the global norm, adamw or muon, decoupled decay."""
    o = config.optimizer
    direction = optax.scale_by_adam(b1=o.beta1, b2=o.beta2, eps=o.eps)
    if o.name == "muon":
        direction = _muon(direction)
    return optax.chain(
        optax.clip_by_global_norm(o.clip) if o.clip else optax.identity(),
        direction,
        optax.add_decayed_weights(o.weight_decay, mask=matrices if o.decay == "matrices" else None),
    )


def matrices(params: Any) -> Any:
    """The tree of `params` with True at the matrices: all leaves but norm scales and the embedding.

    By name, since the scales of the stacked blocks have two axes too. A tied embedding is an embedding.
    """
    leaves = {path: path != "embedding" and not path.endswith("scale") for path in flatten(params)}
    return unflatten(params, leaves)


def _muon(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon (kellerjordan.github.io/posts/muon) on the blocks' matrices, `adam` on all else."""

    def labels(params: Any) -> Any:
        kernels = flatten(matrices(params))
        is_muon = {path: kernel and path.startswith("blocks/") for path, kernel in kernels.items()}
        return unflatten(params, {path: "muon" if yes else "adam" for path, yes in is_muon.items()})

    def dimensions(params: Any) -> Any:
        # (N, in, out): the leading layer axis is a batch axis, each layer is orthogonalised by itself.
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), params)

    scaled = optax.chain(
        contrib.scale_by_muon(beta=MUON_MOMENTUM, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, _: jax.tree.map(_like_adam, updates)),
    )
    return optax.partition({"muon": scaled, "adam": adam}, labels)


def _like_adam(update_NxIxO: jax.Array) -> jax.Array:
    """An orthogonal I x O matrix has RMS 1 / sqrt(max(I, O)); scaled to MUON_RMS."""
    return update_NxIxO * (MUON_RMS * max(update_NxIxO.shape[-2:]) ** 0.5)
