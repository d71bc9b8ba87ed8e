"""The head and the last line of a run's log, and the facts of its manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import loopscale
from loopscale.config import Batch, Config
from loopscale.corpus.folder import Corpus
from loopscale.depth import Prior
from loopscale.diagnostics.memory import Heaviest
from loopscale.environment.kernels import Kernels
from loopscale.model.flops import Counts
from loopscale.model.memory import Memory
from loopscale.model.ring import Ring
from loopscale.parallel.mesh import Mesh


@dataclass(frozen=True)
class Setting:
    """A run as it is set up."""

    folder: Path
    config: Config
    batch: Batch
    corpus: Corpus
    counts: Counts
    prior: Prior
    mesh: Mesh
    ring: Ring
    compute: torch.dtype
    kernels: Kernels
    stages: Sequence[int]
    """Of all ranks."""
    predicted: Sequence[Memory]
    """By stage."""


def banner(run: Setting) -> list[str]:
    """What is about to be trained, on what and how."""
    config, counts, batch, mesh = run.config, run.counts, run.batch, run.mesh
    model, depth, length = config.model, config.depth, config.corpus.sequence_length
    shape = f"{model.prelude_layers}/{model.core_layers}/{model.coda_layers}"
    mean = depth.evaluation_depth
    corpus = run.corpus
    train, held_out = (corpus.split(name).tokens for name in ("train", "validation"))
    step_tokens = batch.global_batch * length
    total = step_tokens * config.train.steps
    named = f"learned (entropy {depth.entropy_coef:g})" if depth.prior == "learned" else depth.prior.upper()
    law = f"fixed {mean}" if depth.prior == "fixed" else f"{named} mean {depth.mean:g} (cap {depth.cap})"
    gradient = "through every visit" if depth.backprop is None else f"through the last {depth.backprop}"
    tracking = "wandb off" if config.log.wandb == "disabled" else f"wandb {config.log.wandb}"
    every = f"every {config.checkpoint.every} steps" if config.checkpoint.every else "at the end"
    compute = str(run.compute).removeprefix("torch.")
    kernels = f" · kernels {run.kernels}" if mesh.device.type == "cuda" else ""
    return [
        f"loopscale {loopscale.__version__} · {run.folder.name} · looped {shape} · {sizes(counts, mean)}",
        f"data     {config.corpus.path} · {quantity(train)} tokens train, {quantity(held_out)} held out · "
        f"{corpus.tokenizer_name} · fingerprint {corpus.fingerprint[:4]}…{corpus.fingerprint[-2:]}",
        f"batch    {batch.global_batch} × {length} = {step_tokens:,} tokens a step · {batch.groups} depth groups · microbatch "
        f"{batch.microbatch} · {config.train.steps:,} steps = {quantity(total)} tokens ({total / train:.1f} epochs)",
        f"depth    {law}, backprop {gradient} · {model.inject} injection · {config.objective.kind} loss",
        f"layout   {_layout(mesh, run.ring)} · {mesh.device.type} {compute} · ZeRO-{config.parallel.zero}{kernels}",
        f"run      {run.folder} · {tracking} · checkpoint {every}, keep {config.checkpoint.keep}",
    ]


def _layout(mesh: Mesh, ring: Ring) -> str:
    """How many processes do what."""
    if mesh.tensor_size * mesh.stages == 1:
        return f"{mesh.world} process{'es' * (mesh.world > 1)}"
    layout = f"{mesh.world} processes = TP {mesh.tensor_size} × PP {mesh.stages} × DP {mesh.data_size}"
    layout += " · sequence parallel" * mesh.sequence_parallel
    if mesh.stages == 1:
        return layout
    return f"{layout} · core layers {'|'.join(map(str, ring.slices))} · {ring.in_flight} microbatches in flight"


def done_line(run: Setting, steps: int, elapsed: float, validation: dict[int, float], sequences: int) -> str:
    """How good the model is, with depth and the number of held-out sequences."""
    mean = run.config.depth.evaluation_depth
    depth = min(validation, key=lambda d: (abs(d - mean), d))
    minutes, seconds = divmod(round(elapsed), 60)
    return (
        f"{steps} steps in {minutes}:{seconds:02d} · held-out ppl {math.exp(validation[depth]):.1f} at depth {depth} "
        f"({sequences} sequences) · next: loopscale eval {run.folder}"
    )


def memory_line(run: Setting, heaviest: Heaviest) -> str:
    """Which rank held most, what of each kind, and what was predicted."""
    stage, gib = run.stages[heaviest.rank], 2**30
    kinds = ", ".join(f"{kind} {size / gib:.3g}" for kind, size in heaviest.kinds.items() if size and kind != "peak")
    return (
        f"heaviest rank {heaviest.rank} (stage {stage}), GiB: {kinds} = peak {heaviest.kinds['peak'] / gib:.3g} · "
        f"predicted {run.predicted[stage].peak / gib:.3g}"
    )


def facts(run: Setting, matmul_rate: float | None) -> dict[str, Any]:
    """What the manifest says beyond versions and code."""
    corpus = run.corpus
    return {
        "layout": {
            "processes": run.mesh.world, "data_parallel": run.mesh.data_size, "tensor_parallel": run.mesh.tensor_size,
            "sequence_parallel": run.mesh.sequence_parallel, "pipeline_stages": run.mesh.stages,
            "core_slices": list(run.ring.slices), "in_flight": run.ring.in_flight,
            "zero": run.config.parallel.zero, "device": run.mesh.device.type, "compute": str(run.compute),
            "microbatch": run.batch.microbatch,
        },
        "corpus": {
            "path": run.config.corpus.path, "fingerprint": corpus.fingerprint, "vocab_size": corpus.vocab_size,
            "train_tokens": corpus.split("train").tokens, "validation_tokens": corpus.split("validation").tokens,
        },
        "parameters": {
            "total": run.counts.total, "non_embedding": run.counts.total - run.counts.embedding,
            "effective": run.counts.effective(run.config.depth.evaluation_depth),
        },
        "prior": {"name": run.prior.name, "mean": run.prior.mean, "pmf": list(run.prior.probabilities)},
        "matmul_flops_per_s": matmul_rate,
        "memory": {"stages": list(run.stages), "predicted": [stage.measurable() for stage in run.predicted]},
    }  # fmt: skip


def sizes(counts: Counts, depth: int) -> str:
    """Parameter counts in words."""
    return (
        f"{quantity(counts.total)} parameters ({quantity(counts.total - counts.embedding)} non-embedding, "
        f"{quantity(counts.effective(depth))} effective at depth {depth})"
    )


def quantity(value: float) -> str:
    """1234567 as "1.23M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
