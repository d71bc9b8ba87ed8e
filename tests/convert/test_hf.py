"""The exported model computes what ours does, without loopscale; its caches give what a forward without a cache does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from loopscale.config import Config, from_values
from loopscale.config.tree import ModelConfig
from loopscale.convert.compare import _fill
from loopscale.convert.formats.hf import ALONE, Hf
from loopscale.convert.formats.modeling_loopscale import LoopscaleConfig, LoopscaleForCausalLM
from loopscale.convert.run import export, import_
from loopscale.convert.tensors import Planned, Shards, write_shards
from loopscale.corpus.progress import Silent
from loopscale.corpus.tokenizer import END_OF_TEXT, load_tokenizer, train_bpe
from loopscale.durable import write_json
from loopscale.errors import CheckpointError, UsageError
from loopscale.evaluate.perplexity import loss_by_depth
from loopscale.evaluate.run import evaluate
from loopscale.model.flops import count
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.ring import Ring
from loopscale.model.stage import LoopedStage
from loopscale.train.folder import config_text
from tests import reference
from tests.convert import toys
from tests.launch import launch

pytestmark = pytest.mark.usefixtures("mesh")

SMALL = {**toys.SHAPE, "kv_heads": 2, "prelude_layers": 1, "core_layers": 2, "coda_layers": 1}
DESIGNS = {
    **toys.MODELS,
    "diagonal": {
        **SMALL, "inject": "diagonal", "state_init": "zero", "between": "damping", "readout": "final_only", "tied_head": True,
        "rope_interleaved": False, "exit_gate": "normed", "norm_centered": False, "state_std": None,
    },
    "raw": {
        **SMALL, "inject": "huginn_linear", "inject_bias": True, "between": "unit", "readout": "raw", "exit_gate": "raw",
        "qk_bias": True,
    },
    "blindspot": {
        **toys.SHAPE, "prelude_layers": 0, "core_layers": 3, "coda_layers": 0, "inject": "none", "state_init": "embedding",
        "positions": "learned", "between": "rmsnorm",
    },
    "shared": {**SMALL, "layer_norm": "branch", "between": "shared", "inject": "parcae", "coda_linear": True},
}  # fmt: skip
DEPTHS = (1, 3, 5)  # below, at and above the depth of the toys
TOKENS = torch.randint(toys.VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


@cache
def toy(name):
    """Configuration, weights, our model and theirs."""
    gated = "exit_gate" in DESIGNS[name]
    of = from_values(
        Config,
        {
            "model": {"vocab_size": toys.VOCABULARY, **DESIGNS[name]},
            "depth": {"prior": "fixed", "mean": 3, "backprop": None},
            "corpus": {"sequence_length": toys.LENGTH},
            "batch": {"global_batch": 1},
            "objective": {"kind": "exit_gate" if gated else "terminal"},
            "run": {"seed": 7},
        },
    ).config
    ours = {n: w / 3 if w.dim() > 1 else w for n, w in toys.weights(of).items()}  # larger ones make much of the last bit
    stage = LoopedStage(of.model, of.corpus.sequence_length, seed=of.run.seed, initialise=False).requires_grad_(False)
    for holder, parameter in stage.held():
        _fill(stage, holder, parameter, lambda names: {n: ours[n] for n in names})
    about = Hf().about(of)
    theirs = LoopscaleForCausalLM(LoopscaleConfig(**about)).eval().requires_grad_(False)
    theirs.load_state_dict({r.theirs: r.out([ours[p.weight.name] for p in r.parts]) for r in Hf().rules(of, about)})
    return of, ours, stage, theirs


def inputs_of(tokens, targets=None):
    documents, rows = Documents.whole(*tokens.shape, tokens.device), torch.arange(len(tokens))
    return Inputs(tokens, tokens if targets is None else targets, documents, rows, purpose="evaluation", final_visit=3)


def ours_at(name, tokens, depth):
    """Logits [B, S, V] and states of our model."""
    _, _, stage, _ = toy(name)
    inputs = inputs_of(tokens)
    feed, state, states = stage.prelude(inputs), None, []
    for r in range(1, depth + 1):
        state = stage.visit(inputs, feed, state, r)
        states.append(state.transpose(0, 1))
    return stage.logits(stage.decode(inputs, state, depth)).transpose(0, 1), states


def close(found, expected):
    assert found.shape == expected.shape
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    assert difference <= 1e-4 * max(1.0, largest), (difference, largest)


@pytest.mark.parametrize("name", DESIGNS)
def test_logits_and_states_are_ours_at_any_depth(name):
    _, _, _, theirs = toy(name)
    for depth in DEPTHS:
        expected, states = ours_at(name, TOKENS, depth)
        found = theirs(TOKENS, depth=depth, output_hidden_states=True)
        close(found.logits, expected)
        assert len(found.hidden_states) == found.visits == depth
        close(found.hidden_states[-1], states[-1])
    assert torch.equal(theirs(TOKENS).logits, theirs(TOKENS, depth=3).logits)  # as the configuration says
    close(theirs(TOKENS, logits_to_keep=2).logits, theirs(TOKENS).logits[:, -2:])


def test_every_option_is_in_one_of_the_designs():
    models = [toy(name)[0].model for name in DESIGNS]
    for key, field in ModelConfig.model_fields.items():
        values = {True, False} if field.annotation is bool else set(get_args(field.annotation))
        if values and type(None) not in values and key != "init_scheme":
            assert {getattr(model, key) for model in models} == values, key


def test_weights_may_be_bf16_and_states_are_fp32():
    for name in DESIGNS:
        _, _, _, theirs = toy(name)
        halved = deepcopy(theirs).bfloat16()
        found, expected = halved(TOKENS, output_hidden_states=True, labels=TOKENS), theirs(TOKENS).logits
        assert found.logits.dtype == found.hidden_states[0].dtype == torch.float32
        assert float((found.logits - expected).square().mean().sqrt()) < 0.1 * float(expected.square().mean().sqrt()), name
        assert halved.generate(TOKENS, max_new_tokens=2, do_sample=False, kv="terminal", pad_token_id=0).shape == (2, 14)


def test_a_config_that_ours_cannot_be_is_told_by_its_key():
    about = Hf().about(toy("parcae")[0])
    with pytest.raises(CheckpointError, match=r"config\.json has no depth, which cannot be told from the weights"):
        Hf().values({key: value for key, value in about.items() if key != "depth"})
    with pytest.raises(CheckpointError, match=r"config\.json: qk_norm_eps is 0\.5; only"):
        Hf().values({**about, "qk_norm_eps": 0.5})


# ---- keys and values


class Reference:
    """The whole recomputed for every call, in fp64: a layer's keys and values come from the inputs that it saw, of tokens of
    before as their last visit had them (``kv="terminal"``, methods of Paper B), or those of the same visit."""

    def __init__(self, name, depth, kv):
        of, ours, stage, _ = toy(name)
        model = of.model
        names = reference.Spec.__dataclass_fields__.keys() - {"prelude", "core", "coda", "head_dim", "kv_heads"}
        self.spec = reference.Spec(
            prelude=model.prelude_layers, core=model.core_layers, coda=model.coda_layers, head_dim=model.head_width,
            kv_heads=model.key_value_heads, **{n: getattr(model, n) for n in names},
        )  # fmt: skip
        self.weights, self.stage = {n: w.double() for n, w in ours.items()}, stage
        self.depth, self.kv, self.seen = depth, kv, {}
        self.tokens, self.begun, self.new = TOKENS[:, :0], 0, {}

    def __call__(self, tokens):
        spec, self.begun, self.new = self.spec, self.tokens.shape[1], {}
        self.tokens = torch.cat((self.tokens, tokens), 1)
        e = reference.embed(self.weights, spec, self.tokens)[:, self.begun :]
        e = self.stack("prelude", spec.prelude, e, 0)
        h = self.initial(e)
        for r in range(1, self.depth + 1):
            h = reference.between(self.weights, spec, h) if r > 1 else h
            h = self.stack("core", spec.core, reference.inject(self.weights, spec, h, e), r if self.kv == "visit" else 0)
        self.seen |= self.new
        h = reference.between(self.weights, spec, h) if spec.between == "unit" else h
        x = reference.norm(spec, h, self.weights["readout.norm"]) if spec.between == "shared" or spec.coda_norm else h
        x = x @ self.weights["coda_linear"].T if spec.coda_linear else x
        x = self.stack("coda", spec.coda, x, 0)
        self.seen |= self.new
        once = spec.between == "shared" and not spec.coda and not spec.coda_linear
        return reference.read_out(self.weights, spec, x, self.depth >= 3, once)

    def initial(self, e):
        if self.spec.state_init == "embedding":
            return e
        return self.stage._initial_state(inputs_of(self.tokens), ()).transpose(0, 1)[:, self.begun :].double()

    def stack(self, part, layers, x, visit):
        for i in range(layers):
            at = f"{part}.{i}."
            weights = {n.removeprefix(at): w for n, w in self.weights.items() if n.startswith(at)}
            for name in ("attention", "mlp"):
                y = reference.norm(self.spec, x, weights[f"{name}_norm"])
                y = self.attention(weights, y, part, i, visit) if name == "attention" else reference.mlp(weights, self.spec, y)
                if self.spec.layer_norm == "pre":
                    x = x + y
                else:
                    branch = self.spec.layer_norm == "branch"
                    normed = reference.norm(self.spec, y if branch else x + y, weights[f"{name}_post_norm"])
                    x = x + normed if branch else normed
        return x

    def attention(self, weights, y, part, i, visit):
        place = (part, i, visit)
        whole = torch.cat((self.seen[place], y), 1) if place in self.seen else y
        self.new[place] = whole
        mask = reference.attention_mask([[0]] * len(y), whole.shape[1])
        tokens = self.tokens if reference.has_value_embedding(self.spec, part, i) else None
        return reference.attention(weights, self.spec, whole, mask, tokens)[:, self.begun :]


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("kv", ["visit", "terminal"])
def test_a_cache_gives_what_its_definition_says_without_one(name, kv):
    _, _, _, theirs = toy(name)
    without, memory = Reference(name, 4, kv), None
    for tokens in TOKENS.split([5, 3, 1, 1, 2], dim=1):
        found = theirs(tokens, depth=4, kv=kv, past_key_values=memory)
        memory = found.past_key_values
        close(found.logits, without(tokens).float())
    assert memory.get_seq_length() == 12
    whole = theirs(TOKENS, depth=4).logits[:, -2:]
    if kv == "visit":
        close(found.logits, whole)
    elif len(theirs.core) > 1 or theirs.prelude:
        assert float((found.logits - whole).abs().max()) > 1e-3  # another layout, other logits: they are compared with its own


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("kv", ["visit", "terminal"])
def test_greedy_generation_is_that_of_a_loop_without_a_cache(name, kv):
    _, _, _, theirs = toy(name)
    prompt = TOKENS[:, :4]
    written = theirs.generate(prompt, max_new_tokens=8, do_sample=False, depth=3, kv=kv, pad_token_id=0)
    assert written.shape == (2, 12)
    without = Reference(name, 3, kv)
    logits = without(prompt)[:, -1]
    for at in range(4, 12):
        if kv == "visit":
            logits = ours_at(name, written[:, :at], 3)[0][:, -1]
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] >= 1e-3
        assert torch.equal(written[clear, at], logits.argmax(-1)[clear])
        logits = without(written[:, at : at + 1])[:, -1] if kv == "terminal" else logits


def test_terminal_sharing_holds_a_bank_for_each_layer():
    _, _, _, theirs = toy("raw")  # 1/2/1
    banks = {kv: theirs(TOKENS, depth=5, kv=kv).past_key_values for kv in ("visit", "terminal")}
    assert {kv: len(memory.layers) for kv, memory in banks.items()} == {"visit": 12, "terminal": 4}
    sizes = {kv: sum(layer.keys.nbytes + layer.values.nbytes for layer in memory.layers) for kv, memory in banks.items()}
    assert sizes["visit"] == 3 * sizes["terminal"]


def test_the_loop_ends_where_every_row_would_leave():
    _, _, stage, theirs = toy("diagonal")
    states = ours_at("diagonal", TOKENS, 6)[1]
    gates = torch.stack([stage.gate_logits(h.transpose(0, 1)).t() for h in states])
    left = reference.exit_probabilities(torch.cat((gates, gates[:1])))[:-1].cumsum(0).flatten(1).amin(1)  # of the last to leave
    for visit in (1, 2, 4):
        between = float(left[visit - 1] + left[visit - 2]) / 2 if visit > 1 else float(left[0]) / 2
        found = theirs(TOKENS, depth=6, exit_probability=between)
        assert found.visits == visit
        close(found.logits, ours_at("diagonal", TOKENS, visit)[0])
    assert theirs(TOKENS, depth=6, exit_probability=1.0).visits == 6
    log_p = [ours_at("diagonal", TOKENS, r)[0].log_softmax(-1) for r in range(1, 7)]
    changes = [float((b.exp() * (b - a)).sum(-1).max()) for a, b in pairwise(log_p)]
    for threshold in (2 * max(changes), 1.001 * changes[2], 0.0):
        visit = next((r for r, change in enumerate(changes, 2) if change < threshold), 6)
        found = theirs(TOKENS, depth=6, exit_kl=threshold)
        assert found.visits == visit
        close(found.logits, ours_at("diagonal", TOKENS, visit)[0])


def test_a_loop_that_ended_early_leaves_a_cache_to_go_on_with():
    _, _, _, theirs = toy("raw")
    first, then = TOKENS.split([9, 3], dim=1)
    early = theirs(first, depth=4, kv="terminal", exit_kl=1e9)
    assert early.visits == 2
    shallow = theirs(first, depth=2, kv="terminal").past_key_values
    for one, other in zip(early.past_key_values.layers, shallow.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    memory = theirs(first, depth=4, exit_kl=1e9).past_key_values
    assert len(memory.layers) == 10 and memory.get_seq_length() == 9
    for bank in (4, 5):  # of the core's second visit; those of visits that did not run have its keys and values
        assert torch.equal(memory.layers[bank].keys, memory.layers[bank + 4].keys)
    assert theirs(then, depth=4, past_key_values=memory).logits.isfinite().all()
    assert [layer.keys.shape[2] for layer in memory.layers] == [12] * 10


@pytest.mark.parametrize("name", ["huginn", "blindspot", "parcae"])
@pytest.mark.parametrize("kv", ["visit", "terminal"])
def test_padding_on_the_left_changes_nothing(name, kv):
    _, _, _, theirs = toy(name)
    padded, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    padded[1, :5], mask[1, :5] = 0, 0
    together = theirs(padded, attention_mask=mask).logits
    alone = theirs(TOKENS[1:, 5:], samples=torch.tensor([1])).logits
    close(together[1:, 5:], alone)
    both = theirs.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False, kv=kv, pad_token_id=0)
    one = theirs.generate(TOKENS[1:, 5:], samples=torch.tensor([1]), max_new_tokens=5, do_sample=False, kv=kv, pad_token_id=0)
    assert torch.equal(both[1, 12:], one[0, 7:])
    assert torch.equal(theirs(TOKENS, attention_mask=torch.ones_like(TOKENS)).logits, theirs(TOKENS).logits)


def test_beams_take_their_keys_and_values_along():
    _, _, _, theirs = toy("ouro")
    best = theirs.generate(TOKENS[:, :4], max_new_tokens=4, num_beams=3, do_sample=False, pad_token_id=0)
    recomputed = theirs.generate(TOKENS[:, :4], max_new_tokens=4, num_beams=3, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(best, recomputed)


def test_what_cannot_be_is_refused_in_a_sentence():
    _, _, _, theirs = toy("xllm")
    memory = theirs(TOKENS, depth=3).past_key_values
    for match, given in (
        ("depth must be at least 1, not 0", {"depth": 0}),
        ("no exit gate; use exit_kl", {"exit_probability": 0.5}),
        ("the cache is of kv='visit' and depth=3", {"past_key_values": memory, "depth": 4}),
        ("the cache is of kv='visit' and depth=3", {"past_key_values": memory, "kv": "terminal"}),
        ("kv='terminal' says what later calls read of a cache; it needs use_cache=True", {"kv": "terminal", "use_cache": False}),
        (r"attention_mask must be \[batch, 12\], not \[2, 3\]", {"attention_mask": torch.ones(2, 3)}),
    ):
        with pytest.raises(ValueError, match=match):
            theirs(TOKENS, **given)
    with pytest.raises(ValueError, match="not one that this model gave back; leave out cache_implementation"):
        theirs.generate(TOKENS, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="it cannot take inputs_embeds"):
        theirs(inputs_embeds=torch.zeros(1, 2, 48))


@pytest.mark.parametrize("name", ["huginn", "hf", "diagonal"])
def test_the_loss_is_the_evaluations(name, mesh):
    of, _, stage, theirs = toy(name)
    targets = torch.cat((TOKENS[:, 1:], torch.full((2, 1), -100)), 1)
    ring = Ring.of(of, count(of.model, of.corpus.sequence_length))
    losses, tokens = loss_by_depth(stage, ring, mesh, [inputs_of(TOKENS, targets)], DEPTHS)
    assert tokens == 22
    for depth in DEPTHS:
        assert float(theirs(TOKENS, labels=TOKENS, depth=depth).loss) == pytest.approx(losses[depth], abs=1e-5)


def test_gradients_reach_every_weight():
    _, _, _, theirs = toy("parcae")
    try:
        theirs.requires_grad_(True)
        theirs(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        assert all(float(p.grad.abs().sum()) > 0 for p in theirs.parameters())
    finally:
        theirs.requires_grad_(False)


# ---- the tool


@pytest.fixture(scope="module")
def run(tmp_path_factory, mesh):
    """A run with one checkpoint, which was made of an exported model, and an evaluation of it."""
    place = tmp_path_factory.mktemp("hf")
    words = [f"the loop is visited {n} times and its state goes on to visit {n + 1}" for n in range(60)]
    tokenizer = train_bpe(words, 320)
    of = toys.config("xllm", vocab_size=tokenizer.get_vocab_size() + 1, exit_gate="none")
    ours, about = {n: w / 3 if w.dim() > 1 else w for n, w in toys.weights(of).items()}, Hf().about(of)
    (place / "given").mkdir()
    planned = [
        Planned(r.theirs, r.shape, lambda r=r: r.out([ours[p.weight.name] for p in r.parts])) for r in Hf().rules(of, about)
    ]
    list(write_shards(place / "given", planned, torch.float32, 50_000))
    write_json(place / "given" / "config.json", about)
    tokenizer.save(str(place / "given" / "tokenizer.json"))
    folder = place / "toy-run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(config_text(of))
    import_(place / "given", None, folder / "checkpoints" / "step-0", Silent())
    (folder / "text.txt").write_text("\n".join(words))
    evaluate(folder, text=folder / "text.txt", depths="1,3", sequences=8)
    write_json(folder / "manifest.json", {"created": "2026-01-02", "seed": 7, "versions": {"loopscale": "0.1"}, "git": {}})
    return folder


@pytest.fixture(scope="module")
def exported(run, threads_of_one):
    """By the command; its process has nothing of this one."""
    out = run.parent / "exported"
    command = [sys.executable, "-m", "loopscale", "convert", str(run), str(out), "--to", "hf", "--shard-size", "0.00005"]
    printed, _ = launch(command, run.parent / "printed.txt").communicate(120)
    told = re.search(r"computed in fp32 from float32 by transformers, differ by (\S+) at most \(they reach (\S+)\)", printed)
    assert told, printed
    assert float(told[1]) <= 1e-4 * float(told[2])
    return out


@pytest.fixture(scope="module")
def threads_of_one():
    """Evaluations take all cores; what comes after them here is faster on one."""
    torch.set_num_threads(1)


@pytest.fixture
def loaded(exported, tmp_path, monkeypatch):
    """The exported model and tokenizer, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    return model, AutoTokenizer.from_pretrained(exported, trust_remote_code=True)


