"""The ``loopscale`` command. Sub-commands import their room when they run, so that help answers at once."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import loopscale

_DESCRIPTION = """\
Pretrain looped language models: one shared transformer block applied R times.

  corpus build CONFIG      text sources -> tokenizer -> shards
  train CONFIG [k=v ...]   a run, from a laptop to many ranks (torchrun -m loopscale train ...)
  plan CONFIG [k=v ...]    the ring schedule of one step, before anything is started
  eval RUN                 held-out perplexity at every depth
  generate RUN PROMPT      text from a checkpoint
  report RUN | --study F   one HTML page of a run, or of a study's runs side by side
  convert FROM OUT         a checkpoint into another format (--to), or one of another format into ours
  launch slurm|local ...   start a run as a SLURM job or as processes of one terminal; its status, logs, end
  doctor                   what is installed, and what each absence costs
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 for faults, 2 for a user's mistakes, 75 for a run that goes on with
    --resume auto."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    overrides = [a for a in rest if not a.startswith("-")] if hasattr(options, "overrides") else []
    if len(overrides) < len(rest):
        options.parser.error(f"unrecognized arguments: {' '.join(a for a in rest if a not in overrides)}")
    if overrides:  # argparse gives up on overrides that follow an option
        options.overrides += overrides
    if not hasattr(options, "run"):
        options.parser.print_help()
        return 2
    warnings.filterwarnings("ignore")  # of libraries; ours are events of the run
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no GPU
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank is told in one sentence, not in stack frames
    return answer(lambda: options.run(options), options.traceback)


