"""Our training step, as `train` compiles it, and the same with what it saves taken away again."""

import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from biphasic_jax.bench.workload import Workload, batches, make_objective, workload
from biphasic_jax.model.flops import training_flops
from biphasic_jax.model.transformer import ModelConfig, Transformer
from biphasic_jax.objectives import Objective, collate, registry
from biphasic_jax.plan import make_plan
from biphasic_jax.train.mesh import batch_shards, make_mesh, place_batch, use_mesh
from biphasic_jax.train.optimizer import make_optimizer
from biphasic_jax.train.state import init_state
from biphasic_jax.train.step import make_train_step


def objective_class(name: str, head: str) -> type[Objective]:
    """The objective `name` with a choice of what reaches the head, and how.

    "gathered": as trained. "all": every position, masked or not, in chunks. "full": every position at once,
    so that the logits (B, L, V) exist. Neither of the last two is in the registry: their name is empty.
    """
    base: Any = registry()[name]

    class Everywhere(base):  # type: ignore[misc]
        name = ""

        def predictions(self, positions: int) -> int | None:
            return None

    class Materialised(Everywhere):
        name = ""

        def loss(self, model: Any, params: Any, batch: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
            logits_BxLxV = model.apply({"params": params}, batch["tokens"], batch["segments"], causal=self.causal)
            nats_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, batch["targets"])
            return jnp.sum(nats_BxL * batch["weights"]), batch["weights"].sum(), {}

    return {"gathered": base, "all": Everywhere, "full": Materialised}[head]


class Ours:
    """One optimizer step of this package. Facts: compile time, compiled memory, FLOPs of a step by formula."""

    def __init__(self, work: Workload, head: str):
        config = work.config()
        objective = make_objective(work, objective_class(work.objective, head))
        model = Transformer(ModelConfig.from_config(config.model, work.vocab_size, config.loss.z_loss))
        optimizer, mesh = make_optimizer(config), make_mesh(config)
        groups = batch_shards(mesh)
        room = objective.predictions(work.tokens // groups)
        step = make_train_step(model, objective, optimizer, make_plan(config), config, mesh)
        hosts = [collate(examples, rows, room, groups) for rows, examples in batches(work)]
        with use_mesh(mesh):
            placed = [place_batch(mesh, batch) for batch in hosts]
            self.state = jax.jit(lambda: init_state(model, optimizer, config.seed))()
            begin = time.perf_counter()
            lowered = step.lower(self.state, placed[0], np.True_)
            traced = time.perf_counter()
            self.compiled = lowered.compile()
            compiled = time.perf_counter()
        self.batches = itertools.cycle(placed)
        predictions = groups * room if room else work.tokens
        memory = self.compiled.memory_analysis()
        self.facts = {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(self.state.params)),
            "trace_seconds": traced - begin,
            "compile_seconds": compiled - traced,
            "predictions": predictions,
            "flops": training_flops(model.config, work.rows, work.row_length, predictions),
            "temp_bytes": getattr(memory, "temp_size_in_bytes", 0),
            "peak_bytes": getattr(memory, "peak_memory_in_bytes", 0),
        }

    def step(self) -> dict[str, float]:
        self.state, metrics = self.compiled(self.state, next(self.batches), np.True_)
        metrics = jax.device_get(metrics)
        return {"loss": float(metrics["loss_sum"] / metrics["weight_sum"])}


def build(settings: Mapping[str, Any]) -> Ours:
    """Settings: a workload's, and `head`: gathered, all or full."""
    return Ours(workload(settings), settings["head"])
