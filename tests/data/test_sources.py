"""Sources: every format gives its documents, in any number of parts, and bad input names file and line."""

import gzip
import json
import math

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from biphasic_jax.data.documents import TEXT_BLOCK, documents
from biphasic_jax.data.sources import UNIT_BYTES, Piece, list_files, make_units, parse_specs, split_file
from biphasic_jax.errors import UserError

TEXTS = [f"document {i}: the caf\u00e9 of \u4e2d\u6587 no. {i}" for i in range(40)]
LINES = "".join(json.dumps({"text": text, "id": i}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(TEXTS))


def read(path, parts=1, text_key="text"):
    """The documents of a source, each file in `parts` parts."""
    found = []
    for file in list_files(str(path)):
        for part in range(parts):
            found += documents(Piece(file.kind, file.path, part, parts, 0), text_key)
    return found


def test_weights():
    specs = parse_specs(["a.txt:3", "b:0.5"])
    assert [(spec.location, spec.weight) for spec in specs] == [("a.txt", 3.0), ("b", 0.5)]
    assert parse_specs(["vendored:tiny"])[0].weight is None
    assert parse_specs(["vendored:tiny:2"])[0] == parse_specs(["vendored:tiny:2.0"])[0]
    assert parse_specs(["tfds:news/plain:1.0.0"])[0].location == "tfds:news/plain:1.0.0"
    with pytest.raises(UserError, match=r"b.txt has no weight while others have one"):
        parse_specs(["a.txt:1", "b.txt"])
    for bad in ("0", "-1", "inf", "nan"):
        with pytest.raises(UserError, match="must be a positive number"):
            parse_specs([f"a.txt:{bad}"])


def test_a_name_with_a_colon_that_exists_has_no_weight(tmp_path):
    (tmp_path / "a:2").mkdir()
    assert parse_specs([f"{tmp_path}/a:2"])[0].weight is None


def write(path, kind):
    if kind == "jsonl":
        path.write_text(LINES, encoding="utf-8")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(LINES.encode()))
    elif kind == "jsonl.zst":  # two frames, as parallel compressors write
        half = len(LINES.encode()) // 2
        compress = zstandard.ZstdCompressor().compress
        path.write_bytes(compress(LINES.encode()[:half]) + compress(LINES.encode()[half:]))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.table({"id": range(40), "text": TEXTS}), path, row_group_size=7)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("parts", [1, 2, 3, 64])
def test_every_document_once_in_any_number_of_parts(tmp_path, kind, parts):
    path = tmp_path / f"x.{kind}"
    write(path, kind)
    found = read(path, parts)
    assert sorted(found) == sorted(TEXTS)
    if parts == 1 or kind in ("jsonl", "parquet"):
        assert found == TEXTS


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(0, 30), max_size=30), parts=st.integers(1, 9), newline=st.booleans())
def test_json_lines_are_cut_between_lines(tmp_path_factory, lengths, parts, newline):
    texts = [f"{i}" + "x" * n for i, n in enumerate(lengths)]
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + ("\n" if newline else ""))
    assert read(path, parts) == texts


def test_a_text_file_is_a_document(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"\xef\xbb\xbfwith a mark\nof order")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.txt").write_text(" \n ")  # no text: no document
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "notes.md").write_text("no")
    assert read(tmp_path) == ["first", "with a mark\nof order"]


@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(st.sampled_from(["\n", " ", "whale", "\u00e9" * 50, "\u4e2d" * 3000, "x" * 30_000]), max_size=30),
    parts=st.integers(1, 5),
)
def test_a_long_text_is_cut_and_nothing_is_lost(tmp_path_factory, words, parts):
    """Blocks lie between 0 and two block sizes, whatever the text; together they are the text."""
    path = tmp_path_factory.mktemp("long") / "x.txt"
    text = "".join(words * 2)
    path.write_text(text, newline="")
    found = read(path, parts)
    size = len(text.encode())
    if text.strip():
        kept = "".join(found)
        assert kept.replace(" ", "").replace("\n", "") == text.replace(" ", "").replace("\n", "")
    assert max([len(block.encode()) for block in found], default=0) <= 2 * TEXT_BLOCK + 4
    assert len(found) <= math.ceil(size / TEXT_BLOCK)


def test_a_book_is_cut_at_line_ends(tmp_path):
    lines = [f"line {i} " + "x" * (i % 90) for i in range(9000)]
    (tmp_path / "x.txt").write_text("\n".join(lines))
    found = read(tmp_path / "x.txt")
    assert len(found) == math.ceil(len("\n".join(lines)) / TEXT_BLOCK)
    assert all(block.endswith("\n") for block in found[:-1])
    assert "".join(found) == "\n".join(lines)


