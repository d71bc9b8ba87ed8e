"""Tokenizers of a corpus: a byte-level BPE or a vocabulary of words trained on it, or any `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from loopscale.errors import DataError, UsageError

END_OF_TEXT = "<|endoftext|>"
WORDS = r"[\s\x1c-\x1f]+|[A-Za-z0-9_]+|[^\s\x1c-\x1fA-Za-z0-9_]"
"""Paper A's tokens: a run of what Python calls white space, a word, or one other character."""
WORD_SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` entries; ``<|endoftext|>`` has id 0 and the 256 bytes follow."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_words(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Paper A's tokenizer: the most frequent tokens of :data:`WORDS` that occur twice, at most ``vocab_size`` with the specials
    (ids 0 to 3); all others are `<unk>`, so text does not come back whole. Documents end with `<eos>`."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=WORD_SPECIALS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=list(WORD_SPECIALS), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


TRAINERS = {"bpe": train_bpe, "words": train_words}
"""By `tokenizer.kind`."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, set to encode text as it is.

    Cutting and padding are off, and a special token spelt out in a text is read as plain characters, so that text
    cannot end a document. Raises :class:`UsageError` for a missing file, :class:`DataError` for any other content.
    """
    if not Path(path).is_file():
        raise UsageError(f"tokenizer file {path} does not exist; give a tokenizer.json, or leave tokenizer.file out to train one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics of its Rust are not even that
        raise DataError(f"{path} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_text(tokenizer: Tokenizer, path: str | Path) -> int:
    """Id of the token that ends a document; raises :class:`DataError` when none can be told."""
    for name in _ENDS:
        found: int | None = tokenizer.token_to_id(name)
        if found is not None:
            return found
    special: dict[int, str] = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    if len(special) == 1:
        return next(iter(special))
    raise DataError(
        f"{path} has no token that ends a document: none of {', '.join(_ENDS)}, "
        f"and {len(special)} special tokens ({', '.join(list(special.values())[:8]) or 'none'}); exactly one would be taken"
    )


def unknown(tokenizer: Tokenizer) -> int | None:
    """Id of the token that stands for whatever has none of its own, where there is such a token."""
    name: str | None = getattr(tokenizer.model, "unk_token", None)
    found: int | None = None if name is None else tokenizer.token_to_id(name)
    return found


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Ids in use, counted as the highest one plus 1 (some tokenizers have gaps)."""
    return 1 + max(map(int, tokenizer.get_vocab(with_added_tokens=True).values()))
