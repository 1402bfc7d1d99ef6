"""What the devices exchange: each collective of a compiled program, with bytes and mesh axes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, cast, get_args, overload

import numpy as np

from ..errors import is_library
from .hlo import Groups, Instruction, Module, Runs, Shape, arrays, parse
from .units import bytes_text, printable

CollectiveKind: TypeAlias = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]
Kind: TypeAlias = CollectiveKind | Literal["ragged-all-to-all", "collective-broadcast"]

_KINDS: frozenset[str] = frozenset(
    (*get_args(CollectiveKind), "ragged-all-to-all", "collective-broadcast")
)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program; a pair of ``-start`` and ``-done`` is one.

    What a ring algorithm sends for n devices in a group, as in the documentation of NCCL's tests
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): 2·bytes·(n-1)/n for an
    all-reduce, bytes·(n-1)/n for all-gather, reduce-scatter and all-to-all. A permutation sends
    all bytes, and so does a broadcast. For a ragged all-to-all it is the most that there can be.

    Attributes:
      kind: such as ``all-reduce``.
      name: the name of the instruction.
      computation: the name of the computation that it is in.
      dtype: the dtype of the arrays, as HLO writes it; several are joined by ``+``.
      shapes: the shapes of its results on one device.
      bytes: of the larger of operand and result on one device.
      bytes_sent: what one device sends to others in one run; of devices that differ, the most.
      group_size: how many devices take part together; of groups that differ, the most.
      num_groups: how many such groups there are.
      axes: the mesh axes that it runs over, in the order of the mesh; axes of size 1 are not
        among them. None if no set of axes explains the groups, or the mesh is not known.
      in_loop: whether it is in a loop.
      times: how often it runs in one call; each branch of a conditional counts as taken. None in
        a loop of unknown length.
      operation: what it was made from, such as ``jit(f)/mlp/dot_general``.
      source: the line of the user's code, such as ``model.py:12``.
    """

    kind: Kind
    name: str
    computation: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    bytes_sent: int
    group_size: int
    num_groups: int
    axes: tuple[str, ...] | None
    in_loop: bool
    times: int | None
    operation: str | None
    source: str | None

    @property
    def total_bytes_sent(self) -> int:
        """What one device sends in all runs; in a loop of unknown length in one."""
        return self.bytes_sent * (1 if self.times is None else self.times)

    def __str__(self) -> str:
        return printable("  ".join(text for text in _cells(self) if text))


