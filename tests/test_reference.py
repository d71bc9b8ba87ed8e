"""The reference model against facts that hold whatever its weights are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
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

    d, query, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = {"embedding.tokens": weight(VOCABULARY, d)}
    if spec.positions == "learned":
        weights["embedding.positions"] = weight(LENGTH + 3, d)
    for part, layers in (("prelude", spec.prelude), ("core", spec.core), ("coda", spec.coda)):
        for i in range(layers):
            shapes = {"attention_norm": (d,), "q": (query, d), "k": (kv, d), "v": (kv, d), "out": (d, query)}
            shapes |= {"mlp_norm": (d,), "gate": (FFN, d), "up": (FFN, d), "down": (d, FFN)}
            weights |= {f"{part}.{i}.{name}": weight(*shape) for name, shape in shapes.items()}
    if spec.inject == "ortho":
        weights |= {"inject.A_log": weight(d), "inject.dt_bias": weight(d), "inject.weight": weight(d, d)}
    if spec.readout == "rmsnorm":
        weights["readout.norm"] = weight(d)
    if not spec.tied_head:
        weights["head"] = weight(VOCABULARY, d)
    return {name: w.requires_grad_() for name, w in weights.items()}


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
