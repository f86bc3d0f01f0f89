"""`evaluate`: measures a checkpoint on held-out rows, or scores sentences with it."""

import argparse
import json
import math
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from biphasic_jax.data.prepare import ensure_rows
from biphasic_jax.data.shards import Rows
from biphasic_jax.errors import UserError
from biphasic_jax.train.evaluator import Evaluator, predicts_shifted
from biphasic_jax.train.opened import Opened, open_checkpoint
from biphasic_jax.train.pll import Score, pseudo_perplexity, score_rows, score_sentences


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = """Measures a checkpoint on held-out rows: CLM loss and bits a byte, MLM loss, accuracy and
perplexity at each mask rate. The rows and the masks are fixed, so two checkpoints are measured alike.

  evaluate --checkpoint=runs/smoke                                  # its newest checkpoint, the rows of its run
  evaluate --checkpoint=runs/smoke/checkpoints/300 --mask-rates=0.15,0.3,0.5 --limit=0
  evaluate --checkpoint=runs/smoke --rows=rows/other --json         # other rows, prepared with its tokenizer
  evaluate --checkpoint=runs/smoke --pll=8                          # also mask each token of 8 rows in turn
  evaluate --checkpoint=runs/smoke --text="The cat sat." --text="The cat sit."

Pseudo-log-likelihood (PLL) masks every token in turn and adds up the log-probabilities of the true ones."""
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a run's folder, or a checkpoint's")
    parser.add_argument("--rows", metavar="DIR", help="rows that `prepare` wrote (default: those of the run)")
    parser.add_argument("--split", choices=("validation", "train"), default="validation", help="(validation)")
    parser.add_argument("--mask-rates", metavar="P,P,...", help="rates to measure MLM at (default: the run's)")
    parser.add_argument("--limit", type=int, metavar="N", help="rows to measure, 0 for all (default: the run's)")
    parser.add_argument("--batch-rows", type=int, metavar="N", help="rows a batch; no figure depends on it")
    parser.add_argument("--pll", type=int, default=0, metavar="N", help="pseudo-log-likelihood of the first N rows")
    parser.add_argument("--text", action="append", metavar="SENTENCE", help="only score this; may be given again")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def main(args: argparse.Namespace) -> int:
    opened = open_checkpoint(args.checkpoint)
    _apply(args, opened)
    found: dict[str, Any] = {"checkpoint": opened.folder, "step": opened.step, "phase": opened.phase}
    if args.text:
        found["sentences"] = sentence_scores(opened, args.text)
    else:
        folder = args.rows or ensure_rows(opened.config)
        opened.check_rows(folder)
        rows = Rows(folder, args.split)
        evaluator = Evaluator(opened.model, opened.config, opened.vocabulary, rows)
        found |= {"rows": folder, "split": args.split, "row_count": evaluator.row_count}
        found["measures"] = _measure(evaluator, opened, quiet=args.json)
        if args.pll:
            found["pll"] = row_scores(opened, rows, min(args.pll, len(rows)), quiet=args.json)
    if args.json:
        print(json.dumps(found, allow_nan=False))
    else:
        _show(found)
    return 0


def sentence_scores(opened: Opened, sentences: list[str]) -> list[dict[str, Any]]:
    """Text, token count, pseudo-log-likelihood (nats) and pseudo-perplexity of each sentence."""
    for number, text in enumerate(sentences, 1):
        if not text.strip():
            raise UserError(f"--text number {number} is empty: give a sentence")
    scores = score_sentences(
        opened.model,
        opened.params,
        opened.vocabulary,
        [opened.encode(text) for text in sentences],
        opened.config.data.row_length,
        shifted=predicts_shifted(opened.config),
    )
    return [{"text": text, **_score_facts([score])} for text, score in zip(sentences, scores, strict=True)]


