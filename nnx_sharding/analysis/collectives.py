"""What the devices exchange: each collective of a compiled program, with bytes and mesh axes.

HLO says which devices form the groups of a collective, by their positions in the mesh. It runs over
those mesh axes in which the positions within each group differ (`device_groups.py`):

    mesh data 2 × model 4     replica_groups={{0,1,2,3},{4,5,6,7}}     over model
                              replica_groups={{0,4},{1,5},{2,6},{3,7}} over data

How often it runs follows from the loops around it (`hlo.py`), what it is for from what it moves
(`purposes.py`), and what hides it from the schedule (`overlap.py`). An HLO program (`Module`)
consists of *computations*, lists of instructions that call each other. A fusion is an instruction
that runs a computation as one kernel. JAX compiles for one *replica* of several *partitions*: a
partition is a device.

From other modules:

    Module         the HLO program. By the name of a computation, ``around`` are the calls around
                   it, ``runs`` is how often it runs, ``roots`` has the instruction that it returns
    Instruction    one instruction. ``rest`` is its text from the operands on, ``attributes`` what
                   it says after them, by name
    Groups         tuples with the numbers of the devices that exchange data with each other
    Placed         Groups by positions in the mesh, and whether the mesh has all of these devices
    Use            the purpose, the parameters and the module of a collective
    Overlap        finds what is `Scheduled` while a collective is in progress
    Located        an instruction, and the computation that it is in
    operations     the names that XLA has joined to the name of one instruction

A mesh may have several *slices*, tori of TPUs. Then the program is that of one slice, and numbers
the devices of that (`slices.py`).
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
from .names import folded, operations
from .opcodes import COLLECTIVES, CollectiveKind
from .overlap import Overlap, Scheduled
from .parameters import ParameterRow
from .purposes import Purpose, Use, uses_of
from .slices import Placed, Position, groups_between, groups_within, positions_of
from .tables import Pictured, table, text
from .units import bytes_text, printable
from .values import Located, Value

if TYPE_CHECKING:
    from rich.console import RenderableType

MeshAxes: TypeAlias = tuple[str, ...] | None
K = TypeVar("K")


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
      operation: the operation that it was made from, such as ``jit(f)/mlp/dot_general``.
      source: the line of the user's code, such as ``model.py:12``.
      purpose: ``parameter`` if it moves parameters to where they are used; ``state`` if it does so
        with other Variables, such as a cache; ``gradient`` if it sums or moves gradients of
        parameters; ``sum`` if it adds up partial results of an operation; ``result`` if it moves
        what the program returns; ``reshard`` if it moves anything else, such as activations. None
        if the arguments are not known.
      parameters: the paths of the parameters or other Variables; for results, of those updated.
      module: the module whose call it is in, such as ``model.blocks[0].up``, if that is known.
      flops_beside: what the device is scheduled to compute while one run is in progress, which the
        compiler for TPUs chooses; 0 if the device waits for it.
      bytes_beside: what it reads and writes meanwhile.
      beside: the operations with most of these flops.
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

    @property
    def total_bytes_sent(self) -> int | None:
        """The bytes that one device sends in all runs; None in a loop of unknown length."""
        if not self.bytes_sent:  # nothing, however often
            return 0
        return None if self.times is None else self.bytes_sent * self.times

    @property
    def of(self) -> str:
        """The parameters (the paths of the first two), or else the operation."""
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
          *axes: exactly these axes, in any order; none for any axes.
        """
        if kind is not None and kind not in COLLECTIVES:
            raise ValueError(
                f"{kind!r} is not a kind of collective; use one of {sorted(COLLECTIVES)}."
            )
        return Collectives(
            collective
            for collective in self
            if kind in (None, collective.kind)
            and (not axes or {*axes} == {*(collective.axes or ())})
        )

    @property
    def resharded(self) -> Collectives:
        """Those that move activations or others that are not parameters, gradients or results."""
        return Collectives(collective for collective in self if collective.purpose == "reshard")

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that one device sends in one call; None if a loop is of unknown length."""
        return self._sums(lambda _: "all").get("all", 0)

    def counts(self) -> dict[CollectiveKind, int]:
        """Counts the instructions of each kind, including zeros; one in a loop counts once."""
        # Tables of tests compare all kinds.
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
        """Sums the bytes that one device sends in one call, by a key; None if one is unknown."""
        sums: dict[K, int | None] = {}
        for collective in self:
            total, sent = sums.get(key(collective), 0), collective.total_bytes_sent
            sums[key(collective)] = None if total is None or sent is None else total + sent
        return sums

    def _pictures(self, width: int) -> Iterable[RenderableType]:
        """Yields what ``print`` shows: a table of the collectives, and the sum of what they send.

        The same collectives of the modules of a list are one row, which says how many they are.
        """
        if not self:
            yield text("no collectives")
            return
        row_counts = Counter(map(_row, self))
        columns = zip(_HEADER, *row_counts, strict=True)
        widths = dict(zip(_HEADER, (max(map(len, column)) for column in columns), strict=True))
        # The column "of" is cut, to at most 26 characters, so that a row fits into 100 with the two
        # spaces after each cell.
        width_of_others = sum(widths.values()) - widths["of"] + 2 * len(widths)
        longest = min(26, 100 - width_of_others)
        rows = []
        for row, count in row_counts.items():
            number = f" ({count} ×)" if count > 1 else ""
            of = _end(row.of, longest=longest - len(number)) + number
            rows.append(row._replace(of=of))
        yield table(_HEADER, rows)
        line = f"sent by one device in one call: {bytes_text(self.bytes_sent)}"
        if self.bytes_sent is None:
            line += ", as a loop is of unknown length"
        if any(collective.conditional for collective in self):
            line += ", of conditionals the branch that sends most"
        yield text(line)


def axes_text(axes: MeshAxes) -> str:
    """Writes mesh axes as tables show them: ``data+model``, ``-`` for none, ``?`` if unknown."""
    return "?" if axes is None else "+".join(axes) or "-"


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
    """Writes the cells of a collective in a table, which are equal for all modules of a list.

    For example, ``model.blocks[0].up.kernel`` and ``[1]`` become ``model.blocks[*].up.kernel``.
    Without parameters, the column "of" has the operations. Of several names it has the first one
    and the number of others: ``model.up.kernel +3``.
    """
    row = _cells(collective)
    of = row.of
    names = collective.parameters or operations(collective.operation or "")
    if names:
        first, *others = names
        of = f"{first} +{len(others)}" if others else first
    of = _FUNCTION.sub("", of)  # "jit(step)/up/dot_general" → "up/dot_general"
    return row._replace(of=folded(of), source=_end(row.source, longest=15))


def _end(name: str, longest: int) -> str:
    """Shortens a name to its last ``longest`` characters, but to no fewer than 8."""
    longest = max(longest, 8)
    return f"…{name[1 - longest :]}" if len(name) > longest else name


_FUNCTION = re.compile(r"^jit\([^/]*\)/")  # at the start of the name of each operation


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
      mesh: the mesh that it was compiled for, or the sizes of its axes by name; its devices are
        counted in its order, as JAX assigns them. None leaves the axes unknown.
      arguments: the rows of its arguments, from ``Compiled.parameters()``. None leaves the purposes
        unknown.
      results: the path of the Variable that each array of its result updates, or None.

    Returns:
      The collectives, in the order of the text. None if a part of it is not understood.

    Raises:
      TypeError: ``hlo`` is neither, such as a compiled function.

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
    if module.unread:  # a part that is not understood may send
        return None
    shape = {} if mesh is None else dict(getattr(mesh, "shape", mesh))
    sizes = {str(axis): int(size) for axis, size in shape.items()}
    # A program with fewer devices than the mesh is that of one of several slices.
    is_of_slice = module.num_devices != math.prod(sizes.values())
    placement = _Placement(
        sizes=sizes,
        positions=positions_of(mesh) if is_of_slice else {},
        num_devices=module.num_devices,
    )
    # The names of instructions that only carry on what others have started.
    continuations = _continuations(module)
    starts = [f"{kind}-start" for kind in COLLECTIVES]
    found = [  # each with its computation, and named after the user's operations
        Located(computation, _with_operation(instruction, computation, module))
        for computation, instruction in module.with_opcode(*COLLECTIVES, *starts)
        if instruction.name not in continuations
    ]
    uses: Mapping[str, Use] = {}  # by the name of the instruction
    if found and arguments is not None:
        uses = uses_of(module, found, arguments, results)
    # Without any start, of its own or in a fusion, the device waits for each collective.
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
        for computation, instruction in found
    ]
    return Collectives(_without_smaller_branches(collectives, module))


def _without_smaller_branches(
    collectives: Sequence[Collective], module: Module
) -> Sequence[Collective]:
    """Sets ``times`` to 0 in those branches of conditionals that do not send most.

    Of each conditional one branch is taken, so that the bytes of several do not add up.
    """
    if not any(collective.conditional for collective in collectives):
        return collectives
    sent: Counter[str] = Counter()  # bytes, by computation
    for collective in collectives:
        sent[collective.computation] += collective.bytes_sent
    # The names of all computations but those in branches that send less than another one.
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
      instruction: the collective, or its start.
      computation: the computation that it is in.
      module: the program.
      placement: the mesh, and where the devices of the program are in it.
      use: what the collective is for.
      overlap: what runs at the same time; None if the device waits for all collectives.
    """
    members = placement.members_of(instruction)
    size = max(map(len, members.groups), default=1)
    payload = _payload(instruction, computation, module=module, group_size=size)
    runs = module.runs[computation.name]  # as often as the computation that it is in
    schedule = Scheduled()
    if overlap is not None:
        schedule = overlap.scheduled(Value(computation.name, instruction.name))
    return Collective(
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
        flops_beside=schedule.work.flops,
        bytes_beside=schedule.work.bytes_accessed,
        beside=schedule.operations,
        **use._asdict(),
    )


