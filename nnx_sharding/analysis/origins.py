"""Which arguments of a compiled program its values are computed from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from .hlo import Module
from .instructions import Instruction, Shape

# The names of the arguments from which an array is computed; for a tuple, one set for each array.
Origin: TypeAlias = "frozenset[str] | tuple[Origin, ...]"

_NOTHING: frozenset[str] = frozenset()
# Part of the origin of what is computed from a product with a parameter, up to the next product or
# sum: a partial result or its cotangent, and not the gradient of a parameter.
WEIGHTED = "with a parameter"
_MAX_DEPTH = 32  # of calls within calls; more are in damaged text only


def origins(
    module: Module,
    names: Iterable[str],
    arguments: Sequence[str] = (),
    parameters: Collection[str] = (),
) -> dict[str, tuple[frozenset[str], ...]]:
    """The names of the arguments from which each operand of some instructions is computed.

    A loop carry counts as its initial value, such as a parameter that each step changes; if that is
    a constant, as what the loop computes. If ``arguments``, the names in their order, are not
    known, those of their operations are used. Instructions that cannot run are left out. Products
    with something that is computed only from ``parameters`` are ``WEIGHTED``.
    """
    entry = module.entry
    tracer = _Tracer(module, frozenset(names), frozenset(parameters))
    if entry is not None:
        inputs = [x for x in entry.instructions if x.opcode == "parameter"]
        by_number = {x.number: frozenset([x.operation or x.name]) for x in inputs}
        by_number |= {i: frozenset([name]) for i, name in enumerate(arguments)}
        tracer.run(entry.name, [by_number.get(i, _NOTHING) for i in range(len(inputs))], 0)
    return tracer.found


class _Tracer:
    """Follows values from the arguments of a program onwards."""

    def __init__(self, module: Module, wanted: frozenset[str], parameters: frozenset[str]):
        self._module, self._wanted, self._parameters = module, wanted, parameters
        self._inside: set[str] = set()  # computations with what is looked for, and their callers
        for name in module.callees_first or ():
            computation = module.by_name.get(name)
            if computation and any(
                one.name in wanted
                or one.opcode in _PRODUCTS_AND_SUMS
                or not self._inside.isdisjoint(callee for _, callee in one.calls())
                for one in computation.instructions
            ):
                self._inside.add(name)
        self._known: dict[tuple[str, tuple[Origin, ...]], Origin] = {}
        self._running: set[str] = set()
        self.found: dict[str, tuple[frozenset[str], ...]] = {}

    def run(self, name: str, arguments: Sequence[Origin], depth: int) -> Origin:
        """The origin of what a computation returns."""
        key = name, tuple(arguments)
        computation = self._module.by_name.get(name)
        if key in self._known:
            return self._known[key]
        if computation is None or name in self._running or depth > _MAX_DEPTH:
            return _NOTHING
        self._running.add(name)
        values: dict[str, Origin] = {}
        value: Origin = _NOTHING
        for instruction in computation.instructions:
            operands = [values.get(operand, _NOTHING) for operand in instruction.operand_names]
            value = self._value(instruction, operands, arguments, depth)
            values[instruction.name] = value
            if instruction.name in self._wanted:
                parts = [frozenset(_all(operand)) for operand in operands]
                before = self.found.get(instruction.name, (_NOTHING,) * len(parts))
                both = zip(before, parts, strict=False)
                self.found[instruction.name] = tuple(old | new for old, new in both)
            if instruction.is_root:
                break
        self._running.remove(name)
        self._known[key] = value
        return value

    def _value(
        self,
        instruction: Instruction,
        operands: Sequence[Origin],
        arguments: Sequence[Origin],
        depth: int,
    ) -> Origin:
        opcode, first = instruction.opcode, operands[0] if operands else _NOTHING
        if opcode == "parameter":
            return _at(arguments, instruction.number)
        if opcode == "get-tuple-element":
            return first if isinstance(first, frozenset) else _at(first, instruction.tuple_index)
        if opcode in ("tuple", "opt-barrier", "optimization-barrier"):
            return tuple(operands) if opcode == "tuple" else first
        called = [callee for attribute, callee in instruction.calls() if attribute != "condition"]
        if opcode == "while" and called:
            once = _carried(first, self.run(called[0], [first], depth + 1))
            return _union(once, self.run(called[0], [once], depth + 1))
        has_wanted = opcode == "fusion" and not self._inside.isdisjoint(called)
        if called and (opcode in ("call", "async-start") or has_wanted):
            return self.run(called[0], operands, depth + 1)
        if opcode == "conditional" and called:
            value: Origin = _NOTHING
            for callee, operand in zip(called, operands[1:], strict=False):
                value = _union(value, self.run(callee, [operand], depth + 1))
            return value
        # A collective of several arrays returns one for each.
        shape = instruction.shape
        if not isinstance(shape, Shape) and 1 < len(shape) == len(operands):
            return tuple(operands)
        parts = [frozenset(_all(operand)) for operand in operands]
        origin = _NOTHING.union(*parts)
        if opcode not in _PRODUCTS_AND_SUMS:
            return origin
        is_weighted = opcode != "reduce" and any(x and x <= self._parameters for x in parts)
        return (origin - {WEIGHTED}) | ({WEIGHTED} if is_weighted else _NOTHING)


_PRODUCTS_AND_SUMS = {"dot", "convolution", "ragged-dot", "reduce"}


def _at(origins: Sequence[Origin], index: int | None) -> Origin:
    return origins[index] if index is not None and index < len(origins) else _NOTHING


def _all(origin: Origin) -> Iterator[str]:
    stack = [origin]
    while stack:
        top = stack.pop()
        if isinstance(top, frozenset):
            yield from top
        else:
            stack += top


def _carried(before: Origin, after: Origin) -> Origin:
    """The origin of a loop carry: the initial one, or after one run if that is a constant."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(map(_carried, before, after))
    return before or after


def _union(a: Origin, b: Origin) -> Origin:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(_union, a, b))
    return a if not b else b if not a else frozenset([*_all(a), *_all(b)])
