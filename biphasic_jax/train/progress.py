"""What a person sees while a run goes: a bar in a terminal, now and then a line elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from biphasic_jax.plan import Plan

SECONDS_A_LINE = 15.0  # where there is no terminal


class Progress:
    """Of the steps of a plan, on stderr. Does nothing unless `show`."""

    def __init__(self, plan: Plan, step: int, show: bool):
        self.plan, self.show = plan, show
        self.console = Console(stderr=True, soft_wrap=True)
        self.bar = None
        self.printed = time.monotonic()
        if show and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.bar = Bar(
                *columns, TimeRemainingColumn(compact=True), TextColumn("{task.fields[text]}"), console=self.console
            )
            self.task = self.bar.add_task("starting", total=plan.end - plan.start, completed=step - plan.start, text="")
            self.bar.start()

    def say(self, text: str) -> None:
        if self.show:
            self.console.print(text, highlight=False, markup=False)

    def train(self, line: dict[str, Any]) -> None:
        if not self.show:
            return
        text = f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s  MFU {line['mfu']:.0%}"
        if self.bar is not None:
            name = f"phase {line['phase']} {line['objective']}"
            self.bar.update(self.task, completed=line["step"] - self.plan.start, description=name, text=text)
        elif time.monotonic() - self.printed > SECONDS_A_LINE:
            self.printed = time.monotonic()
            self.say(f"step {line['step']:,} of {self.plan.end:,}  {line['objective']}  {text}")

    def validation(self, lines: list[dict[str, Any]]) -> None:
        def name(line: dict[str, Any]) -> str:
            return line["objective"] if line["mask_rate"] is None else f"{line['objective']} {line['mask_rate']:.0%}"

        losses = "  ".join(f"{name(line)} {line['loss']:.3f}" for line in lines)
        self.say(f"step {lines[0]['step']:,}: held-out loss  {losses}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
