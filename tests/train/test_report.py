"""The report: what it says of a run, and that it says so when a run did not do well."""

import json
import math
import pathlib
import re

import numpy as np
import pytest
from held_out import tiny, tiny_config

from biphasic_jax.config import to_json
from biphasic_jax.errors import UserError
from biphasic_jax.plan import learning_rate, make_plan
from biphasic_jax.train.findings import cost_of, duration, findings, loss_finding, pairs
from biphasic_jax.train.metrics import MetricsFile
from biphasic_jax.train.record import data_facts, read_record
from biphasic_jax.train.report import main, write_report
from biphasic_jax.train.run_folder import plan_facts

ENTROPY = 5.0


def write_run(folder, phases=(("clm", 40), ("mlm", 60)), clm=4.0, mlm=4.5, accuracy=0.3, until=None, targets=10_000):
    """A run's folder as `train` writes it, with losses that go from 6 to what is given."""
    config = tiny_config()
    with config.unlocked():
        config.phases = tuple(
            p.copy_and_resolve_references()
            for name, steps in phases
            for p in tiny_config().phases
            if p.objective == name and not p.update(steps=steps)
        )
    plan = make_plan(config)
    folder.mkdir()
    (folder / "config.json").write_text(to_json(config))
    (folder / "plan.json").write_text(json.dumps(plan_facts(config, plan, "f", "")))
    (folder / "environment.json").write_text(json.dumps({"backend": "cpu", "versions": {"jax": "0"}, "cores": 2}))
    (folder / "data.json").write_text(
        json.dumps({"validation_rows": 9, "validation_tokens": 1000, "unigram_entropy": ENTROPY})
    )
    file, total = MetricsFile(str(folder / "metrics.jsonl")), 0
    for step in range(1, (until or plan.end) + 1):
        phase = plan.phase_of_update(step - 1)
        masked = phase.objective == "mlm"
        total += 512
        where = {"step": step, "phase": phase.index}
        file.write(
            {
                **where,
                "objective": phase.objective,
                "split": "train",
                "loss": 6 - 2 * (step - phase.start) / (phase.end - phase.start),
                "targets": 100,
                "learning_rate": float(learning_rate(plan, step - 1)),
                "mask_rate": 0.3 if masked else None,
                "grad_norm": 1.0,
                "tokens": 512,
                "tokens_total": total,
                "tokens_per_second": 1024.0,
                "mfu": 0.25,
                "data_wait": 0.125,
            }
        )
        if step % 20 == 0 or step == plan.end:
            learnt = (step - phase.start) / (phase.end - phase.start)
            held_out = {**where, "split": "validation", "targets": targets}
            loss = 9.0 if masked else 6 + (clm - 6) * learnt
            figures = {"loss": loss, "accuracy": 0.1, "perplexity": math.exp(loss), "mask_rate": None}
            file.write({**held_out, "objective": "clm", **figures, "bits_per_byte": loss / 3})
            for rate in (0.15, 0.4):
                loss = 6 + (mlm - 6) * learnt if masked else 8.0
                figures = {"loss": loss, "accuracy": accuracy * learnt * masked, "perplexity": math.exp(loss)}
                file.write({**held_out, "objective": "mlm", **figures, "mask_rate": rate})
    file.close()
    return str(folder)


def report_text(*folders):
    return pathlib.Path(write_report(*folders)[0]).read_text()


def test_unigram_entropy_is_that_of_the_ordinary_tokens():
    t = tiny()
    tokens, segments = t.rows.read(np.arange(len(t.rows)))
    ordinary = [int(i) for i in tokens[segments > 0] if not t.vocabulary.special_V[i]]
    _, counts = np.unique(ordinary, return_counts=True)
    share = counts / counts.sum()
    assert data_facts(t.rows)["unigram_entropy"] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    assert data_facts(t.rows)["validation_tokens"] == len(ordinary)
    assert data_facts(t.rows)["validation_rows"] == len(t.rows)


def test_a_run_that_learnt_is_said_to_end_below_the_entropy(tmp_path):
    text = loss_finding(read_record(write_run(tmp_path / "run")))
    assert "CLM 4.000 (step 40), MLM at 15% 4.500 (step 100), MLM at 40% 4.500 (step 100)" in text
    assert "All end below the unigram entropy of the held-out text, 5.000" in text


def test_clm_lost_in_the_mlm_phase_is_not_hidden(tmp_path):
    assert "CLM stands at 9.000 at step 100" in loss_finding(read_record(write_run(tmp_path / "run")))


def test_a_run_that_did_not_learn_is_said_not_to(tmp_path):
    text = loss_finding(read_record(write_run(tmp_path / "run", mlm=5.2)))
    assert "NOT below the unigram entropy of the held-out text, 5.000: MLM at 15%, MLM at 40%." in text
    assert "end below" not in text


def test_a_loss_that_is_not_finite_does_not_break_the_report(tmp_path):
    folder = write_run(tmp_path / "run", clm=math.nan)
    text = report_text(folder)
    assert "| CLM: loss, nats a token | 10,000 | - | - | 9.000 |" in text


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [(0.35, "beats"), (0.301, "does NOT clearly beat"), (0.25, "does NOT beat, and is worse than,")],
)
def test_the_comparison_says_plainly_who_is_better(tmp_path, accuracy, words):
    run = write_run(tmp_path / "two", accuracy=accuracy)
    alone = write_run(tmp_path / "alone", phases=(("mlm", 100),), accuracy=0.3)
    line = write_report(run, alone)[1][1]
    assert f"of two {words} that of alone (MLM alone) after 100 steps" in line
    assert f"{accuracy:.1%} against 30.0% at mask rate 15%" in line


