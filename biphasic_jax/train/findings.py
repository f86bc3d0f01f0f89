"""What a run's figures say, in sentences: whether it learnt, whether it beats another run, what it cost."""

import math
from dataclasses import dataclass
from statistics import mean

import numpy as np

from biphasic_jax.config import differences
from biphasic_jax.errors import UserError
from biphasic_jax.train.record import Line, Record

# Settings that may differ between two runs without making them hard to compare.
OWN_KEYS = ("phases", "log", "checkpoint", "data.rows", "data.workers")


def findings(run: Record, baseline: Record | None = None) -> list[str]:
    """Three lines: the losses, how good MLM is (against the baseline, if there is one), what it cost."""
    unfinished = f"Not finished, step {run.step:,} of {run.end:,}. " if run.step < run.end else ""
    return [
        unfinished + loss_finding(run),
        comparison_finding(run, baseline) if baseline else mlm_finding(run),
        cost_finding(run),
    ]


def loss_finding(run: Record) -> str:
    """Each held-out loss at the end of the last phase that trains it, and whether it is below the unigram entropy."""
    ends = final_lines(run)
    if not ends:
        return "No held-out loss was measured in a phase that trains it yet."
    listed = ", ".join(f"{name} {line['loss']:.3f} (step {line['step']:,})" for name, line in ends.items())
    text = f"Held-out loss where its phase ends, in nats a token: {listed}."
    if run.entropy is not None:
        above = [name for name, line in ends.items() if line["loss"] >= run.entropy]
        entropy = f"the unigram entropy of the held-out text, {run.entropy:.3f}"
        if above:
            text += f" NOT below {entropy}: {', '.join(above)}."
        else:
            text += f" {('It ends', 'Both end', 'All end')[min(len(ends), 3) - 1]} below {entropy}."
    last = run.at(run.step, "clm")
    if "CLM" in ends and last is not None and last["step"] > ends["CLM"]["step"] and last["loss"] is not None:
        text += f" CLM stands at {last['loss']:.3f} at step {last['step']:,}, after the phases that do not train it."
    return text


def final_lines(run: Record) -> dict[str, Line]:
    """Name -> the last held-out line of a measure within the last phase that trains its objective."""
    found = {}
    for objective, rate in [("clm", None), *(("mlm", rate) for rate in run.mask_rates)]:
        step = run.trained_until(objective)
        line = run.at(step, objective, rate) if step is not None else None
        if line is not None and line["loss"] is not None:
            found[objective.upper() + (f" at {rate:.0%}" if rate else "")] = line
    return found


def mlm_finding(run: Record) -> str:
    accuracies = [
        f"{line['accuracy']:.1%} at mask rate {rate:.0%}"
        for rate in run.mask_rates
        if (line := run.at(run.step, "mlm", rate)) is not None and line["accuracy"] is not None
    ]
    text = f"Held-out MLM accuracy at step {run.step:,}: {', '.join(accuracies)}." if accuracies else ""
    step = run.trained_until("clm")
    line = run.at(step, "clm") if step is not None else None
    if line is not None and line["bits_per_byte"] is not None:
        text += f" CLM where its phase ends: {line['bits_per_byte']:.3f} bits a byte."
    return text.strip() or "MLM accuracy was not measured yet."


@dataclass(frozen=True)
class Pair:
    """Two runs at one mask rate. chance: two standard errors of the difference of the accuracies.

    The errors of the two are taken as independent; both answer for the same targets, so it is a cautious figure.
    """

    mask_rate: float
    run: Line
    baseline: Line

    @property
    def gain(self) -> float:
        return self.run["accuracy"] - self.baseline["accuracy"]

    @property
    def chance(self) -> float:
        parts = [line["accuracy"] * (1 - line["accuracy"]) / line["targets"] for line in (self.run, self.baseline)]
        return 2 * math.sqrt(sum(parts))


