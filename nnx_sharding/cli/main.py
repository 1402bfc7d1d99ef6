"""Chooses the command, and turns errors into messages and exit codes.

A command is a parser whose default ``run`` takes the parsed arguments and returns the exit code.
Errors of the command line (``UsageError``) exit with 2, as those of argparse; any other error is
one line on stderr and exits with 1, unless ``--traceback`` asks for more.

`say` prints a text without control characters. Each of the modules `commands`, `numbers` and
`programs` adds the parsers of its commands by ``add_commands``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .._version import __version__
from . import commands, numbers, programs
from .options import Parser, UsageError, say


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, by default the command line of this process; returns the exit code.

    The code is 0 after success, 1 after an error, 2 if the command line is wrong. A command may
    return other codes.
    """
    # Usage and examples show the command as the user has called it.
    is_script = Path(sys.argv[0]).stem == "nnx-sharding"
    name = "nnx-sharding" if is_script else "python -m nnx_sharding"
    parser = Parser(prog=name, description="Tools for sharded Flax NNX models.")
    parser.add_argument("--version", action="version", version=f"nnx_sharding {__version__}")
    parsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in (programs, numbers, commands):
        module.add_commands(parsers)
    for command in parsers.choices.values():  # all commands have the same formatter and options
        command.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
        command.epilog = (command.epilog or "").replace("python -m nnx_sharding", name)
        text = "show the traceback of an error"
        command.add_argument("--traceback", action="store_true", help=text)
        command.set_defaults(parser=command)  # for the usage below an error
    try:
        return _run(parser.parse_args(argv))  # prints errors; returns the exit code
    except SystemExit as error:  # argparse raises it after --help, or for a wrong command line
        return error.code if isinstance(error.code, int) else 2
    except BrokenPipeError:  # the program that reads our output has ended, for example `head`
        # Output goes nowhere from now on, because Python would flush once more and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # a program that the signal ends has the same code


def _run(arguments: argparse.Namespace) -> int:
    """Runs the command that was chosen; returns the exit code.

    Raises:
      SystemExit: the command found that the command line is wrong; its usage is printed.
      BrokenPipeError: nobody reads the output.
    """
    try:
        code = int(arguments.run(arguments))
        # Output is flushed here, because a broken pipe is caught here, and not when Python ends.
        sys.stdout.flush()
        return code
    except UsageError as error:
        # The method is called by the class, because type checkers know that it does not return.
        Parser.error(arguments.parser, str(error))
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        say(f"{arguments.command}: stopped by SIGINT", error=True)
        return 128 + signal.SIGINT
    except Exception as error:
        # One line is enough for most errors, because they are errors of the user's code.
        if arguments.traceback:
            raise
        say(f"{arguments.command}: {error or type(error).__name__}", error=True)
        return 1
