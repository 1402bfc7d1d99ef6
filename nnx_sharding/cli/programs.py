"""``inspect`` and ``compare``: what one program needs, and strategies side by side."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from ..analysis.hardware import Device, device
from ..analysis.units import bytes_text, read_bytes
from ..jit import jit
from ..lifted import Lifted
from ..partition.mesh import planning_mesh
from ..report.comparison import Comparison, Failure
from ..report.page import write_html
from ..report.program import ProgramReport
from ..report.strategies import attempt, compare
from ..report.terminal import show_report
from ..stages import Compiled, Lowered, Traced
from .options import UsageError, UserError, count, mesh_sizes, option, say, say_error, user_code
from .targets import find

_INSPECT = """\
Calls a function, compiles the program that it returns, and shows the shardings of the arguments,
the memory, the cost and the collectives. Nothing is run, and neither the devices nor the memory
have to be available."""

_INSPECT_EPILOG = """\
The function returns what to compile: (function, *arguments), a function of nnx_sharding.jit, or
the result of its trace, lower or compile. Arguments may be abstract. For example:

  python -m nnx_sharding inspect plan.py:forward --mesh data=64 --html report.html
  python -m nnx_sharding inspect plan.py:forward --mesh data=64 --memory-limit 2GiB   # in CI

exit code: 0; 1 if more than the memory limit is needed or the function failed; 2 if the command
line is wrong"""

_COMPARE = """\
Calls a function, compiles each strategy that it returns, and shows in one table what they need.
Nothing is run, and neither the devices nor the memory have to be available."""

_COMPARE_EPILOG = """\
The function returns (strategies, function, *arguments), which are the arguments of
nnx_sharding.report.compare; or the result of compare; or a mapping from names to programs, each as
for the command inspect. For example:

  python -m nnx_sharding compare plan.py:strategies --mesh data=256 --memory-limit 16GiB
  python -m nnx_sharding compare plan.py:strategies --mesh data=256 --device "TPU v5e"

exit code: 0; 1 if a strategy failed, none fits the memory or the function failed; 2 if the
command line is wrong"""


def add_parser(add_command: Any) -> None:
    """Adds the parsers of these commands."""
    summary = "compile a function and show its memory, cost and collectives"
    texts = {"help": summary, "description": _INSPECT, "epilog": _INSPECT_EPILOG}
    _add_options(add_command("inspect", run_inspect, **texts))
    summary = "compile a function with several strategies and show them in one table"
    texts = {"help": summary, "description": _COMPARE, "epilog": _COMPARE_EPILOG}
    _add_options(add_command("compare", run_compare, **texts))


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name, (kind, metavar, text) in _OPTIONS.items():
        parser.add_argument(name, type=kind, metavar=metavar, help=text)
    add_outputs(parser)


_OPTIONS: dict[str, tuple[Any, str, str]] = {
    "target": (
        str,
        "MODULE:FUNCTION",
        "the function to call, in a module (package.module:function) or in a file "
        "(path/to/file.py:function)",
    ),
    "--mesh": (
        mesh_sizes,
        "AXIS=SIZE,...",
        "the mesh in context, such as data=2,model=4, passed to the function if it has a parameter "
        "`mesh`; virtual CPU devices are used for a mesh larger than the machine",
    ),
    "--devices": (
        count,
        "N",
        "let JAX have N virtual CPU devices, for functions that make a mesh of jax.devices() "
        "themselves",
    ),
    "--device": (option(device), "NAME", 'show the roofline of a device, such as "TPU v5e"'),
    "--memory-limit": (
        option(read_bytes),
        "SIZE",
        "the memory of a device, such as 16GiB (default: that of --device)",
    ),
}


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options for where results are written."""
    parser.add_argument("--json", metavar="FILE", help="write JSON; - prints nothing else")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page")


