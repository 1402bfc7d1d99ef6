"""Where values come from: through tuples, calls, fusions, branches and loops; and trip counts.

A `Value` is one array: an instruction, with an index where that makes a tuple. `Values.passed` goes
one step back through what passes arrays on unchanged:

    get-tuple-element(t), index=1    part (1,) of t
    parameter(0) of a computation    operand 0 of each instruction that calls it
    while                            the initial value, and what its body returns
    fusion, call, conditional        the root of what it calls

A loop whose condition compares a counter with a constant, and whose body adds one, has a known
length (`_Counter`), also where XLA has not noted it. A counter is followed as a `_Number`, a
constant or "what the loop carries there, plus a constant":

    while (i, x)   condition: i + 0 < 10   body returns: (i + 1, …)   → 10 runs from i = 0

*Carried* is a part of the tuple of a loop, ``Value(home, loop, (0,))`` for ``i``, at the start of
a run. It is the initial value, then what the body returns at that index.

An index leads into nested tuples: of (a, (b, c)), (1, 0) is b, and () is the whole tuple. The
*root* of a computation is the instruction whose result it returns. Text that is damaged may lack
instructions, or have cycles; then less is known.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from .instructions import Computation, Instruction

T = TypeVar("T")


def reached(start: T, following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields a node and all that can be reached from it, each once, depth-first.

    ``following`` returns the next nodes of one.
    """
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        yield node
        new = dict.fromkeys(successor for successor in following(node) if successor not in seen)
        seen.update(new)
        pending += new


class Value(NamedTuple):
    """An array: what an instruction makes, or the part of a tuple at an index."""

    computation: str  # the name of the computation that the instruction is in
    name: str  # of the instruction
    index: tuple[int, ...] = ()  # type: ignore[assignment]  # it hides a method of tuples


class Call(NamedTuple):
    """One computation that an instruction runs."""

    instruction: Instruction
    attribute: str  # that names the computation, such as ``body``
    callee: str  # the name of the computation


class Located(NamedTuple):
    """An instruction, and the computation that it is in."""

    computation: Computation
    instruction: Instruction


class User(NamedTuple):
    """An instruction that uses the result of another one."""

    instruction: Instruction
    number: int  # of the operand


