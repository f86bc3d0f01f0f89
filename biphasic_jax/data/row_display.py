"""Rows for the eye: text with segments, hidden tokens and targets; lengths and duplicates."""

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from biphasic_jax.data.shards import Rows
from biphasic_jax.data.token_bytes import token_bytes
from biphasic_jax.data.tokenizer import load_tokenizer
from biphasic_jax.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    from biphasic_jax.data.inspect_rows import ServedRow

# Rows that the figures at the end are measured on, at most; and the shortest segment that counts as a duplicate.
MEASURED_ROWS = 20_000
SHORTEST_REPEATED = 16
BAR = 40  # characters of the longest bar
LEGEND = (
    "[[whale]] hidden by the mask, to be predicted; [[whale>sea]] replaced by another token, to be predicted; "
    "[[=whale]] left as it is, to be predicted. A line begins a segment."
)


class Display:
    """Prints to stdout, in colour where it is a terminal."""

    def __init__(self, folder: str, rows: Rows, vocabulary: Vocabulary):
        tokenizer = load_tokenizer(folder)
        self.rows, self.vocabulary = rows, vocabulary
        self.console = Console(highlight=False, soft_wrap=True)
        self.texts = token_bytes(tokenizer)
        self.names = {i: tokenizer.id_to_token(i) or f"<{i}>" for i in np.flatnonzero(vocabulary.special_V).tolist()}

    def show(self, served: Iterable["ServedRow"], most: int) -> None:
        """The first `most` rows of each step (0: all), and what the steps together hold."""
        self.console.print(Text(LEGEND, style="dim"))
        totals = {"rows": 0, "tokens": 0, "padding": 0, "targets": 0}
        seen: list[int] = []
        for (phase, step), group in groupby(served, key=lambda row: (row.phase, row.step)):
            self.console.print()
            title = f"step {step}, phase {phase.index}: {phase.objective}"
            self.console.print(Text(title, style="bold"))
            for shown, row in enumerate(group):
                real = int(np.count_nonzero(row.segments_L))
                totals["rows"] += 1
                totals["tokens"] += real
                totals["padding"] += len(row.segments_L) - real
                totals["targets"] += int(np.count_nonzero(row.weights_L))
                seen.append(row.row)
                if not most or shown < most:
                    self.console.print(self.row_text(row))
        share = totals["targets"] / max(totals["tokens"], 1)
        self.console.print()
        self.console.print(
            f"{totals['rows']:,} rows, {len(set(seen)):,} different; {totals['tokens']:,} tokens and "
            f"{totals['padding']:,} of padding; {totals['targets']:,} targets, {100 * share:.2f} % of the tokens"
        )
        self._show_measures()

    def row_text(self, row: "ServedRow") -> Text:
        """A row: a heading, then a line for each segment."""
        real = int(np.count_nonzero(row.segments_L))
        targets = int(np.count_nonzero(row.weights_L))
        source = next(s for s in reversed(self.rows.sources) if s.first <= row.row and s.rows)
        text = Text()
        segments = int(row.segments_L.max())
        text.append(
            f"example {row.index}, row {row.row} of {source.name}: {real} tokens in {segments} "
            f"segment{'s' if segments != 1 else ''}, {len(row.segments_L) - real} of padding, {targets} targets\n",
            style="cyan",
        )
        hidden_L = self.predicted(row)
        every = targets > 0.9 * real  # where all is predicted, marks would say nothing
        for segment in range(1, segments + 1):
            places = np.flatnonzero(row.segments_L == segment)
            text.append(f"{segment:>3} ", style="cyan")
            run: list[int] = []
            for place in places.tolist():
                original, fed = int(row.original_L[place]), int(row.tokens_L[place])
                marked = fed != original or (hidden_L[place] and not every)
                if not marked and original not in self.names:
                    run.append(original)
                    continue
                self._append_run(text, run)
                if marked:
                    self._append_marked(text, original, fed)
                else:
                    text.append(self.names[original], style="dim")
            self._append_run(text, run)
            text.append("\n")
        return text

    def predicted(self, row: "ServedRow") -> np.ndarray:
        """(L,) bool: which tokens are somewhere a target, be it at their own place or one before."""
        at_L = row.weights_L > 0
        if np.array_equal(row.targets_L[at_L], row.original_L[at_L]):
            return at_L
        return np.concatenate([[False], at_L[:-1]])

    def _append_run(self, text: Text, run: list[int]) -> None:
        """Ordinary tokens together: one may hold a part of a character."""
        content = b"".join(self.texts[token] or b"" for token in run)
        text.append(_visible(content.decode(errors="replace")))
        run.clear()

    def _append_marked(self, text: Text, original: int, fed: int) -> None:
        name = self._name(original)
        space = " " * (len(name) - len(name.lstrip(" ")))
        text.append(space)
        if fed == self.vocabulary.mask:
            text.append(f"[[{name.lstrip(' ')}]]", style="bold white on red")
        elif fed == original:
            text.append(f"[[={name.lstrip(' ')}]]", style="bold black on green")
        else:
            text.append(f"[[{name.lstrip(' ')}>{self._name(fed).lstrip(' ')}]]", style="bold black on yellow")

    def _name(self, token: int) -> str:
        return self.names.get(token) or _visible((self.texts[token] or b"").decode(errors="replace"))

    def _show_measures(self) -> None:
        """Segment lengths and duplicates over the training rows, or an even sample of them."""
        count = len(self.rows)
        sample = np.unique(np.linspace(0, count - 1, min(count, MEASURED_ROWS)).astype(int))
        lengths: list[int] = []
        row_hashes, segment_hashes = [], []
        tokens = 0
        for chunk in np.array_split(sample, -(-len(sample) // 256)):
            for tokens_L, segments_L in zip(*self.rows.read(chunk), strict=True):
                size_S = np.bincount(segments_L)[1:]
                ends = np.cumsum(size_S)
                lengths += size_S.tolist()
                tokens += int(ends[-1])
                row_hashes.append(hash(tokens_L[: ends[-1]].tobytes()))
                segment_hashes += [
                    hash(tokens_L[end - size : end].tobytes())
                    for end, size in zip(ends.tolist(), size_S.tolist(), strict=True)
                    if size >= SHORTEST_REPEATED
                ]
        of = "all" if len(sample) == count else f"{len(sample):,} of the"
        fill = tokens / (len(sample) * self.rows.manifest.row_length)
        self.console.print(
            f"{of} {count:,} training rows: {100 * fill:.2f} % full; duplicates: {100 * _repeated(row_hashes):.2f} % "
            f"of the rows, {100 * _repeated(segment_hashes):.2f} % of the segments from {SHORTEST_REPEATED} tokens on"
        )
        self.console.print(f"\n{len(lengths):,} segments by length in tokens:")
        for line in histogram(lengths):
            self.console.print(line)


def histogram(lengths: list[int]) -> list[str]:
    """A line for each power of two, with its count and a bar."""
    bins = np.bincount(np.log2(lengths).astype(int))
    first = int(np.flatnonzero(bins)[0])
    lines = []
    for power in range(first, len(bins)):
        label = f"{1 << power}" if power == 0 else f"{1 << power}-{(2 << power) - 1}"
        bar = "#" * int(np.ceil(BAR * bins[power] / bins.max()))
        lines.append(f"{label:>13} {bins[power]:>9,} {bar}".rstrip())
    return lines


def _repeated(hashes: list[int]) -> float:
    return 1 - len(set(hashes)) / max(len(hashes), 1)


def _visible(text: str) -> str:
    """Line ends as a sign, and nothing that a terminal would obey."""
    return "".join(c if c.isprintable() or c == " " else "\u23ce" if c == "\n" else "\u00b7" for c in text)
