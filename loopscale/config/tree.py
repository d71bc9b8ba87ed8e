"""The typed tree of a training run. A field's docstring is its help text; its type and bounds are its rules.

Rules that tie several keys together are in ``check.py``; reading files and overrides is in ``load.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: frozen, strictly typed, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder name of the run below `run.folder`; unset: the config file's name and the time."""
    folder: str = "runs"
    """Where run folders are made."""
    seed: NonNegativeInt = 1
    """Seed of weights, data order, depth draws and state noise."""


class CorpusConfig(Section):
    path: str = "data/sotu"
    """A corpus made by `loopscale corpus build`: a local folder, or a URL that mosaicml-streaming can read."""
    cache: str | None = None
    """Local folder for shards of a remote corpus; required when `corpus.path` is a URL."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens a sequence is predicted over; documents are packed and attention stays within them."""
    workers: NonNegativeInt = 0
    """Reader processes per rank; 0 reads in the training process."""
    shuffle_block: PositiveInt = 65_536
    """Sequences shuffled together: neighbouring shards are mixed in blocks of this many sequences."""
    verify: bool = True
    """Check the digest of every shard before it is first read."""
    accept_change: bool = False
    """Resume although the corpus is not the one that the checkpoint was trained on."""


class ModelConfig(Section):
    vocab_size: PositiveInt | None = None
    """Tokens in the vocabulary; unset: as many as the corpus's tokenizer has."""
    hidden_size: PositiveInt = 128
    """Width d of the state."""
    heads: PositiveInt = 4
    """Query heads."""
    kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); unset: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; unset: hidden_size / heads."""
    ffn_size: PositiveInt = 384
    """Inner width of the SwiGLU feed-forward."""
    prelude_layers: NonNegativeInt = 1
    """Layers before the loop."""
    core_layers: PositiveInt = 2
    """Layers of the shared block that the loop visits."""
    coda_layers: NonNegativeInt = 1
    """Layers after the loop, before the readout."""
    inject: Literal["none", "add", "ortho"] = "ortho"
    """How the prelude's output enters every visit."""
    state_init: Literal["embedding", "normal"] = "normal"
    """The state before the first visit: the prelude's output, or keyed Gaussian noise."""
    state_std: PositiveFloat | None = None
    """Standard deviation of a normal initial state; unset: 1/sqrt(hidden_size)."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions in attention, or a learned embedding added to the tokens'."""
    rope_base: PositiveFloat = 1e6
    """Base of the rotary frequencies."""
    rope_interleaved: bool = True
    """Rotate neighbouring pairs (true) or the two halves of a head (false)."""
    readout: Literal["rmsnorm", "raw"] = "rmsnorm"
    """Normalise the state before the head, or decode it as it is."""
    tied_head: bool = False
    """Use the token embedding as the head's weight."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm."""
    norm_centered: bool = True
    """Learn a norm's gain as 1 + w (weight decay pulls it to 1) instead of as w (pulls it to 0)."""
    init_scheme: Literal["normal", "pytorch"] = "normal"
    """`normal`: linears N(0, init_std²), embedding and head truncated normal of std 1/sqrt(d). `pytorch`: that
    library's defaults, linears uniform within 1/sqrt(inputs), embeddings N(0, 1)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of linear weights under `init_scheme: normal`."""

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.heads

    @property
    def noise_std(self) -> float:
        return self.state_std or self.hidden_size**-0.5

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; asked for only once a corpus has settled it."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size has not been settled by a corpus yet")
        return self.vocab_size


class DepthConfig(Section):
    prior: Literal["fixed", "pln"] = "pln"
    """Law of the number of visits R: always `mean`, or 1 + Poisson with a log-normal rate (PLN)."""
    mean: Annotated[float, Field(ge=1)] = 5.0
    """Mean number of visits (for `pln` after capping; for `fixed` a whole number). Evaluation uses it rounded."""
    sigma: PositiveFloat = 0.5
    """Standard deviation of the log rate of `pln`."""
    cap: PositiveInt = 64
    """Largest R that may be drawn."""
    backprop: PositiveInt | None = 10
    """Visits b at the end that carry gradient; `null`: all of them."""
    groups: PositiveInt = 1
    """Depth groups a global batch is cut into; each draws its own R."""

    @property
    def evaluation_depth(self) -> int:
        return round(self.mean)

    def gradient_visits(self, depth: int) -> int:
        """b of a forward of ``depth`` visits: min(R, backprop)."""
        return depth if self.backprop is None else min(depth, self.backprop)


class ObjectiveConfig(Section):
    kind: Literal["terminal", "per_loop"] = "terminal"
    """Cross entropy at the last visit, or averaged over every visit that carries gradient."""


class BatchConfig(Section):
    global_batch: PositiveInt | None = None
    """Sequences per optimizer step over all ranks."""
    microbatch: PositiveInt | None = None
    """Sequences that one rank runs at once."""
    accumulation: PositiveInt | None = None
    """Microbatches per rank and step. Any two of the three give the third."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.98)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters decay: every one, or only matrices."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; `null`: no clipping."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """Warm-up, then flat and a cosine decay at the end (wsd), cosine all the way, or flat."""
    warmup: Fraction = 0.05
    """Share of all steps in linear warm-up."""
    decay_share: Fraction = 0.1
    """Share of all steps in the final decay of `wsd`."""
    final: Fraction = 0.1
    """Last learning rate as a share of the peak."""


class ParallelConfig(Section):
    tensor: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline: PositiveInt = 1
    """Stages of the ring."""
    zero: Literal[0, 1] = 1
    """DeepSpeed ZeRO stage: 1 divides the optimizer state over data-parallel ranks."""
    timeout: PositiveInt = 600
    """Seconds after which a silent rank ends the run."""


class TrainConfig(Section):
    steps: PositiveInt = 500
    """Optimizer steps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute type of the visits; parameters and gradients are fp32. `auto`: bf16 on a GPU, fp32 on a CPU."""
    recompute: Literal["none", "visit"] = "none"
    """Keep a visit's activations for its backward, or recompute them."""
    loss_chunk: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    bad_steps: PositiveInt = 5
    """Non-finite steps in a row, each skipped, after which the run stops."""
    threads: PositiveInt | None = None
    """CPU threads per rank; unset: the machine's cores divided by the ranks on it."""


class ValidationConfig(Section):
    every: NonNegativeInt = 100
    """Steps between validations; 0: only at the end."""
    sequences: PositiveInt = 64
    """Held-out sequences read each time."""
    depths: Annotated[tuple[PositiveInt, ...] | None, Field(strict=False)] = None
    """Depths to report; unset: 1, 2, the mean, and twice the mean."""


class CheckpointConfig(Section):
    every: NonNegativeInt = 100
    """Steps between checkpoints; 0: only at the end or when asked by a signal."""
    keep: PositiveInt = 3
    """Newest checkpoints kept."""
    keep_every: NonNegativeInt = 0
    """Keep every checkpoint whose step is a multiple of this; 0: none beyond `keep`."""
    on_damage: Literal["fall_back", "stop"] = "fall_back"
    """When the newest checkpoint is damaged: resume from the one before, or stop."""


class LogConfig(Section):
    every: PositiveInt = 10
    """Steps between logged lines."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases: files in the run folder, the service, or neither."""
    wandb_project: str = "loopscale"
    """Project name there."""
    tensorboard: bool = True
    """Write TensorBoard events."""


class Config(Section):
    """A training run."""

    run: RunConfig = RunConfig()
    corpus: CorpusConfig = CorpusConfig()
    model: ModelConfig = ModelConfig()
    depth: DepthConfig = DepthConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
