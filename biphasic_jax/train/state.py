"""The state of a run on the devices: everything that an update reads and writes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from biphasic_jax.model.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """step: int32 (), the updates that lie behind. params: the model's tree. opt_state: the optimizer's."""

    step: Any
    params: Any
    opt_state: Any


def init_state(model: Transformer, optimizer: optax.GradientTransformation, seed: int, step: int = 0) -> TrainState:
    """A state with random weights folded from `seed`; may be jitted, or made abstract by `jax.eval_shape`."""
    params = model.init_params(seed)
    return TrainState(jnp.asarray(step, jnp.int32), params, optimizer.init(params))


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, such as "blocks/attention/q": what shardings and checkpoints go by."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(like: Any, leaves: dict[str, Any]) -> Any:
    """The tree of the shape of `like` whose leaf at each path is `leaves[path]`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in flatten(like)])
