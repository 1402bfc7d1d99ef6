"""Records what ``flatten`` reads, as a recipe for reading it again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ... import _compat
from ..static_equality import Static
from ..static_parts import StaticKind, has_only_dict
from ..treedefs import PyTreeDef, is_leaf_treedef
from .recipe import Kind, Pins, Recipe, Rule, packed
from .walk import ids_of, open_tree

_Places = list[int]
NOWHERE = -1  # a position of what is not in the stream

# How an item of the stream is compared: by value, by identity, or not, or in another way.
_OPEN, _FROZEN, _IDENTITY = range(3)
_TRACE_AND_VALUE = ((Kind.TRACE, _FROZEN), (Kind.VALUE, _OPEN))
_TREEDEF = ((Kind.TREEDEF, _FROZEN),)
_FLAGS = ((Kind.INITIALIZING, _FROZEN), (Kind.IS_SETUP, _FROZEN))
_trace_of = _compat.SLOTS["TRACE"].__get__


def rule_of(child: Any) -> int:
    """The rule for what is described by a child."""
    return (_IDENTITY if child.by_identity else _FROZEN) if type(child) is Static else _OPEN


class WalkRecorder:
    """The stream of a walk over some arguments, and what is to be compared in it.

    Args:
      arguments: of the call, with which the stream starts.
      dynamic: the positions of those that are flattened.
      static: the positions of the static ones.
    """

    def __init__(self, arguments: Sequence[Any], dynamic: Sequence[int], static: Sequence[int]):
        self.static = static
        self.leaves: list[int] = []  # by slot
        self.objects: list[int] = []  # by index
        # The objects of which only the identity is known. If one is collected, the guard is void.
        self.identities: dict[int, Any] = {}
        self._dynamic = dynamic
        self._num_arguments = len(arguments)
        self._stream = [*arguments]
        self._rules = bytearray(len(arguments))  # by position
        # Of each step: its kind, the position that it opens, and that of the first part.
        self._steps: list[int] = []
        self._expected: list[Any] = []  # by step
        self._traces: list[int] = []
        self._mentions: dict[int, int] = {}  # by position: the index of the object
        self._fixed: set[int] = set()  # the indices of objects that must stay the same

    def anew(self) -> WalkRecorder:
        """A recorder of another walk over the same arguments."""
        return WalkRecorder(self._stream[: self._num_arguments], self._dynamic, self.static)

    def open(
        self, kind: Kind, position: int, expected: Any, parts: Collection[Any], rules: bytes = b""
    ) -> range:
        """Adds what an item holds, with rules if they are known; returns the positions of it."""
        start = len(self._stream)
        self._stream += parts
        self._rules += rules or bytes(len(parts))
        self._steps += kind, position, start
        self._expected.append(expected)
        return range(start, len(self._stream))

    def add_static(self, position: int, value: Any, static: Static) -> None:
        """Notes a static value that cannot change."""
        self._rules[position] = rule_of(static)
        if static.by_identity:
            self.identities[_compat.identity(value)] = value

    def add_object(self, position: int, index: int) -> None:
        """Notes a reference to the object with an index."""
        if index == len(self.objects):
            self.objects.append(position)
        self._mentions[position] = index

    def fix(self, index: int, obj: Any) -> None:
        """Notes that an object is compared by identity."""
        self._fixed.add(index)
        self.identities[_compat.identity(obj)] = obj

    def open_variable(self, position: int, variable: Any, value: Any) -> int:
        """Adds the trace and the value of a Variable; returns the position of the value."""
        trace = self._open_slots(_TRACE_AND_VALUE, position, (_trace_of(variable), value))
        self._traces.append(trace)
        return trace + 1

    def _open_slots(
        self, kinds: tuple[tuple[Kind, int], ...], position: int, values: Sequence[Any]
    ) -> int:
        """Adds the content of slots, each with its rule; returns the position of the first."""
        start = end = len(self._stream)
        self._stream += values
        for kind, rule in kinds:
            self._steps += kind, position, end
            self._rules.append(rule)
            self._expected.append(None)
            end += 1
        return start

    def open_node_state(self, position: int, state: Any) -> None:
        """Adds Flax's state of a module, which is compared as an object: its trace is fixed."""
        self._rules[position] = _FROZEN
        self._traces.append(position)
        self._open_slots(_FLAGS, position, _compat.node_flags(state))

    def open_hijax(self, position: int, treedef: Any, leaves: Sequence[Any]) -> range:
        """Adds what a hijax Variable has; returns the positions of its leaves."""
        self._open_slots(_TREEDEF, position, (treedef,))
        return self.open(Kind.LEAVES, position, len(leaves), leaves)

    def open_static(
        self, position: int, value: Any, described: StaticKind, parts: Sequence[Any]
    ) -> Sequence[int]:
        """Adds the parts of a static object; returns their positions."""
        kind = type(value)
        if kind is dict and {str, int}.issuperset(map(type, value)):
            values = self.open(Kind.DICT, position, tuple(parts[::2]), parts[1::2])
            return [place for value in values for place in (NOWHERE, value)]
        names = described.names
        num_items = len(parts) - len(names)
        items, attributes = parts[:num_items], parts[num_items:]
        if kind is list or kind is tuple:
            return self.open(Kind.SEQUENCE, position, num_items, items)
        if has_only_dict(kind):
            return self.open(Kind.NODE, position, names, attributes)
        if has_only_dict(kind, tuple) and kind.__iter__ is tuple.__iter__:
            own = self.open(Kind.NODE, position, names, attributes)
            return [*self.open(Kind.SEQUENCE, position, num_items, items), *own]
        return self.open(Kind.STATIC, position, (described, len(parts)), parts)

    def open_tree(self, position: int, tree: Any, treedef: PyTreeDef) -> tuple[_Places, _Places]:
        """Adds what a pytree holds: the positions of its leaves, and of the data of its nodes.

        If it is nowhere, it is the tree of all dynamic arguments, or the only one, a graph object.
        """
        leaves, aux = _Places(), _Places()
        if position != NOWHERE:
            self._open_tree(position, tree, treedef, leaves, aux)
            return leaves, aux
        own = [child for side in treedef.children() for child in side.children()]
        own = [treedef] if is_leaf_treedef(treedef) else own
        for place, child in zip(self._dynamic, own, strict=True):
            self._open_tree(place, self._stream[place], child, leaves, aux)
        return leaves, aux

    def _open_tree(
        self, position: int, tree: Any, treedef: PyTreeDef, leaves: _Places, aux: _Places
    ) -> None:
        if is_leaf_treedef(treedef):
            leaves.append(position)
            return
        if tree is None:
            self._rules[position] = _FROZEN
            return
        items, children = _compat.own_items(tree), treedef.children()
        if items is None:  # a pytree of a type that only JAX can open
            added = self.open(Kind.TREE, position, treedef, open_tree(tree)[0])
            leaves += added[: treedef.num_leaves]
            aux += added[treedef.num_leaves :]
        elif isinstance(items, dict):
            kind = Kind.DICT if tree is items else Kind.STATE
            added = self.open(kind, position, (*items,), items.values())
            place = dict(zip(items, added, strict=True))
            for key, child in zip(sorted(items), children, strict=True):
                self._open_tree(place[key], items[key], child, leaves, aux)
        else:
            added = self.open(Kind.SEQUENCE, position, len(items), items)
            for pair in zip(added, items, children, strict=True):
                self._open_tree(*pair, leaves, aux)

    def recipe_and_pins(self) -> tuple[Recipe, Pins] | None:
        """The path through the graph, and what is there; None for a graph of another trace."""
        stream, size = self._stream, len(self._stream)
        if not _compat.are_current(stream[position] for position in self._traces):
            return None
        steps, expected, place, stream = self._in_order()
        opened, leaves = steps[:, 1], place[self.leaves]
        types: list[Any] = [None] * size
        for position in (*opened.tolist(), *leaves.tolist()):
            types[position] = type(stream[position])
        own = np.frombuffer(self._rules, np.uint8)
        frozen, alone = place[own == _FROZEN], place[own == _IDENTITY]
        mentions = np.concatenate([alone, place[[*self._mentions]]])
        in_order = np.argsort(mentions)
        mentions = mentions[in_order]
        indices = np.array([-1] * len(alone) + [*self._mentions.values()], int)[in_order]
        _, first, number = np.unique(indices, return_index=True, return_inverse=True)
        traces = place[self._traces]
        rules, pins = np.zeros((2, size), int)
        rules[[kind is not None for kind in types]] |= Rule.TYPED
        rules[traces] |= Rule.OF_TRACE
        for rule, positions in ((Rule.FROZEN, frozen), (Rule.MENTION, mentions)):
            rules[positions] |= rule
            pins[positions] = np.arange(len(positions))
        recipe = Recipe(
            steps=packed(steps),
            expected=tuple(expected),
            types=tuple(types),
            rules=rules.astype(np.uint8).tobytes(),
            pins=packed(pins),
            frozen=packed(frozen),
            mentions=packed(mentions),
            first=packed(np.where(np.isin(indices, [-1, *self._fixed]), -1, first[number])),
            traces=packed(traces),
            leaves=packed(leaves),
            objects=packed(place[self.objects]),
            num_arguments=self._num_arguments,
        )
        pinned, known = (map(stream.__getitem__, own.tolist()) for own in (frozen, mentions))
        return recipe, Pins(tuple(pinned), ids_of(known))

    def _in_order(self) -> tuple[np.ndarray[Any, Any], list[Any], np.ndarray[Any, Any], list[Any]]:
        """The steps, what they expect, the place of each item of the stream, and the stream.

        Reading the late kinds runs Python code, so they come last, with what depends on them.
        """
        stream, size = self._stream, len(self._stream)
        steps = np.array(self._steps, np.int32).reshape(-1, 3)
        kinds, opened, starts = steps.T
        if not (kinds >= Kind.TREE).any():
            return steps, self._expected, np.arange(size), stream
        ends = np.append(starts[1:], size)
        is_late, late_steps = np.zeros(size, bool), kinds >= Kind.TREE
        for i, (position, start, end) in enumerate(zip(opened, starts, ends, strict=True)):
            late_steps[i] |= is_late[position]
            is_late[start:end] = late_steps[i]
        order, step_order = (np.argsort(x, kind="stable") for x in (is_late, late_steps))
        place, counts = np.argsort(order), (ends - starts)[step_order]
        starts = self._num_arguments + np.cumsum(counts) - counts
        steps = np.column_stack([kinds[step_order], place[opened[step_order]], starts])
        expected = [self._expected[i] for i in step_order.tolist()]
        return steps, expected, place, [stream[i] for i in order.tolist()]