def answer(action: Callable[[], int], traceback: bool = False) -> int:
    """The exit code of ``action``, or of what it raised, which is told in a sentence."""
    from loopscale.errors import LoopscaleError, describe_fault

    try:
        return action()
    except LoopscaleError as error:
        if traceback:
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or error.exit_code != 2:  # a mistake in the configuration is the same on every rank
            name = "" if rank == "0" else f"rank {rank}: "
            print(f"{name}error: {error}" if error.exit_code != 2 else str(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if traceback:
            raise
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if traceback:
            raise
        print(f"error: {describe_fault(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("loopscale", description=_DESCRIPTION, formatter_class=raw, add_help=True)
    parser.add_argument("--version", action="version", version=loopscale.__version__)
    parser.set_defaults(parser=parser, traceback=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(
        name: str,
        run: object,
        text: str,
        of: argparse._SubParsersAction[argparse.ArgumentParser] = commands,
        add_help: bool = True,
    ) -> argparse.ArgumentParser:
        sub = of.add_parser(name, help=text, description=text, formatter_class=raw, add_help=add_help)
        sub.set_defaults(run=run, parser=sub)
        sub.add_argument("--traceback", action="store_true", help="show where an error was raised")
        return sub

    corpus = commands.add_parser("corpus", help="make and look at training data")
    corpus.set_defaults(parser=corpus)
    corpus_commands = corpus.add_subparsers(title="commands", metavar="COMMAND")
    build = command("build", _corpus_build, "Make shards from text sources.", corpus_commands, add_help=False)
    _config_arguments(build, "corpus")
    show = command("inspect", _corpus_inspect, "Show a corpus: statistics and packed samples.", corpus_commands)
    show.add_argument("corpus", help="folder or URL")
    show.add_argument("--split", default="train")
    show.add_argument("--count", type=_positive, default=3, help="samples to show (3)")
    show.add_argument("--sequence-length", type=_positive, default=128, help="tokens of a sample (128)")

    train = command("train", _train, "Train a looped model. CONFIG is YAML over the defaults.", add_help=False)
    _config_arguments(train, "run")
    train.add_argument(
        "--resume", metavar="WHERE", help='"auto": this run\'s newest whole checkpoint; or a run folder or checkpoint'
    )
    train.add_argument("--init", metavar="WHERE", help="start a new run from the weights of a run or checkpoint")
    train.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and where each value comes from"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print layout, batch arithmetic, parameters and memory; start nothing"
    )
    _ranks_arguments(train, "with --dry-run: ")
    train.add_argument("--device", choices=("cpu", "gpu"), help="with --dry-run: memory of such ranks; default as here")
    train.add_argument("--profile", action="store_true", help="record steps 4 to 6 into RUN/profile")
    train.add_argument("--study", type=Path, metavar="FILE", help="train the runs of a study that are missing, instead of CONFIG")
    train.add_argument("--at-once", type=_positive, metavar="N", help="with --study: runs at the same time; default by cores")

    plan = command("plan", _plan, "Show the ring schedule of one optimizer step. Starts nothing.", add_help=False)
    _config_arguments(plan, "run")
    _ranks_arguments(plan)
    plan.add_argument("--step", type=_whole, default=0, help="the step whose depths are drawn, from 0 (0)")
    plan.add_argument("--draw", type=Path, metavar="FILE", help="draw the schedule into a .png, .svg or .pdf")

    evaluate = command("eval", _eval, "Held-out perplexity at every depth.")
    _checkpoint_arguments(evaluate)
    evaluate.add_argument("--depths", help='depths as "1-10" or "1,2,5"; default 1 to twice the mean')
    evaluate.add_argument("--text", type=Path, help="a text file instead of the held-out split")
    evaluate.add_argument("--sequences", type=_positive, help="sequences to read; default all")
    evaluate.add_argument("--batch", type=_positive, default=16, help="sequences at once (16)")
    evaluate.add_argument(
        "--diagnose", action="store_true",
        help="how the loop nears its fixed point (contraction, gradient error of truncated backprop, tokens converged), and what "
        "its losses see of the state's scale",
    )  # fmt: skip
    evaluate.add_argument(
        "--exits", action="store_true",
        help="instead: perplexity and tokens/s of early exit by rules that are calibrated here, beside those of fixed depths",
    )  # fmt: skip

    generate = command("generate", _generate, "Continue a prompt.")
    _checkpoint_arguments(generate)
    generate.add_argument("prompt")
    generate.add_argument("--depth", type=_positive, help="visits; default the training mean")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="(64)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    generate.add_argument("--top-k", type=_positive, default=50, help="sample among the k likeliest tokens (50)")
    generate.add_argument("--seed", type=int, default=1, help="(1)")

    report = command("report", _report, "Write RUN/report.html, or report.html of a study, one page that works anywhere.")
    report.add_argument("folder", nargs="?", metavar="RUN")
    report.add_argument("overrides", nargs="*", metavar="section.key=value", help="with --study: as its runs were trained")
    report.add_argument("--study", type=Path, metavar="FILE", help="compare the runs of a study, instead of RUN")
    report.add_argument("--out", type=Path, metavar="FILE", help="write the page here")

    convert = command("convert", _convert, "A checkpoint into another format, or a model of another format into a checkpoint.")
    convert.add_argument(
        "source",
        metavar="FROM",
        help="with --to a run folder or a checkpoint; else a folder with a model and its configuration, or a .gguf",
    )
    convert.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    convert.add_argument("--to", choices=_WRITTEN, help="the format to write")
    convert.add_argument("--from", dest="of", choices=_READ, help="the format to read; default as its files tell")
    convert.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json; default the one in FROM")
    convert.add_argument(
        "--config", type=Path, metavar="FILE", help="with --from deepspeed or megatron: a config.yaml; default the one in FROM"
    )
    convert.add_argument("--dtype", choices=("fp32", "bf16"), help="with --to: of the written weights (fp32)")
    convert.add_argument("--shard-size", type=_gib, metavar="GIB", help="with --to: of a file of weights at most (5)")
    retrofit = convert.add_argument_group("a looped model of a plain one (llama, gguf)")
    retrofit.add_argument(
        "--retrofit", metavar="LAYERS",
        help="layers of prelude, core and coda: 4/8/4, the first, those before the last, and the last; or 0-3/18-25/26-29",
    )  # fmt: skip
    retrofit.add_argument("--depth", type=_positive, metavar="R", help="mean number of visits to train with (4)")
    retrofit.add_argument("--inject", choices=_INJECTIONS, help="the injection, which begins as identity (huginn_linear)")

    _launch_commands(commands, command)

    doctor = command("doctor", _doctor, "What is installed here, and what each absence costs.")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _launch_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser], command: Callable[..., Any]) -> None:
    launch = commands.add_parser("launch", help="start runs on a cluster, and look after them")
    launch.set_defaults(parser=launch)
    of = launch.add_subparsers(title="commands", metavar="COMMAND")

    slurm = command("slurm", _launch_slurm, "Submit a run, or a study as an array, to SLURM.", of, add_help=False)
    _config_arguments(slurm, "run")
    slurm.add_argument("--cluster", type=Path, metavar="FILE", help="what the job asks for; cluster.KEY=VALUE changes it")
    slurm.add_argument("--study", type=Path, metavar="FILE", help="the runs of a study, as an array, instead of CONFIG")
    slurm.add_argument("--at-once", type=_positive, metavar="N", help="with --study: jobs at the same time; default all")
    slurm.add_argument("--rehearse", action="store_true", help="the same job on CPUs with toy widths and a few steps")
    slurm.add_argument("--dry-run", action="store_true", help="print the world and the batch script; submit nothing")

    local = command("local", _launch_local, "Train with several processes of this machine.", of, add_help=False)
    _config_arguments(local, "run")
    local.add_argument("--nproc", type=_positive, required=True, metavar="N", help="processes, one rank each")
    local.add_argument("--resume", metavar="WHERE", help="as of `loopscale train`")
    local.add_argument("--init", metavar="WHERE", help="as of `loopscale train`")

    status = command("status", _launch_status, "How launched runs stand.", of)
    status.add_argument("names", nargs="*", metavar="RUN", help="runs to show; default all")
    logs = command("logs", _launch_logs, "What the ranks of a launched run printed.", of)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until its jobs have ended")
    cancel = command("cancel", _launch_cancel, "Cancel a run's jobs; what it has saved stays.", of)
    requeue = command("requeue", _launch_requeue, "Start a run again where it stopped, with the code it was launched with.", of)
    for one in (logs, cancel, requeue):
        one.add_argument("name", metavar="RUN", help="name or folder of a launched run")
    requeue.add_argument(
        "overrides", nargs="*", metavar="cluster.KEY=VALUE", help="for a new job, other settings of the cluster file"
    )
    for any_of in (status, logs, cancel, requeue):
        any_of.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where run folders are (runs)")


_WRITTEN = ("hf", "huginn", "ouro", "parcae", "xllm", "llama", "megatron")
_READ = (*_WRITTEN, "deepspeed", "gguf")
_INJECTIONS = ("huginn_linear", "none", "add", "diagonal", "ortho")


def _gib(text: str) -> float:
    """A number above 0, for argparse."""
    if not re.fullmatch(r"[0-9]{0,6}(\.[0-9]{1,6})?", text) or not text.strip(".") or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


def _whole(text: str) -> int:
    """A whole number, 0 or more, for argparse."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


class _HelpWithKeys(argparse.Action):
    """Help that goes on with every key of the configuration."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from loopscale.config import Config, CorpusBuild
        from loopscale.config.show import describe_keys

        print(
            parser.format_help()
            + "\nkeys of CONFIG:\n"
            + describe_keys(Config if parser.get_default("kind") == "run" else CorpusBuild)
        )
        parser.exit()


def _config_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("-h", "--help", action=_HelpWithKeys, nargs=0, help="show this and every key of CONFIG")
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--schema", action="store_true", help="print a JSON schema, for editors")
    parser.set_defaults(kind=kind)


def _ranks_arguments(parser: argparse.ArgumentParser, when: str = "") -> None:
    fewest = "default: as few as make whole replicas"
    parser.add_argument("--nodes", type=_positive, help=f"{when}nodes; {fewest}")
    parser.add_argument("--per-node", type=_positive, help=f"{when}processes per node; {fewest}")


def _checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="RUN", help="a run folder (its newest checkpoint) or a checkpoint, or its URL")


