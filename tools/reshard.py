#!/usr/bin/env python
"""Writes a checkpoint anew in another number of parts: without GPUs, without ranks, in bounded memory.

Small boxes of tensors become whole rows of them; a run goes on from the new one as from the old one, at any layout, and
finds the same elements: their digests are compared. OUT appears whole or not at all. With --weights-only the optimizer's
moments stay behind: such a checkpoint can be used, and a new run can start from its weights (--init), but none can go on.

    python tools/reshard.py runs/demo/checkpoints/step-550 serving --parts 4 [--memory 1GiB] [--weights-only]
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from pathlib import Path

from loopscale.cli import answer

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main() -> int:
    warnings.filterwarnings("ignore")  # torch says that it is alone
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--parts", type=int, required=True, help="parts, nearly equal in size")
    parser.add_argument("--memory", type=size, default="1GiB", help="what it may take beside the index and libraries (1GiB)")
    parser.add_argument("--weights-only", action="store_true", help="leave out the moments of the optimizer")
    options = parser.parse_args()
    return answer(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    from loopscale.checkpoint.reshard import reshard
    from loopscale.corpus.progress import progress_to

    how = {"memory": options.memory, "weights_only": options.weights_only}
    with contextlib.closing(progress_to(sys.stderr)) as progress:
        manifest = reshard(options.checkpoint, options.out, options.parts, progress, **how)
    files = sum(f.name.endswith(".safetensors") for f in manifest.files)
    print(f"{options.out}: {manifest.size / 1e6:,.1f} MB in {options.parts} parts ({files} files)")
    return 0


def size(text: str) -> int:
    """Bytes, for argparse."""
    found = re.fullmatch(r"([0-9]{1,15})(KiB|MiB|GiB|)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 1GiB")
    return int(found[1]) * UNITS[found[2]]


if __name__ == "__main__":
    sys.exit(main())
