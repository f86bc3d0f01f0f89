"""`prepare` as users run it: accounting, kills, several workers, full disks, folders that are not its own."""

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from biphasic_jax.config import default_config
from biphasic_jax.data.build import Settings, build_rows
from biphasic_jax.data.documents import documents
from biphasic_jax.data.manifest import read_manifest
from biphasic_jax.data.pack_unit import held_out
from biphasic_jax.data.prepare import ensure_rows
from biphasic_jax.data.shards import Rows
from biphasic_jax.data.sources import UNIT_BYTES, Piece
from biphasic_jax.data.tokenizer import load_tokenizer, vocabulary_of
from biphasic_jax.errors import UserError

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORDS = [f"w{i}" for i in range(2000)]
UNITS = 6


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "biphasic_jax", "prepare", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def run(*arguments, code=0, **options):
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out if code == 0 else err


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with six units of text and a fast tokenizer for it."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    (folder / "text").mkdir()
    for unit in range(UNITS):
        with open(folder / "text" / f"{unit}.jsonl", "w") as file:
            while file.tell() < UNIT_BYTES * 0.9:
                text = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(1, 800)))
                file.write(json.dumps({"text": text}) + "\n")
    vocabulary = {name: i for i, name in enumerate(["</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def arguments(corpus, out, workers=2, segments="documents"):
    return (
        f"--source={corpus}/text", f"--out={out}", f"--tokenizer={corpus}/tokenizer.json", "--row-length=256",
        f"--segments={segments}", "--validation=0.02", "--seed=3", f"--workers={workers}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "rows"
    run(*arguments(corpus, out, workers=1))
    return out


def content(folder):
    """name -> bytes of all that a reader could see."""
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder)) if name != ".lock"}


def texts_of(corpus):
    for unit in range(UNITS):
        yield from documents(Piece("jsonl", f"{corpus}/text/{unit}.jsonl", 0, 1, 0), "text")


def all_tokens(folder, split):
    rows = Rows(str(folder), split)
    tokens_BxL, segments_BxL = rows.read(np.arange(len(rows)))
    return tokens_BxL[segments_BxL > 0]


def test_p7_every_token_of_the_corpus_is_in_the_rows(corpus, undisturbed):
    tokenizer = load_tokenizer(f"{corpus}/tokenizer.json")
    expected = {"train": np.zeros(2003, int), "validation": np.zeros(2003, int)}
    documents_read = 0
    for text in texts_of(corpus):
        side = "validation" if held_out(text, 3, 0.02) else "train"
        ids = [tokenizer.token_to_id(word) for word in text.split()]
        np.add.at(expected[side], [*ids, 0], 1)
        documents_read += 1
    for split, counts in expected.items():
        assert np.array_equal(np.bincount(all_tokens(undisturbed, split), minlength=2003), counts)
    a = read_manifest(str(undisturbed)).accounting
    assert a.documents == documents_read
    assert a.bytes == sum(len(text.encode()) for text in texts_of(corpus))
    assert a.tokens_in == sum(counts.sum() for counts in expected.values())
    assert (a.tokens_in, a.tokens_dropped) == (a.tokens_packed, 0)
    rows = sum(len(Rows(str(undisturbed), split)) for split in expected)
    assert a.padding == rows * 256 - a.tokens_packed


def test_the_held_out_share_is_by_document(corpus, undisturbed):
    manifest = read_manifest(str(undisturbed))
    assert manifest.validation["cut"] == "documents"
    assert manifest.validation["rows"] == len(Rows(str(undisturbed), "validation"))
    sides = [held_out(text, 3, 0.02) for text in texts_of(corpus)]
    assert abs(np.mean(sides) - 0.02) < 5 * (0.02 * 0.98 / len(sides)) ** 0.5
    assert held_out("the same", 1, 0.5) == held_out("the same", 1, 0.5)
    assert not held_out("any", 0, 0.0)


def test_any_number_of_workers_writes_the_same_bytes(corpus, undisturbed, tmp_path):
    summary = run(*arguments(corpus, tmp_path / "rows", workers=3))
    assert content(tmp_path / "rows") == content(undisturbed)
    files = [shard.file for shard in read_manifest(str(tmp_path / "rows")).sources[0].train]
    assert files == [f"train-{unit:05d}.arrayrecord" for unit in range(UNITS)]
    assert re.search(r"tokens dropped +0", summary)
    assert re.search(r"rows are 9\d\.\d+ % full", summary)


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_a_killed_run_is_taken_up_and_ends_in_the_same_bytes(corpus, undisturbed, tmp_path):
    """kill -9 of the parent at several moments: its workers end too, finished units stay, half files go."""
    out = tmp_path / "rows"
    for finished in (0, 2, 4):
        process = start(*arguments(corpus, out))
        wait_for(lambda n=finished: len(list(out.glob("unit-*.json"))) >= n and list(out.glob("*.tmp")), process)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        assert not (out / "manifest.json").exists()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("unit-*.json")}
    assert len(kept) >= 4
    run(*arguments(corpus, out))
    assert content(out) == content(undisturbed)
    assert all((out / name).stat().st_mtime_ns == when for name, when in kept.items())


