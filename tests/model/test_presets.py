"""The paper's sizes, to the parameter."""

import math

import jax
import pytest

from biphasic_jax.config import default_config
from biphasic_jax.errors import UserError
from biphasic_jax.model.presets import PAPER_VOCABULARY, PRESETS, parameter_counts, preset
from biphasic_jax.model.transformer import ModelConfig, Transformer

# arXiv 2507.00994: blocks with norms, one embedding, encoder without head, all with an untied head
PAPER = {
    "210m": (113_265_408, 98_500_608, 211_766_016, 310_266_624),
    "610m": (460_123_776, 147_750_912, 607_874_688, 755_625_600),
    "1b": (966_230_208, 221_626_368, 1_187_856_576, 1_409_482_944),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_sizes_have_the_papers_parameters(name):
    counts = parameter_counts(ModelConfig(vocab_size=PAPER_VOCABULARY, **preset(name)))
    assert (counts["blocks"], counts["embedding"], counts["encoder"], counts["total"]) == PAPER[name]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_counts_are_those_of_the_parameter_tree(name, tied):
    config = ModelConfig(vocab_size=1000, tied=tied, **preset(name))
    tree = jax.eval_shape(lambda: Transformer(config).init_params(0))

    def size(part):
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part))

    counts = parameter_counts(config)
    assert counts["total"] == size(tree)
    assert counts["blocks"] == size((tree["blocks"], tree["final_norm"]))
    assert counts["encoder"] == counts["total"] - counts["head"]
    assert ("head" in tree) == (not tied)


def test_a_preset_fits_a_config():
    config = default_config()
    config.model.update(preset("610m"))
    assert ModelConfig.from_config(config.model, 10).kv_heads == 6


def test_an_unknown_size_names_the_near_ones():
    with pytest.raises(UserError, match=r"'220m'.*210m"):
        preset("220m")
