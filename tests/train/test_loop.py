"""The verb `train`, in this process: real commands, real signals to ourselves at chosen places."""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess

import pytest
from short_run import arrays, assert_same_run, command, environment, folder, kill_at, lines

from biphasic_jax.__main__ import main
from biphasic_jax.train.checkpoint import complete_steps, find, read_meta
from biphasic_jax.train.run_folder import RunFolder


@pytest.fixture(autouse=True)
def caches(monkeypatch):
    monkeypatch.setenv("BIPHASIC_CACHE", str(folder() / "cache"))
    # The report of a finished run has tests of its own; drawing it would be half of each of these.
    monkeypatch.setattr("biphasic_jax.train.loop.Loop.report", lambda self: None)


def train(workdir, *arguments) -> int:
    return main(["train", f"--config={folder() / 'config.py'}", f"--workdir={workdir}", "--quiet", *arguments])


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """A run that was never stopped; tests that change a run copy it."""
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIPHASIC_CACHE", str(folder() / "cache"))
        assert train(workdir) == 0
    return workdir


@pytest.fixture
def run(straight, tmp_path):
    """A copy of the finished run."""
    return pathlib.Path(shutil.copytree(straight, tmp_path / "run"))


def steps_of(workdir) -> list[int]:
    return complete_steps(str(workdir / "checkpoints"))


