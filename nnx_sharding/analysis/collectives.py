"""What the devices exchange: each collective of a compiled program, with bytes and mesh axes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from ..errors import is_library
from .device_groups import Groups, axes_of_groups, axes_of_pairs, connected
from .hlo import Module, parse
from .instructions import OP_NAME, Computation, Instruction, arrays, total_bytes
from .names import operations
from .opcodes import COLLECTIVES
from .overlap import Overlap, Scheduled
from .parameters import ParameterRow
from .purposes import Purpose, Use, uses_of
from .slices import Position, groups_between, groups_within, positions_of
from .tables import Pictured, table, text
from .units import bytes_text, printable
from .values import Value
from .work import Work, made_by

Kind: TypeAlias = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
]  # fmt: skip
MeshAxes: TypeAlias = tuple[str, ...] | None
K = TypeVar("K")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    ``bytes_sent`` is what a ring algorithm sends for n devices in a group, as in the documentation
    of NCCL's tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
    2·bytes·(n-1)/n for an all-reduce, bytes·(n-1)/n for all-gather, reduce-scatter and all-to-all.
    A permutation sends all bytes, and so does a broadcast; for a ragged all-to-all, the operand
    counts, all of which may be sent.

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
      pairs: the devices from and to which a permutation sends, by their positions in the mesh.
      flops_beside: what the device is scheduled to compute while one run is in progress, which the
        compiler for TPUs chooses; 0 if the device waits for it.
      bytes_beside: what it reads and writes meanwhile.
      beside: the operations with most of these flops.
      scheduled_in: the computation that runs it: of a fusion the one that it is in.
      flops_before, bytes_before: what the device computes, reads and writes in one run of that
        before this starts; 0 if no collective runs while the device computes.
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
    conditional: bool
    times: int | None
    operation: str | None
    source: str | None
    purpose: Purpose | None = None
    parameters: tuple[str, ...] = ()
    module: str | None = None
    pairs: Groups = ()
    flops_beside: int = 0
    bytes_beside: int = 0
    beside: tuple[str, ...] = ()
    scheduled_in: str = ""
    flops_before: int = 0
    bytes_before: int = 0

    @property
    def total_bytes_sent(self) -> int:
        """What one device sends in all runs; in one run for a loop of unknown length."""
        return self.bytes_sent * (1 if self.times is None else self.times)

    @property
    def of(self) -> str:
        """The parameters (the paths of the first two), or else the operation."""
        some = [*self.parameters[:2], *["…"] * (len(self.parameters) > 2)]
        return ", ".join(some) or self.operation or ""

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

    def of(self, kind: Kind | None = None, *axes: str) -> Collectives:
        """Those of one kind, over exactly these mesh axes in any order; None and none for any."""
        if kind is not None and kind not in COLLECTIVES:
            raise ValueError(
                f"{kind!r} is not a kind of collective; use one of {sorted(COLLECTIVES)}."
            )
        return Collectives(
            one
            for one in self
            if (kind is None or one.kind == kind)
            and (not axes or (one.axes is not None and {*one.axes} == {*axes}))
        )

    @property
    def resharded(self) -> Collectives:
        """Those that move activations or others that are not parameters, gradients or results."""
        return Collectives(one for one in self if one.purpose == "reshard")

    @property
    def bytes_sent(self) -> int:
        """What one device sends in one call; loops of unknown length count once."""
        return sum(one.total_bytes_sent for one in self)

    @property
    def has_unknown_times(self) -> bool:
        """Whether one is in a loop of unknown length, so that sums may be too low."""
        return any(one.times is None for one in self)

    def counts(self) -> dict[Kind, int]:
        """The number of instructions of each kind, including zeros; one in a loop counts once."""
        counts = Counter(one.kind for one in self)
        return {kind: counts[kind] for kind in get_args(Kind)}

    def by_kind(self) -> dict[Kind, int]:
        """What one device sends in one call, by kind."""
        return self._sums(lambda one: one.kind)

    def by_axes(self) -> dict[MeshAxes, int]:
        """What one device sends in one call, by mesh axes; None if no axes have the groups."""
        return self._sums(lambda one: one.axes)

    def by_purpose(self) -> dict[Purpose | None, int]:
        """What one device sends in one call, by what it is for."""
        return self._sums(lambda one: one.purpose)

    def totals(self) -> dict[tuple[Kind, MeshAxes], tuple[int, int]]:
        """The number of instructions, and what one device sends for them, by kind and mesh axes."""
        numbers = Counter((one.kind, one.axes) for one in self)
        sent = self._sums(lambda one: (one.kind, one.axes))
        return {key: (number, sent[key]) for key, number in numbers.items()}

    def _sums(self, key: Callable[[Collective], K]) -> dict[K, int]:
        sums: Counter[K] = Counter()
        for one in self:
            sums[key(one)] += one.total_bytes_sent
        return dict(sums)

    def _pictures(self, width: int) -> Iterable[Any]:
        if not self:
            yield text("no collectives")
            return
        header = ("kind", "axes", "bytes", "sent", "times", "purpose", "of", "source")
        alike = Counter((*cells, of, _end(source, 15)) for *cells, of, source in map(_alike, self))
        widths = [max(map(len, column)) for column in zip(header, *alike, strict=True)]
        most = min(26, 100 - sum(widths) + widths[-2] - 2 * len(widths))  # for a terminal
        rows = []
        for (*cells, of, source), count in alike.items():
            number = f" ({count} ×)" * (count > 1)
            rows.append((*cells, _end(of, most - len(number)) + number, source))
        yield table(header, rows)
        remark = " or more, as a loop is of unknown length" * self.has_unknown_times
        remark += ", of conditionals the branch that sends most" * any(
            one.conditional for one in self
        )
        yield text(f"sent by one device in one call: {bytes_text(self.bytes_sent)}{remark}")


def axes_text(axes: MeshAxes) -> str:
    """Mesh axes as tables show them: ``data+model``, ``-`` for none, ``?`` for unknown ones."""
    return "?" if axes is None else "+".join(axes) or "-"


def _cells(one: Collective) -> tuple[str, ...]:
    sizes = bytes_text(one.bytes), bytes_text(one.bytes_sent)
    times = "?" if one.times is None else "≤ " * one.conditional + str(one.times)
    return one.kind, axes_text(one.axes), *sizes, times, one.purpose or "", one.of, one.source or ""


def _alike(one: Collective) -> tuple[str, ...]:
    """The cells of one, the same for those of modules in one list."""
    *cells, of, source = _cells(one)
    if one.parameters:
        first, *rest = one.parameters
        of = first + f" +{len(rest)}" * bool(rest)
    return *cells, _INDEX.sub("[*]", _FUNCTION.sub("", of)), source


def _end(name: str, most: int) -> str:
    """The end of a long name, of which at least 8 characters remain."""
    most = max(most, 8)
    return f"…{name[1 - most :]}" if len(name) > most else name


_INDEX, _FUNCTION = re.compile(r"\[\d+\]"), re.compile(r"^jit\([^/]*\)/")


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

    Example:
      >>> from nnx_sharding.analysis import collectives_of
      >>> hlo = "%a = f32[64]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add"
      >>> [one] = collectives_of(hlo, {"data": 2, "model": 4})
      >>> one.kind, one.bytes, one.bytes_sent, one.axes
      ('all-reduce', 256, 384, ('model',))
    """
    module = parse(hlo) if isinstance(hlo, str) else hlo
    shape = {} if mesh is None else dict(getattr(mesh, "shape", mesh))
    sizes = {str(axis): int(size) for axis, size in shape.items()}
    if module.unread:
        return None
    repeated = _repeated_in_fusions(module)
    starts = [f"{kind}-start" for kind in COLLECTIVES]
    found = [
        (computation, _with_metadata(instruction, computation, module))
        for computation, instruction in module.with_opcode(*COLLECTIVES, *starts)
        if instruction.name not in repeated
    ]
    # The program of one of several slices.
    positions = positions_of(mesh) if module.num_devices != math.prod(sizes.values()) else {}
    uses: Mapping[str, Use] = {}
    if found and arguments is not None:
        uses = uses_of(module, found, arguments, results)
    # Others are waited for, or are parts of a fusion.
    overlap = Overlap(module) if repeated or module.with_opcode(*starts, "async-start") else None
    every = [
        _collective(module, *one, sizes, positions, uses.get(one[1].name, Use()), overlap)
        for one in found
    ]
    if any(one.conditional for one in every):
        sent: Counter[str] = Counter()
        for one in every:
            sent[one.computation] += one.bytes_sent
        skipped = {one.computation for one in every} - module.taken(sent)
        every = [dataclasses.replace(x, times=0) if x.computation in skipped else x for x in every]
    return Collectives(every)


