"""Index arithmetic: every row once an epoch, mixtures at their weights, and nothing but arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphasic_jax.data.order import FEW_ROWS, LONGEST_PERIOD, MOST_ROWS, Order, period_shares
from biphasic_jax.data.shards import SourceRows
from biphasic_jax.errors import UserError

seeds = st.integers(0, 2**63)


def sources(sizes, weights=None):
    first = np.cumsum([0, *sizes])
    return [SourceRows(f"s{i}", weights[i] if weights else None, int(first[i]), size) for i, size in enumerate(sizes)]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any), seed=seeds)
def test_r6_every_row_once_an_epoch(sizes, seed):
    n = sum(sizes)
    row_G, epoch_G = Order(sources(sizes), seed).locate(np.arange(3 * n))
    for epoch in range(3):
        assert sorted(row_G[epoch_G == epoch]) == list(range(n))
    assert list(epoch_G) == sorted(epoch_G)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [Order(sources([200]), seed).locate(np.arange(600))[0].reshape(3, 200) for seed in (0, 1)]
    all_orders = np.concatenate(orders)
    for i in range(6):
        for j in range(i):
            assert np.mean(all_orders[i] == all_orders[j]) < 0.05
        assert np.mean(all_orders[i] == np.arange(200)) < 0.05
        assert abs(np.corrcoef(all_orders[i], np.arange(200))[0, 1]) < 0.25


@settings(max_examples=40, deadline=None)
@given(
    index=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    weighted=st.booleans(),
    seed=seeds,
)
def test_an_example_depends_on_its_index_alone(index, weighted, seed):
    some = sources([50, 90], (0.3, 0.7) if weighted else None)
    row_G, epoch_G = Order(some, seed).locate(np.array(index))
    order = Order(some, seed)
    for g, row, epoch in zip(index, row_G, epoch_G, strict=True):
        assert order.locate(np.array([g])) == (row, epoch)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_are_within_one_example_of_the_weights(weights):
    share_S = period_shares(np.array(weights))
    period = share_S.sum()
    assert period <= LONGEST_PERIOD
    assert np.all(np.abs(share_S - period * np.array(weights) / sum(weights)) < 1)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((1,), (1,)), ((1, 1), (1, 1)), ((0.7, 0.2, 0.1), (7, 2, 1)), ((1, 1, 1), (1, 1, 1)), ((5, 15), (1, 3))],
)
def test_the_shortest_exact_period_is_taken(weights, shares):
    assert tuple(period_shares(np.array(weights, float))) == shares


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 80), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    seed=seeds,
)
def test_m8_any_prefix_of_a_mixture_keeps_to_its_weights(sizes, weights, seed):
    weights = weights[: len(sizes)]
    order = Order(sources(sizes, [float(w) for w in weights]), seed)
    period = len(order.source_P)
    row_G, _ = order.locate(np.arange(4 * period + period // 2))
    source_G = np.searchsorted(np.cumsum(sizes), row_G, side="right")
    for s, weight in enumerate(weights):
        served_G = np.cumsum(source_G == s)
        wanted_G = np.arange(1, len(row_G) + 1) * weight / sum(weights)
        assert np.all(np.abs(served_G - wanted_G)[period - 1 :: period] < 1e-6)  # exact after each period
        assert np.all(np.abs(served_G - wanted_G) <= order.share_S[s])


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=3), seed=seeds)
def test_each_source_of_a_mixture_runs_through_epochs_of_its_own(sizes, seed):
    order = Order(sources(sizes, [1.0, 2.0, 4.0][: len(sizes)]), seed)
    row_G, epoch_G = order.locate(np.arange(1000))
    first = np.cumsum([0, *sizes])
    for s in range(len(sizes)):
        mine = (row_G >= first[s]) & (row_G < first[s + 1])
        for epoch in range(epoch_G[mine].max()):  # the last one may be under way
            assert sorted(row_G[mine & (epoch_G == epoch)]) == list(range(first[s], first[s + 1]))


def test_m8_a_mixture_over_its_longest_period():
    """Weights that no short period meets: 3,000 examples hold each source to within a few."""
    weights = (0.5, 1 / 3, 0.123456)
    row_G, _ = Order(sources([100, 100, 100], weights), 7).locate(np.arange(3 * LONGEST_PERIOD))
    counts = np.bincount(row_G // 100)
    assert np.abs(counts - len(row_G) * np.array(weights) / sum(weights)).max() <= 3


def test_periods_of_a_mixture_are_shuffled():
    row_G, _ = Order(sources([100, 100], (1.0, 1.0)), 0).locate(np.arange(2000))
    first_of_pair = (row_G >= 100)[::2]
    assert 0.4 < first_of_pair.mean() < 0.6
    assert 0.4 < np.mean(first_of_pair[1:] == first_of_pair[:-1]) < 0.6


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ([10, 10], (1.0, 0.0001), "s1: its weight 0.0001 is under 1/1024"),
        ([10, 0], (1.0, 1.0), "s1: there is no row to train on"),
        ([0, 0], None, "data.sources: there is no row to train on"),
        ([MOST_ROWS, 1], None, "data.sources: 4294967297 rows are more than 4294967296"),
    ],
)
def test_sources_that_cannot_be_served_are_errors(sizes, weights, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        Order(sources(sizes, weights), 0)


@pytest.mark.parametrize("n", [FEW_ROWS + 1, FEW_ROWS + 2, 2 * FEW_ROWS + 1, 4 * FEW_ROWS + 1])
def test_r6_above_the_size_that_is_drawn_whole(n):
    """FEW_ROWS + 1 and 4 * FEW_ROWS + 1 are sizes at which grain's permutation repeats a row."""
    row_G, epoch_G = Order(sources([n]), 1).locate(np.arange(n - 3, 2 * n))
    assert list(epoch_G[:4]) == [0, 0, 0, 1]
    assert np.array_equal(np.sort(row_G[3:]), np.arange(n))
    assert abs(np.corrcoef(row_G[3:], np.arange(n))[0, 1]) < 0.02


def test_the_limits_of_32_bits():
    """As many rows as the permutation takes, and an index far beyond 32 bits."""
    row_G, epoch_G = Order(sources([MOST_ROWS]), 0).locate(np.array([0, MOST_ROWS - 1, MOST_ROWS, 10**15]))
    assert len(set(row_G)) == 4
    assert row_G.min() >= 0
    assert row_G.max() < MOST_ROWS
    assert list(epoch_G) == [0, 0, 1, 10**15 // MOST_ROWS]


@pytest.mark.parametrize(
    ("served", "rows"),
    [
        (sources([10, 7]), [8, 0, 11, 5, 3]),
        (sources([10, 7], (3.0, 1.0)), [3, 5, 7, 13, 1]),
        (sources([70_000]), [10784, 48576, 30653, 37670, 22895]),
    ],
)
def test_golden_order(served, rows):
    """A change here breaks the resume of every run that is under way: never let it happen by an upgrade."""
    assert Order(served, 3).locate(np.arange(15, 20))[0].tolist() == rows
