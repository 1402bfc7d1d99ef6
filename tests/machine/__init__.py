"""Worlds of equal objects, what users do to them between calls, and how worlds are compared.

A call may skip the split of its arguments if nothing but arrays changed since the last one. Here
everything is done three times, to equal objects: calls that may skip it, calls that never do, and
calls of the plain Python function. After each call all three must look alike.

``SCENARIOS`` has each kind of change once, alone; ``FAMILIES`` mixes them at random.

``objects`` and ``views`` → ``functions`` → ``worlds`` → ``calls`` and ``mutations`` → ``families``
and ``scenarios``.
"""

from . import scenarios_of_values as _more  # noqa: F401  they register themselves
from .calls import UNCOUNTED, X
from .families import FAMILIES, make_graph
from .functions import guarded, step, uncached
from .mutations import reborn
from .scenarios import SCENARIOS, make_one, run_scenario
from .worlds import Failure, Functions3, Worlds, attempt

__all__ = [
    "FAMILIES",
    "SCENARIOS",
    "UNCOUNTED",
    "Failure",
    "Functions3",
    "Worlds",
    "X",
    "attempt",
    "guarded",
    "make_graph",
    "make_one",
    "reborn",
    "run_scenario",
    "step",
    "uncached",
]