def test_chance_is_two_standard_errors(tmp_path):
    run = read_record(write_run(tmp_path / "two", accuracy=0.5, targets=10_000))
    alone = read_record(write_run(tmp_path / "alone", phases=(("mlm", 100),), accuracy=0.5))
    assert pairs(run, alone)[0].chance == pytest.approx(2 * math.sqrt(2 * 0.25 / 10_000))


def test_runs_of_other_length_are_compared_at_a_step_that_both_have(tmp_path):
    run = read_record(write_run(tmp_path / "two"))
    alone = read_record(write_run(tmp_path / "alone", phases=(("mlm", 200),)))
    assert [(pair.run["step"], pair.baseline["step"]) for pair in pairs(run, alone)] == [(100, 100)] * 2


def test_settings_that_differ_are_listed(tmp_path):
    run, alone = write_run(tmp_path / "two"), write_run(tmp_path / "alone", phases=(("mlm", 100),))
    assert "The two runs differ in their phases alone." in report_text(run, alone)
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    config["optimizer"]["learning_rate"] = 7.0
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config))
    assert "- `optimizer.learning_rate: 7.0 -> 0.0005`" in report_text(run, alone)


def test_the_report_has_every_table_and_its_pictures_are_there(tmp_path):
    run, alone = write_run(tmp_path / "two"), write_run(tmp_path / "alone", phases=(("mlm", 100),))
    path, _ = write_report(run, alone)
    text = pathlib.Path(path).read_text()
    assert path == str(tmp_path / "two" / "report.md")
    assert "| end of CLM, step 40 | end of MLM 30%, step 100 |" in text
    assert "| MLM, 15% masked: accuracy | 10,000 | 0.0% | 0.0% | 30.0% |" in text
    assert "| CLM | 0 to 40 | 20,480 | 4.475 | 20 s | 1,024 | 25.0% | 12.5% |" in text
    assert "| versions.jax | 0 |" in text
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", text)
    assert len(pictures) == 5
    for picture in pictures:
        assert (tmp_path / "two" / picture).read_bytes().startswith(b"\x89PNG")


def test_every_row_of_a_table_has_as_many_cells_as_its_head(tmp_path):
    run, alone = write_run(tmp_path / "two"), write_run(tmp_path / "alone", phases=(("mlm", 100),))
    for table in re.findall(r"(?:^\|.*\|\n)+", report_text(run, alone), re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_a_run_that_goes_on_can_be_reported(tmp_path):
    folder = write_run(tmp_path / "run", until=70)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 71, "spl')  # a line that is being written
    _, lines = write_report(folder)
    assert lines[0].startswith("Not finished, step 70 of 100. ")
    assert "| in MLM 30%, step 70 |" in report_text(folder)


def test_a_run_without_any_evaluation_can_be_reported(tmp_path):
    folder = write_run(tmp_path / "run", until=10)
    assert write_report(folder)[1][0].endswith("No held-out loss was measured in a phase that trains it yet.")
    assert "curves/training.png" in report_text(folder)


def test_a_report_of_mlm_alone_does_not_speak_of_clm(tmp_path):
    run = read_record(write_run(tmp_path / "alone", phases=(("mlm", 100),)))
    assert "CLM" not in " ".join(findings(run))


def test_cost_is_that_of_all_steps_where_not_each_has_a_line(tmp_path):
    folder = write_run(tmp_path / "run")
    every = cost_of(read_record(folder))
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] % 10 == 0]
    path.write_text("\n".join(lines) + "\n")
    assert cost_of(read_record(folder)) == every
    assert (every.tokens, every.seconds) == (51_200, 50.0)


def test_durations():
    assert [duration(s) for s in (3.2, 61, 3725)] == ["3 s", "1 min 1 s", "1 h 2 min"]


def test_no_run_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        write_report(str(tmp_path / "nothing"))
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"no plan\.json"):
        write_report(str(tmp_path / "other"))
    folder = write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds nothing yet"):
        write_report(folder)


def test_the_verb_prints_three_lines_and_the_path(tmp_path, capsys):
    import argparse

    assert main(argparse.Namespace(workdir=write_run(tmp_path / "run"), baseline=None)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert printed[3] == f"report: {tmp_path / 'run' / 'report.md'}"


def test_runs_on_other_rows_are_not_compared(tmp_path):
    run, other = write_run(tmp_path / "two"), write_run(tmp_path / "other", phases=(("mlm", 100),))
    facts = json.loads((tmp_path / "other" / "data.json").read_text())
    (tmp_path / "other" / "data.json").write_text(json.dumps({**facts, "fingerprint": "elsewhere"}))
    with pytest.raises(UserError, match="it read other rows"):
        write_report(run, other)
    assert not (tmp_path / "two" / "report.md").exists()


def test_a_baseline_that_still_runs_is_compared_where_both_were_measured_and_said_to_run(tmp_path):
    run = write_run(tmp_path / "two")
    alone = write_run(tmp_path / "alone", phases=(("mlm", 100),), until=73)
    path, lines = write_report(run, alone)
    assert "after 60 steps (alone is not finished: step 73 of 100)" in lines[1]
    assert "Tokens read by then: 30,720 and 30,720." in pathlib.Path(path).read_text()
