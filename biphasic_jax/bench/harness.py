"""Fine-interleaved timing on a noisy machine.

Each variant lives in a process of its own that builds once and then takes one step whenever it is told to.
The parent steps the variants in turn and reverses the order every round, so a slow spell of the machine
meets all of them; what is compared is the quotient within a round, and its median over the rounds.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

# A worker that waits for its turn must leave the cores to the others: OpenMP's threads (torch) sleep
# instead of spinning, and on an accelerator no process takes all of the memory.
QUIET = {"OMP_WAIT_POLICY": "passive", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}


class WorkerDied(RuntimeError):
    """A variant's process ended, or said that it cannot go on; the message names the variant and the reason."""


@dataclass(frozen=True)
class Variant:
    """Something whose step is timed.

    `factory` is "module:function"; in the worker it is called with `settings` (JSON) and returns an object
    with `step() -> dict` (numbers of this step, may be empty) and `facts: dict` (JSON, of the whole build).
    `environment` is added to the worker's: XLA_FLAGS, numbers of threads.
    """

    name: str
    factory: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    label: str = ""


class Worker:
    """The process of one variant. `start_seconds` runs from the process's start to the end of its build."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "biphasic_jax.bench.worker", variant.factory, json.dumps(dict(variant.settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, **QUIET, **variant.environment},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its workers
        )
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - begin

    def step(self) -> dict[str, float]:
        """Takes one step. Returns its numbers, its "seconds" in the worker, and the "core_seconds" of its threads."""
        return self._ask("step")

    def memory(self) -> int:
        """The largest resident memory that the process has had, bytes."""
        return int(self._ask("memory")["bytes"])

    def _ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # what is missing of the answer says why
            self.process.stdin.write(command.encode() + b"\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise WorkerDied(
                f"{self.variant.name}: its process ended with {_ending(self.process.wait())}{self._last()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerDied(f"{self.variant.name}: {answer['error']}")
        return answer

    def _last(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"; its last words: {lines[-1][:300]}" if lines else ""

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _ending(code: int) -> str:
    if code == -9:
        return "signal 9 (out of memory?)"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


@dataclass
class Timings:
    """What one variant showed: the numbers of each round's step, or why there are none."""

    variant: Variant
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    start_seconds: float = 0.0
    memory_bytes: int = 0
    failure: str = ""

    @property
    def seconds(self) -> list[float]:
        return [step["seconds"] for step in self.steps]

    @property
    def core_seconds(self) -> list[float]:
        """What the steps took of the cores: the sum over threads. Others on the machine hardly move it."""
        return [step["core_seconds"] for step in self.steps]


def interleave(
    variants: Sequence[Variant], rounds: int, warmup: int = 1, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Timings]:
    """Builds all variants, one after the other, then steps them in turn, in reversed order every second round.

    A variant whose process dies is left out from then on; its `failure` says why. `tell` hears of progress.
    """
    timings = {variant.name: Timings(variant) for variant in variants}
    workers: dict[str, Worker] = {}

    def drop(name: str, error: WorkerDied) -> None:
        timings[name].failure = str(error)
        timings[name].steps = []
        if name in workers:
            workers.pop(name).close()

    try:
        for variant in variants:
            tell(f"building {variant.name}")
            try:
                workers[variant.name] = Worker(variant)
                for _ in range(warmup):
                    workers[variant.name].step()
            except WorkerDied as error:
                drop(variant.name, error)
                continue
            timings[variant.name].facts = workers[variant.name].facts
            timings[variant.name].start_seconds = workers[variant.name].start_seconds
        for r in range(rounds):
            for name in list(workers) if r % 2 == 0 else list(workers)[::-1]:
                tell(f"round {r + 1} of {rounds}: {name}")
                try:
                    timings[name].steps.append(workers[name].step())
                except WorkerDied as error:
                    drop(name, error)
        for name in list(workers):
            try:
                timings[name].memory_bytes = workers[name].memory()
            except WorkerDied as error:
                drop(name, error)
    finally:
        for worker in workers.values():
            worker.close()
    return timings


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of `values`."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def speed_ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """How many times as fast as `b` is `a`: the spread over the rounds of b's seconds by a's, round by round."""
    return spread([slow / fast for fast, slow in zip(a, b, strict=True)])
