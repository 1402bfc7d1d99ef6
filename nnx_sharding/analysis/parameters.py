"""The table of parameters: how every array of a model or an optimizer is laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..core.flatten import Flat, flatten
from ..core.structure import Container, Location, VariableEntry, container_keys
from ..paths import Path, path_string
from .memory import array_bytes
from .units import printable


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterRow:
    """How one array is laid out.

    Attributes:
      path: the way to the array inside of the tree, such as ``up/kernel``.
      shape: the shape of the whole array.
      dtype: its dtype, a NumPy one or that of PRNG keys.
      spec: its ``PartitionSpec``. None if it has no sharding (an abstract array without one,
        an array of NumPy); the ``repr`` of a sharding that is no ``NamedSharding``.
      shard_shape: the shape of the part that one device holds.
      bytes_per_device: the size of that part.
      bytes_total: the size of the whole array, counted once however often it is replicated.
      sharding: the sharding itself, or None. The properties below ask it what
        ``jax.sharding.Sharding`` can tell; without a sharding each is None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec | str | None
    shard_shape: tuple[int, ...]
    bytes_per_device: int
    bytes_total: int
    sharding: Sharding | None = None

    @property
    def device_set(self) -> set[jax.Device] | None:
        """The devices that hold a part of the array."""
        return None if self.sharding is None else self.sharding.device_set

    @property
    def addressable_devices(self) -> set[jax.Device] | None:
        """Those of them that this process can reach."""
        return None if self.sharding is None else self.sharding.addressable_devices

    @property
    def num_devices(self) -> int | None:
        """The number of devices that hold a part, those of an abstract mesh included."""
        return None if self.sharding is None else self.sharding.num_devices

    @property
    def bytes_addressable(self) -> int | None:
        """The size of all parts, equal ones included, that devices of this process hold."""
        devices = self.addressable_devices
        return None if devices is None else len(devices) * self.bytes_per_device

    @property
    def memory_kind(self) -> str | None:
        """The memory of each device that holds its part, such as ``pinned_host``."""
        return None if self.sharding is None else self.sharding.memory_kind

    @property
    def is_fully_addressable(self) -> bool | None:
        """Whether this process can reach all devices that hold a part."""
        return None if self.sharding is None else self.sharding.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool | None:
        """Whether every device holds the whole array."""
        return None if self.sharding is None else self.sharding.is_fully_replicated

    def devices_indices_map(self) -> Mapping[jax.Device, tuple[slice, ...] | None] | None:
        """Which part of the array each device holds."""
        return None if self.sharding is None else self.sharding.devices_indices_map(self.shape)

    def addressable_devices_indices_map(
        self,
    ) -> Mapping[jax.Device, tuple[slice, ...] | None] | None:
        """The same for the devices that this process can reach."""
        if self.sharding is None:
            return None
        return self.sharding.addressable_devices_indices_map(self.shape)

    def is_equivalent_to(self, other: Sharding) -> bool | None:
        """Whether another sharding would lay this array out in the same way."""
        if self.sharding is None:
            return None
        return self.sharding.is_equivalent_to(other, len(self.shape))


Row = TypeVar("Row", bound=ParameterRow)


class ParameterTable(list[ParameterRow]):
    """Rows of parameters; ``print`` and notebooks show them as a table, with sums."""

    def __str__(self) -> str:
        return format_table(self)

    def _repr_html_(self) -> str:
        # The page shows these rows, and so needs this module.
        from ..report.page.fragment import parameters_html

        return parameters_html(self)


