"""Turns what ``flatten`` reads into a recipe for reading it again.

``flatten`` reports each object that it opens (``recording.py``). The recorder appends what the
object holds to the *stream*, the list of all that was read, and adds a *step* to the recipe: what
was opened, at which position of the stream, and where its parts start. At the end it knows how each
item of the stream is compared: a static by its value, an object by its identity (its *mentions*,
one for each link to it), what was opened by its type, and the rest not at all.

At the end, steps that run Python code are moved behind all others (``walk_order.py``).

Numbers are *positions* of items in the stream, or *indices* of objects, in the order in which
``flatten`` met them. Other words:

    kind        of a static object, all but its parts: its class, and the names of its attributes
    treedef     JAX's description of the containers in a pytree; a *leaf* is what is in none of them
    node data   what a container has besides children and plain keys, as its class tells JAX
    pin         what a walk must find at a position: the value of a static, or the id of an object
    Opcode      how a step opens an item: NODE reads a ``__dict__``, DICT and STATE a mapping,
                SEQUENCE a tuple or list, all without Python code; TREE and STATIC run Python code
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import _compat
from ..recording import UNRECORDED, Comparison, TreePositions, comparison_of
from ..static_equality import Static
from ..static_parts import StaticKind, has_only_dict
from ..treedefs import PyTreeDef, is_leaf_treedef
from .recipe import Opcode, Recipe, Rule, pack_int32
from .walk import ids_of, open_tree
from .walk_order import IntArray, in_walk_order


class _Field(NamedTuple):
    """A field of one of Flax's objects that is read by a step of its own."""

    opcode: Opcode
    comparison: Comparison  # of its value


_VARIABLE_FIELDS = (
    _Field(Opcode.TRACE, Comparison.BY_VALUE),
    _Field(Opcode.VALUE, Comparison.NONE),
)
_HIJAX_FIELDS = (_Field(Opcode.TREEDEF, Comparison.BY_VALUE),)
_NODE_STATE_FIELDS = (
    _Field(Opcode.INITIALIZING, Comparison.BY_VALUE),
    _Field(Opcode.IS_SETUP, Comparison.BY_VALUE),
)
# In the place of the number of an object's first mention: the object must be the recorded one.
_PINNED = -1
_trace_of = _compat.SLOTS["TRACE"].__get__


