"""What a configuration makes of a number of ranks, before any of them is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

from loopscale.config import Batch, Config, settle
from loopscale.errors import ConfigError, DataError, Problem, UsageError
from loopscale.model.flops import Counts, count
from loopscale.model.ring import Ring
from loopscale.parallel.mesh import replicas

_SHOWN_NODES = 3


@dataclass(frozen=True)
class Layout:
    """A run on ``nodes`` × ``per_node`` ranks; the vocabulary of ``config`` is settled."""

    config: Config
    nodes: int
    per_node: int
    batch: Batch
    counts: Counts
    ring: Ring

    @classmethod
    def of(cls, config: Config, nodes: int | None = None, per_node: int | None = None) -> Layout:
        """The layout of ``config``; where a number is not given, the smallest that makes whole replicas.

        Raises :class:`ConfigError` when the ranks make no whole replicas or the batch cannot be cut for them.
        """
        parallel = config.parallel
        size = parallel.tensor * parallel.pipeline
        if nodes is None:
            nodes = 1 if per_node is None else size // gcd(size, per_node)
        if per_node is None:
            per_node = size // gcd(size, nodes)
        batch = settle(config.batch, config.depth.groups, replicas(parallel, nodes * per_node))
        model = config.model.model_copy(update={"vocab_size": _vocabulary(config)})
        counts = count(model, config.corpus.sequence_length)
        return cls(config.model_copy(update={"model": model}), nodes, per_node, batch, counts, Ring.of(config, counts))

    @property
    def stages(self) -> int:
        return len(self.ring.slices)

    @property
    def in_flight(self) -> int:
        """Microbatches that the ring holds at once, at most."""
        return min(self.ring.in_flight, self.batch.accumulation)

    def sizes(self) -> str:
        """As "TP 2 × PP 4 × DP 8"."""
        return f"TP {self.config.parallel.tensor} × PP {self.stages} × DP {self.batch.data_parallel}"

    def describe_slices(self) -> str:
        """The layers of each stage; neighbours with equally many are named together."""
        model, home = self.config.model, self.ring.slices[0]
        said = [f"home: {model.prelude_layers} prelude + {home} core + {model.coda_layers} coda"]
        for layers, own in groupby(range(1, self.stages), key=lambda s: self.ring.slices[s]):
            stages = list(own)
            said.append(f"{stages_named(stages)}: {layers} core layer{'s' * (layers > 1)}{' each' * (len(stages) > 1)}")
        return ", ".join(said)

    def describe_ranks(self) -> str:
        """Which part of the model each node's ranks hold, shortened for many nodes."""
        shown = "; ".join(f"node {n}: {self._on_node(n)}" for n in range(min(self.nodes, _SHOWN_NODES)))
        more = "; …" if self.nodes > _SHOWN_NODES else ""
        apart = self.nodes > 1 and self.per_node % self.config.parallel.tensor
        return shown + more + (" · ranks that share layers lie on different nodes" if apart else "")

    def _on_node(self, node: int) -> str:
        replicas_of: dict[int, list[int]] = {}  # by stage
        for rank in range(node * self.per_node, (node + 1) * self.per_node):
            stage, replica = self.place(rank)
            here = replicas_of.setdefault(stage, [])
            if replica not in here:
                here.append(replica)
        alike = [(list(stages), here) for here, stages in groupby(sorted(replicas_of), key=lambda s: replicas_of[s])]
        if len(alike) == 1 and len(replicas_of) == self.stages:
            return _numbered("replica", alike[0][1])
        return ", ".join(f"{stages_named(stages)} of {_numbered('replica', here)}" for stages, here in alike)

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, replica) of a rank, as Megatron numbers them."""
        group = rank // self.config.parallel.tensor
        if self.config.parallel.order == "tp-dp-pp":
            return divmod(group, self.batch.data_parallel)
        replica, stage = divmod(group, self.stages)
        return stage, replica


def stages_named(stages: Sequence[int]) -> str:
    """Neighbouring stages, as "home and stages 1–3"."""
    behind = [s for s in stages if s > 0]
    return " and ".join(["home"] * (0 in stages) + ([_numbered("stage", behind)] if behind else []))


def by_stage(values: Sequence[str]) -> str:
    """Each stage's value, home first; neighbours that agree are named together."""
    if len(values) > 1 and len(set(values)) == 1:
        return f"every stage: {values[0]}"
    agreeing = ((value, list(own)) for value, own in groupby(range(len(values)), key=lambda s: values[s]))
    return " · ".join(f"{stages_named(stages)}: {value}" for value, stages in agreeing)


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    """As "stage 2" or "stages 1–3"."""
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {numbers[0]}–{numbers[-1]}"


def _vocabulary(config: Config) -> int:
    from loopscale.corpus.folder import open_corpus

    if config.model.vocab_size is not None:
        return config.model.vocab_size
    try:
        return open_corpus(config.corpus.path, config.corpus.cache).vocab_size
    except (UsageError, DataError) as error:
        sentence = f"must be given, since the corpus cannot tell it ({error})"
        raise ConfigError("layout", [Problem("model.vocab_size", sentence)]) from None
