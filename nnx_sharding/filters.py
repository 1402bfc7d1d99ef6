"""Filters by path, for ``StateSharding``, ``ActivationSharding`` and Flax's own functions."""

from .specs.filters import PathGlob, PathRegex, Paths

__all__ = ["PathGlob", "PathRegex", "Paths"]
