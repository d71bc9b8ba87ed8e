"""The typed configuration tree, its loading and its rules. Imports nothing of ours but the errors."""

from loopscale.config.batch import Batch, settle
from loopscale.config.cluster import ClusterConfig
from loopscale.config.corpus import CorpusBuild
from loopscale.config.load import Loaded, from_values, load
from loopscale.config.tree import Config

__all__ = ["Batch", "ClusterConfig", "Config", "CorpusBuild", "Loaded", "from_values", "load", "settle"]