class _Members(NamedTuple):
    """The devices that take part in a collective, by their positions in the mesh."""

    groups: Groups  # of a permutation: the devices that its pairs connect
    axes: MeshAxes


class _Placement(NamedTuple):
    """Where the devices of a program are."""

    sizes: Mapping[str, int]  # of the mesh axes; empty without a mesh
    # Of a program for one of several slices, by the names that it has for devices, their positions
    # in the mesh (`slices.positions_of`). Empty if the program is for the whole mesh.
    positions: Mapping[Position, int]
    num_devices: int | None  # of the program: for one of several slices, fewer than in the mesh

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
        """The number of devices that the program has numbers for, which groups may leave out.

        These are all of the mesh if the program is for it. Otherwise, without a mesh or for one
        slice, there are as many as the text says.
        """
        is_for_whole_mesh = self.sizes and not self.positions
        return math.prod(self.sizes.values()) if is_for_whole_mesh else self.num_devices or 1

    def _in_mesh(self, instruction: Instruction, groups: Groups) -> Placed:
        """Translates groups of devices, as the instruction numbers them, to positions in the mesh.

        These are the same, unless the program is for one of several slices. There, devices are
        numbered by their positions in the slice, and a collective between slices has its groups in
        the attribute ``between_slices`` (`slices.py`).
        """
        if between := instruction.attributes.get("between_slices"):
            return groups_between(between, self.positions)
        if self.positions:  # the same groups in each slice
            return groups_within(groups, self.positions)
        return Placed(groups, in_mesh=bool(self.sizes))  # False without a mesh


