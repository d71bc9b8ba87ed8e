#!/usr/bin/env python
"""Memory and time of `loopscale convert`, by default of 1.07e9 random parameters of Ouro's design in fp32 shards.

read     The shards become a checkpoint of ours. The first call is killed half-way; "kept" are the files that the second finds.
written  That checkpoint becomes a folder for transformers, likewise. To load it there, which is the check, is another process;
         its peak stands beside.
damaged  A shard lacks its last byte: what the call says.

Peaks are of resident memory with mapped files: of the process that loads it nearly all is the folder's own pages, which the
kernel takes back when it needs them. Takes 13 GB of disk in --folder, all of which is removed again.

    python tools/bench_convert.py [--layers 17] [--width 2048] [--folder .]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

FILES = 8
"""Shards of either format, about."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--width", type=int, default=2048, help="of the states; feed-forward 2.75 times, vocabulary 24 times")
    parser.add_argument("--folder", type=Path, default=Path(), help="where files are written, in a folder that is removed")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(**json.loads(options.worker))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-") as folder:
        theirs, ours, exported = (Path(folder) / name for name in ("theirs", "ours", "exported"))
        made = answer(action="make", source=str(theirs), out="", layers=options.layers, width=options.width)
        print(f"{made['parameters'] / 1e9:.2f}e9 parameters, {made['parameters'] * 4 / 2**30:.1f} GiB")
        show("read", "import", theirs, ours)
        show("written", "export", ours, exported)
        shard = max(theirs.glob("*.safetensors"))
        os.truncate(shard, shard.stat().st_size - 1)
        print(f"damaged  {answer(action='import', source=str(theirs), out=f'{ours}-again')['error']}")


def show(title: str, action: str, source: Path, out: Path) -> None:
    killed = run(action=action, source=str(source), out=str(out), kill=True)
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    kept = len(list(out.with_name(f"converting-{out.name}").rglob("*.safetensors")))
    found = answer(action=action, source=str(source), out=str(out))
    loaded = f", of the process that loads it {found['child'] / 2**30:.2f}" if action == "export" else ""
    files, peak = len(list(out.rglob("*.safetensors"))), found["peak"] / 2**30
    print(f"{title:<8} {found['seconds']:.1f} s after a kill, kept {kept} of {files} files; peak GiB {peak:.2f}{loaded}")
    print(f"         {found['check']}")


# ---- the processes


def run(**values: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", json.dumps(values)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def answer(**values: Any) -> dict[str, Any]:
    done = run(**values)
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(action: str, source: str, out: str, kill: bool = False, **sizes: int) -> dict[str, Any]:
    from loopscale.convert.run import export, import_
    from loopscale.corpus.progress import Silent
    from loopscale.errors import CheckpointError

    class Killing(Silent):
        def update(self, phase: str, done: int, total: int) -> None:
            if kill and phase == "converting" and done >= total / 2:
                os.kill(os.getpid(), signal.SIGKILL)

    if action == "make":
        return make(Path(source), **sizes)
    before = time.perf_counter()
    try:
        if action == "export":
            size = sum(part.stat().st_size for part in Path(source).rglob("*.safetensors"))
            check = export(source, "hf", Path(out), Killing(), shard_bytes=size // FILES)
        else:
            check = import_(Path(source), None, Path(out), Killing())
    except CheckpointError as error:
        return {"error": str(error)}
    own, child = (1024 * resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"seconds": time.perf_counter() - before, "peak": own, "child": child, "check": str(check)}


def make(folder: Path, layers: int, width: int) -> dict[str, Any]:
    """A random model as its release would have it, one tensor in memory at a time."""
    import math

    import torch
    from tokenizers import Tokenizer, models

    from loopscale.config import Config, from_values
    from loopscale.convert.formats import FORMATS
    from loopscale.convert.tensors import Planned, write_shards
    from loopscale.corpus.tokenizer import END_OF_TEXT
    from loopscale.durable import write_json

    model = {
        "vocab_size": 24 * width, "hidden_size": width, "heads": max(1, width // 128), "ffn_size": width * 11 // 4,
        "prelude_layers": 0, "core_layers": layers, "coda_layers": 0, "layer_norm": "branch", "inject": "none",
        "state_init": "embedding", "between": "shared", "exit_gate": "normed", "rope_interleaved": False, "norm_centered": False,
    }  # fmt: skip
    values = {"model": model, "depth": {"prior": "fixed", "mean": 4, "backprop": None}, "batch": {"global_batch": 1}}
    config, form = from_values(Config, {**values, "objective": {"kind": "exit_gate"}}).config, FORMATS["ouro"]
    about, generator = form.about(config), torch.Generator().manual_seed(0)
    rules = form.rules(config, about)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    planned = [Planned(rule.theirs, rule.shape, partial(drawn, rule.shape)) for rule in rules]
    parameters = sum(math.prod(rule.shape) for rule in rules)
    folder.mkdir()
    for _ in write_shards(folder, planned, torch.float32, 4 * parameters // FILES):
        pass
    write_json(folder / "config.json", about)
    Tokenizer(models.WordLevel({END_OF_TEXT: 0, "a": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return {"parameters": parameters}


if __name__ == "__main__":
    main()
