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
    trip_counts     how often the body of each loop runs, by the name of the loop, if known
    executed_work   the work of each instruction in one run of its computation; of conditionals only
                    that of the largest branch
    reached         a node, and all that can be reached from it by a function
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from typing import NamedTuple

from .hlo import Module
from .instructions import Computation, Instruction
from .opcodes import PRODUCTS
from .values import Value, reached
from .work import Work, executed_work, sum_of


class _Contents(NamedTuple):
    """What a computation or an instruction consists of, with all that it calls."""

    products: int  # how many matrix products
    channels: Counter[str]  # how many instructions of each collective, by channel


_CHANNEL = re.compile(r"channel_id=(\d+)")


class Scheduled(NamedTuple):
    """What the device does while one run of a collective is in progress."""

    work: Work = Work()  # none if the device waits for it
    operations: tuple[str, ...] = ()  # those with the most flops


class Independent(NamedTuple):
    """The matrix products of an iteration, of which some can run while a collective does."""

    products: int  # those that neither need the collective nor are needed by it
    of: int  # the number of all


class Overlap:
    """What runs in a program, and concurrently with what."""

    def __init__(self, module: Module):
        self._module = module
        # By the name of a computation: what it contains, and its work. Both ask for those of the
        # computations that it calls, which several may call, so they are kept.
        self._contents: Callable[[str], _Contents] = functools.cache(self._contents_of_computation)
        self._total_work: Callable[[str], Work] = functools.cache(self._work_of_computation)
        instructions = (x for computation in module.computations for x in computation.instructions)
        collectives = filter(_is_collective, instructions)
        # How many instructions each collective is written as, by channel.
        self._chain_lengths = Counter(map(_channel, collectives))

    def scheduled(self, collective: Value) -> Scheduled:
        """Returns what the device does from the start of a collective to its end."""
        home = collective.computation
        # The instructions of a fusion are not scheduled: the fusion is, in the computation around.
        for outer, caller in self._module.around(home):
            if caller.opcode not in ("fusion", "async-start"):
                break
            home = outer.name
        schedule = self._module.by_name[home].instructions
        instruction = self._module.maker(collective)
        assert instruction is not None  # a collective that was found in the text
        # All instructions that the compiler writes the collective as, also in fusions.
        channel = _channel(instruction)
        chain = {x.name for x in schedule if channel in self._contents_of(x).channels}
        # The positions of the chain, and of what waits for it, in the schedule.
        steps = []
        for step, x in enumerate(schedule):
            is_end = x.opcode.endswith("-done") and not chain.isdisjoint(x.operand_names)
            if x.name in chain or is_end:
                steps.append(step)
        # What the device does meanwhile is in schedule[start:end].
        start, end = 0, 0  # of damaged text
        if steps:
            start = steps[0] + 1
            end = max(start, steps[-1])  # a single instruction is start and end: nothing is between
        between = [(x, self._work_of(x, home)) for x in schedule[start:end]]
        most_flops_first = sorted(between, key=lambda pair: -pair[1].flops)
        operations = dict.fromkeys(  # each name once
            x.operation for x, work in most_flops_first if work.flops and x.operation
        )
        return Scheduled(sum_of(work for _, work in between), tuple(operations)[:3])

    def _work_of_computation(self, name: str) -> Work:
        """Sums the work of one run of a computation, with all that it calls."""
        return sum_of(self._work_of(x, name) for x in self._module.by_name[name].instructions)

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
        times = self._module.trip_counts.get(instruction.name, 1)  # other than 1 for loops
        for callee in instruction.callees:
            # Others are applied to elements, which the instruction's own work has, or are branches
            # of conditionals that are not taken.
            if callee in self._executed:
                total = total.plus(self._total_work(callee), times)
        return total

    def products_beside(self, collective: Value) -> Independent | None:
        """Counts the matrix products of an iteration that are independent of a collective.

        Returns None if the collective is in no loop, or only moves what loops inside start with.
        """
        instruction = self._module.maker(collective)
        body = None if instruction is None else self._body_with_chain(_channel(instruction))
        if instruction is None or body is None:
            return None
        # All that follow are names of instructions in the body.
        channel = _channel(instruction)
        contents = {x.name: self._contents_of(x) for x in body.instructions}
        products = {name for name, inside in contents.items() if inside.products}
        chain = {name for name, inside in contents.items() if channel in inside.channels}
        operands = {x.name: x.operand_names for x in body.instructions}
        users: defaultdict[str, list[str]] = defaultdict(list)
        for name, used in operands.items():
            for operand in used:
                users[operand].append(name)
        # What each instruction of the chain needs, and what needs it.
        needs = [_all_reached(name, operands) for name in chain]
        needed_by = [_all_reached(name, users) for name in chain]
        # Each instruction of a chain uses the one before, so what the collective as a whole needs
        # is what the first one does, which needs no other one; likewise the last one.
        before = next(names for names in needs if not names & chain)
        after = next(names for names in needed_by if not names & chain)
        if _is_moved_into_loop(body, chain, products - chain, users):
            return None
        # If the chain is a single instruction with products, such as an inner loop, these are not
        # independent. In a longer chain, fusions of the collective and a product are made so that
        # both run at once.
        own = chain if len(chain) == 1 else set()
        return Independent(products=len(products - before - after - own), of=len(products))

    def _body_with_chain(self, channel: str) -> Computation | None:
        """Finds the innermost loop body that has all instructions of a collective.

        None if the collective is in no loop, or begins in one loop and ends in another.
        """
        num_instructions = self._chain_lengths[channel]  # that the collective is written as
        complete = []  # the loop bodies that have all of these, also in what they call
        for call in itertools.chain(*self._module.calls.values()):
            if call.attribute == "body":
                num_inside = self._contents(call.callee).channels[channel]
                if num_inside == num_instructions:
                    complete.append(call.callee)
        innermost = max(complete, key=self._depth, default=None)
        return None if innermost is None else self._module.by_name[innermost]

    def _depth(self, name: str) -> int:
        """Counts the calls that are around a computation."""
        return len([*self._module.around(name)])

    def _contents_of_computation(self, name: str) -> _Contents:
        """Counts what is in a computation, and in those that it calls."""
        computation = self._module.by_name.get(name)  # damaged text may lack it
        return _sum(map(self._contents_of, computation.instructions if computation else ()))

    def _contents_of(self, instruction: Instruction) -> _Contents:
        """Counts what an instruction is, and what is in the computations that it calls."""
        is_call = instruction.opcode == "custom-call" and _PRODUCT.search(instruction.rest)
        is_product = instruction.opcode in PRODUCTS or is_call
        own = _Contents(
            products=1 if is_product else 0,
            channels=Counter([_channel(instruction)] if _is_collective(instruction) else []),
        )
        return _sum([own, *map(self._contents, instruction.callees)])


def _sum(parts: Iterable[_Contents]) -> _Contents:
    """Adds up the contents of several instructions or computations."""
    products, channels = 0, Counter[str]()
    for part in parts:
        products += part.products
        channels.update(part.channels)  # adds the counts
    return _Contents(products, channels)


def _is_moved_into_loop(
    body: Computation, chain: Set[str], products: Set[str], users: Mapping[str, Iterable[str]]
) -> bool:
    """Tells whether a collective only moves what inner loops start with.

    An all-gather of a stack of kernels in front of a loop over layers is an example: the first
    products that use its result are in the loop, and the loop as a whole waits for it.

    Args:
      body: the loop body that has the collective.
      chain: the names of its instructions in the body.
      products: the names of instructions with products in the body; that of a loop, if there are
        some in its body.
      users: the names of the users of each instruction, by its name.
    """
    # The search from the chain on does not go past a product: its users are left out.
    edges = {name: used for name, used in users.items() if name not in products}
    next_products = set.union(*(_all_reached(x, edges) for x in chain)) & products
    loops = {x.name for x in body.instructions if x.opcode == "while"}
    return bool(next_products) and next_products <= loops


# What libraries for CPUs and GPUs call products: `custom_call_target="__cublas$gemm"`.
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
