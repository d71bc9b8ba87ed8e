from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from loopscale.corpus.folder import Corpus, open_corpus
from loopscale.corpus.packing import PackedCorpus, pack_text
from loopscale.errors import DataError, UsageError
from tests.corpus.conftest import built, write_jsonl


@pytest.fixture
def copy(corpus: Corpus, tmp_path: Path) -> Path:
    """The corpus in a folder of its own, nothing unpacked."""
    shutil.copytree(corpus.location, tmp_path / "copy", ignore=shutil.ignore_patterns("*.mds", ".locks"))
    return tmp_path / "copy"


def stream_of(corpus: Corpus, split: str) -> tuple[list[int], list[int]]:
    """Tokens of all records one after the other, and where documents begin, read by streaming's own reader."""
    from streaming import LocalDataset

    PackedCorpus(corpus.location, split, 1).read(0, corpus.split(split).tokens)  # unpacks the shards
    tokens: list[int] = []
    begins: list[int] = []
    records = LocalDataset(corpus.location, split)
    for record in (records[i] for i in range(len(records))):
        begins += [len(tokens)] if record["begins"] else []
        tokens += record["tokens"].tolist()
    return tokens, begins


@pytest.mark.parametrize("length", [1, 7, 64, 301])
def test_samples_are_cuts_of_the_plain_concatenation(corpus: Corpus, length: int) -> None:
    tokens, begins = stream_of(corpus, "train")
    packed = PackedCorpus(corpus.location, "train", length)
    assert len(packed) == (len(tokens) - 1) // length
    for i in range(len(packed)):
        sample, begin = packed[i], i * length
        assert sample.tokens.tolist() == tokens[begin : begin + length + 1]
        inside = [b - begin for b in begins if begin < b < begin + length]
        assert sample.starts.tolist() == [0, *inside]
        wanted = [-100 if begin + j + 1 in begins else tokens[begin + j + 1] for j in range(length)]
        assert sample.targets.tolist() == wanted
    assert packed[0].tokens.dtype == packed[0].targets.dtype == torch.int64


def test_every_token_but_the_first_is_a_target_once(corpus: Corpus) -> None:
    packed = PackedCorpus(corpus.location, "train", 1)
    targets = [int(packed[i].targets) for i in range(len(packed))]
    assert len(targets) == packed.tokens - 1
    assert targets.count(-100) == corpus.split("train").documents - 1


def test_a_remote_corpus_is_fetched_into_its_cache(copy: Path, corpus: Corpus, tmp_path: Path) -> None:
    packed = PackedCorpus(copy, "train", 16, cache=tmp_path / "cache")
    here = PackedCorpus(corpus.location, "train", 16)
    assert torch.equal(packed[3].tokens, here[3].tokens)
    assert not list(copy.rglob("*.mds")) and not list((tmp_path / "cache").rglob("*.zstd"))
    assert len(list((tmp_path / "cache" / "train").glob("*.mds"))) == 1  # the shard that was needed
    other = built(tmp_path / "other", write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"]))
    with pytest.raises(UsageError, match="holds shards of another corpus"):
        open_corpus(other.location, tmp_path / "cache")
    with pytest.raises(UsageError, match=r"is a URL and needs a local folder for its shards: corpus.cache=FOLDER"):
        open_corpus("s3://bucket/corpus")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_names_the_shard(copy: Path) -> None:
    flip(copy / "train" / "shard.00000.mds.zstd")
    with pytest.raises(DataError, match=r"shard train/shard\.00000\.mds\.zstd of corpus .* is damaged"):
        PackedCorpus(copy, "train", 16)[0]


def test_a_flipped_byte_in_an_unpacked_shard_names_it(copy: Path) -> None:
    PackedCorpus(copy, "train", 16)[0]
    flip(copy / "train" / "shard.00000.mds")
    with pytest.raises(DataError, match=r"train/shard\.00000\.mds does not have the digest .* remove that file"):
        PackedCorpus(copy, "train", 16)[0]
    (copy / "train" / "shard.00000.mds").unlink()
    PackedCorpus(copy, "train", 16)[0]


@pytest.mark.parametrize("name", ["train/records.npy", "tokenizer.json", "train/index.json"])
def test_damage_beside_the_shards_is_noticed(copy: Path, name: str) -> None:
    flip(copy / name)
    with pytest.raises(DataError, match=re.escape(f"is damaged: {name}")):
        PackedCorpus(copy, "train", 16).corpus.tokenizer()
    (copy / name).unlink()
    with pytest.raises(DataError, match=re.escape(f"is incomplete: {name} is missing")):
        PackedCorpus(copy, "train", 16).corpus.tokenizer()


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "train" / "shard.00000.mds.zstd").unlink()
    with pytest.raises(DataError, match=r"shard train/shard\.00000\.mds\.zstd of corpus .* cannot be read"):
        PackedCorpus(copy, "train", 16)[0]


def test_no_corpus_says_how_to_make_one(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(UsageError, match=r"does not exist; make it with `loopscale corpus build"):
        PackedCorpus(tmp_path / "none", "train", 16)
    with pytest.raises(UsageError, match=r"is not a corpus: it has no corpus.json"):
        PackedCorpus(tmp_path, "train", 16)
    with pytest.raises(UsageError, match=r"no split 'test'; it has validation, train"):
        PackedCorpus(corpus.location, "test", 16)
    with pytest.raises(DataError, match=r"less than one sample; choose corpus.sequence_length below"):
        PackedCorpus(corpus.location, "validation", 10**6)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "cannot be read"), ("[]", "holds list"), ('{"format": 9}', "format 9"), ('{"format": 1}', "lacks 'content'")],
)
def test_a_damaged_description_is_a_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "corpus.json").write_text(content)
    with pytest.raises(DataError, match=sentence):
        open_corpus(tmp_path)


def test_an_edited_description_is_noticed(copy: Path) -> None:
    about = (copy / "corpus.json").read_text()
    (copy / "corpus.json").write_text(about.replace('"end_of_text": 0', '"end_of_text": 1'))
    with pytest.raises(DataError, match="does not agree with its own fingerprint"):
        open_corpus(copy)


def test_a_packed_corpus_can_be_sent_to_another_process(corpus: Corpus) -> None:
    packed = PackedCorpus(corpus.location, "train", 16)
    assert torch.equal(pickle.loads(pickle.dumps(packed))[5].tokens, packed[5].tokens)


def test_a_text_is_packed_as_one_document(corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = corpus.tokenizer()
    text = "Text 1. abc " * 5
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, corpus.end_of_text]
    for length in (1, 4, len(ids) - 2, len(ids) - 1, len(ids), 500):
        samples = pack_text(text, tokenizer, corpus.end_of_text, length)
        targets = torch.cat([s.targets for s in samples])
        assert targets[targets != -100].tolist() == ids[1:]
        inputs = torch.cat([s.tokens[:-1] for s in samples])
        assert inputs[targets != -100].tolist() == ids[:-1]
        assert all(s.tokens.shape == (length + 1,) and s.starts.tolist() == [0] for s in samples)
        assert (samples[-1].targets != -100).any()
    (tmp_path / "a.txt").write_text(text)
    again = pack_text(tmp_path / "a.txt", tokenizer, corpus.end_of_text, 4)
    assert np.array_equal(again[0].tokens, pack_text(text, tokenizer, corpus.end_of_text, 4)[0].tokens)
    with pytest.raises(UsageError, match="does not exist"):
        pack_text(tmp_path / "none.txt", tokenizer, 0, 4)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8"):
        pack_text(tmp_path / "b.txt", tokenizer, 0, 4)
