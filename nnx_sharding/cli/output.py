"""What the commands write to the terminal, where no name is a control sequence."""

from __future__ import annotations

import argparse
import sys
from typing import IO, Any, NoReturn

from ..analysis.units import printable


def say(text: Any, file: IO[str] | None = None) -> None:
    """Prints a text of several lines; None for stdout."""
    print(printable(text, kept="\n"), file=file)


def say_error(text: Any) -> None:
    """The same on stderr."""
    say(text, sys.stderr)


class Parser(argparse.ArgumentParser):
    """A parser, and so its subcommands, whose errors show what was written on the command line."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with a message."""
        super().error(printable(message, kept="\n"))
