"""A training run from its configuration to its last checkpoint."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loopscale.checkpoint.restore import find, load_weights, storage_of
from loopscale.checkpoint.saver import BEST, Saved, Saver
from loopscale.checkpoint.store import Snapshot
from loopscale.config import Batch, Config, Loaded, settle
from loopscale.corpus.batches import StepBatch, batches
from loopscale.corpus.order import Order
from loopscale.corpus.packing import PackedCorpus
from loopscale.depth import GroupSums, make_prior
from loopscale.diagnostics import memory
from loopscale.diagnostics.norms import NormMeter
from loopscale.environment.compute import compute_type, matmul_rate, set_threads
from loopscale.environment.kernels import choose_kernels
from loopscale.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    NumericsError,
    Problem,
    UsageError,
    describe_fault,
)
from loopscale.evaluate.diagnosis import Diagnosis, diagnose
from loopscale.evaluate.perplexity import loss_by_depth
from loopscale.model.flops import count, matmul_shapes, training_flops
from loopscale.model.ring import Ring
from loopscale.objective.supervision import GATED
from loopscale.parallel import crash
from loopscale.parallel import mesh as meshes
from loopscale.parallel.mesh import Mesh, sum_over_ranks
from loopscale.parallel.ring.plan import Work
from loopscale.parallel.waits import Waits
from loopscale.parallel.zero import load_deepspeed
from loopscale.train import dropped, held_out, snapshot
from loopscale.train import folder as folders
from loopscale.train.banner import Setting, banner, done_line, facts, memory_line
from loopscale.train.blind_spot import BlindSpot
from loopscale.train.journal import read_lines
from loopscale.train.limit import TimeLimit
from loopscale.train.measure import measured_slices
from loopscale.train.memory import Planned, check_fits, explain, is_out_of_memory
from loopscale.train.profile import profiler
from loopscale.train.signals import StopRequest, leave_lost
from loopscale.train.snapshot import Progress
from loopscale.train.spikes import Spike, find_spike, losses_of
from loopscale.train.step import StepResult, TrainStep
from loopscale.train.stragglers import Stragglers
from loopscale.train.telemetry import Telemetry, new_run_id

SAVED_BYTES = 12
"""Of a checkpoint, per parameter: itself and two moments, fp32."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    step: int
    finished: bool
    """False when a signal or a limit of time stopped it."""
    validation: dict[int, float]
    """Held-out loss by depth, nats per token, if the run finished."""


def train(
    loaded: Loaded[Config],
    stop: StopRequest,
    *,
    stem: str = "run",
    resume: str | None = None,
    init: str | Path | None = None,
    profile: bool = False,
) -> Outcome:
    """Trains as configured, until it is done or ``stop`` asks to stop. With ``resume`` goes on from a checkpoint (see
    :func:`loopscale.train.folder.choose`); with ``init`` a new run starts from the weights of a run's newest checkpoint, or
    of one checkpoint.

    Every rank of a job calls it. Raises :class:`LoopscaleError` of the kind that fits what went wrong.
    """
    if init is not None and resume not in (None, "auto"):
        raise UsageError("--init starts a new run and --resume PATH goes on with one; give one of them")
    mesh = meshes.start(loaded.config.parallel)
    set_threads(loaded.config.train.threads, mesh.local_size)
    try:
        meshes.require_same(loaded.config)
        with contextlib.ExitStack() as held, contextlib.closing(Run(loaded, mesh, stem, resume, init, held)) as run:
            return run.go(stop, profile)
    except Exception as error:
        stop.fail()  # torchrun ends the others at once when one has died: they say why first
        if "DataLoader worker" in str(error):  # raised by torch's handler of dead children, wherever it interrupts
            lost = DataError(
                "a process that reads the corpus was killed, perhaps for want of memory; start again with --resume auto, "
                f"and with fewer corpus.workers than {loaded.config.corpus.workers} if it happens again"
            )
            mesh.watch.stopped(lost.with_traceback(error.__traceback__))
            raise lost from None
        if isinstance(error, RuntimeError) and mesh.world > 1 and meshes.is_lost_contact(error):
            sentence = mesh.watch.explain(error, loaded.config.parallel.timeout)
            raise ClusterError(f"{sentence}; start again with --resume auto") from None
        mesh.watch.stopped(error)
        raise
    finally:
        mesh.watch.close()


