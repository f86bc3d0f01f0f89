"""The model as its users see it: the modes, isolation, padding, the tree, its variants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from biphasic_jax.config import default_config
from biphasic_jax.model.head import prediction_loss
from biphasic_jax.model.transformer import ModelConfig, Transformer

V = 61
CONFIG = ModelConfig(
    layers=2, width=32, ff_width=48, heads=4, kv_heads=2, head_size=12, vocab_size=V, init_std=0.2, loss_chunk=16
)
MODEL = Transformer(CONFIG)
PARAMS = jax.jit(MODEL.init_params)(0)
MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def tokens_of(rows, length, seed=0):
    return np.random.default_rng(seed).integers(0, V, (rows, length)).astype(np.int32)


def changed(tokens, where):
    """Other tokens at `where`, in a copy: a computation that is under way may still read the array itself."""
    other = tokens.copy()
    other[where] = (other[where] + 1) % V
    return other


@jax.jit(static_argnames=("causal", "model"))
def logits_of(params, tokens, segments=None, positions=None, *, causal, model=MODEL):
    return model.apply({"params": params}, tokens, segments, positions, causal=causal)


@jax.jit(static_argnames=("causal", "model"))
def loss_and_gradients(params, tokens, segments, weights, *, causal=False, model=MODEL):
    batch = {"tokens": tokens, "segments": segments, "targets": tokens, "weights": weights}
    return jax.value_and_grad(lambda p: prediction_loss(model, p, batch, causal)[0])(params)


def finite(tree):
    return all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))


# Causality


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_c1_causal_logits_do_not_depend_on_later_tokens(rows, padded):
    tokens = tokens_of(rows, 16)
    segments = np.ones_like(tokens) if not padded else np.where(np.arange(16) < 13, 1, 0) * np.ones_like(tokens)
    before = logits_of(PARAMS, tokens, segments, causal=True)
    after = logits_of(PARAMS, changed(tokens, np.s_[:, 9]), segments, causal=True)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:13] != after[:, 9:13]).any(-1).all()


def test_c1_causal_loss_on_random_ids_is_not_below_log_v():
    tokens = tokens_of(16, 64)
    loss, weight, _ = prediction_loss(MODEL, PARAMS, _shifted(tokens), causal=True)
    assert loss / weight > np.log(V)


def _shifted(tokens):
    targets = np.roll(tokens, -1, axis=1)
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    return {"tokens": tokens, "segments": np.ones_like(tokens), "targets": targets, "weights": weights}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_c2_bidirectional_logits_do_depend_on_later_tokens(rows, padded):
    tokens = tokens_of(rows, 16)
    segments = np.ones_like(tokens) if not padded else np.where(np.arange(16) < 13, 1, 0) * np.ones_like(tokens)
    before = logits_of(PARAMS, tokens, segments, causal=False)
    after = logits_of(PARAMS, changed(tokens, np.s_[:, 9]), segments, causal=False)
    assert (before[:, :9] != after[:, :9]).any(-1).all()


def test_c3_the_mode_has_no_default():
    tokens = tokens_of(1, 4)
    for call in (MODEL.apply, MODEL.features):
        with pytest.raises(TypeError, match="causal"):
            call({"params": PARAMS}, tokens)


@MODES
def test_c3_no_segments_and_one_segment_agree(causal):
    tokens = tokens_of(2, 16)
    without = logits_of(PARAMS, tokens, causal=causal)
    within = logits_of(PARAMS, tokens, np.ones_like(tokens), causal=causal)
    np.testing.assert_allclose(without, within, atol=1e-5)


# Packing


@MODES
def test_p2_packed_logits_equal_unpacked_logits(causal):
    first, second = tokens_of(1, 7, 1), tokens_of(1, 11, 2)
    tokens = np.concatenate([first, second, np.zeros((1, 2), np.int32)], 1)
    segments = np.array([[1] * 7 + [2] * 11 + [0] * 2])
    packed = logits_of(PARAMS, tokens, segments, causal=causal)
    np.testing.assert_allclose(packed[:, :7], logits_of(PARAMS, first, causal=causal), atol=1e-5)
    np.testing.assert_allclose(packed[:, 7:18], logits_of(PARAMS, second, causal=causal), atol=1e-5)


@MODES
def test_p2_changing_one_document_leaves_the_other_bit_equal(causal):
    tokens, segments = tokens_of(2, 18), np.array([[1] * 7 + [2] * 11] * 2)
    before = logits_of(PARAMS, tokens, segments, causal=causal)
    after = logits_of(PARAMS, changed(tokens, np.s_[:, :7]), segments, causal=causal)
    np.testing.assert_array_equal(before[:, 7:], after[:, 7:])
    assert (before[:, :7] != after[:, :7]).any()


def test_p3_positions_count_apart_from_isolation():
    tokens, segments = tokens_of(1, 18), np.array([[1] * 7 + [2] * 11])
    restarting = np.array([[*range(7), *range(11)]])
    default = logits_of(PARAMS, tokens, segments, causal=False)
    explicit = logits_of(PARAMS, tokens, segments, restarting, causal=False)
    np.testing.assert_array_equal(default, explicit)
    # Isolated but counted through: rotary attention sees distances alone, so nothing moves ...
    running = logits_of(PARAMS, tokens, segments, np.arange(18)[None], causal=False)
    np.testing.assert_allclose(default, running, atol=1e-4)
    # ... while distances that differ do, and so does restarting without isolation.
    stretched = logits_of(PARAMS, tokens, segments, 3 * restarting, causal=False)
    assert np.abs(default - stretched).max() > 1e-2
    open_running = logits_of(PARAMS, tokens, None, np.arange(18)[None], causal=False)
    open_restarting = logits_of(PARAMS, tokens, None, restarting, causal=False)
    assert np.abs(open_running - open_restarting).max() > 1e-2


# Padding


@pytest.mark.parametrize(("dtype", "causal"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize("padding", [0, 50, 99])
def test_a1_loss_and_gradients_are_finite_with_padding(padding, dtype, causal):
    model = Transformer(dataclasses.replace(CONFIG, dtype=dtype))
    tokens = tokens_of(2, 100)
    segments = np.where(np.arange(100) < 100 - padding, 1, 0) * np.ones_like(tokens)
    loss, gradients = loss_and_gradients(
        PARAMS, tokens, segments, (segments > 0).astype(np.float32), causal=causal, model=model
    )
    assert loss > 0
    assert finite((loss, gradients))


@pytest.mark.parametrize(("dtype", "causal"), [("float32", False), ("bfloat16", True)])
def test_a2_a_padded_row_is_zero_both_ways_and_touches_no_other(dtype, causal):
    model = Transformer(dataclasses.replace(CONFIG, dtype=dtype))
    tokens = tokens_of(3, 16)
    segments = np.ones_like(tokens)
    segments[1] = 0

    @jax.jit
    def reading_all(params, tokens, segments):  # a loss that reads padding too
        def loss(params):
            x = model.features({"params": params}, tokens, segments, causal=causal).astype(jnp.float32)
            return ((x + 1) ** 2).sum(), x

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, features), gradients = reading_all(PARAMS, tokens, segments)
    assert (features[1] == 0).all()
    assert (features[0] != 0).any()
    other = changed(tokens, np.s_[1])
    (_, same_features), same_gradients = reading_all(PARAMS, other, segments)
    jax.tree.map(np.testing.assert_array_equal, (features, gradients), (same_features, same_gradients))
    _, alone = reading_all(PARAMS, tokens, 0 * segments)
    assert finite(alone)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves((alone["blocks"], alone["embedding"])))


@MODES
def test_a6_real_positions_do_not_depend_on_padding_or_batch_size(causal):
    tokens = tokens_of(2, 11)
    expected = logits_of(PARAMS, tokens, np.ones_like(tokens), causal=causal)
    for rows, length in ((2, 32), (5, 13)):
        padded, segments = tokens_of(rows, length, 3), np.zeros((rows, length), np.int32)
        padded[:2, :11], segments[:2, :11] = tokens, 1
        logits = logits_of(PARAMS, padded, segments, causal=causal)
        np.testing.assert_allclose(logits[:2, :11], expected, atol=1e-4)


def test_a6_loss_and_gradients_do_not_depend_on_padding_or_batch_size():
    tokens = tokens_of(2, 11)
    loss, gradients = loss_and_gradients(PARAMS, tokens, np.ones_like(tokens), np.ones(tokens.shape))
    padded, segments = tokens_of(5, 16, 3), np.zeros((5, 16), np.int32)
    padded[:2, :11], segments[:2, :11] = tokens, 1
    same = loss_and_gradients(PARAMS, padded, segments, 1.0 * segments)
    np.testing.assert_allclose(same[0], loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), same[1], gradients)


def test_m3_the_content_of_padding_does_not_reach_the_loss():
    tokens = tokens_of(2, 16)
    segments = np.where(np.arange(16) < 10, 1, 0) * np.ones_like(tokens)
    before = loss_and_gradients(PARAMS, tokens, segments, 1.0 * segments)
    wild = np.where(segments == 0, V + 1000, tokens)  # not even ids
    jax.tree.map(np.testing.assert_array_equal, before, loss_and_gradients(PARAMS, wild, segments, 1.0 * segments))


# The tree and its variants


def test_the_tree_is_as_documented():
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(PARAMS)
    }
    assert shapes == {
        "embedding": (V, 32),
        "blocks/attention_norm/scale": (2, 32),
        "blocks/attention/q": (2, 32, 48),
        "blocks/attention/k": (2, 32, 24),
        "blocks/attention/v": (2, 32, 24),
        "blocks/attention/o": (2, 48, 32),
        "blocks/mlp_norm/scale": (2, 32),
        "blocks/mlp/gate": (2, 32, 48),
        "blocks/mlp/up": (2, 32, 48),
        "blocks/mlp/down": (2, 48, 32),
        "final_norm/scale": (32,),
        "head": (32, V),
    }
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(PARAMS))


@pytest.mark.parametrize("tied", [False, True])
def test_every_axis_has_a_logical_name(tied):
    model = Transformer(dataclasses.replace(CONFIG, tied=tied))
    params = jax.eval_shape(lambda: model.init_params(0))
    axes = model.logical_axes()
    named = jax.tree.map(lambda leaf, names: len(leaf.shape) == len(names), params, axes)
    assert jax.tree.all(named)
    assert axes["blocks"]["mlp"]["down"] == ("layers", "mlp", "embed")
    assert axes["embedding"] == ("vocab", "embed")


def test_initial_weights_are_normal_and_differ_by_layer_and_seed():
    model = Transformer(ModelConfig(4, 64, 128, 4, 4, 16, 500))
    init = jax.jit(model.init_params)
    params = init(3)
    for leaf in (*params["blocks"]["attention"].values(), *params["blocks"]["mlp"].values(), params["embedding"]):
        assert abs(leaf.std() - 0.02) < 1e-3
        assert abs(leaf.mean()) < 1e-3
    assert (params["final_norm"]["scale"] == 1).all()
    gate = params["blocks"]["mlp"]["gate"]
    assert (gate[0] != gate[1]).mean() > 0.99
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), params, model.init_params(3))
    assert (init(4)["embedding"] != params["embedding"]).any()


VARIANTS = [(True, "dots"), (True, "full"), (False, "none"), (False, "full")]


@pytest.mark.parametrize(("scan_layers", "remat"), VARIANTS)
def test_scan_and_remat_change_neither_tree_nor_values(scan_layers, remat):
    model = Transformer(dataclasses.replace(CONFIG, scan_layers=scan_layers, remat=remat))
    tree = jax.eval_shape(lambda: model.init_params(0))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, tree, PARAMS))
    tokens = tokens_of(2, 16)
    segments = np.array([[1] * 9 + [2] * 7, [1] * 12 + [0] * 4])
    expected = loss_and_gradients(PARAMS, tokens, segments, 1.0 * (segments > 0))
    actual = loss_and_gradients(PARAMS, tokens, segments, 1.0 * (segments > 0), model=model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


def test_remat_keeps_less_for_the_backward_pass():
    def saved(remat):
        model = Transformer(dataclasses.replace(CONFIG, layers=8, remat=remat, vocab_size=8))
        shape = jax.ShapeDtypeStruct((4, 256), jnp.int32)
        params = jax.eval_shape(lambda: model.init_params(0))
        lowered = loss_and_gradients.lower(params, shape, shape, shape, model=model)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    none, dots, full = (saved(remat) for remat in ("none", "dots", "full"))
    assert full < dots < none


@MODES
def test_logits_are_f32_and_near_in_bf16(causal):
    model = Transformer(dataclasses.replace(CONFIG, dtype="bfloat16", init_std=0.05))
    params, tokens = model.init_params(0), tokens_of(2, 16)
    logits = logits_of(params, tokens, causal=causal, model=model)
    assert logits.dtype == jnp.float32
    features = model.features({"params": params}, tokens, causal=causal)
    assert features.dtype == jnp.bfloat16
    exact = logits_of(params, tokens, causal=causal)
    assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()


def test_features_may_be_asked_for_in_two_ways():
    tokens, segments = tokens_of(2, 8), np.ones((2, 8), np.int32)
    direct = MODEL.features({"params": PARAMS}, tokens, segments, causal=True)
    by_name = MODEL.apply({"params": PARAMS}, tokens, segments, causal=True, method="features")
    np.testing.assert_array_equal(direct, by_name)
    with pytest.raises(ValueError, match="logitz"):
        MODEL.apply({"params": PARAMS}, tokens, segments, causal=True, method="logitz")


def test_a_model_config_is_read_off_a_config():
    config = default_config()
    made = ModelConfig.from_config(config.model, vocab_size=77, z_loss=1e-4)
    assert (made.vocab_size, made.z_loss, made.width) == (77, 1e-4, config.model.width)
    assert hash(Transformer(made)) == hash(Transformer(dataclasses.replace(made)))
