"""What ``flatten`` reports while it reads a graph, so that the same can be read again.

``flatten`` knows what the content of an object means; whoever records the walk knows how to repeat
it. In between, everything that is read has a *position*: its index in the list of all things read,
in which the arguments come first. ``flatten`` is given the position of each value, and passes the
content of that value on, for which it gets further positions.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import Any, Protocol, Self

from .static_equality import Static
from .static_parts import StaticKind
from .structure import Child
from .treedefs import PyTreeDef

NOWHERE = -1  # the position of what is not read again


class Comparison(enum.IntEnum):
    """How a value must agree with the recorded one."""

    NONE = 0  # not at all, or through its content
    BY_VALUE = 1
    BY_IDENTITY = 2


def comparison_of(child: Child) -> Comparison:
    """Returns how the value that a child describes is compared."""
    if type(child) is not Static:
        return Comparison.NONE
    return Comparison.BY_IDENTITY if child.by_identity else Comparison.BY_VALUE


class ReadRecorder(Protocol):
    """Is told what ``flatten`` reads. The parts of an object get positions in their order."""

    static: Sequence[int]  # the positions of the static arguments
    leaves: list[int]  # the positions of the arrays, by slot
    objects: list[int]  # the position at which each object was met first, by index

    def restarted(self) -> Self:
        """Returns a recorder of another walk over the same arguments."""

    def add_static(self, position: int, value: Any, static: Static) -> None:
        """Notes a static value that cannot change."""

    def add_object(self, position: int, index: int) -> None:
        """Notes a reference to the object with an index."""

    def fix(self, index: int, obj: Any) -> None:
        """Notes that an object has to stay the same one."""

    def open_node(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> Sequence[int]:
        """Notes the attributes of a module, and how each is compared, if all are known."""

    def open_metadata(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> Sequence[int]:
        """Notes the metadata of a Variable in the same way."""

    def open_variable(self, position: int, variable: Any, value: Any) -> int:
        """Notes the trace and the value of a Variable; returns the position of the value."""

    def open_node_state(self, position: int, state: Any) -> None:
        """Notes Flax's state of a module: whether it is set up, and its trace."""

    def open_hijax(self, position: int, treedef: PyTreeDef, leaves: Sequence[Any]) -> Sequence[int]:
        """Notes what a hijax Variable has; returns the positions of its leaves."""

    def open_static(
        self, position: int, value: Any, described: StaticKind, parts: Sequence[Any]
    ) -> Sequence[int]:
        """Notes the parts of a static object."""

    def open_tree(
        self, position: int, tree: Any, treedef: PyTreeDef
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Notes what a pytree holds; returns the positions of its leaves and of its node data.

        A tree that is nowhere is that of all dynamic arguments, or the only one, a graph object.
        """
