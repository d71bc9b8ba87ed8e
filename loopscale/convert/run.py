"""``loopscale convert``: a checkpoint of ours into another format, or one of another format into ours.

Tensors go through memory one rule at a time. All is written to a folder beside OUT, read back, and its logits are compared with
those of what it was made of; then OUT appears. A call that was killed is made again, and keeps the files that are whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopscale.checkpoint import store
from loopscale.checkpoint.commit import Folder
from loopscale.checkpoint.inspect import verified
from loopscale.checkpoint.parts import PartReader, Piece
from loopscale.checkpoint.restore import config_of, find, run_of
from loopscale.config import Config, from_values
from loopscale.convert.compare import Check, Different, Read, compared, logits, probe, same_by_their_code
from loopscale.convert.formats import FORMATS
from loopscale.convert.formats.base import CONFIG, Format
from loopscale.convert.mapping import Rule
from loopscale.convert.retrofit import Plan, injection, looped, looped_rules, refuse_looped, stacked
from loopscale.convert.tensors import Planned, Source, read_fp32
from loopscale.corpus.progress import Progress
from loopscale.corpus.tokenizer import end_of_text, load_tokenizer, vocabulary_size
from loopscale.durable import content_digest, locked, sync, sync_tree, write_json
from loopscale.errors import CheckpointError, UsageError
from loopscale.train.folder import config_text

SHARD_BYTES = 5 * 2**30
"""Of a shard at most, a larger tensor aside."""
MOST_LAYERS = 10_000
LISTED = 6
"""Names that a sentence lists."""


def export(
    where: str | Path,
    name: str,
    out: Path,
    progress: Progress,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> Check:
    """Writes a checkpoint, or the newest whole one of a run, to the folder ``out`` in the format ``name``.

    Raises :class:`UsageError` naming the first property of the model that the format does not have, or where ``out`` exists,
    and :class:`CheckpointError` for a damaged checkpoint, or where the format's own code gives other logits.
    """
    form = FORMATS[name]
    _refuse_existing(out)
    with tempfile.TemporaryDirectory(prefix="loopscale-") as cache:
        source, _ = find(where, Path(cache))
        config = config_of(source)
        form.refuse_unfit(config)
        manifest, reader, about = verified(source, progress), PartReader(source), form.about(config)
        rules = form.rules(config, about)
        told = _told(progress, sum(math.prod(rule.shape) for rule in rules) * dtype.itemsize)
        with _building(out, content_digest([manifest.dump(), name, str(dtype), shard_bytes])) as work:
            planned = [Planned(rule.theirs, rule.shape, _maker(rule, reader)) for rule in rules]
            for written in form.write(work, config, planned, dtype, shard_bytes):
                told(written)
            form.write_about(work, about)
            (work / form.tokenizer).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / "tokenizer.json", work / form.tokenizer)
            form.finish(work, config, dtype, run_of(Path(where), source), source.name)
            expected, found = logits(config, _our_weights(reader)), _read_back(form, work, config)
            theirs = form.logits(work, probe(config), range(1, len(found) + 1))
            if dtype != torch.float32:  # what is told below is what it rounds away, and nothing else
                rounded = _made_of(rules, lambda rule: _maker(rule, reader)().to(dtype).float())
                compared(logits(config, rounded), found, torch.float32)
            if theirs is None:
                return compared(expected, found, dtype)
            same_by_their_code(found, theirs)
            return compared(expected, theirs, dtype, by="transformers")


def import_(
    place: Path,
    name: str | None,
    out: Path,
    progress: Progress,
    *,
    tokenizer: Path | None = None,
    config_file: Path | None = None,
    retrofit: Callable[[int], Plan] | None = None,
) -> Check:
    """Writes the model at ``place``, of the format ``name`` or of that which it is recognised as, as a checkpoint of ours, looped
    as ``retrofit`` plans for its number of layers: `loopscale.load(out)` gives it, and `train --init out` goes on from it.
    ``config_file`` is its configuration, where the format has ours and none lies there.

    Raises :class:`UsageError` where ``out`` exists, no format or tokenizer is found, or ``retrofit`` does not fit the model; and
    :class:`CheckpointError` that lists tensors which are unknown, missing or of another shape, or names a value of the
    configuration that ours cannot be.
    """
    _refuse_existing(out)
    for given in (place, *filter(None, (config_file, tokenizer))):
        if not given.exists():
            raise UsageError(f"{given} does not exist")
    form = _recognised(place, name)
    if config_file is not None and form.configuration == CONFIG:
        raise UsageError(f"--config names a configuration of ours, and a model of the format {form.name} brings its own")
    about = form.read_about(config_file or place)
    if damaged := form.damage(place):
        raise CheckpointError(damaged)
    config = _config_of(form, about, config_file or place / form.configuration)
    source = form.source(place, config)
    rules, plan, made = form.rules(config, about), None, dict[str, Tensor]()
    _refuse_others(place, source, form, config, rules)
    plain, theirs = config, _made_of(rules, lambda rule: read_fp32(source, rule.theirs))
    if retrofit is not None:
        refuse_looped(config)
        plan = retrofit(config.model.core_layers)
        config = looped(config, plan)
        rules, made = looped_rules(rules, config, plan), injection(config)
    with tempfile.TemporaryDirectory(prefix="loopscale-") as scratch:
        words = _tokenizer_of(form, place, tokenizer, config, Path(scratch))
    told = _told(progress, sum(4 * math.prod(p.weight.shape) for rule in rules for p in rule.parts))
    pieces: list[Piece] = [
        _Converted(f"weight/{part.weight.name}", part.weight.shape, (0,) * len(part.weight.shape),
                   torch.empty(part.weight.shape, device="meta"), rule=rule, place=i, source=source, told=told)
        for rule in rules
        for i, part in enumerate(rule.parts)
    ]  # fmt: skip
    pieces += [Piece(f"weight/{name}", tuple(values.shape), (0,) * values.dim(), values) for name, values in made.items()]
    files: dict[str, str | bytes] = {"config.yaml": config_text(config), "tokenizer.json": words}
    with _building(out, content_digest([files["config.yaml"], form.name, str(plan), words.decode(), source.stamps])) as work:
        if plan is None:
            expected = logits(plain, theirs)  # before the rest, for it finds each tensor that cannot be read
        else:
            expected = torch.cat([logits(*stacked(plain, theirs, plan.stack(r))) for r in range(1, plan.compared + 1)])
        snapshot = store.Snapshot(0, pieces, {"step": 0, "converted_from": form.name}, files)
        store.save(_Work(work), snapshot, keep_parts=True)
        found = logits(config, _our_weights(PartReader(work)))
        return compared(expected, found[: len(expected)], torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Reading theirs


def _config_of(form: Format, about: Mapping[str, Any], told_by: Path) -> Config:
    """Ours; what a format does not tell has the defaults, and a batch that no one has trained with."""
    config = from_values(Config, {"batch": {"global_batch": 1}, **form.values(about)}, str(told_by)).config
    if (layers := config.model.prelude_layers + config.model.core_layers + config.model.coda_layers) > MOST_LAYERS:
        raise CheckpointError(f"{told_by} says that the model has {layers:,} layers; at most {MOST_LAYERS:,} can be read")
    return config


def _recognised(place: Path, name: str | None) -> Format:
    if name is not None:
        return FORMATS[name]
    found = next((form for form in FORMATS.values() if form.recognises(place)), None)
    if found is None and place.is_file():
        raise UsageError(f"{place} is a file and no GGUF; give the folder that it lies in")
    if found is None:
        about = f"{place}/{CONFIG} is" if (place / CONFIG).is_file() else f"{place} has no {CONFIG} and is"
        raise UsageError(f"{about} of none of the formats {', '.join(FORMATS)}; --from names one")
    return found


def _refuse_others(folder: Path, source: Source, form: Format, config: Config, rules: Sequence[Rule]) -> None:
    """Every tensor of theirs is one of a rule, stands for one, or follows from the configuration; and none is missing."""
    expected, tied = {rule.theirs: rule for rule in rules}, form.tied(config)
    names = set(source.names)
    if unlike := form.unlike(config, names):
        raise CheckpointError(f"{folder} cannot be read: {unlike}")
    odd = [f"{n} is unknown" for n in sorted(names - expected.keys() - tied.keys() - set(form.buffers))]
    odd += [f"{n} is missing" for n in expected if n not in names]
    shapes = {n: source.shape(n) for n in expected if n in names}
    odd += [
        f"{n} has shape {list(shape)}, must be {list(expected[n].shape)}"
        for n, shape in shapes.items()
        if not expected[n].fits(shape)
    ]
    odd += [
        f"{n} differs from {of}, with which it is tied"
        for n, of in tied.items()
        if n in names and of in names and not torch.equal(source.read(n), source.read(of))
    ]
    if odd:
        more = f"; and {len(odd) - LISTED} more" if len(odd) > LISTED else ""
        raise CheckpointError(
            f"{folder} does not hold what its {form.configuration} says: {'; '.join(odd[:LISTED])}{more}; "
            f"correct the one or the other"
        )


def _tokenizer_of(form: Format, place: Path, given: Path | None, config: Config, scratch: Path) -> bytes:
    """A tokenizer.json that fits the model."""
    path = given or form.tokenizer_file(place, scratch)
    if not path.is_file():
        wrong = "is no file" if path.exists() else "does not exist"
        raise UsageError(f"{path} {wrong}; --tokenizer names a tokenizer.json")
    tokenizer = load_tokenizer(path)
    end_of_text(tokenizer, path)
    if (size := vocabulary_size(tokenizer)) > config.model.vocabulary:
        raise UsageError(f"{path} has {size} tokens, the model {config.model.vocabulary}; --tokenizer names another")
    return path.read_bytes()


@dataclass(frozen=True, kw_only=True)
class _Converted(Piece):
    """A weight of ours that is made of theirs when it is asked for; ``here`` has a shape only."""

    rule: Rule
    place: int
    source: Source
    told: Callable[[int], None]

    def read(self) -> Tensor:
        values = self.rule.back(read_fp32(self.source, self.rule.theirs))[self.place].contiguous()
        self.told(values.nbytes)
        return values


class _Work(Folder):
    """One checkpoint in a folder that is given; parts that are there already count as room."""

    def begin(self, step: int) -> None:
        (self.folder / "tensors").mkdir(exist_ok=True)

    def free(self) -> float:
        return super().free() + sum(part.stat().st_size for part in (self.folder / "tensors").iterdir())

    def writing(self, step: int) -> Path:
        return self.folder

    def publish(self, step: int) -> None:
        pass

    def abandon(self, step: int) -> None:
        pass


def _made_of(rules: Sequence[Rule], theirs: Callable[[Rule], Tensor]) -> Read:
    """Our weights, of the tensors that ``theirs`` gives, fp32."""
    place_of = {part.weight.name: (rule, i) for rule in rules for i, part in enumerate(rule.parts)}

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        places = {n: place_of[n] for n in names}
        whole = {name: rule.back(theirs(rule)) for name, rule in {rule.theirs: rule for rule, _ in places.values()}.items()}
        return {n: whole[rule.theirs][i] for n, (rule, i) in places.items()}

    return read


def _read_back(form: Format, folder: Path, like: Config) -> Tensor:
    """Logits of a folder of theirs, by our model of what its configuration says; of the tokens and the noise that ``like`` has,
    for most formats tell neither a sequence length nor a seed."""
    about = form.read_about(folder)
    told = _config_of(form, about, folder / form.configuration)
    config = told.model_copy(update={"corpus": like.corpus, "run": like.run})
    source = form.source(folder, config)
    return logits(config, _made_of(form.rules(config, about), lambda rule: read_fp32(source, rule.theirs)))


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} already exists; name a folder that does not")


@contextlib.contextmanager
def _building(out: Path, plan: str) -> Iterator[Path]:
    """A folder to write, which becomes ``out`` at the end; what a call with the same ``plan`` wrote that did not end is in it."""
    work = out.with_name(f"converting-{out.name}")
    with locked(out.with_name(f".{out.name}.lock"), wait=False) as mine:
        if not mine:
            raise UsageError(f"{out} is being written by another process")
        _refuse_existing(out)  # by now
        known = work / ".plan"
        if (left := _plan_left_in(work)) != plan:
            if left is not None:
                shutil.rmtree(work)
            work.mkdir(parents=True, exist_ok=True)
            write_json(known, plan)
        try:
            yield work
        except Different:  # what another call made of it would be no better
            shutil.rmtree(work)
            out.with_name(f".{out.name}.lock").unlink()
            raise
        sync_tree(work)
        work.rename(out)
        (out / known.name).unlink()
        sync(out)
        sync(out.parent)
        out.with_name(f".{out.name}.lock").unlink()


def _plan_left_in(work: Path) -> str | None:
    """The plan of the call that began the folder, if there is one. Raises :class:`UsageError` for a folder of anyone else's."""
    known = work / ".plan"
    try:
        plan = json.loads(known.read_text()) if known.is_file() and not work.is_symlink() else None
    except ValueError:
        plan = None
    if isinstance(plan, str):
        return plan
    if work.is_symlink() or (work.exists() and (not work.is_dir() or any(work.iterdir()))):
        raise UsageError(f"{work} is in the way, and was not left by a conversion; rename it, or name another OUT")
    return None


def _our_weights(reader: PartReader) -> Read:
    return lambda names: {n: _stored(reader, n) for n in names}


def _maker(rule: Rule, reader: PartReader) -> Callable[[], Tensor]:
    return lambda: rule.out([_stored(reader, part.weight.name) for part in rule.parts])


def _stored(reader: PartReader, name: str) -> Tensor:
    """A weight of a checkpoint of ours."""
    values = torch.empty(reader.index[f"weight/{name}"].shape)
    reader.read([Piece(f"weight/{name}", tuple(values.shape), (0,) * values.dim(), values)])
    return values


def _told(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0
    progress.update("converting", done, total)

    def told(size: int) -> None:
        nonlocal done
        done += size
        progress.update("converting", done, total)

    return told
