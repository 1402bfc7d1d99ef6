"""``plan``: searches for the mesh, strategies and variant with which a step is fastest.

A *candidate* is a chain of strategies on a mesh for a variant of the step. There may be thousands,
and compiling one takes seconds to minutes, so the search is best-first, with a bound:

 1. **Predict.** The shardings of each candidate are made from shapes. What it holds follows from
    them, and roughly what it sends; what it computes from one trace of the step (predictions.py).
    Ruled out are candidates that raise an error, that shard everything like an earlier one, and
    whose arguments alone exceed the memory.
 2. **Compile** the candidate with the shortest predicted time, several side by side. What was
    compiled corrects the predictions of the others, and if nothing fits, candidates with small
    arguments are preferred (`Search.pick`).
 3. **Bound.** The products of a step at the peak rate of all devices take no less time on any
    candidate. Those whose bound is no less than the best time are not compiled.
 4. **Rank** by the roofline of what was compiled; then by bytes sent and by memory.
 5. **Measure** the first few, if the user asks for it and their devices are at hand. These then
    rank first, by their times (measuring.py).

Without the last step, the result is the best of what was compiled by an estimate. How much better
another candidate can be, by the bound, is `PlanningResult.gap`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from .. import _compat
from ..analysis.hardware import Hardware
from ..analysis.program import ProgramReport
from ..analysis.tables import Pictured, text
from ..analysis.units import bytes_text, time_text
from ..errors import each_warning_once
from ..report.comparison import Column, Comparison, Failure, SearchInterrupted
from ..report.compiling import INTERRUPTED, compile_all
from ..report.strategies import AnyMesh
from .candidates import Candidate
from .measuring import Runner, medians, run_in_rounds
from .memory import lacks_memory
from .prepare import listed_once, prepare
from .remedies import remedies
from .search import FAILS_ALIKE, Search, is_of_compiler


@dataclasses.dataclass(frozen=True)
class PlanningResult(Pictured):
    """The result of :func:`plan`. ``print`` shows all candidates, best first, and a recipe.

    Attributes:
      comparison: the reports of the candidates that were compiled, best first, and why the others
        were not. It can be saved, and shown as a page.
      candidates: the candidates that were compiled, by name.
      least: a lower bound, in seconds, of the time of each candidate that may fit, but was not
        compiled, or whose time is unknown: the products of the step at the peak rate of all
        devices. If some were measured, the time of the others is unknown. Infinite if there is
        none; None if the hardware is unknown, or the products are.
      remedies: if none fits, what would, by estimates for one change at a time: devices, remat,
        microbatches, offload, batch.
      predicted: the time of each candidate that may fit, compiled or not, as it was predicted from
        shapes: in seconds, if all communication is hidden behind compute, and if none is.

    Example: two candidates side by side, and what differs between their programs.
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.planning import plan
      >>> from nnx_sharding.report import diff
      >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
      >>> x = jax.ShapeDtypeStruct((64, 1024), "float32")
      >>> options = {"strategies": ["dp", "dp + tensor"], "out_shardings": P("data")}
      >>> options["meshes"] = [{"data": 8}, {"data": 4, "model": 2}]
      >>> found = plan(lambda model, x: model(x), model, x, hardware="TPU v5e", **options)
      >>> for name in sorted(found.candidates):
      ...     print(name, "has arguments of", found.comparison.figures[name]["arguments"], "bytes")
      dp + tensor, data 4 × model 2 has arguments of 8462336 bytes
      dp, data 8 has arguments of 16826368 bytes
      >>> print(found.candidates["dp, data 8"].recipe)
      mesh = make_mesh({'data': 8})
      sharding = replicated(model, mesh=mesh)
      step = jit(step, in_shardings=(sharding, P('data')), mesh=mesh, out_shardings=P('data',))
      >>> print(diff(*(found.comparison.reports[name] for name in sorted(found.candidates))))
      program
        mesh: data 4 × model 2 → data 8
      memory of one device
        arguments: 8.07 MiB → 16.0 MiB (+98.8%)
      ...
      >>> *_, last = found.explained()  # why each of the others is not the best
      >>> print(last.strip())
      dp, data 8: takes ..., bound by memory
    """

    comparison: Comparison
    candidates: Mapping[str, Candidate]
    least: float | None = None
    predicted: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    remedies: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        """The best candidate that fits, of those whose figures are known; None if none does."""
        figures, fitting = self.comparison.figures, self.comparison.fitting  # ranked, best first
        # If any was measured, only these can be the best; if none was, those with an estimate.
        # Without either, on unknown hardware, bytes decide.
        columns: tuple[Column, ...] = ("measured", "roofline", "bytes_sent")
        for column in columns:
            for name in fitting:
                if figures[name][column] is not None:
                    return self.candidates[name]
        return None

    @property
    def gap(self) -> float | None:
        """At most how much faster another candidate may be: 0.1 for a time that is 10 % shorter.

        A bound; None if there is no best candidate, or the bound of the others is unknown.
        """
        best = None if self.best is None else _seconds(self.comparison.figures[self.best.name])
        return None if best is None or self.least is None else max(0.0, 1 - self.least / best)

    @property
    def ruled_out(self) -> Mapping[str, str]:
        """Why each of the other candidates was not compiled, by name."""
        return self.comparison.ruled_out

    def summary(self) -> Iterator[str]:
        """Yields the best candidate, how much faster others may be, and its recipe, as lines."""
        if not self.comparison.reports:  # the time_limit was over before the first was compiled
            fastest = min(self.predicted, key=self.predicted.__getitem__, default="unknown")
            yield f"best: none was compiled in time; predicted to be fastest: {fastest}"
            return
        if self.best is None:
            yield "best: none fits" + ("; one of these would:" if self.remedies else "")
            yield from (f"  {line}" for line in self.remedies)
            return
        yield f"best: {self.best.name}"
        if (seconds := self.comparison.measured.get(self.best.name)) is not None:
            estimate = self.comparison.figures[self.best.name]["roofline"]
            other = "" if estimate is None else f"; by its roofline {time_text(estimate)}"
            count = len(self.comparison.measured)
            yield f"measured: {time_text(seconds)}, the least of {count}{other}"
        if self.gap == 0:
            yield "bound: no other candidate can be faster"
        elif self.gap is not None:
            bound = f"{time_text(self.least)} ({100 * self.gap:.0f} % less)"
            yield f"bound: no other candidate takes less than {bound}, for its products alone"
        yield from (f"  {line}" for line in self.best.recipe.splitlines())

    def explained(self) -> Iterator[str]:
        """Yields the summary, and why each of the others that were compiled is not the best."""
        yield from self.summary()
        best = "" if self.best is None else self.best.name
        figures, reports = self.comparison.figures, self.comparison.reports
        others = [name for name in reports if name != best]
        if others:
            yield "why not:"
        for name in others:
            report, limit = reports[name], self.comparison.memory_limit
            if isinstance(report, Failure):
                error = textwrap.shorten(report.error, 300, placeholder=" …")
                why = f"{'does not fit' if lacks_memory(report) else 'failed'}: {error}"
            elif not self.comparison.fits(name):
                why = f"needs {bytes_text(figures[name]['peak'])} of {bytes_text(limit)}"
            else:
                # Without a best candidate, there are no figures to compare with.
                why = _slower(figures[name], figures.get(best, {}))
                # The resource that takes most of its time, such as "memory".
                bound_by = getattr(report.roofline, "bound_by", None)
                why = f"{why}, bound by {bound_by}" if bound_by else why
            yield f"  {name}: {why}"

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: the table of candidates, and the summary below it."""
        first, *others = self.summary()
        yield from self.comparison._pictures(width)
        yield from (text(first, "bold"), *map(text, others))


