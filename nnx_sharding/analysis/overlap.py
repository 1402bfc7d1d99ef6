"""Which collectives of a loop can run while the loop computes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from .collectives import Collective
from .hlo import Module
from .instructions import Computation, Instruction

_PRODUCTS = ("dot", "ragged-dot", "convolution")


def products_beside(module: Module, one: Collective) -> tuple[int, int] | None:
    """How many matrix products of the same iteration a collective can run beside, and of how many.

    These neither need its result nor does it need theirs. None if it is not in a loop.
    """
    place, name = one.computation, one.name
    for computation, caller in module.around(one.computation):
        if caller.opcode == "while":
            break
        place, name = computation.name, caller.name
    else:
        return None
    body = module.by_name[place]
    has_products = functools.lru_cache(functools.partial(_has_products, module))
    products = {x.name for x in body.instructions if has_products(x)}
    operands = {x.name: x.operand_names for x in body.instructions}
    users = _reversed(operands)
    related = _reached(operands, name) | _reached(users, name)
    return len(products - related), len(products)


def _has_products(module: Module, one: Instruction) -> bool:
    """Whether an instruction multiplies matrices, itself or in a computation that it runs."""
    if one.opcode == "custom-call":
        return any(word in one.rest for word in ("matmul", "gemm", "dot"))
    inside = (module.by_name.get(name) for _, name in one.calls())
    return one.opcode in _PRODUCTS or any(
        _has_products(module, x) for callee in inside if callee for x in callee.instructions
    )


def _reversed(edges: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for name, operands in edges.items():
        for operand in operands:
            users.setdefault(operand, []).append(name)
    return users


def _reached(edges: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found, open_ = set[str](), [start]
    while open_:
        name = open_.pop()
        if name not in found:
            found.add(name)
            open_ += edges.get(name, ())
    return found
