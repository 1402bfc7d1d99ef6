"""Chooses the subcommand, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import compare, diff, inspect, launch
from .output import Parser, say_error

COMMANDS = (inspect, compare, diff, launch)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words of the command line after the program; None for those of this process.

    Returns:
      The exit code: 0 if all went well, 1 after an error, 2 if the command line is wrong. A
      command may have more.

    Example:
      >>> from nnx_sharding.cli.main import main
      >>> main(["launch", "--help"])
      usage: python -m nnx_sharding launch ...
      0
    """
    try:
        arguments = _parser().parse_args(argv)
        return int(arguments.run(arguments))
    except SystemExit as error:  # so ends argparse, also after --help
        return error.code if isinstance(error.code, int) else 2
    except Exception as error:
        if arguments.traceback:
            raise
        say_error(f"{arguments.command}: {error or type(error).__name__}")
        return 1


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--traceback", action="store_true", help="show where in the code an error comes from"
    )
    parser = Parser(prog="python -m nnx_sharding", description="Tools for sharded Flax NNX models.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        command.add(subparsers, parents=[common])
    return parser
