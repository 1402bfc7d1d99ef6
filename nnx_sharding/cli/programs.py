"""``inspect``, ``source``, ``lock``, ``check``, ``compare`` and ``plan``: what programs need.

Each command, ``run_…``, calls a function that the user names, in the context of a mesh
(`_call_user_function`), and makes a result of what it returns (``_make_…``: functions of the parsed
command line, the name of the user's function for messages, and what it returned). A ``_make_…``
raises a ``UserError`` for a value that it cannot use.

The result of `jit` and of its ``trace``, ``lower`` and ``compile`` are `Lifted`, `Traced`,
`Lowered` and `Compiled`. Errors of the user's code become ``UserError``s (`user_code`), so that
they are told apart from those of the command line, the ``UsageError``s.

`say` prints a text or a table, `write` a result, which it also writes to files. With ``--json -``,
JSON is all that is printed on standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import jax

from .. import _compat
from .._publishing import write_file
from ..analysis.by_line import LineTable
from ..analysis.compiler_shardings import rematerializations
from ..analysis.hardware import HARDWARE, hardware_of
from ..analysis.json_codec import file_path, json_text
from ..analysis.program import ProgramReport
from ..analysis.units import bytes_text, read_bytes
from ..errors import command_for, warnings_collected
from ..partition.mesh import on_topology, planning_mesh
from ..planning.chains import OVER_DATA, STYLES, checked_strategies
from ..planning.plan import PlanningResult, plan
from ..report.comparison import Comparison, Failure, SearchInterrupted
from ..report.compiling import attempt
from ..report.page import write_html
from ..report.strategies import compare
from ..specs.fitting import suggestion
from ..testing.lock import (
    TOLERANCE,
    changes_since,
    described,
    headline,
    lock_text,
    report_with_rules,
)
from ..transforms.jit import jit
from ..transforms.lifted import Lifted
from ..transforms.stages import Compiled, Lowered, Traced
from .options import (
    UsageError,
    count,
    file,
    mesh_sizes,
    option,
    output,
    percentage,
    say,
    seconds,
)
from .user_functions import UserError, find, user_code

T = TypeVar("T")

# Makes the result of a command from the parsed command line, the name of the user's function, and
# what that returned.
Make: TypeAlias = Callable[[argparse.Namespace, str, object], T]

_WITHOUT_DEVICES = "Nothing is run, so neither the devices nor their memory have to be available."

_VIRTUAL_DEVICES = (
    "let JAX have N virtual CPU devices, for functions that make a mesh of jax.devices() themselves"
)
_MESH_IN_CONTEXT = (
    "the mesh in context, such as data=2,model=4, passed to the function if it has a parameter "
    "`mesh`; virtual CPU devices are used for one larger than the machine"
)

_JSON = "write JSON; - prints nothing else"

_INSPECT = """\
The function returns what to compile: (function, *arguments), a function of nnx_sharding.jit, or
the result of its trace, lower or compile. Arguments may be abstract. For example:

  python -m nnx_sharding inspect plan.py:forward --mesh data=64 --html report.html
  python -m nnx_sharding inspect plan.py:forward --topology v5e:8x8 --mesh data=-1

exit code: 0; 1 if more than the memory limit is needed or the function failed; 2 if the command
line is wrong"""

_SOURCE = """\
The function returns what to compile, as for the command inspect. A program that it has only traced
is not compiled: the types of its values on Explicit axes are shown, without cost. For example:

  python -m nnx_sharding source train.py:step --mesh data=4,model=2
  python -m nnx_sharding source train.py:step --topology v5e:8x8 --mesh data=-1 --all

exit code: 0; 1 if the function failed; 2 if the command line is wrong"""

_LOCK = """\
The function returns what to compile, as for the command inspect. For example:

  python -m nnx_sharding lock train.py:step --mesh data=4,model=2    # writes step.lock
  python -m nnx_sharding check train.py:step --mesh data=4,model=2

exit code: 0; 1 if the function failed{changed}; 2 if the command line is wrong{missing}"""
_LOCK_EPILOGS = {
    "lock": _LOCK.format(changed="", missing=""),
    "check": _LOCK.format(
        changed=", or if something changed", missing=", or if there is\nno such lock file"
    ),
}

_COMPARE = """\
The function returns (strategies, function, *arguments), which are the arguments of
nnx_sharding.report.compare; or the result of compare; or a mapping from names to programs, each as
for the command inspect. For example:

  python -m nnx_sharding compare plan.py:strategies --mesh data=256 --hardware "TPU v5e"

