"""Reading held-out sequences in the course of a run."""

from __future__ import annotations

from itertools import islice

from loopscale.config import Config
from loopscale.corpus.batches import collate
from loopscale.corpus.packing import PackedCorpus
from loopscale.model.inputs import Inputs
from loopscale.parallel.mesh import Mesh, on_reader


def read(mesh: Mesh, split: PackedCorpus, config: Config, sequences: int, microbatch: int) -> list[Inputs]:
    """This replica's part, maybe empty, of the first ``sequences`` of a split, as far as there are so many; in microbatches on
    each of its ranks. A collective of the replica."""
    own = iter(range(mesh.data_rank, min(sequences, len(split)), mesh.data_size))
    rows = iter(lambda: list(islice(own, microbatch)), [])
    found = on_reader(mesh, lambda: [collate([split[i] for i in r], r) for r in rows])
    return [Inputs.of(m, mesh.device, final_visit=config.depth.evaluation_depth, purpose="evaluation") for m in found]
