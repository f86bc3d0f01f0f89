"""One unit of work: documents -> tokens -> rows -> one shard of each split, and a marker that it is done.

A unit needs no other, so units may run in any order, anywhere, and again after a kill.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from biphasic_jax.data.documents import documents
from biphasic_jax.data.manifest import Accounting, Shard, write_whole
from biphasic_jax.data.packing import PackedRow, pack
from biphasic_jax.data.shards import ShardWriter
from biphasic_jax.data.sources import Unit
from biphasic_jax.errors import UserError

# Text that goes to the tokenizer at one time, in characters.
TOKENISE_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class Recipe:
    """What decides the bytes of a unit's shards, besides its documents and the tokenizer."""

    row_length: int
    segments: str
    validation: float
    seed: int
    text_key: str
    eos: int
    wide: bool


@dataclass(frozen=True)
class UnitResult:
    """`key` is the hash of all that went in; a split without rows has no shard."""

    number: int
    key: str
    source: int
    train: Shard | None
    validation: Shard | None
    accounting: Accounting


# Called with (documents, tokens, UTF-8 bytes) as work is done.
Report = Callable[[int, int, int], None]


def held_out(text: str, seed: int, share: float) -> bool:
    """Whether a document is held out: by the hash of its text, so that equal documents share a side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=(seed % (1 << 64)).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < share * (1 << 64)


def unit_documents(unit: Unit, text_key: str) -> Iterator[str]:
    for piece in unit.pieces:
        yield from documents(piece, text_key)


def pack_unit(unit: Unit, key: str, recipe: Recipe, tokenizer: Tokenizer, folder: str, report: Report) -> UnitResult:
    """Writes the unit's shards and its marker into `folder`. A unit without documents leaves nothing."""
    counts = {"documents": 0, "bytes": 0, "tokens_in": 0}
    validation: list[np.ndarray] = []

    def train() -> Iterator[np.ndarray]:
        """The training documents; held-out ones are put aside, they are few."""
        for texts in _batches(unit_documents(unit, recipe.text_key)):
            try:
                encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            except Exception as error:  # the library knows no narrower one
                raise UserError(f"the tokenizer cannot encode a text ({error}); give it an unknown token") from error
            sizes, tokens = sum(len(text.encode()) for text in texts), 0
            for text, encoding in zip(texts, encodings, strict=True):
                document_N = np.array([*encoding.ids, recipe.eos], np.int32)
                tokens += len(document_N)
                if held_out(text, recipe.seed, recipe.validation):
                    validation.append(document_N)
                else:
                    yield document_N
            counts["documents"] += len(texts)
            counts["bytes"] += sizes
            counts["tokens_in"] += tokens
            report(len(texts), tokens, sizes)

    shards: dict[str, Shard | None] = {}
    packed, rows = 0, 0
    for split, stream in (("train", train()), ("validation", iter(validation))):
        name = f"{unit.number}/{split}"
        packed_rows = pack(stream, recipe.segments, recipe.row_length, recipe.seed, name)
        written, tokens = _write_shard(os.path.join(folder, shard_name(split, unit.number)), packed_rows, recipe)
        shards[split] = written
        packed += tokens
        rows += written.rows if written else 0
    padding = rows * recipe.row_length - packed
    accounting = Accounting(
        **counts, tokens_packed=packed, tokens_dropped=counts["tokens_in"] - packed, padding=padding
    )
    result = UnitResult(unit.number, key, unit.source, shards["train"], shards["validation"], accounting)
    if accounting.documents:
        write_whole(os.path.join(folder, marker_name(unit.number)), json.dumps(dataclasses.asdict(result)).encode())
    return result


def finished_unit(unit: Unit, key: str, folder: str) -> UnitResult | None:
    """What a marker in `folder` says, if it is of the same work and its shards are there at their full size."""
    try:
        with open(os.path.join(folder, marker_name(unit.number)), encoding="utf-8") as file:
            facts = json.load(file)
        shards = {split: Shard(**facts[split]) if facts[split] else None for split in ("train", "validation")}
        facts |= {**shards, "accounting": Accounting(**facts["accounting"])}
        result = UnitResult(**facts)
        sizes = [os.path.getsize(os.path.join(folder, shard.file)) == shard.bytes for shard in shards.values() if shard]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if result.key == key and all(sizes) else None


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.arrayrecord"


def marker_name(number: int) -> str:
    return f"unit-{number:05d}.json"


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= TOKENISE_AT_ONCE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _write_shard(path: str, rows: Iterator[PackedRow], recipe: Recipe) -> tuple[Shard | None, int]:
    """The shard (None where there is no row) and the number of tokens in it."""
    writer, tokens = None, 0
    try:
        for row in rows:
            writer = writer or ShardWriter(path, recipe.wide)
            writer.write(row.tokens_N, row.lengths_S)
            tokens += len(row.tokens_N)
        return (writer.close() if writer else None), tokens
    except BaseException:
        if writer:
            writer.abandon()
        raise
