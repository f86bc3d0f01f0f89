"""Held-out figures: what they are, and what they must not depend on."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from held_out import tiny, tiny_config

from biphasic_jax.data.batches import evaluation_batches
from biphasic_jax.data.shards import Rows
from biphasic_jax.errors import UserError
from biphasic_jax.model.transformer import Transformer
from biphasic_jax.train.evaluator import Evaluator, measures


def run(config, step=0, rows=None, **options):
    t = tiny()
    evaluator = Evaluator(t.model, config, t.vocabulary, t.rows if rows is None else rows, **options)
    return evaluator.run(t.params, step=step, phase=0)


class FewRows(Rows):
    """The first rows of a split."""

    def __init__(self, folder, split, count):
        super().__init__(folder, split)
        self.count = count

    def __len__(self):
        return self.count


@pytest.fixture(scope="module")
def lines():
    return run(tiny_config(), step=7)


def test_a_line_a_measure_with_the_agreed_keys(lines):
    assert [(line["objective"], line["mask_rate"]) for line in lines] == [("clm", None), ("mlm", 0.15), ("mlm", 0.4)]
    for line in lines:
        assert (line["step"], line["phase"], line["split"]) == (7, 0, "validation")
        assert line["targets"] > 0
        assert 0 <= line["accuracy"] <= 1
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert "bits_per_byte" in lines[0]
    assert "bits_per_byte" not in lines[1]


def test_the_figures_equal_a_direct_computation(lines):
    """One row at a time, plain logits, float64."""
    t, config = tiny(), tiny_config()
    apply = jax.jit(lambda x, s, causal: t.model.apply({"params": t.params}, x, s, causal=causal), static_argnums=2)
    for measure, line in zip(measures(config, t.vocabulary), lines, strict=True):
        loss = correct = targets = size = 0
        batches = evaluation_batches(t.rows, measure.objective, rows_limit=19, batch_rows=1, groups=1)
        for batch in batches:
            logits = np.asarray(apply(batch["tokens"], batch["segments"], measure.name == "clm"), np.float64)
            logits = logits.reshape(-1, t.vocabulary.size)
            if "predict" in batch:
                logits = logits[batch["predict"].ravel()]
            target, weight = batch["targets"].ravel(), batch["weights"].ravel() > 0
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            loss -= logp[np.arange(len(target)), target][weight].sum()
            correct += (logits.argmax(-1) == target)[weight].sum()
            targets += weight.sum()
            size += sum(t.vocabulary.bytes_V[i] for i in target[weight])
        assert line["targets"] == targets
        assert line["loss"] == pytest.approx(loss / targets, rel=1e-5)
        assert line["accuracy"] == pytest.approx(correct / targets, abs=1e-9)
        if measure.name == "clm":
            assert line["bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)


def test_the_bytes_of_the_vocabulary_are_those_of_the_text():
    """What bits per byte divides by; the cut of a row may go through a character, which decoding replaces."""
    t = tiny()
    tokens, segments = t.rows.read(np.arange(len(t.rows)))
    text = t.tokenizer.decode([int(i) for i in tokens[segments > 0] if not t.vocabulary.special_V[i]])
    assert t.vocabulary.bytes_V[tokens[segments > 0]].sum() == pytest.approx(len(text.encode()), rel=1e-3)


@pytest.mark.parametrize("batch_rows", [1, 3, 8, 64])
def test_l3_no_figure_depends_on_the_batch_size(lines, batch_rows):
    others = run(tiny_config(batch_rows=batch_rows, mask_rates=(0.4,)), step=7)
    assert others[0]["bits_per_byte"] == pytest.approx(lines[0]["bits_per_byte"], rel=1e-6)
    for line, other in zip((lines[0], lines[2]), others, strict=True):
        assert line["targets"] == other["targets"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert line["accuracy"] == other["accuracy"]


def test_e11_the_last_partial_batch_counts():
    """19 rows in batches of 8: the figures are those of 19 rows, not of 16."""
    whole = run(tiny_config(batch_rows=8, mask_rates=(1.0,)))
    t = tiny()
    tokens, segments = t.rows.read(np.arange(19))
    ends = sum(len(np.unique(s[s > 0])) for s in segments)
    assert whole[0]["targets"] == (segments > 0).sum() - ends  # each token but the first of a segment
    ordinary = (segments > 0) & ~t.vocabulary.special_V[tokens]
    assert whole[1]["targets"] == ordinary.sum()


def test_rows_zero_means_all_rows():
    t = tiny()
    assert Evaluator(t.model, tiny_config(rows=0), t.vocabulary, t.rows).row_count == len(t.rows)


def test_m9_evaluation_masks_are_fixed_by_their_own_seed():
    t = tiny()

    def fed(config):
        rate = measures(config, t.vocabulary)[1].objective
        return [b["tokens"] for b in evaluation_batches(t.rows, rate, rows_limit=19, batch_rows=8, groups=1)]

    first = fed(tiny_config())
    other_run = tiny_config()
    with other_run.unlocked():
        other_run.seed = 99
    assert all(np.array_equal(a, b) for a, b in zip(first, fed(other_run), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, fed(tiny_config(seed=5)), strict=True))


def test_m9_the_same_figures_at_every_step_and_in_every_process(lines):
    t = tiny()
    evaluator = Evaluator(t.model, tiny_config(), t.vocabulary, t.rows)
    early, late = (evaluator.run(t.params, step=step, phase=step // 5) for step in (0, 9))
    assert [{**line, "step": 9, "phase": 1} for line in early] == late
    assert [{**line, "step": 7, "phase": 0} for line in early] == lines


def test_nothing_is_traced_twice():
    t, traced = tiny(), []
    evaluator = Evaluator(t.model, tiny_config(batch_rows=8, mask_rates=(0.4,)), t.vocabulary, t.rows)
    for measure in evaluator.measures:

        def loss(*arguments, name=measure.name, real=measure.objective.loss):
            traced.append(name)
            return real(*arguments)

        measure.objective.loss = loss
    for step in (0, 1):
        evaluator.run(t.params, step=step, phase=0)
    assert traced == ["clm", "mlm"]


def test_m11_no_target_is_refused_with_the_mend():
    rows = FewRows(tiny().folder, "validation", 0)
    with pytest.raises(UserError, match=r"hold no target; raise data\.validation"):
        run(tiny_config(), rows=rows)
    one = FewRows(tiny().folder, "validation", 1)
    with pytest.raises(UserError, match=r"mlm at mask rate 1e-09.*evaluation.rows"):
        run(tiny_config(mask_rates=(1e-9,)), rows=one)


def test_masks_of_a_low_rate_are_part_of_those_of_a_higher_one():
    """One draw a position: rates are compared on the same text."""
    t = tiny()
    low, high = (m.objective for m in measures(tiny_config(), t.vocabulary)[1:])
    for a, b in zip(
        *(evaluation_batches(t.rows, o, rows_limit=19, batch_rows=19, groups=1) for o in (low, high)), strict=True
    ):
        masked = [batch["tokens"] == t.vocabulary.mask for batch in (a, b)]
        assert (masked[0] & ~masked[1]).sum() == 0
        assert masked[1].sum() > masked[0].sum() > 0


def test_both_objectives_are_measured_whatever_the_phases_are():
    config = tiny_config()
    with config.unlocked():
        config.phases = config.phases[:1]
    assert [m.name for m in measures(config, tiny().vocabulary)] == ["clm", "mlm", "mlm"]


def test_the_corruption_is_not_the_phases_but_the_shift_is():
    config = tiny_config()
    with config.unlocked():
        config.phases[1].update(mask_rate=0.9, shifted=True)
    t = tiny()
    objective = measures(config, t.vocabulary)[1].objective
    assert objective.settings["mask_rate"] == 0.15
    assert objective.settings["shifted"] is True
    assert measures(tiny_config(), t.vocabulary)[1].objective.settings["shifted"] is False


def test_a_stop_between_batches_gives_none():
    t = tiny()
    evaluator = Evaluator(t.model, tiny_config(batch_rows=4), t.vocabulary, t.rows)
    asked = []

    def stop():
        asked.append(1)
        return len(asked) == 3

    assert evaluator.run(t.params, step=0, phase=0, should_stop=stop) is None
    assert len(asked) == 3


def test_z_loss_is_no_part_of_the_figures(lines):
    t = tiny()
    model = Transformer(dataclasses.replace(t.model.config, z_loss=0.01))
    with_z = Evaluator(model, tiny_config(mask_rates=(0.4,)), t.vocabulary, t.rows).run(t.params, step=7, phase=0)
    for line, other in zip((lines[0], lines[2]), with_z, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_several_groups_give_the_same_figures(lines):
    others = run(tiny_config(batch_rows=6, mask_rates=(0.4,)), step=7, groups=2)
    for line, other in zip((lines[0], lines[2]), others, strict=True):
        assert line["targets"] == other["targets"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
