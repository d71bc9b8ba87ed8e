"""Several processes read one corpus, some of them killed: they must not meet but in file locks."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from loopscale.corpus.folder import Corpus

pytestmark = pytest.mark.ranks

READS = """
    import sys
    from loopscale.corpus.packing import PackedCorpus
    print("loaded", flush=True)
    for line in sys.stdin:  # one corpus folder a line
        packed = PackedCorpus(line.strip(), "train", 16)
        print(sum(int(packed[i].tokens.sum()) for i in range(len(packed))), flush=True)
"""


def reader(script: str = READS) -> subprocess.Popen[str]:
    """A process that reads each corpus it is told to, whole, and answers with the sum of what it read."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "loaded\n"
    return process


def tell(process: subprocess.Popen[str], folder: Path) -> None:
    assert process.stdin
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe
            pipe.close()


def fresh(corpus: Corpus, target: Path) -> Path:
    shutil.copytree(corpus.location, target, ignore=shutil.ignore_patterns("*.mds", ".locks"))
    return target


def test_two_processes_unpack_one_corpus_at_once_20_times(corpus: Corpus, tmp_path: Path) -> None:
    first, second = reader(), reader()
    answers = set()
    for number in range(20):
        folder = fresh(corpus, tmp_path / str(number))
        tell(first, folder)
        tell(second, folder)
        answers |= {answer(first), answer(second)}
    end(first, second)
    assert len(answers) == 1 and answers != {""}


STOPS_WHILE_UNPACKING = """
    import sys
    from pathlib import Path
    import streaming
    from loopscale.corpus.packing import PackedCorpus

    def prepare(self, shard):  # the lock is held, and half a shard is on disk
        Path(self.local, self.split, shard.raw_data.basename + ".tmp").write_bytes(b"half")
        print("unpacking", flush=True)
        sys.stdin.read()

    streaming.Stream.prepare_shard = prepare
    print("loaded", flush=True)
    PackedCorpus(sys.stdin.readline().strip(), "train", 16)[0]
"""


def test_a_killed_reader_leaves_nothing_that_hinders_the_next(corpus: Corpus, tmp_path: Path) -> None:
    folder = fresh(corpus, tmp_path / "corpus")
    killed, second = reader(STOPS_WHILE_UNPACKING), reader()
    tell(killed, folder)
    assert answer(killed) == "unpacking\n"
    tell(second, folder)  # waits for the lock
    killed.send_signal(signal.SIGKILL)
    wanted = answer(second)
    third = reader()
    tell(third, folder)
    assert answer(third) == wanted != ""
    end(killed, second, third)


STREAMS = """
    import sys
    from streaming import StreamingDataset
    dataset = StreamingDataset(local=sys.argv[1], split="train", batch_size=1)
    print("loaded", flush=True)
    sys.stdin.read()
"""


def test_shared_memory_is_neither_made_nor_touched(corpus: Corpus, tmp_path: Path) -> None:
    """A StreamingDataset elsewhere on the machine keeps its segments, and one that was killed is no hindrance."""
    folder = fresh(corpus, tmp_path / "corpus")
    neighbour = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STREAMS), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert answer(neighbour) == "loaded\n"
    before = segments()
    ours = reader()
    tell(ours, folder)
    assert answer(ours) != ""
    assert before and segments() == before
    end(neighbour)
    again = reader()
    tell(again, folder)
    assert answer(again) != ""
    end(ours, again)


def segments() -> set[str]:
    """Names of shared memory, of the kind that streaming gives."""
    return {path.name for path in Path("/dev/shm").glob("[0-9]*_*")}
