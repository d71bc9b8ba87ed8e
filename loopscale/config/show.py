"""The configuration tree in words: every key for ``--keys``, a JSON schema for editors, values with their origins,
what differs between two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from loopscale.config.load import Loaded, Tree, describe_type, inner_section


def describe_keys(tree: type[BaseModel]) -> str:
    """Every key with its type, its default and what it means; single keys first, then the sections."""
    return "\n".join(_describe(tree, ""))


def _describe(tree: type[BaseModel], prefix: str) -> Iterator[str]:
    sections = {name: inner for name, field in tree.model_fields.items() if (inner := inner_section(field))}
    for name, field in tree.model_fields.items():
        if name in sections:
            continue
        default = "must be given" if field.default is PydanticUndefined else f"default {_scalar(field.default)}"
        yield f"  {prefix}{name}   {describe_type(field.annotation, field.metadata)}; {default}"
        yield f"      {' '.join((field.description or '').split())}"
    for name, inner in sections.items():
        listed = "[]" if inner is not tree.model_fields[name].annotation else ""
        yield from ["", f"{prefix}{name}{listed}:", *_describe(inner, f"{prefix}{name}{listed}.")]


def schema(tree: type[BaseModel]) -> str:
    """A JSON schema of the YAML file, ``base`` included."""
    content: dict[str, Any] = tree.model_json_schema()
    content["properties"]["base"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Files whose values this one goes over, relative to it.",
    }
    return json.dumps(content, indent=1)


def with_origins(loaded: Loaded[Tree]) -> str:
    """The resolved tree as YAML, each value followed by the layer that set it."""
    return "\n".join(_values(loaded.config.model_dump(mode="json"), "", dict(loaded.origins)))


def _values(content: dict[str, Any], prefix: str, origins: dict[str, str]) -> Iterator[str]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from [f"{name}:", *(f"  {line}" for line in _values(value, f"{key}.", origins))]
        else:
            yield f"{f'{name}: {_scalar(value)}':<40} # {origins.get(key, 'default')}"


def _scalar(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, (BaseModel, list)) and any(isinstance(v, BaseModel) for v in plain):
        return "[...]"
    return yaml.safe_dump(plain, default_flow_style=True, width=10**9, allow_unicode=True).split("\n")[0]


FIXED = ("model.", "corpus.sequence_length", "corpus.shuffle_block", "run.seed")
"""What a resumed run keeps: what it is, and what it reads next."""
QUIET = (
    "run.", "log.", "corpus.path", "corpus.cache", "corpus.workers", "corpus.accept_change", "train.threads", "train.max_time",
    "train.grace", "train.stuck_after", "parallel.", "checkpoint.", "diagnostics.",
)  # fmt: skip
"""What may change without changing the run."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) of two configuration trees as plain values."""
    found = []
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append((f"{prefix}{key}", old, new))
    return found
