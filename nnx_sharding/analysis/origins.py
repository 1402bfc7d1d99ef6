"""Which arguments of a compiled program its values are computed from."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from .hlo import Module
from .opcodes import PRODUCTS
from .values import Value, reached

_MAX_STEPS = 64  # from the initial value of a loop to constants


class Origins:
    """Finds the arguments from which values are computed.

    Args:
      module: the program.
      arguments: the names of its arguments, by their numbers.
      parameters: those of them that are Variables.
    """

    def __init__(self, module: Module, arguments: Mapping[int, str], parameters: Collection[str]):
        self._module = module
        self._arguments, self._parameters = arguments, parameters
        self._others: dict[Value, str] = {}  # known to be computed from this, which is no parameter

    def of(self, value: Value) -> frozenset[str]:
        """The names of the arguments from which a value is computed; of other than parameters, one.

        A loop carry counts as its initial value, such as a parameter that each step changes; if
        that is a constant, as what the loop computes.
        """
        found: set[str] = set()
        users: dict[Value, Value | None] = {value: None}  # by what they are computed from
        pending = [value]
        while pending:
            value = pending.pop()
            name = self._others.get(value) or self._argument(value)
            if name is not None and name not in self._parameters:
                user: Value | None = value
                while user is not None:
                    self._others[user], user = name, users[user]
                return frozenset([name])
            found.update([name] if name else ())
            for operand in self._before(value):
                if operand not in users:
                    users[operand] = value
                    pending.append(operand)
        return frozenset(found)

    def is_weighted(self, value: Value) -> bool:
        """Whether it is computed from a product with a parameter, with no product or sum after it.

        Then it is a partial result or its cotangent, and not the gradient of a parameter.
        """

        def is_one_of(x: Value, *opcodes: str) -> bool:
            one = self._module.maker(x)
            return one is not None and one.opcode in opcodes

        def before(x: Value) -> list[Value]:
            return [] if is_one_of(x, "reduce", *PRODUCTS) else self._before(x)

        return any(
            is_one_of(x, *PRODUCTS)
            and any(self.are_parameters(self.of(y)) for y in self._module.operands(x))
            for x in reached(value, before)
        )

    def are_parameters(self, names: frozenset[str]) -> bool:
        """Whether something is computed from parameters only, and from some."""
        return bool(names) and names <= {*self._parameters}

    def _argument(self, value: Value) -> str | None:
        """The name of the argument that a value is; None for others."""
        one, entry = self._module.maker(value), self._module.entry
        if one is None or entry is None or value.computation != entry.name:
            return None
        return None if one.number is None else self._arguments.get(one.number, one.name)

    def _before(self, value: Value) -> list[Value]:
        """What a value is computed from."""
        one, passed = self._module.maker(value), self._module.passed(value)
        if one is None:
            return []
        callers = self._module.callers.get(value.computation, [])
        if one.opcode == "parameter" and passed and callers[0][1].opcode == "while":
            initial, *after = passed
            return after if self._is_constant(initial) else [initial]
        if passed or not value.index:
            return passed or self._module.operands(value)
        # A collective of several arrays returns one for each.
        operands = self._module.operands(value)
        is_each = len(operands) > 1 and len(operands) == len(one.results)
        return operands[value.index[0] :][:1] if is_each else operands

    def _is_constant(self, value: Value) -> bool:
        """Whether it is computed from constants only, in few steps."""

        def before(x: Value) -> list[Value]:
            return self._module.passed(x) or self._module.operands(x)

        found = [*itertools.islice(reached(value, before), _MAX_STEPS)]
        makers = filter(None, map(self._module.maker, found))
        is_fixed = all(one.opcode not in ("parameter", "while") for one in makers)
        return is_fixed and len(found) < _MAX_STEPS
