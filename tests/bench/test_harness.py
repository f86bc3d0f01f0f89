"""The interleaving, the quotients, and what becomes of a process that dies. No time is asserted."""

import os
import signal

import pytest

from biphasic_jax.bench.harness import Variant, Worker, WorkerDied, interleave, speed_ratio, spread

HERE = os.path.dirname(__file__)


def dummy(name, log, factory="build", **settings):
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    settings = {"name": name, "log": str(log), **settings}
    return Variant(name, f"dummy_variants:{factory}", settings, {"PYTHONPATH": path})


def test_variants_take_turns_and_every_second_round_is_reversed(tmp_path):
    log = tmp_path / "log"
    told = []
    timings = interleave([dummy(name, log) for name in "abc"], rounds=3, warmup=1, tell=told.append)
    assert log.read_text() == "abc" + "abc" + "cba" + "abc"
    assert [step["number"] for step in timings["b"].steps] == [2, 3, 4]
    assert all(seconds > 0 for t in timings.values() for seconds in t.seconds)
    assert timings["a"].facts == {"name": "a"}
    assert timings["a"].memory_bytes > 1 << 20
    assert told[0] == "building a"
    assert told[-1] == "round 3 of 3: c"


def test_a_worker_that_dies_is_named_and_the_others_go_on(tmp_path):
    log = tmp_path / "log"
    variants = [dummy("a", log), dummy("d", log, die_at=2), dummy("c", log)]
    timings = interleave(variants, rounds=3)
    assert timings["d"].failure == "d: its process ended with exit code 7; its last words: the last straw"
    assert timings["d"].steps == []
    assert len(timings["a"].steps) == len(timings["c"].steps) == 3
    assert log.read_text() == "adc" + "adc" + "ca" + "ac"


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ({"factory": "refuse"}, "r: RuntimeError: this machine has no such thing"),
        ({"factory": "absent"}, "r: AttributeError: module 'dummy_variants' has no attribute 'absent'"),
        ({"raise_at": 0}, "r: ValueError: no more of this"),
    ],
)
def test_a_variant_that_cannot_be_built_or_stepped_says_why(tmp_path, variant, reason):
    timings = interleave([dummy("r", tmp_path / "log", **variant), dummy("a", tmp_path / "log")], rounds=1)
    assert timings["r"].failure == reason
    assert len(timings["a"].steps) == 1


def test_a_worker_killed_for_memory_is_told_apart(tmp_path):
    with Worker(dummy("k", tmp_path / "log")) as worker:
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"^k: its process ended with signal 9 \(out of memory\?\)"):
            worker.step()


def test_no_worker_outlives_the_run(tmp_path):
    with Worker(dummy("a", tmp_path / "log")) as worker:
        process = worker.process
        assert process.poll() is None
    assert process.poll() is not None


def test_ratios_are_medians_of_the_quotients_within_a_round():
    # The machine was three times as slow in the second round: the quotient of that round is as good as any.
    ours, other = [1.0, 3.0, 1.0], [2.0, 6.0, 1.5]
    assert speed_ratio(ours, other) == {"median": 2.0, "min": 1.5, "max": 2.0}
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    with pytest.raises(ValueError, match="zip"):
        speed_ratio([1.0], [1.0, 2.0])
