"""How much memory a compiled program takes on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .units import bytes_text

_UNWRITTEN = {"written": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a compiled program on one device, in bytes.

    What a backend does not tell is None. Figures that begin with ``host`` are of memory kinds of
    the host, such as ``pinned_host``; the others do not contain them.

    Attributes:
      arguments: the arrays that the program is given, aliased ones included.
      outputs: the arrays that it returns, aliased ones included.
      temporaries: what it needs in between.
      aliased: the outputs that take the place of donated arguments; they are in both of the above.
      generated_code: the program itself; 0 on the CPU.
      peak: what has to be free for a call: arguments + outputs - aliased + temporaries + generated
        code, as XLA allocates the temporaries of a call as one block; more if JAX tells more.
      host_arguments: arguments in the memory of the host.
      host_outputs: outputs there.
      host_temporaries: temporaries there.
      host_aliased: aliased outputs there.
      host_generated_code: generated code there.
      by_path: the bytes of each argument array by its path, such as ``model.up.kernel``, without
        those that the program does not use.
    """

    arguments: int | None = None
    outputs: int | None = None
    temporaries: int | None = None
    aliased: int | None = None
    generated_code: int | None = None
    peak: int | None = None
    host_arguments: int | None = None
    host_outputs: int | None = None
    host_temporaries: int | None = None
    host_aliased: int | None = None
    host_generated_code: int | None = None
    # In JSON it is told by the rows of the arguments.
    by_path: Mapping[str, int] = dataclasses.field(default_factory=dict, metadata=_UNWRITTEN)

    def __str__(self) -> str:
        names = [field.name for field in dataclasses.fields(self) if field.name != "by_path"]
        told = [(name, getattr(self, name)) for name in names]
        lines = [
            f"{name.replace('_', ' '):<20}{bytes_text(value):>12}"
            for name, value in told
            if value is not None and (value or not name.startswith("host_"))
        ]
        return "\n".join(lines) or "the backend does not tell"


def memory_of(analysis: Any, by_path: Mapping[str, int] | None = None) -> Memory | None:
    """What JAX's ``memory_analysis`` tells; None if it tells nothing.

    Args:
      analysis: what the method of ``jax.stages.Compiled`` returned.
      by_path: the bytes of each argument.

    Example:
      >>> import jax
      >>> from nnx_sharding.analysis import memory_of
      >>> compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), "float32")).compile()
      >>> memory_of(compiled.memory_analysis()).arguments
      32
    """
    if analysis is None:
        return None
    told = {ours: _bytes(getattr(analysis, theirs, None)) for ours, theirs in _NAMES.items()}
    # The peak of XLA for CPUs leaves temporaries out (seen with JAX 0.10 and 0.12).
    peaks = (_bytes(getattr(analysis, "peak_memory_in_bytes", None)), _sum(told))
    peak = max((peak for peak in peaks if peak), default=None)
    return Memory(**told, peak=peak, by_path=dict(by_path or {}))


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """The bytes of an array as XLA lays it out: elements of less than 8 bits are packed.

    Args:
      shape: its shape.
      dtype: its dtype, which may be that of PRNG keys.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding.analysis.memory import array_bytes
      >>> array_bytes((3, 5), jnp.dtype("int4")), array_bytes((3, 5), jnp.dtype("int8"))
      (8, 15)
    """
    bits: int = 8 * dtype.itemsize
    for kind, info in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            bits = int(info(dtype).bits)
    return -(-math.prod(shape) * bits // 8)


_NAMES = {
    f"{host}{ours}": f"{host}{theirs}_size_in_bytes"
    for host in ("", "host_")
    for ours, theirs in (
        ("arguments", "argument"),
        ("outputs", "output"),
        ("temporaries", "temp"),
        ("aliased", "alias"),
        ("generated_code", "generated_code"),
    )
}


def _bytes(value: Any) -> int | None:
    """A size; None for what is no size, such as the -1 of backends that do not know."""
    return int(value) if isinstance(value, int) and value >= 0 else None


def _sum(told: Mapping[str, int | None]) -> int | None:
    parts = [told[name] for name in ("arguments", "outputs", "temporaries", "generated_code")]
    aliased = told["aliased"]
    if aliased is None or any(part is None for part in parts):
        return None
    return sum(part for part in parts if part is not None) - aliased
