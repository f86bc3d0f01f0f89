"""The formula against the matrix products that the traced program holds."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from biphasic_jax.model.flops import forward_flops, training_flops
from biphasic_jax.model.head import prediction_loss
from biphasic_jax.model.transformer import ModelConfig, Transformer

CONFIG = ModelConfig(
    layers=2, width=24, ff_width=40, heads=4, kv_heads=2, head_size=8, vocab_size=50, scan_layers=False, loss_chunk=64
)
ROWS, LENGTH, ROOM = 3, 16, 20


def products(jaxpr) -> int:
    """FLOPs of all dot_generals of a jaxpr, inner ones included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * math.prod(out.shape) * math.prod(left.shape[i] for i in contracted)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            total += times * products(inner)
    return total


@pytest.mark.parametrize("gathered", [True, False], ids=["predicted positions", "all positions"])
def test_the_formula_counts_the_products_of_the_program(gathered):
    model = Transformer(CONFIG)
    shape = (1, ROOM) if gathered else (ROWS, LENGTH)
    batch = {
        "tokens": jnp.zeros((ROWS, LENGTH), jnp.int32),
        "segments": jnp.ones((ROWS, LENGTH), jnp.int32),
        "targets": jnp.zeros(shape, jnp.int32),
        "weights": jnp.ones(shape),
    }
    if gathered:
        batch["predict"] = jnp.arange(ROOM, dtype=jnp.int32)[None]

    def loss(params):
        return prediction_loss(model, params, batch, causal=False)[0]

    params = jax.eval_shape(lambda: model.init_params(0))
    predictions = ROOM if gathered else ROWS * LENGTH
    assert products(jax.make_jaxpr(loss)(params).jaxpr) == forward_flops(CONFIG, ROWS, LENGTH, predictions)
    step = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    assert products(step) == training_flops(CONFIG, ROWS, LENGTH, predictions)
