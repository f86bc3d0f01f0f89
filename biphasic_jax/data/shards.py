"""Rows on disk: ArrayRecord shards, one row a record, each under its own checksum.

A record: CRC-32 of the rest (uint32), number of segments (uint32), their lengths (uint32 each), the tokens
(uint16, or uint32 where the vocabulary needs it); little-endian. Padding is not stored: it fills the row's end.
Records are neither grouped nor compressed: rows are read in random order, and 2 bytes a token read fastest.
"""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from biphasic_jax.data.manifest import Manifest, Shard, cannot_write, read_manifest, temporary_name
from biphasic_jax.errors import UserError

# One row a chunk, so that a random read fetches one row; no thread pool, so that reading survives a fork.
WRITER_OPTIONS = "group_size:1,uncompressed"
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def encode_row(tokens_N: np.ndarray, lengths_S: np.ndarray, wide: bool) -> bytes:
    """The record of a row: its N real tokens and the lengths of its S segments, which add up to N."""
    if int(np.sum(lengths_S)) != len(tokens_N):
        raise ValueError(f"segments of {np.sum(lengths_S)} tokens in a row of {len(tokens_N)}")
    lengths = np.asarray(lengths_S, "<u4")
    body = np.uint32(len(lengths)).astype("<u4").tobytes() + lengths.tobytes()
    body += np.asarray(tokens_N).astype("<u4" if wide else "<u2").tobytes()
    return zlib.crc32(body).to_bytes(4, "little") + body


