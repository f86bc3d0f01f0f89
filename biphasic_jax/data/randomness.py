"""Random numbers on the host: folded from (seed, purpose, index), never threaded or saved."""

import hashlib

import numpy as np


def generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    """The generator of one thing: the same for the same arguments, independent for any other.

    The Philox key is a hash of (seed, purpose); its counter starts at `index` in the upper words, so two
    indices never share a stream (each may draw 2**64 blocks).
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, index, 0, 0]))


def fold(seed: int, purpose: str, index: int = 0) -> int:
    """A 32-bit seed for a library that wants one, folded from the same three."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
