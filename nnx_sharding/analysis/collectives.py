"""What the devices exchange: each collective of a compiled program, with bytes and mesh axes.

HLO says which devices form the groups of a collective, by their positions in the mesh. The
collective runs over the mesh axes along which the positions in a group differ (`device_groups.py`):

    mesh data 2 × model 4     replica_groups={{0,1,2,3},{4,5,6,7}}     over model
                              replica_groups={{0,4},{1,5},{2,6},{3,7}} over data

Three other files add to this. The loops around a collective tell how often it runs (`hlo.py`), what
it moves tells its purpose (`purposes.py`), and the schedule tells what the device computes
meanwhile (`overlap.py`). An HLO program (`Module`) consists of *computations*, lists of
instructions that call each other. A fusion is an instruction that runs a computation as one kernel.
JAX compiles for one *replica* of several *partitions*: a partition is a device.

A mesh may have several *slices*, tori of TPUs. The program is then for one slice, and numbers only
the devices of this slice (`slices.py`).
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast, get_args

from ..errors import is_library
from .device_groups import Groups, axes_of_groups, axes_of_pairs, connected
from .hlo import Module, parse
from .instructions import OP_NAME, Computation, Instruction, Shape, arrays, operands_of, total_bytes
from .json_codec import UNWRITTEN
from .names import folded, operations
from .opcodes import COLLECTIVES, CollectiveKind
from .overlap import Overlap, Scheduled
from .parameters import ParameterRow
from .purposes import Purpose, Use, uses_of
from .slices import Placed, Position, groups_between, groups_within, positions_of
from .tables import Pictured, Table, text
from .units import bytes_text, printable
from .values import Located, Value

if TYPE_CHECKING:
    from rich.console import RenderableType

MeshAxes: TypeAlias = tuple[str, ...] | None
K = TypeVar("K")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One array of a collective that moves several, because the compiler merges collectives.

    Attributes:
      shape: the shape of the result on one device.
      bytes: the share of ``Collective.bytes``.
      purpose: as of a collective that moves only this array, like the next fields.
      parameters: the paths of the parameters or other Variables.
      module: the module whose call it is in.
      operation: the operation that it was made from; None if nothing says which one.
      source: the line of the user's code; None if nothing says which one.
    """

    shape: tuple[int, ...]
    bytes: int
    purpose: Purpose
    parameters: tuple[str, ...]
    module: str | None
    operation: str | None
    source: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    ``bytes_sent`` is what a ring algorithm sends for n devices in a group, as in the documentation
    of NCCL's tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
    2·bytes·(n-1)/n for an all-reduce, bytes·(n-1)/n for all-gather, reduce-scatter and all-to-all.
    A permutation sends all bytes, and so does a broadcast. Of a ragged all-to-all the smaller of
    operand and result counts: devices send no more than they have, and on average no more than they
    take.

    Attributes:
      kind: such as ``all-reduce``.
      name: the name of the instruction.
      computation: the name of the computation that it is in.
      dtype: the dtype of the arrays, as HLO writes it; several are joined by ``+``.
      shapes: the shapes of its results on one device.
      bytes: the size of the larger of operand and result on one device.
      bytes_sent: the bytes that one device sends to others in one run; the maximum over devices.
      group_size: the number of devices in a group; the maximum over groups.
      num_groups: the number of groups.
      axes: the mesh axes that it runs over, or over parts of which, in the order of the mesh,
        without axes of size 1; None if no set of axes has these groups, or the mesh is not known or
        lacks one of the devices.
      in_loop: whether it is in a loop.
      conditional: whether it is in a branch of a conditional, which may not be taken.
      times: how often it runs in one call, if conditionals take the branch that sends most: 0 in
        other branches. None in a loop of unknown length.
      operation: the operation that it was made from, such as ``jit(f)/mlp/dot_general``. If the
        compiler merged several, this and the next two are those of the largest array with the
        purpose of most bytes, and the names of other operations follow.
      source: the line of the user's code, such as ``model.py:12``.
      purpose: ``parameter`` if it moves parameters to where they are used; ``state`` if it does so
        with other Variables, such as a cache; ``gradient`` if it sums or moves gradients of
        parameters; ``sum`` if it adds up partial results of an operation; ``result`` if it moves
        what the program returns; ``reshard`` if it moves anything else, such as activations. None
        if the arguments are not known.
      parameters: the paths of the parameters or other Variables, those of larger arrays first; for
        results, of those updated.
      module: the module whose call it is in, such as ``model.blocks[0].up``, if that is known.
      flops_beside: what the device is scheduled to compute while one run is in progress, which the
        compiler for TPUs chooses; 0 if the device waits for it.
      bytes_beside: what it reads and writes meanwhile.
      beside: the operations with most of these flops.
      parts: what each array is for, if there are several and the arguments are known. JSON omits
        it.
    """

    kind: CollectiveKind
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
    conditional: bool
    times: int | None
    operation: str | None
    source: str | None
    purpose: Purpose | None = None
    parameters: tuple[str, ...] = ()
    module: str | None = None
    flops_beside: int = 0
    bytes_beside: int = 0
    beside: tuple[str, ...] = ()
    parts: tuple[Part, ...] = dataclasses.field(default=(), compare=False, metadata=UNWRITTEN)

    @property
    def main_part(self) -> int | None:
        """The position of the part that it is named after; None without ``parts``.

        That is the largest one with its purpose. Of several, it is that of the first parameter.
        """
        ranks = {
            i: (part.bytes, part.parameters[:1] == self.parameters[:1])
            for i, part in enumerate(self.parts)
            if part.purpose == self.purpose
        }
        return max(ranks, key=ranks.__getitem__, default=None)

    @property
    def total_bytes_sent(self) -> int | None:
        """The bytes that one device sends in all runs; None in a loop of unknown length."""
        if not self.bytes_sent:  # The number of runs does not matter.
            return 0
        return None if self.times is None else self.bytes_sent * self.times

    @property
    def of(self) -> str:
        """The paths of the first two parameters, or else the operation; empty without either."""
        more = ("…",) if len(self.parameters) > 2 else ()
        return ", ".join((*self.parameters[:2], *more)) or self.operation or ""

    def __str__(self) -> str:
        return printable("  ".join(cell for cell in _cells(self) if cell))


class Collectives(tuple[Collective, ...], Pictured):
    """The collectives of a program, in its order; ``print`` shows them as a table.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> mean = jit(lambda x: x.mean(0), in_shardings=P("data"), out_shardings=P(), mesh=mesh)
      >>> [c] = mean.lower(jnp.ones((16, 4))).compile().collectives()
      >>> c.kind, c.axes, c.bytes, c.bytes_sent
      ('all-reduce', ('data',), 16, 28)
    """

    def of(self, kind: CollectiveKind | None = None, *axes: str) -> Collectives:
        """Selects collectives by kind and by the set of mesh axes that they run over.

        Args:
          kind: such as ``all-reduce``; None for all kinds.
          *axes: exactly these axes, in any order; no axes match all axes.

        Raises:
          ValueError: ``kind`` is not a kind of collective.
        """
        if kind is not None and kind not in COLLECTIVES:
            raise ValueError(
                f"{kind!r} is not a kind of collective; use one of {sorted(COLLECTIVES)}."
            )
        chosen = []
        for collective in self:
            is_of_kind = kind is None or collective.kind == kind
            # Collectives with unknown axes (None) are chosen only if no axes are given.
            is_over_axes = not axes or {*(collective.axes or ())} == {*axes}
            if is_of_kind and is_over_axes:
                chosen.append(collective)
        return Collectives(chosen)

    @property
    def resharded(self) -> Collectives:
        """The collectives whose purpose is ``reshard``: they move activations, for example."""
        return Collectives(collective for collective in self if collective.purpose == "reshard")

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that one device sends in one call; None if a loop is of unknown length."""
        return self._sums(lambda _: "all").get("all", 0)

    def counts(self) -> dict[CollectiveKind, int]:
        """Counts the instructions of each kind, including zeros; one in a loop counts once."""
        # Zeros are included because users' tests compare tables of all kinds.
        counts = Counter(collective.kind for collective in self)
        return {kind: counts[kind] for kind in get_args(CollectiveKind)}

    def by_kind(self) -> dict[CollectiveKind, int | None]:
        """Sums the bytes that one device sends in one call, by kind; None as in `bytes_sent`."""
        return self._sums(lambda collective: collective.kind)

    def by_axes(self) -> dict[MeshAxes, int | None]:
        """Sums the bytes that one device sends in one call, by mesh axes; None for unknown axes."""
        return self._sums(lambda collective: collective.axes)

    def by_purpose(self) -> dict[Purpose | None, int | None]:
        """Sums the bytes that one device sends in one call, by what they are for."""
        return self._sums(lambda collective: collective.purpose)

    def totals(self) -> dict[tuple[CollectiveKind, MeshAxes], tuple[int, int | None]]:
        """Counts instructions, and sums the bytes that one device sends, by kind and mesh axes."""
        numbers = Counter((collective.kind, collective.axes) for collective in self)
        sent = self._sums(lambda collective: (collective.kind, collective.axes))
        return {key: (number, sent[key]) for key, number in numbers.items()}

    def _sums(self, key: Callable[[Collective], K]) -> dict[K, int | None]:
        """Sums the bytes that one device sends in one call, by a key of each collective.

        A sum is None if the bytes of one of its collectives are unknown.
        """
        sums: dict[K, int | None] = {}
        for collective in self:
            total, sent = sums.get(key(collective), 0), collective.total_bytes_sent
            sums[key(collective)] = None if total is None or sent is None else total + sent
        return sums

    def _pictures(self, width: int) -> Iterable[RenderableType]:
        """Yields what ``print`` shows: a table of the collectives, and the sum of what they send.

        Collectives with equal cells, such as those of the modules of a list, share one row, which
        says how many they are.
        """
        if not self:
            yield text("no collectives")
            return
        yield Table(_HEADER, _counted_rows(Counter(map(_row, self))))
        line = f"sent by one device in one call: {bytes_text(self.bytes_sent)}"
        if self.bytes_sent is None:
            line += ", as a loop is of unknown length"
        if any(collective.conditional for collective in self):
            line += ", of conditionals the branch that sends most"
        yield text(line)


