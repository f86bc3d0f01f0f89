"""The verb `prepare`, and `ensure_rows`: the rows that a config asks for, made if they are missing."""

import argparse
import hashlib
import json
import os
import signal
import sys
from typing import Any

from ml_collections import ConfigDict

from biphasic_jax.config import LONGEST_ROW, SEGMENT_POLICIES
from biphasic_jax.data.build import Settings, build_rows, describe
from biphasic_jax.data.manifest import Manifest, read_manifest
from biphasic_jax.errors import UserError

DESCRIPTION = """\
Tokenises documents, packs them into rows of a fixed length and writes them as ArrayRecord shards with a manifest.

  a folder of books, with a tokenizer trained on them:
    prepare --source=books/ --out=rows/books --train-tokenizer --vocab-size=8192 --row-length=512
  a mixture, three parts to one, with the tokenizer of a published model:
    prepare --source=web.jsonl.zst:3 --source=wiki.parquet:1 --out=rows/mix --tokenizer=llama/tokenizer.json
  the paper's blocks of random length:
    prepare --source=fineweb-edu/ --out=rows/paper --tokenizer=llama/ --row-length=2048 --segments=random_split

A source is PATH[:WEIGHT]: a file (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow), a folder of such files or a
data set that Hugging Face's save_to_disk wrote; tfds:NAME_OR_DIR, stored as array_record; or vendored:NAME, text that
comes with this package. Without weights all rows are one pool. A command that was killed goes on where it stopped, and
the rows do not depend on the number of workers. Look at them with `inspect`."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="PATH[:WEIGHT]", help="give it again for a mixture")
    add("--out", required=True, metavar="DIR", help="a new or empty folder, or one that this command began")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="FILE", default="", help="a tokenizer.json, or a folder that has one")
    tokenizer.add_argument("--train-tokenizer", action="store_true", help="a byte-level BPE on the training documents")
    add("--vocab-size", type=int, default=8192, help="of the tokenizer that is trained, specials included (8192)")
    add("--row-length", type=int, default=512, metavar="L", help="tokens a row (512)")
    add("--segments", choices=SEGMENT_POLICIES, default="documents", help="what attends only to itself (documents)")
    add("--validation", type=float, default=0.01, metavar="SHARE", help="share of the documents held out (0.01)")
    add("--seed", type=int, default=0, help="of the held-out cut and the random splits (0)")
    add("--mask-token", default="auto", metavar="NAME", help="a token of the tokenizer, such as a reserved one; `add`; "
        "or `auto`: one with a known name, else added (auto)")  # fmt: skip
    add("--text-key", default="text", help="key or column of the text (text)")
    add("--workers", type=int, default=0, help="processes; 0: one a core (0)")


def main(args: argparse.Namespace) -> int:
    settings = Settings(
        tuple(args.source),
        args.tokenizer,
        args.vocab_size,
        args.row_length,
        args.segments,
        args.validation,
        args.seed,
        args.mask_token,
        args.text_key,
    )
    if not 8 <= args.row_length <= LONGEST_ROW:
        raise UserError(f"--row-length={args.row_length} must be 8 to {LONGEST_ROW:,} tokens")
    if not 0 <= args.validation < 1:
        raise UserError(f"--validation={args.validation} must be a share below 1")
    if args.seed < 0 or args.workers < 0:
        raise UserError(f"--seed={args.seed} and --workers={args.workers} must be 0 or more")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    manifest, already = build_rows(settings, args.out, args.workers or available_cores())
    if already:
        print(f"{args.out} is complete already, with the same settings")
    print_summary(manifest)
    print(f"rows are in {args.out}")
    return 0


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_summary(manifest: Manifest) -> None:
    """Where every token went, and how the tokenizer fits, as a table on stdout."""
    a, vocabulary, fits = manifest.accounting, manifest.vocabulary, manifest.fertility
    rows = [sum(shard.rows for shard in source.train) - source.held_out for source in manifest.sources]
    if len(rows) > 1:
        for source, count in zip(manifest.sources, rows, strict=True):
            weight = f", weight {source.weight:g}" if source.weight else ""
            print_line("", f"{count:,}", f"training rows of {source.name}{weight}")
    print_line("documents", f"{a.documents:,}", f"{a.bytes / 1e6:,.1f} MB of text")
    print_line("tokens in", f"{a.tokens_in:,}", "the end-of-document token of each included")
    print_line("tokens packed", f"{a.tokens_packed:,}")
    print_line("tokens dropped", f"{a.tokens_dropped:,}")
    print_line(
        "padding", f"{a.padding:,}", f"rows are {100 * a.tokens_packed / (a.tokens_packed + a.padding):.2f} % full"
    )
    print_line("training rows", f"{sum(rows):,}", f"of {manifest.row_length:,} tokens, segments: {manifest.segments}")
    print_line("validation rows", f"{manifest.validation['rows']:,}", f"cut by {manifest.validation['cut']}")
    print_line("vocabulary", f"{vocabulary['size']:,}", f"mask id {vocabulary['mask']} ({vocabulary['mask_how']})")
    if fits:
        print_line("tokens per word", f"{fits['tokens_per_word']:.3f}", f"on {fits['measured_on']} text")
        print_line("bytes per token", f"{fits['bytes_per_token']:.3f}")
        print_line("words kept whole", f"{100 * fits['whole_words']:.1f} %")


def print_line(name: str, value: str, note: str = "") -> None:
    print(f"{name:<17}{value:>15}  {note}".rstrip())


def ensure_rows(config: ConfigDict) -> str:
    """The folder of the rows that a resolved config asks for, prepared in the cache if they are not there yet.

    Raises `UserError` where `data.rows` was prepared with another row length or segment policy.
    """
    d = config.data
    if d.rows:
        manifest = read_manifest(d.rows)
        for key in ("row_length", "segments"):
            have = getattr(manifest, key)
            if have != d[key]:
                raise UserError(
                    f"config.data.{key}={d[key]!r}, but the rows of config.data.rows={d.rows!r} were prepared with "
                    f"{have!r}; set --config.data.{key}={have} or prepare other rows"
                )
        return d.rows
    settings = Settings(
        tuple(d.sources), d.tokenizer, d.vocab_size, d.row_length, d.segments, d.validation, d.seed, d.mask_token
    )
    folder = os.path.join(cache_root(), "rows", cache_key(describe(settings)[0]))
    manifest, already = build_rows(settings, folder, available_cores())
    if not already:
        rows = sum(shard.rows for source in manifest.sources for shard in source.train)
        print(f"prepared {rows:,} rows of {d.row_length} tokens in {folder}", file=sys.stderr)
    return folder


def cache_root() -> str:
    """Where rows and compiled programs are kept between runs: $BIPHASIC_CACHE, or ~/.cache/biphasic_jax."""
    return os.environ.get("BIPHASIC_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "biphasic_jax")


def cache_key(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
