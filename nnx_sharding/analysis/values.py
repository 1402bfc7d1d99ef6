"""Where values come from: through tuples, calls, fusions, branches and loops; and trip counts.

A `Value` is one array: an instruction, with an index where that makes a tuple. `Values.passed` goes
one step back through what passes arrays on unchanged:

    get-tuple-element(t), index=1    part (1,) of t
    parameter(0) of a computation    operand 0 of each instruction that calls it
    while                            the initial value, and what its body returns
    fusion, call, conditional        the root of what it calls

The length of a loop is known (`_Counter`), even if XLA has not noted it, if its condition compares
a counter with a constant, and if its body adds a constant to the counter. A counter is followed as
a `_Number`: a constant, or "what the loop carries there, plus a constant":

    while (i, x)   condition: i + 0 < 10   body returns: (i + 1, …)   → 10 runs from i = 0

*Carried* means a part of the tuple of a loop at the start of a run: ``Value(home, loop, (0,))`` for
``i``. In the first run, a carried value is the initial value; later it is what the body returned
at that index.

An index leads into nested tuples: in (a, (b, c)), the index (1, 0) means b, and () means the whole
tuple. The *root* of a computation is the instruction whose result it returns. The *home* of an
instruction is the computation that it is in. Damaged text may lack instructions, or have cycles:
functions then return less, but do not raise.
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

    ``following`` returns the nodes that lie one step behind a node.
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
    name: str  # the name of the instruction
    # The field hides the method `index` of tuples, so mypy has to be told to ignore it.
    index: tuple[int, ...] = ()  # type: ignore[assignment]


class Call(NamedTuple):
    """One computation that an instruction runs."""

    instruction: Instruction
    attribute: str  # the attribute that names the computation, such as ``body``
    callee: str  # the name of the computation


class Located(NamedTuple):
    """An instruction, and the computation that it is in."""

    computation: Computation
    instruction: Instruction


class User(NamedTuple):
    """An instruction that uses the result of another one."""

    instruction: Instruction
    number: int  # the position among the user's operands


class Values:
    """The computations of a program, which call each other, and the values in them.

    The properties are tables that are made on first use. `hlo.Module`, a program that was read from
    text, extends this class.

    Attributes:
      computations: the computations in the order of the text.
    """

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
        """Yields the instruction that calls a computation, the caller of its home, and so on.

        The last caller is in the entry computation. If several instructions call a computation,
        only the last one in the text counts.
        """
        seen = set[str]()  # ends the search in damaged text, which may have cycles
        while name in self.callers and name not in seen:
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
        """The name of the home of each instruction, by the instruction's name.

        Names of instructions are enough as keys because compilers make them unique.
        """
        return {op.name: name for name, ops in self.within.items() for op in ops.values()}

    @functools.cached_property
    def roots(self) -> Mapping[str, Instruction]:
        """The instruction whose result each computation returns."""
        return {c.name: op for c in self.computations for op in c.instructions if op.is_root}

    @functools.cached_property
    def users(self) -> Mapping[str, Mapping[str, list[User]]]:
        """The users of each instruction: name of its home → its own name → users.

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

    def sources(self, value: Value) -> list[Value]:
        """Lists the values that a value is a copy of, or else the operands of its instruction."""
        return self.passed(value) or self.operands(value)

    def passed(self, value: Value) -> list[Value]:
        """Returns the values that a value is an unchanged copy of.

        For an instruction that only passes arrays on, this is an operand, or what a called
        computation returns. For what a loop carries, the list has two values: the initial value,
        and what the body returns. For the parameter of a computation, it has what each caller
        gives. The list is empty for a value that an instruction computes.
        """
        maker = self.maker(value)
        home, index = value.computation, value.index
        if maker is None:
            return []
        match maker.opcode:
            case "parameter":
                number = maker.number or 0  # Only damaged text lacks the number.
                given = [
                    self._given(caller, home=outer.name, callee=home, number=number, index=index)
                    for outer, caller in self.callers.get(home, ())
                ]
                return [*itertools.chain(*given)]
            case "tuple" if not index:
                return self.operands(value)
            case "tuple":  # Part (2, 1) of a tuple is part (1,) of its operand 2.
                number, *inner_index = index  # The case above has taken the empty index.
                return self._operand(maker, home=home, number=number, index=tuple(inner_index))
            case "get-tuple-element" if maker.tuple_index is not None:
                # Part (1,) of the item 2 of a tuple is part (2, 1) of the tuple.
                outer_index = (maker.tuple_index, *index)
                return self._operand(maker, home=home, number=0, index=outer_index)
            case "get-tuple-element" | "opt-barrier" | "optimization-barrier":
                return self._operand(maker, home=home, number=0, index=index)
            case "while":
                return self._carried(maker, home=home, index=index)
            case "call" | "fusion" | "conditional":
                return self._returned(maker.callees, index)
            case "async-start":
                # An async-start makes a tuple of operands and results, ((x,), (a, b), …), so part
                # (1, 0) of this tuple is part (0,) of what the computation returns.
                return self._returned(maker.callees, index[-1:])
        return []

    def _operand(
        self, instruction: Instruction, *, home: str, number: int, index: tuple[int, ...]
    ) -> list[Value]:
        """Returns a part of an operand, in a list that is empty where damaged text lacks it.

        Args:
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

        A loop gives two values: the initial value, and what its body returns. An instruction that
        applies the computation to elements, such as a ``reduce``, gives none. Others give one.
        """
        if caller.opcode == "while":
            return self._carried(caller, home=home, index=index)
        if caller.opcode == "conditional":
            # The operands of a conditional are the predicate, then one operand for each branch. A
            # branch has one parameter. If two branches are the same computation, the operand of the
            # first branch is followed.
            number = 1 + caller.callees.index(callee)
        elif caller.opcode not in ("call", "fusion", "async-start"):
            return []
        return self._operand(caller, home=home, number=number, index=index)

    def _carried(self, loop: Instruction, *, home: str, index: tuple[int, ...]) -> list[Value]:
        """Lists two values at an index of a loop's tuple: the initial one, and the body's result.

        ``home`` is the computation that the loop is in.
        """
        initial = self._operand(loop, home=home, number=0, index=index)
        bodies = [callee for attribute, callee in loop.calls if attribute == "body"]
        return initial + self._returned(bodies, index)

    def _returned(self, names: Iterable[str], index: tuple[int, ...]) -> list[Value]:
        """Lists what computations return, without those that damaged text lacks."""
        return [Value(name, self.roots[name].name, index) for name in names if name in self.roots]


