"""A row: a fixed-length line of tokens, the unit that the pipeline serves."""

from dataclasses import dataclass

import numpy as np


@dataclass
class RowBatch:
    """B rows of length L before any objective.

    tokens_BxL: int32, the pad id in padding. segments_BxL: int32, 1, 2, ... in a row, 0 in padding.
    index_B: int64, global example index (its epoch included). row_B: int64, the row that it is.
    """

    tokens_BxL: np.ndarray
    segments_BxL: np.ndarray
    index_B: np.ndarray
    row_B: np.ndarray
