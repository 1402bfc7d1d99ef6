"""``diff``, ``launch`` and ``explain``: commands that compile nothing.

Each ``run_…`` takes the parsed command line, and returns the exit code. `say` prints a text, and
`write` a result, which it also writes to the files of ``--json`` and ``--html``. A ``UsageError``
is a mistake of the command line, with an exit code of its own.
"""

from __future__ import annotations

import argparse
import difflib
import re
from functools import partial
from pathlib import Path
from typing import Any

from ..analysis.program import ProgramReport
from ..analysis.units import bound_text
from ..report.changes import by_strategy, diff, only_on_one_side
from ..report.comparison import DECISIVE, Column, Comparison, figure_text, load, why_unknown
from ..testing import launch
from .options import UsageError, count, percentage, say, seconds
from .programs import add_outputs, write

_DIFF = """\
For example, as a check of a pull request:

  python -m nnx_sharding diff before.json after.json --fail-above 5%

exit code: 0 if nothing changed; 1 if something did, or with --fail-above if figures grew by more
or are unknown; 2 if a file cannot be read or the command line is wrong"""


def add_commands(subparsers: Any) -> None:
    """Adds the parsers of these commands."""
    _add_diff(subparsers)
    _add_launch(subparsers)
    parser = subparsers.add_parser(
        "explain",
        help="explain an error",
        description="Prints what an error means and what to do about it.",
        epilog="exit code: 0, or 2 if there is no such section",
    )
    parser.set_defaults(run=run_explain)
    text = "as the note below an error names it; without it, all are listed"
    parser.add_argument("section", nargs="?", help=text)


def _add_diff(subparsers: Any) -> None:
    """Adds the parser of ``diff``."""
    parser = subparsers.add_parser(
        "diff",
        help="show what changed between two reports, comparisons or plans",
        description="Shows what changed between two files that inspect, compare or plan wrote\n"
        "with --json: the best candidate, memory, cost, collectives, shardings of arguments.",
        epilog=_DIFF,
    )
    parser.set_defaults(run=run_diff)
    add = parser.add_argument  # once for each option below
    add("before", metavar="BEFORE.json", help="the report, comparison or plan before")
    add("after", metavar="AFTER.json", help="the one after, of the same kind")
    text = "leave out figures that changed by no more than this, up or down (default: 0%%)"
    add("--threshold", type=percentage, default=0.0, metavar="PERCENT", help=text)
    text = "fail only if memory, cost, roofline or collectives grew by more than this or are "
    add("--fail-above", type=percentage, metavar="PERCENT", help=f"{text}unknown")
    add_outputs(parser)


def _add_launch(subparsers: Any) -> None:
    """Adds the parser of ``launch``, whose options are called like the parameters of `launch`."""
    parser = subparsers.add_parser(
        "launch",
        help="run a program in several processes on this machine",
        description="Runs a Python program in several processes on this machine, in which\n"
        "jax.distributed.initialize() needs no arguments. If one fails, the others are ended.",
        epilog="exit code: that of the process that failed first, 128 + n after signal n;\n"
        "124 after --timeout; else 0, or 2 if the command line is wrong",
        usage="%(prog)s [options] {script.py | -m module} [argument ...]",
    )
    parser.set_defaults(run=run_launch)
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


def run_diff(arguments: argparse.Namespace) -> int:
    """Shows the changes; returns the exit code.

    It is 1 if anything changed or, with ``--fail-above``, if figures grew by more or are unknown.
    """
    try:
        before, after = load(arguments.before), load(arguments.after)
        changes = diff(before, after, threshold=arguments.threshold)
    # A file that cannot be read is a mistake of the command line, with its own exit code.
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    # The changes are written before the exit code is known, because they are shown in any case.
    head = _best_changed(before, after) if changes else ""
    if head and arguments.json != "-":
        say(head)
    write(arguments, changes, head=head)
    if arguments.fail_above is None:
        return int(bool(changes))
    # Each failure has its strategy. Changes that --threshold leaves out above count here, too.
    grown = diff(before, after).grown(arguments.fail_above)
    failures = [("", line) for line in only_on_one_side(grown)]
    failures += [(x.strategy, str(x)) for x in grown if not x.only_on_side]
    # A figure that a backend does not report may have grown by anything.
    for name, report in by_strategy(after).items():
        reasons = why_unknown(report) if isinstance(report, ProgramReport) else {}
        failures += [(name, f"{figure} is unknown: {why}") for figure, why in reasons.items()]
    if failures:
        head = f"diff: these grew by more than {arguments.fail_above:.1%}, or are unknown:"
        # The name of the strategy is empty for single reports.
        lines = (f"  {name}: {failure}" if name else f"  {failure}" for name, failure in failures)
        say("\n".join([head, *lines]), error=True)
    return int(bool(failures))


