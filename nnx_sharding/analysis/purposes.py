"""What collectives are for: parameters, gradients, sums, results, or resharding of other values."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .hlo import Module
from .instructions import Computation, Instruction, arrays
from .names import around, common, module_of, operations
from .opcodes import ELEMENTWISE, PRODUCTS, TRANSCENDENTAL
from .parameters import ParameterRow
from .values import Value, reached

Purpose: TypeAlias = Literal["parameter", "state", "gradient", "sum", "result", "reshard"]


class Use(NamedTuple):
    """What a collective is for; the fields are those of ``Collective``."""

    purpose: Purpose | None = None
    parameters: tuple[str, ...] = ()
    module: str | None = None


def uses_of(
    module: Module,
    collectives: Sequence[tuple[Computation, Instruction]],
    rows: Iterable[ParameterRow],
    updated: Sequence[str | None] = (),
) -> dict[str, Use]:
    """What collectives are for, by name; ``updated`` are the Variables that results update."""
    used = [row for row in rows if row.used]
    variables = _Variables(row for row in used if row.variable is not None)
    arguments = {number: x.operation or x.name for number, x in module.parameters.items()}
    if inputs_of(module, used):
        arguments |= {number: row.path for number, row in enumerate(used)}
    origins, results = Origins(module, arguments, variables.paths), _results(module, updated)
    return {
        one.name: _use(one, module, computation, origins, variables, results.get(one.name))
        for computation, one in collectives
    }


def _operations_of_arrays(one: Instruction, computation: Computation) -> list[list[str]]:
    """The operations of each array that a collective makes."""
    every = operations(one.operation or "")
    if len(one.results) < 2 or len(one.results) != len(one.operand_names):
        return [every] * len(one.results)
    by_name = {other.name: other.operation for other in computation.instructions}
    parts = {
        other.tuple_index: other.operation
        for other in computation.instructions
        if other.opcode == "get-tuple-element" and other.operand_names == (one.name,)
    }
    names = [(by_name.get(name), parts.get(i)) for i, name in enumerate(one.operand_names)]
    return [_own_operations(pair, every) for pair in names]


def _own_operations(names: Sequence[str | None], every: list[str]) -> list[str]:
    """The operations in the first of these names that shares one with the collective.

    An operand may be named after something else, such as the loop that computes it.
    """
    known = [operations(name) for name in names if name]
    return next((x for x in known if not {*x}.isdisjoint(every)), known[0] if known else every)


def inputs_of(module: Module, rows: Sequence[ParameterRow]) -> list[Instruction]:
    """The parameters of a program, if they are in the order of rows; TPU's may be renamed."""
    paths = {row.path for row in rows}
    inputs = [module.parameters[i] for i in range(len(rows)) if i in module.parameters]
    in_order = len(inputs) == len(rows) == len(module.parameters) and all(
        [shape.dims for shape in arrays(x.shape)] == [row.shard_shape]
        and (x.operation == row.path or x.operation not in paths)
        for x, row in zip(inputs, rows, strict=True)
    )
    return inputs if in_order else []


class _Variables:
    """The Variables among the arguments of a program."""

    def __init__(self, rows: Iterable[ParameterRow]):
        self.paths: set[str] = set()
        self.states: set[str] = set()  # those that are not parameters
        self.modules: set[str] = set()  # the paths of all modules that contain them
        # Those that may have gradients: of the program (None), and of each module.
        self._rows: dict[str | None, list[ParameterRow]] = {}
        for row in rows:
            self.paths.add(row.path)
            self.states.update([row.path] if row.variable in _WITHOUT_GRADIENT else [])
            outer = around(row.path)
            self.modules.update(outer)
            own = [path for path in outer if "." not in row.path[len(path) + 1 :]]
            for key in (None, *own) if row.variable not in _WITHOUT_GRADIENT else ():
                self._rows.setdefault(key, []).append(row)

    def with_part(
        self, modules: Iterable[str | None], dims: Sequence[int], lengths: Collection[int | None]
    ) -> set[str]:
        """The Variables of modules that can have a part of this shape, no smaller than a shard."""
        # Gradients of products may be transposed, and in a loop over layers a dimension is gone.
        orders = itertools.permutations(dims) if 1 < len(dims) < 5 else [tuple(dims)]
        every = [row for module in modules for row in self._rows.get(module, ())]
        for order in orders if dims else ():
            found = {
                row.path
                for row in every
                for missing in ((1,) if row.shape[:1] and row.shape[0] in lengths else (0,))
                if _is_part(order, row.shape[missing:], row.shard_shape[missing:])
            }
            if found:
                return found
        return set()


# What Flax keeps besides parameters.
_WITHOUT_GRADIENT = {"BatchStat", "Cache", "Intermediate", "MetricState", "RngCount", "RngKey"}
_WITHOUT_GRADIENT |= {"OptArray", "OptState", "OptVariable", "RngState"}


