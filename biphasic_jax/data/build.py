"""From sources to a folder of rows: makes what is missing of it, and only that.

The folder: `prepare.json` (the settings, written first: it marks the folder as ours), `tokenizer.json`, one shard of
each split and one marker a unit, `manifest.json` last. A run that was killed goes on with the units that have no
marker. Every file is put in place whole, and a lock makes a second process wait for the first.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from biphasic_jax.config import differences
from biphasic_jax.data.fertility import fertility
from biphasic_jax.data.manifest import (
    MANIFEST,
    TOKENIZER,
    VERSION,
    Accounting,
    Manifest,
    Source,
    read_manifest,
    write_whole,
)
from biphasic_jax.data.pack_unit import Recipe, UnitResult, finished_unit, held_out, marker_name, unit_documents
from biphasic_jax.data.pool import run_units
from biphasic_jax.data.sources import File, Spec, Unit, list_files, make_units, parse_specs
from biphasic_jax.data.tokenizer import (
    Roles,
    declared_roles,
    load_tokenizer,
    make_vocabulary,
    resolve_roles,
    tokenizer_sha256,
    train_tokenizer,
    vocabulary_facts,
)
from biphasic_jax.errors import UserError

SETTINGS = "prepare.json"
LOCK = ".lock"
TOKENIZER_FACTS = "tokenizer_facts.json"
# Text from which a tokenizer is trained at most, taken from the beginning of every unit alike.
TRAINING_TEXT = 256 << 20


@dataclass(frozen=True)
class Settings:
    """What the rows depend on, as the user says it. `tokenizer`: a path, or "" to train one of `vocab_size`."""

    sources: tuple[str, ...]
    tokenizer: str
    vocab_size: int
    row_length: int
    segments: str
    validation: float
    seed: int
    mask_token: str
    text_key: str = "text"


def describe(settings: Settings) -> tuple[dict[str, Any], list[Spec], list[list[File]]]:
    """(facts, specs, files of each): the facts hold everything that decides the rows' bytes."""
    specs = parse_specs(settings.sources)
    files = [list_files(spec.location) for spec in specs]
    if settings.tokenizer:
        load_tokenizer(settings.tokenizer)  # a bad one is told before any work
        path = settings.tokenizer
        with open(os.path.join(path, TOKENIZER) if os.path.isdir(path) else path, "rb") as file:
            tokenizer: Any = {"sha256": hashlib.sha256(file.read()).hexdigest(), "roles": declared_roles(path)}
    else:
        tokenizer = {"train": settings.vocab_size}
    facts = {
        "version": VERSION,
        "sources": [[spec.location, spec.weight] for spec in specs],
        "tokenizer": tokenizer,
        **{k: getattr(settings, k) for k in ("row_length", "segments", "validation", "seed", "mask_token", "text_key")},
        "files": {spec.location: [file.identity for file in mine] for spec, mine in zip(specs, files, strict=True)},
    }
    return json.loads(json.dumps(facts)), specs, files


def build_rows(settings: Settings, out: str, workers: int) -> tuple[Manifest, bool]:
    """The manifest of `out`, where the rows are complete on return, and whether they already were."""
    facts, specs, files = describe(settings)
    _claim(out)
    with _lock(out):
        complete = os.path.isfile(os.path.join(out, MANIFEST))
        _compare(out, facts, complete)
        units = make_units(files)
        tokenizer, roles, measured = _tokenizer(settings, facts, units, out)
        vocabulary = make_vocabulary(tokenizer, roles)
        with open(os.path.join(out, TOKENIZER), "rb") as file:
            sha256 = tokenizer_sha256(file.read())
        recipe = Recipe(
            settings.row_length,
            settings.segments,
            settings.validation,
            settings.seed,
            settings.text_key,
            roles.eos,
            wide=vocabulary.size > 1 << 16,
        )
        keys = _keys(units, files, recipe, sha256)
        found = {unit.number: finished_unit(unit, keys[unit.number], out) for unit in units}
        if complete and all(found.values()):
            return read_manifest(out), True
        if complete:  # a shard was deleted or cut short since
            os.remove(os.path.join(out, MANIFEST))
        jobs = [(unit, keys[unit.number]) for unit in units if found[unit.number] is None]
        finished = sum(unit.text_bytes for unit in units if found[unit.number] is not None)
        made = run_units(jobs, recipe, tokenizer, out, workers, finished)
        results = sorted([*made, *filter(None, found.values())], key=lambda result: result.number)
        _sweep(out, units, results)
        manifest = _manifest(
            settings,
            specs,
            results,
            {"file": TOKENIZER, "sha256": sha256},
            vocabulary_facts(vocabulary, roles),
            measured,
        )
        manifest.write(out)
        return manifest, False


