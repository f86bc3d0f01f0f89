"""The mesh of devices, and the one table that says which axis of it splits what.

Axes: `data` splits rows; `fsdp` splits rows and, over the model's width, weights; `tensor` splits heads,
the feed-forward width and the vocabulary. The compiler places the communication (`AxisType.Auto`).
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from biphasic_jax.errors import UserError
from biphasic_jax.model.transformer import Transformer
from biphasic_jax.train.state import TrainState, flatten, unflatten

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
# Logical axis -> mesh axes. In one array a mesh axis is used once, by the first that asks for it.
RULES = (
    ("batch", BATCH),
    ("length", None),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("layers", None),
)


def make_mesh(
    config: ConfigDict, shape: Sequence[int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh of `shape` over AXES; by default all devices on `data`, or as many as divide a micro-batch."""
    devices = jax.devices() if devices is None else list(devices)
    rows = config.batch.rows // config.batch.accumulation
    if shape is None:
        shape = (next(n for n in range(min(len(devices), rows), 0, -1) if rows % n == 0), 1, 1)
    data, fsdp, tensor = shape
    if math.prod(shape) > len(devices):
        raise UserError(f"a mesh of {data} x {fsdp} x {tensor} needs {math.prod(shape)} devices, not {len(devices)}")
    if rows % (data * fsdp):
        raise UserError(
            f"config.batch.rows={config.batch.rows} over accumulation={config.batch.accumulation} is {rows} rows a "
            f"micro-batch, which data x fsdp = {data * fsdp} devices do not divide"
        )
    used = devices[: math.prod(shape)]
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=used)


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Makes `mesh` and the table of rules current: both are needed for constraints inside the model to hold."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the mesh splits the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of every leaf of a batch: its leading axis over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def place_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's slice of a batch as global arrays."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in batch.items()}


def param_shardings(mesh: Mesh, model: Transformer) -> Any:
    """The tree of the parameters with a NamedSharding at each leaf, from the model's logical axes."""

    def of(axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, nn.logical_to_mesh_axes(axes, RULES) or PartitionSpec())

    return jax.tree.map(of, model.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, tuple))


def state_shardings(mesh: Mesh, model: Transformer, state: TrainState) -> TrainState:
    """The tree of `state` (may be abstract) with shardings: an optimizer's leaf lies where its parameter lies."""
    params = param_shardings(mesh, model)
    shapes = {path: leaf.shape for path, leaf in flatten(state.params).items()}
    by_path = flatten(params)

    def of(path: str, leaf: Any) -> NamedSharding:
        owners = [p for p in by_path if path.endswith(f"/{p}") and shapes[p] == leaf.shape]
        return by_path[max(owners, key=len)] if owners else replicated(mesh)

    opt_leaves = {path: of(path, leaf) for path, leaf in flatten(state.opt_state).items()}
    return TrainState(replicated(mesh), params, unflatten(state.opt_state, opt_leaves))
