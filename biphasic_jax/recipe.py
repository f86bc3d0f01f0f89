"""A config file read: `FILE[:ARGUMENT]`, whose `get_config` makes the config, and `--config.KEY=VALUE` on top."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from biphasic_jax.config import resolve
from biphasic_jax.errors import UserError
from biphasic_jax.overrides import apply_override, nearest


def load_config(spec: str, overrides: Sequence[str], registry: Callable[[], Mapping[str, Any]]) -> ConfigDict:
    """The resolved and checked config of `FILE[:ARGUMENT]` after `KEY=VALUE` overrides.

    `registry()` maps a name to an object with `defaults` (a dict) and `check(settings)`; it is asked after
    the file was read, so that a config may import an objective of its own. Raises `UserError` for anything
    that is wrong with the config.
    """
    config = read_config_file(spec)
    for override in overrides:
        apply_override(config, override)
    return resolve(config, registry())


def read_config_file(spec: str) -> ConfigDict:
    """What `get_config` of `FILE[:ARGUMENT]` returns, before overrides. Its folder may hold modules it imports."""
    path, _, argument = spec.partition(":")
    if not os.path.isfile(path):
        folder, name = os.path.split(path)
        here = sorted(f for f in os.listdir(folder or ".") if f.endswith(".py")) if os.path.isdir(folder or ".") else []
        raise UserError(
            f"--config={spec}: there is no file {path!r}{nearest(name, here) or '; see configs/ for recipes'}"
        )
    module_spec = importlib.util.spec_from_file_location("biphasic_jax_user_config", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"--config={spec}: {path!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UserError(f"--config={spec}: {path} has no function get_config()")
        if argument and not inspect.signature(module.get_config).parameters:
            raise UserError(f"--config={spec}: {path} takes no argument, but {argument!r} was given")
        config = module.get_config(argument) if argument else module.get_config()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"--config={spec}: {path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"--config={spec}: get_config() gave {config!r}; return a changed default_config()")
    return config
