"""What a page's script unpacks."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def unpacked(page: str, script: str) -> str:
    """The text in one of the page's packed scripts: ``data`` or ``plotly``."""
    (packed,) = re.findall(rf'<script id="{script}" type="application/gzip">([^<]*)</script>', page)
    return gzip.decompress(base64.b85decode(packed.replace(",", "<"))).decode()


def data(page: str) -> dict[str, Any]:
    """The figures' specifications and tables."""
    found: dict[str, Any] = json.loads(unpacked(page, "data"))
    return found
