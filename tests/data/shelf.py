"""Small real shards for the tests of order and batches: every row says which one it is."""

import os

import numpy as np

from biphasic_jax.config import default_config
from biphasic_jax.data.manifest import Accounting, Manifest, Source
from biphasic_jax.data.shards import Rows, ShardWriter
from biphasic_jax.data.vocabulary import Vocabulary

LENGTH, SIZE = 16, 500
BOS, EOS, MASK, PAD = range(4)


def vocabulary() -> Vocabulary:
    special_V = np.arange(SIZE) < 4
    return Vocabulary(
        size=SIZE,
        bos=BOS,
        eos=EOS,
        pad=PAD,
        mask=MASK,
        special_V=special_V,
        word_start_V=special_V | (np.arange(SIZE) % 3 == 0),
        bytes_V=np.where(special_V, 0, 3).astype(np.int32),
    )


def write_rows(folder, sizes, *, weights=None, validation=0, held_out=0) -> Rows:
    """The train split of `sizes` rows a source, in shards of at most 7; `label` tells rows apart.

    `validation` rows a source in the other split; or `held_out` rows at the end of the last source.
    """
    os.makedirs(folder, exist_ok=True)
    number = 0
    sources = []
    for s, size in enumerate(sizes):
        splits = {}
        for split, count in (("train", size), ("validation", validation)):
            shards = []
            for first in range(0, count, 7):
                writer = ShardWriter(f"{folder}/{split}-{s}-{first:05d}.arrayrecord", wide=False)
                for _ in range(first, min(first + 7, count)):
                    writer.write(*_row(number))
                    number += 1
                shards.append(writer.close())
            splits[split] = tuple(shards)
        weight = weights[s] if weights else None
        held = held_out if s == len(sizes) - 1 else 0
        sources.append(Source(f"source{s}", weight, splits["train"], splits["validation"], held))
    roles = {"size": SIZE, "bos": BOS, "eos": EOS, "pad": PAD, "mask": MASK, "mask_how": "known"}
    cut = {"share": 0.1, "cut": "rows" if held_out else "documents", "rows": validation * len(sizes) + held_out}
    tokenizer = {"file": "tokenizer.json", "sha256": "0" * 64}
    Manifest(LENGTH, "documents", 0, tokenizer, roles, tuple(sources), cut, Accounting()).write(folder)
    return Rows(folder, "train")


def _row(number):
    """BOS, the row's number in two tokens, and text; 2 segments, and padding after every other row."""
    text = 4 + (np.arange(LENGTH) * 7 + number * 13) % (SIZE - 4)
    text[:3] = BOS, 4 + number // 490, 4 + number % 490
    length = LENGTH - 3 * (number % 2)
    text[length - 1] = EOS
    return text[:length], np.array([6, length - 6])


def label(tokens_BxL):
    """The number that `write_rows` gave each row, which counts validation rows too."""
    return (tokens_BxL[:, 1] - 4) * 490 + tokens_BxL[:, 2] - 4


def config(rows, seed=5):
    c = default_config()
    c.batch.rows = rows
    c.seed = seed
    return c
