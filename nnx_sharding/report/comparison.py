"""Strategies side by side: what each takes, compiled before any device is there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from .. import _compat
from ..analysis.hardware import Device
from ..analysis.hardware import device as device_named
from ..analysis.units import bytes_text, count_text, printable, time_text
from ..graph import merge, split
from ..jit import jit
from ..lifted import Lifted
from ..partition.virtual import planning_mesh
from ..state_sharding import StateSharding
from .json_form import JsonForm
from .limits import read_bytes
from .program import ProgramReport

FORMAT = "nnx_sharding.comparison"
VERSION = 1

AnyMesh: TypeAlias = Mesh | AbstractMesh | Mapping[str, int]
Column: TypeAlias = Literal["peak", "arguments", "bytes_sent", "flops", "roofline", "planning"]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to lay out the arguments of a function, for :func:`compare`.

    Attributes:
      in_shardings: as for :func:`~nnx_sharding.jit`; or a function that is called with the
        abstract arguments, with the mesh in context, and returns that.
      mesh: the mesh of this strategy; None for the one that all have.
      out_shardings: as for :func:`~nnx_sharding.jit`.
    """

    in_shardings: Any
    mesh: AnyMesh | None = None
    out_shardings: Any = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """A strategy that could not be compiled.

    Attributes:
      error: the type of the error and its text.
    """

    error: str


@dataclasses.dataclass(frozen=True)
class Comparison(JsonForm):
    """Reports side by side: what :func:`compare` returns. ``print`` shows a table.

    Attributes:
      reports: for each strategy its report, or why there is none.
      memory_limit: the bytes that a device has; None if that was not said.
      seconds: how long it took to trace, lower and compile each strategy, as far as it is known.

    Raises:
      TypeError: something else stands where a report belongs.
      ValueError: there are no reports.
    """

    reports: Mapping[str, ProgramReport | Failure]
    memory_limit: int | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.reports:
            raise ValueError("there is nothing to compare: give at least one report.")
        wrong = [
            f"  {name!r}: {found!r}"
            for name, found in self.reports.items()
            if not isinstance(found, ProgramReport | Failure)
        ]
        if wrong:
            raise TypeError("these are no reports of programs:\n" + "\n".join(wrong))

    @property
    def figures(self) -> dict[str, dict[Column, float | None]]:
        """For each strategy that was compiled the figures of one device; None if not known.

        ``peak``, ``arguments`` and ``bytes_sent`` (by collectives in one call) are in bytes,
        ``roofline`` (the least time on the device that was named) and ``planning`` in seconds.
        """
        return {name: self._figures(name, report) for name, report in self._compiled.items()}

    @property
    def bytes_sent_by_axes(self) -> dict[str, dict[tuple[str, ...] | None, int]]:
        """For each strategy that was compiled the bytes that one device sends, by mesh axes."""
        return {name: report.collectives.by_axes() for name, report in self._compiled.items()}

    @property
    def fitting(self) -> tuple[str, ...]:
        """The strategies whose peak is known and within ``memory_limit``; all if there is none."""
        return tuple(name for name in self._compiled if self.fits(name) is True)

    def fits(self, name: str) -> bool | None:
        """Whether a strategy fits the memory; None if its peak is not known.

        Raises:
          KeyError: there is no such strategy.
        """
        report = self.reports[name]
        if isinstance(report, Failure):
            return False
        peak = None if report.memory is None else report.memory.peak
        if self.memory_limit is None:
            return True
        return None if peak is None else peak <= self.memory_limit

    def best(self, column: Column) -> str | None:
        """The strategy with the least of something, of those that fit; None if there is none.

        Args:
          column: one of ``figures``.

        Raises:
          ValueError: there is no such column.
        """
        if column not in get_args(Column):
            raise ValueError(f"the columns are {get_args(Column)}, not {column!r}.")
        figures = self.figures
        known = {
            name: value
            for name in self.fitting
            for value in [figures[name][column]]
            if value is not None
        }
        return min(known, key=known.__getitem__) if known else None

    @property
    def marked(self) -> dict[Column, str]:
        """:meth:`best` of each column, as tables mark it; empty for a single strategy."""
        if len(self._compiled) < 2:
            return {}
        named = ((column, self.best(column)) for column in get_args(Column))
        return {column: name for column, name in named if name is not None}

    def judged(
        self, *, memory_limit: int | str | None = None, device: Device | str | None = None
    ) -> Comparison:
        """The same programs for another device, without compiling them again.

        Args:
          memory_limit: the bytes that a device has, or a text such as ``"16 GiB"``. None takes
            that of ``device``, else the old one.
          device: for the roofline; None leaves it as it is.

        Raises:
          ValueError: the limit cannot be read, or there is no such device in the table.
          TypeError: they are something else.
        """
        limit = self.memory_limit if memory_limit is None else read_bytes(memory_limit)
        if device is None:
            return dataclasses.replace(self, memory_limit=limit)
        own = device_named(device) if isinstance(device, str) else device
        limit = own.memory_bytes if memory_limit is None else limit
        reports = {
            name: found.with_roofline(own) if isinstance(found, ProgramReport) else found
            for name, found in self.reports.items()
        }
        return Comparison(reports, limit, self.seconds)

    _FORMAT = FORMAT
    _VERSION = VERSION
    _NOUN = "comparison"

    def _parts(self) -> dict[str, Any]:
        reports = {
            name: {"error": found.error} if isinstance(found, Failure) else found.as_dict()
            for name, found in self.reports.items()
        }
        return {
            "memory_limit": self.memory_limit,
            "seconds": dict(self.seconds),
            "best": self.marked,
            "reports": reports,
        }

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> Comparison:
        limit, seconds, reports = _checked_parts(parts)
        return cls({name: _read_report(name, own) for name, own in reports.items()}, limit, seconds)

    def __str__(self) -> str:
        return printable("\n".join(_table(self)), kept="\n")

    def _repr_html_(self) -> str:
        from .page.fragment import report_html

        return report_html(self)

    @property
    def _compiled(self) -> dict[str, ProgramReport]:
        return {n: found for n, found in self.reports.items() if isinstance(found, ProgramReport)}

    def _figures(self, name: str, report: ProgramReport) -> dict[Column, float | None]:
        memory, cost = report.memory, report.cost.executed
        return {
            "peak": None if memory is None else memory.peak,
            "arguments": None if memory is None else memory.arguments,
            "bytes_sent": report.collectives.bytes_sent,
            "flops": None if cost is None else cost.flops,
            "roofline": None if report.roofline is None else report.roofline.seconds,
            "planning": self.seconds.get(name),
        }


