"""How long a run takes to begin: compiling its steps, and from the start of `train` to its first step."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from biphasic_jax.bench.harness import Variant, Worker
from biphasic_jax.data.prepare import ensure_rows
from biphasic_jax.errors import EXIT_INTERRUPTED, UserError
from biphasic_jax.objectives import registry
from biphasic_jax.recipe import load_config

PATIENCE = 600.0  # seconds until a run that writes no line is given up


class Programs:
    """Compiles the step of every phase of a config, just as `train` does. It has no step of its own."""

    def __init__(self, config: str, overrides: Sequence[str], workdir: str):
        from biphasic_jax.train.compilation import enable_compilation_cache
        from biphasic_jax.train.mesh import use_mesh
        from biphasic_jax.train.program import compile_phase
        from biphasic_jax.train.run_folder import RunFolder
        from biphasic_jax.train.setup import set_up

        enable_compilation_cache()
        run, state = set_up(RunFolder(workdir), load_config(config, overrides, registry), False)
        phases = []
        with use_mesh(run.mesh):
            for p in run.plan.phases:
                program, state = compile_phase(run, p, state)
                phases.append({"phase": p.index, "objective": p.objective, "seconds": program.compile_seconds})
        self.facts = {"phases": phases}


def build_programs(settings: Mapping[str, Any]) -> Programs:
    return Programs(**settings)


def measure(config: str, overrides: Sequence[str], steps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Compiles twice and trains `steps` steps twice, without a compilation cache and then with it; JSON.

    The rows are prepared before the clock starts.
    """
    tell("preparing the rows of the config")
    ensure_rows(load_config(config, overrides, registry))
    with tempfile.TemporaryDirectory() as folder:
        compiles, starts = {}, {}
        for cache in ("cold", "warm"):
            tell(f"compiling, cache {cache}")
            settings = {"config": config, "overrides": list(overrides), "workdir": os.path.join(folder, f"c-{cache}")}
            environment = _cache(os.path.join(folder, "compile-cache"))
            variant = Variant(f"compile-{cache}", "biphasic_jax.bench.startup:build_programs", settings, environment)
            with Worker(variant) as worker:
                compiles[cache] = worker.facts["phases"]
        for cache in ("cold", "warm"):
            tell(f"training {steps} steps, cache {cache}")
            starts[cache] = train_briefly(
                config, overrides, steps, os.path.join(folder, cache), _cache(os.path.join(folder, "train-cache"))
            )
    return {"config": config, "overrides": list(overrides), "compile": compiles, "start": starts}


def _cache(folder: str) -> dict[str, str]:
    """The environment that makes JAX keep what it compiles in `folder`, as train/compilation.py would."""
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}


def train_briefly(
    config: str, overrides: Sequence[str], steps: int, workdir: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Starts `train` in a process, lets it go to step `steps` or its end, and stops it.

    seconds_to_first_step: from the start of the process to the line of step 1 in metrics.jsonl, which is written
    when step 2 is on its way. The rates are medians over the lines from the third on.
    """
    command = [sys.executable, "-m", "biphasic_jax", "train", f"--config={config}", f"--workdir={workdir}", "--quiet"]
    command += [f"--config.{override}" for override in overrides]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            first = 0.0
            lines: list[dict[str, Any]] = []
            while len(lines) < steps and process.poll() is None and time.perf_counter() - begin < PATIENCE:
                time.sleep(0.02)
                lines = train_lines(os.path.join(workdir, "metrics.jsonl"))
                first = first or (time.perf_counter() - begin if lines else 0.0)
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        if code not in (0, EXIT_INTERRUPTED) or not lines:
            log.seek(0)
            last = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()][-1:]
            raise UserError(f"--config={config}: its training ended with exit code {code}: {' '.join(last)}")
    steady = lines[2:] or lines
    rates = {key: statistics.median(line[key] for line in steady) for key in ("tokens_per_second", "mfu", "data_wait")}
    return {"seconds_to_first_step": first, "steps": len(lines), **rates}


def train_lines(path: str) -> list[dict[str, Any]]:
    """The complete train lines of a metrics.jsonl that is being written."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return [line for line in lines if line["split"] == "train"]
