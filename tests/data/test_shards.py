"""Rows on disk: what is written is read, and damage is named by shard and record."""

import dataclasses
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphasic_jax.data.manifest import Accounting, Manifest, Source, read_manifest
from biphasic_jax.data.shards import Rows, ShardWriter, decode_row, encode_row
from biphasic_jax.errors import UserError

LENGTH, PAD = 32, 7


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.booleans(), st.integers(0, 2**16 - 1))
def test_a_record_is_read_as_it_was_written(lengths, wide, largest):
    tokens = np.random.default_rng(0).integers(0, largest * (100 if wide else 1) + 1, sum(lengths))
    back, back_lengths = decode_row(encode_row(tokens, np.array(lengths), wide), wide)
    assert np.array_equal(back, tokens)
    assert np.array_equal(back_lengths, lengths)


@given(st.integers(0, 10**9))
def test_any_flipped_bit_of_a_record_is_noticed(bit):
    record = bytearray(encode_row(np.arange(20), np.array([5, 15]), wide=False))
    bit %= 8 * len(record)
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="checksum"):
        decode_row(bytes(record), wide=False)


def test_segments_must_cover_the_tokens():
    with pytest.raises(ValueError, match="segments of 4"):
        encode_row(np.arange(5), np.array([4]), wide=False)


def write_folder(folder, counts, size=1000, held_out=(), validation_rows=0):
    """Sources of shards with `counts[s]` rows each, and the rows: (tokens, lengths) by source, shard and row."""
    rng = np.random.default_rng(0)
    content, sources = [], []
    number = 0
    for s, shard_counts in enumerate(counts):
        shards = []
        for count in shard_counts:
            writer = ShardWriter(os.path.join(folder, f"train-{number:05d}.arrayrecord"), wide=size > 1 << 16)
            for _ in range(count):
                lengths = rng.integers(1, 9, rng.integers(1, 5))
                tokens = rng.integers(0, size, lengths.sum())
                writer.write(tokens, lengths)
                content.append((tokens, lengths))
            shards.append(writer.close())
            number += 1
        sources.append(Source(f"s{s}", None, tuple(shards), (), held_out[s] if held_out else 0))
    vocabulary = {"size": size, "bos": 0, "eos": 1, "pad": PAD, "mask": 2, "mask_how": "known"}
    cut = {"share": 0.1, "cut": "rows" if held_out else "none", "rows": sum(held_out)}
    manifest = Manifest(
        LENGTH, "documents", 0, {"file": "t", "sha256": "0"}, vocabulary, tuple(sources), cut, Accounting()
    )
    manifest.write(folder)
    return content


@pytest.mark.parametrize("size", [1000, 100_000])
def test_rows_come_back_in_any_order(tmp_path, size):
    content = write_folder(tmp_path, [[5, 3], [4]], size)
    rows = Rows(str(tmp_path), "train")
    assert len(rows) == 12
    assert [(source.first, source.rows) for source in rows.sources] == [(0, 8), (8, 4)]
    order = np.random.default_rng(1).integers(0, 12, 40)  # with repeats
    tokens_BxL, segments_BxL = rows.read(order)
    assert tokens_BxL.dtype == segments_BxL.dtype == np.int32
    for row, tokens_L, segments_L in zip(order, tokens_BxL, segments_BxL, strict=True):
        tokens, lengths = content[row]
        assert np.array_equal(tokens_L[: len(tokens)], tokens)
        assert np.all(tokens_L[len(tokens) :] == PAD)
        assert np.array_equal(segments_L[: len(tokens)], np.repeat(np.arange(len(lengths)) + 1, lengths))
        assert np.all(segments_L[len(tokens) :] == 0)


def test_no_row_and_rows_out_of_range(tmp_path):
    write_folder(tmp_path, [[3]])
    rows = Rows(str(tmp_path), "train")
    assert rows.read(np.array([], int))[0].shape == (0, LENGTH)
    for bad in (-1, 3):
        with pytest.raises(IndexError):
            rows.read(np.array([bad]))


