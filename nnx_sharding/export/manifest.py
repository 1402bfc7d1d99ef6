"""What a program in a file takes and gives, as data that needs no code to be read."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from ..analysis.units import printable
from ..paths import Path, accessor, path_string
from . import trees
from .trees import Tree


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array that a program takes or gives.

    Attributes:
      name: what the author of the function would write: ``model.up.kernel``.
      shape: its shape; a symbolic size is a string, such as ``"batch"``.
      dtype: its dtype: ``"float32"``, ``"bfloat16"``, ``"key<fry>"``.
      mesh: the position in ``Manifest.meshes`` of the mesh over which it is laid out; None if
        that is left open, or it lies on one device.
      spec: for each dimension the mesh axes that cut it: None, a name, or a list of names. None
        as a whole if the layout is left open.
      memory_kind: the kind of memory, where a layout is declared.
      unreduced: the mesh axes over which the devices hold summands of the array.
      reduced: the mesh axes over which its gradient is unreduced.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    mesh: int | None = None
    spec: tuple[Any, ...] | None = None
    memory_kind: str | None = None
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, aval: Any, sharding: NamedSharding | None, meshes: Sequence[Any] = ()
    ) -> ArrayInfo:
        """What is to be said of an array; its mesh is one of ``meshes``."""
        shape = tuple(size if isinstance(size, int) else str(size) for size in aval.shape)
        if sharding is None:
            return cls(name, shape, str(aval.dtype))
        mesh = None if sharding.mesh.empty else meshes.index(sharding.mesh)
        spec = None if mesh is None else tuple(map(_entry, sharding.spec.partitions))
        summing = (tuple(sorted(axes)) for axes in (sharding.spec.unreduced, sharding.spec.reduced))
        return cls(name, shape, str(aval.dtype), mesh, spec, sharding.memory_kind, *summing)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        summing = {"unreduced": self.unreduced, "reduced": self.reduced}
        words = [
            f"{kind}={{{', '.join(map(repr, axes))}}}" for kind, axes in summing.items() if axes
        ]
        entries = [*map(repr, self.spec or ()), *words]
        spec = "" if self.spec is None else f" P({', '.join(entries)})"
        return f"{self.dtype}[{shape}]{spec}"


def _entry(entry: Any) -> Any:
    """One entry of a spec, as JSON can say it."""
    if entry is None or isinstance(entry, str):
        return entry
    return list(map(str, entry)) if isinstance(entry, tuple) else str(entry)


@dataclasses.dataclass(frozen=True)
class MeshInfo:
    """A mesh that a program runs on.

    Attributes:
      names: the names of its axes.
      sizes: their sizes.
      types: their types: ``"Auto"``, ``"Explicit"`` or ``"Manual"``.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    types: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Any) -> MeshInfo:
        """What is to be said of a mesh."""
        types = tuple(kind.name for kind in mesh.axis_types)
        return cls(tuple(map(str, mesh.axis_names)), tuple(mesh.axis_sizes), types)

    def __str__(self) -> str:
        return ", ".join(f"{n}={size}" for n, size in zip(self.names, self.sizes, strict=True))


def meshes_of(shardings: Iterable[NamedSharding | None]) -> list[Any]:
    """The meshes of shardings, each once."""
    found = (sharding.mesh for sharding in shardings if sharding is not None)
    return list(dict.fromkeys(mesh for mesh in found if not mesh.empty))


