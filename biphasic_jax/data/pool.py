"""Runs units over processes, shows how far they are, and stops cleanly on an error or Ctrl-C."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_end
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from tokenizers import Tokenizer

from biphasic_jax.data.pack_unit import Recipe, UnitResult, pack_unit
from biphasic_jax.data.sources import Unit
from biphasic_jax.errors import Interrupted, UserError

Job = tuple[Unit, str]  # a unit and its key


def run_units(
    jobs: Sequence[Job], recipe: Recipe, tokenizer: Tokenizer, folder: str, workers: int, finished_bytes: int
) -> list[UnitResult]:
    """Packs the units, in any order. `finished_bytes`: text of the units that an earlier run finished.

    Raises the first `UserError` of a unit; `Interrupted` on Ctrl-C. What was finished stays.
    """
    workers = min(workers, len(jobs))
    with _Display(sum(unit.text_bytes for unit, _ in jobs), finished_bytes) as display:
        try:
            if workers <= 1:
                return [
                    pack_unit(unit, key, recipe, tokenizer, folder, lambda *counts: display.add(unit, *counts))  # noqa: B023
                    for unit, key in jobs
                ]
            return _run_in_processes(jobs, recipe, tokenizer, folder, workers, display)
        except KeyboardInterrupt:
            raise Interrupted("prepare stopped; the same command takes up from the last finished unit") from None


def _run_in_processes(
    jobs: Sequence[Job], recipe: Recipe, tokenizer: Tokenizer, folder: str, workers: int, display: "_Display"
) -> list[UnitResult]:
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of whoever calls
    counts, stop = context.SimpleQueue(), context.Event()
    start = (tokenizer.to_str(), recipe, folder, counts, stop)
    results = []
    # The largest first, so that no core is left with a large one at the end.
    order = sorted(range(len(jobs)), key=lambda i: (-jobs[i][0].text_bytes, i))
    with ProcessPoolExecutor(workers, context, _start_worker, start) as executor:
        try:
            pending = {executor.submit(_work, i, *jobs[i]) for i in order}
            while pending:
                done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                while not counts.empty():
                    index, *further = counts.get()
                    display.add(jobs[index][0], *further)
                results += [future.result() for future in done]
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died, of memory perhaps; the same command takes up from here, --workers=1 needs least"
            ) from error
        finally:
            stop.set()
            # Waits: a worker that is still starting needs what this process would take down.
            executor.shutdown(wait=True, cancel_futures=True)
    return results


_worker: dict[str, Any] = {}


def _start_worker(tokenizer_json: str, recipe: Recipe, folder: str, counts: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: there is a process a core
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    _worker.update(tokenizer=tokenizer, recipe=recipe, folder=folder, counts=counts, stop=stop)


def _end_with(sentinel: int) -> None:
    """Ends this process when its parent is gone: a killed parent cannot tell its workers."""
    wait_for_end([sentinel])
    os._exit(1)


def _work(index: int, unit: Unit, key: str) -> UnitResult:
    def report(*counts: int) -> None:
        if _worker["stop"].is_set():
            raise Interrupted("stopped by the parent")
        _worker["counts"].put((index, *counts))

    return pack_unit(unit, key, _worker["recipe"], _worker["tokenizer"], _worker["folder"], report)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        seconds = task.elapsed or 0.0
        rate = task.fields["tokens"] / seconds if seconds else 0.0
        return Text(f"{task.fields['documents']:,} documents  {rate / 1e6:.2f} M tokens/s", no_wrap=True)


class _Display:
    """A progress bar in estimated bytes of text; a unit never counts for more than its estimate."""

    def __init__(self, pending_bytes: int, finished_bytes: int):
        columns = (TextColumn("{task.description}"), BarColumn(24), _Rate(), TimeRemainingColumn(compact=True))
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(
            "packing", total=pending_bytes + finished_bytes, completed=finished_bytes, documents=0, tokens=0
        )
        self._seen: dict[int, int] = {}
        self._documents, self._tokens = 0, 0

    def add(self, unit: Unit, documents: int, tokens: int, text_bytes: int) -> None:
        seen = self._seen.get(unit.number, 0)
        advance = min(text_bytes, max(unit.text_bytes - seen, 0))
        self._seen[unit.number] = seen + text_bytes
        self._documents += documents
        self._tokens += tokens
        self._progress.update(self._task, advance=advance, documents=self._documents, tokens=self._tokens)

    def __enter__(self) -> "_Display":
        self._progress.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._progress.update(self._task, completed=self._progress.tasks[0].total)
        else:
            self._progress.live.transient = True  # an error stands alone on stderr
        self._progress.stop()
