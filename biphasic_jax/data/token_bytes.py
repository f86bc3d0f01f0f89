"""What text each token id stands for, whatever the tokenizer's alphabet: byte-level, metaspace, WordPiece."""

import json
import unicodedata
from typing import Any

from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """The UTF-8 bytes of every id below the largest, the space before a word included; None where no token is.

    A byte-level token may be part of a character. WordPiece writes no spaces: a token without "##" gets one.
    """
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    alphabet = _alphabet(json.loads(tokenizer.to_str()))
    byte_of = _byte_level_alphabet()
    found: list[bytes | None] = [None] * (max(tokens.values()) + 1)
    for token, number in tokens.items():
        if token in added:
            found[number] = token.encode()
        elif alphabet == "byte-level":
            found[number] = bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
        elif alphabet == "metaspace":
            is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            found[number] = bytes([int(token[3:5], 16)]) if is_byte else token.replace("\u2581", " ").encode()
        elif alphabet == "wordpiece":
            found[number] = token[2:].encode() if token.startswith("##") else b" " + token.encode()
        else:
            found[number] = b" " + token.encode()
    return found


def begins_word(text: bytes) -> bool:
    """Whether a token with these bytes begins a word: a space, a mark of punctuation or an ideograph does.

    A letter, a digit, the rest of a character and a contraction ('s) go on with the word before them.
    """
    if not text or 0x80 <= text[0] < 0xC0:
        return False
    characters = text.decode("utf-8", errors="replace")
    first = characters[0]
    if first in "'\u2019" and len(characters) > 1 and characters[1].isalpha():
        return False
    return _ideographic(first) or unicodedata.category(first)[0] not in "LNM"


def _ideographic(character: str) -> bool:
    """Scripts without spaces whose characters are words or syllables: Han, kana."""
    code = ord(character)
    return 0x3040 <= code <= 0x30FF or 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code < 0x32000


def _alphabet(description: dict[str, Any]) -> str:
    """How a tokenizer's tokens spell text, from its JSON."""
    parts = json.dumps([description.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")])
    if '"ByteLevel"' in parts:
        return "byte-level"
    if '"Metaspace"' in parts or "\\u2581" in parts:  # json.dumps escapes the metaspace character
        return "metaspace"
    return "wordpiece" if description["model"].get("type") == "WordPiece" else "words"


def _byte_level_alphabet() -> dict[str, int]:
    """character -> byte of the GPT-2 alphabet: printable bytes stand for themselves, the others for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