SIGTERM and Ctrl-C end it early: what was compiled until then is shown and written to the files.

exit code: 0; 1 if a strategy failed, none fits the memory or the function failed; 2 if the
command line is wrong; 128 + n after signal n"""

_PLAN = """\
The function returns (step, *arguments), as for the command inspect, or a mapping from variants to
such tuples in the order of preference; or the result of nnx_sharding.planning.plan. The shardings
and the mesh of a jitted step are not used. For example:

  python -m nnx_sharding plan plan.py:training --topology v5e:16x16 --donate model optimizer

SIGTERM and Ctrl-C end it early: what was compiled until then is shown and written to the files.

exit code: 0; 1 if nothing fits the memory or the function failed; 2 if the command line is wrong;
128 + n after signal n"""


def add_commands(subparsers: object) -> None:
    """Adds the parsers of these commands."""
    summary = "compile a function and show its memory, cost and collectives"
    _add_outputs_and_limit(_add_parser(subparsers, "inspect", run_inspect, summary, _INSPECT))
    summary = "show the lines of yours that a function runs, with types, collectives and cost"
    source = _add_parser(subparsers, "source", run_source, summary, _SOURCE)
    source.add_argument("--json", type=output, metavar="FILE", help=_JSON)
    folded = "show all types, collectives and modules of each line"
    source.add_argument("--all", action="store_true", help=folded)
    summary = "compile a function and write its cost to a lock file, to be committed"
    _add_lock_command(subparsers, "lock", run_lock, summary)
    summary = "compile a function and compare its cost with a lock file"
    check = _add_lock_command(subparsers, "check", run_check, summary)
    text = "the change of bytes and flops, up or down, that is none (default: 2%%)"
    check.add_argument("--tolerance", type=percentage, default=TOLERANCE, help=text)
    summary = "compile a function with several strategies and show them in one table"
    _add_outputs_and_limit(_add_parser(subparsers, "compare", run_compare, summary, _COMPARE))
    _add_plan_command(subparsers)


def _add_plan_command(subparsers: object) -> None:
    """Adds the parser of ``plan``, whose options are called like the parameters of the function."""
    summary = "search for the mesh and the strategy with which a training step is fastest"
    devices = "number of devices to plan for (default: those of --topology or this machine)"
    mesh = "the only mesh to try, such as data=2,model=4 (default: all of the devices)"
    parser = _add_parser(subparsers, "plan", run_plan, summary, _PLAN, devices=devices, mesh=mesh)
    _add_outputs_and_limit(parser)
    add = parser.add_argument
    add(
        "--strategies",
        nargs="+",
        # Checked here, before anything is imported or compiled.
        type=option(lambda name: checked_strategies([name])[0]),
        metavar="STRATEGY",
        help=f"those to try (default: all), such as 'fsdp + tensor': {', '.join(OVER_DATA)}, "
        f"with none or some of {', '.join(STYLES)}",
    )
    add(
        "--most",
        type=count,
        default=16,
        metavar="N",
        help="how many programs are compiled at most (default: %(default)s)",
    )
    add(
        "--measure",
        type=count,
        default=0,
        metavar="N",
        help="run the best N on the devices of this machine, and choose the fastest of them",
    )
    add(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        help="seconds after which no more programs are compiled",
    )
    add(
        "--maximize",
        choices=["batch"],
        help="search for the largest batch that fits, not for the shortest step",
    )
    add("--cache", metavar="FOLDER", help="keep reports, to compile nothing twice")


def _add_parser(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
    *,
    devices: str = _VIRTUAL_DEVICES,
    mesh: str = _MESH_IN_CONTEXT,
) -> argparse.ArgumentParser:
    """Adds a command that calls a function of the user, with the options for this.

    Args:
      devices: the help for ``--devices``.
      mesh: the help for ``--mesh``.
    """
    description = f"Calls a function of yours, to {summary}.\n{_WITHOUT_DEVICES}"
    # One summary in both places, so that they agree.
    texts = {"help": summary, "description": description, "epilog": epilog}
    parser: argparse.ArgumentParser = subparsers.add_parser(name, **texts)
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "target",
        metavar="MODULE:FUNCTION",
        help="the function to call: package.module:function or path/to/file.py:function",
    )
    add("--mesh", type=mesh_sizes, metavar="AXIS=SIZE,...", help=mesh)
    add(
        "--topology",
        metavar="NAME",
        help="compile for TPUs of a topology such as v5e:16x16 instead, wherever a mesh is given "
        "by its sizes; needs no TPU, but pip install 'nnx_sharding[tpu]'",
    )
    add(
        "--slices",
        type=count,
        default=1,
        metavar="N",
        help="number of slices, each of this topology (default: %(default)s)",
    )
    add("--devices", type=count, metavar="N", help=devices)
    add(
        "--hardware",
        type=option(hardware_of),
        metavar="NAME",
        help='show the roofline of this hardware, such as "TPU v5e"',
    )
    add(
        "--donate",
        nargs="+",
        metavar="NAME",
        help="parameters whose memory the results may take, as donate_argnames of jit, for a "
        "function that is not jitted",
    )
    return parser


def _add_lock_command(
    subparsers: object, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """Adds a command about a lock file, and returns its parser; see `_add_parser`."""
    parser = _add_parser(subparsers, name, run, summary, _LOCK_EPILOGS[name])
    text = "the lock file (default: the name of the function with .lock)"
    parser.add_argument("--file", type=file, metavar="FILE", help=text)
    tables = "memory and flops by module and line as well, which compiles the program once more"
    parser.add_argument("--by-module", action="store_true", help=tables)
    return parser


def _add_outputs_and_limit(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that make reports."""
    add = parser.add_argument
    add(
        "--memory-limit",
        type=option(read_bytes),
        metavar="SIZE",
        help="the memory of a device, such as 16GiB (default: that of --hardware, else of the "
        "devices compiled for if it is known)",
    )
    add(
        "--by-module",
        action="store_true",
        help="show memory and cost by module as well (plan: of the best candidate), which "
        "compiles each program once more",
    )
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options for where results are written."""
    add = partial(parser.add_argument, metavar="FILE")
    add("--json", type=output, help=_JSON)
    add("--html", type=file, help="write a self-contained page")


def write(
    arguments: argparse.Namespace, result: Any, title: str | None = None, head: str = ""
) -> None:
    """Prints a report, a comparison or changes, and writes the files of ``--json`` and ``--html``.

    With ``--json -``, the JSON is printed, and nothing else.

    Args:
      arguments: the command line.
      result: what is printed and written.
      title: the title of the page; None for the name in the result.
      head: what the page shows first.
    """
    if arguments.html is not None:
        write_html(arguments.html, result, title, head)
    if arguments.json == "-":
        say(result.to_json())
        return
    if arguments.json is not None:
        write_file(Path(arguments.json), result.to_json().encode())
    # Reports have colors, and use the width of a terminal; a file or a pipe gets plain text.
    if isinstance(result, ProgramReport) and sys.stdout.isatty():
        from rich.console import Console

        Console().print(result)
    else:
        say(result)


_REMATERIALIZED = """\
inspect: to change their shardings, the compiler gathers these arrays on each device and cuts them
again ("Involuntary full rematerialization"); change one mesh axis at a time, or choose specs that
need no change. The page "Debugging communication" says how:"""


def run_inspect(arguments: argparse.Namespace) -> int:
    """Shows the report; returns the exit code: 0 if the program fits, or has no limit."""
    # The compiler's remarks are only in its log. The log is read at the end of the block. Then the
    # list `remarks` gets a record of each array that is gathered as a whole.
    with _compat.compiler_log(rematerializations) as remarks:
        report = _call_user_function(arguments, _make_report)
    _warn_if_unsharded(arguments, report.name, report)
    write(arguments, report)
    if remarks:
        lines = [f"  {remark.text(report)}" for remark in remarks]
        say("\n".join([_REMATERIALIZED, *lines]), error=True)
    # A comparison of this one report finds the limit: --memory-limit, or the limit of the hardware.
    judged = Comparison({report.name: report}).judged(
        memory_limit=arguments.memory_limit, hardware=arguments.hardware
    )
    if judged.fits(report.name):
        return 0
    peak = None if report.memory is None else report.memory.peak
    # An unknown peak does not fit either, because the exit code has to be safe for scripts.
    needs = "the backend reports no memory" if peak is None else f"needs {bytes_text(peak)}"
    limit = f"the limit is {bytes_text(judged.memory_limit)} on each device"
    say(f"inspect: {report.name}: {needs}; {limit}", error=True)
    return 1


def _warn_if_unsharded(arguments: argparse.Namespace, name: str, report: ProgramReport) -> None:
    """Prints a warning if a program has a mesh but no shardings, the most frequent mistake.

    No sharding means that each device holds all bytes of all arguments. ``name`` is the name of the
    program in the output of the command.
    """
    is_replicated = all(row.bytes_per_device == row.bytes_total for row in report.parameters)
    if report.num_devices > 1 and report.parameters and is_replicated:
        say(
            f"{arguments.command}: {name} is not sharded: each of the {report.num_devices} devices "
            "holds all arguments. Give jit in_shardings=..., or search for them with plan.",
            error=True,
        )


def run_source(arguments: argparse.Namespace) -> int:
    """Compiles a program, and shows the table of its lines; returns the exit code."""
    lines = _call_user_function(arguments, _make_lines)
    data = json_text(lines.as_dict())  # JSON has all lines, even without --all
    if arguments.json == "-":
        say(data)
        return 0
    if arguments.json is not None:
        write_file(Path(arguments.json), data.encode())
    say(lines.full() if arguments.all else lines)  # `lines` shows the largest item of each line
    return 0


def run_lock(arguments: argparse.Namespace) -> int:
    """Compiles a program, and writes its costs to a lock file; returns the exit code."""
    file = _lock_file(arguments)
    report = _call_user_function(arguments, _make_report)
    _warn_if_unsharded(arguments, report.name, report)
    write_file(file, lock_text(report).encode())
    say(f"wrote {file}")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Shows what changed since a lock file was written; returns 1 if anything did, else 0."""
    file = _lock_file(arguments)
    if not file.exists():  # before the program is compiled
        raise UsageError(f"there is no lock file {file}; write it: {_lock_command(arguments)}")
    report = _call_user_function(arguments, _make_report)
    _warn_if_unsharded(arguments, report.name, report)
    try:
        changes = changes_since(file, report, arguments.tolerance)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if changes:  # the headline and the remedy come before the details, because these may be long
        head = headline(file, report, changes, arguments.tolerance)
        say(f"{report.name} is not as {file} says: {head}.")
        say(f"If this is wanted, write {file} again: {_lock_command(arguments)}.")
    say(described(changes, report))
    return int(bool(changes))


