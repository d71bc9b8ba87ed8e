"""The model of Megatron layers, run by the ring's executor, against the plain reference in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopscale.config.tree import ModelConfig, ObjectiveConfig
from loopscale.model.inputs import Documents, Inputs
from loopscale.objective.supervision import exits
from loopscale.parallel.ring.execute import Task, execute
from loopscale.parallel.ring.links import Links
from loopscale.parallel.ring.offload import waiting_on_cpu
from loopscale.parallel.ring.plan import plan
from loopscale.randomness import normals, stream_key
from tests import reference
from tests.holding import join, split

TOLERANCE = 1e-5
VOCABULARY, LENGTH, BATCH, SEED, STEP = 97, 24, 3, 5, 7
SHAPES = {
    "fixedpoint": {"hidden_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_size": 80},
    "fixedpoint-tied-halves": {
        "hidden_size": 32, "heads": 4, "ffn_size": 40, "inject": "add", "tied_head": True, "rope_interleaved": False,
        "readout": "raw",
    },
    "blindspot": {
        "hidden_size": 48, "heads": 4, "kv_heads": 4, "ffn_size": 64, "prelude_layers": 0, "core_layers": 3, "coda_layers": 0,
        "inject": "none", "state_init": "embedding", "positions": "learned", "tied_head": True, "norm_centered": False,
        "init_scheme": "pytorch",
    },
    "embedding-ortho": {"hidden_size": 32, "heads": 2, "ffn_size": 48, "state_init": "embedding"},
}  # fmt: skip
DOCUMENTS = {"whole": [[0], [0], [0]], "packed": [[0], [0, 5, 17], [0, 23]]}
CASES = [
    (shape, objective, depth, b, documents)
    for shape, objective, (depth, b), documents in itertools.product(
        SHAPES, ["terminal", "per_loop"], [(4, 4), (5, 2), (1, 1)], DOCUMENTS
    )
    if not (shape == "blindspot" and b < depth)
]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def build(shape: str, **more):
    from loopscale.model.stage import LoopedStage

    return LoopedStage(ModelConfig(vocab_size=VOCABULARY, **SHAPES[shape]), LENGTH, seed=SEED, loss_chunk=16, **more)


def perturb(stage) -> dict[str, torch.Tensor]:
    """Moves every weight off its initial value, so that no gain or bias hides; returns float64 copies by global name."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    with torch.no_grad():
        for holder, parameter in stage.held():
            own = {n: w + torch.randn(w.shape, generator=generator) * 0.05 for n, w in split(holder, [parameter]).items()}
            parameter.fill_(7.0)  # padding must not matter
            parameter[: sum(len(w) for w in own.values())] = join(holder, own)[: sum(len(w) for w in own.values())]
            weights.update({name: w.double().requires_grad_() for name, w in own.items()})
    return weights


def spec_of(model: ModelConfig) -> reference.Spec:
    return reference.Spec(
        hidden_size=model.hidden_size, heads=model.heads, kv_heads=model.key_value_heads, head_dim=model.head_width,
        prelude=model.prelude_layers, core=model.core_layers, coda=model.coda_layers, inject=model.inject,
        positions=model.positions, rope_base=model.rope_base, rope_interleaved=model.rope_interleaved, readout=model.readout,
        tied_head=model.tied_head, norm_eps=model.norm_eps, norm_centered=model.norm_centered,
    )  # fmt: skip