def _load_config(options: argparse.Namespace) -> object:
    """The configuration, or None when only its schema was asked for."""
    from loopscale.config import Config, CorpusBuild, load
    from loopscale.config.show import schema
    from loopscale.errors import UsageError

    tree = Config if options.kind == "run" else CorpusBuild
    if options.schema:
        print(schema(tree))
        return None
    if options.config is None:
        raise UsageError(f"{options.parser.prog} needs a CONFIG file; --help lists what it may hold")
    return load(tree, options.config, options.overrides)


def _corpus_build(options: argparse.Namespace) -> int:
    loaded = _load_config(options)
    if loaded is None:
        return 0
    from loopscale.corpus.build import build
    from loopscale.corpus.progress import progress_to

    build(loaded.config, progress=progress_to(sys.stderr))  # type: ignore[attr-defined]
    return 0


def _corpus_inspect(options: argparse.Namespace) -> int:
    from loopscale.corpus.show import inspect

    inspect(options.corpus, split=options.split, count=options.count, sequence_length=options.sequence_length)
    return 0


def _train(options: argparse.Namespace) -> int:
    if options.study is not None:
        return _train_study(options)
    loaded = _load_config(options)
    if loaded is None:
        return 0
    if options.print_config:
        from loopscale.config.show import with_origins

        print(with_origins(loaded))  # type: ignore[arg-type]
        return 0
    if options.dry_run:
        from loopscale.plan.dry_run import dry_run

        gpus = {"cpu": False, "gpu": True, None: None}[options.device]
        print(dry_run(loaded.config, options.nodes, options.per_node, gpus))  # type: ignore[attr-defined]
        return 0
    from loopscale.train.signals import INTERRUPTED, StopRequest

    stop = StopRequest(loaded.config.train.grace)  # type: ignore[attr-defined]
    stop.listen()  # to the end of the process: its imports and its end take seconds, too
    from loopscale.train.run import train

    outcome = train(
        loaded, stop, stem=options.config.stem, resume=options.resume, init=options.init, profile=options.profile  # type: ignore[arg-type]
    )  # fmt: skip
    return 0 if outcome.finished else INTERRUPTED


