"""What a device computes while a collective is in progress, in two ways.

Compilers for accelerators split a collective into a start and an end, and schedule work between
them. `Overlap.scheduled` sums that work, from the order of the instructions. The compiler for CPUs
does not: for its programs `Overlap.products_beside` counts the matrix products in an iteration of a
loop that neither need the collective nor are needed by it, so that another compiler may overlap
them. A *chain* are all instructions of one collective, which have its channel.

From other modules:

    Module          the HLO program. ``maker`` is the instruction that makes a value, ``around``
                    the calls around a computation
    executed_work   the work of each instruction in one run of its computation
"""

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

# How often a computation or instruction runs a collective, by channel, or a matrix product.
_Contents: TypeAlias = Counter[str | None]
_PRODUCT_COUNT = None  # the key of products in place of a channel
_CHANNEL = re.compile(r"channel_id=(\d+)")


class Scheduled(NamedTuple):
    """When a collective runs."""

    home: str  # the computation that runs it, of fusions the one around them
    before: Work  # what the device does before it starts, in one run of this computation
    beside: Work  # from the start to the end
    operations: tuple[str, ...]  # the operations with the most flops that run concurrently with it


class Independent(NamedTuple):
    """The matrix products of an iteration, of which some can run while a collective does."""

    products: int  # those that neither need the collective nor are needed by it
    of: int  # all


class Overlap:
    """What runs in a program, and concurrently with what."""

    def __init__(self, module: Module):
        self._module = module
        self._contents: Callable[[str], _Contents] = functools.cache(self._of_computation)
        self._until: Callable[[str], Sequence[Work]] = functools.cache(self._sums)
        every = (x for computation in module.computations for x in computation.instructions)
        self._every = Counter(map(_channel, filter(_is_collective, every)))

    def scheduled(self, collective: Value) -> Scheduled:
        """Returns what the device does before and while a collective is in progress.

        Empty work if the program waits for it.
        """
        name = collective.computation
        # The instructions of a fusion are not scheduled: the fusion is.
        for home, caller in self._module.around(name):
            if caller.opcode not in ("fusion", "async-start"):
                break
            name = home.name
        instructions = self._module.by_name[name].instructions
        instruction = self._module.maker(collective)
        assert instruction is not None
        channel = _channel(instruction)
        chain = {x.name for x in instructions if self._of_instruction(x)[channel]}
        # The positions of these, and of what waits for them, in the schedule.
        steps = []
        for step, x in enumerate(instructions):
            is_end = x.opcode.endswith("-done") and not chain.isdisjoint(x.operand_names)
            if x.name in chain or is_end:
                steps.append(step)
        start, end = 0, 0  # of damaged text
        if steps:
            start = steps[0] + 1
            end = max(start, steps[-1])
        between = instructions[start:end]
        flops = {x.name: self._work_of(name, x).flops for x in between}
        computing = (x for x in between if flops[x.name] and x.operation)
        most = sorted(computing, key=lambda x: -flops[x.name])
        operations = dict.fromkeys(x.operation or "" for x in most)
        before, until = (self._until(name)[step] for step in (start, end))  # sums up to there
        return Scheduled(name, before, until.plus(before, -1), tuple(operations)[:3])

    def _sums(self, name: str) -> Sequence[Work]:
        """Sums what is done before each instruction of a computation, and before its end."""
        parts = (self._work_of(name, x) for x in self._module.by_name[name].instructions)
        return [*itertools.accumulate(parts, Work.plus, initial=Work())]

    @functools.cached_property
    def _executed(self) -> Mapping[str, Mapping[str, Work]]:
        parts = executed_work(self._module).items()
        return {name: {x.name: work for x, work in part} for name, part in parts}

    def _work_of(self, computation: str, instruction: Instruction) -> Work:
        """Sums the work of an instruction and of what it calls; a collective has none."""
        if _is_collective(instruction):
            return Work()
        total = self._executed.get(computation, {}).get(instruction.name, Work())
        for callee in instruction.callees:
            if callee in self._executed:  # others are applied to elements, or not taken
                times = self._module.trip_counts.get(instruction.name, 1)
                total = total.plus(self._until(callee)[-1], times)
        return total

    def products_beside(self, collective: Value) -> Independent | None:
        """Counts the matrix products of an iteration that are independent of a collective.

        None if the collective is in no loop.
        """
        # For TPUs the compiler may write one collective as several instructions: the first starts
        # it, some products carry it on, the last waits.
        instruction = self._module.maker(collective)
        body = None if instruction is None else self._body(_channel(instruction))
        if instruction is None or body is None:
            return None
        contents = {x.name: self._of_instruction(x) for x in body.instructions}
        products = {name for name, counts in contents.items() if counts[_PRODUCT_COUNT]}
        chain = {name for name, counts in contents.items() if counts[_channel(instruction)]}
        operands = {x.name: x.operand_names for x in body.instructions}
        users: defaultdict[str, list[str]] = defaultdict(list)
        for name, used in operands.items():
            for operand in used:
                users[operand].append(name)
        before = [_reached(operands, name) for name in chain]
        after = [_reached(users, name) for name in chain]
        # What the first of the chain needs, and what needs the last.
        needed = next(names for names in before if not names & chain)
        waiting = next(names for names in after if not names & chain)
        loops = {x.name for x in body.instructions if x.opcode == "while"}
        rest = {name: used for name, used in users.items() if name not in products - chain}
        first = set.union(*(_reached(rest, name) for name in chain)) & products - chain
        if first and first <= loops:  # it only has what a loop in that one starts with
            return None
        own = chain if len(chain) == 1 else set()  # a product with a collective in it
        return Independent(len(products - needed - waiting - own), len(products))

    def _body(self, channel: str) -> Computation | None:
        """Finds the innermost loop body that has all instructions of a collective."""
        calls = (call for calls in self._module.calls.values() for call in calls)
        bodies = (call.callee for call in calls if call.attribute == "body")  # of loops
        with_all = [x for x in bodies if self._contents(x)[channel] == self._every[channel]]
        depth = {name: len([*self._module.around(name)]) for name in with_all}
        return self._module.by_name[max(depth, key=depth.__getitem__)] if depth else None

    def _of_computation(self, name: str) -> _Contents:
        """Counts what is in a computation, and in those that it calls."""
        computation = self._module.by_name.get(name)
        parts = map(self._of_instruction, computation.instructions if computation else ())
        return sum(parts, _Contents())

    def _of_instruction(self, instruction: Instruction) -> _Contents:
        """Counts what an instruction is, and what is in the computations that it calls."""
        contents = sum(map(self._contents, instruction.callees), _Contents())
        if _is_collective(instruction):
            contents[_channel(instruction)] += 1
        is_call = instruction.opcode == "custom-call" and _PRODUCT.search(instruction.rest)
        if instruction.opcode in PRODUCTS or is_call:
            contents[_PRODUCT_COUNT] += 1
        return contents


# What libraries for CPUs and GPUs call products of matrices.
_PRODUCT = re.compile(r'custom_call_target="[^"]*(matmul|gemm|conv)', re.IGNORECASE)


def _is_collective(instruction: Instruction) -> bool:
    return instruction.collective is not None


def _channel(instruction: Instruction) -> str:
    """Returns what all instructions of one collective have in common."""
    channel = _CHANNEL.search(instruction.rest)
    return instruction.name if channel is None else channel[1]


def _reached(edges: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Collects what can be reached along edges, without the start."""
    return {*reached(start, lambda name: edges.get(name, ()))} - {start}
