"""The typed tree of a training run. A field's docstring is its help text; its type and bounds are its rules.

Rules that tie several keys together are in ``check.py``; reading files and overrides is in ``load.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from loopscale.config.registry import INJECTIONS, READOUTS

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
if TYPE_CHECKING:
    InjectionName: TypeAlias = str
    ReadoutName: TypeAlias = str
else:
    InjectionName, ReadoutName = Literal[tuple(INJECTIONS)], Literal[tuple(READOUTS)]


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
    sequence_length: Annotated[int, Field(ge=2, le=1 << 20)] = 128
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
    activation: Literal["swiglu", "relu2"] = "swiglu"
    """Feed-forward: down(silu(gate x) * up x), or down(relu(up x)²)."""
    layer_norm: Literal["pre", "sandwich", "branch"] = "pre"
    """RMSNorm before attention and feed-forward; `sandwich` adds one after each residual sum, `branch` one on each
    branch before the sum."""
    qk_norm: bool = False
    """Normalise every query and key head (no learned gain)."""
    qk_bias: bool = False
    """Learn a bias on queries and keys."""
    value_embeddings: bool = False
    """Add a gated embedding of the token to the values of every other layer, the last one included."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor on the embeddings."""
    embedding_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the embeddings' channels set to zero in training, keyed by (seed, step, sample, position)."""
    inject: InjectionName = "ortho"
    """How the prelude's output e enters the state h before every visit."""
    inject_bias: bool = False
    """A bias on `huginn_linear` (Paper B's form of it has one)."""
    state_init: Literal["zero", "embedding", "normal", "truncated_normal"] = "normal"
    """The state before the first visit: zeros, the prelude's output, or keyed Gaussian noise (cut at 3 sigma)."""
    state_std: PositiveFloat | None = None
    """Standard deviation of a noisy initial state; unset: 1/sqrt(hidden_size)."""
    between: Literal["none", "rmsnorm", "damping", "shared", "unit"] = "none"
    """What the state passes from one visit to the next: nothing, a norm of its own, a learned factor below 1, or a norm that is
    both decoded and fed on: the readout's (`shared`, Ouro), or one without a gain (`unit`, Paper B's form of Huginn)."""
    coda_norm: bool = False
    """The readout's norm stands before the coda too, and is not fed on (Huginn)."""
    coda_linear: bool = False
    """A square map before the coda."""
    readout: ReadoutName = "rmsnorm"
    """Before the head: normalise the state, or not, or only after the last visit, or keep a learned power of its
    scale (0 hides it, 1 is raw)."""
    tied_head: bool = False
    """Use the token embedding as the head's weight."""
    exit_gate: Literal["none", "raw", "normed"] = "none"
    """A learned exit probability per token and visit, from the state or from its norm."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions in attention, or a learned embedding added to the tokens'."""
    rope_base: PositiveFloat = 1e6
    """Base of the rotary frequencies."""
    rope_interleaved: bool = True
    """Rotate neighbouring pairs (true) or the two halves of a head (false)."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm, those of `qk_norm` aside: they have the smallest of fp32, as Parcae's code."""
    norm_centered: bool = True
    """Learn a norm's gain as 1 + w (weight decay pulls it to 1) instead of as w (pulls it to 0)."""
    init_scheme: Literal["normal", "pytorch", "scaled", "scaled_zero"] = "normal"
    """`normal`: linears N(0, init_std²), embedding and head truncated normal of std 1/sqrt(d). `pytorch`: that
    library's defaults. `scaled`: truncated normal of std sqrt(2/(5d)), divided by sqrt(2 init_depth) for the output
    of attention and feed-forward (Huginn); `scaled_zero`: those outputs start at zero (Parcae)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of linear weights under `init_scheme: normal`."""
    init_depth: PositiveInt = 1
    """Effective depth of `init_scheme: scaled`: prelude + core x mean visits + coda."""

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
    prior: Literal["fixed", "poisson", "lognormal_poisson", "pln", "uniform", "table", "learned"] = "pln"
    """Law of the number of visits R, capped: `fixed`, always the mean; `poisson`, Poisson(mean) but at least 1;
    `lognormal_poisson`, 1 + Poisson of a log-normal rate of that mean; `pln`, the same, its rate such that the capped
    mean is the mean; `uniform` over 1 to 2 mean - 1; `table`; `learned`, which begins as `pln` and follows how well each depth
    predicts."""
    mean: Annotated[float, Field(ge=1)] = 5.0
    """Mean number of visits, as each law takes it; evaluation uses it rounded."""
    sigma: PositiveFloat = 0.5
    """Standard deviation of the log rate."""
    cap: Annotated[int, Field(ge=1, le=1024)] = 64
    """Largest R that may be drawn."""
    table: Annotated[tuple[NonNegativeFloat, ...] | None, Field(strict=False)] = None
    """Probabilities of R = 1, 2, … for `prior: table`; they are divided by their sum. A run's folder, as runs/NAME, stands for
    the law that it ended with: so a learned law is frozen for another run."""
    curriculum: Annotated[float, Field(ge=1)] | None = None
    """Mean to begin with; it moves linearly to `mean` over `curriculum_share` of the steps."""
    curriculum_share: Fraction = 0.25
    """Share of all steps in which the mean moves."""
    entropy_coef: NonNegativeFloat = 0.01
    """`learned`: weight of the law's entropy, the knob between a law that settles on the best depth (0) and one that keeps
    many depths trained (0.1): the former predicts a little better at the mean, the latter at all others."""
    budget_coef: NonNegativeFloat = 1.0
    """`learned`: weight of (the law's mean - `mean`)², or with `budget: flops` of what stands in its place."""
    budget: Literal["visits", "flops"] = "visits"
    """`learned`: what is held: the mean number of visits, as in Paper B; or the mean training operations of the core, where a
    visit beyond `backprop` costs a third of one with gradient. By `visits` a law with a longer tail costs less than it
    counts; by `flops` its mean may drift from the depth that evaluation uses, so it is off by default."""
    baseline: Literal["moving", "leave_one_out"] = "moving"
    """`learned`: what a group's feedback is compared with: the moving mean of all steps, as in Paper B; or the mean of the
    step's other groups, which takes out what a step's groups have in common (their stage of training, its weights), but is
    noisy with few of them: off by default, worth it with eight groups or more."""
    lr: Annotated[float, Field(gt=0, le=100)] = 1e-3
    """`learned`: learning rate of its logits."""
    burn_in: NonNegativeInt = 32
    """`learned`: steps that are only watched before the law moves."""
    backprop: PositiveInt | None = 10
    """Visits b at the end that carry gradient; `null`: all of them."""
    groups: PositiveInt = 1
    """Depth groups a global batch is cut into; each draws its own R."""
    draws: Literal["independent", "antithetic", "stratified"] = "independent"
    """How the groups of a step draw: each by itself; in pairs at quantiles u and 1 - u; or one in each of as many equal
    strata of the law. Each group's own law is the same in all three. The latter two even out the work and the feedback of a
    step; the groups then depend on each other, so that the loss varies less within steps than a law's spread says and runs
    differ from published ones: off by default."""
    per_sequence: bool = False
    """Draw R for every sequence; a group runs to its deepest one, and shorter sequences begin later."""
    check_every: NonNegativeInt = 100
    """Steps between checks that all ranks draw from the same law; 0: never."""

    @property
    def evaluation_depth(self) -> int:
        return round(self.mean)

    @property
    def deepest(self) -> int:
        """The largest R that the law can give."""
        match self.prior:
            case "fixed":
                return int(self.mean)
            case "uniform":
                return int(2 * self.mean - 1)
            case "table":
                return max((i for i, p in enumerate(self.table or (), 1) if p > 0), default=self.cap)
        return self.cap

    def gradient_visits(self, depth: int) -> int:
        """b of a forward of ``depth`` visits: min(R, backprop)."""
        return depth if self.backprop is None else min(depth, self.backprop)


