"""Trip counts of loops for which XLA records none, as its TPU compiler does not.

Their conditions compare a counter with a number; values are followed to initial constants.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from .instructions import Instruction
from .values import Value, Values

_MAX_DEPTH = 200  # of steps from a value to a constant; more are in damaged text


class _Number(NamedTuple):
    """An integer; with ``carried``, the value that a loop carries there plus an integer."""

    carried: Value | None
    plus: int


def trip_counts(values: Values) -> dict[str, int]:
    """How often the body of each ``while`` runs, by the name of the instruction, if known."""
    counter = _Counter(values)
    loops = values.with_opcode("while")
    counts = {one.name: counter.count(home.name, one) for home, one in loops}
    return {name: count for name, count in counts.items() if count is not None}


class _Counter:
    def __init__(self, values: Values):
        self._values = values
        self._known: dict[Value, _Number | None] = {}

    def count(self, home: str, loop: Instruction) -> int | None:
        """How often the body of a loop runs."""
        condition = self._values.roots.get(dict(loop.calls).get("condition", ""))
        if loop.trip_count is not None or condition is None:
            return loop.trip_count
        test = Value(dict(loop.calls)["condition"], condition.name)
        while (one := self._values.maker(test)) and one.opcode in ("fusion", *_COPIES):
            test = [*self._values.passed(test), *self._values.operands(test), test][0]
        if one is None or one.opcode != "compare" or len(one.operand_names) != 2:
            return None
        left, right = map(self._number, self._values.operands(test))
        direction, limit = one.attributes.get("direction", ""), self._fixed(right)
        if limit is None:
            left, limit, direction = right, self._fixed(left), _MIRRORED.get(direction, direction)
        counter = None if left is None else left.carried
        if limit is None or left is None or counter is None or counter[:2] != (home, loop.name):
            return None
        initial, after = self._carried(counter)
        first = self._fixed(initial)
        if first is None or after is None or after.carried != counter:
            return None
        return _runs(limit - first - left.plus, after.plus, direction)

    def _fixed(self, number: _Number | None) -> int | None:
        """A number, if loops carry it unchanged."""
        if number is None or number.carried is None:
            return number and number.plus
        initial, after = self._carried(number.carried)
        first = self._fixed(initial) if after == (number.carried, 0) else None
        return None if first is None else first + number.plus

    def _carried(self, value: Value) -> Sequence[_Number | None]:
        """What a loop carries there at first, and after a run."""
        found = [*map(self._number, self._values.passed(value))]
        return found if len(found) == 2 else (None, None)  # where text is damaged

    def _number(self, value: Value, depth: int = 0) -> _Number | None:
        if value not in self._known:
            self._known[value] = None  # where text is damaged, it may be computed from itself
            self._known[value] = self._computed(value, depth) if depth < _MAX_DEPTH else None
        return self._known[value]

    def _computed(self, value: Value, depth: int) -> _Number | None:
        one, values = self._values.maker(value), self._values
        if one is None:
            return None
        if one.opcode == "constant":
            text = "".join(one.operands)
            return _Number(None, int(text)) if _INTEGER.fullmatch(text) else None
        loops = [c for c in values.callers.get(value.computation, ()) if c[1].opcode == "while"]
        if one.opcode == "parameter" and loops:
            return _Number(Value(loops[0][0].name, loops[0][1].name, value.index), 0)
        if one.opcode == "while":
            fixed = self._fixed(_Number(value, 0))
            return None if fixed is None else _Number(None, fixed)
        if one.opcode in _ARITHMETIC and len(one.operand_names) == 2:
            first, second = (self._number(x, depth + 1) for x in values.operands(value))
            return _ARITHMETIC[one.opcode](first, second) if first and second else None
        same = values.operands(value)[:1] if one.opcode in _COPIES else values.passed(value)
        found = {self._number(x, depth + 1) for x in same}
        return found.pop() if len(found) == 1 else None


def _sum(a: _Number, b: _Number, sign: int = 1) -> _Number | None:
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
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


def _runs(left: int, step: int, direction: str) -> int | None:
    """How often a counter that is ``left`` less than a limit takes a step before it passes it."""
    if not step:
        return None
    if step < 0:
        step, left, direction = -step, -left, _MIRRORED.get(direction, direction)
    if direction == "NE":
        return left // step if left >= 0 and not left % step else None
    return {"LT": max(0, -(-left // step)), "LE": max(0, left // step + 1)}.get(direction)
