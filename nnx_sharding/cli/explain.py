"""``explain``: the section of the page of errors that the note below an error names."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import Any

from .options import UsageError, say


def add_commands(subparsers: Any) -> None:
    """Adds the parser of this command."""
    parser = subparsers.add_parser(
        "explain",
        help="explain an error",
        description="Prints what an error means and what to do about it.",
        epilog="exit code: 0, or 2 if there is no such section",
    )
    parser.set_defaults(run=_run)
    text = "as the note below an error names it; without it, all are listed"
    parser.add_argument("section", nargs="?", help=text)


def _run(arguments: argparse.Namespace) -> int:
    sections = _sections()
    name = arguments.section
    if name is None:
        say("\n".join(sections))
    elif name in sections:
        say(sections[name])
    else:
        close = [f"did you mean {near}?" for near in difflib.get_close_matches(name, sections, 1)]
        raise UsageError("; ".join([f"no section {name!r}", *close]))
    return 0


def _sections() -> dict[str, str]:
    """The text of each section with its subsections, by its anchor."""
    installed = Path(__file__).with_name("errors.md")  # setup.py puts it there
    page = installed if installed.exists() else Path(__file__).parents[2] / "docs" / "errors.md"
    text = page.read_text(encoding="utf-8")
    # Marks for the script that writes the messages.
    text = re.sub(r"<!--.*?-->\n", "", text)
    # A heading may have an anchor of its own in front of it.
    headings = [*re.finditer(r"^(?:\(([\w-]+)\)=\n)?(##+) (.*)\n", text, flags=re.MULTILINE)]
    sections = {}
    for index, heading in enumerate(headings):
        later = (next_ for next_ in headings[index + 1 :] if len(next_[2]) <= len(heading[2]))
        end = next((next_.start() for next_ in later), len(text))
        anchor = heading[1] or re.sub(r"[^\w\- ]", "", heading[3].lower()).replace(" ", "-")
        sections[anchor] = text[heading.start(2) : end].rstrip()
    return sections
