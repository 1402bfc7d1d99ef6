"""The schedules of strategies that ran during a trace, and the layers that ran without theirs.

A schedule, for example of a pipeline, runs when the module for which it is declared is called.
Layers that are taken out of a ``Stack``, or scanned by hand, compute the same numbers without it,
but on every device. So at the end of a trace, a schedule that did not run is reported if its layers
were taken out, or if a module around them was called.

Modules are known by the name of an argument and their path in the argument (`Place`):
``("model", ("decoder", "blocks"))``. A ``Stack`` has its layers in an attribute ``layers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from .. import _compat
from ..specs.activation_sharding import CallSchedule
from ..specs.paths import Path, accessor

Place: TypeAlias = tuple[str, Path]  # the name of an argument, and the path of a module in it


class PendingCall(Protocol):
    """The result of a call that a schedule runs later, together with other calls."""

    def check_ran(self) -> None:
        """Raises an error if the function has ended, and the call never ran."""


class ScheduleUses:
    """The uses of modules during one trace and the traces within it, to find unused schedules.

    Its private attributes are sets of the places of modules:

        _ran         modules that ran by their schedule
        _called      modules that were called without a schedule
        _taken_out   stacks whose layers are used one by one
    """

    def __init__(self) -> None:
        self._ran = set[Place]()
        self._called = set[Place]()
        self._taken_out = set[Place]()

    def note_call(self, place: Place, *, by_schedule: bool) -> None:
        """Records that a module was called: by its schedule, or without one."""
        places = self._ran if by_schedule else self._called
        places.add(place)

    def note_single_layers(self, stack: Any) -> None:
        """Records that layers of a ``Stack`` are used one by one."""
        if (tag := _compat.tag_of(stack)) is not None:
            self._taken_out.add((tag.name, tag.path))

    def report(self, schedules: Mapping[Place, CallSchedule]) -> None:
        """Reports the schedules that did not run, though their layers did.

        Args:
          schedules: the schedule of each module that has one, by the place of the module.
        """
        for (name, path), schedule in schedules.items():
            place = (name, path)
            # The layers ran if a model around them was called, because it may scan them by itself,
            # or if they were called one by one, for example in a scan over ``stack.layers``. A
            # model that was not called at all, in a step that only updates it, reports nothing.
            places_around = {(name, path[:length]) for length in range(len(path))}
            place_of_layers = (name, (*path, "layers"))
            places_that_run_layers = {place, place_of_layers, *places_around}
            is_called = not places_that_run_layers.isdisjoint(self._called)
            is_used = is_called or place in self._taken_out
            if is_used and place not in self._ran:
                schedule.report_unscheduled(accessor(name, path))


# The uses of schedules in the outermost trace; None if it has no schedules.
SCHEDULE_USES: ContextVar[ScheduleUses | None] = ContextVar("SCHEDULE_USES", default=None)