def axes_text(axes: MeshAxes, *, words: bool = False) -> str:
    """Writes mesh axes as tables show them: ``data+model``, ``-`` for none, ``?`` if unknown.

    With ``words``, the latter two are ``no axes`` and ``unknown axes``.
    """
    unknown, none = ("unknown axes", "no axes") if words else ("?", "-")
    return unknown if axes is None else "+".join(axes) or none


class _Row(NamedTuple):
    """The cells of a collective in a table."""

    kind: str
    axes: str
    bytes: str
    sent: str
    times: str
    purpose: str
    of: str
    source: str


_HEADER = _Row._fields


def _cells(collective: Collective) -> _Row:
    """Writes the cells of a collective in full."""
    times = "?" if collective.times is None else str(collective.times)
    if collective.conditional and collective.times is not None:
        times = f"≤ {times}"
    return _Row(
        kind=collective.kind,
        axes=axes_text(collective.axes),
        bytes=bytes_text(collective.bytes),
        sent=bytes_text(collective.bytes_sent),
        times=times,
        purpose=collective.purpose or "",
        of=collective.of,
        source=collective.source or "",
    )


def _row(collective: Collective) -> _Row:
    """Writes the cells of a collective in a table, so that they are equal for modules of a list.

    For example, ``model.blocks[0].up.kernel`` and ``model.blocks[1].up.kernel`` both become
    ``model.blocks[*].up.kernel``. The column "of" has the parameters, or else the operations. If
    there are several, it has the first one and the number of others: ``model.up.kernel +3``. Arrays
    that are for something else than the parameters count among the others.
    """
    row = _cells(collective)
    of = row.of
    names = collective.parameters or operations(collective.operation or "")
    if names:
        first, *others = names
        count = len(others)
        if collective.parameters:
            count += sum(part.purpose != collective.purpose for part in collective.parts)
        of = f"{first} +{count}" if count else first
    of = _FUNCTION.sub("", of)  # "jit(step)/up/dot_general" → "up/dot_general"
    return row._replace(of=folded(of), source=_end(row.source, longest=15))


