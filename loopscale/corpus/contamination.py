"""13-gram decontamination: training documents that share a run of 13 words with an evaluation file are left out.

The length and the rule are those of GPT-3 (Brown et al., 2020, appendix C). Words are runs of letters and digits, in
lower case, so that punctuation and line breaks do not hide a match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from loopscale.corpus.documents import open_bytes, text_files
from loopscale.errors import DataError

NGRAM = 13


def evaluation_ngrams(patterns: Sequence[str]) -> frozenset[str]:
    """All runs of 13 words in the evaluation files; of JSON Lines, in every text value."""
    return frozenset(gram for pattern in patterns for text in _texts(pattern) for gram in _ngrams(text))


def contaminated(text: str, ngrams: frozenset[str]) -> bool:
    """Whether ``text`` shares a run of 13 words with the evaluation files."""
    return bool(ngrams) and any(gram in ngrams for gram in _ngrams(text))


def _ngrams(text: str) -> Iterator[str]:
    words = re.findall(r"\w+", text.lower())
    return (" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))


def _texts(pattern: str) -> Iterator[str]:
    for path in text_files(pattern):
        try:
            with open_bytes(path) as stream:
                if ".jsonl" in path.suffixes:
                    for line in stream:
                        yield from _strings(json.loads(line)) if line.strip() else ()
                else:
                    yield stream.read().decode("utf-8")
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"evaluation file {path} cannot be read for decontamination: {error}") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
