"""Masks, positions, and every backend against attention written out with loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphasic_jax.errors import UserError
from biphasic_jax.model.attention import BACKENDS, attention, attention_mask, choose_backend, positions_from_segments

SEGMENTS = {
    "one segment": None,
    "padded": [[1] * 13, [1] * 9 + [0] * 4, [1] + [0] * 12],
    "packed": [[1] * 5 + [2] * 8, [1] * 2 + [2] * 4 + [3] * 3 + [0] * 4, [0] * 3 + [4] * 10],
    "empty row": [[1] * 13, [0] * 13, [1] * 6 + [2] * 7],
}
HEADS = {"mha": (2, 2), "gqa": (6, 2), "mqa": (3, 1)}


def written_out(q, k, v, segments, causal):
    """One query at a time, in f64."""
    B, L, H, h = q.shape
    out = np.zeros(q.shape)
    for b, i, n in np.ndindex(B, L, H):
        seen = [
            j
            for j in range(L)
            if (segments is None or (segments[b][j] == segments[b][i] != 0)) and (j <= i or not causal)
        ]
        if seen:
            group = n // (H // k.shape[2])
            scores = np.array([q[b, i, n] @ k[b, j, group] for j in seen]) / np.sqrt(h)
            weights = np.exp(scores - scores.max())
            out[b, i, n] = sum(w * v[b, j, group] for w, j in zip(weights / weights.sum(), seen, strict=True))
    return out


def arrays(heads, kv_heads, dtype=np.float32, rows=3, length=13, size=8):
    rng = np.random.default_rng(0)
    shapes = ((rows, length, n, size) for n in (heads, kv_heads, kv_heads))
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("heads", HEADS)
def test_a4_values_equal_attention_written_out(backend, causal, segments, heads):
    q, k, v = arrays(*HEADS[heads])
    s = SEGMENTS[segments]
    out = attention(q, k, v, None if s is None else jnp.asarray(s), causal=causal, backend=backend)
    np.testing.assert_allclose(out, written_out(*map(np.float64, (q, k, v)), s, causal), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_a4_gradients_equal_finite_differences(backend, causal, segments):
    qkv = arrays(4, 2, rows=3)
    s = None if SEGMENTS[segments] is None else jnp.asarray(SEGMENTS[segments])
    probe = np.random.default_rng(1).normal(size=qkv[0].shape)

    @jax.jit
    def loss(qkv):
        return (attention(*qkv, s, causal=causal, backend=backend) * probe).sum()

    gradients = jax.jit(jax.grad(loss))(qkv)
    for n in range(3):
        direction = np.random.default_rng(n).normal(size=qkv[n].shape).astype(np.float32)
        up, down = (tuple(x + e * direction if i == n else x for i, x in enumerate(qkv)) for e in (1e-2, -1e-2))
        slope = (loss(up) - loss(down)) / 2e-2
        np.testing.assert_allclose((gradients[n] * direction).sum(), slope, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a2_padding_gets_exact_zeros_and_gives_none_a_gradient(backend, dtype, causal):
    qkv = arrays(4, 2, dtype)
    s = jnp.asarray(SEGMENTS["empty row"])

    def loss(qkv):
        out = attention(*qkv, s, causal=causal, backend=backend)
        return (out.astype(jnp.float32) ** 2).sum(), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(qkv)
    assert out.dtype == dtype
    for x in (out, *gradients):
        assert np.isfinite(x.astype(np.float32)).all()
        assert (x[1] == 0).all()
        assert (x[0] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_c3_no_segments_and_one_segment_agree(backend, causal):
    q, k, v = arrays(4, 2)
    without = attention(q, k, v, None, causal=causal, backend=backend)
    within = attention(q, k, v, jnp.ones(q.shape[:2], jnp.int32), causal=causal, backend=backend)
    np.testing.assert_allclose(without, within, atol=1e-6)


def test_c3_the_mode_has_no_default():
    q, k, v = arrays(4, 2)
    with pytest.raises(TypeError, match="causal"):
        attention(q, k, v, None)


def test_p3_the_mask_isolates_whatever_the_positions():
    mask = np.asarray(attention_mask(jnp.asarray([[1, 1, 2, 2, 0]]), 5, causal=False))[0]
    expected = np.zeros((5, 5), bool)
    expected[:2, :2] = expected[2:4, 2:4] = True
    np.testing.assert_array_equal(mask, expected)
    causal = np.asarray(attention_mask(jnp.asarray([[1, 1, 2, 2, 0]]), 5, causal=True))[0]
    np.testing.assert_array_equal(causal, np.tril(expected))


def test_no_mask_is_made_where_all_see_all():
    assert attention_mask(None, 5, causal=False) is None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_p3_positions_restart_in_each_segment(lengths):
    segments = [i + 1 for i, n in enumerate(lengths) for _ in range(n)]
    segments += [0] * (42 - len(segments))
    expected = [i for n in lengths for i in range(n)]
    positions = positions_from_segments(np.array([segments] * 2))
    assert positions.dtype == np.int32
    assert positions[1, : len(expected)].tolist() == expected


def test_a8_auto_says_what_it_took():
    name, reason = choose_backend("auto")
    assert name in BACKENDS
    assert reason.startswith("auto")


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_a8_a_backend_that_is_not_there_is_an_error(name):
    with pytest.raises(UserError, match=f"model.attention='{name}'.*xla"):
        choose_backend(name)