def _lock_command(arguments: argparse.Namespace) -> str:
    """Returns the command that writes the lock file, for messages."""
    return f"nnx-sharding lock {arguments.target}, with the same options"


def _lock_file(arguments: argparse.Namespace) -> Path:
    """Returns the lock file of the option, or ``step.lock`` for ``train.py:Model.step``."""
    name = arguments.target.rpartition(":")[2].rpartition(".")[2]
    return file_path(arguments.file or f"{name}.lock")


def run_compare(arguments: argparse.Namespace) -> int:
    """Compares strategies, and shows them; returns the exit code."""
    return _search(arguments, _make_comparison, _show_comparison)


def _show_comparison(arguments: argparse.Namespace, comparison: Comparison) -> int:
    """Prints and writes a comparison; returns the exit code: 0 if all compile, and one fits."""
    comparison = comparison.judged(memory_limit=arguments.memory_limit, hardware=arguments.hardware)
    write(arguments, comparison)
    # A strategy that fails does not hide the others, but changes the exit code.
    failed = [name for name, report in comparison.reports.items() if isinstance(report, Failure)]
    if failed:
        say(f"compare: failed: {', '.join(failed)}", error=True)
    # If there are no reports, the printed comparison says why nothing was compiled.
    elif comparison.reports and not comparison.fitting:
        limit = bytes_text(comparison.memory_limit)
        say(f"compare: no strategy fits {limit} on each device", error=True)
    return int(bool(failed) or not comparison.fitting)


