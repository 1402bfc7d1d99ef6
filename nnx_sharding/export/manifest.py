"""The inputs and outputs of an exported program, as data that can be read without its code.

A pytree is described by a tree. A tree is JSON, one of ::

    {"input": 3}, {"output": 0}      an array, by its position in the program
    null                             None
    {kind: [[path, tree], ...]}      a container with its parts

where the kind is "tuple", "list", "dict", "state" (a module, or an nnx.State) or "object" (any
other class, which becomes a dict). A path is a list of keys: one key, except in a "state". For
example, a module with an ``nnx.Linear`` called ``up`` is ::

    {"state": [[["up", "bias"], {"input": 0}], [["up", "kernel"], {"input": 1}]]}

:func:`tree_of` makes a tree from a structure (``core/structure.py``), :func:`leaves_of` reads the
arrays in one, and :func:`build` makes a pytree of it again. A *structure* is a table: ``entries``
describe the modules and Variables of a pytree, by their index, and its arrays have numbers, the
*slots*. Its ``walk`` yields the location of each Variable and array below a part: a path, the slots
of the arrays, and ``object_index``, which is None for an array outside of Variables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..analysis.json_codec import JsonForm
from ..analysis.meshes import MeshDescription
from ..analysis.parameters import spec_text
from ..analysis.tables import text
from ..analysis.units import printable
from ..core.structure import LEAF, Child, Container, Structure, VariableEntry
from ..core.treedefs import PyTreeDef, container_keys, is_leaf_treedef
from ..specs.paths import Path, accessor, path_string, plain_key

# A tree is JSON as above. Python has no type for it that a checker could use.
Tree: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array that a program takes or returns.

    Attributes:
      name: for an input, its path in Python syntax: ``model.up.kernel``.
      shape: its shape; a symbolic size is a string, such as ``"batch"``.
      dtype: its dtype: ``"float32"``, ``"bfloat16"``, ``"key<fry>"``.
      mesh: the position of its mesh in ``Manifest.meshes``; None if the sharding is left open, or
        the array is on one device.
      spec: its spec; None if ``mesh`` is None.
      memory_kind: the kind of memory, if a sharding is declared.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    mesh: int | None = None
    spec: PartitionSpec | None = None
    memory_kind: str | None = None

    @classmethod
    def of(
        cls, name: str, aval: Any, sharding: NamedSharding | None, meshes: Sequence[Any] = ()
    ) -> ArrayInfo:
        """Returns the description of an array.

        Args:
          name: its name.
          aval: an array, or the type of one: only its shape and dtype are read.
          sharding: its sharding; None if that is left open, or not of interest.
          meshes: the meshes of the program, among them that of ``sharding``.
        """
        shape = tuple(size if isinstance(size, int) else str(size) for size in aval.shape)
        info = cls(name, shape, str(aval.dtype), memory_kind=getattr(sharding, "memory_kind", None))
        if sharding is None or sharding.mesh.empty:
            return info
        return dataclasses.replace(info, mesh=meshes.index(sharding.mesh), spec=sharding.spec)

    @property
    def type(self) -> str:
        """Dtype and shape, such as ``float32[4,16]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return self.type if self.spec is None else f"{self.type} {spec_text(self.spec)}"


def meshes_of(shardings: Iterable[NamedSharding | None]) -> list[Mesh | AbstractMesh]:
    """Returns the meshes of shardings, each once."""
    meshes = (sharding.mesh for sharding in shardings if sharding is not None)
    return list(dict.fromkeys(mesh for mesh in meshes if not mesh.empty))


