"""Adding an objective is one class in one file: it is found, checked, transformed, collated, sent to workers."""

import gc

import numpy as np
import pytest
from samples import row_batch, vocabulary

from biphasic_jax.errors import UserError
from biphasic_jax.objectives import Objective, collate, registry
from biphasic_jax.recipe import load_config

CONFIG = """
import numpy as np
from biphasic_jax.config import default_config, phase
from biphasic_jax.errors import UserError
from biphasic_jax.objectives import Examples, Objective

class Halves(Objective):
    "The first half of a row, backwards."
    name = "halves"
    causal = True
    defaults = {"step_weight": 0.5}

    @classmethod
    def check(cls, settings):
        if settings["step_weight"] <= 0:
            raise UserError(f"step_weight={settings['step_weight']}: give a positive number")

    def transform(self, rows, step):
        weights = np.zeros(rows.tokens_BxL.shape, np.float32)
        weights[:, : weights.shape[1] // 2] = self.settings["step_weight"] * step
        return Examples(rows.tokens_BxL[:, ::-1], rows.tokens_BxL, weights, {"seen": np.ones(len(weights), np.int32)})

    def predictions(self, positions):
        return positions // 2

def get_config():
    c = default_config()
    c.data.sources = ("none",)
    c.phases = (phase("clm", steps=3), phase("halves", steps=5))
    return c
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(CONFIG)
    return lambda *overrides: load_config(str(path), overrides, registry)


def test_the_two_objectives_of_the_package_are_there():
    found = registry()
    assert found["clm"].causal
    assert not found["mlm"].causal
    assert all(issubclass(cls, Objective) and cls.name == name for name, cls in found.items())


def test_an_objective_of_a_config_file_is_found_and_usable(config):
    p = config().phases[1]
    assert p.step_weight == 0.5
    objective = registry()["halves"]({"step_weight": p.step_weight}, vocabulary(), 0, (3, 8))
    rows = row_batch(count=4, length=32)
    batch = collate(objective.transform(rows, 4), rows, objective.predictions(4 * 32 // 2), 2)
    assert batch["weights"].shape == (2, 32)
    assert batch["weights"].min() == 2
    assert np.array_equal(batch["tokens"], rows.tokens_BxL[:, ::-1])
    assert batch["counts/seen"].sum() == 4


def test_an_objective_of_a_config_file_outlives_its_module(config):
    config()
    gc.collect()
    assert "halves" in registry()


def test_its_settings_are_checked_like_any_other(config):
    with pytest.raises(UserError, match=r"phases\[1\].step_weight=-1: give a positive number"):
        config("phases[1].step_weight=-1")
    with pytest.raises(UserError, match="unknown key 'step_weigth'; did you mean 'step_weight'"):
        config("phases[1].step_weigth=2")
    with pytest.raises(UserError, match=r"'halvse' is not an objective; did you mean .*'halves'"):
        config("phases[1].objective=halvse")


def test_a_mask_rate_may_be_a_schedule_in_a_config(config):
    schedule = '{"shape": "steps", "values": [0.4, 0.2], "at": [0.5]}'
    p = config("phases[1].objective=mlm", f"phases[1].mask_rate={schedule}").phases[1]
    objective = registry()["mlm"](dict(p), vocabulary(), 0, (3, 8))
    assert [objective.rate(step) for step in (3, 7)] == [0.4, 0.2]
    with pytest.raises(UserError, match=r"phases\[1\].mask_rate=.*one number in values more"):
        config("phases[1].objective=mlm", 'phases[1].mask_rate={"shape": "steps", "values": [0.4], "at": [0.5]}')
