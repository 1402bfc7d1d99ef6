"""Compiles a function once more, to see which modules its memory and cost belong to.

A program that was compiled for calls does not say this: its operations have no names of modules,
and JAX reports only sums of its memory. So the function is traced again, with the path of each
module in the names of its operations, and compiled again with XLA's option `xla_dump_to`. With that
option the compiler writes files that list where it puts each array. XLA writes them before it
checks whether the program fits into memory, so they also explain an error that it does not fit.

This file imports all of `analysis`. Calls never need it: `out_of_memory.py` and `figures.py` import
it on demand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh, Sharding

from .. import _compat
from ..activations.calls import Recorder
from ..analysis.attribution import CompiledProgram, Measured
from ..analysis.buffers import Buffers, read_buffers
from ..analysis.compiled_collectives import collectives_of
from ..analysis.hlo import Module, parse
from ..analysis.memory import memory_of
from ..analysis.meshes import MeshDescription
from ..analysis.parameters import ParameterRow, ParameterTable, argument_row, variable_fields
from ..analysis.work import executed_work
from ..core.plan import Plan

if TYPE_CHECKING:
    from .out_of_memory import CompileWith


class DumpedProgram(NamedTuple):
    """A program with the modules in the names of its operations, and its memory if known."""

    module: Module  # the program for one device
    buffers: Buffers | None  # the place of each array; None if the compiler does not write it
    required: int | None  # bytes that have to be free for a call; None if the compiler failed
    paths: frozenset[str]  # the paths of the modules that were called
    # The program before it is partitioned, with the sharding of each value; None if the compiler
    # does not write it.
    whole: Module | None
    infos: Sequence[jax.stages.ArgInfo]  # type and donation of each argument array, by slot
    # The sharding of each argument array; None for an array that is not used. The field is None if
    # the compiler failed.
    shardings: Sequence[Sharding | None] | None

    def compiled_program(self, rows: Sequence[ParameterRow], mesh: Mesh | None) -> CompiledProgram:
        """Returns the facts from which tables of memory and cost are made, without the hardware.

        Args:
          rows: a row for each argument array.
          mesh: the mesh for which it was compiled; None for one device.
        """
        return CompiledProgram(
            module=self.module,
            buffers=self.buffers,
            required=self.required,
            executed=None if self.module.unread else executed_work(self.module),
            # The collectives are read from this program, because its operations have other names
            # than those of the program for calls.
            collectives=collectives_of(self.module, mesh, rows),
            mesh=None if mesh is None else MeshDescription.of(mesh),
        )

    def measured(self, seconds: Mapping[str, float]) -> Measured:
        """Joins times that were measured for calls with the modules of this program.

        Both programs were compiled from the same operations, so their instructions have the same
        names. Only the instructions of this program also name their modules.

        Args:
          seconds: the time of each instruction, by its name, such as ``fusion.3``.

        Raises:
          ValueError: the compiler made other instructions this time.
        """
        missing = [name for name in seconds if name not in self.module.homes]
        if missing:
            raise ValueError(
                f"by_module: compiled once more, the program has no instruction {missing[0]} (and "
                f"{len(missing) - 1} others), so that the profile cannot be joined to modules. "
                "by_line(profile=...) can join it to lines."
            )
        return Measured(self.module, seconds)


def dump_program(recorder: Recorder, compile_with: CompileWith) -> DumpedProgram:
    """Traces and compiles a function, and reads the compiler's files about its memory.

    If the program does not fit into memory, the result is what the compiler wrote before it failed:
    the program and where it would put each array, but neither the bytes that JAX would count
    (``required``) nor the shardings of the inputs.

    Args:
      recorder: traces the function of a call, with its types.
      compile_with: compiles a lowered function as for the call, with further options.

    Raises:
      JaxRuntimeError: the compiler fails for another reason, or before it writes the program.
    """
    lowered = recorder.traced.lower()
    with tempfile.TemporaryDirectory() as dump_to:
        folder = Path(dump_to)
        # Both stay None if the program does not fit into memory.
        required = None  # bytes
        shardings = None  # the shardings of its inputs
        try:
            # JAX's cache is off, because a program that is found there is not compiled, so nothing
            # is written. Warnings are off, because the compilation for calls has shown them.
            with _compat.without_cache(lowered), _compat.without_compiler_warnings():
                options = {"xla_dump_to": dump_to, "xla_dump_hlo_pass_re": _SHARDING_PASSES}
                program = compile_with(lowered, options)
            text = program.as_text() or ""
            memory = memory_of(program.memory_analysis())  # None if the backend does not say
            required = None if memory is None else memory.peak
            positional, _keywords = program.input_shardings  # all arrays are positional arguments
            shardings = positional
        except jax.errors.JaxRuntimeError as error:
            program_files = [*folder.glob("*after_optimizations.txt")]
            if not _compat.is_out_of_memory(error) or not program_files:
                raise
            text = program_files[0].read_text()
        infos, _keywords = lowered.args_info
        return DumpedProgram(
            module=parse(text),
            buffers=read_buffers(folder),
            required=required,
            paths=frozenset(call.path for call in recorder.calls),
            whole=_read_whole_program(folder),
            infos=infos,
            shardings=shardings,
        )


def _read_whole_program(folder: Path) -> Module | None:
    """Reads the program before it is partitioned, with the sharding of each value.

    It is in the file that the last pass wrote that chooses shardings. The result is None without
    such a file, because no such pass ran.
    """
    # A compiler has the passes of GSPMD, of Shardy, or of both. With both, the files of Shardy come
    # last.
    files = [path for glob in _AFTER_SHARDING for path in sorted(folder.glob(glob))]
    return parse(files[-1].read_text()) if files else None


# The passes of Shardy and of GSPMD that choose the sharding of each value: a regular expression for
# XLA, and the names of the files that XLA writes after them.
_SHARDING_PASSES = "shardy-xla|sharding-propagation"
_AFTER_SHARDING = "*.after_sharding-propagation*.txt", "*.after_shardy-xla*.txt"


def argument_rows(
    plan: Plan,
    infos: Sequence[jax.stages.ArgInfo],
    actual: Sequence[Sharding | None],
    declared: Sequence[Sharding | None],
) -> ParameterTable:
    """Lists how each argument array is sharded, in the order of slots.

    Args:
      plan: the plan of the call.
      infos: the type of each array, and whether it is donated.
      actual: the sharding of each array in the program; None for an array that it does not use.
      declared: the sharding that the user declared; shown for unused arrays.
    """
    # For each slot, these columns describe the Variable that holds the array, such as its class.
    # They are empty for an array that a module holds itself, or that is in no object.
    of_variables: list[dict[str, Any]] = [{}] * len(infos)
    for index, slots in enumerate(plan.structure.slots):
        for slot in slots:
            of_variables[slot] = variable_fields(plan.structure, index)
    rows = []
    columns = zip(plan.names, infos, of_variables, actual, declared, strict=True)
    for path, info, of_variable, actual_sharding, declared_sharding in columns:
        is_used = actual_sharding is not None
        sharding = actual_sharding if is_used else declared_sharding
        rows.append(argument_row(path, info, sharding, used=is_used, **of_variable))
    return ParameterTable(rows)
