"""Rules between keys: combinations that cannot be, each as one sentence that names a way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loopscale.config.batch import settle
from loopscale.config.cluster import ClusterConfig
from loopscale.config.corpus import CorpusBuild
from loopscale.config.tree import Config, DepthConfig, ModelConfig, Section
from loopscale.errors import ConfigError, Problem

VALUE_GATE = 32
"""Channels of the state that gate a value embedding (Parcae's code)."""


def check(config: Section) -> list[Problem]:
    """All combinations in ``config`` that cannot be."""
    if isinstance(config, Config):
        return [*_model(config.model), *_depth(config), *_objective(config), *_layout(config), *_run(config)]
    if isinstance(config, CorpusBuild):
        return list(_corpus_build(config))
    if isinstance(config, ClusterConfig):
        return list(_cluster(config))
    return []


def _model(model: ModelConfig) -> Iterator[Problem]:
    if model.head_dim is None and model.hidden_size % model.heads:
        yield Problem(
            "model.heads",
            f"{model.heads} does not divide model.hidden_size {model.hidden_size}; give model.head_dim, or a divisor",
        )
    elif model.positions == "rope" and model.head_width % 2:
        yield Problem("model.head_dim", f"is {model.head_width}; rotary positions turn pairs, so it must be even")
    if model.heads % model.key_value_heads:
        yield Problem("model.kv_heads", f"{model.key_value_heads} does not divide model.heads {model.heads}")
    if model.state_init != "embedding" and model.inject == "none":
        yield Problem(
            "model.state_init",
            f"{model.state_init} with model.inject none would never see the tokens; "
            f"use state_init embedding, or inject add or ortho",
        )
    if model.state_std is not None and model.state_init not in ("normal", "truncated_normal"):
        yield Problem(
            "model.state_std",
            f"is {model.state_std:g}, but state_init {model.state_init} has no noise; "
            f"use state_std=null, or state_init normal or truncated_normal",
        )
    if model.inject_bias and model.inject != "huginn_linear":
        yield Problem(
            "model.inject_bias",
            f"is the bias of huginn_linear, not of inject {model.inject}; use inject_bias=false, or that injection",
        )
    if model.coda_norm and (model.readout != "rmsnorm" or not model.coda_layers or model.between in ("shared", "unit")):
        yield Problem(
            "model.coda_norm",
            "needs readout rmsnorm, a coda, and a state that is not normalised already; use coda_norm=false",
        )
    if model.qk_norm and model.qk_bias:
        yield Problem("model.qk_bias", "is refused beside qk_norm, for designs differ in which comes first; use one of them")
    if model.between == "shared" and model.readout != "rmsnorm":
        yield Problem(
            "model.between",
            f"shared needs a norm at every readout, and readout is {model.readout}; use readout rmsnorm, or between rmsnorm",
        )
    if model.exit_gate == "normed" and model.readout not in ("rmsnorm", "final_only"):
        yield Problem(
            "model.exit_gate",
            f"normed reads the readout's norm, and readout {model.readout} has none; use exit_gate raw, or readout rmsnorm",
        )
    if model.value_embeddings and model.hidden_size < VALUE_GATE:
        yield Problem(
            "model.value_embeddings",
            f"are gated by {VALUE_GATE} channels, and model.hidden_size is {model.hidden_size}; "
            f"use hidden_size {VALUE_GATE} or more, or value_embeddings=false",
        )
    if model.init_depth != 1 and model.init_scheme != "scaled":
        yield Problem(
            "model.init_depth",
            f"is {model.init_depth}, which init_scheme {model.init_scheme} does not use; use init_scheme scaled, or init_depth=1",
        )


def _depth(config: Config) -> Iterator[Problem]:
    depth = config.depth
    if depth.prior == "fixed" and depth.mean != int(depth.mean):
        yield Problem("depth.mean", f"is {depth.mean:g}; a fixed depth is a whole number")
    if depth.prior == "uniform" and 2 * depth.mean != int(2 * depth.mean):
        yield Problem("depth.mean", f"is {depth.mean:g}; a uniform law over 1 to 2 mean - 1 has a whole or half-whole mean")
    elif depth.mean > depth.cap:
        yield Problem("depth.mean", f"is {depth.mean:g}, above depth.cap {depth.cap}")
    elif depth.prior == "uniform" and 2 * depth.mean - 1 > depth.cap:
        yield Problem(
            "depth.mean",
            f"is {depth.mean:g}; a uniform law then reaches {2 * depth.mean - 1:g}, above depth.cap {depth.cap}; "
            f"use a mean up to {(depth.cap + 1) / 2:g}, or a larger cap",
        )
    elif depth.prior in ("pln", "learned") and not 1 < depth.mean < depth.cap:
        yield Problem(
            "depth.mean", f"is {depth.mean:g}; a {depth.prior} mean lies between 1 and depth.cap {depth.cap}; use prior fixed"
        )
    yield from _table(depth)
    if depth.curriculum is not None:
        yield from _curriculum(depth, depth.curriculum)
    yield from _learned(config)
    yield from _draws(config)
    if depth.per_sequence and depth.prior == "fixed":
        yield Problem(
            "depth.per_sequence",
            "gives every sequence the same depth under prior fixed; use per_sequence=false, or a prior that varies",
        )
    deepest = depth.deepest
    if config.model.inject == "none" and depth.backprop is not None and depth.backprop < deepest:
        yield Problem(
            "depth.backprop",
            f"{depth.backprop} of up to {deepest} visits with model.inject none gives the embeddings no gradient; "
            f"use depth.backprop=null, or an injection",
        )


def _table(depth: DepthConfig) -> Iterator[Problem]:
    if depth.prior != "table":
        if depth.table is not None:
            yield Problem("depth.table", f"would not be read under prior {depth.prior}; use prior table, or depth.table=null")
    elif depth.table is None:
        yield Problem("depth.table", "must be given for prior table: the probabilities of R = 1, 2, …")
    elif len(depth.table) > depth.cap:
        yield Problem(
            "depth.table", f"has {len(depth.table)} entries, above depth.cap {depth.cap}; use a shorter table, or a larger cap"
        )
    elif not any(depth.table):
        yield Problem("depth.table", "holds no probability above 0; give at least one depth some")


def _learned(config: Config) -> Iterator[Problem]:
    depth = config.depth
    if depth.prior != "learned":
        for key, default in (("budget", "visits"), ("baseline", "moving")):
            if (value := getattr(depth, key)) != default:
                yield Problem(f"depth.{key}", f"{value} belongs to prior learned, not to {depth.prior}; use {default}")
        return
    if depth.per_sequence:
        yield Problem(
            "depth.per_sequence",
            "hides which depth of a group earned its loss, and prior learned follows that; use per_sequence=false",
        )
    if depth.baseline == "leave_one_out":
        if depth.groups < 2:
            yield Problem("depth.baseline", f"leave_one_out compares groups, and depth.groups is {depth.groups}; use moving")
        elif depth.draws != "independent":
            yield Problem(
                "depth.baseline",
                f"leave_one_out is biased where a group's draw depends on the others', as with draws {depth.draws}; "
                f"use baseline moving, or draws independent",
            )


def _draws(config: Config) -> Iterator[Problem]:
    depth = config.depth
    if depth.draws != "independent" and depth.groups == 1 and not depth.per_sequence:
        yield Problem("depth.draws", f"{depth.draws} needs several draws a step; use depth.groups 2 or more, or independent")


def _curriculum(depth: DepthConfig, start: float) -> Iterator[Problem]:
    moving = ("poisson", "lognormal_poisson", "pln")
    if depth.prior not in moving:
        yield Problem(
            "depth.curriculum",
            f"moves the mean of a law, and that of prior {depth.prior} stays; "
            f"use prior {_either(moving)}, or depth.curriculum=null",
        )
    elif start > depth.cap:
        yield Problem("depth.curriculum", f"is {start:g}, above depth.cap {depth.cap}")
    elif depth.prior == "pln" and not 1 < start < depth.cap:
        yield Problem(
            "depth.curriculum", f"is {start:g}; a pln mean lies between 1 and depth.cap {depth.cap}; begin slightly above 1"
        )


def _objective(config: Config) -> Iterator[Problem]:
    model, depth, objective = config.model, config.depth, config.objective
    gated = objective.kind in ("exit_gate", "exit_gate_stage2")
    if gated and model.exit_gate == "none":
        yield Problem("objective.kind", f"{objective.kind} needs a gate; use model.exit_gate normed or raw, or kind per_loop")
    elif objective.kind == "exit_gate_stage2" and not (depth.prior == "fixed" and depth.gradient_visits(int(depth.mean)) > 1):
        yield Problem(
            "objective.kind",
            "exit_gate_stage2 compares each visit with the one before; use depth.prior fixed, mean and backprop 2 or more",
        )
    if model.exit_gate != "none" and not gated:
        yield Problem(
            "model.exit_gate",
            f"{model.exit_gate} gets no gradient from objective.kind {objective.kind}; "
            f"use objective.kind exit_gate, or model.exit_gate=none",
        )
    if depth.per_sequence and depth.prior != "fixed" and objective.kind != "terminal":
        yield Problem(
            "depth.per_sequence",
            f"has no common visits for {objective.kind} to supervise; use per_sequence=false, or objective.kind terminal",
        )
    if objective.kind == "exit_gate_stage2" and (objective.norm_penalty or objective.anchor):
        key = "norm_penalty" if objective.norm_penalty else "anchor"
        yield Problem(f"objective.{key}", "has nothing to train while exit_gate_stage2 freezes the model; set it to 0")
    if objective.loop_weights is not None:
        yield from _loop_weights(config, objective.loop_weights)


def _loop_weights(config: Config, weights: tuple[float, ...]) -> Iterator[Problem]:
    depth, kind = config.depth, config.objective.kind
    if kind != "per_loop":
        problem = f"belong to kind per_loop, not to {kind}; use objective.kind per_loop, or loop_weights=null"
    elif depth.prior != "fixed":
        problem = f"need the same visits at every step; use depth.prior fixed instead of {depth.prior}, or loop_weights=null"
    elif len(weights) != (visits := depth.gradient_visits(int(depth.mean))):
        problem = f"are {len(weights)} for {visits} supervised visits; give {visits}, or loop_weights=null"
    elif not any(weights):
        problem = "are all 0, which leaves no loss; give at least one visit a weight"
    else:
        return
    yield Problem("objective.loop_weights", problem)


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _layout(config: Config) -> Iterator[Problem]:
    yield from _tensor(config)
    yield from _pipeline(config)
    parallel = config.parallel
    if parallel.context > 1:
        yield Problem(
            "parallel.context",
            f"is {parallel.context}, and context parallelism is not offered: every rank of a replica attends over whole "
            f"sequences; use 1, and parallel.tensor with sequence_parallel=true for long ones",
        )
    if parallel.zero > 1:
        reason = (
            "divides gradients, and those of a shared block are whole until its last visit: its peak is no lower than that of 1"
            if parallel.zero == 2
            else "would gather the shared weights again at every visit"
        )
        yield Problem("parallel.zero", f"{parallel.zero} {reason}; use 0 or 1")
    if parallel.offload_optimizer and parallel.zero == 0:
        remedy = "use false" if config.optimizer.name == "muon" else "use that, or false"
        yield Problem("parallel.offload_optimizer", f"needs parallel.zero=1, since ZeRO 0 updates on the device; {remedy}")
    if config.train.offload_activations and config.train.recompute == "visit":
        yield Problem(
            "train.offload_activations",
            "has nothing to take away while train.recompute visit keeps no activations; use recompute none or layer, or false",
        )
    if config.optimizer.name == "muon" and parallel.zero:
        yield Problem(
            "parallel.zero",
            f"{parallel.zero} divides matrices that muon needs whole; use parallel.zero=0, or optimizer.name adamw",
        )
    try:
        settle(config.batch, config.depth.groups, 1)
    except ConfigError as error:
        yield from error.problems


def _tensor(config: Config) -> Iterator[Problem]:
    tensor, model = config.parallel.tensor, config.model
    divided = {
        "model.heads": model.heads,
        "model.kv_heads": model.key_value_heads,
        "model.ffn_size": model.ffn_size,
    }
    uneven = [f"{key} {size}" for key, size in divided.items() if size % tensor]
    if uneven:
        yield Problem("parallel.tensor", f"{tensor} does not divide {' and '.join(uneven)}; use a common divisor, or 1")
    length = config.corpus.sequence_length
    if config.parallel.sequence_parallel and length % tensor:
        yield Problem(
            "parallel.sequence_parallel",
            f"divides positions, and parallel.tensor {tensor} does not divide corpus.sequence_length {length}; "
            f"use sequence_parallel=false, or a multiple",
        )
    if tensor > 1 and config.optimizer.name == "muon":
        yield Problem(
            "parallel.tensor", f"{tensor} divides matrices that muon needs whole; use parallel.tensor=1, or optimizer.name adamw"
        )


def _pipeline(config: Config) -> Iterator[Problem]:
    if config.parallel.pipeline > 1 and config.objective.kind == "exit_gate_stage2":
        yield Problem(
            "parallel.pipeline",
            f"is {config.parallel.pipeline}, and exit_gate_stage2 trains the gate alone, which sits on one stage; use 1",
        )
    stages, layers, slices = config.parallel.pipeline, config.model.core_layers, config.parallel.slices
    if stages > layers + 1:
        yield Problem(
            "parallel.pipeline",
            f"{stages} stages need at least {stages - 1} core layers beside the home stage; "
            f"model.core_layers is {layers}. Use 1 to {layers + 1}",
        )
    elif not isinstance(slices, str) and (len(slices) != stages or sum(slices) != layers or 0 in slices[1:]):
        yield Problem(
            "parallel.slices",
            f"{list(slices)} must be one number for each of the {stages} stage(s), {layers} in all (model.core_layers), "
            f"and only the first, home's, may be 0; or use even",
        )


def _run(config: Config) -> Iterator[Problem]:
    if "://" in config.corpus.path and config.corpus.cache is None:
        yield Problem("corpus.cache", f"must name a local folder, since corpus.path {config.corpus.path} is a URL")
    if (folder := config.checkpoint.folder) is not None:
        scheme, _, rest = folder.partition("://") if "://" in folder else ("", "", folder)
        if not rest.strip("/") and (scheme or not rest):
            yield Problem("checkpoint.folder", f"{folder!r} names no folder; give one, or a URL such as s3://bucket/runs")
        if scheme == "memory":
            yield Problem(
                "checkpoint.folder", f"{folder} ends with the process; give a folder, or a URL such as s3://bucket/runs"
            )
    stuck_after, timeout = config.train.stuck_after, config.parallel.timeout
    if stuck_after is not None and stuck_after >= timeout:
        yield Problem(
            "train.stuck_after",
            f"is {stuck_after}, but after parallel.timeout {timeout} seconds without an answer the run has ended; use half of "
            f"that, or a longer timeout",
        )
    if config.train.spikes == "rewind" and config.checkpoint.every == 0:
        yield Problem(
            "train.spikes",
            "rewind goes back to a checkpoint, and checkpoint.every 0 makes none; use skip, or checkpoint.every=100",
        )
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


def _cluster(cluster: ClusterConfig) -> Iterator[Problem]:
    container, job = cluster.container, cluster.job
    if container.engine != "none" and container.image is None:
        yield Problem("container.image", f"must be given for container.engine {container.engine}")
    if container.engine == "none" and container.image is not None:
        yield Problem("container.engine", f"is none, and container.image is {container.image}; use pyxis, apptainer or podman")
    if job.notice >= 60 * job.time:
        yield Problem("job.notice", f"is {job.notice} s, not less than job.time {job.time} min")
    ours = {"nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "array", "dependency", "requeue", "job-name"}
    for option in job.sbatch:
        name = option.partition("=")[0].replace("_", "-")
        if name in ours:
            yield Problem("job.sbatch", f"has {option}, which is set by other keys and `loopscale launch` itself")
