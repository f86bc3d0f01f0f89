import json
import re
import subprocess
import sys

import pytest

from biphasic_jax import config as config_module
from biphasic_jax.config import default_config, differences, phase, resolve, to_dict
from biphasic_jax.errors import UserError
from biphasic_jax.objectives import registry
from biphasic_jax.recipe import load_config


def loaded(*overrides, spec="configs/tiny.py"):
    return load_config(spec, overrides, registry)


def test_durations_in_steps_tokens_and_shares():
    c = default_config()
    c.data.sources, c.data.row_length, c.batch.rows = ("vendored:tiny",), 64, 10
    c.phases = (phase("clm", tokens=64_000), phase("mlm", share=0.5))
    c.budget_tokens = 640_000
    assert [p.steps for p in resolve(c, registry()).phases] == [100, 500]
    c.phases = (phase("clm", steps=3, share=0.5),)
    with pytest.raises(UserError, match="exactly one of steps, tokens, share"):
        resolve(c, registry())


def test_warmup_as_a_share_becomes_steps():
    c = loaded("schedule.warmup=0.1", "schedule.decay=0.25")
    assert (c.schedule.warmup, c.schedule.decay) == (16, 40)
    assert isinstance(c.schedule.warmup, int)


def test_e10_an_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match=r"'learning_rat'.*'learning_rate'"):
        loaded("optimizer.learning_rat=1e-3")
    with pytest.raises(UserError, match=r"'mask_ratio'.*'mask_rate'"):
        loaded("phases[1].mask_ratio=0.3")
    c = default_config()
    c.model.widht = 3
    with pytest.raises(UserError, match=r"model\.widht.*width"):
        resolve(c, registry())


def test_e10_every_key_is_read_somewhere():
    """An option that nothing reads is a typo that nobody sees: each leaf's name must stand in the package."""
    import pathlib

    root = pathlib.Path(config_module.__file__).parent
    code = "\n".join(p.read_text() for p in root.rglob("*.py") if p.name != "config.py")
    code += pathlib.Path(config_module.__file__).read_text().split("def resolve")[1]

    def leaves(node, prefix=()):
        for key, value in node.items():
            if isinstance(value, dict):
                yield from leaves(value, (*prefix, key))
            else:
                yield (*prefix, key)

    unread = [
        ".".join(k) for k in leaves(to_dict(default_config())) if f".{k[-1]}" not in code and f'"{k[-1]}"' not in code
    ]
    assert unread == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=abc", "needs a value like 0"),
        ("phases[7].steps=1", "not an index below 2"),
        ("model.kv_heads=3", "multiple of model.kv_heads"),
        ("batch.accumulation=3", "multiple of batch.accumulation"),
        ("data.segments=sentences", "documents, random_split, row"),
        ("schedule.warmup=4000", "more than the plan's 160 steps"),
        ("phases[0].objective=cml", "or 'clm'"),
        ("phases[1].mask_rate=1.5", "mask_rate"),
        ("model.head_size=15", "even"),
        ("evaluation.mask_rates=()", "at least one rate"),
        ("optimizer.name=lion", "adamw, muon"),
        ("phases[0].warmup=3", "schedule.span='phase'"),
        ("seed", "--config.KEY=VALUE"),
        ("phases=5", "needs a value like"),
        ("phases=mlm", "needs a value like"),
        ("phases=(1, 2)", "needs a value like"),
        ("optimizer.learning_rate={'a': 1}", "must be a number"),
        ("optimizer.learning_rate=1e999", "finite"),
        ("optimizer.weight_decay=-1", "weight_decay=-1"),
        ("data.sources=5", "PATH[:WEIGHT]"),
        ("evaluation.batch_rows=-3", "0 or more"),
        ("evaluation.seed=-1", "evaluation.seed=-1"),
        ("data.seed=-1", "data.seed=-1"),
        ("seed=99999999999999999999999", "must be an int of 0 to"),
        ("checkpoint.minutes=-1", "0 (never) or more"),
        ("phases[1].steps=100000000000000000000", "steps in all"),
        ("batch.rows=100000000000", "tokens a step"),
        ("data.row_length=1000000000000", "8 to 1,048,576"),
        ("mesh.fsdp=0", "mesh.fsdp=0 must be a positive int, or -1"),
        ("mesh.tensor=-1", "not both data and tensor"),
        ("mesh.slices=0", "mesh.slices=0 must be a positive int"),
    ],
)
def test_each_broken_rule_names_the_value_and_the_mend(override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        loaded(override)


def test_overrides_reach_every_kind_of_value():
    c = loaded(
        "seed=7",
        "phases[1].steps=11",
        "phases.0.steps=12",
        "phases[1].mask_rate={'shape': 'linear', 'from': 0.5, 'to': 0.1}",
        "evaluation.mask_rates=0.1,0.2",
        "model.tied=true",
        "optimizer.learning_rate=1",
        "data.sources=('a', 'b:2')",
        "schedule={'warmup': 3, 'decay': 4}",
    )
    assert (c.seed, c.phases[0].steps, c.phases[1].steps) == (7, 12, 11)
    assert to_dict(c.phases[1].mask_rate) == {"shape": "linear", "from": 0.5, "to": 0.1}
    assert (c.model.tied, c.optimizer.learning_rate) == (True, 1.0)
    assert (tuple(c.evaluation.mask_rates), tuple(c.data.sources)) == ((0.1, 0.2), ("a", "b:2"))
    assert (c.schedule.warmup, c.schedule.decay) == (3, 4)
    whole = loaded("phases=[{'objective': 'mlm', 'steps': 20}]", "schedule.warmup=0", "schedule.decay=0")
    assert [p.objective for p in whole.phases] == ["mlm"]


def test_the_resolved_config_is_locked_and_plain_json():
    c = loaded()
    with pytest.raises(AttributeError):
        c.model.heigth = 3
    plain = json.loads(config_module.to_json(c))
    assert [p["objective"] for p in plain["phases"]] == ["clm", "mlm"]
    assert isinstance(plain["phases"][1]["mask_rate"], float)
    assert isinstance(plain["seed"], int)


def test_differences_are_listed_by_key():
    a, b = to_dict(loaded()), to_dict(loaded("model.width=32", "phases[1].steps=7"))
    assert differences(a, b) == ["model.width: 64 -> 32", "phases[1].steps: 90 -> 7"]
    assert differences(a, a) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file"),
        ("x = 1", "no function get_config"),
        ("def get_config(:", "SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def get_config(): raise ValueError('x')", "ValueError: x"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("def get_config(): return 5", "changed default_config"),
    ],
)
def test_a_config_file_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "c.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(str(path), [], registry)


