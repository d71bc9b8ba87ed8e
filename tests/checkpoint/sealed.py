"""Changed checkpoints whose manifests fit them: digests alone do not show the change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


def seal(checkpoint: Path, **more: Any) -> None:
    """Writes a manifest that fits the files as they are now."""
    files = [p for p in checkpoint.rglob("*") if p.is_file() and p.name != "manifest.json" and not p.name.startswith(".")]
    listed = {str(p.relative_to(checkpoint)): described(p.read_bytes()) for p in files}
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 2, "facts": {}, "files": {**listed, **more}}))


def described(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@contextmanager
def changed(checkpoint: Path, file: str) -> Iterator[Any]:
    """The content of a JSON or YAML file, to be changed; the manifest fits it then."""
    path = checkpoint / file
    content = yaml.safe_load(path.read_text())
    yield content
    path.write_text(json.dumps(content))
    seal(checkpoint)
