"""A batch is a function of the step: whatever the workers, the processes, the step one starts from."""

import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from shelf import LENGTH, PAD, config, label, vocabulary, write_rows

import biphasic_jax
from biphasic_jax.data import batches as batches_module
from biphasic_jax.data.batches import evaluation_batches, examples, row_hash, train_batches
from biphasic_jax.data.order import Order
from biphasic_jax.data.shards import Rows
from biphasic_jax.errors import UserError
from biphasic_jax.objectives import collate, registry
from biphasic_jax.recipe import load_config

BERT = {"mask_share": 0.8, "random_share": 0.1, "keep_share": 0.1}


def make(name, seed=5, **changes):
    return registry()[name](changes, vocabulary(), seed, (0, 1000))


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert np.array_equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(str(tmp_path_factory.mktemp("rows")), [20, 30])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_rows(str(tmp_path_factory.mktemp("mixture")), [20, 30], weights=[0.75, 0.25])


def test_a_batch_is_what_its_parts_make_it(rows):
    """Order, rows, transform and collate, put together by hand."""
    c, mlm = config(12), make("mlm", **BERT)
    for step, batch in train_batches(rows, mlm, c, start=7, stop=9, groups=3):
        index = np.arange(step * 12, (step + 1) * 12)
        row, _ = Order(rows.sources, c.seed).locate(index)
        row_batch, transformed = examples(rows, mlm, c, step)
        assert np.array_equal(row_batch.index_B, index)
        assert np.array_equal(row_batch.row_B, row)
        assert np.array_equal(row_batch.tokens_BxL, rows.read(row)[0])
        equal(batch, collate(transformed, row_batch, mlm.predictions(4 * LENGTH), 3))


def test_chunks_change_nothing(rows, monkeypatch):
    whole = [batch for _, batch in train_batches(rows, make("mlm", **BERT), config(12), start=0, stop=3, groups=2)]
    monkeypatch.setattr(batches_module, "CHUNK", 5 * LENGTH)
    parts = [batch for _, batch in train_batches(rows, make("mlm", **BERT), config(12), start=0, stop=3, groups=2)]
    for a, b in zip(whole, parts, strict=True):
        equal(a, b)


@pytest.mark.parametrize("workers", [1, 4])
def test_m7_m8_the_number_of_workers_changes_no_byte(mixture, workers):
    options = {"start": 3, "stop": 12, "groups": 2}
    plain = train_batches(mixture, make("mlm", **BERT), config(8), **options)
    worked = train_batches(mixture, make("mlm", **BERT), config(8), **options, workers=workers)
    for (step, a), (other_step, b) in zip(plain, worked, strict=True):
        assert step == other_step
        equal(a, b)


@pytest.mark.parametrize("name", ["clm", "mlm"])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_m7_r5_h1_processes_share_out_one_global_batch(rows, name, processes):
    c = config(12)
    whole = train_batches(rows, make(name), c, start=2, stop=8, groups=processes)
    slices = [
        train_batches(rows, make(name), c, start=2, stop=8, groups=1, process=p, processes=processes)
        for p in range(processes)
    ]
    for (step, batch), *parts in zip(whole, *slices, strict=True):
        assert all(part_step == step for part_step, _ in parts)
        equal(batch, {key: np.concatenate([part[key] for _, part in parts]) for key in batch})


def test_r1_r5_a_resume_is_arithmetic(rows):
    """From any step on, and with another number of processes in between."""
    c, mlm = config(12), make("mlm")
    straight = dict(train_batches(rows, mlm, c, start=0, stop=14, groups=2))  # over three epochs of 50 rows
    assert list(straight) == list(range(14))
    for start in (1, 5, 13):
        for step, batch in train_batches(rows, mlm, c, start=start, stop=14, groups=2):
            equal(batch, straight[step])
    for p in range(2):
        for step, batch in train_batches(rows, mlm, c, start=9, stop=11, groups=1, process=p, processes=2):
            assert np.array_equal(batch["tokens"], straight[step]["tokens"][6 * p : 6 * p + 6])
    assert list(train_batches(rows, mlm, c, start=4, stop=4, groups=1)) == []
    assert list(train_batches(rows, mlm, c, start=4, stop=4, groups=1, workers=2)) == []


def served(rows, steps, batch_rows):
    """The labels of the rows of some steps, in order."""
    found = train_batches(rows, make("clm"), config(batch_rows), start=0, stop=steps, groups=1)
    return np.concatenate([label(batch["tokens"]) for _, batch in found])


