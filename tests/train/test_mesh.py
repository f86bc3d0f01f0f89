import jax
import numpy as np
import pytest
from held_out import tiny_config
from jax.sharding import AxisType, PartitionSpec
from stepping import Stepping

from biphasic_jax.errors import UserError
from biphasic_jax.train.mesh import AXES, batch_shards, make_mesh, place_batch, use_mesh
from biphasic_jax.train.state import flatten


def config_of(rows, accumulation):
    config = tiny_config()
    with config.unlocked():
        config.batch.update(rows=rows, accumulation=accumulation)
    return config


@pytest.mark.parametrize(
    ("rows", "accumulation", "devices"),
    [(16, 1, 8), (16, 2, 8), (16, 4, 4), (12, 1, 6), (7, 1, 7), (3, 1, 3), (1, 1, 1)],
)
def test_by_default_as_many_devices_as_divide_a_micro_batch(rows, accumulation, devices):
    mesh = make_mesh(config_of(rows, accumulation))
    assert dict(mesh.shape) == {"data": devices, "fsdp": 1, "tensor": 1}
    assert batch_shards(mesh) == devices


def test_axes_are_auto_and_in_order():
    mesh = make_mesh(tiny_config(), (2, 2, 2))
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_mesh_that_does_not_fit_is_an_error():
    with pytest.raises(UserError, match="needs 64 devices"):
        make_mesh(tiny_config(), (16, 2, 2))
    with pytest.raises(UserError, match=r"batch\.rows=12"):
        make_mesh(config_of(12, 1), (8, 1, 1))


def test_weights_optimizer_and_batch_really_lie_where_the_rules_say():
    stepping = Stepping("mlm", (2, 2, 2))
    state, _ = stepping(stepping.state(), stepping.batch())
    params, opt = flatten(state.params), flatten(state.opt_state)
    wanted = {
        "embedding": PartitionSpec("tensor", "fsdp"),
        "head": PartitionSpec("fsdp", "tensor"),
        "blocks/attention/q": PartitionSpec(None, "fsdp", "tensor"),
        "blocks/attention/o": PartitionSpec(None, "tensor", "fsdp"),
        "blocks/mlp/down": PartitionSpec(None, "tensor", "fsdp"),
        "final_norm/scale": PartitionSpec("fsdp"),
    }
    for path, spec in wanted.items():
        leaf = params[path]
        assert leaf.sharding.spec == spec, path
        parts = {None: 1, "fsdp": 2, "tensor": 2}
        shape = tuple(size // parts[axis] for size, axis in zip(leaf.shape, spec, strict=True))
        assert {shard.data.shape for shard in leaf.addressable_shards} == {shape}, path
        for moment in ("mu", "nu"):
            assert opt[f"1/{moment}/{path}"].sharding.spec == spec
    assert state.step.sharding.is_fully_replicated
    batch = place_batch(stepping.mesh, stepping.batch())
    assert {shard.data.shape[0] for shard in batch["tokens"].addressable_shards} == {stepping.rows // 4}


def test_activations_stay_split_by_rows_in_the_compiled_step():
    """Without the constraints the partitioner follows the weights, and every device holds all rows."""
    stepping = Stepping("clm", (2, 2, 1))
    with use_mesh(stepping.mesh):
        batch = place_batch(stepping.mesh, stepping.batch())
        text = stepping.step.lower(stepping.state(), batch, stepping.yes).compile().as_text()
    length, width, rows = stepping.config.data.row_length, stepping.config.model.width, stepping.rows
    assert f"f32[{rows // 4},{length},{width}]" in text
    assert f"f32[{rows},{length},{width}]" not in text


def test_a_batch_is_placed_row_for_row():
    stepping = Stepping("clm", (8, 1, 1))
    batch = stepping.batch()
    placed = place_batch(stepping.mesh, batch)
    for name, array in batch.items():
        np.testing.assert_array_equal(jax.device_get(placed[name]), array)