def _seconds(figures: Mapping[Column, float | None]) -> float | None:
    """Returns the seconds of a step: measured, or else estimated; None if neither is known."""
    measured = figures["measured"]
    return figures["roofline"] if measured is None else measured


def _slower(figures: Mapping[Column, float | None], best: Mapping[Column, float | None]) -> str:
    """Says by how much a candidate is worse than the best, by the first figure that differs.

    Such as ``takes 12 ms, not 10 ms (+20.0 %)``.

    Args:
      figures: those of the candidate, from ``Comparison.figures``.
      best: those of the best; empty if there is none.
    """
    if figures["measured"] is None and best.get("measured") is not None:
        return f"not measured, and takes {time_text(figures['roofline'])} by its roofline"
    verbs: dict[Column, str] = {
        "measured": "takes",
        "roofline": "takes",
        "bytes_sent": "sends",
        "peak": "needs",
    }
    for column in _RANKED_BY:  # in which candidates are compared
        own, other = figures[column], best.get(column)
        if own is not None and other is not None and own != other:
            more = f" ({100 * (own / other - 1):+.1f} %)" if other else ""
            show = bytes_text if column in ("bytes_sent", "peak") else time_text
            return f"{verbs[column]} {show(own)}, not {show(other)}{more}"
    return "its figures are not better, or not known"