def test_r6_r9_three_epochs_serve_each_row_once_and_no_validation_row(tmp_path):
    for name, cut in (("documents", {"validation": 9}), ("rows", {"held_out": 9})):
        train = write_rows(str(tmp_path / name), [20, 34], **cut)
        held_out = Rows(str(tmp_path / name), "validation")
        n, batch_rows = len(train), 9
        assert n % batch_rows == 0
        assert len(held_out) == (18 if name == "documents" else 9)
        train_labels = set(label(train.read(np.arange(n))[0]))
        held_out_labels = set(label(held_out.read(np.arange(len(held_out)))[0]))
        assert len(train_labels) + len(held_out_labels) == n + len(held_out)
        epochs = served(train, 3 * n // batch_rows, batch_rows).reshape(3, n)
        for epoch in epochs:
            assert set(epoch) == train_labels
        assert not held_out_labels & set(epochs.ravel())
        assert not np.array_equal(epochs[0], epochs[1])


def test_m8_the_mixture_is_realised(mixture):
    labels = served(mixture, 20, 8)
    assert np.sum(labels < 20) == 0.75 * 160
    for end in range(4, 161, 4):
        assert np.sum(labels[:end] < 20) == 0.75 * end


def test_m7_masks_differ_in_each_epoch_and_between_rows(rows):
    c, mlm = config(10), make("mlm", mask_rate=0.5)
    found = [examples(rows, mlm, c, step) for step in range(20)]  # four epochs
    row = np.concatenate([row_batch.row_B for row_batch, _ in found])
    masks = np.concatenate([e.weights_BxL for _, e in found])
    for r in range(50):
        mine = masks[row == r]
        assert len(mine) == 4
        assert all(not np.array_equal(a, b) for a, b in itertools.combinations(mine, 2))
    same = np.mean([np.array_equal(masks[i], masks[i + 1]) for i in range(199)])
    assert same < 0.02


def test_the_seed_of_the_run_fixes_order_and_masks(rows):
    first = {seed: examples(rows, make("mlm", seed), config(12, seed), 0) for seed in (0, 1)}
    assert not np.array_equal(first[0][0].row_B, first[1][0].row_B)
    again = examples(rows, make("mlm", 1), config(12, 1), 0)
    assert np.array_equal(first[1][1].tokens_BxL, again[1].tokens_BxL)


def test_row_hashes_tell_batches_apart(rows, mixture):
    c = config(12)
    hashes = [row_hash(rows, c, step) for step in range(30)]
    assert len(set(hashes)) == 30
    assert all(len(h) == 8 and set(h) <= set("0123456789abcdef") for h in hashes)
    assert row_hash(rows, c, 3) == hashes[3]
    assert row_hash(rows, config(12, seed=6), 3) != hashes[3]
    assert row_hash(rows, config(13), 3) != hashes[3]
    assert row_hash(mixture, c, 3) != hashes[3]


def test_a_batch_that_cannot_be_divided_is_an_error(rows):
    with pytest.raises(UserError, match=r"batch\.rows=10 must be a multiple of 6"):
        train_batches(rows, make("clm"), config(10), start=0, stop=1, groups=2, processes=3)
    with pytest.raises(UserError, match=r"batch\.rows=10 must be a multiple of 3"):
        examples(rows, make("clm"), config(10), 0, processes=3)
    with pytest.raises(ValueError, match="batch_rows=10 is not a multiple"):
        next(evaluation_batches(rows, make("clm"), rows_limit=0, batch_rows=10, groups=3))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_row_is_named(tmp_path, workers):
    rows = write_rows(str(tmp_path), [6])
    shard = tmp_path / "train-0-00000.arrayrecord"
    data = bytearray(shard.read_bytes())
    data[data.index(bytes(rows.read(np.array([3]))[0][0, 3:9].astype("<u2").tobytes()))] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match=r"train-0-00000\.arrayrecord: record 3 is damaged"):
        list(
            train_batches(
                Rows(str(tmp_path), "train"), make("clm"), config(6), start=0, stop=3, groups=1, workers=workers
            )
        )


def workers_of_this_process():
    return [p for p in psutil.Process().children() if any("spawn_main" in word for word in p.cmdline())]


def test_a_dead_worker_is_a_clear_error_and_closing_ends_the_others(rows):
    before = {p.pid for p in workers_of_this_process()}
    iterator = train_batches(rows, make("clm"), config(10), start=0, stop=10**6, groups=1, workers=2)
    next(iterator), next(iterator)
    workers = [p for p in workers_of_this_process() if p.pid not in before]
    assert len(workers) == 2
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides what a signal means
        workers[0].send_signal(number)
    assert len([step for step, _ in itertools.islice(iterator, 40)]) == 40
    workers[0].kill()
    with pytest.raises(RuntimeError, match=r"one of 2 data workers died.*exit code -9.*lower config.data.workers"):
        for _ in iterator:
            pass
    assert not psutil.wait_procs(workers, timeout=10)[1]


