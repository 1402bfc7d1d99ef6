"""The figures of a compiled function: cost, memory, collectives, time, reasons, a report.

This file is apart from `stages.py` because it needs all of `analysis`, which takes as long to
import as everything that a call needs. `Compiled` makes one :class:`Figures` when the user first
asks for a figure, and passes each question on to it.

There are two programs: the one that calls run (``module``), and the same one compiled again with
names of modules (``dumped``), which takes as long as the first compilation.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from .._compat import cached_property
from ..analysis.argument_reasons import ArgumentReasons
from ..analysis.attribution import CompiledProgram, Measured, module_table
from ..analysis.by_line import LineTable
from ..analysis.by_module import ModuleTable
from ..analysis.collective_reasons import CollectiveReasons, Shape
from ..analysis.collectives import Collective, Collectives
from ..analysis.compiled_collectives import collectives_of
from ..analysis.cost import COMPILED, Cost, cost_of
from ..analysis.hardware import HARDWARE, Hardware, hardware_of
from ..analysis.hlo import Module, parse
from ..analysis.inferred_specs import compiled_values, inferred_activations
from ..analysis.instructions import padded_bytes
from ..analysis.line_attribution import line_table
from ..analysis.measured import Profile, measured_seconds
from ..analysis.memory import Memory, memory_of
from ..analysis.meshes import MeshDescription
from ..analysis.parameters import ActivationTable, ParameterRow, ParameterTable, mesh_of
from ..analysis.program import ProgramReport, describe, devices_of
from ..analysis.purposes import rows_of_inputs
from ..analysis.reasons import Reason
from ..analysis.roofline import Roofline, roofline_of
from ..analysis.source_frames import file_title
from ..analysis.traced_values import MadeValue, made_values
from ..analysis.units import bytes_text
from ..analysis.work import with_loops
from ..core.outcome import Outcome
from ..specs.fitting import suggestion
from .module_memory import DumpedProgram, argument_rows, dump_program

if TYPE_CHECKING:
    from .stages import Compiled

# How many arrays of a module `why` lists; more do not fit on a screen.
_MAX_LISTED = 12


class Figures:
    """The figures of one compiled function; figures that take long are computed once.

    Attributes:
      module: the parsed program that calls run.
      dumped: the program compiled once more; the first use takes as long as a compilation.
      _compiled, _stage: the compiled function, and JAX's own stage in it.
      _plan: what is known of the arguments: their names, structure and declared shardings.
      _arguments: a row for each argument array, by slot. ``_rows_by_path`` has the rows by path.
      _mesh: the mesh that most arrays have; None if no array is sharded over a mesh.
      _made: the values that the user's code makes. ``_module_paths`` are the paths of the modules
        that it calls. The first use of either traces the function once more.
      _program: ``dumped`` as the input of tables, without the hardware.
      _module_tables: the tables of `by_module` without a profile, by the hardware of their times.
    """

    def __init__(self, compiled: Compiled):
        self._compiled = compiled
        self._stage: jax.stages.Compiled = compiled._stage
        self._plan = compiled._plan
        self._module_tables: dict[Hardware | None, ModuleTable] = {}  # by the hardware of the times

    @cached_property
    def _mesh(self) -> Mesh | None:
        return mesh_of(self._compiled.shardings())

    @cached_property
    def _device(self) -> jax.Device:
        """The first device that runs the program."""
        return devices_of(self._compiled.shardings())[0]

    @cached_property
    def cost(self) -> Cost | None:
        """The cost of a call on one device, with the bodies of loops as often as they run."""
        # A compiler for GPUs that are not present estimates nothing, but the program can be read.
        cost = self.cost_by_xla() or Cost(0.0, 0.0, 0.0, COMPILED)
        return with_loops(cost, self.module)

    def cost_by_xla(self) -> Cost | None:
        """Returns what XLA counts, with the body of each loop once; None if it counts nothing."""
        return cost_of(self._stage.cost_analysis(), COMPILED)

    @cached_property
    def memory(self) -> Memory | None:
        """The memory that the program takes on one device; None if JAX does not say."""
        used = [row for row in self._arguments if row.used]  # JAX drops unused arguments
        argument_bytes = {row.path: row.bytes_per_device for row in used}
        analysis = self._stage.memory_analysis()
        total = getattr(analysis, "argument_size_in_bytes", None)
        if total is not None and total != sum(argument_bytes.values()):
            # The layouts of TPUs pad arrays to tiles, and the inputs of the program show the
            # padding. An argument keeps its unpadded size if it is unknown which input it is.
            # The result of `rows_of_inputs` has only the inputs that are known, by their number.
            for number, row in rows_of_inputs(self.module, used).items():
                instruction = self.module.parameters[number]
                argument_bytes[row.path] = padded_bytes(instruction.shape_text)
        memory = memory_of(analysis, argument_bytes)
        if memory is None:
            return None
        # `by_module` is passed as a function, because it compiles once more, and only printing
        # calls it.
        return dataclasses.replace(memory, by_module=self._compiled.by_module)

    def by_module(
        self, depth: int | None, hardware: Hardware | str | None, profile: Profile | None
    ) -> ModuleTable:
        """Attributes memory, cost and time to modules.

        Args:
          depth: how many attributes below an argument modules are listed; None for all.
          hardware: the peak figures for the column of seconds; None for those of the devices for
            which the program was compiled.
          profile: a profile of calls of the function; with it, the seconds are measured.
        """
        peak = self._hardware(hardware)
        if profile is not None:
            seconds = measured_seconds(profile, self.module)  # by the name of the instruction
            # `dumped` is not the program that ran, but its instructions have the same names.
            # `measured` raises an error if they have not.
            measured = self.dumped.measured(seconds)
            table = self._module_table(peak, measured)  # not kept, because a profile is used once
        else:
            if peak not in self._module_tables:
                self._module_tables[peak] = self._module_table(peak)
            table = self._module_tables[peak]
        return table if depth is None else table.at_depth(depth)

    def _module_table(self, peak: Hardware | None, measured: Measured | None = None) -> ModuleTable:
        """Makes the table of all modules; ``measured`` has the seconds of the instructions."""
        program = self._program._replace(hardware=peak)
        return module_table(program, self._arguments, self.dumped.paths, measured)

    def by_line(self, hardware: Hardware | str | None, profile: Profile | None) -> LineTable:
        """Attributes types, cost and time to the lines of the user's code.

        Args:
          hardware: the peak figures for the column of seconds; None for those of the devices for
            which the program was compiled.
          profile: a profile of calls of the function; with it, seconds are also measured.
        """
        # A profile is joined to the program that ran, because it knows the lines of its operations.
        # Modules, which `by_module` needs, are known in the dumped program alone.
        measured = None
        if profile is not None:
            measured = Measured(self.module, measured_seconds(profile, self.module))
        # Figures come from the dumped program. The specs of the values that the user's lines make
        # come from the program before it is partitioned.
        program = self._program._replace(hardware=self._hardware(hardware))
        return line_table(program, self._made, self._module_paths, self.dumped.whole, measured)

    @cached_property
    def _program(self) -> CompiledProgram:
        """The input of tables by module and by line, without the hardware.

        Raises:
          ValueError: the function computes something else now than when it was compiled.
        """
        program = self.dumped.compiled_program(self._arguments, self._mesh)
        has_other_types = _types_of(program.module) != _types_of(self.module)
        if has_other_types or self._has_other_flops(program):
            raise ValueError(
                f"{self._plan.fun_name} is another program than the one that was compiled: "
                "by_module and by_line trace it once more, and what it captures, or a setting of "
                "JAX, has changed since. Compile it again."
            )
        return program

    def _has_other_flops(self, program: CompiledProgram) -> bool:
        """Returns whether a program has clearly other flops than calls; False if they are unknown.

        A fifth more or less counts as equal, because a compiler may fuse in another way the second
        time, which changes flops by little.
        """
        # The flops of calls are None for loops of unknown length.
        flops_of_calls = None if self.cost is None else self.cost.flops
        # `executed` has pairs of an instruction and its flops in one run, by the name of the
        # computation; None if a part of the program is not understood.
        if flops_of_calls is None or program.executed is None:
            return False
        flops = 0.0
        for name, works in program.executed.items():
            num_runs = program.module.runs[name].least  # how often the computation runs
            flops += sum(work.flops for _, work in works) * num_runs
        return abs(flops - flops_of_calls) > 0.2 * flops_of_calls

    def activations(self, *, compile_again: bool) -> ActivationTable:
        """Lists the outputs of modules, with the specs that the compiler chose.

        A trace knows specs that are declared or in types. On Auto axes the compiler chooses, so
        these specs are read from a program.

        Args:
          compile_again: whether to read them from the program before it is partitioned, which has
            all specs, but has to be compiled for this (``dumped``). Otherwise they are inferred
            from the shapes in the program for one device, which tell most specs.
        """
        rows = self._compiled._traced_activations()
        is_incomplete = any(row.chosen_by == "compiler" for row in rows)
        # Without a mesh nothing is sharded. A program that could not be read completely could tell
        # wrong specs.
        if not is_incomplete or self._mesh is None or self.module.unread:
            return ActivationTable(rows)  # no longer `of_trace`: compiling shows no more
        axis_sizes = MeshDescription.of(self._mesh).axes
        whole_program = self.dumped.whole if compile_again else None
        # `values` has the values that the lines of the user's code make, with their specs in the
        # program. Each row gets the spec of the value that it is.
        values = compiled_values(
            self._made, self._module_paths, self.module, whole_program, axis_sizes
        )
        return ActivationTable(inferred_activations(rows, values, axis_sizes))

    @cached_property
    def _module_paths(self) -> frozenset[str]:
        """The paths of the modules that are called, such as ``model.up``."""
        return frozenset(call.path for call in self._compiled._recorder.calls)

    @cached_property
    def _made(self) -> list[MadeValue]:
        """The values that the user's code makes, from its trace, each with line and module."""
        return made_values(self._compiled._recorder.traced, self._module_paths)

    def why(self, subject: str | Collective) -> Reason:
        """Says why an argument or the arrays of a module are sharded so, or a collective is there.

        Raises:
          ValueError: the program has no such argument, module or collective.

        Args:
          subject: the path of an argument or of a module; or a collective, or its name.
        """
        if isinstance(subject, str):
            if subject in self._rows_by_path:
                return self._why_argument(subject)
            in_module = f"{subject}.", f"{subject}["
            paths = [path for path in self._rows_by_path if path.startswith(in_module)]
            if paths:
                return self._why_module(subject, paths)
        collectives = self.collectives or ()
        name = subject if isinstance(subject, str) else subject.name
        collective = next((x for x in collectives if x.name == name), None)
        if collective is None:
            names = [*self._plan.names, *(x.name for x in collectives)]
            raise ValueError(
                f"{self._plan.fun_name} has no argument, module or collective that is called "
                f"{name!r}{suggestion(name, names)}"
            )
        return self._collective_reasons.reason(collective)

    def reasons(self) -> dict[str, Reason]:
        """Returns the reason for each used argument, by path, and each collective, by name."""
        used = {row.path: self._why_argument(row.path) for row in self._arguments if row.used}
        collectives = self.collectives or ()
        return used | {x.name: self._collective_reasons.reason(x) for x in collectives}

    @cached_property
    def _rows_by_path(self) -> dict[str, ParameterRow]:
        return {row.path: row for row in self._arguments}

    def _why_argument(self, path: str) -> Reason:
        """Says why the argument with a path is sharded as it is."""
        return self._argument_reasons.reason(self._rows_by_path[path])

    def _why_module(self, module_path: str, paths: list[str]) -> Reason:
        """Says how the arrays of a module are sharded, each with the first of its reasons.

        The first reason is the rule that decides. The other reasons, and what to write instead, are
        in the answer for the array itself.

        Args:
          module_path: the module, such as ``model.up``.
          paths: the paths of its arrays, such as ``model.up.kernel``.
        """
        facts = []
        for path in paths[:_MAX_LISTED]:
            reason = self._why_argument(path)
            rule = " ".join(reason.facts[:1])  # empty if there is no reason
            facts.append(f"{reason.subject}. {rule}")
        num_unlisted = len(paths) - len(facts)
        if num_unlisted:  # a module in it has fewer arrays, so that more of them are listed
            facts.append(f"And {num_unlisted} more: ask for one of its modules.")
        rows = [self._rows_by_path[path] for path in paths]
        local = bytes_text(sum(row.bytes_per_device for row in rows))
        total = bytes_text(sum(row.bytes_total for row in rows))
        subject = f"{module_path}: {len(paths)} arrays, {local} of {total} on each device"
        return Reason(subject, tuple(facts))

    @cached_property
    def _argument_reasons(self) -> ArgumentReasons:
        """Answers `why` for arguments: knows the plan, and the objects and arrays of the call."""
        recorder = self._compiled._recorder
        return ArgumentReasons(self._plan, recorder.objects, recorder.leaves)

    @cached_property
    def _collective_reasons(self) -> CollectiveReasons:
        """Answers `why` for collectives: knows the program, and the values of the user's lines.

        A collective moves shards of a value. The compiler writes down its line and operation, and
        the trace has the whole shapes of what the line and operation make. For example, a
        collective moves f32[8,4] on 2 devices, and its line makes a (16, 4): the collective moves
        that array, sharded in dimension 0.
        """
        # ("model.py:12", "dot_general") → the whole shapes of the values that it makes in the trace
        whole_shapes = defaultdict[tuple[str, str], set[Shape]](set)
        for value in self._made:
            if value.line is not None:
                file, line = value.line
                whole_shapes[f"{file_title(file)}:{line}", value.operation].add(value.shape)
        mesh = None if self._mesh is None else MeshDescription.of(self._mesh)
        axis_types = {} if mesh is None else mesh.axis_types
        return CollectiveReasons(
            self.module,
            self._module_paths,
            {} if mesh is None else mesh.axes,
            auto_axes={axis for axis, kind in axis_types.items() if kind == "Auto"},
            whole_shapes=whole_shapes,
            why_argument=self._why_argument,  # for collectives that gather a parameter
        )

    def _hardware(self, hardware: Hardware | str | None) -> Hardware | None:
        """Returns the figures of the named hardware; for None, of the program's devices.

        The result is None if the table of hardware does not have the devices.
        """
        if hardware is not None:
            return hardware_of(hardware)
        return HARDWARE.get(self._device.device_kind)

    @cached_property
    def dumped(self) -> DumpedProgram:
        """The program compiled once more, with the modules in the names of its operations."""
        return dump_program(self._compiled._recorder, self._compiled._compile_with)

    @cached_property
    def module(self) -> Module:
        """The parsed program."""
        return parse(self._stage.as_text() or "")

    @cached_property
    def collectives(self) -> Collectives | None:
        """The data that devices exchange; None if it is unknown."""
        return collectives_of(self.module, self._mesh, self._arguments, self._updated_paths())

    def _updated_paths(self) -> list[str | None]:
        """Returns, for each output of the program, the path of the Variable that it updates.

        The path is None for an output that is returned to the user. An array has a *slot* (a
        position) among the arrays of the arguments, and another one among the arrays after the
        call. ``structure_before`` and ``structure_after`` list the slots of each object, by the
        object's index, which is the same in both.
        """
        outcome: Outcome = self._compiled._outcome  # says where each array is after the call
        structure_before, structure_after = self._plan.structure, outcome.structure
        out_tree: Any = self._stage.out_tree
        # `Outcome.arrays` picks the array of each slot after the call from the inputs and the
        # groups of outputs. Here it gets the number of each output, and None in place of each
        # input, so it picks the number of the output in each slot.
        numbers = jax.tree_util.tree_unflatten(out_tree, range(out_tree.num_leaves))
        *groups, _outcome = numbers
        no_inputs = [None] * structure_before.num_leaves
        output_numbers = outcome.arrays(no_inputs, groups)  # by slot afterwards
        paths: list[str | None] = [None] * out_tree.num_leaves
        # `values` and `metadata` have the indices of the Variables that the call changes.
        for index in (*outcome.values, *outcome.metadata):
            # `zip` is not strict, because a Variable may hold another number of arrays afterwards.
            for old_slot, new_slot in zip(
                structure_before.slots[index], structure_after.slots[index], strict=False
            ):
                output_number = output_numbers[new_slot]
                if output_number is not None:
                    paths[output_number] = self._plan.names[old_slot]
        return paths

    def roofline(self, hardware: Hardware | str) -> Roofline:
        """Computes the time of a call at the peak rates of hardware, given as figures or a name."""
        mesh = None if self._mesh is None else MeshDescription.of(self._mesh)
        return roofline_of(self.cost, self.collectives, hardware, mesh, self._device.platform)

    @cached_property
    def report(self) -> ProgramReport:
        """All figures in one object, except figures by module."""
        activations = self.activations(compile_again=False)
        return describe(self._compiled, self._plan.fun_name, self._stage.as_text(), activations)

    def parameters(self) -> ParameterTable:
        """Lists how each argument array is sharded, including unused arrays."""
        return ParameterTable(self._arguments)  # a copy, because the caller may change the list

    @cached_property
    def _arguments(self) -> ParameterTable:
        """A row for each argument array, in the order of slots."""
        # The sharding is None for an array that the program does not use.
        actual = self._stage.input_shardings[0]
        return argument_rows(self._plan, self._stage.args_info[0], actual, self._plan.shardings)


def _types_of(module: Module) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Lists the dtypes and shapes of the arrays that a program takes, and last of its results."""
    instructions = [module.parameters[number] for number in sorted(module.parameters)]
    if module.entry is not None and module.entry.name in module.roots:
        instructions.append(module.roots[module.entry.name])
    return [[(x.dtype, x.dims) for x in instruction.results] for instruction in instructions]
