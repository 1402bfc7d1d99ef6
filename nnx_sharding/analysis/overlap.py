"""What a device computes while a collective is in progress, in two ways.

Compilers for accelerators split a collective into a start and an end, and schedule work between
them. `Overlap.scheduled` sums that work, from the order of the instructions. The compiler for CPUs
does not: for its programs `Overlap.products_beside` counts the matrix products in an iteration of a
loop that neither need the collective nor are needed by it, so that another compiler may overlap
them. The instructions that the compiler writes one collective as have the number of its *channel*,
and are its *chain*: in a loop for TPUs, for example, a start, products that carry it on, an end.

From other modules:

    Module          the HLO program. ``maker`` is the instruction that makes a value, ``around``
                    the calls around a computation, innermost first, ``by_name`` its computations
    executed_work   the work of each instruction in one run of its computation
    reached         a node, and all that can be reached from it by a function
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
    of: int  # the number of all


class Overlap:
    """What runs in a program, and concurrently with what."""

    def __init__(self, module: Module):
        self._module = module
        # By the name of a computation: what it contains, and the work until each of its
        # instructions. Each asks for those that the computation calls, so what is known is kept.
        self._contents: Callable[[str], _Contents] = functools.cache(self._contents_of_computation)
        self._work_until: Callable[[str], Sequence[Work]] = functools.cache(self._running_sums)
        instructions = (x for computation in module.computations for x in computation.instructions)
        collectives = filter(_is_collective, instructions)
        self._chain_lengths = Counter(map(_channel, collectives))  # by channel

    def scheduled(self, collective: Value) -> Scheduled:
        """Returns what the device does before and while a collective is in progress.

        Empty work if the program waits for it.
        """
        name = collective.computation
        # The instructions of a fusion are not scheduled: the fusion is.
        for outer, caller in self._module.around(name):
            if caller.opcode not in ("fusion", "async-start"):
                break
            name = outer.name
        schedule = self._module.by_name[name].instructions
        instruction = self._module.maker(collective)
        assert instruction is not None
        channel = _channel(instruction)
        chain = {x.name for x in schedule if self._contents_of(x)[channel]}
        # The positions of the chain, and of what waits for it, in the schedule.
        steps = []
        for step, x in enumerate(schedule):
            is_end = x.opcode.endswith("-done") and not chain.isdisjoint(x.operand_names)
            if x.name in chain or is_end:
                steps.append(step)
        start, end = 0, 0  # of damaged text
        if steps:
            start = steps[0] + 1
            end = max(start, steps[-1])
        between = schedule[start:end]
        flops = {x.name: self._work_of(x, name).flops for x in between}
        computing = (x for x in between if flops[x.name] and x.operation)
        most_flops_first = sorted(computing, key=lambda x: -flops[x.name])
        operations = dict.fromkeys(x.operation or "" for x in most_flops_first)
        before_start, before_end = (self._work_until(name)[step] for step in (start, end))
        return Scheduled(
            home=name,
            before=before_start,
            beside=before_end.plus(before_start, times=-1),  # the difference
            operations=tuple(operations)[:3],
        )

    def _running_sums(self, name: str) -> Sequence[Work]:
        """Sums what is done before each instruction of a computation, and before its end."""
        parts = (self._work_of(x, name) for x in self._module.by_name[name].instructions)
        return [*itertools.accumulate(parts, Work.plus, initial=Work())]

    @functools.cached_property
    def _executed(self) -> Mapping[str, Mapping[str, Work]]:
        """The work of each instruction in one run, by the name of its computation and its own."""
        executed = executed_work(self._module).items()
        return {name: {x.name: work for x, work in parts} for name, parts in executed}

    def _work_of(self, instruction: Instruction, computation: str) -> Work:
        """Sums the work of an instruction and of what it calls; a collective has none.

        ``computation`` is the name of the one that the instruction is in.
        """
        if _is_collective(instruction):
            return Work()
        total = self._executed.get(computation, {}).get(instruction.name, Work())
        for callee in instruction.callees:
            if callee in self._executed:  # others are applied to elements, or not taken
                times = self._module.trip_counts.get(instruction.name, 1)  # of a loop
                work_until_end = self._work_until(callee)[-1]
                total = total.plus(work_until_end, times)
        return total

    def products_beside(self, collective: Value) -> Independent | None:
        """Counts the matrix products of an iteration that are independent of a collective.

        Returns None if the collective is in no loop, or only moves what loops inside start with.
        """
        instruction = self._module.maker(collective)
        body = None if instruction is None else self._body_with_chain(_channel(instruction))
        if instruction is None or body is None:
            return None
        # All that follows are names of instructions in the body.
        contents = {x.name: self._contents_of(x) for x in body.instructions}
        products = {name for name, counts in contents.items() if counts[_PRODUCT_COUNT]}
        chain = {name for name, counts in contents.items() if counts[_channel(instruction)]}
        operands = {x.name: x.operand_names for x in body.instructions}
        users: defaultdict[str, list[str]] = defaultdict(list)
        for name, used in operands.items():
            for operand in used:
                users[operand].append(name)
        before = [_all_reached(name, operands) for name in chain]
        after = [_all_reached(name, users) for name in chain]
        # The first of the chain needs none of the others, and the last is needed by none.
        needed = next(names for names in before if not names & chain)
        waiting = next(names for names in after if not names & chain)
        if _is_moved_into_loop(body, chain, products - chain, users):
            return None
        own = chain if len(chain) == 1 else set()  # a product with a collective in it
        return Independent(products=len(products - needed - waiting - own), of=len(products))

    def _body_with_chain(self, channel: str) -> Computation | None:
        """Finds the innermost loop body that has all instructions of a collective; None without."""
        calls = (call for calls in self._module.calls.values() for call in calls)
        bodies = (call.callee for call in calls if call.attribute == "body")  # of loops
        length = self._chain_lengths[channel]
        with_all = [name for name in bodies if self._contents(name)[channel] == length]
        depth = {name: len([*self._module.around(name)]) for name in with_all}
        return self._module.by_name[max(depth, key=depth.__getitem__)] if depth else None

    def _contents_of_computation(self, name: str) -> _Contents:
        """Counts what is in a computation, and in those that it calls."""
        computation = self._module.by_name.get(name)
        parts = map(self._contents_of, computation.instructions if computation else ())
        return sum(parts, _Contents())

    def _contents_of(self, instruction: Instruction) -> _Contents:
        """Counts what an instruction is, and what is in the computations that it calls."""
        contents = sum(map(self._contents, instruction.callees), _Contents())
        if _is_collective(instruction):
            contents[_channel(instruction)] += 1
        is_call = instruction.opcode == "custom-call" and _PRODUCT.search(instruction.rest)
        if instruction.opcode in PRODUCTS or is_call:
            contents[_PRODUCT_COUNT] += 1
        return contents


def _is_moved_into_loop(
    body: Computation, chain: Set[str], products: Set[str], users: Mapping[str, Iterable[str]]
) -> bool:
    """Whether a collective only moves what inner loops start with.

    So it is if all of the next products that use it are in these: what is reached from the
    ``chain`` without passing another product.
    """
    edges = {name: used for name, used in users.items() if name not in products}
    next_products = set.union(*(_all_reached(x, edges) for x in chain)) & products
    loops = {x.name for x in body.instructions if x.opcode == "while"}
    return bool(next_products) and next_products <= loops


# What libraries for CPUs and GPUs call products of matrices.
_PRODUCT = re.compile(r'custom_call_target="[^"]*(matmul|gemm|conv)', re.IGNORECASE)


def _is_collective(instruction: Instruction) -> bool:
    return instruction.collective is not None


def _channel(instruction: Instruction) -> str:
    """Returns what all instructions of one collective have in common: its channel, or its name."""
    channel = _CHANNEL.search(instruction.rest)
    return instruction.name if channel is None else channel[1]


def _all_reached(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Collects the names that can be reached along edges, without the start."""
    return {*reached(start, lambda name: edges.get(name, ()))} - {start}
