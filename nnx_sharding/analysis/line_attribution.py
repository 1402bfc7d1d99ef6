"""Attributes types, work and memory of a program to lines of the user's code.

**Types** come from the trace, as on Explicit axes types have specs. The line of an operation is the
innermost frame of its traceback that is not in a library. JAX traces a function such as `jnp.where`
once for all of its callers, so frames outside of the innermost trace belong to the first caller,
and an operation without a line inside of it has that of the call:

    jit[name=_where]     model.py:10     from the traceback of the call
      select_n           model.py:10     as there is no user's frame within the trace of _where

**Cost** is that of `attribution.py` with another key: a place is a line instead of a module. XLA
keeps the tracebacks of operations; only lines that the trace has count, so that the line that
compiles the program does not.

On **Auto** axes the compiler chooses how values are sharded, and writes only the shapes on one
device. They say how the value is sharded where mesh axes have different sizes:

    mesh data 2 × model 4     f32[8,64] in the trace, f32[4,16] on one device: P('data', 'model')

From other modules:

    PlaceFinder     finds the place of each instruction (`places.py`); here a place is a line
    Module          the HLO program; ``source`` has the lines that an instruction was made from
    read_sharding   the spec that a sharding of XLA says on a mesh; None if there is none
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..specs.fitting import axes_of
from ..specs.paths import enclosing_paths
from .attribution import CompiledProgram, Measured, figures_by_place, seconds_by_place
from .by_line import LineCollectives, LineRow, LineTable, ValueType, source_text
from .collectives import Collective, Collectives, users_frame
from .compiler_shardings import read_sharding
from .hlo import Module
from .instructions import Instruction
from .names import module_of, operations
from .owners import Arguments
from .parameters import ActivationRow, full_spec
from .places import UNKNOWN, Place, PlaceFinder

Line: TypeAlias = tuple[str, int]  # file, line
Shape: TypeAlias = tuple[int, ...]

FROM_PROGRAM = "specs on Auto axes come from the compiled program"
_UNDER_SHARD_MAP = "specs under shard_map, where each shape is that of one device"
_BY_COMPILER = "specs on Auto axes or without a mesh in the trace, which the compiler chooses"


class OperationKey(NamedTuple):
    """By what operations of a program and of its trace are compared."""

    line: str  # as ``model.py:12``; empty if it is unknown
    operation: str  # such as ``dot_general``
    backward: bool
    module: str | None


class MadeValue(NamedTuple):
    """A value of the trace."""

    line: Line | None
    operation: str
    dtype: str
    shape: Shape
    spec: PartitionSpec | None
    why: str | None  # why the spec is unknown, or lacks axes
    backward: bool
    module: str | None
    times: int


def made_values(traced: jax.stages.Traced, modules: Collection[str]) -> list[MadeValue]:
    """Lists what a traced function makes; ``modules`` are the paths of those that it calls."""
    return [*_walk(traced.jaxpr.jaxpr, None, "", 1, modules)]


def _walk(
    jaxpr: Jaxpr, line_around: Line | None, scope_around: str, times: int, modules: Collection[str]
) -> Iterator[MadeValue]:
    """Yields the values that a jaxpr makes, with those of the jaxprs inside it.

    Args:
      jaxpr: the jaxpr.
      line_around: the user's line that calls it, for equations without a line of their own.
      scope_around: the name scopes around it, which say the module and the pass.
      times: how often it runs.
      modules: the paths of the modules that are called.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        avals: list[Any] = [x.aval for x in equation.outvars]
        line = _line_of(equation) or line_around
        scope = f"{scope_around}{equation.source_info.name_stack}/"
        # A kernel works on parts of arrays, which are no values of the program.
        inner = [] if name == "pallas_call" else [*_compat.jaxprs_of(equation)]
        runs = times * equation.params["length"] if name == "scan" else times
        for part in inner:
            yield from _walk(part, line, scope, runs, modules)
        # What a call returns is made in it, and counted there; a loop stacks that.
        if any([x.aval for x in part.outvars] == avals for part in inner):
            continue
        backward, module = "transpose(" in scope, module_of(scope, modules)
        for aval in avals:
            if hasattr(aval, "shape"):  # tokens have none
                spec = _spec_of(aval)
                if name == "sharding_constraint" and spec == (None, _BY_COMPILER):
                    spec = _constrained(equation.params["sharding"], len(aval.shape))
                kind = str(aval.dtype), tuple(aval.shape), *spec
                yield MadeValue(line, name, *kind, backward, module, times)


