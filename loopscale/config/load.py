"""Reading a configuration: YAML files over their bases, then overrides; every problem found at once.

Layers, weakest first: defaults, the files named by ``base:`` (relative to the file that names them), the file, the
``section.key=value`` overrides. Each value keeps the name of the layer that set it.
"""

from __future__ import annotations

import difflib
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from loopscale.config.frozen import law_of_run
from loopscale.config.tree import Section
from loopscale.errors import ConfigError, Problem, UsageError

Tree = TypeVar("Tree", bound=Section)
Key = tuple[str, ...]
_DEEPEST = 8
_ONE_LINE = 10**9
_MISSING = "must be given"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-3`` as text; people mean a number. Repeated keys are mistakes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} appears twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _PlainLoader(_Loader):
    """Every value where it is used: what is read is no larger than its text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias stands for a value")
        return super().compose_node(parent, index)


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


def parse_yaml(text: str, source: str, *, aliases: bool = True) -> Any:
    """YAML text as plain values; raises :class:`UsageError` with line and column when it is not YAML, or when it has aliases
    and may not: a few of them can stand for more values than fit into memory."""
    try:
        return yaml.load(text, Loader=_Loader if aliases else _PlainLoader)
    except Exception as error:  # beside YAMLError whatever the library stumbles over: "!!int ''" is an IndexError
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
    _take_frozen_law(values, problems)
    return _validate(tree, values, origins, problems, source)


def from_values(tree: type[Tree], content: Mapping[str, Any], source: str = "config") -> Loaded[Tree]:
    """As :func:`load`, from a nested mapping."""
    values = dict(_flatten(content))
    return _validate(tree, values, dict.fromkeys(values, source), [], source)


def _take_frozen_law(values: dict[Key, Any], problems: list[Problem]) -> None:
    """Numbers in the place of a run's folder: what a run is must not change with another run."""
    key = ("depth", "table")
    if isinstance(folder := values.get(key), str):
        try:
            values[key] = law_of_run(Path(folder))
        except (ValueError, OSError) as error:
            problems.append(Problem("depth.table", f"is {folder!r}; {error}; give a run's folder, or a list of probabilities"))
            del values[key]


def _layers(path: Path, trail: tuple[Path, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.is_dir():
        raise UsageError(f"config file {path} is a folder; name a YAML file")
    if not path.exists():
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
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold keys and values, not {type(content).__name__}")
    if wrong := [k for k in content if not isinstance(k, str)]:
        raise UsageError(f"{path}: the key {wrong[0]!r} is not a word")
    bases = content.pop("base", None) or []
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
    if len(prefix) > _DEEPEST:
        raise UsageError(f"{'.'.join(prefix[:3])}… is nested deeper than any key; is an alias its own part?")
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
            told = {_location(e["loc"]): e for e in error.errors(include_url=False)}
            found = {place: e for place, e in told.items() if not any(p != place and p[: len(place)] == place for p in told)}
            keys = {tuple(itertools.takewhile(lambda part: isinstance(part, str), location)) for location in found}
            bad = {key for key in good for wrong in keys if key[: len(wrong)] == wrong or wrong[: len(key)] == key}
            dropped = {p.key for p in problems}
            fresh = [_problem(tree, location, e) for location, e in found.items()]
            problems += [p for p in fresh if not (p.sentence == _MISSING and any(d.startswith(p.key) for d in dropped))]
            if not bad:  # what is missing cannot be dropped
                raise ConfigError(source, problems) from None
            good = {k: v for k, v in good.items() if k not in bad}
    named = {p.key for p in problems}
    problems += [p for p in check(config) if p.key not in named]
    if problems:
        raise ConfigError(source, sorted(problems, key=lambda p: p.key))
    return Loaded(config, {".".join(k): v for k, v in origins.items()}, source)


Location = tuple[int | str, ...]
"""Keys, and places in lists, from the root to a value."""


def _location(found: Location) -> Location:
    """A pydantic location without the branches of unions, which it also names."""
    place: list[int | str] = []
    for part in found:
        if isinstance(part, str) and place and re.search(r"[\[(-]|^(int|float|str|bool)$", part):
            break
        place.append(part)
    return tuple(place)


def _shown(location: Location) -> str:
    """``sources[2].kind``; lists are counted from 1."""
    return "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _field_at(tree: type[BaseModel], location: Location) -> FieldInfo | None:
    """The field at a location, that of the whole list for a place in a list of plain values."""
    section: type[BaseModel] | None = tree
    field: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            section = inner_section(field)
        elif section is None or part not in section.model_fields:
            return field
        else:
            field = section.model_fields[part]
            section = inner_section(field)
    return field


def inner_section(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section that a field is, or that each entry of its list is."""
    annotation: Any = field.annotation if field else None
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def all_keys(tree: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every key of the tree, depth first."""
    for name, field in tree.model_fields.items():
        inner = inner_section(field)
        if inner is None:
            yield (*prefix, name)
        else:
            yield from all_keys(inner, (*prefix, name))


def _problem(tree: type[BaseModel], location: Location, error: ErrorDetails) -> Problem:
    key, value, kind = _shown(location), error["input"], error["type"]
    if kind == "extra_forbidden":
        return Problem(key, f"unknown key{_near_key(tree, location)}")
    if kind == "missing" and not isinstance(location[-1], int):
        return Problem(key, _MISSING)
    while location and isinstance(location[-1], int):  # an entry of a plain list: speak of the list
        location = location[:-1]
    field = _field_at(tree, location)
    wanted = describe_type(field.annotation, field.metadata) if field else "a value of another kind"
    near = difflib.get_close_matches(str(value), [str(c) for c in _choices(field.annotation)], n=1) if field else []
    hint = f"; did you mean {near[0]}?" if near else ""
    return Problem(_shown(location), f"is {_show(value)}, must be {wanted}{hint}")


def _near_key(tree: type[BaseModel], location: Location) -> str:
    names = tuple(part for part in location if isinstance(part, str))
    dotted = ".".join(names)
    known = {".".join(k): k for k in all_keys(tree)}
    known.update({k[0]: k[:1] for k in list(known.values())})
    near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
    near = near or [".".join(k) for k in known.values() if k[-1] == names[-1]][:1]
    return f"; did you mean {near[0]}?" if near else f"; sections are {', '.join(tree.model_fields)}"


def _show(value: Any) -> str:
    return (
        repr(value) if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=_ONE_LINE).split("\n")[0]
    )


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
