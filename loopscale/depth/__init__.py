"""How many visits a forward makes: priors over the depth and keyed draws from them."""

from loopscale.depth.controller import DepthController, GroupSums
from loopscale.depth.draw import draw_depths
from loopscale.depth.priors import DepthLaw, Prior, make_prior, pln

__all__ = ["DepthController", "DepthLaw", "GroupSums", "Prior", "draw_depths", "make_prior", "pln"]
