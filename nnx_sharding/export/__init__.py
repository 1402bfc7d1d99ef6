"""Programs in files: a function is exported once, and called where its code is not."""

from .export import export
from .exported import Exported, Result, load
from .manifest import Argument, ArrayInfo, Manifest, MeshInfo, Place

__all__ = [
    "Argument",
    "ArrayInfo",
    "Exported",
    "Manifest",
    "MeshInfo",
    "Place",
    "Result",
    "export",
    "load",
]