class Values:
    """The computations of a program, which call each other, and the values in them."""

    computations: Sequence[Computation]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Computation]:
        """The computations by name."""
        return {computation.name: computation for computation in self.computations}

    def with_opcode(self, *names: str) -> list[Located]:
        """Lists the instructions with one of these opcodes."""
        opcodes = {*names}
        return [
            Located(computation, instruction)
            for computation in self.computations
            for instruction in computation.instructions
            if instruction.opcode in opcodes
        ]

    @functools.cached_property
    def calls(self) -> Mapping[str, list[Call]]:
        """The calls in each computation, by its name."""
        return {
            computation.name: [
                Call(op, attribute, callee)
                for op in computation.instructions
                for attribute, callee in op.calls
            ]
            for computation in self.computations
        }

    @functools.cached_property
    def callers(self) -> Mapping[str, list[Located]]:
        """The instructions that call each computation, by its name."""
        callers: defaultdict[str, list[Located]] = defaultdict(list)
        for computation in self.computations:
            for call in self.calls[computation.name]:
                callers[call.callee].append(Located(computation, call.instruction))
        return dict(callers)

    def around(self, name: str) -> Iterator[Located]:
        """Yields the instruction that calls a computation, the caller of that, and so on.

        The last one is in the entry computation.
        """
        seen = {""}  # damaged text may have cycles
        while name in self.callers.keys() - seen:
            seen.add(name)
            caller = self.callers[name][-1]
            yield caller
            name = caller.computation.name

    @functools.cached_property
    def within(self) -> Mapping[str, Mapping[str, Instruction]]:
        """The instructions of each computation by name."""
        return {
            computation.name: {op.name: op for op in computation.instructions}
            for computation in self.computations
        }

    @functools.cached_property
    def homes(self) -> Mapping[str, str]:
        """The computation of each instruction, by its name, which compilers make unique."""
        return {op.name: name for name, ops in self.within.items() for op in ops.values()}

    @functools.cached_property
    def roots(self) -> Mapping[str, Instruction]:
        """The instruction whose result each computation returns."""
        return {c.name: op for c in self.computations for op in c.instructions if op.is_root}

    @functools.cached_property
    def users(self) -> Mapping[str, Mapping[str, list[User]]]:
        """The users of each instruction, by the names of its computation and its own.

        ``users["main"]["x"]`` has ``User(add, 1)`` for ``%add = f32[8] add(%y, %x)`` in ``main``.
        """
        users: dict[str, defaultdict[str, list[User]]] = {}
        for computation in self.computations:
            by_name = users[computation.name] = defaultdict(list)
            for instruction in computation.instructions:
                for number, name in enumerate(instruction.operand_names):
                    by_name[name].append(User(instruction, number))
        return users

    def maker(self, value: Value) -> Instruction | None:
        """Returns the instruction of a value; None for one that damaged text lacks."""
        return self.within.get(value.computation, {}).get(value.name)

    def operands(self, value: Value) -> list[Value]:
        """Lists the operands of the instruction of a value."""
        maker = self.maker(value)
        return [Value(value.computation, name) for name in maker.operand_names] if maker else []

    def passed(self, value: Value) -> list[Value]:
        """Returns the values that a value is an unchanged copy of.

        It is the operand of what only passes arrays on, or what a called computation returns. There
        are several if the value may be a copy of either: of what a loop carries, the initial value
        and what its body returns; of a parameter, what each caller gives. Empty for a value that an
        instruction computes.
        """
        maker = self.maker(value)
        home, index = value.computation, value.index
        if maker is None:
            return []
        match maker.opcode:
            case "parameter":
                number = maker.number or 0  # always there, but in damaged text
                given = [
                    self._given(caller, home=outer.name, callee=home, number=number, index=index)
                    for outer, caller in self.callers.get(home, ())
                ]
                return [*itertools.chain(*given)]
            case "tuple" if not index:
                return self.operands(value)
            case "tuple":  # part (2, 1) of a tuple is part (1,) of its operand 2
                number, *inner_index = index
                return self._operand(maker, home=home, number=number, index=tuple(inner_index))
            case "get-tuple-element" if maker.tuple_index is not None:  # the other way round
                outer_index = (maker.tuple_index, *index)
                return self._operand(maker, home=home, number=0, index=outer_index)
            case "get-tuple-element" | "opt-barrier" | "optimization-barrier":
                return self._operand(maker, home=home, number=0, index=index)
            case "while":
                return self._carried(maker, home=home, index=index)
            case "call" | "fusion" | "conditional":
                return self._returned(maker.callees, index)
            case "async-start":
                # It makes a tuple of operands and results, ((x,), (a, b), …), so its part (1, 0) is
                # part (0,) of what the computation returns.
                return self._returned(maker.callees, index[-1:])
        return []

    def _operand(
        self, instruction: Instruction, *, home: str, number: int, index: tuple[int, ...]
    ) -> list[Value]:
        """Returns a part of an operand, in a list that is empty where damaged text lacks it.

        Args:
          instruction: the instruction.
          home: the computation that it is in.
          number: that of the operand.
          index: which part of the operand; () for all of it.
        """
        names = instruction.operand_names
        return [Value(home, names[number], index)] if number < len(names) else []

    def _given(
        self,
        caller: Instruction,
        *,
        home: str,
        callee: str,
        number: int,
        index: tuple[int, ...],
    ) -> list[Value]:
        """Lists what an instruction gives to a parameter of a computation that it calls.

        One value, but two for what a loop carries, and none if it applies the computation to
        elements, as a ``reduce`` does.

        Args:
          caller: the instruction.
          home: the computation that it is in.
          callee: the computation that it calls.
          number: which parameter of that.
          index: which part of the parameter.
        """
        if caller.opcode == "while":
            return self._carried(caller, home=home, index=index)
        if caller.opcode == "conditional":
            # Operands are the predicate, then one for each branch, which has one parameter. If two
            # branches are the same computation, the operand of the first one is followed.
            number = 1 + caller.callees.index(callee)
        elif caller.opcode not in ("call", "fusion", "async-start"):
            return []
        return self._operand(caller, home=home, number=number, index=index)

    def _carried(self, loop: Instruction, *, home: str, index: tuple[int, ...]) -> list[Value]:
        """Lists the initial value of what a loop carries at an index, and what its body returns.

        ``home`` is the computation that the loop is in.
        """
        initial = self._operand(loop, home=home, number=0, index=index)
        bodies = [callee for attribute, callee in loop.calls if attribute == "body"]
        return initial + self._returned(bodies, index)

    def _returned(self, names: Iterable[str], index: tuple[int, ...]) -> list[Value]:
        """Lists what computations return, without those that damaged text lacks."""
        return [Value(name, self.roots[name].name, index) for name in names if name in self.roots]


