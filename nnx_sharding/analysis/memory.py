"""The memory that a compiled program takes on one device, by the sums that JAX reports.

What of it is needed when, `buffers.py` reads; which modules hold it, `by_module.py` shows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .by_module import ModuleTable
from .json_codec import UNWRITTEN
from .tables import Pictured, Table, text
from .units import bytes_text


@dataclasses.dataclass(frozen=True, slots=True)
class Memory(Pictured):
    """The memory of a compiled program on one device, in bytes.

    A figure that the backend does not report is None. Figures that begin with ``host`` are for
    memory kinds of the host, such as ``pinned_host``; the others do not include them.

    Attributes:
      arguments: the arrays that the program is given, including aliased ones.
      outputs: the arrays that it returns, including aliased ones.
      temporaries: what it needs in between, with the gaps that XLA leaves, which the size that JAX
        reports for TPUs counts twice.
      aliased: the outputs that reuse donated arguments; both of the above include them.
      generated_code: the program itself; 0 on the CPU.
      peak: what has to be free for a call: arguments + outputs - aliased + temporaries + generated
        code, as XLA allocates the temporaries of a call as one block. The peak that JAX reports is
        another figure: without temporaries on CPUs, with the vector memory and the host on TPUs.
      host_arguments, host_outputs, host_temporaries, host_aliased, host_generated_code: the same
        in host memory.
      by_path: the bytes of each argument array by its path, such as ``model.up.kernel``, without
        those that the program does not use; on TPUs, with the padding of tiles.
      by_module: makes the table of modules that hold the peak, for printing; None if unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding import jit
      >>> memory = jit(lambda x: x + 1).lower(jnp.ones(256)).compile().memory()
      >>> memory.arguments, memory.outputs, memory.by_path
      (1024, 1024, {'x': 1024})
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
    by_path: Mapping[str, int] = dataclasses.field(default_factory=dict)
    by_module: Callable[[], ModuleTable] | None = dataclasses.field(
        default=None, compare=False, repr=False, metadata=UNWRITTEN
    )

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: a bar for each figure, and what holds the peak."""
        known: dict[str, int] = {}  # by the name of the field
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            is_size = field.name not in ("by_path", "by_module") and size is not None
            # Most programs have nothing on the host, so zeros there are left out.
            if is_size and (size or not field.name.startswith("host_")):
                known[field.name] = size
        most = max(known.values(), default=0) or 1  # the length of a full bar
        rows = [
            (name.replace("_", " "), text("█" * round(24 * size / most), "blue"), bytes_text(size))
            for name, size in known.items()
        ]
        yield Table(("memory of each device", "", ""), rows or [("unknown", "", "")], numbers=1)
        if self.by_module is not None:
            yield text(self.by_module().summary())


def memory_of(analysis: Any, by_path: Mapping[str, int] | None = None) -> Memory | None:
    """Reads the memory that JAX's ``memory_analysis`` reports; None if it reports nothing.

    Args:
      analysis: the result of ``memory_analysis`` of a ``jax.stages.Compiled``.
      by_path: the bytes of each argument.
    """
    if analysis is None:
        return None
    sizes: dict[str, Any] = {
        f"{host}{ours}": _size(getattr(analysis, f"{host}{theirs}_size_in_bytes", None))
        for host in ("", "host_")
        for ours, theirs in _NAMES.items()
    }
    peak = None
    if None not in [sizes[name] for name in _NAMES]:  # All figures of device memory are known.
        # Outputs that reuse donated arguments count as arguments and as outputs, so they are
        # subtracted once.
        held = sizes["arguments"] + sizes["outputs"] - sizes["aliased"]
        # The TPU compiler also reports the size of all that it allocates, without code. Its size of
        # temporaries counts the gaps between them twice. If the sum is therefore larger than the
        # total, the temporaries are what the total has besides arguments and outputs.
        allocated = _size(getattr(analysis, "total_allocation_bytes", None)) or 0
        if held <= allocated < held + sizes["temporaries"]:
            sizes["temporaries"] = allocated - held
        peak = held + sizes["temporaries"] + sizes["generated_code"]
    return Memory(**sizes, peak=peak, by_path=dict(by_path or {}))


# Our names of figures → the words in JAX's, such as ``argument_size_in_bytes``.
_NAMES = {"arguments": "argument", "outputs": "output", "temporaries": "temp"}
_NAMES |= {"aliased": "alias", "generated_code": "generated_code"}


def _size(value: Any) -> int | None:
    """Returns a size; None for the -1 of backends that do not know it."""
    return int(value) if isinstance(value, int) and value >= 0 else None


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Counts the bytes of an array as XLA stores it: elements of less than 8 bits are packed."""
    return -(-math.prod(shape) * _bits(dtype) // 8)  # rounded up


@functools.cache  # the description of a dtype takes ten times as long as the product of a shape
def _bits(dtype: Any) -> int:
    """Returns the bits of an element: 4 for ``int4``, which takes a byte in NumPy."""
    for kind, info in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            return int(info(dtype).bits)
    return 8 * int(dtype.itemsize)