def _counted_rows(row_counts: Mapping[_Row, int]) -> list[_Row]:
    """Writes how many collectives share a row, and shortens the column "of" so that rows fit.

    ``row_counts`` has the different rows, each with the number of collectives that share it.
    """
    columns = zip(_HEADER, *row_counts, strict=True)
    widths = dict(zip(_HEADER, (max(map(len, column)) for column in columns), strict=True))
    # Texts in the column "of" are cut to 26 characters at most, or to fewer, so that a row fits
    # into 100 characters with the two spaces after each cell.
    width_of_others = sum(widths.values()) - widths["of"] + 2 * len(widths)
    longest = min(26, 100 - width_of_others)
    rows = []
    for row, count in row_counts.items():
        number = f" ({count} ×)" if count > 1 else ""
        of = _end(row.of, longest=longest - len(number)) + number
        rows.append(row._replace(of=of))
    return rows


def _end(name: str, longest: int) -> str:
    """Shortens a name to its last ``longest`` characters, but to no fewer than 8."""
    longest = max(longest, 8)
    return f"…{name[1 - longest :]}" if len(name) > longest else name


# The traced function, with which the name of each operation begins.
_FUNCTION = re.compile(r"^jit\([^/]*\)/")


def collectives_of(
    hlo: str | Module,
    mesh: Any = None,
    arguments: Iterable[ParameterRow] | None = None,
    results: Sequence[str | None] = (),
) -> Collectives | None:
    """Lists the collectives of a compiled program.

    Args:
      hlo: the text of the compiled program, or the result of
        :func:`~nnx_sharding.analysis.hlo.parse`.
      mesh: the mesh that the program was compiled for, or the sizes of its axes by name. Devices
        are numbered in the order of the mesh, as JAX assigns them. None leaves the axes unknown.
      arguments: the rows of its arguments, from ``Compiled.parameters()``. None leaves the purposes
        unknown.
      results: the path of the Variable that each array of its result updates, or None.

    Returns:
      The collectives, in the order of the text. None if a part of the text is not understood.

    Raises:
      TypeError: ``hlo`` is neither text nor a parsed program, but a compiled function, for example.

    Example:
      >>> from nnx_sharding.analysis import collectives_of
      >>> hlo = "%a = f32[64]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add"
      >>> [one] = collectives_of(hlo, {"data": 2, "model": 4})
      >>> one.kind, one.bytes, one.bytes_sent, one.axes
      ('all-reduce', 256, 384, ('model',))
    """
    if not isinstance(hlo, str | Module):
        raise TypeError(
            f"collectives_of takes the text of a compiled program, got {type(hlo).__name__}. Pass "
            "compiled.as_text()."
        )
    module = parse(hlo) if isinstance(hlo, str) else hlo
    if module.unread:  # A part that is not understood may send.
        return None
    # A mesh has its sizes as ``shape``; otherwise ``mesh`` is a mapping of sizes itself.
    shape = {} if mesh is None else dict(getattr(mesh, "shape", mesh))
    sizes = {str(axis): int(size) for axis, size in shape.items()}
    # If the program and the mesh differ in the number of devices, the program is for one of several
    # slices. Without a mesh they differ, too, but then `positions_of` has no positions.
    is_of_slice = module.num_devices != math.prod(sizes.values())
    placement = _Placement(
        sizes=sizes,
        positions=positions_of(mesh) if is_of_slice else {},
        num_devices=module.num_devices,
    )
    # The names of instructions that only carry on a collective that another one has started.
    continuations = _continuations(module)
    starts = [f"{kind}-start" for kind in COLLECTIVES]
    # The collectives, each with its computation, and named after the user's operations.
    instructions = [
        Located(computation, _with_operation(instruction, computation, module))
        for computation, instruction in module.with_opcode(*COLLECTIVES, *starts)
        if instruction.name not in continuations
    ]
    uses: Mapping[str, Use] = {}  # by the name of the instruction
    if instructions and arguments is not None:
        uses = uses_of(module, instructions, arguments, results)
    # Without a start, of its own or in a fusion, a collective is a single step of the schedule. If
    # none has a start, the device waits for each of them, and `Overlap` has nothing to find.
    has_starts = continuations or module.with_opcode(*starts, "async-start")
    overlap = Overlap(module) if has_starts else None
    collectives = [
        _collective(
            instruction,
            computation,
            module=module,
            placement=placement,
            use=uses.get(instruction.name, Use()),
            overlap=overlap,
        )
        for computation, instruction in instructions
    ]
    return Collectives(_without_smaller_branches(collectives, module))