def test_an_argument_that_the_file_does_not_take():
    with pytest.raises(UserError, match="takes no argument"):
        loaded(spec="configs/tiny.py:large")


def test_the_paper_has_38_names_and_no_other():
    import importlib.util

    spec = importlib.util.spec_from_file_location("paper", "configs/paper.py")
    paper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(paper)
    assert len(set(paper.NAMES)) == 38
    for name in paper.NAMES:
        c = resolve(paper.get_config(name), registry())
        assert c.batch.rows * c.data.row_length == 2_359_296
        total = int(name.rsplit("-", 1)[1].removesuffix("k")) * 1000
        assert sum(p.steps for p in c.phases) == total
        assert c.phases[-1].objective == ("mlm" if "mlm" in name else "clm")
        assert (c.optimizer.beta1, c.optimizer.beta2, c.optimizer.eps, c.optimizer.decay) == (0.9, 0.95, 1e-5, "all")
    split = resolve(paper.get_config("610m-clm-10k-mlm40-42k"), registry())
    assert [(p.objective, p.steps) for p in split.phases] == [("clm", 10_000), ("mlm", 32_000)]
    assert split.phases[1].mask_rate == 0.4
    with pytest.raises(UserError, match="610m-clm-10k-mlm40-42k"):
        paper.get_config("610m-clm-10k-mlm40-43k")


def test_e10_through_the_command_line():
    command = [sys.executable, "-m", "biphasic_jax", "train", "--config=configs/tiny.py", "--workdir=unused"]
    result = subprocess.run(
        [*command, "--config.optimizer.lerning_rate=1"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error:")
    assert "learning_rate" in result.stderr
    assert "Traceback" not in result.stderr
