"""The registry: every `Objective` in a module of this package, by name."""

import importlib
import pkgutil

from biphasic_jax.objectives.objective import Examples, Objective, collate

__all__ = ["Examples", "Objective", "collate", "registry"]


def registry() -> dict[str, type[Objective]]:
    """name -> class of every objective that has been defined, those of this package included."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found: dict[str, type[Objective]] = {}
    pending = [Objective]
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if cls.name:
                found[cls.name] = cls
    return found
