"""The verb `bench`: the speed of this machine and this code, as ratios inside one run."""

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from biphasic_jax.bench.report import markdown, show
from biphasic_jax.bench.training import CPU_FLAGS, LABELS, measure, variants
from biphasic_jax.bench.workload import Workload
from biphasic_jax.data.manifest import write_whole
from biphasic_jax.errors import UserError

DESCRIPTION = """\
Measures how fast this code is on this machine, and against what.

  everything, in about ten minutes, into results/bench.json and results/bench.md:
    bench --all --out=results/bench.json
  the MLM step against itself without the masked-position gather, and against PyTorch:
    bench --train --objectives=mlm --rounds=9 --shapes=8x512 --vocab-size=32768
  another model, only two variants, in bfloat16:
    bench --train --variants=ours,torch --layers=12 --width=768 --heads=12 --kv-heads=4 --ff-width=3072 --dtype=bfloat16
  a set of XLA flags that you want to try:
    bench --train --variants=ours,ours-flags --xla-flags='--xla_cpu_experimental_ynn_fusion_type=dot'
  the data pipeline alone, at rows of 2,048 tokens; compile time and the start of a run:
    bench --data --data-row-length=2048
    bench --startup --config=configs/smoke.py

Times on a shared machine move by half, so nothing here compares two times that were taken apart. Each variant lives in
a process of its own; they take one step each in turn, in an order that is reversed every round; a factor is the median
of the quotients within a round, printed with the least and the greatest. Look at these before you believe the median.
PyTorch and transformers are compared where they are installed, and left out with a word where they are not."""

VERSIONS = ("biphasic-jax", "jax", "jaxlib", "flax", "optax", "numpy", "grain", "torch", "transformers")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--all", action="store_true", help="all sections, the default where none is named")
    add("--train", action="store_true", help="the training step: ours, ours without its savings, PyTorch")
    add("--data", action="store_true", help="batches and `prepare`, tokens a second")
    add("--startup", "--compile", action="store_true", help="compile time, process start to first step, data wait")
    add("--out", default="", metavar="FILE.json", help="also write the record here, and FILE.md beside it")
    add("--rounds", type=int, metavar="N", default=5, help="of every interleaved run; an odd number (5)")

    train = parser.add_argument_group("the training step")
    train.add_argument("--variants", metavar="NAMES", default=",".join(LABELS), help=f"which ones ({','.join(LABELS)})")
    train.add_argument("--objectives", metavar="NAMES", default="mlm,clm", help="phases (mlm,clm)")
    train.add_argument("--shapes", metavar="ROWSxLENGTH", default="8x256,4x512", help="rows a step x tokens a row; "
                       "several with a comma (8x256,4x512)")  # fmt: skip
    w = Workload()
    for flag, text in (
        ("vocab-size", "ids"),
        ("layers", "blocks"),
        ("width", "of the hidden states"),
        ("ff-width", "of the feed-forward layer"),
        ("heads", "query heads"),
        ("kv-heads", "key/value heads"),
        ("head-size", "of each head"),
        ("loss-chunk", "positions whose logits exist at one time"),
    ):
        default = getattr(w, flag.replace("-", "_"))
        train.add_argument(f"--{flag}", type=int, metavar="N", default=default, help=f"{text} ({default})")
    train.add_argument("--mask-rate", type=float, metavar="SHARE", default=w.mask_rate, help=f"of MLM ({w.mask_rate})")
    train.add_argument("--dtype", choices=("float32", "bfloat16"), default=w.dtype, help=f"of the products ({w.dtype})")
    train.add_argument("--scan-layers", action="store_true", help="one compiled layer instead of unrolled ones")
    train.add_argument(
        "--xla-flags", metavar="FLAGS", default=CPU_FLAGS, help=f"of the variant ours-flags ({CPU_FLAGS})"
    )
    train.add_argument("--threads", type=int, metavar="N", default=0, help="of PyTorch; 0: one a core (0)")
    train.add_argument(
        "--product-size", type=int, metavar="N", default=2048, help="side of the matrices that MFU is against (2048)"
    )

    data = parser.add_argument_group("the data pipeline")
    data.add_argument("--data-source", default="vendored:corpus_cc0", metavar="PATH", help="of `prepare` "
                      "(vendored:corpus_cc0)")  # fmt: skip
    data.add_argument("--data-row-length", type=int, metavar="N", default=2048, help="tokens a row (2048)")
    data.add_argument("--data-batch-rows", type=int, metavar="N", default=16, help="rows a batch (16)")
    data.add_argument("--data-workers", type=int, metavar="N", default=0, help="also with so many worker processes (0)")
    data.add_argument("--data-steps", type=int, metavar="N", default=64, help="batches a round (64)")

    startup = parser.add_argument_group("the start of a run")
    startup.add_argument("--config", default="configs/smoke.py", metavar="FILE[:ARG]", help="of the run that is "
                         "started (configs/smoke.py); --config.KEY=VALUE changes it")  # fmt: skip
    startup.add_argument(
        "--startup-steps", type=int, metavar="N", default=20, help="steps until it is stopped again (20)"
    )


