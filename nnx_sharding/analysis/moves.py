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
    followed: set[Value] = set()  # what bodies of loops return, as far as the way went through it
    for _ in range(_MAX_STEPS):
        sources = _sources(module, value, past_user_moves)
        if len(sources) > 1:
            # What a loop carries has the initial value as its first source, and what the body
            # returns as its last, which is followed. Where the body returns what it was given, that
            # leads back to this loop; the second time, only the initial value is left.
            sources = [source for source in sources if source not in followed]
            followed.update(sources[-1:])
        if not sources or module.maker(sources[-1]) is None:  # damaged text may lack it
            break
        value = sources[-1]
    return value


def _sources(module: Module, value: Value, past_user_moves: bool) -> Sequence[Value]:
    """Lists the values that an array is moved or passed on from; empty if it is computed here.

    There are several for what a loop carries: the initial value, then what its body returns.
    ``past_user_moves`` says whether moves that the user wrote are followed, too.
    """
    instruction = module.maker(value)
    operands = module.operands(value)
    if instruction is None:
        return ()
    opcode = instruction.opcode
    # A move with a name is part of what the user wrote: the array belongs to the move's module.
    is_move_followed = past_user_moves or instruction.operation is None
    if opcode == "fusion" and not _may_pass_on(module, instruction, is_move_followed):
        return ()
    if opcode == "tuple" and not value.index:  # a whole tuple has no single source
        return ()
    if opcode == "dynamic-update-slice" and not past_user_moves:
        return operands[1:2]  # what is written: a loop over layers stacks its results so
    if opcode == "async-start":
        return module.passed(value)
    if opcode.endswith("-done"):
        return operands[:1]
    if opcode.endswith("-start"):
        # A collective makes new values, except for an all-gather, which only moves them; the start
        # of a copy or a slice moves them, too.
        is_computed = base(opcode) in COLLECTIVES - {"all-gather"}
        return () if is_computed else operands[:1]
    if base(opcode) in _MOVES and is_move_followed:
        return operands[:1]
    return module.passed(value)  # through tuples, calls, fusions and loops; else nothing


def _may_pass_on(module: Module, fusion: Instruction, is_move_followed: bool) -> bool:
    """Tells whether the array that a fusion makes may be computed outside of it.

    ``is_move_followed`` says whether moves are followed at all.
    """
    fused = module.fused(fusion)
    if fused is None:  # damaged text: it is taken for a move
        return is_move_followed
    # One array of several may be a moved one, and an update in place passes on what is written:
    # `_sources` of the root decides.
    root = module.roots.get(fused.name)
    if root is not None and root.opcode in ("tuple", "dynamic-update-slice"):
        return True
    moving = _MOVES | {"parameter", "constant", "tuple"}
    return is_move_followed and all(x.opcode in moving for x in fused.instructions)
