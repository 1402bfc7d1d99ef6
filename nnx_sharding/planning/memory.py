"""Finds the memory that a program needs on each device, in its report or a compiler's error.

The compiler for CPUs compiles a program of any size, and its report has the peak. The compiler for
TPUs refuses a program that exceeds the memory of a chip: there is an error and no report. The
search treats both kinds of programs that do not fit alike, so this module reads the bytes from the
error, as far as the error says them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..analysis.program import ProgramReport
from ..analysis.units import read_bytes
from ..report.comparison import Failure


class MemoryNeed(NamedTuple):
    """The bytes that a program needs on each device."""

    arguments: int
    rest: int | None = None  # bytes besides the arguments, mostly activations; None if unknown
    is_refused: bool = False  # whether the compiler refused the program

    @property
    def peak(self) -> int | None:
        """All bytes; None if the rest is unknown."""
        return None if self.rest is None else self.arguments + self.rest


def memory_need(report: ProgramReport | Failure, arguments: int) -> MemoryNeed | None:
    """Returns the memory of a program; None if unknown, or if it failed for another reason.

    Args:
      report: the report of the program, or its failure.
      arguments: the predicted bytes of the arguments, which count if there is no report.
    """
    if isinstance(report, Failure):
        if not report.lacks_memory:
            return None
        return _memory_need_of_refused(report.error, arguments)
    memory = report.memory
    if memory is None or memory.peak is None or memory.arguments is None:
        return None
    return MemoryNeed(memory.arguments, memory.peak - memory.arguments)


def _memory_need_of_refused(error: str, arguments: int) -> MemoryNeed:
    """Reads the memory of a program from the TPU compiler's error, which has one of two forms.

    If the error has neither form, ``rest`` is None. The temporaries of the first form do not
    contain the arguments. This was seen with a quarter of the batch, which fits: its peak is a
    quarter of these temporaries, plus its arguments.
    """
    rest: int | None = temporaries_needed(error) or None
    if rest is None:
        used = _USED.search(error)  # the second form has the bytes of all arrays
        if used is not None:
            rest = max(_bytes(used[1]) - arguments, 0)
    return MemoryNeed(arguments, rest, is_refused=True)


def temporaries_needed(error: str) -> int | None:
    """Reads the bytes of temporaries from the TPU compiler's error; None for other errors."""
    match = _TEMPORARIES.search(error)
    return None if match is None else _bytes(match[1])


# "the total memory required for HLO temporaries (40.01G) exceeds available HBM (15.75G)"
_TEMPORARIES = re.compile(r"memory required[^(]*\(([\d.]+[KMGT]?)\) exceeds available HBM")
# "Ran out of memory in memory space hbm. Used 20.91G of 15.75G hbm."
_USED = re.compile(r"Used ([\d.]+[KMGT]?) of [\d.]+[KMGT]? hbm")


def _bytes(size: str) -> int:
    """Reads the bytes of a size in the notation of XLA, where G is a GiB."""
    return read_bytes(f"{size}iB" if size[-1].isalpha() else size)
