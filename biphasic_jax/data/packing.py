"""Documents into rows, by three policies. Nothing is dropped: what does not fill a row becomes padding.

documents     A document is a segment; a longer one is cut into pieces of a row, and what remains is packed with
              other remainders, each into the fullest open row that has room (best fit, bounded open rows).
random_split  The paper's: documents are one stream, and a row holds two blocks of it, r and L - r tokens, with r
              uniform in lo .. L - lo, lo = min(12, L // 4) (arXiv 2507.00994, footnote 6).
row           The stream again; a row is one segment.

A document here is an array of token ids that ends in its end-of-document token.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from biphasic_jax.data.randomness import generator

OPEN_ROWS = 128
SHORTEST_BLOCK = 12


@dataclass(frozen=True)
class PackedRow:
    """tokens_N: N <= L real tokens; lengths_S: int32, of the row's segments, in order; they add up to N."""

    tokens_N: np.ndarray
    lengths_S: np.ndarray


def pack(documents: Iterable[np.ndarray], policy: str, row_length: int, seed: int, unit: str) -> Iterator[PackedRow]:
    """The rows of a stream of documents; a function of its arguments alone, in memory of a few rows.

    `seed` and `unit` (the name of the stream) fix the random splits.
    """
    if policy == "documents":
        return pack_documents(documents, row_length)
    if policy == "random_split":
        return cut_stream(documents, row_length, lambda row: random_split(row_length, seed, unit, row))
    if policy == "row":
        return cut_stream(documents, row_length, lambda row: np.array([row_length]))
    raise ValueError(f"unknown segment policy {policy!r}")


def random_split(row_length: int, seed: int, unit: str, row: int) -> np.ndarray:
    """The lengths (r, L - r) of the two blocks of row `row` of a unit."""
    shortest = min(SHORTEST_BLOCK, row_length // 4)
    r = generator(seed, f"random_split/{unit}", row).integers(shortest, row_length - shortest, endpoint=True)
    return np.array([r, row_length - r])


def cut_stream(
    documents: Iterable[np.ndarray], row_length: int, lengths_of: Callable[[int], np.ndarray]
) -> Iterator[PackedRow]:
    """Rows of one stream of tokens; row i has segments of `lengths_of(i)`, the last row what is left."""
    waiting: list[np.ndarray] = []
    held, row = 0, 0
    for document_N in documents:
        waiting.append(document_N)
        held += len(document_N)
        if held < row_length:
            continue
        stream_M = np.concatenate(waiting)
        cut = 0
        while held - cut >= row_length:
            yield PackedRow(stream_M[cut : cut + row_length], lengths_of(row))
            cut += row_length
            row += 1
        waiting, held = [stream_M[cut:]], held - cut
    if held:
        ends = np.minimum(np.cumsum(lengths_of(row)), held)
        lengths = np.diff(ends, prepend=0)
        yield PackedRow(np.concatenate(waiting), lengths[lengths > 0])


def pack_documents(documents: Iterable[np.ndarray], row_length: int, open_rows: int = OPEN_ROWS) -> Iterator[PackedRow]:
    """Rows whose segments are documents or pieces of them; at most `open_rows` rows wait for more."""
    rows: list[list[np.ndarray]] = [[] for _ in range(open_rows)]
    room = np.full(open_rows, row_length)  # of each open row; an empty one has it all
    for document_N in documents:
        cut = len(document_N) // row_length * row_length
        for start in range(0, cut, row_length):
            yield _row([document_N[start : start + row_length]])
        piece_N = document_N[cut:]
        if not len(piece_N):
            continue
        fit = np.where(room >= len(piece_N), room, row_length + 1)
        slot = int(np.argmin(fit))
        if fit[slot] > row_length:  # no row has room: the fullest one goes
            slot = int(np.argmin(room))
            yield _row(rows[slot])
            rows[slot], room[slot] = [], row_length
        rows[slot].append(piece_N)
        room[slot] -= len(piece_N)
        if not room[slot]:
            yield _row(rows[slot])
            rows[slot], room[slot] = [], row_length
    for pieces in rows:
        if pieces:
            yield _row(pieces)


def _row(pieces: list[np.ndarray]) -> PackedRow:
    return PackedRow(np.concatenate(pieces), np.array([len(piece) for piece in pieces], np.int32))
