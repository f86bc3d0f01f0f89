"""Rows for the tests of objectives: documents that begin and end with special tokens, and padding."""

import numpy as np

from biphasic_jax.data.rows import RowBatch
from biphasic_jax.data.vocabulary import Vocabulary

SIZE = 200
BOS, EOS, MASK, PAD = range(4)


def vocabulary(pad=PAD):
    """Ids 0 to 3 and 100 to 109 are special; of the others every third begins a word."""
    special_V = np.isin(np.arange(SIZE), [0, 1, 2, 3, *range(100, 110)])
    return Vocabulary(
        size=SIZE,
        bos=BOS,
        eos=EOS,
        pad=pad,
        mask=MASK,
        special_V=special_V,
        word_start_V=special_V | (np.arange(SIZE) % 3 == 0),
        bytes_V=np.where(special_V, 0, 3).astype(np.int32),
    )


def row_batch(count=8, length=256, documents=4, padding=0.1, seed=0, first=0, bos=True, pad=PAD):
    """`count` rows with the global indices first, first + 1, ...; special ids 100 to 109 stand in the text too."""
    random = np.random.default_rng(seed)
    ordinary = vocabulary().ordinary
    tokens_BxL = np.full((count, length), pad, np.int32)
    segments_BxL = np.zeros((count, length), np.int32)
    for b in range(count):
        end = length - random.integers(0, int(padding * length) + 1) if padding else length
        cuts = np.sort(random.choice(np.arange(3, end - 3), documents - 1, replace=False)) if documents > 1 else []
        for s, (start, stop) in enumerate(zip([0, *cuts], [*cuts, end], strict=True)):
            text = random.choice(ordinary, stop - start)
            text[random.random(len(text)) < 0.02] = 100 + random.integers(10)
            if bos:
                text[0] = BOS
            text[-1] = EOS
            tokens_BxL[b, start:stop] = text
            segments_BxL[b, start:stop] = s + 1
    index_B = np.arange(first, first + count, dtype=np.int64)
    return RowBatch(tokens_BxL, segments_BxL, index_B, index_B % 97)


def take(rows, where):
    """Some rows of a batch."""
    return RowBatch(rows.tokens_BxL[where], rows.segments_BxL[where], rows.index_B[where], rows.row_B[where])
