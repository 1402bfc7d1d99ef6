"""Compiles a function once more, to see which modules its memory and cost belong to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import SingleDeviceSharding

from .. import _compat
from ..activations.calls import Recorder
from ..analysis.attribution import module_table
from ..analysis.buffers import Buffers, read_buffers
from ..analysis.by_module import ModuleTable
from ..analysis.collectives import collectives_of
from ..analysis.hardware import Hardware
from ..analysis.hlo import Module, parse
from ..analysis.memory import memory_of
from ..analysis.meshes import MeshDescription
from ..analysis.parameters import (
    ParameterRow,
    ParameterTable,
    argument_row,
    mesh_of,
    variable_type,
)
from ..analysis.units import bytes_text
from ..core.failures import raise_instead
from ..core.plan import Plan

# Compiles a stage of JAX with more options for XLA.
CompileWith: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]


class Dumped(NamedTuple):
    """A program with the modules in the names of its operations, and its memory if known."""

    module: Module
    buffers: Buffers | None
    required: int | None
    paths: frozenset[str]  # of the modules that were called
    infos: Sequence[Any]  # of the arguments
    shardings: Sequence[Any] | None  # of the arguments, None for an unused one; if it was compiled

    def table(
        self, rows: Sequence[ParameterRow], mesh: Any, hardware: Hardware | None
    ) -> ModuleTable:
        """Memory and cost by module."""
        return module_table(
            self.module,
            self.buffers,
            rows,
            self.paths,
            required=self.required,
            collectives=collectives_of(self.module, mesh, rows),
            hardware=hardware,
            mesh=None if mesh is None else MeshDescription.of(mesh),
        )


def dumped(recorder: Recorder, compile_with: CompileWith) -> Dumped:
    """Traces and compiles a function, with what the compiler writes about its memory.

    It writes that for a program that does not fit into memory, too.
    """
    lowered = recorder.traced.lower()
    with tempfile.TemporaryDirectory() as name:
        folder, memory, shardings = Path(name), None, None
        try:
            with _compat.without_cache(lowered):
                program = compile_with(lowered, {"xla_dump_to": name})
            text = program.as_text() or ""
            memory, shardings = memory_of(program.memory_analysis()), program.input_shardings[0]
        except jax.errors.JaxRuntimeError as error:
            written = [*folder.glob("*after_optimizations.txt")]
            if not _is_out_of_memory(error) or not written:
                raise
            text = written[0].read_text()
        module, buffers = parse(text), read_buffers(folder)
    required = None if memory is None else memory.peak
    paths = frozenset(call.path for call in recorder.calls)
    return Dumped(module, buffers, required, paths, lowered.args_info[0], shardings)


def argument_rows(
    plan: Plan, infos: Sequence[Any], actual: Sequence[Any], declared: Sequence[Any]
) -> ParameterTable:
    """How each argument array is sharded; None among the actual shardings for an unused one."""
    kinds: list[str | None] = [None] * len(infos)
    for index, slots in enumerate(plan.structure.slots):
        for slot in slots:
            kinds[slot] = variable_type(plan.structure, index)
    columns = zip(plan.names, infos, kinds, actual, declared, strict=True)
    return ParameterTable(
        argument_row(path, info, used or fallback, used=used is not None, variable=kind)
        for path, info, kind, used, fallback in columns
    )


def explain_memory(
    error: BaseException,
    plan: Plan,
    recorder: Callable[[], Recorder],
    compile_with: CompileWith,
) -> None:
    """Raises an error again with what holds the memory and what would help, if that is too small.

    The program is compiled once more for this.
    """
    # Compilers for GPUs wait for those of other processes, which may not have failed.
    would_wait = jax.process_count() > 1 and jax.default_backend() == "gpu"
    if would_wait or not isinstance(error, Exception) or not _is_out_of_memory(error):
        return

    def explanation() -> Exception:
        made = recorder()
        found, default = dumped(made, compile_with), SingleDeviceSharding(jax.devices()[0])
        shardings = [
            s or getattr(leaf, "sharding", None) or default
            for s, leaf in zip(plan.shardings, made.leaves, strict=True)
        ]
        rows = argument_rows(plan, found.infos, found.shardings or shardings, shardings)
        return _out_of_memory(error, found.table(rows, mesh_of(shardings), None), rows)

    raise_instead(error, explanation)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a program does not fit into memory, by the compiler or at run time."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _out_of_memory(error: Exception, found: ModuleTable, rows: Sequence[ParameterRow]) -> Exception:
    """The error with what holds the memory, and what would help, with the bytes that this saves."""
    kinds = found.by_kind()
    kept = kinds.get("activations", 0)
    saved = {
        "nnx_sharding.remat or Stack(remat=True), which computes activations again": kept,
        "accumulate_gradients(steps=8), with activations of an eighth of the batch": kept * 7 // 8,
        "sharding what is replicated, as nnx_sharding.partition.fsdp does": sum(
            row.bytes_per_device - row.bytes_per_device // row.num_devices
            for row in rows
            if row.used and row.bytes_per_device == row.bytes_total
        ),
        "donating what the function returns changed": min(
            kinds.get("outputs", 0),
            sum(row.bytes_per_device for row in rows if row.used and not row.donated),
        ),
    }
    lines = [f"  {bytes_text(size)} at most: {what}" for what, size in saved.items() if size]
    help_ = ["What would help, with what it saves on each device:", *lines] if lines else []
    return type(error)("\n".join([str(error), "", str(found.top()), *help_]))
