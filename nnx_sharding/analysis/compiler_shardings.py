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
        dims = named["dims"]  # "{'model', ?}, {}"
        summands = _UNREDUCED.search(written, named.end())  # " unreduced={'data'}"
        unreduced = summands["axes"] if summands else ""
        # `'model':(1)2` is a part of an axis, which no spec can name. Along manual axes, each
        # device has an array of its own.
        if ":(" in dims + unreduced or " manual={" in written[named.end() :]:
            return None
        entries = [tuple(_AXIS.findall(dim)) for dim in _DIM.findall(dims)]  # [("model",), ()]
        summed = frozenset(_AXIS.findall(unreduced))
        is_of_mesh = all(axis in sizes for axes in (*entries, summed) for axis in axes)
        return (
            spec_of_entries(entries, summed)
            if is_of_mesh and rank in (None, len(entries))
            else None
        )
    if " last_tile_dims=" in written:  # Devices along manual or unreduced axes have no spec.
        return None
    tiled = _TILED.match(written)
    return None if tiled is None else _read_tiles(tiled, rank, sizes)


# {mesh['data'=2,'model'=4], [{'model', ?}, {}]}
_NAMED = re.compile(r"\{mesh\[[^\]]*\], \[(?P<dims>.*?)\]")
_DIM = re.compile(r"\{([^}]*)\}")  # {'model', ?}
# What follows the dimensions: `, replicated={'model'}, unreduced={'data'}}`
_UNREDUCED = re.compile(r" unreduced=\{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r"'([^']+)'")  # 'model'
# {devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}, whose last tile dimension is of replicas
_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"(?P<replicas> last_tile_dim_replicate)?"
)


def _read_tiles(
    match: re.Match[str], rank: int | None, sizes: Mapping[str, int]
) -> PartitionSpec | None:
    """Reads the form with devices: the spec whose tiles are on the same devices.

    ``[1,8]<=[2,4]T(1,0)`` are the devices 0 to 7 as (2, 4), transposed to (4, 2), as tiles (1, 8):
    0, 4, 1, 5, 2, 6, 3, 7. On a mesh of data 2 × model 4, P(None, ("model", "data")) has the same.

    Args:
      match: of ``_TILED``: the number of ``tiles`` in each dimension; ``dims`` and ``order``, the
        shape of the devices and how it is transposed; and whether there are ``replicas``.
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
        # The device of each tile, for devices in a mesh of this shape, transposed to this order.
        array = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(tiles)
        # Devices that hold the same tile have no order.
        return np.sort(array, axis=-1) if match["replicas"] else array

    devices = devices_of_tiles(dims, order)
    # Each spec with as many parts in each dimension is tried, until one has the same devices.
    for entries in possible_entries(len(counts), lambda i, n: n == counts[i], sizes):
        used = [axis for axes in entries for axis in axes]
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
    subsets = [x for n in range(len(axes) + 1) for x in choose(axes, n)]
    counts = {subset: math.prod(sizes[axis] for axis in subset) for subset in subsets}
    choices = [[x for x, count in counts.items() if divides(i, count)] for i in range(rank)]
    for entries in itertools.product(*choices):
        used = [axis for entry in entries for axis in entry]
        if len({*used}) == len(used):  # an axis shards one dimension
            yield entries


def spec_of_entries(entries: Entries, unreduced: frozenset[str] = frozenset()) -> PartitionSpec:
    """Makes a spec from the axes of each dimension: one is written alone, and none as None.

    Values along the ``unreduced`` axes are still to be summed.
    """
    plain = (axes if len(axes) > 1 else next(iter(axes), None) for axes in entries)
    return PartitionSpec(*plain, unreduced=unreduced)


class Rematerialization(NamedTuple):
    """A remark of the compiler that it gathers an array in order to shard it in another way."""

    operation: str  # the name of the operation, such as ``jit(f)/up/dot_general``
    before: str  # the sharding, as the compiler writes it
    after: str

    def text(self, report: ProgramReport) -> str:
        """Writes the remark in the names of the user's program, which ``report`` has.

        Such as ``dot_general in model.up (model.py:12): P('data') → P('model')``.
        """
        sizes = {} if report.mesh is None else report.mesh.axes  # without a mesh, no text is read

        def spec_of(written: str) -> str:
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
        return f"{name}{where}{line}: {spec_of(self.before)} → {spec_of(self.after)}"


# … Involuntary full rematerialization … from sharding {…} to {…} without … op_name="jit(f)/dot" …
_REMARK = re.compile(
    r"^.*Involuntary full rematerialization.*? from sharding (\{.*?\}) to (\{.*?\}) "
    r"(?:efficiently|without) .*?(?:op_name=\"([^\"]*)\".*)?$",
    re.MULTILINE,
)


def rematerializations(log: str) -> tuple[list[Rematerialization], str]:
    """Finds the remarks in the log of the compiler; returns each once, and the rest of the log."""
    found = dict.fromkeys(
        Rematerialization(operation or "an operation", before, after)
        for before, after, operation in _REMARK.findall(log)
    )
    return [*found], re.sub(r"\n{2,}", "\n", _REMARK.sub("", log)).lstrip("\n")
