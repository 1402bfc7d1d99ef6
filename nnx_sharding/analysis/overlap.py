"""What a device computes while a collective is in progress, in two ways.

Compilers for accelerators split a collective into a start and an end, and schedule work between
them. `Overlap.scheduled` sums this work, from the order of the instructions. The compiler for CPUs
does not split collectives. For its programs, `Overlap.products_beside` counts the matrix products
in an iteration of a loop that neither need the collective nor are needed by it, because another
compiler may run these at the same time. A compiler may write one collective as several
instructions: in a loop for TPUs, for example, a start, products that carry it on, and an end. These
instructions are the *chain* of the collective; all of them have the number of its *channel*.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from .hlo import Module
from .instructions import Computation, Instruction
from .opcodes import PRODUCTS
from .values import Value, reached
from .work import Work, executed_work, sum_of


class _Contents(NamedTuple):
    """What a computation or an instruction consists of, with all that it calls."""

    products: int  # the number of matrix products
    channels: Counter[str]  # the number of instructions of each collective, by channel


class Scheduled(NamedTuple):
    """What the device does while one run of a collective is in progress."""

    work: Work = Work()  # the work meanwhile; zero if the device waits for the collective
    operations: tuple[str, ...] = ()  # the names of up to three operations with the most flops


class Independent(NamedTuple):
    """How many matrix products of an iteration can run while a collective runs."""

    products: int  # the number of products that neither need the collective nor are needed by it
    of: int  # the number of all products of the iteration


class Overlap:
    """What runs in a program, and concurrently with what.

    Attributes:
      _module: the program.
      _contents: the function that returns the `_Contents` of a computation, by its name.
      _total_work: the function that returns the work of one run of a computation, by its name.
      _chain_lengths: how many instructions the chain of each collective has, by its channel.
    """

    def __init__(self, module: Module):
        self._module = module
        # Both functions call themselves for the computations that a computation calls. Results are
        # cached because several computations may call the same one.
        self._contents: Callable[[str], _Contents] = functools.cache(self._contents_of_computation)
        self._total_work: Callable[[str], Work] = functools.cache(self._work_of_computation)
        instructions = (x for computation in module.computations for x in computation.instructions)
        collectives = filter(_is_collective, instructions)
        self._chain_lengths = Counter(map(_channel, collectives))

    def scheduled(self, collective: Value) -> Scheduled:
        """Returns what the device does from the start of a collective to its end.

        A collective that is a single step of the schedule has nothing in between, so the work is
        zero.
        """
        home = collective.computation
        # The schedule has fusions as a whole, and not the instructions inside, so the schedule is
        # that of the computation around the fusion.
        for caller_home, caller in self._module.around(home):
            if caller.opcode not in ("fusion", "async-start"):
                break
            home = caller_home.name
        schedule = self._module.by_name[home].instructions
        instruction = self._module.maker(collective)
        assert instruction is not None  # The collective was found in the text.
        steps = self._steps_of(_channel(instruction), schedule)
        # A single step has nothing between its start and its end. Only damaged text has no steps.
        between = schedule[steps[0] + 1 : steps[-1]] if steps else []
        work_between = [(x, self._work_of(x, home)) for x in between]
        most_flops_first = sorted(work_between, key=lambda pair: -pair[1].flops)
        operations = dict.fromkeys(  # unique names
            x.operation for x, work in most_flops_first if work.flops and x.operation
        )
        return Scheduled(sum_of(work for _, work in work_between), tuple(operations)[:3])

    def _steps_of(self, channel: str, schedule: Sequence[Instruction]) -> list[int]:
        """Lists the positions in a schedule of a collective, and of the ends that wait for it."""
        # Among the instructions are fusions that have instructions of the collective inside.
        chain = {x.name for x in schedule if channel in self._contents_of(x).channels}
        steps = []
        for step, x in enumerate(schedule):
            is_end = x.opcode.endswith("-done") and not chain.isdisjoint(x.operand_names)
            if x.name in chain or is_end:
                steps.append(step)
        return steps

    def _work_of_computation(self, name: str) -> Work:
        """Sums the work of one run of a computation, with all that it calls."""
        return sum_of(self._work_of(x, name) for x in self._module.by_name[name].instructions)

    @functools.cached_property
    def _executed(self) -> Mapping[str, Mapping[str, Work]]:
        """The work of each instruction in one run: name of its computation → its name → work."""
        executed = executed_work(self._module).items()
        return {name: {x.name: work for x, work in parts} for name, parts in executed}

    def _work_of(self, instruction: Instruction, computation: str) -> Work:
        """Sums the work of an instruction and of what it calls; a collective has none.

        ``computation`` is the name of the computation that the instruction is in.
        """
        if _is_collective(instruction):
            return Work()
        total = self._executed.get(computation, {}).get(instruction.name, Work())
        times = self._module.trip_counts.get(instruction.name, 1)  # 1 unless it is a loop
        for callee in instruction.callees:
            # Callees that are missing in ``_executed`` add nothing: the instruction's own work has
            # the work of a callee that is applied to elements, and other missing callees are
            # branches of conditionals that are not taken.
            if callee in self._executed:
                total = total.plus(self._total_work(callee), times)
        return total

    def products_beside(self, collective: Value) -> Independent | None:
        """Counts the matrix products of an iteration that are independent of a collective.

        Returns None if the collective is in no loop, or if it only moves initial values of inner
        loops.
        """
        instruction = self._module.maker(collective)
        if instruction is None:  # Only damaged text lacks the instruction.
            return None
        channel = _channel(instruction)
        body = self._body_with_chain(channel)
        if body is None:
            return None
        # All sets and mappings below have names of instructions in the body.
        contents = {x.name: self._contents_of(x) for x in body.instructions}
        products = {name for name, content in contents.items() if content.products}
        # The chain has at least one instruction, because `_body_with_chain` has found it here.
        chain = {name for name, content in contents.items() if channel in content.channels}
        operands = {x.name: x.operand_names for x in body.instructions}
        users = _users(operands)
        # For each instruction of the chain: the instructions that it needs, and those that need it.
        needs = [_all_reached(name, operands) for name in chain]
        needed_by = [_all_reached(name, users) for name in chain]
        # Each instruction of a chain uses the one before. Only the first one needs no other
        # instruction of the chain, and the whole collective needs what the first one needs.
        # Likewise, no other instruction of the chain needs the last one.
        needed_by_first = next(names for names in needs if not names & chain)
        need_last = next(names for names in needed_by if not names & chain)
        if _is_moved_into_loop(body, chain, products - chain, users):
            return None
        # If the chain is a single instruction with products, such as an inner loop, its products
        # are not independent. In a longer chain, the compiler fuses the collective with products so
        # that both run at once, so these products are independent.
        dependent_products = chain if len(chain) == 1 else set()
        independent = products - needed_by_first - need_last - dependent_products
        return Independent(products=len(independent), of=len(products))

    def _body_with_chain(self, channel: str) -> Computation | None:
        """Finds the innermost loop body that has all instructions of a collective.

        Returns None if the collective is in no loop, or begins in one loop and ends in another.
        """
        num_instructions = self._chain_lengths[channel]  # the length of the chain
        complete = []  # the loop bodies that have the whole chain, themselves or in their callees
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
        computation = self._module.by_name.get(name)  # None if damaged text lacks it
        return _sum(map(self._contents_of, computation.instructions if computation else ()))

    def _contents_of(self, instruction: Instruction) -> _Contents:
        """Counts an instruction itself, and what is in the computations that it calls."""
        is_product = instruction.opcode in PRODUCTS
        if instruction.opcode == "custom-call":
            is_product = _PRODUCT.search(instruction.rest) is not None
        channels = [_channel(instruction)] if _is_collective(instruction) else []
        own = _Contents(products=int(is_product), channels=Counter(channels))
        return _sum([own, *map(self._contents, instruction.callees)])


def _sum(parts: Iterable[_Contents]) -> _Contents:
    """Adds up the contents of several instructions or computations."""
    products, channels = 0, Counter[str]()
    for part in parts:
        products += part.products
        channels.update(part.channels)  # `Counter.update` adds the counts.
    return _Contents(products, channels)


def _users(operands: Mapping[str, Iterable[str]]) -> Mapping[str, list[str]]:
    """Returns the names of the users of each instruction, from the operands of each."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    for name, names_of_operands in operands.items():
        for operand in names_of_operands:
            users[operand].append(name)
    return users


