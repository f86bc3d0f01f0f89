"""Pseudo-log-likelihood, held against a loop that masks one token of one segment at a time."""

import functools
import math

import jax
import numpy as np
import pytest
from held_out import tiny

from biphasic_jax.errors import UserError
from biphasic_jax.train.pll import Score, _rank_in_segment, pseudo_perplexity, score_rows, score_sentences


@functools.cache
def log_probabilities():
    t = tiny()
    return jax.jit(lambda x, s: jax.nn.log_softmax(t.model.apply({"params": t.params}, x, s, causal=False)))


def slow(ids, shifted=False):
    """The score of one segment, alone in its row, by one forward pass a token."""
    t = tiny()
    tokens, segments = np.full((1, 32), t.vocabulary.pad, np.int32), np.zeros((1, 32), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    total, count = 0.0, 0
    for i, token in enumerate(ids):
        if t.vocabulary.special_V[token] or (shifted and i == 0):
            continue
        masked = tokens.copy()
        masked[0, i] = t.vocabulary.mask
        total += float(log_probabilities()(masked, segments)[0, i - shifted, token])
        count += 1
    return total, count


@pytest.mark.parametrize("shifted", [False, True])
def test_rows_equal_the_slow_loop(shifted):
    t = tiny()
    tokens, segments = t.rows.read(np.arange(len(t.rows)))
    chosen = [int(np.argmax(segments.max(1))), 0, 1]
    scores = score_rows(
        t.model, t.params, t.vocabulary, tokens[chosen], segments[chosen], batch_rows=7, shifted=shifted
    )
    assert len(scores[0]) > 1
    for b, row in zip(chosen, scores, strict=True):
        assert len(row) == segments[b].max()
        for s, score in enumerate(row, 1):
            total, count = slow(tokens[b][segments[b] == s].tolist(), shifted)
            assert score.tokens == count
            assert score.log_likelihood == pytest.approx(total, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("batch_rows", [1, 3, 64])
def test_no_score_depends_on_the_batch(batch_rows):
    t = tiny()
    tokens, segments = t.rows.read(np.arange(2))
    scores = score_rows(t.model, t.params, t.vocabulary, tokens, segments, batch_rows=batch_rows)
    expected = score_rows(t.model, t.params, t.vocabulary, tokens, segments, batch_rows=8)
    assert [[s.tokens for s in row] for row in scores] == [[s.tokens for s in row] for row in expected]
    for row, other in zip(scores, expected, strict=True):
        for score, wanted in zip(row, other, strict=True):
            assert score.log_likelihood == pytest.approx(wanted.log_likelihood, rel=1e-6)


def test_sentences_are_scored_as_if_alone():
    t = tiny()
    sentences = [t.tokenizer.encode(text).ids for text in ("The sea was calm.", "A man", "Where are you going to?")]
    scores = score_sentences(t.model, t.params, t.vocabulary, sentences, 32)
    for ids, score in zip(sentences, scores, strict=True):
        total, count = slow(ids)
        assert score.tokens == count
        assert score.log_likelihood == pytest.approx(total, rel=1e-5)


def test_special_tokens_and_padding_are_not_scored():
    t = tiny()
    tokens = np.full((1, 32), t.vocabulary.pad, np.int32)
    tokens[0, :3] = [*t.tokenizer.encode("a").ids[:1], *t.tokenizer.encode("b").ids[:1], t.vocabulary.eos]
    segments = (np.arange(32) < 3).astype(np.int32)[None]
    ((score,),) = score_rows(t.model, t.params, t.vocabulary, tokens, segments)
    assert score.tokens == 2


def test_a_row_costs_as_many_passes_as_its_longest_segment_has_tokens():
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    ranks = _rank_in_segment(np.full((1, 8), 300), segments, tiny().vocabulary, False)
    assert ranks.tolist() == [[0, 1, 2, 0, 1, 0, -1, -1]]


def test_a_row_of_padding_has_no_score():
    t = tiny()
    tokens, segments = np.full((2, 32), t.vocabulary.pad, np.int32), np.zeros((2, 32), np.int32)
    assert score_rows(t.model, t.params, t.vocabulary, tokens, segments) == [[], []]


def test_pseudo_perplexity_is_of_the_corpus_not_the_mean_of_sentences():
    scores = [Score(-1.0, 1), Score(-9.0, 3)]
    assert pseudo_perplexity(scores) == pytest.approx(math.exp(10 / 4))
    with pytest.raises(UserError, match="no token"):
        pseudo_perplexity([Score(0.0, 0)])


def test_a_sentence_that_no_row_holds_is_an_error_that_names_it():
    t = tiny()
    with pytest.raises(UserError, match="sentence 2 has 40 tokens, but a row holds 32"):
        score_sentences(t.model, t.params, t.vocabulary, [[5], [5] * 40], 32)
