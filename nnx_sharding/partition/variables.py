"""The Variables of a model by path, and shardings that are given by path.

All strategies see a model as a list of these: each Variable, and each *bare* array, which is in no
Variable, with its first path, its arrays (one, unless the value is a pytree), and what is known of
its dimensions (``layers.py``). They come from a flattened model (``Flat``): its ``leaves`` are the
arrays, a *slot* is the index of a leaf, and its ``structure`` has an *entry* for each object, a
module (``NodeEntry``) or a Variable. Entries refer to others by their index; a list or a dict,
which is no object, is a ``Container`` in the entry that holds it.

In a model with Variables, bare arrays that modules hold are *buffers*, such as masks: they are not
trained. In one without, they are the parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import nnx

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.static_equality import Static
from ..core.structure import (
    Container,
    NodeEntry,
    Structure,
    VariableEntry,
    atoms,
    holds_objects,
    is_leaf_variable,
    parts_of,
)
from ..specs.activation_sharding import ActivationSharding
from ..specs.filters import Paths
from ..specs.paths import Path, path_key, path_string, plain_key
from ..specs.state_sharding import StateSharding
from .layers import LayerDimensions, Stacked

Shape: TypeAlias = tuple[int, ...]
# The sharding of each path of a model, as its strategies change it.
SpecsByPath: TypeAlias = dict[Path, Any]


class NamedVariable(NamedTuple):
    """A Variable of a model, or an array outside of any, with its path."""

    path: Path
    variable: Any  # the Variable, or the array
    arrays: tuple[Any, ...]
    shapes: Sequence[Shape]  # of its arrays; a number is a scalar
    is_buffer: bool = False  # an array that a model with Variables holds outside of them
    layers: Stacked = Stacked()  # the dimensions of stacked layers
    is_norm: bool = False  # a parameter or statistic of a normalization layer

    @property
    def name(self) -> str:
        """The path as a string, such as ``blocks/3/up/kernel``."""
        return path_string(self.path)

    @property
    def shape(self) -> Shape | None:
        """The shape of its arrays; None if they have different ones."""
        if len(self.shapes) == 1:  # nearly all; strategies ask several times for each
            return self.shapes[0]
        return self.shapes[0] if self.shapes.count(self.shapes[0]) == len(self.shapes) else None

    @property
    def layer_shape(self) -> Shape:
        """The shape for one layer; ``()`` without a shape, or if the layers are ambiguous."""
        if self.shape is None or self.layers.is_ambiguous:
            return ()
        return tuple(self.shape[d] for d in self.layer_dimensions)

    @property
    def layer_dimensions(self) -> list[int]:
        """The dimensions that are not stacked layers, in their order."""
        stacked = self.layers.dimensions
        dimensions = range(len(self.shape or ()))
        return [d for d in dimensions if d not in stacked] if stacked else [*dimensions]

    @property
    def layer_size(self) -> int:
        """The number of elements in one layer, at least; 0 without a shape."""
        shape = self.shape
        return 0 if shape is None else math.prod(shape[d] for d in self.layer_dimensions)

    def dimension(self, index: int) -> int | None:
        """Returns the dimension that has this index in one layer; None if that is not known."""
        dimensions = self.layer_dimensions
        is_known = not self.layers.is_ambiguous and -len(dimensions) <= index < len(dimensions)
        return dimensions[index] if is_known else None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of a Variable; none for a bare array."""
        return self.variable.get_metadata() if _compat.is_any_variable(self.variable) else {}

    @property
    def annotation(self) -> Any:
        """The sharding in the metadata, or None."""
        # Flax writes the first; the others are stored in older models.
        keys = ("out_sharding", "sharding", "sharding_names")
        return next((self.metadata[key] for key in keys if self.metadata.get(key)), None)