def read_sum(rows, connection):
    connection.send(int(rows.read(np.arange(len(rows)))[0].sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_rows_are_read_in_other_processes(tmp_path, method):
    write_folder(tmp_path, [[5, 3]])
    rows = Rows(str(tmp_path), "train")
    expected = int(rows.read(np.arange(8))[0].sum())  # opened here already
    assert int(pickle.loads(pickle.dumps(rows)).read(np.arange(8))[0].sum()) == expected
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    process = context.Process(target=read_sum, args=(rows, theirs))
    process.start()
    assert mine.recv() == expected
    process.join()


def test_held_out_rows_are_the_last_of_each_source(tmp_path):
    """Where no document was held out, rows are: validation and training are disjoint and cover everything."""
    write_folder(tmp_path, [[5, 3], [4, 1, 2]], held_out=(4, 2))
    train, validation = Rows(str(tmp_path), "train"), Rows(str(tmp_path), "validation")
    assert (len(train), len(validation)) == (9, 6)
    assert [(s.first, s.rows) for s in validation.sources] == [(0, 4), (4, 2)]
    (tmp_path / "all").mkdir()
    write_folder(tmp_path / "all", [[5, 3], [4, 1, 2]])
    everything = Rows(str(tmp_path / "all"), "train").read(np.arange(15))[0]
    assert np.array_equal(train.read(np.arange(9))[0], everything[[0, 1, 2, 3, 8, 9, 10, 11, 12]])
    assert np.array_equal(validation.read(np.arange(6))[0], everything[[4, 5, 6, 7, 13, 14]])


def test_a_flipped_byte_names_the_shard_and_the_record(tmp_path):
    """Any byte of the file: either the row is still right, or the error names shard and record."""
    content = write_folder(tmp_path, [[6]])
    path = tmp_path / "train-00000.arrayrecord"
    whole = path.read_bytes()
    named = 0
    # The file's own header and footer are zero padding for the most part: look where the records are.
    places = [p for p in range(len(whole)) if whole[p]]
    for place in places[:: max(1, len(places) // 150)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        message = None
        try:
            tokens_BxL, _ = Rows(str(tmp_path), "train").read(np.arange(6))
        except UserError as error:
            message = str(error)
        if message is None:
            for (tokens, _), tokens_L in zip(content, tokens_BxL, strict=True):
                assert np.array_equal(tokens_L[: len(tokens)], tokens)
        else:
            assert "train-00000.arrayrecord: record " in message or "train-00000.arrayrecord: its index" in message
            named += "arrayrecord: record" in message
    assert named > 20


def test_a_damaged_record_leaves_the_others_readable(tmp_path):
    content = write_folder(tmp_path, [[6]])
    path = tmp_path / "train-00000.arrayrecord"
    whole = bytearray(path.read_bytes())
    record = encode_row(*content[3], wide=False)
    whole[whole.index(record) + len(record) - 1] ^= 1
    path.write_bytes(bytes(whole))
    rows = Rows(str(tmp_path), "train")
    rows.read(np.array([0, 1, 2, 4, 5]))
    with pytest.raises(UserError, match=r"train-00000.arrayrecord: record 3 is damaged"):
        rows.read(np.array([1, 3, 5]))


@pytest.mark.parametrize("cut", [1, 100, 30_000])
def test_a_truncated_shard_is_named(tmp_path, cut):
    write_folder(tmp_path, [[6]])
    path = tmp_path / "train-00000.arrayrecord"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"train-00000.arrayrecord: \d+ bytes where the manifest says"):
        Rows(str(tmp_path), "train")


def test_a_missing_shard_and_a_wrong_count_are_named(tmp_path):
    write_folder(tmp_path, [[6]])
    manifest = read_manifest(str(tmp_path))
    source = manifest.sources[0]
    wrong = dataclasses.replace(source, train=(dataclasses.replace(source.train[0], rows=9),))
    dataclasses.replace(manifest, sources=(wrong,)).write(str(tmp_path))
    with pytest.raises(UserError, match=r"train-00000.arrayrecord: its index .* 6 records where the manifest says 9"):
        Rows(str(tmp_path), "train").read(np.array([0]))
    os.remove(tmp_path / "train-00000.arrayrecord")
    with pytest.raises(UserError, match=r"train-00000.arrayrecord: this shard is missing"):
        Rows(str(tmp_path), "train")


def test_a_manifest_that_is_absent_or_changed_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_manifest(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="not complete"):
        read_manifest(str(tmp_path))
    write_folder(tmp_path, [[2]])
    path = tmp_path / "manifest.json"
    good = path.read_text()
    path.write_text(good.replace('"row_length": 32', '"row_length": 64'))
    with pytest.raises(UserError, match="changed after it was written"):
        read_manifest(str(tmp_path))
    path.write_text(good[:100])
    with pytest.raises(UserError, match="not a manifest"):
        read_manifest(str(tmp_path))
    path.write_text(good)
    assert read_manifest(str(tmp_path)).row_length == 32


def test_the_fingerprint_is_of_the_content(tmp_path):
    """Other rows, another order or other weights change it; other names do not."""
    write_folder(tmp_path, [[4, 2]])
    manifest = read_manifest(str(tmp_path))
    source = manifest.sources[0]
    renamed = dataclasses.replace(source, name="elsewhere")
    assert dataclasses.replace(manifest, sources=(renamed,)).fingerprint == manifest.fingerprint
    swapped = dataclasses.replace(source, train=source.train[::-1])
    weighted = dataclasses.replace(source, weight=2.0)
    for other in (swapped, weighted):
        assert dataclasses.replace(manifest, sources=(other,)).fingerprint != manifest.fingerprint
    assert dataclasses.replace(manifest, row_length=64).fingerprint != manifest.fingerprint


def test_a_shard_appears_whole_or_not_at_all(tmp_path):
    writer = ShardWriter(str(tmp_path / "x.arrayrecord"), wide=False)
    writer.write(np.arange(4), np.array([4]))
    assert not (tmp_path / "x.arrayrecord").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
