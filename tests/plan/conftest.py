"""A layout out of a few sections of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loopscale.config import Config


@pytest.fixture
def config() -> Callable[..., Config]:
    """A small model's configuration; sections are given as dicts and change it."""

    def make(**sections: dict[str, Any]) -> Config:
        base: dict[str, dict[str, Any]] = {
            "model": {"vocab_size": 1000, "core_layers": 6},
            "batch": {"global_batch": 32},
            "depth": {"groups": 8},
        }
        return Config.model_validate({**base, **{name: {**base.get(name, {}), **own} for name, own in sections.items()}})

    return make
