import numpy as np
import pytest
from stepping import Stepping, assert_same_bits

from biphasic_jax.objectives.clm import Clm
from biphasic_jax.objectives.mlm import Mlm
from biphasic_jax.train.guards import WATCHED, GuardError, probe_batches, probe_causality


def probe(stepping, state=None):
    batches = probe_batches(
        stepping.objective, stepping.vocabulary, stepping.rows, stepping.config.data.row_length, stepping.groups
    )
    return probe_causality(
        lambda s, batch: stepping(s, batch, update=False), state or stepping.state(), stepping.objective, batches
    )


class Seeing(Clm):
    """CLM whose compiled step looks ahead."""

    name = ""

    def loss(self, model, params, batch):
        from biphasic_jax.model.head import prediction_loss

        return prediction_loss(model, params, batch, causal=False)


class Blind(Mlm):
    """MLM whose compiled step kept the causal mask of the phase before."""

    name = ""

    def loss(self, model, params, batch):
        from biphasic_jax.model.head import prediction_loss

        return prediction_loss(model, params, batch, causal=True)


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_c4_a_sound_step_passes_and_the_state_is_untouched(objective):
    stepping = Stepping(objective, model__init_std=0.02)
    state = stepping.state()
    before = probe(stepping, state)
    assert_same_bits(before, stepping.state())


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1)])
def test_c1_a_causal_phase_that_sees_the_future_is_stopped(shape):
    with pytest.raises(GuardError, match="sees the future"):
        probe(Stepping(Seeing, shape))


def test_c2_a_bidirectional_phase_that_is_causal_is_stopped():
    with pytest.raises(GuardError, match="is causal"):
        probe(Stepping(Blind))


def test_the_probe_batches_are_those_of_the_phase_and_differ_in_later_tokens_alone():
    stepping = Stepping("mlm", accumulation=2)
    rows, length = stepping.rows, stepping.config.data.row_length
    one, two = probe_batches(stepping.objective, stepping.vocabulary, rows, length, stepping.groups)
    real = stepping.batch()
    for batch in (one, two):
        assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {k: (v.shape, v.dtype) for k, v in real.items()}
    differs_BxL = one["tokens"] != two["tokens"]
    first_BxL = one["segments"] == 1
    np.testing.assert_array_equal(differs_BxL, first_BxL & (np.arange(length) > WATCHED))
    assert one["weights"].sum() == rows
    for name in one:
        if name != "tokens":
            np.testing.assert_array_equal(one[name], two[name])
    assert (one["segments"] == 0).any()
    assert (one["segments"] == 2).any()
