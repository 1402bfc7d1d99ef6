"""Types of options, output and the error of a wrong command line, which the commands share.

The type of an option is a function of its text, which argparse calls; `option` makes argparse show
the message of the ValueError that it raises. A function below `@option` reads one option, and
raises a ValueError for a text that is wrong.

`printable` escapes control characters, except those that it is told to keep. `file_path` replaces
``~`` by the home directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ..analysis.json_codec import file_path
from ..analysis.units import printable
from ..partition.mesh import MOST_DEVICES

T = TypeVar("T")


class UsageError(ValueError):
    """The command line is wrong; the exit code is 2."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors print no control characters."""

    def error(self, message: str) -> NoReturn:
        """Exits with a message."""
        super().error(printable(message, kept="\n"))


def say(text: object, *, error: bool = False) -> None:
    """Prints text, which may have several lines, without control characters."""
    print(printable(text, kept="\n"), file=sys.stderr if error else sys.stdout)


def option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Makes the type of an option from a function that reads it, or raises a ValueError.

    argparse shows the message of an ``ArgumentTypeError`` only.
    """

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@option
def count(text: str) -> int:
    """Reads a number of processes or devices."""
    if not 1 <= int(text) <= MOST_DEVICES:
        raise ValueError(f"must be from 1 to {MOST_DEVICES}, not {int(text)}")
    return int(text)


@option
def seconds(text: str) -> float:
    """Reads a time limit: an int if it is one, for messages such as ``within 60 s``."""
    value = float(text)
    if not value > 0:  # not a number, `nan`, is no limit either
        raise ValueError(f"must be more than 0, not {text}")
    return int(value) if value.is_integer() else value


@option
def output(text: str) -> str:
    """Reads the name of a file to write, whose folder exists; ``-`` is standard output.

    It is checked before anything is compiled, which may take minutes.
    """
    path = file_path(text)
    if text != "-" and path.is_dir():
        raise ValueError(f"{text} is a folder")
    if text != "-" and not os.access(path.parent, os.W_OK):
        raise ValueError(f"{text} cannot be written: there is no writable folder {path.parent}")
    return text


@option
def file(text: str) -> str:
    """Reads the name of a file to write; not ``-``, which is for JSON only."""
    if text == "-":
        raise ValueError("must be the name of a file; standard output has what --json - prints")
    return output(text)


@option
def percentage(text: str) -> float:
    """Reads ``5%`` or ``5`` as the fraction 0.05."""
    # What is no number has the same message as a number out of range.
    with contextlib.suppress(ValueError):
        percent = float(text.strip().removesuffix("%"))
        if 0 <= percent < float("inf"):
            return percent / 100
    raise ValueError(f"must be a percentage such as 5%, not {text}")


@option
def mesh_sizes(text: str) -> dict[str, int]:
    """Reads the sizes of axes from ``data=2,model=4``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        # -1 is a size: the devices that the other axes leave. What other numbers a mesh may have is
        # checked when it is made.
        if not name or not re.fullmatch(r"-?\d+", number) or name in sizes:
            raise ValueError(
                f"{part!r} in {text!r}: write each axis once with its size, as in data=2,model=4"
            )
        sizes[name] = int(number)
    return sizes