_MAX_DEPTH = 200  # of steps from a value to a constant; more are in damaged text


class _Number(NamedTuple):
    """An integer that is known, or known up to what a loop carries: ``carried + plus``."""

    carried: Value | None  # a part of the loop's tuple, at the start of a run; None counts as 0
    plus: int


def trip_counts(values: Values) -> dict[str, int]:
    """Counts how often the body of each ``while`` runs, by the name of the loop, if known."""
    counter = _Counter(values)
    loops = values.with_opcode("while")
    counts = {loop.name: counter.count(loop, home.name) for home, loop in loops}
    return {name: count for name, count in counts.items() if count is not None}


class _Counter:
    """Follows what the condition of a loop compares, and what its body adds, to constants.

    ``count`` is for a whole loop. ``_number`` follows one value, ``_fixed`` makes an integer of
    what that returns, and ``_carried`` follows the two values of what a loop carries.
    """

    def __init__(self, values: Values):
        self._values = values
        self._known: dict[Value, _Number | None] = {}  # what ``_number`` has returned

    def count(self, loop: Instruction, home: str) -> int | None:
        """Returns how often the body of a loop runs; None if it is unknown.

        The condition has to be ``counter < limit`` (or another comparison), where the limit is a
        constant, and the body has to add a constant to the counter. ``home`` is the name of the
        computation that the loop is in.
        """
        condition = self._values.roots.get(dict(loop.calls).get("condition", ""))
        if loop.trip_count is not None or condition is None:  # XLA has noted it
            return loop.trip_count
        # Back from what the condition returns to the comparison: into a fusion, and past copies.
        test = Value(dict(loop.calls)["condition"], condition.name)
        for _ in range(_MAX_DEPTH):
            maker = self._values.maker(test)
            if maker is None or maker.opcode not in ("fusion", *_COPIES):
                break
            sources = self._values.passed(test) or self._values.operands(test)
            if not sources:  # in damaged text
                return None
            test = sources[0]
        if maker is None or maker.opcode != "compare" or len(maker.operand_names) != 2:
            return None
        compared, other = map(self._number, self._values.operands(test))
        # The counter changes, so the other one of the two numbers is the limit.
        direction, limit = maker.attributes.get("direction", ""), self._fixed(other)
        if limit is None:  # the limit is on the left: `limit > counter` is `counter < limit`
            compared, limit = other, self._fixed(compared)
            direction = _MIRRORED.get(direction, direction)
        if limit is None or compared is None or compared.carried is None:
            return None
        counter = compared.carried  # what is compared is `counter + compared.plus`
        if (counter.computation, counter.name) != (home, loop.name):  # another loop carries it
            return None
        initial, after = self._carried(counter)
        first = self._fixed(initial)
        if first is None or after is None or after.carried != counter:
            return None
        # The body returns `counter + after.plus`, which is the step.
        return _runs(limit - first - compared.plus, step=after.plus, direction=direction)

    def _fixed(self, number: _Number | None) -> int | None:
        """Returns a number as an integer; None if it is unknown, or if a loop changes it.

        What the body of a loop hands on unchanged is its initial value, which may be carried by a
        loop around this one; each step leads further out.
        """
        if number is None:
            return None
        if number.carried is None:
            return number.plus
        initial, after = self._carried(number.carried)
        is_unchanged = after == _Number(
            number.carried, plus=0
        )  # the body returns what it was given
        first = self._fixed(initial) if is_unchanged else None
        return None if first is None else first + number.plus

    def _carried(self, value: Value) -> Sequence[_Number | None]:
        """Follows both values of what a loop carries: the initial one, and that after a run.

        ``value`` is a part of the tuple of a loop. A number is None if it is unknown.
        """
        numbers = [*map(self._number, self._values.passed(value))]
        return numbers if len(numbers) == 2 else (None, None)  # where text is damaged

    def _number(self, value: Value, depth: int = 0) -> _Number | None:
        """Returns a value as a number, and keeps it; None if it is unknown.

        ``depth`` counts the calls of this function within each other. A value at which the search
        is given up, so that Python's stack does not overflow, is unknown from then on.
        """
        if value not in self._known:
            self._known[value] = None  # where text is damaged, it may be computed from itself
            self._known[value] = self._computed(value, depth) if depth < _MAX_DEPTH else None
        return self._known[value]

    def _computed(self, value: Value, depth: int) -> _Number | None:
        """Follows a value to a number, by the instruction that makes it; None if it is unknown.

        ``depth`` is as in ``_number``.
        """
        maker, values = self._values.maker(value), self._values
        if maker is None:
            return None
        if maker.opcode == "constant":
            literal = "".join(maker.operands)
            is_integer = _INTEGER.fullmatch(literal)
            return _Number(carried=None, plus=int(literal)) if is_integer else None
        callers = values.callers.get(value.computation, ())
        loops = [(home, caller) for home, caller in callers if caller.opcode == "while"]
        if maker.opcode == "parameter" and loops:  # of a body or a condition, which one loop has
            home, loop = loops[0]
            return _Number(carried=Value(home.name, loop.name, value.index), plus=0)
        if maker.opcode == "while":  # after a loop, what that has not changed is known
            fixed = self._fixed(_Number(carried=value, plus=0))
            return None if fixed is None else _Number(carried=None, plus=fixed)
        if maker.opcode in _ARITHMETIC and len(maker.operand_names) == 2:
            first, second = (self._number(x, depth + 1) for x in values.operands(value))
            return _ARITHMETIC[maker.opcode](first, second) if first and second else None
        # What it is a copy of. If there are several, such as what each of the callers gives, it is
        # known if they are the same number.
        copied = values.operands(value)[:1] if maker.opcode in _COPIES else values.passed(value)
        numbers = {self._number(x, depth + 1) for x in copied}
        return numbers.pop() if len(numbers) == 1 else None


