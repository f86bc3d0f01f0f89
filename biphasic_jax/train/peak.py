"""How many floating-point operations a second a device can do at best: the denominator of MFU."""

import time

import jax
import jax.numpy as jnp

# Dense bf16 FLOP/s by the maker's data sheet, by a part of `device_kind` in lower case; the first that fits.
PEAKS = (
    ("tpu7x", 2307e12),
    ("v6 lite", 918e12),
    ("v6e", 918e12),
    ("v5p", 459e12),
    ("v5 lite", 197e12),
    ("v5e", 197e12),
    ("v5", 459e12),
    ("v4", 275e12),
    ("v3", 61.5e12),  # a core; a chip has two
    ("b200", 2250e12),
    ("h200", 989e12),
    ("h100", 989e12),
    ("a100", 312e12),
    ("l40s", 362e12),
    ("l4", 121e12),
    ("mi300x", 1307e12),
    ("mi250", 191e12),
)


def peak_flops(device: jax.Device) -> float:
    """FLOP/s of one device: by data sheet where it is known, else by a matrix product measured for 0.3 s."""
    kind = device.device_kind.lower()
    for name, peak in PEAKS:
        if device.platform in ("tpu", "gpu", "cuda", "rocm") and name in kind:
            return peak
    return measured_flops(device)


def measured_flops(device: jax.Device, size: int = 1024, seconds: float = 0.3) -> float:
    """FLOP/s of a float32 product of two square matrices, the best of as many as fit in `seconds`.

    Forced host devices share the cores: each is given its part.
    """
    a = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / (jax.local_device_count() if device.platform == "cpu" else 1)
