"""Compiled programs are kept on disk, so that a second start of the same shapes does not compile again."""

import os

import jax

from biphasic_jax.data.prepare import cache_root


def cache_folder() -> str:
    """$BIPHASIC_CACHE/xla, or ~/.cache/biphasic_jax/xla."""
    return os.path.join(cache_root(), "xla")


def enable_compilation_cache() -> None:
    """For this process; a cache that the user set for JAX itself stays."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", cache_folder())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
