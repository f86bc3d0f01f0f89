"""What is said before the first step: to the person at the terminal, and to the run folder."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.table import Table

from biphasic_jax.config import to_json
from biphasic_jax.model.attention import choose_backend
from biphasic_jax.model.presets import parameter_counts
from biphasic_jax.train.mesh import batch_shards, unsplit
from biphasic_jax.train.record import DATA_FACTS, data_facts
from biphasic_jax.train.run_folder import plan_facts

if TYPE_CHECKING:
    from biphasic_jax.train.setup import Run

PACKAGES = ("biphasic-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "array-record", "numpy")


def environment(run: "Run") -> dict[str, Any]:
    """Versions, devices, mesh and attention backend of this start."""
    backend, reason = choose_backend(run.config.model.attention)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "backend": jax.default_backend(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in run.mesh.devices.flat],
        "processes": jax.process_count(),
        "mesh": dict(run.mesh.shape),
        "idle_devices": jax.device_count() - run.mesh.size,
        "unsplit": unsplit(run.mesh, run.model),
        "attention": backend,
        "attention_reason": reason,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def write_start(run: "Run") -> None:
    """config.json, plan.json, environment.json, data.json, tokenizer.json, and a line in resumes.jsonl."""
    folder, start = run.folder, run.start
    plan = plan_facts(run.config, run.plan, run.fingerprint, start.parent_key)
    folder.write("config.json", to_json(run.config) + "\n")
    folder.write("plan.json", json.dumps(plan, indent=2) + "\n")
    folder.write("environment.json", json.dumps(environment(run), indent=2) + "\n")
    folder.write("tokenizer.json", run.tokenizer_json)
    if len(run.validation):
        folder.write(DATA_FACTS, json.dumps(data_facts(run.validation), indent=2) + "\n")
    facts = {"step": start.step, "mode": start.mode, "checkpoint": start.checkpoint, "plan_start": start.plan_start}
    folder.record({**facts, "parent_key": start.parent_key, "changes": list(start.changes)})


def print_summary(run: "Run") -> None:
    """What is about to run, on stdout."""
    config, plan, mesh = run.config, run.plan, run.mesh
    rows, length, accumulation = config.batch.rows, config.data.row_length, config.batch.accumulation
    shards, facts = batch_shards(mesh), environment(run)
    counts = parameter_counts(run.model.config)
    epochs = (plan.end * rows) / len(run.rows)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    devices = f"{mesh.size} x {run.mesh.devices.flat[0].device_kind} ({facts['backend']})"
    table.add_row("run", run.folder.path)
    table.add_row("parameters", f"{counts['total']:,} ({counts['encoder']:,} without the head), {config.model.dtype}")
    table.add_row("devices", f"{devices}, mesh {' x '.join(f'{k} {v}' for k, v in mesh.shape.items())}")
    if facts["idle_devices"]:
        mend = "; they do not divide the rows of a micro-batch" if config.mesh.data == -1 else ""
        table.add_row("idle", f"{facts['idle_devices']} of {jax.device_count()} devices{mend}")
    for line in facts["unsplit"]:
        table.add_row("not split", line)
    table.add_row("attention", f"{facts['attention']} ({facts['attention_reason']})")
    table.add_row("global batch", f"{rows:,} rows of {length:,} = {rows * length:,} tokens a step, padding included")
    per_device = rows // shards // accumulation
    table.add_row("a device", f"{per_device:,} rows at a time, accumulation {accumulation}")
    table.add_row(
        "data", f"{len(run.rows):,} rows, {len(run.validation):,} held out; the plan reads {epochs:.2f} epochs"
    )
    for phase in plan.phases:
        rate = phase.settings.get("mask_rate")
        settings = f", mask rate {rate}" if rate is not None else ""
        optimizer = ", fresh optimizer" if phase.optimizer == "reset" else ""
        table.add_row(
            f"phase {phase.index}", f"{phase.objective}, steps {phase.start:,} to {phase.end:,}{settings}{optimizer}"
        )
    table.add_row("starts", _start(run))
    Console(soft_wrap=True).print(table, highlight=False)
    if not len(run.validation):
        print("no row is held out (data.validation): nothing will be evaluated")


def _start(run: "Run") -> str:
    start = run.start
    if start.mode == "new":
        return f"from random weights, seed {run.config.seed}"
    if start.mode == "resume":
        changed = f", with changes: {'; '.join(start.changes)}" if start.changes else ""
        done = ", its end: there is nothing left to train" if start.step == run.plan.end else ""
        return f"goes on from step {start.step:,}{done}{changed}"
    what = "weights, optimizer and data position" if start.mode == "full" else "weights only"
    return f"from {start.checkpoint}: {what}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
