"""Finds the line of the user's code that each instruction of a program is for.

XLA keeps the tracebacks of operations. Only lines that the trace has count, so that the line that
compiles the program does not. All else is as in `places.py`, where a *place* is a module: an
instruction that the compiler made has the line of the nearest ones that it serves. Here, the path
of a place is a line, ``model.py:12``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from .collectives import Collective
from .hlo import Module
from .instructions import Instruction
from .names import module_of, operations
from .opcodes import PRODUCTS
from .places import Place, PlaceFinder
from .traced_values import TRACED_PRODUCTS, Line, MadeValue


class OperationKey(NamedTuple):
    """What is the same of an operation in the trace and of the instructions made of it."""

    line: str  # the line of code, such as ``model.py:12``; empty if it is unknown
    operation: str  # the name of the operation, such as ``dot_general``
    backward: bool
    module: str | None


class LineFinder(PlaceFinder):
    """Finds the lines of instructions, among those in the trace.

    Three methods of the base class are overridden: how a place is read from an instruction, how it
    is read from the report of a collective, and how several places are joined.

    Attributes:
      lines: these lines by the path of their place, such as ``model.py:12``.
      _product_paths: the paths of those in which the trace has a product of matrices.
      _places_of_lines: the place of each line, by (file, line). The pass is forward for all.
    """

    def __init__(self, module: Module, made: Sequence[MadeValue]):
        super().__init__(module, module_paths=(), parameter_modules={})
        self.lines: dict[str, Line] = {line_path(x.line): x.line for x in made if x.line}
        self._product_paths = {line_path(x.line) for x in made if x.operation in TRACED_PRODUCTS}
        # A line has one place for both passes.
        self._places_of_lines = {line: Place(path, False) for path, line in self.lines.items()}

    def keys(self, modules: Collection[str]) -> Iterator[tuple[OperationKey, Instruction]]:
        """Yields the instructions that have a line, each after the key of its operation.

        One that XLA merged of several operations comes with the key of each. ``modules`` are the
        paths of the user's modules.
        """
        for computation in self._module.computations:
            for instruction in computation.instructions:
                # The place is a line of the user's code; None without one.
                place = self._written_place(instruction)
                if place is None:
                    continue
                # A name is ``jit(step)/transpose(jvp(model))/up/dot_general``, for example.
                for name in operations(instruction.operation or ""):
                    key = OperationKey(
                        line=place.path or "",
                        operation=name.rpartition("/")[2],
                        backward="transpose(" in name,
                        module=module_of(name, modules),
                    )
                    yield key, instruction

    def _written_place(self, instruction: Instruction) -> Place | None:
        """Reads the line from the traceback of the operation, which the compiler kept."""
        frames = self._module.source(instruction)  # (file, line), innermost first
        known = (self._places_of_lines[x] for x in frames if x in self._places_of_lines)
        return next(known, None)

    def _recorded_place(self, collective: Collective) -> Place | None:
        """Finds the line of a collective's ``source``, which may have a part of the file's path.

        Returns None if that is unknown, or not clear.
        """
        end = f"/{collective.source}"
        places = [
            place for place in self._places_of_lines.values() if f"/{place.path}".endswith(end)
        ]
        return places[0] if len(places) == 1 else None

    def _joined(self, paths: Sequence[str], instruction: Instruction) -> str:
        """Returns the line of what serves several: the first, which computes what is moved.

        XLA for CPUs drops the names of batched products if a device has one row. The line of such a
        product is the first that has one in the trace, and not that which made its operand.
        """
        if self._has_product(instruction):
            paths = [path for path in paths if path in self._product_paths] or paths
        return paths[0]

    def _has_product(self, instruction: Instruction) -> bool:
        """Tells whether an instruction is a product of matrices, or a fusion with one."""
        called = filter(None, map(self._module.by_name.get, instruction.callees))
        fused = [inner for computation in called for inner in computation.instructions]
        return any(each.opcode in PRODUCTS for each in (instruction, *fused))


def line_path(line: Line | None) -> str:
    """Writes a line as the path of a place, ``model.py:12``; empty for an unknown one."""
    return "" if line is None else f"{line[0]}:{line[1]}"
