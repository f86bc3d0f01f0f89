"""A phase in little: real rows, an objective, a mesh and the jitted step, for the tests of what goes into it."""

import jax
import numpy as np
from held_out import tiny, tiny_config

from biphasic_jax.data.rows import RowBatch
from biphasic_jax.data.shards import Rows
from biphasic_jax.model.transformer import ModelConfig, Transformer
from biphasic_jax.objectives import collate, registry
from biphasic_jax.plan import make_plan
from biphasic_jax.train.mesh import (
    AXES,
    batch_shards,
    make_mesh,
    place_batch,
    replicated,
    state_shardings,
    use_mesh,
)
from biphasic_jax.train.optimizer import make_optimizer
from biphasic_jax.train.state import TrainState, init_state
from biphasic_jax.train.step import make_train_step


def train_rows(count: int) -> RowBatch:
    rows = Rows(tiny().folder, "train")
    number_B = np.arange(count)
    return RowBatch(*rows.read(number_B), number_B, number_B)


class Stepping:
    """Config, model, mesh, state and step of one phase; `objective` is a name or an Objective's class."""

    def __init__(self, objective="mlm", shape=(1, 1, 1, 1), accumulation=1, optimizer=None, **changes):
        config = tiny_config()
        with config.unlocked():
            config.batch.accumulation = accumulation
            config.mesh.update(dict(zip(AXES, shape, strict=True)))
            config.model.layers = 1
            for key, value in changes.items():
                section, _, name = key.partition("__")
                config[section][name] = value
        self.config, self.vocabulary = config, tiny().vocabulary
        self.mesh = make_mesh(config)
        self.plan = make_plan(config)
        cls = registry()[objective] if isinstance(objective, str) else objective
        self.objective = cls({}, self.vocabulary, config.seed, (0, 2))
        self.model = Transformer(ModelConfig.from_config(config.model, self.vocabulary.size, config.loss.z_loss))
        self.optimizer = optimizer or make_optimizer(config)
        self.groups = accumulation * batch_shards(self.mesh)
        self.yes, self.no = (jax.device_put(np.bool_(x), replicated(self.mesh)) for x in (True, False))
        with use_mesh(self.mesh):
            self.step = make_train_step(self.model, self.objective, self.optimizer, self.plan, config, self.mesh)

    @property
    def rows(self):
        return self.config.batch.rows

    def state(self):
        """Random weights and an optimizer of zeros, put together on the host: that compiles nothing."""
        abstract = jax.eval_shape(lambda: init_state(self.model, self.optimizer, 0))
        random = np.random.default_rng(0)
        params = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(x.dtype), abstract.params)
        opt_state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract.opt_state)
        state = TrainState(np.int32(0), params, opt_state)
        return jax.device_put(state, state_shardings(self.mesh, self.model, abstract))

    def batch(self, rows=None, weights=None):
        """A host batch of the phase; `weights(weights_BxL)` may change the weights before it is laid out."""
        rows = train_rows(self.rows) if rows is None else rows
        examples = self.objective.transform(rows, 0)
        if weights is not None:
            examples.weights_BxL = weights(examples.weights_BxL)
        room = self.objective.predictions(rows.tokens_BxL.size // self.groups)
        return collate(examples, rows, room, self.groups)

    def __call__(self, state, batch, update=True):
        with use_mesh(self.mesh):
            state, metrics = self.step(state, place_batch(self.mesh, batch), self.yes if update else self.no)
        return state, jax.device_get(metrics)


def assert_same_bits(a, b):
    """Two trees are equal to the last bit; NaN equals NaN."""
    a, b = jax.device_get((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, x in jax.tree_util.tree_leaves_with_path(a):
        y = dict(jax.tree_util.tree_leaves_with_path(b))[path]
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)
