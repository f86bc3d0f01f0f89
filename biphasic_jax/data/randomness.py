"""Random numbers on the host: folded from (seed, purpose, index), never threaded or saved."""

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    """The generator of one thing: the same for the same arguments, independent for any other.

    The Philox key is a hash of (seed, purpose); its counter starts at `index` in the upper words, so two
    indices never share a stream (each may draw 2**64 blocks).
    """
    key: Any = _Key(_key(seed, purpose))
    return np.random.Generator(np.random.Philox(key, counter=[0, index, 0, 0]))


@functools.lru_cache(maxsize=64)
def _key(seed: int, purpose: str) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest(), np.uint64)


class _Key(ISeedSequence):
    """Philox(_Key(k)) is Philox(key=k), for which numpy would first gather entropy at five times the cost."""

    def __init__(self, key: np.ndarray):
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self.key


def fold(seed: int, purpose: str, index: int = 0) -> int:
    """A 32-bit seed for a library that wants one, folded from the same three."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