def _best_changed(before: ProgramReport | Comparison, after: ProgramReport | Comparison) -> str:
    """Returns lines with the best strategy or candidate before and after; "" for single reports.

    The names of candidates have the mesh, so two plans for different devices have no common name,
    and their figures are in no other line.
    """
    if not isinstance(before, Comparison) or not isinstance(after, Comparison):
        return ""
    texts = _best_text(before), _best_text(after)
    if texts[0] == texts[1]:
        return f"best: {texts[0]}, as before"
    return f"best before: {texts[0]}\nbest after: {texts[1]}"


def _best_text(comparison: Comparison) -> str:
    """Returns the best of a comparison with its figures: "fsdp, data 8: peak 2 GiB, …".

    The best has the shortest time among those that fit, measured or else estimated. Without any
    time, it has the shortest known part of one, and without that, it sends least, as in a plan.
    """
    names = {column: comparison.best(column) for column in DECISIVE}
    bounds = {name: comparison.at_least[name]["roofline"] for name in comparison.fitting}
    known = {name: seconds for name, seconds in bounds.items() if seconds is not None}
    shortest = min(known, key=known.__getitem__, default=None)
    in_order = (names["measured"], names["roofline"], shortest, names["bytes_sent"])
    best = next((name for name in in_order if name is not None), None)
    if best is None:
        return "none fits" if comparison.reports else "none was compiled"
    figures, at_least = comparison.figures[best], comparison.at_least[best]
    columns: tuple[Column, ...] = (*DECISIVE, "peak")
    texts = [
        f"{column.replace('bytes_sent', 'sent')} "
        f"{bound_text(figures[column], at_least[column], partial(figure_text, column))}"
        for column in columns
        if figures[column] is not None or at_least[column] is not None
    ]
    return f"{best}: {', '.join(texts)}"


def run_launch(arguments: argparse.Namespace) -> int:
    """Runs a program in several processes; returns the exit code that `launch` returns."""
    # `program` is a list of words: a script and its arguments, or -m, a module and its arguments.
    program = arguments.program if arguments.module is None else ["-m", *arguments.module]
    # The check is here, because argparse cannot require one of the two.
    if program in ([], ["-m"]):
        raise UsageError("name a script (train.py) or `-m module`")
    # A missing file is reported before processes start, because each of them would report it.
    if arguments.module is None and not Path(program[0]).exists():
        raise UsageError(f"no such file: {program[0]}")
    # These options are called like the parameters of `launch`.
    names = ("processes", "devices_per_process", "platform", "timeout", "grace")
    return launch(program, **{name: getattr(arguments, name) for name in names})


def run_explain(arguments: argparse.Namespace) -> int:
    """Shows a section of the page of errors, or their names; returns the exit code."""
    sections, name = _sections(), arguments.section
    if name is not None and name not in sections:
        close = [f"did you mean {near}?" for near in difflib.get_close_matches(name, sections, 1)]
        raise UsageError("; ".join([f"no section {name!r}", *close]))
    say("\n".join(sections) if name is None else sections[name])
    return 0


def _sections() -> dict[str, str]:
    """Returns the text of each section of the page of errors, with its subsections, by anchor.

    An anchor is the end of the section's address on the web, which errors print.
    """
    installed = Path(__file__).with_name("errors.md")  # setup.py puts it there
    page = installed if installed.exists() else Path(__file__).parents[2] / "docs" / "errors.md"
    # Comments of one line are removed, because they only mark where a script writes messages.
    text = re.sub(r"<!--.*?-->\n", "", page.read_text(encoding="utf-8"))
    # A heading, "## Not divisible", may have an anchor of its own on the line before:
    # "(indivisible)=".
    pattern = r"^(?:\((?P<anchor>[\w-]+)\)=\n)?(?P<marks>##+) (?P<title>.*)\n"
    headings = list(re.finditer(pattern, text, flags=re.MULTILINE))
    sections = {}
    for index, heading in enumerate(headings):
        # A section ends where a section of its own level, or of a higher one, begins. So it
        # includes its subsections, which are sections by themselves, too.
        level = len(heading["marks"])
        later = (other for other in headings[index + 1 :] if len(other["marks"]) <= level)
        end = next((other.start() for other in later), len(text))
        # Sphinx makes the same anchors from the headings of this page: "Not divisible" →
        # "not-divisible".
        title_anchor = re.sub(r"[^\w\- ]", "", heading["title"].lower()).replace(" ", "-")
        anchor = heading["anchor"] or title_anchor
        sections[anchor] = text[heading.start("marks") : end].rstrip()
    return sections
