"""loopscale: looped language models, from a laptop CPU to a cluster. Importing it is cheap.

``load(path)`` gives the model of a checkpoint, ``train(config)`` runs a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loopscale.inference.load import LoopedModel
    from loopscale.train.run import Outcome


def load(path: str | Path) -> LoopedModel:
    """The model of a checkpoint, or of a run's newest one; see :class:`loopscale.inference.load.LoopedModel`."""
    from loopscale.inference.load import load

    return load(path)


def train(config: str | Path, overrides: Sequence[str] = (), *, resume: str | None = None) -> Outcome:
    """Trains as the YAML file ``config`` says, with ``section.key=value`` overrides; ``resume`` as on the command line.

    For the main thread: while it runs, a signal means what it means to the command, and may end the process. Raises
    :class:`loopscale.errors.ConfigError` with every problem of the configuration at once.
    """
    from pathlib import Path

    from loopscale.config import Config, load
    from loopscale.train.run import train
    from loopscale.train.signals import StopRequest

    loaded = load(Config, config, overrides)
    with StopRequest(loaded.config.train.grace) as stop:
        return train(loaded, stop, stem=Path(config).stem, resume=resume)