def _collective(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    sizes: Mapping[str, int],
    positions: Mapping[Position, int],
    use: Use,
    overlap: Overlap | None,
) -> Collective:
    kind = cast(Kind, instruction.collective)
    results, mesh = instruction.results, tuple(sizes.items())
    pairs: Groups = ()
    runs = module.runs[computation.name]
    groups = instruction.source_target_pairs
    if kind != "collective-permute":
        whole = math.prod(sizes.values()) if mesh and not positions else module.num_devices or 1
        groups = _groups(instruction, whole)
    is_placed = bool(mesh)
    if between := instruction.attributes.get("between_slices"):
        groups, is_placed = groups_between(between, positions)
    elif positions:
        groups, is_placed = groups_within(groups, positions)
    if kind == "collective-permute":
        pairs = tuple(pair for pair in groups if len({*pair}) > 1)
        groups = connected(pairs)
        axes = axes_of_pairs(pairs, mesh) if is_placed else None
    else:
        axes = axes_of_groups(groups, mesh) if is_placed else None
    size = max(map(len, groups), default=1)
    larger = total_bytes(results) * (size if kind == "reduce-scatter" else 1)
    if kind == "ragged-all-to-all":
        operands = module.within[computation.name]
        larger = total_bytes(made_by(operands, instruction.operand_names[0])) or larger
    if kind == "all-reduce" and runs.is_fused and size > 1:
        parts = tuple(arrays(module.roots[computation.name].shape))
        # A fusion that sums and keeps each device's part is a reduce-scatter.
        if total_bytes(parts) * size == larger:
            kind, results = "reduce-scatter", parts
    at = Scheduled(computation.name, Work(), Work(), ())
    if overlap is not None:
        at = overlap.scheduled(Value(computation.name, instruction.name))
    return Collective(
        kind=kind,
        name=instruction.name,
        computation=computation.name,
        dtype="+".join(dict.fromkeys(shape.dtype for shape in results)),
        shapes=tuple(shape.dims for shape in results),
        bytes=larger,
        bytes_sent=_bytes_sent(kind, larger, size),
        group_size=size,
        num_groups=len(groups),
        axes=axes,
        pairs=pairs if is_placed or not mesh else (),
        in_loop=runs.in_loop,
        conditional=runs.in_branch,
        times=runs.times,
        operation=instruction.operation,
        source=_users_line(module.source(instruction)),
        flops_beside=at.beside.flops,
        bytes_beside=at.beside.bytes_accessed,
        beside=at.operations,
        scheduled_in=at.home,
        flops_before=at.before.flops,
        bytes_before=at.before.bytes_accessed,
        **use._asdict(),
    )


