"""The process of one variant: `python -m biphasic_jax.bench.worker MODULE:FUNCTION SETTINGS`.

It builds, says so, and answers each line on stdin (`step`, `memory`) with one line of JSON on stdout. It ends with
its stdin, so no worker outlives its parent.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback
from typing import Any


def peak_memory() -> int:
    """The largest resident memory this process has had, bytes."""
    try:
        with open("/proc/self/status") as status:  # ru_maxrss would count the parent's pages before exec
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not reach the parent as an answer

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    module, _, function = sys.argv[1].partition(":")
    try:
        variant = getattr(importlib.import_module(module), function)(json.loads(sys.argv[2]))
        answer(variant.facts)
        for line in sys.stdin:
            if line.strip() == "memory":
                answer({"bytes": peak_memory()})
                continue
            begin, begin_cores = time.perf_counter(), time.process_time()
            numbers = variant.step()
            seconds, cores = time.perf_counter() - begin, time.process_time() - begin_cores
            answer({"seconds": seconds, "core_seconds": cores, **numbers})
    except Exception as error:
        traceback.print_exc()
        reason = str(error).splitlines()
        answer({"error": f"{type(error).__name__}: {reason[0] if reason else ''}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
