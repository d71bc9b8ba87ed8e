#!/usr/bin/env python
"""What a checkpoint holds: tensors with shapes and norms, counters, facts; or how it differs from another one.

Every file is verified first, and the elements of the tensors against their digests. With OTHER the exit code is 0 when all
tensors are equal to the bit and the counters of the state too (elapsed time and run_id aside), else 1; differences of the
configurations are shown, and do not count. Some 100 MB of memory are enough, beside libraries and the index.

    python tools/inspect_checkpoint.py runs/demo/checkpoints/step-550 [OTHER] [--filter 'weight/core.*'] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from loopscale.cli import answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--filter", default="*", metavar="GLOB", help="names of the tensors to read")
    parser.add_argument("--no-verify", action="store_true", help="do not read the files against the manifest first")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    return answer(lambda: show(options))


def show(options: argparse.Namespace) -> int:
    from rich.console import Console

    from loopscale.checkpoint import inspect
    from loopscale.corpus.progress import progress_to

    how = {"verify": not options.no_verify, "pattern": options.filter}
    found: inspect.Inspection | inspect.Comparison
    with contextlib.closing(progress_to(sys.stderr)) as progress:
        if options.other is None:
            found = inspect.inspect(options.checkpoint, progress, **how)
        else:
            found = inspect.compare(options.checkpoint, options.other, progress, **how)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if options.json:
        print(inspect.as_json(found))
    elif isinstance(found, inspect.Inspection):
        inspect.show(found, console)
    else:
        inspect.show_comparison(found, console)
    return int(isinstance(found, inspect.Comparison) and not found.same)


if __name__ == "__main__":
    sys.exit(main())
