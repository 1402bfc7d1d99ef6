"""Chooses the command, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import diff, launch, programs
from .options import Parser, UsageError, say_error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words of the command line after the program; None for those of this process.

    Returns:
      The exit code: 0 after success, 1 after an error, 2 if the command line is wrong. A command
      may have others.

    Example:
      >>> from nnx_sharding.cli.main import main
      >>> main(["launch", "--help"])
      usage: python -m nnx_sharding launch ...
      0
    """
    try:
        arguments = _parser().parse_args(argv)
        try:
            return int(arguments.run(arguments))
        except UsageError as error:
            parser: Parser = arguments.parser
            parser.error(str(error))
    except SystemExit as error:  # of argparse, also after --help
        return error.code if isinstance(error.code, int) else 2
    except Exception as error:
        if arguments.traceback:
            raise
        say_error(f"{arguments.command}: {error or type(error).__name__}")
        return 1


def _parser() -> Parser:
    parser = Parser(prog="python -m nnx_sharding", description="Tools for sharded Flax NNX models.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in (programs, diff, launch):
        module.add_parser(functools.partial(_add_command, subparsers))
    return parser


def _add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    """Adds a command; ``run`` returns its exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, formatter_class=formatter, **texts
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run, parser=parser)
    return parser