def test_ctrl_c_stops_with_its_own_code_and_is_taken_up(corpus, undisturbed, tmp_path):
    out = tmp_path / "rows"
    process = start(*arguments(corpus, out))
    parent = psutil.Process(process.pid)
    while True:  # a little at a time, or a fast machine is done before the signal arrives
        workers = parent.children(recursive=True)
        for worker in workers:
            worker.suspend()
        if list(out.glob("unit-*.json")):
            break
        for worker in workers:
            worker.resume()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    for worker in workers:
        worker.resume()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 83, err
    assert "Traceback" not in err
    assert not psutil.wait_procs(workers, timeout=10)[1]
    run(*arguments(corpus, out))
    assert content(out) == content(undisturbed)


def test_a_full_disk_is_one_error_and_is_taken_up(corpus, undisturbed, tmp_path):
    """The limit on the size of files stands for the disk: both are an error of the write."""
    out = tmp_path / "rows"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # noqa: E731
    for workers in (1, 2):
        err = run(*arguments(corpus, out, workers), code=2, preexec_fn=limit)
        assert re.search(r"error: .*rows/\S+ cannot be written \(.*\); make room", err)
        assert "Traceback" not in err
        assert not list(out.glob("*.arrayrecord"))
        assert not list(out.glob("*.tmp"))
    run(*arguments(corpus, out))
    assert content(out) == content(undisturbed)


def test_two_processes_on_one_folder(corpus, undisturbed, tmp_path):
    both = [start(*arguments(corpus, tmp_path / "rows", workers=1)) for _ in range(2)]
    ends = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert sum("complete already" in out for out, _ in ends) == 1
    assert content(tmp_path / "rows") == content(undisturbed)


def test_a_complete_folder_is_left_alone(corpus, undisturbed):
    before = {path.name: path.stat().st_mtime_ns for path in undisturbed.iterdir()}
    assert "complete already" in run(*arguments(corpus, undisturbed))
    assert {path.name: path.stat().st_mtime_ns for path in undisturbed.iterdir()} == before


def test_other_settings_in_one_folder_are_an_error_that_names_them(corpus, undisturbed):
    before = content(undisturbed)
    changed = [a.replace("=256", "=128").replace("documents", "row") for a in arguments(corpus, undisturbed)]
    err = run(*changed, code=2)
    assert "row_length: 256 -> 128" in err
    assert "segments: 'documents' -> 'row'" in err
    assert content(undisturbed) == before


def test_a_lost_or_cut_shard_is_made_again(corpus, undisturbed, tmp_path):
    out = tmp_path / "rows"
    shutil.copytree(undisturbed, out)
    (out / "train-00001.arrayrecord").unlink()
    with open(out / "train-00004.arrayrecord", "r+b") as file:
        file.truncate(1000)
    untouched = (out / "train-00000.arrayrecord").stat().st_mtime_ns
    run(*arguments(corpus, out))
    assert content(out) == content(undisturbed)
    assert (out / "train-00000.arrayrecord").stat().st_mtime_ns == untouched


