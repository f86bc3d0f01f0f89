"""WORKSPACE.md keeps its word: its objective works as it stands there, and its rooms are those of the tree."""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "WORKSPACE.md").read_text()

CONFIG = """
import unswap  # noqa: F401
from biphasic_jax.config import phase
from biphasic_jax.recipe import read_config_file

def get_config():
    c = read_config_file({tiny!r})
    c.phases = (phase("clm", steps=4), phase("unswap", steps=6, swap_rate=0.2))
    c.schedule.warmup, c.schedule.decay = 1, 1
    c.evaluation.every = 0
    return c
"""


def test_the_worked_objective_trains_without_a_change_elsewhere(tmp_path):
    (tmp_path / "unswap.py").write_text(re.search(r"```python\n(.*?)```", TEXT, re.S).group(1))
    (tmp_path / "mine.py").write_text(CONFIG.format(tiny=str(ROOT / "configs" / "tiny.py")))
    command = [sys.executable, "-m", "biphasic_jax", "train", f"--config={tmp_path / 'mine.py'}"]
    run = tmp_path / "run"
    subprocess.run([*command, f"--workdir={run}"], check=True, cwd=ROOT)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    swaps = [line for line in lines if line["split"] == "train" and line["objective"] == "unswap"]
    assert [line["step"] for line in swaps] == list(range(5, 11))
    for line in swaps:
        assert line["targets"] == 2 * line["swaps"] > 0
    result = subprocess.run(
        [*command, f"--workdir={run}2", "--config.phases[1].swap_rate=0.9"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 2
    assert "phases[1].swap_rate=0.9" in result.stderr


def test_every_file_has_a_room():
    named = set(re.findall(r"`([\w/]+\.py)`", TEXT))
    missing = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "biphasic_jax").rglob("*.py")
        if path.name != "__init__.py" and not any(str(path).endswith("/" + name) for name in named)
    ]
    assert missing == []
    gone = [
        name
        for name in named
        if not list((ROOT / "biphasic_jax").rglob(pathlib.Path(name).name))
        and not (ROOT / name).exists()
        and not list((ROOT / "tests").rglob(pathlib.Path(name).name))
    ]
    assert gone == []
