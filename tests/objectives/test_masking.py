"""The pure corruptions: where they may reach, how often, and that each position has the same chance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import MASK, row_batch, vocabulary

from biphasic_jax.objectives import masking

SPANS = masking.Spans.geometric(5.0, 10)
rates = st.floats(0.02, 1.0)


@st.composite
def rows_of_stretches(draw):
    """(segments_L, allowed_L) of one row: runs of a segment each, allowed or not, padding last."""
    runs = draw(st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.booleans()), min_size=1, max_size=12))
    segments, allowed, segment = [], [], 1
    for length, allow, next_segment in runs:
        segment += next_segment
        segments += [segment] * length
        allowed += [allow] * length
    padding = draw(st.integers(0, 9))
    return np.array(segments + [0] * padding, np.int32), np.array(allowed + [False] * padding)


def test_ordinary_positions_are_real_and_not_special():
    rows, v = row_batch(), vocabulary()
    allowed_BxL = masking.ordinary_positions(rows.tokens_BxL, rows.segments_BxL, v.special_V)
    for tokens_L, segments_L, allowed_L in zip(rows.tokens_BxL, rows.segments_BxL, allowed_BxL, strict=True):
        for token, segment, allowed in zip(tokens_L, segments_L, allowed_L, strict=True):
            assert allowed == (segment > 0 and token not in (0, 1, 2, 3, *range(100, 110)))


def test_words_begin_where_they_must():
    v = vocabulary()
    # word starts: multiples of 3; 100 is special; a segment's first token begins a word whatever it is
    tokens = np.array([[7, 9, 10, 11, 100, 13, 12, 14, 16, 17, 3, 3]])
    segments = np.array([[1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 0]])
    allowed = masking.ordinary_positions(tokens, segments, v.special_V)
    heads, head = masking.word_heads(tokens, segments, allowed, v.word_start_V)
    assert np.flatnonzero(heads[0]).tolist() == [0, 1, 5, 6, 8]
    assert head[0][allowed[0]].tolist() == [0, 1, 1, 1, 5, 6, 6, 8, 8]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 30), seed=st.integers(0, 10**6))
def test_choosing_exactly(count, seed):
    random = np.random.default_rng(seed)
    allowed = random.random((1, 40)) < 0.8
    count = min(count, int(allowed.sum()))
    draw = random.random((1, 40), dtype=np.float32)
    chosen = masking.choose_exactly(draw, allowed, [count])
    assert chosen.sum() == count
    assert not np.any(chosen & ~allowed)
    if 0 < count < allowed.sum():
        assert draw[chosen].max() <= draw[allowed & ~chosen].min()


def test_exact_counts_round_without_bias():
    allowed = np.arange(40)[None, :] < np.full((4000, 1), 13)
    counts = np.array(masking.exact_counts(allowed, 0.4, [np.random.default_rng(i) for i in range(4000)]))
    assert set(counts) == {5, 6}
    assert abs(counts.mean() - 5.2) < 4 * 0.4 / np.sqrt(4000)


def test_span_lengths_are_the_published_ones():
    """SpanBERT's p = 0.2 truncated at 10 has a mean of 3.8."""
    assert pytest.approx(3.797, abs=1e-3) == SPANS.mean
    assert SPANS.length_cdf_K[0] == pytest.approx(0.2 / (1 - 0.8**10))


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.4, 0.75])
def test_spans_keep_their_length_and_do_not_touch(rate):
    """In one long stretch each run of selected positions is one drawn span."""
    selected = SPANS.select(np.random.default_rng(0), np.ones(200_000, int), np.ones(200_000, bool), rate)
    edges = np.flatnonzero(np.diff(selected.astype(int), prepend=0, append=0))
    lengths = np.diff(edges)[::2][1:-1]
    assert lengths.max() == 10
    shares = np.bincount(lengths, minlength=11)[1:] / len(lengths)
    assert np.abs(shares - np.diff(SPANS.length_cdf_K, prepend=0)).max() < 5 * np.sqrt(0.25 / len(lengths))


