"""The tables of parameters and of activations: how every array of a model or program is sharded."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..core.flatten import Flat, flatten
from ..core.structure import Container, Location, Structure, VariableEntry, locations_in
from ..core.treedefs import container_keys
from ..errors import raise_if_any
from ..specs.fitting import axes_of, pad_entries, with_entries
from ..specs.paths import Path, path_string
from .json_codec import UNWRITTEN
from .memory import array_bytes
from .tables import Pictured, Table, axis_styles, drawn, text
from .units import bytes_text


def spec_text(spec: PartitionSpec | str | None) -> str:
    """Writes a spec as a user would; ``-`` without one."""
    if not isinstance(spec, PartitionSpec):
        return spec or "-"
    sums = []  # texts, such as ``unreduced={'model'}``
    for kind in ("unreduced", "reduced"):
        axes = sorted(getattr(spec, kind))
        if axes:
            sums.append(f"{kind}={{{', '.join(map(repr, axes))}}}")
    return f"P({', '.join([*map(repr, spec.partitions), *sums])})"


# What a Variable is for. A "variable" is of a class that says nothing: it may have a gradient.
VariableRole: TypeAlias = Literal["parameter", "optimizer state", "state", "variable"]


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterRow:
    """How one array is sharded.

    Attributes:
      path: the path of the array, such as ``up/kernel`` in a tree, and
        ``model.blocks[0].up.kernel`` in the arguments of a program.
      shape: the global shape of the array.
      dtype: its dtype, such as ``float32``.
      spec: its ``PartitionSpec``; in programs with one entry per dimension. None if it has no
        sharding (an abstract array without one, an array of NumPy); the ``repr`` of a sharding
        that is not a ``NamedSharding``.
      shard_shape: the shape of the shard of one device.
      bytes_per_device: the size of that shard.
      bytes_total: the size of the global array, counted once however often it is replicated.
      memory_kind: the memory that holds it, such as ``device`` or ``pinned_host``; None if unknown.
      donated: whether the caller donates it to the program.
      used: whether the program uses it; unused arrays are not passed to it.
      variable: the type of its Variable, such as ``Param``; None for an array outside of Variables.
      role: what its Variable is for, by the class of Flax that the type is or extends:
        ``parameter`` (``nnx.Param``, such as ``LoRAParam``), ``optimizer state``, ``state``
        (statistics, caches, random streams and what else has no gradient), or ``variable``.
      sharding: the sharding itself; None without one, and in a report that was read from a file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | str | None
    shard_shape: tuple[int, ...]
    bytes_per_device: int
    bytes_total: int
    memory_kind: str | None = None
    donated: bool = False
    used: bool = True
    variable: str | None = None
    role: VariableRole | None = None
    sharding: Sharding | None = dataclasses.field(default=None, compare=False, metadata=UNWRITTEN)

    @property
    def marks(self) -> list[str]:
        """A list of the words ``donated`` and ``unused``, each only if it applies."""
        marks = {"donated": self.donated, "unused": not self.used}
        return [mark for mark, applies in marks.items() if applies]

    @property
    def num_devices(self) -> int:
        """How many devices hold a shard, including those of an abstract mesh; 1 if unknown."""
        return 1 if self.sharding is None else self.sharding.num_devices

    @property
    def bytes_addressable(self) -> int | None:
        """The size of all shards on devices of this process; None if the devices are unknown."""
        if self.sharding is None:
            return None
        # Each device has a shard.
        return len(self.sharding.addressable_devices) * self.bytes_per_device


Row = TypeVar("Row", bound=ParameterRow)


class ParameterTable(list[ParameterRow], Pictured):
    """Rows of parameters, which ``print`` shows as a table with exact bytes.

    Notebooks and a ``rich.console.Console`` show them with units and coloured mesh axes.
    """

    def _pictures(self, width: int) -> Iterable[Any]:
        yield rows_table(self, width)

    def __str__(self) -> str:
        sums = sum(row.bytes_per_device for row in self), sum(row.bytes_total for row in self)
        footer = ("total", "", "", "", "", *map(str, sums))
        return drawn(Table(HEADER, map(cells, self), numbers=2, footer=footer))


