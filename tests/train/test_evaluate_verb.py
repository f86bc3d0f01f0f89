"""`evaluate` and `fill-mask` on a real checkpoint, through the program's front door."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from held_out import tiny, tiny_config, tiny_settings

from biphasic_jax.__main__ import main
from biphasic_jax.config import to_dict
from biphasic_jax.data.build import build_rows
from biphasic_jax.train.checkpoint import Checkpointer
from biphasic_jax.train.evaluator import Evaluator
from biphasic_jax.train.opened import open_checkpoint
from biphasic_jax.train.state import TrainState


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with the checkpoints of step 2, the end of CLM, and of step 4, the end of MLM."""
    t, folder = tiny(), tmp_path_factory.mktemp("run")
    config = tiny_config(batch_rows=8, mask_rates=(0.4,))
    with config.unlocked():
        config.data.rows = t.folder
    meta = {
        "plan_start": 0,
        "parent_key": "",
        "config": to_dict(config),
        "vocabulary": t.rows.manifest.vocabulary,
        "tokenizer_sha256": t.rows.manifest.tokenizer["sha256"],
    }
    checkpointer = Checkpointer(str(folder / "checkpoints"), keep=lambda step, steps: True, asynchronous=False)
    with open(f"{t.folder}/tokenizer.json") as file:
        tokenizer_json = file.read()
    for step in (2, 4):
        checkpointer.save(step, TrainState(jnp.int32(step), t.params, {"m": jnp.zeros(1)}), meta, tokenizer_json)
    checkpointer.close()
    return folder


def test_evaluate_gives_the_figures_of_the_run(run, capsys):
    assert main(["evaluate", f"--checkpoint={run}", "--json", "--pll=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["phase"], found["row_count"]) == (4, 1, 19)
    t, config = tiny(), tiny_config(batch_rows=8, mask_rates=(0.4,))
    assert found["measures"] == Evaluator(t.model, config, t.vocabulary, t.rows).run(t.params, step=4, phase=1)
    assert found["pll"]["tokens"] > 0


def test_evaluate_takes_a_checkpoint_and_other_settings(run, capsys):
    arguments = [f"--checkpoint={run / 'checkpoints' / '2'}", "--mask-rates=0.3", "--limit=2", "--batch-rows=1"]
    assert main(["evaluate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "step 2, phase 0" in printed
    assert "2 validation rows" in printed
    assert [line.split()[:2] for line in printed.splitlines()[3:]] == [["clm", "-"], ["mlm", "0.3"]]


def test_e5_rows_of_another_tokenizer_are_refused(run, tmp_path, capsys):
    other = str(tmp_path / "other")
    build_rows(dataclasses.replace(tiny_settings(), vocab_size=500), other, 1)
    assert main(["evaluate", f"--checkpoint={run}", f"--rows={other}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {other}: its rows were made with another tokenizer")


def test_e5_rows_with_another_mask_token_are_refused(run):
    opened = open_checkpoint(str(run))
    opened.meta["vocabulary"]["mask"] = 3
    with pytest.raises(Exception, match=r"special tokens are not those of .*: mask: 3 -> 2"):
        opened.check_rows(tiny().folder)


def test_evaluate_scores_sentences(run, capsys):
    assert main(["evaluate", f"--checkpoint={run}", "--text=The [b]sea[/b].", "--text=A man"]) == 0
    printed = capsys.readouterr().out
    assert "The [b]sea[/b]." in printed  # brackets are text, no markup
    assert "A man" in printed


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--mask-rates=0.3,x", "give numbers"),
        ("--mask-rates=0", "each must be above 0"),
        ("--limit=-1", "must be 0 or more"),
        ("--text= ", "is empty"),
        ("--rows=/nowhere", "no such folder of rows"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(run, capsys, argument, message):
    assert main(["evaluate", f"--checkpoint={run}", argument]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_fill_mask_lists_candidates(run, capsys):
    assert main(["fill-mask", f"--checkpoint={run}", "--text=The [MASK] of the [MASK].", "--top=3"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert len(printed.out.splitlines()) == 4
    assert printed.out.splitlines()[0].split() == ["probability", "mask", "1", "probability", "mask", "2"]


def test_fill_mask_warns_before_any_mlm_and_goes_on(run, capsys):
    checkpoint = run / "checkpoints" / "2"
    assert main(["fill-mask", f"--checkpoint={checkpoint}", "--text=The [MASK].", "--json"]) == 0
    printed = capsys.readouterr()
    assert "has not been in an MLM phase" in printed.err
    ((first, *_),) = json.loads(printed.out)["masks"]
    assert 0 < first["probability"] < 1


def test_fill_mask_without_a_mask_is_exit_2(run, capsys):
    assert main(["fill-mask", f"--checkpoint={run}", "--text=The sea."]) == 2
    assert "holds no mask" in capsys.readouterr().err