def small(tmp_path, texts, **changes):
    """Settings for a few documents with a tokenizer trained on them."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Settings(**{**dict(sources=(str(path),), tokenizer="", vocab_size=270, row_length=16, segments="documents",
                              validation=0.2, seed=0, mask_token="auto"), **changes})  # fmt: skip


def test_a_mended_input_is_taken_up(tmp_path):
    settings = small(tmp_path, [f"good {i}" for i in range(20)])
    path = tmp_path / "x.jsonl"
    good = path.read_text()
    path.write_text(good + "bad\n")
    with pytest.raises(UserError, match=r"x.jsonl: line 21: not JSON"):
        build_rows(settings, str(tmp_path / "rows"), 1)
    path.write_text(good)
    manifest, already = build_rows(settings, str(tmp_path / "rows"), 1)
    assert not already
    assert manifest.accounting.documents == 20


def test_a_finished_unit_whose_input_changed_is_made_again(corpus, tmp_path):
    """A marker counts only for the same work: here the first file is changed after its unit was finished."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"w{i} w{i}"}) + "\n" for i in range(30)))
    good = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text("bad")
    settings = small(
        tmp_path, [], sources=(f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"), tokenizer=f"{corpus}/tokenizer.json"
    )
    with pytest.raises(UserError, match=r"b.jsonl: line 1"):
        build_rows(settings, str(tmp_path / "rows"), 1)
    assert (tmp_path / "rows" / "unit-00000.json").exists()
    (tmp_path / "b.jsonl").write_text(good)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"text": "w99 w99"}\n')
    manifest, _ = build_rows(settings, str(tmp_path / "rows"), 1)
    fresh, _ = build_rows(settings, str(tmp_path / "fresh"), 1)
    assert manifest == fresh
    assert manifest.accounting.documents == 61


def test_a_command_that_failed_at_once_may_be_mended(tmp_path):
    """No row was made, so nothing binds the folder to the first settings."""
    settings = small(tmp_path, [f"good {i}" for i in range(20)])
    with pytest.raises(UserError, match="no key 'body'"):
        build_rows(dataclasses.replace(settings, text_key="body"), str(tmp_path / "rows"), 1)
    build_rows(settings, str(tmp_path / "rows"), 1)


def test_changed_input_under_complete_rows_is_an_error(tmp_path):
    settings = small(tmp_path, ["one", "two", "three"])
    build_rows(settings, str(tmp_path / "rows"), 1)
    with open(tmp_path / "x.jsonl", "a") as file:
        file.write('{"text": "four"}\n')
    with pytest.raises(UserError, match=r"prepared with other settings \(files.*x.jsonl"):
        build_rows(settings, str(tmp_path / "rows"), 1)


def test_a_folder_with_other_things_is_not_touched(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="the folder holds other things"):
        build_rows(small(tmp_path, ["text"]), str(tmp_path / "rows"), 1)
    assert os.listdir(tmp_path / "rows") == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="it is a file; give a folder"):
        build_rows(small(tmp_path, ["text"]), str(tmp_path / "file"), 1)


def test_an_empty_corpus_is_an_error(tmp_path):
    for texts in ([], ["", "  "]):
        with pytest.raises(UserError, match=r"--source=\S+x.jsonl: it is empty"):
            build_rows(small(tmp_path, texts), str(tmp_path / "rows"), 1)


def test_rows_are_held_out_where_no_document_was(tmp_path):
    settings = small(tmp_path, ["a text of some words that fills more than a row or two " * 5] * 2, validation=0.01)
    manifest, _ = build_rows(settings, str(tmp_path / "rows"), 1)
    assert manifest.validation["cut"] == "rows"
    train, validation = (Rows(str(tmp_path / "rows"), split) for split in ("train", "validation"))
    assert len(validation) == manifest.validation["rows"] == 1
    assert len(train) == sum(shard.rows for shard in manifest.sources[0].train) - 1


def test_nothing_is_held_out_when_asked(tmp_path):
    manifest, _ = build_rows(small(tmp_path, ["some text"] * 5, validation=0.0), str(tmp_path / "rows"), 1)
    assert manifest.validation == {"share": 0.0, "cut": "none", "rows": 0}
    assert len(Rows(str(tmp_path / "rows"), "validation")) == 0


def test_equal_documents_fall_on_one_side(tmp_path):
    """Or what is held out would be in the training rows."""
    texts = [f"document {i % 50} of fifty" for i in range(500)]
    build_rows(small(tmp_path, texts, row_length=64), str(tmp_path / "rows"), 1)
    tokenizer = load_tokenizer(str(tmp_path / "rows"))
    found = {}
    for split in ("train", "validation"):
        rows = Rows(str(tmp_path / "rows"), split)
        tokens_BxL, segments_BxL = rows.read(np.arange(len(rows)))
        found[split] = {
            tokenizer.decode(tokens[segments == s].tolist())
            for tokens, segments in zip(tokens_BxL, segments_BxL, strict=True)
            for s in range(1, segments.max() + 1)
        }
    assert found["train"] | found["validation"] == {f"document {i} of fifty" for i in range(50)}
    assert not found["train"] & found["validation"]