def parameter_table(tree: Any) -> ParameterTable:
    """Lists how the arrays of a model, an optimizer or any pytree of them are sharded.

    Only types and shardings are used: no data is fetched, nothing waits for a device.

    Args:
      tree: modules, optimizers, Variables, states and arrays, placed or abstract
        (``jax.ShapeDtypeStruct``, with or without a sharding). An array without a sharding
        counts as if it were on one device. Values that are no arrays, such as strings, are left
        out.

    Returns:
      One row for each array, in the order in which NNX walks the tree, as a list that ``print``
      and notebooks show as a table. A shared Variable is listed once, under its first path.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
      >>> from nnx_sharding.analysis import parameter_table
      >>> columns = NamedSharding(AbstractMesh((2, 4), ("data", "model")), P(None, "model"))
      >>> kernel = jax.ShapeDtypeStruct((64, 256), "float32", sharding=columns)
      >>> [row] = parameter_table({"up": nnx.Dict(kernel=nnx.Param(kernel))})
      >>> row.path, row.shard_shape, row.bytes_per_device, row.bytes_total
      ('up/kernel', (64, 64), 16384, 65536)
      >>> row.spec == P(None, "model")
      True
    """
    rows = ParameterTable()
    faults = []  # Faults are collected, because one error has to tell all of them.
    flat = flatten(tree)
    structure = flat.structure
    # A location is where a Variable is, or an array outside of Variables.
    for location in locations_in(structure):
        # The fields of a row that say in which Variable the array is.
        fields = variable_fields(structure, location.object_index)
        for path, array in arrays_at(flat, location, location.path):
            sharding = getattr(array, "sharding", None)
            try:
                rows.append(row_of(ParameterRow, path, array, sharding, **fields))
            except ValueError as error:  # The sharding does not divide the shape.
                faults.append(f"  {path or 'the root'}: {error}")
    head = "the shardings of these arrays do not divide their shapes:"
    raise_if_any(ValueError, head, faults, "Change the shapes or the shardings.")
    return rows


HEADER = ("path", "shape", "dtype", "spec", "shard shape", "bytes/device", "bytes")


def cells(row: ParameterRow) -> tuple[str, ...]:
    """Returns the texts of one row of the table, in the order of ``HEADER``."""
    return (
        " ".join([row.path or "(the root)", *(f"({mark})" for mark in row.marks)]),
        shape_text(row.shape),
        row.dtype,
        spec_text(row.spec),
        shape_text(row.shard_shape),
        str(row.bytes_per_device),
        str(row.bytes_total),
    )


def shape_text(shape: Sequence[int]) -> str:
    """Writes a shape as tables show it, such as ``(64,256)``."""
    return f"({','.join(map(str, shape))})"


def rows_table(rows: Sequence[ParameterRow], width: int, most: int = 200) -> Any:
    """Draws rows for consoles, with coloured axes, and units for bytes.

    A console of less than 100 columns gets no shard shapes.

    Args:
      rows: the rows.
      width: the columns of the console.
      most: the number of rows to draw; one more line counts the other rows.
    """
    styles = spec_styles(rows)
    sums = sum(row.bytes_per_device for row in rows), sum(row.bytes_total for row in rows)
    header: Sequence[Any] = HEADER
    footer: Sequence[Any] = ["total", "", "", "", "", *map(bytes_text, sums)]
    body: list[Sequence[Any]] = []
    for row in rows:
        path, shape, dtype, spec, shard_shape, *_ = cells(row)
        # Exact bytes, the other two cells, are replaced by bytes with units.
        sizes = bytes_text(row.bytes_per_device), bytes_text(row.bytes_total)
        body.append([path, shape, dtype, text(spec, styles=styles), shard_shape, *sizes])
    if width < 100:  # The column of the shard shape, the fifth one, is left out.
        header, footer = ([*line[:4], *line[5:]] for line in (header, footer))
        body = [[*line[:4], *line[5:]] for line in body]
    return Table(header, body, numbers=2, footer=footer, most=most)


def spec_styles(rows: Iterable[Any]) -> dict[str, str]:
    """Chooses a colour for each mesh axis, by how specs write it: ``{"'data'": "cyan"}``."""
    styles = axis_styles(axis for row in rows for axis in axes_in(row.spec))
    return {repr(axis): style for axis, style in styles.items()}


def axes_in(spec: PartitionSpec | str | None) -> tuple[str, ...]:
    """Lists the mesh axes that partition an array, major first, as text."""
    entries = spec.partitions if isinstance(spec, PartitionSpec) else ()
    return tuple(str(axis) for entry in entries for axis in axes_of(entry))


