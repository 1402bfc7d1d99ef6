"""Shardings as the compiler writes them, and what it remarks about them while it compiles.

XLA has two forms; both are read as the specs of the mesh that a program is for:

    {mesh['data'=2,'model'=4], [{'data'}, {}]}              P('data', None)
    {devices=[2,1,4]<=[8] last_tile_dim_replicate}          P('data', None) on a mesh 2 × 4

The first lists the axes of each dimension. The second divides the array into *tiles*, 2 × 1, and
says which devices hold each: [8] are the devices 0 to 7, as an array of shape (2, 1, 4), whose last
dimension are those that hold the same tile.

Where the compiler has to turn one sharding into another and knows no direct way, it gathers the
whole array on each device, and writes "Involuntary full rematerialization" into its log.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from .collectives import Collectives
from .names import module_of
from .parameters import spec_text
from .program import ProgramReport

Entries: TypeAlias = Sequence[tuple[str, ...]]  # the mesh axes over each dimension, major first


def read_sharding(written: str, rank: int | None, sizes: Mapping[str, int]) -> PartitionSpec | None:
    """Returns the spec of a sharding as the compiler writes it; None if no spec says the same.

    A dimension may be *open*, which a ``?`` marks: the compiler was free to shard it further. The
    spec has the axes that are written.

    Args:
      written: the text.
      rank: the number of dimensions of the array; None for that of the text.
      sizes: the sizes of the mesh axes, in their order.

    Example:
      >>> from nnx_sharding.analysis.compiler_shardings import read_sharding
      >>> sizes = {"data": 2, "model": 4}
      >>> read_sharding("{mesh['data'=2,'model'=4], [{'model', ?}, {}]}", 2, sizes)
      P('model', None)
      >>> read_sharding("{devices=[1,8]<=[2,4]T(1,0)}", 2, sizes)
      P(None, ('model', 'data'))
    """
    if written == "{replicated}":
        return PartitionSpec(*[None] * (rank or 0))
    named = _NAMED.match(written)
    if named is not None:
        return _read_axes(named, rank, sizes)
    if " last_tile_dims=" in written:  # Devices along manual or unreduced axes have no spec.
        return None
    tiled = _TILED.match(written)
    return None if tiled is None else _read_tiles(tiled, rank, sizes)


# {mesh['data'=2,'model'=4], [{'model', ?}, {}]}
_NAMED = re.compile(r"\{mesh\[[^\]]*\], \[(?P<dims>.*?)\]")
_DIM = re.compile(r"\{([^}]*)\}")  # {'model', ?}
# A part of what follows the dimensions: `, replicated={'model'}, unreduced={'data'}}`
_UNREDUCED = re.compile(r" unreduced=\{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r"'([^']+)'")  # 'model'
# {devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}, whose last tile dimension is of replicas
_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"(?P<replicas> last_tile_dim_replicate)?"
)


def _read_axes(
    match: re.Match[str], rank: int | None, sizes: Mapping[str, int]
) -> PartitionSpec | None:
    """Reads the form with the axes of each dimension; None if no spec says the same.

    Args:
      match: a match of ``_NAMED``, up to the bracket behind the dimensions. Its group ``dims`` has
        the axes of each dimension: ``{'model', ?}, {}``.
      rank: the number of dimensions of the array; None for that of the text.
    """
    dims, rest = match["dims"], match.string[match.end() :]
    unreduced_part = _UNREDUCED.search(rest)
    unreduced = unreduced_part["axes"] if unreduced_part else ""  # "'data'"
    # `'model':(1)2` is a part of an axis, which no spec can name. Along manual axes, each device
    # has an array of its own.
    if ":(" in dims + unreduced or " manual={" in rest:
        return None
    entries = [tuple(_AXIS.findall(dim)) for dim in _DIM.findall(dims)]  # [("model",), ()]
    unreduced_axes = frozenset(_AXIS.findall(unreduced))
    used = unreduced_axes.union(*entries)
    if not used <= sizes.keys() or rank not in (None, len(entries)):
        return None
    return spec_of_entries(entries, unreduced_axes)


def _read_tiles(
    match: re.Match[str], rank: int | None, sizes: Mapping[str, int]
) -> PartitionSpec | None:
    """Reads the form with devices: finds the spec whose tiles are on the same devices.

    ``[1,8]<=[2,4]T(1,0)`` are the devices 0 to 7 as (2, 4), transposed to (4, 2), as tiles (1, 8):
    0, 4, 1, 5, 2, 6, 3, 7. On a mesh of data 2 × model 4, the tiles of P(None, ("model", "data"))
    are on these devices, too. Returns None if no spec has such tiles.

    Args:
      match: a match of ``_TILED``. Its groups are the number of ``tiles`` in each dimension, the
        shape ``dims`` of the devices, the ``order`` to which it is transposed, and ``replicas``,
        which is None unless several devices hold each tile.
      rank: the number of dimensions of the array; None for that of the text.
      sizes: the sizes of the mesh axes, in their order.
    """
    tiles = [int(size) for size in match["tiles"].split(",")]
    dims = [int(size) for size in match["dims"].split(",")]
    order = [int(x) for x in match["order"].split(",")] if match["order"] else range(len(dims))
    is_of_mesh = math.prod(dims) == math.prod(sizes.values()) == math.prod(tiles)
    counts = tiles[:-1] if match["replicas"] else tiles  # by dimension of the array
    if not is_of_mesh or rank not in (None, len(counts)):
        return None

    def devices_of_tiles(shape: Sequence[int], order: Sequence[int]) -> np.ndarray:
        """Returns the devices of each tile: those of a mesh of this shape, in this order."""
        array = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(tiles)
        # Devices that hold the same tile have no order.
        return np.sort(array, axis=-1) if match["replicas"] else array

    devices = devices_of_tiles(dims, order)

    def has_parts(dimension: int, count: int) -> bool:
        return counts[dimension] == count

    # Each spec with as many parts in each dimension is tried, until one has the same devices.
    for entries in possible_entries(len(counts), has_parts, sizes):
        used = [axis for axes in entries for axis in axes]
        # The axes over dimensions, then those along which tiles are replicated.
        major_first = [*used, *(axis for axis in sizes if axis not in used)]
        positions = [[*sizes].index(axis) for axis in major_first]
        if np.array_equal(devices_of_tiles([*sizes.values()], positions), devices):
            return spec_of_entries(entries)
    return None  # The sharding is over a part of an axis.


def possible_entries(
    rank: int,
    divides: Callable[[int, int], bool],
    sizes: Mapping[str, int],
    *,
    any_order: bool = False,
) -> Iterator[Entries]:
    """Yields the mesh axes over each dimension, for all specs that divide an array as asked.

    Args:
      rank: the number of dimensions of the array.
      divides: tells whether a dimension, by its number, may be divided into so many parts.
      sizes: the sizes of the mesh axes, in their order.
      any_order: True if the order of axes over one dimension does not matter: then only their order
        in the mesh is tried. False tries all orders.
    """
    axes = [axis for axis, size in sizes.items() if size > 1]
    choose = itertools.combinations if any_order else itertools.permutations
    entries_of_any = [entry for count in range(len(axes) + 1) for entry in choose(axes, count)]
    # The number of parts into which the axes of each entry divide a dimension.
    num_parts = {entry: math.prod(sizes[axis] for axis in entry) for entry in entries_of_any}
    # For each dimension, the entries that divide it as asked.
    choices = [
        [entry for entry, count in num_parts.items() if divides(dimension, count)]
        for dimension in range(rank)
    ]
    for entries in itertools.product(*choices):
        used = [axis for entry in entries for axis in entry]
        if len({*used}) == len(used):  # An axis can shard only one dimension.
            yield entries


def spec_of_entries(entries: Entries, unreduced: frozenset[str] = frozenset()) -> PartitionSpec:
    """Makes a spec from the axes of each dimension.

    For ``[("data", "model"), ("stage",), ()]``, it is ``P(("data", "model"), "stage", None)``.
    Values along the ``unreduced`` axes are still to be summed.
    """
    partitions: list[tuple[str, ...] | str | None] = []
    for axes in entries:
        if len(axes) > 1:
            partitions.append(axes)
        else:
            partitions.append(axes[0] if axes else None)
    return PartitionSpec(*partitions, unreduced=unreduced)


class Rematerialization(NamedTuple):
    """A remark of the compiler that it gathers an array in order to shard it in another way."""

    operation: str  # the name of the operation, such as ``jit(f)/up/dot_general``
    before: str  # the sharding, as the compiler writes it
    after: str

    def text(self, report: ProgramReport) -> str:
        """Writes the remark in the names of the user's program, which ``report`` has.

        For example, ``dot_general in model.up (model.py:12): P('data') → P('model')``.
        """
        sizes = {} if report.mesh is None else report.mesh.axes

        def sharding_text(written: str) -> str:
            """Writes a sharding as a spec; if no spec says the same, as the compiler does."""
            spec = read_sharding(written, None, sizes)
            return written if spec is None else spec_text(spec)

        modules = {row.path for row in report.activations}
        module = module_of(self.operation, modules)
        # The line is that of a collective with this operation, perhaps among others that the
        # compiler has joined to its name.
        collectives = report.collectives or Collectives()
        sources = [x.source for x in collectives if self.operation in (x.operation or "")]
        where = f" in {module}" if module else ""
        line = next((f" ({source})" for source in sources if source), "")
        name = self.operation.rpartition("/")[2]
        before, after = sharding_text(self.before), sharding_text(self.after)
        return f"{name}{where}{line}: {before} → {after}"


# … Involuntary full rematerialization … from sharding {…} to {…} without … op_name="jit(f)/dot" …
_REMARK = re.compile(
    r"^.*Involuntary full rematerialization.*? from sharding (\{.*?\}) to (\{.*?\}) "
    r"(?:efficiently|without) .*?(?:op_name=\"([^\"]*)\".*)?$",
    re.MULTILINE,
)


def rematerializations(log: str) -> tuple[list[Rematerialization], str]:
    """Finds the remarks in the log of the compiler; returns each once, and the rest of the log."""
    remarks = dict.fromkeys(
        Rematerialization(operation or "an operation", before, after)
        for before, after, operation in _REMARK.findall(log)
    )
    without_remarks = _REMARK.sub("", log)
    # Each remark has left an empty line.
    return [*remarks], re.sub(r"\n{2,}", "\n", without_remarks).lstrip("\n")
