"""Explains errors of programs that do not fit into memory: what holds it, and what would help.

JAX says how many bytes are missing. The program is compiled once more for the modules that hold
them (`module_memory.py`), which is imported only then: it needs all of `analysis`.
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
    recorder: Callable[[], Recorder],
    compile_with: CompileWith,
) -> None:
    """Raises an error again with what holds the memory and what would help, if that is too small.

    Args:
      error: what JAX raised.
      plan: the plan of the call.
      recorder: makes what traces the function again.
      compile_with: compiles it as it was compiled for the call.
    """
    # Compilers for GPUs wait for the compilers of other processes, which may not have failed.
    would_wait = jax.process_count() > 1 and jax.default_backend() == "gpu"
    if would_wait or not isinstance(error, Exception) or not _compat.is_out_of_memory(error):
        return
    raise_instead(error, lambda: _explanation(error, plan, recorder(), compile_with))


def _explanation(
    error: Exception, plan: Plan, recorder: Recorder, compile_with: CompileWith
) -> Exception:
    """Returns the error with what holds the memory, by module; compiles the program once more."""
    from ..analysis.attribution import module_table
    from ..analysis.parameters import mesh_of
    from .module_memory import argument_rows, dump_program

    program = dump_program(recorder, compile_with)
    # Where nothing says more, JAX puts what a program is given on the first device.
    default = SingleDeviceSharding(jax.devices()[0])
    shardings = [
        sharding or getattr(leaf, "sharding", None) or default
        for sharding, leaf in zip(plan.shardings, recorder.leaves, strict=True)
    ]
    rows = argument_rows(plan, program.infos, program.shardings or shardings, shardings)
    compiled = program.compiled_program(rows, mesh_of(shardings), None)
    return _with_remedies(error, module_table(compiled, rows, program.paths), rows)


def _with_remedies(error: Exception, table: ModuleTable, rows: Sequence[ParameterRow]) -> Exception:
    """Returns the error with the modules that hold most, and what would help.

    ``table`` has the memory of each module, ``rows`` the arguments of the program.
    """
    from ..analysis.units import bytes_text

    by_kind = table.by_kind()
    # Upper bounds: what really is saved only another compilation would tell.
    kept = by_kind.get("activations", 0)
    saved = {
        "nnx_sharding.remat or Stack(remat=True), which computes activations again": kept,
        "accumulate_gradients(steps=8), with activations of an eighth of the batch": kept * 7 // 8,
        "sharding what is replicated, as nnx_sharding.partition.fsdp does": sum(
            row.bytes_per_device - row.bytes_per_device // row.num_devices
            for row in rows
            if row.used and row.bytes_per_device == row.bytes_total
        ),
        # Donated arguments become outputs, so at most the smaller one of the two is saved.
        "donating what the function returns changed": min(
            by_kind.get("outputs", 0),
            sum(row.bytes_per_device for row in rows if row.used and not row.donated),
        ),
    }
    lines = [f"  {bytes_text(size)} at most: {what}" for what, size in saved.items() if size]
    help_ = ["What would help, with what it saves on each device:", *lines] if lines else []
    return type(error)("\n".join([str(error), "", str(table.top()), *help_]))
