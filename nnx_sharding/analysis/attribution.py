"""Which module of the user's model each instruction and each array of a program belongs to."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .buffers import Allocation, Buffer, Buffers
from .by_module import Kind, MemoryOverTime, ModuleRow, ModuleTable, Phase, ordered
from .collectives import Collective, Collectives
from .cost import COMPILED, Cost
from .hardware import Hardware
from .hlo import Module
from .instructions import Instruction, Shape, arrays
from .meshes import MeshDescription
from .names import around, common, module_of, operations
from .opcodes import COLLECTIVES, base
from .parameters import ParameterRow
from .purposes import inputs_of
from .roofline import roofline_of
from .values import Value
from .work import Work, executed_work


class Place(NamedTuple):
    """The module that an operation belongs to, and whether it is for the backward pass."""

    path: str  # empty outside of modules
    backward: bool


class Owner(NamedTuple):
    """What an array in memory counts as; the place is None if it is unknown."""

    place: Place | None
    kind: Kind


_OUTSIDE = Place("", False)
# Passed on or known before the program runs.
_UNTIMED = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
_MAX_STEPS = 128  # from an array to the instruction that makes its values
_MOVES = {"bitcast", "convert", "copy", "dynamic-slice", "reshape", "slice", "transpose"}
_MOVES.add("all-gather")


class Attribution:
    """Finds the modules, those of arguments or in ``paths``, of instructions and arrays."""

    def __init__(self, module: Module, rows: Iterable[ParameterRow], paths: Iterable[str]):
        self._module = module
        rows = [row for row in rows if row.used]
        self._homes = {one.name: c.name for c in module.computations for one in c.instructions}
        self._named: dict[str, Place] = {}
        self._places: dict[str, Place | None] = {}
        self.arguments = _arguments(rows)
        by_path = {row.path: number for number, row in enumerate(rows)}
        in_order = bool(inputs_of(module, rows))
        self._numbers = {
            number: number if in_order else by_path.get(one.operation or "")
            for number, one in module.parameters.items()
        }
        self._known = {*paths}.union(*(around(row.path) for row in rows))
        self._dims: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        for row, owner in zip(rows, self.arguments, strict=True):
            if owner.kind == "parameters" and owner.place:
                whole = {row.shape, row.shard_shape}
                # In a loop over layers the first dimension is gone.
                self._dims[owner.place.path] |= whole | {dims[1:] for dims in whole}

    def argument(self, number: int) -> Owner:
        """What the argument with this number counts as."""
        at = self._numbers.get(number)
        return Owner(None, "inputs") if at is None else self.arguments[at]

    def named(self, operation: str) -> Place:
        """The place in the name of an operation."""
        if operation not in self._named:
            names = operations(operation)
            found = [module_of(name, self._known) for name in names]
            paths = [path for path in found if path is not None]
            backward = all("transpose(" in name for name in names)
            self._named[operation] = Place(common(paths) if paths else "", backward)
        return self._named[operation]

    def place(self, one: Instruction) -> Place | None:
        """The place of an instruction by its name, or those of what it has fused."""
        if one.name not in self._places:
            operation = one.operation
            place = None if operation is None else self.named(operation)
            calls = one.calls if place is None and one.opcode in _PARTS else ()
            for _, callee in calls:
                inner = self._module.by_name.get(callee)
                found = (self.place(i) for i in reversed(inner.instructions if inner else []))
                place = place or next(filter(None, found), None)
            self._places[one.name] = place
        return self._places[one.name]

    def schedule(self, names: Iterable[str]) -> list[Place]:
        """The place of each instruction; where it is unknown, that of the one before."""
        places, place = list[Place](), _OUTSIDE
        for name in names:
            one = self._module.maker(Value(self._homes.get(name, ""), name))
            found = None if one is None or one.opcode in _UNTIMED else self.place(one)
            place = found or place
            places.append(place)
        return places

    def owner(
        self, value: Buffer, allocation: Allocation, backward: Sequence[int], end: int
    ) -> Owner:
        """What an array counts as; ``backward`` are positions among the ``end`` of the schedule."""
        is_result = allocation.is_result and value.last >= end - 1
        if is_result and allocation.parameter is not None:
            return self.argument(allocation.parameter)
        if value.name not in self._homes:
            return Owner(None, "temporaries")
        array = Value(self._homes[value.name], value.name, value.index)
        number = self._module.argument(self._maker(array, through_moves=True))
        if number is not None and number in self._numbers:
            return self.argument(number)
        array = self._maker(array)
        one = self._module.maker(array)
        assert one is not None
        place, dims = self.place(one), _dims(one, array.index)
        if place is None or not place.path:
            place = self._of_parameter(array, dims) or place
        if is_result or place is None:
            return Owner(place, "outputs" if is_result else "temporaries")
        if place.backward and dims in self._dims[place.path]:
            return Owner(place, "gradients")
        following = bisect.bisect_right(backward, value.first)
        is_kept = following < len(backward) and backward[following] <= value.last
        return Owner(place, "activations" if is_kept and not place.backward else "temporaries")

    def _maker(self, value: Value, *, through_moves: bool = False) -> Value:
        """The value that is copied, sliced or passed on, by unnamed operations or by all moves."""
        # What a loop carries is what its body computes; where that is what it gets, the initial.
        returned: set[Value] = set()
        for _ in range(_MAX_STEPS):
            before = self._before(value, through_moves)
            if len(before) > 1:
                before = [x for x in before if x not in returned]
                returned.update(before[-1:])
            if not before or self._module.maker(before[-1]) is None:
                break
            value = before[-1]
        return value

    def _before(self, value: Value, through_moves: bool) -> Sequence[Value]:
        """What an array is taken from unchanged."""
        one, operands = self._module.maker(value), self._module.operands(value)
        if one is None:
            return ()
        is_moved = through_moves or one.operation is None
        if one.opcode == "fusion":
            inner = self._module.fused(one)
            codes = {i.opcode for i in inner.instructions} if inner else set()
            root = self._module.roots.get(inner.name) if inner else None
            is_update = root is not None and root.opcode in ("tuple", "dynamic-update-slice")
            if not is_update and not (
                is_moved and codes <= _MOVES | {"parameter", "constant", "tuple"}
            ):
                return ()
        if one.opcode == "tuple" and not value.index:
            return ()
        if one.opcode == "dynamic-update-slice" and not through_moves:
            return operands[1:2]
        is_pair = one.opcode.endswith(("-start", "-done")) and one.opcode != "async-start"
        if is_pair or (base(one.opcode) in _MOVES and is_moved):
            is_sum = is_pair and base(one.opcode) in COLLECTIVES - {"all-gather"}
            return () if is_sum and not one.opcode.endswith("-done") else operands[:1]
        return self._module.passed(value)

    def _of_parameter(self, value: Value, dims: tuple[int, ...]) -> Place | None:
        """The place of a parameter of this shape, of which an optimizer's step is computed, say."""
        pending, seen, found = [value], {value.name}, None
        while pending and dims and len(seen) < _MAX_STEPS:
            value = pending.pop(0)
            one, number = self._module.maker(value), self._module.argument(value)
            place = self.argument(number).place if number is not None else one and self.place(one)
            if place is not None and place.path:
                if dims in self._dims[place.path]:
                    found = place
                    if place.backward:
                        break
                continue
            for operand in self._module.operands(value) if one and one.opcode != "while" else ():
                following = self._maker(operand)
                maker = self._module.maker(following)
                if maker and maker.name not in seen and _dims(maker, following.index) == dims:
                    seen.add(maker.name)
                    pending.append(following)
        return found