def _line_of(equation: JaxprEqn) -> Line | None:
    """Returns the line of an equation within the innermost trace; None without one of the user."""
    traceback = equation.source_info.traceback
    frames: list[Any] = [] if traceback is None else traceback.frames  # innermost first
    inside = itertools.takewhile(lambda x: "trace_to_jaxpr" not in x.function_name, frames)
    return users_frame((frame.file_name, frame.line_num) for frame in inside)


def _spec_of(aval: Any) -> tuple[PartitionSpec | None, str | None]:
    """Returns the spec in the type of a traced value, and why it is unknown or lacks axes."""
    sharding = getattr(aval, "sharding", None)
    if not aval.shape:  # a number has no dimension to shard
        return PartitionSpec() if sharding is None else sharding.spec, None
    if sharding is None or sharding.mesh.empty:
        return None, _BY_COMPILER
    sizes = zip(sharding.mesh.axis_types, sharding.mesh.axis_sizes, strict=True)
    kinds = {kind for kind, size in sizes if size > 1}
    if AxisType.Manual in kinds:
        return None, _UNDER_SHARD_MAP
    why = _BY_COMPILER if AxisType.Auto in kinds else None
    return (None if kinds == {AxisType.Auto} else sharding.spec), why


def _constrained(sharding: Sharding, rank: int) -> tuple[PartitionSpec | None, str | None]:
    """Returns the spec of a constraint on Auto axes, which may leave dimensions to the compiler."""
    if not isinstance(sharding, NamedSharding):
        return None, _BY_COMPILER
    spec = full_spec(sharding.spec, rank)
    is_whole = PartitionSpec.UNCONSTRAINED not in spec.partitions
    return spec, None if is_whole else _BY_COMPILER


class _LineFinder(PlaceFinder):
    """Finds the lines of instructions, among those in the trace.

    Attributes:
      lines: these lines by the path of their place, such as ``model.py:12``.
    """

    def __init__(self, module: Module, lines: Iterable[Line]):
        super().__init__(module, module_paths=(), parameter_modules={})
        self.lines: dict[str, Line] = {_path(line): line for line in lines}
        self._known = {line: Place(path, False) for path, line in self.lines.items()}

    def keys(self, modules: Collection[str]) -> Iterator[tuple[OperationKey, Instruction]]:
        """Yields the instructions that belong to lines, each after the key of its operation."""
        for computation in self._module.computations:
            for instruction in computation.instructions:
                place = self._written_place(instruction)
                if place is None:
                    continue
                for name in operations(instruction.operation or ""):
                    operation, backward = name.rpartition("/")[2], "transpose(" in name
                    module = module_of(name, modules)
                    key = OperationKey(place.path or "", operation, backward, module)
                    yield key, instruction

    def _written_place(self, instruction: Instruction) -> Place | None:
        """Reads the line from the traceback of the operation, which the compiler kept."""
        frames = self._module.source(instruction)
        return next((self._known[frame] for frame in frames if frame in self._known), None)

    def _recorded_place(self, collective: Collective) -> Place | None:
        """Finds the line of a collective's ``source``, which may have a part of the file's path.

        Returns None if that is unknown, or not clear.
        """
        end = f"/{collective.source}"
        places = [place for place in self._known.values() if f"/{place.path}".endswith(end)]
        return places[0] if len(places) == 1 else None

    def _joined(self, paths: Sequence[str]) -> str:
        """Returns the line of what serves several: the first, which computes what is moved."""
        return paths[0]


