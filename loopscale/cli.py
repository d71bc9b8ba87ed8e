"""The ``loopscale`` command. Sub-commands import their room when they run, so that help answers at once."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import loopscale

_DESCRIPTION = """\
Pretrain looped language models: one shared transformer block applied R times.

  corpus build CONFIG      text sources -> tokenizer -> shards
  train CONFIG [k=v ...]   a run, from a laptop to many ranks (torchrun -m loopscale train ...)
  plan CONFIG [k=v ...]    the ring schedule of one step, before anything is started
  eval RUN                 held-out perplexity at every depth
  generate RUN PROMPT      text from a checkpoint
  report RUN               one HTML page
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
    train.add_argument("--profile", action="store_true", help="record steps 4 to 6 into RUN/profile")

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

    generate = command("generate", _generate, "Continue a prompt.")
    _checkpoint_arguments(generate)
    generate.add_argument("prompt")
    generate.add_argument("--depth", type=_positive, help="visits; default the training mean")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="(64)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    generate.add_argument("--top-k", type=_positive, default=50, help="sample among the k likeliest tokens (50)")
    generate.add_argument("--seed", type=int, default=1, help="(1)")

    report = command("report", _report, "Write RUN/report.html, one page that works anywhere.")
    report.add_argument("folder", type=Path, metavar="RUN")

    doctor = command("doctor", _doctor, "What is installed here, and what each absence costs.")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


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
    loaded = _load_config(options)
    if loaded is None:
        return 0
    if options.print_config:
        from loopscale.config.show import with_origins

        print(with_origins(loaded))  # type: ignore[arg-type]
        return 0
    if options.dry_run:
        from loopscale.plan.dry_run import dry_run

        print(dry_run(loaded.config, options.nodes, options.per_node))  # type: ignore[attr-defined]
        return 0
    from loopscale.train.signals import INTERRUPTED, StopRequest

    stop = StopRequest(loaded.config.train.grace)  # type: ignore[attr-defined]
    stop.listen()  # to the end of the process: its imports and its end take seconds, too
    from loopscale.train.run import train

    outcome = train(
        loaded, stop, stem=options.config.stem, resume=options.resume, init=options.init, profile=options.profile  # type: ignore[arg-type]
    )  # fmt: skip
    return 0 if outcome.finished else INTERRUPTED


def _plan(options: argparse.Namespace) -> int:
    loaded = _load_config(options)
    if loaded is None:
        return 0
    from loopscale.plan.ring import plan_report

    print(plan_report(loaded.config, options.step, options.nodes, options.per_node, options.draw))  # type: ignore[attr-defined]
    return 0


def _eval(options: argparse.Namespace) -> int:
    from loopscale.evaluate.run import evaluate

    evaluate(options.checkpoint, depths=options.depths, text=options.text, sequences=options.sequences, batch=options.batch)
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
    from loopscale.report.page import write_report

    print(write_report(options.folder))
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
