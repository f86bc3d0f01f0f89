"""A run of forty steps, CLM then MLM over more than two epochs, as a user starts it: in a process of its own."""

import atexit
import functools
import gzip
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import numpy as np

import biphasic_jax.data
from biphasic_jax.train.checkpoint import find

TIMINGS = ("tokens_per_second", "mfu", "data_wait")
CONFIG = """
from biphasic_jax.config import default_config, phase

def get_config():
    c = default_config()
    c.data.sources = ({text!r},)
    c.data.vocab_size = 300
    c.data.row_length = 32
    c.data.validation = 0.3
    c.model.update(layers=1, width=16, ff_width=32, heads=2, kv_heads=1, head_size=8, loss_chunk=128)
    c.batch.rows = 16
    c.phases = (phase("clm", steps=20), phase("mlm", steps=20, mask_rate=0.3, mask_share=0.8, random_share=0.1,
                                              keep_share=0.1))
    c.optimizer.learning_rate = 3e-3
    c.schedule.update(warmup=5, decay=10)
    c.checkpoint.every = 6
    c.evaluation.update(every=9, rows=16, mask_rates=(0.3,))
    c.log.tensorboard = False
    return c
"""
# Runs `train` after `PATCH`, a statement that may break or kill the process at a chosen place.
PATCHED = "import os, signal, sys\n{patch}\nfrom biphasic_jax.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"


@functools.cache
def folder() -> pathlib.Path:
    """Made once a session: config.py, text, and the caches of rows and compiled programs."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="biphasic-short-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    source = pathlib.Path(biphasic_jax.data.__file__).parent / "vendored" / "tiny.jsonl.gz"
    with gzip.open(source, "rt") as file:
        texts = [json.loads(line)["text"] for line in file]
    # Short documents, so that a few thousand characters hold some of either split.
    pieces = [text[i : i + 200] for text in texts[:6] for i in range(0, 1600, 200)]
    (path / "text.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    (path / "config.py").write_text(CONFIG.format(text=str(path / "text.jsonl")))
    return path


def command(workdir, *arguments: str, patch: str = "") -> list[str]:
    config = f"--config={folder() / 'config.py'}"
    return [sys.executable, "-c", PATCHED.format(patch=patch), "train", config, f"--workdir={workdir}", *arguments]


def environment(devices: int = 1) -> dict[str, str]:
    """One device, as a user has it, or some; programs that compile fast rather than run fast."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags += f" --xla_force_host_platform_device_count={devices}" if devices > 1 else ""
    return os.environ | {"XLA_FLAGS": flags, "BIPHASIC_CACHE": str(folder() / "cache")}


def train(workdir, *arguments: str, patch: str = "", devices: int = 1) -> subprocess.CompletedProcess:
    """Runs `train` to its end; `patch` is Python that runs before."""
    return subprocess.run(
        command(workdir, *arguments, patch=patch), env=environment(devices), capture_output=True, text=True, timeout=300
    )


def trained(workdir, *arguments: str) -> pathlib.Path:
    """Runs `train` to a good end."""
    result = train(workdir, "--quiet", *arguments)
    assert result.returncode == 0, result.stderr
    return pathlib.Path(workdir)


@functools.cache
def straight() -> pathlib.Path:
    """The run that was never stopped."""
    return trained(folder() / "straight")


def lines(workdir) -> list[dict]:
    return [json.loads(line) for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()]


def arrays(checkpoint) -> dict[str, bytes]:
    """Every array of a checkpoint by path, as its bytes."""
    import orbax.checkpoint as ocp

    from biphasic_jax.train.state import flatten

    trees = {}
    for item in ("params", "optimizer"):
        tree = ocp.StandardCheckpointer().restore(pathlib.Path(checkpoint).resolve() / item)
        trees |= {f"{item}/{path}": np.asarray(leaf).tobytes() for path, leaf in flatten(tree).items()}
    return trees


def assert_same_run(workdir, other) -> None:
    """Every line but its timings, and the last checkpoint, are equal bit for bit; no step stands twice."""
    mine, theirs = (
        [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines(w)] for w in (workdir, other)
    )
    assert mine == theirs
    a, b = arrays(find(str(workdir))), arrays(find(str(other)))
    assert a.keys() == b.keys()
    assert [path for path in a if a[path] != b[path]] == []


def kill_at(module: str, name: str, call: int, number: int = signal.SIGKILL, after: bool = False) -> str:
    """A patch that sends the process a signal at call number `call` (from 1) of a function or method."""
    return f"""
import importlib
owner = importlib.import_module("{module}")
*path, last = "{name}".split(".")
for part in path:
    owner = getattr(owner, part)
def patch(original, calls=[0]):
    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] == {call} and not {after}:
            os.kill(os.getpid(), {int(number)})
        result = original(*args, **kwargs)
        if calls[0] == {call} and {after}:
            os.kill(os.getpid(), {int(number)})
        return result
    return wrapped
setattr(owner, last, patch(getattr(owner, last)))
"""