def _without_smaller_branches(
    collectives: Sequence[Collective], module: Module
) -> Sequence[Collective]:
    """Returns the collectives with ``times`` 0 in branches of conditionals that do not send most.

    Only one branch of a conditional runs, so the bytes of several branches must not add up.
    """
    if not any(collective.conditional for collective in collectives):
        return collectives
    sent: Counter[str] = Counter()  # bytes, by computation
    for collective in collectives:
        sent[collective.computation] += collective.bytes_sent
    # The names of all computations, without those in branches that send less than another branch.
    taken = module.taken(sent)
    return [c if c.computation in taken else dataclasses.replace(c, times=0) for c in collectives]


def _collective(
    instruction: Instruction,
    computation: Computation,
    *,
    module: Module,
    placement: _Placement,
    use: Use,
    overlap: Overlap | None,
) -> Collective:
    """Describes one collective.

    Args:
      placement: the mesh, and where the devices of the program are in it.
      overlap: what runs at the same time; None if the device waits for all collectives.
    """
    members = placement.members_of(instruction)
    size = max(map(len, members.groups), default=1)
    payload = _payload(instruction, computation, module=module, group_size=size)
    runs = module.runs[computation.name]  # A collective runs as often as its computation.
    schedule = Scheduled()
    if overlap is not None:
        schedule = overlap.scheduled(Value(computation.name, instruction.name))
    collective = Collective(
        kind=payload.kind,
        name=instruction.name,
        computation=computation.name,
        dtype="+".join(dict.fromkeys(shape.dtype for shape in payload.results)),
        shapes=tuple(shape.dims for shape in payload.results),
        bytes=payload.bytes,
        bytes_sent=_bytes_sent(payload.kind, payload_bytes=payload.bytes, group_size=size),
        group_size=size,
        num_groups=len(members.groups),
        axes=members.axes,
        in_loop=runs.in_loop,
        conditional=runs.in_branch,
        times=runs.times,
        operation=instruction.operation,
        source=_users_line(module.source(instruction)),
        purpose=use.purpose,
        parameters=use.parameters,
        module=use.module,
        flops_beside=schedule.work.flops,
        bytes_beside=schedule.work.bytes_accessed,
        beside=schedule.operations,
        parts=_parts(use, module, num_bytes=payload.bytes),
    )
    if collective.main_part is None:
        return collective
    main = collective.parts[collective.main_part]
    if main.operation is None:
        return collective
    return dataclasses.replace(
        collective,
        operation=_with_first(main.operation, instruction.operation),
        source=main.source or collective.source,
    )


