"""Turns what ``flatten`` reads into a recipe for reading it again.

``flatten`` reports each object that it opens (``recording.py``). The recorder appends the object's
contents to the *stream*, the list of all that was read, and adds a *step* to the recipe: how the
object was opened, at which position of the stream it is, and where its parts start. Once
``flatten`` is done, the recorder knows how a walk compares each item of the stream: a static by its
value, each link to an object (a *mention*) by the id of the object, an item that a step opens by
its type, and any other item not at all. ``recipe`` then moves steps that run Python code behind all
other steps (``walk_order.py``).

Numbers are *positions* of items in the stream, or *indices* of objects, in the order in which
``flatten`` met them. Other words:

    kind        the class of a static object, and the names of its attributes
    treedef     JAX's description of the containers in a pytree; a *leaf* is what the innermost
                containers hold
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

    opcode: Opcode  # the opcode of the step
    comparison: Comparison  # how a walk compares the field's value


_VARIABLE_FIELDS = (
    _Field(Opcode.TRACE, Comparison.BY_VALUE),
    _Field(Opcode.VALUE, Comparison.NONE),
)
_HIJAX_FIELDS = (_Field(Opcode.TREEDEF, Comparison.BY_VALUE),)
_NODE_STATE_FIELDS = (
    _Field(Opcode.INITIALIZING, Comparison.BY_VALUE),
    _Field(Opcode.IS_SETUP, Comparison.BY_VALUE),
)
# Takes the place of the number of an object's first mention if the object must be the recorded one.
_PINNED = -1
_trace_of = _compat.SLOTS["TRACE"].__get__


class WalkRecorder:
    """Records one walk over the arguments of a call, and makes a recipe of it.

    Args:
      arguments: the arguments of the call, positional and by keyword; the stream starts with them.
      dynamic: the positions of the arguments that are flattened.
      static: the positions of the static arguments.

    Attributes:
      identities: the objects that are only compared by identity, by id.
      static_positions: the positions of the static arguments.
      leaf_positions: the position of each array, by slot.
      object_positions: the position of the first mention of each object, by index.

    In all methods, ``position`` is that of the item that is recorded or opened. ``flatten`` has it
    from the method that opened the item's owner: most ``open_*`` methods append the parts of an
    object to the stream, in their order, and return the positions of these parts.

    Private attributes:

        _dynamic       the positions of the arguments that are flattened
        _num_arguments   the number of arguments
        _stream        all items that were read, by position
        _comparisons   how each item is compared (``Comparison``), by position
        _steps         the fields of all steps (``Step``), one step after the other
        _expected      what each step must find, such as names or a length
        _mentions      the index of the object at the position of each mention
        _traces        the positions of the traces that Variables and modules belong to
        _pinned        the indices of objects that have to stay the same
    """

    def __init__(self, arguments: Sequence[object], dynamic: Sequence[int], static: Sequence[int]):
        """Starts the stream with the arguments of a call."""
        self.static_positions = static
        self.leaf_positions: list[int] = []
        self.object_positions: list[int] = []
        # If one of these objects is collected, another may get its id, so the guard is then void.
        self.identities: dict[int, Any] = {}
        self._dynamic = dynamic
        self._num_arguments = len(arguments)
        self._stream: list[Any] = [*arguments]
        # The zeros are ``Comparison.NONE``, which holds for an item until it is reported.
        self._comparisons = bytearray(len(arguments))
        self._steps: list[int] = []  # flat, because a tuple for each step would take longer
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
        """Records a static value that cannot change; ``static`` says how it is compared."""
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
        """Records the metadata of a Variable; the arguments are those of ``open_node``."""
        return self._open(Opcode.METADATA, position, names, values, comparisons)

    def open_variable(self, position: int, variable: object, value: object) -> int:
        """Records the trace and the value of a Variable; returns the position of the value."""
        fields = self._open_fields(_VARIABLE_FIELDS, position, (_trace_of(variable), value))
        trace_position, value_position = fields
        self._traces.append(trace_position)
        return value_position

    def open_node_state(self, position: int, state: object) -> None:
        """Records Flax's state of a module: whether it is set up, and its trace."""
        # The state names the trace of its module, so it is compared like the trace of a Variable.
        self._comparisons[position] = Comparison.BY_VALUE
        self._traces.append(position)
        self._open_fields(_NODE_STATE_FIELDS, position, _compat.node_flags(state))

    def open_hijax(self, position: int, treedef: PyTreeDef, leaves: Sequence[Any]) -> range:
        """Records the treedef and the leaves of a hijax Variable; returns the leaves' positions."""
        self._open_fields(_HIJAX_FIELDS, position, (treedef,))
        return self._open(Opcode.LEAVES, position, len(leaves), leaves)

    def open_static(
        self, position: int, value: object, kind: StaticKind, parts: Sequence[Any]
    ) -> Sequence[int]:
        """Records the parts of a static object; returns their positions.

        Steps that run no Python code open objects of common classes. ``Opcode.STATIC`` opens
        objects of all other classes.

        Args:
          position: the position of the object.
          value: the object.
          kind: the object's class, and the names of its attributes.
          parts: the object's items, then the values of its attributes. The items of a dict are its
            keys and values in turns.
        """
        if type(value) is dict and {str, int}.issuperset(map(type, value)):
            # A walk reads only the values again, because the step compares the keys. This is enough
            # for keys of exactly these types: such a key cannot change, and it does not matter
            # which of two equal keys a dict has.
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
        # A subclass of tuple, such as a named tuple with attributes, takes two steps: one reads the
        # ``__dict__``, the other the items. A class with an ``__iter__`` of its own may yield other
        # items than the tuple has, so the step for sequences cannot read them.
        if has_only_dict(cls, tuple) and cls.__iter__ is tuple.__iter__:
            attribute_positions = self._open(Opcode.NODE, position, kind.names, attributes)
            item_positions = self._open(Opcode.SEQUENCE, position, num_items, items)
            return [*item_positions, *attribute_positions]
        return self._open(Opcode.STATIC, position, (kind, len(parts)), parts)

    def open_arguments(self, treedef: PyTreeDef) -> TreePositions:
        """Records all dynamic arguments; returns the positions of their leaves and node data.

        ``treedef`` describes ``(args, kwargs)``, or the only argument if that is a graph object.
        """
        if is_leaf_treedef(treedef):  # a graph object is a leaf to JAX
            treedefs = [treedef]
        else:
            args_treedef, kwargs_treedef = treedef.children()
            treedefs = [*args_treedef.children(), *kwargs_treedef.children()]  # one by argument
        trees = [self._stream[position] for position in self._dynamic]
        return self._open_trees(self._dynamic, trees, treedefs)

    def open_tree(self, position: int, tree: Any, treedef: PyTreeDef) -> TreePositions:
        """Records a pytree, level by level; returns the positions of its leaves and node data.

        Args:
          position: the position of the pytree.
          tree: the pytree; a graph object is a leaf.
          treedef: describes ``tree``.
        """
        if is_leaf_treedef(treedef):  # ``tree`` itself is the leaf
            return TreePositions([position], [])
        if tree is None:  # a pytree without leaves
            self._comparisons[position] = Comparison.BY_VALUE
            return TreePositions([], [])
        # The children are in ``tree`` itself if it is a tuple, list or dict, or in the dict that an
        # `nnx.State` wraps. None: only JAX can open the pytree, by one step for all its levels.
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
        # A walk reads a dict in the dict's own order. In the treedef, JAX has the children sorted
        # by key. `sorted` is safe because ``own_items`` returns a dict only if it gives that order.
        position_of = dict(zip(items, opened, strict=True))
        keys = sorted(items)
        positions = [position_of[key] for key in keys]
        return self._open_trees(positions, [items[key] for key in keys], treedef.children())

    def _open_trees(
        self, positions: Iterable[int], trees: Iterable[Any], treedefs: Iterable[PyTreeDef]
    ) -> TreePositions:
        """Records several pytrees; returns the positions of the leaves and node data of all."""
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
          position: the position of the item that was opened.
          expected: what a walk compares first: names, keys, a length or a treedef.
          comparisons: how each part is compared. If this is empty, each part is reported on its own
            later, and is not compared until then.
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
        """Adds a step for each field of one of Flax's objects; returns the values' positions.

        Args:
          fields: the fields: the opcode that reads each field, and how its value is compared.
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

        Returns None if the graph belongs to another trace.
        """
        if not _compat.are_current(self._stream[position] for position in self._traces):
            return None
        order = in_walk_order(self._stream, self._steps, self._expected, self._num_arguments)
        # From here on, positions are those in the order of a walk: ``moved[recorded position]``.
        stream, moved = order.stream, order.new_position
        comparisons = np.frombuffer(self._comparisons, np.uint8)  # by recorded position

        # For each rule, the positions of the items that it compares: ``frozen`` by the value of a
        # static, ``mentions`` by the id of an object, ``typed`` by the type. A walk compares the
        # types of arrays and of what a step opens.
        frozen = moved[comparisons == Comparison.BY_VALUE]
        mentions, first = self._ordered_mentions(moved, comparisons)
        leaves, traces = moved[self.leaf_positions], moved[self._traces]
        _opcodes, opened, _starts = order.steps.T  # each has one number for each step
        typed = np.concatenate([opened, leaves])

        # The same facts by position, because a walk looks them up when it reads an item.
        types: list[type | None] = [None] * len(stream)
        for position in typed.tolist():
            types[position] = type(stream[position])
        rules = np.zeros(len(stream), int)  # bits of a `Rule`; 0 for an item that is not compared
        rules[typed] |= Rule.TYPED
        rules[traces] |= Rule.OF_TRACE
        rules[frozen] |= Rule.FROZEN
        rules[mentions] |= Rule.MENTION
        pins = np.zeros(len(stream), int)  # the number of the pin, in ``statics`` or in ``ids``
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
            # The recipe has ids, because a guard must not keep the objects alive.
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
        """Returns two arrays: the positions of mentions, and the first mention of each object.

        The positions are ascending. The second array has an item for each mention: the number of
        the first mention of the same object. By these numbers a walk checks that another model
        shares objects in the same places. With mentions of a, b, a at 2, 5, 7, the result is
        ``[2, 5, 7], [0, 1, 0]``. The item is `_PINNED` for an object that must stay the same,
        because a walk compares the id of this object.

        Args:
          new_position: the position of each item in the order of a walk, by its recorded position.
          comparisons: how each item is compared, by its recorded position.
        """
        # A static that is compared by identity is a mention as well. It has no index, and must
        # stay the same.
        statics = new_position[comparisons == Comparison.BY_IDENTITY]
        links = new_position[[*self._mentions]]
        positions = np.concatenate([statics, links])
        # For each of ``positions``: the index of the object there; None for a static.
        indices: list[int | None] = [*[None] * len(statics), *self._mentions.values()]
        ascending = np.argsort(positions)
        first_of_object: dict[int, int] = {}  # by index: the number of the first mention
        first_mentions = []
        for number, i in enumerate(ascending.tolist()):
            index = indices[i]
            if index is None or index in self._pinned:
                first_mentions.append(_PINNED)
            else:
                first_mentions.append(first_of_object.setdefault(index, number))
        return positions[ascending], np.array(first_mentions, int)
