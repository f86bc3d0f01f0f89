import functools

import jax
import numpy as np
import optax
import pytest
from stepping import Stepping, assert_same_bits

from biphasic_jax.plan import learning_rate
from biphasic_jax.train.metrics import train_line

clm_stepping = functools.cache(lambda: Stepping("clm", optimizer__learning_rate=1e-2))
mlm_stepping = functools.cache(lambda: Stepping("mlm", loss__z_loss=1e-3))


def uneven(weights_BxL):
    """No target at all in the first half of the rows, few in the next quarter: means of means would show."""
    rows = len(weights_BxL)
    weights_BxL = weights_BxL.copy()
    weights_BxL[: rows // 2] = 0
    weights_BxL[rows // 2 : 3 * rows // 4, 4:] = 0
    return weights_BxL


@functools.cache
def gradient_and_loss(objective, shape, accumulation, **changes):
    """The gradient that the step hands to its optimizer, which here keeps it as its state, and the metrics."""
    stepping = Stepping(objective, shape, accumulation, optimizer=optax.trace(decay=0), loss__z_loss=1e-3, **changes)
    state, metrics = stepping(stepping.state(), stepping.batch(weights=uneven))
    return jax.device_get(state.opt_state.trace), metrics


@pytest.mark.parametrize(
    ("objective", "shape", "accumulation"),
    [
        ("mlm", (1, 1, 1, 1), 2),
        ("mlm", (1, 1, 1, 1), 4),
        ("mlm", (2, 1, 1, 1), 1),
        ("mlm", (2, 1, 1, 1), 4),
        ("mlm", (1, 4, 1, 1), 1),
        ("mlm", (1, 1, 2, 1), 1),
        ("mlm", (1, 1, 1, 4), 1),
        ("mlm", (8, 1, 1, 1), 1),
        ("mlm", (2, 2, 2, 1), 2),
        ("mlm", (1, 2, 2, 2), 2),
        ("clm", (8, 1, 1, 1), 1),
        ("clm", (1, 1, 1, 8), 1),
        ("clm", (2, 1, 2, 2), 2),
    ],
)
def test_l1_loss_and_gradient_depend_on_neither_accumulation_nor_devices(objective, shape, accumulation):
    wanted, whole = gradient_and_loss(objective, (1, 1, 1, 1), 1)
    gradient, metrics = gradient_and_loss(objective, shape, accumulation)
    assert metrics["weight_sum"] == whole["weight_sum"] > 0
    assert_near(gradient, metrics, wanted, whole)


@pytest.mark.parametrize("objective", ["clm", "mlm"])
@pytest.mark.parametrize(("remat", "scan"), [("none", False), ("dots", True), ("dots", False), ("full", True)])
def test_loss_and_gradient_depend_on_neither_scan_nor_remat(objective, remat, scan):
    wanted, whole = gradient_and_loss(objective, (1, 1, 1, 1), 1, model__layers=3)
    gradient, metrics = gradient_and_loss(
        objective, (1, 1, 1, 1), 1, model__layers=3, model__remat=remat, model__scan_layers=scan
    )
    assert_near(gradient, metrics, wanted, whole)


def assert_near(gradient, metrics, wanted, whole):
    """Within 1e-5, of the value for sums, of the largest for a gradient."""
    for name in ("loss_sum", "grad_norm", "sums/correct", "sums/z_loss", "tokens"):
        np.testing.assert_allclose(metrics[name], whole[name], rtol=1e-5, err_msg=name)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    for mine, leaf in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, leaf, atol=1e-5 * scale)


def test_l1_the_gradient_is_that_of_the_mean_over_all_targets():
    stepping = mlm_stepping()
    batch = stepping.batch(weights=uneven)
    arrays = {name: array for name, array in batch.items() if not name.startswith("counts/")}
    params = jax.device_get(stepping.state().params)

    def mean_loss(params):
        loss_sum, weight_sum, _ = stepping.objective.loss(stepping.model, params, arrays)
        return loss_sum / weight_sum

    gradient, _ = gradient_and_loss("mlm", (1, 1, 1, 1), 1)
    wanted = jax.grad(mean_loss)(params)
    for mine, leaf in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, leaf, atol=1e-5 * float(np.abs(leaf).max()))


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_m5_a_batch_without_a_target_has_loss_0_and_finite_gradients(objective):
    stepping = mlm_stepping() if objective == "mlm" else clm_stepping()
    state, metrics = stepping(stepping.state(), stepping.batch(weights=np.zeros_like))
    assert metrics["finite"]
    assert metrics["grad_norm"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))
    line = train_line(metrics, 1.0, 0.0, 0.0)
    assert line["loss"] == 0
    assert line["targets"] == 0


def test_l4_a_non_finite_update_leaves_the_state_as_it_was_and_moves_on():
    stepping = mlm_stepping()
    state = stepping.state()
    before = jax.device_get(state)
    state, metrics = stepping(state, stepping.batch(weights=lambda w: np.where(w > 0, np.float32(np.inf), w)))
    assert not metrics["finite"]
    after = jax.device_get(state)
    assert_same_bits((after.params, after.opt_state), (before.params, before.opt_state))
    assert after.step == before.step + 1
    state, metrics = stepping(state, stepping.batch())
    assert metrics["finite"]
    assert not np.array_equal(jax.device_get(state.params)["embedding"], before.params["embedding"])


def test_a_step_without_update_returns_the_state_bit_for_bit():
    stepping = clm_stepping()
    state = stepping.state()
    before = jax.device_get(state)
    state, looked = stepping(state, stepping.batch(), update=False)
    assert_same_bits(state, before)
    _, metrics = stepping(state, stepping.batch())
    assert metrics["loss_sum"] == looked["loss_sum"]


@pytest.mark.parametrize("accumulation", [1, 8])
def test_r7_the_learning_rate_follows_the_update_not_the_micro_batch(accumulation):
    stepping = mlm_stepping() if accumulation == 1 else Stepping("mlm", accumulation=accumulation)
    state, batch = stepping.state(), stepping.batch()
    for step in range(3):
        state, metrics = stepping(state, batch)
        assert metrics["learning_rate"] == learning_rate(stepping.plan, step)
    assert state.step == 3


def test_the_loss_falls():
    stepping = clm_stepping()
    state, batch = stepping.state(), stepping.batch()
    losses = []
    for _ in range(4):
        state, metrics = stepping(state, batch)
        losses.append(metrics["loss_sum"])
    assert losses == sorted(losses, reverse=True)
