"""Causal language modelling: every token of a segment predicts the next one."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from biphasic_jax.data.rows import RowBatch
from biphasic_jax.errors import UserError
from biphasic_jax.objectives.objective import Examples, Objective, documents_of


class Clm(Objective):
    """Settings: `segment_end_weight`, 0 or 1: whether the last token of a segment predicts the next one's first.

    The weights come from the segments, never from ids: where pad and eos are one id, a real eos is a target.
    Nothing here divides segments further, so documents that share a segment predict across their border.
    """

    name: ClassVar[str] = "clm"
    causal: ClassVar[bool] = True
    defaults: ClassVar[dict[str, Any]] = {"segment_end_weight": 0.0}

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        if settings["segment_end_weight"] not in (0, 1):
            raise UserError(
                f"segment_end_weight={settings['segment_end_weight']!r}: give 0 (a segment's last token predicts "
                f"nothing) or 1 (it predicts the next segment's first)"
            )

    def transform(self, rows: RowBatch, step: int) -> Examples:
        """The one place of the shift: position i has the target i + 1; the last position of a row has weight 0."""
        targets_BxL = np.full_like(rows.tokens_BxL, self.vocabulary.pad)
        targets_BxL[:, :-1] = rows.tokens_BxL[:, 1:]
        here_BxL, next_BxL = rows.segments_BxL[:, :-1], rows.segments_BxL[:, 1:]
        weights_BxL = np.zeros(rows.tokens_BxL.shape, np.float32)
        if self.settings["segment_end_weight"]:
            weights_BxL[:, :-1] = (here_BxL > 0) & (next_BxL > 0)
        else:
            weights_BxL[:, :-1] = (here_BxL == next_BxL) & (next_BxL > 0)
        documents_B, without_B = documents_of(rows.segments_BxL, weights_BxL > 0)
        counts = {
            "tokens": np.count_nonzero(rows.segments_BxL, axis=1).astype(np.int32),
            "documents": documents_B,
            "documents_without_target": without_B,
        }
        return Examples(rows.tokens_BxL, targets_BxL, weights_BxL, counts)
