"""Which kernels are chosen. Neither a GPU nor NVIDIA's extensions are here: what detection would find is set by hand."""

from __future__ import annotations

import ast
import importlib.util
import inspect

import pytest
import torch
import torch.nn.functional as F

from loopscale.config.tree import Config, ModelConfig
from loopscale.environment import kernels
from loopscale.errors import ConfigError
from loopscale.model.inputs import Documents, Inputs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NO_TE = "no Transformer Engine: transformer-engine is not installed"


def config(asked: str, **parallel) -> Config:
    return Config.model_validate({"train": {"kernels": asked}, "parallel": parallel})


@pytest.fixture
def installed(monkeypatch):
    """Says which extensions detection finds."""

    def set_to(te: bool, apex: bool) -> None:
        find = importlib.util.find_spec
        found = {"transformer_engine": te or None}
        monkeypatch.setattr(importlib.util, "find_spec", lambda n, p=None: found[n] if n in found else find(n, p))
        monkeypatch.setattr(kernels, "apex_has_kernels", lambda: apex)

    return set_to


def test_a_cpu_has_torch_alone_and_says_nothing(installed):
    installed(te=True, apex=True)
    chosen = kernels.choose_kernels(config("auto"), CPU, torch.float32)
    assert str(chosen) == "torch"


def test_auto_takes_what_is_installed_and_fits(installed):
    installed(te=True, apex=True)
    assert str(kernels.choose_kernels(config("auto"), GPU, torch.bfloat16)) == "te, AdamW by apex"
    assert str(kernels.choose_kernels(config("torch"), GPU, torch.bfloat16)) == "torch"
    fp32 = kernels.choose_kernels(config("auto"), GPU, torch.float32)
    assert (fp32.layers, fp32.adam) == ("torch", "apex")
    assert fp32.notes == ("no Transformer Engine: its attention takes bf16, and train.precision is fp32",)
    moved = kernels.choose_kernels(config("auto", offload_optimizer=True), GPU, torch.bfloat16)
    assert (moved.layers, moved.adam) == ("te", "torch")
    assert "parallel.offload_optimizer updates on the CPU" in moved.notes[0]


def test_what_is_missing_is_said(installed):
    installed(te=False, apex=False)
    chosen = kernels.choose_kernels(config("auto"), GPU, torch.bfloat16)
    assert (chosen.layers, chosen.adam) == ("torch", "torch")
    assert str(chosen) == f"torch ({NO_TE}; no apex: not installed)"


@pytest.mark.parametrize(
    ("te", "device", "compute", "reason"),
    [
        (True, CPU, torch.bfloat16, "it runs on GPUs alone"),
        (False, GPU, torch.bfloat16, "transformer-engine is not installed"),
        (True, GPU, torch.float32, "its attention takes bf16"),
    ],
)
def test_transformer_engine_is_refused_with_the_reason(installed, te, device, compute, reason):
    installed(te=te, apex=False)
    with pytest.raises(ConfigError, match=f"train.kernels.*te cannot be had: {reason}"):
        kernels.choose_kernels(config("te"), device, compute)


def declaration(module, name: str, method: str) -> inspect.Signature:
    """Of a method, from the source: without the extension the class itself is a mock."""
    classes = {node.name: node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ClassDef)}
    found = next(node for node in classes[name].body if isinstance(node, ast.FunctionDef) and node.name == method)
    own = found.args.args
    missing = [inspect.Parameter.empty] * (len(own) - len(found.args.defaults)) + [None] * len(found.args.defaults)
    return inspect.Signature(
        [
            inspect.Parameter(argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for argument, default in zip(own, missing, strict=True)
        ]
    )


def test_layers_of_transformer_engine_are_called_as_megatron_declares_them(mesh, monkeypatch):
    """Stand-ins with the arithmetic of torch and the signatures of Megatron's wrappers: no machine here has the real ones.
    The layers give what torch's give, documents included."""
    import megatron.core.extensions.transformer_engine as engine
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from loopscale.model.attention import CoreAttention
    from loopscale.model.stage import LoopedStage

    declared, made = (declaration(engine, "TEDotProductAttention", method) for method in ("forward", "__init__"))

    class Attention(torch.nn.Module):
        def __init__(self, *arguments, **options):
            made.bind(self, *arguments, **options)
            super().__init__()

        def forward(self, *arguments, **options):
            bound = declared.bind(self, *arguments, **options).arguments
            q, k, v, packed = (bound[name] for name in ("query", "key", "value", "packed_seq_params"))
            assert (packed.qkv_format, bound["attn_mask_type"].name) == ("thd", "padding_causal")
            rows = []
            for begin, end in zip(packed.cu_seqlens_q[:-1], packed.cu_seqlens_q[1:], strict=True):
                one = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
                rows.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True).transpose(0, 1))
            return torch.cat(rows).flatten(-2)

    model = ModelConfig(vocab_size=50, hidden_size=32, heads=4, kv_heads=2, ffn_size=48, qk_bias=True)
    plain = LoopedStage(model, 16, seed=1)
    monkeypatch.setattr(engine, "TEDotProductAttention", Attention)
    monkeypatch.setattr(engine, "TEColumnParallelLinear", ColumnParallelLinear)
    monkeypatch.setattr(engine, "TERowParallelLinear", RowParallelLinear)
    ours = LoopedStage(model, 16, seed=1, kernels="te")
    tokens = torch.arange(32).view(2, 16)
    documents = Documents(torch.tensor([0, 5, 16, 32], dtype=torch.int32), 2, 16)
    inputs = Inputs(tokens, tokens, documents, torch.arange(2))
    assert any(isinstance(m, Attention) for m in ours.modules()) and any(isinstance(m, CoreAttention) for m in plain.modules())
    for stage in (ours, plain):
        assert [name for name, _ in stage.named_parameters()] == [name for name, _ in plain.named_parameters()]
    states = [stage.visit(inputs, stage.prelude(inputs), None, 1) for stage in (ours, plain)]
    torch.testing.assert_close(states[0], states[1])