# The most steps from a value to a constant. Only damaged text has more.
_MAX_DEPTH = 200


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

    ``count`` counts the runs of a loop. ``_comparison`` finds what its condition compares,
    ``_number`` follows one value to a `_Number`, ``_fixed`` turns a `_Number` into an integer, and
    ``_carried`` follows the initial value and the body's result of what a loop carries. Each of
    them returns None for what is unknown; ``_carried`` returns a pair in which a number may be
    None.

    Attributes:
      _values: the computations of the program.
      _numbers: the results of ``_number`` by value; None for a value whose number is unknown, or is
        being computed.
    """

    def __init__(self, values: Values):
        self._values = values
        self._numbers: dict[Value, _Number | None] = {}

    def count(self, loop: Instruction, home: str) -> int | None:
        """Returns how often the body of a loop runs; None if it is unknown.

        The condition has to be ``counter < limit`` (or another comparison), where the limit is a
        constant, and the body has to add a constant to the counter. ``home`` is the name of the
        computation that the loop is in.
        """
        if loop.trip_count is not None:  # XLA has noted the trip count.
            return loop.trip_count
        comparison = self._comparison(dict(loop.calls).get("condition", ""))
        maker = None if comparison is None else self._values.maker(comparison)
        if comparison is None or maker is None:
            return None
        left, right = map(self._number, self._values.operands(comparison))
        # The counter changes, so the number that is fixed is the limit. `compared` is the other
        # number, which depends on the counter.
        compared, limit = left, self._fixed(right)
        direction = maker.attributes.get("direction", "")
        if limit is None:  # The limit is on the left: `limit > counter` is `counter < limit`.
            compared, limit = right, self._fixed(left)
            direction = _MIRRORED.get(direction, direction)
        if limit is None or compared is None or compared.carried is None:
            return None
        counter = compared.carried  # The condition compares `counter + compared.plus`.
        if (counter.computation, counter.name) != (home, loop.name):  # Another loop carries it.
            return None
        initial, after_run = self._carried(counter)
        first = self._fixed(initial)  # the counter in the first run
        if first is None or after_run is None or after_run.carried != counter:
            return None
        # The body returns `counter + after_run.plus`, so `after_run.plus` is the step.
        return _runs(limit - first - compared.plus, step=after_run.plus, direction=direction)

    def _comparison(self, condition: str) -> Value | None:
        """Finds the comparison of two values whose result the condition of a loop returns.

        The search goes back from the result, into fusions and past copies. Returns None if anything
        else makes the result. ``condition`` is the name of the computation.
        """
        root = self._values.roots.get(condition)
        if root is None:  # Damaged text lacks the condition.
            return None
        value = Value(condition, root.name)
        for _ in range(_MAX_DEPTH):
            maker = self._values.maker(value)
            if maker is None:
                return None
            if maker.opcode not in ("fusion", *_COPIES):
                is_comparison = maker.opcode == "compare" and len(maker.operand_names) == 2
                return value if is_comparison else None
            sources = self._values.sources(value)
            if not sources:  # Damaged text lacks the sources.
                return None
            value = sources[0]
        return None

    def _fixed(self, number: _Number | None) -> int | None:
        """Returns a number as an integer; None if it is unknown, or if a loop changes it.

        If the body of a loop returns a carried value unchanged, the value is the initial value. A
        loop around this one may carry that in turn. The recursion ends because each call follows a
        value of a loop further out.
        """
        if number is None:
            return None
        if number.carried is None:
            return number.plus
        initial, after_run = self._carried(number.carried)
        is_unchanged = after_run == _Number(number.carried, plus=0)
        first = self._fixed(initial) if is_unchanged else None
        return None if first is None else first + number.plus

    def _carried(self, value: Value) -> Sequence[_Number | None]:
        """Returns two numbers for what a loop carries: the initial one, and the one after a run.

        ``value`` is a part of the tuple of a loop. A number is None if it is unknown.
        """
        numbers = [*map(self._number, self._values.passed(value))]
        # Damaged text may lack one of the two values.
        return numbers if len(numbers) == 2 else (None, None)

    def _number(self, value: Value, depth: int = 0) -> _Number | None:
        """Returns a value as a number, and keeps the result; None if the number is unknown.

        ``depth`` counts the calls of this function within each other. At ``_MAX_DEPTH`` the search
        gives up, so that Python's stack does not overflow, and the value stays unknown.
        """
        if value not in self._numbers:
            # In damaged text, a value may be computed from itself: the recursion then finds None.
            self._numbers[value] = None
            self._numbers[value] = self._computed(value, depth) if depth < _MAX_DEPTH else None
        return self._numbers[value]

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
        if maker.opcode == "parameter" and loops:
            # A body or a condition belongs to one loop, so the first caller is the only one.
            home, loop = loops[0]
            return _Number(carried=Value(home.name, loop.name, value.index), plus=0)
        if maker.opcode == "while":
            # The value is the result of a loop: a number is known if the loop has not changed it.
            fixed = self._fixed(_Number(carried=value, plus=0))
            return None if fixed is None else _Number(carried=None, plus=fixed)
        if maker.opcode in _ARITHMETIC and len(maker.operand_names) == 2:
            first, second = (self._number(x, depth + 1) for x in values.operands(value))
            return _ARITHMETIC[maker.opcode](first, second) if first and second else None
        # This value may be a copy of any of these values. If there are several, because each caller
        # gives one, for example, the number is known if all of them are the same number.
        copied = values.operands(value)[:1] if maker.opcode in _COPIES else values.passed(value)
        numbers = {self._number(x, depth + 1) for x in copied}
        return numbers.pop() if len(numbers) == 1 else None


def _sum(a: _Number, b: _Number, sign: int = 1) -> _Number | None:
    """Returns ``a + sign·b``; None if that has more than one carried value, or ``-carried``."""
    # A sum is the same in either order, so the number with a carried value, if any, becomes ``a``.
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
      direction: how the counter compares with the limit while the loop goes on, such as ``LT``.

    Returns:
      The count; None if the loop does not end, or has another condition.
    """
    if not step:
        return None
    if step < 0:  # Counting down to a limit is counting up to its negative.
        step, distance = -step, -distance
        direction = _MIRRORED.get(direction, direction)
    if direction == "NE":
        return distance // step if distance >= 0 and not distance % step else None
    if direction == "LT":
        return max(0, -(-distance // step))  # rounded up
    if direction == "LE":
        return max(0, distance // step + 1)
    return None  # `counter > limit` stays true while the counter grows.
