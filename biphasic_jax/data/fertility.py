"""How well a tokenizer fits a text."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

WORD = re.compile(r"[^\W\d_]+")


def fertility(tokenizer: Tokenizer, texts: Callable[[bool], Iterable[str]]) -> dict[str, Any]:
    """Measures on held-out text, `texts(True)`, or on training text, `texts(False)`, where none is held out.

    tokens_per_word: tokens of the text over its words between spaces. bytes_per_token: UTF-8 bytes over tokens.
    whole_words: share of the running words of letters that are one token after a space. vocabulary: ids.
    """
    sample, side = list(texts(True)), "held-out"
    if not sample:
        sample, side = list(texts(False)), "training"
    encodings = tokenizer.encode_batch_fast(sample, add_special_tokens=False)
    tokens = sum(len(encoding.ids) for encoding in encodings)
    words = sum(len(text.split()) for text in sample)
    counts = Counter(word for text in sample for word in WORD.findall(text))
    spelled = tokenizer.encode_batch_fast([f" {word}" for word in counts], add_special_tokens=False)
    whole = sum(count for count, encoding in zip(counts.values(), spelled, strict=True) if len(encoding.ids) == 1)
    return {
        "measured_on": side,
        "words": words,
        "vocabulary": tokenizer.get_vocab_size(with_added_tokens=True),
        "tokens_per_word": round(tokens / max(words, 1), 4),
        "bytes_per_token": round(sum(len(text.encode()) for text in sample) / max(tokens, 1), 4),
        "whole_words": round(whole / max(counts.total(), 1), 4),
    }
