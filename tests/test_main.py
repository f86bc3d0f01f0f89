import subprocess
import sys

import pytest

from biphasic_jax import __main__ as cli


def run(*words):
    return subprocess.run([sys.executable, "-m", "biphasic_jax", *words], capture_output=True, text=True, check=False)


def test_without_a_verb_the_verbs_are_shown():
    result = run()
    assert result.returncode == 0
    for verb in cli.VERBS:
        assert verb in result.stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_teaches(verb):
    result = run(verb, "--help")
    assert result.returncode == 0
    assert "python -m biphasic_jax" in result.stdout
    assert len(result.stdout.splitlines()) > 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tran"], "did you mean train"),
        (["train", "--confg=configs/tiny.py", "--workdir=x"], "--confg"),
        (["train"], "required"),
        (["train", "--config=configs/none.py", "--workdir=x"], "there is no file"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(words, message):
    result = run(*words)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_override_may_be_one_word_or_two():
    _, args = cli.parse(["train", "--config=c.py", "--workdir=w", "--config.seed=3", "--config.model.width", "8"])
    assert args.overrides == ["seed=3", "model.width=8"]
    assert args.config == "c.py"
