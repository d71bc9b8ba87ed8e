"""Memory by kind in a run's files, and what is said when there is not enough of it."""

from __future__ import annotations

import re
import resource
from dataclasses import replace

import pytest
import torch

from loopscale.config import Config, settle
from loopscale.diagnostics.memory import KINDS
from loopscale.errors import UsageError
from loopscale.model.flops import count
from loopscale.model.memory import elements, stage_holders
from loopscale.model.ring import Ring
from loopscale.train.memory import Planned, check_fits, explain, is_out_of_memory
from tests.conftest import TINY

GIB = 2**30


@pytest.mark.ranks
def test_every_record_has_the_kinds_of_every_rank_and_the_journal_the_heaviest(runs):
    """Two stages, the second with one of the two core layers; without replicas ZeRO pads to an even number of elements."""
    runs.train("kinds", "parallel.pipeline=2", "parallel.slices=[1,1]", "train.steps=3", ranks=2)
    vocabulary = runs.manifest("kinds")["corpus"]["vocab_size"]
    config = Config.model_validate({**TINY, "model": {**TINY["model"], "vocab_size": vocabulary}})
    sizes = [4 * sum(elements(h, 1) for h in own) for own in stage_holders(config, (1, 1))]
    for record in runs.records("kinds"):
        memory = record["memory"]
        assert tuple(memory) == KINDS and all(len(ranks) == 2 for ranks in memory.values())
        assert memory["parameters"] == memory["gradients"] == sizes
        assert memory["optimizer"] == [3 * size for size in sizes]
        assert all(peak > 0 for peak in memory["peak"])
    (told,) = [event["message"] for event in runs.journal("kinds") if event["kind"] == "memory"]
    peaks = [max(record["memory"]["peak"][rank] for record in runs.records("kinds")) for rank in (0, 1)]
    heaviest = peaks.index(max(peaks))
    assert re.fullmatch(rf"heaviest rank {heaviest} \(stage {heaviest}\), GiB: parameters .* = peak \S+ · predicted \S+", told)
    about = runs.manifest("kinds")["memory"]
    assert about["stages"] == [0, 1] and [stage["parameters"] for stage in about["predicted"]] == sizes


@pytest.mark.ranks
def test_an_allocation_that_fails_ends_the_run_with_one_sentence(runs):
    """A process that may have 2 GiB of data, and a microbatch whose activations alone are more."""
    wide = ["model.hidden_size=256", "model.ffn_size=4096", "batch.global_batch=256", "batch.microbatch=128", "train.steps=2"]
    with runs.start("large", *wide) as job:
        resource.prlimit(job.ranks[0].pid, resource.RLIMIT_DATA, (2 * GIB, 2 * GIB))
        assert job.wait_for_end() == [1], job.printed(0)
        output, sentence = job.printed(0), job.last_line(0)
    assert "Traceback" not in output
    assert re.match(
        r"error: rank 0 \(stage 0\) ran out of memory while running [a-z ]+ ?\d* of microbatch 0 of step 1, "
        r"for want of \S+ \S+; it held \(predicted at most\): parameters \S+ MiB \(\S+ MiB\), .*in all \S+ \S+ \(\S+ GiB\); "
        r"of the \S+ GiB predicted, activations are the largest part\. To need less, set batch\.microbatch=\d+ ",
        sentence,
    ), sentence
    assert "parallel.in_flight" not in sentence


def planned(device: str = "cpu", size: int = 1, **sections) -> Planned:
    base = {
        "model": {"vocab_size": 1000, "hidden_size": 256, "core_layers": 4},
        "batch": {"global_batch": 16, "microbatch": 4},
        "depth": {"prior": "fixed", "mean": 4},
    }
    config = Config.model_validate({**base, **{name: {**base.get(name, {}), **own} for name, own in sections.items()}})
    batch = settle(config.batch, 1, size // (config.parallel.tensor * config.parallel.pipeline))
    where = torch.device(device)
    ring = Ring.of(config, count(config.model, config.corpus.sequence_length))
    return Planned(config, batch, ring, where, torch.bfloat16 if device == "cuda" else torch.float32)


def told(case: Planned, stage: int = 0, in_step: bool = True, **now: int) -> str:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
    return str(explain(error, case, rank=3, stage=stage, doing="validating", now=now, in_step=in_step))


def settings(sentence: str) -> list[str]:
    return re.findall(r"[a-z_]+\.[a-z_]+=\w+", sentence)


def test_only_settings_that_are_enough_are_named():
    """What a rank held when it failed is what there is; a tenth is left for what the prediction may miss."""
    alone = planned()
    sentence = told(alone)
    assert "rank 3 (stage 0) ran out of memory while validating, for want of 20.00 MiB" in sentence
    assert settings(sentence) == ["batch.microbatch=2", "train.recompute=layer", "depth.backprop=2"]
    half = replace(alone, batch=replace(alone.batch, microbatch=2, accumulation=8)).predict()[0].peak
    tight = told(alone, peak=int(1.05 * half))
    assert "batch.microbatch=2" not in settings(tight) and "batch.microbatch=1" in settings(tight)
    both = told(alone, peak=int(1.4 * alone.predict()[0].held))
    assert "To need less, set batch.microbatch=1 and train.recompute=" in both
    assert "No setting is enough: with batch.microbatch=1 and " in told(alone, peak=alone.predict()[0].held)


def test_settings_that_this_run_cannot_use_are_not_named():
    ring = told(planned(size=2, parallel={"pipeline": 2}, batch={"microbatch": 1}), stage=1)
    assert settings(ring) == ["parallel.in_flight=1", "train.recompute=layer", "depth.backprop=2"]
    on_gpu = told(planned("cuda", model={"inject": "none", "state_init": "embedding"}, depth={"backprop": None}))
    assert settings(on_gpu) == ["batch.microbatch=2", "train.recompute=layer", "train.offload_activations=true"]
    recomputed = told(planned(batch={"microbatch": 1}, depth={"mean": 1}, train={"recompute": "visit"}))
    assert "batch.microbatch" not in recomputed and "train.recompute" not in recomputed
    assert "parallel.tensor" not in recomputed, "more ranks share one machine's memory"
    beside = told(planned(), in_step=False, peak=2 * GIB)
    assert not settings(beside) and beside.endswith("leave more memory free")


def test_the_kind_that_grew_beyond_its_prediction_is_named_before_the_largest():
    case = planned("cuda", 2, batch={"microbatch": 1}, depth={"mean": 1}, model={"hidden_size": 1024, "ffn_size": 4096})
    expected = case.predict()[0]
    assert "the optimizer's states are the largest part" in told(case)
    assert settings(told(case))[0] == "parallel.offload_optimizer=true"
    grown = told(case, **{**expected.measurable(), "activations": 9 * expected.peak})
    assert "activations have grown beyond their part" in grown
    not_divided = planned(
        "cuda", 4, batch={"microbatch": 1}, depth={"mean": 1}, model={"hidden_size": 1024}, parallel={"zero": 0}
    )
    assert "parallel.zero=1" in told(not_divided) and "offload_optimizer" not in told(not_divided)


def test_a_run_that_cannot_fit_is_refused_before_it_begins():
    check_fits(planned(), [0])
    huge = planned(batch={"global_batch": 2**10, "microbatch": 2**10}, corpus={"sequence_length": 512})
    with pytest.raises(UsageError, match=r"will need [\d,.]+ GiB, and \S+ GiB are free; most of it is activations.*To need less"):
        check_fits(huge, [0])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (MemoryError(), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
    ],
)
def test_what_a_lack_of_memory_looks_like(error, expected):
    assert is_out_of_memory(error) is expected