def row_scores(opened: Opened, rows: Rows, count: int, quiet: bool = False) -> dict[str, Any]:
    """Pseudo-log-likelihood of the first `count` rows: each segment is scored by itself, then added up."""
    scores: list[Score] = []
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        for b in progress.track(range(count), description="pseudo-log-likelihood"):
            tokens_1xL, segments_1xL = rows.read(np.array([b]))
            (row,) = score_rows(
                opened.model,
                opened.params,
                opened.vocabulary,
                tokens_1xL,
                segments_1xL,
                shifted=predicts_shifted(opened.config),
            )
            scores += row
    return {"rows": count, "segments": len(scores), **_score_facts(scores)}


def _score_facts(scores: list[Score]) -> dict[str, Any]:
    total = sum(score.log_likelihood for score in scores)
    tokens = sum(score.tokens for score in scores)
    return {"tokens": tokens, "pll": total, "pseudo_perplexity": pseudo_perplexity(scores)}


def _apply(args: argparse.Namespace, opened: Opened) -> None:
    """Puts the arguments into the checkpoint's config, whose evaluation settings they override."""
    evaluation = opened.config.evaluation
    for name, value in (("limit", args.limit), ("batch-rows", args.batch_rows), ("pll", args.pll)):
        if value is not None and value < 0:
            raise UserError(f"--{name}={value} must be 0 or more")
    if args.limit is not None:
        evaluation.rows = args.limit
    if args.batch_rows is not None:
        evaluation.batch_rows = args.batch_rows
    if args.mask_rates is not None:
        try:
            rates = [float(part) for part in args.mask_rates.split(",")]
        except ValueError:
            raise UserError(f"--mask-rates={args.mask_rates}: give numbers, such as 0.15,0.4") from None
        if not all(0 < rate <= 1 for rate in rates):
            raise UserError(f"--mask-rates={args.mask_rates}: each must be above 0 and at most 1")
        with evaluation.ignore_type():
            evaluation.mask_rates = rates


def _measure(evaluator: Evaluator, opened: Opened, quiet: bool) -> list[dict[str, Any]]:
    """The evaluator's lines, with a bar on stderr that moves on with each batch."""
    batches = len(evaluator.measures) * math.ceil(evaluator.row_count / evaluator.batch_rows)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("evaluating", total=batches)

        def next_batch() -> bool:
            progress.advance(task)
            return False

        lines = evaluator.run(opened.params, step=opened.step, phase=opened.phase, should_stop=next_batch)
    assert lines is not None  # nobody stops it
    return lines


def _show(found: dict[str, Any]) -> None:
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f"{found['checkpoint']}: step {found['step']:,}, phase {found['phase']}")
    if "measures" in found:
        console.print(f"{found['row_count']:,} {found['split']} rows of {found['rows']}")
        table = _table("objective", "mask rate", "loss (nats)", "perplexity", "accuracy", "bits a byte", "targets")
        for line in found["measures"]:
            table.add_row(
                line["objective"],
                _number(line["mask_rate"], "g"),
                _number(line["loss"], ".4f"),
                _number(line["perplexity"], ",.1f"),
                _number(line["accuracy"], ".2%"),
                _number(line.get("bits_per_byte"), ".4f"),
                f"{line['targets']:,}",
            )
        console.print(table)
    if "pll" in found:
        pll = found["pll"]
        console.print(
            f"pseudo-perplexity {pll['pseudo_perplexity']:,.2f} over {pll['tokens']:,} tokens in {pll['segments']:,} "
            f"segments of {pll['rows']:,} rows (pseudo-log-likelihood {pll['pll']:,.1f} nats)",
        )
    if "sentences" in found:
        table = _table("sentence", "tokens", "PLL (nats)", "pseudo-perplexity")
        for score in found["sentences"]:
            cells = (f"{score['tokens']:,}", f"{score['pll']:.3f}", f"{score['pseudo_perplexity']:,.2f}")
            table.add_row(score["text"], *cells)
        console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
