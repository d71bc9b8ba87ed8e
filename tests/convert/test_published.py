"""Parcae's released code reads what is written for it, and its models come in: where that code is.

The package parcae-lm 0.1.0 holds no module, wheel and source alike; the release's own repository, on PYTHONPATH, does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loopscale
from loopscale.config import Config
from loopscale.convert.run import import_
from loopscale.corpus.progress import Silent
from loopscale.randomness import stream_key, truncated_normals
from tests.checkpoint.golden.make import tokenizer
from tests.convert.folders import exported
from tests.convert.toys import LENGTH, VOCABULARY

parcae_lm = pytest.importorskip("parcae_lm", reason="Parcae's release (sandyresearch/parcae) is not on PYTHONPATH")
TOKENS = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def by_release(model: torch.nn.Module, of: Config, depth: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits by its code, which begins with the noise that ours draws."""
    place = stream_key(of.run.seed, "evaluation"), torch.arange(LENGTH)[None], torch.zeros(1, 1, dtype=torch.int64), 0
    noise = truncated_normals(*place, of.model.hidden_size, cut=3.0).float() * of.model.noise_std
    monkeypatch.setattr(model, "initialize_state", lambda e: noise.expand_as(e).to(e))
    with torch.no_grad():
        logits = model(TOKENS, num_steps_pair=torch.tensor([depth, 0]), return_logits=True)["logits"]
    return logits[..., :VOCABULARY].float()


@pytest.mark.parametrize("changes", [{}, {"tied_head": False}], ids=str)
def test_its_loader_reads_what_is_written(mesh, tmp_path, monkeypatch, changes):
    there = exported(tmp_path, "parcae", **changes)
    local = lambda place, name, **_: str((Path(place) / name).resolve(strict=True))  # noqa: E731  # in the hub's place
    monkeypatch.setattr("huggingface_hub.hf_hub_download", local)
    theirs, ours = parcae_lm.from_pretrained(str(there)).eval(), loopscale.load(tmp_path / "ours" / "step-3")
    written = torch.load(there / "pytorch_model.bin", weights_only=True)
    own = theirs.state_dict()  # it takes what it finds, whatever is missing
    assert own.keys() - written.keys() == {"freqs_cis"} | ({"lm_head.weight"} if not changes else set())
    assert all(torch.equal(own[name], values) for name, values in written.items())
    for depth in (1, 3):
        expected = by_release(theirs, ours.config, depth, monkeypatch)
        assert (ours(TOKENS, depth=depth).logits - expected).abs().max() < 1e-4 * max(1, expected.abs().max())


def test_a_random_model_of_its_own_comes_in(mesh, tmp_path, monkeypatch):
    from parcae_lm.models.parcae.config import ParcaeConfig

    torch.manual_seed(0)
    theirs = ParcaeConfig(
        block_size=LENGTH, vocab_size=VOCABULARY, n_embd=64, intermediate_size=128, num_attention_heads=4,
        n_layers_in_prelude=2, n_layers_in_recurrent_block=2, n_layers_in_coda=2, mean_recurrence=4, mean_backprop_depth=2,
        recurrent_embedding_dimension=64, recurrent_intermediation_embedding_dimension=128, tie_embeddings=True,
        injection_type="diagonal", prelude_norm=True, qk_norm=True, state_init="like-init", nonlin_name="ReLU2", bias=False,
        block_class_name="TransformerPreNormBlock", norm_class_name="RMSNorm", mlp_class_name="BaseMLP",
    ).construct_model().eval()  # fmt: skip
    with torch.no_grad():
        for values in theirs.parameters():
            values.add_(torch.randn_like(values) * 0.1)
    parcae_lm.save_pretrained(theirs, str(tmp_path / "theirs"))
    tokenizer(str(tmp_path / "theirs" / "tokenizer.json"))
    import_(tmp_path / "theirs", None, tmp_path / "ours", Silent())
    ours = loopscale.load(tmp_path / "ours")
    for depth in (1, 4):
        expected = by_release(theirs, ours.config, depth, monkeypatch)
        assert (ours(TOKENS, depth=depth).logits - expected).abs().max() < 1e-4 * max(1, expected.abs().max())
