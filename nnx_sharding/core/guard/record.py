"""The guard of a call: whether its graph is still the one that was split.

The guard follows the same path through the live objects and compares them with what was there
before (``walk.py``). A match means that splitting again would give the same structure, since
everything on which a structure depends is compared: names in order, types, statics, and which
objects are shared. For these, ids are enough, so a guard keeps no model alive. Another object may
get the id of a dead one, but then its content is compared as well; objects without content drop the
guard when they are collected (``watched``).

A mismatch, or anything unexpected, means "changed": the call then splits. So a guard may be too
strict, which costs time, but never too lax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ... import _compat
from ..flatten import Flat
from ..structure import Structure
from .recipe import Pins


class Guard(NamedTuple):
    """The path through a graph, and what must be there for it to have a structure."""

    structure: Structure
    walk: Any
    pins: Pins
    follow: Any

    @classmethod
    def of(cls, structure: Structure, walk: Any, pins: Pins) -> Guard:
        """The guard of the graph with these pins."""
        return cls(structure, walk, pins, walk.follower(pins))

    def check(self, arguments: tuple[Any, ...]) -> Flat | None:
        """The graph as ``flatten`` would split it, or None if it may have changed."""
        try:
            found = self.follow(arguments)
        except Exception:  # a missing attribute or a comparison that raises is a change
            return None
        if found is None:
            return None
        leaves, objects = found
        return Flat(self.structure, leaves, objects, updatable=True)

    def match(self, arguments: tuple[Any, ...]) -> tuple[Flat, Pins] | None:
        """Another graph of the same structure, and its pins; None if the structure differs."""
        try:
            match = self.walk.match(self.pins, arguments)
        except Exception:
            return None
        if match is None:
            return None
        (leaves, objects), frozen, mentions, traces = match
        if not _compat.are_current(traces):
            return None
        return Flat(self.structure, leaves, objects, updatable=True), Pins(frozen, mentions)