@_compat.api_boundary
@each_warning_once()  # all candidates are traced, and most give the same ones
def plan(
    step: Callable[..., Any] | Mapping[str, Any],
    *args: Any,
    devices: int | None = None,
    topology: str | None = None,
    num_slices: int = 1,
    axes: Sequence[str] | Mapping[str, Any] = ("data", "model"),
    meshes: Iterable[AnyMesh] | None = None,
    strategies: Iterable[str] | Mapping[str, Any] | None = None,
    variants: Mapping[str, Sequence[Any]] | None = None,
    maximize: Literal["batch"] | None = None,
    memory_limit: int | str | None = None,
    hardware: Hardware | str | None = None,
    most: int | None = 16,
    measure: int = 0,
    time_limit: float | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    by_module: bool = False,
    quiet: bool = False,
    **options: Any,
) -> PlanningResult:
    """Searches for the mesh and strategies with which a step fits into memory and is fastest.

    Each chain of strategies is tried on each mesh that the devices can form. What can be ruled out
    is not compiled: candidates whose arguments alone exceed the memory, those that shard everything
    like another one or become the same program, those that raise an error, and those whose products
    alone take longer than what was compiled. The others are compiled side by side, those predicted
    to be fastest first; what was compiled corrects the predictions of the others. While nothing
    fits, ``remat`` of each ``Stack`` is tried, and more microbatches if the step has a parameter
    ``microbatches`` with a default; and ``prefetch`` where the best step waits for what ``fsdp``
    gathers. If still nothing fits, the result says what would.

    The chains have names such as ``"fsdp + tensor"``. Over the axes of the batch, ``data`` and
    ``replica``, and over ``expert`` and ``context``, if these are used:

    * ``dp``: data parallelism, parameters are replicated;
    * ``zero1``: the state of the optimizer is sharded;
    * ``fsdp``: parameters, gradients and the state of the optimizer are sharded;
    * ``hsdp``: the same, but ``dp`` over ``replica`` (between slices).

    Then, each over an axis of its own:

    * ``+ tensor``: :func:`~nnx_sharding.partition.tensor_parallel` over ``model``, and
      ``+ sequence`` the same with ``sequence=True``;
    * ``+ expert``: :func:`~nnx_sharding.experimental.expert_parallel` over ``expert``, for models
      in which a router has as many outputs as a parameter has matrices. All meshes then have the
      axis, so that the model may name it;
    * ``+ pipeline``: :func:`~nnx_sharding.partition.pipeline` over ``stage``, for models with a
      ``Stack``, with one to eight microbatches for each stage. Stages that wait are in the
      roofline: they compute in each tick;
    * ``+ context``: :func:`~nnx_sharding.experimental.context_parallel` over ``context``, which
      also shards the second dimension of the batch; by default where there are fewer rows than
      devices. All three methods of attention are tried; and, on meshes that have the axis ``ring``
      as well, all-to-all within ``context`` with a ring over that, for more devices than heads.

    Args:
      step: the function to run; of one that is wrapped by ``jit``, the shardings and the mesh are
        not used. Or variants of it by name, each a function, or a tuple of a function and its own
        arguments.
      *args: its arguments, abstract or not, also in dicts and other pytrees. Modules are sharded by
        the strategies. An optimizer belongs to the model whose parameters its state has. Arrays
        outside of modules with the most frequent first dimension are the batch, others are
        replicated.
      devices: the number of devices; None for all of the topology, or of this process.
      topology: a TPU topology, such as ``"v5e:16x16"``, for which the TPU compiler compiles; None
        for the devices of this machine, or virtual ones.
      num_slices: the number of slices of the topology, over which the axis ``replica`` runs, or
        that for the stages of a pipeline. What slices send each other is predicted not to be hidden
        behind compute, so stages over slices are compiled first where gradients take long.
      axes: the names that your step uses for the axes ``data`` and ``model``; three names, the
        first of them for ``replica``; or names by role, as in ``{"data": "dp", "stage": "pp"}``.
        ``model`` may be two axes, as in ``{"model": ("x", "y")}``: what does not divide by both is
        sharded over the first.
      meshes: the sizes of these axes in each mesh to try, or meshes; None for all.
      strategies: the names of those to try, None for all; or, by name, functions from the abstract
        arguments to ``in_shardings``, called with the mesh in context. A function is tried on all
        meshes.
      variants: values of options to combine: ``remat`` of each ``Stack``, ``prefetch`` of ``fsdp``,
        ``offload`` of the state of the optimizer (for steps that use
        :func:`~nnx_sharding.training.fetched`), and keyword arguments of the step under their
        names, as in ``{"remat": [False, True], "microbatches": [1, 2, 4]}``.
      maximize: ``"batch"`` for the largest batch that fits: the rows given, times or divided by a
        power of two; of several candidates with the same, the fastest is best.
      memory_limit: the memory of a device in bytes, or a text such as ``"16 GiB"``. None uses that
        of ``hardware``.
      hardware: the figures for the roofline: peak ones, those of :func:`calibrate`, or a key of
        ``HARDWARE``: ``TPU v4``, ``TPU v5e``, ``TPU v5p``, ``TPU v6e``, ``TPU7x``, ``A100 40GB``,
        ``A100 80GB``, ``H100 SXM``, ``H200``, ``B200``; None uses those of the topology.
      most: the maximum number of programs to compile; None for all.
      measure: how many of those that fit are run on the devices of this process, the best by their
        roofline first. They are compiled again, and run in rounds in which all take turns, with
        arguments of zeros: yours are not used. The best is then the fastest of these. One that
        fails while it runs keeps its reason, and loses.
      time_limit: seconds after which no more are compiled; all are predicted, though, also if none
        is compiled in time.
      cache_dir: a folder for reports, as for :func:`~nnx_sharding.report.compare`.
      by_module: whether the report of the best candidate has memory and cost by module, for which
        it is compiled again.
      quiet: whether to show no progress on terminals.
      **options: for :func:`~nnx_sharding.jit`, the same for all: ``donate_argnums``, ….

    Returns:
      The candidates: first those that were measured, by their times; the others ranked by the
      estimate of their roofline, then by the bytes sent, then by memory; without known hardware by
      the last two. Those that do not fit come last, the smallest
      peak first, and those that failed. ``gap`` says how much faster others may be. The estimate
      contains the communication that a compiler for accelerators has not hidden behind compute; for
      virtual CPU devices, all of it counts as hidden.

    Raises:
      ValueError: no candidate can fit or be lowered: each reason is listed once; or the arguments
        of the search are wrong, such as ``measure`` for devices that this process does not have.
      KeyboardInterrupt: by Ctrl-C. It shows what was compiled until then, and has it as ``result``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.planning import plan
      >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
      >>> x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> options = {"memory_limit": "5 MiB", "out_shardings": P("data")}
      >>> found = plan(lambda model, x: model(x), model, x, devices=8, **options)
      >>> found.best.name
      'dp + tensor, data 1 × model 8'
      >>> print(found.best.recipe)
      mesh = make_mesh({'data': 1, 'model': 8})
      sharding = tensor_parallel(model, mesh=mesh, axis='model')
      step = jit(step, in_shardings=(sharding, P('data')), mesh=mesh, out_shardings=P('data',))
    """
    end = math.inf if time_limit is None else time.monotonic() + time_limit
    # 1. Predict all candidates.
    search, compile_on = prepare(
        step,
        args,
        options,
        devices=devices,
        topology=topology,
        num_slices=num_slices,
        axes=axes,
        meshes=meshes,
        strategies=strategies,
        variants=variants,
        maximize=maximize,
        memory_limit=memory_limit,
        hardware=hardware,
        most=most,
        measure=measure,
        quiet=quiet,
    )
    compile_programs = partial(
        compile_all,
        memory_limit=search.limit,
        hardware=search.hardware,
        cache_dir=cache_dir,
        devices=compile_on,
        quiet=quiet,
    )
    # 2. Compile those that the search picks, with what is left of the time.
    found = _compiled(search, compile_programs, most=most, time_limit=end - time.monotonic())
    why_left = _why_left(found, most, time_limit)
    # 3. Measure the best, and report the best of these by module.
    try:
        found = _measured(found, search, measure, quiet=quiet)
        if by_module:
            found = _with_modules_of_best(found, search, compile_programs)
    except KeyboardInterrupt:
        raise SearchInterrupted(_result(search, found, why_left)) from None
    return _result(search, found, why_left)


