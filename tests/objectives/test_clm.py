"""Causal language modelling: one shift, weights from segments alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import EOS, row_batch, vocabulary

from biphasic_jax.data.rows import RowBatch
from biphasic_jax.errors import UserError
from biphasic_jax.objectives.clm import Clm


def clm(pad=3, **changes):
    Clm.check({**Clm.defaults, **changes})
    return Clm(changes, vocabulary(pad), 0, (0, 10))


@settings(max_examples=60, deadline=None)
@given(
    documents=st.integers(1, 6),
    padding=st.sampled_from([0, 0.3]),
    end_weight=st.sampled_from([0, 1, 0.0, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_each_token_predicts_the_next_one_of_its_segment(documents, padding, end_weight, seed):
    rows = row_batch(count=3, length=70, documents=documents, padding=padding, seed=seed)
    before = rows.tokens_BxL.copy()
    examples = clm(segment_end_weight=end_weight).transform(rows, 0)
    assert np.array_equal(examples.tokens_BxL, before)
    assert examples.weights_BxL.dtype == np.float32
    for b in range(3):
        for i in range(70):
            here = rows.segments_BxL[b, i]
            after = rows.segments_BxL[b, i + 1] if i < 69 else 0
            wanted = here > 0 and after > 0 and (here == after or end_weight == 1)
            assert examples.weights_BxL[b, i] == wanted
            if wanted:
                assert examples.targets_BxL[b, i] == rows.tokens_BxL[b, i + 1]


def test_p6_the_last_token_of_a_segment_predicts_nothing_unless_asked():
    rows = row_batch(count=4, length=64, documents=4, padding=0)
    ends = np.diff(rows.segments_BxL, axis=1, append=0) != 0
    assert not clm().transform(rows, 0).weights_BxL[ends].any()
    asked = clm(segment_end_weight=1).transform(rows, 0).weights_BxL
    assert asked[:, :-1].all()  # the paper's: every next token of the row
    assert not asked[:, -1].any()


def test_documents_inside_one_segment_predict_across_their_border():
    """The paper's blocks hold several documents; inside a block every next token is a target."""
    tokens = np.array([[0, 50, EOS, 0, 60, 61, EOS, 70]], np.int32)
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 2]], np.int32)
    examples = clm().transform(RowBatch(tokens, segments, np.zeros(1, int), np.zeros(1, int)), 0)
    assert examples.weights_BxL.tolist() == [[1, 1, 1, 1, 0, 1, 1, 0]]
    assert examples.targets_BxL[0, 2] == 0
    assert examples.counts["documents"].tolist() == [2]


def test_m4_with_pad_equal_to_eos_the_real_eos_is_a_target():
    rows = row_batch(count=4, length=64, documents=3, padding=0.4, pad=EOS)
    examples = clm(pad=EOS).transform(rows, 0)
    weighted = examples.weights_BxL > 0
    assert np.sum(examples.targets_BxL[weighted] == EOS) == 3 * 4  # one for each document, none for the padding
    other = row_batch(count=4, length=64, documents=3, padding=0.4)
    assert np.array_equal(examples.weights_BxL, clm().transform(other, 0).weights_BxL)


def test_m3_padding_is_never_a_target_whatever_it_holds():
    rows = row_batch(count=4, length=64, padding=0.5)
    filled = RowBatch(
        np.where(rows.segments_BxL == 0, 50, rows.tokens_BxL), rows.segments_BxL, rows.index_B, rows.row_B
    )
    a, b = clm(segment_end_weight=1).transform(rows, 0), clm(segment_end_weight=1).transform(filled, 0)
    assert np.array_equal(a.weights_BxL, b.weights_BxL)
    assert np.array_equal(a.targets_BxL[a.weights_BxL > 0], b.targets_BxL[b.weights_BxL > 0])
    assert a.weights_BxL[:, :-1][rows.segments_BxL[:, 1:] == 0].sum() == 0


def test_counts_a_row():
    tokens = np.array([[50, 51, 52, 53, 54, 3]], np.int32)
    segments = np.array([[1, 1, 2, 3, 3, 0]], np.int32)
    counts = clm().transform(RowBatch(tokens, segments, np.zeros(1, int), np.zeros(1, int)), 0).counts
    assert {name: int(count[0]) for name, count in counts.items()} == {
        "tokens": 5,
        "documents": 3,
        "documents_without_target": 1,
    }


def test_every_position_is_a_prediction_and_there_is_no_rate():
    assert clm().predictions(512) is None
    assert clm().rate(3) is None
    assert Clm.causal is True


@pytest.mark.parametrize("value", [0.5, -1, "1", None])
def test_another_end_weight_is_an_error(value):
    with pytest.raises(UserError, match=r"segment_end_weight=.*give 0"):
        clm(segment_end_weight=value)
