"""Pure corruptions: which positions are selected, and what they become.

Everything here takes the random numbers, or the rows' generators, as arguments, and works on positions that
`ordinary_positions` allows: never on special tokens or padding, never across segments. Each way of selecting
takes every allowed position with probability `rate`, at the ends of segments too. (An exact count of tokens in
spans is exact as a count; of a position it is so but for 1 / the number of spans.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from biphasic_jax.objectives.objective import segment_starts


def uniform(generators: Sequence[np.random.Generator], length: int, dtype: type = np.float32) -> np.ndarray:
    """Uniform draws of [0, 1), (B, length) float32 or float64: row b from the b-th generator."""
    draw_BxL: np.ndarray = np.empty((len(generators), length), dtype)
    for generator, draw_L in zip(generators, draw_BxL, strict=True):
        generator.random(out=draw_L, dtype=dtype)
    return draw_BxL


def ordinary_positions(tokens_BxL: np.ndarray, segments_BxL: np.ndarray, special_V: np.ndarray) -> np.ndarray:
    """Where a real token that is not special stands, (B, L) bool."""
    return (segments_BxL > 0) & ~special_V.take(tokens_BxL)


def word_heads(
    tokens_BxL: np.ndarray, segments_BxL: np.ndarray, allowed_BxL: np.ndarray, word_start_V: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(heads_BxL bool, head_BxL int64): where words begin, and for each allowed position where its word does.

    A word also begins after a position that is not allowed and at the start of a segment.
    """
    starts_BxL = word_start_V.take(tokens_BxL) | segment_starts(segments_BxL)
    starts_BxL[:, 1:] |= ~allowed_BxL[:, :-1]
    heads_BxL = allowed_BxL & starts_BxL
    position_L = np.arange(tokens_BxL.shape[1])
    return heads_BxL, np.maximum.accumulate(np.where(heads_BxL, position_L, 0), axis=1)


def exact_counts(allowed_BxL: np.ndarray, rate: float, generators: Sequence[np.random.Generator]) -> list[int]:
    """How many positions to take of each row: rate x allowed, rounded up or down at random without bias."""
    draws = [generator.random() for generator in generators]
    counts = np.count_nonzero(allowed_BxL, axis=1).tolist()
    return [min(n, int(np.floor(rate * n + draw))) for n, draw in zip(counts, draws, strict=True)]


def choose_exactly(draw_BxL: np.ndarray, allowed_BxL: np.ndarray, count_B: Sequence[int]) -> np.ndarray:
    """The `count_B[b]` allowed positions of row b with the smallest draws, (B, L) bool."""
    chosen_BxL = np.zeros(allowed_BxL.shape, bool)
    ranked_BxL = np.where(allowed_BxL, draw_BxL, np.float32(2))
    for ranked_L, chosen_L, count in zip(ranked_BxL, chosen_BxL, count_B, strict=True):
        if count:
            chosen_L[np.argpartition(ranked_L, count - 1)[:count]] = True
    return chosen_BxL


