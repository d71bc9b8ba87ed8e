"""Makes a folder of each format as this version exports it, and ``expected.json``: digests of the weights, and logits by depth.

Run once per format (``python -m tests.convert.golden.make NAME``), then kept: later versions must read what this one wrote.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import loopscale
from loopscale.checkpoint.parts import read_index
from loopscale.convert.run import export
from loopscale.corpus.progress import Silent
from tests.convert.folders import checkpoint
from tests.convert.toys import config, weights

HERE = Path(__file__).parent
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 1, 1, 2]])
DEPTHS = (1, 4)
NARROW = {"vocab_size": 6, "hidden_size": 8, "heads": 2, "ffn_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "hf": NARROW,
    "huginn": {**NARROW, "core_layers": 1, "embedding_multiplier": 8**0.5},
    "ouro": {**NARROW, "core_layers": 2},
    "parcae": {
        **NARROW, "hidden_size": 32, "prelude_layers": 0, "coda_layers": 0, "state_std": (2 / 160) ** 0.5,
    },
    "xllm": {**NARROW, "head_dim": 4, "core_layers": 1},
    "llama": {**NARROW, "core_layers": 2},
}  # fmt: skip
"""What the toys' designs are here; a value embedding's gate reads 32 channels."""
DTYPES = {"parcae": torch.bfloat16}


def main(name: str) -> None:
    of, dtype = config(name, **MODELS[name]), DTYPES.get(name, torch.float32)
    given = {n: w.to(dtype).float() for n, w in weights(of, spread=0.2).items()}
    with tempfile.TemporaryDirectory() as scratch:
        ours = checkpoint(Path(scratch) / "ours", of, given)
        shutil.rmtree(HERE / name, ignore_errors=True)
        export(ours, name, HERE / name, Silent(), dtype=dtype)
        digests, model = {n: tensor.digest for n, tensor in read_index(ours).items()}, loopscale.load(ours)
    for own in ("README.md", "modeling_loopscale.py"):  # they are not read
        (HERE / name / own).unlink(missing_ok=True)
    known = json.loads((HERE / "expected.json").read_text()) if (HERE / "expected.json").is_file() else {}
    logits = {str(depth): model(TOKENS, depth=depth).logits.tolist() for depth in DEPTHS}
    (HERE / "expected.json").write_text(json.dumps({**known, name: {"weights": digests, "logits": logits}}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