class Run:
    """A run between its start and its end; one per rank. ``held`` lets its folder go, also where it does not come to a start."""

    def __init__(
        self,
        loaded: Loaded[Config],
        mesh: Mesh,
        stem: str,
        resume: str | None,
        init: str | Path | None,
        held: contextlib.ExitStack,
    ):
        self.mesh, self.telemetry = mesh, Telemetry()
        corpus = loaded.config.corpus
        self.corpus = PackedCorpus(corpus.path, "train", corpus.sequence_length, cache=corpus.cache, verify=corpus.verify)
        self.held_out = PackedCorpus(corpus.path, "validation", corpus.sequence_length, cache=corpus.cache, verify=corpus.verify)
        self.config = config = self._settled(loaded.config)
        self.batch: Batch = settle(config.batch, config.depth.groups, mesh.data_size)
        self.counts = count(config.model, config.corpus.sequence_length)
        choose_kernels(config, mesh.device, compute_type(config, mesh.device))  # refused before a folder is made
        self.ring = Ring.of(config, self.counts)
        told = meshes.gather_objects((mesh.stage, mesh.watch.role))
        self.stages = [stage for stage, _ in told]
        self.stragglers = Stragglers(self.stages, [role for _, role in told])
        check_fits(self._planned, self.stages[mesh.rank - mesh.local_rank :][: mesh.local_size])
        self.folder = meshes.on_main(lambda: self._claimed(stem, resume, held))
        stuck_after = config.train.stuck_after
        timeout = config.parallel.timeout
        mesh.watch.attend(self.folder, timeout / 2 if stuck_after is None else stuck_after, timeout, leave_lost)
        self.patient = meshes.patient_group(config.checkpoint.timeout)
        with mesh.watch.patiently():
            place = folders.past(self.folder, config, resume, self.patient)
        self.storage = storage_of(self.folder, config.checkpoint.folder)
        meshes.on_main(self._probe)
        self.saver = Saver(self.storage, config.checkpoint, self.patient)
        self._initial = ""
        self.limit = TimeLimit(config.train.max_time, SAVED_BYTES * self.counts.total)
        self._retry_save_at: int | None = None
        self.progress, notes = Progress(run_id=new_run_id()), list(place.passed_over)
        self.blind_spot = BlindSpot(config)
        self.matmul_rate: float | None = None
        with self._explaining():
            notes += self._build(place, init)
        self.setting = Setting(
            self.folder, config, self.batch, self.corpus.corpus, self.counts, make_prior(config.depth), mesh, self.ring,
            self.stage.compute, self.step.kernels, self.stages, self.predicted,
        )  # fmt: skip
        meshes.on_main(lambda: self._introduce(loaded, place.checkpoint, init, notes))

    def close(self) -> None:
        """Closes what tells of the run."""
        self.telemetry.close()

    # ---- the run

    def go(self, stop: StopRequest, profile: bool) -> Outcome:
        with self._explaining(in_step=False):
            outcome = self._go(stop, profile)
        self.mesh.watch.begin("the end", outcome.step)
        return outcome

    def _go(self, stop: StopRequest, profile: bool) -> Outcome:
        config = self.config
        validation: dict[int, float] = {}
        window = _Window(self.mesh.waits)
        self.memory.begin()
        stop.begin()
        with contextlib.closing(self._data()) as data, profiler(self.folder, profile and self.mesh.is_main) as profiled:
            for batch in data:
                step = self.progress.step + 1
                last = step == config.train.steps
                validated = last or _due(step, config.validation.every)
                diagnosed = _due(step, config.diagnostics.every) and config.depth.deepest > 1
                logged = validated or diagnosed or step == 1 or _due(step, config.log.every)  # what grows is counted from step 1
                meter = NormMeter(config.depth.cap, self.mesh.device) if logged else None
                observe = meter.observe if meter is not None and self.mesh.sees_tokens else None
                reason = stop.name or self.limit.reason()
                with self._explaining():
                    result = self.step(
                        step - 1, batch, stop=reason is not None, observe=observe,
                        find_spike=None if config.train.spikes == "ignore" else self._find_spike,
                    )  # fmt: skip
                window.add(result, sum(self._flops(w) for w in result.work) / len(result.work))
                self._count(result, batch)
                went_back = self._handle_skipped(result, batch) if result.skipped else False
                profiled()
                self._hear_of_save()
                stopping = result.stop_ranks > 0 and (went_back or not last)
                if stopping:
                    reason = self._agreed(reason, stop)
                if went_back:
                    window, validation = _Window(self.mesh.waits), {}
                    self.memory.begin()
                else:
                    if validated:
                        with window.aside(), self.memory.aside():
                            validation = self._validate()
                            self._measure_matmul_rate()
                    diagnosis = None
                    if diagnosed:
                        with window.aside(), self.memory.aside():
                            diagnosis = self._diagnose()
                    if meter is not None:
                        self._log(result, meter, window, validation if validated else {}, diagnosis)
                        window = _Window(self.mesh.waits)
                        self.memory.begin()
                    self.telemetry.advance(step)
                    if last or stopping or _due(step, config.checkpoint.every) or step == self._retry_save_at:
                        with self.limit.aside(), window.aside(), self.memory.aside():
                            self._save(validation if validated else {}, must=last or stopping)
                if stopping:
                    self.telemetry.event("stopped", self.progress.step, f"asked to stop by {reason}; go on with --resume auto")
                    return Outcome(self.folder, self.progress.step, False, {})
        progress = self.progress
        validation = validation or self._validate()
        if self.optimizer.applied_steps == 0:
            raise NumericsError(
                f"all {progress.step} steps had a non-finite loss or gradient, so nothing was learned; lower optimizer.lr "
                f"({config.optimizer.lr:g}) or the weights of the objective's terms"
            )
        sequences = min(config.validation.sequences, len(self.held_out))
        if self.heaviest.kinds:
            self.telemetry.event("memory", progress.step, memory_line(self.setting, self.heaviest))
        self.telemetry.event(
            "done", progress.step, done_line(self.setting, progress.step, progress.elapsed, validation, sequences)
        )
        return Outcome(self.folder, progress.step, True, validation)

    def _data(self) -> Generator[StepBatch, None, None]:
        """Steps' data, to the last step; anew from where the run stands when it has gone back."""
        while self.progress.step < self.config.train.steps:
            yield from self._data_until_it_goes_back()

    def _data_until_it_goes_back(self) -> Generator[StepBatch, None, None]:
        """One rank of a replica reads, and hands the data to the others."""
        config, left = self.config.corpus, self.config.train.steps - self.progress.step
        with contextlib.ExitStack() as stack:
            if self.mesh.reads:
                order = Order(len(self.corpus), self.config.run.seed, config.shuffle_block)
                reader = batches(
                    self.corpus, order, self.batch, data_rank=self.mesh.data_rank, consumed=self.progress.consumed,
                    workers=config.workers, steps=left,
                )  # fmt: skip
                stack.enter_context(contextlib.closing(reader))
            for step in range(self.progress.step, self.config.train.steps):
                self.mesh.watch.begin(f"step {step + 1}", step + 1)
                self.mesh.watch.doing = f"reading the data of step {step + 1}"
                yield meshes.on_reader(self.mesh, lambda: next(reader))
                if self.progress.step <= step:
                    return

    def _agreed(self, reason: str | None, stop: StopRequest) -> str:
        """Why the run stops, of the ranks that know; each has the grace of a signal if any got one. A collective."""
        reasons = meshes.gather_objects((reason, stop.name is not None))
        if any(by_signal for _, by_signal in reasons):
            stop.begin_grace()
        rank, first = next((rank, reason) for rank, (reason, _) in enumerate(reasons) if reason is not None)
        return first if self.mesh.world == 1 else f"{first} (rank {rank})"

    # ---- counters, and steps that are skipped

    def _count(self, result: StepResult, batch: StepBatch) -> None:
        """Advances the counters; a skipped step reads its samples too."""
        progress = self.progress
        progress.step += 1
        progress.consumed = batch.end
        progress.elapsed = time.monotonic() - self.started
        if result.skipped:
            progress.skipped += 1
            progress.bad_in_a_row += 1
            return
        progress.tokens += sum(g.tokens for g in result.groups)
        if progress.step > progress.went_back_from:
            progress.bad_in_a_row = 0
        settings = self.config.train
        remembered = [] if settings.spikes == "ignore" else [*progress.losses, losses_of(result.groups)]
        progress.losses = remembered[-settings.spike_window :]

    def _find_spike(self, groups: Sequence[GroupSums]) -> Spike | None:
        settings = self.config.train
        return find_spike(losses_of(groups), self.progress.losses, settings.spike_threshold, settings.spike_window)

    def _handle_skipped(self, result: StepResult, batch: StepBatch) -> bool:
        """Tells and keeps what was skipped, ends the run after too many in a row, and goes back where that is asked for:
        then it returns True."""
        progress, settings, spike = self.progress, self.config.train, result.spike
        first, path = dropped.first_bad(result.ranks), dropped.path_of(self.folder, progress.step)
        began = "" if first is None else f"; first {dropped.in_words(first)}"
        reason = f"non-finite loss or gradient on {result.bad_ranks} of {self.mesh.world} ranks"
        if spike is not None:
            reason = f"loss spike, {spike.excess:.3g} nats above what its depths let expect ({spike.allowed:.3g} allowed)"
        if self.mesh.is_main:
            self._keep_skipped(path, result, batch, reason)
        if progress.bad_in_a_row >= settings.bad_steps:
            lower = f"a lower optimizer.lr than {self.config.optimizer.lr:g}"
            had, remedy = "a non-finite loss or gradient", lower
            if spike is not None:
                had, remedy = "a loss spike", f"{lower} or a larger train.spike_threshold than {settings.spike_threshold:g}"
            raise NumericsError(
                f"{progress.bad_in_a_row} steps in a row, up to step {progress.step}, had {had}{began}; {path} has the samples "
                f"of the last, files beside it those before. With --resume auto and {remedy} it goes on from the last "
                f"checkpoint, or begins again where none was saved"
            )
        went_back = spike is not None and settings.spikes == "rewind" and self._go_back()
        done = f"back to step {self.progress.step}, and on with other samples" if went_back else "skipped on all"
        depths = ", ".join(str(g.depth) for g in result.groups)
        self.telemetry.event(
            "rewound" if went_back else "skipped", progress.step,
            f"{reason}: {done} (global samples {batch.first} to {batch.end - 1}, depths {depths}, loss {result.loss:g})"
            f"{began}; see skipped/{path.name}",
        )  # fmt: skip
        return went_back

    def _keep_skipped(self, path: Path, result: StepResult, batch: StepBatch, reason: str) -> None:
        """Writes the file about a skipped step; a full disk does not end the run."""
        loss = result.loss if math.isfinite(result.loss) else None
        about = dropped.Skipped(self.progress.step, reason, loss, result.draws, (batch.first, batch.end), result.ranks)
        try:
            dropped.keep(path, about)
        except OSError as error:
            self._warn([f"what was skipped could not be kept: {describe_fault(error)}"])

    def _go_back(self) -> bool:
        """Goes on from the newest checkpoint, but behind the samples that were read; False where there is none. A collective."""
        now, self.mesh.watch.doing = self.progress, f"going back from step {self.progress.step}"
        self._hear_of_save(wait=True)
        with self.mesh.watch.patiently():
            place = folders.past(self.folder, self.config, "auto", self.patient)
        if place.checkpoint is None:
            return False
        with self.memory.aside():
            self._go_on_from(place.checkpoint)
            self.progress = replace(
                self.progress,
                consumed=now.consumed, skipped=now.skipped, bad_in_a_row=now.bad_in_a_row, elapsed=now.elapsed,
                went_back_from=max(now.step, now.went_back_from),
            )  # fmt: skip
        meshes.on_main(lambda: self._warn([*place.passed_over, *self._tell_from_here()]))
        return True

    def _validate(self) -> dict[int, float]:
        """Held-out loss at the configured depths, on the first sequences of the validation split."""
        config = self.config
        self._begin_aside("validation", "validating")
        inputs = held_out.read(self.mesh, self.held_out, config, config.validation.sequences, self.batch.microbatch)
        losses, _ = loss_by_depth(self.stage, self.ring, self.mesh, inputs, validation_depths(config), sum_over_ranks)
        return losses

    def _diagnose(self) -> Diagnosis:
        """What becomes of the state in the loop, on a few sequences of the validation split. A collective."""
        config, sequences = self.config, max(self.config.diagnostics.sequences, self.mesh.data_size)
        self._begin_aside("diagnosis", "diagnosing the loop")
        inputs = held_out.read(self.mesh, self.held_out, config, sequences, self.batch.microbatch)
        return diagnose(self.stage, self.ring, self.mesh, config, inputs)

    def _begin_aside(self, what: str, doing: str) -> None:
        self.mesh.watch.begin(f"the {what} after step {self.progress.step}", self.progress.step)
        self.mesh.watch.doing = doing

    def _log(
        self, result: StepResult, meter: NormMeter, window: _Window, validation: dict[int, float],
        diagnosis: Diagnosis | None,
    ) -> None:  # fmt: skip
        with self.mesh.waits.waiting():
            norms = meter.result(sum_over_ranks)
        told = meshes.gather_objects((memory.by_kind(self._held(), self.memory.read()), window.busy))
        ranks, busy = [held for held, _ in told], [own for _, own in told]
        self.heaviest.see(ranks)
        rate, seconds = self.matmul_rate, window.seconds
        self.telemetry.log(
            {
                "step": self.progress.step,
                "loss": result.loss,
                "perplexity": _perplexity(result.terminal_loss),
                "lr": result.lr,
                "tokens": self.progress.tokens,
                "tokens_per_s": window.tokens / seconds,
                "matmul_share": None if rate is None else window.flops / seconds / (rate * self.mesh.world),
                "elapsed": self.progress.elapsed,
                **({"terms": result.terms} if len(result.terms) > 1 else {}),
                "depths": list(result.draws),
                "prior": self._law(),
                "depth_losses": [g.loss / max(g.tokens, 1) for g in result.groups],
                "grad_norm": result.grad_norm,
                "state_norm": norms.mean,
                "state_norm_p99": norms.p99,
                "state_change": norms.change,
                "state_converged": norms.converged,
                "skipped": self.progress.skipped,
                "busy": busy,
                "memory": {kind: [held[kind] for held in ranks] for kind in memory.KINDS},
                **({"validation": {str(depth): loss for depth, loss in validation.items()}} if validation else {}),
                **({} if diagnosis is None else diagnosis.as_json()),
            }
        )
        for kind, words in () if diagnosis is None else diagnosis.in_words().items():
            self.telemetry.event(kind, self.progress.step, words)
        warnings = (self.stragglers.see(busy, window.steps), self.blind_spot.see(self.progress.step, norms.mean))
        self._warn(words for words in warnings if words)

    def _law(self) -> dict[str, Any]:
        """The law that the next step draws from, to where its tail is below one in ten thousand."""
        law = self.step.law.at(self.progress.step / self.config.train.steps)
        p = list(law.probabilities)
        while len(p) > 1 and p[-1] < 1e-4:
            p.pop()
        return {"mean": law.mean, "entropy": law.entropy, "probabilities": [round(x, 6) for x in p], **self.step.law.figures()}

    def _measure_matmul_rate(self) -> None:
        """Keeps the best rate seen: another process may have had the machine while one of them was measured."""
        tokens = self.batch.microbatch * self.config.corpus.sequence_length
        found = matmul_rate(matmul_shapes(self.config.model), tokens, self.mesh.device)
        self.matmul_rate = found if found is None else max(found, self.matmul_rate or 0.0)

    def _flops(self, work: Work) -> float:
        return training_flops(self.counts, work, self.config.objective.kind in GATED)

    # ---- checkpoints

    def _save(self, validation: dict[int, float], must: bool) -> None:
        """Commits a checkpoint, or lets one be committed; one that fails is told and tried again, unless it ``must`` be."""
        progress = self.progress
        self.mesh.watch.begin(f"saving step {progress.step}", progress.step)
        with self.mesh.watch.patiently():
            self._hear_of_save(wait=True)
        score = validation.get(self.config.depth.evaluation_depth)
        own = snapshot.own(self.stage, self.optimizer, self.mesh)
        content = Snapshot(progress.step, own, self._state(), self._companions(), {BEST: score})
        if self.config.checkpoint.background and not must:
            self.saver.request(content)
            return
        try:
            with self.mesh.watch.patiently():
                saved = self.saver.save(content)
            self._tell_saved(saved)
            self._retry_save_at = None
        except CheckpointError as error:
            if must:
                raise
            self._retry_save_at = progress.step + max(1, self.config.checkpoint.every // 10)
            self._warn_of_save(error, f"tried again at step {self._retry_save_at}")

    def _hear_of_save(self, wait: bool = False) -> None:
        """What became of a checkpoint in the background, if there is news, or after waiting for it."""
        if wait or self.saver.is_done():
            try:
                saved = self.saver.wait()
            except CheckpointError as error:
                self._warn_of_save(error, f"the next is tried in {self.config.checkpoint.every} steps")
            else:
                self._tell_saved(saved)

    def _tell_saved(self, saved: Saved | None) -> None:
        if saved is not None:
            self.limit.saw_save(saved.seconds)
            took = f"{saved.size / 1e6:.0f} MB, {saved.seconds:.1f} s"
            own = Path(self.storage.where) == self.folder / "checkpoints"
            where = "checkpoints" if own else self.storage.where
            self.telemetry.event("saved", self.progress.step, f"{where}/step-{saved.step} ({took})")
            self._warn([f"older checkpoints could not be removed: {saved.fault}"] if saved.fault else [])

    def _warn_of_save(self, error: CheckpointError, remedy: str) -> None:
        self.telemetry.event("warning", self.progress.step, f"{error}; the one before is kept, and {remedy}")

    def _state(self) -> dict[str, Any]:
        state = snapshot.State(
            **asdict(self.progress), applied_steps=self.optimizer.applied_steps, law=self.step.law.state(),
            corpus=self.corpus.fingerprint, global_batch=self.batch.global_batch,
        )  # fmt: skip
        return asdict(state)

    def _companions(self) -> dict[str, str | bytes]:
        """What makes a checkpoint usable alone."""
        return {
            "config.yaml": folders.config_text(self.config),
            "tokenizer.json": self.corpus.corpus.file("tokenizer.json").read_bytes(),
        }

    # ---- the start

    def _settled(self, config: Config) -> Config:
        """The configuration with the vocabulary of the corpus."""
        size = self.corpus.vocab_size
        asked = config.model.vocab_size
        if asked is not None and asked < size:
            raise ConfigError(
                config.corpus.path, [Problem("model.vocab_size", f"is {asked}; the corpus's tokenizer has {size} tokens")]
            )
        model = config.model.model_copy(update={"vocab_size": asked or size})
        return config.model_copy(update={"model": model})

    @property
    def _planned(self) -> Planned:
        """What the prediction of memory depends on."""
        return Planned(self.config, self.batch, self.ring, self.mesh.device, compute_type(self.config, self.mesh.device))

    def _held(self) -> dict[str, int]:
        """Bytes that stay between steps, by kind."""
        rotary = self.stage.rotary
        return memory.held(self.stage, [] if rotary is None else [rotary.turns], self.optimizer)

    @contextlib.contextmanager
    def _explaining(self, in_step: bool = True) -> Iterator[None]:
        """Where memory runs out, one sentence says who had what of it and what to change."""
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            mesh = self.mesh
            now = memory.by_kind(self._held(), self.memory.now()) if hasattr(self, "stage") else {}
            raise explain(
                error, self._planned, rank=mesh.rank, stage=mesh.stage, doing=mesh.watch.doing, now=now, in_step=in_step
            ) from None

    def _build(self, place: folders.Place, init: str | Path | None) -> list[str]:
        """Builds this rank's part of the model, as a checkpoint has it if there is one; returns what changed since then."""
        config, mesh, changes = self.config, self.mesh, list[str]()
        load_deepspeed()  # libraries are not the model's memory
        self.memory, self.heaviest = memory.PeakMemory(mesh.device), memory.Heaviest()
        mesh.watch.doing = "building its part of the model"
        if config.parallel.slices == "measured" and mesh.stages > 1:
            self.ring = Ring.of(config, self.counts, measured_slices(config, self.batch, mesh))
        self.predicted = self._planned.predict()
        self.step = TrainStep(config, self.batch, self.ring, mesh)
        self.stage, self.optimizer = self.step.stage, self.step.optimizer
        if place.checkpoint is not None:
            changes = snapshot.changes(place.checkpoint, config, self.corpus.fingerprint, self.batch.global_batch)
            self._go_on_from(place.checkpoint)
        elif init is not None:
            with mesh.watch.patiently():
                source, changes = find(init, self.folder / "fetched", self.patient)
                load_weights(source, self.stage)
            self._initial = source.name
            self.optimizer.begin_at(0)
        self.started = time.monotonic() - self.progress.elapsed
        self._measure_matmul_rate()
        return changes

    def _go_on_from(self, checkpoint: Path) -> None:
        """Weights, moments, counters and the law of the depths as a verified checkpoint has them. A collective."""
        with self.mesh.watch.patiently():
            state = snapshot.restore(checkpoint, self.stage, self.optimizer, self.mesh, self.patient)
        self.progress = state.progress()
        self.step.law.load(state.law)

    def _claimed(self, stem: str, resume: str | None, held: contextlib.ExitStack) -> Path:
        """The folder of the run, taken for this process."""
        folder = folders.choose(self.config, stem, resume)
        held.enter_context(folders.claim(folder))
        held.callback(folders.drop_empty, folder)
        crash.set_aside(folder)
        return folder

    def _probe(self) -> None:
        """Finds out before the first step whether checkpoints can be written: after the last it would be late."""
        needed, where = SAVED_BYTES * self.counts.total, self.storage.where
        try:
            self.storage.probe()
        except OSError as error:
            raise UsageError(f"checkpoints cannot be written to {where} (checkpoint.folder): {describe_fault(error)}") from None
        if (free := self.storage.free()) < needed:
            raise UsageError(
                f"a checkpoint has {needed / 1e6:.0f} MB, and the disk of {where} {free / 1e6:.0f} MB free; make room, or name "
                f"another checkpoint.folder"
            )

    def _introduce(self, loaded: Loaded[Config], checkpoint: Path | None, init: str | Path | None, notes: list[str]) -> None:
        """Writes what the run is, opens the sinks and prints the head of the log."""
        resumed = self.progress.step
        folders.describe(self.folder, self.config, loaded.origins, facts(self.setting, self.matmul_rate))
        aside = self._tell_from_here()
        for line in banner(self.setting):
            self.telemetry.event("start", resumed, line)
        self._warn([*notes, *self._without_effect(), *aside])
        if checkpoint is not None:
            self.telemetry.event("resumed", resumed, f"from checkpoints/{checkpoint.name}")
        elif init is not None:
            self.telemetry.event("init", resumed, f"weights from {init} ({self._initial})")

    def _tell_from_here(self) -> list[str]:
        """Opens the sinks anew where the run stands, on rank 0: of what lies beyond, records are cut and checkpoints set
        aside. Returns what there is to say about it."""
        self.telemetry.close()
        aside = folders.set_aside_later(self.storage, self.progress.step)
        shutil.rmtree(self.folder / "fetched", ignore_errors=True)
        self.telemetry = Telemetry.open(self.folder, self.config, run_id=self.progress.run_id, resumed_step=self.progress.step)
        self.blind_spot = BlindSpot(self.config, read_lines(self.folder / "metrics.jsonl"))
        return [f"set aside, for this run goes on from before: {', '.join(aside)}"] if aside else []

    def _warn(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.telemetry.event("warning", self.progress.step, note)

    def _without_effect(self) -> Iterator[str]:
        """Settings that change nothing here."""
        asked = {
            "parallel.offload_optimizer": self.config.parallel.offload_optimizer,
            "train.offload_activations": self.config.train.offload_activations,
        }
        if self.mesh.device.type == "cpu":
            yield from (f"{key}=true saves nothing here: this device's memory is the CPU's" for key, on in asked.items() if on)
        if self.config.parallel.sequence_parallel and self.config.parallel.tensor == 1:
            yield "parallel.sequence_parallel=true divides nothing while parallel.tensor is 1"


class _Window:
    """Steps, tokens, operations and seconds since the last logged step; reading data counts, validation and saving do not."""

    def __init__(self, waits: Waits):
        self.steps, self.tokens, self.flops, self._waits = 0, 0, 0.0, waits
        self._began, self._waited = self._clocks()

    @property
    def seconds(self) -> float:
        return max(self._clocks()[0] - self._began, 1e-9)

    @property
    def busy(self) -> float:
        """Seconds a step in which this rank did not wait for others."""
        now, waited = self._clocks()
        return max(now - self._began - (waited - self._waited), 0.0) / max(self.steps, 1)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Time that is not counted."""
        before = self._clocks()
        yield
        after = self._clocks()
        self._began += after[0] - before[0]
        self._waited += after[1] - before[1]

    def add(self, result: StepResult, flops_per_token: float) -> None:
        self._waits.seconds()  # a GPU's marks of a step's waits are let go
        tokens = sum(g.tokens for g in result.groups)
        self.steps += 1
        self.tokens += tokens
        self.flops += tokens * flops_per_token

    def _clocks(self) -> tuple[float, float]:
        """Seconds, and those of waits among them."""
        return time.monotonic(), self._waits.seconds()


def validation_depths(config: Config) -> tuple[int, ...]:
    """Depths that validation reports."""
    mean = config.depth.evaluation_depth
    return config.validation.depths or tuple(sorted({1, 2, mean, 2 * mean}))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan
