"""Records what ``flatten`` reads, as a recipe for reading it again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ... import _compat
from ..static_equality import Content, Static
from ..static_parts import has_only_dict
from ..treedefs import PyTreeDef, is_leaf_treedef
from .recipe import Kind, Pins, Recipe, packed
from .walk import ids_of, open_tree

_Places = list[int]
_Step = tuple[Kind, int, Any, range]  # as in a recipe, and the positions of what it adds
NOWHERE = -1  # a position of what is not in the stream

# How an item of the stream is compared: by value, by identity, or not, or in another way.
_OPEN, _FROZEN, _IDENTITY = range(3)

_LATE = 1 << 20  # deeper than any graph


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
        self._steps: list[_Step] = []
        self._traces: list[int] = []
        self._mentions: dict[int, int] = {}  # by position: the index of the object
        self._fixed: set[int] = set()  # the indices of objects that must stay the same

    def open(
        self, kind: Kind, position: int, expected: Any, parts: Collection[Any], rules: bytes = b""
    ) -> range:
        """Adds what an item holds, with rules if they are known; returns the positions of it."""
        start = len(self._stream)
        self._stream += parts
        self._rules += rules or bytes(len(parts))
        added = range(start, len(self._stream))
        self._steps.append((kind, position, expected, added))
        return added

    def add_static(self, position: int, value: Any, static: Static) -> None:
        """Notes a static value that cannot change."""
        self._rules[position] = rule_of(static)
        if static.by_identity:
            self.identities[id(value)] = value

    def add_object(self, position: int, index: int) -> None:
        """Notes a reference to the object with an index."""
        if index == len(self.objects):
            self.objects.append(position)
        self._mentions[position] = index

    def fix(self, index: int, obj: Any) -> None:
        """Notes that an object is compared by identity."""
        self._fixed.add(index)
        self.identities[id(obj)] = obj

    def open_variable(self, position: int, variable: Any, value: Any) -> int:
        """Adds the trace and the value of a Variable; returns the position of the value."""
        trace = _compat.SLOTS["TRACE"].__get__(variable)
        self._traces += self.open(Kind.TRACE, position, None, (trace,), bytes([_FROZEN]))
        return self.open(Kind.VALUE, position, None, (value,))[0]

    def open_node_state(self, position: int, state: Any) -> None:
        """Adds Flax's state of a module, which is compared as an object: its trace is fixed."""
        self._rules[position] = _FROZEN
        self._traces.append(position)
        for kind in (Kind.INITIALIZING, Kind.IS_SETUP):
            flag = _compat.SLOTS[kind.name].__get__(state)
            self.open(kind, position, None, (flag,), bytes([_FROZEN]))

    def open_static(self, position: int, value: Any, content: Content) -> Sequence[int]:
        """Adds the parts of a static object; returns their positions."""
        kind, parts = type(value), content.parts
        if kind is dict and {str, int}.issuperset(map(type, value)):
            values = self.open(Kind.DICT, position, tuple(parts[::2]), parts[1::2])
            return [place for value in values for place in (NOWHERE, value)]
        if kind is list or kind is tuple:
            return self.open(Kind.SEQUENCE, position, len(parts), parts)
        if has_only_dict(value):
            return self.open(Kind.NODE, position, content.kind.names, parts)
        return self.open(Kind.STATIC, position, (content.kind, len(parts)), parts)

    def open_tree(self, position: int, tree: Any, treedef: PyTreeDef) -> tuple[_Places, _Places]:
        """Adds what a pytree holds: the positions of its leaves, and of the data of its nodes.

        If it is nowhere, it is the tree of all dynamic arguments.
        """
        leaves, aux = _Places(), _Places()
        if position != NOWHERE:
            self._open_tree(position, tree, treedef, leaves, aux)
            return leaves, aux
        own = [child for side in treedef.children() for child in side.children()]
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
            kind = Kind.DICT if type(tree) is dict else Kind.STATE
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
        if not _compat.are_current(self._stream[position] for position in self._traces):
            return None
        stream, place, steps = self._in_order()
        opened, leaves = place[[step[1] for step in steps]], place[self.leaves]
        types: list[type | None] = [None] * len(stream)
        for position in (*opened.tolist(), *leaves.tolist()):
            types[position] = type(stream[position])
        rules = np.frombuffer(self._rules, np.uint8)
        frozen, alone = place[rules == _FROZEN], place[rules == _IDENTITY]
        mentions = np.concatenate([alone, place[[*self._mentions]]])
        in_order = np.argsort(mentions)
        mentions = mentions[in_order]
        indices = np.array([-1] * len(alone) + [*self._mentions.values()], int)[in_order]
        _, first, number = np.unique(indices, return_index=True, return_inverse=True)
        recipe = Recipe(
            kinds=bytes([step[0] for step in steps]),
            opened=packed(opened),
            expected=tuple([step[2] for step in steps]),
            types=tuple(types),
            frozen=packed(frozen),
            mentions=packed(mentions),
            first=packed(np.where(np.isin(indices, [-1, *self._fixed]), -1, first[number])),
            traces=packed(place[self._traces]),
            leaves=packed(leaves),
            objects=packed(place[self.objects]),
            num_arguments=self._num_arguments,
        )
        pinned, known = (map(stream.__getitem__, own.tolist()) for own in (frozen, mentions))
        return recipe, Pins(tuple(pinned), ids_of(known))

    def _in_order(self) -> tuple[list[Any], np.ndarray[Any, Any], list[_Step]]:
        """The stream, where its old items are, and the steps: by depth and kind, which is faster.

        Reading the late kinds runs Python code, so they come last, with what depends on them.
        """
        depths, keys = [0] * len(self._stream), []
        for kind, position, _, added in self._steps:
            depth = depths[position] + 1
            if kind >= Kind.STATE:
                depth = max(depth, _LATE)
            depths[added.start : added.stop] = [depth] * len(added)
            keys.append((depth, kind))
        steps = [self._steps[i] for i in sorted(range(len(keys)), key=keys.__getitem__)]
        order = [*range(self._num_arguments)]
        for step in steps:
            order += step[3]
        return [self._stream[i] for i in order], np.argsort(order), steps
