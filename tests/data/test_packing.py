"""Packing: every token in one row and one segment, in order, whatever the documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphasic_jax.data.packing import OPEN_ROWS, pack, pack_documents, random_split

POLICIES = ("documents", "random_split", "row")
row_lengths = st.integers(8, 64)
document_lengths = st.lists(st.one_of(st.integers(1, 20), st.integers(1, 300)), max_size=60)


def numbered(lengths):
    """Documents whose tokens are all different: document d holds d * 1000, d * 1000 + 1, ..."""
    return [np.arange(n) + 1000 * d for d, n in enumerate(lengths)]


def segments_of(row):
    return np.split(row.tokens_N, np.cumsum(row.lengths_S)[:-1])


@pytest.mark.parametrize("policy", POLICIES)
@given(lengths=document_lengths, row_length=row_lengths)
def test_p7_every_token_is_packed_once(policy, lengths, row_length):
    rows = list(pack(numbered(lengths), policy, row_length, seed=0, unit="u"))
    packed = sorted(np.concatenate([row.tokens_N for row in rows]).tolist()) if rows else []
    assert packed == sorted(np.concatenate(numbered(lengths)).tolist() if lengths else [])
    for row in rows:
        assert 0 < len(row.tokens_N) <= row_length
        assert row.lengths_S.min() > 0
        assert row.lengths_S.sum() == len(row.tokens_N)


@given(lengths=document_lengths, row_length=row_lengths)
def test_a_segment_is_a_document_or_a_piece_of_one(lengths, row_length):
    pieces = {}
    for row in pack_documents(numbered(lengths), row_length):
        for segment in segments_of(row):
            assert np.array_equal(segment, np.arange(len(segment)) + segment[0])
            assert segment[0] // 1000 == segment[-1] // 1000
            pieces.setdefault(segment[0] // 1000, []).append((segment[0] % 1000, len(segment)))
    for d, n in enumerate(lengths):  # whole rows first, then one remainder
        whole, rest = divmod(n, row_length)
        expected = [(i * row_length, row_length) for i in range(whole)]
        assert sorted(pieces[d]) == expected + ([(whole * row_length, rest)] if rest else [])


@pytest.mark.parametrize("policy", ["random_split", "row"])
@given(lengths=document_lengths, row_length=row_lengths)
def test_stream_policies_keep_the_order_and_fill_every_row_but_the_last(policy, lengths, row_length):
    rows = list(pack(numbered(lengths), policy, row_length, seed=0, unit="u"))
    if rows:
        assert np.array_equal(np.concatenate([row.tokens_N for row in rows]), np.concatenate(numbered(lengths)))
    assert all(len(row.tokens_N) == row_length for row in rows[:-1])
    assert all(len(row.lengths_S) == (1 if policy == "row" else 2) for row in rows[:-1])


@given(row_length=st.integers(8, 4096), row=st.integers(0, 10**6))
def test_random_splits_stay_in_bounds(row_length, row):
    r, rest = random_split(row_length, 0, "u", row)
    shortest = min(12, row_length // 4)
    assert shortest <= r <= row_length - shortest
    assert r + rest == row_length


def test_random_splits_are_the_papers():
    """r is uniform in 12..2036 for rows of 2,048: two blocks of 1,024 tokens on average, 2,304 of them 2,359,296."""
    draws = np.array([random_split(2048, 0, "u", row)[0] for row in range(20_000)])
    assert draws.min() == 12
    assert draws.max() == 2036
    assert abs(draws.mean() - 1024) < 5 * 2025 / 12**0.5 / 20_000**0.5
    counts, _ = np.histogram(draws, bins=5, range=(12, 2037))
    assert abs(counts - 4000).max() < 5 * 4000**0.5
    one_row = next(iter(pack([np.arange(4096)], "random_split", 2048, seed=0, unit="u")))
    assert one_row.lengths_S.sum() == 2048


def test_random_splits_depend_on_seed_unit_and_row_alone():
    assert np.array_equal(random_split(512, 1, "a", 2), random_split(512, 1, "a", 2))
    same = [random_split(2048, *other)[0] for other in ((1, "a", 2), (2, "a", 2), (1, "b", 2), (1, "a", 3))]
    assert len(set(same)) == 4


def test_documents_fill_rows_well():
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 5000).astype(int) + 1
    for row_length in (128, 1024):
        rows = list(pack_documents([np.zeros(n, np.int32) for n in lengths], row_length))
        assert lengths.sum() / (len(rows) * row_length) > 0.98


def test_packing_holds_a_bounded_number_of_rows():
    """A stream without an end gives rows all the time, so memory is bounded."""
    fed = emitted = 0

    def stream():
        nonlocal fed
        rng = np.random.default_rng(0)
        while True:
            n = int(rng.integers(1, 64))
            fed += n
            yield np.zeros(n, np.int32)

    for row in pack_documents(stream(), 64):
        emitted += len(row.tokens_N)
        assert fed - emitted <= OPEN_ROWS * 64
        if emitted > 200_000:
            return


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="whatever"):
        list(pack([np.arange(3)], "whatever", 16, 0, "u"))
