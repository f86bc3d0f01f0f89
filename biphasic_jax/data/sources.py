"""Where documents come from: PATH[:WEIGHT], tfds:NAME_OR_DIR[:WEIGHT], vendored:NAME[:WEIGHT].

A source is files; a file is cut into pieces that can be read apart; small pieces together are a unit of work.
Units depend on the files alone, never on the machine, so that any number of workers writes the same rows.
"""

import hashlib
import importlib.resources
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from biphasic_jax.errors import UserError

# The estimated text that makes a unit, and the most units of a source: large corpora get larger units.
UNIT_BYTES = 2 << 20
MOST_UNITS = 512
# A compressed file is read whole for each of its pieces, so it gets few.
MOST_COMPRESSED_PIECES = 64
KINDS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "jsonl-compressed",
    ".json.gz": "jsonl-compressed",
    ".jsonl.zst": "jsonl-compressed",
    ".json.zst": "jsonl-compressed",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# Text bytes for a byte on disk, about: only the size of units depends on it.
EXPANSION = {"jsonl-compressed": 3, "parquet": 2}


@dataclass(frozen=True)
class Spec:
    """One `--source`: `location` as given, without its weight."""

    location: str
    weight: float | None


@dataclass(frozen=True)
class File:
    """`size` in bytes on disk; for `tfds` the path is the builder's folder. `identity` changes with the content."""

    kind: str
    path: str
    size: int
    identity: Any

    @property
    def text_bytes(self) -> int:
        return self.size * EXPANSION.get(self.kind, 1)


@dataclass(frozen=True)
class Piece:
    """Part `part` of `parts` of a file; `text_bytes` is an estimate."""

    kind: str
    path: str
    part: int
    parts: int
    text_bytes: int


@dataclass(frozen=True)
class Unit:
    """Work that needs no other: its pieces, in order, become one shard of each split."""

    number: int
    source: int
    pieces: tuple[Piece, ...]

    @property
    def text_bytes(self) -> int:
        return sum(piece.text_bytes for piece in self.pieces)


def parse_specs(sources: Sequence[str]) -> list[Spec]:
    """The sources with their weights; `UserError` where some have a weight and others none."""
    specs = [_parse_spec(source) for source in sources]
    weighted = [spec for spec in specs if spec.weight is not None]
    if weighted and len(weighted) != len(specs):
        bare = next(spec.location for spec in specs if spec.weight is None)
        raise UserError(f"--source={bare} has no weight while others have one; write --source={bare}:1.0")
    return specs


def _parse_spec(source: str) -> Spec:
    location, colon, tail = source.rpartition(":")
    if not colon or not location or os.path.exists(source) or location in ("tfds", "vendored"):
        return Spec(source, None)
    try:
        weight = float(tail)
    except ValueError:
        return Spec(source, None)
    if not 0 < weight < float("inf"):
        raise UserError(f"--source={source}: the weight {tail} must be a positive number")
    return Spec(location, weight)


def list_files(location: str) -> list[File]:
    """The files of a source in a fixed order; `UserError` where there is none."""
    if location.startswith("vendored:"):
        return [_vendored(location)]
    if location.startswith("tfds:"):
        return [_tfds(location)]
    if os.path.isdir(location):
        files = _dataset_on_disk(location) or _folder(location)
        if not files:
            raise UserError(f"--source={location}: no file in this folder ends in {', '.join(KINDS)}")
        return files
    if not os.path.isfile(location):
        raise UserError(f"--source={location}: there is no such file or folder")
    kind = kind_of(location)
    if kind is None:
        raise UserError(f"--source={location}: cannot tell its format; a file must end in {', '.join(KINDS)}")
    return [_file(location, kind)]


def kind_of(path: str) -> str | None:
    name = os.path.basename(path).lower()
    endings = [ending for ending in KINDS if name.endswith(ending)]
    return KINDS[max(endings, key=len)] if endings else None