class ObjectiveConfig(Section):
    kind: Literal["terminal", "per_loop", "exit_gate", "exit_gate_stage2"] = "terminal"
    """Cross entropy at the last visit; averaged over every visit that carries gradient; expected under the exit gate
    less an entropy term (Ouro's stage I; with `model.exit_gate: raw` Paper A's adaptive loss); or the gate alone,
    trained to continue where the next visit helps (Ouro's stage II)."""
    loop_weights: Annotated[tuple[NonNegativeFloat, ...] | None, Field(strict=False)] = None
    """`per_loop`: weight of each of the last visits, earliest first; divided by their sum. Unset: equal."""
    gate_entropy: NonNegativeFloat = 0.1
    """`exit_gate`: weight of the entropy of the exit distribution."""
    norm_penalty: NonNegativeFloat = 0.0
    """Weight of the state's mean square, averaged over the visits that carry gradient."""
    anchor: NonNegativeFloat = 0.0
    """Weight of (the state's root mean square over those visits, per sequence, less `anchor_target`)²."""
    anchor_target: PositiveFloat = 1.0
    """Root mean square that `anchor` pulls to."""


class BatchConfig(Section):
    global_batch: PositiveInt | None = None
    """Sequences per optimizer step over all ranks."""
    microbatch: PositiveInt | None = None
    """Sequences that one rank runs at once."""
    accumulation: PositiveInt | None = None
    """Microbatches per rank and step. Any two of the three give the third."""


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = "adamw"
    """AdamW; or torch's Muon for the matrices inside layers and AdamW for the rest (needs `parallel.zero: 0`). Muon's
    Newton-Schulz steps run in bf16: curves of different layouts agree to about 1e-3 rather than to rounding in fp32."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.98)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    no_decay: Annotated[tuple[Literal["embedding", "norm", "bias", "injection", "coda_linear"], ...], Field(strict=False)] = ()
    """Kinds of parameters that do not decay."""
    muon_lr: PositiveFloat = 8e-3
    """Peak learning rate of Muon."""
    muon_momentum: Beta = 0.95
    """Momentum of Muon."""
    muon_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of Muon's matrices."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; `null`: no clipping."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """Warm-up, then flat and a cosine decay at the end (wsd), cosine all the way, or flat."""
    warmup: Fraction = 0.05
    """Share of all steps in linear warm-up."""
    decay_share: Fraction = 0.1
    """Share of all steps in the final decay of `wsd`."""
    decay_shape: Literal["cosine", "linear"] = "cosine"
    """Curve of the final decay of `wsd`."""
    final: Fraction = 0.1
    """Last learning rate as a share of the peak."""


class ParallelConfig(Section):
    tensor: PositiveInt = 1
    """Ranks that share each layer."""
    sequence_parallel: bool = False
    """Divide what lies between a layer's products along the sequence over the ranks that share the layer, rather than
    computing it on each of them."""
    pipeline: PositiveInt = 1
    """Stages of the ring: the home stage, which has all that is not core, and slices of the core behind it."""
    slices: Literal["even", "measured"] | Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = "even"
    """Core layers of each stage, the home stage first, as [0, 2, 2]; or chosen so that the stages' operations are even,
    counted, or (`measured`) timed at the start: then a resumed run may choose others."""
    in_flight: PositiveInt | None = None
    """Microbatches in the ring at once, each with the activations of up to `depth.backprop` visits; unset: two a stage."""
    order: Literal["tp-dp-pp", "tp-pp-dp"] = "tp-dp-pp"
    """Which ranks are neighbours: those that share layers (tp), then replicas (dp), then stages (pp), or stages first."""
    context: PositiveInt = 1
    """Ranks that share a sequence: 1, for context parallelism is not offered."""
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage: 0, or 1, which divides the optimizer state over replicas."""
    offload_optimizer: bool = False
    """Keep optimizer state in CPU memory, and update there (needs `parallel.zero: 1`)."""
    timeout: PositiveInt = 600
    """Seconds after which a silent rank ends the run."""
    check_replicas: NonNegativeInt = 100
    """Steps between checks that all replicas hold the same weights, to the bit; 0: never, as where under ZeRO 0 replicas
    update on machines of different kinds, which round differently."""


