"""What can be wrong with a call, as data, and the hooks by which diagnostics hear of it.

The core does not import diagnostics. It collects all offenders of one kind and hands them, as tuples,
to the installed :class:`Diagnostics`, which make the exception or the warning of them
(``diagnostics/messages.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NoReturn


class Problem(enum.Enum):
    """A kind of problem. The value names the fields of each offender."""

    # Arguments and options
    ARGUMENT_IS_NOT_ARRAY = "path, value"
    RESULT_IS_NOT_ARRAY = "path, value"
    STATIC_NOT_HASHABLE = "argument, value, error"
    STATIC_HOLDS_ARRAYS = "argument, value"
    POSITION_OUT_OF_RANGE = "option, positions, number of arguments"
    INVALID_OPTION = "option, value, choices"
    # Specs
    NOT_A_SPEC = "place, value, suggestion"
    NOT_A_PREFIX = "place, mismatch"
    WRONG_NUMBER_OF_SPECS = "parameters, static ones, those without a spec, number of specs"
    UNKNOWN_PARAMETER = "name, parameters"
    NO_FILTER_MATCHES = "path, object, filters"
    CONFLICTING_SPECS = "path, spec, other path, other spec"
    SPEC_DOES_NOT_FIT_MESH = "spec, paths, faults"
    SPEC_DOES_NOT_FIT_SHAPE = "path, shape, shape before, spec, faults"
    SPEC_CORRECTED = "path, shape, shape before, spec, faults, corrected spec"
    FILTER_UNUSED = "filter, arguments, suggestion"
    NO_MESH = ""
    NO_DEVICES = "mesh"
    # Placing
    CANNOT_PLACE = "path, reason"
    COMMITTED_ELSEWHERE = "path, shape, sharding, declared sharding"
    # What a traced function did
    CAPTURED_ARRAY = "name, array"
    TRACER_IN_STATIC = "path, object"
    CAPTURED_OBJECT = "path, object"
    CLASS_CHANGED = "path, object"
    STATIC_CHANGED = "path, object"
    OUTPUT_IS_INPUT = "path, path of the input (None: captured)"
    DONATION_UNUSED = "path, array"
    FOREIGN_TRACE = "path"


class Diagnostics:
    """What is asked when something is wrong; by default nothing is explained."""

    def error(
        self, problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any
    ) -> Exception:
        """The exception for a problem."""
        return ValueError(problem.name, *offenders, details)

    def warn(self, problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any) -> None:
        """Warns of a problem; with ``strict`` among the details it is an error."""

    def failed(self, plan: Any, leaves: Sequence[Any], error: Exception) -> None:
        """Raises what explains an error of JAX better than itself, or adds a note to it."""


_installed = Diagnostics()


def install(diagnostics: Diagnostics) -> None:
    """Makes these the diagnostics of all transforms."""
    global _installed
    _installed = diagnostics


def refuse(problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any) -> NoReturn:
    """Raises the error for a problem."""
    raise _installed.error(problem, offenders, **details)


def warn(problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any) -> None:
    """Warns of a problem."""
    _installed.warn(problem, offenders, **details)


def failed(plan: Any, leaves: Sequence[Any], error: Exception) -> None:
    """Lets diagnostics explain an error of JAX; returns if they do not."""
    _installed.failed(plan, leaves, error)
