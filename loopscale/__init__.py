"""loopscale: looped language models, from a laptop CPU to a cluster. Importing it is cheap."""

__version__ = "0.1.0"
