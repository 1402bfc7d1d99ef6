"""What collectives are for: parameters, gradients, sums, results, or resharding of other values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .hlo import Module
from .instructions import Instruction, arrays
from .origins import origins
from .parameters import ParameterRow

Purpose: TypeAlias = Literal["parameter", "gradient", "sum", "result", "reshard"]


class Use(NamedTuple):
    """What a collective is for; the fields are those of ``Collective``."""

    purpose: Purpose | None = None
    parameters: tuple[str, ...] = ()
    module: str | None = None


def uses_of(
    module: Module, collectives: Sequence[Instruction], rows: Iterable[ParameterRow]
) -> dict[str, Use]:
    """What each collective of a program with these arguments is for, by name."""
    used = [row for row in rows if row.used]
    variables = _Variables(row for row in used if row.variable is not None)
    computed_from = origins(module, (one.name for one in collectives), _names(module, used))
    results = _results(module)
    return {
        one.name: _use(one, computed_from.get(one.name, ()), variables, one.name in results)
        for one in collectives
    }


def _names(module: Module, rows: Sequence[ParameterRow]) -> list[str]:
    """The paths of the arguments by their numbers; none if the rows are in another order.

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
    return [row.path for row in rows] if in_order and len(inputs) == len(rows) else []


class _Variables:
    """The Variables among the arguments of a program."""

    def __init__(self, rows: Iterable[ParameterRow]):
        self.paths: set[str] = set()
        self.modules: set[str] = set()  # the paths of all modules that contain them
        # The paths of all Variables (None) and of each module's own, by shape and shard shape.
        self._by_shape: dict[str | None, dict[_Shapes, list[str]]] = {}
        for row in rows:
            self.paths.add(row.path)
            around = [row.path[: match.start()] for match in _PART.finditer(row.path)]
            self.modules.update(around)
            own = [path for path in around if "." not in row.path[len(path) + 1 :]]
            for key in (None, *own):
                shapes = self._by_shape.setdefault(key, {})
                shapes.setdefault((row.shape, row.shard_shape), []).append(row.path)

    def with_part(self, module: str | None, dims: Sequence[int], missing: int) -> Iterator[str]:
        """The Variables of a module that can have a part of this shape, no smaller than a shard.

        ``missing`` is the number of their dimensions that the shape lacks.
        """
        for (shape, shard), paths in self._by_shape.get(module, {}).items():
            sizes = zip(dims, shape[missing:], shard[missing:], strict=False)
            is_part = 0 < len(dims) == len(shape) - missing
            if is_part and all(n and not full % n and not n % part for n, full, part in sizes):
                yield from paths


_Shapes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def _use(
    one: Instruction, operands: Sequence[frozenset[str]], variables: _Variables, is_result: bool
) -> Use:
    names = operations(one.operation or "")
    modules = [module_of(name, variables.modules) for name in names]
    common = modules[0]
    while common is not None and not all(_is_at(module, common) for module in modules):
        common = common[: max(common.rfind("."), common.rfind("["), 0)] or None
    sums = one.opcode.startswith(("all-reduce", "reduce-scatter"))
    if not sums and operands and all(x and x <= variables.paths for x in operands):
        return Use("parameter", tuple(sorted(frozenset().union(*operands))), common)
    backward = {
        module
        for name, module in zip(names, modules, strict=True)
        if "transpose(" in name and (sums or module is not None)
    }
    shapes = {shape.dims for shape in arrays(one.shape)}
    for missing in (0, 1):  # in a loop over layers the first dimension is gone
        found = (variables.with_part(x, dims, missing) for x in backward for dims in shapes)
        if gradients := {path for paths in found for path in paths}:
            return Use("gradient", tuple(sorted(gradients)), common)
    return Use("sum" if sums else "result" if is_result else "reshard", (), common)


def _is_at(path: str | None, module: str) -> bool:
    return path is not None and (path + ".").startswith((module + ".", module + "["))


def _results(module: Module) -> set[str]:
    """The instructions whose values the program returns unchanged."""
    entry = module.entry
    by_name = {x.name: x for x in entry.instructions} if entry is not None else {}
    moves = {
        x.name for x in module.computations if _SAME.issuperset(i.opcode for i in x.instructions)
    }
    stack = [x.name for x in by_name.values() if x.is_root]
    found: set[str] = set()
    while stack:
        name = stack.pop()
        if name in found or name not in by_name:
            continue
        found.add(name)
        one = by_name[name]
        is_copy = one.opcode == "fusion" and all(called in moves for _, called in one.calls())
        if is_copy or one.opcode in _SAME or one.opcode.endswith("-done"):
            stack += one.operand_names
    return found


_SAME = {"tuple", "get-tuple-element", "copy", "bitcast", "reshape", "transpose", "convert"}
_SAME.add("parameter")


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
