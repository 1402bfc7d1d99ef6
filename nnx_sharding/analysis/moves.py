"""Follows an array back to the value that computes it, past moves and past copies without change.

    %x = f32[4,8] dot(...)             the value that computes the array
    %t = (f32[4,8]) tuple(%x)          passes it on, as loops, calls and get-tuple-element do
    %y = f32[8,4] transpose(%x)        moves it, as copies, slices and gathers do

A move that the compiler adds has no name of an operation, and is always followed. A move that the
user wrote is followed only with ``past_user_moves``.
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
    followed: set[Value] = set()  # the results of loop bodies that the way went through
    for _ in range(_MAX_STEPS):
        sources = _sources(module, value, past_user_moves)
        if len(sources) > 1:
            # A value that a loop carries has two sources: the initial value, and the result of the
            # body, which is followed first. If the body returns the value unchanged, the way leads
            # back to this loop. The second time, only the initial value is left.
            sources = [source for source in sources if source not in followed]
            followed.update(sources[-1:])
        if not sources or module.maker(sources[-1]) is None:  # Damaged text may lack the maker.
            break
        value = sources[-1]
    return value


def _sources(module: Module, value: Value, past_user_moves: bool) -> Sequence[Value]:
    """Lists the values that an array is moved or passed on from; empty if it is computed here.

    A value that a loop carries has two: the initial value, then the result of the body.
    ``past_user_moves`` says whether moves that the user wrote are followed, too.
    """
    instruction = module.maker(value)
    operands = module.operands(value)
    if instruction is None:
        return ()
    opcode = instruction.opcode
    # The user wrote a move with a name, so its result belongs to the module of the move.
    is_move_followed = past_user_moves or instruction.operation is None
    if opcode == "fusion" and not _may_pass_on(module, instruction, is_move_followed):
        return ()
    if opcode == "tuple" and not value.index:  # A whole tuple has no single source.
        return ()
    if opcode == "dynamic-update-slice" and not past_user_moves:
        # The written part is followed, because a loop over layers stacks its results in this way.
        return operands[1:2]
    if opcode == "async-start":
        return module.passed(value)
    if opcode.endswith("-done"):
        return operands[:1]
    if opcode.endswith("-start"):
        # A collective makes new values, but an all-gather only moves them. The start of a copy or a
        # slice moves them, too.
        is_computed = base(opcode) in COLLECTIVES - {"all-gather"}
        return () if is_computed else operands[:1]
    if base(opcode) in _MOVES and is_move_followed:
        return operands[:1]
    # `passed` goes through tuples, calls, fusions and loops, and is empty for other instructions.
    return module.passed(value)


def _may_pass_on(module: Module, fusion: Instruction, is_move_followed: bool) -> bool:
    """Tells whether the array that a fusion makes may be computed outside of the fusion.

    ``is_move_followed`` says whether moves are followed at all.
    """
    fused = module.fused(fusion)
    if fused is None:  # In damaged text, a fusion without a computation counts as a move.
        return is_move_followed
    # If the fusion makes several arrays, one of them may be moved, and an update in place passes on
    # the written part. `_sources` decides this for the root.
    root = module.roots.get(fused.name)
    if root is not None and root.opcode in ("tuple", "dynamic-update-slice"):
        return True
    moving = _MOVES | {"parameter", "constant", "tuple"}
    return is_move_followed and all(x.opcode in moving for x in fused.instructions)