def _train_study(options: argparse.Namespace) -> int:
    from loopscale.config.study import load_study
    from loopscale.errors import UsageError

    if wrong := [name for name in ("resume", "init", "print_config", "profile") if getattr(options, name)]:
        raise UsageError(f"--{wrong[0].replace('_', '-')} is for a single run, and --study goes on with all of its own")
    study = load_study(options.study, _given(options))
    from loopscale.cluster.local import Asked

    asked = Asked()  # before imports that take seconds
    from loopscale.cluster.local_study import Room, check_same, describe, run_study

    room = Room.here(study, options.at_once)
    if options.dry_run:
        check_same(study)
        print(describe(study, room))
        return 0
    return run_study(study, room, asked)


def _given(options: argparse.Namespace) -> list[str]:
    """All overrides; with a study, what stands first is one too."""
    return [*([str(options.config)] if options.study is not None and options.config is not None else []), *options.overrides]


def _launch_slurm(options: argparse.Namespace) -> int:
    from loopscale.config import ClusterConfig, Config, load
    from loopscale.config.study import load_study
    from loopscale.errors import UsageError

    given = _given(options)
    of_cluster = [o.removeprefix("cluster.") for o in given if o.startswith("cluster.")]
    options.overrides = of_run = [o for o in given if not o.startswith("cluster.")]
    if options.cluster is None and not options.schema:
        raise UsageError("launch slurm needs --cluster FILE: nodes, devices, partition, time (configs/cluster has examples)")
    if options.study is None and (loaded := _load_config(options)) is None:
        return 0
    cluster = load(ClusterConfig, options.cluster, of_cluster).config

    from loopscale.cluster.submit import Launch, named

    folder = None
    if options.study is not None:
        study = load_study(options.study, of_run)
        runs: list[Config] = [run.loaded.config for run in study.runs]
        folder = study.folder
    else:
        runs = [named(loaded.config, options.config.stem)]  # type: ignore[attr-defined]
    if options.rehearse:
        from loopscale.cluster.rehearsal import rehearsed

        asked = cluster
        runs, (cluster, *_) = zip(*(rehearsed(config, asked) for config in runs), strict=True)  # type: ignore[assignment]
    launch = Launch.of(runs, cluster, folder, options.at_once)
    if options.dry_run:
        print(launch.describe())
        return 0
    jobs = launch.submit()
    job = cluster.job
    print(f"submitted job{'s' * (len(jobs) > 1)} {', '.join(jobs)} · {job.nodes} × {job.devices} ranks · {launch.folder}")
    shown = os.path.relpath(launch.folder)
    print(f"  loopscale launch status {shown} · loopscale launch logs -f {shown}{f'/{runs[0].run.name}' if folder else ''}")
    return 0


def _launch_local(options: argparse.Namespace) -> int:
    loaded = _load_config(options)
    if loaded is None:
        return 0
    from loopscale.cluster.local import run_local

    further = [part for name in ("resume", "init") if (value := getattr(options, name)) for part in (f"--{name}", value)]
    timeout = loaded.config.parallel.timeout  # type: ignore[attr-defined]
    return run_local(options.nproc, [str(options.config), *options.overrides, *further], timeout)


def _launch_status(options: argparse.Namespace) -> int:
    from rich.console import Console

    from loopscale.cluster.status import find_runs, launched, standings, table

    folders = [run for name in options.names for run in find_runs(name, options.runs)] or launched(options.runs.absolute())
    if not folders:
        print(f"no run of {options.runs} has been launched")
        return 0
    console = Console()
    console.width = console.width if console.is_terminal else 200
    console.print(table(standings(folders, options.runs)))
    return 0


def _launch_logs(options: argparse.Namespace) -> int:
    from loopscale.cluster.commands import show_logs
    from loopscale.cluster.status import find_run

    show_logs(find_run(options.name, options.runs), options.follow)
    return 0