def main(args: argparse.Namespace) -> int:
    sections = [name for name in ("train", "data", "startup") if getattr(args, name)]
    if args.all or not sections:
        sections = ["train", "data", "startup"]
    works, names = check(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process of ours is left behind
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    record: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "biphasic_jax", *sys.argv[1:]]),
        "created": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "xla_flags": args.xla_flags,
    }
    with Status() as tell:
        if "train" in sections:
            record["train"] = [
                measure(
                    work,
                    variants(work, names, args.xla_flags, args.threads, args.product_size),
                    args.rounds,
                    tell.under(f"{work.objective} {work.rows}x{work.row_length}"),
                )
                for work in works
            ]
        if "data" in sections:
            from biphasic_jax.bench import pipeline

            record["data"] = pipeline.measure(
                args.data_source,
                args.data_row_length,
                args.data_batch_rows,
                args.data_workers,
                args.rounds,
                args.data_steps,
                tell.under("data"),
            )
        if "startup" in sections:
            from biphasic_jax.bench import startup

            record["startup"] = startup.measure(args.config, args.overrides, args.startup_steps, tell.under("startup"))
    record["load"] = {"before": load, "after": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0}
    show(record, Console())
    if args.out:
        write(record, args.out)
    return 1 if failures(record) else 0


def check(args: argparse.Namespace) -> tuple[list[Workload], list[str]]:
    """The workloads and the names of the variants that the flags ask for; `UserError` where they make no sense."""
    names = [name for name in args.variants.split(",") if name]
    for name in names:
        if name not in LABELS:
            raise UserError(f"--variants={args.variants}: {name!r} is not one of {', '.join(LABELS)}")
    objectives = [name for name in args.objectives.split(",") if name]
    for name in objectives:
        if name not in ("mlm", "clm"):
            raise UserError(f"--objectives={args.objectives}: {name!r} is neither mlm nor clm")
    for flag in ("rounds", "data_steps", "data_batch_rows", "startup_steps", "product_size"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')}={getattr(args, flag)} must be 1 or more")
    if args.vocab_size < 8:
        raise UserError(f"--vocab-size={args.vocab_size} must be 8 or more: four ids are special")
    if args.out and not args.out.endswith(".json"):
        raise UserError(f"--out={args.out}: give a file that ends in .json; the Markdown is written beside it")
    if args.out and not os.path.isdir(os.path.dirname(args.out) or "."):
        raise UserError(f"--out={args.out}: there is no folder {os.path.dirname(args.out)!r}; make it first")
    sizes = {key: getattr(args, key) for key in Workload.__dataclass_fields__ if hasattr(args, key)}
    works = [
        Workload(objective=name, rows=rows, row_length=length, **sizes)
        for rows, length in shapes(args.shapes)
        for name in objectives
    ]
    for work in works:
        work.config()  # the one check of all sizes
    return works, names


def shapes(text: str) -> list[tuple[int, int]]:
    """(rows, row length) of each part of "8x256,4x512"."""
    parts = [part for part in text.split(",") if part]
    if not parts or not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", part) for part in parts):
        raise UserError(f"--shapes={text}: write ROWSxLENGTH, such as 8x256, or several with a comma")
    return [(int(rows), int(length)) for rows, _, length in (part.partition("x") for part in parts)]


def write(record: dict[str, Any], path: str) -> None:
    """The record as JSON at `path`, and as Markdown beside it."""
    page = path.removesuffix(".json") + ".md"
    write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
    write_whole(page, markdown(record).encode())
    print(f"written: {path} and {page}")


def failures(record: dict[str, Any]) -> list[str]:
    """What could not be measured though it should have been: what is not installed does not count."""
    lines = [line for section in record.get("train", []) for line in [*section["variants"], *section["products"]]]
    lines += record.get("data", {}).get("lines", [])
    return [line["failure"] for line in lines if line["failure"] and "not installed" not in line["failure"]]


class Status:
    """Tells on stderr what is being measured: one moving line in a terminal, else a line each."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.status = self.console.status("")

    def under(self, title: str) -> Any:
        def tell(text: str) -> None:
            if self.console.is_terminal:
                self.status.update(f"{title}: {text}")
            else:
                print(f"{title}: {text}", file=sys.stderr, flush=True)

        return tell

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.status.stop()


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and system of this machine. The accelerator, if any, is among a variant's facts."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        processor = lines[0].partition(":")[2].strip() if lines else processor
    except OSError:
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the code that is measured, with a + where files differ from it; "" outside a repository."""
    folder = os.path.dirname(os.path.abspath(__file__))

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
