"""Which collectives can run while the device computes."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from .hlo import Module
from .instructions import Computation, Instruction
from .opcodes import PRODUCTS
from .values import Value, reached
from .work import Work, executed_work

# How often a computation or instruction runs a collective, by channel, or a matrix product (None).
_Contents: TypeAlias = Counter[str | None]
_CHANNEL = re.compile(r"channel_id=(\d+)")


class Overlap:
    """What runs in a program, and beside what."""

    def __init__(self, module: Module):
        self._module = module
        self._contents: Callable[[str], _Contents] = functools.cache(self._of_computation)
        self._work: Callable[[str], Work] = functools.cache(self._of_run)
        every = (x for computation in module.computations for x in computation.instructions)
        self._every = Counter(map(_channel, filter(_is_collective, every)))

    def scheduled_beside(self, collective: Value) -> tuple[Work, tuple[str, ...]]:
        """What the device is scheduled to do from the start of a collective to its end.

        Returns:
          The work, in one run of the collective, and the operations in it with the most flops.
        """
        name = collective.computation
        for home, caller in self._module.around(name):
            if caller.opcode not in ("fusion", "async-start"):
                break
            name = home.name
        instructions = self._module.by_name[name].instructions
        [instruction] = filter(None, [self._module.maker(collective)])
        channel = _channel(instruction)
        chain = {x.name for x in instructions if self._of_instruction(x)[channel]}
        at = [
            i
            for i, x in enumerate(instructions)
            if x.name in chain
            or (x.opcode.endswith("-done") and not chain.isdisjoint(x.operand_names))
        ]
        between = instructions[at[0] + 1 : at[-1]] if at else []  # none in damaged text
        done = [(x, self._work_of(name, x)) for x in between]
        total = functools.reduce(Work.plus, (work for _, work in done), Work())
        most = sorted((x for x in done if x[1].flops), key=lambda x: -x[1].flops)
        operations = dict.fromkeys(x.operation for x, _ in most if x.operation)
        return total, tuple(operations)[:3]

    @functools.cached_property
    def _executed(self) -> Mapping[str, Mapping[str, Work]]:
        parts = executed_work(self._module).items()
        return {name: {one.name: own for one, own in each} for name, each in parts}

    def _work_of(self, computation: str, one: Instruction) -> Work:
        """The work of an instruction with what it calls; none of a collective."""
        if _is_collective(one):
            return Work()
        total = self._executed.get(computation, {}).get(one.name, Work())
        for _, callee in one.calls:
            total = total.plus(self._work(callee), self._module.trip_counts.get(one.name, 1))
        return total

    def _of_run(self, name: str) -> Work:
        """The work of a computation; none of one that is applied to elements, or is not taken."""
        if name not in self._executed:
            return Work()
        parts = (self._work_of(name, x) for x in self._module.by_name[name].instructions)
        return functools.reduce(Work.plus, parts, Work())

    def products_beside(self, collective: Value) -> tuple[int, int] | None:
        """How many matrix products of an iteration a collective can run beside, and of how many.

        These do not need its result, and it does not need theirs. For TPUs the compiler may write
        one as several instructions: the first starts it, some products carry it on, the last waits.
        None if it is in no loop, or only has what a loop in that one starts with.
        """
        instruction = self._module.maker(collective)
        body = None if instruction is None else self._body(_channel(instruction))
        if instruction is None or body is None:
            return None
        parts = [(x.name, self._of_instruction(x)) for x in body.instructions]
        products = {name for name, contents in parts if contents[None]}
        chain = {name for name, contents in parts if contents[_channel(instruction)]}
        operands = {x.name: x.operand_names for x in body.instructions}
        users = _reversed(operands)
        before = [_reached(operands, name) for name in chain]
        after = [_reached(users, name) for name in chain]
        start = next(x for x in before if not x & chain)
        end = next(x for x in after if not x & chain)
        loops = {x.name for x in body.instructions if x.opcode == "while"}
        rest = {name: used for name, used in users.items() if name not in products - chain}
        first = set.union(*(_reached(rest, name) for name in chain)) & products - chain
        if first and first <= loops:
            return None
        return len(products - start - end - (chain if len(chain) == 1 else set())), len(products)

    def _body(self, channel: str) -> Computation | None:
        """The innermost loop body that has all instructions of a collective."""
        calls = (call for calls in self._module.calls.values() for call in calls)
        bodies = (name for _, attribute, name in calls if attribute == "body")
        found = [x for x in bodies if self._contents(x)[channel] == self._every[channel]]
        depth = {name: len([*self._module.around(name)]) for name in found}
        return self._module.by_name[max(found, key=depth.__getitem__)] if found else None

    def _of_computation(self, name: str) -> _Contents:
        computation = self._module.by_name.get(name)
        parts = map(self._of_instruction, computation.instructions if computation else ())
        return sum(parts, _Contents())

    def _of_instruction(self, one: Instruction) -> _Contents:
        inside = sum((self._contents(name) for _, name in one.calls), _Contents())
        if _is_collective(one):
            inside[_channel(one)] += 1
        is_call = one.opcode == "custom-call"
        if one.opcode in PRODUCTS or (is_call and _PRODUCT.search(one.rest)):
            inside[None] += 1
        return inside


# What libraries for CPUs and GPUs call products of matrices.
_PRODUCT = re.compile(r'custom_call_target="[^"]*(matmul|gemm|conv)', re.IGNORECASE)


def _is_collective(one: Instruction) -> bool:
    return one.collective is not None


def _channel(one: Instruction) -> str:
    found = _CHANNEL.search(one.rest)
    return one.name if found is None else found[1]


def _reversed(edges: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for name, operands in edges.items():
        for operand in operands:
            users.setdefault(operand, []).append(name)
    return users


def _reached(edges: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """What can be reached along edges, without the start."""
    return {*reached(start, lambda name: edges.get(name, ()))} - {start}