def _compiled(
    search: Search,
    compile_programs: Callable[..., Comparison],
    *,
    most: int | None,
    time_limit: float,
) -> Comparison:
    """Compiles the candidates that the search picks, and rules out what fails alike.

    Raises:
      ValueError: no candidate can be traced.
      SearchInterrupted: Ctrl-C; its result is the plan by what was compiled until then.
    """
    try:
        compiled = compile_programs(
            "plan",
            search.programs,
            search.pick,
            most=most,
            time_limit=time_limit,
            ruled_out=search.ruled_out,
        )
    except SearchInterrupted as interrupt:
        raise SearchInterrupted(_result(search, interrupt.result, INTERRUPTED)) from None
    # Again, since programs may have failed after the search picked the last one.
    search.rule_out_failing(compiled.reports)
    failures = _failures_to_trace(compiled.reports)
    if len(failures) == len(compiled.reports) > 0:
        raise _error_of_step(failures, search)
    return compiled


def _why_left(compiled: Comparison, most: int | None, time_limit: float | None) -> str:
    """Says why other candidates were not compiled; the numbers are arguments of `plan`."""
    count = len(compiled.reports) - len(_failures_to_trace(compiled.reports))
    if time_limit is not None and count != most:  # not as many as may be: time was over
        return f"not compiled within {time_limit} s"
    return f"the {count} compiled are predicted to be better"