def test_a_worker_ends_when_its_parent_is_killed(rows, tmp_path):
    """Nobody else would end it: it would wait for ever for its batch to be fetched."""
    script = tmp_path / "parent.py"
    script.write_text(
        f"import sys; sys.path[:0] = {[os.path.dirname(__file__), os.path.dirname(biphasic_jax.__path__[0])]!r}\n"
        "from shelf import config, vocabulary\n"
        "from biphasic_jax.data.batches import train_batches\n"
        "from biphasic_jax.data.shards import Rows\n"
        "from biphasic_jax.objectives import registry\n"
        "if __name__ == '__main__':\n"
        f"    rows = Rows({rows.folder!r}, 'train')\n"
        "    clm = registry()['clm']({}, vocabulary(), 0, (0, 9))\n"
        "    it = train_batches(rows, clm, config(10), start=0, stop=10**6, groups=1, workers=1)\n"
        "    print(next(it)[0], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout.readline() == b"0\n"
    workers = [p for p in psutil.Process(parent.pid).children() if any("spawn_main" in w for w in p.cmdline())]
    assert len(workers) == 1
    parent.kill()
    parent.communicate()
    assert not psutil.wait_procs(workers, timeout=10)[1]


OBJECTIVE = """
import numpy as np
from biphasic_jax.config import default_config, phase
from biphasic_jax.objectives import Examples, Objective

class Backwards(Objective):
    name = "backwards"
    def transform(self, rows, step):
        return Examples(rows.tokens_BxL[:, ::-1], rows.tokens_BxL, np.ones(rows.tokens_BxL.shape, np.float32))

def get_config():
    c = default_config()
    c.data.sources = ("none",)
    c.phases = (phase("backwards", steps=3),)
    return c
"""


def test_an_objective_of_a_config_file_reaches_the_workers(rows, tmp_path):
    (tmp_path / "recipe.py").write_text(OBJECTIVE)
    load_config(str(tmp_path / "recipe.py"), (), registry)
    options = {"start": 0, "stop": 2, "groups": 1}
    plain = train_batches(rows, make("backwards"), config(5), **options)
    worked = train_batches(rows, make("backwards"), config(5), **options, workers=1)
    for (_, a), (_, b) in zip(plain, worked, strict=True):
        equal(a, b)


def test_m9_evaluation_masks_never_change(rows):
    """The same for any batch size: a row's mask hangs on its number and the evaluation's seed."""
    mlm = make("mlm", seed=1234)

    def masks(batch_rows, limit=0):
        found = evaluation_batches(rows, mlm, rows_limit=limit, batch_rows=batch_rows, groups=1)
        return np.concatenate([batch["tokens"] for batch in found])

    whole = masks(50)
    assert np.array_equal(whole, masks(50))
    for batch_rows, limit in ((1, 0), (7, 0), (16, 0), (7, 20), (64, 33)):
        some = masks(batch_rows, limit)
        n = limit or 50
        assert len(some) == -(-n // batch_rows) * batch_rows
        assert np.array_equal(some[:n], whole[:n])
        assert np.all(some[n:] == PAD)


def test_e11_the_last_partial_batch_is_filled_with_nothing(rows):
    found = list(evaluation_batches(rows, make("mlm"), rows_limit=0, batch_rows=16, groups=2))
    assert len(found) == 4
    assert {key: value.shape for key, value in found[0].items()} == {key: v.shape for key, v in found[3].items()}
    assert np.sum(found[3]["segments"].any(axis=1)) == 2
    assert found[3]["weights"][1].sum() == 0
    assert found[3]["counts/selected"][2:].sum() == 0


def test_h2_all_processes_have_as_many_evaluation_batches(rows):
    whole = list(evaluation_batches(rows, make("mlm"), rows_limit=33, batch_rows=16, groups=2))
    parts = [
        list(evaluation_batches(rows, make("mlm"), rows_limit=33, batch_rows=16, groups=1, process=p, processes=2))
        for p in range(2)
    ]
    for batch, *slices in zip(whole, *parts, strict=True):
        equal(batch, {key: np.concatenate([part[key] for part in slices]) for key in batch})


def test_a_few_evaluation_rows_hold_each_source(rows):
    """20 rows of one source and 30 of the other: any prefix holds about 2 in 5 of the first."""
    for limit in (5, 10, 25):
        found = evaluation_batches(rows, make("clm"), rows_limit=limit, batch_rows=5, groups=1)
        labels = np.concatenate([label(batch["tokens"]) for batch in found])
        assert abs(np.sum(labels < 20) - 0.4 * limit) <= 1
        assert np.all(np.diff(labels[labels < 20]) == 1)
