"""Reading a configuration: YAML files over their bases, then overrides; every problem found at once.

Layers, weakest first: defaults, the files named by ``base:`` (relative to the file that names them), the file, the
``section.key=value`` overrides. Each value keeps the name of the layer that set it.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loopscale.config.tree import Section
from loopscale.errors import ConfigError, Problem, UsageError

Tree = TypeVar("Tree", bound=Section)
Key = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-3`` as text; people mean a number. Repeated keys are mistakes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} appears twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Loaded(Generic[Tree]):
    """A configuration and where each of its values came from (dotted key -> layer)."""

    config: Tree
    origins: Mapping[str, str]
    source: str


def parse_yaml(text: str, source: str) -> Any:
    """YAML text as plain values; raises :class:`UsageError` with line and column when it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UsageError(f"{source} is not valid YAML{where}: {getattr(error, 'problem', None) or error}") from None


def load(tree: type[Tree], path: str | Path, overrides: Sequence[str] = ()) -> Loaded[Tree]:
    """Reads ``path`` over its bases, applies ``overrides``; raises :class:`ConfigError` with all problems found."""
    source = str(path) + (f" + {len(overrides)} override{'s' * (len(overrides) > 1)}" if overrides else "")
    values: dict[Key, Any] = {}
    origins: dict[Key, str] = {}
    problems: list[Problem] = []
    for layer, content in (*_layers(Path(path), ()), *_override_layers(overrides, problems)):
        for key, value in _flatten(content):
            for shadowed in [k for k in values if k[: len(key)] == key or key[: len(k)] == k]:
                del values[shadowed], origins[shadowed]
            values[key], origins[key] = value, layer
    return _validate(tree, values, origins, problems, source)


def from_values(tree: type[Tree], content: Mapping[str, Any], source: str = "config") -> Loaded[Tree]:
    """As :func:`load`, from a nested mapping."""
    values = dict(_flatten(content))
    return _validate(tree, values, dict.fromkeys(values, source), [], source)


