"""Explains errors of programs that do not fit into memory: what holds it, and what would help.

JAX says how many bytes are missing. The program is compiled once more for the modules that hold
them (`module_memory.py`), which is imported only then: it needs all of `analysis`. A `Recorder`
traces the function again, with the paths of modules. `dump_program` compiles that, and returns what
the compiler has written: the program, the types of its arguments (``infos``), the modules that it
calls (``paths``), and the ``shardings`` of its inputs, or None if the compiler has failed again.
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

    Returns for any other error, and if the explanation fails: the caller then raises the error as
    it is.

    Args:
      error: what JAX raised.
      plan: the plan of the call.
      make_recorder: makes what traces the function again.
      compile_with: compiles it as it was compiled for the call.
    """
    # To compile for several processes with GPUs, the compilers of all have to take part. They would
    # wait for that of a process that has not run out of memory.
    would_wait = jax.process_count() > 1 and jax.default_backend() == "gpu"
    if would_wait or not isinstance(error, Exception) or not _compat.is_out_of_memory(error):
        return
    raise_instead(error, lambda: _explanation(error, plan, make_recorder(), compile_with))


def _explanation(
    error: Exception, plan: Plan, recorder: Recorder, compile_with: CompileWith
) -> Exception:
    """Returns the error with what holds the memory, by module; compiles the program once more."""
    from ..analysis.attribution import module_table
    from ..analysis.parameters import mesh_of
    from .module_memory import argument_rows, dump_program

    program = dump_program(recorder, compile_with)
    # As far as the arguments say: what is declared, else the array's own sharding. Without either,
    # JAX puts an array on the first device.
    default = SingleDeviceSharding(jax.devices()[0])
    expected = [
        sharding or getattr(leaf, "sharding", None) or default
        for sharding, leaf in zip(plan.shardings, recorder.leaves, strict=True)
    ]
    # Those of the program, if it was compiled. If it ran out of memory in a call, it could be.
    actual = program.shardings or expected
    rows = argument_rows(plan, program.infos, actual, declared=expected)
    compiled = program.compiled_program(rows, mesh_of(expected))
    return _with_remedies(error, module_table(compiled, rows, program.paths), rows)


def _with_remedies(error: Exception, table: ModuleTable, rows: Sequence[ParameterRow]) -> Exception:
    """Returns the error with the modules that hold most, and what would help.

    Args:
      error: the error of JAX.
      table: the memory of each module.
      rows: the argument arrays of the program.
    """
    from ..analysis.units import bytes_text

    by_kind = table.by_kind()  # bytes on one device at the peak
    activations = by_kind.get("activations", 0)
    used = [row for row in rows if row.used]  # JAX drops arguments that the program does not use
    # An array that each device has as a whole: sharded over all of them, one part would remain.
    replicated = sum(
        row.bytes_per_device - row.bytes_per_device // row.num_devices
        for row in used
        if row.bytes_per_device == row.bytes_total
    )
    # Donated arguments become outputs, so at most the smaller one of the two is saved.
    not_donated = sum(row.bytes_per_device for row in used if not row.donated)
    not_reused = min(by_kind.get("outputs", 0), not_donated)
    # Upper bounds: what really is saved only another compilation would tell.
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
    # Of the class of JAX's error, which users catch. These classes take a text.
    return type(error)("\n".join([str(error), "", str(table.top()), *remedies]))
