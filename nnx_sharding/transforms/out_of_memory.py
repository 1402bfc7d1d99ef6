"""Explains errors of programs that do not fit into memory: what holds it, and what would help.

JAX says how many bytes are missing. `module_memory.py` compiles the program once more to find the
modules that hold them. It is imported only then, because it needs all of `analysis`. A `Recorder`
traces the function again, with the paths of modules. `dump_program` compiles that trace, and
returns what the compiler has written: the program, the types of its arguments (``infos``), the
modules that it calls (``paths``), and the ``shardings`` of its inputs, or None if the compiler has
failed again. `raise_instead` raises the error that a function returns instead of the given one, or
returns if that function fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax.sharding import SingleDeviceSharding

from .. import _compat
from ..activations.calls import Recorder
from ..core.failures import raise_instead
from ..core.plan import Plan

if TYPE_CHECKING:
    from ..analysis.by_module import ModuleTable
    from ..analysis.parameters import ParameterRow

# Compiles a lowered stage of JAX with more options for XLA.
CompileWith: TypeAlias = Callable[[jax.stages.Lowered, Mapping[str, Any]], jax.stages.Compiled]


def explain_memory(
    error: BaseException,
    plan: Plan,
    make_recorder: Callable[[], Recorder],
    compile_with: CompileWith,
) -> None:
    """Raises an error of too little memory again, with what holds it and what would help.

    Returns for any other error, and if the explanation fails. The caller then raises the error as
    it is.

    Args:
      error: the exception that JAX raised.
      plan: the plan of the call.
      make_recorder: makes the recorder, which traces the function again. It is called only for an
        error of memory.
      compile_with: compiles the trace with the options of the first compilation.
    """
    # Programs for several processes with GPUs are compiled by all processes together. The compiler
    # here would wait for processes that have not run out of memory, so nothing is explained.
    would_wait = jax.process_count() > 1 and jax.default_backend() == "gpu"
    if would_wait or not isinstance(error, Exception) or not _compat.is_out_of_memory(error):
        return
    raise_instead(error, lambda: _explanation(error, plan, make_recorder(), compile_with))


def _explanation(
    error: Exception, plan: Plan, recorder: Recorder, compile_with: CompileWith
) -> Exception:
    """Returns the error with what holds the memory, by module; compiles the program once more.

    Raises whatever the second compilation raises; then there is no explanation.
    """
    from ..analysis.attribution import module_table
    from ..analysis.parameters import mesh_of
    from .module_memory import argument_rows, dump_program

    program = dump_program(recorder, compile_with)
    # An argument is expected to have the declared sharding, or else its own. Without either, JAX
    # puts an array on the first device.
    default = SingleDeviceSharding(jax.devices()[0])
    expected = [
        sharding or getattr(leaf, "sharding", None) or default
        for sharding, leaf in zip(plan.shardings, recorder.leaves, strict=True)
    ]
    # The program's shardings are known if it compiles, as for a call that ran out of memory.
    actual = program.shardings or expected
    rows = argument_rows(plan, program.infos, actual, declared=expected)
    compiled = program.compiled_program(rows, mesh_of(expected))
    return _with_remedies(error, module_table(compiled, rows, program.paths), rows)


def _with_remedies(error: Exception, table: ModuleTable, rows: Sequence[ParameterRow]) -> Exception:
    """Returns the error with the modules that hold most, and what would help."""
    from ..analysis.units import bytes_text

    by_kind = table.by_kind()  # bytes on one device at the peak
    activations = by_kind.get("activations", 0)
    used = [row for row in rows if row.used]  # JAX drops arguments that the program does not use
    # Each device holds a replicated array as a whole. Sharded over all devices, one part is left.
    replicated = sum(
        row.bytes_per_device - row.bytes_per_device // row.num_devices
        for row in used
        if row.bytes_per_device == row.bytes_total
    )
    # Donated arguments become outputs, so donation saves the smaller one of the two at most.
    not_donated = sum(row.bytes_per_device for row in used if not row.donated)
    not_reused = min(by_kind.get("outputs", 0), not_donated)
    # The figures are upper bounds, because only another compilation would tell what is saved.
    most_saved = {
        "nnx_sharding.remat or Stack(remat=True), which computes activations again": activations,
        "accumulate_gradients(steps=8), with activations of an eighth of the batch": (
            activations * 7 // 8
        ),
        "sharding what is replicated, as nnx_sharding.partition.fsdp does": replicated,
        "donating what the function returns changed": not_reused,
    }
    remedies = [f"  {bytes_text(n)} at most: {what}" for what, n in most_saved.items() if n]
    if remedies:
        remedies.insert(0, "What would help, with what it saves on each device:")
    # The class is that of JAX's error, because users catch it. These classes take a text.
    return type(error)("\n".join([str(error), "", str(table.top()), *remedies]))
