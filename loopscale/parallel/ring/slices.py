"""How many of the core's layers each stage of the ring holds."""

from __future__ import annotations


def balanced_slices(layers: int, stages: int, layer: float, home: float) -> tuple[int, ...]:
    """Core layers of each stage, the home stage first, such that the heaviest stage is as light as can be.

    ``layer`` is the time of one core layer over a step and ``home`` that of all that home alone does, in one unit. Home
    may hold no layer, every other stage holds at least one; among equals the plan with the most layers at home is
    taken. Needs ``layers >= stages - 1``.
    """
    if stages == 1:
        return (layers,)

    def heaviest(own: int) -> float:
        return max(home + own * layer, -(-(layers - own) // (stages - 1)) * layer)

    own = min(range(layers - stages + 1, -1, -1), key=heaviest)
    each, more = divmod(layers - own, stages - 1)
    return (own, *(each + (s < more) for s in range(stages - 1)))