class Collectives(Sequence[Collective]):
    """The collectives of a program; ``print`` shows them as a table.

    Args:
      found: the collectives in the order of the program.
    """

    def __init__(self, found: Iterable[Collective] = ()):
        self._found = tuple(found)

    @overload
    def __getitem__(self, index: int) -> Collective: ...

    @overload
    def __getitem__(self, index: slice) -> Collectives: ...

    def __getitem__(self, index: int | slice) -> Collective | Collectives:
        return Collectives(self._found[index]) if isinstance(index, slice) else self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collectives) and self._found == other._found

    def __hash__(self) -> int:
        return hash(self._found)

    def of(self, kind: Kind | None = None, *axes: str) -> Collectives:
        """Those of one kind, of the kind and exactly these mesh axes, or of the axes alone.

        Args:
          kind: None for any.
          *axes: in any order; none for any.

        Raises:
          ValueError: there is no such kind.

        Example:
          >>> from nnx_sharding.analysis import collectives_of
          >>> hlo = "%a = f32[64]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add"
          >>> len(collectives_of(hlo, {"data": 2, "model": 2}).of("all-reduce", "model"))
          1
        """
        if kind is not None and kind not in _KINDS:
            raise ValueError(f"{kind!r} is no kind of collective; there are {sorted(_KINDS)}.")
        return Collectives(
            one
            for one in self._found
            if (kind is None or one.kind == kind)
            and (not axes or (one.axes is not None and {*one.axes} == {*axes}))
        )

    @property
    def bytes_sent(self) -> int:
        """What one device sends in one call; loops of unknown length count once."""
        return sum(one.total_bytes_sent for one in self._found)

    @property
    def has_unknown_times(self) -> bool:
        """Whether one is in a loop of unknown length, so that there may be more."""
        return any(one.times is None for one in self._found)

    def by_kind(self) -> dict[Kind, int]:
        """What one device sends in one call, by kind."""
        sums: dict[Kind, int] = {}
        for one in self._found:
            sums[one.kind] = sums.get(one.kind, 0) + one.total_bytes_sent
        return sums

    def by_axes(self) -> dict[tuple[str, ...] | None, int]:
        """What one device sends in one call, by mesh axes; None for what no axes explain."""
        sums: dict[tuple[str, ...] | None, int] = {}
        for one in self._found:
            sums[one.axes] = sums.get(one.axes, 0) + one.total_bytes_sent
        return sums

    def __repr__(self) -> str:
        return f"Collectives({list(self._found)!r})"

    def __str__(self) -> str:
        if not self._found:
            return "no collectives"
        rows = [[printable(cell) for cell in row] for row in (_HEADER, *map(_cells, self._found))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        more = " or more, as a loop is of unknown length" if self.has_unknown_times else ""
        return "\n".join(
            [*lines, f"sent by one device in one call: {bytes_text(self.bytes_sent)}{more}"]
        )


_HEADER = ("kind", "axes", "bytes", "sent", "times", "operation", "source")


def _cells(one: Collective) -> tuple[str, ...]:
    return (
        one.kind,
        "?" if one.axes is None else ",".join(one.axes) or "-",
        bytes_text(one.bytes),
        bytes_text(one.bytes_sent),
        "?" if one.times is None else str(one.times),
        one.operation or "",
        one.source or "",
    )


def collectives_of(hlo: str | Module, mesh: Any = None) -> Collectives:
    """Lists the collectives of a compiled program.

    Args:
      hlo: the text of the compiled program, or what :func:`~nnx_sharding.analysis.hlo.parse` made
        of it.
      mesh: the mesh that it was compiled for, or the sizes of its axes by name; its devices are
        counted in its order, as JAX assigns them. None leaves the axes unknown.

    Returns:
      The collectives, in the order of the text.

    Example:
      >>> from nnx_sharding.analysis import collectives_of
      >>> hlo = "%a = f32[64]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add"
      >>> [found] = collectives_of(hlo, {"data": 2, "model": 4})
      >>> found.kind, found.bytes, found.bytes_sent, found.axes
      ('all-reduce', 256, 384, ('model',))
    """
    module = parse(hlo) if isinstance(hlo, str) else hlo
    sizes = _sizes(mesh)
    runs = module.runs
    return Collectives(
        _collective(module, computation.name, instruction, kind, sizes, runs[computation.name])
        for computation in module.computations
        for instruction in computation.instructions
        if (kind := instruction.opcode.removesuffix("-start")) in _KINDS
    )


def _sizes(mesh: Any) -> dict[str, int]:
    """The sizes of the axes of a mesh by name."""
    shape = {} if mesh is None else getattr(mesh, "shape", mesh)
    return {str(axis): int(size) for axis, size in dict(shape).items()}


def _collective(
    module: Module,
    computation: str,
    instruction: Instruction,
    opcode: str,
    sizes: Mapping[str, int],
    runs: Runs,
) -> Collective:
    kind = cast(Kind, opcode)
    results = _results(instruction)
    count = math.prod(sizes.values()) if sizes else module.num_devices or 1
    if kind == "collective-permute":
        pairs = tuple(pair for pair in instruction.source_target_pairs if len({*pair}) > 1)
        groups: Groups | None = _connected(pairs)
        axes = _axes_of_pairs(pairs, tuple(sizes.items()))
    else:
        groups = _groups(instruction, count)
        axes = None if groups is None else axes_of(groups, tuple(sizes.items()))
    size = max(map(len, groups), default=1) if groups is not None else 1
    larger = sum(shape.bytes for shape in results) * (size if kind == "reduce-scatter" else 1)
    return Collective(
        kind=kind,
        name=instruction.name,
        computation=computation,
        dtype="+".join(dict.fromkeys(shape.dtype for shape in results)),
        shapes=tuple(shape.dims for shape in results),
        bytes=larger,
        bytes_sent=_moved(kind, larger, size),
        group_size=size,
        num_groups=len(groups) if groups is not None else 1,
        axes=axes if sizes else None,
        in_loop=runs.in_loop,
        times=runs.times,
        operation=instruction.operation,
        source=_users_line(module.source(instruction)),
    )


def _results(instruction: Instruction) -> list[Shape]:
    """The arrays that a collective makes, also if it is the start of a pair."""
    shape = instruction.shape
    # An all-reduce-start has the shape of the result; other starts are (operand, result, ...).
    if instruction.opcode in _STARTS and not isinstance(shape, Shape) and len(shape) > 1:
        return list(arrays(shape[1]))
    return list(arrays(shape))


_STARTS = tuple(f"{kind}-start" for kind in _KINDS if kind != "all-reduce")


def _moved(kind: Kind, larger: int, size: int) -> int:
    if size < 2:
        return 0
    if kind in ("collective-permute", "collective-broadcast"):
        return larger
    # Rounded up: a device sends whole bytes.
    return -(-larger * (2 if kind == "all-reduce" else 1) * (size - 1) // size)


# Who takes part


def _groups(instruction: Instruction, count: int) -> Groups | None:
    """The groups of devices; None if they are not understood."""
    groups = instruction.replica_groups
    attributes = instruction.attributes
    over_partitions = "channel_id" in attributes and "use_global_device_ids" not in attributes
    of_replicas = instruction.opcode.removesuffix("-start") in _OF_REPLICAS
    # Then the groups are of replicas, of which JAX makes one, and each is joined by all partitions.
    if groups == () or (groups == ((0,),) and over_partitions and of_replicas):
        return (tuple(range(count)),)
    return groups


_OF_REPLICAS = ("all-reduce", "all-gather", "reduce-scatter")


@functools.lru_cache(maxsize=1024)
def axes_of(groups: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    """The mesh axes over which groups of devices run.

    Args:
      groups: positions in the order of the mesh's devices.
      sizes: the axes of the mesh with their sizes, major first.

    Returns:
      The axes in the order of the mesh, without those of size 1; None if there are none for which
      these are the groups.
    """
    dims = tuple(size for _, size in sizes)
    count = math.prod(dims)
    if sorted(device for group in groups for device in group) != list(range(count)):
        return None
    varying = _varying(np.array(groups[0]), dims)
    size = math.prod(dims[axis] for axis in varying)
    last = range(-len(varying), 0)
    expected = np.moveaxis(np.arange(count).reshape(dims), varying, last).reshape(-1, size)
    if {frozenset(group) for group in groups} != {frozenset(row) for row in expected.tolist()}:
        return None
    return tuple(sizes[axis][0] for axis in varying)


@functools.lru_cache(maxsize=1024)
def _axes_of_pairs(pairs: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    """The axes along which a permutation sends."""
    dims = tuple(size for _, size in sizes)
    if any(device >= math.prod(dims) for pair in pairs for device in pair):
        return None
    moved = {axis for pair in pairs for axis in _varying(np.array(pair), dims)}
    return tuple(sizes[axis][0] for axis in sorted(moved))


def _varying(devices: np.ndarray, dims: tuple[int, ...]) -> list[int]:
    """The dimensions of the mesh in which the places of some devices differ."""
    places = np.unravel_index(devices, dims) if dims else ()
    return [axis for axis, place in enumerate(places) if (place != place[0]).any()]


def _connected(pairs: Groups) -> Groups:
    """The sets of devices that are connected by pairs."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        merged = set(pair).union(*(group_of.get(device, ()) for device in pair))
        group_of.update(dict.fromkeys(merged, merged))
    distinct = {id(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(distinct.values())


# Where it comes from


def _users_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """The innermost line that is in no library, else the innermost."""
    for file, line in (*_outside(frames), *frames):
        return f"{PurePath(file).name}:{line}"
    return None


def _outside(frames: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    for file, line in frames:
        if not (is_library(file) or "site-packages" in file or file.startswith("<frozen")):
            yield file, line
