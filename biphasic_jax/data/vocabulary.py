"""What the training code must know of a tokenizer: sizes, special ids, word starts, bytes."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Ids are ints below `size`; `pad` may equal `eos`.

    special_V, word_start_V: bool. A special id is never masked, and never a random replacement. A token
    with word_start begins a word; special tokens do too. bytes_V: int32, UTF-8 bytes of each token's text,
    0 for special ones.
    """

    size: int
    bos: int | None
    eos: int
    pad: int
    mask: int
    special_V: np.ndarray
    word_start_V: np.ndarray
    bytes_V: np.ndarray

    @property
    def ordinary(self) -> np.ndarray:
        """The ids that are not special, ascending, int32."""
        return np.flatnonzero(~self.special_V).astype(np.int32)
