"""The order of the steps of a walk: those that run Python code come last.

A step opens one item of the *stream*, the list of all that is read, and appends what the item holds
(``recipe.py``). Some steps run Python code, such as the flatten function of a pytree, and such code
may do anything. A walk has to compare everything else before such code runs. So these steps, and
the steps that open what these have appended, are moved to the end. Each step takes the items that
it appends along, so positions in the stream change as well.

    opcode          what a step opens; the opcodes from ``Opcode.TREE`` on run Python code
    step            an opcode, the position of the item that the step opens, and the *start*, the
                    position of the first item that it appends; in arrays, one row for each step
    old, new        names of positions and steps as they were recorded, and in the order of a walk
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .recipe import Opcode, Step

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.integer[Any]]]


class WalkOrder(NamedTuple):
    """The steps in the order of a walk, and the stream that these steps make."""

    steps: IntArray  # (steps, fields of a Step), with new positions
    expected: list[Any]  # by step: what a walk must find, such as names
    new_position: IntArray  # by recorded position: the position of this item in ``stream``
    stream: list[Any]  # the items, by new position


def in_walk_order(
    stream: list[Any], step_fields: Sequence[int], expected: list[Any], num_arguments: int
) -> WalkOrder:
    """Moves the steps that run Python code, and the steps that depend on them, to the end.

    Args:
      stream: the items, in the order in which they were recorded.
      step_fields: the fields of all steps (``Step``), one step after the other.
      expected: for each step what a walk must find.
      num_arguments: the number of the first items of the stream, which no step appends.
    """
    size = len(stream)
    steps = np.array(step_fields, np.int32).reshape(-1, len(Step._fields))  # (steps, fields)
    opcodes, opened, starts = steps.T
    # Steps that run Python code are late. The enum has their opcodes last.
    is_late_step = opcodes >= Opcode.TREE
    if not is_late_step.any():
        return WalkOrder(steps, expected, np.arange(size), stream)  # nothing moves
    ends = np.append(starts[1:], size)  # each step appends up to where the next one starts
    is_late_item = np.zeros(size, bool)  # by position
    for i, (position, start, end) in enumerate(zip(opened, starts, ends, strict=True)):
        # A step that opens what a late step has appended is late as well.
        is_late_step[i] |= is_late_item[position]
        is_late_item[start:end] = is_late_step[i]
    # False sorts before True. Stable sorts keep the order among early ones and among late ones.
    old_position = np.argsort(is_late_item, kind="stable")  # by new position
    old_step = np.argsort(is_late_step, kind="stable")  # by new step
    new_position = np.argsort(old_position)  # the inverse permutation, by old position
    # By new step: the three fields of a `Step`.
    new_opcodes = opcodes[old_step]
    new_opened = new_position[opened[old_step]]
    counts = (ends - starts)[old_step]  # how many items each step appends
    # A step appends its items behind the arguments and the items of all earlier steps.
    new_starts = num_arguments + np.cumsum(counts) - counts
    return WalkOrder(
        steps=np.column_stack([new_opcodes, new_opened, new_starts]),
        expected=[expected[i] for i in old_step.tolist()],
        new_position=new_position,
        stream=[stream[i] for i in old_position.tolist()],
    )
