import json
import math

import numpy as np
import pytest

from biphasic_jax.errors import UserError
from biphasic_jax.train.metrics import Clock, MetricsFile, TensorBoard, train_line

VALUES = {
    "loss_sum": np.float32(30.0),
    "weight_sum": np.float32(10.0),
    "sums/z_loss": np.float32(2.0),
    "sums/correct": np.float32(4.0),
    "counts/candidates": np.int32(40),
    "counts/selected": np.int32(10),
    "counts/masked": np.int32(8),
    "counts/random": np.int32(1),
    "counts/kept": np.int32(1),
    "counts/documents_without_target": np.int32(3),
    "tokens": np.int32(50),
    "grad_norm": np.float32(0.5),
    "learning_rate": np.float32(0.25),
    "finite": np.bool_(True),
}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(str(tmp_path / "m.jsonl"))
    file.write({"step": 1, "loss": 2.5})
    assert read(tmp_path / "m.jsonl") == [{"step": 1, "loss": 2.5}]
    file.close()


def test_opening_at_a_position_drops_what_lies_behind_it(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(str(path))
    file.write({"step": 1})
    position = file.position()
    file.write({"step": 2})
    file.write({"step": 3})
    file.close()
    file = MetricsFile(str(path), position)
    assert file.position() == position
    file.write({"step": 2})
    file.close()
    assert [line["step"] for line in read(path)] == [1, 2]
    MetricsFile(str(path)).close()  # a run that begins anew
    assert path.read_text() == ""


def test_a_file_that_is_too_short_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="earlier lines are lost"):
        MetricsFile(str(tmp_path / "m.jsonl"), 100).close()


def test_what_is_not_finite_is_null(tmp_path):
    file = MetricsFile(str(tmp_path / "m.jsonl"))
    file.write({"loss": math.nan, "grad_norm": math.inf, "mask_rate": None})
    file.close()
    assert read(tmp_path / "m.jsonl") == [{"loss": None, "grad_norm": None, "mask_rate": None}]


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=r"m\.jsonl"):
        MetricsFile(str(tmp_path / "missing" / "m.jsonl"))


def test_a_train_line_divides_once_and_names_shares():
    line = train_line(VALUES, seconds=2.0, waited=0.5, mfu=0.3)
    assert line["loss"] == 2.8  # without the z-loss
    assert line["targets"] == 10
    assert line["accuracy"] == 0.4
    assert line["tokens_per_second"] == 25
    assert line["data_wait"] == 0.25
    assert (line["realised_rate"], line["masked_share"], line["random_share"], line["kept_share"]) == (
        0.25,
        0.8,
        0.1,
        0.1,
    )
    assert line["documents_without_target"] == 3


def test_a_train_line_without_targets_has_no_shares():
    empty = VALUES | {"loss_sum": 0.0, "weight_sum": 0.0, "sums/z_loss": 0.0, "counts/selected": 0, "sums/correct": 0.0}
    line = train_line(empty, 1.0, 0.0, 0.0)
    assert (line["loss"], line["targets"], line["accuracy"], line["masked_share"]) == (0, 0, None, None)


def test_the_clock_leaves_pauses_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock()
    now[0] = 1.0
    assert clock.lap() == 1.0
    now[0] = 11.0
    clock.restart()
    now[0] = 11.5
    assert clock.lap() == 0.5


def test_tensorboard_events_are_written(tmp_path):
    board = TensorBoard(str(tmp_path), 0)
    board.write({"step": 1, "phase": 0, "objective": "clm", "split": "train", "loss": 2.0, "rows": "abc"})
    board.write({"step": 1, "phase": 0, "objective": "mlm", "split": "validation", "mask_rate": 0.4, "loss": 2.0})
    board.close()
    (events,) = tmp_path.iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content
    assert b"validation/mlm_0.4/loss" in content
