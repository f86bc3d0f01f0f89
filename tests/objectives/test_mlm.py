"""Masked language modelling: what is selected, at which rate, and that a row's mask is its own."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import MASK, PAD, row_batch, take, vocabulary

from biphasic_jax.data.rows import RowBatch
from biphasic_jax.errors import UserError
from biphasic_jax.objectives import collate
from biphasic_jax.objectives.mlm import COUNTINGS, SELECTIONS, Mlm

V = vocabulary()
BERT = {"mask_share": 0.8, "random_share": 0.1, "keep_share": 0.1}
WAYS = [{"selection": s, "counting": c} for s, c in itertools.product(SELECTIONS, COUNTINGS)]
PHASE = (100, 200)


def mlm(seed=0, steps=PHASE, v=V, **changes):
    Mlm.check({**Mlm.defaults, **changes})
    return Mlm(changes, v, seed, steps)


def selected(examples):
    return examples.weights_BxL > 0


@st.composite
def some_rows(draw):
    documents = draw(st.integers(1, 6))
    return row_batch(
        count=draw(st.integers(1, 4)),
        length=draw(st.integers(10 * documents + 10, 130)),
        documents=documents,
        padding=draw(st.sampled_from([0, 0.1, 0.5])),
        seed=draw(st.integers(0, 10**6)),
        first=draw(st.integers(0, 10**9)),
        bos=draw(st.booleans()),
    )


way = st.sampled_from(WAYS)
shares = st.sampled_from([{}, BERT, {"mask_share": 0.0, "keep_share": 1.0}])


@settings(max_examples=80, deadline=None)
@given(rows=some_rows(), way=way, shares=shares, rate=st.floats(0.05, 1), shifted=st.booleans())
def test_m1_special_tokens_and_padding_are_never_selected(rows, way, shares, rate, shifted):
    examples = mlm(mask_rate=rate, shifted=shifted, **way, **shares).transform(rows, 100)
    special_BxL = V.special_V[rows.tokens_BxL] | (rows.segments_BxL == 0)
    assert np.array_equal(examples.tokens_BxL[special_BxL], rows.tokens_BxL[special_BxL])
    chosen_BxL = np.roll(selected(examples), 1, axis=1) if shifted else selected(examples)
    assert not np.any(chosen_BxL & special_BxL)
    assert np.all(set(np.unique(examples.weights_BxL)) <= {0, 1})
    assert np.all(examples.targets_BxL[selected(examples)] == rows.tokens_BxL[chosen_BxL])


@settings(max_examples=80, deadline=None)
@given(rows=some_rows(), way=way, shares=shares, rate=st.floats(0.05, 1))
def test_what_is_counted_is_what_happened(rows, way, shares, rate):
    examples = mlm(mask_rate=rate, **way, **shares).transform(rows, 100)
    counts, chosen_BxL = examples.counts, selected(examples)
    masked_BxL = chosen_BxL & (examples.tokens_BxL == MASK)
    kept_or_same_BxL = chosen_BxL & (examples.tokens_BxL == rows.tokens_BxL)
    assert np.array_equal(counts["tokens"], (rows.segments_BxL > 0).sum(1))
    assert np.array_equal(counts["candidates"], (~V.special_V[rows.tokens_BxL] & (rows.segments_BxL > 0)).sum(1))
    assert np.array_equal(counts["selected"], chosen_BxL.sum(1))
    assert np.array_equal(counts["masked"], masked_BxL.sum(1))
    assert np.array_equal(counts["random"] + counts["kept"], (chosen_BxL & ~masked_BxL).sum(1))
    assert np.all(counts["kept"] <= kept_or_same_BxL.sum(1))  # a random id may be the same one
    assert np.array_equal(examples.tokens_BxL[~chosen_BxL], rows.tokens_BxL[~chosen_BxL])
    for b, (segments_L, chosen_L) in enumerate(zip(rows.segments_BxL, chosen_BxL, strict=True)):
        documents = [chosen_L[segments_L == s].any() for s in np.unique(segments_L[segments_L > 0])]
        assert counts["documents"][b] == len(documents)
        assert counts["documents_without_target"][b] == len(documents) - sum(documents)
    assert all(count.dtype == np.int32 for count in counts.values())


@pytest.mark.parametrize("way", WAYS)
def test_m2_the_rate_of_each_document_is_inside_binomial_bounds(way):
    rate, objective = 0.3, mlm(mask_rate=0.3, **way)
    span_variance = mlm(mask_rate=0.3, selection="spans")._variance(0.3)
    spread = {"tokens": 1, "words": 8, "spans": span_variance / (rate * (1 - rate))}[way["selection"]]
    rows = row_batch(count=40, length=512, documents=5)
    chosen_BxL = selected(objective.transform(rows, 100))
    candidates_BxL = ~V.special_V[rows.tokens_BxL] & (rows.segments_BxL > 0)
    for b, s in itertools.product(range(40), range(1, 6)):
        document_L = candidates_BxL[b] & (rows.segments_BxL[b] == s)
        n = document_L.sum()
        assert abs(chosen_BxL[b, document_L].sum() - rate * n) <= 5 * math.sqrt(spread * n * rate * (1 - rate)) + 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "rate", [0.15, 0.4, 1.0, {"shape": "linear", "from": 0.5, "to": 0.1}, {"shape": "cosine", "from": 0.2, "to": 0.6}]
)
def test_m13_realised_rates_hold_at_every_point_of_a_schedule(way, rate):
    objective = mlm(mask_rate=rate, **way, **BERT)
    rows = row_batch(count=64, length=512, documents=3)
    for step in (100, 133, 150, 199):
        wanted = objective.rate(step)
        counts = {name: int(count.sum()) for name, count in objective.transform(rows, step).counts.items()}
        n, chosen = counts["candidates"], counts["selected"]
        assert abs(chosen - wanted * n) <= 4 * math.sqrt(objective._variance(wanted) * n) + 1e-6
        for name, share in (("masked", 0.8), ("random", 0.1), ("kept", 0.1)):
            assert abs(counts[name] - share * chosen) <= 4 * math.sqrt(share * (1 - share) * chosen)


def test_m13_exact_counts_are_exact_in_each_row():
    rows = row_batch(count=32)
    for rate in (0.15, 0.4, 0.77):
        for selection in ("tokens", "spans"):
            counts = mlm(mask_rate=rate, selection=selection, counting="exact").transform(rows, 100).counts
            assert np.all(np.abs(counts["selected"] - rate * counts["candidates"]) < 1)


def test_m13_the_papers_masks_are_mask_tokens_alone():
    counts = mlm().transform(row_batch(), 100).counts
    assert np.array_equal(counts["masked"], counts["selected"])
    assert not counts["random"].any()
    assert not counts["kept"].any()


def words_of(rows, b):
    """Lists of positions, by walking along the row."""
    words = []
    for i, (token, segment) in enumerate(zip(rows.tokens_BxL[b], rows.segments_BxL[b], strict=True)):
        if segment == 0 or V.special_V[token]:
            continue
        goes_on = (
            i > 0
            and not V.word_start_V[token]
            and words
            and words[-1][-1] == i - 1
            and rows.segments_BxL[b, i - 1] == segment
        )
        if goes_on:
            words[-1].append(i)
        else:
            words.append([i])
    return words


@settings(max_examples=60, deadline=None)
@given(rows=some_rows(), counting=st.sampled_from(COUNTINGS), rate=st.floats(0.05, 0.95), shifted=st.booleans())
def test_words_are_selected_as_a_whole(rows, counting, rate, shifted):
    objective = mlm(mask_rate=rate, selection="words", counting=counting, shifted=shifted)
    chosen_BxL = selected(objective.transform(rows, 100))
    chosen_BxL = np.roll(chosen_BxL, 1, axis=1) if shifted else chosen_BxL
    for b in range(len(chosen_BxL)):
        words = words_of(rows, b)
        for word in words:
            assert len(set(chosen_BxL[b, word])) == 1
        if counting == "exact":
            usable = [w for w in words if not shifted or (w[0] and rows.segments_BxL[b, w[0] - 1] > 0
                      and rows.segments_BxL[b, w[0] - 1] == rows.segments_BxL[b, w[0]])]  # fmt: skip
            assert abs(sum(chosen_BxL[b, w[0]] for w in words) - rate * len(usable)) < 1


@settings(max_examples=40, deadline=None)
@given(rows=some_rows(), way=way)
def test_shifted_targets_are_read_one_position_earlier_in_their_segment(rows, way):
    examples = mlm(mask_rate=1.0, shifted=True, **way).transform(rows, 100)
    where = np.argwhere(selected(examples))
    for b, i in where:
        assert rows.segments_BxL[b, i] == rows.segments_BxL[b, i + 1]
        assert examples.targets_BxL[b, i] == rows.tokens_BxL[b, i + 1]
        assert examples.tokens_BxL[b, i + 1] == MASK
    firsts = (np.diff(rows.segments_BxL, axis=1, prepend=-1) != 0) & (rows.segments_BxL > 0)
    assert np.array_equal(examples.tokens_BxL[firsts], rows.tokens_BxL[firsts])
    if way["selection"] != "words":  # at rate 1 all others are targets
        others = ~firsts & (rows.segments_BxL > 0) & ~V.special_V[rows.tokens_BxL]
        assert len(where) == others.sum()


@pytest.mark.parametrize("shares", [{}, BERT])
@pytest.mark.parametrize("way", WAYS)
def test_m7_a_mask_is_a_function_of_seed_and_index_alone(way, shares):
    objective = mlm(**way, **shares)
    rows = row_batch(count=12)
    whole = objective.transform(rows, 100)
    for where in (slice(0, 1), slice(3, 7), np.array([11, 2, 5])):
        part = mlm(**way, **shares).transform(take(rows, where), 100)
        assert np.array_equal(part.tokens_BxL, whole.tokens_BxL[where])
        assert np.array_equal(part.weights_BxL, whole.weights_BxL[where])
        assert all(np.array_equal(part.counts[name], whole.counts[name][where]) for name in whole.counts)


@pytest.mark.parametrize("way", WAYS)
def test_m7_no_two_indices_share_a_mask(way):
    """The same row again in another epoch, and rows beside each other: overlap as of independent masks."""
    one = row_batch(count=1, length=1000, documents=1, padding=0)
    n = 30
    rows = RowBatch(
        np.repeat(one.tokens_BxL, n, 0), np.repeat(one.segments_BxL, n, 0), np.arange(n) * 1000, np.zeros(n, int)
    )
    objective = mlm(mask_rate=0.5, **way)
    chosen_BxL = selected(objective.transform(rows, 100))
    candidates = ~V.special_V[one.tokens_BxL[0]]
    spread = max(1.0, objective._variance(0.5) / 0.25)
    for i in range(n):
        for j in range(i):
            agree = np.mean(chosen_BxL[i, candidates] == chosen_BxL[j, candidates])
            assert abs(agree - 0.5) < 5.5 * math.sqrt(0.25 * spread / candidates.sum())


def test_m9_one_seed_fixes_all_masks():
    rows = row_batch()
    assert np.array_equal(mlm(3).transform(rows, 100).tokens_BxL, mlm(3).transform(rows, 100).tokens_BxL)
    assert not np.array_equal(mlm(3).transform(rows, 100).tokens_BxL, mlm(4).transform(rows, 100).tokens_BxL)


def test_m9_masks_do_not_depend_on_the_step_or_the_phase():
    """With one rate a row that comes again under its index is masked alike: evaluation masks never change."""
    rows, other = row_batch(), mlm(steps=(0, 7))
    assert np.array_equal(mlm().transform(rows, 150).tokens_BxL, other.transform(rows, 3).tokens_BxL)


@pytest.mark.parametrize("counting", COUNTINGS)
@pytest.mark.parametrize("selection", ["tokens", "words"])
def test_masks_at_lower_rates_are_part_of_those_at_higher(selection, counting):
    rows = row_batch()
    masks = [
        selected(mlm(mask_rate=rate, selection=selection, counting=counting).transform(rows, 100))
        for rate in (0.1, 0.15, 0.4, 0.9)
    ]
    for low, high in itertools.pairwise(masks):
        assert not np.any(low & ~high)
        assert low.sum() < high.sum()


def test_m12_random_replacements_are_never_special():
    rows = row_batch(count=64, length=512)
    examples = mlm(mask_rate=1.0, mask_share=0.0, random_share=1.0).transform(rows, 100)
    replaced = examples.tokens_BxL[selected(examples)]
    assert not V.special_V[replaced].any()
    assert set(replaced) == set(V.ordinary)


@pytest.mark.parametrize("way", WAYS)
def test_m3_padding_changes_nothing(way):
    """Longer rows and other ids in the padding: the real part of the batch is the same."""
    rows = row_batch(padding=0.4)
    longer = RowBatch(
        np.pad(rows.tokens_BxL, ((0, 0), (0, 40)), constant_values=50),
        np.pad(rows.segments_BxL, ((0, 0), (0, 40))),
        rows.index_B,
        rows.row_B,
    )
    filled = RowBatch(
        np.where(rows.segments_BxL == 0, 77, rows.tokens_BxL), rows.segments_BxL, rows.index_B, rows.row_B
    )
    objective = mlm(**way)
    for other in (filled, longer):
        a, b = objective.transform(rows, 100), objective.transform(other, 100)
        real = rows.segments_BxL > 0
        length = rows.tokens_BxL.shape[1]
        assert np.array_equal(a.tokens_BxL[real], b.tokens_BxL[:, :length][real])
        assert np.array_equal(a.weights_BxL, b.weights_BxL[:, :length])
        assert b.weights_BxL.sum() == a.weights_BxL.sum()


def test_m5_rows_without_a_candidate():
    rows = RowBatch(np.full((2, 16), PAD, np.int32), np.zeros((2, 16), np.int32), np.arange(2), np.arange(2))
    for way in WAYS:
        objective = mlm(**way)
        batch = collate(objective.transform(rows, 100), rows, objective.predictions(32), 1)
        assert batch["weights"].sum() == 0
        assert batch["counts/selected"].sum() == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rate", [0.15, 0.4, 0.9])
def test_room_is_enough_and_not_wasted(way, rate):
    """Full rows of real lengths never overflow; the room is not more than six deviations ask for."""
    objective = mlm(mask_rate=rate, **way)
    rows = row_batch(count=16, length=1024, documents=2, padding=0, bos=False)
    room = objective.predictions(4 * 1024)
    for step in range(20):
        again = RowBatch(rows.tokens_BxL, rows.segments_BxL, rows.index_B + 1000 * step, rows.row_B)
        batch = collate(objective.transform(again, 100), again, room, 4)
        assert batch["counts/overflow"].sum() == 0
        assert batch["predict"].shape == (4, room)
    assert room % 64 == 0
    assert room <= min(4096, rate * 4096 + 6 * math.sqrt(objective._variance(rate) * 4096) + 64)


def test_room_follows_the_highest_rate_of_the_phase():
    rising = mlm(mask_rate={"shape": "linear", "from": 0.1, "to": 0.5})
    assert rising.predictions(4096) == mlm(mask_rate=0.5).predictions(4096)
    assert mlm(mask_rate=1.0).predictions(1000) == 1000
    assert mlm(mask_rate=0.4).predictions(8) == 8
    assert mlm(mask_rate=0.3).predictions(64) == 8 * math.ceil((0.3 * 64 + 6 * math.sqrt(0.21 * 64)) / 8)


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [
        (0.3, (0.3, 0.3, 0.3, 0.3)),
        ({"shape": "constant", "from": 0.3}, (0.3, 0.3, 0.3, 0.3)),
        ({"shape": "linear", "from": 0.5, "to": 0.2}, (0.5, 0.2 + 0.3 * 49 / 99, 0.2 + 0.3 * 24 / 99, 0.2)),
        ({"shape": "cosine", "from": 0.5, "to": 0.2}, (0.5, None, None, 0.2)),
        ({"shape": "steps", "values": [0.5, 0.4, 0.1], "at": [0.5, 0.75]}, (0.5, 0.4, 0.1, 0.1)),
    ],
)
def test_schedules(rate, wanted):
    objective = mlm(mask_rate=rate)
    for step, value in zip((100, 150, 175, 199), wanted, strict=True):
        if value is not None:
            assert objective.rate(step) == pytest.approx(value)
    assert mlm(mask_rate=rate, steps=(5, 6)).rate(5) == pytest.approx(wanted[0])


def test_the_cosine_is_flat_at_both_ends():
    objective = mlm(mask_rate={"shape": "cosine", "from": 0.5, "to": 0.2}, steps=(0, 101))
    assert objective.rate(50) == pytest.approx(0.35)
    assert objective.rate(25) == pytest.approx(0.2 + 0.3 * (1 + math.cos(math.pi / 4)) / 2)
    assert objective.rate(0) - objective.rate(1) < 0.0001


def test_steps_begin_at_their_update():
    objective = mlm(mask_rate={"shape": "steps", "values": [0.5, 0.4], "at": [0.5]})
    assert [objective.rate(s) for s in (149, 150)] == [0.5, 0.4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_rate": 0}, "mask_rate=0: give a rate above 0"),
        ({"mask_rate": 1.5}, "mask_rate=1.5: give a rate above 0"),
        ({"mask_rate": True}, "mask_rate=True: give a number, or a schedule"),
        ({"mask_rate": "0.4"}, "mask_rate='0.4': give a number, or a schedule"),
        ({"mask_rate": {"shape": "sine", "from": 0.1}}, "shape is not one of constant, linear"),
        ({"mask_rate": {"shape": "linear", "from": 0.1}}, "a linear schedule has the keys shape, from, to"),
        ({"mask_rate": {"shape": "linear", "from": 0.1, "to": 2}}, "each rate must be above 0"),
        ({"mask_rate": {"shape": "linear", "from": 0.1, "to": "x"}}, "from and to must be numbers"),
        ({"mask_rate": {"shape": "steps", "values": [0.1, 0.2], "at": []}}, "one number in values more than in at"),
        ({"mask_rate": {"shape": "steps", "values": [0.1, 0.2], "at": [1.0]}}, "shares of the phase"),
        ({"mask_rate": {"shape": "steps", "values": [0.1] * 3, "at": [0.7, 0.2]}}, "shares of the phase"),
        ({"selection": "word"}, "selection='word' is not one of tokens, words, spans"),
        ({"counting": "poisson"}, "counting='poisson' is not one of bernoulli, exact"),
        ({"mask_share": 0.8}, "give three shares that add up to 1"),
        ({"mask_share": 1.2, "random_share": -0.2}, "give three shares that add up to 1"),
        ({"span_mean": 0.5}, "span_mean=0.5: give a number of tokens"),
        ({"span_max": 2.5}, "span_max=2.5: give a whole number"),
        ({"shifted": "yes"}, "shifted='yes' is not one of False, True"),
    ],
)
def test_settings_that_make_no_sense_are_errors(settings, message):
    with pytest.raises(UserError, match=message):
        Mlm.check({**Mlm.defaults, **settings})


def test_golden_masks():
    """A change here changes the masks of every run that is under way: never let it happen by an upgrade."""
    rows = row_batch(count=1, length=32, documents=1, padding=0, first=10**6)
    found = [np.flatnonzero(selected(mlm(mask_rate=0.3, **way).transform(rows, 100))[0]).tolist() for way in WAYS]
    assert found == GOLDEN_POSITIONS
    assert mlm(mask_rate=0.9, **BERT).transform(rows, 100).tokens_BxL[0, :24].tolist() == GOLDEN_TOKENS


GOLDEN_POSITIONS = [
    [3, 6, 8, 9, 10, 11, 13, 19, 21, 22, 28],
    [1, 4, 6, 7, 8, 9, 17, 26, 29],
    [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 28, 29],
    [1, 8, 26, 27],
    [1, 17],
    [11, 23, 24, 25, 26, 27, 28, 29, 30],
]
GOLDEN_TOKENS = [0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 183, 2, 2, 194, 149, 2, 2, 118, 2, 2, 2, 2, 2]  # fmt: skip
