from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from loopscale.config import Batch
from loopscale.corpus.batches import StepBatch, batches, collate
from loopscale.corpus.folder import Corpus
from loopscale.corpus.order import Order
from loopscale.corpus.packing import PackedCorpus
from loopscale.errors import DataError
from tests.train.jobs import Job

LENGTH = 16


def sized(ranks: int, microbatch: int = 1) -> Batch:
    """8 sequences a step in 2 depth groups, over ``ranks`` replicas."""
    return Batch(global_batch=8, microbatch=microbatch, accumulation=8 // (ranks * microbatch), groups=2, data_parallel=ranks)


def read(packed: PackedCorpus, batch: Batch, rank: int, consumed: int = 0, workers: int = 0, steps: int = 3) -> list[StepBatch]:
    order = Order(len(packed), seed=3, shuffle_block=64)
    return list(batches(packed, order, batch, data_rank=rank, consumed=consumed, workers=workers, steps=steps))


def global_groups(packed: PackedCorpus, batch: Batch, **options: int) -> list[list[list[tuple[int, list[int]]]]]:
    """Per step and group: (global sample, tokens) over all ranks."""
    ranks = [read(packed, batch, rank, **options) for rank in range(batch.data_parallel)]
    return [
        [
            [
                (int(sample), tokens.tolist())
                for steps in ranks
                for microbatch in steps[step].groups[group]
                for sample, tokens in zip(microbatch.samples, microbatch.tokens, strict=True)
            ]
            for group in range(batch.groups)
        ]
        for step in range(len(ranks[0]))
    ]


@pytest.fixture(scope="module")
def packed(corpus: Corpus) -> PackedCorpus:
    return PackedCorpus(corpus.location, "train", LENGTH)


def test_a_step_is_the_next_global_samples(packed: PackedCorpus) -> None:
    order = Order(len(packed), seed=3, shuffle_block=64)
    for step, groups in enumerate(global_groups(packed, sized(1))):
        flat = [pair for group in groups for pair in group]
        assert [sample for sample, _ in flat] == list(range(8 * step, 8 * step + 8))
        assert all(tokens == packed[order[sample]].tokens.tolist() for sample, tokens in flat)


@pytest.mark.parametrize(("ranks", "microbatch"), [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_layouts_read_the_same_groups(packed: PackedCorpus, ranks: int, microbatch: int) -> None:
    assert global_groups(packed, sized(ranks, microbatch)) == global_groups(packed, sized(1))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 4])
def test_worker_processes_change_nothing(packed: PackedCorpus, ranks: int) -> None:
    assert global_groups(packed, sized(ranks), workers=2) == global_groups(packed, sized(1))


def test_a_resumed_run_reads_on_across_epochs(packed: PackedCorpus) -> None:
    steps = 2 * len(packed) // 8 + 2  # past two epoch edges, which steps straddle
    assert len(packed) % 8
    whole = global_groups(packed, sized(1, 4), steps=steps)
    for stop in (1, len(packed) // 8, len(packed) // 8 + 1, steps - 1):
        assert global_groups(packed, sized(2, 2), consumed=8 * stop, steps=2)[: steps - stop] == whole[stop : stop + 2]
    first = [tokens for step in whole for group in step for _, tokens in group][: len(packed)]
    assert sorted(first) == sorted(packed[i].tokens.tolist() for i in range(len(packed)))


def test_microbatches_carry_boundaries_and_masks(packed: PackedCorpus) -> None:
    order = Order(len(packed), seed=3, shuffle_block=64)
    for step in read(packed, sized(2, 2), rank=1):
        assert (step.end - step.first, len(step.groups)) == (8, 2)
        for microbatch in (m for group in step.groups for m in group):
            samples = [packed[order[int(c)]] for c in microbatch.samples]
            alike = collate(samples, microbatch.samples.tolist())
            assert torch.equal(microbatch.tokens, alike.tokens) and torch.equal(microbatch.targets, alike.targets)
            assert torch.equal(microbatch.cu_seqlens, alike.cu_seqlens) and microbatch.cu_seqlens.dtype == torch.int32
            starts = [row * LENGTH + p for row, s in enumerate(samples) for p in s.starts.tolist()]
            assert microbatch.cu_seqlens.tolist() == [*starts, 2 * LENGTH]
            assert torch.equal(microbatch.samples, alike.samples)
            assert microbatch.inputs.shape == microbatch.targets.shape == (2, LENGTH)
            assert torch.equal(microbatch.to("cpu").samples, microbatch.samples)


def test_the_run_s_own_generator_is_left_alone(packed: PackedCorpus) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    read(packed, sized(1), rank=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.ranks
def test_workers_ignore_notices_and_end_when_closed(packed: PackedCorpus) -> None:
    order = Order(len(packed), seed=3, shuffle_block=64)
    reader = batches(packed, order, sized(1), data_rank=0, consumed=0, workers=2, steps=20)
    others = psutil.Process().children()
    next(reader)
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) == 2
    for worker in workers:
        for notice in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            worker.send_signal(notice)
    assert len(list(zip(reader, range(10), strict=False))) == 10
    reader.close()
    assert not psutil.wait_procs(workers, timeout=5)[1]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 1])
