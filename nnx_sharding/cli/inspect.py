"""``inspect``: what one program takes."""

from __future__ import annotations

import argparse
from typing import Any

from ..analysis.units import bytes_text
from .output import say_error
from .programs import (
    add_options,
    compiled,
    found_by,
    in_context,
    limit_of,
    write,
)


def add(subparsers: Any, **common: Any) -> None:
    """Adds the parser of this command."""
    parser = subparsers.add_parser(
        "inspect",
        help="compile a function and show its memory, cost and collectives",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **common,
    )
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


_DESCRIPTION = """\
Calls a function of yours, compiles what it returns, and shows how its arguments are laid out,
the memory that it takes, what it computes and what the devices exchange. Nothing is run, and
neither the devices nor the memory have to be there."""

_EPILOG = """\
The function returns what to compile: (function, *arguments), a function that nnx_sharding.jit
made, or what its trace, lower or compile returned. For example, in plan.py:

  def forward(mesh):
      model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))   # shapes only
      step = jit(apply, in_shardings=(fsdp(model, mesh), P("data")), mesh=mesh)
      return step, model, jax.ShapeDtypeStruct((256, 1024), "float32")

  python -m nnx_sharding inspect plan.py:forward --mesh data=64
  python -m nnx_sharding inspect plan.py:forward --mesh data=64 --html report.html
  python -m nnx_sharding inspect plan.py:forward --mesh data=64 --memory-limit 2GiB   # in CI

exit code: 0; 1 if more than the memory limit is needed or the function failed; 2 if the command
line is wrong"""


def run(arguments: argparse.Namespace) -> int:
    """Shows the report; returns the exit code."""
    found, mesh = found_by(arguments)
    with in_context(mesh):
        report = compiled(arguments.target, found, arguments.device)
    write(arguments, report)
    limit = limit_of(arguments)
    peak = None if report.memory is None else report.memory.peak
    if limit is None or (peak is not None and peak <= limit):
        return 0
    needs = "the backend does not tell its memory" if peak is None else f"needs {bytes_text(peak)}"
    told = f"{report.name}: {needs}; the limit is {bytes_text(limit)} on each device"
    say_error(f"inspect: {told}")
    return 1