class Listing(NamedTuple):
    """What a model holds: ``flat`` is the flattened model, ``variables`` are listed by path."""

    flat: Flat
    variables: Sequence[NamedVariable]

    def modules(self) -> Iterator[tuple[Path, int]]:
        """Yields the first path of each module, and its index in the flattened model.

        Depth first, as ``nnx.iter_graph``, which takes ten times as long.
        """
        structure = self.flat.structure
        seen: set[int] = set()  # the indices of objects
        # What is still to be walked: paths, each with the index of an object, or a container.
        stack: list[tuple[Path, Any]] = [((), structure.root)]
        while stack:
            path, child = stack.pop()
            is_object = isinstance(child, int)
            entry = structure.entries[child] if is_object else child
            if is_leaf_variable(entry):  # a Variable with one array: most of all
                continue
            if is_object:
                if child in seen:  # by another path
                    continue
                seen.add(child)
            parts: Sequence[tuple[Path, Any]] = ()  # what is in it, by the path from here
            if isinstance(entry, NodeEntry):
                yield tuple(map(plain_key, path)), child
                pairs = zip(entry.keys, entry.children, strict=True)
                # Static attributes, such as sizes, hold no modules, and modules have many.
                parts = [((key,), part) for key, part in pairs if type(part) is not Static]
            elif isinstance(entry, Container):
                parts = [*parts_of(entry).items()]
            elif isinstance(entry, VariableEntry) and holds_objects(entry):
                parts = [((), entry.value)]  # a Variable that has a module as its value
            stack += [((*path, *key), part) for key, part in reversed(parts)]

    def below(self, index: int) -> Iterator[tuple[Path, Any]]:
        """Yields the path in a module of each Variable and array in it, and the Variable itself."""
        return ((place.path, place.subject) for place in _places(self.flat, index))


# Within `models_unchanged`: by the id of a module, the module, so that no other gets this id, and
# what it holds.
_KNOWN: ContextVar[dict[int, tuple[object, Listing]] | None]
_KNOWN = ContextVar("_KNOWN", default=None)


@contextlib.contextmanager
def models_unchanged() -> Iterator[None]:
    """Promises that no model changes within the block, so that each is flattened once.

    A search asks hundreds of strategies for shardings of one model. `listing_of` fills ``_KNOWN``.
    """
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)


def variables(tree: object) -> Sequence[NamedVariable]:
    """Lists the Variables and bare arrays of a model, an optimizer or a pytree, by first path."""
    return listing_of(tree).variables


def listing_of(tree: object) -> Listing:
    """Flattens a model, an optimizer or a pytree, and lists what it holds.

    That takes most of the time of a strategy for many Variables: a strategy lists those of a model
    once, and all its stages use the list. Within :func:`models_unchanged`, that of a module is made
    once for all strategies.
    """
    known = _KNOWN.get()  # None outside of `models_unchanged`
    if known is None or not _compat.is_node(tree):  # a pytree may be made anew for each call
        return _listing(tree)
    if id(tree) not in known:
        known[id(tree)] = tree, _listing(tree)
    _, listing = known[id(tree)]
    return listing


def _listing(tree: object) -> Listing:
    """Lists the Variables and bare arrays of a tree, with what is known of their dimensions."""
    flat = flatten(tree, graph=True)
    bare_parameters = _bare_parameters(flat.structure)  # their slots
    layers = LayerDimensions(flat)
    named = []
    for place in _places(flat):
        arrays = tuple(flat.leaves[slot] for slot in place.slots)
        shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
        # The arrays of a Variable are stacked alike, so the first one tells.
        stacked = layers.find(place.path, place.subject, place.slots, shapes[0])
        named.append(
            NamedVariable(
                place.path,
                place.subject,
                arrays,
                shapes,
                is_buffer=not place.is_variable and bare_parameters.isdisjoint(place.slots),
                layers=stacked,
                is_norm=layers.is_norm(place.subject),
            )
        )
    return Listing(flat, named)


class _Place(NamedTuple):
    """Where a Variable or bare array is in a flattened tree."""

    path: Path
    subject: Any  # the Variable, or the array
    slots: Sequence[int]  # of its arrays
    is_variable: bool


def _places(flat: Flat, module: int | None = None) -> Iterator[_Place]:
    """Yields each Variable or bare array in a flattened tree, once, by its first path.

    Args:
      flat: the tree.
      module: the index of a module, to yield only what is in it, by the path from there.
    """
    structure = flat.structure
    # Arrays outside of all objects have their slots in the root, from which the walk takes them. In
    # a module there are none: each array has its slot in the module or Variable that holds it.
    start, root_slots = structure.root, structure.root_slots
    if module is not None:
        start, root_slots = module, ()
    for location in structure.walk(start, iter(root_slots)):
        slots = location.slots
        if not slots:  # a Variable of None, or of a pytree without leaves
            continue
        path = tuple(map(plain_key, location.path))
        index = location.object_index  # of a Variable or a `jax.Ref`; None for a bare array
        if index is not None and isinstance(structure.entries[index], VariableEntry):
            yield _Place(path, flat.objects[index], slots, is_variable=True)
        else:  # the array, or the reference, which is its own leaf
            yield _Place(path, flat.leaves[slots[0]], slots, is_variable=False)


