"""Training arithmetic on this machine, as design goals state it: the share of its own matrix-product rate.

One run measures, in turn and several times over: matrix products of the model's own shapes, a whole step of loopscale
(Paper A's shape: one stack of layers looped K times, per-loop loss, fp32), and the same step in plain PyTorch. Shares are
(6 N_grad + 2 N_nograd) operations per token, the head at every exit included and attention scores left out, over wall
time. Then a profile says where loopscale's time goes.

    python tools/bench_training.py [--width 256 --layers 4 --loops 4 --vocabulary 8000 --batch 8 --length 128]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

warnings.filterwarnings("ignore")


class PlainLayer(nn.Module):
    """A pre-norm layer as one would write it in PyTorch alone."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainLooped(nn.Module):
    """Paper A's model: the stack looped K times, a tied head after every loop."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        width = options.width
        self.loops = options.loops
        self.tokens, self.positions = nn.Embedding(options.vocabulary, width), nn.Embedding(options.length, width)
        self.layers = nn.ModuleList(PlainLayer(width, options.heads, options.inner) for _ in range(options.layers))
        self.norm = nn.RMSNorm(width)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h, total = self.tokens(tokens) + self.positions.weight, torch.zeros(())
        for _ in range(self.loops):
            for layer in self.layers:
                h = layer(h)
            total = total + F.cross_entropy((self.norm(h) @ self.tokens.weight.t()).flatten(0, 1), targets.flatten())
        return total / self.loops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("heads", 8), ("inner", 1024), ("layers", 4), ("loops", 4), ("vocabulary", 8000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("batch", 8), ("length", 128), ("threads", torch.get_num_threads()), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    from loopscale.environment.compute import matmul_rate

    ours, model_flops, shapes = build_ours(options)
    plain = build_plain(options)
    tokens = options.batch * options.length
    rates, times = [], {"loopscale": [], "plain PyTorch": []}
    for _ in range(options.rounds):
        rates.append(matmul_rate(shapes, tokens, torch.device("cpu")) or float("nan"))
        times["loopscale"].append(timed(ours))
        times["plain PyTorch"].append(timed(plain))
    rate = statistics.median(rates)
    print(f"matrix products of the model's shapes: {rate / 1e9:.0f} GFLOP/s on {options.threads} threads")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        share = model_flops * tokens / median / rate
        print(f"{name:<14} {median * 1e3:6.0f} ms a step  {tokens / median:8,.0f} tokens/s  {share:.1%} of the rate")
    profile(ours)


def build_ours(options: argparse.Namespace) -> tuple[Callable[[], None], int, list[tuple[int, int]]]:
    from loopscale.config.tree import ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig
    from loopscale.model.flops import count, matmul_shapes, training_flops
    from loopscale.model.inputs import Documents, Inputs
    from loopscale.model.stage import LoopedStage
    from loopscale.objective.supervision import exits
    from loopscale.parallel import mesh
    from loopscale.parallel.ring.execute import Task, execute
    from loopscale.parallel.ring.links import Links
    from loopscale.parallel.ring.plan import plan
    from loopscale.parallel.zero import ZeroOptimizer

    mesh.start(ParallelConfig())
    model = ModelConfig(
        vocab_size=options.vocabulary, hidden_size=options.width, heads=options.heads, ffn_size=options.inner, prelude_layers=0,
        core_layers=options.layers, coda_layers=0, inject="none", state_init="embedding", positions="learned", tied_head=True,
    )  # fmt: skip
    objective = ObjectiveConfig(kind="per_loop")
    stage = LoopedStage(model, options.length, seed=1, objective=objective)
    kinds = {h.parameter: h.weights[0].kind for h, _ in stage.held()}
    optimizer = ZeroOptimizer({h.parameter: p for h, p in stage.held()}, kinds, OptimizerConfig(), 1)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length + 1))
    documents = Documents.whole(options.batch, options.length, torch.device("cpu"))
    inputs = Inputs(tokens[:, :-1], tokens[:, 1:].contiguous(), documents, torch.arange(options.batch))
    supervision = exits(objective, options.loops, options.loops)
    task = Task(inputs, options.loops, options.loops, supervision, 1 / tokens[:, 1:].numel())
    ring = plan(1, [task.work], in_flight=1)

    def step() -> None:
        execute(ring, stage, [task], Links.alone())
        optimizer.step(0.1)

    return step, training_flops(count(model, options.length), task.work), matmul_shapes(model)


def build_plain(options: argparse.Namespace) -> Callable[[], None]:
    model = PlainLooped(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length + 1))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def timed(step: Callable[[], None], repeats: int = 3) -> float:
    """Best of a few, after one to warm up."""
    step()
    seconds = []
    for _ in range(repeats):
        before = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - before)
    return min(seconds)


def profile(step: Callable[[], None], lines: int = 12) -> None:
    """Own time of loopscale's operators."""
    with torch.profiler.profile() as recorded:
        step()
        step()
    events = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
    whole = sum(e.self_cpu_time_total for e in events)
    for event in events[:lines]:
        print(f"  {event.self_cpu_time_total / whole:6.1%}  {event.key}")


if __name__ == "__main__":
    main()
