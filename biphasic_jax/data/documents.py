"""The documents of a piece, as an iterator of text that holds little in memory.

Whatever is wrong with the input is a `UserError` that names the file and the line (or record).
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from biphasic_jax.data.sources import Piece, tfds_builder
from biphasic_jax.errors import UserError

# A text file is one document up to here; a longer one is cut at the first line end after each multiple of it.
TEXT_BLOCK = 64 << 10


def documents(piece: Piece, text_key: str) -> Iterator[str]:
    """The documents of a piece, in order; those without any text are passed over."""
    readers = {
        "text": lambda: _text(piece),
        "jsonl": lambda: _json_lines(piece, text_key),
        "jsonl-compressed": lambda: _compressed_json_lines(piece, text_key),
        "parquet": lambda: _parquet(piece, text_key),
        "arrow": lambda: _arrow(piece, text_key),
        "tfds": lambda: _tfds(piece, text_key),
    }
    try:
        for text in readers[piece.kind]():
            if text and not text.isspace():
                yield text
    except OSError as error:
        raise UserError(f"{piece.path}: cannot be read: {error.strerror or error}") from error


def _range(piece: Piece, count: int) -> tuple[int, int]:
    """Which of `count` things belong to the piece."""
    return count * piece.part // piece.parts, count * (piece.part + 1) // piece.parts


def _text(piece: Piece) -> Iterator[str]:
    """Blocks of a text file; block i begins at the first line end after i * TEXT_BLOCK."""
    size = os.path.getsize(piece.path)
    first, last = _range(piece, -(-size // TEXT_BLOCK))
    with open(piece.path, "rb") as file:
        start = _block_start(file, first, size)
        for block in range(first, last):
            end = _block_start(file, block + 1, size)
            file.seek(start)
            content = file.read(end - start)
            if block == 0:
                content = content.removeprefix(b"\xef\xbb\xbf")
            yield _decode(content, piece.path, start)
            start = end


def _block_start(file: BinaryIO, block: int, size: int) -> int:
    """Where a block begins. Text without a line end in reach is cut at a space, else between characters."""
    nominal = block * TEXT_BLOCK
    if block == 0 or nominal >= size:
        return min(nominal, size)
    file.seek(nominal)
    window = file.read(TEXT_BLOCK)
    for mark in (b"\n", b" "):
        found = window.find(mark)
        if found >= 0:
            return nominal + found + 1
    continuation = 0
    while continuation < len(window) and 0x80 <= window[continuation] < 0xC0:
        continuation += 1
    return nominal + continuation


def _decode(content: bytes, path: str, start: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = _line_number(path, start + error.start)
        byte = content[error.start]
        raise UserError(f"{path}: line {line}: not UTF-8 (byte 0x{byte:02x}); convert it, with iconv say") from None


def _line_number(path: str, position: int) -> int:
    """The line (from 1) of a byte of an uncompressed file: only looked up for an error."""
    line = 1
    with open(path, "rb") as file:
        while position > 0 and (block := file.read(min(position, 1 << 20))):
            line += block.count(b"\n")
            position -= len(block)
    return line


def _json_lines(piece: Piece, text_key: str) -> Iterator[str]:
    """The lines that begin inside the piece's range of bytes."""
    start, stop = _range(piece, os.path.getsize(piece.path))
    with open(piece.path, "rb") as file:
        position = start
        if start:  # the line that runs over the start belongs to the piece before
            file.seek(start - 1)
            position = start - 1 + len(file.readline())
        while position < stop and (line := file.readline()):
            here = position
            position += len(line)
            try:
                text = _json_text(line, text_key)
            except _Bad as bad:
                raise UserError(f"{piece.path}: line {_line_number(piece.path, here)}: {bad}") from None
            if text is not None:
                yield text