def _parts(use: Use, module: Module, *, num_bytes: int) -> tuple[Part, ...]:
    """Describes the arrays of a collective; empty for a single one, or if purposes are unknown.

    Args:
      num_bytes: the bytes of the collective, which the parts share.
    """
    total = sum(array_use.array.bytes for array_use in use.arrays) or 1
    return tuple(
        Part(
            shape=array.dims,
            bytes=num_bytes * array.bytes // total,
            purpose=purpose,
            parameters=parameters,
            module=path,
            operation=None if array.named is None else array.operations[0],
            source=None if array.named is None else _users_line(module.source(array.named)),
        )
        for array, purpose, parameters, path in use.arrays
    )


def _with_first(first: str, joined: str | None) -> str:
    """Joins the names of operations so that `operations` lists this one first.

    The names stay as XLA has joined them, if the first one is this one already.
    """
    names = operations(joined) if joined else []
    return joined if joined and names[0] == first else ";".join(dict.fromkeys([first, *names]))


class _Members(NamedTuple):
    """The devices that take part in a collective, by their positions in the mesh."""

    groups: Groups  # for a permutation: the sets of devices that its pairs connect
    axes: MeshAxes


class _Placement(NamedTuple):
    """Where the devices of a program are."""

    sizes: Mapping[str, int]  # the sizes of the mesh axes; empty without a mesh
    # For a program for one of several slices: a device, as the program names it → its position in
    # the mesh (`slices.positions_of`). Empty if the program is for the whole mesh.
    positions: Mapping[Position, int]
    # The number of devices of the program. If it is for one of several slices, these are fewer than
    # in the mesh.
    num_devices: int | None

    def members_of(self, instruction: Instruction) -> _Members:
        """Finds the devices that take part in a collective, and the mesh axes that it runs over.

        For the mesh ``data 2 × model 2``, where devices 0 and 1 differ along ``model``:

            all-reduce            replica_groups={{0,1},{2,3}}           ((0, 1), (2, 3)), model
            collective-permute    source_target_pairs={{0,2},{2,0}}      ((0, 2),), data
        """
        mesh_axes = tuple(self.sizes.items())
        if instruction.collective == "collective-permute":
            placed = self._in_mesh(instruction, instruction.source_target_pairs)
            # A device that sends to itself sends nothing over a link.
            pairs = tuple(pair for pair in placed.groups if len({*pair}) > 1)
            axes = axes_of_pairs(pairs, mesh_axes) if placed.in_mesh else None
            return _Members(connected(pairs), axes)  # (0, 1), (1, 2) → (0, 1, 2)
        groups = _groups_of_partitions(instruction, self._num_numbered_devices)
        placed = self._in_mesh(instruction, groups)
        axes = axes_of_groups(placed.groups, mesh_axes) if placed.in_mesh else None
        return _Members(placed.groups, axes)

    @property
    def _num_numbered_devices(self) -> int:
        """The number of devices that the program numbers; groups need not have all of them.

        A program for the whole mesh numbers all devices of the mesh. Without a mesh, or for one
        slice, the text says the number; it is 1 if the text does not.
        """
        is_for_whole_mesh = self.sizes and not self.positions
        return math.prod(self.sizes.values()) if is_for_whole_mesh else self.num_devices or 1

    def _in_mesh(self, instruction: Instruction, groups: Groups) -> Placed:
        """Translates groups of devices, as the instruction numbers them, to positions in the mesh.

        Numbers and positions are the same, unless the program is for one of several slices. Such a
        program numbers devices by their positions in the slice, and a collective between slices has
        its groups in the attribute ``between_slices`` (`slices.py`).
        """
        if between := instruction.attributes.get("between_slices"):
            return groups_between(between, self.positions)
        if self.positions:  # Each slice has the same groups.
            return groups_within(groups, self.positions)
        return Placed(groups, in_mesh=bool(self.sizes))


