"""The chunked loss against the plain one: values, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from biphasic_jax.model.head import chunked_cross_entropy, head_kernel, prediction_loss, project, shards_of
from biphasic_jax.model.transformer import ModelConfig, Transformer

G, P, D, V = 2, 37, 12, 53


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(G, P, D)), dtype)
    kernel = jnp.asarray(rng.normal(size=(D, V)), np.float32)
    targets = rng.integers(0, V, (G, P)).astype(np.int32)
    weights = (rng.random((G, P)) < 0.7).astype(np.float32) * rng.choice([1.0, 0.25], (G, P)).astype(np.float32)
    return x, kernel, targets, weights


def plain(x, kernel, targets, weights, z_loss):
    """Full logits, optax's cross-entropy."""
    logits = project(x, kernel)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    z = z_loss * jax.nn.logsumexp(logits, -1) ** 2
    correct = logits.argmax(-1) == targets
    return (weights * (loss + z)).sum(), {"correct": (weights * correct).sum(), "z_loss": (weights * z).sum()}


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 1000])
def test_values_and_gradients_equal_the_plain_loss(chunk, z_loss):
    x, kernel, targets, weights = inputs()

    def ours(x, kernel):
        loss, sums = chunked_cross_entropy(x, kernel, targets, weights, chunk, z_loss)
        return 0.5 * loss, sums

    def theirs(x, kernel):
        loss, sums = plain(x, kernel, targets, weights, z_loss)
        return 0.5 * loss, sums

    (loss, sums), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(x, kernel)
    (their_loss, their_sums), their_gradients = jax.value_and_grad(theirs, (0, 1), has_aux=True)(x, kernel)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
    np.testing.assert_allclose(ours(x, kernel)[0], their_loss, rtol=1e-5)  # not under differentiation
    for name, value in their_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5)
    for ours_leaf, theirs_leaf in zip(gradients, their_gradients, strict=True):
        np.testing.assert_allclose(ours_leaf, theirs_leaf, atol=1e-5)


def test_bf16_features_are_multiplied_in_bf16_and_summed_in_f32():
    x, kernel, targets, weights = inputs(jnp.bfloat16)

    def loss(x, kernel):
        return chunked_cross_entropy(x, kernel, targets, weights, 8, 0.0)[0]

    value, (dx, dkernel) = jax.value_and_grad(loss, (0, 1))(x, kernel)
    assert (value.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    expected, _ = plain(x.astype(jnp.float32), rounded, targets, weights, 0.0)
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_a_target_without_weight_may_be_anything():
    x, kernel, targets, weights = inputs()
    wild = np.where(weights == 0, np.int32(-100), targets)
    value = jax.value_and_grad(lambda x: chunked_cross_entropy(x, kernel, wild, weights, 8, 0.0)[0])(x)
    expected = jax.value_and_grad(lambda x: chunked_cross_entropy(x, kernel, targets, weights, 8, 0.0)[0])(x)
    jax.tree.map(np.testing.assert_array_equal, value, expected)


def test_m5_no_target_gives_zero_loss_and_zero_gradients():
    x, kernel, targets, weights = inputs()

    def loss(x, kernel):
        return chunked_cross_entropy(x, kernel, targets, 0 * weights, 8, 0.1)[0]

    value, gradients = jax.value_and_grad(loss, (0, 1))(x, kernel)
    assert value == 0
    assert all((g == 0).all() for g in gradients)


def test_a_tie_is_not_correct():
    _, sums = chunked_cross_entropy(
        jnp.zeros((1, 4, D)), jnp.zeros((D, V)), jnp.zeros((1, 4), int), jnp.ones((1, 4)), 4, 0
    )
    assert sums["correct"] == 0


def test_the_logits_of_all_positions_never_exist():
    rows, length, chunk, vocab = 4, 512, 64, 4096
    config = ModelConfig(
        layers=1, width=16, ff_width=16, heads=1, kv_heads=1, head_size=8, vocab_size=vocab, loss_chunk=chunk
    )
    model = Transformer(config)
    params = jax.eval_shape(lambda: model.init_params(0))
    shape = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = {"tokens": shape, "segments": shape, "targets": shape, "weights": shape}

    def temporaries(loss):
        compiled = jax.jit(jax.grad(loss)).lower(params, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def full(params, batch):
        logits = model.apply({"params": params}, batch["tokens"], batch["segments"], causal=True)
        return plain(logits, jnp.eye(vocab), batch["targets"], batch["weights"], 0.0)[0]

    logits_bytes = 4 * rows * length * vocab
    assert temporaries(lambda p, b: prediction_loss(model, p, b, causal=True)[0]) < logits_bytes / 2
    assert temporaries(full) >= logits_bytes


@pytest.mark.parametrize(("groups", "tied"), [(1, False), (4, True)])
def test_only_the_predicted_positions_count_and_groups_do_not_matter(groups, tied):
    config = ModelConfig(
        layers=2, width=16, ff_width=24, heads=2, kv_heads=1, head_size=8, vocab_size=V, tied=tied, loss_chunk=8
    )
    model = Transformer(config)
    params = jax.jit(model.init_params)(0)
    rng = np.random.default_rng(0)
    rows, length, room = 4, 20, 40 // groups
    tokens, all_targets = rng.integers(0, V, (2, rows, length))
    segments = np.where(np.arange(length) < 17, 1, 0) * np.ones((rows, 1), int)
    all_weights = (rng.random((rows, length)) < 0.3) * (segments > 0)
    predict, targets, weights = (np.zeros((groups, room), t) for t in (np.int32, np.int32, np.float32))
    for g in range(groups):
        where = np.flatnonzero(all_weights.reshape(groups, -1)[g])
        predict[g, : len(where)] = where
        targets[g, : len(where)] = all_targets.reshape(groups, -1)[g, where]
        weights[g, : len(where)] = 1
    gathered = dict(tokens=tokens, segments=segments, predict=predict, targets=targets, weights=weights)

    def ours(params):
        loss, weight, sums = prediction_loss(model, params, gathered, causal=False)
        return loss, (weight, sums)

    def theirs(params):
        logits = model.apply({"params": params}, tokens, segments, causal=False)
        nothing = optax.softmax_cross_entropy_with_integer_labels(logits, all_targets)
        return (nothing * all_weights).sum(), ((logits.argmax(-1) == all_targets) * all_weights).sum()

    (loss, (weight, sums)), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (their_loss, correct), their_gradients = jax.jit(jax.value_and_grad(theirs, has_aux=True))(params)
    assert weight == all_weights.sum()
    assert sums["correct"] == correct
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, their_gradients)


def test_the_kernel_of_a_tied_head_is_the_embedding():
    params = {"embedding": jnp.arange(6.0).reshape(3, 2)}
    np.testing.assert_array_equal(head_kernel(params), params["embedding"].T)


def test_without_a_mesh_the_batch_has_one_shard():
    assert shards_of("batch") == shards_of("length") == 1
