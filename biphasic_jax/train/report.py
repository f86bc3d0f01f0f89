"""`report`: what came out of a run, for a person with a minute. report.md, and its figures in curves/."""

import argparse
import os
from typing import Any

from biphasic_jax.data.manifest import write_whole
from biphasic_jax.train.findings import check_comparable, cost_of, duration, findings, last_mean, pairs, unlike
from biphasic_jax.train.record import Record, read_record

REPORT = "report.md"
CURVES = "curves"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = """Writes report.md and its curves into a run's folder, and prints three lines of result.

  report --workdir=runs/smoke
  report --workdir=runs/smoke --baseline=runs/smoke-mlm    # against MLM alone over the same budget

`train` writes the report itself when a run ends. This verb writes it at any time, also while the run goes
on, and beside a baseline."""
    parser.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--baseline", metavar="DIR", help="folder of another run to compare with")


def main(args: argparse.Namespace) -> int:
    path, lines = write_report(args.workdir, args.baseline)
    print("\n".join([*lines, f"report: {path}"]))
    return 0


def write_report(workdir: str, baseline: str | None = None) -> tuple[str, list[str]]:
    """Writes report.md and curves/NAME.png into `workdir`; returns the path of the former and three lines of result.

    `baseline`: a run to compare with, usually MLM alone over the same budget. Raises `UserError` where a
    folder is no run or has no metrics yet, or where the two read different rows.
    """
    from biphasic_jax.train import curves  # matplotlib is slow to import, and only a report needs it

    run = read_record(workdir)
    other = read_record(baseline) if baseline else None
    if other:
        check_comparable(run, other)
    lines = findings(run, other)

    def png(name: str) -> str:
        return os.path.join(workdir, CURVES, f"{name}.png")

    parts = [f"# {run.name}", "\n".join(f"- {line}" for line in lines)]
    if run.validation:
        curves.draw_losses(run, png("losses"))
        curves.draw_accuracy(run, png("accuracy"))
        parts += [_picture("losses", "Held-out losses over the phases"), held_out_table(run)]
        parts += [_picture("accuracy", "Held-out accuracy over the phases")]
    if other and (found := pairs(run, other)):
        rate = found[-1].mask_rate if run.main_rate is None else run.main_rate
        curves.draw_comparison(run, other, rate, png("comparison"))
        parts += [f"## Against {other.name}", comparison_table(run, other), _settings(run, other)]
        parts += [_picture("comparison", f"MLM accuracy of {run.name} and {other.name}")]
    if run.train:
        curves.draw_training(run, png("training"))
        curves.draw_schedule(run, png("schedule"))
        parts += ["## Training", phase_table(run), _picture("training", "Training loss")]
        parts += [_picture("schedule", "Learning rate and mask rate")]
    if run.environment:
        parts += ["## Where it ran", environment_table(run)]
    path = os.path.join(workdir, REPORT)
    write_whole(path, ("\n\n".join(parts) + "\n").encode())
    return path, lines


def held_out_table(run: Record) -> str:
    """Every held-out figure at the first evaluation and at the end of each phase."""
    steps = {run.validation[0]["step"]: "first"}
    for phase in run.phases:
        if phase.start < run.step:
            reached = min(phase.end, run.step)
            steps[reached] = f"{'end of' if phase.end <= run.step else 'in'} {phase.label}"
    header = ["", "targets", *(f"{what}, step {step:,}" for step, what in steps.items())]
    rows = []
    for objective, rate in [("clm", None), *(("mlm", rate) for rate in run.mask_rates)]:
        lines = [run.at(step, objective, rate) for step in steps]
        name = objective.upper() if rate is None else f"MLM, {rate:.0%} masked"
        targets = next((f"{line['targets']:,}" for line in lines if line), "")
        for key, label, form in (
            ("loss", "loss, nats a token", ".3f"),
            ("bits_per_byte", "bits a byte", ".3f"),
            ("perplexity", "perplexity", ",.1f"),
            ("accuracy", "accuracy", ".1%"),
        ):
            values = [line.get(key) if line else None for line in lines]
            if any(value is not None for value in values):
                rows.append([f"{name}: {label}", targets, *(_number(value, form) for value in values)])
    if run.entropy is not None:
        tokens = f"{run.data['validation_tokens']:,}"
        rows.append(["unigram entropy, nats a token", tokens, *[_number(run.entropy, ".3f")] * len(steps)])
    return _table(header, rows)


def comparison_table(run: Record, other: Record) -> str:
    """MLM of two runs, at each mask rate, at the last step at which both were measured."""
    rows = [
        [
            f"{pair.mask_rate:.0%}",
            *(_number(line["accuracy"], ".1%") for line in (pair.run, pair.baseline)),
            f"{100 * pair.gain:+.2f} points (chance: {100 * pair.chance:.2f})",
            *(_number(line["loss"], ".3f") for line in (pair.run, pair.baseline)),
            f"{pair.run['loss'] - pair.baseline['loss']:+.3f}",
        ]
        for pair in pairs(run, other)
    ]
    names = [run.name, other.name]
    header = [
        "mask rate",
        *(f"accuracy, {name}" for name in names),
        "gain",
        *(f"loss, {name}" for name in names),
        "change",
    ]
    return _table(header, rows) + (
        "\n\nChance: two standard errors of the difference, as if the two answered for different targets."
    )


def _settings(run: Record, other: Record) -> str:
    step = pairs(run, other)[-1].run["step"]
    tokens = [cost.tokens if (cost := cost_of(record, until=step)) else 0 for record in (run, other)]
    budget = f"Tokens read by then: {tokens[0]:,} and {tokens[1]:,}. "
    lines = unlike(run, other)
    if not lines:
        return budget + "The two runs differ in their phases alone."
    return (
        budget
        + f"Settings that differ besides the phases ({other.name} -> {run.name}):\n\n"
        + "\n".join(f"- `{line}`" for line in lines)
    )


def phase_table(run: Record) -> str:
    """What each phase read, where its loss ended and what it cost."""
    rows = []
    for index, phase in enumerate(run.phases):
        cost = cost_of(run, index)
        losses = [line["loss"] for line in run.train if line["phase"] == index and line["loss"] is not None]
        if cost is None or not losses:
            continue
        rows.append(
            [
                phase.label,
                f"{phase.start:,} to {min(phase.end, run.step):,}",
                f"{cost.tokens:,}",
                _number(last_mean(losses), ".3f"),
                duration(cost.seconds),
                _number(cost.tokens_per_second, ",.0f"),
                _number(cost.mfu, ".1%"),
                _number(cost.data_wait, ".1%"),
            ]
        )
    header = ["phase", "steps", "tokens", "loss at its end", "time", "tokens/s", "MFU", "waiting for data"]
    return _table(header, rows) + (
        "\n\nTime and rates are those of the training steps: compiling, evaluating and saving are not in them."
    )


def environment_table(run: Record) -> str:
    """Versions, devices and the like, as `environment.json` has them."""
    rows = [
        [key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for key, value in _leaves(run.environment)
    ]
    return _table(["", ""], rows)


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _picture(name: str, text: str) -> str:
    return f"![{text}]({CURVES}/{name}.png)"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: the first column left, the others right."""
    marks = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, marks, *rows))