def _compressed_json_lines(piece: Piece, text_key: str) -> Iterator[str]:
    """Every `parts`-th line: a compressed file can only be read from its beginning."""
    number = 0
    with open(piece.path, "rb") as file:
        try:
            for number, line in enumerate(_decompressed(file, piece.path), start=1):
                if number % piece.parts != (piece.part + 1) % piece.parts:
                    continue
                text = _json_text(line, text_key)
                if text is not None:
                    yield text
        except _Bad as bad:
            raise UserError(f"{piece.path}: line {number}: {bad}") from None
        except (EOFError, zlib.error, gzip.BadGzipFile, _zstd_error()) as error:
            raise UserError(f"{piece.path}: damaged or cut short after line {number} ({error})") from error


def _decompressed(file: BinaryIO, path: str) -> Any:
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 20)  # type: ignore[arg-type]
    import zstandard

    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True), 1 << 20)


def _zstd_error() -> type[Exception]:
    import zstandard

    return zstandard.ZstdError


class _Bad(Exception):
    """What is wrong with one record; whoever knows its place makes a UserError of it."""


def _json_text(line: bytes, text_key: str) -> str | None:
    """The text of a JSON line, None for an empty line."""
    if line.isspace():
        return None
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _Bad(f"not UTF-8 (byte 0x{line[error.start]:02x}); convert the file, with iconv say") from None
    except ValueError as error:
        raise _Bad(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Bad(f"a JSON {type(record).__name__} where an object with {text_key!r} is needed")
    if text_key not in record:
        raise _Bad(f"no key {text_key!r}; it has {', '.join(map(repr, record))}; give --text-key")
    return _checked(record[text_key], text_key)


def _checked(value: Any, text_key: str) -> str:
    """`value` as text that can be encoded as UTF-8."""
    try:
        if isinstance(value, bytes):
            return value.decode("utf-8")
        if isinstance(value, str):
            value.encode("utf-8")
            return value
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise _Bad(f"{text_key!r} is not valid Unicode ({error.reason})") from None
    raise _Bad(f"{text_key!r} is {type(value).__name__}, not text")


def _parquet(piece: Piece, text_key: str) -> Iterator[str]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(piece.path)
        _need_column(piece.path, text_key, file.schema_arrow.names)
        first, last = _range(piece, file.num_row_groups)
        row = sum(file.metadata.row_group(group).num_rows for group in range(first))
        batches = file.iter_batches(1024, row_groups=list(range(first, last)), columns=[text_key])
        yield from _column(batches, piece.path, text_key, row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{piece.path}: damaged Parquet ({str(error).splitlines()[0]})") from error


def _arrow(piece: Piece, text_key: str) -> Iterator[str]:
    import pyarrow

    try:
        reader = pyarrow.ipc.open_stream(pyarrow.memory_map(piece.path))
        _need_column(piece.path, text_key, reader.schema.names)
        yield from _column((batch.select([text_key]) for batch in reader), piece.path, text_key, 0)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{piece.path}: not a readable Arrow stream ({str(error).splitlines()[0]})") from error


def _need_column(path: str, text_key: str, names: list[str]) -> None:
    if text_key not in names:
        raise UserError(f"{path}: no column {text_key!r}; it has {', '.join(map(repr, names))}; give --text-key")


def _column(batches: Any, path: str, text_key: str, row: int) -> Iterator[str]:
    for batch in batches:
        for value in batch.column(0).to_pylist():
            try:
                yield _checked(value, text_key)
            except _Bad as bad:
                raise UserError(f"{path}: row {row}: {bad}") from None
            row += 1


def _tfds(piece: Piece, text_key: str) -> Iterator[str]:
    builder = tfds_builder(piece.path)
    _need_column(f"tfds:{piece.path}", text_key, list(builder.info.features))
    source = builder.as_data_source(split="train")
    first, last = _range(piece, len(source))
    for start in range(first, last, 256):
        numbers = range(start, min(start + 256, last))
        for number, record in zip(numbers, source.__getitems__(list(numbers)), strict=True):
            try:
                yield _checked(record[text_key], text_key)
            except _Bad as bad:
                raise UserError(f"tfds:{piece.path}: record {number}: {bad}") from None