def arrays_at(flat: Flat, location: Location, path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of one Variable, each after its path as text: ``("up/kernel", array)``.

    Values that are no arrays, such as strings, are left out. A Python number counts as the scalar
    array that JAX makes of it.

    Args:
      flat: the tree that has the Variable, as a structure and its leaves.
      location: where the Variable is, with the numbers of its leaves (slots).
      path: the path of the Variable, to which the keys in its value are added.
    """
    keys = keys_inside(flat, location.object_index, len(location.slots))
    for slot, key in zip(location.slots, keys, strict=True):
        leaf = flat.leaves[slot]
        if isinstance(leaf, bool | int | float | complex):
            leaf = jax.ShapeDtypeStruct((), jax.typeof(leaf).dtype)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            yield path_string((*path, *key)), leaf


def variable_fields(structure: Structure, index: int | None) -> dict[str, Any]:
    """Returns the fields of a row that say what Variable an array is in; empty if it is in none.

    ``index`` is the number of the Variable's entry in the structure; None for an array without one.
    """
    entry = None if index is None else structure.entries[index]
    if not isinstance(entry, VariableEntry):
        return {}
    return {"variable": entry.type.__name__, "role": _role_of(entry.type)}


def _role_of(variable_class: type) -> VariableRole:
    """Returns what Variables of a class are for; a user's class inherits this from Flax's."""
    if issubclass(variable_class, nnx.Param):
        return "parameter"
    if issubclass(variable_class, nnx.OptState):
        return "optimizer state"
    return "state" if issubclass(variable_class, _STATES) else "variable"


_STATES = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState, nnx.metrics.MetricState)


def keys_inside(flat: Flat, index: int | None, count: int) -> Sequence[Path]:
    """Lists the paths of the ``count`` arrays within one Variable, whose value may be a pytree.

    ``index`` is the number of the Variable's entry in the structure; None for an array without a
    Variable.
    """
    entry = None if index is None else flat.structure.entries[index]
    if isinstance(entry, VariableEntry) and isinstance(entry.value, Container):
        return container_keys(entry.value.treedef)
    return [()] * count


def row_of(kind: type[Row], path: str, array: Any, sharding: Sharding | None, **more: Any) -> Row:
    """Makes the row of an array with this sharding.

    Args:
      kind: the class of the row.
      path: the path of the array.
      array: the array, or an object with its shape and dtype.
      sharding: its sharding, if it has one.
      **more: other fields of the row.

    Raises:
      ValueError: the sharding does not divide the shape.
    """
    shape = shard_shape = tuple(array.shape)
    spec: PartitionSpec | str | None = None
    if sharding is not None:
        shard_shape = tuple(sharding.shard_shape(shape))
        spec = sharding.spec if isinstance(sharding, NamedSharding) else repr(sharding)
    return kind(
        path=path,
        shape=shape,
        dtype=str(array.dtype),
        spec=spec,
        shard_shape=shard_shape,
        bytes_per_device=array_bytes(shard_shape, array.dtype),
        bytes_total=array_bytes(shape, array.dtype),
        memory_kind=None if sharding is None else sharding.memory_kind,
        sharding=sharding,
        **more,
    )


def argument_row(path: str, info: Any, sharding: Sharding | None, **more: Any) -> ParameterRow:
    """Makes the row of an argument of a program, with a spec that has an entry for each dimension.

    Args:
      path: the path of the argument.
      info: an object with its shape and dtype, and whether it is donated, as in
        ``jax.stages.Compiled.args_info``.
      sharding: its sharding in the program.
      **more: other fields of the row.
    """
    if isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=full_spec(sharding.spec, len(info.shape)))
    return row_of(ParameterRow, path, info, sharding, donated=bool(info.donated), **more)


def full_spec(spec: PartitionSpec, rank: int) -> PartitionSpec:
    """Returns the spec with an entry for each dimension."""
    return with_entries(spec, pad_entries(spec, rank))


def mesh_of(shardings: Iterable[Any]) -> Mesh | None:
    """Returns the mesh that most shardings have; None if none has a mesh with axes."""
    named = (sharding for sharding in shardings if isinstance(sharding, NamedSharding))
    meshes = Counter[Mesh]()
    for sharding in named:
        # XLA may give scalars a mesh without axes, which does not count.
        if isinstance(sharding.mesh, Mesh) and sharding.mesh.axis_names:
            meshes[sharding.mesh] += 1
    return meshes.most_common(1)[0][0] if meshes else None


def device_bytes(rows: Iterable[ParameterRow]) -> dict[int, int]:
    """Sums the bytes on each device, by its id or by its position in an abstract mesh."""
    # Bytes are summed by sharding first, because listing devices takes long, and there are far
    # fewer shardings than arrays.
    sums: Counter[Sharding] = Counter()
    for row in rows:
        if row.sharding is not None:
            sums[row.sharding] += row.bytes_per_device
    held: Counter[int] = Counter()
    for sharding, size in sums.items():
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            ids = [*range(sharding.num_devices)]
        else:
            devices: set[Any] = sharding.device_set
            ids = [device.id for device in devices]
        for device_id in ids:
            held[device_id] += size
    return dict(sorted(held.items()))


ChosenBy: TypeAlias = Literal["user", "strategy", "types", "inferred", "compiler"]


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationRow:
    """How one array that a module returns is sharded.

    Attributes:
      path: the module, such as ``model.blocks[0].up``.
      module: the name of its class.
      method: the method that returned the array.
      output: where the array is in the output of the method, such as ``[0]``; empty if it is all of
        the output.
      shape: the shape of the array in the call; without mapped dimensions under ``vmap``, and in a
        ``shard_map`` that of the part on one device.
      dtype: its dtype.
      spec: its ``PartitionSpec``, with one entry per dimension, ``UNCONSTRAINED`` where the
        compiler chooses; None if it chooses for all, and in a ``shard_map`` over all mesh axes.
      shard_shape: the shape of the shard of one device; None if the compiler chooses any of it.
      bytes_per_device: the size of that shard.
      bytes_total: the size of an array of this ``shape``, so in a ``shard_map`` of the part.
      chosen_by: ``user`` if the transform was given the spec, for the module or for what the
        function returns; ``strategy`` if it came with the shardings of an argument, or was inferred
        for them; ``types`` if it follows from the types of arrays on Explicit axes; ``inferred`` if
        the compiler chose the spec, and it was read from the shapes in the compiled program;
        ``compiler`` if it is not known.
    """

    path: str
    module: str
    method: str
    output: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None
    shard_shape: tuple[int, ...] | None
    bytes_per_device: int | None
    bytes_total: int
    chosen_by: ChosenBy

    @property
    def name(self) -> str:
        """The path, the method unless it is ``__call__``, and the array's place in the output."""
        method = "" if self.method == "__call__" else f".{self.method}()"
        return f"{self.path}{method}{self.output}"


class ActivationTable(list[ActivationRow], Pictured):
    """Rows of activations; ``print`` and notebooks show them as a table."""

    # Whether these are the rows of a trace. What the compiler chooses is not known then.
    of_trace: bool = False

    def _pictures(self, width: int) -> Iterable[Any]:
        yield activations_table(self)
        if self.of_trace and any(row.chosen_by == "compiler" for row in self):
            yield text("compiler: chooses when it compiles; `compiled.activations()` has the specs")


def activation_row(
    array: jax.Array | jax.core.ShapedArray | jax.ShapeDtypeStruct,
    sharding: NamedSharding | None,
    chosen_by: ChosenBy,
    *,
    is_part: bool = False,
    **names: str,
) -> ActivationRow:
    """Makes the row of an array that a module returned.

    Args:
      array: the array, or its shape and dtype.
      sharding: how it is sharded; None if that is unknown.
      chosen_by: who chose that.
      is_part: whether the array is the part on one device, as in a ``shard_map`` over all axes.
      **names: ``path``, ``module``, ``method`` and ``output`` of the row.
    """
    spec = shard_shape = bytes_per_device = None
    if sharding is not None:
        spec = full_spec(sharding.spec, array.ndim)
        if PartitionSpec.UNCONSTRAINED not in spec.partitions:
            shard_shape = tuple(sharding.shard_shape(array.shape))
            bytes_per_device = array_bytes(shard_shape, array.dtype)
    elif is_part:
        shard_shape = tuple(array.shape)
        bytes_per_device = array_bytes(shard_shape, array.dtype)
    return ActivationRow(
        **names,
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        spec=spec,
        shard_shape=shard_shape,
        bytes_per_device=bytes_per_device,
        bytes_total=array_bytes(array.shape, array.dtype),
        chosen_by=chosen_by,
    )


def _is_part(row: ActivationRow) -> bool:
    """Tells whether a row has the part on one device, in a ``shard_map`` over all mesh axes.

    Without a spec, the shape on one device is known only there.
    """
    return row.spec is None and row.shard_shape is not None


_HEADER = ("activation", "module", "shape", "dtype", "spec", "chosen by", "bytes/device", "bytes")


def activations_table(rows: Iterable[ActivationRow], most: int = 200) -> Any:
    """Draws activations for consoles: with coloured axes, and units for bytes.

    ``most`` is the number of rows that are shown; one more line counts the other rows.
    """
    rows = list(rows)
    styles = spec_styles(rows)  # a colour for each mesh axis in the specs
    lines = (
        (
            row.name,
            row.module,
            shape_text(row.shape),
            row.dtype,
            "part on one device" if _is_part(row) else text(spec_text(row.spec), styles=styles),
            row.chosen_by,
            bytes_text(row.bytes_per_device),
            # In a `shard_map`, the size of the whole array is unknown.
            bytes_text(None if _is_part(row) else row.bytes_total),
        )
        for row in rows
    )
    return Table(_HEADER, lines, numbers=2, most=most)  # the last two columns are numbers
