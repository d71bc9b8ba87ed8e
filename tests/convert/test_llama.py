"""Plain models of other people: transformers' own Llama and llama.cpp's files, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import loopscale
from loopscale.cli import main
from loopscale.convert.run import export, import_
from loopscale.corpus.progress import Silent
from loopscale.corpus.tokenizer import load_tokenizer
from loopscale.errors import CheckpointError, UsageError
from tests.convert.test_run import change, state_of

SHAPE = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rope_theta": 1e5, "rms_norm_eps": 1e-5, "initializer_range": 0.2,
}  # fmt: skip
TOKENS = torch.arange(64).view(2, 32) * 7 % 300
TEXT = "The 1947 budget: $37,500,000,000.\n\n  It is   higher, isn't it?"


def words() -> Tokenizer:
    """A byte-level BPE of 260 tokens, cut as SmolLM2's is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", *alphabet, "Ġ" + "t", "he"]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("Ġ", "t"), ("h", "e")]))
    before = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(before), decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    return made


def llama(folder: Path, **changes) -> torch.nn.Module:
    """A random model, saved as transformers saves it."""
    torch.manual_seed(0)
    kind = (MistralConfig, MistralForCausalLM) if changes.pop("mistral", False) else (LlamaConfig, LlamaForCausalLM)
    model = kind[1](kind[0](**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name:
                values.normal_(1.0, 0.3)
    model.save_pretrained(folder, max_shard_size="100KB")
    words().save(str(folder / "tokenizer.json"))
    return model


def as_gguf(path: Path, model: torch.nn.Module, quantised: str = "F32", **changes) -> None:
    """The model as llama.cpp's converter writes it; matrices inside layers ``quantised``."""
    about = model.config
    out = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    values = {
        "block_count": about.num_hidden_layers, "context_length": about.max_position_embeddings,
        "embedding_length": about.hidden_size, "feed_forward_length": about.intermediate_size,
        "attention.head_count": about.num_attention_heads, "attention.head_count_kv": about.num_key_value_heads,
    }  # fmt: skip
    for key, value in values.items():
        out.add_uint32(f"llama.{key}", value)
    out.add_float32("llama.attention.layer_norm_rms_epsilon", about.rms_norm_eps)
    out.add_float32("llama.rope.freq_base", about.rope_theta)
    if "rope_scaling" in changes:
        out.add_string("llama.rope.scaling.type", changes["rope_scaling"])
    own = words().get_vocab()
    tokens = sorted(own, key=own.get)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(changes.get("pre", "smollm"))
    out.add_token_list(tokens)
    out.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    out.add_token_merges(["Ġ t", "h e"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, about.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and about.tie_word_embeddings:
            continue
        rows = tensor.detach()
        for projection, heads in (("q_proj", about.num_attention_heads), ("k_proj", about.num_key_value_heads)):
            if projection in name:  # of each head the rows 0, c/2, 1, c/2 + 1, …
                rows = rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        kind = gguf.GGMLQuantizationType[quantised] if "proj" in name else gguf.GGMLQuantizationType.F32
        out.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(rows.numpy(), kind), raw_dtype=kind)
    numbers = {"rope.scale_linear": out.add_float32, "rope.dimension_count": out.add_uint32, "expert_count": out.add_uint32}
    for key, add in numbers.items():
        if key in changes:
            add(f"llama.{key}", changes[key])
    if "factors" in changes:
        out.add_tensor("rope_freqs.weight", changes["factors"])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 8}, {"mistral": True, "sliding_window": None}]
)
def test_transformers_own_models_come_and_go_with_every_bit(mesh, tmp_path, changes):
    theirs = llama(tmp_path / "theirs", **changes)
    import_(tmp_path / "theirs", None, tmp_path / "ours", Silent())
    ours = loopscale.load(tmp_path / "ours")
    assert ours(TOKENS, depth=1).logits.sub(logits(theirs)).abs().max() < 1e-4
    assert ours.config.depth.evaluation_depth == 1 and ours.config.model.core_layers == 3
    check = export(tmp_path / "ours", "llama", tmp_path / "back", Silent())
    assert check.by == "transformers"
    given, back = state_of(tmp_path / "theirs"), state_of(tmp_path / "back")
    assert given.keys() == back.keys() and all(torch.equal(given[n], back[n]) for n in given)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert isinstance(again, LlamaForCausalLM) and again.config.tie_word_embeddings == ("tie_word_embeddings" in changes)
    assert torch.equal(logits(again.eval()), logits(theirs))


