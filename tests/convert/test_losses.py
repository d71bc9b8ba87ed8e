"""The loss of an exported run, as transformers computes it, is what training and `loopscale eval` said of it.

A held-out sequence of ours holds several documents that do not attend to each other: theirs reads each document's part alone, at
the positions and with the sample number that it has in the sequence, which key the noise of the initial state. No token begins a
document, the end of text is the target of its last one, and a document's first token is not scored, for nothing tells it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from loopscale.cli import main
from loopscale.convert.formats.hf import ALONE
from loopscale.corpus.packing import IGNORED, PackedCorpus
from tests.corpus.conftest import texts

SEQUENCES, LENGTH, DEPTHS = 40, 32, (1, 3, 6)

SCRIPT = (
    ALONE.partition("import torch")[0]  # loopscale cannot be imported
    + """
import json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, given = sys.argv[1:]
given = json.load(open(given))
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

def nats(part, depth):
    ids, targets = torch.tensor([part["ids"]]), torch.tensor(part["targets"])
    positions = part["first"] + torch.arange(ids.shape[1])[None]
    samples = torch.tensor([part["sample"]])
    logits = model(ids, position_ids=positions, samples=samples, depth=depth, use_cache=False).logits[0]
    return float(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum"))

with torch.no_grad():
    losses = {depth: sum(nats(part, depth) for part in given["parts"]) for depth in given["depths"]}
encoded = [tokenizer(text).input_ids for text in given["texts"]]
print(json.dumps({"nats": losses, "encoded": encoded, "end": tokenizer.eos_token_id}))
"""
)


@pytest.fixture
def exported(runs):
    """A trained run, its evaluation and its export."""
    own = [f"validation.sequences={SEQUENCES}", f"validation.depths={list(DEPTHS)}", f"corpus.sequence_length={LENGTH}"]
    runs.train("run", "train.steps=4", "optimizer.lr=0.02", *own)
    depths = ",".join(map(str, DEPTHS))
    assert main(["eval", str(runs.path("run")), "--depths", depths, "--sequences", str(SEQUENCES)]) == 0
    assert main(["convert", str(runs.path("run")), str(runs.folder / "exported"), "--to", "hf"]) == 0
    return runs.folder / "exported"


@pytest.mark.ranks
@pytest.mark.usefixtures("threads_as_before")
def test_transformers_reads_the_held_out_tokens_and_their_loss_as_training_did(runs, exported):
    corpus = PackedCorpus(runs.corpus, "validation", LENGTH)
    samples = [corpus[i] for i in range(SEQUENCES)]
    parts = [
        {"ids": s.tokens[a:b].tolist(), "targets": s.targets[a:b].tolist(), "first": a, "sample": i}
        for i, s in enumerate(samples)
        for a, b in zip(s.starts.tolist(), [*s.starts.tolist()[1:], LENGTH], strict=True)
    ]
    assert len(parts) >= SEQUENCES + 3  # some sequences hold several documents
    (runs.folder / "given.json").write_text(json.dumps({"parts": parts, "texts": texts(300), "depths": DEPTHS}))
    command = [sys.executable, "-I", "-W", "ignore", "-c", SCRIPT, str(exported), str(runs.folder / "given.json")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(runs.folder / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    scored = sum(target != IGNORED for part in parts for target in part["targets"])
    losses = {int(depth): nats / scored for depth, nats in found["nats"].items()}
    trained = {int(depth): loss for depth, loss in runs.records("run")[-1]["validation"].items()}
    evaluation = json.loads((runs.path("run") / "evaluations" / "step-4-held-out.json").read_text())
    assert losses == pytest.approx(trained, rel=1e-4)
    assert losses == pytest.approx(dict(zip(evaluation["depths"], evaluation["loss"], strict=True)), rel=1e-4)
    assert evaluation["tokens"] == scored and abs(losses[1] - losses[6]) > 1e-2  # not one number for all depths

    stream, begins = corpus.read(0, corpus.tokens).tolist(), [*corpus.document_starts(corpus.tokens).tolist(), corpus.tokens]
    documents = {tuple(stream[a:b]) for a, b in pairwise(begins)}
    encoded = {(*ids, found["end"]) for ids in found["encoded"]}
    assert len(documents) > 30 and documents <= encoded
