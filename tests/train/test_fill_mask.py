"""Filling masks: what counts as one, and what is put there."""

import jax
import numpy as np
import pytest
from held_out import tiny

from biphasic_jax.errors import UserError
from biphasic_jax.train.fill_mask import encode_masked, fill_masks


def encode(text):
    t = tiny()
    return encode_masked(t.tokenizer, t.vocabulary, text, 64)


def test_the_mark_and_the_tokenizers_own_mask_mean_the_same():
    t = tiny()
    assert encode("The [MASK] of the king") == encode("The <|mask|> of the king")
    assert encode("The [MASK] of the king").count(t.vocabulary.mask) == 1


def test_a_mask_takes_the_place_of_a_token_with_its_space():
    t = tiny()
    plain = [*t.tokenizer.encode("The king of the sea").ids, t.vocabulary.eos]
    ids = encode("The king of [MASK] sea")
    the = t.tokenizer.encode(" the").ids
    assert len(the) == 1, "the test needs a word that is one token"
    where = ids.index(t.vocabulary.mask)
    assert [*ids[:where], *the, *ids[where + 1 :]] == plain


def test_text_in_a_document_stays_text():
    """The mask is meant here alone: the tokenizer is as it was before."""
    t = tiny()
    encode("a [MASK]")
    assert t.vocabulary.mask not in t.tokenizer.encode("a <|mask|>").ids


def test_no_mask_is_an_error_that_shows_how():
    with pytest.raises(UserError, match=r"holds no mask: write \[MASK\] \(or <\|mask\|>\)"):
        encode("The king of the sea")


def test_a_text_longer_than_the_rows_is_refused():
    with pytest.raises(UserError, match="but the model's rows hold 64: shorten it"):
        encode("a king and " * 40 + "[MASK]")


def test_candidates_are_the_most_probable_ordinary_tokens():
    t = tiny()
    ids = encode("The [MASK] of the [MASK].")
    first, second = fill_masks(t.model, t.params, t.vocabulary, t.tokenizer, ids, top=4)
    logits = t.model.apply({"params": t.params}, np.array([ids]), np.ones((1, len(ids)), np.int32), causal=False)
    for candidates, where in zip((first, second), np.flatnonzero(np.array(ids) == t.vocabulary.mask), strict=True):
        probability = np.asarray(jax.nn.softmax(logits[0, where]))
        order = [i for i in np.argsort(-probability) if not t.vocabulary.special_V[i]]
        assert [c.token for c in candidates] == order[:4]
        assert [c.probability for c in candidates] == pytest.approx(probability[order[:4]], rel=1e-5)
        assert [c.text for c in candidates] == [t.tokenizer.decode([int(i)]) for i in order[:4]]


def test_a_shifted_model_is_read_one_position_earlier():
    t = tiny()
    ids = encode("The [MASK] of the king.")
    (candidates,) = fill_masks(t.model, t.params, t.vocabulary, t.tokenizer, ids, top=1, shifted=True)
    logits = t.model.apply({"params": t.params}, np.array([ids]), np.ones((1, len(ids)), np.int32), causal=False)
    probability = np.asarray(jax.nn.softmax(logits[0, ids.index(t.vocabulary.mask) - 1]))
    assert candidates[0].probability == pytest.approx(probability[t.vocabulary.ordinary].max(), rel=1e-5)
    with pytest.raises(UserError, match="cannot stand first"):
        fill_masks(t.model, t.params, t.vocabulary, t.tokenizer, encode("[MASK] of"), shifted=True)