def run_plan(arguments: argparse.Namespace) -> int:
    """Searches for a plan, and shows it; returns the exit code."""
    return _search(arguments, _make_plan, _show_plan)


def _show_plan(arguments: argparse.Namespace, result: PlanningResult) -> int:
    """Prints and writes a plan; returns the exit code: 0 if a candidate fits, else 1."""
    best = result.best  # None if no candidate fits, an error after which a script has to stop
    if best is not None:
        title = f"Plan: {best.name}"
    else:
        title = "Plan: none fits" if result.comparison.reports else "Plan: none was compiled"
    # The page says in any case what was tried: `explained` returns the summary, and the reasons why
    # other candidates are worse.
    explained = "\n".join(result.explained())
    write(arguments, result.comparison, title, head=explained)
    if best is None:
        # The table says of each candidate that it does not fit, so the reasons are left out.
        say("\n".join(result.summary()), error=True)
    elif arguments.json != "-":  # with `--json -`, nothing but the JSON is printed
        say(explained)
    return int(best is None)


def _search(
    arguments: argparse.Namespace,
    make: Make[T],
    show: Callable[[argparse.Namespace, T], int],
) -> int:
    """Makes a result as `_call_user_function` does, and shows it; returns the exit code.

    ``show`` prints and writes a result, and returns the exit code if nothing interrupts the search.

    SIGTERM has the effect of Ctrl-C, because a search takes minutes to hours, and batch systems end
    a job with SIGTERM: the results until then are shown and written to the files, and the exit code
    is 128 + the number of the signal.
    """
    stopped_by = signal.SIGINT

    def stop(number: int, frame: object) -> NoReturn:
        nonlocal stopped_by
        stopped_by = signal.Signals(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return show(arguments, _call_user_function(arguments, make))
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, SearchInterrupted):  # at least one candidate was predicted
            show(arguments, interrupt.result)
        say(f"{arguments.command}: stopped by {stopped_by.name}", error=True)
        return 128 + stopped_by
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_donate(arguments: argparse.Namespace, target: str, function: object) -> None:
    """Checks that ``--donate``, if it is given, fits what a user's function returned.

    Args:
      target: what the user's function is called in messages.
      function: the function to jit, or anything else that was returned in its place.

    Raises:
      UserError: the function is jitted already, so the option would have no effect.
      UsageError: the function has no parameter of that name.
    """
    if arguments.donate is None:
        return
    # Functions of these types are jitted, so it is too late to choose donated arguments.
    if isinstance(function, Lifted | ProgramReport | Traced | Lowered | Compiled):
        raise UserError(
            f"{target} returned {function!r:.200}. --donate is for functions that are not jitted; "
            "give jit donate_argnames instead."
        )
    # A value that is no function has no parameters; the caller refuses it.
    names = inspect.signature(function).parameters if callable(function) else ()
    unknown = set(arguments.donate).difference(names)
    # `jit` would raise an error too, but it would count as an error of the user's function.
    if unknown:
        listed = ", ".join(sorted(f"{name!r}{suggestion(name, names)}" for name in unknown))
        raise UsageError(f"--donate: the function has no parameter {listed}")