def _with_modules_of_best(
    found: Comparison, search: Search, compile_programs: Callable[..., Comparison]
) -> Comparison:
    """Compiles the best candidate again, if one fits, for memory and cost by module."""
    best = next(iter(_ranked(found, search).reports), None)
    if best is None or not found.fits(best):
        return found
    lower = {best: search.entries[best].lower}
    detailed = compile_programs("modules of the best", lower, by_module=True).compiled
    return dataclasses.replace(found, reports={**found.reports, **detailed})


def _measured(found: Comparison, search: Search, count: int, *, quiet: bool) -> Comparison:
    """Runs the best ``count`` candidates that fit, if any; returns all with the times of these.

    One that fails while it runs gets the reason in place of its report.
    """
    if not count:
        return found
    runners, ranked = {}, _ranked(found, search)
    for name in ranked.fitting[:count]:
        entry = search.entries[name]
        variant = entry.variant
        runners[name] = Runner.of(entry.candidate, variant.fun, entry.args, variant.options)
    seconds, failures = medians(run_in_rounds(runners, quiet=quiet))
    return dataclasses.replace(ranked, reports={**ranked.reports, **failures}, measured=seconds)


def _ranked(found: Comparison, search: Search) -> Comparison:
    """Returns the same reports, the best that fits first."""
    ranks = {name: _rank(name, found, search) for name in found.reports}
    reports = {name: found.reports[name] for name in sorted(ranks, key=ranks.__getitem__)}
    return dataclasses.replace(found, reports=reports)


