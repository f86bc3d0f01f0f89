"""Pseudo-log-likelihood: each token masked in turn and predicted from both sides (arXiv 1910.14659, eq. 1).

Segments of a row never see each other, so the j-th token of every segment is masked in one copy of the
row: a row costs as many forward passes as its longest segment has tokens, however many segments it holds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.model.head import head_kernel, project
from biphasic_jax.objectives.objective import segment_starts

CHUNK = 256  # predictions whose logits exist at one time


@dataclass(frozen=True)
class Score:
    """One segment: the sum of log p(token | all others) over its ordinary tokens, in nats, and their count."""

    log_likelihood: float
    tokens: int


def pseudo_perplexity(scores: Sequence[Score]) -> float:
    """exp(-sum of all scores / count of all tokens), over a whole corpus at once (arXiv 1910.14659, eq. 3)."""
    tokens = sum(score.tokens for score in scores)
    if not tokens:
        raise UserError("pseudo-perplexity of no token: give text that holds more than special tokens")
    return math.exp(-sum(score.log_likelihood for score in scores) / tokens)


def score_rows(
    model: Any,
    params: Any,
    vocabulary: Vocabulary,
    tokens_BxL: np.ndarray,
    segments_BxL: np.ndarray,
    *,
    batch_rows: int = 32,
    shifted: bool = False,
) -> list[list[Score]]:
    """For each row, the scores of its segments 1, 2, ...; bidirectional.

    tokens_BxL, segments_BxL: int32 rows (segment 0 is padding). batch_rows: masked copies a forward pass;
    no score depends on it. shifted: token i is read at position i - 1, and the first of a segment not
    scored. Special tokens stay visible and are not scored.
    """
    rank_BxL = _rank_in_segment(tokens_BxL, segments_BxL, vocabulary, shifted)
    copies = [(b, j) for b in range(len(rank_BxL)) for j in range(rank_BxL[b].max(initial=-1) + 1)]
    batches = [copies[i : i + batch_rows] for i in range(0, len(copies), batch_rows)]
    sizes = [sum(int((rank_BxL[b] == j).sum()) for b, j in batch) for batch in batches]
    room = 1 << (max(sizes, default=1) - 1).bit_length()  # a power of two: few shapes to compile

    segment_count = int(segments_BxL.max(initial=0))
    sums_BxS = np.zeros((len(tokens_BxL), segment_count + 1))
    counts_BxS = np.zeros((len(tokens_BxL), segment_count + 1), np.int64)
    length = tokens_BxL.shape[1]
    for batch in batches:
        row_C = np.zeros(batch_rows, np.int64)  # a short last batch is filled up with unmasked copies of row 0
        rank_C = np.full(batch_rows, -2)
        row_C[: len(batch)], rank_C[: len(batch)] = np.array(batch).T
        masked_CxL = rank_BxL[row_C] == rank_C[:, None]
        tokens_CxL = np.where(masked_CxL, vocabulary.mask, tokens_BxL[row_C]).astype(np.int32)
        copy_P, position_P = np.nonzero(masked_CxL)
        read_P = np.zeros(room, np.int32)
        read_P[: len(copy_P)] = copy_P * length + position_P - shifted
        target_P = np.zeros(room, np.int32)
        target_P[: len(copy_P)] = tokens_BxL[row_C[copy_P], position_P]
        logp_P = np.asarray(_log_probabilities(model, params, tokens_CxL, segments_BxL[row_C], read_P, target_P))
        where = row_C[copy_P], segments_BxL[row_C[copy_P], position_P]
        np.add.at(sums_BxS, where, logp_P[: len(copy_P)].astype(np.float64))
        np.add.at(counts_BxS, where, 1)
    held = [int(segments_L.max(initial=0)) for segments_L in segments_BxL]
    return [
        [Score(float(sums_BxS[b, s]), int(counts_BxS[b, s])) for s in range(1, held[b] + 1)] for b in range(len(held))
    ]


def score_sentences(
    model: Any,
    params: Any,
    vocabulary: Vocabulary,
    sentences: Sequence[Sequence[int]],
    row_length: int,
    *,
    batch_rows: int = 32,
    shifted: bool = False,
) -> list[Score]:
    """The score of each sentence, given as token ids; they are packed into rows of `row_length`."""
    for i, ids in enumerate(sentences):
        if len(ids) > row_length:
            raise UserError(f"sentence {i + 1} has {len(ids)} tokens, but a row holds {row_length}: shorten it")
    rows = list(_pack_in_order(sentences, row_length, vocabulary.pad))
    tokens_BxL, segments_BxL = (np.stack(arrays) for arrays in zip(*rows, strict=True))
    scores = score_rows(model, params, vocabulary, tokens_BxL, segments_BxL, batch_rows=batch_rows, shifted=shifted)
    return [score for row in scores for score in row]


def _rank_in_segment(
    tokens_BxL: np.ndarray, segments_BxL: np.ndarray, vocabulary: Vocabulary, shifted: bool
) -> np.ndarray:
    """How many scored tokens stand before each scored token in its segment; -1 where none is scored."""
    starts_BxL = segment_starts(segments_BxL)
    scored_BxL = (segments_BxL > 0) & ~vocabulary.special_V[tokens_BxL]
    if shifted:
        scored_BxL &= ~starts_BxL
    seen_BxL = np.cumsum(scored_BxL, axis=1) - scored_BxL  # scored tokens of the row before each position
    at_start_BxL = np.maximum.accumulate(np.where(starts_BxL, seen_BxL, 0), axis=1)
    return np.where(scored_BxL, seen_BxL - at_start_BxL, -1)


def _pack_in_order(
    sentences: Sequence[Sequence[int]], row_length: int, pad: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows (tokens, segments) that hold the sentences one behind another, a segment each."""
    tokens_L, segments_L = np.full(row_length, pad, np.int32), np.zeros(row_length, np.int32)
    used = 0
    for ids in sentences:
        if used + len(ids) > row_length:
            yield tokens_L.copy(), segments_L.copy()
            tokens_L[:], segments_L[:], used = pad, 0, 0
        tokens_L[used : used + len(ids)] = ids
        segments_L[used : used + len(ids)] = segments_L.max() + 1
        used += len(ids)
    if used:
        yield tokens_L, segments_L


@partial(jax.jit, static_argnames="model")
def _log_probabilities(model: Any, params: Any, tokens_CxL: Any, segments_CxL: Any, read_P: Any, target_P: Any) -> Any:
    """log p(target) in float32 at the flat positions `read_P`; the logits of `CHUNK` of them at a time."""
    x_CxLxD = model.features({"params": params}, tokens_CxL, segments_CxL, causal=False)
    x_PxD = x_CxLxD.reshape(-1, x_CxLxD.shape[-1])[read_P]
    kernel_DxV = head_kernel(params)

    def chunk(features_and_targets: tuple[Any, Any]) -> Any:
        x_KxD, target_K = features_and_targets
        logp_KxV = jax.nn.log_softmax(project(x_KxD, kernel_DxV))
        return jnp.take_along_axis(logp_KxV, target_K[:, None], axis=1)[:, 0]

    size = min(CHUNK, len(read_P))
    return jax.lax.map(chunk, (x_PxD.reshape(-1, size, x_PxD.shape[-1]), target_P.reshape(-1, size))).reshape(-1)