@pytest.mark.ranks
def test_an_export_of_what_was_read_has_every_bit_of_it(run, exported):
    given, written = Shards(run.parent / "given"), Shards(exported)
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert set(written.names) == set(given.names) and len(written.names) == 42
    assert all(torch.equal(written.read(n), given.read(n)) for n in written.names)
    assert written.shape("embedding.tokens.weight")[0] == toy_vocabulary(exported)  # the true one's rows, no padding
    assert json.loads((exported / "config.json").read_text()) == json.loads((run.parent / "given" / "config.json").read_text())
    assert not list(run.parent.glob("converting-*")) and not list(run.parent.glob(".*"))


def toy_vocabulary(folder):
    return load_tokenizer(folder / "tokenizer.json").get_vocab_size() + 1


def test_loopscale_cannot_help_the_process_that_checks():
    guard = ALONE.partition("import torch")[0]
    done = subprocess.run([sys.executable, "-I", "-c", f"{guard}\nimport loopscale"], capture_output=True, text=True)
    assert done.returncode == 1 and "the exported model is to work without loopscale" in done.stderr


@pytest.mark.ranks
def test_transformers_reads_what_training_read(run, exported, loaded):
    model, tokenizer = loaded
    ours = load_tokenizer(exported / "tokenizer.json")
    text = f"the loop is visited {END_OF_TEXT} times\n"
    assert tokenizer(text).input_ids == ours.encode(text).ids and set(tokenizer(text)) == {"input_ids", "attention_mask"}
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == ours.token_to_id(END_OF_TEXT)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    both = tokenizer(["the loop", "the loop is visited"], padding=True, return_tensors="pt")
    assert both.attention_mask[0, 0] == 0  # on the left
    written = model.generate(**both, max_new_tokens=4, do_sample=False)
    assert written.shape == (2, both.input_ids.shape[1] + 4)


