"""Several processes read one corpus, some of them killed: they must not meet but in file locks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from loopscale.corpus.folder import Corpus
from tests.launch import Launched, kill_group

pytestmark = pytest.mark.ranks


def read(orders: Connection) -> None:
    """Reads each corpus it is told to, whole, and answers with the sum of what it read."""
    from loopscale.corpus.packing import PackedCorpus

    while True:
        packed = PackedCorpus(orders.recv(), "train", 16)
        orders.send(sum(int(packed[i].tokens.sum()) for i in range(len(packed))))


def stop_while_unpacking(orders: Connection) -> None:
    import streaming

    from loopscale.corpus.packing import PackedCorpus

    def prepare(self: streaming.Stream, shard: Any) -> None:  # the lock is held, and half a shard is on disk
        Path(self.local, self.split, shard.raw_data.basename + ".tmp").write_bytes(b"half")
        orders.send("unpacking")
        time.sleep(600)

    streaming.Stream.prepare_shard = prepare
    PackedCorpus(orders.recv(), "train", 16)[0]


def stream(orders: Connection) -> None:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(orders.recv()), split="train", batch_size=1)
    orders.send(len(dataset))
    time.sleep(600)


class Reader:
    """A process that does ``work``, seen from the test."""

    def __init__(self, work: Callable[[Connection], None], output: Path):
        self._pipe, orders = Pipe()
        self._process = Launched(work, (orders,), output)
        orders.close()

    def tell(self, folder: Path) -> None:
        self._pipe.send(folder)

    def answer(self) -> Any:
        return self._pipe.recv()

    def end(self) -> None:
        kill_group(self._process)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    """Starts readers, which end with the test."""
    readers = list[Reader]()

    def start(work: Callable[[Connection], None] = read) -> Reader:
        readers.append(Reader(work, tmp_path / f"reader-{len(readers)}.txt"))
        return readers[-1]

    yield start
    for reader in readers:
        reader.end()


def fresh(corpus: Corpus, target: Path) -> Path:
    shutil.copytree(corpus.location, target, ignore=shutil.ignore_patterns("*.mds", ".locks"))
    return target


def test_two_processes_unpack_one_corpus_at_once_20_times(corpus: Corpus, tmp_path: Path, start: Callable[..., Reader]) -> None:
    first, second = start(), start()
    answers = set()
    for number in range(20):
        folder = fresh(corpus, tmp_path / str(number))
        first.tell(folder)
        second.tell(folder)
        answers |= {first.answer(), second.answer()}
    assert len(answers) == 1


def test_a_killed_reader_leaves_nothing_that_hinders_the_next(
    corpus: Corpus, tmp_path: Path, start: Callable[..., Reader]
) -> None:
    folder = fresh(corpus, tmp_path / "corpus")
    killed, second = start(stop_while_unpacking), start()
    killed.tell(folder)
    assert killed.answer() == "unpacking"
    second.tell(folder)  # waits for the lock
    killed.end()
    wanted = second.answer()
    third = start()
    third.tell(folder)
    assert third.answer() == wanted


def test_shared_memory_is_neither_made_nor_touched(corpus: Corpus, tmp_path: Path, start: Callable[..., Reader]) -> None:
    """A StreamingDataset elsewhere on the machine keeps its segments, and one that was killed is no hindrance."""
    folder = fresh(corpus, tmp_path / "corpus")
    neighbour, ours, again = start(stream), start(), start()
    neighbour.tell(folder)
    assert neighbour.answer() > 0
    before = segments()
    ours.tell(folder)
    assert ours.answer() > 0
    assert before and segments() == before
    neighbour.end()
    again.tell(folder)
    assert again.answer() > 0


def segments() -> set[str]:
    """Names of shared memory, of the kind that streaming gives."""
    return {path.name for path in Path("/dev/shm").glob("[0-9]*_*")}
