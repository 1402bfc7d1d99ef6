"""Programs in files: exported ones, which are called without their code, and compiled ones."""

from .executable import load_executable, save_executable
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
    "load_executable",
    "save_executable",
]
