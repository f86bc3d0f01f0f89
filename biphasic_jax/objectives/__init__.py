"""The registry: every `Objective` in a module of this package, by name."""

import importlib
import pkgutil

from biphasic_jax.objectives.objective import DEFINED, Examples, Objective, collate

__all__ = ["Examples", "Objective", "collate", "registry"]


def registry() -> dict[str, type[Objective]]:
    """name -> class of every objective that has been defined, those of this package included."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {cls.name: cls for cls in DEFINED if cls.name}