class TrainConfig(Section):
    steps: PositiveInt = 500
    """Optimizer steps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute type of the visits; parameters and gradients are fp32. `auto`: bf16 on a GPU, fp32 on a CPU. Both have the
    range of fp32, so there is no loss scaling."""
    recompute: Literal["none", "visit", "layer"] = "none"
    """What is computed again just before its backward, rather than kept: nothing, a whole visit (its input is kept), or
    each layer (its input is kept)."""
    offload_activations: bool = False
    """Let what visits keep for their backward wait in CPU memory."""
    kernels: Literal["auto", "torch", "te"] = "auto"
    """Layers by torch or by Transformer Engine, AdamW by torch or by apex; `auto` takes what is installed and fits."""
    loss_chunk: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    bad_steps: PositiveInt = 5
    """Bad steps in a row, each skipped on all ranks, after which the run stops: those with a non-finite loss or gradient,
    and loss spikes. RUN/skipped/step-N.json has a skipped step's samples, and what was not finite first."""
    spikes: Literal["ignore", "skip", "rewind"] = "ignore"
    """Train on a step whose loss is a spike; or drop its update; or go back to the newest checkpoint (where there is none
    yet, drop it) and read on behind the spike's samples, so that what led there is done again on other samples."""
    spike_threshold: PositiveFloat = 6.0
    """A loss is a spike this many standard deviations (1.4826 times the median absolute deviation) above the median of the
    last good steps, losses of a depth compared with those of that depth."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Good steps that spikes are judged by; until there are half as many, nothing is a spike."""
    max_time: PositiveFloat | None = None
    """Seconds after its start at which the process must be gone, imports included: the run saves and stops by itself, as at
    a signal, while there is time for it. Give less than the scheduler's limit. YAML reads 1:30:00 as 5400."""
    grace: PositiveFloat = 120.0
    """Seconds that a signal leaves: for the rest of the step and a checkpoint. Then the process ends at once, and the last
    checkpoint stands. Give what the scheduler gives (SLURM 30 between its signal and its kill, or as --signal asks for)."""
    stuck_after: NonNegativeInt | None = None
    """Seconds without a new step, of several ranks, after which rank 0 says who waits for whom, on the terminal and in the
    run's stuck.txt; a save or a validation counts by itself. Unset: half of `parallel.timeout`; 0: never."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads per rank; unset: the machine's cores divided by the ranks on it."""


