"""`fill-mask`: what a model puts in place of the masks of a sentence."""

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.model.head import head_kernel, project
from biphasic_jax.train.evaluator import predicts_shifted
from biphasic_jax.train.opened import open_checkpoint

MARK = "[MASK]"


@dataclass(frozen=True)
class Candidate:
    """A token in place of a mask: its id, its text (a leading space included) and its probability."""

    token: int
    text: str
    probability: float


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = f"""Shows what a checkpoint puts in place of the masks of a sentence.

  fill-mask --checkpoint=runs/smoke --text="The {MARK} of the king."
  fill-mask --checkpoint=runs/smoke/checkpoints/300 --text="She {MARK} to the {MARK}." --top=10

{MARK}, or the tokenizer's own mask token, stands for one token, the space before it included. Each mask is
filled by itself, while the others stay masked."""
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a run's folder, or a checkpoint's")
    parser.add_argument("--text", required=True, metavar="SENTENCE", help=f"with {MARK} in place of a token")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="candidates a mask (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def main(args: argparse.Namespace) -> int:
    if args.top < 1:
        raise UserError(f"--top={args.top} must be at least 1")
    opened = open_checkpoint(args.checkpoint)
    ids = encode_masked(opened.tokenizer, opened.vocabulary, args.text, opened.config.data.row_length)
    if not opened.has_learnt_mlm:
        print(
            f"warning: {opened.folder} (step {opened.step}) has not been in an MLM phase: its answers mean little",
            file=sys.stderr,
        )
    masks = fill_masks(
        opened.model,
        opened.params,
        opened.vocabulary,
        opened.tokenizer,
        ids,
        top=args.top,
        shifted=predicts_shifted(opened.config),
    )
    if args.json:
        print(json.dumps({"text": args.text, "masks": [[asdict(c) for c in candidates] for candidates in masks]}))
        return 0
    table = Table(box=None, pad_edge=False)
    for number in range(1, len(masks) + 1):
        table.add_column("probability", justify="right")
        table.add_column(f"mask {number}")
    for rank in zip(*masks, strict=True):
        cells = ((f"{candidate.probability:.2%}", repr(candidate.text)) for candidate in rank)
        table.add_row(*(cell for pair in cells for cell in pair))
    Console(markup=False, highlight=False, soft_wrap=True).print(table)  # tokens may look like markup
    return 0


def encode_masked(tokenizer: Tokenizer, vocabulary: Vocabulary, text: str, row_length: int) -> list[int]:
    """The ids, `row_length` at most, of a sentence in which `[MASK]` or the tokenizer's mask stands for one token.

    A space before a mask goes: in these vocabularies a word brings its own. The end-of-text token follows,
    as it does in training.
    """
    own = tokenizer.id_to_token(vocabulary.mask)
    assert own is not None
    masked = re.sub(rf" ?(?:{re.escape(MARK)}|{re.escape(own)})", lambda _: own, text)
    literal = tokenizer.encode_special_tokens
    try:
        tokenizer.encode_special_tokens = False  # here the mask is meant, where in a document it would be text
        ids = tokenizer.encode(masked, add_special_tokens=False).ids
    finally:
        tokenizer.encode_special_tokens = literal
    if vocabulary.mask not in ids:
        raise UserError(f"--text={text!r} holds no mask: write {MARK} (or {own}) in place of a token")
    if len(ids) >= row_length:
        raise UserError(f"--text has {len(ids) + 1} tokens, but the model's rows hold {row_length}: shorten it")
    return [*ids, vocabulary.eos]


def fill_masks(
    model: Any,
    params: Any,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    top: int = 5,
    shifted: bool = False,
) -> list[list[Candidate]]:
    """The `top` most probable ordinary tokens for each mask in `ids`, each mask apart from the others.

    Probabilities are of the whole vocabulary, special tokens included. shifted: a mask is read at the
    position before it.
    """
    where_P = np.flatnonzero(np.asarray(ids) == vocabulary.mask)
    if shifted and where_P[0] == 0:
        raise UserError(f"this model reads a token at the position before it: {MARK} cannot stand first")
    tokens_1xL = np.asarray(ids, np.int32)[None]
    probability_PxV = np.asarray(_probabilities(model, params, tokens_1xL, where_P - shifted))
    ordinary = vocabulary.ordinary
    best_PxK = ordinary[np.argsort(-probability_PxV[:, ordinary], axis=1, kind="stable")[:, :top]]
    return [
        [Candidate(int(t), tokenizer.decode([int(t)]), float(probability_V[t])) for t in best_K]
        for probability_V, best_K in zip(probability_PxV, best_PxK, strict=True)
    ]


@partial(jax.jit, static_argnames="model")
def _probabilities(model: Any, params: Any, tokens_1xL: Any, where_P: Any) -> Any:
    """(P, V) float32, of one bidirectional segment at the positions `where_P`."""
    x_1xLxD = model.features({"params": params}, tokens_1xL, jnp.ones_like(tokens_1xL), causal=False)
    return jax.nn.softmax(project(x_1xLxD[0, where_P], head_kernel(params)))