def signal_in(monkeypatch, owner, name, call=1, number=signal.SIGTERM, after=False):
    """Sends ourselves a signal at the given call of a function or method."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call and not after:
            os.kill(os.getpid(), number)
        result = original(*args, **kwargs)
        if calls[0] == call and after:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(owner, name, wrapped)


def test_r13_a_signal_at_any_stage_ends_in_a_complete_checkpoint_and_83(straight, tmp_path, monkeypatch, capsys):
    from biphasic_jax.train import program, setup
    from biphasic_jax.train.checkpoint import Checkpointer
    from biphasic_jax.train.evaluator import Evaluator
    from biphasic_jax.train.loop import Loop

    workdir = tmp_path / "run"
    stages = [  # what is interrupted, and the step at which the run then stands
        ("set-up", setup, "ensure_rows", dict(), 0),
        ("first compile", program, "compile_phase", dict(), 0),
        ("a step", Loop, "update", dict(call=3), 3),
        ("a step, Ctrl-C", Loop, "update", dict(call=2, number=signal.SIGINT), 5),
        ("evaluation", Evaluator, "_total", dict(), 9),
        ("evaluation, over", Evaluator, "run", dict(after=True), 9),
        ("a save", Checkpointer, "save", dict(), 12),
        ("a save, under way", Checkpointer, "save", dict(after=True), 18),
        ("a fetch", Loop, "fetch", dict(), 19),
        ("the phase switch", program, "compile_phase", dict(call=2, after=True), 20),
    ]
    for name, owner, function, how, step in stages:
        with monkeypatch.context() as patch:
            signal_in(patch, owner, function, **how)
            code = train(workdir)
        error = capsys.readouterr().err
        assert code == 83, f"{name}: {error}"
        assert "the same command goes on" in error, name
        assert steps_of(workdir)[-1] == step, name
        assert not [n for n in os.listdir(workdir / "checkpoints") if not n.isdecimal()], name
    assert train(workdir) == 0
    assert_same_run(workdir, straight)
    starts = [json.loads(line) for line in (workdir / "resumes.jsonl").read_text().splitlines()]
    assert [start["mode"] for start in starts] == ["new"] + ["resume"] * len(stages)


def test_a_second_ctrl_c_ends_it_at_once(tmp_path):
    hang = (
        kill_at("biphasic_jax.train.loop", "Loop.update", 2, signal.SIGINT)
        + "\nimport time\n"
        + (
            "from biphasic_jax.train import loop\n"
            "original = loop.Loop.update\n"
            "def update(self, *args):\n"
            "    original(self, *args)\n"
            "    if self.step == 2:\n"
            "        print('hanging', flush=True)\n"
            "        time.sleep(120)\n"
            "loop.Loop.update = update\n"
        )
    )
    process = subprocess.Popen(
        command(tmp_path / "run", "--quiet", patch=hang), env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == -signal.SIGINT


def test_a_finished_run_says_so_and_trains_no_further(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    assert train(run) == 0
    assert (run / "metrics.jsonl").read_bytes() == before
    assert steps_of(run)[-1] == 40


def test_r10_a_changed_config_is_an_error_that_lists_the_differences(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert train(run, "--config.seed=1", "--config.phases[1].mask_rate=0.5", "--config.optimizer.learning_rate=1") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for difference in ("seed: 0 -> 1", "phases[1].mask_rate: 0.3 -> 0.5", "optimizer.learning_rate: 0.003 -> 1"):
        assert difference in error
    assert {path: path.read_bytes() for path in before} == before


def test_keys_that_decide_nothing_may_change(run):
    assert train(run, "--config.checkpoint.every=11", "--config.data.workers=1", "--config.log.every=2") == 0


def test_r8_the_schedule_may_be_overridden_by_name_and_it_is_recorded(run, capsys):
    longer = ("--config.phases[1].steps=24", "--config.optimizer.learning_rate=0.001")
    assert train(run, *longer) == 2
    assert "--override-schedule" in capsys.readouterr().err
    key = read_meta(find(str(run)))["content_key"]
    assert train(run, "--override-schedule", *longer) == 0
    assert steps_of(run)[-1] == 44
    assert lines(run)[-2]["step"] == 44
    start = json.loads((run / "resumes.jsonl").read_text().splitlines()[-1])
    assert start["changes"] == ["optimizer.learning_rate: 0.003 -> 0.001", "phases[1].steps: 20 -> 24"]
    assert start["parent_key"] == key  # the work before was another plan's
    assert train(run, *longer) == 0  # from now on the new config is the run's
    assert train(run, "--override-schedule", "--config.seed=1", *longer) == 2


def test_r10_other_rows_under_a_checkpoint_are_an_error_that_names_both_fingerprints(run, tmp_path, capsys):
    rows = tmp_path / "rows"
    prepare = [
        "prepare",
        f"--source={folder() / 'text.jsonl'}",
        f"--out={rows}",
        f"--tokenizer={run / 'tokenizer.json'}",
    ]
    assert main([*prepare, "--row-length=32", "--validation=0.3", "--seed=7"]) == 0
    capsys.readouterr()
    assert train(run, f"--config.data.rows={rows}") == 2
    error = capsys.readouterr().err
    assert "fingerprint" in error
    assert len(re.findall(r"\b[0-9a-f]{64}\b", error)) == 2


def test_r11_a_folder_without_a_commit_marker_is_skipped_with_a_warning(straight, tmp_path):
    workdir = tmp_path / "run"
    (workdir / "checkpoints").mkdir(parents=True)
    checkpoints = workdir / "checkpoints"
    shutil.copytree(straight / "checkpoints" / "20", checkpoints / "20")
    (checkpoints / "99").mkdir()
    shutil.copytree(straight / "checkpoints" / "40", checkpoints / "40")
    (checkpoints / "40" / "commit_success.txt").unlink()
    shutil.copy(straight / "metrics.jsonl", workdir)
    with pytest.warns(UserWarning, match="not a complete checkpoint"):
        assert train(workdir) == 0
    assert (checkpoints / "99").exists()
    assert_same_run(workdir, straight)  # from 20 on, over the broken 40


@pytest.fixture(scope="session")
def flat(straight, tmp_path_factory):
    """CLM then MLM without warm-up or decay: any part of its plan may be a plan of its own."""
    workdir = tmp_path_factory.mktemp("runs") / "flat"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIPHASIC_CACHE", str(folder() / "cache"))
        patch.setattr("biphasic_jax.train.loop.Loop.report", lambda self: None)
        assert train(workdir, *FLAT) == 0
    return workdir


FLAT = ("--config.schedule.warmup=0", "--config.schedule.decay=0")


def mlm_only(tmp_path) -> str:
    """A config file with the second phase alone."""
    text = (
        (folder() / "config.py")
        .read_text()
        .replace('phase("clm", steps=20), phase(', "phase(")
        .replace("keep_share=0.1))", "keep_share=0.1),)")
    )
    path = tmp_path / "mlm.py"
    path.write_text(text)
    return str(path)


def train_mlm(tmp_path, checkpoint, mode, *arguments) -> int:
    config = [f"--config={mlm_only(tmp_path)}", f"--config.init.checkpoint={checkpoint}", f"--config.init.mode={mode}"]
    return main(["train", *config, f"--workdir={tmp_path / 'run'}", "--quiet", *FLAT, *arguments])


def test_r8_init_full_goes_on_with_weights_optimizer_step_and_data(flat, tmp_path):
    assert train_mlm(tmp_path, flat / "checkpoints" / "20", "full") == 0
    mine = [line for line in lines(tmp_path / "run") if line["split"] == "train"]
    theirs = [line for line in lines(flat) if line["split"] == "train" and line["step"] > 20]
    assert [(x["step"], x["loss"], x["rows"]) for x in mine] == [(x["step"], x["loss"], x["rows"]) for x in theirs]
    assert arrays(find(str(tmp_path / "run"))) == arrays(find(str(flat)))
    start = json.loads((tmp_path / "run" / "resumes.jsonl").read_text())
    assert (start["mode"], start["step"], start["plan_start"]) == ("full", 20, 20)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["start"], plan["end"]) == (20, 40)


def test_r8_init_weights_starts_everything_else_anew(flat, tmp_path):
    assert train_mlm(tmp_path, flat / "checkpoints" / "20", "weights", "--config.checkpoint.step_zero=true") == 0
    first, source = arrays(tmp_path / "run" / "checkpoints" / "0"), arrays(flat / "checkpoints" / "20")
    assert {k: v for k, v in first.items() if k.startswith("params")} == {
        k: v for k, v in source.items() if k.startswith("params")
    }
    assert all(not any(v) for k, v in first.items() if k.startswith("optimizer"))
    assert [line["step"] for line in lines(tmp_path / "run") if line["split"] == "train"] == list(range(1, 21))
    assert lines(tmp_path / "run")[0]["split"] == "validation"  # what the other run hands over
    assert json.loads((tmp_path / "run" / "resumes.jsonl").read_text())["mode"] == "weights"


def test_init_full_on_another_seed_or_model_is_an_error(flat, tmp_path, capsys):
    assert train_mlm(tmp_path, flat, "full", "--config.seed=3") == 2
    assert "seed is 0, here it is 3" in capsys.readouterr().err
    assert train_mlm(tmp_path, flat, "weights", "--config.model.rope_theta=500.0") == 2
    assert "model.rope_theta: 10000.0 -> 500.0" in capsys.readouterr().err
    assert train_mlm(tmp_path, tmp_path / "nowhere", "weights") == 2
    assert "nowhere" in capsys.readouterr().err


def test_e5_a_model_of_another_vocabulary_is_an_error(tmp_path, capsys):
    assert train(tmp_path / "run", "--config.model.vocab_size=999") == 2
    assert "config.model.vocab_size=999" in capsys.readouterr().err


def test_two_runs_in_one_folder_is_an_error(run, capsys):
    holder = RunFolder(str(run))
    try:
        assert train(run) == 2
        assert f"process {os.getpid()} is training there" in capsys.readouterr().err
    finally:
        holder.close()
    assert train(run) == 0


def test_l4_a_non_finite_step_stops_the_run_and_is_in_no_checkpoint(tmp_path, capsys):
    import numpy as np

    workdir = tmp_path / "run"
    huge = ("--config.optimizer.learning_rate=1e38", "--config.optimizer.clip=0", "--config.phases[1].steps=5")
    assert train(workdir, "--config.checkpoint.every=1", *huge) == 2
    assert "not finite" in capsys.readouterr().err
    bad = [line for line in lines(workdir) if line["loss"] is None]
    assert len(bad) == 1
    assert steps_of(workdir)[-1] == bad[0]["step"] - 1
    for value in arrays(find(str(workdir))).values():
        assert len(value) % 4 or np.isfinite(np.frombuffer(value, np.float32)).all()
    assert train(workdir, "--override-schedule", "--config.guards.non_finite=skip", *huge) == 0
    assert [line for line in lines(workdir) if line["split"] == "train"][-1]["skipped"] > 0


def test_m5_steps_without_a_target_are_counted_and_harmless(tmp_path):
    assert train(tmp_path / "run", "--config.phases[1].mask_rate=0.002") == 0
    mlm = [line for line in lines(tmp_path / "run") if line["split"] == "train" and line["objective"] == "mlm"]
    empty = [line for line in mlm if line["targets"] == 0]
    assert 0 < len(empty) < len(mlm)
    assert {line["loss"] for line in empty} == {0}
    assert mlm[-1]["empty"] == len(empty)
    assert all(line["grad_norm"] is not None for line in mlm)


def test_a_full_disk_is_one_error_that_names_the_folder_and_destroys_nothing(straight, tmp_path, capfd):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    shutil.rmtree(workdir / "checkpoints" / "40")
    shutil.rmtree(workdir / "checkpoints" / "36")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (workdir / "metrics.jsonl").write_bytes((workdir / "metrics.jsonl").read_bytes()[:60_000])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        code = train(workdir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert code == 2
    assert len(error) == 1
    assert str(workdir) in error[0]
    assert train(workdir) == 0
    assert_same_run(workdir, straight)


def test_r5_another_number_of_devices_loses_and_repeats_no_row(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    for step in ("36", "40"):
        shutil.rmtree(workdir / "checkpoints" / step)
    one_device = subprocess.run(command(workdir, "--quiet"), env=environment(), capture_output=True, text=True)
    assert one_device.returncode == 0, one_device.stderr
    devices = [len(json.loads((w / "environment.json").read_text())["devices"]) for w in (straight, workdir)]
    assert devices == [8, 1]
    mine, theirs = ([line for line in lines(w) if line["split"] == "train"] for w in (workdir, straight))
    assert [(x["step"], x["rows"], x["targets"]) for x in mine] == [
        (x["step"], x["rows"], x["targets"]) for x in theirs
    ]
    assert all(abs(x["loss"] - y["loss"]) < 1e-3 for x, y in zip(mine, theirs, strict=True))


def test_print_config_is_json_and_needs_no_folder(capsys):
    assert main(["train", f"--config={folder() / 'config.py'}", "--print-config", "--config.seed=5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["seed"] == 5
    assert [p["objective"] for p in printed["phases"]] == ["clm", "mlm"]


def test_h7_the_summary_names_batch_devices_accumulation_tokens_parameters_backend_mesh(tmp_path, monkeypatch, capsys):
    from biphasic_jax.train import setup

    signal_in(monkeypatch, setup, "ensure_rows")  # the summary is all that is wanted
    config = f"--config={folder() / 'config.py'}"
    assert main(["train", config, f"--workdir={tmp_path / 'run'}", "--config.batch.accumulation=2"]) == 83
    printed = capsys.readouterr().out
    for words in (
        "16 rows of 32 = 512 tokens a step",
        "1 rows at a time, accumulation 2",
        "mesh data 8 x fsdp 1 x tensor 1",
        "8 x cpu",
        "parameters",
        "xla",
        "from random weights",
    ):
        assert words in printed


def test_the_lines_keep_the_contract(straight):
    assert {"config.json", "plan.json", "environment.json", "metrics.jsonl", "report.md"} <= set(os.listdir(straight))
    found = lines(straight)
    train_lines = [line for line in found if line["split"] == "train"]
    assert [line["step"] for line in train_lines] == list(range(1, 41))
    assert [line["phase"] for line in train_lines] == [0] * 20 + [1] * 20
    for line in found:
        assert {"step", "phase", "objective", "split", "loss", "targets"} <= line.keys()
    for line in train_lines:
        assert {
            "learning_rate",
            "mask_rate",
            "grad_norm",
            "tokens",
            "tokens_per_second",
            "mfu",
            "data_wait",
        } <= line.keys()
        assert line["mask_rate"] == (None if line["objective"] == "clm" else 0.3)
        assert line["targets"] > 0
    assert train_lines[-1]["tokens_total"] == sum(line["tokens"] for line in train_lines)
    assert {line["step"] for line in found if line["split"] == "validation"} == {9, 18, 20, 27, 36, 40}
    masked = sum(line["masked"] for line in train_lines[20:])
    assert abs(masked / sum(line["selected"] for line in train_lines[20:]) - 0.8) < 0.05


def test_keep_policies(tmp_path):
    workdir = tmp_path / "run"
    keep = ("--config.checkpoint.every=3", "--config.checkpoint.keep_last=1", "--config.checkpoint.keep_every=9")
    assert train(workdir, "--config.checkpoint.step_zero=true", *keep) == 0
    assert steps_of(workdir) == [0, 9, 18, 20, 27, 36, 40]


def test_the_optimizer_is_reset_at_a_switch_if_the_config_says_so(straight, tmp_path, monkeypatch):
    from biphasic_jax.train.loop import Loop

    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_in(patch, Loop, "update", call=21)
        assert train(workdir, "--config.phases[1].optimizer=reset") == 83
    reset, carried = arrays(workdir / "checkpoints" / "21"), arrays(straight / "checkpoints" / "20")
    count = next(path for path in reset if path.endswith("count"))
    assert int.from_bytes(carried[count], "little") == 20
    assert int.from_bytes(reset[count], "little") == 1
    assert train(workdir, "--config.phases[1].optimizer=reset") == 0
