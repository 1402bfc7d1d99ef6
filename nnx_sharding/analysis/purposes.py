"""What collectives are for: parameters, gradients, sums, results, or the resharding of others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .hlo import Instruction, Module
from .origins import origins
from .parameters import ParameterRow
from .shapes import arrays

Purpose: TypeAlias = Literal["parameter", "gradient", "sum", "result", "reshard"]


class Use(NamedTuple):
    """What a collective is for.

    Attributes:
      purpose: ``parameter`` if it moves parameters or other Variables to where they are used,
        ``gradient`` if it sums or moves gradients of parameters, ``sum`` if it sums what an
        operation left in parts, ``result`` if it moves what the program returns, and ``reshard``
        if it moves anything else, such as activations; None if that is not known.
      parameters: the paths of the parameters.
      module: the module whose call it is in, where the program has names for that.
    """

    purpose: Purpose | None
    parameters: tuple[str, ...]
    module: str | None


def uses_of(
    module: Module, collectives: Sequence[Instruction], rows: Iterable[ParameterRow]
) -> dict[str, Use]:
    """What each collective of a program with these arguments is for, by name."""
    variables = {row.path: row for row in rows if row.used and row.variable is not None}
    known = {path[: match.start()] for path in variables for match in _PART.finditer(path)}
    computed_from = origins(module, (one.name for one in collectives))
    results = _results(module)
    return {
        one.name: _use(one, computed_from.get(one.name, ()), variables, known, one.name in results)
        for one in collectives
    }


def _use(
    one: Instruction,
    operands: Sequence[frozenset[str]],
    variables: dict[str, ParameterRow],
    known: Collection[str],
    is_result: bool,
) -> Use:
    names = operations(one.operation or "")
    modules = [module_of(name, known) for name in names]
    around = (path for path in known if all(_is_at(module, path) for module in modules))
    common = max(around, key=len, default=None)
    sums = one.opcode.startswith(("all-reduce", "reduce-scatter"))
    if not sums and operands and all(x and x <= variables.keys() for x in operands):
        return Use("parameter", tuple(sorted(frozenset().union(*operands))), common)
    shapes = {shape.dims for shape in arrays(one.shape)}
    backward = [
        module
        for name, module in zip(names, modules, strict=True)
        if "transpose(" in name and (sums or module is not None)
    ]
    for missing in (0, 1):  # in a loop over layers the first dimension is gone
        gradients = tuple(
            path
            for path, row in variables.items()
            if any(module is None or _is_own(path, module) for module in backward)
            and any(_is_part(dims, row, missing) for dims in shapes)
        )
        if gradients:
            return Use("gradient", gradients, common)
    return Use("sum" if sums else "result" if is_result else "reshard", (), common)


def _is_at(path: str | None, module: str) -> bool:
    return path is not None and (path + ".").startswith((module + ".", module + "["))


def _is_own(path: str, module: str) -> bool:
    """Whether a parameter is one of a module itself, not of a module in it."""
    return _is_at(path, module) and "." not in path[len(module) + 1 :]


def _is_part(dims: Sequence[int], row: ParameterRow, missing: int) -> bool:
    """Whether an array can be a part of a parameter that is not less than a shard."""
    sizes = zip(dims, row.shape[missing:], row.shard_shape[missing:], strict=False)
    is_part = all(size and not full % size and not size % shard for size, full, shard in sizes)
    return is_part and 0 < len(dims) == len(row.shape) - missing


def _results(module: Module) -> set[str]:
    """The instructions whose values the program returns as they are."""
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
    """The operations that one was made from, written as ``f/(a/dot:b/dot)`` or ``f/a;f/b``."""
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


# Where a part of a path begins: an attribute or a key.
_PART = re.compile(r"(?<!^)[.\[]")
