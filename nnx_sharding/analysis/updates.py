"""Tells parameters from moments, and gradients of one shape from each other, by what is computed.

The arguments of a step may be trees, such as ``params`` and ``opt_state``. The moments of an
optimizer then have the types and shapes of parameters, and calls of modules have no names. What is
left is where values come from. For one step of Adam::

    gradient   computed from params, x
    mu' = b·mu + (1 - b)·gradient                              by element
    params' = params - mu' / …                                 by element

Two rules follow, which need no names. A *moment* is a Variable that the update of a parameter is
computed from, while no gradient is; a parameter is one that gradients are computed from. And a
gradient is that of the parameter with which the program combines it, by element, to its results.

A program that updates nothing, such as one that returns gradients, leaves open which of several
parameters of one shape a gradient is of.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .hlo import Module
from .instructions import Instruction, dims_at
from .opcodes import COLLECTIVES, ELEMENTWISE, REARRANGING, TRANSCENDENTAL, base
from .values import Value, reached

# An array of a collective: the name of the collective, and the number of the array.
ArrayOf: TypeAlias = tuple[str, int]

# Opcodes of operations that return elements of some of their operands → the numbers of these. A
# device takes its part of a sum by a slice. A loop over layers writes the gradient of each layer
# into an array, and the gradients of rows of an embedding are added to zeros by a scatter.
_FOLLOWED = {
    **dict.fromkeys(REARRANGING | {"dynamic-slice", "slice"}, (0,)),
    "dynamic-update-slice": (0, 1),
    "scatter": (0, 2),
}
# What computes each element from the elements of its operands at the same position.
_BY_ELEMENT = ELEMENTWISE | TRANSCENDENTAL
_CALLS = ("async", "call", "conditional", "fusion")
# The most steps back from one result. An update takes some dozens, also in nested loops; damaged
# text may have cycles.
_MAX_STEPS = 5000


class _Step(NamedTuple):
    """A value on the way back from a result."""

    value: Value
    # The instructions that call the computation of the value, outermost first. Several calls may
    # share a computation, and the way back leaves it by the call through which it came.
    callers: tuple[Value, ...]
    # Whether a collective sums the value on the way: a gradient is computed from other Variables
    # than its own, also by element, and these are not what it is combined with.
    summed: bool = False


class _Combined(NamedTuple):
    """What the program combines by element to one of its results."""

    result: Value
    variables: frozenset[str]  # the paths of Variables
    arrays: frozenset[ArrayOf]  # what collectives make


class Updates:
    """Tells which Variables the arrays of collectives can be gradients of.

    Args:
      module: the program.
      variables: the paths of the Variables that may have gradients, by the number of the argument.
      gradients: what collectives that are named after a derivative take.
      computed_from: returns the values that a value is computed from in one step.

    Attributes:
      _module: as given, like the other private attributes without a text here.
    """

    def __init__(
        self,
        module: Module,
        variables: Mapping[int, str],
        gradients: Sequence[Value],
        computed_from: Callable[[Value], Iterable[Value]],
    ):
        self._module, self._variables = module, variables
        self._gradients, self._computed_from = gradients, computed_from

    def parameters_of(self, array: ArrayOf, candidates: Collection[str]) -> set[str]:
        """Returns the Variables that an array can be the gradient of, one at least.

        Args:
          candidates: the paths of the Variables that it can be the gradient of by its shape.
        """
        with_array = [x.variables - self._moments for x in self._combined if array in x.arrays]
        updated = [*filter(None, with_array)]  # New moments are computed without parameters.
        if updated:
            # A copy of the parameters that follows them slowly is combined with the gradient, too,
            # but only the parameter is part of each of the results.
            return {*(frozenset.intersection(*updated) or frozenset.union(*updated))}
        # If nothing by element says which parameter it is, any of the candidates may be it.
        return {*candidates} - self._moments or {*candidates}

    @functools.cached_property
    def _moments(self) -> frozenset[str]:
        """The paths of the Variables that are moments, by the first rule at the top."""
        parameters = self._behind(self._gradients)
        updates = [x.result for x in self._combined if not x.variables.isdisjoint(parameters)]
        return self._behind(updates) - parameters

    def _behind(self, starts: Sequence[Value]) -> frozenset[str]:
        """Returns the paths of the Variables from which any of these values is computed."""

        def following(value: Value | None) -> Iterable[Value]:
            """Lists the values one step back; None is the step before ``starts``."""
            return starts if value is None else self._computed_from(value)

        values: Iterable[Value | None] = reached(None, following)
        paths = (self._variable(value) for value in values if value is not None)
        return frozenset(path for path in paths if path is not None)

    def _variable(self, value: Value) -> str | None:
        """Returns the path of the Variable that a value is; None for other values."""
        number = self._module.argument(value)
        return None if number is None else self._variables.get(number)

    @functools.cached_property
    def _combined(self) -> list[_Combined]:
        """What the program combines to each of its results, without numbers such as the loss."""
        entry = self._module.entry
        root = None if entry is None else self._module.roots.get(entry.name)
        if entry is None or root is None:  # Only damaged text lacks them.
            return []
        results = [Value(entry.name, root.name)]
        if root.opcode == "tuple":
            results = self._module.operands(results[0])
        return [self._combined_to(result) for result in results if self._dims(result)]

    def _combined_to(self, result: Value) -> _Combined:
        """Collects what one result is computed from by element."""
        variables, arrays = set[str](), set[ArrayOf]()
        steps = reached(_Step(result, ()), self._steps_back)
        for step in itertools.islice(steps, _MAX_STEPS):
            maker, path = self._module.maker(step.value), self._variable(step.value)
            if path is not None and not step.summed:
                variables.add(path)
            if maker is not None and maker.collective is not None:
                is_part = len(maker.operand_names) > 1 and step.value.index
                arrays.add((maker.name, step.value.index[0] if is_part else 0))
        return _Combined(result, frozenset(variables), frozenset(arrays))

    def _steps_back(self, step: _Step) -> list[_Step]:
        """Lists the steps from a value to what it is computed from by element; empty at the end."""
        value, callers, summed = step
        maker = self._module.maker(value)
        if maker is None:
            return []
        opcode = base(maker.opcode)
        if opcode == "parameter":
            return self._given(maker, step)
        inside = (*callers, value._replace(index=()))
        if opcode == "while":
            initial = [step._replace(value=x) for x in self._operand(value, 0)]
            return initial + self._returned(maker, step._replace(callers=inside), value.index)
        if opcode in _CALLS and maker.callees:
            # The start of an asynchronous call makes a tuple of operands and results.
            index = value.index[-1:] if opcode == "async" else value.index
            return self._returned(maker, step._replace(callers=inside), index)
        summed = summed or opcode in ("all-reduce", "reduce-scatter")
        return [_Step(x, callers, summed) for x in self._operands(maker, opcode, value)]

    def _given(self, parameter: Instruction, step: _Step) -> list[_Step]:
        """Lists what the call through which the way came gives to a parameter."""
        if not step.callers:  # It is an argument of the program.
            return []
        *outer, caller = step.callers
        instruction = self._module.maker(caller)
        assert instruction is not None  # The way came through it.
        number = parameter.number or 0  # Only damaged text lacks the number.
        if instruction.opcode == "conditional":  # It has a predicate, then one operand per branch.
            number = 1 + instruction.callees.index(step.value.computation)
        operands = self._operand(caller._replace(index=step.value.index), number)
        given = [_Step(operand, tuple(outer), step.summed) for operand in operands]
        if instruction.opcode == "while":  # In later runs, it is what the body has returned.
            given += self._returned(instruction, step, step.value.index)
        return given

    def _returned(self, caller: Instruction, step: _Step, index: tuple[int, ...]) -> list[_Step]:
        """Lists what the computations of a call return, of a loop what its body returns.

        Args:
          caller: the call, which is the last one of the callers of ``step``.
          index: which part of what they return.
        """
        is_loop = caller.opcode == "while"
        names = [name for key, name in caller.calls if key == "body" or not is_loop]
        roots = self._module.roots
        values = [Value(x, roots[x].name, index) for x in names if x in roots]
        return [step._replace(value=value) for value in values]

    def _operands(self, maker: Instruction, opcode: str, value: Value) -> list[Value]:
        """Lists the operands of which a value has the elements, or computes with them by element.

        Args:
          maker: the instruction of the value.
          opcode: its opcode, without ``-start`` and ``-done``.
        """
        operands = self._module.operands(value)
        if opcode in ("tuple", "get-tuple-element", "opt-barrier", "optimization-barrier"):
            return self._module.passed(value)
        if maker.opcode.endswith("-done"):  # It passes on what its start has made.
            return self._operand(value, 0)
        if opcode in COLLECTIVES:
            number = value.index[0] if value.index and len(operands) > 1 else 0
            return operands[number : number + 1]
        if opcode in _BY_ELEMENT:
            dims = self._dims(value)
            return [operand for operand in operands if self._dims(operand) == dims]
        followed = _FOLLOWED.get(opcode, ())
        return [operand for i, operand in enumerate(operands) if i in followed]

    def _operand(self, value: Value, number: int) -> list[Value]:
        """Returns a part of an operand of the maker of a value: the part at the value's index.

        The list is empty where damaged text lacks the operand.
        """
        operands = self._module.operands(value)[number : number + 1]
        return [operand._replace(index=value.index) for operand in operands]

    def _dims(self, value: Value) -> tuple[int, ...]:
        """Returns the dimensions of an array; empty for a number, and for a tuple."""
        maker = self._module.maker(value)
        return () if maker is None else dims_at(maker, value.index)