def decode_row(record: bytes, wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_N, lengths_S) of a record, read-only views; `ValueError` where its checksum is wrong."""
    if len(record) < 8 or zlib.crc32(memoryview(record)[4:]) != int.from_bytes(record[:4], "little"):
        raise ValueError("checksum mismatch")
    segments = int.from_bytes(record[4:8], "little")
    lengths_S = np.frombuffer(record, "<u4", segments, 8)
    tokens_N = np.frombuffer(record, "<u4" if wide else "<u2", offset=8 + 4 * segments)
    return tokens_N, lengths_S


class ShardWriter:
    """Writes rows to `path`: into a temporary file that `close` puts in its place, or `abandon` removes.

    A full disk is a `UserError` that leaves nothing behind.
    """

    def __init__(self, path: str, wide: bool):
        self.path, self.wide = path, wide
        self.rows, self.crc = 0, 0
        self._temporary = temporary_name(path)
        self._writer = self._attempt(lambda: ArrayRecordWriter(self._temporary, WRITER_OPTIONS))

    def write(self, tokens_N: np.ndarray, lengths_S: np.ndarray) -> None:
        record = encode_row(tokens_N, lengths_S, self.wide)
        self._attempt(lambda: self._writer.write(record))
        self.crc = zlib.crc32(record, self.crc)
        self.rows += 1

    def close(self) -> Shard:
        self._attempt(self._publish)
        return Shard(os.path.basename(self.path), self.rows, os.path.getsize(self.path), self.crc)

    def _publish(self) -> None:
        self._writer.close()
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (OSError, RuntimeError, ValueError) as error:  # the C++ writer's are RuntimeErrors
            self.abandon()
            raise cannot_write(self.path, error) from error

    def abandon(self) -> None:
        if os.path.exists(self._temporary):
            os.remove(self._temporary)


@dataclass(frozen=True)
class SourceRows:
    """The rows `first` to `first + rows` (excluded) of a split come from this source."""

    name: str
    weight: float | None
    first: int
    rows: int


@dataclass(frozen=True)
class _Span:
    """`rows` records of a shard from `record` on."""

    shard: Shard
    record: int
    rows: int


class Rows:
    """The rows of one split of a prepared folder, read by number; picklable, usable in worker processes.

    Raises `UserError` at once where the manifest is missing or a shard is absent or of the wrong size, and on
    reading where a record's checksum fails; it names the shard and the record.
    """

    manifest: Manifest
    sources: list[SourceRows]

    def __init__(self, folder: str, split: str):
        if split not in ("train", "validation"):
            raise ValueError(f"split {split!r} is neither train nor validation")
        self.folder, self.split = folder, split
        self.manifest = read_manifest(folder)
        self.sources, self._spans = _layout(self.manifest, split)
        self._starts = np.cumsum([0] + [span.rows for span in self._spans])
        self._readers: dict[int, Any] = {}
        self._pid = os.getpid()
        for span in self._spans:
            path = os.path.join(folder, span.shard.file)
            if not os.path.isfile(path):
                raise UserError(f"{path}: this shard is missing; run the same `prepare` again")
            if os.path.getsize(path) != span.shard.bytes:
                raise UserError(
                    f"{path}: {os.path.getsize(path)} bytes where the manifest says {span.shard.bytes}: the shard was "
                    f"cut short or changed, so its last records are lost; run the same `prepare` again"
                )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}

    def read(self, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens_BxL, segments_BxL) of the rows with these numbers, both int32.

        Tokens hold the pad id in padding; segments count 1, 2, ... in a row and are 0 in padding.
        """
        rows_B = np.asarray(rows_B, np.int64)
        if len(rows_B) and (rows_B.min() < 0 or rows_B.max() >= len(self)):
            raise IndexError(f"row {rows_B.max()} of {len(self)}")
        length, wide = self.manifest.row_length, self.manifest.wide
        tokens_BxL = np.full((len(rows_B), length), self.manifest.vocabulary["pad"], np.int32)
        segments_BxL = np.zeros((len(rows_B), length), np.int32)
        spans_B = np.searchsorted(self._starts, rows_B, side="right") - 1
        for number in np.unique(spans_B):
            span = self._spans[number]
            places = np.flatnonzero(spans_B == number)
            numbers = (rows_B[places] - self._starts[number] + span.record).tolist()
            for place, record_number, record in zip(places, numbers, self._records(number, numbers), strict=True):
                try:
                    tokens_N, lengths_S = decode_row(record, wide)
                    count = len(tokens_N)
                    tokens_BxL[place, :count] = tokens_N
                    segments_BxL[place, :count] = np.repeat(np.arange(1, len(lengths_S) + 1), lengths_S)
                except ValueError as error:
                    raise self._damaged(span, record_number, error) from None
        return tokens_BxL, segments_BxL

    def _records(self, number: int, records: list[int]) -> list[bytes]:
        span = self._spans[number]
        try:
            reader = self._reader(number)
            return reader.read(records)
        except UserError:
            raise
        except Exception as error:  # of the C++ reader, which does not say which record it was
            for record in records:
                try:
                    self._reader(number).read([record])
                except Exception as inner:
                    raise self._damaged(span, record, inner) from None
            raise self._damaged(span, records[0], error) from None

    def _reader(self, number: int) -> Any:
        if self._pid != os.getpid():  # after a fork: never share a file position with the parent
            self._readers, self._pid = {}, os.getpid()
        if number not in self._readers:
            span = self._spans[number]
            path = os.path.join(self.folder, span.shard.file)
            reader = ArrayRecordReader(path, READER_OPTIONS)
            if reader.num_records() != span.shard.rows:
                raise UserError(
                    f"{path}: its index is damaged, it has {reader.num_records()} records where the manifest says "
                    f"{span.shard.rows}; delete this file and run `prepare` again"
                )
            self._readers[number] = reader
        return self._readers[number]

    def _damaged(self, span: _Span, record: int, error: Exception) -> UserError:
        path = os.path.join(self.folder, span.shard.file)
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        return UserError(f"{path}: record {record} is damaged ({reason}); delete this file and run `prepare` again")


def _layout(manifest: Manifest, split: str) -> tuple[list[SourceRows], list[_Span]]:
    """The split's sources and spans in the order of its row numbers."""
    sources, spans, first = [], [], 0
    for source in manifest.sources:
        kept = sum(shard.rows for shard in source.train) - source.held_out
        mine = [_Span(shard, 0, shard.rows) for shard in source.validation] if split == "validation" else []
        start = 0
        for shard in source.train:
            cut = min(max(kept - start, 0), shard.rows)
            span = _Span(shard, 0, cut) if split == "train" else _Span(shard, cut, shard.rows - cut)
            if span.rows:
                mine.append(span)
            start += shard.rows
        rows = sum(span.rows for span in mine)
        sources.append(SourceRows(source.name, source.weight, first, rows))
        spans += mine
        first += rows
    return sources, spans