def write(arguments: argparse.Namespace, result: Any, page: Any = None) -> None:
    """Prints a result, and writes the files; the page may show something else."""
    if arguments.html is not None:
        write_html(arguments.html, result if page is None else page)
    if arguments.json not in (None, "-"):
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(result.to_json())
    if isinstance(result, ProgramReport) and arguments.json != "-" and sys.stdout.isatty():
        show_report(result)
    else:
        say(result.to_json() if arguments.json == "-" else result)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Shows the report; returns the exit code."""
    value, mesh = _call(arguments)
    with _in_context(mesh):
        report = _report(arguments.target, value, arguments.device)
    write(arguments, report)
    limit = arguments.memory_limit
    if limit is None and arguments.device is not None:
        limit = arguments.device.memory_bytes
    peak = None if report.memory is None else report.memory.peak
    if limit is None or (peak is not None and peak <= limit):
        return 0
    needs = "the backend reports no memory" if peak is None else f"needs {bytes_text(peak)}"
    limit_text = f"the limit is {bytes_text(limit)} on each device"
    say_error(f"inspect: {report.name}: {needs}; {limit_text}")
    return 1


def run_compare(arguments: argparse.Namespace) -> int:
    """Shows the comparison; returns the exit code."""
    value, mesh = _call(arguments)
    with _in_context(mesh):
        comparison = _comparison(arguments.target, value)
    comparison = comparison.judged(memory_limit=arguments.memory_limit, device=arguments.device)
    write(arguments, comparison)
    failed = [name for name, report in comparison.reports.items() if isinstance(report, Failure)]
    if failed:
        say_error(f"compare: failed: {', '.join(failed)}")
    elif not comparison.fitting:
        limit = bytes_text(comparison.memory_limit)
        say_error(f"compare: no strategy fits {limit} on each device")
    return int(bool(failed) or not comparison.fitting)


def _call(arguments: argparse.Namespace) -> tuple[Any, Mesh | None]:
    """The result of the user's function, and the mesh in whose context it was called."""
    if arguments.devices is not None:
        _use_virtual_devices(arguments.devices)
    function = find(arguments.target)
    try:
        mesh = None if arguments.mesh is None else planning_mesh(arguments.mesh)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with _in_context(mesh), user_code(f"{arguments.target} failed"):
        takes_mesh = "mesh" in inspect.signature(function).parameters
        return function(**({"mesh": mesh} if takes_mesh else {})), mesh


def _in_context(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _use_virtual_devices(number: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", number)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has been initialized
        if jax.device_count() != number:
            raise UsageError(
                f"--devices {number}: JAX runs in this process already, with "
                f"{jax.device_count()} devices. Start a new process: python -m nnx_sharding ..."
            ) from None


def _report(target: str, value: Any, named: Device | None) -> ProgramReport:
    """The report of a program that a function returned."""
    if isinstance(value, ProgramReport):
        return value if named is None else value.with_roofline(named)
    function, *args = value if isinstance(value, tuple) and value else (value,)
    is_stage = isinstance(value, Traced | Lowered | Compiled)
    if not is_stage and (not callable(function) or isinstance(function, type)):
        raise UserError(
            f"{target} returned {value!r:.200}. It has to return (function, *arguments), a "
            "function of nnx_sharding.jit, the result of its trace, lower or compile, or a report."
        )
    with user_code(f"what {target} returned cannot be compiled"):
        if not is_stage:
            value = (function if isinstance(function, Lifted) else jit(function)).trace(*args)
        if isinstance(value, Traced):
            value = value.lower()
        if isinstance(value, Lowered):
            value = value.compile()
        report: ProgramReport = value.report(device=named)
        return report


def _comparison(target: str, value: Any) -> Comparison:
    """The comparison of strategies that a function returned."""
    if isinstance(value, Comparison):
        return value
    if isinstance(value, Mapping) and value:
        makers = {
            n: functools.partial(_report, f"{target}, {n},", p, None) for n, p in value.items()
        }
        return Comparison({str(name): attempt(make) for name, make in makers.items()})
    if not isinstance(value, tuple) or len(value) < 2 or not isinstance(value[0], Mapping):
        raise UserError(
            f"{target} returned {value!r:.200}. It has to return (strategies, function, "
            "*arguments), a Comparison, or a mapping from names to programs."
        )
    with user_code(f"what {target} returned cannot be compared"):
        return compare(*value)
