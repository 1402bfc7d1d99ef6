"""The page docs/models.md, written from the results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "public_models.json"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def load() -> dict[str, dict[str, Any]]:
    """Returns the results by model and measure."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the results."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def write(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the page."""