def _launch_cancel(options: argparse.Namespace) -> int:
    from loopscale.cluster.commands import cancel
    from loopscale.cluster.status import find_runs

    print(cancel(find_runs(options.name, options.runs)))
    return 0


def _launch_requeue(options: argparse.Namespace) -> int:
    from loopscale.cluster.commands import requeue
    from loopscale.cluster.status import find_run

    print(requeue(find_run(options.name, options.runs), [o.removeprefix("cluster.") for o in options.overrides]))
    return 0


def _plan(options: argparse.Namespace) -> int:
    loaded = _load_config(options)
    if loaded is None:
        return 0
    from loopscale.plan.ring import plan_report

    print(plan_report(loaded.config, options.step, options.nodes, options.per_node, options.draw))  # type: ignore[attr-defined]
    return 0


def _eval(options: argparse.Namespace) -> int:
    if options.exits:
        return _eval_exits(options)
    from loopscale.evaluate.run import evaluate

    evaluate(
        options.checkpoint, depths=options.depths, text=options.text, sequences=options.sequences, batch=options.batch,
        diagnosed=options.diagnose,
    )  # fmt: skip
    return 0


def _eval_exits(options: argparse.Namespace) -> int:
    from loopscale.errors import UsageError

    if wrong := [name for name in ("depths", "diagnose") if getattr(options, name)]:
        raise UsageError(f"--{wrong[0]} does not go with --exits, which measures depths 1 to the training mean and nothing else")
    from loopscale.inference.frontier import frontier

    frontier(options.checkpoint, text=options.text, sequences=options.sequences, batch=options.batch)
    return 0


def _generate(options: argparse.Namespace) -> int:
    from loopscale.inference.load import load

    model = load(options.checkpoint)
    for note in model.notes:
        print(f"! {note}", file=sys.stderr)
    text = model.generate(
        options.prompt, depth=options.depth, max_new_tokens=options.max_new_tokens,
        temperature=options.temperature, top_k=options.top_k, seed=options.seed,
    )  # fmt: skip
    print(text)
    return 0


def _report(options: argparse.Namespace) -> int:
    from loopscale.errors import UsageError
    from loopscale.report import write_report, write_study_report

    folder, overrides = options.folder, options.overrides
    if options.study is not None and folder is not None and "=" in folder:  # what stands first is an override then
        folder, overrides = None, [folder, *overrides]
    if (folder is None) == (options.study is None):
        raise UsageError("loopscale report takes either a RUN folder or --study FILE")
    if options.study is None:
        if overrides:
            raise UsageError(f"loopscale report takes one RUN folder; {overrides[0]} belongs to --study FILE")
        print(write_report(Path(folder), options.out))
        return 0
    path, left_out = write_study_report(options.study, overrides, options.out)
    print(path)
    if left_out:
        print(left_out, file=sys.stderr)
    return 0


def _convert(options: argparse.Namespace) -> int:
    from loopscale.convert.retrofit import plan
    from loopscale.convert.run import export, import_
    from loopscale.corpus.progress import progress_to
    from loopscale.errors import UsageError

    progress = progress_to(sys.stderr)
    try:
        if options.to is None:
            if options.dtype is not None or options.shard_size is not None:
                raise UsageError("--dtype and --shard-size are of what --to writes; a checkpoint of ours is fp32; leave them out")
            looped = None
            if options.retrofit is not None:
                looped = partial(plan, options.retrofit, options.depth or 4, options.inject or "huginn_linear")
            elif options.depth is not None or options.inject is not None:
                raise UsageError("--depth and --inject are of a model that is looped by --retrofit; give it, or leave them out")
            place = Path(options.source)
            given = {"tokenizer": options.tokenizer, "config_file": options.config}
            check = import_(place, options.of, options.out, progress, retrofit=looped, **given)
        elif any(getattr(options, name) is not None for name in ("of", "tokenizer", "config", "retrofit", "depth", "inject")):
            raise UsageError(
                "--to writes a checkpoint in another format, and --from, --tokenizer, --config, --retrofit, --depth and "
                "--inject are of one that is read; leave out --to or those"
            )
        else:
            import torch

            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype or "fp32"]
            size = int((options.shard_size or 5) * 2**30)
            check = export(options.source, options.to, options.out, progress, dtype=dtype, shard_bytes=size)
    finally:
        progress.close()
    print(f"written {options.out}; {check}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    from loopscale.environment.doctor import as_json, examine, exit_code, render

    findings = examine()
    if options.json:
        print(as_json(findings))
    else:
        render(findings, Console())
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