@settings(max_examples=150, deadline=None)
@given(row=rows_of_stretches(), rate=rates, exact=st.booleans(), seed=st.integers(0, 10**6))
def test_spans_stay_on_allowed_positions(row, rate, exact, seed):
    segments_L, allowed_L = row
    count = int(rate * allowed_L.sum()) if exact else None
    selected_L = SPANS.select(np.random.default_rng(seed), segments_L, allowed_L, rate, count)
    assert not np.any(selected_L & ~allowed_L)
    if exact:
        assert selected_L.sum() == count
    if rate == 1:
        assert np.array_equal(selected_L, allowed_L)


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("exact", [False, True])
def test_m13_each_position_has_the_same_chance_in_a_span(rate, exact):
    """At the ends of segments and beside special tokens as much as in the middle: no stretch is favoured."""
    copies = 8
    segments = np.concatenate([np.repeat([1, 1, 2, 3], [30, 1, 6, 25]) + 3 * i for i in range(copies)])
    allowed = np.arange(len(segments)) % 62 != 30  # a special token; then segments of 6 and 25
    random, n = np.random.default_rng(1), 900
    total = np.zeros(len(segments))
    for _ in range(n):
        count = int(np.floor(rate * allowed.sum() + random.random())) if exact else None
        total += SPANS.select(random, segments, allowed, rate, count)
    error = np.abs(total.reshape(copies, 62).mean(axis=0) / n - rate)[allowed[:62]].max()
    noise = 4.5 * np.sqrt(rate * (1 - rate) / n / copies)
    assert error < noise + (0.01 if exact else 0)  # exact: the span that is cut loses its end


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.9])
def test_m13_the_beginning_of_a_row_has_the_same_chance(rate):
    """The process of spans has been running when a row begins; else its first positions were taken too seldom."""
    random, n = np.random.default_rng(4), 4000
    total = sum(SPANS.select(random, np.ones(16, int), np.ones(16, bool), rate).astype(int) for _ in range(n))
    assert np.abs(total / n - rate).max() < 4 * np.sqrt(rate * (1 - rate) / n)


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.9])
def test_spans_on_both_sides_of_a_border_are_independent(rate):
    """The last position of a segment tells nothing about the first of the next."""
    segments, allowed = np.repeat([1, 2], 20), np.ones(40, bool)
    random = np.random.default_rng(2)
    pairs = np.array([SPANS.select(random, segments, allowed, rate)[19:21] for _ in range(6000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.06
    inside = np.array([SPANS.select(random, segments, allowed, rate)[10:12] for _ in range(2000)])
    assert abs(np.corrcoef(inside.T)[0, 1]) > 0.07


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("stretch", [1, 3, 12, 400])
def test_the_variance_of_spans_is_not_more_than_stated(rate, stretch):
    length = 400
    segments, allowed = np.arange(length) // stretch + 1, np.ones(length, bool)
    random = np.random.default_rng(3)
    counts = [SPANS.select(random, segments, allowed, rate).sum() for _ in range(1500)]
    stated = SPANS.variance_per_position(rate) * length
    assert np.var(counts) < stated * (1 + 5 * np.sqrt(2 / 1500))
    if stretch == length and rate < 0.9:
        assert np.var(counts) > stated * 0.8


@settings(max_examples=60, deadline=None)
@given(
    shares=st.sampled_from([(1.0, 0.0), (0.8, 0.1), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0), (0.7, 0.1)]),
    seed=st.integers(0, 10**6),
)
def test_replacing_touches_selected_positions_alone(shares, seed):
    random, v = np.random.default_rng(seed), vocabulary()
    rows = row_batch(2, 64, seed=seed)
    selected = masking.ordinary_positions(rows.tokens_BxL, rows.segments_BxL, v.special_V)
    selected &= random.random(selected.shape) < 0.5
    before = rows.tokens_BxL.copy()
    fed, masked, replaced = masking.replace(
        rows.tokens_BxL, selected, random.random(selected.shape), *shares, MASK, v.ordinary
    )
    assert np.array_equal(rows.tokens_BxL, before)
    assert np.array_equal(fed[~selected], before[~selected])
    assert np.all(fed[masked] == MASK)
    assert not v.special_V[fed[replaced]].any()
    assert not np.any(masked & replaced)
    assert np.array_equal(fed[selected & ~masked & ~replaced], before[selected & ~masked & ~replaced])


def test_m12_replacements_are_uniform_over_the_ordinary_vocabulary():
    v, shape = vocabulary(), (100, 2000)
    tokens = np.full(shape, 50, np.int32)  # one id: what comes out cannot be drawn from the batch
    draw = np.random.default_rng(0).random(shape)
    fed, _, replaced = masking.replace(tokens, np.ones(shape, bool), draw, 0.8, 0.1, MASK, v.ordinary)
    counts = np.bincount(fed[replaced], minlength=v.size)
    assert not counts[v.special_V].any()
    expected = replaced.sum() / len(v.ordinary)
    chi_square = ((counts[v.ordinary] - expected) ** 2 / expected).sum()
    degrees = len(v.ordinary) - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)
