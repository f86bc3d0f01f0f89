import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from held_out import tiny_config

from biphasic_jax.model.transformer import ModelConfig, Transformer
from biphasic_jax.train.optimizer import MUON_RMS, make_optimizer, matrices
from biphasic_jax.train.state import flatten, unflatten


def params_and_gradients(tied=False, steps=5):
    config = tiny_config()
    model = Transformer(ModelConfig.from_config({**config.model, "tied": tied}, 50))
    abstract = jax.eval_shape(lambda: model.init_params(0))
    random = np.random.default_rng(0)

    def draw(scale):
        return jax.tree.map(lambda x: scale * random.standard_normal(x.shape).astype(np.float32), abstract)

    return draw(0.5), [draw(10.0 ** (i % 3 - 1)) for i in range(steps)]  # some clipped, some not


def optimizer_config(**changes):
    config = tiny_config()
    with config.unlocked():
        config.optimizer.update(changes)
    return config


def descend(config, params, gradients, rate):
    optimizer = make_optimizer(config)

    @jax.jit
    def update(params, state, gradient):
        direction, state = optimizer.update(gradient, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, direction), state, direction

    state = optimizer.init(params)
    for gradient in gradients:
        params, state, direction = update(params, state, gradient)
    return flatten(params), direction


@pytest.mark.parametrize("decay", ["all", "matrices"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_adamw_is_pytorchs(decay, clip):
    rate, eps, weight_decay = 1e-2, 1e-5, 0.1
    params, gradients = params_and_gradients()
    config = optimizer_config(eps=eps, weight_decay=weight_decay, decay=decay, clip=clip)
    mine, _ = descend(config, params, gradients, rate)

    tensors = {path: torch.nn.Parameter(torch.tensor(leaf)) for path, leaf in flatten(params).items()}
    decays = {path: decay == "all" or yes for path, yes in flatten(matrices(params)).items()}
    groups = [
        {"params": [t for path, t in tensors.items() if decays[path] == yes], "weight_decay": weight_decay * yes}
        for yes in (True, False)
    ]
    reference = torch.optim.AdamW([g for g in groups if g["params"]], lr=rate, betas=(0.9, 0.95), eps=eps)
    for gradient in gradients:
        for path, leaf in flatten(gradient).items():
            tensors[path].grad = torch.tensor(leaf)
        if clip:
            torch.nn.utils.clip_grad_norm_(tensors.values(), clip)
        reference.step()
    for path, tensor in tensors.items():
        np.testing.assert_allclose(mine[path], tensor.detach().numpy(), rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_embeddings_are_no_matrices(tied):
    params, _ = params_and_gradients(tied)
    decayed = {path for path, yes in flatten(matrices(params)).items() if yes}
    attention = {f"blocks/attention/{name}" for name in "qkvo"}
    mlp = {f"blocks/mlp/{name}" for name in ("gate", "up", "down")}
    assert decayed == attention | mlp | (set() if tied else {"head"})


def test_muon_makes_every_layers_update_orthogonal_and_as_large_as_adamws():
    params, gradients = params_and_gradients(steps=3)
    config = optimizer_config(name="muon", weight_decay=0.0)
    _, direction = descend(config, params, gradients, 1e-2)
    for path, update in flatten(direction).items():
        if path.startswith("blocks/") and not path.endswith("scale"):
            for layer in np.asarray(update):
                values = np.linalg.svd(layer / (MUON_RMS * max(layer.shape) ** 0.5), compute_uv=False)
                assert 0.25 < values.min() <= values.max() < 1.25, path  # five Newton-Schulz steps reach 1 about
                assert abs(np.sqrt(np.mean(layer**2)) / MUON_RMS - 1) < 0.25, path


def test_muon_treats_layers_apart_and_leaves_all_else_to_adam():
    params, (gradient,) = params_and_gradients(steps=1)
    config = optimizer_config(name="muon", weight_decay=0.0, clip=0.0)
    _, one = descend(config, params, [gradient], 1e-2)
    other = unflatten(
        gradient,
        {
            path: leaf * np.array([1, -3]).reshape(-1, 1, 1).astype(np.float32) if leaf.ndim == 3 else leaf
            for path, leaf in flatten(gradient).items()
        },
    )
    _, two = descend(config, params, [other], 1e-2)
    one, two = flatten(one), flatten(two)
    adam = flatten(descend(optimizer_config(weight_decay=0.0, clip=0.0), params, [gradient], 1e-2)[1])
    for path in one:
        if path.startswith("blocks/") and not path.endswith("scale"):
            np.testing.assert_allclose(one[path][0], two[path][0], atol=1e-5)
            np.testing.assert_allclose(one[path][1], -two[path][1], atol=1e-5)
        else:
            np.testing.assert_allclose(one[path], adam[path], rtol=1e-6)


def test_decay_is_multiplied_by_the_learning_rate_and_apart_from_the_gradient():
    params, _ = params_and_gradients()
    nothing = jax.tree.map(jnp.zeros_like, params)
    after, _ = descend(optimizer_config(decay="all", weight_decay=0.1), params, [nothing], 1e-2)
    for path, leaf in flatten(params).items():
        np.testing.assert_allclose(after[path], leaf * (1 - 1e-2 * 0.1), rtol=1e-6)
