"""The run folder: who may write into it, which config it belongs to, and what is recorded there.

config.json  plan.json  environment.json  tokenizer.json  resumes.jsonl  metrics.jsonl
checkpoints/STEP/  tensorboard/  report.md
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from biphasic_jax.config import FREE_KEYS, differences, to_dict
from biphasic_jax.data.manifest import write_whole
from biphasic_jax.errors import UserError
from biphasic_jax.plan import Plan, content_key

# What `--override-schedule` may change in a run that has begun.
SCHEDULE_KEYS = re.compile(
    r"phases\[\d+\]\.(steps|warmup|decay|learning_rate)$|schedule\.|budget_|optimizer\.learning_rate$|guards\."
)


class RunFolder:
    """Made where it is missing, and locked: one process at a time trains in it."""

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        try:
            os.makedirs(self.path, exist_ok=True)
            self._lock = open(self.file(".lock"), "a+")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"--workdir={path}: cannot be written ({error.strerror}); give another folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it, however the process ends
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            raise UserError(
                f"--workdir={path}: {owner} is training there; wait for it, or give another folder"
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()}")
        self._lock.flush()

    def file(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def close(self) -> None:
        self._lock.close()

    def write(self, name: str, text: str) -> None:
        write_whole(self.file(name), text.encode())

    def record(self, start: Mapping[str, Any]) -> None:
        """Adds a line to resumes.jsonl: how this start of the run came about."""
        with open(self.file("resumes.jsonl"), "a") as file:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **start}) + "\n")


def changed_keys(stored: Mapping[str, Any], config: ConfigDict) -> list[str]:
    """`key: old -> new` for every key that decides the weights and differs from the checkpoint's config."""
    lines = differences(dict(stored), to_dict(config))
    return [line for line in lines if not any(re.match(rf"{re.escape(key)}[.:\[]", line) for key in FREE_KEYS)]


def check_config(workdir: str, meta: Mapping[str, Any], config: ConfigDict, override_schedule: bool) -> list[str]:
    """The changes that `--override-schedule` lets pass; `UserError` where there are others, or it was not given."""
    changes = changed_keys(meta["config"], config)
    if not changes:
        return []
    refused = [line for line in changes if not (override_schedule and SCHEDULE_KEYS.match(line.split(":")[0]))]
    if refused:
        others = [line for line in refused if not SCHEDULE_KEYS.match(line.split(":")[0])]
        mend = "give the old values, or another --workdir"
        if not others:
            mend += ", or --override-schedule to go on with the new ones"
        raise UserError(f"--workdir={workdir}: this run began with another config: {'; '.join(refused)}: {mend}")
    return changes


def plan_facts(config: ConfigDict, plan: Plan, fingerprint: str, parent: str) -> dict[str, Any]:
    """What plan.json holds: phases with the content key of their end, and the spans of the learning rate."""
    phases = [
        {
            **to_dict(vars(phase)),
            "content_key": content_key(config, plan, phase.end, fingerprint, parent),
        }
        for phase in plan.phases
    ]
    return {"start": plan.start, "end": plan.end, "phases": phases, "spans": [vars(span) for span in plan.spans]}
