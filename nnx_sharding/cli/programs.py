"""What ``inspect`` and ``compare`` have in common: options, and what a function may return."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from ..analysis.hardware import Device, device
from ..jit import jit
from ..lifted import Lifted
from ..partition.virtual import MOST_DEVICES, planning_mesh
from ..report.limits import read_bytes
from ..report.page import write_html
from ..report.program import ProgramReport
from ..report.terminal import show_report
from ..stages import Compiled, Lowered, Traced
from .output import say
from .targets import TargetError, UsersError, find, told


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what both have."""
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="the function to call, in a module (package.module:function) or in a file "
        "(path/to/file.py:function)",
    )
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="AXIS=SIZE,...",
        help="the mesh in whose context the function is called, such as data=2,model=4, which is "
        "given to it if it has a parameter `mesh`; where it has more devices than there are here, "
        "they are virtual ones of the CPU",
    )
    parser.add_argument(
        "--devices",
        type=_count,
        metavar="N",
        help="let JAX have N virtual devices of the CPU, for functions that make a mesh of "
        "jax.devices() themselves",
    )
    parser.add_argument(
        "--device",
        type=_device,
        metavar="NAME",
        help='bound the time by the peak figures of a device, such as "TPU v5e"',
    )
    parser.add_argument(
        "--memory-limit",
        type=size,
        metavar="SIZE",
        help="the memory that a device has, such as 16GiB (default: that of --device)",
    )
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds where results are written."""
    parser.add_argument("--json", metavar="FILE", help="write it as JSON; - prints just that")
    parser.add_argument("--html", metavar="FILE", help="write it as a page that needs nothing else")


def write(arguments: argparse.Namespace, told: Any, page: Any = None) -> None:
    """Prints a result, and writes the files that were asked for.

    Args:
      arguments: those of the command line.
      told: what has ``to_json``.
      page: what the page shows, if that is something else.
    """
    if arguments.html is not None:
        write_html(arguments.html, told if page is None else page)
    if arguments.json not in (None, "-"):
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(told.to_json())
    if isinstance(told, ProgramReport) and arguments.json != "-" and sys.stdout.isatty():
        show_report(told)
    else:
        say(told.to_json() if arguments.json == "-" else told)


def found_by(arguments: argparse.Namespace) -> tuple[Any, Mesh | None]:
    """What the function returned, and the mesh that it was called with.

    Raises:
      UsersError: it failed.
      SystemExit: there is no such function or mesh; that was told.
    """
    if arguments.devices is not None:
        _use_virtual_devices(arguments)
    try:
        function = find(arguments.target)
        mesh = None if arguments.mesh is None else planning_mesh(arguments.mesh)
    except (TargetError, TypeError, ValueError) as error:
        arguments.parser.error(str(error))
    with in_context(mesh):
        return function(mesh), mesh


def in_context(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context of a mesh; nothing if there is none."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _use_virtual_devices(arguments: argparse.Namespace) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", arguments.devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has started
        if jax.device_count() != arguments.devices:
            arguments.parser.error(
                f"--devices {arguments.devices}: JAX runs in this process already, with "
                f"{jax.device_count()} devices. Start a process of its own: "
                "python -m nnx_sharding ..."
            )


def compiled(target: str, found: Any, wanted: Device | None) -> ProgramReport:
    """The report of what a function returned.

    Raises:
      UsersError: it is nothing that can be compiled, or it cannot be compiled.
    """
    if isinstance(found, ProgramReport):
        return found if wanted is None else found.with_roofline(wanted)
    try:
        lower = _lowering(found)
    except TypeError as error:
        raise UsersError(f"{target} returned {error}") from None
    try:
        return lower().report(device=wanted)
    except Exception as error:
        raise UsersError(f"what {target} returned cannot be compiled: {told(error)}") from error


def _lowering(found: Any) -> Callable[[], Compiled]:
    """What compiles it.

    Raises:
      TypeError: it is nothing that can be compiled.
    """
    if isinstance(found, Compiled):
        return lambda: found
    if isinstance(found, Lowered):
        return found.compile
    if isinstance(found, Traced):
        return lambda: found.lower().compile()
    function, *args = found if isinstance(found, tuple) and found else (found,)
    if not callable(function) or isinstance(function, type):
        raise TypeError(
            f"{found!r:.200}. It has to return (function, *arguments), what nnx_sharding.jit(...) "
            "made, what its trace, lower or compile returned, or a report."
        )
    lifted = function if isinstance(function, Lifted) else jit(function)
    return lambda: lifted.lower(*args).compile()


def limit_of(arguments: argparse.Namespace) -> int | None:
    """The memory that a device has; None if nothing tells."""
    if arguments.memory_limit is not None:
        return int(arguments.memory_limit)
    return None if arguments.device is None else int(arguments.device.memory_bytes)


# Values of options


def mesh_sizes(text: str) -> Mapping[str, int]:
    """The sizes of axes, from ``data=2,model=4``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (own.strip() for own in part.partition("="))
        if not name or not number.lstrip("-").isdecimal() or name in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r}: write each axis once with its size, as in data=2,model=4"
            )
        sizes[name] = int(number)
    return sizes


def size(text: str) -> int:
    """Bytes, from ``16GiB``."""
    try:
        return read_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _device(text: str) -> Device:
    try:
        return device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, not {text}")
    if int(text) > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_DEVICES}, not {text}")
    return int(text)