@dataclass(frozen=True, eq=False)
class Spans:
    """Spans of geometric length with p = 1 / mean, truncated at K (SpanBERT, arXiv 1907.10529, section 3.1).

    A row's spans are a stationary renewal process: lengths as above, then gaps whose mean g makes spans cover
    the share `rate`: g = m (1 - rate) / rate with m the mean of the truncated lengths. Gaps are geometric from
    1 on, so that spans do not touch; where g < 1 (rates near 1) a gap is 1 with probability g, else 0.
    """

    length_cdf_K: np.ndarray  # of the lengths 1 to K
    rest_cdf_K: np.ndarray  # of what is left of the span that covers a given position: P(rest = j) = P(length >= j) / m
    mean: float
    variance: float

    @classmethod
    def geometric(cls, mean: float, most: int) -> "Spans":
        length_K = np.arange(1, most + 1)
        share_K = (1 - 1 / mean) ** (length_K - 1.0)
        share_K /= share_K.sum()
        m = float(share_K @ length_K)
        at_least_K = share_K[::-1].cumsum()[::-1]
        cdfs = np.cumsum(share_K), np.cumsum(at_least_K / m)
        for cdf_K in cdfs:
            cdf_K[-1] = 1  # against rounding: a draw is always below it
        return cls(*cdfs, m, float(share_K @ (length_K - m) ** 2))

    def gap(self, rate: float) -> float:
        """The mean gap between spans that cover the share `rate`."""
        return self.mean * (1 - rate) / rate

    def variance_per_position(self, rate: float) -> float:
        """Of the number of selected positions, per allowed position.

        That of an alternating renewal process in the long run (Cox, Renewal Theory, 1962), or of independent
        draws where that is more: segments may be shorter than a span.
        """
        m, g = self.mean, self.gap(rate)
        gap_variance = g * (g - 1) if g >= 1 else g * (1 - g)
        return max((m * m * gap_variance + g * g * self.variance) / (m + g) ** 3, rate * (1 - rate))

    def draw(self, generator: np.random.Generator, length: int, rate: float) -> np.ndarray:
        """(length,) int64: even numbers inside spans, odd ones in gaps; a number a span or gap."""
        g = self.gap(rate)
        pieces: list[np.ndarray] = []
        covered = 0
        while covered < length:
            n = 16 + int(1.25 * (length - covered) / (self.mean + g))
            piece = np.empty(2 * n, np.int64)
            piece[0::2] = 1 + np.searchsorted(self.length_cdf_K, generator.random(n), side="right")
            piece[1::2] = generator.geometric(1 / g, n) if g >= 1 else generator.random(n) < g
            if not pieces:  # the process has been running: position 0 is inside a span with probability `rate`
                inside = generator.random() < rate
                piece[0] = 1 + np.searchsorted(self.rest_cdf_K, generator.random(), side="right") if inside else 0
                piece[1] = piece[1] if inside else max(piece[1], 1)
            pieces.append(piece)
            covered += int(piece.sum())
        runs = np.concatenate(pieces)
        return np.repeat(np.arange(len(runs)), runs)[:length]

    def select(
        self,
        generator: np.random.Generator,
        segments_L: np.ndarray,
        allowed_L: np.ndarray,
        rate: float,
        count: int | None = None,
    ) -> np.ndarray:
        """The selected positions of a row, (L,) bool; exactly `count` of them if it is given.

        The process runs over a line on which the allowed stretches of the row lie with K - 1 places between
        them, so that no span reaches from one into the next; what falls between them is lost. For a count,
        it runs at a higher rate and spans are dropped in random order; of the last one the end is dropped.
        """
        selected_L = np.zeros(len(allowed_L), bool)
        places = np.flatnonzero(allowed_L)
        if not len(places) or count == 0:
            return selected_L
        stretch = (np.diff(places, prepend=-2) > 1) | (np.diff(segments_L[places], prepend=-1) != 0)
        line = np.arange(len(places)) + (len(self.length_cdf_K) - 1) * (np.cumsum(stretch) - 1)
        if count is None:
            selected_L[places[self.draw(generator, line[-1] + 1, rate)[line] % 2 == 0]] = True
            return selected_L
        margin = 4 * np.sqrt(self.variance_per_position(rate) / len(places))
        while True:
            rate = min(1.0, rate + margin)
            run = self.draw(generator, line[-1] + 1, rate)[line]
            inside = np.flatnonzero(run % 2 == 0)
            if len(inside) >= count:
                break
        first_dropped = np.argsort(generator.random(run[-1] + 1)[run[inside]], kind="stable")
        selected_L[places[inside[first_dropped[:count]]]] = True
        return selected_L


def replace(
    tokens_BxL: np.ndarray,
    selected_BxL: np.ndarray,
    draw_BxL: np.ndarray,
    mask_share: float,
    random_share: float,
    mask: int,
    ordinary_R: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(fed_BxL, masked_BxL, random_BxL): selected tokens become `mask`, or one of `ordinary_R`, or stay.

    `draw_BxL`, float64 of [0, 1), decides which; inside the random share it also picks the id, uniformly.
    """
    masked_BxL = selected_BxL & (draw_BxL < mask_share)
    random_BxL = selected_BxL & (draw_BxL >= mask_share) & (draw_BxL < mask_share + random_share)
    fed_BxL = np.where(masked_BxL, np.int32(mask), tokens_BxL)
    if random_share:
        place_N = np.flatnonzero(random_BxL)
        scaled_N = (draw_BxL.ravel()[place_N] - mask_share) * (len(ordinary_R) / random_share)
        fed_BxL.ravel()[place_N] = ordinary_R[np.minimum(scaled_N.astype(np.int64), len(ordinary_R) - 1)]
    return fed_BxL, masked_BxL, random_BxL
