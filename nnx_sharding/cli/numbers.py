"""``same`` checks that a step computes the same numbers on the true mesh as on one device.

The check runs in a process with as many virtual devices as the mesh has (`call_with_devices`). In
that process the user's function is called for the step and its arguments. If the function takes a
configuration, the numbers in the configuration are made smaller first (`shrink`). `with_values`
fills abstract arguments, `unjitted` takes the function and its options out of `jit`, and
`assert_same` compares, and raises an AssertionError if numbers differ. `call_with_devices` raises
here what the check raises there. `find` imports what the user names, and within `user_code` errors
become ``UserError``s.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from ..partition.mesh import make_mesh
from ..testing import assert_same
from ..testing.shrinking import shrink, with_values
from ..testing.virtual_devices import call_with_devices
from ..transforms.jit import unjitted
from ..transforms.lifted import Lifted
from .options import UsageError, count, mesh_sizes, option, say
from .user_functions import UserError, find, user_code

_SAME = """\
The function takes the mesh and returns (jit(step, in_shardings=...), *arguments). Arguments are
arrays or shapes, which random numbers fill. If it has a parameter `config`, whose default is a
dataclass or a mapping, its numbers are made smaller as far as every argument keeps its spec;
--config names a smaller one of yours. For example:

  python -m nnx_sharding same train.py:step --mesh data=64,model=16

exit code: 0 if the numbers are the same; 1 if not, or the function failed; 2 if the command line is
wrong"""

_NOT_PROVED = """\
  not proved: what depends on the sizes that changed, such as the rounding of longer sums, kernels
  that a compiler chooses by size, overflow; and what the compiler of another backend does."""


@option
def _axis_types(text: str) -> tuple[AxisType, ...]:
    """Reads ``auto``, or one type for each axis as in ``auto,explicit``."""
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    unknown = [name for name in text.split(",") if name not in types]
    if unknown:
        raise ValueError(f"expected auto or explicit, for all axes or for each one, got {text!r}")
    return tuple(types[name] for name in text.split(","))


def add_commands(subparsers: Any) -> None:
    """Adds the parser of this command."""
    summary = "check that a step has the numbers of one device on a mesh of virtual devices"
    parser = subparsers.add_parser("same", help=summary, epilog=_SAME)
    parser.description = f"Calls a function of yours, to {summary}."
    parser.set_defaults(run=run_same)
    add = parser.add_argument
    target = "the function to call: package.module:function or path/to/file.py:function"
    add("target", metavar="MODULE:FUNCTION", help=target)
    mesh = "the mesh of the job, such as data=64,model=16"
    add("--mesh", type=mesh_sizes, metavar="AXIS=SIZE,...", required=True, help=mesh)
    types = "auto or explicit, for all axes or one for each (default: explicit)"
    add("--axis-types", type=_axis_types, metavar="TYPE,...", help=types)
    config = "a configuration to pass to the function, instead of making its default smaller"
    add("--config", metavar="MODULE:NAME", help=config)
    add("--steps", type=count, default=1, metavar="N", help="calls to compare (default: 1)")
    runs = "runs on the mesh, which have to be equal bit for bit (default: 1)"
    add("--runs", type=count, default=1, metavar="N", help=runs)


def run_same(arguments: argparse.Namespace) -> int:
    """Compares the numbers in a new process, and prints the verdict.

    Returns:
      The exit code: 0 if the numbers are the same, and 1 if they differ.
    """
    devices = math.prod(arguments.mesh.values())
    if min(arguments.mesh.values()) < 1:
        raise UsageError("--mesh: give each axis its size; -1 needs a number of devices")
    types = arguments.axis_types or (AxisType.Explicit,)
    if len(types) == 1:  # one type is for all axes
        types = types * len(arguments.mesh)
    if len(types) != len(arguments.mesh):
        raise UsageError("--axis-types: give one type, or one for each axis of --mesh")
    find(arguments.target)  # raises a UsageError before a process is started
    options = {name: getattr(arguments, name) for name in ("config", "steps", "runs")}
    start = time.monotonic()
    try:
        call_with_devices(devices, _check, arguments.target, arguments.mesh, types, **options)
    except AssertionError as error:
        say(error)
        return 1
    say(f"the same numbers on {devices:,} devices, in {time.monotonic() - start:.0f} s")
    return 0


def _check(
    target: str,
    sizes: dict[str, int],
    types: tuple[AxisType, ...],
    *,
    config: str | None,
    **options: Any,
) -> None:
    """Compares a step on a mesh of virtual devices with one device, in a process that has these.

    Args:
      target: the name of the user's function, which makes the step and its arguments.
      sizes: the sizes of the mesh axes by name.
      config: the name of the configuration for the function; None to make its default smaller.
      **options: the options of `assert_same`.

    Raises:
      AssertionError: the numbers differ.
      UserError: the user's function failed.
    """
    function, mesh = find(target), make_mesh(sizes, types)
    parameters = inspect.signature(function).parameters

    def build(config: Any) -> tuple[Any, ...]:
        """Returns the jitted step and its arguments, which the user's function makes."""
        offered = {"mesh": mesh, "config": config}
        value = function(**{name: x for name, x in offered.items() if name in parameters})
        if not isinstance(value, tuple) or not value or not isinstance(value[0], Lifted):
            raise UserError(
                f"{target} returned {value!r:.200}. It has to return "
                "(jit(step, in_shardings=...), *arguments)."
            )
        return value

    with jax.set_mesh(mesh), user_code(f"{target} failed"):
        chosen, changes = _chosen_config(target, build, parameters.get("config"), config)
        step, *args = build(chosen)
        # `assert_same` jits the user's function again with its options, on one device and on the
        # mesh.
        fun, declared = unjitted(step)
        say(f"shrunk: {', '.join(changes) or 'nothing'}\n{_NOT_PROVED}")
        sys.stdout.flush()  # the check may take minutes, or crash
        shardings = declared.pop("in_shardings")
        del declared["compiler_options"]  # options for the devices of the job, not for CPUs
        values = with_values(tuple(args))
    assert_same(fun, *values, shardings=shardings, mesh=mesh, **declared, **options)


def _chosen_config(
    target: str,
    build: Callable[[Any], tuple[Any, ...]],
    parameter: inspect.Parameter | None,
    name: str | None,
) -> tuple[Any, list[str]]:
    """Returns the configuration for the user's function, and texts that say what is smaller in it.

    The configuration is the one that the user names, or the function's default, made smaller. It is
    None for a function without the parameter.

    Args:
      build: makes the step and its arguments from a configuration.
      parameter: the parameter ``config`` of the function; None if it has none.
      name: the name of a configuration; None if the user named none.

    Raises:
      UserError: the parameter has no default, and no configuration is named.
    """
    if name is not None:
        return find(name, is_function=False), [f"as {name} says"]
    if parameter is None:
        return None, ["nothing: the function has no parameter `config`"]
    if parameter.default is inspect.Parameter.empty:
        raise UserError(f"{target}: `config` has no default; name one by --config")
    # Nothing is printed while the configuration shrinks, because all changes are printed at once.
    return shrink(build, parameter.default, on_change=lambda text: None)