def compare(
    strategies: Mapping[str, Any],
    fun: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | None = None,
    memory_limit: int | str | None = None,
    device: Device | str | None = None,
    **options: Any,
) -> Comparison:
    """Compiles a function once for each strategy and shows what each takes.

    Nothing is run, and no array is made: arguments may be abstract and far larger than the memory,
    the mesh larger than the machine (see :func:`planning_mesh`). A strategy that fails keeps its
    error, and the others go on.

    Args:
      strategies: by name what differs: the ``in_shardings`` for :func:`~nnx_sharding.jit`; a
        function that makes them from the abstract arguments, called with the mesh in context, so
        that ``lambda model, x: (fsdp(model), P("data"))`` will do; or a :class:`Strategy`, which
        may have a mesh of its own.
      fun: the function, not yet wrapped by ``jit``.
      *args: its arguments, abstract (``nnx.eval_shape``, ``jax.ShapeDtypeStruct``) or not. Of
        arrays only shapes and dtypes are looked at.
      mesh: the mesh, an abstract one, or the sizes of its axes by name; None for the one in
        context.
      memory_limit: the memory of a device in bytes, or a text such as ``"16 GiB"``. None takes
        that of ``device``.
      device: for the roofline: the peak figures of a device, or its name, such as ``"TPU v5e"``.
      **options: for :func:`~nnx_sharding.jit`, the same for all: ``donate_argnums``, ….

    Returns:
      The comparison. The figures are those of the compiler that is here. Where the mesh is larger
      than the machine that is XLA for CPUs, which computes in float32 what is bfloat16; take
      temporaries and what is sent as estimates from above.

    Raises:
      TypeError: ``strategies`` is no mapping, ``fun`` no function or already wrapped, or an option
        is one that each strategy has for itself.
      ValueError: there are no strategies, the limit cannot be read, or the device is not known.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.report import compare
      >>> from nnx_sharding.partition import fsdp, replicated
      >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
      >>> x = jax.ShapeDtypeStruct((64, 1024), "float32")
      >>> found = compare(
      ...     {
      ...         "dp": lambda model, x: (replicated(model), P("data")),
      ...         "fsdp": lambda model, x: (fsdp(model), P("data")),
      ...     },
      ...     lambda model, x: model(x),
      ...     model,
      ...     x,
      ...     mesh={"data": 64},
      ...     memory_limit="18 MiB",
      ... )
      >>> found.fits("dp"), found.best("arguments")
      (True, 'fsdp')
      >>> found.figures["dp"]["arguments"] == 4 * (1024 * 4096 + 4096 + 1024)
      True
      >>> found.figures["fsdp"]["arguments"] == 4 * (1024 * 4096 // 64 + 4096 + 1024)
      True
    """
    if not isinstance(strategies, Mapping):
        raise TypeError(f"strategies are a mapping from names, not {strategies!r}.")
    if isinstance(fun, Lifted) or not callable(fun):
        hint = "; give the function itself, and the options of jit to compare" * callable(fun)
        raise TypeError(f"compare needs a function to compile, not {fun!r}{hint}.")
    if "in_shardings" in options:
        raise TypeError("each strategy has in_shardings of its own; leave out in_shardings=...")
    if not strategies:
        raise ValueError("there are no strategies to compare.")
    own = device_named(device) if isinstance(device, str) else device
    limit = own.memory_bytes if memory_limit is None and own is not None else memory_limit
    limit = None if limit is None else read_bytes(limit)
    mesh = _compat.context_mesh() if mesh is None else mesh
    abstract = abstracted(args)
    reports: dict[str, ProgramReport | Failure] = {}
    seconds: dict[str, float] = {}
    for name, given in strategies.items():
        strategy = given if isinstance(given, Strategy) else Strategy(given)
        if strategy.mesh is None:
            strategy = dataclasses.replace(strategy, mesh=mesh)
        start = time.perf_counter()
        make = functools.partial(_planned, strategy, fun, abstract, own, options)
        reports[str(name)] = attempt(make)
        seconds[str(name)] = round(time.perf_counter() - start, 3)
    return Comparison(reports, limit, seconds)