def _bytes_sent(kind: Kind, larger: int, size: int) -> int:
    if size < 2:
        return 0
    if kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
        return larger
    # Rounded up to bytes.
    return -(-larger * (2 if kind == "all-reduce" else 1) * (size - 1) // size)


def _groups(instruction: Instruction, count: int) -> Groups:
    groups, attributes = instruction.replica_groups or (), instruction.attributes
    over_partitions = "channel_id" in attributes and "use_global_device_ids" not in attributes
    of_replicas = instruction.opcode.startswith(("all-reduce", "all-gather", "reduce-scatter"))
    # These are groups of replicas, of which JAX has one, and all partitions take part in each.
    if groups == () or (groups == ((0,),) and over_partitions and of_replicas):
        return (tuple(range(count)),)
    return groups


def _users_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """The innermost line that is not in a library, else the innermost."""
    library = ("site-packages", "<frozen")
    users = (f for f in frames if not (is_library(f[0]) or any(part in f[0] for part in library)))
    file, line = next(users, frames[0] if frames else ("", 0))
    return f"{PurePath(file).name}:{line}" if file else None


def _with_metadata(one: Instruction, computation: Computation, module: Module) -> Instruction:
    """An instruction with the metadata that the TPU compiler leaves out: of callers or operands."""
    places = [(computation, one), *module.around(computation.name)]
    home, caller = next((x for x in places if x[1].operation is not None), places[-1])
    names, operands = [caller.operation], {*caller.operand_names}
    if len(operands) > 1 and len(operations(caller.operation or "")) == 1:
        names = [i.operation for i in home.instructions if i.name in operands] + names
    name = ";".join(dict.fromkeys(filter(None, names)))
    if name == (one.operation or ""):
        return one
    written = caller.attributes.get("metadata", "")
    quoted = name.replace("\\", r"\\").replace('"', r"\"")
    metadata = f'{{op_name="{quoted}" {OP_NAME.sub("", written).strip("{}")}}}'
    rest = one.rest.replace(f", metadata={written}", "") if written else one.rest
    return one._replace(rest=f"{rest}, metadata={metadata}")


def _repeated_in_fusions(module: Module) -> set[str]:
    """Collectives that the TPU compiler repeats in each fusion that carries on the first one."""
    starts: dict[str, str | None] = {}
    others: dict[str, str | None] = {}
    for computation in module.computations:
        is_start = any("AsyncCollectiveStart" in one.rest for one in computation.instructions)
        for one in computation.instructions:
            if "async_collective_fusion_config" in one.rest:
                (starts if is_start else others)[one.name] = one.attributes.get("channel_id")
    return {name for name, channel in others.items() if channel in starts.values()}
