"""Programs in files: exported ones, which are called without their code, and compiled ones."""

from .executable import load_executable, save_executable
from .export import export
from .exported import Exported, load

__all__ = ["Exported", "export", "load", "load_executable", "save_executable"]
