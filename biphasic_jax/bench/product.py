"""The rate of plain matrix products on this machine: what MFU is measured against."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

REPEATS = 4  # products a step


class Products:
    """Square products of `size`, by numpy's BLAS or compiled by XLA. A step's "flops" is 2 size^3 a product."""

    def __init__(self, library: str, size: int, dtype: str):
        a, b = np.random.default_rng(0).standard_normal((2, size, size), np.float32)
        self.flops = REPEATS * 2 * size**3
        self.facts: dict[str, Any] = {"library": library, "size": size, "dtype": dtype}
        self.multiply: Callable[[], Any]
        if library == "numpy":
            self.multiply = lambda: a @ b
        else:
            import jax
            import jax.numpy as jnp

            x, y = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
            product = jax.jit(jnp.dot)
            self.multiply = lambda: product(x, y).block_until_ready()

    def step(self) -> dict[str, float]:
        for _ in range(REPEATS):
            self.multiply()
        return {"flops": self.flops}


def build(settings: Mapping[str, Any]) -> Products:
    """Settings: library ("numpy", which multiplies float32, or "jax"), size, dtype."""
    return Products(settings["library"], settings["size"], settings["dtype"])
