"""`collate` lays targets out for the device; `documents_of` counts documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import row_batch

from biphasic_jax.objectives import Examples, collate
from biphasic_jax.objectives.objective import documents_of


def some_examples(rows, share, seed=0):
    random = np.random.default_rng(seed)
    shape = rows.tokens_BxL.shape
    weights_BxL = np.where(random.random(shape) < share, random.random(shape) + 0.5, 0).astype(np.float32)
    targets_BxL = random.integers(0, 200, shape).astype(np.int32)
    return Examples(rows.tokens_BxL, targets_BxL, weights_BxL, {"things": np.arange(len(shape), dtype=np.int32)})


@settings(max_examples=60, deadline=None)
@given(groups=st.sampled_from([1, 2, 3, 6]), room=st.integers(1, 200), share=st.floats(0, 1), seed=st.integers(0, 999))
def test_each_weighted_position_stands_once_in_its_group(groups, room, share, seed):
    rows = row_batch(count=6, length=40)
    examples = some_examples(rows, share, seed)
    batch = collate(examples, rows, room, groups)
    rows_a_group = 6 // groups
    for g in range(groups):
        some = slice(g * rows_a_group, (g + 1) * rows_a_group)
        weights_M, targets_M = examples.weights_BxL[some].ravel(), examples.targets_BxL[some].ravel()
        wanted = np.flatnonzero(weights_M)
        used = min(len(wanted), room)
        assert batch["counts/overflow"][g] == len(wanted) - used
        assert batch["predict"][g, :used].tolist() == wanted[:used].tolist()
        assert np.array_equal(batch["weights"][g, :used], weights_M[wanted[:used]])
        assert np.array_equal(batch["targets"][g, :used], targets_M[wanted[:used]])
        assert not batch["weights"][g, used:].any()
    assert all(len(batch[name]) % groups == 0 for name in ("tokens", "segments", "predict", "targets", "weights"))
    assert batch["predict"].dtype == batch["targets"].dtype == np.int32
    assert batch["weights"].dtype == np.float32


def test_without_room_targets_stay_by_position():
    rows = row_batch(count=2, length=40)
    examples = some_examples(rows, 0.5)
    batch = collate(examples, rows, None, 2)
    assert set(batch) == {"tokens", "segments", "targets", "weights", "counts/things"}
    assert batch["targets"] is examples.targets_BxL
    assert batch["weights"] is examples.weights_BxL


def test_m6_a_target_of_id_zero_counts():
    rows = row_batch(count=1, length=40)
    examples = Examples(rows.tokens_BxL, np.zeros((1, 40), np.int32), np.ones((1, 40), np.float32))
    batch = collate(examples, rows, 40, 1)
    assert batch["weights"].sum() == 40
    assert not batch["targets"].any()


@pytest.mark.parametrize(
    ("segments", "targets", "documents", "without"),
    [
        ([1, 1, 2, 2, 3, 0], [1, 0, 0, 0, 1, 0], 3, 1),
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], 1, 1),
        ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], 0, 0),
        ([1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 1], 6, 0),
    ],
)
def test_m2_documents_without_a_target_are_counted(segments, targets, documents, without):
    segments_BxL, target_BxL = np.array([segments, [0] * 6, segments]), np.array([targets, [0] * 6, targets], bool)
    documents_B, without_B = documents_of(segments_BxL, target_BxL)
    assert documents_B.tolist() == [documents, 0, documents]
    assert without_B.tolist() == [without, 0, without]
    assert documents_B.dtype == without_B.dtype == np.int32
