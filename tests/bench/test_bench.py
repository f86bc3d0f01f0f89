"""The verb `bench` from end to end on models of next to nothing. No time is asserted."""

import json

import pytest

from biphasic_jax import __main__
from biphasic_jax.bench import reference, startup, training
from biphasic_jax.bench.harness import Timings, Variant
from biphasic_jax.bench.ours import objective_class
from biphasic_jax.bench.report import markdown
from biphasic_jax.bench.training import flops_of, predicted_speedup, summarise
from biphasic_jax.bench.workload import Workload, batches, make_objective
from biphasic_jax.objectives import registry

MICRO = ["--shapes=2x32", "--vocab-size=64", "--layers=1", "--width=16", "--ff-width=32", "--heads=2"]
MICRO += ["--kv-heads=1", "--head-size=8", "--loss-chunk=16", "--product-size=64", "--rounds=1"]
SPREAD = {"median", "min", "max"}


def bench(*flags):
    return __main__.main(["bench", *flags])


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """For the workers, which inherit it: what is compiled here runs a few times at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        yield


@pytest.fixture(scope="module")
def mlm(tmp_path_factory):
    """(record, Markdown page) of one round of all variants."""
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    assert bench("--train", "--objectives=mlm", *MICRO, f"--out={out}") == 0
    return json.loads(out.read_text()), out.with_suffix(".md").read_text()


def test_the_record_says_what_was_measured_where_and_by_which_command(mlm):
    record, _ = mlm
    assert {"command", "created", "commit", "hardware", "versions", "xla_flags", "load", "train"} == set(record)
    assert set(record["hardware"]) == {"processor", "cores", "memory_bytes", "platform"}
    assert record["versions"]["jax"]
    section = record["train"][0]
    assert section["workload"]["tokens"] == 64
    assert section["rounds"] == 1
    assert [line["name"] for line in section["variants"]] == list(training.LABELS)
    for line in section["variants"]:
        assert line["failure"] == ""
        assert set(line["step_seconds"]) == set(line["mfu"]) == SPREAD
        assert line["tokens_per_second"] > 0
        assert line["memory_bytes"] > 0
    assert [set(product["flops_per_second"]) for product in section["products"]] == [SPREAD, SPREAD]


def test_all_variants_learn_the_same_from_the_same_batches(mlm):
    lines = {line["name"]: line for line in mlm[0]["train"][0]["variants"]}
    for name in ("ours-flags", "no-gather", "full-logits"):
        assert lines[name]["losses"] == pytest.approx(lines["ours"]["losses"], abs=1e-4)
    assert lines["torch-gather"]["losses"] == pytest.approx(lines["torch"]["losses"], abs=1e-4)
    assert lines["torch"]["losses"] == pytest.approx(lines["ours"]["losses"], abs=0.1)  # other random weights
    assert len({line["facts"]["parameters"] for line in lines.values()}) == 1


def test_the_predicted_factor_is_printed_beside_the_measured_one(mlm):
    record, page = mlm
    lines = {line["name"]: line for line in record["train"][0]["variants"]}
    assert lines["no-gather"]["predicted"] == lines["full-logits"]["predicted"] > 1
    assert "predicted" not in lines["torch"]
    row = next(line for line in page.splitlines() if line.startswith("| no-gather |") and line.count("|") == 7)
    assert row.endswith(f"| {lines['no-gather']['predicted']:.2f} |")
    assert record["command"] in page


def test_predicted_factor_by_hand():
    work = Workload(
        rows=1, row_length=8, layers=1, width=4, ff_width=8, heads=1, kv_heads=1, head_size=4, vocab_size=10
    )
    # a token: attention matrices 4 * (2 + 2) * 4, feed-forward 3 * 4 * 8; twice each. Attention 4 * 8 * 4 a token.
    trunk = 8 * (2 * (4 * 4 * 4 + 3 * 4 * 8) + 4 * 8 * 4)
    head = 2 * 4 * 10  # a position
    assert flops_of(work, 8) == 3 * (trunk + 8 * head)
    assert flops_of(work, 3) == 3 * (trunk + 3 * head)
    saved = flops_of(work, 8) - flops_of(work, 3)
    assert predicted_speedup(flops_of(work, 8), saved) == pytest.approx((trunk + 8 * head) / (trunk + 3 * head))


def test_summary_of_known_timings():
    def timings(name, seconds, **facts):
        steps = [{"seconds": s, "core_seconds": 2.0, "loss": 1.0, "flops": 1e9} for s in seconds]
        return Timings(Variant(name, "m:f"), {"parameters": 1, **facts}, steps, 1.0, 5)

    record = summarise(
        Workload(rows=2, row_length=50),
        {
            "ours": timings("ours", [1.0, 2.0, 1.0], flops=2e9),
            "no-gather": timings("no-gather", [2.0, 3.0, 1.5], flops=3e9),
            "torch": Timings(Variant("torch", "m:f"), failure="torch: died"),
            "product-jax": timings("product-jax", [0.5, 1.0, 0.5]),
            "product-numpy": timings("product-numpy", [0.25, 2.0, 1.0]),
        },
        3,
    )
    ours, no_gather, torch = record["variants"]
    assert ours["tokens_per_second"] == 100
    assert ours["mfu"]["median"] == 1.0  # 2e9 a second against 4, 1 and 2e9: 0.5, 1, 1
    assert ours["mfu"]["min"] == 0.5
    assert no_gather["ours_faster"] == {"median": 1.5, "min": 1.5, "max": 2.0}
    assert no_gather["ours_cheaper"]["median"] == 1.0
    assert no_gather["predicted"] == 1.5
    assert torch["failure"] == "torch: died"
    assert "step_seconds" not in torch


def test_without_pytorch_its_lines_say_how_to_install_it(monkeypatch, tmp_path):
    message = f"not installed: torch; {reference.INSTALL}"
    monkeypatch.setattr(training, "missing", lambda: message)
    out = tmp_path / "bench.json"
    assert bench("--train", "--objectives=mlm", "--variants=torch", *MICRO, f"--out={out}") == 0
    record = json.loads(out.read_text())
    assert [line["failure"] for line in record["train"][0]["variants"]] == [message]
    assert message in markdown(record)


def test_a_variant_that_fails_fails_the_command(tmp_path, capsys):
    code = bench("--train", "--objectives=mlm", "--variants=ours-flags", "--xla-flags=--xla_no_such_flag=1", *MICRO)
    assert code == 1
    assert "ours-flags: its process ended with" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--variants=ours,tensorflow", "'tensorflow' is not one of ours"),
        ("--objectives=rtd", "'rtd' is neither mlm nor clm"),
        ("--shapes=8", "write ROWSxLENGTH"),
        ("--shapes=8x0", "write ROWSxLENGTH"),
        ("--rounds=0", "--rounds=0 must be 1 or more"),
        ("--heads=5", "model.heads=5 must be a multiple of model.kv_heads"),
        ("--out=/no/such/folder/bench.json", "there is no folder '/no/such/folder'"),
        ("--out=bench.txt", "give a file that ends in .json"),
        ("--vocab-size=4", "four ids are special"),
    ],
)
def test_flags_that_make_no_sense_are_one_error(flag, words, capsys):
    assert bench("--train", flag) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error


def test_ablations_stay_out_of_the_registry():
    before = registry()
    for head in ("all", "full"):
        cls = objective_class("mlm", head)
        assert make_objective(Workload(), cls).predictions(4096) is None
    assert registry() == before


def test_batches_are_the_objectives_own():
    work = Workload(rows=4, row_length=256)
    (rows, examples), *others = batches(work)
    selected = examples.weights_BxL > 0
    assert 0.25 < selected.mean() < 0.35
    assert (examples.tokens_BxL[selected] == 2).all()
    assert (examples.targets_BxL[selected] == rows.tokens_BxL[selected]).all()
    assert not any((other.tokens_BxL == rows.tokens_BxL).all() for other, _ in others)


def test_data_pipeline_section(tmp_path):
    out = tmp_path / "bench.json"
    flags = ["--data-source=vendored:tiny", "--data-row-length=256", "--data-batch-rows=4", "--data-steps=2"]
    assert bench("--data", "--rounds=1", *flags, f"--out={out}") == 0
    lines = {line["name"]: line for line in json.loads(out.read_text())["data"]["lines"]}
    assert set(lines) == {"clm-0", "mask-0", "bert-0", "exact-0", "prepare"}
    assert all(set(line["tokens_per_second"]) == SPREAD for line in lines.values())
    assert lines["prepare"]["bytes_per_second"]["median"] > 0


def test_train_lines_of_a_file_that_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert startup.train_lines(str(path)) == []
    path.write_text('{"step": 1, "split": "train"}\n{"step": 1, "split": "validation"}\n{"step": 2, "spl')
    assert startup.train_lines(str(path)) == [{"step": 1, "split": "train"}]


def test_startup_section_starts_the_real_verb_with_a_cold_and_a_warm_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BIPHASIC_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "bench.json"
    flags = [f"--config.model.{key}={value}" for key, value in {"layers": 1, "width": 16, "ff_width": 32}.items()]
    flags += ["--config.data.vocab_size=300", "--config.batch.rows=4", "--config.evaluation.rows=4"]
    flags += ["--config.log.tensorboard=false", "--startup-steps=3"]
    assert bench("--startup", "--config=configs/tiny.py", *flags, f"--out={out}") == 0
    section = json.loads(out.read_text())["startup"]
    for cache in ("cold", "warm"):
        assert [phase["objective"] for phase in section["compile"][cache]] == ["clm", "mlm"]
        start = section["start"][cache]
        assert start["steps"] >= 3
        assert start["seconds_to_first_step"] > 0
        assert 0 <= start["data_wait"] <= 1
    assert list((tmp_path / "cache").iterdir()) == [tmp_path / "cache" / "rows"]  # the user's own cache stays as it was


def test_a_run_that_cannot_start_is_one_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BIPHASIC_CACHE", str(tmp_path / "cache"))
    assert bench("--startup", "--config=configs/none.py") == 2
    assert "there is no file 'configs/none.py'" in capsys.readouterr().err
