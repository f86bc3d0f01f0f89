"""What a folder of prepared rows says of itself. `manifest.json` is written last: its presence means complete."""

import dataclasses
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from typing import Any

from biphasic_jax.errors import UserError

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Shard:
    """One ArrayRecord file: `rows` records, `bytes` on disk, `crc` (CRC-32) over all records in order."""

    file: str
    rows: int
    bytes: int
    crc: int


@dataclass(frozen=True)
class Source:
    """One entry of the mixture. `weight` is None unless weights were given.

    `held_out`: that many rows at the end of `train` are validation rows instead (the cut by rows).
    """

    name: str
    weight: float | None
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    held_out: int = 0


@dataclass(frozen=True)
class Accounting:
    """Where every token went: tokens_in = tokens_packed + tokens_dropped; padding is in tokens too.

    `bytes`: UTF-8 bytes of the documents; tokens include the end-of-document token of each.
    """

    documents: int = 0
    bytes: int = 0
    tokens_in: int = 0
    tokens_packed: int = 0
    tokens_dropped: int = 0
    padding: int = 0

    def __add__(self, other: "Accounting") -> "Accounting":
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Accounting(*(a + b for a, b in zip(mine, theirs, strict=True)))


@dataclass(frozen=True)
class Manifest:
    """`vocabulary`: size, bos, eos, pad, mask (ids; bos may be null), mask_how ("known", "named", "added").

    `tokenizer`: file, sha256. `validation`: share, cut ("documents", "rows" or "none"), rows.
    `fertility`: what `train_tokenizer` measured, or empty. `fingerprint`: hex, of what the rows hold
    and in which order they are served; free of paths and times.
    """

    row_length: int
    segments: str
    seed: int
    tokenizer: dict[str, str]
    vocabulary: dict[str, Any]
    sources: tuple[Source, ...]
    validation: dict[str, Any]
    accounting: Accounting
    fertility: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: int = VERSION

    @property
    def fingerprint(self) -> str:
        content = {
            "version": self.version,
            "row_length": self.row_length,
            "segments": self.segments,
            "seed": self.seed,
            "tokenizer": self.tokenizer["sha256"],
            "vocabulary": self.vocabulary,
            "cut": [self.validation["share"], self.validation["cut"]],
            "sources": [
                [s.weight, s.held_out, [[x.rows, x.crc] for x in s.train], [x.crc for x in s.validation]]
                for s in self.sources
            ],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def wide(self) -> bool:
        """Whether token ids need 32 bits on disk."""
        return self.vocabulary["size"] > 1 << 16

    def write(self, folder: str) -> None:
        """Puts the manifest into `folder`, whole or not at all."""
        facts = {**dataclasses.asdict(self), "fingerprint": self.fingerprint}
        write_whole(os.path.join(folder, MANIFEST), json.dumps(facts, indent=2).encode())


def read_manifest(folder: str) -> Manifest:
    """The manifest of `folder`; `UserError` where there is none or it does not hold together."""
    path = os.path.join(folder, MANIFEST)
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: there is no such folder of rows; make it with `prepare --out={folder} ...`")
    if not os.path.isfile(path):
        raise UserError(f"{folder}: no {MANIFEST}, so these rows are not complete; run `prepare` again to finish them")
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)
        stated = facts.pop("fingerprint")
        version = facts["version"]
        if version != VERSION:
            raise UserError(f"{path}: format version {version}, this program reads {VERSION}; prepare the rows again")
        shards = lambda entries: tuple(Shard(**entry) for entry in entries)  # noqa: E731
        facts["sources"] = tuple(
            Source(**{**s, "train": shards(s["train"]), "validation": shards(s["validation"])})
            for s in facts["sources"]
        )
        facts["accounting"] = Accounting(**facts["accounting"])
        manifest = Manifest(**facts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a manifest of prepared rows ({type(error).__name__}: {error})") from error
    if manifest.fingerprint != stated:
        raise UserError(f"{path}: it was changed after it was written (fingerprint); prepare the rows again")
    return manifest


def temporary_name(path: str) -> str:
    """A name beside `path` that no other process uses; what a kill leaves under it is swept by its ending."""
    return f"{path}.{uuid.uuid4().hex[:12]}.tmp"


def cannot_write(path: str, error: Exception) -> UserError:
    """The error of a full or read-only disk."""
    reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
    return UserError(f"{path}: cannot be written ({reason}); make room, and the same command takes up from here")


def write_whole(path: str, content: bytes) -> None:
    """Writes a file so that nobody ever sees half of it, whatever is killed and whoever else writes it."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise cannot_write(path, error) from error