def _groups_of_partitions(instruction: Instruction, num_devices: int) -> Groups:
    """Returns the groups of devices that exchange data, as the instruction numbers them.

    The attribute ``replica_groups`` has groups of devices; if it is empty, all devices form one
    group. In one mode of XLA it has groups of replicas, and all partitions of a replica take part.
    A program of JAX has only the replica 0, so in this mode ``{{0}}`` stands for all of its
    ``num_devices`` devices, too.
    """
    groups, attributes = instruction.replica_groups or (), instruction.attributes
    # For these three kinds, a channel without global ids means the mode with groups of replicas.
    # For other kinds, it means groups of partitions: https://openxla.org/xla/operation_semantics
    are_replicas = (
        "channel_id" in attributes
        and "use_global_device_ids" not in attributes
        and instruction.opcode.startswith(("all-reduce", "all-gather", "reduce-scatter"))
    )
    if groups == () or (are_replicas and groups == ((0,),)):
        return (tuple(range(num_devices)),)
    return groups


class _Payload(NamedTuple):
    """What a collective moves."""

    kind: CollectiveKind
    results: Sequence[Shape]
    # The size of the larger of operand and result; for a ragged all-to-all, of the smaller.
    bytes: int


def _payload(
    instruction: Instruction, computation: Computation, *, module: Module, group_size: int
) -> _Payload:
    """Returns what a collective moves on each device.

    Args:
      group_size: the number of devices that exchange data with each other.
    """
    kind, results = cast(CollectiveKind, instruction.collective), instruction.results
    num_bytes = total_bytes(results)
    if kind == "reduce-scatter":
        # The operand counts: its size is the size of the result times the number of devices.
        num_bytes *= group_size
    if kind == "ragged-all-to-all":
        # Only the first operand is sent; the other operands say where parts of it begin.
        operands = operands_of(instruction, module.within[computation.name])
        operand_bytes = total_bytes(operands[0])  # 0 if damaged text lacks the operand's maker
        num_bytes = min(operand_bytes or num_bytes, num_bytes)
    if kind == "all-reduce" and module.runs[computation.name].is_fused and group_size > 1:
        # Some compilers write a reduce-scatter as a fusion: an all-reduce, then a slice of its
        # result, the device's own part. The fusion returns these slices. The bytes are still those
        # of the operand.
        slices = tuple(arrays(module.roots[computation.name].shape))
        if total_bytes(slices) * group_size == num_bytes:
            kind, results = "reduce-scatter", slices
    return _Payload(kind, results, num_bytes)


