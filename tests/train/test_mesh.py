import itertools
import signal

import jax
import numpy as np
import pytest
from held_out import tiny_config
from jax.sharding import AxisType, PartitionSpec
from short_run import kill_at, lines, straight, train
from stepping import Stepping

from biphasic_jax.errors import UserError
from biphasic_jax.train.mesh import AXES, batch_shards, make_mesh, place_batch, share_of, unsplit, use_mesh
from biphasic_jax.train.state import flatten


def config_of(rows=16, accumulation=1, **mesh):
    config = tiny_config()
    with config.unlocked():
        config.batch.update(rows=rows, accumulation=accumulation)
        config.mesh.update(mesh)
    return config


@pytest.mark.parametrize(
    ("rows", "accumulation", "devices"),
    [(16, 1, 8), (16, 2, 8), (16, 4, 4), (12, 1, 6), (7, 1, 7), (3, 1, 3), (1, 1, 1)],
)
def test_by_default_as_many_devices_as_divide_a_micro_batch(rows, accumulation, devices):
    mesh = make_mesh(config_of(rows, accumulation))
    assert dict(mesh.shape) == {"data": devices, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert batch_shards(mesh) == devices


def test_one_axis_takes_what_the_others_leave():
    assert make_mesh(config_of(data=2, fsdp=-1)).shape["fsdp"] == 4
    assert make_mesh(config_of(fsdp=2, tensor=2)).shape["data"] == 2
    assert make_mesh(config_of(rows=6, fsdp=2)).shape["data"] == 3
    assert make_mesh(config_of(data=1, sequence=-1)).shape["sequence"] == 8


def test_axes_are_auto_and_in_order():
    mesh = make_mesh(config_of(data=2, fsdp=2, tensor=2))
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": 16, "fsdp": 2}, r"data=16, fsdp=2, tensor=1, sequence=1 needs 32 devices, there are 8"),
        ({"rows": 12, "data": 8}, r"batch\.rows=12"),
        ({"data": 1, "tensor": 2, "sequence": 3}, r"mesh\.sequence=3 must divide config\.data\.row_length=32"),
        ({"slices": 2}, r"mesh\.slices=2: the devices lie in 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error(settings, message):
    with pytest.raises(UserError, match=message):
        make_mesh(config_of(**settings))


def fake_mesh(owners, shape):
    """A mesh whose devices belong to the processes `owners`."""

    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    class Fake:
        devices = np.array([Device(p) for p in owners], object).reshape(shape)

    Fake.shape = dict(zip(AXES, shape, strict=True))
    return Fake


@pytest.mark.parametrize(
    ("owners", "shape", "shares"),
    [
        ([0, 0, 1, 1], (4, 1, 1, 1), [(0, 2), (1, 2)]),
        ([0, 0, 1, 1], (2, 2, 1, 1), [(0, 2), (1, 2)]),
        ([0, 0, 1, 1], (2, 1, 2, 1), [(0, 2), (1, 2)]),
        ([0, 0, 1, 1], (1, 1, 4, 1), [(0, 1), (0, 1)]),
        ([0, 1, 2, 3], (2, 1, 1, 2), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ([1, 1, 0, 0], (4, 1, 1, 1), [(1, 2), (0, 2)]),
        ([0] * 8, (2, 2, 2, 1), [(0, 1)]),
    ],
)
def test_h1_a_process_feeds_the_rows_that_its_devices_hold(owners, shape, shares):
    assert [share_of(fake_mesh(owners, shape), p) for p in range(len(shares))] == shares


def test_rows_that_processes_hold_in_part_are_an_error():
    with pytest.raises(UserError, match=r"data x fsdp be a multiple of the number of processes"):
        share_of(fake_mesh([0, 0, 0, 1, 1, 1], (3, 1, 2, 1)), 0)


def test_weights_optimizer_and_batch_really_lie_where_the_rules_say():
    stepping = Stepping("mlm", (2, 2, 2, 1))
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


def axes_of(*split):
    """A mesh shape of 2 along each of the axes."""
    return tuple(2 if axis in split else 1 for axis in AXES)


@pytest.mark.parametrize("split", [*itertools.combinations(AXES, 1), *itertools.combinations(AXES, 2)])
def test_each_axis_and_each_pair_really_splits_weights_optimizer_and_activations(split):
    """Of activations, the compiled program: left alone, the partitioner follows the weights and replicates rows."""
    stepping = Stepping("clm", axes_of(*split), model__width=48)  # a size that no other axis has
    with use_mesh(stepping.mesh):
        batch, state = place_batch(stepping.mesh, stepping.batch()), stepping.state()
        compiled = stepping.step.lower(state, batch, stepping.yes).compile()
        state, _ = compiled(state, batch, stepping.yes)
    params, opt = flatten(state.params), flatten(state.opt_state)
    m, parts = stepping.config.model, stepping.mesh.shape
    wanted = {
        "embedding": (stepping.vocabulary.size // parts["tensor"], m.width // parts["fsdp"]),
        "blocks/attention/q": (1, m.width // parts["fsdp"], m.heads * m.head_size // parts["tensor"]),
        "blocks/mlp/down": (1, m.ff_width // parts["tensor"], m.width // parts["fsdp"]),
    }
    for path, shape in wanted.items():
        for leaf in (params[path], opt[f"1/mu/{path}"], opt[f"1/nu/{path}"]):
            assert {shard.data.shape for shard in leaf.addressable_shards} == {shape}, path
    rows, length = stepping.rows // batch_shards(stepping.mesh), stepping.config.data.row_length
    text, groups = compiled.as_text(), m.heads // m.kv_heads
    assert f"f32[{rows},{length // parts['sequence']},{m.width}]" in text
    assert f"f32[{2 * rows},{length},{m.width}]" not in text
    if parts["sequence"] > 1:  # a part of the queries against all keys; no device ever has the features of whole rows
        assert f"f32[{rows},{length},{m.width}]" not in text
        assert f"f32[{rows},{m.kv_heads},{length // 2 * groups},{length}]" in text
        assert f"f32[{rows},{m.kv_heads},{length * groups},{length}]" not in text
    assert f"{stepping.rows * length},{stepping.vocabulary.size}]" not in text


def test_what_an_axis_does_not_divide_stays_whole_and_is_named():
    stepping = Stepping("mlm", (1, 1, 4, 1), model__ff_width=66)
    assert unsplit(stepping.mesh, stepping.model) == [
        f"blocks/mlp/{name} is whole over tensor: its mlp of 66 is no multiple of 4" for name in ("down", "gate", "up")
    ] + ["attention is whole over tensor: 1 key/value heads are no multiple of 4"]
    state, metrics = stepping(stepping.state(), stepping.batch())
    assert state.params["blocks"]["mlp"]["up"].sharding.is_fully_replicated
    assert metrics["finite"]


def test_a_batch_is_placed_row_for_row():
    stepping = Stepping("clm", (8, 1, 1, 1))
    batch = stepping.batch()
    placed = place_batch(stepping.mesh, batch)
    for name, array in batch.items():
        np.testing.assert_array_equal(jax.device_get(placed[name]), array)


def test_r5_eight_devices_then_four_then_eight_lose_and_repeat_nothing(tmp_path):
    """Killed in either phase, and taken up on another mesh; the same rows, and the losses of the run on one device."""
    for devices, mesh, patch in (
        (8, "mesh.fsdp=2", kill_at("biphasic_jax.train.loop", "Loop.update", 15)),
        (4, "mesh.sequence=2", kill_at("biphasic_jax.train.loop", "Loop.update", 15)),
        (8, "mesh.tensor=2", ""),
    ):
        result = train(tmp_path, "--quiet", f"--config.{mesh}", patch=patch, devices=devices)
        assert result.returncode == (-signal.SIGKILL if patch else 0), result.stderr
    mine, theirs = lines(tmp_path), lines(straight())
    assert [(line["step"], line["split"], line.get("rows")) for line in mine] == [
        (line["step"], line["split"], line.get("rows")) for line in theirs
    ]
    for line, other in zip(mine, theirs, strict=True):
        assert line["targets"] == other["targets"]
        np.testing.assert_allclose(line["loss"], other["loss"], rtol=1e-5)
