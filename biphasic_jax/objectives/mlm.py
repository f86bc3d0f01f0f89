"""Masked language modelling: some tokens are hidden, the rest of the segment on both sides tells them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from biphasic_jax.data.randomness import generator
from biphasic_jax.data.rows import RowBatch
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.objectives import masking
from biphasic_jax.objectives.objective import Examples, Objective, documents_of, segment_starts
from biphasic_jax.objectives.rate import check_rate, rate_at, rates_of

SELECTIONS = ("tokens", "words", "spans")
COUNTINGS = ("bernoulli", "exact")
SHARES = ("mask_share", "random_share", "keep_share")
DEVIATIONS = 6  # of the room for targets beyond the expected ones: exceeded once in 10^9 groups
WORD_SPREAD = 6  # tokens: mean squared over mean word length; in English 1.1 at 32,768 ids, 3.5 at 512
SHORTEST_ROW = 8  # tokens


class Mlm(Objective):
    """Settings of a phase, with their defaults:

    mask_rate       0.4: the share of ordinary tokens that is selected; a number or a schedule (rate.py).
    selection       tokens, words (whole ones), spans (geometric lengths).
    counting        bernoulli: each token, word or span by itself (the paper's); exact: the same share of each
                    row's tokens (spans too), or words, up to rounding.
    mask_share, random_share, keep_share: what becomes of a selected token: the mask token (paper: all), a
                    random ordinary one, itself (BERT: 0.8, 0.1, 0.1). All of them are targets.
    span_mean, span_max: tokens; lengths are geometric with p = 1 / span_mean, truncated at span_max.
    shifted         False; True: token i is predicted at i - 1 (MNTP, arXiv 2404.05961), so that a segment's
                    first token, or word, is never selected.

    Special tokens and padding are never selected, and no word or span crosses them or a segment's border.
    The selection at a lower rate is part of that at a higher one (tokens and words).
    """

    name: ClassVar[str] = "mlm"
    causal: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {
        "mask_rate": 0.4,
        "selection": "tokens",
        "counting": "bernoulli",
        "mask_share": 1.0,
        "random_share": 0.0,
        "keep_share": 0.0,
        "span_mean": 5.0,
        "span_max": 10,
        "shifted": False,
    }

    def __init__(self, settings: Mapping[str, Any], vocabulary: Vocabulary, seed: int, steps: tuple[int, int]):
        super().__init__(settings, vocabulary, seed, steps)
        self.ordinary_R = vocabulary.ordinary
        self.spans = masking.Spans.geometric(self.settings["span_mean"], self.settings["span_max"])

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        check_rate("mask_rate", settings["mask_rate"])
        for key, choices in (("selection", SELECTIONS), ("counting", COUNTINGS), ("shifted", (False, True))):
            if settings[key] not in choices:
                raise UserError(f"{key}={settings[key]!r} is not one of {', '.join(map(str, choices))}")
        shares = [settings[key] for key in SHARES]
        numbers = all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares)
        if not numbers or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            given = ", ".join(f"{key}={share!r}" for key, share in zip(SHARES, shares, strict=True))
            raise UserError(f"{given}: give three shares that add up to 1, such as 0.8, 0.1, 0.1")
        mean, most = settings["span_mean"], settings["span_max"]
        if not isinstance(mean, int | float) or not mean >= 1:
            raise UserError(f"span_mean={mean!r}: give a number of tokens, 1 or more")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise UserError(f"span_max={most!r}: give a whole number of tokens, 1 or more")

    def rate(self, step: int) -> float:
        return rate_at(self.settings["mask_rate"], step, self.steps)

    def transform(self, rows: RowBatch, step: int) -> Examples:
        """Counts a row: tokens, candidates, selected, masked, random, kept, documents, documents_without_target."""
        generators = [generator(self.seed, "mask", index) for index in rows.index_B.tolist()]
        candidates_BxL, selected_BxL = self._select(rows, self.rate(step), generators)
        fed_BxL, masked_BxL, random_BxL = self._replace(rows.tokens_BxL, selected_BxL, generators)
        targets_BxL, weights_BxL = rows.tokens_BxL, selected_BxL.astype(np.float32)
        if self.settings["shifted"]:
            targets_BxL = np.roll(targets_BxL, -1, axis=1)
            weights_BxL = np.roll(weights_BxL, -1, axis=1)  # position 0 is never selected: nothing wraps
        documents_B, without_B = documents_of(rows.segments_BxL, selected_BxL)
        selected_B, masked_B, random_B = (_per_row(where) for where in (selected_BxL, masked_BxL, random_BxL))
        counts = {
            "tokens": _per_row(rows.segments_BxL),
            "candidates": _per_row(candidates_BxL),
            "selected": selected_B,
            "masked": masked_B,
            "random": random_B,
            "kept": selected_B - masked_B - random_B,
            "documents": documents_B,
            "documents_without_target": without_B,
        }
        return Examples(fed_BxL, targets_BxL, weights_BxL, counts)

    def _select(
        self, rows: RowBatch, rate: float, generators: Sequence[np.random.Generator]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(candidates_BxL, selected_BxL) bool."""
        tokens_BxL, segments_BxL = rows.tokens_BxL, rows.segments_BxL
        selection, exact = self.settings["selection"], self.settings["counting"] == "exact"
        allowed_BxL = masking.ordinary_positions(tokens_BxL, segments_BxL, self.vocabulary.special_V)
        usable_BxL = ~segment_starts(segments_BxL) if self.settings["shifted"] else None
        if selection == "words":
            heads_BxL, head_BxL = masking.word_heads(
                tokens_BxL, segments_BxL, allowed_BxL, self.vocabulary.word_start_V
            )
            if usable_BxL is not None:
                heads_BxL &= usable_BxL
                allowed_BxL &= np.take_along_axis(usable_BxL, head_BxL, axis=1)
            chosen_BxL = self._choose(heads_BxL, rate, exact, generators)
            return allowed_BxL, allowed_BxL & np.take_along_axis(chosen_BxL, head_BxL, axis=1)
        if usable_BxL is not None:
            allowed_BxL &= usable_BxL
        if selection == "tokens":
            return allowed_BxL, self._choose(allowed_BxL, rate, exact, generators)
        count_B = masking.exact_counts(allowed_BxL, rate, generators) if exact else [None] * len(generators)
        selected = [
            self.spans.select(generator, segments_L, allowed_L, rate, count)
            for generator, segments_L, allowed_L, count in zip(
                generators, segments_BxL, allowed_BxL, count_B, strict=True
            )
        ]
        return allowed_BxL, np.stack(selected)

    @staticmethod
    def _choose(
        allowed_BxL: np.ndarray, rate: float, exact: bool, generators: Sequence[np.random.Generator]
    ) -> np.ndarray:
        length = allowed_BxL.shape[1]
        if exact:
            count_B = masking.exact_counts(allowed_BxL, rate, generators)
            return masking.choose_exactly(masking.uniform(generators, length), allowed_BxL, count_B)
        return allowed_BxL & (masking.uniform(generators, length) < rate)

    def _replace(
        self, tokens_BxL: np.ndarray, selected_BxL: np.ndarray, generators: Sequence[np.random.Generator]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mask, mask_share = self.vocabulary.mask, self.settings["mask_share"]
        if mask_share == 1:
            return np.where(selected_BxL, np.int32(mask), tokens_BxL), selected_BxL, np.zeros_like(selected_BxL)
        draw_BxL = masking.uniform(generators, tokens_BxL.shape[1], np.float64)
        return masking.replace(
            tokens_BxL, selected_BxL, draw_BxL, mask_share, self.settings["random_share"], mask, self.ordinary_R
        )

    def predictions(self, positions: int) -> int:
        """Room for the targets among `positions` positions: those expected at the phase's highest rate, and six
        standard deviations.

        The room belongs to a group of rows as a whole. Deviations grow with the square root, so a group of 16
        rows needs a quarter of what single rows would waste; the head computes all of the room, used or not.
        """
        rates = rates_of(self.settings["mask_rate"])
        room = max(rate * positions + DEVIATIONS * math.sqrt(self._variance(rate) * positions) for rate in rates)
        step = 64 if positions >= 1024 else 8
        return min(positions, math.ceil(room / step) * step)

    def _variance(self, rate: float) -> float:
        """Of the number of targets, per position, at most."""
        if self.settings["selection"] == "words":
            return WORD_SPREAD * rate * (1 - rate)
        if self.settings["counting"] == "exact":
            return 1 / 4 / SHORTEST_ROW  # only the rounding of each row is random
        return self.spans.variance_per_position(rate) if self.settings["selection"] == "spans" else rate * (1 - rate)


def _per_row(where_BxL: np.ndarray) -> np.ndarray:
    return np.count_nonzero(where_BxL, axis=1).astype(np.int32)
