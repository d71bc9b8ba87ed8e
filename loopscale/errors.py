"""Exceptions a user may see.

Every message says what was found, what was expected and which option to change. ``exit_code`` is what the
command line returns: 2 for a mistake that the user can mend, 1 for a fault of data, machine or program.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass


class LoopscaleError(Exception):
    """Base of all errors raised on purpose; the command line prints its message without a traceback."""

    exit_code = 1


class UsageError(LoopscaleError):
    """A wrong argument: a missing file, an unknown name, an option that does not fit another."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: the dotted key and one sentence about it."""

    key: str
    sentence: str


class ConfigError(LoopscaleError):
    """All problems of one configuration, raised together."""

    exit_code = 2

    def __init__(self, source: str, problems: Sequence[Problem]):
        self.source = source
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'' if len(self.problems) == 1 else 's'}"
        width = min(max((len(p.key) for p in self.problems), default=0), 32)
        lines = [f"  {p.key:<{width}}  {p.sentence}" for p in self.problems]
        super().__init__("\n".join([f"{source}: {count}", *lines]))


class DataError(LoopscaleError):
    """A corpus, shard, tokenizer or text file that cannot be used."""


class CheckpointError(LoopscaleError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class ClusterError(LoopscaleError):
    """A process group, node or scheduler that failed."""


class OutOfMemory(LoopscaleError):
    """More memory was asked for than a rank's device or machine has."""


class NumericsError(LoopscaleError):
    """Non-finite or impossible values."""


def describe_fault(error: OSError) -> str:
    """A fault of the file system or the network in one sentence: the path and the reason."""
    if isinstance(error, shutil.Error):  # of a tree: a list of (source, target, reason)
        _, target, reason = error.args[0][0]
        return f"{target}: {reason}"
    where = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error)
    return f"{where}{reason}"