def line_table(
    program: CompiledProgram,
    made: Sequence[MadeValue],
    modules: Collection[str],
    whole: Module | None,
    measured: Measured | None = None,
) -> LineTable:
    """Sums types, cost and memory of a compiled program by line.

    Args:
      program: the program.
      made: the values of its trace.
      modules: the paths of the modules that it calls.
      whole: the program before it is partitioned, with the sharding of each value; None if unknown.
      measured: the times of the instructions of a program of this trace; None without a profile.
    """
    code_lines = [value.line for value in made if value.line]
    finder = _LineFinder(program.module, code_lines)
    times = None
    if measured is not None:
        times = seconds_by_place(_LineFinder(measured.module, code_lines), measured)
    places = [*(Place(path, False) for path in finder.lines), UNKNOWN]
    no_arguments = Arguments(program.module, ())  # no line makes them
    figures, _, reasons = figures_by_place(finder, no_arguments, program, places, times)
    if program.mesh is not None:
        made = compiled_values(made, modules, program.module, whole, program.mesh.axes)
    typed = {(row.file, row.line): row for row in typed_table(made).rows}
    rest = None  # bytes of arguments, or of what the compiler made
    if program.buffers is not None:
        of_lines = (x.at_peak.total() for place, x in figures.items() if x.at_peak and place.path)
        rest = max(program.buffers.in_use()) - sum(of_lines)
    rows = []
    for place, figure in figures.items():
        line = finder.lines.get(place.path or "", (None, None))
        sent, held = figure.collectives, figure.at_peak
        rows.append(
            dataclasses.replace(
                typed.get(line, LineRow(*line)),
                collectives=None if sent is None else _by_kind(sent),
                flops=figure.cost.flops,
                bytes=figure.cost.bytes_accessed,
                seconds=figure.seconds,
                at_peak=held.total() if held is not None and place.path else rest,
                measured=figure.measured,
            )
        )
    return LineTable(_ordered(rows), "; ".join(reasons) or None, _remark(made))


def typed_table(made: Sequence[MadeValue]) -> LineTable:
    """Returns a table with the types of the values that each line of a trace makes, without cost.

    The first type of a line is that of its result.
    """
    by_line: defaultdict[Line | None, list[MadeValue]] = defaultdict(list)
    for value in reversed(made):  # the result of a line is what it makes last
        by_line[value.line].append(value)
    rows = []
    for line, values in by_line.items():
        counts = Counter[ValueType]()
        for value in values:
            kind = ValueType(value.dtype, value.shape, value.spec, value.backward, count=0)
            counts[kind] += value.times
        types = [dataclasses.replace(kind, count=count) for kind, count in counts.items()]
        types.sort(key=lambda kind: kind.backward)  # the forward pass first
        file, number = line or (None, None)
        code = "" if line is None else source_text(*line)
        modules = sorted({value.module for value in values if value.module})
        rows.append(LineRow(file, number, code, tuple(types), tuple(modules)))
    return LineTable(_ordered(rows), "figures, as the program is not compiled", _remark(made))


def _ordered(rows: Iterable[LineRow]) -> tuple[LineRow, ...]:
    """Sorts rows by file and line; that without a line is the last."""
    return tuple(sorted(rows, key=lambda row: (row.file is None, row.file or "", row.line or 0)))


def _remark(made: Iterable[MadeValue]) -> str | None:
    """Says which specs are unknown, and which are not from types."""
    unknown = dict.fromkeys(value.why for value in made if value.why is not None)
    remarks = [FROM_PROGRAM] if FROM_PROGRAM in unknown else []
    if reasons := [why for why in unknown if why != FROM_PROGRAM]:
        remarks.append(f"unknown: {', '.join(reasons)}")
    return "; ".join(remarks) or None