def _is_moved_into_loop(
    body: Computation, chain: Set[str], products: Set[str], users: Mapping[str, Iterable[str]]
) -> bool:
    """Tells whether a collective only moves initial values of inner loops.

    An all-gather of a stack of kernels in front of a loop over layers is an example: the first
    products that use its result are in the loop, and the loop as a whole waits for it.

    Args:
      chain: the names of its instructions in the body.
      products: the names of instructions with products in the body. An inner loop is one of them
        if its own body has products.
      users: the names of the users of each instruction, by its name.
    """
    # The search from the chain on does not go past products, so their users are left out.
    edges = {name: used for name, used in users.items() if name not in products}
    next_products = set.union(*(_all_reached(x, edges) for x in chain)) & products
    loops = {x.name for x in body.instructions if x.opcode == "while"}
    return bool(next_products) and next_products <= loops


# The names of products in libraries for CPUs and GPUs: `custom_call_target="__cublas$gemm"`.
_PRODUCT = re.compile(r'custom_call_target="[^"]*(matmul|gemm|conv)', re.IGNORECASE)


def _is_collective(instruction: Instruction) -> bool:
    """Tells whether an instruction is a collective, or the start of one."""
    return instruction.collective is not None


def _channel(instruction: Instruction) -> str:
    """Returns what all instructions of one collective have in common: its channel, or its name."""
    return instruction.attributes.get("channel_id", instruction.name)


def _all_reached(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Collects the names that can be reached along edges, without the start."""
    return {*reached(start, lambda name: edges.get(name, ()))} - {start}