def abstracted(tree: Any) -> Any:
    """A copy of a graph with shapes and dtypes in the place of its arrays."""
    structure, arrays = split(tree)
    return merge(structure, jax.tree_util.tree_map(_abstract, arrays))


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def attempt(make: Callable[[], ProgramReport]) -> ProgramReport | Failure:
    """The report, or what kept it from being made."""
    try:
        return make()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}")


def _planned(
    strategy: Strategy,
    fun: Callable[..., Any],
    args: Sequence[Any],
    device: Device | None,
    options: Mapping[str, Any],
) -> ProgramReport:
    mesh = None if strategy.mesh is None else planning_mesh(strategy.mesh)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        in_shardings = strategy.in_shardings
        if callable(in_shardings) and not isinstance(in_shardings, _SPECS):
            in_shardings = in_shardings(*args)
        wrapped = jit(
            fun,
            in_shardings=in_shardings,
            mesh=mesh,
            **{"out_shardings": strategy.out_shardings, **options},
        )
        return wrapped.lower(*args).compile().report(device=device)


_SPECS = (PartitionSpec, Sharding, StateSharding, Mapping)


# Reading


def _checked_parts(data: dict[str, Any]) -> tuple[int | None, dict[str, float], dict[str, Any]]:
    """The limit, the seconds and the reports as data.

    Raises:
      ValueError: parts are missing, unknown or of other types; all are told.
    """
    limit, reports = data.get("memory_limit"), data.get("reports")
    seconds = data.get("seconds", {})
    known = ("memory_limit", "seconds", "best", "reports")
    problems = [f"{key}: not known" for key in data if key not in known]
    if limit is not None and type(limit) is not int:
        problems.append(f"memory_limit: {limit!r} is no integer")
    if not isinstance(reports, dict) or not reports:
        problems.append(
            "reports: missing" if reports is None else "reports: no object with reports"
        )
    if not isinstance(seconds, dict) or not all(type(s) in (int, float) for s in seconds.values()):
        problems.append("seconds: no object of numbers")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"this is no comparison:\n{lines}\nIt may be damaged or not made by us.")
    assert isinstance(reports, dict)
    return limit, seconds, reports


