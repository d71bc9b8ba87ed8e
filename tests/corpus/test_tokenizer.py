from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from loopscale.corpus.tokenizer import end_of_text, load_tokenizer, train_bpe, vocabulary_size
from loopscale.errors import DataError, UsageError
from tests.corpus.conftest import texts


def test_training_is_deterministic_and_reads_any_text() -> None:
    first, second = train_bpe(texts(30), 350), train_bpe(texts(30), 350)
    assert first.to_str() == second.to_str()
    assert first.token_to_id("<|endoftext|>") == 0 and vocabulary_size(first) == 350
    for text in ("new 字 words\r\n\ttoo", "\x00 and 🙂"):
        assert first.decode(first.encode(text).ids) == text


def test_the_end_of_text_is_found_or_asked_for() -> None:
    def with_special(*names: str) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE({"a": 0}, []))
        tokenizer.add_special_tokens([AddedToken(n, special=True) for n in names])
        return tokenizer

    assert end_of_text(with_special("<s>", "</s>"), "x") == 2
    assert end_of_text(with_special("[STOP]"), "x") == 1
    with pytest.raises(DataError, match=r"x has no token that ends a document: .* 2 special tokens \(\[A\], \[B\]\)"):
        end_of_text(with_special("[A]", "[B]"), "x")


def test_files_that_are_no_tokenizer_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist; give a tokenizer.json"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer.json"):
        load_tokenizer(tmp_path / "bad.json")
