"""The mesh of devices, and the one table that says which axis of it splits what.

Axes: `data` splits rows; `fsdp` splits rows and, over the model's width, weights; `tensor` splits heads, the
feed-forward width and the vocabulary; `sequence` splits the length of rows, whose keys and values every device
of it then holds whole. The compiler places the communication (`AxisType.Auto`).
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from biphasic_jax.config import MESH_AXES as AXES
from biphasic_jax.errors import UserError
from biphasic_jax.model.transformer import Transformer
from biphasic_jax.train.state import TrainState, flatten, unflatten

BATCH = ("data", "fsdp")
# Logical axis -> mesh axes. In one array a mesh axis is used once, by the first that asks for it.
RULES = (
    ("batch", BATCH),
    ("predictions", (*BATCH, "sequence")),
    ("length", "sequence"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("layers", None),
)


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config.mesh` over `devices` (all).

    An axis of -1 takes the devices that the others leave; `data` then only so many as divide a micro-batch.
    With `slices` above 1 the data axis runs over the slices of a multi-slice TPU first: only gradients cross
    the slower network between them. Raises `UserError` where devices or rows cannot be divided so.
    """
    devices = jax.devices() if devices is None else list(devices)
    rows, length = config.batch.rows // config.batch.accumulation, config.data.row_length
    shape = {axis: config.mesh[axis] for axis in AXES}
    said = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    fixed = math.prod(size for size in shape.values() if size > 0)
    for axis, size in shape.items():
        if size < 0:
            shape[axis] = max(len(devices) // fixed, 1)
            if axis == "data":
                most = min(shape[axis], max(rows // shape["fsdp"], 1)) if shape["fsdp"] > 0 else shape[axis]
                shape[axis] = next((n for n in range(most, 1, -1) if rows % (n * shape["fsdp"]) == 0), 1)
    used = math.prod(shape.values())
    if used > len(devices):
        raise UserError(
            f"config.mesh: {said} needs {used} devices, there are {len(devices)}; lower an axis, or set one to -1"
        )
    if len(devices) > used and jax.process_count() > 1:
        raise UserError(
            f"config.mesh: {said} takes {used} of {len(devices)} devices for {rows} rows a micro-batch, and processes "
            f"cannot share what is less than all; raise an axis, or config.batch.rows"
        )
    if rows % (shape["data"] * shape["fsdp"]):
        raise UserError(
            f"config.batch.rows={config.batch.rows} over accumulation={config.batch.accumulation} is {rows} rows a "
            f"micro-batch, which data x fsdp = {shape['data'] * shape['fsdp']} devices do not divide"
        )
    if length % shape["sequence"]:
        raise UserError(f"config.mesh.sequence={shape['sequence']} must divide config.data.row_length={length}")
    slices = config.mesh.slices
    if slices > 1:
        return Mesh(_across_slices(shape, slices, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return jax.make_mesh(tuple(shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:used])


def _across_slices(shape: Mapping[str, int], slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    found = len({getattr(device, "slice_index", 0) for device in devices})
    if found != slices or shape["data"] % slices:
        raise UserError(
            f"config.mesh.slices={slices}: the devices lie in {found}, and slices must divide data={shape['data']}"
        )
    inside = [size // slices if axis == "data" else size for axis, size in shape.items()]
    return create_hybrid_device_mesh(inside, (slices, 1, 1, 1), devices)


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


def share_of(mesh: Mesh, process: int) -> tuple[int, int]:
    """(part, parts): a batch falls into `parts` equal runs of rows, of which `process` feeds number `part`.

    Processes whose devices hold the same rows, because a tensor or sequence axis spans them, feed the same part.
    """
    owners_BxM = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    owners_BxM = owners_BxM.reshape(batch_shards(mesh), -1)
    held = {p: np.flatnonzero((owners_BxM == p).any(1)) for p in np.unique(owners_BxM)}
    mine = held[process]
    first, count = int(mine[0]), len(mine)
    apart = all(np.array_equal(other, mine) or not np.isin(other, mine).any() for other in held.values())
    if not apart or first % count or not np.array_equal(mine, np.arange(first, first + count)):
        raise UserError(
            f"config.mesh: process {process} holds parts {mine.tolist()} of a batch, which other processes hold in "
            f"part; let data x fsdp be a multiple of the number of processes, or a divisor of it"
        )
    return first // count, len(owners_BxM) // count


def place_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's share of a batch as global arrays."""
    sharding, (_, parts) = batch_sharding(mesh), share_of(mesh, jax.process_index())

    def place(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, array, (len(array) * parts, *array.shape[1:]))

    return {name: place(array) for name, array in batch.items()}


def param_shardings(mesh: Mesh, model: Transformer) -> Any:
    """The tree of the parameters with a NamedSharding at each leaf, from the model's logical axes."""
    return jax.tree.map(lambda placed: NamedSharding(mesh, placed[0]), _placed(mesh, model), is_leaf=_is_placed)


def unsplit(mesh: Mesh, model: Transformer) -> list[str]:
    """A line for each parameter, and for attention, that a rule would split over an axis which does not divide it."""
    placed = flatten(jax.tree.map(lambda placed: placed[1], _placed(mesh, model), is_leaf=_is_placed))
    lines = [f"{path} {reason}" for path, reason in placed.items() if reason]
    heads, tensor = model.config.kv_heads, mesh.shape["tensor"]
    if heads % tensor:
        lines.append(f"attention is whole over tensor: {heads} key/value heads are no multiple of {tensor}")
    return lines


def _placed(mesh: Mesh, model: Transformer) -> Any:
    """The tree of the parameters with (PartitionSpec, why it is not what the rules say, or "") at each leaf."""
    shapes = jax.eval_shape(lambda: model.init_params(0))

    def place(axes: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> tuple[PartitionSpec, str]:
        spec, reasons = list(nn.logical_to_mesh_axes(axes, RULES) or ()), []
        for i, axis in enumerate(spec):
            if axis is not None and leaf.shape[i] % mesh.shape[axis]:
                spec[i] = None
                reasons.append(
                    f"is whole over {axis}: its {axes[i]} of {leaf.shape[i]} is no multiple of {mesh.shape[axis]}"
                )
        return PartitionSpec(*spec), "; ".join(reasons)

    return jax.tree.map(place, model.logical_axes(), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], PartitionSpec)


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
