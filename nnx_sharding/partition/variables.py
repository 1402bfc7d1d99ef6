"""The Variables of a model by path, and shardings that are given by path.

All strategies see a model as a list of `NamedVariable`. There is one for each Variable, and one for
each *bare* array, which is in no Variable. A `NamedVariable` has the first path, the arrays (one,
unless the value is a pytree), and the dimensions of stacked layers (``layers.py``). The list comes
from a flattened model (``Flat``): its ``leaves`` are the arrays, a *slot* is the index of a leaf,
and its ``structure`` has an *entry* for each object, a module (``NodeEntry``) or a Variable.
Entries refer to other objects by their index. A list or a dict is no object; it is a ``Container``
in the entry that holds it.

In a model with Variables, bare arrays that modules hold are *buffers*, such as masks: they are not
trained. In a model without Variables, bare arrays are the parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

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
from ..specs.paths import Path, path_string, plain_key
from ..specs.state_sharding import StateSharding
from .layers import LayerDimensions, Stacked

Shape: TypeAlias = tuple[int, ...]
# The sharding of each path of a model. Strategies replace entries.
SpecsByPath: TypeAlias = dict[Path, Any]


class NamedVariable(NamedTuple):
    """A Variable of a model, or an array outside of any, with its path; it has at least one array.

    If ``layers`` is ambiguous, some of its dimensions are not stacked layers.
    """

    path: Path
    variable: Any  # the Variable, or the array
    arrays: tuple[Any, ...]
    shapes: Sequence[Shape]  # the shapes of the arrays; a number is a scalar
    is_buffer: bool = False  # whether it is an array that a model with Variables holds outside them
    layers: Stacked = Stacked()  # the dimensions of stacked layers
    is_norm: bool = False  # whether it is a parameter or statistic of a normalization layer

    @property
    def name(self) -> str:
        """The path as a string, such as ``blocks/3/up/kernel``."""
        return path_string(self.path)

    @property
    def shape(self) -> Shape | None:
        """The shape of the arrays; None if they have different shapes."""
        # The shortcut saves time, because nearly all Variables have one array, and strategies ask
        # often.
        if len(self.shapes) == 1:
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
        """The number of elements in one layer; 0 without a shape.

        If the layers are ambiguous, it is a lower bound.
        """
        shape = self.shape
        return 0 if shape is None else math.prod(shape[d] for d in self.layer_dimensions)

    def dimension(self, index: int) -> int | None:
        """Returns the dimension of the array that has this index in one layer.

        None if one layer has no such dimension, or if the layers are ambiguous.
        """
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
        # Flax writes the first key. Older models have the others.
        keys = ("out_sharding", "sharding", "sharding_names")
        return next((self.metadata[key] for key in keys if self.metadata.get(key)), None)


class Listing(NamedTuple):
    """A flattened model, and a list of its Variables and bare arrays."""

    flat: Flat
    variables: Sequence[NamedVariable]

    def modules(self) -> Iterator[tuple[Path, int]]:
        """Yields the first path of each module, and its index in the flattened model.

        Modules come depth first, as from ``nnx.iter_graph``, which takes ten times as long.
        """
        structure = self.flat.structure
        seen: set[int] = set()  # the indices of objects that were visited
        # The parts that are still to be visited: the index of an object, or a container, by path.
        stack: list[tuple[Path, Any]] = [((), structure.root)]
        while stack:
            path, child = stack.pop()
            is_object = isinstance(child, int)
            entry = structure.entries[child] if is_object else child
            if is_leaf_variable(entry):  # most entries are so, and hold no modules
                continue
            if is_object:
                if child in seen:  # another path led to the object
                    continue
                seen.add(child)
            parts: Sequence[tuple[Path, Any]] = ()  # the parts of the entry, by their path in it
            if isinstance(entry, NodeEntry):
                yield tuple(map(plain_key, path)), child
                pairs = zip(entry.keys, entry.children, strict=True)
                # Static attributes, such as sizes, are left out because they hold no modules.
                parts = [((key,), part) for key, part in pairs if type(part) is not Static]
            elif isinstance(entry, Container):
                parts = [*parts_of(entry).items()]
            elif isinstance(entry, VariableEntry) and holds_objects(entry):
                parts = [((), entry.value)]  # a Variable that has a module as its value
            stack += [((*path, *key), part) for key, part in reversed(parts)]

    def below(self, index: int) -> Iterator[tuple[Path, Any]]:
        """Yields each Variable and bare array in a module: its path in the module, and itself.

        ``index`` is the index of the module in the flattened model.
        """
        return ((place.path, place.subject) for place in _places(self.flat, index))


# Within `models_unchanged`, the module and its listing by the id of the module; None outside of it.
# The module is kept so that no other module gets the same id.
_KNOWN: ContextVar[dict[int, tuple[object, Listing]] | None]
_KNOWN = ContextVar("_KNOWN", default=None)


@contextlib.contextmanager
def models_unchanged() -> Iterator[None]:
    """Promises that no model changes within the block, so that each is flattened once.

    The promise saves time in a search, which asks hundreds of strategies for shardings of one
    model.
    """
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)


def variables(tree: object) -> Sequence[NamedVariable]:
    """Lists the Variables and bare arrays of a model, an optimizer or a pytree, by first path."""
    return listing_of(tree).variables


def modules_of(tree: object) -> list[Any]:
    """Lists the modules of a model or a pytree, each once; none for the State of a model."""
    listing = listing_of(tree)
    return [listing.flat.objects[index] for _, index in listing.modules()]


def listing_of(tree: object) -> Listing:
    """Flattens a model, an optimizer or a pytree, and lists its Variables and bare arrays.

    For many Variables, this takes most of the time of a strategy, so a strategy makes one listing,
    and all its steps use it. Within :func:`models_unchanged`, the listing of a module is made once
    for all strategies.
    """
    listings = _KNOWN.get()
    # The listing of a pytree is not kept, because a pytree may be made anew for each call.
    if listings is None or not _compat.is_node(tree):
        return _listing(tree)
    if id(tree) not in listings:
        listings[id(tree)] = tree, _listing(tree)
    _, listing = listings[id(tree)]
    return listing


def _listing(tree: object) -> Listing:
    """Lists the Variables and bare arrays of a tree, with their dimensions of stacked layers."""
    flat = flatten(tree, graph=True)
    bare_parameters = _bare_parameters(flat.structure)  # the slots of bare arrays
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
    """The place of a Variable or bare array in a flattened tree."""

    path: Path
    subject: Any  # the Variable, or the array
    slots: Sequence[int]  # the slots of its arrays
    is_variable: bool


def _places(flat: Flat, module: int | None = None) -> Iterator[_Place]:
    """Yields each Variable or bare array in a flattened tree, once, by its first path.

    Args:
      module: the index of a module. Only its Variables and arrays are yielded then, by their paths
        in the module. None for the whole tree.
    """
    structure = flat.structure
    # The slots of arrays outside of all objects are in the root, and the walk gets them from there.
    # A walk in a module needs none, because each array has its slot in the module or Variable that
    # holds it.
    start, root_slots = structure.root, structure.root_slots
    if module is not None:
        start, root_slots = module, ()
    for location in structure.walk(start, iter(root_slots)):
        slots = location.slots
        if not slots:  # a Variable of None, or of a pytree without leaves
            continue
        path = tuple(map(plain_key, location.path))
        # The index of a Variable or a `jax.Ref`; None for a bare array.
        index = location.object_index
        if index is not None and isinstance(structure.entries[index], VariableEntry):
            yield _Place(path, flat.objects[index], slots, is_variable=True)
        else:  # a bare array, or a reference, which is its own leaf
            yield _Place(path, flat.leaves[slots[0]], slots, is_variable=False)


def _bare_parameters(structure: Structure) -> Set[int]:
    """Returns the slots of bare arrays that are parameters; all other bare arrays are buffers.

    * Without any Variable in the tree, all arrays are parameters, including those in modules.
    * With Variables in modules only, ``(model, {"kernel": array})``, the bare arrays outside of
      modules are parameters.
    * With Variables outside of modules, as in the ``nnx.State`` of a model, no bare array is one:
      the Variables are the parameters, and the bare arrays were buffers of the model.
    """
    entries = structure.entries
    if not any(isinstance(entry, VariableEntry) for entry in entries):
        return frozenset(range(structure.num_leaves))
    # The objects in the root itself, or in its lists and dicts, but in no module.
    root_objects = (entries[atom] for atom in atoms((structure.root,)) if isinstance(atom, int))
    has_variables_outside = any(isinstance(entry, VariableEntry) for entry in root_objects)
    return frozenset() if has_variables_outside else frozenset(structure.root_slots)


# The activation sharding that sharded parameters require: parameters are gathered over the axes of
# the batch while they are used, and layers choose the sharding of their outputs on Explicit axes.
FOLLOWING = ActivationSharding(gather=True, infer=True)


class Remarks(NamedTuple):
    """Texts for reports about the arrays of a model, by path."""

    notes: dict[Path, str]  # why an array stays replicated, or what its spec costs
    # The strategies that chose a spec: ``column of tensor_parallel, fsdp over dimension 0``.
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
      remarks: texts about the arrays, for ``check_sharding`` and lock files.
      by: the name of the function that chose the specs of paths without a remark.
    """
    # There is one filter for all paths with the same spec, note and strategy, because models have
    # thousands of paths, but few different combinations of these.
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