def _groups_of_partitions(instruction: Instruction, num_devices: int) -> Groups:
    """Returns the groups of devices that exchange data, as the instruction numbers them.

    The attribute ``replica_groups`` has groups of devices, or is empty for all of them. In one mode
    of XLA it has groups of replicas, of which all partitions take part: a program of JAX has only
    the replica 0, so that ``{{0}}`` stands for all of its ``num_devices`` devices, too.
    """
    groups, attributes = instruction.replica_groups or (), instruction.attributes
    # For these kinds, a channel without global ids stands for that mode; for others, it stands for
    # groups of partitions: https://openxla.org/xla/operation_semantics
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
    bytes: int  # of the larger of operand and result; of a ragged all-to-all the smaller


def _payload(
    instruction: Instruction, computation: Computation, *, module: Module, group_size: int
) -> _Payload:
    """Returns what a collective moves on each device.

    Args:
      instruction: the collective.
      computation: the computation that it is in.
      module: the program.
      group_size: the number of devices that exchange data with each other.
    """
    kind, results = cast(CollectiveKind, instruction.collective), instruction.results
    num_bytes = total_bytes(results)
    if kind == "reduce-scatter":  # its operand is larger than its result
        num_bytes *= group_size
    if kind == "ragged-all-to-all":
        # The first operand is what is sent; the others say where parts of it begin.
        operands = operands_of(instruction, module.within[computation.name])
        operand_bytes = total_bytes(operands[0])  # 0 where damaged text lacks it
        num_bytes = min(operand_bytes or num_bytes, num_bytes)
    if kind == "all-reduce" and module.runs[computation.name].is_fused and group_size > 1:
        # A fusion of an all-reduce and a slice of its result, the device's own part, is how some
        # compilers write a reduce-scatter. The bytes stay those of the operand.
        parts = tuple(arrays(module.roots[computation.name].shape))  # what the fusion returns
        if total_bytes(parts) * group_size == num_bytes:
            kind, results = "reduce-scatter", parts
    return _Payload(kind, results, num_bytes)


