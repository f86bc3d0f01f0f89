"""Which row is global example g? Index arithmetic alone: it reads nothing and remembers nothing.

Update k reads the examples k*B to (k+1)*B - 1, so the order is a function of the step, whatever the number
of processes, workers and devices.
"""

import functools
from collections.abc import Sequence

import numpy as np
from grain.experimental import index_shuffle

from biphasic_jax.data.randomness import fold, generator
from biphasic_jax.data.shards import SourceRows
from biphasic_jax.errors import UserError

LONGEST_PERIOD = 1024  # examples; shares finer than its inverse are rounded
MOST_ROWS = 2**32  # of one permutation: index_shuffle works on 32 bits and never returns beyond
FEW_ROWS = 2**16  # up to here a permutation is drawn whole: index_shuffle walks over 2**16 places to find few


class Order:
    """The order of a split's rows over all epochs, fixed by `seed`.

    Without weights all sources are one pool, and an epoch serves each row once, in a permutation of its own.
    With weights, every period of P examples holds a fixed number of each source, in an order of its own, so
    that each prefix keeps close to the weights; and each source runs through epochs of its own.
    Raises `UserError` for sources that cannot be served so.
    """

    def __init__(self, sources: Sequence[SourceRows], seed: int):
        self.seed = seed
        weights = [source.weight for source in sources]
        if None in weights:  # `prepare` gives all sources a weight, or none
            pool = sum(source.rows for source in sources)
            sources, weights = [SourceRows("data.sources", None, 0, pool)], [1.0]
        for source in sources:
            if not source.rows:
                raise UserError(f"{source.name}: there is no row to train on; give more text or lower data.validation")
            if source.rows > MOST_ROWS:
                raise UserError(f"{source.name}: {source.rows} rows are more than {MOST_ROWS}; split it into sources")
        self.first_S = np.array([source.first for source in sources], np.int64)
        self.rows_S = np.array([source.rows for source in sources], np.int64)
        self.share_S = period_shares(np.array(weights, np.float64))
        for source, share in zip(sources, self.share_S, strict=True):
            if not share:
                raise UserError(
                    f"{source.name}: its weight {source.weight} is under 1/{LONGEST_PERIOD} of the sum, "
                    f"which would never be read; raise it or leave the source out"
                )
        self.source_P = np.repeat(np.arange(len(sources)), self.share_S)  # of a period's places before the shuffle
        self.rank_P = np.concatenate([np.arange(share) for share in self.share_S])  # of each among its source's

    def locate(self, index_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row_G, epoch_G), int64, of global examples: row numbers of the split, and the epoch of their source."""
        index_G = np.asarray(index_G, np.int64)
        source_G, draw_G = self._draws(index_G)
        epoch_G, place_G = np.divmod(draw_G, self.rows_S[source_G])
        row_G = np.empty_like(index_G)
        for source, epoch in set(zip(source_G.tolist(), epoch_G.tolist(), strict=True)):
            inside = (source_G == source) & (epoch_G == epoch)
            row_G[inside] = permuted(self.seed, source, epoch, int(self.rows_S[source]), place_G[inside])
        return row_G + self.first_S[source_G], epoch_G

    def _draws(self, index_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source_G, draw_G): example g is draw number draw_G[g], counted from 0 over all epochs, of its source."""
        if len(self.first_S) == 1:
            return np.zeros_like(index_G), index_G
        period_G, place_G = np.divmod(index_G, len(self.source_P))
        source_G, rank_G = np.empty_like(index_G), np.empty_like(index_G)
        for period in np.unique(period_G):
            source_P = generator(self.seed, "mixture", int(period)).permutation(self.source_P)
            rank_P = np.empty_like(self.rank_P)
            rank_P[np.argsort(source_P, kind="stable")] = self.rank_P
            inside = period_G == period
            source_G[inside], rank_G[inside] = source_P[place_G[inside]], rank_P[place_G[inside]]
        return source_G, period_G * self.share_S[source_G] + rank_G


def permuted(seed: int, source: int, epoch: int, rows: int, place_N: np.ndarray) -> np.ndarray:
    """Where an epoch's permutation of 0 .. rows - 1 sends each of `place_N`."""
    if rows <= FEW_ROWS:
        return _permutation(seed, source, epoch, rows)[place_N]
    key = fold(seed, f"order/{source}", epoch)
    last = rows - 1
    # grain 0.2.18 repeats a row and leaves one out where `last` is a power of 4: there one more place is shuffled,
    # and who is sent to it goes on until he lands inside.
    most = rows if last.bit_count() == 1 else last
    row_N = np.array([index_shuffle(place, max_index=most, seed=key, rounds=4) for place in place_N.tolist()])
    for n in np.flatnonzero(row_N > last):
        row_N[n] = index_shuffle(int(row_N[n]), max_index=most, seed=key, rounds=4)
    return row_N


@functools.lru_cache(maxsize=32)
def _permutation(seed: int, source: int, epoch: int, rows: int) -> np.ndarray:
    return generator(seed, f"order/{source}", epoch).permutation(rows)


def period_shares(weight_S: np.ndarray) -> np.ndarray:
    """Examples of each source in a period: the shortest period that meets the weights, else the longest one.

    There the shares are rounded by largest remainder, each to within one example.
    """
    weight_S = weight_S / weight_S.sum()
    period_P = np.arange(1, LONGEST_PERIOD + 1)
    exact_PxS = period_P[:, None] * weight_S
    meets_P = np.all(np.abs(exact_PxS - np.rint(exact_PxS)) < 1e-6, axis=1)
    if meets_P.any():
        return np.rint(exact_PxS[np.argmax(meets_P)]).astype(np.int64)
    share_S = np.floor(exact_PxS[-1]).astype(np.int64)
    remainder_S = exact_PxS[-1] - share_S
    share_S[np.argsort(-remainder_S, kind="stable")[: LONGEST_PERIOD - share_S.sum()]] += 1
    return share_S