def _by_kind(collectives: Collectives) -> tuple[LineCollectives, ...]:
    """Sums the collectives of each kind over the same axes."""
    in_unknown_loops = {(c.kind, c.axes) for c in collectives if c.times is None}
    return tuple(
        LineCollectives(*key, bytes=None if key in in_unknown_loops else sent, count=count)
        for key, (count, sent) in collectives.totals().items()
    )


def compiled_values(
    made: Sequence[MadeValue],
    modules: Collection[str],
    module: Module,
    whole: Module | None,
    sizes: Mapping[str, int],
) -> list[MadeValue]:
    """Completes values whose specs the compiler chose by the specs in the compiled program.

    Args:
      made: the values of the trace.
      modules: the paths of the modules that it calls.
      module: the program for one device, whose shapes mostly say the spec.
      whole: the program before it is partitioned, which has all specs; None if it is not there.
      sizes: the sizes of the mesh axes.
    """
    finder = _LineFinder(whole or module, [value.line for value in made if value.line])
    keyed = [*finder.keys(modules)]
    if whole is not None:
        specs = _written_specs(keyed, sizes)
    else:
        specs = _specs_of_shards(made, keyed, sizes)
    completed = []
    for value in made:
        spec = specs.get((_key(value), value.shape))
        if value.why == _BY_COMPILER and spec is not None:
            value = value._replace(spec=spec, why=FROM_PROGRAM)
        completed.append(value)
    return completed


# By operation and shape of the whole value; None if it is unknown.
_Specs: TypeAlias = dict[tuple[OperationKey, Shape], PartitionSpec | None]


def _written_specs(
    keyed: Iterable[tuple[OperationKey, Instruction]], sizes: Mapping[str, int]
) -> _Specs:
    """Reads the specs of operations in a program that is not partitioned yet.

    A spec is known if all values of one operation, line, module and shape have the same.
    """
    specs: _Specs = {}
    for key, instruction in keyed:
        written = instruction.attributes.get("sharding")
        if written is not None and len(instruction.results) == 1:
            shape = instruction.results[0].dims
            spec = read_sharding(written, len(shape), sizes)
            if specs.setdefault((key, shape), spec) != spec:
                specs[key, shape] = None
    return specs


def _specs_of_shards(
    made: Iterable[MadeValue],
    keyed: Iterable[tuple[OperationKey, Instruction]],
    sizes: Mapping[str, int],
) -> _Specs:
    """Infers specs from the shapes that operations have in the trace and on one device.

    With several shapes of one rank it is not known which on one device is of which.
    """
    whole_shapes = defaultdict[tuple[OperationKey, int], set[Shape]](set)  # by rank
    shard_shapes = defaultdict[tuple[OperationKey, int], set[Shape]](set)
    for value in made:
        whole_shapes[_key(value), len(value.shape)].add(value.shape)
    for key, instruction in keyed:
        for array in instruction.results:
            shard_shapes[key, len(array.dims)].add(array.dims)
    specs: _Specs = {}
    for (key, rank), shapes in whole_shapes.items():
        if len(shapes) == len(shard_shapes[key, rank]) == 1:
            [whole], [shard] = shapes, shard_shapes[key, rank]
            specs[key, whole] = spec_of_shard(whole, shard, sizes)
    return specs


def inferred_activations(
    rows: Iterable[ActivationRow], made: Iterable[MadeValue], sizes: Mapping[str, int]
) -> Iterator[ActivationRow]:
    """Fills in how activations are sharded in a compiled program, where the compiler chose.

    What a module returns is the last value of its shape that is made within its call.

    Args:
      rows: the activations.
      made: the values of the trace, with the specs of the compiled program.
      sizes: those of the mesh axes.
    """
    # The spec of the last value that a module makes of each dtype and shape.
    last: dict[tuple[str, str, Shape], PartitionSpec | None] = {}
    for value in made:
        if value.backward:
            continue
        path = value.module or ""
        for outer in [*enclosing_paths(path), path]:
            key = outer, value.dtype, value.shape
            last[key] = _with_constraint(value.spec, last.get(key))
    for row in rows:
        spec = last.get((row.path, row.dtype, row.shape))
        if row.chosen_by == "compiler" and spec is not None:
            row = _with_spec(row, spec, sizes)
        yield row