def _dims(one: Instruction, index: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of the array at an index of the result of an instruction."""
    shape = one.shape
    for i in index:
        if isinstance(shape, Shape) or i >= len(shape):
            return ()
        shape = shape[i]
    first = next(arrays(shape), None)
    return first.dims if first is not None and isinstance(shape, Shape) else ()


_KEY = re.compile(r"[^.\[\]'\"]+")


def _arguments(rows: Sequence[ParameterRow]) -> list[Owner]:
    """What each argument counts as; the state of an optimizer belongs where its path ends."""
    keys = [tuple(_KEY.findall(row.path)) for row in rows]
    ends: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    whole = set()
    for row, path in zip(rows, keys, strict=True):
        if row.variable == "Param":
            whole.add(path[1:])
            for start in range(len(path)):
                ends[path[start:]].add(_around(row.path))
    owners = []
    for row, path in zip(rows, keys, strict=True):
        tails = [path[start:] for start in range(1, len(path))]
        of_optimizer = (row.variable or "").startswith("Opt")
        if row.variable == "Param":
            owners.append(Owner(Place(_around(row.path), False), "parameters"))
        elif of_optimizer or (row.variable is None and any(tail in whole for tail in tails)):
            modules = next((ends[tail] for tail in tails if tail in ends), set[str]())
            module = next(iter(modules)) if len(modules) == 1 else _around(row.path)
            owners.append(Owner(Place(module, False), "optimizer state"))
        elif row.variable is None:
            owners.append(Owner(Place(row.path, False), "inputs"))
        else:
            owners.append(Owner(Place(_around(row.path), False), "other state"))
    return owners


def _around(path: str) -> str:
    """The module that has an array at this path; the path itself without one."""
    return [path, *around(path)][-1]


def module_table(
    module: Module,
    buffers: Buffers | None,
    rows: Sequence[ParameterRow],
    paths: Iterable[str],
    *,
    required: int | None = None,
    collectives: Collectives | None = None,
    hardware: Hardware | None = None,
    mesh: MeshDescription | None = None,
) -> ModuleTable:
    """Memory and cost by module; ``required`` is what has to be free, None for all buffers."""
    attribution = Attribution(module, rows, paths)
    work = None if module.unread else _work(module, attribution)
    sent: defaultdict[Place, list[Collective]] = defaultdict(list)
    for one in collectives or ():
        place = one.operation and attribution.named(one.operation)
        sent[place or _OUTSIDE].append(one)
    held, over_time = ({}, ()) if buffers is None else _held(attribution, buffers)
    table = []
    for place in {**(work or {}), **sent, **held}:
        own = None if work is None else work.get(place, Work())
        some = None if collectives is None else Collectives(sent.get(place, ()))
        cost = None if own is None else Cost(**own._asdict(), stage=COMPILED)
        roofline = None if hardware is None else roofline_of(cost, some, hardware, mesh)
        row = ModuleRow(
            *place,
            flops=own and own.flops,
            bytes_accessed=own and own.bytes_accessed,
            bytes_sent=None if some is None else some.bytes_sent,
            seconds=None if roofline is None else roofline.seconds,
            at_peak=None if buffers is None else dict(held.get(place, Counter()).most_common()),
        )
        if own or sent.get(place) or row.at_peak:
            table.append(row)
    if buffers is None:
        return ModuleTable(ordered(table), why="the compiler does not say what it assigns")
    if required is None:
        required = sum(one.size for one in buffers.allocations)  # with the gaps in them
    peak = max(buffers.in_use())
    rest = peak - sum(sum(kinds.values()) for kinds in held.values())
    reserved = max(required - peak, 0)
    return ModuleTable(ordered(table), peak, rest, reserved, MemoryOverTime(over_time))


def _work(module: Module, attribution: Attribution) -> dict[Place, Work]:
    """The work of each place, with the bodies of loops counted as often as they run."""
    done: defaultdict[Place, Work] = defaultdict(Work)
    for name, parts in executed_work(module).items():
        callers = (attribution.place(caller) for _, caller in module.around(name))
        outer = next(filter(None, callers), _OUTSIDE)
        for one, own in parts:
            place = attribution.place(one) or outer
            done[place] = done[place].plus(own, module.runs[name].least)
    return done


_PARTS = {"fusion", "call", "async-start"}


def _held(
    attribution: Attribution, buffers: Buffers
) -> tuple[dict[Place, Counter[Kind]], list[Phase]]:
    """What each place holds at the peak, by kind, and the memory over the schedule."""
    in_use, places = buffers.in_use(), attribution.schedule(buffers.schedule)
    peak = max(range(len(in_use)), key=in_use.__getitem__)
    backward = [at for at, place in enumerate(places) if place.backward]
    held: defaultdict[Place, Counter[Kind]] = defaultdict(Counter)
    for one in buffers.allocations:
        owned = []
        live = [value for value in one.values if value.first <= peak <= value.last]
        if one.parameter is not None:
            owned.append((attribution.argument(one.parameter), one.size))
        elif one.is_result and one.values:  # which is held for what is made last
            live.insert(0, max(one.values, key=lambda value: value.last))
        for value in live:
            owned.append((attribution.owner(value, one, backward, len(places)), value.size))
        rest = one.size
        for owner, size in reversed(owned):
            taken = min(size, rest)
            rest -= taken
            if owner.place is not None and taken:
                held[owner.place][owner.kind] += taken
    phases: list[Phase] = []
    for at, (place, size) in enumerate(zip(places, in_use, strict=True)):
        if phases and place == (phases[-1].path, phases[-1].backward):
            size, at = max(phases[-1].bytes, size), phases.pop().start
        phases.append(Phase(at, *place, size))
    return held, phases
