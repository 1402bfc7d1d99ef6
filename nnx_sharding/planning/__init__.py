"""Choosing meshes and strategies before there are devices."""

from .candidates import Candidate
from .plan import Plan, plan

__all__ = ["Candidate", "Plan", "plan"]
