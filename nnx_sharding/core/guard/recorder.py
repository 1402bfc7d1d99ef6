"""Turns what ``flatten`` reads into a recipe for reading it again.

``flatten`` reports each object that it opens. The recorder appends what the object holds to the
stream, and one step to the recipe: what was opened, at which position, and where its parts start.
At the end it knows of each item of the stream whether it was opened, compared, or only passed on.

Reading some objects runs Python code, in which anything may happen. Their steps, and those for what
they hold, are moved to the end, so that a walk is done with all others before any such code runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import _compat
from ..recording import NOWHERE, Comparison, comparison_of
from ..static_equality import Static
from ..static_parts import StaticKind, has_only_dict
from ..treedefs import PyTreeDef, is_leaf_treedef
from .recipe import Opcode, Recipe, Rule, Step, packed
from .walk import ids_of, open_tree

_OF_VARIABLE = ((Opcode.TRACE, Comparison.BY_VALUE), (Opcode.VALUE, Comparison.NONE))
_OF_HIJAX = ((Opcode.TREEDEF, Comparison.BY_VALUE),)
_OF_NODE_STATE = (
    (Opcode.INITIALIZING, Comparison.BY_VALUE),
    (Opcode.IS_SETUP, Comparison.BY_VALUE),
)
_trace_of = _compat.SLOTS["TRACE"].__get__


class WalkRecorder:
    """The stream of a walk over some arguments, and what is to be compared in it.

    Args:
      arguments: of the call, with which the stream starts.
      dynamic: the positions of those that are flattened.
      static: the positions of the static ones.
    """

    def __init__(self, arguments: Sequence[Any], dynamic: Sequence[int], static: Sequence[int]):
        # Positions in the stream: of the static arguments, of each array, and of the first
        # reference to each object.
        self.static = static
        self.leaves: list[int] = []
        self.objects: list[int] = []
        # The objects of which only the identity is known. If one is collected, the guard is void.
        self.identities: dict[int, Any] = {}
        self._dynamic = dynamic
        self._num_arguments = len(arguments)
        self._stream = [*arguments]
        self._comparisons = bytearray(len(arguments))  # by position
        # The fields of each step, without tuples: a model has three steps for each Variable.
        self._steps: list[int] = []
        self._expected: list[Any] = []  # by step: the names that it must find
        self._traces: list[int] = []  # positions of the traces of Variables and modules
        self._mentions: dict[int, int] = {}  # by position: the index of the object
        self._fixed: set[int] = set()  # the indices of objects that must stay the same

    def restarted(self) -> WalkRecorder:
        """Returns a recorder of another walk over the same arguments."""
        return WalkRecorder(self._stream[: self._num_arguments], self._dynamic, self.static)

    def add_static(self, position: int, value: Any, static: Static) -> None:
        """Notes a static value that cannot change."""
        self._comparisons[position] = comparison_of(static)
        if static.by_identity:
            self.identities[_compat.identity(value)] = value

    def add_object(self, position: int, index: int) -> None:
        """Notes a reference to the object with an index."""
        if index == len(self.objects):
            self.objects.append(position)
        self._mentions[position] = index

    def fix(self, index: int, obj: Any) -> None:
        """Notes that an object has to stay the same one."""
        self._fixed.add(index)
        self.identities[_compat.identity(obj)] = obj

    def open_node(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> range:
        """Notes the attributes of a module, and how each is compared, if all are known."""
        return self._open(Opcode.NODE, position, names, values, comparisons)

    def open_metadata(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> range:
        """Notes the metadata of a Variable in the same way."""
        return self._open(Opcode.METADATA, position, names, values, comparisons)

    def open_variable(self, position: int, variable: Any, value: Any) -> int:
        """Notes the trace and the value of a Variable; returns the position of the value."""
        trace = self._open_slots(_OF_VARIABLE, position, (_trace_of(variable), value))
        self._traces.append(trace)
        return trace + 1

    def open_node_state(self, position: int, state: Any) -> None:
        """Notes Flax's state of a module: whether it is set up, and its trace."""
        self._comparisons[position] = Comparison.BY_VALUE  # an object of its trace
        self._traces.append(position)
        self._open_slots(_OF_NODE_STATE, position, _compat.node_flags(state))

    def open_hijax(self, position: int, treedef: PyTreeDef, leaves: Sequence[Any]) -> range:
        """Notes what a hijax Variable has; returns the positions of its leaves."""
        self._open_slots(_OF_HIJAX, position, (treedef,))
        return self._open(Opcode.LEAVES, position, len(leaves), leaves)

    def open_static(
        self, position: int, value: Any, described: StaticKind, parts: Sequence[Any]
    ) -> Sequence[int]:
        """Notes the parts of a static object; returns their positions."""
        own = type(value)
        if own is dict and {str, int}.issuperset(map(type, value)):
            # Its keys, every other part, cannot change unnoticed.
            values = self._open(Opcode.DICT, position, tuple(parts[::2]), parts[1::2])
            return [place for value in values for place in (NOWHERE, value)]
        names = described.names
        num_items = len(parts) - len(names)
        items, attributes = parts[:num_items], parts[num_items:]
        if own is list or own is tuple:
            return self._open(Opcode.SEQUENCE, position, num_items, items)
        if has_only_dict(own):
            return self._open(Opcode.NODE, position, names, attributes)
        if has_only_dict(own, tuple) and own.__iter__ is tuple.__iter__:
            places = self._open(Opcode.NODE, position, names, attributes)
            return [*self._open(Opcode.SEQUENCE, position, num_items, items), *places]
        return self._open(Opcode.STATIC, position, (described, len(parts)), parts)

    def open_tree(
        self, position: int, tree: Any, treedef: PyTreeDef
    ) -> tuple[list[int], list[int]]:
        """Notes what a pytree holds; returns the positions of its leaves and of its node data.

        A tree that is nowhere is that of all dynamic arguments, or the only one, a graph object.
        """
        leaves, aux = list[int](), list[int]()
        if position != NOWHERE:
            self._open_tree(position, tree, treedef, leaves, aux)
            return leaves, aux
        # JAX's own tree has positional and keyword arguments.
        children = [child for side in treedef.children() for child in side.children()]
        children = [treedef] if is_leaf_treedef(treedef) else children
        for place, child in zip(self._dynamic, children, strict=True):
            self._open_tree(place, self._stream[place], child, leaves, aux)
        return leaves, aux

    def _open_tree(
        self, position: int, tree: Any, treedef: PyTreeDef, leaves: list[int], aux: list[int]
    ) -> None:
        if is_leaf_treedef(treedef):
            leaves.append(position)
            return
        if tree is None:
            self._comparisons[position] = Comparison.BY_VALUE
            return
        items, children = _compat.own_items(tree), treedef.children()
        if items is None:  # a pytree of a type that only JAX can open
            added = self._open(Opcode.TREE, position, treedef, open_tree(tree)[0])
            leaves += added[: treedef.num_leaves]
            aux += added[treedef.num_leaves :]
        elif isinstance(items, dict):
            opcode = Opcode.DICT if tree is items else Opcode.STATE
            added = self._open(opcode, position, (*items,), items.values())
            places = dict(zip(items, added, strict=True))
            for key, child in zip(sorted(items), children, strict=True):  # JAX sorts the keys
                self._open_tree(places[key], items[key], child, leaves, aux)
        else:
            added = self._open(Opcode.SEQUENCE, position, len(items), items)
            for index, item, child in zip(added, items, children, strict=True):
                self._open_tree(index, item, child, leaves, aux)

    def _open(
        self,
        opcode: Opcode,
        position: int,
        expected: Any,
        parts: Collection[Any],
        comparisons: bytes = b"",
    ) -> range:
        """Adds a step and what it appends to the stream; returns the positions of that."""
        start = len(self._stream)
        self._stream += parts
        self._comparisons += comparisons or bytes(len(parts))
        self._steps += opcode, position, start
        self._expected.append(expected)
        return range(start, len(self._stream))

    def _open_slots(
        self,
        slots: tuple[tuple[Opcode, Comparison], ...],
        position: int,
        values: Sequence[Any],
    ) -> int:
        """Adds a step for each of some slots; returns the position of the first value."""
        start = end = len(self._stream)
        self._stream += values
        for opcode, comparison in slots:
            self._steps += opcode, position, end
            self._comparisons.append(comparison)
            self._expected.append(None)
            end += 1
        return start

    def recipe(self) -> Recipe | None:
        """Returns the path through the graph and what is there; None for one of another trace."""
        if not _compat.are_current(self._stream[position] for position in self._traces):
            return None
        order = self._in_order()
        place, stream, size = order.place, order.stream, len(order.stream)
        opened, leaves = order.steps[:, 1], place[self.leaves]
        types: list[type | None] = [None] * size
        for position in (*opened.tolist(), *leaves.tolist()):
            types[position] = type(stream[position])
        comparisons = np.frombuffer(self._comparisons, np.uint8)
        frozen = place[comparisons == Comparison.BY_VALUE]
        # A mention is an object of the structure, with its index, or a static without one (-1).
        alone = place[comparisons == Comparison.BY_IDENTITY]
        mentions = np.concatenate([alone, place[[*self._mentions]]])
        indices = np.array([-1] * len(alone) + [*self._mentions.values()], int)
        by_position = np.argsort(mentions)
        mentions, indices = mentions[by_position], indices[by_position]
        _, first, number = np.unique(indices, return_index=True, return_inverse=True)
        is_fixed = np.isin(indices, [-1, *self._fixed])
        traces = place[self._traces]
        rules, pins = np.zeros((2, size), int)
        rules[[kind is not None for kind in types]] |= Rule.TYPED
        rules[traces] |= Rule.OF_TRACE
        for rule, positions in ((Rule.FROZEN, frozen), (Rule.MENTION, mentions)):
            rules[positions] |= rule
            pins[positions] = np.arange(len(positions))
        return Recipe(
            steps=packed(order.steps),
            expected=tuple(order.expected),
            types=tuple(types),
            rules=rules.astype(np.uint8).tobytes(),
            pins=packed(pins),
            frozen=packed(frozen),
            statics=tuple(stream[position] for position in frozen.tolist()),
            mentions=packed(mentions),
            ids=ids_of(stream[position] for position in mentions.tolist()),
            first=packed(np.where(is_fixed, -1, first[number])),
            traces=packed(traces),
            leaves=packed(leaves),
            objects=packed(place[self.objects]),
            num_arguments=self._num_arguments,
        )

    def _in_order(self) -> _Order:
        """Moves the steps that run Python code, and those that depend on them, to the end."""
        stream, size = self._stream, len(self._stream)
        steps = np.array(self._steps, np.int32).reshape(-1, len(Step._fields))  # (steps, fields)
        opcodes, opened, starts = steps.T
        late_steps = opcodes >= Opcode.TREE
        if not late_steps.any():
            return _Order(steps, self._expected, np.arange(size), stream)
        ends = np.append(starts[1:], size)
        is_late = np.zeros(size, bool)  # by position
        for i, (position, start, end) in enumerate(zip(opened, starts, ends, strict=True)):
            late_steps[i] |= is_late[position]
            is_late[start:end] = late_steps[i]
        old_position = np.argsort(is_late, kind="stable")  # by new position
        old_step = np.argsort(late_steps, kind="stable")  # by new step
        place = np.argsort(old_position)  # its inverse
        counts = (ends - starts)[old_step]
        starts = self._num_arguments + np.cumsum(counts) - counts
        return _Order(
            np.column_stack([opcodes[old_step], place[opened[old_step]], starts]),
            [self._expected[i] for i in old_step.tolist()],
            place,
            [stream[i] for i in old_position.tolist()],
        )


class _Order(NamedTuple):
    """The steps in the order of a walk."""

    steps: np.ndarray[Any, Any]  # (steps, fields of a Step)
    expected: list[Any]  # by step
    place: np.ndarray[Any, Any]  # where each item of the recorded stream is in the new one
    stream: list[Any]