class LeafInfo(NamedTuple):
    """One array of an argument: its path, the path in Python syntax, and its position as input."""

    path: Path
    name: str
    position: int


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of an exported function that is not static.

    Attributes:
      name: its name in the signature.
      keyword: whether it was passed by keyword.
      donated: whether its arrays are donated: a call consumes their buffers.
      tree: its structure, as JSON.
    """

    name: str
    keyword: bool
    donated: bool
    tree: Tree

    @functools.cached_property
    def leaves(self) -> tuple[LeafInfo, ...]:
        """The arrays of the argument."""
        arrays = leaves_of(self.tree)
        return tuple(LeafInfo(path, accessor(self.name, path), i) for path, _, i in arrays)

    @functools.cached_property
    def by_path(self) -> dict[tuple[str, ...] | str, LeafInfo]:
        """The arrays by paths such as ``("up", "kernel")`` and, if unambiguous, ``up/kernel``."""
        result: dict[tuple[str, ...] | str, LeafInfo] = {}
        # The text "a/b" is ambiguous if there are paths with the key "a/b" and the keys "a", "b".
        texts = Counter(path_string(leaf.path) for leaf in self.leaves)
        for leaf in self.leaves:
            result[tuple(map(str, leaf.path))] = leaf
            if texts[path_string(leaf.path)] == 1:
                result[path_string(leaf.path)] = leaf
        return result


@dataclasses.dataclass(frozen=True)
class Manifest(JsonForm):
    """The inputs and outputs of an exported function, and the versions that made it.

    Attributes:
      function: the name of the function.
      transform: ``"jit"`` or ``"shard_map"``.
      arguments: its arguments, in order.
      static: the text of each static argument; their values are part of the program.
      inputs: the arrays that the program takes. An array that several arguments share is one input.
      outputs: the arrays that the program returns.
      result: what the function returns, as JSON.
      updates: what the function changes in each argument, as JSON.
      devices: the number of devices that the program runs on.
      meshes: the meshes of the devices: usually one; none if the program has no sharding.
      platforms: the platforms for which it was lowered.
      calling_convention: the version of the calling convention of ``jax.export``.
      versions: the versions of jax, flax and nnx_sharding that made it.
    """

    function: str
    transform: str
    arguments: tuple[Argument, ...]
    static: dict[str, str]
    inputs: tuple[ArrayInfo, ...]
    outputs: tuple[ArrayInfo, ...]
    result: Tree
    updates: dict[str, Tree]
    devices: int
    meshes: tuple[MeshDescription, ...]
    platforms: tuple[str, ...]
    calling_convention: int
    versions: dict[str, str]

    _FORMAT: ClassVar[str] = "nnx_sharding export"
    _VERSION: ClassVar[int] = 2
    _NOUN: ClassVar[str] = "manifest of an exported function"

    def __post_init__(self) -> None:
        """Raises a ``ValueError`` if it names an argument, mesh or array that it does not have.

        The check is needed because anybody may have written the file.
        """
        names = [argument.name for argument in self.arguments]
        # The names of arguments differ, and only arguments have updates.
        if len(set(names)) < len(names) or not self.updates.keys() <= set(names):
            raise ValueError(f"arguments {names}, updates {[*self.updates]}")
        for info in (*self.inputs, *self.outputs):
            if info.mesh not in (None, *range(len(self.meshes))):
                raise ValueError(f"there is no mesh {info.mesh}")
        # A tree may name arrays of these kinds, as many as there are. Arguments have no outputs.
        inputs, outputs = {"input": len(self.inputs)}, {"output": len(self.outputs)}
        trees = [(argument.tree, inputs) for argument in self.arguments]
        trees += [(tree, inputs | outputs) for tree in (self.result, *self.updates.values())]
        for tree, counts in trees:
            for _, kind, position in leaves_of(tree):
                # `isinstance` would not do, because True is an int, too.
                if type(position) is not int or position not in range(counts.get(kind, 0)):
                    raise ValueError(f"there is no {kind} {position!r:.100}")

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields the lines of its table: a head, then each array of the arguments and results."""
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        meshes = "".join(f" ({mesh})" for mesh in self.meshes)
        makers = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        head = f"{self.function}: {self.transform} for {devices}{meshes} of "
        head += f"{', '.join(self.platforms)}, by {makers}"
        rows = [(info.name, str(info)) for info in self.inputs]
        rows += [(name, f"= {value}, static") for name, value in self.static.items()]
        arrays = {"input": self.inputs, "output": self.outputs}
        for name, tree in (("result", self.result), *self.updates.items()):
            for path, kind, position in leaves_of(tree):
                rows.append((f"→ {accessor(name, path)}", str(arrays[kind][position])))
        rows = [(printable(name), info) for name, info in rows]
        longest = max((len(name) for name, _ in rows), default=0)
        yield text(head)
        yield from (text(f"  {name:{longest}}  {info}") for name, info in rows)


def tree_of(structure: Structure, array: Callable[[int], Tree]) -> Tree:
    """Returns the tree of the pytree that a structure describes.

    Args:
      structure: the structure. Its arrays are numbered by *slots*.
      array: returns the tree of the array in a slot, such as ``{"input": slot}``.
    """
    return _tree(structure, structure.root, iter(structure.root_slots), array)


def _tree(
    structure: Structure, child: Child, slots: Iterator[int], array: Callable[[int], Tree]
) -> Tree:
    """Returns the tree of a part of a structure.

    A Variable has the tree of its value, a module that of an ``nnx.State``.

    Args:
      child: the part: an array (``LEAF``), a pytree (``Container``), the index of a module or
        Variable in ``structure.entries``, or a static value.
      slots: the slots of the arrays in the part, outside of modules and Variables. Each array takes
        the next one.
      array: returns the tree of the array in a slot.
    """
    if child is LEAF:
        return array(next(slots))
    if isinstance(child, Container):
        parts = [_tree(structure, part, slots, array) for part in child.children]
        return _container(child.treedef, iter(parts))
    if not isinstance(child, int):  # a static value, which is part of the program, and no array
        return None
    items = []  # the path of each Variable and array below, and its tree
    # A module or Variable knows the slots of its arrays, so none are passed.
    for location in structure.walk(child, slots=iter(())):
        entry = None if location.object_index is None else structure.entries[location.object_index]
        value = entry.value if isinstance(entry, VariableEntry) else LEAF
        items.append((location.path, _tree(structure, value, iter(location.slots), array)))
    if isinstance(structure.entries[child], VariableEntry) and items:
        [(_, value_tree), *_] = items  # the walk from a Variable begins with itself
        return value_tree
    return tree_from("state", items)