def test_a_mistral_that_does_not_tell_its_window_has_one(mesh, tmp_path):
    llama(tmp_path / "theirs", mistral=True, sliding_window=None)
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del about["sliding_window"]
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(about))
    assert MistralConfig.from_pretrained(tmp_path / "theirs").sliding_window == 4096
    with pytest.raises(CheckpointError, match="sliding_window is 4096; only None can be read"):
        import_(tmp_path / "theirs", None, tmp_path / "ours", Silent())


def test_values_of_transformers_5_are_read(mesh, tmp_path):
    theirs = llama(tmp_path / "theirs")
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    about.pop("rope_scaling", None)
    about["rope_parameters"] = {"rope_theta": about.pop("rope_theta"), "rope_type": "default"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(about))
    import_(tmp_path / "theirs", None, tmp_path / "ours", Silent())
    assert loopscale.load(tmp_path / "ours")(TOKENS, depth=1).logits.sub(logits(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling is \{.*llama3.*\}; only None can be read"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters is \{.*yarn.*\}; only None can be read"),
        ({"attention_bias": True}, "attention_bias is True; only False can be read"),
        ({"sliding_window": 4096}, "sliding_window is 4096; only None can be read"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' can be read"),
        ({"head_dim": "wide"}, "head_dim is 'wide', must be int"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, must be at least 1"),
    ],
)
def test_models_that_ours_cannot_be_are_refused_by_their_value(mesh, tmp_path, values, sentence):
    llama(tmp_path / "theirs")
    change(tmp_path / "theirs", **values)
    with pytest.raises(CheckpointError, match=rf"config.json: {sentence}"):
        import_(tmp_path / "theirs", None, tmp_path / "ours", Silent())
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_the_model_that_it_was_made_of(mesh, tmp_path, tied):
    theirs = llama(tmp_path / "theirs", tie_word_embeddings=tied)
    as_gguf(tmp_path / "model.gguf", theirs)
    import_(tmp_path / "model.gguf", None, tmp_path / "ours", Silent())
    export(tmp_path / "ours", "llama", tmp_path / "back", Silent())
    given, back = state_of(tmp_path / "theirs"), state_of(tmp_path / "back")
    assert given.keys() == back.keys() and all(torch.equal(given[n], back[n]) for n in given)
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (about["rms_norm_eps"], about["rope_theta"]) == (1e-5, 1e5)  # as written in decimals, not as fp32 has them


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_weights_are_what_the_type_says(mesh, tmp_path, kind):
    theirs = llama(tmp_path / "theirs", hidden_size=64, intermediate_size=96)
    as_gguf(tmp_path / "model.gguf", theirs, kind)
    import_(tmp_path / "model.gguf", None, tmp_path / "ours", Silent())
    export(tmp_path / "ours", "llama", tmp_path / "back", Silent())
    name = "model.layers.1.mlp.down_proj.weight"
    given, back = (state_of(tmp_path / place)[name] for place in ("theirs", "back"))
    blocks = given.view(-1, 32)
    step = {  # between neighbouring values of a block of 32
        "F16": blocks.abs() * 2**-10, "BF16": blocks.abs() * 2**-7, "Q8_0": blocks.abs().amax(1, keepdim=True) / 127,
        "Q4_0": blocks.abs().amax(1, keepdim=True) / 8, "Q4_1": (blocks.amax(1) - blocks.amin(1))[:, None] / 15,
    }[kind]  # fmt: skip
    error = (back.view(-1, 32) - blocks).abs()
    most = 1.001 if kind == "Q4_0" else 0.501  # it has a step less above zero than below, of which the largest may fall short
    scale = blocks.abs().amax(1, keepdim=True) * 2**-10  # a block's own numbers are fp16
    assert (error <= most * step + scale + 1e-7).all() and error.max() > 0
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(state_of(tmp_path / "theirs")[norm], state_of(tmp_path / "back")[norm])


@pytest.mark.parametrize(("pre", "cut"), [("smollm", True), ("gpt-2", False)])
def test_its_tokenizer_is_made_of_it(mesh, tmp_path, pre, cut):
    as_gguf(tmp_path / "model.gguf", llama(tmp_path / "theirs"), pre=pre)
    import_(tmp_path / "model.gguf", None, tmp_path / "ours", Silent())
    made, given = load_tokenizer(tmp_path / "ours" / "tokenizer.json"), words()
    if not cut:
        given.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert made.encode(TEXT).ids == given.encode(TEXT).ids
    assert made.pre_tokenizer.pre_tokenize_str("a 12")[-1][0] == ("2" if cut else "Ġ12")
    assert made.decode(made.encode(TEXT).ids) == TEXT
    assert {t.content for t in made.get_added_tokens_decoder().values()} == {"<|endoftext|>", "<|im_start|>"}


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"architecture": "qwen2"}, CheckpointError, "architecture 'qwen2'; only 'llama' can be read"),
        ({"rope_scaling": "yarn"}, CheckpointError, "llama.rope.scaling.type is 'yarn'; only 'none' can be read"),
        ({"factors": np.ones(6, np.float32)}, CheckpointError, "has rope_freqs.weight: its rotary frequencies are scaled"),
        ({"rope.scale_linear": 4.0}, CheckpointError, "llama.rope.scale_linear is 4.0; only 1.0 can be read"),
        (
            {"rope.dimension_count": 8},
            CheckpointError,
            "rope.dimension_count is 8; only the width of a head, 12, can be read",
        ),
        ({"expert_count": 8}, CheckpointError, "llama.expert_count is 8; only 0 can be read"),
        ({"pre": "qwen2"}, UsageError, "of the kind 'gpt2' with 'qwen2'.* --tokenizer names its tokenizer.json"),
    ],
)
def test_other_gguf_files_are_refused_by_what_they_are(mesh, tmp_path, changes, error, sentence):
    as_gguf(tmp_path / "model.gguf", llama(tmp_path / "theirs"), **changes)
    with pytest.raises(error, match=sentence):
        import_(tmp_path / "model.gguf", None, tmp_path / "ours", Silent())


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.99])
def test_a_truncated_gguf_file_is_named(mesh, tmp_path, share):
    as_gguf(tmp_path / "model.gguf", llama(tmp_path / "theirs"))
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: max(8, int(share * len(whole)))])
    with pytest.raises(CheckpointError, match=r"model.gguf cannot be read as GGUF"):
        import_(tmp_path / "model.gguf", None, tmp_path / "ours", Silent())


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_head_of_a_gguf_file_is_one_sentence(mesh, tmp_path, seed):
    """Some bytes of it are others: the file is refused, or is read as one of other values."""
    as_gguf(tmp_path / "model.gguf", llama(tmp_path / "theirs"))
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    random = np.random.default_rng(seed)
    for place in random.integers(4, 2000, 10):
        content[place] = random.integers(256)
    (tmp_path / "model.gguf").write_bytes(content)
    code = main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "ours")])
    assert (code in (1, 2)) == (not (tmp_path / "ours").exists())


def test_a_tokenizer_may_be_given_and_gguf_is_not_written(mesh, tmp_path, capsys):
    as_gguf(tmp_path / "model.gguf", llama(tmp_path / "theirs"), pre="other")
    words().save(str(tmp_path / "words.json"))
    import_(tmp_path / "model.gguf", None, tmp_path / "ours", Silent(), tokenizer=tmp_path / "words.json")
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == (tmp_path / "words.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "gguf"])
    assert "invalid choice: 'gguf'" in capsys.readouterr().err
