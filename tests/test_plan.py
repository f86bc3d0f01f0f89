import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biphasic_jax.config import default_config, phase, resolve
from biphasic_jax.objectives import registry
from biphasic_jax.plan import content_key, learning_rate, make_plan, stretches


def config_of(*phases, **schedule):
    c = default_config()
    c.data.sources = ("vendored:tiny",)
    c.phases = phases
    c.schedule.update(schedule)
    return resolve(c, registry())


def rates(plan):
    return [float(learning_rate(plan, step)) for step in range(plan.start, plan.end)]


def test_the_papers_schedule_to_the_digit():
    plan = make_plan(config_of(phase("clm", steps=10_000), phase("mlm", steps=32_000), warmup=2000, decay=2000))
    assert float(learning_rate(plan, 0)) == pytest.approx(5e-4 / 2000)
    assert float(learning_rate(plan, 1999)) == pytest.approx(5e-4)
    assert float(learning_rate(plan, 10_000)) == pytest.approx(5e-4)  # no second warm-up at the switch
    assert float(learning_rate(plan, 39_999)) == pytest.approx(5e-4)
    assert float(learning_rate(plan, 40_000)) == pytest.approx(5e-4 * (1 - 1 / 2000))
    assert float(learning_rate(plan, 41_999)) == 0.0


def test_warmup_equals_torchs_linear_schedule():
    plan = make_plan(config_of(phase("mlm", steps=50), warmup=20, decay=0))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 20, 1.0))
    for step in range(50):
        assert float(learning_rate(plan, step)) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - np.sqrt(0.5))])
def test_shapes_of_the_decay(shape, middle):
    plan = make_plan(config_of(phase("mlm", steps=100), warmup=0, decay=40, shape=shape))
    assert rates(plan)[79] == pytest.approx(5e-4 * middle, rel=1e-5)
    assert rates(plan)[-1] == pytest.approx(0, abs=1e-11)
    assert all(a >= b for a, b in zip(rates(plan)[60:], rates(plan)[61:], strict=False))


def test_one_schedule_a_phase():
    plan = make_plan(
        config_of(
            phase("clm", steps=40),
            phase("mlm", steps=20, warmup=0, learning_rate=1e-4),
            span="phase",
            warmup=4,
            decay=10,
        )
    )
    assert rates(plan)[39] == 0.0
    assert rates(plan)[40] == pytest.approx(1e-4)
    assert rates(plan)[59] == 0.0


def test_a_plan_that_continues_a_checkpoint_begins_at_its_step():
    config = config_of(phase("mlm", steps=30), warmup=5, decay=5)
    assert rates(make_plan(config, 70)) == rates(make_plan(config))
    assert make_plan(config, 70).phase_of_update(99).end == 100


def test_learning_rate_is_the_same_traced_and_on_the_host():
    import jax
    import jax.numpy as jnp

    for shape in ("linear", "cosine", "sqrt"):
        plan = make_plan(config_of(phase("clm", steps=30), phase("mlm", steps=30), warmup=7, decay=11, shape=shape))
        traced = jax.jit(jax.vmap(functools.partial(learning_rate, plan, xp=jnp)))(jnp.arange(60))
        np.testing.assert_allclose(traced, rates(plan), rtol=2e-6, atol=1e-10)


def key(config, step, data="rows"):
    return content_key(config, make_plan(config), step, data)


def test_two_plans_share_the_work_before_they_part():
    long = config_of(phase("clm", steps=42_000), warmup=2000, decay=2000)
    split = config_of(phase("clm", steps=10_000), phase("mlm", steps=32_000), warmup=2000, decay=2000)
    assert key(long, 10_000) == key(split, 10_000)
    assert key(long, 10_001) != key(split, 10_001)
    assert key(long, 1000) == key(split, 1000)


@pytest.mark.parametrize(
    "change", [("seed", 1), ("model.layers", 2), ("optimizer.beta2", 0.9), ("batch.rows", 32), ("loss.z_loss", 1e-4)]
)
def test_everything_that_decides_the_weights_is_in_the_key(change):
    from biphasic_jax.overrides import apply_override

    a = config_of(phase("clm", steps=40), warmup=4, decay=4)
    b = default_config()
    b.data.sources, b.phases = ("vendored:tiny",), (phase("clm", steps=40),)
    b.schedule.update(warmup=4, decay=4)
    apply_override(b, f"{change[0]}={change[1]}")
    b = resolve(b, registry())
    assert key(a, 20) != key(b, 20)
    assert key(a, 20) != key(a, 20, data="other rows")
    assert key(a, 20) != content_key(a, make_plan(a), 20, "rows", parent="another run")


def test_what_does_not_reach_the_weights_is_not_in_the_key():
    a = config_of(phase("clm", steps=40), warmup=4, decay=4)
    b = config_of(phase("clm", steps=40), warmup=4, decay=4)
    b.unlock()
    b.log.every, b.checkpoint.every, b.data.workers = 7, 3, 4
    assert key(a, 20) == key(b, 20)


def test_a_schedule_over_the_phase_ties_the_key_to_its_length():
    rate = {"shape": "linear", "from": 0.5, "to": 0.1}
    a = config_of(phase("mlm", steps=40, mask_rate=rate), warmup=0, decay=0)
    b = config_of(phase("mlm", steps=80, mask_rate=rate), warmup=0, decay=0)
    c, d = (config_of(phase("mlm", steps=n), warmup=0, decay=0) for n in (40, 80))
    assert key(a, 20) != key(b, 20)
    assert key(c, 20) == key(d, 20)


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    warmup=st.integers(0, 10),
    decay=st.integers(0, 10),
    until=st.integers(0, 120),
)
def test_stretches_tile_the_steps(lengths, warmup, decay, until):
    total = sum(lengths)
    names = ["clm", "mlm"] * 2
    plan = make_plan(
        config_of(
            *(phase(names[i], steps=n) for i, n in enumerate(lengths)),
            warmup=min(warmup, total // 2),
            decay=min(decay, total // 2),
        )
    )
    pieces = stretches(plan, until)
    covered = [step for piece in pieces for step in range(piece["start"], piece["end"])]
    assert covered == list(range(min(until, total)))
    for piece in pieces:
        assert piece["objective"] == plan.phase_of_update(piece["start"]).objective
