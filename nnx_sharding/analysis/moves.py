"""Follows an array back to the value that computes it, past what only moves it or passes it on.

    %x = f32[4,8] dot(...)             the value that computes the array
    %t = (f32[4,8]) tuple(%x)          passes it on, as loops, calls and get-tuple-element do
    %y = f32[8,4] transpose(%x)        moves it, as copies, slices and gathers do

Moves that the compiler adds, which have no name of an operation, are always followed. Those that
the user wrote are followed ``past_user_moves`` only.

From other modules:

    Module   the HLO program. ``maker`` is the instruction that makes a value, ``operands`` are the
             values that this takes, ``passed`` those that a value is an unchanged copy of
    Value    an array: an instruction, and the index if that makes a tuple
"""

from __future__ import annotations

from collections.abc import Sequence

from .hlo import Module
from .instructions import Instruction
from .opcodes import COLLECTIVES, MOVING, base
from .values import Value

# Instructions whose results have the elements of their operands.
_MOVES = MOVING | {"all-gather"}
# Real programs need a few dozen steps; damaged text may have cycles.
_MAX_STEPS = 128


def computing_value(module: Module, value: Value, *, past_user_moves: bool = False) -> Value:
    """Returns the value that computes an array, or the argument that it is.

    Args:
      module: the program.
      value: the array.
      past_user_moves: whether to follow copies, slices and transposes that the user wrote, too.
    """
    # What a loop carries comes from two values: the initial one, and what its body returns. The
    # last is followed. Where the body only returns what it was given, that leads here again, and
    # then the initial one is.
    returned_by_bodies: set[Value] = set()
    for _ in range(_MAX_STEPS):
        before = _values_before(module, value, past_user_moves)
        if len(before) > 1:
            before = [previous for previous in before if previous not in returned_by_bodies]
            returned_by_bodies.update(before[-1:])
        if not before or module.maker(before[-1]) is None:  # damaged text may lack it
            break
        value = before[-1]
    return value


def _values_before(module: Module, value: Value, past_user_moves: bool) -> Sequence[Value]:
    """Lists the values whose elements an array has; nothing if its instruction computes them."""
    instruction = module.maker(value)
    operands = module.operands(value)
    if instruction is None:
        return ()
    opcode = instruction.opcode
    # A move with a name is part of what the user wrote: the array belongs to the move's module.
    is_move_followed = past_user_moves or instruction.operation is None
    if opcode == "fusion" and not _passes_arrays_on(module, instruction, is_move_followed):
        return ()
    if opcode == "tuple" and not value.index:
        return ()
    if opcode == "dynamic-update-slice" and not past_user_moves:
        return operands[1:2]  # what is written into the array, as a loop over layers does
    if opcode.endswith(("-start", "-done")) and opcode != "async-start":
        # The start of a collective that sums computes; its end passes on what the start made.
        is_sum = base(opcode) in COLLECTIVES - {"all-gather"}
        return () if is_sum and opcode.endswith("-start") else operands[:1]
    if base(opcode) in _MOVES and is_move_followed:
        return operands[:1]
    return module.passed(value)


def _passes_arrays_on(module: Module, fusion: Instruction, is_move_followed: bool) -> bool:
    """Tells whether to look for the computing value inside a fusion, as it may only move arrays.

    Also if it updates an array in place, or makes several, of which each may be a moved one.
    ``is_move_followed`` says whether moves are followed at all.
    """
    fused = module.fused(fusion)
    if fused is None:
        return is_move_followed
    root = module.roots.get(fused.name)
    if root is not None and root.opcode in ("tuple", "dynamic-update-slice"):
        return True
    opcodes = {instruction.opcode for instruction in fused.instructions}
    return is_move_followed and opcodes <= _MOVES | {"parameter", "constant", "tuple"}
