"""Programs in files: a function is exported once, and called without its code."""

from .export import export
from .exported import Exported, Result, load
from .manifest import Argument, ArrayInfo, LeafInfo, Manifest, MeshInfo

__all__ = [
    "Argument",
    "ArrayInfo",
    "Exported",
    "LeafInfo",
    "Manifest",
    "MeshInfo",
    "Result",
    "export",
    "load",
]