class WalkRecorder:
    """Records one walk over the arguments of a call: a ``ReadRecorder`` that makes a recipe.

    Args:
      arguments: of the call, positional and by keyword; the stream starts with them.
      dynamic: the positions of those that are flattened.
      static: the positions of the static ones.

    Attributes:
      identities: the objects that are only compared by identity.

    Its private attributes:

        _stream        all items that were read, by position
        _comparisons   how each of them is compared (``Comparison``), by position
        _steps         the fields of all steps (``Step``), one step after the other
        _expected      for each step what it must find, such as names or a length
        _mentions      for the position of each mention, the index of the object
        _traces        the positions of the traces that Variables and modules belong to
        _pinned        the indices of objects that have to stay the same
    """

    def __init__(self, arguments: Sequence[object], dynamic: Sequence[int], static: Sequence[int]):
        """Starts the stream with the arguments of a call."""
        self.static_positions = static
        self.leaf_positions: list[int] = []  # where each array is, by slot
        self.object_positions: list[int] = []  # where each object was met first, by index
        # By id. If one of them is collected, another may get its id, and the guard is void.
        self.identities: dict[int, Any] = {}
        self._dynamic = dynamic
        self._num_arguments = len(arguments)
        self._stream: list[Any] = [*arguments]
        self._comparisons = bytearray(len(arguments))  # zeros: ``Comparison.NONE``, until reported
        # Three numbers for each step, in one list: a tuple for each would take longer to make.
        self._steps: list[int] = []
        self._expected: list[Any] = []
        self._traces: list[int] = []
        self._mentions: dict[int, int] = {}
        self._pinned: set[int] = set()

    def restarted(self) -> WalkRecorder:
        """Returns a recorder of another walk over the same arguments."""
        return WalkRecorder(
            self._stream[: self._num_arguments], self._dynamic, self.static_positions
        )

    def add_static(self, position: int, value: object, static: Static) -> None:
        """Records a static value that cannot change."""
        self._comparisons[position] = comparison_of(static)
        if static.by_identity:
            self.identities[_compat.identity(value)] = value

    def add_object(self, position: int, index: int) -> None:
        """Records a link to the object with an index."""
        if index == len(self.object_positions):
            self.object_positions.append(position)
        self._mentions[position] = index

    def pin_object(self, index: int, obj: object) -> None:
        """Records that an object has to stay the same one."""
        self._pinned.add(index)
        self.identities[_compat.identity(obj)] = obj

    def open_node(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> range:
        """Records the attributes of a module, and how each is compared, if all are known."""
        return self._open(Opcode.NODE, position, names, values, comparisons)

    def open_metadata(
        self, position: int, names: Collection[str], values: Collection[Any], comparisons: bytes
    ) -> range:
        """Records the metadata of a Variable in the same way."""
        return self._open(Opcode.METADATA, position, names, values, comparisons)

    def open_variable(self, position: int, variable: object, value: object) -> int:
        """Records the trace and the value of a Variable; returns the position of the value."""
        opened = self._open_fields(_VARIABLE_FIELDS, position, (_trace_of(variable), value))
        self._traces.append(opened[0])
        return opened[1]

    def open_node_state(self, position: int, state: object) -> None:
        """Records Flax's state of a module: whether it is set up, and its trace."""
        self._comparisons[position] = Comparison.BY_VALUE  # it is an object of its trace
        self._traces.append(position)
        self._open_fields(_NODE_STATE_FIELDS, position, _compat.node_flags(state))

    def open_hijax(self, position: int, treedef: PyTreeDef, leaves: Sequence[Any]) -> range:
        """Records what a hijax Variable has; returns the positions of its leaves."""
        self._open_fields(_HIJAX_FIELDS, position, (treedef,))
        return self._open(Opcode.LEAVES, position, len(leaves), leaves)

    def open_static(
        self, position: int, value: object, kind: StaticKind, parts: Sequence[Any]
    ) -> Sequence[int]:
        """Records the parts of a static object; returns their positions.

        Objects of common classes are opened by steps that run no Python code, others by
        ``Opcode.STATIC``.

        Args:
          position: the position of the object.
          value: the object.
          kind: its class, and the names of its attributes.
          parts: its items, then the values of its attributes; of a dict keys and values in turns.
        """
        if type(value) is dict and {str, int}.issuperset(map(type, value)):
            # Only the values are read again. The step compares the keys, which is enough if they
            # are of exactly these types: they cannot change, and it does not matter which of two
            # equal ones a dict has.
            keys, values = tuple(parts[::2]), parts[1::2]
            positions = [UNRECORDED] * len(parts)
            positions[1::2] = self._open(Opcode.DICT, position, keys, values)
            return positions
        cls: Any = kind.type
        num_items = len(parts) - len(kind.names)
        items, attributes = parts[:num_items], parts[num_items:]
        if cls is list or cls is tuple:
            return self._open(Opcode.SEQUENCE, position, num_items, items)
        if has_only_dict(cls):  # an object of a plain class, without slots
            return self._open(Opcode.NODE, position, kind.names, attributes)
        # A subclass of tuple, such as a named tuple with attributes, takes two steps: one reads its
        # ``__dict__``, one its items, which are those of the tuple unless it iterates otherwise.
        if has_only_dict(cls, tuple) and cls.__iter__ is tuple.__iter__:
            attribute_positions = self._open(Opcode.NODE, position, kind.names, attributes)
            item_positions = self._open(Opcode.SEQUENCE, position, num_items, items)
            return [*item_positions, *attribute_positions]
        return self._open(Opcode.STATIC, position, (kind, len(parts)), parts)

    def open_arguments(self, treedef: PyTreeDef) -> TreePositions:
        """Records all dynamic arguments; returns the positions of their leaves and node data.

        ``treedef`` is that of ``(args, kwargs)``, or that of the only argument, a graph object.
        """
        if is_leaf_treedef(treedef):  # a graph object, which to JAX has no content
            treedefs = [treedef]
        else:
            by_position, by_keyword = treedef.children()
            treedefs = [*by_position.children(), *by_keyword.children()]  # one for each argument
        trees = [self._stream[position] for position in self._dynamic]
        return self._open_trees(self._dynamic, trees, treedefs)

    def open_tree(self, position: int, tree: Any, treedef: PyTreeDef) -> TreePositions:
        """Records a pytree, level by level; returns the positions of its leaves and node data.

        Args:
          position: the position of the pytree.
          tree: the pytree; a graph object is a leaf.
          treedef: describes it.
        """
        if is_leaf_treedef(treedef):  # ``tree`` itself is the leaf
            return TreePositions([position], [])
        if tree is None:  # a pytree without leaves
            self._comparisons[position] = Comparison.BY_VALUE
            return TreePositions([], [])
        # What holds the children: a tuple, list or dict, which is ``tree`` itself, or the dict that
        # an `nnx.State` wraps. None if only JAX can open it, which takes one step for all levels.
        items = _compat.own_items(tree)
        if items is None:
            leaves_and_data, _ = open_tree(tree)
            opened = self._open(Opcode.TREE, position, treedef, leaves_and_data)
            return TreePositions(opened[: treedef.num_leaves], opened[treedef.num_leaves :])
        if not isinstance(items, dict):
            opened = self._open(Opcode.SEQUENCE, position, len(items), items)
            return self._open_trees(opened, items, treedef.children())
        opcode = Opcode.DICT if tree is items else Opcode.STATE
        opened = self._open(opcode, position, (*items,), items.values())
        # A guard reads a dict in its own order. JAX has the children sorted by key in the treedef;
        # ``own_items`` has found that `sorted` gives the same order.
        position_of = dict(zip(items, opened, strict=True))
        keys = sorted(items)
        positions = [position_of[key] for key in keys]
        return self._open_trees(positions, [items[key] for key in keys], treedef.children())

    def _open_trees(
        self, positions: Iterable[int], trees: Iterable[Any], treedefs: Iterable[PyTreeDef]
    ) -> TreePositions:
        """Records several pytrees; returns the positions of the leaves and node data of all.

        Args:
          positions: the position of each.
          trees: the pytrees.
          treedefs: describe them.
        """
        leaves, aux = list[int](), list[int]()  # aux: node data
        for position, tree, treedef in zip(positions, trees, treedefs, strict=True):
            opened = self.open_tree(position, tree, treedef)
            leaves += opened.leaves
            aux += opened.aux
        return TreePositions(leaves, aux)

    def _open(
        self,
        opcode: Opcode,
        position: int,
        expected: object,
        parts: Collection[Any],
        comparisons: bytes = b"",
    ) -> range:
        """Adds a step that appends parts to the stream; returns their positions.

        Args:
          opcode: how a walk opens the item again.
          position: the position of the item that was opened.
          expected: what a walk compares first: names, keys, a length or a treedef.
          parts: what the item holds.
          comparisons: how each part is compared. If it is empty, each part is reported later on its
            own, and is compared by no rule until then.
        """
        start = len(self._stream)
        self._stream += parts
        not_compared = bytes(len(parts))  # a zero for each: ``Comparison.NONE``
        self._comparisons += comparisons or not_compared
        self._steps += opcode, position, start  # the fields of one `Step`
        self._expected.append(expected)
        return range(start, len(self._stream))

    def _open_fields(
        self, fields: Sequence[_Field], position: int, values: Collection[Any]
    ) -> range:
        """Adds a step for each field of one of Flax's objects; returns where their values are.

        Args:
          fields: the fields: the opcode that reads each, and how its value is compared.
          position: the position of the object.
          values: the values of the fields, which are appended to the stream.
        """
        start = len(self._stream)
        self._stream += values
        opened = range(start, len(self._stream))
        for field, value_position in zip(fields, opened, strict=True):
            self._steps += field.opcode, position, value_position  # the fields of one `Step`
            self._comparisons.append(field.comparison)
            self._expected.append(None)  # a field has a value, and no names to compare
        return opened

    def recipe(self) -> Recipe | None:
        """Returns the recipe of the walk: how to read the graph again, and what must be the same.

        None if the graph belongs to another trace.
        """
        if not _compat.are_current(self._stream[position] for position in self._traces):
            return None
        order = in_walk_order(self._stream, self._steps, self._expected, self._num_arguments)
        # From here on, positions are those in the order of a walk: ``moved[recorded position]``.
        stream, moved = order.stream, order.new_position
        comparisons = np.frombuffer(self._comparisons, np.uint8)  # by recorded position

        # The positions of items that are compared in one way. With a pin: the value of a static, or
        # the id of an object. By type: what a step opens, and arrays.
        frozen = moved[comparisons == Comparison.BY_VALUE]
        mentions, first = self._ordered_mentions(moved, comparisons)
        leaves, traces = moved[self.leaf_positions], moved[self._traces]
        _opcodes, opened, _starts = order.steps.T  # one of each for each step
        typed = np.concatenate([opened, leaves])

        # The same by position, as a walk needs it when it reads an item.
        types: list[type | None] = [None] * len(stream)
        for position in typed.tolist():
            types[position] = type(stream[position])
        rules = np.zeros(len(stream), int)  # a `Rule`: several bits, or 0 for what is not compared
        rules[typed] |= Rule.TYPED
        rules[traces] |= Rule.OF_TRACE
        rules[frozen] |= Rule.FROZEN
        rules[mentions] |= Rule.MENTION
        pins = np.zeros(len(stream), int)  # the number of its pin, in ``statics`` or in ``ids``
        pins[frozen] = np.arange(len(frozen))
        pins[mentions] = np.arange(len(mentions))
        return Recipe(
            steps=pack_int32(order.steps),
            expected=tuple(order.expected),
            types=tuple(types),
            rules=rules.astype(np.uint8).tobytes(),
            pins=pack_int32(pins),
            frozen=pack_int32(frozen),
            statics=tuple(stream[position] for position in frozen.tolist()),
            mentions=pack_int32(mentions),
            # Not the objects themselves, which a guard must not keep alive.
            ids=ids_of(stream[position] for position in mentions.tolist()),
            first=pack_int32(first),
            traces=pack_int32(traces),
            leaves=pack_int32(leaves),
            objects=pack_int32(moved[self.object_positions]),
            num_arguments=self._num_arguments,
        )

    def _ordered_mentions(
        self, new_position: IntArray, comparisons: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Returns the positions of mentions, ascending, and for each the object's first mention.

        The latter is a number among the mentions, by which a walk checks that another model shares
        objects in the same places. With mentions of a, b, a at 2, 5, 7, the result is
        ``[2, 5, 7], [0, 1, 0]``. For an object that must stay the same it is `_PINNED`: the walk
        compares its id.

        Args:
          new_position: the position of each item in the order of a walk, by its recorded position.
          comparisons: how each item is compared, by its recorded position.
        """
        # Besides the links to objects, statics that are compared by identity. These have no index,
        # and must stay the same.
        statics = new_position[comparisons == Comparison.BY_IDENTITY]
        links = new_position[[*self._mentions]]
        positions = np.concatenate([statics, links])
        # The index of the object at each position.
        objects: list[int | None] = [*[None] * len(statics), *self._mentions.values()]
        ascending = np.argsort(positions)
        first_of_object: dict[int, int] = {}
        first_mentions = []
        for number, i in enumerate(ascending.tolist()):
            index = objects[i]
            if index is None or index in self._pinned:
                first_mentions.append(_PINNED)
            else:
                first_mentions.append(first_of_object.setdefault(index, number))
        return positions[ascending], np.array(first_mentions, int)
