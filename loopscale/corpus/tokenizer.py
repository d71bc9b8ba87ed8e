"""Tokenizers of a corpus: a byte-level BPE trained on it, or any `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from loopscale.errors import DataError, UsageError

END_OF_TEXT = "<|endoftext|>"
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


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Ids in use, counted as the highest one plus 1 (some tokenizers have gaps)."""
    return 1 + max(map(int, tokenizer.get_vocab(with_added_tokens=True).values()))