@pytest.mark.ranks
def test_the_loss_of_the_export_is_that_of_our_evaluation(run, loaded):
    """On the tokens that `loopscale eval` reads, cut as it cuts them."""
    model, tokenizer = loaded
    found = json.loads((run / "evaluations" / "step-0-text-text.txt.json").read_text())
    ids = tokenizer((run / "text.txt").read_text()).input_ids
    length, count_ = found["sequence_length"], found["sequences"]
    assert found["tokens"] == length * count_
    rows = torch.tensor(ids[: length * count_ + 1]).unfold(0, length + 1, length)
    for depth, loss in zip(found["depths"], found["loss"], strict=True):
        with torch.no_grad():
            logits = model(rows[:, :-1], depth=depth).logits
        assert float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())) == pytest.approx(loss, abs=1e-5)


@pytest.mark.ranks
def test_saving_and_loading_gives_every_bit_back(loaded, tmp_path):
    from transformers import AutoModelForCausalLM

    model, _ = loaded
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(again.state_dict()[n], w) for n, w in model.state_dict().items())
    assert again.config.to_diff_dict().keys() == model.config.to_diff_dict().keys()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.ranks
def test_the_page_tells_what_was_measured_and_nothing_else(run, exported, tmp_path):
    page = (exported / "README.md").read_text()
    found = json.loads((run / "evaluations" / "step-0-text-text.txt.json").read_text())
    assert f"| 3 | {found['loss'][1]:.4f} | {found['perplexity'][1]:.2f} |" in page and "text.txt: 8 sequences of 32" in page
    assert "# toy-run, step-0" in page and "by loopscale 0.1." in page and "1 layer before the loop, a block of 2 layers" in page
    assert "8 banks at R = 3" in page and "4 banks at any R" in page and "{" not in page.replace("{depth}", "")
    of = toys.config("ouro")
    Hf().finish(bare(tmp_path, exported), of, torch.float32, None, "step-0")
    page = (tmp_path / "README.md").read_text()
    assert "Nothing was measured of this checkpoint." in page and "## Made" not in page and "`exit_probability`" in page


