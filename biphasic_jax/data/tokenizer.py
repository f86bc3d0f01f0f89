"""Tokenizers: loading, training, which ids are special, and the vocabulary of a prepared folder."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from biphasic_jax.data.manifest import TOKENIZER, read_manifest
from biphasic_jax.data.token_bytes import begins_word, token_bytes
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError

SPECIALS = ("<|bos|>", "<|eos|>", "<|mask|>", "<|pad|>")
# Names under which public tokenizers keep each role, the surest first.
KNOWN_NAMES = {
    "bos": ("<|bos|>", "<|begin_of_text|>", "<s>", "<bos>", "[CLS]"),
    "eos": ("<|eos|>", "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[SEP]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "mask": ("<|mask|>", "<mask>", "[MASK]"),
}
# Contractions, words with one leading non-letter, numbers in threes, punctuation, line ends, spaces: the split of
# Llama 3 and GPT-4, so that no merge crosses a word.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMALLEST_VOCABULARY = 256 + len(SPECIALS)
LARGEST_VOCABULARY = 2**24  # what the trainer is asked to hold at most


@dataclass(frozen=True)
class Roles:
    """Ids of the special roles; `mask_how`: "known" by its name, "named" by the user, or "added"."""

    bos: int | None
    eos: int
    pad: int
    mask: int
    mask_how: str


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that holds one; it never truncates or pads."""
    file = os.path.join(path, TOKENIZER) if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise UserError(f"tokenizer {path}: there is no such file; give a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer {file}: not a tokenizer.json of the tokenizers library ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|mask|>" written in a document is text, not the mask
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids, the four specials first; the same for the same texts."""
    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"--vocab-size={vocab_size}: a byte-level one has {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY:,} ids"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def declared_roles(path: str) -> dict[str, str | int]:
    """role -> token or id, as the files beside a `tokenizer.json` declare it."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    roles: dict[str, str | int] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                facts = json.load(file)
        except (OSError, ValueError):
            continue
        for role in KNOWN_NAMES:
            token = facts.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            number = facts.get(f"{role}_token_id")
            number = number[0] if isinstance(number, list) and number else number
            value = token if isinstance(token, str) else number
            if isinstance(value, str | int) and role not in roles:
                roles[role] = value
    return roles


def resolve_roles(tokenizer: Tokenizer, declared: Mapping[str, str | int], mask: str = "auto") -> Roles:
    """Which ids play the special roles; adds a mask token to `tokenizer` where it has none.

    `mask`: "auto" (declared, or a known name, else added), "add", or the name of a token, such as a reserved one.
    """
    ids: dict[str, int | None] = {}
    for role, names in KNOWN_NAMES.items():
        ids[role] = _declared_id(tokenizer, declared.get(role))
        for name in names:
            if ids[role] is None:
                ids[role] = tokenizer.token_to_id(name)
    if ids["eos"] is None:
        raise UserError(
            "the tokenizer has no end-of-text token under a known name; put a tokenizer_config.json with "
            '{"eos_token": NAME} beside it'
        )
    how = "known"
    if mask not in ("auto", "add"):
        ids["mask"], how = tokenizer.token_to_id(mask), "named"
        if ids["mask"] is None:
            reserved = [token for token in tokenizer.get_vocab() if "reserved" in token or "unused" in token]
            near = difflib.get_close_matches(mask, tokenizer.get_vocab(), n=2) or sorted(reserved)[:2]
            hint = f"; it has {' and '.join(map(repr, near))}" if near else ""
            raise UserError(f"--mask-token={mask}: the tokenizer has no such token{hint}; or give `add`")
        tokenizer.add_special_tokens([AddedToken(mask, special=True, normalized=False)])
    elif mask == "add" or ids["mask"] is None:
        name, before = SPECIALS[2], tokenizer.get_vocab()
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        ids["mask"], how = tokenizer.token_to_id(name), "known" if name in before else "added"
        taken = [token for token, number in before.items() if number == ids["mask"] and token != name]
        if taken:
            raise UserError(
                f"the tokenizer's ids have gaps, and an added mask would get id {ids['mask']}, which is already "
                f"{taken[0]!r}; name one of its tokens with --mask-token"
            )
    eos, pad, mask_id = ids["eos"], ids["pad"], ids["mask"]
    assert eos is not None
    assert mask_id is not None
    if mask_id in (ids["bos"], eos, pad):
        raise UserError(
            f"--mask-token={mask}: id {mask_id} already begins, ends or pads text; choose another, or `add`"
        )
    return Roles(ids["bos"], eos, eos if pad is None else pad, mask_id, how)


def _declared_id(tokenizer: Tokenizer, value: str | int | None) -> int | None:
    if isinstance(value, int):
        return value if tokenizer.id_to_token(value) is not None else None
    return tokenizer.token_to_id(value) if value is not None else None


def make_vocabulary(tokenizer: Tokenizer, roles: Roles) -> Vocabulary:
    """The vocabulary; special are the roles, the tokenizer's own special tokens and the ids without a token."""
    texts = token_bytes(tokenizer)
    special_V = np.array([text is None for text in texts])
    special_V[[i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]] = True
    unknown = json.loads(tokenizer.to_str())["model"].get("unk_token")
    special_V[[i for i in (roles.bos, roles.eos, roles.pad, roles.mask) if i is not None]] = True
    if unknown is not None and tokenizer.token_to_id(unknown) is not None:
        special_V[tokenizer.token_to_id(unknown)] = True
    return Vocabulary(
        size=len(texts),
        bos=roles.bos,
        eos=roles.eos,
        pad=roles.pad,
        mask=roles.mask,
        special_V=special_V,
        word_start_V=special_V | np.array([begins_word(text or b"") for text in texts]),
        bytes_V=np.where(special_V, 0, [len(text or b"") for text in texts]).astype(np.int32),
    )


def tokenizer_sha256(tokenizer_json: bytes) -> str:
    return hashlib.sha256(tokenizer_json).hexdigest()


def vocabulary_facts(vocabulary: Vocabulary, roles: Roles) -> dict[str, Any]:
    """What a manifest keeps of a vocabulary."""
    ids = {"bos": roles.bos, "eos": roles.eos, "pad": roles.pad, "mask": roles.mask, "mask_how": roles.mask_how}
    return {"size": vocabulary.size, **ids}


def vocabulary_of(folder: str) -> Vocabulary:
    """The vocabulary of a prepared folder; `UserError` where its tokenizer is not the one that made the rows."""
    manifest = read_manifest(folder)
    path = os.path.join(folder, manifest.tokenizer["file"])
    if not os.path.isfile(path):
        raise UserError(f"{path}: the tokenizer of these rows is missing; prepare the rows again")
    with open(path, "rb") as file:
        found = tokenizer_sha256(file.read())
    if found != manifest.tokenizer["sha256"]:
        raise UserError(
            f"{path}: not the tokenizer that made these rows (sha256 {found[:12]}, the manifest says "
            f"{manifest.tokenizer['sha256'][:12]}); put it back or prepare the rows again"
        )
    facts = manifest.vocabulary
    vocabulary = make_vocabulary(load_tokenizer(path), Roles(**{k: v for k, v in facts.items() if k != "size"}))
    if vocabulary.size != facts["size"]:
        raise UserError(
            f"{path}: {vocabulary.size} ids where the manifest says {facts['size']}; prepare the rows again"
        )
    return vocabulary
