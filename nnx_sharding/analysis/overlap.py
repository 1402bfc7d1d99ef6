"""Which collectives can run while the device computes."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .hlo import Module
from .instructions import Computation, Instruction
from .opcodes import PRODUCTS
from .values import Value, reached
from .work import Work, executed_work

# How often a computation or instruction runs a collective, by channel, or a matrix product (None).
_Contents: TypeAlias = Counter[str | None]
_CHANNEL = re.compile(r"channel_id=(\d+)")


class Scheduled(NamedTuple):
    """When a collective runs."""

    home: str  # the computation that runs it, of fusions the one around them
    before: Work  # what the device does before it starts, in one run of this computation
    beside: Work  # from the start to the end
    operations: tuple[str, ...]  # those with the most flops beside it


class Overlap:
    """What runs in a program, and beside what."""

    def __init__(self, module: Module):
        self._module = module
        self._contents: Callable[[str], _Contents] = functools.cache(self._of_computation)
        self._until: Callable[[str], Sequence[Work]] = functools.cache(self._sums)
        every = (x for computation in module.computations for x in computation.instructions)
        self._every = Counter(map(_channel, filter(_is_collective, every)))

    def scheduled(self, collective: Value) -> Scheduled:
        """When a collective is scheduled to start and to end."""
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
        start, end = (at[0] + 1, max(at[0] + 1, at[-1])) if at else (0, 0)  # none in damaged text
        done = [(x, self._work_of(name, x).flops) for x in instructions[start:end]]
        most = sorted((x for x in done if x[1]), key=lambda x: -x[1])
        operations = dict.fromkeys(x.operation for x, _ in most if x.operation)
        before, until = (self._until(name)[i] for i in (start, end))
        return Scheduled(name, before, until.plus(before, -1), tuple(operations)[:3])

    def _sums(self, name: str) -> Sequence[Work]:
        """What is done before each instruction of a computation, and before its end."""
        parts = (self._work_of(name, x) for x in self._module.by_name[name].instructions)
        return [*itertools.accumulate(parts, Work.plus, initial=Work())]

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
            if callee in self._executed:  # others are applied to elements, or not taken
                times = self._module.trip_counts.get(one.name, 1)
                total = total.plus(self._until(callee)[-1], times)
        return total

    def products_beside(self, collective: Value) -> tuple[int, int] | None:
        """How many independent matrix products an iteration has, of how many; None if no loop."""
        # For TPUs the compiler may write one collective as several instructions: the first starts
        # it, some products carry it on, the last waits.
        instruction = self._module.maker(collective)
        body = None if instruction is None else self._body(_channel(instruction))
        if instruction is None or body is None:
            return None
        parts = [(x.name, self._of_instruction(x)) for x in body.instructions]
        products = {name for name, contents in parts if contents[None]}
        chain = {name for name, contents in parts if contents[_channel(instruction)]}
        operands = {x.name: x.operand_names for x in body.instructions}
        users: defaultdict[str, list[str]] = defaultdict(list)
        for name, used in operands.items():
            for operand in used:
                users[operand].append(name)
        before = [_reached(operands, name) for name in chain]
        after = [_reached(users, name) for name in chain]
        start = next(x for x in before if not x & chain)
        end = next(x for x in after if not x & chain)
        loops = {x.name for x in body.instructions if x.opcode == "while"}
        rest = {name: used for name, used in users.items() if name not in products - chain}
        first = set.union(*(_reached(rest, name) for name in chain)) & products - chain
        if first and first <= loops:  # it only has what a loop in that one starts with
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


def _reached(edges: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """What can be reached along edges, without the start."""
    return {*reached(start, lambda name: edges.get(name, ()))} - {start}
