"""The reference model against facts that hold whatever its weights are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import reference
from tests.reference import ORTHO_EPS, Spec

SPEC = Spec(hidden_size=16, heads=4, kv_heads=2, head_dim=4, prelude=1, core=2, coda=1)
VOCABULARY, FFN, LENGTH = 11, 24, 9
DOCUMENTS = [[0, 4, 5], [0]]


def parameters(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Random float64 weights of every name that ``spec`` calls for."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    d = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.tokens": (VOCABULARY, d)}
    if spec.positions == "learned":
        shapes["embedding.positions"] = (LENGTH + 3, d)
    for part, layers in (("prelude", spec.prelude), ("core", spec.core), ("coda", spec.coda)):
        for i in range(layers):
            shapes |= {f"{part}.{i}.{name}": shape for name, shape in layer_shapes(spec, part, i).items()}
    if spec.inject == "huginn_linear":
        shapes |= {"inject.weight": (d, 2 * d), "inject.bias": (d,)}
    elif spec.inject in ("diagonal", "parcae", "ortho"):
        shapes |= {"inject.A_log": (d,), "inject.dt_bias": (d,), "inject.weight": (d, d)}
        shapes |= {"inject.norm": (d,)} if spec.inject == "parcae" else {}
    if spec.between in ("rmsnorm", "damping"):
        shapes |= {"between.norm": (d,)} if spec.between == "rmsnorm" else {"between.damping": (1,)}
    if spec.coda_linear:
        shapes["coda_linear"] = (d, d)
    if spec.readout in ("rmsnorm", "final_only") or spec.between == "shared" or spec.exit_gate == "normed":
        shapes["readout.norm"] = (d,)
    if spec.readout == "alpha":
        shapes |= {"readout.alpha": (1,), "readout.log_scale": (1,)}
    if spec.exit_gate != "none":
        shapes |= {"gate.weight": (1, d), "gate.bias": (1,)}
    if not spec.tied_head:
        shapes["head"] = (VOCABULARY, d)
    return {name: weight(*shape).requires_grad_() for name, shape in shapes.items()}


def layer_shapes(spec: Spec, part: str, i: int) -> dict[str, tuple[int, ...]]:
    d, query, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attention_norm": (d,), "q": (query, d), "k": (kv, d), "v": (kv, d), "out": (d, query)}
    shapes |= {"mlp_norm": (d,), "gate": (FFN, d), "up": (FFN, d), "down": (d, FFN)}
    if spec.activation == "relu2":
        del shapes["gate"]
    if spec.layer_norm != "pre":
        shapes |= {"attention_post_norm": (d,), "mlp_post_norm": (d,)}
    if spec.qk_bias:
        shapes |= {"q_bias": (query,), "k_bias": (kv,)}
    if reference.has_value_embedding(spec, part, i):
        shapes |= {"value_gate": (spec.kv_heads, min(32, d)), "value_embedding": (VOCABULARY, kv)}
    return shapes


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def noise() -> Tensor:
    return torch.randn(2, LENGTH, SPEC.hidden_size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def variant(**changes: object) -> Spec:
    return dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]


def test_ortho_sets_the_component_along_q() -> None:
    weights = parameters(SPEC)
    h, e = noise(), noise().flip(0)
    step, q = reference.ortho_terms(weights, e)
    v = torch.exp(-step * weights["inject.A_log"].exp()) * h
    out = reference.inject(weights, SPEC, h, e)
    norm = q.square().sum(-1)
    torch.testing.assert_close((out * q).sum(-1), norm + (v * q).sum(-1) * ORTHO_EPS / (norm + ORTHO_EPS))
    assert ((out - q).norm(dim=-1) <= v.norm(dim=-1)).all()


def test_ortho_without_input_only_decays() -> None:
    weights, h = parameters(SPEC), noise()
    out = reference.inject(weights, SPEC, h, torch.zeros_like(h))
    torch.testing.assert_close(
        out, torch.exp(-torch.nn.functional.softplus(weights["inject.dt_bias"]) * weights["inject.A_log"].exp()) * h
    )


@pytest.mark.parametrize("spec", [SPEC, variant(positions="learned", inject="none", tied_head=True)])
def test_documents_do_not_see_each_other(spec: Spec) -> None:
    weights, before = parameters(spec), tokens()
    after = before.clone()
    after[0, 4] = (after[0, 4] + 1) % VOCABULARY  # the whole second document of the first row
    (*_, (_, _, a)), (*_, (_, _, b)) = (reference.forward(weights, spec, t, DOCUMENTS, None, 3, 3) for t in (before, after))
    same = torch.ones(2, LENGTH, dtype=torch.bool)
    same[0, 4] = False
    assert torch.equal(a[same], b[same])
    assert not torch.allclose(a[~same], b[~same])


def test_later_tokens_do_not_reach_earlier_ones() -> None:
    weights, before = parameters(SPEC), tokens()
    after = before.clone()
    after[1, 6] = (after[1, 6] + 1) % VOCABULARY
    a, b = (reference.forward(weights, SPEC, t, DOCUMENTS, noise(), 2, 2)[-1][2] for t in (before, after))
    assert torch.equal(a[1, :6], b[1, :6])
    assert not torch.isclose(a[1, 6:], b[1, 6:]).all(-1).any()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_scores_depend_on_distance_only(interleaved: bool) -> None:
    spec = variant(rope_base=100.0, rope_interleaved=interleaved)
    vector = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    q, k = (reference.rotate(spec, x.expand(1, 1, LENGTH, 4)) for x in vector)
    scores = (q @ k.transpose(-1, -2))[0, 0]
    for distance in range(LENGTH):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(scores[0, 0], (vector[0] * vector[1]).sum())


def test_interleaved_and_half_split_rotation_are_permutations_of_each_other() -> None:
    x = torch.randn(1, 2, LENGTH, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    order = [0, 2, 1, 3]  # pairs (0, 1), (2, 3) side by side <-> firsts, then seconds
    torch.testing.assert_close(
        reference.rotate(variant(rope_interleaved=True), x)[..., order],
        reference.rotate(variant(rope_interleaved=False), x[..., order]),
    )


def test_a_repeated_kv_head_is_plain_attention() -> None:
    grouped, plain = SPEC, variant(kv_heads=4)
    weights = parameters(grouped)
    repeated = dict(weights)
    for name in [n for n in weights if n.endswith((".k", ".v"))]:
        repeated[name] = weights[name].view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    a, b = (
        reference.forward(w, s, tokens(), DOCUMENTS, noise(), 2, 2)[-1][2] for w, s in ((weights, grouped), (repeated, plain))
    )
    torch.testing.assert_close(a, b)


def test_attention_and_feed_forward_equal_torchs() -> None:
    weights, x = {n.removeprefix("core.0."): w for n, w in parameters(SPEC).items() if n.startswith("core.0.")}, noise()
    spec, mask = variant(positions="learned"), reference.attention_mask(DOCUMENTS, LENGTH)
    q, k, v = ((x @ weights[n].T).unflatten(-1, (-1, 4)).transpose(1, 2) for n in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
    expected = expected.transpose(1, 2).flatten(-2) @ weights["out"].T
    torch.testing.assert_close(reference.attention(weights, spec, x, mask), expected)
    torch.testing.assert_close(
        reference.norm(variant(norm_centered=True), x, weights["mlp_norm"]),
        torch.nn.functional.rms_norm(x, (16,), 1 + weights["mlp_norm"], SPEC.norm_eps),
    )


def gradients(spec: Spec, weights: dict[str, Tensor], value: Tensor) -> dict[str, Tensor | None]:
    return dict(zip(weights, torch.autograd.grad(value, list(weights.values()), allow_unused=True), strict=True))


def test_visits_without_gradient_are_a_constant_initial_state() -> None:
    weights, targets = parameters(SPEC), tokens(1)
    truncated = reference.loss(weights, SPEC, tokens(), DOCUMENTS, noise(), targets, "per_loop", 5, 2)
    state = reference.forward(weights, SPEC, tokens(), DOCUMENTS, noise(), 3, 3)[-1][1].detach()
    resumed = reference.loss(weights, SPEC, tokens(), DOCUMENTS, state, targets, "per_loop", 2, 2)
    torch.testing.assert_close(truncated, resumed)
    torch.testing.assert_close(gradients(SPEC, weights, truncated), gradients(SPEC, weights, resumed))


@pytest.mark.parametrize(("gradient_visits", "reaches"), [(3, True), (2, False)])
def test_without_injection_the_prelude_learns_through_the_initial_state_only(gradient_visits: int, reaches: bool) -> None:
    spec = variant(inject="none")
    weights = parameters(spec)
    value = reference.loss(weights, spec, tokens(), DOCUMENTS, None, tokens(1), "terminal", 3, gradient_visits)
    assert (gradients(spec, weights, value)["prelude.0.q"] is not None) == reaches


def test_losses_are_means_over_valid_tokens_and_supervised_visits() -> None:
    weights, targets = parameters(SPEC), tokens(1)
    targets[0, 2:6] = -100
    visits = reference.forward(weights, SPEC, tokens(), DOCUMENTS, noise(), 4, 3)
    each = [torch.nn.functional.cross_entropy(logits[targets >= 0], targets[targets >= 0]) for _, _, logits in visits]
    terminal, per_loop = (
        reference.loss(weights, SPEC, tokens(), DOCUMENTS, noise(), targets, objective, 4, 3)
        for objective in ("terminal", "per_loop")
    )
    torch.testing.assert_close(terminal, each[-1])
    torch.testing.assert_close(per_loop, torch.stack(each[1:]).mean())


BLINDSPOT = {"prelude": 0, "core": 3, "coda": 0, "inject": "none", "positions": "learned", "tied_head": True}
OURO = {"prelude": 0, "core": 3, "coda": 0, "inject": "none", "layer_norm": "branch", "between": "shared"}
PRESETS: dict[str, dict[str, Any]] = {
    "fixedpoint": {"state_init": "normal"},
    "huginn": {
        "prelude": 2, "core": 3, "coda": 2, "inject": "huginn_linear", "layer_norm": "sandwich", "between": "shared",
        "qk_bias": True, "embedding_multiplier": 4.0, "tied_head": True, "state_init": "truncated_normal",
    },
    "parcae": {
        "prelude": 2, "core": 2, "coda": 2, "inject": "parcae", "activation": "relu2", "qk_norm": True,
        "value_embeddings": True, "coda_linear": True, "tied_head": True, "state_init": "normal",
    },
    "ouro": OURO | {"exit_gate": "normed"},
    "blindspot": BLINDSPOT | {"readout": "final_only", "exit_gate": "raw", "norm_centered": False},
    "blindspot-alpha": BLINDSPOT | {"readout": "alpha", "between": "damping"},
    "blindspot-norm": BLINDSPOT | {"between": "rmsnorm"},
    "diagonal": {"inject": "diagonal", "readout": "raw", "state_init": "zero"},
}  # fmt: skip
DIFFERENTIATED = ("diagonal", "parcae", "ortho", "huginn_linear", "add")


def toy(preset: str, **changes: object) -> Spec:
    return variant(**(PRESETS[preset] | changes))


def start(spec: Spec) -> Tensor | None:
    return noise() if spec.state_init in ("normal", "truncated_normal") else None


@pytest.mark.parametrize("preset", PRESETS)
def test_every_weight_of_every_preset_learns(preset: str) -> None:
    spec = toy(preset)
    weights = parameters(spec)
    objective = "terminal" if spec.exit_gate == "none" else "exit_gate"
    value = reference.loss(weights, spec, tokens(), DOCUMENTS, start(spec), tokens(1), objective, 3, 3)  # type: ignore[arg-type]
    for name, gradient in gradients(spec, weights, value).items():
        assert gradient is not None and gradient.isfinite().all() and gradient.abs().max() > 0, name


@pytest.mark.parametrize("inject", DIFFERENTIATED)
def test_injections_are_differentiated_rightly(inject: str) -> None:
    spec = dataclasses.replace(SPEC, hidden_size=5, inject=inject)  # type: ignore[arg-type]
    weights = {name: w for name, w in parameters(spec).items() if name.startswith("inject.")}
    h, e = (x[:, :2, :5].clone().requires_grad_() for x in (noise(), noise().flip(0)))

    def run(h: Tensor, e: Tensor, *values: Tensor) -> Tensor:
        return reference.inject(dict(zip(weights, values, strict=True)), spec, h, e)

    assert torch.autograd.gradcheck(run, (h, e, *weights.values()))


def test_the_linear_injection_reads_the_state_first() -> None:
    h, e, eye, none = noise(), noise().flip(0), torch.eye(16).double(), torch.zeros(16, 16).double()
    spec = variant(inject="huginn_linear")
    assert torch.equal(reference.inject({"inject.weight": torch.cat((eye, none), 1)}, spec, h, e), h)
    both = {"inject.weight": torch.cat((2 * eye, 3 * eye), 1), "inject.bias": torch.full((16,), 5.0).double()}
    torch.testing.assert_close(reference.inject(both, spec, h, e), 2 * h + 3 * e + 5)


def test_the_diagonal_injection_decays_and_adds() -> None:
    h, e = noise(), noise().flip(0)
    bias = torch.full((16,), math.log(math.expm1(0.5 * math.log(5)))).double()
    weights = {"inject.A_log": torch.zeros(16).double(), "inject.dt_bias": bias, "inject.weight": torch.eye(16).double()}
    expected = h / math.sqrt(5) + 0.5 * math.log(5) * e  # Parcae's start: step ln(5)/2, decay 1/sqrt(5)
    torch.testing.assert_close(reference.inject(weights, variant(inject="diagonal"), h, e), expected)
    gain = torch.full((16,), 0.5).double()
    parcae = reference.inject({**weights, "inject.norm": gain}, variant(inject="parcae"), h, e)
    torch.testing.assert_close(parcae, h / math.sqrt(5) + 0.5 * math.log(5) * F.rms_norm(e, (16,), 1 + gain, SPEC.norm_eps))


@pytest.mark.parametrize("layer_norm", ["pre", "sandwich", "branch"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_a_layer_is_what_its_formula_says(layer_norm: str, activation: str) -> None:
    spec = variant(layer_norm=layer_norm, activation=activation)
    weights, x, mask = parameters(spec), noise(), reference.attention_mask(DOCUMENTS, LENGTH)
    own = {name.removeprefix("prelude.0."): w for name, w in weights.items()}

    def n(name: str, y: Tensor) -> Tensor:
        return F.rms_norm(y, (16,), 1 + own[f"{name}_norm"], spec.norm_eps)

    def attend(y: Tensor) -> Tensor:
        return reference.attention(own, spec, n("attention", y), mask)

    def feed(y: Tensor) -> Tensor:
        y = n("mlp", y)
        up = F.linear(y, own["up"])
        inner = torch.where(up > 0, up**2, 0) if activation == "relu2" else F.silu(F.linear(y, own["gate"])) * up
        return F.linear(inner, own["down"])

    if layer_norm == "pre":
        expected = x + attend(x)
        expected = expected + feed(expected)
    elif layer_norm == "sandwich":
        expected = n("attention_post", x + attend(x))
        expected = n("mlp_post", expected + feed(expected))
    else:
        expected = x + n("attention_post", attend(x))
        expected = expected + n("mlp_post", feed(expected))
    torch.testing.assert_close(reference.stack(weights, spec, "prelude", 1, x, mask), expected)


def test_sandwich_removes_scale_and_branch_bounds_the_step() -> None:
    mask = reference.attention_mask(DOCUMENTS, LENGTH)
    for layer_norm in ("sandwich", "branch"):
        spec = variant(layer_norm=layer_norm, norm_eps=1e-14)
        weights = parameters(spec) | {
            f"core.{i}.{x}_post_norm": torch.zeros(16).double() for i in (0, 1) for x in ("attention", "mlp")
        }
        for scale in (1.0, 1e3):
            h = scale * noise()
            out = reference.stack(weights, spec, "core", 2, h, mask)
            if layer_norm == "sandwich":
                torch.testing.assert_close(reference.rms(out), torch.ones(2, LENGTH, 1).double())
            else:
                assert (reference.rms(out - h) <= 4 + 1e-9).all()  # four branches of root mean square 1


def test_normalised_queries_and_keys_have_no_scale() -> None:
    spec = variant(qk_norm=True)
    mask = reference.attention_mask(DOCUMENTS, LENGTH)
    weights = {n.removeprefix("core.0."): w for n, w in parameters(spec).items() if n.startswith("core.0.")}
    scaled = {**weights, "q": 7 * weights["q"], "k": 0.1 * weights["k"]}
    outs = [reference.attention(w, spec, noise(), mask) for w in (weights, scaled)]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)  # but for the norm's epsilon
    assert not torch.allclose(outs[0], reference.attention(weights, variant(), noise(), mask))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_biases_are_a_constant_channel(qk_norm: bool) -> None:
    spec = variant(qk_bias=True, qk_norm=qk_norm)
    mask, x = reference.attention_mask(DOCUMENTS, LENGTH), noise()
    weights = {n.removeprefix("core.0."): w for n, w in parameters(spec).items() if n.startswith("core.0.")}
    wider = {name: torch.cat((weights[name], weights[f"{name}_bias"][:, None]), 1) for name in "qk"}
    wider |= {"v": torch.cat((weights["v"], torch.zeros(8, 1)), 1), "out": weights["out"]}
    with_one = torch.cat((x, torch.ones(2, LENGTH, 1)), -1)
    torch.testing.assert_close(
        reference.attention(weights, spec, x, mask), reference.attention(wider, variant(qk_norm=qk_norm), with_one, mask)
    )


def test_value_embeddings_are_gated() -> None:
    spec = variant(value_embeddings=True)
    mask, x, t = reference.attention_mask(DOCUMENTS, LENGTH), noise(), tokens()
    x[..., 0] = 1.0
    weights = {n.removeprefix("core.0."): w for n, w in parameters(spec).items() if n.startswith("core.0.")}
    gate = torch.zeros(2, 16).double()
    closed, half, open_ = ({**weights, "value_gate": gate.index_fill(1, torch.tensor(0), v)} for v in (-1e4, 0.0, 1e4))
    plain = reference.attention(weights, spec, x, mask)
    torch.testing.assert_close(reference.attention(closed, spec, x, mask, t), plain)
    # attention is linear in the values: half open adds the attended embeddings once, open twice
    once = reference.attention(half, spec, x, mask, t) - plain
    assert once.abs().max() > 0.01
    torch.testing.assert_close(reference.attention(open_, spec, x, mask, t) - plain, 2 * once)
    # with equal scores, what is added is attention over values that are one-hot tokens times the embedding
    equal = {**half, "q": weights["q"] * 0, "k": weights["k"] * 0}
    added = reference.attention(equal, spec, x, mask, t) - reference.attention(equal, spec, x, mask)
    one_hot = {"q": torch.zeros(16, VOCABULARY).double(), "k": torch.zeros(8, VOCABULARY).double()}
    one_hot |= {"v": weights["value_embedding"].T, "out": weights["out"]}
    torch.testing.assert_close(added, reference.attention(one_hot, spec, F.one_hot(t, VOCABULARY).double(), mask))


@pytest.mark.parametrize(
    ("layers", "expected"), [((2, 2, 2), [1, 3, 5]), ((1, 2, 1), [1, 3]), ((0, 3, 0), [0, 2]), ((2, 4, 1), [0, 2, 4, 6])]
)
def test_every_other_layer_and_the_last_embed_values(layers: tuple[int, int, int], expected: list[int]) -> None:
    spec = variant(**dict(zip(("prelude", "core", "coda"), layers, strict=True)), value_embeddings=True)
    order = [(part, i) for part, n in zip(("prelude", "core", "coda"), layers, strict=True) for i in range(n)]
    assert [j for j, (part, i) in enumerate(order) if reference.has_value_embedding(spec, part, i)] == expected
    assert not any(reference.has_value_embedding(variant(), part, i) for part, i in order)


def test_embeddings_are_scaled_then_placed_then_dropped() -> None:
    spec = variant(positions="learned", embedding_multiplier=3.0, prelude=0, core=0, coda=0, inject="none", readout="raw")
    weights, mask = parameters(spec), (noise() > 0) / 0.5
    [(_, h, _)] = reference.forward(weights, spec, tokens(), DOCUMENTS, None, 1, 1, dropout=mask)
    expected = 3 * weights["embedding.tokens"][tokens()] + weights["embedding.positions"][:LENGTH]
    torch.testing.assert_close(h, expected * mask)


def test_the_state_begins_where_it_is_told() -> None:
    args = (tokens(), DOCUMENTS)
    zero, weights = variant(state_init="zero"), parameters(SPEC)
    a = reference.forward(weights, zero, *args, None, 2, 2)[-1][2]
    b = reference.forward(weights, zero, *args, torch.zeros(2, LENGTH, 16).double(), 2, 2)[-1][2]
    assert torch.equal(a, b)
    assert not torch.allclose(a, reference.forward(weights, SPEC, *args, None, 2, 2)[-1][2])
    with pytest.raises(ValueError, match="h0"):
        reference.forward(weights, variant(state_init="normal"), *args, None, 2, 2)


@pytest.mark.parametrize("between", ["none", "rmsnorm", "damping", "shared"])
def test_two_visits_are_one_then_what_stands_between_then_one(between: str) -> None:
    spec = variant(between=between)
    weights, args = parameters(spec), (spec, tokens(), DOCUMENTS)
    (_, h, _), second = reference.forward(weights, *args, noise(), 2, 2)
    gain = {"rmsnorm": "between.norm", "shared": "readout.norm"}
    if between == "damping":
        h = h / (1 + torch.exp(-weights["between.damping"]))
    elif between != "none":
        h = F.rms_norm(h, (16,), 1 + weights[gain[between]], spec.norm_eps)
    [again] = reference.forward(weights, *args, h, 1, 1)
    torch.testing.assert_close(second[1:], again[1:])


def test_the_passage_into_the_first_visit_with_gradient_is_a_constant() -> None:
    spec = variant(between="damping")
    weights, args = parameters(spec), (spec, tokens(), DOCUMENTS)
    truncated = reference.loss(weights, *args, noise(), tokens(1), "terminal", 4, 2)
    h = reference.forward(weights, *args, noise(), 2, 1)[-1][1]
    resumed = reference.loss(weights, *args, reference.between(weights, spec, h).detach(), tokens(1), "terminal", 2, 2)
    found, expected = (gradients(spec, weights, x)["between.damping"] for x in (truncated, resumed))
    assert found is not None and found.abs().item() > 1e-6
    torch.testing.assert_close(found, expected)
    assert (
        gradients(spec, weights, reference.loss(weights, *args, noise(), tokens(1), "terminal", 4, 1))["between.damping"] is None
    )


@pytest.mark.parametrize(("coda", "coda_linear"), [(0, False), (1, False), (0, True), (1, True)])
def test_the_shared_norm_stands_before_the_coda_and_is_applied_once_without_one(coda: int, coda_linear: bool) -> None:
    spec = variant(between="shared", coda=coda, coda_linear=coda_linear)
    weights, mask = parameters(spec), reference.attention_mask(DOCUMENTS, LENGTH)

    def shared(x: Tensor) -> Tensor:
        return F.rms_norm(x, (16,), 1 + weights["readout.norm"], spec.norm_eps)

    for _, h, logits in reference.forward(weights, spec, tokens(), DOCUMENTS, noise(), 2, 2):
        x = shared(h)
        x = F.linear(x, weights["coda_linear"]) if coda_linear else x
        x = reference.stack(weights, spec, "coda", coda, x, mask)
        torch.testing.assert_close(logits, F.linear(shared(x) if coda or coda_linear else x, weights["head"]))


def test_a_square_map_stands_before_the_coda() -> None:
    spec, mask = variant(coda_linear=True, readout="raw"), reference.attention_mask(DOCUMENTS, LENGTH)
    weights = parameters(spec)
    [(_, h, logits)] = reference.forward(weights, spec, tokens(), DOCUMENTS, noise(), 1, 1)
    x = reference.stack(weights, spec, "coda", 1, F.linear(h, weights["coda_linear"]), mask)
    torch.testing.assert_close(logits, F.linear(x, weights["head"]))


def test_final_only_normalises_the_last_visit() -> None:
    final, raw, norm = (variant(readout=r) for r in ("final_only", "raw", "rmsnorm"))
    weights = parameters(final)
    a, b, c = (reference.forward(weights, s, tokens(), DOCUMENTS, noise(), 3, 3) for s in (final, raw, norm))
    for r in range(2):
        assert torch.equal(a[r][2], b[r][2])
    assert torch.equal(a[2][2], c[2][2])
    assert not torch.allclose(b[2][2], c[2][2])


def test_alpha_goes_from_hiding_the_scale_to_raw() -> None:
    spec, weights, x = variant(readout="alpha"), parameters(variant(readout="alpha")), noise()

    def read(alpha: float, x: Tensor) -> Tensor:
        return reference.read_out({**weights, "readout.alpha": torch.tensor([alpha]).double()}, spec, x)

    torch.testing.assert_close(read(50.0, x), reference.read_out(weights, variant(readout="raw"), x))
    torch.testing.assert_close(read(-50.0, x), read(-50.0, 9 * x))
    unit = {**weights, "head": torch.eye(16).double(), "readout.alpha": torch.tensor([-50.0]).double()}
    torch.testing.assert_close(
        reference.rms(reference.read_out(unit, spec, x)), weights["readout.log_scale"].exp().expand(2, LENGTH, 1)
    )
    torch.testing.assert_close(read(0.0, 9 * x), 3 * read(0.0, x))  # sigmoid(0): the square root of the scale


def test_exit_probabilities_sum_to_one() -> None:
    gates = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
    p = reference.exit_probabilities(gates)
    torch.testing.assert_close(p.sum(0), torch.ones(3, 4).double())
    leave = 1 / (1 + torch.exp(-gates))
    for t in range(4):
        torch.testing.assert_close(p[t], leave[t] * (1 - leave[:t]).prod(0))
    torch.testing.assert_close(reference.exit_probabilities(torch.zeros(4)), torch.tensor([0.5, 0.25, 0.125, 0.125]))
    assert torch.equal(reference.exit_probabilities(gates[:1]), torch.ones(1, 3, 4).double())


@pytest.mark.parametrize("kind", ["raw", "normed"])
def test_the_gate_reads_the_state_or_its_norm(kind: str) -> None:
    spec = variant(exit_gate=kind)
    weights = parameters(spec)
    x = F.rms_norm(noise(), (16,), 1 + weights["readout.norm"], spec.norm_eps) if kind == "normed" else noise()
    torch.testing.assert_close(
        reference.gate_logits(weights, spec, noise()), x @ weights["gate.weight"][0] + weights["gate.bias"]
    )


def scored() -> Tensor:
    targets = tokens(1)
    targets[0, 2:6] = -100
    return targets


def objective(spec: Spec, weights: dict[str, Tensor], kind: str, depth: int, b: int, **more: Any) -> Tensor:
    return reference.loss(weights, spec, tokens(), DOCUMENTS, noise(), scored(), kind, depth, b, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["raw", "normed"])
def test_the_expected_loss_lies_between_exits(kind: str) -> None:
    spec = variant(exit_gate=kind)
    weights = parameters(spec)
    at = {
        b: {**weights, "gate.weight": weights["gate.weight"] * 0, "gate.bias": torch.tensor([b]).double()}
        for b in (-80.0, 0.0, 80.0)
    }
    first = objective(spec, weights, "per_loop", 4, 3, loop_weights=(1, 0, 0))
    torch.testing.assert_close(objective(spec, at[80.0], "exit_gate", 4, 3), first)
    torch.testing.assert_close(objective(spec, at[-80.0], "exit_gate", 4, 3), objective(spec, weights, "terminal", 4, 3))
    even = objective(spec, weights, "per_loop", 4, 2) - 0.7 * math.log(2)  # two exits of one half: entropy ln 2
    torch.testing.assert_close(objective(spec, at[0.0], "exit_gate", 4, 2, gate_entropy=0.7), even)


def test_loop_weights_count_from_the_last_visit() -> None:
    weights = parameters(SPEC)
    kind = "per_loop"
    torch.testing.assert_close(
        objective(SPEC, weights, kind, 4, 3, loop_weights=(0, 0, 5)), objective(SPEC, weights, "terminal", 4, 3)
    )
    torch.testing.assert_close(objective(SPEC, weights, kind, 4, 3, loop_weights=(2, 2, 2)), objective(SPEC, weights, kind, 4, 3))
    torch.testing.assert_close(
        objective(SPEC, weights, kind, 4, 2, loop_weights=(9, 1, 3)), objective(SPEC, weights, kind, 4, 2, loop_weights=(1, 3))
    )
    with pytest.raises(ValueError, match="loop weights"):
        objective(SPEC, weights, kind, 4, 3, loop_weights=(1, 1))


def test_the_second_stage_teaches_the_gate_alone() -> None:
    spec = variant(exit_gate="normed")
    weights = parameters(spec)
    found = gradients(spec, weights, objective(spec, weights, "exit_gate_stage2", 4, 3))
    assert {name for name, g in found.items() if g is not None} == {"gate.weight", "gate.bias"}


def test_the_second_stage_by_hand() -> None:
    ce = torch.tensor([[3.0], [2.995], [3.5], [1.0]]).double()  # gains 0.005, 0, 2.5
    gates = torch.tensor([[9.0], [0.0], [1.0], [-1.0]]).double()
    w = [0.5, 1 / (1 + math.exp(0.25)), 1 / (1 + math.exp(-50 * 2.495))]
    stay = [0.5, 1 / (1 + math.e), math.e / (1 + math.e)]
    expected = sum(-a * math.log(s) - (1 - a) * math.log(1 - s) for a, s in zip(w, stay, strict=True)) / 4
    torch.testing.assert_close(reference.gate_gain(ce, gates), torch.tensor([expected]).double())


def test_penalties_are_means_over_rows() -> None:
    weights = parameters(SPEC)
    plain = objective(SPEC, weights, "terminal", 4, 3)
    visits = reference.forward(weights, SPEC, tokens(), DOCUMENTS, noise(), 4, 3)[1:]
    squares = torch.stack([h.square().mean((1, 2)) for _, h, _ in visits]).mean(0)  # one per row
    torch.testing.assert_close(objective(SPEC, weights, "terminal", 4, 3, norm_penalty=0.3), plain + 0.3 * squares.mean())
    anchored = objective(SPEC, weights, "terminal", 4, 3, anchor=0.2, anchor_target=2.0)
    torch.testing.assert_close(anchored, plain + 0.2 * ((squares.sqrt() - 2) ** 2).mean())


@pytest.mark.parametrize("between", ["none", "rmsnorm", "damping", "shared"])
@pytest.mark.parametrize("kind", ["terminal", "per_loop", "exit_gate", "exit_gate_stage2"])
@pytest.mark.parametrize("b", [2, 4])
def test_each_sequence_runs_as_if_alone_at_its_own_depth(between: str, kind: str, b: int) -> None:
    spec = variant(between=between, exit_gate="raw", value_embeddings=True, inject="parcae")
    weights, targets = parameters(spec), scored()
    more = {"loop_weights": (1, 2, 3, 4) if kind == "per_loop" else None, "norm_penalty": 0.3, "anchor": 0.2}
    together = objective(spec, weights, kind, 4, b, first_visit=[4, 2], **more)
    total, counts = torch.zeros(()).double(), (targets >= 0).sum(1)
    last: list[tuple[int, Tensor, Tensor]] = []
    for i, depth in enumerate((1, 3)):
        row = (spec, tokens()[i : i + 1], DOCUMENTS[i : i + 1], noise()[i : i + 1])
        own = {"loop_weights": more["loop_weights"]}
        ce = reference.loss(weights, *row, targets[i : i + 1], kind, depth, min(b, depth), **own)  # type: ignore[arg-type]
        both = reference.loss(weights, *row, targets[i : i + 1], kind, depth, min(b, depth), **more)  # type: ignore[arg-type]
        total = total + ce * counts[i] / counts.sum() + (both - ce) / 2
        last.append(reference.forward(weights, *row, depth, 1)[-1])
    torch.testing.assert_close(together, total)
    found, expected = gradients(spec, weights, together), gradients(spec, weights, total)
    torch.testing.assert_close(
        {n: g for n, g in found.items() if g is not None}, {n: g for n, g in expected.items() if g is not None}
    )
    visits = reference.forward(weights, spec, tokens(), DOCUMENTS, noise(), 4, 4, first_visit=torch.tensor([4, 2]))
    torch.testing.assert_close(visits[-1][1], torch.cat([h for _, h, _ in last]))
    torch.testing.assert_close(visits[-1][2], torch.cat([logits for _, _, logits in last]))
    assert torch.equal(visits[2][1][0], noise()[0])


def test_a_row_without_targets_counts_for_its_penalty_alone() -> None:
    weights, targets = parameters(SPEC), scored()
    targets[0] = -100
    value = reference.loss(weights, SPEC, tokens(), DOCUMENTS, noise(), targets, "per_loop", 2, 2)
    alone = reference.loss(weights, SPEC, tokens()[1:], DOCUMENTS[1:], noise()[1:], targets[1:], "per_loop", 2, 2)
    torch.testing.assert_close(value, alone)
    with pytest.raises(ValueError, match="first_visit"):
        reference.forward(weights, SPEC, tokens(), DOCUMENTS, noise(), 2, 2, first_visit=[1, 3])