def make_units(sources: Sequence[Sequence[File]]) -> list[Unit]:
    """The units of all sources, numbered from 0 in order."""
    units: list[Unit] = []
    for number, files in enumerate(sources):
        target = max(UNIT_BYTES, sum(file.text_bytes for file in files) // MOST_UNITS)
        gathered: list[Piece] = []
        held = 0
        for piece in (piece for file in files for piece in split_file(file, target)):
            if gathered and held + piece.text_bytes > target:
                units.append(Unit(len(units), number, tuple(gathered)))
                gathered, held = [], 0
            gathered.append(piece)
            held += piece.text_bytes
        if gathered:
            units.append(Unit(len(units), number, tuple(gathered)))
    return units


def split_file(file: File, target: int) -> list[Piece]:
    """A file as pieces of about `target` bytes of text, as far as its format lets it be read in parts."""
    parts = max(1, -(-file.text_bytes // target))
    if file.kind == "jsonl-compressed":
        parts = min(parts, MOST_COMPRESSED_PIECES)
    elif file.kind == "parquet":
        import pyarrow.parquet

        try:
            parts = min(parts, max(1, pyarrow.parquet.read_metadata(file.path).num_row_groups))
        except Exception as error:
            raise UserError(f"{file.path}: not a Parquet file ({str(error).splitlines()[0]})") from error
    elif file.kind == "arrow":
        parts = 1
    return [Piece(file.kind, file.path, part, parts, file.text_bytes // parts) for part in range(parts)]


def _file(path: str, kind: str) -> File:
    facts = os.stat(path)
    path = os.path.abspath(path)
    return File(kind, path, facts.st_size, [path, facts.st_size, facts.st_mtime_ns])


def _folder(folder: str) -> list[File]:
    """Every readable file below `folder`, by path; hidden ones and their folders are passed over."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            kind = None if name.startswith(".") else kind_of(name)
            if kind:
                files.append(_file(os.path.join(parent, name), kind))
    return files


def _dataset_on_disk(folder: str) -> list[File]:
    """The Arrow files of a Hugging Face dataset that `save_to_disk` wrote, in its own order; [] for other folders."""
    splits = os.path.join(folder, "dataset_dict.json")
    if os.path.isfile(splits):
        names = _json(splits).get("splits", [])
        if "train" not in names:
            raise UserError(f"--source={folder}: it has the splits {names}, none is `train`; give the folder of one")
        folder = os.path.join(folder, "train")
    state = os.path.join(folder, "state.json")
    if not (os.path.isfile(state) and os.path.isfile(os.path.join(folder, "dataset_info.json"))):
        return []
    files = []
    for entry in _json(state).get("_data_files", []):
        path = os.path.join(folder, entry["filename"])
        if not os.path.isfile(path):
            raise UserError(f"{path}: this file of the dataset is missing")
        files.append(_file(path, "arrow"))
    return files


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error


def _vendored(location: str) -> File:
    name = location.removeprefix("vendored:")
    folder = importlib.resources.files("biphasic_jax.data") / "vendored"
    path = os.path.join(str(folder), f"{name}.jsonl.gz")
    if not os.path.isfile(path):
        names = sorted(entry.name.split(".")[0] for entry in folder.iterdir() if entry.name.endswith(".jsonl.gz"))
        raise UserError(f"--source={location}: no such text is vendored; there are {', '.join(names)}")
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return File("jsonl-compressed", path, os.path.getsize(path), [location, digest])


def _tfds(location: str) -> File:
    name = location.removeprefix("tfds:")
    builder = tfds_builder(name)
    info = builder.info.splits["train"]
    identity = [location, builder.info.full_name, info.num_examples, info.num_bytes]
    return File("tfds", name, info.num_bytes, identity)


def tfds_builder(name_or_dir: str) -> Any:
    """The builder of a data set that TFDS has prepared as ArrayRecord; nothing is downloaded, no TensorFlow needed."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(f"--source=tfds:{name_or_dir}: needs `pip install tensorflow-datasets`") from error
    try:
        builder = tfds.builder_from_directory(name_or_dir) if os.path.isdir(name_or_dir) else tfds.builder(name_or_dir)
        splits = list(builder.info.splits)
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"--source=tfds:{name_or_dir}: no such data set ({str(error).strip().splitlines()[0]})"
        ) from error
    if "train" not in splits:
        raise UserError(
            f"--source=tfds:{name_or_dir}: no split `train`; prepared splits: {', '.join(splits) or 'none'}"
        )
    if builder.info.file_format.value != "array_record":
        raise UserError(
            f"--source=tfds:{name_or_dir}: stored as {builder.info.file_format.value}; prepare it with "
            f"file_format='array_record', which is read without TensorFlow"
        )
    return builder
