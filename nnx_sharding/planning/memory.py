"""What a program needs on each device: by its report, or by the compiler that refused it.

The compiler of CPUs compiles a program of any size, and its report has the peak. That of TPUs
refuses one that exceeds the memory of a chip, with an error and no report. Both are programs that
do not fit, and the search treats them alike: as far as the error says what is needed, by that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..analysis.program import ProgramReport
from ..analysis.units import read_bytes
from ..report.comparison import Failure


class Memory(NamedTuple):
    """The bytes that a program needs on each device."""

    arguments: int
    rest: int | None = None  # besides the arguments, mostly activations; None if unknown
    is_refused: bool = False  # whether it is from the error of the compiler that refused it

    @property
    def peak(self) -> int | None:
        """All bytes; None if the rest is unknown."""
        return None if self.rest is None else self.arguments + self.rest


def memory_of(report: ProgramReport | Failure, arguments: int) -> Memory | None:
    """Returns what a program needs; None if that is unknown, or it failed for another reason.

    Args:
      report: the report, or the error.
      arguments: the bytes of its arguments as they were predicted, for a program without a report.
    """
    if isinstance(report, Failure):
        return _memory_of_refused(report.error, arguments) if lacks_memory(report) else None
    memory = report.memory
    if memory is None or memory.peak is None or memory.arguments is None:
        return None
    return Memory(memory.arguments, memory.peak - memory.arguments)


def lacks_memory(failure: Failure) -> bool:
    """Whether a program failed as it does not fit the memory of a device, which all arrays share.

    A kernel that does not fit the scratch memory of a core (VMEM) is another matter: recomputed
    activations and smaller batches do not change what it needs.
    """
    return "RESOURCE_EXHAUSTED" in failure.error and not _OF_A_CORE.search(failure.error)


_OF_A_CORE = re.compile(r"CompileTimeScopedVmemOom|memory space [vs]mem\b")


def _memory_of_refused(error: str, arguments: int) -> Memory:
    """Reads what a program needs from the error of the TPU compiler, which has one of two forms.

    The arguments are not among the temporaries: a program of a quarter of the batch, which fits,
    has a peak of a quarter of these and of its arguments.
    """
    if temporaries := temporaries_needed(error):
        return Memory(arguments, temporaries, is_refused=True)
    if used := _USED.search(error):  # by all arrays
        return Memory(arguments, max(_bytes(used[1]) - arguments, 0), is_refused=True)
    return Memory(arguments, is_refused=True)


def temporaries_needed(error: str) -> int | None:
    """Reads the bytes of temporaries from the TPU compiler's error; None if it is another one."""
    found = _TEMPORARIES.search(error)
    return None if found is None else _bytes(found[1])


# "the total memory required for HLO temporaries (40.01G) exceeds available HBM (15.75G)"
_TEMPORARIES = re.compile(r"memory required[^(]*\(([\d.]+[KMGT]?)\) exceeds available HBM")
# "Ran out of memory in memory space hbm. Used 20.91G of 15.75G hbm."
_USED = re.compile(r"Used ([\d.]+[KMGT]?) of [\d.]+[KMGT]? hbm")


def _bytes(size: str) -> int:
    """Reads a size as XLA writes it, whose G is a GiB."""
    return read_bytes(f"{size}iB" if size[-1].isalpha() else size)
