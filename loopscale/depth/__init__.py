"""How many visits a forward makes: priors over the depth and keyed draws from them."""

from loopscale.config.tree import DepthConfig
from loopscale.depth.controller import DepthController, GroupSums
from loopscale.depth.draw import draw_depths
from loopscale.depth.learned import LearnedLaw
from loopscale.depth.priors import DepthLaw, Prior, make_prior, pln

__all__ = ["DepthController", "DepthLaw", "GroupSums", "LearnedLaw", "Prior", "draw_depths", "make_law", "make_prior", "pln"]


def make_law(config: DepthConfig) -> DepthController:
    """What decides the depths of a run that begins."""
    return LearnedLaw(config) if config.prior == "learned" else DepthLaw(config)