def _layers(path: Path, trail: tuple[Path, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_file():
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
            if path.parent.is_dir()
            else []
        )
        named = f", named as base by {trail[-1]}" if trail else ""
        raise UsageError(
            f"config file {path} does not exist{named}" + (f"; did you mean {path.parent / near[0]}?" if near else "")
        )
    if path.resolve() in [p.resolve() for p in trail]:
        raise UsageError(f"config files name each other as base: {' -> '.join(map(str, (*trail, path)))}")
    content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if content is None:
        content = {}
    if not isinstance(content, dict) or not all(isinstance(k, str) for k in content):
        raise UsageError(f"{path} must hold keys and values, not {type(content).__name__}")
    bases = content.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        raise ConfigError(str(path), [Problem("base", f"must be a file name or a list of them, not {bases!r}")])
    for base in bases:
        yield from _layers(path.parent / base, (*trail, path))
    yield str(path), content


def _override_layers(overrides: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            problems.append(Problem(override, "an override is written section.key=value"))
            continue
        value: Any = parse_yaml(text, f"the value of override {key}")
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        yield "override", value


def _flatten(content: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, (*prefix, str(key)))
        elif not (isinstance(value, Mapping) or (value is None and not prefix)):  # an empty section sets nothing
            yield (*prefix, str(key)), value


def _nest(values: Mapping[Key, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        place = nested
        for part in key[:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = value
    return nested


def _validate(
    tree: type[Tree], values: dict[Key, Any], origins: dict[Key, str], problems: list[Problem], source: str
) -> Loaded[Tree]:
    """Validates; drops what is wrong and validates the rest again, so that rules between good keys still report."""
    from loopscale.config.check import check

    problems = list(problems)
    good = dict(values)
    config: Tree | None = None
    while config is None:
        try:
            config = tree.model_validate(_nest(good))
        except ValidationError as error:
            found = {_config_key(e["loc"]): e for e in error.errors(include_url=False)}
            bad = {key for key in good for loc in found if key[: len(loc)] == loc or loc[: len(key)] == key}
            problems += [_problem(tree, loc, e, good) for loc, e in found.items()]
            if not bad:  # what is missing cannot be dropped
                raise ConfigError(source, problems) from None
            good = {k: v for k, v in good.items() if k not in bad}
    named = {p.key for p in problems}
    problems += [p for p in check(config) if p.key not in named]
    if problems:
        raise ConfigError(source, sorted(problems, key=lambda p: p.key))
    return Loaded(config, {".".join(k): v for k, v in origins.items()}, source)


def _config_key(location: tuple[int | str, ...]) -> Key:
    """The dotted key of a pydantic location, which also names the branches of unions in it."""
    key: list[str] = []
    for part in location:
        if isinstance(part, int):
            break
        if re.search(r"[\[(-]|^(int|float|str|bool)$", part) and key:
            break
        key.append(part)
    return tuple(key)


def _section_at(tree: type[BaseModel], key: Key) -> type[BaseModel] | None:
    for part in key:
        field = tree.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        tree = annotation
    return tree


def all_keys(tree: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every key of the tree, depth first."""
    for name in tree.model_fields:
        inner = _section_at(tree, (name,))
        if inner is None:
            yield (*prefix, name)
        else:
            yield from all_keys(inner, (*prefix, name))


def _problem(tree: type[BaseModel], key: Key, error: ErrorDetails, values: Mapping[Key, Any]) -> Problem:
    dotted, value, kind = ".".join(key), error["input"], error["type"]
    if kind == "extra_forbidden":
        known = {".".join(k): k for k in all_keys(tree)}
        known.update({k[0]: k[:1] for k in list(known.values())})
        near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
        if not near:
            near = [".".join(k) for k in known.values() if k[-1] == key[-1]][:1]
        return Problem(
            dotted, "unknown key" + (f"; did you mean {near[0]}?" if near else f"; sections are {', '.join(tree.model_fields)}")
        )
    if kind == "missing":
        return Problem(dotted, "must be given")
    field = (_section_at(tree, key[:-1]) or tree).model_fields.get(key[-1]) if key else None
    wanted = describe_type(field.annotation, field.metadata) if field else "a value of another kind"
    nearest = ""
    if isinstance(value, str) and field is not None:
        near = difflib.get_close_matches(value, [str(c) for c in _choices(field.annotation)], n=1)
        nearest = f"; did you mean {near[0]}?" if near else ""
    detail = "" if len(error["loc"]) == len(key) or not kind.startswith("value") else f" ({error['msg']})"
    shown = values.get(key, value)
    return Problem(dotted, f"is {_show(shown)}, must be {wanted}{nearest}{detail}")


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


def _choices(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [c for part in typing.get_args(annotation) for c in _choices(part)]


def describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A field's type in words: "a whole number, at least 1", "one of none, add, ortho", "... or null"."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        base, *extra = typing.get_args(annotation)
        inner = [m for e in extra for m in getattr(e, "metadata", [e])]
        return describe_type(base, [*inner, *metadata])
    if origin in (typing.Union, types.UnionType):
        parts = [a for a in typing.get_args(annotation) if a is not type(None)]
        words = " or ".join(describe_type(p, metadata) for p in parts)
        return words + (" or null" if len(parts) < len(typing.get_args(annotation)) else "")
    if origin is typing.Literal:
        return "one of " + ", ".join(str(c) for c in typing.get_args(annotation))
    bounds = {
        name: getattr(m, name)
        for m in metadata
        for name in ("gt", "ge", "lt", "le", "pattern")
        if getattr(m, name, None) is not None
    }
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "pattern": "matching"}
    limits = "".join(f", {signs[name]} {bound}" for name, bound in bounds.items())
    if origin is tuple:
        inner_type = typing.get_args(annotation)
        count = "a list of" if inner_type[-1] is Ellipsis else f"a list of {len(inner_type)}:"
        return f"{count} {describe_type(inner_type[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if annotation in names:
        return names[annotation] + limits
    return "a section of keys" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else str(annotation)