def check_comparable(run: Record, baseline: Record) -> None:
    """Raises `UserError` unless both runs answered for the same held-out tokens."""
    mine, theirs = run.data.get("fingerprint"), baseline.data.get("fingerprint")
    if mine != theirs:
        raise UserError(
            f"--baseline={baseline.folder}: it read other rows (fingerprint {theirs}, here {mine}): accuracies on "
            f"other held-out text or another tokenizer cannot be compared; give a run on the same rows"
        )
    for key in ("rows", "seed"):
        a, b = run.config["evaluation"][key], baseline.config["evaluation"][key]
        if a != b:
            raise UserError(
                f"--baseline={baseline.folder}: its evaluation.{key} is {b}, here it is {a}: use `evaluate`"
            )


def pairs(run: Record, baseline: Record) -> list[Pair]:
    """What both runs measured of MLM, each rate at the last step at which both did."""
    found = []
    for rate in run.mask_rates:
        theirs = {line["step"]: line for line in baseline.measured("mlm", rate) if line["loss"] is not None}
        mine = [line for line in run.measured("mlm", rate) if line["loss"] is not None and line["step"] in theirs]
        if mine:
            found.append(Pair(rate, mine[-1], theirs[mine[-1]["step"]]))
    return found


def comparison_finding(run: Record, baseline: Record) -> str:
    """Whether the run's MLM accuracy beats the baseline's, rate by rate; in plain words where it does not."""
    found = pairs(run, baseline)
    if not found:
        return f"{run.name} and {baseline.name} have measured MLM at no common mask rate: nothing to compare."
    if all(pair.gain > pair.chance for pair in found):
        verdict = "beats"
    elif all(pair.gain < -pair.chance for pair in found):
        verdict = "does NOT beat, and is worse than,"
    else:
        verdict = "does NOT clearly beat"
    listed = ", ".join(
        f"{pair.run['accuracy']:.1%} against {pair.baseline['accuracy']:.1%} at mask rate {pair.mask_rate:.0%}"
        for pair in found
    )
    alone = " (MLM alone)" if {p.objective for p in baseline.phases} == {"mlm"} else ""
    steps = f"after {found[-1].run['step']:,} steps"
    if baseline.step < baseline.end:
        steps += f" ({baseline.name} is not finished: step {baseline.step:,} of {baseline.end:,})"
    return f"Held-out MLM accuracy of {run.name} {verdict} that of {baseline.name}{alone} {steps}: {listed}."


def unlike(run: Record, baseline: Record) -> list[str]:
    """Settings, other than the phases, in which two runs differ."""
    lines = differences(baseline.config, run.config)
    return [line for line in lines if not line.startswith(OWN_KEYS)]


def cost_finding(run: Record) -> str:
    cost = cost_of(run)
    if cost is None:
        return "Nothing was trained yet."
    text = (
        f"{cost.tokens:,} tokens in {duration(cost.seconds)} of training steps: {cost.tokens_per_second:,.0f} a second"
    )
    if cost.mfu is not None:
        text += f", MFU {cost.mfu:.1%}"
    return f"{text}, {cost.data_wait:.1%} of the time waiting for data."


@dataclass(frozen=True)
class Cost:
    """tokens: real ones. seconds: in training steps alone. The rates are medians over the lines."""

    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float
    data_wait: float


def cost_of(run: Record, phase: int | None = None, until: int | None = None) -> Cost | None:
    """What a run, or a phase of it, cost up to step `until`.

    Where not every step has a line, a line stands for those before it.
    """
    read_M = np.diff([0, *(line["tokens_total"] for line in run.train)])
    chosen = [
        m
        for m, line in enumerate(run.train)
        if phase in (None, line["phase"]) and (until is None or line["step"] <= until)
    ]
    if not chosen:
        return None
    rate_M, mfu_M, wait_M = (
        np.array([line[key] for line in run.train]) for key in ("tokens_per_second", "mfu", "data_wait")
    )
    seconds_M = read_M / rate_M
    return Cost(
        tokens=int(read_M[chosen].sum()),
        seconds=float(seconds_M[chosen].sum()),
        tokens_per_second=float(np.median(rate_M[chosen])),
        mfu=float(np.median(mfu_M[chosen])),
        data_wait=float(np.average(wait_M[chosen], weights=seconds_M[chosen])),
    )


def duration(seconds: float) -> str:
    """As a person says it: 41 s, 3 min 20 s, 5 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def last_mean(values: list[float], count: int = 20) -> float:
    """The mean of the last few values: a single batch says little."""
    return mean(values[-count:])