def _jit_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the command line for the ``jit`` of a user's function."""
    return {} if arguments.donate is None else {"donate_argnames": arguments.donate}


def _make_plan(arguments: argparse.Namespace, target: str, value: object) -> PlanningResult:
    """Searches for the mesh and the strategy of a step that the user's function returned.

    Args:
      target: what the user's function is called in messages.
      value: what it returned: ``(step, *arguments)``; a mapping from names of variants to such
        tuples; or what ``plan`` returned.
    """
    if isinstance(value, PlanningResult):
        return value
    if not isinstance(value, tuple | Mapping) or not value:
        raise UserError(
            f"{target} returned {value!r:.200}. It has to return (step, *arguments), a mapping "
            "from variants to such tuples, or what plan returned."
        )
    # A mapping of variants has the arguments in each of its tuples, so `plan` gets the mapping
    # alone. `plan` also takes (variants, *arguments), where variants are functions with the same
    # arguments.
    step, *args = (value,) if isinstance(value, Mapping) else value
    variants = [*step.values()] if isinstance(step, Mapping) else [step]
    for variant in variants:
        function = variant[0] if isinstance(variant, tuple) else variant
        _check_donate(arguments, target, function)
    # The remaining options are those of `plan`.
    options = _jit_options(arguments)
    options |= {"num_slices": arguments.slices, "cache_dir": arguments.cache}
    options["meshes"] = None if arguments.mesh is None else [arguments.mesh]
    # These options have the names of parameters of `plan`.
    for name in (
        "strategies", "maximize", "time_limit", "memory_limit", "hardware", "by_module", "most",
        "measure",
    ):  # fmt: skip
        options[name] = getattr(arguments, name)
    with user_code(f"what {target} returned cannot be planned"), _warnings_said():
        try:
            return plan(step, *args, **options)
        except ValueError as error:  # the text of `plan` already says what is wrong
            raise UserError(str(error).removeprefix("plan: ")) from error


