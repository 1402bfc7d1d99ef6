"""Reads the collectives of a compiled program from its text: `collectives_of`.

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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from .collectives import Collective, Collectives, MeshAxes, Part
from .device_groups import AxisPart, Groups, axes_of_groups, axes_of_pairs, axis_parts, connected
from .hlo import Module, parse
from .instructions import OP_NAME, Computation, Instruction, Shape, arrays, operands_of, total_bytes
from .names import operations
from .opcodes import COLLECTIVES, CollectiveKind
from .overlap import Overlap, Scheduled
from .parameters import ParameterRow
from .purposes import Use, uses_of
from .slices import Placed, Position, groups_between, groups_within, positions_of
from .source_frames import users_line
from .values import Located, Value


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
        axis_parts=members.axis_parts,
        in_loop=runs.in_loop,
        conditional=runs.in_branch,
        times=runs.times,
        operation=instruction.operation,
        source=users_line(module.source(instruction)),
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
            source=None if array.named is None else users_line(module.source(array.named)),
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
    axis_parts: tuple[AxisPart, ...] = ()  # as in `Collective`


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
        parts = () if axes is None else axis_parts(placed.groups, mesh_axes, axes)
        return _Members(placed.groups, axes, parts)

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
        # What comes out of a loop, moved or not, is named after the loop, as in ``jit(f)/while``.
        # This name does not say what computes the operand, so it does not count.
        names_of_loops = {loop.operation for _, loop in module.with_opcode("while")}
        makers = [maker for maker in home.instructions if maker.name in operands]
        makers.sort(key=lambda maker: total_bytes(arrays(maker.shape)), reverse=True)
        makers_names = [maker.operation for maker in makers]
        names = [name for name in makers_names if name not in names_of_loops] + names
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