def _bytes_sent(kind: CollectiveKind, *, payload_bytes: int, group_size: int) -> int:
    """Returns the bytes that one device of a group sends in a ring.

    ``payload_bytes`` is the size of the larger of operand and result: of what an all-gather makes,
    and of what a reduce-scatter takes. ``Collective`` has the formulas.
    """
    if group_size < 2:
        return 0
    # Each device sends to one other.
    if kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
        return payload_bytes
    passes = 2 if kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
    return -(-payload_bytes * passes * (group_size - 1) // group_size)  # rounded up


def users_frame(frames: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Returns the first frame that is not in a library, else None.

    ``frames`` are (file, line), innermost first. A layer of Flax says less than the line of the
    user's model that calls it.
    """
    for file, line in frames:
        if not (is_library(file) or "site-packages" in file or "<frozen" in file):
            return file, line
    return None


def _users_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """Writes the innermost frame that is not in a library, else the innermost: ``model.py:12``."""
    file, line = users_frame(frames) or (frames[0] if frames else ("", 0))
    return f"{file_title(file)}:{line}" if file else None


def file_title(file: str) -> str:
    """Returns the name of a file without its folder; of the third cell of a notebook, ``In[3]``."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and (shell := ipython.get_ipython()) is not None:
        # IPython compiles a cell under a name made from a hash, which says nothing to its author.
        # It returns the kind of what it compiled, and its title; None for other files.
        cell: tuple[str, str] | None = shell.compile.format_code_name(file)
        if cell is not None:
            return cell[1]
    return PurePath(file).name


def _with_operation(
    instruction: Instruction, computation: Computation, module: Module
) -> Instruction:
    """Returns a collective that is named after the user's operations.

    TPU compilers leave out such names. They are those of the innermost instruction around it that
    has any, such as the fusion that it is in, and if that takes several operands, of these.

    Args:
      instruction: the collective.
      computation: the computation that it is in.
      module: the program.
    """
    around = [Located(computation, instruction), *module.around(computation.name)]  # from inside
    with_name = (located for located in around if located.instruction.operation is not None)
    home, named = next(with_name, around[-1])
    names, operands = [named.operation], {*named.operand_names}
    # If the compiler has merged several collectives into one, that has the name of one of them: the
    # instructions that make its operands have the names of all. The largest comes first, since a
    # table shows only that one.
    if len(operands) > 1 and len(operations(named.operation or "")) == 1:
        made = [other for other in home.instructions if other.name in operands]
        made.sort(key=lambda other: total_bytes(arrays(other.shape)), reverse=True)
        names = [other.operation for other in made] + names
    joined = ";".join(dict.fromkeys(filter(None, names)))  # as XLA joins several
    if joined == (instruction.operation or ""):
        return instruction
    # The text of the instruction gets the metadata of ``named`` with the new name, in the form of
    # XLA: ``…, metadata={op_name="…" source_line=…}``. Its own metadata, if it is ``named``, goes.
    metadata = named.attributes.get("metadata", "")
    source = OP_NAME.sub("", metadata).strip("{}")  # ``source_line=…``
    escaped = joined.replace("\\", r"\\").replace('"', r"\"")
    rest = instruction.rest
    if metadata:
        rest = rest.replace(f", metadata={metadata}", "")
    return instruction._replace(rest=f'{rest}, metadata={{op_name="{escaped}" {source}}}')


def _continuations(module: Module) -> set[str]:
    """Returns the names of collectives that only carry on one that was started before.

    The TPU compiler writes an asynchronous collective as several fusions. Each has a copy of the
    collective, with ``async_collective_fusion_config`` in its text. All copies have one channel;
    the fusion that starts it also has an "AsyncCollectiveStart".
    """
    started_channels: set[str | None] = set()  # None is that of all copies without a channel
    channels_of_others: dict[str, str | None] = {}  # by the name of the copy
    for computation in module.computations:  # a fusion is a computation
        is_start = any("AsyncCollectiveStart" in op.rest for op in computation.instructions)
        copies = (op for op in computation.instructions if _ASYNC_CONFIG in op.rest)
        for copy in copies:
            channel = copy.attributes.get("channel_id")
            if is_start:
                started_channels.add(channel)
            else:
                channels_of_others[copy.name] = channel
    return {name for name, channel in channels_of_others.items() if channel in started_channels}


_ASYNC_CONFIG = "async_collective_fusion_config"