def test_a_mixture_keeps_its_sources_and_weights_apart(tmp_path):
    for name, words in (("a", "apple"), ("b", "bread")):
        (tmp_path / f"{name}.txt").write_text(f"{words} " * 300)
    sources = (f"{tmp_path}/a.txt:3", f"{tmp_path}/b.txt:1")
    build_rows(small(tmp_path, [], sources=sources, validation=0.0), str(tmp_path / "rows"), 1)
    rows = Rows(str(tmp_path / "rows"), "train")
    assert [source.weight for source in rows.sources] == [3.0, 1.0]
    tokenizer = load_tokenizer(str(tmp_path / "rows"))
    for source, word in zip(rows.sources, ("apple", "bread"), strict=True):
        tokens_BxL, segments_BxL = rows.read(np.arange(source.first, source.first + source.rows))
        assert set(tokenizer.decode(tokens_BxL[segments_BxL > 0].tolist()).split()) == {word}


def test_the_mask_that_was_added_is_still_added_when_taken_up(corpus, undisturbed):
    """The folder's tokenizer has the mask; a second look must not take it for one that it always had."""
    facts = read_manifest(str(undisturbed)).vocabulary
    assert facts == {"size": 2003, "bos": None, "eos": 0, "pad": 0, "mask": 2002, "mask_how": "added"}
    assert vocabulary_of(str(undisturbed)).mask == 2002
    assert load_tokenizer(f"{corpus}/tokenizer.json").token_to_id("<|mask|>") is None  # the user's file is as it was


def test_wide_ids(tmp_path):
    """Ids beyond 65,535 come back."""
    vocabulary = {name: i for i, name in enumerate(["</s>", "<unk>", *(f"w{i}" for i in range(70_000))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = small(tmp_path, ["w1 w69999 w3"], tokenizer=str(tmp_path / "tokenizer.json"), validation=0.0)
    build_rows(settings, str(tmp_path / "rows"), 1)
    assert Rows(str(tmp_path / "rows"), "train").read(np.array([0]))[0][0, :4].tolist() == [3, 70_001, 5, 0]


def config_of(tmp_path, texts):
    config = default_config()
    settings = small(tmp_path, texts)
    config.data.update(sources=settings.sources, vocab_size=270, row_length=16, validation=0.2)
    return config


def test_ensure_rows_prepares_once(tmp_path, monkeypatch):
    monkeypatch.setenv("BIPHASIC_CACHE", str(tmp_path / "cache"))
    config = config_of(tmp_path, [f"some text to prepare {i}" for i in range(20)])
    folder = ensure_rows(config)
    assert folder.startswith(str(tmp_path / "cache" / "rows"))
    before = os.stat(os.path.join(folder, "manifest.json")).st_mtime_ns
    assert ensure_rows(config) == folder
    assert os.stat(os.path.join(folder, "manifest.json")).st_mtime_ns == before
    config.data.row_length = 32
    assert ensure_rows(config) != folder
    with open(tmp_path / "x.jsonl", "a") as file:  # what was read is in the folder's name
        file.write('{"text": "another text"}\n')
    config.data.row_length = 16
    assert ensure_rows(config) != folder


def test_ensure_rows_checks_rows_that_are_given(tmp_path):
    config = config_of(tmp_path, [f"some text to prepare {i}" for i in range(20)])
    build_rows(small(tmp_path, [f"some text to prepare {i}" for i in range(20)]), str(tmp_path / "rows"), 1)
    config.data.rows = str(tmp_path / "rows")
    assert ensure_rows(config) == config.data.rows
    config.data.row_length = 32
    with pytest.raises(UserError, match=r"config.data.row_length=32, but .* prepared with 16"):
        ensure_rows(config)
    config.data.rows = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no such folder of rows"):
        ensure_rows(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--row-length=4",), "--row-length=4 must be 8 to 1,048,576"),
        (("--validation=1",), "--validation=1.0 must be a share below 1"),
        (("--source=nowhere.txt",), "--source=nowhere.txt: there is no such file"),
        (("--tokenizer=nowhere.json",), "nowhere.json: there is no such file"),
        (("--segments=paragraph",), "--segments"),
        (("--mask-token=<|msk|>",), "--mask-token=<|msk|>: the tokenizer has no such token"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(corpus, tmp_path, change, message):
    err = run(*arguments(corpus, tmp_path / "rows", workers=1), *change, code=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