def test_a_hugging_face_dataset_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "n": range(40)})
    dataset.save_to_disk(tmp_path / "one", num_shards=3)
    assert read(tmp_path / "one") == TEXTS
    datasets.DatasetDict(train=dataset, test=dataset.select(range(3))).save_to_disk(tmp_path / "split")
    assert read(tmp_path / "split") == TEXTS
    shuffled = dataset.shuffle(seed=1).select(range(10))
    shuffled.save_to_disk(tmp_path / "shuffled")
    assert read(tmp_path / "shuffled") == shuffled["text"][:]
    datasets.DatasetDict(test=dataset).save_to_disk(tmp_path / "test_only")
    with pytest.raises(UserError, match=r"splits \['test'\], none is `train`"):
        read(tmp_path / "test_only")
    with pytest.raises(UserError, match="no column 'body'; it has 'text', 'n'; give --text-key"):
        read(tmp_path / "one", text_key="body")
    next((tmp_path / "one").glob("data-00001*")).write_bytes(b"not arrow at all")
    with pytest.raises(UserError, match=r"data-00001.*not a readable Arrow stream"):
        read(tmp_path / "one")


def test_a_tfds_builder(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")

    class SmallText(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples(), "test": self._generate_examples()}

        def _generate_examples(self):
            yield from ((i, {"text": text}) for i, text in enumerate(TEXTS))

    builder = SmallText(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    source = f"tfds:{builder.data_dir}"
    assert sorted(read(source)) == sorted(TEXTS)
    assert sorted(read(source, parts=3)) == sorted(TEXTS)
    with pytest.raises(UserError, match="no column 'body'; it has 'text'"):
        read(source, text_key="body")
    with pytest.raises(UserError, match="no such data set"):
        read("tfds:no_such_data_set")


def test_vendored_text():
    texts = read("vendored:tiny")
    assert len(texts) == 44
    assert 300_000 < sum(map(len, texts)) < 400_000
    assert set(texts) < set(read("vendored:corpus_cc0"))
    with pytest.raises(UserError, match="there are corpus_cc0, tiny"):
        read("vendored:nothing")


def test_units_depend_on_the_files_alone(tmp_path):
    """Small files share a unit, large ones are cut; the pieces of all units are every file once."""
    (tmp_path / "small").mkdir()
    for i in range(30):
        (tmp_path / "small" / f"{i:02d}.txt").write_text("x" * (UNIT_BYTES // 8))
    (tmp_path / "large.jsonl").write_text(LINES * (5 * UNIT_BYTES // len(LINES.encode())))
    files = [list_files(str(tmp_path / "small")), list_files(str(tmp_path / "large.jsonl"))]
    units = make_units(files)
    assert [unit.number for unit in units] == list(range(len(units)))
    assert [unit.source for unit in units] == [0] * 4 + [1] * 5
    assert all(unit.text_bytes <= UNIT_BYTES for unit in units)
    pieces = [piece for unit in units for piece in unit.pieces]
    assert pieces == [piece for mine in files for file in mine for piece in split_file(file, UNIT_BYTES)]
    assert units == make_units(files)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"fine\nfine\nb\xe9d", r"x.txt: line 3: not UTF-8 \(byte 0xe9\)"),
        ("x.jsonl", b'{"text": "fine"}\n{"text": "b\xe9d"}\n', r"x.jsonl: line 2: not UTF-8 \(byte 0xe9\)"),
        ("x.jsonl", b'{"text": "fine"}\n\n{"text": "bad"\n', "x.jsonl: line 3: not JSON"),
        ("x.jsonl", b'{"body": "bad"}\n', "x.jsonl: line 1: no key 'text'; it has 'body'; give --text-key"),
        ("x.jsonl", b'["bad"]\n', "x.jsonl: line 1: a JSON list where an object"),
        ("x.jsonl", b'{"text": null}\n', "x.jsonl: line 1: 'text' is NoneType, not text"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "x.jsonl: line 1: 'text' is not valid Unicode"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "fine"}\nbad\n'), "x.jsonl.gz: line 2: not JSON"),
        ("x.jsonl.gz", gzip.compress(LINES.encode())[:-20], r"x.jsonl.gz: damaged or cut short after line \d+"),
        ("x.jsonl.gz", b"not gzip", "x.jsonl.gz: damaged or cut short after line 0"),
        ("x.jsonl.zst", b"not zstandard", "x.jsonl.zst: damaged or cut short after line 0"),
        ("x.parquet", b"not parquet", "x.parquet: damaged Parquet"),
    ],
)
def test_bad_input_names_the_file_and_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_the_line_is_right_in_a_later_part(tmp_path):
    lines = [json.dumps({"text": f"{i}"}) for i in range(1000)]
    lines[876] = "bad"
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"x.jsonl: line 877: not JSON"):
        read(tmp_path / "x.jsonl", parts=7)


def test_a_null_in_a_parquet_column_names_the_row(tmp_path):
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b", None, "d"]}), tmp_path / "x.parquet", row_group_size=2)
    with pytest.raises(UserError, match=r"x.parquet: row 2: 'text' is NoneType"):
        read(tmp_path / "x.parquet", parts=2)


def test_missing_and_unknown_sources(tmp_path):
    with pytest.raises(UserError, match="--source=/no/such/place: there is no such file or folder"):
        list_files("/no/such/place")
    (tmp_path / "x.pdf").write_text("x")
    with pytest.raises(UserError, match=r"cannot tell its format; a file must end in .txt"):
        list_files(str(tmp_path / "x.pdf"))
    with pytest.raises(UserError, match="no file in this folder ends in"):
        list_files(str(tmp_path))
