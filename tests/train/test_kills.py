"""kill -9 at any moment: the same command goes on, and the run that comes out is the one never killed, bit for bit.

BIPHASIC_KILLS=20 kills as often at random moments; by default a few times.
"""

import os
import random
import subprocess
import time

from short_run import assert_same_run, command, environment, kill_at, lines, straight, train, trained

KILLS = int(os.environ.get("BIPHASIC_KILLS", "2"))


def test_r1_r11_killed_in_evaluation_save_and_compilation_and_gone_on_bit_for_bit(tmp_path):
    workdir = tmp_path / "run"
    kills = [
        kill_at("biphasic_jax.train.evaluator", "Evaluator._total", 2),
        kill_at("biphasic_jax.train.checkpoint", "Checkpointer.save", 2, after=True),  # still being written
        kill_at("biphasic_jax.train.program", "compile_phase", 2),
        kill_at("biphasic_jax.train.loop", "Loop.update", 13),
    ]
    for kill in kills:
        result = train(workdir, "--quiet", patch=kill)
        assert result.returncode == -9, result.stderr
    trained(workdir)
    assert_same_run(workdir, straight())
    train_lines = [line for line in lines(workdir) if line["split"] == "train"]
    assert len({line["rows"] for line in train_lines}) == 40
    assert 40 * 16 > 2 * 165  # more than two epochs of the rows


def test_r1_random_kills(tmp_path):
    draw = random.Random(os.environ.get("BIPHASIC_KILL_SEED", "0"))
    runs = [tmp_path / "run-0"]
    for _ in range(KILLS):
        process = subprocess.Popen(command(runs[-1], "--quiet"), env=environment(), stderr=subprocess.DEVNULL)
        # After some more lines and a while: that is in the middle of anything, start and compilation included.
        wanted = line_count(runs[-1]) + draw.choice([-1, 1, 5, 10, 15])
        while process.poll() is None and line_count(runs[-1]) < wanted:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, draw.choice([0.1, 5.0])))
        process.kill()
        if process.wait() == 0:
            runs.append(tmp_path / f"run-{len(runs)}")
    for run in runs:
        trained(run)
        assert_same_run(run, straight())


def line_count(workdir) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
