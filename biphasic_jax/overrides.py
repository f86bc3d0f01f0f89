"""`--config.KEY=VALUE` on the command line: finding the key, reading the value, keeping its type."""

import ast
import difflib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from biphasic_jax.errors import UserError


def apply_override(config: ConfigDict, override: str) -> None:
    """Sets `a.b=VALUE` or `phases[1].steps=VALUE` in place; VALUE is a Python or JSON literal, or text."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--config.{override}: write --config.KEY=VALUE")
    parts = key.replace("[", ".").replace("]", "").split(".")
    node: Any = config
    for depth, part in enumerate(parts[:-1]):
        node = _child(node, part, ".".join(parts[: depth + 1]))
    last, value = parts[-1], parse_value(text)
    if isinstance(node, ConfigDict) and len(parts) == 3 and parts[0] == "phases" and last not in node:
        node.unlock()
        node[last] = value  # a phase's keys depend on its objective: `resolve` checks them
        return
    current = _child(node, last, key)
    value = _fit_type(value, current, key, text)
    if isinstance(node, list):
        node[int(last)] = value
    elif isinstance(current, ConfigDict):
        for name, entry in value.items():
            apply_override(config, f"{key}.{name}={entry!r}")
    else:
        with node.ignore_type():
            node[last] = value


def _child(node: Any, part: str, key: str) -> Any:
    if isinstance(node, list | tuple):
        if not part.isdigit() or int(part) >= len(node):
            raise UserError(f"--config.{key}: {part!r} is not an index below {len(node)}")
        return node[int(part)]
    if not isinstance(node, ConfigDict) or part not in node:
        names = list(node.keys()) if isinstance(node, ConfigDict) else []
        raise UserError(f"--config.{key}: there is no key {part!r}{nearest(part, names)}")
    return node[part]


def nearest(word: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; the keys here are {', '.join(names)}" if names else ""


def parse_value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text in ("null", "None"):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _fit_type(value: Any, current: Any, key: str, text: str) -> Any:
    """`value` as the type of `current`, or a UserError; numbers may become schedules (dicts)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(current, bool):
        if isinstance(value, bool):
            return value
    elif isinstance(current, int | float):
        if number or isinstance(value, dict):
            whole = isinstance(current, int) and isinstance(value, float) and value.is_integer() and abs(value) >= 1
            return int(value) if whole else value
    elif isinstance(current, str):
        return value if isinstance(value, str) else text
    elif isinstance(current, list | tuple):
        if isinstance(value, list | tuple) and not (
            current and isinstance(current[0], ConfigDict) and not all(isinstance(v, dict) for v in value)
        ):
            if current and isinstance(current[0], ConfigDict):
                return tuple(ConfigDict(v) for v in value)
            return tuple(value)
        if not isinstance(value, dict) and not (current and isinstance(current[0], ConfigDict)):
            return tuple(parse_value(part) for part in text.split(","))
    elif isinstance(current, ConfigDict):
        if isinstance(value, dict):
            return value
    else:
        return value
    raise UserError(f"--config.{key}={text}: needs a value like {current!r} ({type(current).__name__})")
