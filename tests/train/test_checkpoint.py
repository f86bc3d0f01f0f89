import pathlib
import shutil

import jax
import numpy as np
import pytest
from held_out import tiny
from stepping import Stepping, assert_same_bits

from biphasic_jax import build, load
from biphasic_jax.config import default_config, to_dict
from biphasic_jax.errors import UserError
from biphasic_jax.train.checkpoint import (
    Checkpointer,
    complete_steps,
    find,
    read_meta,
    read_params,
    read_state,
    read_tokenizer,
    read_vocabulary,
)
from biphasic_jax.train.mesh import state_shardings
from biphasic_jax.train.state import TrainState, flatten


def like(stepping, state):
    """The abstract state, laid out over the mesh of `stepping`."""
    shardings = state_shardings(stepping.mesh, stepping.model, state)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=s), state, shardings)


def random_state(stepping, step=7):
    random = np.random.default_rng(step)
    state = stepping.state()
    noise = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), jax.device_get(state))
    state = TrainState(np.int32(step), noise.params, noise.opt_state)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, stepping.state()))


def meta_of(stepping):
    v = stepping.vocabulary
    vocabulary = {"size": v.size, "bos": v.bos, "eos": v.eos, "pad": v.pad, "mask": v.mask, "mask_how": "known"}
    return {"config": to_dict(stepping.config), "vocabulary": vocabulary}


@pytest.fixture(scope="module")
def stepping():
    return Stepping("clm", (2, 2, 2, 1))


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(str(tmp_path / "run" / "checkpoints"), keep=lambda step, steps: True)
    yield made
    made.close()


def save(checkpointer, stepping, step=7, state=None):
    state = random_state(stepping, step) if state is None else state
    checkpointer.save(step, state, meta_of(stepping), tiny().tokenizer.to_str())
    checkpointer.wait()
    return state


def test_a_state_comes_back_bit_for_bit_on_any_mesh(checkpointer, stepping):
    state = save(checkpointer, stepping)
    for shape in ((2, 2, 2, 1), (1, 1, 1, 1), (8, 1, 1, 1)):
        other = Stepping("clm", shape)
        back = read_state(checkpointer.path(7), like(other, other.state()), 7)
        assert_same_bits(back, state)
        for path, leaf in flatten(back).items():
            assert leaf.sharding.mesh == other.mesh, path


def test_muons_state_comes_back_too(checkpointer):
    muon = Stepping("clm", optimizer__name="muon")
    state = save(checkpointer, muon)
    assert_same_bits(read_state(checkpointer.path(7), like(muon, muon.state()), 7), state)


def test_an_asynchronous_save_holds_the_state_of_its_step_whatever_is_trained_meanwhile(checkpointer):
    stepping = Stepping("clm")
    state, batch = stepping.state(), stepping.batch()
    wanted = {}
    for step in range(3):
        wanted[step] = jax.device_get(state)
        checkpointer.save(step, state, meta_of(stepping), "{}")
        state, _ = stepping(state, batch)  # donates the arrays that are being written
    checkpointer.wait()
    for step, was in wanted.items():
        assert_same_bits(read_state(checkpointer.path(step), like(stepping, state), step), was)


def test_load_takes_a_run_or_a_checkpoint_and_gives_model_weights_tokenizer(checkpointer, stepping, tmp_path):
    save(checkpointer, stepping, 3)
    state = save(checkpointer, stepping, 7)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "7"):
        model, params, tokenizer = load(path)
        assert_same_bits(params, state.params)
        assert model == stepping.model
        assert tokenizer.encode("a word").ids == tiny().tokenizer.encode("a word").ids
    moved = shutil.copytree(tmp_path / "run" / "checkpoints" / "3", tmp_path / "alone")
    assert load(moved)[0] == stepping.model
    tokens = np.array([[5, 6, 7]], np.int32)
    assert model.apply({"params": params}, tokens, causal=True).shape == (1, 3, model.config.vocab_size)


def test_the_vocabulary_of_a_checkpoint_is_the_rows(checkpointer, stepping):
    save(checkpointer, stepping)
    folder = checkpointer.path(7)
    vocabulary = read_vocabulary(read_meta(folder), read_tokenizer(folder))
    wanted = stepping.vocabulary
    assert (vocabulary.size, vocabulary.mask, vocabulary.pad) == (wanted.size, wanted.mask, wanted.pad)
    np.testing.assert_array_equal(vocabulary.special_V, wanted.special_V)


def test_r11_what_has_no_commit_marker_is_no_checkpoint(checkpointer, stepping, tmp_path):
    save(checkpointer, stepping, 3)
    save(checkpointer, stepping, 7)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "7" / "commit_success.txt").unlink()
    (folder / "99").mkdir()
    (folder / "notes").mkdir()
    with pytest.warns(UserWarning, match="99 is not a complete checkpoint"):
        assert complete_steps(str(folder)) == [3]
    with pytest.warns(UserWarning, match="7 is not a complete checkpoint"):
        assert find(str(tmp_path / "run")) == str(folder / "3")
    state = save(checkpointer, stepping, 7)  # over the incomplete one of that name
    assert_same_bits(read_state(str(folder / "7"), like(stepping, stepping.state()), 7), state)


def test_r12_every_missing_extra_and_reshaped_leaf_is_named(checkpointer, stepping):
    save(checkpointer, stepping)
    wanted = like(stepping, stepping.state()).params
    head = wanted.pop("head")
    wanted["tail"] = head
    wanted["blocks"]["mlp"]["up"] = jax.ShapeDtypeStruct((1, 32, 65), np.float32)
    with pytest.raises(UserError) as error:
        read_params(checkpointer.path(7), wanted)
    assert "tail is missing; head is extra; blocks/mlp/up has shape (1, 32, 64), not (1, 32, 65)" in str(error.value)


def test_what_is_not_kept_goes_and_half_a_deletion_is_no_checkpoint(tmp_path, stepping):
    checkpointer = Checkpointer(str(tmp_path), keep=lambda step, steps: step == 2 or step in steps[-2:])
    for step in range(1, 7):
        save(checkpointer, stepping, step)
    assert complete_steps(str(tmp_path)) == [2, 5, 6]
    checkpointer.close()
    shutil.copytree(tmp_path / "5", tmp_path / "4.deleted")
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    Checkpointer(str(tmp_path), keep=lambda step, steps: True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "5", "6"]


def test_paths_that_are_none_are_errors_of_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        find(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no complete checkpoint"):
        find(str(tmp_path))


def test_a_damaged_checkpoint_is_an_error_that_names_it(checkpointer, stepping):
    save(checkpointer, stepping)
    for file in pathlib.Path(checkpointer.path(7), "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(UserError, match=r"checkpoints/7: params cannot be read"):
        read_params(checkpointer.path(7), like(stepping, stepping.state()).params)


def test_build_gives_random_weights_of_a_size_or_a_config():
    model, params = build("tiny", vocab_size=99, seed=1)
    assert params["embedding"].shape == (99, 64)
    assert not np.array_equal(params["embedding"], build("tiny", vocab_size=99, seed=2)[1]["embedding"])
    config = default_config()
    config.model.update(layers=1, width=8, ff_width=8, heads=1, kv_heads=1, head_size=8, vocab_size=11)
    model, params = build(config)
    assert model.config.vocab_size == 11
    config.model.vocab_size = 0
    config.data.tokenizer = "tokenizer.json"
    with pytest.raises(UserError, match="vocab_size"):
        build(config)
