"""Where the values of a program come from: through tuples, calls, fusions, branches and loops."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from .instructions import Computation, Instruction

T = TypeVar("T")


def reached(start: T, following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Something and all that can be reached from it, each once."""
    pending, seen = [start], {start}
    while pending:
        one = pending.pop()
        yield one
        new = dict.fromkeys(other for other in following(one) if other not in seen)
        seen.update(new)
        pending += new


class Value(NamedTuple):
    """An array: what an instruction makes, or the part of a tuple at an index."""

    computation: str
    name: str
    index: tuple[int, ...] = ()  # type: ignore[assignment]  # it hides a method of tuples


class Values:
    """The computations of a program, which call each other, and the values in them."""

    computations: Sequence[Computation]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Computation]:
        """The computations by name."""
        return {computation.name: computation for computation in self.computations}

    def with_opcode(self, *names: str) -> list[tuple[Computation, Instruction]]:
        """The instructions with one of these opcodes, each after the computation that it is in."""
        opcodes = {*names}
        return [(c, x) for c in self.computations for x in c.instructions if x.opcode in opcodes]

    @functools.cached_property
    def calls(self) -> Mapping[str, list[tuple[Instruction, str, str]]]:
        """The calls of each computation, as instruction, attribute, and called computation."""
        return {
            one.name: [(i, *call) for i in one.instructions for call in i.calls]
            for one in self.computations
        }

    @functools.cached_property
    def callers(self) -> Mapping[str, list[tuple[Computation, Instruction]]]:
        """The instructions that call each computation, and where they are."""
        callers: defaultdict[str, list[tuple[Computation, Instruction]]] = defaultdict(list)
        for computation in self.computations:
            for one, _, callee in self.calls[computation.name]:
                callers[callee].append((computation, one))
        return dict(callers)

    def around(self, name: str) -> Iterator[tuple[Computation, Instruction]]:
        """The instruction that calls a computation, that which calls its computation, and so on."""
        seen = {""}
        while name in self.callers.keys() - seen:
            seen.add(name)
            computation, caller = self.callers[name][-1]
            yield computation, caller
            name = computation.name

    @functools.cached_property
    def within(self) -> Mapping[str, Mapping[str, Instruction]]:
        """The instructions of each computation by name."""
        return {c.name: {one.name: one for one in c.instructions} for c in self.computations}

    @functools.cached_property
    def roots(self) -> Mapping[str, Instruction]:
        """The instruction whose result each computation returns."""
        return {c.name: one for c in self.computations for one in c.instructions if one.is_root}

    def maker(self, value: Value) -> Instruction | None:
        """The instruction of a value; None for one that damaged text lacks."""
        return self.within.get(value.computation, {}).get(value.name)

    def operands(self, value: Value) -> list[Value]:
        """The operands of the instruction of a value."""
        one = self.maker(value)
        return [Value(value.computation, name) for name in one.operand_names] if one else []

    def passed(self, value: Value) -> list[Value]:
        """The values that one is passed on from unchanged; of a loop, the initial and the last."""
        one, (home, _, index) = self.maker(value), value
        if one is None:
            return []
        if one.opcode == "parameter":
            pairs = self.callers.get(home, ())
            return [v for c, by in pairs for v in self._given(c.name, by, home, one, index)]
        operands, opcode = self.operands(value), one.opcode
        if opcode == "tuple" and index:
            return [x._replace(index=index[1:]) for x in operands[index[0] :][:1]]
        if opcode == "tuple":
            return operands
        if opcode in ("get-tuple-element", "opt-barrier", "optimization-barrier"):
            place = () if one.tuple_index is None else (one.tuple_index,)
            return [operand._replace(index=(*place, *index)) for operand in operands[:1]]
        if opcode == "while":
            return self._carried(value.computation, one, index)
        if opcode in ("call", "fusion", "conditional", "async-start"):
            part = index[-1:] if opcode == "async-start" else index
            return self._returned((callee for _, callee in one.calls), part)
        return []

    def _given(
        self, at: str, caller: Instruction, home: str, one: Instruction, index: tuple[int, ...]
    ) -> list[Value]:
        """What an instruction gives to a parameter of a computation that it calls."""
        if caller.opcode == "while":
            return self._carried(at, caller, index)
        number = one.number or 0
        if caller.opcode == "conditional":
            number = 1 + [callee for _, callee in caller.calls].index(home)
        elif caller.opcode not in ("call", "fusion", "async-start"):
            return []
        return [Value(at, name, index) for name in caller.operand_names[number:][:1]]

    def _carried(self, at: str, loop: Instruction, index: tuple[int, ...]) -> list[Value]:
        """The initial value of what a loop carries, and what its body returns."""
        initial = [Value(at, name, index) for name in loop.operand_names[:1]]
        bodies = [callee for attribute, callee in loop.calls if attribute == "body"]
        return initial + self._returned(bodies, index)

    def _returned(self, names: Iterable[str], index: tuple[int, ...]) -> list[Value]:
        return [Value(name, self.roots[name].name, index) for name in names if name in self.roots]