def bare(folder, exported):
    (folder / "tokenizer.json").write_bytes((exported / "tokenizer.json").read_bytes())
    return folder


def test_an_export_with_other_logits_leaves_nothing_behind(run, monkeypatch):
    out = run.parent / "wrong"
    before = sorted(run.parent.iterdir())
    monkeypatch.setattr(Hf, "logits", lambda *_: torch.zeros(1, 32, 1))
    with pytest.raises(CheckpointError, match="what was written has other logits in transformers than in our model"):
        export(run, "hf", out, Silent())
    assert sorted(run.parent.iterdir()) == before


def test_an_injection_that_was_added_to_ours_is_refused():
    of = toys.config("xllm")
    with pytest.raises(UsageError, match=r"model\.inject is gated, must be none or add or huginn_linear"):
        Hf().refuse_unfit(of.model_copy(update={"model": of.model.model_copy(update={"inject": "gated"})}))


OTHER = "LOOPSCALE_TRANSFORMERS_5"
"""In the environment: an interpreter that has what this one has, but transformers 5."""


@pytest.mark.ranks
@pytest.mark.skipif(OTHER not in os.environ, reason=f"{OTHER} names no interpreter with transformers 5, which streaming refuses")
def test_all_this_holds_under_transformers_5():
    python, environment = os.environ[OTHER], {name: value for name, value in os.environ.items() if name != OTHER}
    version = [python, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.run(version, capture_output=True, text=True).stdout.startswith("5.")
    tests = [python, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(tests, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed, 1 skipped", done.stdout)
    assert passed and int(passed[1]) > 60, done.stdout
