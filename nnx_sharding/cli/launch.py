"""``launch``: several processes of one program on this machine."""

from __future__ import annotations

import argparse
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..partition.virtual import MOST_DEVICES
from ..testing import launch


def add(subparsers: Any, **common: Any) -> None:
    """Adds the parser of this command."""
    parser = subparsers.add_parser(
        "launch",
        help="run a program in several processes on this machine",
        description="Runs a Python program in several processes on this machine, in which "
        "jax.distributed.initialize() needs no arguments, as on a cluster. If one fails the "
        "others are ended, and its exit code is that of the command (128 + n for signal n; 124 "
        "after --timeout).",
        usage="%(prog)s [options] script.py [argument ...]\n"
        "       %(prog)s [options] -m module [argument ...]",
        **common,
    )
    parser.add_argument(
        "--processes", type=_count, default=2, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument(
        "--devices-per-process",
        type=_count,
        default=1,
        metavar="N",
        help="how many devices each has, on the CPU virtual ones (default: %(default)s)",
    )
    parser.add_argument(
        "--platform",
        default="cpu",
        metavar="NAME",
        help="what JAX_PLATFORMS is set to, such as cuda (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end all processes after this time (default: never)",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=3.0,
        metavar="SECONDS",
        help="from asking a process to end until it is killed (default: %(default)g)",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Launches the program; returns the exit code."""
    is_module = arguments.module is not None
    program = arguments.module if is_module else arguments.program
    fault = _fault(program, is_module)
    if fault:
        arguments.parser.error(fault)
    return launch(
        ["-m", *program] if is_module else program,
        processes=arguments.processes,
        devices_per_process=arguments.devices_per_process,
        platform=arguments.platform,
        timeout=arguments.timeout,
        grace=arguments.grace,
    )


def _fault(program: list[str], is_module: bool) -> str | None:
    """What is wrong with a program, as far as that can be seen without running it."""
    if not program:
        return "which module? -m needs a name" if is_module else "which program? Name a script"
    name = program[0]
    if not is_module:
        return None if Path(name).exists() else f"there is no file {name}"
    # As the processes will look for it, but without importing the packages that it is in.
    found = PathFinder.find_spec(name.partition(".")[0], ["", *sys.path])
    return None if found else f"there is no module {name}"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    if number > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_DEVICES}, not {number}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return number