def _claim(out: str) -> None:
    """Makes `out` ours, or raises: a folder with other things in it is not touched."""
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"--out={out}: it is a file; give a folder")
    if os.path.isdir(out) and not os.path.isfile(os.path.join(out, SETTINGS)):
        # What a kill before the settings were in place leaves is ours too.
        others = [name for name in os.listdir(out) if name != LOCK and not name.startswith(f"{SETTINGS}.")]
        if others:
            raise UserError(f"--out={out}: the folder holds other things and no {SETTINGS}; give an empty or a new one")
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out={out}: cannot be made ({error.strerror})") from error


def _compare(out: str, facts: dict[str, Any], complete: bool) -> None:
    """Writes the settings; raises where rows were made with others. Unfinished rows may go on with mended input."""
    path = os.path.join(out, SETTINGS)
    if not os.path.isfile(path):
        write_whole(path, json.dumps(facts, indent=2).encode())
    try:
        with open(path, encoding="utf-8") as file:
            old = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give another --out, or delete this folder") from error
    begun = any(name.startswith("unit-") for name in os.listdir(out))
    pair = [old, facts] if complete else [{k: v for k, v in x.items() if k != "files"} for x in (old, facts)]
    changed = differences(pair[0], pair[1]) if complete or begun else []
    if changed:
        more = f"; and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise UserError(
            f"--out={out}: it was prepared with other settings ({'; '.join(changed[:4])}{more}); "
            f"give another --out, or delete this folder"
        )
    if old != facts:
        write_whole(path, json.dumps(facts, indent=2).encode())


