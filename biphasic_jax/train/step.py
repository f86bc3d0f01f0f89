"""The one pure step: micro-batches add, devices add, one division at the end."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from biphasic_jax.model.transformer import Transformer
from biphasic_jax.objectives import Objective
from biphasic_jax.plan import Plan, learning_rate
from biphasic_jax.train.mesh import BATCH, batch_shards, replicated, state_shardings
from biphasic_jax.train.state import TrainState, init_state

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


def make_train_step(
    model: Transformer,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    config: ConfigDict,
    mesh: Mesh,
) -> Any:
    """The jitted `(state, batch, update) -> (state, metrics)` of one phase; trace it under `use_mesh(mesh)`.

    batch: from `objectives.collate`, placed by `place_batch`. update: bool scalar; False computes the metrics
    and returns the state as it was, in the same executable. The state is donated. The learning rate is that
    of `state.step`, so neither accumulation nor a resume moves it.

    metrics, scalars: loss_sum (nats, z-loss included) and weight_sum; sums/NAME of the objective; counts/NAME
    added over the batch; tokens (not padding); grad_norm of the mean gradient, before clipping;
    learning_rate; finite, False where loss or gradient was not: such an update keeps parameters and
    optimizer as they were and only moves the step on.
    """
    accumulation, shards = config.batch.accumulation, batch_shards(mesh)

    def loss_sums(params: Any, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss_sum, weight_sum, sums = objective.loss(model, params, batch)
        named = {f"sums/{name}": value for name, value in sums.items()}
        return loss_sum, {"loss_sum": loss_sum, "weight_sum": weight_sum, **named}

    def gradient_sums(params: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        """Gradient of the loss sum and the sums of a whole batch, one micro-batch after the other."""
        gradient = jax.grad(loss_sums, has_aux=True)
        if accumulation == 1:
            return gradient(params, batch)

        def add(total: Any, micro_batch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, micro_batch)), None

        micro_batches = split_micro_batches(batch, accumulation, shards, mesh)
        first = jax.tree.map(lambda x: x[0], micro_batches)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, first))
        return jax.lax.scan(add, zeros, micro_batches)[0]

    def step(state: TrainState, batch: Batch, update: jax.Array) -> tuple[TrainState, Metrics]:
        counts = {name: array.sum() for name, array in batch.items() if name.startswith("counts/")}
        arrays = {name: array for name, array in batch.items() if not name.startswith("counts/")}
        gradient_sum, metrics = gradient_sums(state.params, arrays)
        weight_sum = metrics["weight_sum"]
        mean = jax.tree.map(lambda g: g / jnp.where(weight_sum > 0, weight_sum, 1), gradient_sum)
        grad_norm = optax.tree.norm(mean)
        rate = learning_rate(plan, state.step, jnp)

        direction, opt_state = optimizer.update(mean, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, direction)
        finite = jnp.isfinite(metrics["loss_sum"]) & jnp.isfinite(grad_norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite & update, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        metrics |= counts
        metrics |= {"tokens": (batch["segments"] > 0).sum(), "grad_norm": grad_norm}
        metrics |= {"learning_rate": rate, "finite": finite}
        return TrainState(state.step + update, params, opt_state), metrics

    abstract = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    shardings = state_shardings(mesh, model, abstract)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))


def split_micro_batches(batch: Batch, accumulation: int, shards: int, mesh: Mesh) -> Batch:
    """Each leaf (n, ...) as (accumulation, n / accumulation, ...): every device splits the rows that it holds.

    Prediction groups are runs of rows of n / (shards * accumulation), so groups and their rows go together.
    """

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(shards, accumulation, -1, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(accumulation, -1, *x.shape[3:])
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, BATCH)))

    return {name: split(array) for name, array in batch.items()}