def _with_spec(row: ActivationRow, spec: PartitionSpec, sizes: Mapping[str, int]) -> ActivationRow:
    """Returns the row of an activation that is sharded by an inferred spec."""
    # By dimension; the last shard may be smaller.
    counts = [math.prod(sizes.get(str(axis), 1) for axis in axes_of(x)) for x in spec.partitions]
    shard = tuple(-(-n // count) for n, count in zip(row.shape, counts, strict=True))  # rounded up
    size = row.bytes_total * math.prod(shard) // max(math.prod(row.shape), 1)
    return dataclasses.replace(
        row, spec=spec, shard_shape=shard, bytes_per_device=size, chosen_by="inferred"
    )


def _with_constraint(
    spec: PartitionSpec | None, before: PartitionSpec | None
) -> PartitionSpec | None:
    """Returns a spec where the dimensions that a constraint leaves open are as before it."""
    if spec is None or PartitionSpec.UNCONSTRAINED not in spec.partitions:
        return spec
    if before is None or len(before) != len(spec):
        return None
    pairs = zip(spec.partitions, before.partitions, strict=True)
    entries = [y if x is PartitionSpec.UNCONSTRAINED else x for x, y in pairs]
    return PartitionSpec(*entries)


def _key(value: MadeValue) -> OperationKey:
    return OperationKey(_path(value.line), value.operation, value.backward, value.module)


def _path(line: Line | None) -> str:
    """Writes a line as the path of a place."""
    return "" if line is None else f"{line[0]}:{line[1]}"


def spec_of_shard(
    shape: Shape, shard_shape: Shape, sizes: Mapping[str, int], *, any_order: bool = False
) -> PartitionSpec | None:
    """Returns the spec with which an array has shards of a shape; None if there is not just one.

    With ``any_order``, axes over one dimension are in the order of the mesh, where shapes do not
    say it.

    Example:
      >>> from nnx_sharding.analysis.line_attribution import spec_of_shard
      >>> spec_of_shard((8, 64), (4, 16), {"data": 2, "model": 4})
      P('data', 'model')
      >>> spec_of_shard((8, 64), (4, 64), {"data": 2, "model": 2}) is None
      True
      >>> spec_of_shard((8, 64), (1, 64), {"data": 2, "model": 4}) is None
      True
    """
    axes = [axis for axis, size in sizes.items() if size > 1]
    # Shapes do not say the order of axes, so that several over one dimension are never clear.
    choose = itertools.combinations if any_order else itertools.permutations
    subsets = [x for n in range(len(axes) + 1) for x in choose(axes, n)]
    counts = {subset: math.prod(sizes[axis] for axis in subset) for subset in subsets}
    # For each dimension the axes that divide it into shards of this size; the last may be padded.
    choices = [
        [subset for subset, count in counts.items() if -(-whole // count) == part]
        for whole, part in zip(shape, shard_shape, strict=True)
    ]
    found = []
    for entries in itertools.product(*choices):
        used = [axis for entry in entries for axis in entry]
        if len({*used}) == len(used):  # an axis shards one dimension
            found.append(entries)
    if len(found) != 1:
        return None
    # As in a spec: None for no axes, and one axis without a tuple.
    plain: dict[tuple[str, ...], str | None] = {(): None, **{(axis,): axis for axis in axes}}
    return PartitionSpec(*(plain.get(entry, entry) for entry in found[0]))