def _is_part(dims: Sequence[int], shape: Sequence[int], shard: Sequence[int]) -> bool:
    sizes = zip(dims, shape, shard, strict=False)
    return len(dims) == len(shape) and all(
        n and not full % n and not n % part for n, full, part in sizes
    )


def _use(
    one: Instruction,
    module: Module,
    computation: Computation,
    origins: Origins,
    variables: _Variables,
    updated: tuple[str, ...] | None,
) -> Use:
    operations_of = _operations_of_arrays(one, computation)
    every = dict.fromkeys(name for names in operations_of for name in names)
    modules = [module_of(name, variables.modules) or "" for name in every] or [""]
    path = common(modules) or None
    sums = one.collective in ("all-reduce", "reduce-scatter")
    operands = [Value(computation.name, name) for name in one.operand_names]
    made_from = [] if sums else [origins.of(operand) for operand in operands]
    if made_from and all(map(origins.are_parameters, made_from)):
        moved = frozenset().union(*made_from)
        kind: Purpose = "state" if moved <= variables.states else "parameter"
        return Use(kind, tuple(sorted(moved)), path)
    # How often the loops around it run; None for those of unknown length.
    callers = [caller.name for _, caller in module.around(computation.name)
               if caller.opcode == "while"]  # fmt: skip
    lengths = {module.trip_counts.get(name) for name in callers}
    gradients: set[str] = set()
    for i, (array, names) in enumerate(zip(one.results, operations_of, strict=True)):
        own = operands[i : i + 1] if len(operands) == len(operations_of) else operands
        found = {module_of(name, variables.modules) for name in names if "transpose(" in name}
        backward = found if sums else found - {None}
        parts = variables.with_part(backward, array.dims, lengths)
        if parts and not any(map(origins.is_weighted, own)):
            gradients |= parts
    if gradients:
        return Use("gradient", tuple(sorted(gradients)), path)
    if sums or updated is None:
        return Use("sum" if sums else "reshard", (), path)
    return Use("result", updated, path)


def _results(module: Module, updated: Sequence[str | None]) -> dict[str, tuple[str, ...]]:
    """The instructions whose values are returned, unchanged or added to the Variables updated."""
    root = module.roots.get(module.entry.name) if module.entry else None
    if module.entry is None or root is None:
        return {}
    by_name = module.within[module.entry.name]
    codes = {x.name: {i.opcode for i in x.instructions} for x in module.computations}
    names = root.operand_names if root.opcode == "tuple" else (root.name,)
    paths = updated if len(updated) == len(names) else [None] * len(names)
    stack: list[tuple[str, str | None]] = [*zip(names, paths, strict=True)]
    found: dict[str, tuple[str, ...]] = {}
    while stack:
        name, path = stack.pop()
        own = () if path is None else (path,)
        if name not in by_name or (name in found and {*own} <= {*found[name]}):
            continue
        found[name] = (*found.get(name, ()), *own)
        one = by_name[name]
        inside = {one.opcode}.union(*(codes.get(called, {""}) for _, called in one.calls))
        inside -= {"fusion"}
        operands = [by_name[x] for x in one.operand_names if x in by_name]
        if one.opcode.endswith("-done") or inside <= _SAME:
            stack += [(operand.name, path) for operand in operands]
        elif path is not None and inside <= _SAME | _BY_ELEMENT:
            dims = [shape.dims for shape in arrays(one.shape)]
            alike = (x for x in operands if [shape.dims for shape in arrays(x.shape)] == dims)
            stack += [(operand.name, path) for operand in alike]
    return found


_SAME = {"tuple", "get-tuple-element", "copy", "bitcast", "reshape", "transpose", "convert"}
_SAME.add("parameter")
_BY_ELEMENT = ELEMENTWISE | TRANSCENDENTAL | {"broadcast", "constant"}


_MAX_STEPS = 64  # from the initial value of a loop to constants


class Origins:
    """Finds the arguments, of which some are parameters, from which values are computed."""

    def __init__(self, module: Module, arguments: Mapping[int, str], parameters: Collection[str]):
        self._module = module
        self._arguments, self._parameters = arguments, parameters
        self._others: dict[Value, str] = {}  # known to be computed from this, which is no parameter

    def of(self, value: Value) -> frozenset[str]:
        """The names of the arguments from which a value is computed; of non-parameters, one."""
        found: set[str] = set()
        users: dict[Value, Value | None] = {value: None}  # by what they are computed from
        pending = [value]
        while pending:
            value = pending.pop()
            name, number = self._others.get(value), self._module.argument(value)
            if name is None and number is not None:
                name = self._arguments.get(number, value.name)
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
        """Whether it is a partial result: of a product with a parameter, with no product after."""

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

    def _before(self, value: Value) -> list[Value]:
        """What a value is computed from."""
        one, passed = self._module.maker(value), self._module.passed(value)
        if one is None:
            return []
        callers = self._module.callers.get(value.computation, [])
        # A loop carry is its initial value, or what the loop computes if that is a constant.
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