@contextlib.contextmanager
def _lock(out: str) -> Iterator[None]:
    """Holds `out` for this process; the system lets go of it when the process ends, however it ends."""
    with open(os.path.join(out, LOCK), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {out}; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: whole files keep it safe, the work is done twice
            yield
            return
        for name in os.listdir(out):
            if name.endswith(".tmp"):
                os.remove(os.path.join(out, name))
        yield


def _tokenizer(
    settings: Settings, facts: dict[str, Any], units: Sequence[Unit], out: str
) -> tuple[Tokenizer, Roles, dict[str, Any]]:
    """(tokenizer, roles, fertility) of `out`, made if they are not there yet."""
    decided_by = [facts["tokenizer"], facts["mask_token"]]
    if not settings.tokenizer:
        decided_by += [facts[key] for key in ("files", "validation", "seed", "text_key")]
    key = hashlib.sha256(json.dumps(decided_by, sort_keys=True).encode()).hexdigest()
    path, facts_path = os.path.join(out, TOKENIZER), os.path.join(out, TOKENIZER_FACTS)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(facts_path, encoding="utf-8") as file:
        known = json.load(file)
        with open(path, "rb") as tokenizer_file:
            whole = tokenizer_sha256(tokenizer_file.read()) == known["sha256"]
        if whole and known["key"] == key:
            return load_tokenizer(path), Roles(**known["roles"]), known["fertility"]
    measured: dict[str, Any] = {}
    if settings.tokenizer:
        tokenizer = load_tokenizer(settings.tokenizer)
        roles = resolve_roles(tokenizer, declared_roles(settings.tokenizer), settings.mask_token)
    else:
        print(f"training a tokenizer of {settings.vocab_size:,} ids", file=sys.stderr)
        tokenizer = train_tokenizer(_texts(settings, units, TRAINING_TEXT, held=False), settings.vocab_size)
        roles = resolve_roles(tokenizer, {}, settings.mask_token)
        measured = fertility(tokenizer, lambda held: _texts(settings, units, 4 << 20, held))
    content = tokenizer.to_str().encode()
    write_whole(path, content)
    known = {
        "key": key,
        "sha256": tokenizer_sha256(content),
        "roles": dataclasses.asdict(roles),
        "fertility": measured,
    }
    write_whole(facts_path, json.dumps(known, indent=2).encode())
    return tokenizer, roles, measured


def _texts(settings: Settings, units: Sequence[Unit], limit: int, held: bool) -> Iterator[str]:
    """The documents of one side of the held-out cut, at most about `limit` characters, from every unit alike."""
    for unit in units:
        room = limit // len(units)
        for text in unit_documents(unit, settings.text_key):
            if held_out(text, settings.seed, settings.validation) == held:
                yield text
                room -= len(text)
            if room <= 0:
                break


def _keys(units: Sequence[Unit], files: Sequence[Sequence[File]], recipe: Recipe, sha256: str) -> list[str]:
    """The key of each unit: a hash of its pieces, the identity of their files, the recipe and the tokenizer."""
    identities = {file.path: file.identity for mine in files for file in mine}
    keys = []
    for unit in units:
        inputs = [[piece.kind, piece.part, piece.parts, identities[piece.path]] for piece in unit.pieces]
        work = [VERSION, unit.number, unit.source, inputs, dataclasses.astuple(recipe), sha256]
        keys.append(hashlib.sha256(json.dumps(work).encode()).hexdigest())
    return keys


def _sweep(out: str, units: Sequence[Unit], results: Sequence[UnitResult]) -> None:
    """Removes shards and markers of an earlier division into units."""
    keep = {shard.file for result in results for shard in (result.train, result.validation) if shard}
    keep |= {marker_name(unit.number) for unit in units}
    for name in os.listdir(out):
        ours = name.startswith(("train-", "validation-")) and name.endswith(".arrayrecord")
        if (ours or name.startswith("unit-")) and name not in keep:
            os.remove(os.path.join(out, name))


def _manifest(
    settings: Settings,
    specs: Sequence[Spec],
    results: Sequence[UnitResult],
    tokenizer: dict[str, str],
    vocabulary: dict[str, Any],
    measured: dict[str, Any],
) -> Manifest:
    """The manifest of finished units; raises where a source has no document or no training row."""
    by_source: list[Source] = []
    total = Accounting()
    validation_rows = sum(result.validation.rows for result in results if result.validation)
    cut = "none" if not settings.validation else "documents" if validation_rows else "rows"
    for number, spec in enumerate(specs):
        mine = [result for result in results if result.source == number]
        accounting = sum((result.accounting for result in mine), Accounting())
        if not accounting.documents:
            raise UserError(f"--source={spec.location}: it is empty, no document has any text")
        train = tuple(result.train for result in mine if result.train)
        validation = tuple(result.validation for result in mine if result.validation)
        rows = sum(shard.rows for shard in train)
        if not rows:
            raise UserError(
                f"--source={spec.location}: all its {accounting.documents} documents fell on the held-out side; "
                f"lower --validation={settings.validation} or change --seed"
            )
        held = max(1, round(settings.validation * rows)) if cut == "rows" and rows > 1 else 0
        by_source.append(Source(spec.location, spec.weight, train, validation, held))
        total += accounting
    held_rows = validation_rows + sum(source.held_out for source in by_source)
    return Manifest(
        settings.row_length,
        settings.segments,
        settings.seed,
        tokenizer,
        vocabulary,
        tuple(by_source),
        {"share": settings.validation, "cut": cut if held_rows else "none", "rows": held_rows},
        total,
        measured,
    )