@contextlib.contextmanager
def _warnings_said() -> Iterator[None]:
    """Prints the warnings of this library in the block as texts, at its end.

    No line of the user has called the library, so the warnings have no line to point at.
    """
    collected: list[tuple[Any, str]] = []
    try:
        with warnings_collected() as collected:
            yield
    finally:
        for category, text in collected:
            say(f"{category.__name__}: {text}", error=True)


def _call_user_function(arguments: argparse.Namespace, make: Make[T]) -> T:
    """Calls the user's function, and returns the result that ``make`` makes of its value.

    Both functions run in the context of the mesh and the topology of the command line.

    Raises:
      UsageError: the options do not go together, or there is no such function.
      UserError: the function failed.
    """
    if arguments.devices is not None:
        _use_virtual_devices(arguments.devices)  # before the user's module asks for devices
    function = find(arguments.target)
    if arguments.topology is None and arguments.slices > 1:
        raise UsageError("--slices needs --topology, such as --topology v5e:16x16")
    with contextlib.ExitStack() as context:
        context.enter_context(command_for(function))
        try:
            # Within this context, `planning_mesh` makes meshes of the devices of the topology.
            # Without a topology, it changes nothing.
            context.enter_context(on_topology(arguments.topology, arguments.slices))
            mesh = None if arguments.mesh is None else planning_mesh(arguments.mesh)
        except ValueError as error:
            raise UsageError(str(error)) from None
        except ImportError as error:  # the TPU compiler is not installed
            instead = _options_for_virtual_devices(arguments)
            raise ImportError(
                f"{error} Here, this means {instead} instead of --topology."
            ) from None
        if mesh is not None:
            # The mesh is in context while the function is called and while its result is compiled.
            context.enter_context(jax.set_mesh(mesh))
        parameter = inspect.signature(function).parameters.get("mesh")
        # A function may have a mesh of its own as the default.
        needs_mesh = parameter is not None and parameter.default is parameter.empty
        if needs_mesh and mesh is None:
            if arguments.command != "plan":
                raise UsageError(f"{arguments.target} takes a mesh: add one, such as --mesh data=8")
            # Any mesh will do, because `plan` chooses other meshes and traces the step again.
            replicas = {"replica": arguments.slices} if arguments.slices > 1 else {}
            mesh = planning_mesh({**replicas, "data": -1, "model": 1})
        with user_code(f"{arguments.target} failed"):
            value = function() if parameter is None else function(mesh=mesh)
        return make(arguments, arguments.target, value)


def _options_for_virtual_devices(arguments: argparse.Namespace) -> str:
    """Returns the options that have as many virtual devices as ``--topology`` and ``--slices``.

    For ``plan --topology v5p:2x2x2``, these are ``--devices 8 --hardware "TPU v5p"``.
    """
    generation, _, sizes = arguments.topology.partition(":")
    # "v5p" is "TPU v5p" among the names, and "tpu7x" is "TPU7x".
    spellings = (generation, f"tpu{generation}")
    hardware = [name for name in HARDWARE if name.replace(" ", "").lower() in spellings]
    numbers = sizes.split("x")
    if not hardware or not all(map(str.isdecimal, numbers)):  # the topology is unknown
        hardware, number = ["TPU v5e"], 64
    else:
        devices_per_chip = 2 if generation == "tpu7x" else 1
        number = math.prod(map(int, numbers)) * devices_per_chip * arguments.slices
    devices = f"--devices {number}" if arguments.command == "plan" else f"--mesh data={number}"
    return f'{devices} --hardware "{hardware[0]}"'


