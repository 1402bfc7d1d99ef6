"""Trip counts of loops for which XLA records none, as its TPU compiler does not.

The condition of such a loop compares a counter with a number, and its body adds a number to it.
Both are found by evaluating those integers of the program that do not depend on arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from .instructions import Computation, Instruction

_MAX_DEPTH = 16  # of calls within calls; each loop is evaluated twice


class _Carried(NamedTuple):
    """What a loop carries at a position, plus a number."""

    position: int
    plus: int = 0


class _Test(NamedTuple):
    """A comparison of two values, such as ``LT``."""

    left: _Value
    right: _Value
    direction: str


# An integer, or what takes the place of one; a tuple of values; None for what is not known.
_Value: TypeAlias = "int | _Carried | _Test | tuple[_Value, ...] | None"


def trip_counts(
    computations: Mapping[str, Computation], entry: Computation | None
) -> dict[str, int]:
    """How often the body of each ``while`` runs, by the name of the instruction, if known."""
    every = (one for computation in computations.values() for one in computation.instructions)
    known = {one.name: one.trip_count for one in every if one.opcode == "while"}
    if entry is not None and None in known.values():
        evaluator = _Evaluator(computations)
        evaluator.run(entry.name, [], True, 0)
        known = evaluator.counts | {n: count for n, count in known.items() if count is not None}
    return {name: count for name, count in known.items() if count is not None}


class _Evaluator:
    """Evaluates integers that do not depend on arguments."""

    def __init__(self, computations: Mapping[str, Computation]):
        self._computations = computations
        self._known: dict[tuple[str, tuple[_Value, ...], bool], _Value] = {}
        self.counts: dict[str, int | None] = {}

    def run(self, name: str, arguments: Sequence[_Value], final: bool, depth: int) -> _Value:
        """What a computation returns; the counts of its loops are kept if it is final."""
        key = name, tuple(arguments), final
        computation = self._computations.get(name)
        if computation is None or depth > _MAX_DEPTH or key in self._known:
            return self._known.get(key)
        values: dict[str, _Value] = {}
        value: _Value = None
        for one in computation.instructions:
            value = self._value(one, values, arguments, final, depth + 1)
            values[one.name] = value
            if one.is_root:
                break
        self._known[key] = value
        return value

    def _value(
        self,
        one: Instruction,
        values: Mapping[str, _Value],
        arguments: Sequence[_Value],
        final: bool,
        depth: int,
    ) -> _Value:
        opcode = one.opcode
        if opcode == "parameter":
            return _at(arguments, one.number)
        if opcode == "constant":
            text = "".join(one.operands)
            return int(text) if _INTEGER.fullmatch(text) else None
        if not (opcode in _CALLS or (opcode in _SCALAR and _IS_SCALAR.match(one.shape_text))):
            return None
        operands = [values.get(operand) for operand in one.operand_names]
        called = dict(one.calls())
        if opcode == "while":
            return self._loop(one, called, operands, final, depth)
        if opcode in ("call", "fusion", "async-start"):
            return self.run("".join(called.values()), operands, final, depth)
        if opcode == "conditional":
            for (_, branch), operand in zip(one.calls(), operands[1:], strict=False):
                self.run(branch, [operand], final, depth)
            return None
        if opcode == "tuple":
            return tuple(operands)
        return _computed(one, operands)

    def _loop(
        self,
        one: Instruction,
        called: Mapping[str, str],
        operands: Sequence[_Value],
        final: bool,
        depth: int,
    ) -> _Value:
        body, condition = called.get("body", ""), called.get("condition", "")
        initial = operands[0] if operands else None
        if not _is_tuple(initial):
            self.run(body, [None], final, depth)
            return None
        carried = tuple(map(_Carried, range(len(initial))))
        after = self.run(body, [carried], False, depth)
        if not _is_tuple(after) or len(after) != len(initial):
            after = (None,) * len(initial)
        # What the body returns unchanged keeps its initial value.
        kept = [new == was for new, was in zip(after, carried, strict=True)]
        either = zip(initial, carried, kept, strict=True)
        state = tuple(value if same else was for value, was, same in either)
        after = self.run(body, [state], final, depth)
        test = self.run(condition, [state], final, depth)
        if final and _is_tuple(after):
            count = _count(initial, after, test)
            # It may be called from several places with different counts.
            is_same = self.counts.setdefault(one.name, count) == count
            self.counts[one.name] = count if is_same else None
        return tuple(value if same else None for value, same in zip(initial, kept, strict=True))


def _at(values: Sequence[_Value], index: int | None) -> _Value:
    return values[index] if index is not None and index < len(values) else None


def _is_tuple(value: Any) -> TypeGuard[tuple[_Value, ...]]:
    return type(value) is tuple


# Those that may run a loop, or return the tuples that loops carry.
_CALLS = {"while", "call", "async-start", "conditional", "tuple", "get-tuple-element"}
_SCALAR = {"add", "subtract", "multiply", "compare", "copy", "bitcast", "convert", "reshape"}
_SCALAR |= {"fusion", "copy-start", "copy-done"}
_IS_SCALAR = re.compile(r"\(?(?:pred|[su]\d+)\[\]")
_INTEGER = re.compile(r"-?\d{1,18}")


def _computed(one: Instruction, operands: Sequence[_Value]) -> _Value:
    """The value of an operation on integers."""
    first, second, *_ = [*operands, None, None]
    if one.opcode == "get-tuple-element":
        return _at(first, one.tuple_index) if _is_tuple(first) else None
    if one.opcode == "compare":
        return _Test(first, second, one.attributes.get("direction", ""))
    if len(operands) == 1:
        return first
    if one.opcode == "add" and isinstance(first, int) and isinstance(second, _Carried):
        first, second = second, first
    if not isinstance(second, int):
        return None
    if one.opcode == "multiply":
        return first * second if isinstance(first, int) else None
    second = -second if one.opcode == "subtract" else second
    if isinstance(first, _Carried):
        return first._replace(plus=first.plus + second)
    return first + second if isinstance(first, int) else None


def _count(initial: Sequence[_Value], after: Sequence[_Value], test: _Value) -> int | None:
    """How often a loop runs, given its initial carry, the carry after a step, and its condition."""
    if not isinstance(test, _Test):
        return None
    counter, limit, direction = test
    if isinstance(limit, _Carried):
        counter, limit, direction = limit, counter, _MIRRORED.get(direction, direction)
    if not isinstance(counter, _Carried) or not isinstance(limit, int):
        return None
    first, next_ = initial[counter.position], after[counter.position]
    if not isinstance(first, int) or not isinstance(next_, _Carried):
        return None
    step, left = next_.plus, limit - first - counter.plus
    if next_.position != counter.position or not step:
        return None
    if step < 0:
        step, left, direction = -step, -left, _MIRRORED.get(direction, direction)
    if direction == "NE":
        return left // step if left >= 0 and not left % step else None
    return {"LT": max(0, -(-left // step)), "LE": max(0, left // step + 1)}.get(direction)


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
