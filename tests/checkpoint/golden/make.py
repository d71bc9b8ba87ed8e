"""Makes ``step-2``, the golden checkpoint of the format that this version writes, and ``logits.json``, what its model says.

Run once per format (``python -m tests.checkpoint.golden.make``), then kept: later versions must read what this one wrote.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import loopscale
from loopscale.config import Config, from_values
from loopscale.train.run import train
from loopscale.train.signals import StopRequest
from tests.corpus.conftest import built, write_jsonl

HERE = Path(__file__).parent
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 1, 1, 2]])
DEPTHS = (1, 3)
RUN = {
    "run": {"name": "golden"},
    "corpus": {"path": "corpus", "sequence_length": 8},
    "model": {"hidden_size": 8, "heads": 2, "ffn_size": 8, "prelude_layers": 0, "core_layers": 1, "coda_layers": 0},
    "depth": {"mean": 3, "cap": 8},
    "batch": {"global_batch": 4},
    "train": {"steps": 2, "threads": 1},
    "validation": {"every": 0, "sequences": 2},
    "log": {"wandb": "disabled", "tensorboard": False},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # no path of this machine gets into the file
        write_jsonl(Path("texts.jsonl"), [" ".join("abcde"[(i * j) % 5] for j in range(1, 40)) for i in range(60)])
        tokenizer("letters.json")
        built(Path("corpus"), "texts.jsonl", tokenizer={"file": "letters.json"})
        outcome = train(from_values(Config, RUN), StopRequest(1))
        shutil.rmtree(HERE / "step-2", ignore_errors=True)
        shutil.copytree(outcome.folder / "checkpoints" / "step-2", HERE / "step-2")
    model = loopscale.load(HERE / "step-2")
    logits = {str(depth): model(TOKENS, depth=depth).logits.tolist() for depth in DEPTHS}
    (HERE / "logits.json").write_text(json.dumps(logits) + "\n")


def tokenizer(path: str) -> None:
    """Five letters and the end of a text."""
    words = {"<|endoftext|>": 0, **{letter: i for i, letter in enumerate("abcde", 1)}}
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(path)


if __name__ == "__main__":
    main()