def _read_report(name: str, data: Any) -> ProgramReport | Failure:
    if isinstance(data, dict) and set(data) == {"error"}:
        return Failure(str(data["error"]))
    try:
        return ProgramReport.from_dict(data)
    except ValueError as error:
        raise ValueError(f"reports.{name}: {error}") from None


# The table


def _table(comparison: Comparison) -> Iterator[str]:
    figures = comparison.figures
    if figures:
        yield from _aligned([_header(comparison), *_rows(comparison)])
        yield from _notes(comparison)
    for name, found in comparison.reports.items():
        if isinstance(found, Failure):
            first, *rest = found.error.splitlines() or [""]
            yield f"{name} failed: {first}"
            yield from (f"  {line}" for line in rest[:12])


def _header(comparison: Comparison) -> list[str]:
    over = [f"over {_axes(axes)}" for axes in _all_axes(comparison)]
    fits = [] if comparison.memory_limit is None else ["fits"]
    marked = [f"{name}  " for name in ("peak", "arguments", "sent")]
    return ["strategy", "mesh", *marked, *over, "flops  ", "roofline  ", "planned", *fits]


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    best = comparison.marked
    for name, own in comparison.figures.items():
        report = comparison.reports[name]
        assert isinstance(report, ProgramReport)
        texts = {key: _TEXTS[key](value) for key, value in own.items()}
        for key in _MARKED:
            texts[key] += " *" if best.get(key) == name else "  "
        by_axes = report.collectives.by_axes()
        over = [bytes_text(by_axes.get(axes, 0)) for axes in _all_axes(comparison)]
        by = "" if report.roofline is None else f"{report.roofline.bound_by} "
        roofline = f"{by}{texts['roofline']}"
        row = [name, _mesh(report), texts["peak"], texts["arguments"], texts["bytes_sent"], *over]
        row += [texts["flops"], roofline, texts["planning"]]
        if comparison.memory_limit is not None:
            row.append({True: "yes", False: "no", None: "?"}[comparison.fits(name)])
        yield row


def _notes(comparison: Comparison) -> Iterator[str]:
    limit = comparison.memory_limit
    reports = comparison._compiled.values()
    fits = "" if limit is None else f"; a device has {bytes_text(limit)}"
    marked = "; * is the least of those that fit" if comparison.marked else ""
    yield f"for one device and one call{fits}{marked}"
    devices = {report.roofline.device for report in reports if report.roofline is not None}
    if devices:
        yield f"roofline: the least time on {', '.join(sorted(devices))}, at its peak figures"


def _all_axes(comparison: Comparison) -> list[tuple[str, ...] | None]:
    """The sets of axes over which any strategy sends; what no axes explain comes last."""
    found = dict.fromkeys(axes for own in comparison.bytes_sent_by_axes.values() for axes in own)
    return sorted(found, key=lambda axes: (axes is None, len(axes or ()), axes or ()))


def _axes(axes: tuple[str, ...] | None) -> str:
    return "?" if axes is None else "+".join(axes) or "-"


def _mesh(report: ProgramReport) -> str:
    if report.mesh is None:
        return f"{report.num_devices} devices"
    return " × ".join(f"{axis} {size}" for axis, size in report.mesh.axes.items())


_TEXTS: dict[Column, Callable[[float | None], str]] = {
    "peak": bytes_text,
    "arguments": bytes_text,
    "bytes_sent": bytes_text,
    "flops": count_text,
    "roofline": time_text,
    "planning": time_text,
}

_MARKED: tuple[Column, ...] = ("peak", "arguments", "bytes_sent", "flops", "roofline")


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with names to the left and figures to the right, so that stars stand apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