def _bytes_sent(kind: CollectiveKind, *, payload_bytes: int, group_size: int) -> int:
    """Returns the bytes that one device of a group sends in a ring.

    ``payload_bytes`` is the size of the larger of operand and result: of the result of an
    all-gather, and of the operand of a reduce-scatter. ``Collective`` has the formulas.
    """
    if group_size < 2:
        return 0
    # Each device sends its whole payload to one other device.
    if kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
        return payload_bytes
    # An all-reduce in a ring is a reduce-scatter, then an all-gather.
    passes = 2 if kind == "all-reduce" else 1
    return -(-payload_bytes * passes * (group_size - 1) // group_size)  # rounded up


def users_frame(frames: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Returns the first frame that is not in a library, else None.

    ``frames`` are (file, line), innermost first. Frames in libraries are left out because the line
    of the user's model that calls a layer says more than a line of that layer's code in Flax.
    """
    for file, line in frames:
        if not (is_library(file) or "site-packages" in file or "<frozen" in file):
            return file, line
    return None


def _users_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """Writes the innermost frame outside of libraries, else the innermost: ``model.py:12``.

    Returns None if there are no frames, or if the file is unknown.
    """
    frame = users_frame(frames) or next(iter(frames), None)
    if frame is None:
        return None
    file, line = frame
    return f"{file_title(file)}:{line}" if file else None


def file_title(file: str) -> str:
    """Returns the name of a file without its folder; for a cell of a notebook, its title."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        # IPython compiles a cell under a name made from a hash, and this name says nothing to the
        # author of the cell. `format_code_name` returns the kind of the code, and its title, for a
        # cell; None for other files.
        cell: tuple[str, str] | None = shell.compile.format_code_name(file)
        if cell is not None:
            return cell[1]
    return PurePath(file).name


def _with_operation(
    instruction: Instruction, computation: Computation, module: Module
) -> Instruction:
    """Returns a copy of a collective that is named after the user's operations.

    TPU compilers may leave out the name of a collective. The innermost instruction around the
    collective that has a name, such as the fusion that it is in, lends its name. If that
    instruction takes several operands, the names of the operands are joined to it.
    """
    # The collective, then the calls around it, innermost first.
    candidates = [Located(computation, instruction), *module.around(computation.name)]
    with_name = (located for located in candidates if located.instruction.operation is not None)
    # ``named`` lends its name, and ``home`` is the computation that it is in.
    home, named = next(with_name, candidates[-1])
    names, operands = [named.operation], {*named.operand_names}
    # If the compiler has merged several collectives into one, the result has the name of only one
    # of them, but the instructions that make the operands have the names of all. The largest
    # operand comes first, because a table shows only the first name.
    if len(operands) > 1 and len(operations(named.operation or "")) == 1:
        makers = [maker for maker in home.instructions if maker.name in operands]
        makers.sort(key=lambda maker: total_bytes(arrays(maker.shape)), reverse=True)
        names = [maker.operation for maker in makers] + names
    # Names are joined by semicolons, like those that XLA joins, so that `operations` splits them.
    joined = ";".join(dict.fromkeys(filter(None, names)))
    if joined == (instruction.operation or ""):
        return instruction
    # The text of the collective gets the metadata of ``named`` with the new name, as XLA writes it:
    # ``…, metadata={op_name="…" source_line=…}``. If ``named`` is the collective itself, its text
    # has that metadata already, so the old copy is removed.
    metadata = named.attributes.get("metadata", "")
    source = OP_NAME.sub("", metadata).strip("{}")  # ``source_line=…``
    escaped = joined.replace("\\", r"\\").replace('"', r"\"")
    rest = instruction.rest
    if metadata:
        rest = rest.replace(f", metadata={metadata}", "")
    return instruction._replace(rest=f'{rest}, metadata={{op_name="{escaped}" {source}}}')


def _continuations(module: Module) -> set[str]:
    """Returns the names of copies of collectives that only carry on one that was started before.

    The TPU compiler writes an asynchronous collective as several fusions. Each fusion has a copy of
    the collective, with ``async_collective_fusion_config`` in its text. All copies have the same
    channel. Only the fusion that starts the collective also has an "AsyncCollectiveStart".
    """
    # Copies without a channel share the key None.
    started_channels: set[str | None] = set()
    # The name of a copy outside of starts → its channel.
    channels_of_copies: dict[str, str | None] = {}
    for computation in module.computations:  # The body of each fusion is a computation.
        is_start = any("AsyncCollectiveStart" in op.rest for op in computation.instructions)
        copies = (op for op in computation.instructions if _ASYNC_CONFIG in op.rest)
        for copy in copies:
            channel = copy.attributes.get("channel_id")
            if is_start:
                started_channels.add(channel)
            else:
                channels_of_copies[copy.name] = channel
    return {name for name, channel in channels_of_copies.items() if channel in started_channels}


_ASYNC_CONFIG = "async_collective_fusion_config"