def test_damage_met_while_reading_is_one_sentence(corpus: Corpus, tmp_path: Path, workers: int) -> None:
    import shutil

    shutil.copytree(corpus.location, tmp_path / "copy", ignore=shutil.ignore_patterns("*.mds", ".locks"))
    for shard in (tmp_path / "copy" / "train").glob("*.zstd"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=r"^shard train/shard\.\d+\.mds\.zstd of corpus .* is damaged: [^\n]*$"):
        read(PackedCorpus(tmp_path / "copy", "train", LENGTH), sized(1), rank=0, workers=workers)


UNCLOSED = """
    import sys
    from loopscale.config import Batch
    from loopscale.corpus.batches import batches
    from loopscale.corpus.order import Order
    from loopscale.corpus.packing import PackedCorpus

    packed = PackedCorpus(sys.argv[1], "train", 16)
    reader = batches(packed, Order(len(packed), 3, 64), Batch(8, 1, 8, 2, 1), data_rank=0, consumed=0, workers=2, steps=20)
    next(reader)
    raise SystemExit(3)
"""


@pytest.mark.ranks
def test_a_run_that_fails_does_not_wait_for_its_workers(corpus: Corpus) -> None:
    """The real thing: it is about what an interpreter does at its end."""
    command = [sys.executable, "-c", textwrap.dedent(UNCLOSED), corpus.location]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (3, "")


RANK = """
    import json, os, sys
    import torch.distributed as dist
    from loopscale.config import Batch
    from loopscale.corpus.batches import batches
    from loopscale.corpus.order import Order
    from loopscale.corpus.packing import PackedCorpus

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank in json.loads(sys.argv[3]):  # the others do not read, and nobody waits for them
        packed = PackedCorpus(sys.argv[1], "train", 16)
        batch = Batch(global_batch=8, microbatch=1, accumulation=4, groups=2, data_parallel=2)
        order = Order(len(packed), seed=3, shuffle_block=64)
        reader = batches(packed, order, batch, data_rank=rank % 2, consumed=8, workers=1, steps=2)
        read = [[[m.samples.tolist() for m in group] for group in step.groups] for step in reader]
        json.dump(read, open(f"{sys.argv[2]}/{rank}.json", "w"))
    dist.barrier()
    dist.destroy_process_group()
"""


def by_ranks(tmp_path: Path, corpus: Path, ranks: int, readers: list[int]) -> list[list[list[list[list[int]]]]]:
    command = [sys.executable, "-c", textwrap.dedent(RANK), str(corpus), str(tmp_path), json.dumps(readers)]
    with Job(tmp_path, "stripes", [command] * ranks) as job:
        assert job.wait_for_end() == [0] * ranks, job.all_printed()
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in readers]


@pytest.mark.ranks
@pytest.mark.parametrize("readers", [[0, 1], [1]])
def test_ranks_read_their_stripes(corpus: Corpus, tmp_path: Path, readers: list[int]) -> None:
    stripes = {
        0: [[[[8], [9]], [[12], [13]]], [[[16], [17]], [[20], [21]]]],
        1: [[[[10], [11]], [[14], [15]]], [[[18], [19]], [[22], [23]]]],
    }
    assert by_ranks(tmp_path, Path(corpus.location), 2, readers) == [stripes[rank] for rank in readers]
