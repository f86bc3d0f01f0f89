"""A rate that is a number, or a schedule over a phase.

    0.4
    {"shape": "constant", "from": 0.4}
    {"shape": "linear", "from": 0.4, "to": 0.15}             # or "cosine": flat at both ends
    {"shape": "steps", "values": [0.4, 0.3, 0.15], "at": [0.5, 0.9]}   # each later value begins at a share of the phase

The first update of a linear or cosine schedule has `from`, the last one `to`.
"""

import math
from collections.abc import Sequence
from typing import Any

from biphasic_jax.errors import UserError

KEYS = {
    "constant": ("shape", "from"),
    "linear": ("shape", "from", "to"),
    "cosine": ("shape", "from", "to"),
    "steps": ("shape", "values", "at"),
}


def rate_at(rate: Any, step: int, steps: tuple[int, int]) -> float:
    """The rate of update `step` in a phase of the updates `steps[0]` to `steps[1]` (excluded)."""
    if _is_number(rate):
        return float(rate)
    start, end = steps
    if rate["shape"] == "constant":
        return float(rate["from"])
    if rate["shape"] == "steps":
        begun = sum(step - start >= at * (end - start) for at in rate["at"])
        return float(rate["values"][begun])
    f = min(max((step - start) / max(end - start - 1, 1), 0.0), 1.0)
    if rate["shape"] == "cosine":
        f = (1 - math.cos(math.pi * f)) / 2
    return float(rate["from"] * (1 - f) + rate["to"] * f)


def rates_of(rate: Any) -> list[float]:
    """The rates between which a schedule moves."""
    if _is_number(rate):
        return [float(rate)]
    if rate["shape"] == "steps":
        return [float(value) for value in rate["values"]]
    return [float(rate[key]) for key in ("from", "to") if key in rate]


def check_rate(key: str, rate: Any) -> None:
    """Raises `UserError("key=rate: mend")` unless it is a rate in (0, 1] or a schedule of such."""
    if _is_number(rate):
        if not 0 < rate <= 1:
            raise UserError(f"{key}={rate!r}: give a rate above 0 and at most 1")
        return
    try:
        schedule = dict(rate)
    except (TypeError, ValueError):
        raise UserError(f"{key}={rate!r}: give a number, or a schedule such as {_EXAMPLE}") from None
    keys = KEYS.get(schedule.get("shape", ""))
    if keys is None:
        raise UserError(f"{key}={schedule}: shape is not one of {', '.join(KEYS)}; for instance {_EXAMPLE}")
    if set(schedule) != set(keys):
        raise UserError(f"{key}={schedule}: a {schedule['shape']} schedule has the keys {', '.join(keys)}")
    if schedule["shape"] == "steps":
        values, at = schedule["values"], schedule["at"]
        if not _are_numbers(values) or not _are_numbers(at) or len(values) != len(at) + 1:
            raise UserError(f"{key}={schedule}: give one number in values more than in at, where the later ones begin")
        if any(not 0 < share < 1 for share in at) or list(at) != sorted(set(at)):
            raise UserError(f"{key}={schedule}: at holds shares of the phase, rising, between 0 and 1")
    elif not all(_is_number(schedule[end]) for end in keys[1:]):
        raise UserError(f"{key}={schedule}: {' and '.join(keys[1:])} must be numbers")
    if any(not 0 < value <= 1 for value in rates_of(schedule)):
        raise UserError(f"{key}={schedule}: each rate must be above 0 and at most 1")


_EXAMPLE = '{"shape": "linear", "from": 0.4, "to": 0.15}'


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(map(_is_number, values))
