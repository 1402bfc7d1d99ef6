"""Programs with one fault each, and right programs that look alike."""

from . import experts, layers, losses, modules, others, sequences, updates  # noqa: F401
from .harness import FAULTS, SURROUNDINGS, Verdict, check

__all__ = ["FAULTS", "SURROUNDINGS", "Verdict", "check"]
