"""``diff``: what changed between two reports or comparisons."""

from __future__ import annotations

import argparse
from typing import Any

from ..report.changes import by_strategy, diff
from ..report.comparison import Comparison, load, why_unknown
from .options import UsageError, percentage, say
from .programs import add_outputs, write

_EPILOG = """\
For example, as a check of a pull request:

  python -m nnx_sharding diff before.json after.json --fail-above 5%

exit code: 0 if nothing changed; 1 if something did, or with --fail-above if figures grew by more
or are unknown; 2 if a file cannot be read or the command line is wrong"""


def add_commands(subparsers: Any) -> None:
    """Adds the parser of this command."""
    parser = subparsers.add_parser(
        "diff",
        help="show what changed between two reports or comparisons",
        description="Shows what changed between two files that inspect or compare wrote with\n"
        "--json: memory, cost, collectives and the shardings of arguments.",
        epilog=_EPILOG,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("before", metavar="BEFORE.json", help="the report or comparison before")
    add("after", metavar="AFTER.json", help="the one after, of the same kind")
    threshold = "leave out figures that changed by no more than this, up or down (default: 0%%)"
    add("--threshold", type=percentage, default=0.0, metavar="PERCENT", help=threshold)
    fail_above = (
        "fail only if memory, cost, roofline or collectives grew by more than this or are unknown"
    )
    add("--fail-above", type=percentage, metavar="PERCENT", help=fail_above)
    add_outputs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Shows the changes; returns the exit code."""
    try:
        before, after = load(arguments.before), load(arguments.after)
        changes = diff(before, after, threshold=arguments.threshold)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    write(arguments, changes)
    if arguments.fail_above is None:
        return int(bool(changes))
    failures: list[tuple[str, Any]] = [
        (change.strategy, change) for change in changes.grown(arguments.fail_above)
    ]
    failures += [
        (name, f"{figure} is unknown: {why}")
        for name, report in Comparison(by_strategy(after)).compiled.items()
        for figure, why in why_unknown(report).items()
    ]
    if failures:
        say(
            f"diff: these grew by more than {arguments.fail_above:.1%}, or are unknown:", error=True
        )
    for name, failure in failures:
        say(f"  {name}: {failure}" if name else f"  {failure}", error=True)
    return int(bool(failures))
