"""The verb `train`, and the loop. Nothing heavy is imported before the stop flag is in place.

"Step k" is the state after k updates. At each step, in this order:

    evaluate   first, so that a checkpoint can say that its step has been evaluated
    save       before anything else can go wrong; a stop is heeded here, right after a complete state
    enter      a new phase: compile and probe, only once its start is on disk
    fetch      the batch that the step's number names; the device is still busy with the last update
    update     sent off, not waited for
    record     the update before it: its numbers are ready, so the device never waits for the host
"""

import argparse
import time
from typing import TYPE_CHECKING, Any

from biphasic_jax.errors import Interrupted, UserError
from biphasic_jax.train.signals import StopFlag

if TYPE_CHECKING:
    from biphasic_jax.train.program import Program
    from biphasic_jax.train.setup import Run
    from biphasic_jax.train.state import TrainState

DESCRIPTION = """\
Runs the phases of a config. The same command goes on where the last one stopped, whatever stopped it.

  python -m biphasic_jax train --config=configs/tiny.py --workdir=runs/tiny
  python -m biphasic_jax train --config=configs/tiny.py --workdir=runs/other \\
      --config.seed=1 --config.phases[1].mask_rate=0.4 --config.optimizer.learning_rate=1e-3
  python -m biphasic_jax train --config=configs/tiny.py --print-config

Ctrl-C or SIGTERM ends it after a complete checkpoint, with exit code 83. The run folder then holds config.json,
plan.json, environment.json, metrics.jsonl, tensorboard/, checkpoints/STEP/ and, at the end, report.md.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--config", required=True, metavar="FILE[:ARG]", help="a Python file with get_config()")
    parser.add_argument("--workdir", metavar="DIR", help="the run's folder; made where it is missing")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as JSON, and exit")
    parser.add_argument(
        "--override-schedule",
        action="store_true",
        help="go on with other phase lengths, schedule, learning rate or guards than the run began with; recorded",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def main(args: argparse.Namespace) -> int:
    stop = StopFlag().install()
    try:
        return _main(args, stop)
    finally:
        stop.restore()


def _main(args: argparse.Namespace, stop: StopFlag) -> int:
    from biphasic_jax.config import to_json
    from biphasic_jax.objectives import registry
    from biphasic_jax.recipe import load_config

    config = load_config(args.config, args.overrides, registry)
    if args.print_config:
        print(to_json(config))
        return 0
    if not args.workdir:
        raise UserError("train needs --workdir=DIR, where the run is kept")

    from biphasic_jax.train.compilation import enable_compilation_cache
    from biphasic_jax.train.mesh import use_mesh
    from biphasic_jax.train.run_folder import RunFolder
    from biphasic_jax.train.setup import set_up
    from biphasic_jax.train.summary import print_summary, write_start

    begin = time.perf_counter()
    enable_compilation_cache()
    folder = RunFolder(args.workdir)
    try:
        try:
            run, state = set_up(folder, config, args.override_schedule)
        except Exception as error:
            if stop():  # the signal reached worker processes of `prepare` too
                raise Interrupted("stopped before there was a state to save; the same command begins again") from error
            raise
        try:
            write_start(run)
            if not args.quiet:
                print_summary(run)
            with use_mesh(run.mesh):
                Loop(run, state, stop, args.quiet, begin).train()
        finally:
            run.checkpointer.close()  # waits: no way out leaves a save half done
    finally:
        folder.close()
    return 0


class Loop:
    """The state of a run while it runs, and what is counted along the way."""

    def __init__(self, run: "Run", state: "TrainState", stop: StopFlag, quiet: bool, begin: float):
        from biphasic_jax.train.recorder import Recorder

        meta = run.start.meta if run.start.mode == "resume" else {}
        self.run, self.state, self.stop = run, state, stop
        self.step = run.start.step
        self.saved = self.step if meta else None
        self.evaluated = meta.get("evaluated_step")
        self.saved_at = time.monotonic()
        self.program: Program | None = None
        self.batches: Any = None  # a generator of (step, batch)
        self.pending: tuple[int, Any, float] | None = None  # step, metrics on the device, seconds waited for data
        self.recorder = Recorder(run, meta, quiet)
        self.evaluator = _make_evaluator(run)
        self.quiet, self.begin = quiet, begin

    def train(self) -> None:
        """To the plan's end. Raises `Interrupted` after a complete checkpoint where a stop was asked for."""
        try:
            while True:
                self.evaluate()
                self.save()
                if self.stop() or self.step == self.run.plan.end:
                    break
                if not self.enter_phase():
                    continue
                fetched = self.fetch()
                if fetched is None:
                    continue
                self.update(*fetched)
            self.save()  # a stop may have come after the save above
            self.run.checkpointer.wait()
        finally:
            self.leave_phase()
            self.recorder.close()
        if self.stop():
            raise Interrupted(
                f"stopped at step {self.step} with a complete checkpoint in {self.run.checkpointer.path(self.step)}; "
                f"the same command goes on from there"
            )
        self.report()

    def evaluate(self) -> None:
        config, plan, step = self.run.config, self.run.plan, self.step
        every = config.evaluation.every
        due = step in {phase.end for phase in plan.phases} or (every and step % every == 0 and step > plan.start)
        due = due or (step == plan.start and bool(config.init.checkpoint))  # what the other run hands over
        if not due or step == self.evaluated or self.evaluator is None or self.stop():
            return
        self.flush()
        phase = plan.phase_of_update(max(step - 1, plan.start)).index
        lines = self.evaluator.run(self.state.params, step=step, phase=phase, should_stop=self.stop)
        if lines is not None:  # else it was cut short: `evaluated` stays behind, and a resume does it again
            self.recorder.validation(lines)
            self.evaluated = step
        self.recorder.clock.restart()

    def save(self) -> None:
        c, plan, step = self.run.config.checkpoint, self.run.plan, self.step
        due = step in {phase.end for phase in plan.phases} or self.stop() or (step == plan.start and c.step_zero)
        due = due or bool(c.every and step > plan.start and step % c.every == 0)
        due = due or bool(c.minutes and time.monotonic() - self.saved_at > 60 * c.minutes)
        self.run.checkpointer.check()  # of the last one: what comes after a save that failed may be lost
        if not due or step == self.saved:
            return
        self.flush()  # also: a non-finite update stops the run before it becomes the newest checkpoint
        meta = self.run.meta(step) | {"evaluated_step": self.evaluated} | self.recorder.meta()
        self.run.checkpointer.save(step, self.state, meta, self.run.tokenizer_json)
        self.saved, self.saved_at = step, time.monotonic()
        self.recorder.clock.restart()

    def enter_phase(self) -> bool:
        """Compiles where a phase begins or is taken up; False if a stop was asked for meanwhile."""
        from biphasic_jax.train.program import compile_phase, reset_optimizer

        phase = self.run.plan.phase_of_update(self.step)
        if self.program is not None and self.program.phase == phase:
            return True
        self.flush()
        self.leave_phase()
        if self.step == phase.start and phase.optimizer == "reset":
            self.state = reset_optimizer(self.run, self.state)
        self.program, self.state = compile_phase(self.run, phase, self.state)
        self.batches = self.program.batches(self.step)
        self.recorder.progress.say(f"{self.program}, {time.perf_counter() - self.begin:.1f} s after the start")
        self.recorder.clock.restart()
        return not self.stop()

    def leave_phase(self) -> None:
        """Ends the threads or processes that work ahead on batches."""
        if self.batches is not None:
            self.batches.close()
        self.program = self.batches = None

    def fetch(self) -> tuple[Any, float] | None:
        """The batch of this step and the seconds it took; None if a stop came in between."""
        begin = time.perf_counter()
        try:
            step, batch = next(self.batches)
        except Exception:
            if self.stop():  # Ctrl-C reaches data workers too, and they end at once
                return None
            raise
        assert step == self.step, f"the pipeline gave batch {step} at step {self.step}"
        return batch, time.perf_counter() - begin

    def update(self, batch: Any, waited: float) -> None:
        assert self.program is not None
        self.state, metrics = self.program.update(self.state, batch)
        self.flush()
        self.step += 1
        self.pending = (self.step, metrics, waited)

    def flush(self) -> None:
        """Writes down the update whose numbers are still on the device."""
        if self.pending is None:
            return
        assert self.program is not None
        (step, metrics, waited), self.pending = self.pending, None
        self.recorder.train(self.program, step, metrics, waited)

    def report(self) -> None:
        from biphasic_jax.train.report import write_report

        path, lines = write_report(self.run.folder.path)
        if not self.quiet:
            print("\n".join([*lines, f"report: {path}"]))


def _make_evaluator(run: "Run") -> Any:
    from biphasic_jax.train.evaluator import Evaluator
    from biphasic_jax.train.mesh import batch_shards, place_batch

    if not len(run.validation):
        return None
    return Evaluator(
        run.model,
        run.config,
        run.vocabulary,
        run.validation,
        groups=batch_shards(run.mesh),
        place=lambda batch: place_batch(run.mesh, batch),
    )
