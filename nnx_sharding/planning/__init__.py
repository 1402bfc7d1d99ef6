"""Choosing meshes and strategies before there are devices."""

from .plan import plan

__all__ = ["plan"]
