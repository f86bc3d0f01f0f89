"""Tokenizers: which ids are special, where words begin, and that nothing is mixed up with another tokenizer."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from biphasic_jax.data.fertility import fertility
from biphasic_jax.data.manifest import Accounting, Manifest
from biphasic_jax.data.token_bytes import begins_word, token_bytes
from biphasic_jax.data.tokenizer import (
    SPECIALS,
    declared_roles,
    load_tokenizer,
    make_vocabulary,
    resolve_roles,
    tokenizer_sha256,
    train_tokenizer,
    vocabulary_facts,
    vocabulary_of,
)
from biphasic_jax.errors import UserError

TEXTS = [
    "the whale and the sea, the sea; the ship's whale in 1851\n",
    "a ship and a whale",
    "Ahab's ship. The sea!",
] * 5


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 280)


@given(text=st.text())
def test_any_text_survives_the_byte_level_tokenizer(trained, text):
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=False) == text
    texts = token_bytes(trained)
    assert b"".join(texts[i] for i in ids) == text.encode()
    vocabulary = make_vocabulary(trained, resolve_roles(trained, {}))
    assert vocabulary.bytes_V[ids].sum() == len(text.encode())
    assert not vocabulary.special_V[ids].any()


def test_training_is_deterministic_and_puts_the_specials_first(trained):
    assert train_tokenizer(TEXTS, 280).to_str() == trained.to_str()
    assert [trained.token_to_id(name) for name in SPECIALS] == [0, 1, 2, 3]
    assert trained.get_vocab_size() == 280
    with pytest.raises(UserError, match="--vocab-size=100"):
        train_tokenizer(TEXTS, 100)


def test_special_names_written_in_a_document_are_text(trained, tmp_path):
    (tmp_path / "tokenizer.json").write_text(trained.to_str())
    for tokenizer in (trained, load_tokenizer(str(tmp_path))):
        ids = tokenizer.encode("say <|mask|> or <|eos|>", add_special_tokens=False).ids
        assert min(ids) >= len(SPECIALS)
        assert tokenizer.decode(ids, skip_special_tokens=False) == "say <|mask|> or <|eos|>"


def test_a_trained_vocabulary(trained):
    roles = resolve_roles(trained, {})
    vocabulary = make_vocabulary(trained, roles)
    assert (vocabulary.size, vocabulary.bos, vocabulary.eos, vocabulary.mask, vocabulary.pad) == (280, 0, 1, 2, 3)
    assert roles.mask_how == "known"
    assert np.array_equal(np.flatnonzero(vocabulary.special_V), [0, 1, 2, 3])
    assert vocabulary.word_start_V[:4].all()
    assert vocabulary.bytes_V[:4].sum() == 0
    tokens = trained.encode(" the whale", add_special_tokens=False).ids
    starts = np.flatnonzero(vocabulary.word_start_V[tokens])
    assert trained.decode([tokens[i] for i in starts]).split()[0] == "the"
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (b" the", True),
        (b"ing", False),
        (b"'s", False),
        ("\u2019t".encode(), False),
        (b"'", True),
        (b",", True),
        (b"\n", True),
        (b"12", False),
        (b"\xa9", False),  # the rest of a character
        (b"", False),
        ("\u4e2d".encode(), True),
        ("\u3042".encode(), True),
        ("\u00e9t\u00e9".encode(), False),
        ("\u0301".encode(), False),  # a combining accent
    ],
)
def test_where_words_begin(text, begins):
    assert begins_word(text) is begins


def word_level(*names):
    vocabulary = {name: i for i, name in enumerate([*names, "whale", "sea"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_pad_may_equal_eos_and_the_mask_be_added():
    tokenizer = word_level("</s>", "<unk>")
    roles = resolve_roles(tokenizer, {})
    assert (roles.bos, roles.eos, roles.pad, roles.mask, roles.mask_how) == (None, 0, 0, 4, "added")
    vocabulary = make_vocabulary(tokenizer, roles)
    assert vocabulary.size == 5
    assert vocabulary.special_V.tolist() == [True, True, False, False, True]  # eos, unk, the added mask
    assert vocabulary.ordinary.tolist() == [2, 3]
    again = resolve_roles(tokenizer, {}, "add")
    assert (again.mask, again.mask_how) == (4, "known")


def test_the_mask_may_be_a_reserved_slot():
    """As the paper's: an id that the tokenizer keeps in reserve, so the vocabulary does not grow."""
    tokenizer = word_level("<|end_of_text|>", "<|reserved_special_token_0|>", "<unk>")
    roles = resolve_roles(tokenizer, {}, "<|reserved_special_token_0|>")
    assert (roles.mask, roles.mask_how) == (1, "named")
    vocabulary = make_vocabulary(tokenizer, roles)
    assert vocabulary.size == 5
    assert vocabulary.special_V[1]
    with pytest.raises(UserError, match=r"--mask-token=<\|reserved\|>.*reserved_special_token_0"):
        resolve_roles(tokenizer, {}, "<|reserved|>")
    with pytest.raises(UserError, match="already begins, ends or pads"):
        resolve_roles(tokenizer, {}, "<|end_of_text|>")


