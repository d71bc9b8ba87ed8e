from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from loopscale.corpus.tokenizer import (
    WORD_SPECIALS,
    WORDS,
    end_of_text,
    load_tokenizer,
    train_bpe,
    train_words,
    unknown,
    vocabulary_size,
)
from loopscale.errors import DataError, UsageError
from tests.corpus.conftest import texts


def test_training_is_deterministic_and_reads_any_text() -> None:
    first, second = train_bpe(texts(30), 350), train_bpe(texts(30), 350)
    assert first.to_str() == second.to_str()
    assert first.token_to_id("<|endoftext|>") == 0 and vocabulary_size(first) == 350
    for text in ("new 字 words\r\n\ttoo", "\x00 and 🙂"):
        assert first.decode(first.encode(text).ids) == text


def test_words_are_those_of_the_paper() -> None:
    """White space runs, words of letters, digits and underscores, and single other characters; once is not enough."""
    text = "snake_case2  été!?\n\nonce snake_case2 "
    found = re.findall(WORDS, text)
    assert found == ["snake_case2", "  ", "é", "t", "é", "!", "?", "\n\n", "once", " ", "snake_case2", " "]
    tokenizer = train_words([text], 300)
    # by count, then by spelling, behind the specials
    assert tokenizer.get_vocab() == {t: i for i, t in enumerate(("<pad>", "<bos>", "<eos>", "<unk>", " ", "snake_case2", "é"))}
    encoded = tokenizer.encode("snake_case2 never é")
    assert encoded.tokens == ["snake_case2", " ", "<unk>", " ", "é"] and tokenizer.decode(encoded.ids) == "snake_case2  é"
    assert end_of_text(tokenizer, "x") == 2 and unknown(tokenizer) == 3 and unknown(train_bpe([text], 300)) is None


@given(st.lists(st.text(), max_size=6), st.integers(4, 40))
def test_words_are_cut_without_loss_and_the_frequent_ones_kept(texts: list[str], size: int) -> None:
    counts = Counter(token for text in texts for token in re.findall(WORDS, text))
    assert all("".join(re.findall(WORDS, text)) == text for text in texts)
    kept = set(train_words(texts, size).get_vocab()) - set(WORD_SPECIALS)
    often = [count for count in counts.values() if count >= 2]
    assert len(kept) == min(len(often), size - len(WORD_SPECIALS)) and train_words(texts, size).get_vocab_size() <= size
    assert sorted((counts[token] for token in kept), reverse=True) == sorted(often, reverse=True)[: len(kept)]


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
