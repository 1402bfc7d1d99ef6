"""``diff``: what changed between two reports or comparisons."""

from __future__ import annotations

import argparse
from typing import Any

from ..report.changes import diff, load
from ..report.comparison import Comparison
from ..report.program import ProgramReport
from .output import say_error
from .programs import add_outputs, write


def add(subparsers: Any, **common: Any) -> None:
    """Adds the parser of this command."""
    parser = subparsers.add_parser(
        "diff",
        help="show what changed between two reports or comparisons",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **common,
    )
    parser.add_argument("before", metavar="BEFORE.json", help="the report or comparison before")
    parser.add_argument("after", metavar="AFTER.json", help="the one after, of the same kind")
    parser.add_argument(
        "--threshold",
        type=_percent,
        default=0.0,
        metavar="PERCENT",
        help="leave out figures that changed by no more than this, up or down (default: 0%%)",
    )
    parser.add_argument(
        "--fail-above",
        type=_percent,
        metavar="PERCENT",
        help="fail only if memory, cost, roofline or collectives grew by more than this",
    )
    add_outputs(parser)
    parser.set_defaults(run=run, parser=parser)


_DESCRIPTION = """\
Shows what changed between two files that inspect or compare wrote by --json, for example from
two commits or two releases of JAX: memory, cost, collectives, and how arguments are laid out."""

_EPILOG = """\
For example, as a check of a pull request:

  python -m nnx_sharding inspect plan.py:step --mesh data=64 --json after.json
  python -m nnx_sharding diff before.json after.json --fail-above 5%

exit code: 0 if nothing changed; 1 if something did, or with --fail-above if figures grew by more;
2 if a file cannot be read or the command line is wrong"""


def run(arguments: argparse.Namespace) -> int:
    """Shows the changes; returns the exit code."""
    try:
        before, after = load(arguments.before), load(arguments.after)
        changes = diff(before, after, threshold=arguments.threshold)
    except (OSError, ValueError) as error:
        arguments.parser.error(str(error))
    write(arguments, changes, _side_by_side(before, after))
    if arguments.fail_above is None:
        return int(bool(changes))
    grown = changes.grown(arguments.fail_above)
    if grown:
        say_error(f"diff: these grew by more than {arguments.fail_above:.1%}:")
        for change in grown:
            own = f"{change.strategy}: " if change.strategy else ""
            say_error(f"  {own}{change}")
    return int(bool(grown))


def _side_by_side(
    before: ProgramReport | Comparison, after: ProgramReport | Comparison
) -> Comparison:
    """All reports of both for the page."""
    reports = {
        f"{name} ({side})" if name else side: report
        for side, found in (("before", before), ("after", after))
        for name, report in (
            found.reports if isinstance(found, Comparison) else {"": found}
        ).items()
    }
    limit = before.memory_limit if isinstance(before, Comparison) else None
    return Comparison(reports, limit)


def _percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a percentage such as 5%, not {text}")
    return percent / 100
