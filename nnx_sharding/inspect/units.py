"""Numbers as people read them; the analysis writes them in the same way."""

from __future__ import annotations

from ..analysis.units import UNKNOWN, bytes_text, count_text, time_text

__all__ = ["UNKNOWN", "bytes_text", "count_text", "time_text"]