def _container(treedef: PyTreeDef, parts: Iterator[Tree]) -> Tree:
    """Returns the tree of a pytree, whose leaves are the next parts.

    Args:
      parts: yields the tree of each leaf, in order. The calls for children take from the same
        iterator.
    """
    if is_leaf_treedef(treedef):
        return next(parts)
    type_, data = treedef.node_data()
    children = [_container(child, parts) for child in treedef.children()]
    if type_ is type(None):  # None is a node without children to JAX
        return None
    kind = _KINDS.get(type_, "object")
    # JAX has the keys of a dict as the data of the node. For other classes it has keys only in
    # the paths of leaves.
    keys = data if kind == "dict" else _keys(treedef)
    return tree_from(kind, (((key,), child) for key, child in zip(keys, children, strict=True)))


# The kinds of containers. A container of any other class has the kind "object".
_KINDS = {tuple: "tuple", list: "list", dict: "dict", nnx.State: "state"}


def _keys(treedef: PyTreeDef) -> Iterator[Any]:
    """Yields the key of each child of a node of any class; its index if it holds no array."""
    paths = iter(container_keys(treedef))  # the path of each leaf below the node
    for index, child in enumerate(treedef.children()):
        leaf_paths = [next(paths) for _ in range(child.num_leaves)]
        yield leaf_paths[0][0] if leaf_paths and leaf_paths[0] else index


def tree_from(kind: str, items: Iterable[tuple[Path, Tree]]) -> Tree:
    """Returns the tree of a container from the paths of its parts and their trees.

    ``kind`` is one of `_KINDS`, or "object"; only in a "state" may a path have several keys. A
    "state" in a "state" becomes part of it: for the item ``(("up",), {"state": [[["w"], t]]})``,
    the result has ``[["up", "w"], t]``.
    """
    parts = []
    for path, tree in items:
        keys = [_plain(key) for key in path]
        if kind == "state" and isinstance(tree, dict) and "state" in tree:
            for keys_below, part in tree["state"]:
                parts.append([[*keys, *keys_below], part])
        else:
            parts.append([keys, tree])
    return {kind: parts}


def _plain(key: Any) -> str | int:
    """Returns a key of a path in a form that JSON can hold: an int or a text."""
    key = plain_key(key)
    return key if type(key) in (str, int) else str(key)


def leaves_of(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, str, int]]:
    """Yields each array in a tree: its path, ``"input"`` or ``"output"``, and its position.

    ``path`` is the path of the tree itself; the paths of its arrays begin with it.

    Raises:
      ValueError: the tree has another form, because anybody may have written the file.
    """
    if tree is None:
        return
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError(f"expected an array or a container, got {tree!r:.100}")
    [(kind, content)] = tree.items()  # {"input": 3}, or {"list": [[[0], …], [[1], …]]}
    if kind in ("input", "output"):
        yield path, kind, content
        return
    if kind not in {*_KINDS.values(), "object"} or not isinstance(content, list):
        raise ValueError(f"expected a container, got {tree!r:.100}")
    paths_so_far = set()
    for keys, part in content:
        is_path = isinstance(keys, list) and all(type(key) in (str, int) for key in keys)
        has_right_length = is_path and (kind == "state" or len(keys) == 1)
        if not has_right_length or tuple(keys) in paths_so_far:
            raise ValueError(f"expected another path than {keys!r:.100}")
        paths_so_far.add(tuple(keys))
        yield from leaves_of(part, (*path, *keys))


def build(tree: Tree, arrays: Mapping[str, Sequence[Any]]) -> Any:
    """Returns the pytree that a tree describes, with arrays in it.

    A "state" becomes an ``nnx.State``, and an "object" a dict. ``arrays`` has the arrays for
    ``"input"`` and for ``"output"``, by position.
    """
    if tree is None:
        return None
    [(kind, content)] = tree.items()
    if kind in arrays:
        return arrays[kind][content]
    parts = {tuple(path): build(part, arrays) for path, part in content}
    if kind == "state":
        return nnx.from_flat_state(parts)
    if kind == "tuple":
        return tuple(parts.values())
    if kind == "list":
        return list(parts.values())
    return {key: part for (key,), part in parts.items()}