def _bare_parameters(structure: Structure) -> Set[int]:
    """Returns the slots of bare arrays that are parameters; all others are buffers.

    Which ones they are depends on the tree:

    * without any Variable, all arrays, also those in modules, are parameters;
    * in modules and pytrees of arrays, ``(model, {"kernel": array})``, those outside of modules;
    * with Variables outside of modules, as in the ``nnx.State`` of a model, none: its Variables are
      the parameters, and its arrays are what the model held as buffers.
    """
    entries = structure.entries
    if not any(isinstance(entry, VariableEntry) for entry in entries):
        return frozenset(range(structure.num_leaves))
    # What is in the root itself, or in its lists and dicts, but in no module.
    root_objects = (entries[atom] for atom in atoms((structure.root,)) if isinstance(atom, int))
    has_variables_outside = any(isinstance(entry, VariableEntry) for entry in root_objects)
    return frozenset() if has_variables_outside else frozenset(structure.root_slots)


def map_variables(tree: object, function: Callable[[NamedVariable], object]) -> Any:
    """Returns the tree with the results of a function in place of Variables and bare arrays.

    A module becomes an ``nnx.State`` of these. A Variable without arrays, which has no result,
    becomes None.
    """
    parts, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_compat.is_graph_object)
    new_parts = []
    for keys, part in parts:  # a module, a Variable or a bare array
        prefix = tuple(plain_key(path_key(key)) for key in keys)  # the path of the part
        results = {}  # by the path in the part, but the function gets the whole path
        for named in variables(part):
            whole_path = (*prefix, *named.path)
            results[named.path] = function(named._replace(path=whole_path))
        is_module = _compat.is_node(part)
        # A part that is no module is the only Variable or array in it, whose path is ().
        new_parts.append(nnx.from_flat_state(results) if is_module else results.get(()))
    return jax.tree_util.tree_unflatten(treedef, new_parts)


# What sharded parameters require of activations: parameters are gathered over the axes of the batch
# while they are used, and layers choose the sharding of their outputs on Explicit axes.
FOLLOWING = ActivationSharding(gather=True, infer=True)


class Remarks(NamedTuple):
    """What reports say of the arrays of a model, by path."""

    notes: dict[Path, str]  # why one stays replicated, or what its spec costs
    # What chose its spec: ``column of tensor_parallel, fsdp over dimension 0``.
    strategies: dict[Path, str]


NO_REMARKS = Remarks({}, {})


def from_paths(
    specs: SpecsByPath,
    activations: ActivationSharding = FOLLOWING,
    remarks: Remarks = NO_REMARKS,
    by: str = "",
) -> StateSharding:
    """Makes the result of a strategy: a ``StateSharding`` from one sharding for each path.

    Args:
      specs: the sharding of each path.
      activations: how activations are sharded.
      remarks: what ``check_sharding`` and lock files say of the arrays.
      by: what chose the specs of paths for which ``remarks`` has nothing.
    """
    # One filter for all paths with the same spec, note and strategy: models have thousands of
    # paths, and few of these.
    groups: dict[tuple[Any, str, str], list[Path]] = {}
    for path, spec in specs.items():
        key = spec, remarks.notes.get(path, ""), remarks.strategies.get(path, by)
        groups.setdefault(key, []).append(path)
    rules = [
        (Paths(paths, note, strategy), spec) for (spec, note, strategy), paths in groups.items()
    ]
    return StateSharding(rules, activations=activations)


def specs_by_path(tree: object, sharding: StateSharding) -> dict[Path, Any]:
    """Returns the sharding of each path of a model; None where ``sharding`` has none for it.

    Args:
      tree: the model, optimizer or pytree; abstract (``nnx.eval_shape``) or not.
      sharding: the shardings, such as what a strategy returned.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding.partition import replicated, specs_by_path
      >>> model = nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
      >>> specs_by_path(model, replicated(model))
      {('bias',): P(), ('kernel',): P()}
    """
    return {x.path: sharding.find(x.path, x.variable)[1] for x in variables(tree)}
