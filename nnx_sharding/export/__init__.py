"""Programs in files, which are called without the code of their models."""

from .export import export
from .exported import Exported, load

__all__ = ["Exported", "export", "load"]