def parameter_table(tree: Any) -> ParameterTable:
    """Lists how the arrays of a model, an optimizer or any pytree of them are laid out.

    Only types and shardings are looked at: no data is fetched, nothing waits for a device.

    Args:
      tree: modules, optimizers, Variables, states and arrays, placed or abstract
        (``jax.ShapeDtypeStruct``, with or without a sharding). An array that has no sharding
        counts as lying whole on one device. What is no array, such as a string, is left out.

    Returns:
      One row for each array, in the order in which NNX walks the tree, as a list that ``print``
      and notebooks show as a table. A Variable that is reached more than once is listed once,
      under its first path.

    Raises:
      ValueError: shardings do not divide the shapes of their arrays.

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
    rows, faults = ParameterTable(), []
    for path, array in _arrays(flatten(tree)):
        try:
            rows.append(row_of(ParameterRow, path, array, getattr(array, "sharding", None)))
        except ValueError as error:
            faults.append(f"  {path or 'the root'}: {error}")
    if faults:
        raise ValueError(
            "these arrays cannot be cut as their shardings say:\n"
            + "\n".join(faults)
            + "\nChange the shapes or the shardings."
        )
    return rows


def format_table(rows: Iterable[ParameterRow]) -> str:
    """Writes a table of parameters as aligned plain text, with a last line for the sums.

    Args:
      rows: what :func:`parameter_table` returned.

    Returns:
      The lines of the table, without a newline at the end.

    Example:
      >>> import jax
      >>> from nnx_sharding.analysis import format_table, parameter_table
      >>> model = {"up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> print(format_table(parameter_table(model)))
      path   shape     dtype    spec  shard shape  bytes/device  bytes
      -----  --------  -------  ----  -----------  ------------  -----
      up     (64,256)  float32  -     (64,256)            65536  65536
      -----  --------  -------  ----  -----------  ------------  -----
      total                                               65536  65536
    """
    rows = list(rows)
    sums = (sum(row.bytes_per_device for row in rows), sum(row.bytes_total for row in rows))
    return aligned([HEADER, *map(cells, rows)], ("total", "", "", "", "", *map(str, sums)))


HEADER = ("path", "shape", "dtype", "spec", "shard shape", "bytes/device", "bytes")
_NUMBERS = 2  # how many columns at the end are aligned to the right


def cells(row: ParameterRow) -> tuple[str, ...]:
    """The texts of one row of the table, below those of ``HEADER``."""
    return (
        row.path or "(the root)",
        _shape(row.shape),
        str(row.dtype),
        "-" if row.spec is None else str(row.spec),
        _shape(row.shard_shape),
        str(row.bytes_per_device),
        str(row.bytes_total),
    )


def aligned(lines: Sequence[Sequence[str]], total: Sequence[str]) -> str:
    """A table with a header as its first line and the sums as its last."""
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, total, strict=True)]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_aligned(line, widths) for line in (lines[0], rule, *lines[1:], rule, total))


def _shape(shape: tuple[int, ...]) -> str:
    return f"({','.join(map(str, shape))})"


def _aligned(cells: Sequence[str], widths: list[int]) -> str:
    texts = len(cells) - _NUMBERS
    padded = [
        cell.ljust(width) if i < texts else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _arrays(flat: Flat) -> Iterator[tuple[str, Any]]:
    """Each array with its path; what is no array is left out."""
    structure = flat.structure
    for place in structure.walk(structure.root, iter(structure.root_slots)):
        yield from arrays_at(flat, place, place.path)


def arrays_at(flat: Flat, place: Location, path: Path) -> Iterator[tuple[str, Any]]:
    """The arrays of one Variable with their paths, which begin with that of the Variable."""
    keys = keys_inside(flat, place.entry, len(place.slots))
    for slot, key in zip(place.slots, keys, strict=True):
        leaf = flat.leaves[slot]
        if isinstance(leaf, bool | int | float | complex):
            leaf = jax.ShapeDtypeStruct((), jax.typeof(leaf).dtype)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            yield path_string((*path, *key)), leaf


def keys_inside(flat: Flat, index: int | None, count: int) -> Sequence[Path]:
    """The paths of the arrays inside of one Variable, which may hold a whole pytree."""
    entry = None if index is None else flat.structure.entries[index]
    if isinstance(entry, VariableEntry) and isinstance(entry.value, Container):
        return container_keys(entry.value.treedef)
    return [()] * count


def row_of(kind: type[Row], path: str, array: Any, sharding: Sharding | None, **more: Any) -> Row:
    """The row of an array that is laid out, or would be, by this sharding."""
    shape = tuple(array.shape)
    shard_shape = shape if sharding is None else tuple(sharding.shard_shape(shape))
    return kind(
        path=path,
        shape=shape,
        dtype=array.dtype,
        spec=_spec(sharding),
        shard_shape=shard_shape,
        bytes_per_device=array_bytes(shard_shape, array.dtype),
        bytes_total=array_bytes(shape, array.dtype),
        sharding=sharding,
        **more,
    )


def _spec(sharding: Sharding | None) -> PartitionSpec | str | None:
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return None if sharding is None else repr(sharding)
