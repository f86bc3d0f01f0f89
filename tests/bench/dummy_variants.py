"""Variants whose steps do next to nothing: what the harness is tested with."""

import os
import sys
from collections.abc import Mapping
from typing import Any


class Dummy:
    """Appends its name to a log at every step; may print, raise or die at a given one."""

    def __init__(self, name: str, log: str, die_at: int = -1, raise_at: int = -1):
        self.name, self.log, self.die_at, self.raise_at = name, log, die_at, raise_at
        self.steps = 0
        self.facts = {"name": name}
        print("a library greets its users on stdout")

    def step(self) -> dict[str, float]:
        if self.steps == self.die_at:
            print("the last straw", file=sys.stderr, flush=True)
            os._exit(7)
        if self.steps == self.raise_at:
            raise ValueError("no more of this")
        os.write(1, b"and says something at every step\n")
        with open(self.log, "a") as file:
            file.write(self.name)
        self.steps += 1
        return {"number": float(self.steps)}


def build(settings: Mapping[str, Any]) -> Dummy:
    return Dummy(**settings)


def refuse(settings: Mapping[str, Any]) -> Dummy:
    raise RuntimeError("this machine has no such thing")
