"""Checks: functions that return the error for one kind of mistake in the arguments of a call.

They run after JAX has refused the call (``failures.py``), and for compiled programs
(``compiled_mismatches.py``). A *plan* has what is known of the arguments: names, specs, transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..errors import listed_error
from .plan import Plan

# Takes a plan and the arrays of the call, and returns the error, or None if nothing is wrong.
Check: TypeAlias = Callable[..., Exception | None]


def as_check(
    anchor: str, head: str, remedy: str, error: type[Exception] = ValueError
) -> Callable[[Callable[..., Iterator[str]]], Check]:
    """Returns a decorator: makes a check of a function that yields a line for each wrong argument.

    The error says ``head``, then the lines, then ``remedy``. Without lines there is no error.

    Args:
      anchor: the section of docs/errors.md that the error refers to.
      head: the first line, with ``{name}`` for the transform and ``{fun_name}`` for the function.
      remedy: what to do, with ``{in_name}`` for the option with the specs of inputs.
      error: the type of the error.
    """

    def decorate(lines_of: Callable[..., Iterator[str]]) -> Check:
        def check(plan: Plan, *details: object) -> Exception | None:
            first = head.format(name=plan.transform.name, fun_name=plan.fun_name)
            last = remedy.format(in_name=plan.transform.in_name)
            return listed_error(error, first, [*lines_of(plan, *details)], last, anchor)

        return check

    return decorate