def _use_virtual_devices(number: int) -> None:
    """Lets JAX have virtual CPU devices.

    Raises a UsageError if JAX is initialized already with another number of devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", number)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has been initialized
        if jax.device_count() != number:
            raise UsageError(
                f"--devices {number}: JAX is already running in this process, with "
                f"{jax.device_count()} devices. Start a new process: python -m nnx_sharding ..."
            ) from None


def _make_report(arguments: argparse.Namespace, target: str, value: Any) -> ProgramReport:
    """Compiles a program that a function returned, and returns its report.

    Args:
      target: what the user's function is called in messages.
      value: what it returned: a report, or anything that `_stage_of` takes.
    """
    hardware = arguments.hardware
    # A function may compile by itself, with options that the command line lacks.
    if isinstance(value, ProgramReport):
        _check_donate(arguments, target, value)
        return value if hardware is None else value.with_roofline(hardware)
    with user_code(f"what {target} returned cannot be compiled"):  # errors become UserErrors
        compiled = _compile(_stage_of(arguments, target, value, others="or a report"))
        # The report for a lock file also has the rule that decides each argument's sharding.
        is_for_lock = arguments.command in ("lock", "check")
        make_report = report_with_rules if is_for_lock else Compiled.report
        return make_report(compiled, hardware=hardware, by_module=arguments.by_module)


def _make_lines(arguments: argparse.Namespace, target: str, value: Any) -> LineTable:
    """Compiles a program that a function returned, unless it is traced, and lists its lines.

    The arguments are those of `_make_report`, but ``value`` may be no report.
    """
    with user_code(f"what {target} returned cannot be compiled"):
        if isinstance(value, Traced):  # lines of a traced program have costs, but no hardware
            _check_donate(arguments, target, value)
            return value.by_line()
        compiled = _compile(_stage_of(arguments, target, value))
        report = compiled.report()
        _warn_if_unsharded(arguments, report.name, report)
        return compiled.by_line(hardware=arguments.hardware)


def _stage_of(
    arguments: argparse.Namespace, target: str, value: Any, others: str = ""
) -> Traced | Lowered | Compiled:
    """Returns the program that the user's function returned, or traces the function it returned.

    Args:
      target: what the user's function is called in messages.
      value: what it returned: ``(function, *arguments)``, a function without arguments, or a stage
        of a program.
      others: what else it may be, at the end of a message: ``or a report``.
    """
    function, *args = value if isinstance(value, tuple) and value else (value,)
    _check_donate(arguments, target, function)
    if isinstance(value, Traced | Lowered | Compiled):
        return value
    if not callable(function) or isinstance(function, type):
        stage = "the result of its trace, lower or compile"
        last = f"{stage}, {others}" if others else f"or {stage}"
        raise UserError(
            f"{target} returned {value!r:.200}. It has to return (function, *arguments), a "
            f"function of nnx_sharding.jit, {last}."
        )
    is_jitted = isinstance(function, Lifted)
    jitted = function if is_jitted else jit(function, **_jit_options(arguments))
    return jitted.trace(*args)


def _compile(stage: Traced | Lowered | Compiled) -> Compiled:
    """Returns a stage compiled; a stage that is not lowered is lowered first."""
    if isinstance(stage, Traced):
        stage = stage.lower()
    return stage.compile() if isinstance(stage, Lowered) else stage


def _make_comparison(arguments: argparse.Namespace, target: str, value: object) -> Comparison:
    """Compares the strategies that a function returned.

    Args:
      target: what the user's function is called in messages.
      value: what it returned: the arguments of ``compare``, as ``(strategies, function,
        *arguments)``; the result of ``compare``; or a mapping from names to programs.
    """
    if isinstance(value, Comparison):
        return value
    if isinstance(value, Mapping) and value:
        reports: dict[str, ProgramReport | Failure] = {}
        for name, program in value.items():
            name_in_messages = f"{target}, {name},"  # "train.py:step, fsdp, returned …"
            make_report = partial(_make_report, arguments, name_in_messages, program)
            report = attempt(make_report)  # a failure does not end the others
            reports[str(name)] = report
            if isinstance(report, ProgramReport):
                _warn_if_unsharded(arguments, str(name), report)
        return Comparison(reports)
    if not isinstance(value, tuple) or len(value) < 2 or not isinstance(value[0], Mapping):
        raise UserError(
            f"{target} returned {value!r:.200}. It has to return (strategies, function, "
            "*arguments), a Comparison, or a mapping from names to programs."
        )
    with user_code(f"what {target} returned cannot be compared"):
        _, function, *_ = value
        _check_donate(arguments, target, function)
        return compare(*value, by_module=arguments.by_module, **_jit_options(arguments))
