"""What can be wrong with a call, as data, and the hooks by which diagnostics learn of it.

The core does not import diagnostics. It collects all offenders of one kind and passes them, as
tuples, to the installed :class:`Diagnostics`, which make an exception or a warning from them
(``diagnostics/messages.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NoReturn


class Problem(enum.Enum):
    """A kind of problem; the comments list the fields of an offender."""

    # Arguments and options
    ARGUMENT_IS_NOT_ARRAY = enum.auto()  # path, value
    RESULT_IS_NOT_ARRAY = enum.auto()  # path, value
    STATIC_NOT_HASHABLE = enum.auto()  # argument, value, error
    STATIC_HOLDS_ARRAYS = enum.auto()  # argument, value
    POSITION_OUT_OF_RANGE = enum.auto()  # option, positions, number of arguments
    INVALID_OPTION = enum.auto()  # option, value, choices
    # Specs
    NOT_A_SPEC = enum.auto()  # place, value, suggestion
    NOT_A_PREFIX = enum.auto()  # place, mismatch
    WRONG_NUMBER_OF_SPECS = enum.auto()  # parameters, static ones, missing ones, number
    UNKNOWN_PARAMETER = enum.auto()  # name, parameters
    NO_FILTER_MATCHES = enum.auto()  # path, object, rules
    CONFLICTING_SPECS = enum.auto()  # path, spec, other path, other spec
    UNKNOWN_SPEC = enum.auto()  # path, spec
    SPEC_DOES_NOT_FIT_MESH = enum.auto()  # spec, paths, faults
    SPEC_DOES_NOT_FIT_SHAPE = enum.auto()  # path, fit, shape before
    SPEC_CORRECTED = enum.auto()  # path, fit, shape before
    FILTER_UNUSED = enum.auto()  # filter, arguments, suggestion
    CANNOT_BE_TYPED = enum.auto()  # path, key, module, error, types, entry
    ACTIVATION_UNUSED = enum.auto()  # filter, method
    ACTIVATION_DOES_NOT_FIT = enum.auto()  # line
    NO_MESH = enum.auto()
    NO_DEVICES = enum.auto()  # mesh
    # Placing
    CANNOT_PLACE = enum.auto()  # path, reason
    COMMITTED_ELSEWHERE = enum.auto()  # path, shape, sharding, declared sharding
    # What a traced function did
    CAPTURED_ARRAY = enum.auto()  # name, array
    WRONG_GRADIENT = enum.auto()  # path, operation, axes, remedy
    TRACER_IN_STATIC = enum.auto()  # path, object
    CAPTURED_OBJECT = enum.auto()  # path, object
    CLASS_CHANGED = enum.auto()  # path, object
    STATIC_CHANGED = enum.auto()  # path, object
    UNDECLARED_ARGUMENT = enum.auto()  # path, array
    UNDECLARED_RESULT = enum.auto()  # path, array
    OUTPUT_IS_INPUT = enum.auto()  # path, path of the input (None: captured)
    VARYING_OUTPUT = enum.auto()  # path, array, spec, axes along which it varies
    DONATION_UNUSED = enum.auto()  # path, array
    FOREIGN_TRACE = enum.auto()  # path


class Diagnostics:
    """Makes exceptions and warnings for problems; by default nothing is explained."""

    def error(
        self, problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any
    ) -> Exception:
        """The exception for a problem."""
        return ValueError(problem.name, *offenders, details)

    def warn(self, problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any) -> None:
        """Warns about a problem; with ``strict`` among the details it is an error."""

    def failed(self, plan: Any, leaves: Sequence[Any], error: Exception) -> None:
        """Raises an error that explains one of JAX better, or adds a note to it."""


_installed = Diagnostics()


def install(diagnostics: Diagnostics) -> None:
    """Makes these the diagnostics of all transforms."""
    global _installed
    _installed = diagnostics


def refuse(problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any) -> NoReturn:
    """Raises the error for a problem."""
    raise _installed.error(problem, offenders, **details) from None


def warn(problem: Problem, offenders: Sequence[tuple[Any, ...]], **details: Any) -> None:
    """Warns about a problem."""
    _installed.warn(problem, offenders, **details)


def failed(plan: Any, leaves: Sequence[Any], error: Exception) -> None:
    """Lets diagnostics explain an error from JAX; returns if they do not."""
    _installed.failed(plan, leaves, error)