class ValidationConfig(Section):
    every: NonNegativeInt = 100
    """Steps between validations; 0: only at the end."""
    sequences: PositiveInt = 64
    """Held-out sequences read each time."""
    depths: Annotated[tuple[PositiveInt, ...] | None, Field(strict=False, min_length=1)] = None
    """Depths to report; unset: 1, 2, the mean, and twice the mean."""


class DiagnosticsConfig(Section):
    every: NonNegativeInt = 500
    """Steps between diagnoses of the loop, on held-out sequences: how fast it contracts, what truncated backprop leaves out of
    the gradient, how many tokens have converged, what losses see of the state's scale; 0: never."""
    sequences: PositiveInt = 4
    """Held-out sequences read each time, at least one for each replica."""


class CheckpointConfig(Section):
    every: NonNegativeInt = 100
    """Steps between checkpoints; 0: only at the end or when asked by a signal."""
    keep: PositiveInt = 3
    """Newest checkpoints kept."""
    keep_every: NonNegativeInt = 0
    """Keep every checkpoint whose step is a multiple of this; 0: none beyond `keep`."""
    keep_best: NonNegativeInt = 1
    """Keep as many of those with the lowest held-out loss, where a validation fell on their step."""
    folder: str | None = None
    """Folder or URL (s3://…, gs://…; whatever fsspec has a library for) in which a folder of the run's name takes its
    checkpoints; unset: `checkpoints` in the run's folder."""
    timeout: PositiveInt = 3600
    """Seconds that ranks wait for one that saves, reads or verifies its part of a checkpoint."""
    background: bool = False
    """Go on training while a checkpoint is written, from a copy: each rank then needs CPU memory for what it saves."""
    on_damage: Literal["fall_back", "stop"] = "fall_back"
    """When the newest checkpoint is damaged: resume from the one before, or stop."""


class LogConfig(Section):
    every: PositiveInt = 10
    """Steps between logged lines; the first step is logged too."""
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
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