class Place(NamedTuple):
    """Where one array stands in an argument.

    Attributes:
      path: the keys that lead to it.
      name: what the author of the function would write.
      position: which one of ``Manifest.inputs`` it is.
    """

    path: Path
    name: str
    position: int


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of an exported function, static ones apart.

    Attributes:
      name: its name in the signature.
      keyword: whether it was given by keyword.
      donated: whether its arrays are donated: a call takes their memory.
      tree: what it consists of, as JSON.
    """

    name: str
    keyword: bool
    donated: bool
    tree: Tree

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        """Its arrays, each with its path, its name and its position in ``Manifest.inputs``."""
        found = trees.places(self.tree)
        return tuple(Place(path, accessor(self.name, path), own) for path, _, own in found)

    @functools.cached_property
    def by_keys(self) -> dict[tuple[str, ...], Place]:
        """The places by the texts of their keys."""
        return {tuple(map(str, place.path)): place for place in self.places}

    @functools.cached_property
    def by_text(self) -> dict[str, Place]:
        """The places by their paths as text: ``up/kernel``; without what is ambiguous then."""
        texts = Counter(path_string(place.path) for place in self.places)
        named = ((path_string(place.path), place) for place in self.places)
        return {text: place for text, place in named if texts[text] == 1}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """How an exported function is called, and what it was made with.

    Attributes:
      function: the name of the function.
      transform: ``"jit"`` or ``"shard_map"``.
      arguments: its arguments, in order.
      static: the text of each static argument; their values are part of the program.
      inputs: the arrays that the program takes. An array that several arguments share is one.
      outputs: the arrays that it gives.
      result: what the function returns, as JSON.
      updates: for each argument what the function changes in it, as JSON.
      devices: how many devices the program runs on.
      meshes: how they are laid out: usually one mesh; none if it has no sharding.
      platforms: the platforms that it was lowered for.
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
    meshes: tuple[MeshInfo, ...]
    platforms: tuple[str, ...]
    calling_convention: int
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain data."""
        # Through text, so that tuples are lists here as after reading.
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """The manifest from plain data.

        Raises:
          ValueError: the data are none of a manifest.
        """
        try:
            manifest = cls(
                **{
                    **data,
                    "arguments": tuple(Argument(**argument) for argument in data["arguments"]),
                    "inputs": tuple(map(_array_info, data["inputs"])),
                    "outputs": tuple(map(_array_info, data["outputs"])),
                    "meshes": tuple(map(_mesh_info, data["meshes"])),
                    "platforms": tuple(map(str, data["platforms"])),
                }
            )
            _check(manifest)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return manifest

    def __str__(self) -> str:
        where = ", ".join(self.platforms)
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        meshes = "".join(f" ({mesh})" for mesh in self.meshes)
        makers = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        head = f"{self.function}: {self.transform} for {devices}{meshes} of {where}, by {makers}"
        rows = [(info.name, str(info)) for info in self.inputs]
        rows += [(name, f"= {text}, static") for name, text in self.static.items()]
        rows += [("→ " + path, str(self._info(kind, i))) for path, kind, i in self._results()]
        rows = [(printable(name), printable(text)) for name, text in rows]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([printable(head)] + [f"  {name:{width}}  {text}" for name, text in rows])

    def _info(self, kind: str, position: int) -> ArrayInfo:
        return (self.inputs if kind == "input" else self.outputs)[position]

    def _results(self) -> Iterable[tuple[str, str, int]]:
        """The arrays of the result, and those that are updated, with their names."""
        for name, tree in (("result", self.result), *self.updates.items()):
            for path, kind, position in trees.places(tree):
                yield accessor(name, path), kind, position


def _array_info(data: dict[str, Any]) -> ArrayInfo:
    info = ArrayInfo(**{**data, "shape": tuple(data["shape"])})
    if info.spec is not None:
        info = dataclasses.replace(info, spec=tuple(info.spec))
    return dataclasses.replace(info, unreduced=tuple(info.unreduced), reduced=tuple(info.reduced))


def _mesh_info(data: dict[str, Any]) -> MeshInfo:
    info = MeshInfo(**{name: tuple(entries) for name, entries in data.items()})
    if not len(info.names) == len(info.sizes) == len(info.types):
        raise TypeError("a mesh with other numbers of names, sizes and types")
    return info


_TYPES = {
    "function": str,
    "transform": str,
    "static": dict,
    "updates": dict,
    "devices": int,
    "calling_convention": int,
    "versions": dict,
}


def _check(manifest: Manifest) -> None:
    """Makes sure of what all that reads a manifest relies on."""
    for name, kind in _TYPES.items():
        if not isinstance(getattr(manifest, name), kind):
            raise TypeError(f"{name} is no {kind.__name__}")
    for info in (*manifest.inputs, *manifest.outputs):
        if not isinstance(info.name, str) or not isinstance(info.dtype, str):
            raise TypeError("an array without a name or a dtype")
    counts = {"input": len(manifest.inputs), "output": len(manifest.outputs)}
    for argument in manifest.arguments:
        if not isinstance(argument.name, str):
            raise TypeError("an argument without a name")
        trees.check(argument.tree, {"input": counts["input"]})
    for tree in (manifest.result, *manifest.updates.values()):
        trees.check(tree, counts)
