"""What collectives are for: parameters, gradients, sums, results, or resharding of other values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .hlo import Module
from .instructions import Computation, Instruction, arrays
from .opcodes import ELEMENTWISE, TRANSCENDENTAL
from .origins import WEIGHTED, origins
from .parameters import ParameterRow

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
    """What each collective of a program with these arguments is for, by name.

    ``updated`` has the path of the Variable that each array of the result updates.
    """
    used = [row for row in rows if row.used]
    variables = _Variables(row for row in used if row.variable is not None)
    names = (one.name for _, one in collectives)
    arguments = [row.path for row in used] if inputs_of(module, used) else []
    computed_from = origins(module, names, arguments, variables.paths)
    results = _results(module, updated)
    return {
        one.name: _use(
            one,
            _operations_of_arrays(one, computation),
            computed_from.get(one.name, ()),
            variables,
            _lengths(module, computation),
            results.get(one.name),
        )
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
    found = [by_name.get(name) or parts.get(i) for i, name in enumerate(one.operand_names)]
    return [operations(name) if name else every for name in found]


def _lengths(module: Module, computation: Computation) -> set[int | None]:
    """How often the loops around a computation run; None for those of unknown length."""
    lengths: set[int | None] = set()
    name, seen = computation.name, {""}
    while name in module.callers.keys() - seen:
        seen.add(name)
        around, caller = module.callers[name][-1]
        name = around.name
        if caller.opcode == "while":
            lengths.add(module.trip_counts.get(caller.name))
    return lengths


def inputs_of(module: Module, rows: Sequence[ParameterRow]) -> list[Instruction]:
    """The parameters of a program in the order of rows; empty if the rows are in another order.

    The TPU compiler gives some arguments the names of operations that use them.
    """
    entry, paths = module.entry, {row.path for row in rows}
    inputs = [one for one in entry.instructions if one.opcode == "parameter"] if entry else []
    by_number = {one.number: one for one in inputs}

    def is_argument(number: int, row: ParameterRow) -> bool:
        one = by_number.get(number)
        shapes = [shape.dims for shape in arrays(one.shape)] if one else []
        name = one.operation if one else None
        return shapes == [row.shard_shape] and (name == row.path or name not in paths)

    in_order = all(is_argument(number, row) for number, row in enumerate(rows))
    return [by_number[i] for i in range(len(rows))] if in_order and len(inputs) == len(rows) else []


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
            around = [row.path[: match.start()] for match in _PART.finditer(row.path)]
            self.modules.update(around)
            own = [path for path in around if "." not in row.path[len(path) + 1 :]]
            for key in (None, *own) if row.variable not in _WITHOUT_GRADIENT else ():
                self._rows.setdefault(key, []).append(row)

    def with_part(
        self, modules: Iterable[str | None], dims: Sequence[int], lengths: Collection[int | None]
    ) -> set[str]:
        """The Variables of modules that can have a part of this shape, no smaller than a shard.

        In a loop over layers, a stack of them has lost its first dimension. The gradient of a
        product may be transposed.
        """
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
    operations_of: Sequence[Sequence[str]],
    operands: Sequence[frozenset[str]],
    variables: _Variables,
    lengths: Collection[int | None],
    updated: tuple[str, ...] | None,
) -> Use:
    every = dict.fromkeys(name for names in operations_of for name in names)
    modules = [module_of(name, variables.modules) for name in every] or [None]
    common = modules[0]
    while common is not None and not all(_is_at(module, common) for module in modules):
        common = common[: max(common.rfind("."), common.rfind("["), 0)] or None
    sums = one.collective in ("all-reduce", "reduce-scatter")
    plain = [operand - {WEIGHTED} for operand in operands]
    if not sums and plain and all(x and x <= variables.paths for x in plain):
        moved = frozenset().union(*plain)
        return Use(
            "state" if moved <= variables.states else "parameter", tuple(sorted(moved)), common
        )
    gradients: set[str] = set()
    for i, (array, names) in enumerate(zip(one.results, operations_of, strict=True)):
        own = operands[i] if len(operands) == len(operations_of) else frozenset().union(*operands)
        backward = {
            module
            for name in names
            if "transpose(" in name
            and ((module := module_of(name, variables.modules)) is not None or sums)
        }
        if WEIGHTED not in own:
            gradients |= variables.with_part(backward, array.dims, lengths)
    if gradients:
        return Use("gradient", tuple(sorted(gradients)), common)
    if sums or updated is None:
        return Use("sum" if sums else "reshard", (), common)
    return Use("result", updated, common)


def _is_at(path: str | None, module: str) -> bool:
    return path is not None and (path + ".").startswith((module + ".", module + "["))


def _results(module: Module, updated: Sequence[str | None]) -> dict[str, tuple[str, ...]]:
    """The instructions whose values the program returns unchanged, with the Variables updated.

    An update that is added to a Variable, element by element, belongs to the new value.
    """
    entry = module.entry
    by_name = {x.name: x for x in entry.instructions} if entry is not None else {}
    codes = {x.name: {i.opcode for i in x.instructions} for x in module.computations}
    roots = [x for x in by_name.values() if x.is_root]
    names = [
        name for x in roots for name in (x.operand_names if x.opcode == "tuple" else (x.name,))
    ]
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
        inside = {one.opcode}.union(*(codes.get(called, {""}) for _, called in one.calls()))
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


def operations(operation: str) -> list[str]:
    """The operations that one was made from, written ``f/(a/dot:b/dot)`` or ``f/a;f/b``."""
    found = []
    for name in operation.split(";"):
        start = 0 if name.startswith("(") else name.find("/(") + 1
        is_joined = name.endswith(")") and (start > 0 or name.startswith("("))
        parts = name[start + 1 : -1].split(":") if is_joined else [name[start:]]
        found += [name[:start] + part for part in parts]
    return found


def module_of(operation: str, known: Collection[str]) -> str | None:
    """The module in the name of an operation, ``jit(f)/jvp(model)/up/dot``: its path, if known."""
    found: str | None = None
    for part in _parts(operation):
        inside = [part] if found is None else [f"{found}.{part}", f"{found}{part}", part]
        found = next((path for path in inside if path in known), found)
    return found


def _parts(operation: str) -> Iterator[str]:
    for part in operation.split("/")[:-1]:
        if not part.startswith(("jit(", "pjit(")):
            yield part.rpartition("(")[2].rstrip(")")


# The beginning of a part of a path: an attribute or a key.
_PART = re.compile(r"(?<!^)[.\[]")