def _sum(a: _Number, b: _Number, sign: int = 1) -> _Number | None:
    """Returns ``a + sign·b``; None if that has more than one carried value, or ``-carried``."""
    if a.carried is None and sign > 0:
        a, b = b, a
    return None if b.carried else a._replace(plus=a.plus + sign * b.plus)


def _difference(a: _Number, b: _Number) -> _Number | None:
    return _sum(a, b, -1)


def _product(a: _Number, b: _Number) -> _Number | None:
    return None if a.carried or b.carried else _Number(None, a.plus * b.plus)


_ARITHMETIC = {"add": _sum, "subtract": _difference, "multiply": _product}
_COPIES = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"}
_INTEGER = re.compile(r"-?\d{1,18}")
# The direction if both sides are exchanged: `a < b` is `b > a`.
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


def _runs(distance: int, *, step: int, direction: str) -> int | None:
    """Counts the runs of a loop: the steps of its counter until the condition is false.

    Args:
      distance: from the first value of the counter to the limit.
      step: what each run adds to the counter.
      direction: how the counter compares with the limit while the loop goes on, such as ``LT``.

    Returns:
      The count; None if the loop does not end, or has another condition.
    """
    if not step:
        return None
    if step < 0:  # counting down to a limit is counting up to its negative
        step, distance = -step, -distance
        direction = _MIRRORED.get(direction, direction)
    if direction == "NE":
        return distance // step if distance >= 0 and not distance % step else None
    if direction == "LT":
        return max(0, -(-distance // step))  # rounded up
    if direction == "LE":
        return max(0, distance // step + 1)
    return None  # `counter > limit` stays true while the counter grows
