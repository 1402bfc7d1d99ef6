"""Why an array is sharded as it is, and why a collective is in a program.

An **argument** has the spec of the first rule that matches it, as far as its shape allows: so the
reason is that rule, what earlier or later ones say, and which mesh axes divide which dimensions.

A **collective** is where two shardings meet: how a value is made, and how it is used. Both are
found in the compiled program, past what only moves the value: from the operands back to the
instruction that computes it, from the result on to the first that computes with it.

    sine (model.up)  f32[4,16,8]  →  all-gather, all-gather  →  f32[16,16,16]  multiply (model)
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ..core.plan import Plan
from ..core.resolve import NamedLocation, locate
from ..specs.filters import Paths, to_predicate
from ..specs.fitting import OnIndivisible, describe, fit_sharding
from ..specs.paths import accessor
from ..specs.state_sharding import StateSharding
from .collectives import Collective, axes_text, file_title, users_frame
from .hlo import Module
from .instructions import Instruction
from .line_attribution import spec_of_shard
from .names import module_of, operations
from .parameters import ParameterRow, axes_in, shape_text, spec_text
from .purposes import Purpose
from .tables import Pictured, text
from .units import bytes_text
from .values import Value


@dataclasses.dataclass(frozen=True)
class Reason(Pictured):
    """Why something is as it is: what ``Compiled.why`` returns. ``print`` shows it.

    Attributes:
      subject: what it is about, and how it is sharded or what it sends.
      facts: why, one sentence each.
      instead: what to write for another result; empty if nothing is known.
    """

    subject: str
    facts: tuple[str, ...]
    instead: str = ""

    def _pictures(self, width: int) -> Iterable[Any]:
        yield text(self.subject, "bold")
        yield from (text(f"  {fact}") for fact in self.facts)
        if self.instead:
            yield text(f"  instead: {self.instead}")


def argument_reason(
    plan: Plan, row: ParameterRow, objects: Sequence[Any], leaves: Sequence[Any]
) -> Reason:
    """Says why an argument is sharded as it is.

    Args:
      plan: how the function was called.
      row: the argument in the program.
      objects: the objects of the call, with abstract arrays.
      leaves: its arrays, abstract.
    """
    slot, mesh = plan.names.index(row.path), plan.transform.context
    places = locate(plan.structure, plan.arguments)
    [place, *others] = [place for place in places if slot in place.location.slots]
    declared, facts = _declared(plan, place, place.subject(objects, leaves))
    if others:
        names = ", ".join(other.name for other in others)
        facts.append(f"It is the same Variable as {names}, so all of them have one sharding.")
    default: OnIndivisible = getattr(plan.transform, "on_indivisible", "error")
    action = plan.on_indivisible.get(slot, default)
    shown: OnIndivisible = "drop" if action == "error" else action
    fit = fit_sharding(declared, mesh, row.shape, on_indivisible=shown)
    if fit.reasons:
        facts.append(f"Of {_spec(declared)}, not all fits: {fit.reasons}.")
    sizes = {str(axis): size for axis, size in getattr(mesh, "shape", {}).items() if size > 1}
    free = {axis: size for axis, size in sizes.items() if axis not in axes_in(row.spec)}
    facts += _dividing(row, free)
    if axes_in(row.spec):
        whole, part = shape_text(row.shape), shape_text(row.shard_shape)
        subject = f"{row.path}: {spec_text(row.spec)}, {part} of {whole} on each device"
    else:
        size = bytes_text(row.bytes_per_device)
        subject = f"{row.path}: replicated, {size} on each device"
    return Reason(subject, tuple(facts), _override(place, row, free))


def _declared(plan: Plan, place: NamedLocation, subject: Any) -> tuple[Any, list[str]]:
    """Returns the spec that the user or a strategy declared, and the sentences that say so."""
    rules, option = place.part.spec, plan.transform.in_name
    name = accessor(place.argument.name, place.part.keys)
    if rules is None:
        return None, [
            f"{option} has nothing for {name}: it keeps the sharding of the array that was "
            "passed, or else the compiler chooses."
        ]
    if not isinstance(rules, StateSharding):
        return rules, [f"{option} has {_spec(rules)} for {name}."]
    path, index, declared = rules.find_below(place.part.below, place.paths[0], subject)
    if index is None:
        return None, [f"No rule of {option} for {name} matches."]
    facts = [f"{_rule(rules, index)} decides: {_spec(declared)}."]
    if note := getattr(rules.filters[index], "note", ""):
        facts = [f"The strategy leaves it replicated: {note}."]
    later = [
        number
        for number in range(index + 1, len(rules.filters))
        if to_predicate(rules.filters[number])(path, subject)
    ]
    # A rule for the rest says nothing about this array.
    named = [number for number in later if rules.filters[number] not in (..., True)]
    facts += [
        f"{_rule(rules, number)} says {_spec(rules.shardings[number])}, and is overridden."
        for number in named[:3]
    ]
    return declared, facts


def _spec(declared: Any) -> str:
    spec = getattr(declared, "spec", declared)
    return spec_text(spec) if isinstance(spec, PartitionSpec) else describe(declared)


def _rule(rules: StateSharding, index: int) -> str:
    if isinstance(rules.filters[index], Paths):
        return "The strategy, which lists this path,"
    return f"Rule {index}, {rules.names[index]},"


def _dividing(row: ParameterRow, free: Mapping[str, int]) -> Iterator[str]:
    """Says which dimensions the axes that do not shard an array divide."""
    for axis, size in free.items():
        dimensions = [str(d) for d, n in enumerate(row.shape) if n % size == 0 and n > 0]
        if not dimensions:
            shape = shape_text(row.shape)
            yield f"{axis!r} ({size}) divides no dimension of {shape}, so it cannot shard it."
        elif not axes_in(row.spec):
            number = "dimension" if len(dimensions) == 1 else "each of the dimensions"
            yield f"{axis!r} ({size}) would divide {number} {', '.join(dimensions)}."


def _override(place: NamedLocation, row: ParameterRow, free: Mapping[str, int]) -> str:
    """Writes a call that shards a replicated array, or replicates a sharded one."""
    if not isinstance(place.part.spec, StateSharding):
        return ""
    spec = "P()"
    if not axes_in(row.spec):
        sizes = sorted(((n, d) for d, n in enumerate(row.shape)), reverse=True)
        fitting = [(axis, d) for axis, size in free.items() for n, d in sizes if n % size == 0]
        if not fitting:
            return ""
        axis, dimension = fitting[0]
        spec = f"P({', '.join([*['None'] * dimension, repr(axis)])})"
    names = [re.escape(str(key)) for key in place.paths[0]]
    pattern = "/".join(r"\d+" if name.isdecimal() else name for name in names)
    return f'nnx_sharding.partition.override(sharding, {{r"{pattern}$": {spec}}})'


class _Side(NamedTuple):
    """Where the value that a collective moves is computed, or used."""

    operation: str  # such as dot_general, or the path of an argument
    module: str | None
    line: str | None
    shape: tuple[int, ...]  # on one device


def collective_reason(
    collective: Collective,
    module: Module,
    modules: Collection[str],
    sizes: Mapping[str, int],
    global_shapes: Mapping[tuple[str, str], set[tuple[int, ...]]],
    why_argument: Callable[[str], Reason],
) -> Reason:
    """Says why a collective is there.

    Args:
      collective: one of the program.
      module: the program.
      modules: the paths of the modules that it calls.
      sizes: those of the mesh axes.
      global_shapes: the shapes that the trace has, by line (``model.py:12``) and operation.
      why_argument: says why an argument is sharded as it is.
    """
    purpose, paths = collective.purpose, collective.parameters
    sent = bytes_text(collective.bytes_sent)
    axes = axes_text(collective.axes)
    use = f"{collective.name}, for {purpose or 'an unknown purpose'}"
    subject = f"{collective.kind} over {axes}, sends {sent} ({use})"
    value = Value(collective.computation, collective.name)
    made, used = _maker(module, value, modules), _user(module, value, modules)
    facts = []
    if purpose in ("parameter", "state") and paths:
        reasons = [why_argument(path) for path in paths[:2]]
        facts += [f"It gathers {reason.subject}." for reason in reasons]
        facts += reasons[0].facts[:1]
        made = None
    elif purpose == "gradient" and paths:
        made = used = None  # one that sums several gradients has many makers
        more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
        names = f"{', '.join(paths[:2])}{more}"
        facts.append(f"It adds up the parts of the gradient of {names}: each device computes that")
        facts[-1] += f" of its part of the batch, which is sharded over {axes}."
    elif purpose == "sum" and made is not None:
        facts.append(f"Each device has a part of the sum that {_place(made)} computes, because a")
        facts[-1] += f" dimension over which that sums is sharded over {axes}."
        made = None
    # The value is the same on both sides, so its shape in the trace is known by either line.
    sides = [side for side in (made, used) if side is not None]
    shapes = {x for side in sides for x in global_shapes.get((side.line or "", side.operation), ())}
    for verb, side in (("Made", made), ("Used", used)):
        if side is not None:
            facts.append(f"{verb}{_sharded(side, shapes, sizes)} by {_place(side)}.")
    if used is None and purpose != "gradient":
        facts.append(
            "The function returns it, with the sharding of out_shardings or of a Variable."
        )
    return Reason(subject, tuple(facts), _instead(collective, made, used))


def _place(side: _Side) -> str:
    where = f" in {side.module}" if side.module else ""
    return f"{side.operation}{where}" + (f" ({side.line})" if side.line else "")


def _sharded(side: _Side, shapes: set[tuple[int, ...]], sizes: Mapping[str, int]) -> str:
    """Writes how a value is sharded on one side of what moves it."""
    specs = {
        spec_of_shard(shape, side.shape, sizes, any_order=True)
        for shape in shapes
        if len(shape) == len(side.shape)
    }
    known = [spec for spec in specs if spec is not None]
    spec = known[0] if len(known) == 1 else None
    as_spec = "" if spec is None else f" as {spec_text(spec)}"
    return f"{as_spec}, {shape_text(side.shape)} on each device,"


# These pass on the elements of their first operand, or some of them.
_MOVING = {"copy", "bitcast", "convert", "reshape", "transpose", "dynamic-slice", "slice"}
_STEPS = 200


def _maker(module: Module, value: Value, modules: Collection[str]) -> _Side | None:
    """Follows a value back to the instruction that computes it, or to an argument."""
    shape: tuple[int, ...] | None = None
    for _ in range(_STEPS):
        instruction = module.maker(value)
        if instruction is None:
            return None
        dims = _dims(instruction, value)
        # XLA computes products in two dimensions, which the value then has not yet.
        shape = dims if shape is None or len(shape) == len(dims) else shape
        before = module.passed(value)
        if not before and (_moves(instruction) or instruction.opcode == "tuple"):
            before = module.operands(value)
        if not before:
            return _side(module, instruction, shape, modules)
        value = before[0]
    return None


def _user(module: Module, value: Value, modules: Collection[str]) -> _Side | None:
    """Follows a value to the first instruction that computes with it, also into fusions."""
    users: defaultdict[tuple[str, str], list[tuple[Instruction, int]]] = defaultdict(list)
    for computation in module.computations:
        for instruction in computation.instructions:
            for number, name in enumerate(instruction.operand_names):
                users[computation.name, name].append((instruction, number))
    pending, seen = [value], {value}
    while pending and len(seen) < _STEPS:
        value = pending.pop()
        source = module.maker(value)
        for instruction, number in users[value.computation, value.name]:
            new = Value(value.computation, instruction.name)
            if instruction.opcode in ("fusion", "call"):
                inside = [x for name in instruction.callees for x in module.within[name].values()]
                name = next((x.name for x in inside if x.number == number), "")
                new = Value(instruction.callees[0], name)
            elif not _moves(instruction) and instruction.opcode != "get-tuple-element":
                if instruction.opcode in ("tuple", "while") or source is None:
                    continue  # carried on, or returned
                return _side(module, instruction, _dims(source, value), modules)
            if new not in seen:
                seen.add(new)
                pending.append(new)
        root = module.roots.get(value.computation)
        if root is not None and root.name == value.name:  # of a fusion: on to who uses that
            pairs = ((home, op) for home, op in module.callers.get(value.computation, ()))
            callers = [Value(c.name, op.name) for c, op in pairs if op.opcode in ("fusion", "call")]
            pending += [caller for caller in callers if caller not in seen]
            seen.update(callers)
    return None


def _moves(instruction: Instruction) -> bool:
    """Tells whether an instruction only moves the elements of its first operand."""
    is_transfer = instruction.opcode.endswith(("-start", "-done"))
    is_sum = instruction.collective in ("all-reduce", "reduce-scatter")
    return (
        instruction.opcode in _MOVING or is_transfer or bool(instruction.collective and not is_sum)
    )


def _dims(instruction: Instruction, value: Value) -> tuple[int, ...]:
    results = instruction.results
    number = value.index[0] if value.index and value.index[0] < len(results) else 0
    return results[number].dims if results else ()


def _side(
    module: Module, instruction: Instruction, shape: tuple[int, ...], modules: Collection[str]
) -> _Side:
    name = next(iter(operations(instruction.operation or "")), "")
    frame = users_frame(module.source(instruction))
    line = None if frame is None else f"{file_title(frame[0])}:{frame[1]}"
    operation = name.rpartition("/")[2] or instruction.opcode
    return _Side(operation, module_of(name, modules), line, shape)


# What to write so that a collective is not needed, by its purpose.
_INSTEAD: dict[Purpose | None, str] = {
    "parameter": "nothing, if parameters are to be sharded over the axis of the batch (FSDP); to "
    "keep them whole or to compute with parts, use replicated or tensor_parallel",
    "state": "shard it as its module uses it, or write it inside of shard_map",
    "gradient": "nothing, if the batch is sharded over this axis; accumulate_gradients sends once "
    "for several microbatches",
    "sum": "shard the kernel over its columns instead of its rows, or leave this axis out: a "
    "product over a sharded dimension is a sum over devices",
    "result": "give out_shardings the spec with which it is computed",
}


def _instead(collective: Collective, made: _Side | None, used: _Side | None) -> str:
    """Says what to write to avoid a collective."""
    if collective.purpose in _INSTEAD:
        return _INSTEAD[collective.purpose]
    module = None if made is None else made.module
    if module is None or "." not in module:
        return "with_sharding_constraint where it is made, with the spec with which it is used"
    path = module.partition(".")[2]
    pattern = re.sub(r"\[\d+\]", r"/\\d+", path).replace(".", "/")
    return (
        f'jit(activation_shardings={{r"{pattern}": …}}), with the spec with which it is used, or '
        "with_sharding_constraint there"
    )
