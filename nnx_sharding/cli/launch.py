"""``launch``: several processes of one program on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..testing import launch
from .options import UsageError, count, seconds


def add_commands(subparsers: Any) -> None:
    """Adds the parser of this command."""
    parser = subparsers.add_parser(
        "launch",
        help="run a program in several processes on this machine",
        description="Runs a Python program in several processes on this machine, in which\n"
        "jax.distributed.initialize() needs no arguments. If one fails, the others are ended.",
        epilog="exit code: that of the process that failed first, 128 + n after signal n;\n"
        "124 after --timeout; else 0, or 2 if the command line is wrong",
        usage="%(prog)s [options] {script.py | -m module} [argument ...]",
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("--processes", type=count, default=2, metavar="N", help="default: 2")
    text = "of each process, virtual ones on the CPU (default: 1)"
    add("--devices-per-process", type=count, default=1, metavar="N", help=text)
    add("--platform", default="cpu", metavar="NAME", help="JAX_PLATFORMS (default: cpu)")
    add("--timeout", type=seconds, metavar="SECONDS", help="end all processes after this time")
    text = "from asking a process to end until it is killed (default: 3)"
    add("--grace", type=seconds, default=3.0, metavar="SECONDS", help=text)
    add("-m", dest="module", nargs="...", help="run a module, as python -m does")
    add("program", nargs="...", help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> int:
    program = arguments.program if arguments.module is None else ["-m", *arguments.module]
    if program in ([], ["-m"]):
        raise UsageError("name a script (train.py) or `-m module`")
    if arguments.module is None and not Path(program[0]).exists():
        raise UsageError(f"no such file: {program[0]}")
    names = ("processes", "devices_per_process", "platform", "timeout", "grace")
    return launch(program, **{name: getattr(arguments, name) for name in names})
