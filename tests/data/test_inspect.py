"""`inspect`: what the device would get, in a form that a program or a person can check."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from biphasic_jax.__main__ import main
from biphasic_jax.data.inspect_rows import ServedRow, by_position, parse_steps, served_rows
from biphasic_jax.data.prepare import ensure_rows
from biphasic_jax.data.row_display import Display, histogram
from biphasic_jax.data.shards import Rows
from biphasic_jax.data.tokenizer import vocabulary_of
from biphasic_jax.errors import UserError
from biphasic_jax.objectives import registry
from biphasic_jax.plan import Phase, make_plan
from biphasic_jax.recipe import load_config

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CONFIG = """
from biphasic_jax.config import default_config, phase

def get_config():
    c = default_config()
    c.data.sources = ("vendored:tiny",)
    c.data.vocab_size = 512
    c.data.row_length = 128
    c.batch.rows = 8
    c.phases = (phase("clm", steps=3), phase("mlm", steps=3, mask_rate=0.3))
    c.schedule.warmup = c.schedule.decay = 1
    return c
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "config.py").write_text(CONFIG)
    return folder


def inspect(place, *arguments):
    """What the command prints, as a process of its own: grain's workers start from its main module."""
    environment = {**os.environ, "BIPHASIC_CACHE": str(place / "cache")}
    command = [sys.executable, "-m", "biphasic_jax", "inspect", f"--config={place}/config.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(place, *arguments):
    return [json.loads(line) for line in inspect(place, "--format=json", *arguments).splitlines()]


@pytest.fixture(scope="module")
def all_rows(place):
    return objects(place, "--steps=0:6")


@pytest.fixture
def run(place, monkeypatch):
    monkeypatch.setenv("BIPHASIC_CACHE", str(place / "cache"))
    config = load_config(f"{place}/config.py", [], registry)
    folder = ensure_rows(config)
    return config, folder, Rows(folder, "train"), vocabulary_of(folder)


def test_json_has_a_row_of_every_example_in_order(all_rows):
    assert [row["index"] for row in all_rows] == list(range(48))
    assert [row["step"] for row in all_rows] == [i // 8 for i in range(48)]
    names = ["step", "index", "tokens", "segments", "positions", "original", "targets", "weights"]
    for row in all_rows:
        assert list(row) == names
        assert {len(row[name]) for name in names[2:]} == {128}


def test_positions_restart_in_each_segment(all_rows):
    for row in all_rows:
        expected, place = [], 0
        for i, segment in enumerate(row["segments"]):
            place = place + 1 if i and segment == row["segments"][i - 1] else 0
            expected.append(place if segment else 0)
        assert row["positions"] == expected


def test_a_causal_phase_shows_the_next_token_and_a_masked_one_what_it_hides(all_rows, run):
    *_, vocabulary = run
    for row in all_rows:
        tokens, original, weights = (np.array(row[name]) for name in ("tokens", "original", "weights"))
        targets = np.array(row["targets"])
        at = np.flatnonzero(weights)
        if row["step"] < 3:
            assert np.array_equal(tokens, original)
            assert np.array_equal(targets[at], original[at + 1])
            assert len(at) > 100
        else:
            assert np.array_equal(targets[at], original[at])
            assert np.all(tokens[at] == vocabulary.mask)
            assert np.array_equal(tokens[weights == 0], original[weights == 0])
            assert not vocabulary.special_V[original[at]].any()
        assert not targets[weights == 0].any()


def test_workers_and_processes_change_no_row(place, all_rows):
    """Across the switch of phases, so through both objectives."""
    assert objects(place, "--steps=2:4", "--workers=2") == all_rows[16:32]
    second = objects(place, "--steps=2:4", "--process=1", "--processes=2")
    assert second == all_rows[20:24] + all_rows[28:32]


def test_text_shows_segments_masks_and_figures(place, run, capsys):
    assert main(["inspect", f"--config={place}/config.py", "--steps=3", "--rows=2"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text  # no colours where nobody looks
    assert text.count("\nexample ") == 2
    assert "step 3, phase 1: mlm" in text
    assert text.count("[[") > 20
    assert "8 rows, 8 different" in text
    assert "training rows: 99." in text
    assert "duplicates: 0.00 % of the rows" in text
    assert "segments by length in tokens" in text


def display(run, original, tokens, segments, at, offset=0):
    """How a row is shown that predicts the tokens at `at`, each from `offset` places before."""
    _, folder, rows, vocabulary = run
    weights, targets = np.zeros(len(original), np.float32), np.zeros(len(original), np.int32)
    weights[np.array(at) - offset] = 1
    targets[np.array(at) - offset] = np.array(original)[at]
    phase = Phase(0, "mlm", {}, 0, 1, "carry")
    row = ServedRow(phase, 0, 0, 0, np.array(tokens), np.array(segments), np.array(original), targets, weights)
    shown = Display(folder, rows, vocabulary)
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(shown.row_text(row))
    return capture.get().splitlines()[1:]


@pytest.mark.parametrize("offset", [0, 1])
def test_a_row_is_readable(run, offset):
    """Hidden, replaced and kept tokens, a character in two tokens, a special token, padding, two segments."""
    from biphasic_jax.data.tokenizer import load_tokenizer

    _, folder, _, vocabulary = run
    encode = lambda text: load_tokenizer(folder).encode(text).ids  # noqa: E731
    snowman = encode("\u2603")
    assert len(snowman) > 1
    first, second = encode("a b c d") + snowman + [vocabulary.eos], encode("e\nf g")
    original = first + second + [vocabulary.pad] * 2
    segments = [1] * len(first) + [2] * len(second) + [0, 0]
    tokens = list(original)
    tokens[1], tokens[2] = vocabulary.mask, encode(" e")[0]
    lines = display(run, original, tokens, segments, [1, 2, 3], offset)
    assert lines[:2] == ["  1 a [[b]] [[c>e]] [[=d]]\u2603<|eos|>", "  2 e\u23cef g"]


def test_targets_that_are_a_list_of_positions():
    batch = {
        "tokens": np.zeros((2, 4), np.int32),
        "predict": np.array([[1, 6, 0, 0]]),
        "targets": np.array([[9, 8, 5, 0]], np.int32),
        "weights": np.array([[1, 0.5, 0, 0]], np.float32),
    }
    targets_BxL, weights_BxL = by_position(batch)
    assert targets_BxL.tolist() == [[0, 9, 0, 0], [0, 0, 8, 0]]
    assert weights_BxL.tolist() == [[0, 1, 0, 0], [0, 0, 0.5, 0]]
    dense = {"tokens": batch["tokens"], "targets": np.full((2, 4), 7), "weights": np.eye(4, dtype=np.float32)[:2]}
    assert by_position(dense)[0].tolist() == [[7, 0, 0, 0], [0, 7, 0, 0]]


def test_the_rows_are_those_of_the_folder(run):
    config, _, rows, vocabulary = run
    for row in served_rows(rows, vocabulary, config, make_plan(config), 1, 2):
        assert np.array_equal(rows.read(np.array([row.row]))[0][0], row.original_L)
        assert np.array_equal(rows.read(np.array([row.row]))[1][0], row.segments_L)


def test_histogram():
    assert [line.split()[:2] for line in histogram([1, 2, 3, 3, 9])] == [
        ["1", "1"],
        ["2-3", "3"],
        ["4-7", "0"],
        ["8-15", "1"],
    ]


def test_steps(run):
    plan = make_plan(run[0])
    assert parse_steps("2:5", plan) == (2, 5)
    assert parse_steps("4", plan) == (4, 5)
    for bad in ("6:7", "3:3", "3:2", "-1:2", "a:b", ":"):
        with pytest.raises(UserError, match=f"--steps={bad}"):
            parse_steps(bad, plan)


def test_a_plan_that_goes_on_from_a_checkpoint(run):
    """Its first update has the number of the checkpoint's step, and reads that batch."""
    config, _, rows, vocabulary = run
    plan = make_plan(config, 3)
    with pytest.raises(UserError, match="the updates 3 to 8"):
        parse_steps("0:1", plan)
    first = next(served_rows(rows, vocabulary, config, plan, 3, 4))
    assert (first.phase.objective, first.step, first.index) == ("clm", 3, 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps=0:7",), "--steps=0:7: the plan has the updates 0 to 5"),
        (("--process=2", "--processes=2"), "--process=2 must be one of 0 to 1"),
        (("--config.data.row_lenth=9",), "row_length"),
    ],
)
def test_bad_usage(place, capsys, arguments, message):
    assert main(["inspect", f"--config={place}/config.py", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
