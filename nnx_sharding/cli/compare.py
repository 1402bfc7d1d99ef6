"""``compare``: strategies side by side."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from typing import Any

from ..analysis.units import bytes_text
from ..report.comparison import Comparison, Failure
from ..report.strategies import attempt
from ..report.strategies import compare as compare_strategies
from .output import say_error
from .programs import (
    add_options,
    compiled,
    found_by,
    in_context,
    limit_of,
    write,
)
from .targets import UsersError, told


def add(subparsers: Any, **common: Any) -> None:
    """Adds the parser of this command."""
    parser = subparsers.add_parser(
        "compare",
        help="compile a function by several strategies and show them in one table",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **common,
    )
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


_DESCRIPTION = """\
Calls a function of yours and compiles the strategies that it returns, each by itself: one
table of what each takes. Nothing is run, and neither the devices nor the memory have to be
there."""

_EPILOG = """\
The function returns (strategies, function, *arguments), which are the arguments of
nnx_sharding.report.compare; or what compare itself returned; or a mapping from names to programs,
each as for the command inspect. For example, in plan.py:

  def strategies():
      model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))   # shapes only
      x = jax.ShapeDtypeStruct((256, 1024), "float32")
      return {
          "dp": lambda model, x: (replicated(model), P("data")),
          "fsdp": lambda model, x: (fsdp(model), P("data")),
      }, apply, model, x

  python -m nnx_sharding compare plan.py:strategies --mesh data=256 --memory-limit 16GiB
  python -m nnx_sharding compare plan.py:strategies --mesh data=256 --device "TPU v5e"
  python -m nnx_sharding compare plan.py:strategies --mesh data=256 --json a.json --html a.html

exit code: 0; 1 if a strategy failed, none fits the memory or the function failed; 2 if the
command line is wrong"""


def run(arguments: argparse.Namespace) -> int:
    """Shows the comparison; returns the exit code."""
    found, mesh = found_by(arguments)
    with in_context(mesh):
        comparison = _compared(arguments.target, found)
    limit = limit_of(arguments)
    comparison = comparison.judged(memory_limit=limit, device=arguments.device)
    write(arguments, comparison)
    failed = [name for name, own in comparison.reports.items() if isinstance(own, Failure)]
    if failed:
        say_error(f"compare: failed: {', '.join(failed)}")
    elif not comparison.fitting:
        assert comparison.memory_limit is not None
        text = bytes_text(comparison.memory_limit)
        say_error(f"compare: no strategy fits {text} on each device")
    return int(bool(failed) or not comparison.fitting)


def _compared(target: str, found: Any) -> Comparison:
    """The comparison of what a function returned.

    Raises:
      UsersError: it is nothing that can be compared.
    """
    if isinstance(found, Comparison):
        return found
    if isinstance(found, Mapping) and found:
        reports = {
            str(name): attempt(functools.partial(compiled, f"{target}, {name},", own, None))
            for name, own in found.items()
        }
        return Comparison(reports)
    if not isinstance(found, tuple) or len(found) < 2 or not isinstance(found[0], Mapping):
        raise UsersError(
            f"{target} returned {found!r:.200}. It has to return (strategies, function, "
            "*arguments), a Comparison, or a mapping from names to programs."
        )
    try:
        return compare_strategies(*found)
    except (TypeError, ValueError) as error:
        raise UsersError(f"what {target} returned cannot be compared: {told(error)}") from error