def example(documents: str) -> tuple[Inputs, list[list[int]]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    targets[0, 3:6] = targets[2, -1] = -100
    starts = DOCUMENTS[documents]
    flat = [row * LENGTH + s for row, own in enumerate(starts) for s in own]
    boundaries = torch.tensor([*flat, BATCH * LENGTH], dtype=torch.int32)
    return Inputs(tokens, targets, Documents(boundaries, BATCH, LENGTH), torch.tensor([11, 4, 90]), STEP), starts


def initial_state(model: ModelConfig, inputs: Inputs) -> torch.Tensor | None:
    if model.state_init == "embedding":
        return None
    key = stream_key(SEED, "state")
    noise = normals(key, torch.arange(LENGTH)[None], inputs.samples[:, None], STEP, model.hidden_size)
    return noise.double() * model.noise_std


def run(stage, inputs: Inputs, objective: str, depth: int, b: int, **keeping: bool) -> float:
    valid = int((inputs.targets != -100).sum())
    task = Task(inputs, depth, b, exits(ObjectiveConfig(kind=objective), depth, b), 1 / valid, 1 / BATCH)
    outcome = execute(plan(1, [task.work], in_flight=1), stage, [task], Links.alone(), **keeping)[0]
    return sum(term.item() for term in outcome.terms.values())


@pytest.mark.parametrize(("shape", "objective", "depth", "b", "documents"), CASES)
def test_loss_and_every_gradient_agree_with_the_reference(mesh, shape, objective, depth, b, documents):
    stage = build(shape)
    weights = perturb(stage)
    inputs, starts = example(documents)
    expected = reference.loss(
        weights,
        spec_of(stage.model),
        inputs.tokens,
        starts,
        initial_state(stage.model, inputs),
        inputs.targets,
        objective,
        depth,
        b,
    )
    expected.backward()
    assert run(stage, inputs, objective, depth, b) == pytest.approx(expected.item(), rel=TOLERANCE)
    for holder, parameter in stage.held():
        for name, gradient in split(holder, [parameter.grad]).items():
            assert relative(gradient, weights[name].grad) <= TOLERANCE, name


@pytest.mark.parametrize(("shape", "documents"), itertools.product(SHAPES, DOCUMENTS))
def test_states_and_logits_of_every_visit_agree_with_the_reference(mesh, shape, documents):
    stage = build(shape)
    weights = perturb(stage)
    inputs, starts = example(documents)
    visits = reference.forward(
        weights, spec_of(stage.model), inputs.tokens, starts, initial_state(stage.model, inputs), depth=4, gradient_visits=4
    )
    with torch.no_grad():
        feed, state = stage.prelude(inputs), None
        for r, expected_state, expected_logits in visits:
            state = stage.visit(inputs, feed, state, r)
            assert relative(state.transpose(0, 1), expected_state) <= TOLERANCE
            assert relative(stage.logits(stage.decode(inputs, state, r)).transpose(0, 1), expected_logits) <= TOLERANCE


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layers", "keeping"),
    [(False, {"recompute": True}), (True, {}), (False, {"offload": True}), (True, {"offload": True})],
    ids=["visits", "layers", "offload", "layers-offload"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_however_activations_are_kept_the_gradients_are_the_same(mesh, shape, layers, keeping, compute):
    """Bit for bit when recomputed. A copy need not have the strides of what was saved, so products of it may add up in another
    order. Nothing is copied off a device here, which has none: the copies are made within the CPU's memory."""
    inputs, _ = example("packed")
    gradients = []
    for stage, ways in ((build(shape, compute=compute), {}), (build(shape, compute=compute, recompute_layers=layers), keeping)):
        run(stage, inputs, "per_loop", 3, 3, **ways)
        gradients.append([p.grad for p in stage.parameters()])
    least = 0.0 if "offload" not in keeping else 1e-6 if compute == torch.float32 else 1e-3
    assert all((a - b).norm() <= least * b.norm() for a, b in zip(*gradients, strict=True))


def test_a_recomputed_layer_keeps_its_input_alone(mesh):
    stage = build("blindspot", recompute_layers=True)
    inputs, _ = example("whole")
    feed = tuple(t.detach().requires_grad_() for t in stage.prelude(inputs))
    state, sizes = torch.zeros(LENGTH, BATCH, 48, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        stage.visit(inputs, feed, state, 2)
    assert sizes == [LENGTH * BATCH * 48] * 3  # one of each layer


def test_what_waits_on_the_cpu_is_a_copy_and_parameters_stay(mesh):
    weight, x = torch.nn.Parameter(torch.randn(3, 4)), torch.randn(5, 4, requires_grad=True)
    with waiting_on_cpu():
        hidden = x @ weight.t()
        out = hidden.exp()
    kept = out.detach().clone()
    out.detach().zero_()  # exp saves its result: the saved copy must not see this
    out.sum().backward()
    torch.testing.assert_close(x.grad, kept @ weight.detach())
    weight.data.mul_(2)  # the product saved the weight itself, no copy of it
    again = torch.randn(5, 4, requires_grad=True)
    with waiting_on_cpu():
        product = again @ weight.t()
    weight.data.mul_(2)
    product.sum().backward()
    torch.testing.assert_close(again.grad, weight.detach().sum(0).expand(5, 4))


def test_visits_without_gradient_keep_no_activations(mesh):
    stage = build("fixedpoint")
    inputs, _ = example("whole")
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        run(stage, inputs, "terminal", 4, 2)
        shallow = sum(saved)
        saved.clear()
        run(stage, inputs, "terminal", 40, 2)
    assert sum(saved) == shallow


def test_bf16_visits_reach_fp32_gradients_near_those_of_fp32(mesh):
    inputs, _ = example("packed")
    exact, rounded = build("fixedpoint"), build("fixedpoint", compute=torch.bfloat16)
    run(exact, inputs, "terminal", 4, 2)
    run(rounded, inputs, "terminal", 4, 2)
    for (name, a), b in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert b.grad.dtype == torch.float32
        assert relative(b.grad, a.grad.double()) < 0.1, name  # bf16 has 8 bits: 0.4% a product, a few dozen in a row


def test_gradients_of_shared_weights_survive_a_prefix_without_gradient_under_bf16(mesh):
    """Autocast once cached weights that a no-grad prefix had cast, and lost their gradient; casting by hand must not."""
    inputs, _ = example("whole")
    stage = build("fixedpoint", compute=torch.bfloat16)
    run(stage, inputs, "terminal", 5, 1)
    assert all(p.grad is not None and p.grad.norm() > 0 for p in stage.core_block.parameters())


def test_a_microbatch_that_is_done_leaves_no_mask(mesh):
    stage = build("fixedpoint")
    inputs, _ = example("packed")
    run(stage, inputs, "per_loop", 3, 2)
    assert "mask" not in vars(inputs.documents)
    made = inputs.documents.mask
    assert made is inputs.documents.mask


def test_padding_holds_zeros_where_weights_are_to_be_loaded():
    """A gradient of 0 there times a NaN would be a NaN in the gradient of the state."""
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is then NaN
    try:
        stage = build("fixedpoint", initialise=False)
    finally:
        torch.use_deterministic_algorithms(False)
    rows = {holder.parameter: parameter for holder, parameter in stage.held() if holder.padded}
    assert set(rows) == {"embedding.weight", "head.weight"} and {len(r) for r in rows.values()} == {128}
    assert not any(r[VOCABULARY:].any() for r in rows.values())
    assert stage.core_block.layers["0"].mlp.linear_fc2.weight.isnan().all()
