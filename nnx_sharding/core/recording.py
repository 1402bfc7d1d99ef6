"""The reports of ``flatten`` while it reads a graph, by which a guard can read the graph again.

``flatten`` knows what the content of an object means, and a recorder knows how to repeat the walk.
They name everything that is read by its *position*: its index in the list of all that is read. The
arguments come first in this list. When ``flatten`` opens a value, it tells the recorder the
position of the value and what the value holds. The recorder returns the positions of these parts.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from .static_equality import Static
from .static_parts import StaticKind
from .structure import Child
from .treedefs import PyTreeDef

UNRECORDED = -1  # the position of a value that is not read again
# An endless iterable, to be zipped with any number of values that are not read again.
ALL_UNRECORDED: Iterable[int] = itertools.repeat(UNRECORDED)


class Comparison(enum.IntEnum):
    """How a value must agree with the recorded value, for a guard to hold."""

    NONE = 0  # the value itself is not compared; its content may be
    BY_VALUE = 1
    BY_IDENTITY = 2


def comparison_of(child: Child) -> Comparison:
    """Returns how the value that a child describes is compared."""
    if type(child) is not Static:
        return Comparison.NONE
    return Comparison.BY_IDENTITY if child.by_identity else Comparison.BY_VALUE


class TreePositions(NamedTuple):
    """The positions of what one or several pytrees hold, in the order of JAX."""

    leaves: Sequence[int]  # the positions of the leaves
    # The positions of the data of nodes that JAX compares by ``==`` only (`treedefs.aux_of`).
    aux: Sequence[int]


class ReadRecorder(Protocol):
    """Is told what ``flatten`` reads. The parts of an object get positions in their order.

    ``position`` is where the reported value was read. The ``open_`` methods report what the value
    holds, and most of them return the positions of its parts.
    """

    static_positions: Sequence[int]  # the positions of the static arguments
    leaf_positions: list[int]  # the position of each array, by slot
    object_positions: list[int]  # the position where each object was met first, by index

    def restarted(self) -> Self:
        """Returns a recorder of another walk over the same arguments."""

    def add_static(self, position: int, value: object, static: Static) -> None:
        """Records a static value that cannot change."""

    def add_object(self, position: int, index: int) -> None:
        """Records a link to the object with an index."""

    def pin_object(self, index: int, obj: object) -> None:
        """Records that an object has to stay the same one."""

    def open_node(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> Sequence[int]:
        """Records the attributes of a module, and how each is compared, if all are known.

        Args:
          position: where the module was read.
          names: the names of the attributes.
          values: their values, in the same order.
          comparisons: a byte for each attribute, its :class:`Comparison`; empty if not all are
            known.
        """

    def open_metadata(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> Sequence[int]:
        """Records the metadata of a Variable; the arguments are those of ``open_node``."""

    def open_variable(self, position: int, variable: object, value: object) -> int:
        """Records the trace and the value of a Variable; returns the position of the value."""

    def open_node_state(self, position: int, state: object) -> None:
        """Records Flax's state of a module: whether it is set up, and its trace."""

    def open_hijax(self, position: int, treedef: PyTreeDef, leaves: Sequence[Any]) -> Sequence[int]:
        """Records the treedef and the leaves of a hijax Variable; returns the leaves' positions."""

    def open_static(
        self, position: int, value: object, kind: StaticKind, parts: Sequence[Any]
    ) -> Sequence[int]:
        """Records the parts of a static object; returns their positions."""

    def open_arguments(self, treedef: PyTreeDef) -> TreePositions:
        """Records all dynamic arguments; returns the positions of what they hold.

        ``treedef`` describes ``(args, kwargs)``, or the only argument if that is a graph object.
        """

    def open_tree(self, position: int, tree: object, treedef: PyTreeDef) -> TreePositions:
        """Records a pytree; returns the positions of what it holds."""
