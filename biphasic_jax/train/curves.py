"""The figures of a report: small, one message each, PNG."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from biphasic_jax.train.record import Record, smooth

CLM, GREY = "#2b6cb0", "#6b7280"
MLM = ("#c2410c", "#ea9a3e", "#7c2d12", "#f0b97d")  # one shade a mask rate
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.edgecolor": "#9ca3af",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}


def draw_losses(record: Record, path: str) -> None:
    """Both held-out losses over all phases, against the unigram entropy."""
    with _figure(path) as figure:
        axes = figure.subplots()
        firsts, highest = [], {}
        for label, colour, objective, rate in _measures(record):
            lines = record.measured(objective, rate)
            values = np.array([line["loss"] for line in lines], float)  # what is no number leaves a gap
            _line(axes, [line["step"] for line in lines], values, colour, label)
            finite = values[np.isfinite(values)]
            firsts += finite[:1].tolist()
            highest[label] = finite.max(initial=0.0)
        if record.entropy is not None:
            axes.axhline(record.entropy, color=GREY, linestyle="--", linewidth=1.2, label="unigram entropy")
            firsts.append(record.entropy)
        _frame(axes, record, "Held-out loss", "nats a token")
        # An objective that is not being trained may rise without limit: it must not flatten the rest.
        top = 1.12 * max(firsts, default=1.0)
        above = [f"{label} goes up to {value:.1f}" for label, value in highest.items() if value > top]
        if above:
            axes.set_ylim(top=top)
            axes.set_xlabel(f"step   (cut at {top:.1f}: {', '.join(above)})")


def draw_accuracy(record: Record, path: str) -> None:
    """The share of held-out targets that the model puts first."""
    with _figure(path) as figure:
        axes = figure.subplots()
        for label, colour, objective, rate in _measures(record):
            lines = record.measured(objective, rate)
            _line(axes, [line["step"] for line in lines], [line["accuracy"] for line in lines], colour, label)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        _frame(axes, record, "Held-out accuracy", "targets that are right")


def draw_training(record: Record, path: str) -> None:
    """The training loss, a phase in the colour of its objective, with its running mean."""
    with _figure(path) as figure:
        axes = figure.subplots()
        window = max(1, len(record.train) // 40)
        for phase in range(len(record.phases)):
            lines = [line for line in record.train if line["phase"] == phase and line["loss"] is not None]
            if not lines:
                continue
            at, values = [line["step"] for line in lines], [line["loss"] for line in lines]
            colour = CLM if record.phases[phase].objective == "clm" else MLM[0]
            axes.plot(at, values, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(at, smooth(values, window), color=colour)
        steps = window * record.config["log"]["every"]
        title = f"Training loss, and its mean over {steps} steps" if window > 1 else "Training loss"
        _frame(axes, record, title, "nats a target", legend=False)


def draw_schedule(record: Record, path: str) -> None:
    """Learning rate and mask rate at each step, as they were used."""
    with _figure(path, height=3.8) as figure:
        upper, lower = figure.subplots(2, sharex=True)
        steps = [line["step"] for line in record.train]
        upper.plot(steps, [line["learning_rate"] for line in record.train], color=GREY)
        upper.set_ylim(bottom=0)
        masked = [line for line in record.train if line["mask_rate"] is not None]
        lower.plot([line["step"] for line in masked], [line["mask_rate"] for line in masked], color=MLM[0])
        lower.set_ylim(0, max([0.5, *(line["mask_rate"] * 1.1 for line in masked)]))
        lower.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _frame(upper, record, "Learning rate", "", legend=False)
        _frame(lower, record, "Mask rate", "", legend=False, names=False)
        upper.set_xlabel("")


def draw_comparison(record: Record, baseline: Record, rate: float, path: str) -> None:
    """MLM accuracy of two runs at one mask rate, over the same budget."""
    with _figure(path) as figure:
        axes = figure.subplots()
        for run, colour, style in ((record, MLM[0], "-"), (baseline, GREY, "--")):
            lines = run.measured("mlm", rate)
            steps, values = [line["step"] for line in lines], [line["accuracy"] for line in lines]
            axes.plot(steps, values, style, color=colour, marker="o", markersize=2.5, label=run.name)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        _frame(axes, record, f"Held-out MLM accuracy at mask rate {rate:.0%}", "targets that are right")


def _measures(record: Record) -> list[tuple[str, str, str, float | None]]:
    """(label, colour, objective, mask rate) of everything that was measured."""
    found: list[tuple[str, str, str, float | None]] = []
    if record.measured("clm"):
        found.append(("CLM", CLM, "clm", None))
    for i, rate in enumerate(record.mask_rates):
        found.append((f"MLM, {rate:.0%} masked", MLM[i % len(MLM)], "mlm", rate))
    return found


def _line(axes: Axes, steps: Sequence[int], values: Any, colour: str, label: str) -> None:
    axes.plot(steps, values, color=colour, marker="o", markersize=2.5, label=label)


def _frame(axes: Axes, record: Record, title: str, unit: str, *, legend: bool = True, names: bool = True) -> None:
    """Title, units, and where one phase ends and the next begins."""
    axes.set_title(title, pad=16 if names else 6)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    start = record.phases[0].start
    axes.set_xlim(start, record.end)
    for phase in record.phases:
        if phase.start > start:
            axes.axvline(phase.start, color="#111827", linewidth=1.0, linestyle=":")
        if names:
            middle = (phase.start + phase.end) / 2
            where = axes.get_xaxis_transform()
            axes.text(middle, 1.02, phase.label, transform=where, ha="center", va="bottom", color=GREY)
    if legend:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


@contextmanager
def _figure(path: str, height: float = 3.2) -> Iterator[Figure]:
    """A figure that is saved to `path` at the end; without pyplot, so that no display and no state is needed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.4, height), dpi=140, layout="constrained")
        yield figure
        os.makedirs(os.path.dirname(path), exist_ok=True)
        figure.savefig(path)
