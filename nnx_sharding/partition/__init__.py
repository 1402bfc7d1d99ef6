"""Choosing how arrays are split over a mesh, and making the choice fit."""

from .fit import INDIVISIBLE, Indivisible, axis_problems, fit, shape_problems, variants

__all__ = [
    "INDIVISIBLE",
    "Indivisible",
    "axis_problems",
    "fit",
    "shape_problems",
    "variants",
]
