"""The program of one phase: its objective, its compiled and probed step, its batches."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from biphasic_jax.data.batches import train_batches
from biphasic_jax.model.flops import training_flops
from biphasic_jax.objectives import Objective, registry
from biphasic_jax.plan import Phase
from biphasic_jax.train.guards import probe_batches, probe_causality
from biphasic_jax.train.mesh import batch_shards, place_batch, share_of
from biphasic_jax.train.setup import Run
from biphasic_jax.train.state import TrainState
from biphasic_jax.train.step import make_train_step

HostBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Program:
    """What the loop needs of a phase. flops: of one update, by formula."""

    run: Run
    phase: Phase
    objective: Objective
    compiled: Any
    flops: float
    compile_seconds: float

    def __str__(self) -> str:
        name = f"phase {self.phase.index} {self.phase.objective}"
        probed = " and probed" if self.run.config.guards.causality_probe else ""
        return f"{name}: step compiled in {self.compile_seconds:.1f} s{probed}"

    def batches(self, step: int) -> Iterator[tuple[int, HostBatch]]:
        """(step, this process's slice of batch `step`) from `step` to the end of the phase."""
        run = self.run
        part, parts = share_of(run.mesh, jax.process_index())
        return train_batches(
            run.rows,
            self.objective,
            run.config,
            start=step,
            stop=self.phase.end,
            groups=groups(run),
            process=part,
            processes=parts,
            workers=run.config.data.workers,
        )

    def update(self, state: TrainState, batch: HostBatch) -> tuple[TrainState, Any]:
        """The next state, and metrics that may still be in the making on the device."""
        return self.compiled(state, place_batch(self.run.mesh, batch), self.run.yes)

    def look(self, state: TrainState, batch: HostBatch) -> tuple[TrainState, Any]:
        """The state as it was, and the metrics: the same executable as `update`."""
        return self.compiled(state, place_batch(self.run.mesh, batch), self.run.no)


def groups(run: Run) -> int:
    """Into how many prediction groups this process's rows of a batch fall."""
    _, parts = share_of(run.mesh, jax.process_index())
    return run.config.batch.accumulation * batch_shards(run.mesh) // parts


def compile_phase(run: Run, phase: Phase, state: TrainState) -> tuple[Program, TrainState]:
    """The phase's program, probed for causality if the config says so, and the state as it was.

    The shapes are those of a probe batch. Call it under `use_mesh(run.mesh)`.
    """
    config = run.config
    cls = registry()[phase.objective]
    objective = cls(phase.settings, run.vocabulary, config.seed, (phase.start, phase.end))
    begin = time.perf_counter()
    _, parts = share_of(run.mesh, jax.process_index())
    rows, length = config.batch.rows, config.data.row_length
    batches = probe_batches(objective, run.vocabulary, rows // parts, length, groups(run))
    step = make_train_step(run.model, objective, run.optimizer, run.plan, config, run.mesh)
    compiled = step.lower(state, place_batch(run.mesh, batches[0]), run.yes).compile()
    flops = training_flops(run.model.config, rows, length, parts * batches[0]["targets"].size)
    program = Program(run, phase, objective, compiled, flops, time.perf_counter() - begin)
    if config.guards.causality_probe:
        state = probe_causality(program.look, state, objective, batches)
    return program, state


def reset_optimizer(run: Run, state: TrainState) -> TrainState:
    """The state with the optimizer as at the start of a run."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    fresh = jax.jit(run.optimizer.init, out_shardings=shardings)(state.params)
    return TrainState(state.step, state.params, fresh)