def _failures_to_trace(reports: Mapping[str, ProgramReport | Failure]) -> dict[str, Failure]:
    """Selects the failures of the step or of a strategy, by name: those not of the compiler."""
    return {
        name: report
        for name, report in reports.items()
        if isinstance(report, Failure) and not is_of_compiler(report)
    }


def _error_of_step(failures: Mapping[str, Failure], search: Search) -> ValueError:
    """Makes the error for a step that no candidate could be traced for: it is at fault itself.

    Args:
      failures: what each candidate raised that was to be compiled; at least one.
      search: says why the others were ruled out.
    """
    # `FAILS_ALIKE` is left out. It says nothing new, and how many candidates have it depends on
    # which ended first, so the message would not always be the same.
    others = {name: why for name, why in search.ruled_out.items() if why != FAILS_ALIKE}
    reasons = {name: failure.error for name, failure in failures.items()} | others
    error = ValueError(listed_once("plan: no candidate can be lowered:", reasons))
    first, *_ = failures.values()
    error.__cause__ = first.exception  # whose traceback leads into the step
    return error


def _rank(name: str, found: Comparison, search: Search) -> tuple[Any, ...]:
    """Returns the sort key of a candidate; the smallest is best. Unknown figures come last.

    Those that fit have ``(False, -rows, measured, roofline, bytes sent, peak)``; the rows only
    count if the largest batch is sought. Those that do not fit have ``(True, peak)``, so they come
    after all others, and the one that nearly fits is the first of them.
    """
    figures = found.figures.get(name, {})
    if not found.fits(name):
        memory = search.memory_of(name, found.reports)  # also of one that the compiler refused
        return (True, math.inf if memory is None or memory.peak is None else memory.peak)
    rows = search.entries[name].candidate.rows if search.maximize else 0
    known = (figures[column] for column in _RANKED_BY)
    return (False, -rows, *(math.inf if figure is None else figure for figure in known))


_RANKED_BY: tuple[Column, ...] = ("measured", "roofline", "bytes_sent", "peak")


def _result(search: Search, found: Comparison, why_left: str) -> PlanningResult:
    """Puts together what was compiled, why the rest was not, and how good the rest can be.

    Args:
      search: all candidates.
      found: the reports of those that were compiled.
      why_left: why no more were.
    """
    reports, entries = found.reports, search.entries
    left = [name for name in entries if name not in reports and name not in search.ruled_out]
    ruled_out = search.ruled_out | dict.fromkeys(left, why_left)
    comparison = dataclasses.replace(_ranked(found, search), ruled_out=ruled_out)
    predicted = {}
    for name, entry in entries.items():
        if entry.least is not None:  # the products and the hardware are known
            seconds = entry.seconds.values()  # of compute, memory and interconnect, each alone
            # If all communication is hidden behind compute, and if none is.
            predicted[name] = (max(seconds), float(sum(seconds)))
    return PlanningResult(
        comparison=comparison,
        candidates={name: entries[name].candidate for name in comparison.reports},
        least=_least_of_others(search, found, left),
        predicted=predicted,
        remedies=() if found.fitting else tuple(remedies(search, reports)),
    )


def _least_of_others(search: Search, found: Comparison, left: Sequence[str]) -> float | None:
    """Returns ``PlanningResult.least``: a lower bound of all times that are not known.

    Args:
      search: all candidates, each with a bound: its products at the peak rate of all devices.
      found: the reports of those that were compiled.
      left: the names of those that may fit, but were not compiled.

    Returns:
      The bound in seconds; infinity if all times are known; None if no bound can be given.
    """
    # The largest batch is not sought by time, and without hardware there are no rates.
    if search.maximize or search.hardware is None:
        return None
    # A measured time and an estimate cannot be compared: once some were measured, these count.
    timed = {*found.measured}
    if not timed:
        for name, report in found.compiled.items():
            if getattr(report.roofline, "seconds", None) is not None:
                timed.add(name)
    # `fits` is None if the memory of a program is unknown: then it may fit.
    untimed = [x for x in found.compiled if found.fits(x) is not False and x not in timed]
    bounds: list[float] = []
    for name in (*left, *untimed):
        least = search.entries[name].least
        if least is None:
            return None
        bounds.append(least)
    return min(bounds, default=math.inf)
