"""Predicted bytes against what the modules hold and what autograd saves."""

from __future__ import annotations

from dataclasses import astuple
from math import ceil

import pytest
import torch

from loopscale.model.weights import holders
from loopscale.plan.layout import Layout
from loopscale.plan.memory import layer_activations, predict_memory, stage_parameters


def test_parameters_of_a_stage_are_those_that_its_modules_hold(mesh, config):
    from loopscale.model.stage import LoopedStage
    from loopscale.parallel.mesh import Place

    layout = Layout.of(config(parallel={"pipeline": 3, "slices": [1, 3, 2]}))
    for stage, predicted in enumerate(stage_parameters(layout)):
        place = Place(stage, layout.ring.slices)
        held = LoopedStage(layout.config.model, 128, seed=1, place=place, initialise=False)
        assert predicted == sum(p.numel() for p in held.parameters())


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_parameters_of_a_tensor_rank_are_its_shares(config, tensor):
    model = {"core_layers": 2, "qk_bias": True, "value_embeddings": True, "tied_head": False, "vocab_size": 1001}
    layout = Layout.of(config(model=model, parallel={"tensor": tensor}))
    table = holders(layout.config.model, 128)
    shares = [h.join({w.name: torch.empty(w.shape) for w in h.weights}, tensor - 1, tensor).numel() for h in table]
    assert stage_parameters(layout) == [sum(shares)]


def test_optimizer_state_is_divided_over_replicas(config):
    one, four = (predict_memory(Layout.of(config(), 1, n))[0] for n in (1, 4))
    assert one.optimizer == 3 * one.weights == 3 * one.gradients
    assert four.optimizer == 12 * ceil(four.weights / 4 / 4)
    assert predict_memory(Layout.of(config(parallel={"zero": 0}), 1, 4))[0].optimizer == 2 * one.weights


def test_a_stage_has_its_share_of_everything(config):
    whole = predict_memory(Layout.of(config()))[0]
    home, *behind = predict_memory(Layout.of(config(parallel={"pipeline": 4, "slices": [0, 2, 2, 2], "in_flight": 1})))
    assert home.weights + sum(m.weights for m in behind) == whole.weights
    assert behind[0] == behind[1] == behind[2]
    assert behind[0].logits == 0 < home.logits == whole.logits
    assert 2.9 < whole.activations / behind[0].activations < 3.6
    assert home.total == sum(astuple(home))


def test_activations_grow_with_microbatches_in_flight_and_shrink_with_recomputation(config):
    def stage_1(**sections):
        return predict_memory(Layout.of(config(**sections)))[1].activations

    ring = {"pipeline": 2, "slices": [0, 6]}
    one, four = (stage_1(parallel={**ring, "in_flight": n}) for n in (1, 4))
    assert four == 4 * one
    assert stage_1(parallel={**ring, "in_flight": 100}) == 8 * one  # a step has 8
    assert stage_1(parallel={**ring, "in_flight": 4}, train={"recompute": "visit"}) < one


def test_sequence_parallelism_divides_what_lies_between_products(config):
    model = config().model
    whole, shared, divided = (layer_activations(model, "fp32", *by) for by in ((1, 1), (4, 1), (4, 4)))
    assert divided == whole / 4 < shared < whole
    assert shared - divided == pytest.approx(0.75 * 16 * model.hidden_size)


@pytest.mark.parametrize(
    "model",
    [{}, {"kv_heads": 2}, {"activation": "relu2"}, {"qk_norm": True}, {"value_embeddings": True}, {"layer_norm": "branch"}],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("slices", [[2], [0, 2]])
def test_a_visit_keeps_what_was_predicted(mesh, config, model, precision, slices):
    """What autograd saves in one visit more, beside parameters and the feed, which all visits share."""
    shape = {"hidden_size": 128, "heads": 4, "ffn_size": 256, "core_layers": 2, "prelude_layers": 0, "coda_layers": 0}
    layouts = [
        Layout.of(
            config(
                model={**shape, **model},
                parallel={"pipeline": len(slices), "slices": slices, "in_flight": 1},
                depth={"prior": "fixed", "mean": visits},
                train={"precision": precision},
            )
        )
        for visits in (4, 5)
    ]
    before, after = (predict_memory(layout) for layout in layouts)
    for stage, (fewer, more) in enumerate(zip(before, after, strict=True)):
        saved = saved_in_a_visit(layouts[0], stage)
        assert 0.98 * saved <= more.activations - fewer.activations <= 1.12 * saved


def saved_in_a_visit(layout: Layout, stage: int) -> int:
    """Bytes that a visit keeps for its backward, its input and output among them."""
    from loopscale.model.inputs import Documents, Inputs
    from loopscale.model.stage import LoopedStage
    from loopscale.parallel.mesh import Place

    model, batch, length = layout.config.model, layout.batch.microbatch, layout.config.corpus.sequence_length
    compute = torch.bfloat16 if layout.config.train.precision == "bf16" else torch.float32
    held = LoopedStage(model, length, seed=1, place=Place(stage, layout.ring.slices), compute=compute)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    inputs = Inputs(tokens, tokens, Documents.whole(batch, length, torch.device("cpu")), torch.arange(batch))
    feed = tuple(t.detach().requires_grad_() for t in held.prelude(inputs)) if stage == 0 else ()
    state = torch.zeros(length, batch, model.hidden_size, requires_grad=True)
    sizes = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = held.visit(inputs, feed, state, 2)
    if layout.stages > 1:
        keep(out)
    keep(state)
    for shared in (*held.parameters(), *feed):
        sizes.pop(shared.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
