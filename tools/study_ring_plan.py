#!/usr/bin/env python
"""How close ring plans come to the lower bound, and how long planning takes, over drawn depths.

Prints one line per (stages, microbatches): median, 90th percentile and largest makespan / lower bound, the most visits
whose activations one stage keeps (median, against the ceiling in-flight x b), and milliseconds per plan.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np

from loopscale.parallel.ring.plan import Work, plan
from loopscale.plan.timetable import kept_visits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=list(range(2, 9)), help="ring sizes p")
    parser.add_argument("--per-stage", type=int, nargs="+", default=[2, 4, 8], help="microbatches M as multiples of p")
    parser.add_argument("--draws", type=int, default=100, help="plans per line")
    parser.add_argument("--per-loop", action="store_true", help="an exit at every visit with gradient, not only the last")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    print(f"{'p':>3} {'M':>4} {'median':>8} {'p90':>8} {'largest':>8} {'kept':>6} {'ceiling':>8} {'ms':>7}")
    for per_stage in options.per_stage:
        for stages in options.stages:
            source = np.random.default_rng((options.seed, stages, per_stage))
            ratios, kept, ceilings, times = [], [], [], []
            for _ in range(options.draws):
                work = [draw(source, options.per_loop) for _ in range(per_stage * stages)]
                start = time.perf_counter()
                ring = plan(stages, work)
                times.append(1e3 * (time.perf_counter() - start))
                ratios.append(ring.makespan / ring.lower_bound())
                kept.append(max(kept_visits(ring, stage) for stage in range(stages)))
                ceilings.append(ring.in_flight * max(w.gradient_visits for w in work))
            print(
                f"{stages:>3} {per_stage * stages:>4} {np.median(ratios):>8.3f} {np.quantile(ratios, 0.9):>8.3f} "
                f"{max(ratios):>8.3f} {np.median(kept):>6.0f} {np.median(ceilings):>8.0f} {np.median(times):>7.1f}",
                flush=True,
            )


def draw(source: np.random.Generator, per_loop: bool) -> Work:
    """One microbatch under the PLN-5 law (mean 5 visits, cap 64), its last 10 visits with gradient."""
    depth = min(64, 1 + int(source.poisson(math.exp(source.normal(1.261294, 0.5)))))
    gradient_visits = min(depth, 10)
    first = depth - gradient_visits + 1 if per_loop else depth
    return Work(depth, gradient_visits, tuple(range(first, depth + 1)))


if __name__ == "__main__":
    main()