def test_ids_without_a_token_are_special():
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "whale": 1, "sea": 5}, unk_token="whale"))
    vocabulary = make_vocabulary(tokenizer, resolve_roles(tokenizer, {}))
    assert vocabulary.size == 6
    assert vocabulary.mask == 3
    assert vocabulary.special_V.tolist() == [True, True, True, True, True, False]  # whale is the unknown token


def test_an_added_mask_never_takes_the_id_of_a_token():
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "whale": 1, "sea": 3}, unk_token="whale"))
    with pytest.raises(UserError, match=r"id 3, which is already 'sea'.*--mask-token"):
        resolve_roles(tokenizer, {})


def test_roles_are_read_beside_the_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(word_level("<one>", "<two>", "<three>").to_str())
    tokenizer = load_tokenizer(str(path))
    with pytest.raises(UserError, match=r"no end-of-text token.*tokenizer_config.json"):
        resolve_roles(tokenizer, declared_roles(str(path)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<two>"}, "pad_token": None}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0], "bos_token_id": 0}))
    roles = resolve_roles(tokenizer, declared_roles(str(tmp_path)))
    assert (roles.bos, roles.eos, roles.pad) == (0, 1, 1)


def test_known_names_of_bert():
    tokenizer = word_level("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
    roles = resolve_roles(tokenizer, {})
    assert (roles.bos, roles.eos, roles.pad, roles.mask, roles.mask_how) == (1, 2, 0, 3, "known")
    assert make_vocabulary(tokenizer, roles).ordinary.tolist() == [5, 6]


def test_words_of_wordpiece():
    vocabulary = {name: i for i, name in enumerate(["[SEP]", "[UNK]", "wha", "##le", ",", "##s"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]", "[UNK]"])
    vocabulary = make_vocabulary(tokenizer, resolve_roles(tokenizer, {}))
    assert vocabulary.word_start_V.tolist() == [True, True, True, False, True, False, True]
    assert vocabulary.bytes_V.tolist() == [0, 0, 4, 2, 2, 1, 0]


@pytest.mark.parametrize("how", ["pre_tokenizer", "normalizer"])
def test_words_of_metaspace(how):
    pieces = ["</s>", "<unk>", "<0xE4>", "\u2581wha", "le", ",", "\u2581"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(pieces)}, [], unk_token="<unk>"))
    if how == "pre_tokenizer":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    assert token_bytes(tokenizer) == [b"</s>", b"<unk>", b"\xe4", b" wha", b"le", b",", b" "]
    vocabulary = make_vocabulary(tokenizer, resolve_roles(tokenizer, {}))
    assert vocabulary.word_start_V.tolist() == [True, True, True, True, False, True, True, True]


def test_a_template_or_a_truncation_in_the_file_changes_nothing(trained, tmp_path):
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|bos|> $A <|eos|>", None, [("<|bos|>", 0), ("<|eos|>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = [encoding.ids for encoding in loaded.encode_batch_fast(TEXTS[:3], add_special_tokens=False)]
    assert ids == [trained.encode(text, add_special_tokens=False).ids for text in TEXTS[:3]]


def test_a_bad_tokenizer_file_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json: there is no such file"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    (tmp_path / "tokenizer.json").write_text('{"hello": 1}')
    with pytest.raises(UserError, match=r"tokenizer.json: not a tokenizer.json"):
        load_tokenizer(str(tmp_path))


def folder_of(tokenizer, folder):
    roles = resolve_roles(tokenizer, {})
    vocabulary = make_vocabulary(tokenizer, roles)
    content = tokenizer.to_str().encode()
    (folder / "tokenizer.json").write_bytes(content)
    named = {"file": "tokenizer.json", "sha256": tokenizer_sha256(content)}
    cut = {"share": 0.0, "cut": "none", "rows": 0}
    manifest = Manifest(8, "row", 0, named, vocabulary_facts(vocabulary, roles), (), cut, Accounting())
    manifest.write(str(folder))
    return vocabulary, manifest


def test_e5_the_vocabulary_of_a_folder_is_that_of_its_rows(trained, tmp_path):
    vocabulary, _ = folder_of(trained, tmp_path)
    found = vocabulary_of(str(tmp_path))
    for name in ("size", "bos", "eos", "pad", "mask"):
        assert getattr(found, name) == getattr(vocabulary, name)
    for name in ("special_V", "word_start_V", "bytes_V"):
        assert np.array_equal(getattr(found, name), getattr(vocabulary, name))


def test_e5_another_tokenizer_in_the_folder_is_an_error(trained, tmp_path):
    folder_of(trained, tmp_path)
    other = Tokenizer.from_str(trained.to_str())
    other.add_special_tokens([AddedToken("<|more|>", special=True)])
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="not the tokenizer that made these rows"):
        vocabulary_of(str(tmp_path))


def test_e5_a_manifest_of_another_vocabulary_is_an_error(trained, tmp_path):
    _, manifest = folder_of(trained, tmp_path)
    manifest.vocabulary["size"] = 301
    manifest.write(str(tmp_path))
    with pytest.raises(UserError, match="280 ids where the manifest says 301"):
        vocabulary_of(str(tmp_path))


def test_e5_a_missing_tokenizer_is_an_error(trained, tmp_path):
    folder_of(trained, tmp_path)
    shutil.move(tmp_path / "tokenizer.json", tmp_path / "away.json")
    with pytest.raises(UserError, match="the tokenizer of these rows is missing"):
        vocabulary_of(str(tmp_path))


def test_fertility_counts_words_and_bytes():
    """One token a letter: the figures can be told by hand."""
    tokenizer = train_tokenizer([], 260)
    assert fertility(tokenizer, lambda held: ["ab cde f"] if held else []) == {
        "measured_on": "held-out",
        "words": 3,
        "vocabulary": 260,
        "tokens_per_word": round(8 / 3, 4),
        "bytes_per_token": 1.0,
        "whole_words": 0.0,
    }
    measured = fertility(train_tokenizer(TEXTS, 280), lambda held: [] if held else TEXTS)
    assert measured["measured_on"] == "training"
    assert measured["whole_words"] > 0.5
    assert measured["tokens_per_word"] < 3


def test_an_absurd_vocabulary_is_an_error_before_memory_is_asked_for():
    with pytest.raises(UserError, match="--vocab-size=1000000000000: a byte-level one has"):
        train_tokenizer(["some text"], 10**12)
