"""``plan``: searches for the mesh, strategies and variant with which a step is fastest.

A *candidate* is a chain of strategies on a mesh for a variant of the step. There may be thousands,
and compiling one takes seconds to minutes, so the search is best-first, with a bound:

 1. **Predict.** The shardings of each candidate are made from shapes. The bytes that a candidate
    holds follow from the shardings, and so does a rough estimate of the bytes that it sends. The
    products that it computes follow from one trace of the step (predictions.py). Candidates are
    ruled out if they raise an error, if they shard everything like an earlier candidate, or if
    their arguments alone exceed the memory.
 2. **Compile** the candidate with the shortest predicted time, several candidates side by side. The
    compiled programs correct the predictions of the other candidates. If nothing fits, candidates
    with small arguments are preferred (`Search.pick`).
 3. **Bound.** No candidate takes less time than the products of the step at the peak rate of all
    devices. A candidate is not compiled if this bound is no less than the best time.
 4. **Rank** the compiled candidates by their roofline, then by the known part of an unknown one,
    then by bytes sent, then by memory.
 5. **Measure** the first few candidates, if the user asks for it and the devices are at hand. The
    measured candidates then rank first, by their times (measuring.py).

Without the last step, the result is the best of the compiled candidates by an estimate.
`PlanningResult.gap` says how much better another candidate can be, by the bound.
"""

from __future__ import annotations

import dataclasses
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from .. import _compat
from ..analysis.hardware import Hardware
from ..analysis.program import ProgramReport
from ..analysis.tables import Pictured, text
from ..analysis.units import bytes_text, time_text
from ..errors import each_warning_once, warn_or_raise, warnings_collected
from ..report.comparison import (
    Column,
    Comparison,
    Failure,
    SearchInterrupted,
    figure_text,
    names_by_value,
    shortened,
    why_unknown,
)
from ..report.compiling import INTERRUPTED, compile_all
from ..report.strategies import AnyMesh
from .candidates import Candidate
from .measuring import Runner, medians, run_in_rounds
from .prepare import listed_once, prepare
from .recipes import Warned
from .remedies import remedies
from .search import FAILS_ALIKE, Search, is_of_compiler

# The figures by which the best candidate may be chosen, and by which candidates are ranked, the
# most important first: those of `Comparison.figures`, and the bound of an unknown roofline.
BestBy: TypeAlias = Literal["measured", "roofline", "at_least", "bytes_sent"]
RankedBy: TypeAlias = BestBy | Literal["peak"]
_CHOSEN_BY: tuple[BestBy, ...] = get_args(BestBy)
# What helps if the search ended before a candidate that may be the best was compiled.
_TO_COMPILE_MORE = "a longer time limit, a larger `most`, or fewer strategies and variants"


@dataclasses.dataclass(frozen=True)
class PlanningResult(Pictured):
    """The result of :func:`plan`. ``print`` shows all candidates, best first, and a recipe.

    Attributes:
      comparison: the reports of the candidates that were compiled, best first, and the reasons why
        the others were not compiled. You can save it, and show it as a page.
      candidates: the candidates that were compiled, by name.
      least: a lower bound, in seconds, of the times that are not known: the products of the step at
        the peak rate of all devices. A time is not known if the candidate may fit, but was not
        compiled, or has no estimate. If some candidates were measured, the times of all others are
        not known. Infinite if all times are known; None if the hardware or the products are not.
      predicted: for each candidate that may fit, compiled or not, two times in seconds that were
        predicted from shapes: if compute and access to memory hide all communication, and if they
        hide none. These are rough: of the memory, only arguments and operands of products count.
      remedies: if no candidate fits, lines that say what may fit, by estimates for one change at a
        time: devices, remat, microbatches, offload, batch. What is impossible has no line.
      warned: the texts of the warnings for each compiled candidate that has some. Only those of the
        best are given as warnings; without a best, those of all compiled candidates.
      maximize: ``"batch"`` if the search was for the largest batch, which then counts before times.
      left: the candidates that may fit, but were not compiled, by name.

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
      from jax.sharding import PartitionSpec as P
      from nnx_sharding import jit, make_mesh, replicated
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
    warned: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    maximize: Literal["batch"] | None = None
    left: Mapping[str, Candidate] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The best candidate that fits and has the figure ``best_by``; None if there is none."""
        return self._choice[0]

    @property
    def best_by(self) -> BestBy | None:
        """The figure by which ``best`` is chosen: the first that a candidate that fits has.

        A search for the largest batch chooses by it among the candidates with that batch.

        ``"measured"`` and ``"roofline"`` are times. ``"at_least"`` is the part of the roofline that
        is known (``Roofline.at_least``), if the step has loops of unknown length, for example.
        ``"bytes_sent"`` counts if nothing is known of times, for example without hardware.
        """
        return self._choice[1]

    @property
    def _choice(self) -> tuple[Candidate, BestBy] | tuple[None, None]:
        """The best candidate, and the figure by which it is chosen; two None if there is none."""
        rankings, fitting = _rankings(self.comparison), self.comparison.fitting
        # `Comparison.best` is not used, because a search for the largest batch ranks by rows first.
        for column in _CHOSEN_BY:
            for name in fitting:  # ranked, best first
                if rankings[name][column] is not None:
                    return self.candidates[name], column
        return None, None

    @property
    def gap(self) -> float | None:
        """An upper bound of how much faster another candidate may be: 0.1 for a 10 % shorter time.

        None if there is no best candidate, or no bound of the other times is known.
        """
        best = self.best
        if best is None or self.least is None:
            return None
        seconds = _seconds(self.comparison.figures[best.name])
        return None if seconds is None else max(0.0, 1 - self.least / seconds)

    @property
    def undecided(self) -> tuple[str, ...]:
        """The candidates in ``left`` that may fit a larger batch than the best, the smallest first.

        Empty unless the search was for the largest batch. Without a best, these are all in
        ``left``.
        """
        if self.maximize is None:
            return ()
        most_rows = 0 if self.best is None else self.best.rows
        rows = {name: x.rows for name, x in self.left.items() if x.rows > most_rows}
        return tuple(sorted(rows, key=rows.__getitem__))

    @property
    def ruled_out(self) -> Mapping[str, str]:
        """The name of each candidate that was not compiled → the reason."""
        return self.comparison.ruled_out

    def summary(self) -> Iterator[str]:
        """Yields lines: the best candidate, how much faster others may be, and the recipe.

        If no candidate fits, the lines are the remedies.
        """
        if not self.comparison.reports:  # the time limit ended before a candidate was compiled
            fastest = min(self.predicted, key=self.predicted.__getitem__, default="unknown")
            yield f"best: none was compiled in time; predicted to be fastest: {fastest}"
            yield f"  to compile some: {_TO_COMPILE_MORE}"
            return
        if self.best is None:
            yield "best: none fits" + ("; by estimates, one of these may:" if self.remedies else "")
            if self.left and not self.maximize:
                which = f"{len(self.left)} that were not compiled, {shortened([*self.left])}"
                yield f"  perhaps one of {which}: {_TO_COMPILE_MORE}"
            yield from (f"  {line}" for line in self.remedies)
            yield from self._batches_left()
            return
        yield f"best: {self.best.name}"
        yield from self._batches_left()
        yield from self._why_chosen(self.best)
        seconds = self.comparison.measured.get(self.best.name)
        if seconds is not None:
            estimate = self.comparison.figures[self.best.name]["roofline"]
            by_roofline = "" if estimate is None else f"; by its roofline {time_text(estimate)}"
            # A smaller batch may take less time, so a search for the largest one leaves it out.
            rivals = [x for x in self.comparison.measured if not self._has_fewer_rows(x, self.best)]
            yield f"measured: {time_text(seconds)}, the least of {len(rivals)}{by_roofline}"
        if self.gap == 0:
            yield "bound: no other candidate of this search can be faster"
        elif self.gap is not None:
            bound = f"{time_text(self.least)} ({100 * self.gap:.0f} % less)"
            yield f"bound: no other candidate takes less than {bound}, for its products alone"
        yield from (f"  {line}" for line in self.best.recipe.splitlines())

    def _batches_left(self) -> Iterator[str]:
        """Yields a line about batches that may fit, but were not compiled, for each reason."""
        larger = "batches" if self.best is None else "larger batches"
        reasons = {name: self.ruled_out[name] for name in self.undecided}
        for why, names in names_by_value(reasons).items():
            yield f"{larger} may fit, but were {why}: {shortened(names)}"

    def _why_chosen(self, best: Candidate) -> Iterator[str]:
        """Yields a line that says by what the best is chosen, unless that is its time."""
        report = self.comparison.compiled[best.name]
        why = why_unknown(report).get("roofline", "the hardware is not known")
        chosen = f"of those with {best.rows} rows, chosen" if self.maximize else "chosen"
        if self.best_by == "at_least":
            known = time_text(self.comparison.at_least[best.name]["roofline"])
            yield f"{chosen} by the known part of its time, {known}: {why}"
        elif self.best_by == "bytes_sent":
            yield f"{chosen} by the bytes that it sends, as its time is not known: {why}"

    def _has_fewer_rows(self, name: str, best: Candidate) -> bool:
        """Whether a candidate loses by its batch alone; False if batches are not compared."""
        return self.maximize is not None and self.candidates[name].rows < best.rows

    def explained(self) -> Iterator[str]:
        """Yields the summary, and why each of the other compiled candidates is not the best.

        The first line of each warning for a candidate is below its reason.
        """
        yield from self.summary()
        best = self.best
        others = [name for name in self.comparison.reports if best is None or name != best.name]
        if others:
            yield "why not:"
        for name in others:
            yield f"  {name}: {self._why_not(name, best)}"
            for warning in self.warned.get(name, ()):
                yield f"    warning: {textwrap.shorten(warning, 200, placeholder=' …')}"

    def _why_not(self, name: str, best: Candidate | None) -> str:
        """Returns the reason why a compiled candidate is not the best: the first that decides."""
        report = self.comparison.reports[name]
        if isinstance(report, Failure):
            error = textwrap.shorten(report.error, 300, placeholder=" …")
            return f"{'does not fit' if report.lacks_memory else 'failed'}: {error}"
        fits = self.comparison.fits(name)
        if fits is None:
            return f"the memory that it needs is not known: {why_unknown(report)['peak']}"
        if not fits:
            limit = bytes_text(self.comparison.memory_limit)
            peak = self.comparison.figures[name]["peak"]
            return f"needs {bytes_text(peak)} of {limit}"
        if best is None:  # `_choice` would have chosen a candidate that fits by either
            return "neither its time nor the bytes that it sends are known"
        if self._has_fewer_rows(name, best):
            return f"{self.candidates[name].rows or 'no'} rows, not {best.rows}"
        rankings = _rankings(self.comparison)
        why = _worse(rankings[name], rankings[best.name])
        # `bound_by` is the resource that takes most of the time, such as "memory".
        bound_by = getattr(report.roofline, "bound_by", None)
        return f"{why}, bound by {bound_by}" if bound_by else why

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: the table of candidates, and the summary below it."""
        first, *others = self.summary()
        yield from self.comparison._pictures(width)
        yield from (text(first, "bold"), *map(text, others))


def _seconds(figures: Mapping[Column, float | None]) -> float | None:
    """Returns the seconds of a step: measured, or else estimated; None if neither is known."""
    measured = figures["measured"]
    return figures["roofline"] if measured is None else measured


def _worse(figures: Mapping[RankedBy, float | None], best: Mapping[RankedBy, float | None]) -> str:
    """Says by which figure a candidate is worse than the best: the first in the order of ranks.

    An example is ``takes 12 ms, not 10 ms (+20.0 %)``. A figure that is not known is worse than any
    known one, as in `_rank`. A figure in which the candidate is better is no reason.

    Args:
      figures: the figures of the candidate, from `_rankings`.
      best: the figures of the best candidate.
    """
    for column, (verb, unknown) in _VERBS.items():
        figure, best_figure = figures[column], best[column]
        if best_figure is None:
            continue
        if figure is None:
            estimate = figures["roofline"]
            if column == "measured" and estimate is not None:
                return f"{unknown}, and takes {time_text(estimate)} by its roofline"
            return unknown
        if figure > best_figure:
            more = f" ({100 * (figure / best_figure - 1):+.1f} %)" if best_figure else ""
            written_as: Column = "roofline" if column == "at_least" else column
            shown, shown_best = (figure_text(written_as, x) for x in (figure, best_figure))
            return f"{verb} {shown}, not {shown_best}{more}"
    return "its figures are not better, or not known"


# For each figure: the verb before it, and what is said of a candidate for which it is not known.
_VERBS: Mapping[RankedBy, tuple[str, str]] = {
    "measured": ("takes", "not measured"),
    "roofline": ("takes", "its time is not known"),
    "at_least": ("takes, in the known part of its time,", "no part of its time is known"),
    "bytes_sent": ("sends", "the bytes that it sends are not known"),
    "peak": ("needs", "the memory that it needs is not known"),
}


@_compat.api_boundary
@each_warning_once()  # the warnings of the best, and of what is no candidate
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

    The search tries each chain of strategies on each mesh that the devices can form. It does not
    compile candidates that it can rule out: candidates whose arguments alone exceed the memory,
    that shard everything like another candidate or become the same program, that raise an error, or
    whose products alone take longer than a compiled candidate. It compiles the other candidates
    side by side, in the order of their predicted times. The compiled programs correct the
    predictions of the others. While nothing fits, the search tries ``remat`` of each ``Stack``, and
    more microbatches if the step has a parameter ``microbatches`` with a default. If the best step
    waits for the gathers of ``fsdp``, the search tries ``prefetch``. If nothing fits in the end,
    the result says what may fit.

    The chains have names such as ``"fsdp + tensor"``. The first part says what is sharded over the
    axes of the batch, ``data`` and ``replica``, and over ``expert`` and ``context``, if these are
    used:

    * ``dp``: data parallelism, parameters are replicated;
    * ``zero1``: the state of the optimizer is sharded;
    * ``fsdp``: parameters, gradients and the state of the optimizer are sharded;
    * ``hsdp``: the same within slices, but ``dp`` over ``replica`` (between slices).

    The other parts are styles for layers, each over an axis of its own:

    * ``+ tensor``: :func:`~nnx_sharding.partition.tensor_parallel` over ``model``, and
      ``+ sequence`` the same with ``sequence=True``;
    * ``+ expert``: :func:`~nnx_sharding.experimental.expert_parallel` over ``expert``, for models
      that have kernels of shape (experts, in, out) and a router of shape (in, experts). All meshes
      then have the axis, so that the model may name it;
    * ``+ pipeline``: :func:`~nnx_sharding.partition.pipeline` over ``stage``, for models with a
      ``Stack`` or a list of equal blocks, with one to eight microbatches for each stage. The
      roofline counts stages that wait, because they compute in each tick;
    * ``+ context``: :func:`~nnx_sharding.experimental.context_parallel` over ``context``, which
      also shards the second dimension of the batch. By default, this is only tried if there are
      fewer rows than devices. All three methods of attention are tried. On meshes that also have
      the axis ``ring``, all-to-all within ``context`` is combined with a ring over ``ring``, for
      more devices than heads.

    Args:
      step: the function to run. If it is wrapped by ``jit``, the shardings and the mesh of this
        ``jit`` are not used. Or a dict of variants of the step by name: each is a function, or a
        tuple of a function and its own arguments.
      *args: the arguments of the step, abstract or not. They may be dicts and other pytrees.
        Strategies shard the modules. An optimizer belongs to the model whose parameters its state
        has. Arrays outside of modules with the most frequent first dimension are the batch. All
        other arrays are replicated.
      devices: the number of devices; None for all of the topology, or of this process.
      topology: a TPU topology, such as ``"v5e:16x16"``, for which the TPU compiler compiles; None
        for the devices of this machine, or virtual ones.
      num_slices: the number of slices of the topology. The axis ``replica`` runs over slices, or
        the axis for the stages of a pipeline does. The prediction takes communication between
        slices not to be hidden behind compute, so stages over slices are compiled first if
        gradients take long.
      axes: the names that your step uses for the axes ``data`` and ``model``; or three names, the
        first one for ``replica``; or names by role, as in ``{"data": "dp", "stage": "pp"}``.
        ``model`` may have two axes, as in ``{"model": ("x", "y")}``. Dimensions that do not divide
        by both are sharded over the first one.
      meshes: the meshes to try, or the sizes of the axes of each; None for all meshes.
      strategies: the names of the strategies to try; None for all. Or a dict of functions by name,
        which return ``in_shardings`` for the abstract arguments. Each function is tried on all
        meshes, and is called with the mesh in context.
      variants: values of options to combine: ``remat`` of each ``Stack``, ``prefetch`` of ``fsdp``,
        ``offload`` of the state of the optimizer (for steps that use
        :func:`~nnx_sharding.training.fetched`), and keyword arguments of the step under their
        names, as in ``{"remat": [False, True], "microbatches": [1, 2, 4]}``.
      maximize: ``"batch"`` searches for the largest batch that fits: the number of rows in
        ``args``, times or divided by a power of two. Of several candidates with the same batch,
        the fastest is best.
      memory_limit: the memory of a device in bytes, or a text such as ``"16 GiB"``. None uses the
        memory of ``hardware``.
      hardware: the figures for the roofline: peak figures, the result of :func:`calibrate`, or a
        key of ``HARDWARE``: ``TPU v4``, ``TPU v5e``, ``TPU v5p``, ``TPU v6e``, ``TPU7x``,
        ``A100 40GB``, ``A100 80GB``, ``H100 SXM``, ``H200``, ``B200``; None uses the figures of the
        kind of the devices, if they are known.
      most: the maximum number of programs to compile; None for all.
      measure: how many candidates that fit are run on the devices of this process, the best by
        their roofline first. They are compiled again, and run in rounds in which all take turns,
        with arguments of zeros instead of your arguments. The best candidate is then the fastest of
        these. If a candidate fails while it runs, the result has the reason, and the candidate
        loses.
      time_limit: seconds after which no more programs are compiled. All candidates are predicted
        even if no program is compiled in time.
      cache_dir: a folder for reports, as for :func:`~nnx_sharding.report.compare`.
      by_module: whether the report of the best candidate has memory and cost by module. The
        candidate is compiled again for that.
      quiet: whether to show no progress on terminals.
      **options: for :func:`~nnx_sharding.jit`, the same for all: ``donate_argnums``, ….

    Returns:
      The candidates, best first. Measured candidates are first, by their times. The others follow
      by the estimate of their roofline, then by the bytes sent, then by memory; without known
      hardware, only by bytes sent and memory. Candidates that do not fit, the smallest peak first,
      and candidates that failed come last. ``gap`` says how much faster other candidates may be.
      The estimate contains the communication that a compiler for accelerators has not hidden behind
      compute. For virtual CPU devices, all communication counts as hidden.

    Raises:
      ValueError: no candidate can fit or be lowered (the message lists each reason once), or the
        arguments of the search are wrong, for example ``measure`` for devices that this process
        does not have.
      KeyboardInterrupt: by Ctrl-C. The error shows what was compiled until then, and has this as
        ``result``.

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
      from jax.sharding import PartitionSpec as P
      from nnx_sharding import jit, make_mesh, tensor_parallel
      mesh = make_mesh({'data': 1, 'model': 8})
      sharding = tensor_parallel(model, mesh=mesh, axis='model')
      step = jit(step, in_shardings=(sharding, P('data')), mesh=mesh, out_shardings=P('data',))
    """
    end = math.inf if time_limit is None else time.monotonic() + time_limit
    # 1. Predict all candidates.
    search = prepare(
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
        devices=search.compile_on,
        quiet=quiet,
    )
    # 2. Compile the candidates that the search picks, in the time that is left.
    comparison = _compiled(search, compile_programs, most=most, time_limit=end - time.monotonic())
    why_left = _why_left(comparison, search, time_limit)
    # 3. Measure the best candidates, and report the best one by module.
    try:
        comparison = _measured(comparison, search, measure, quiet=quiet)
        if by_module:
            comparison = _with_modules_of_best(comparison, search, compile_programs)
    except KeyboardInterrupt:
        raise SearchInterrupted(_result(search, comparison, why_left)) from None
    return _result(search, comparison, why_left)


def _compiled(
    search: Search,
    compile_programs: Callable[..., Comparison],
    *,
    most: int | None,
    time_limit: float,
) -> Comparison:
    """Compiles the candidates that the search picks, and rules out candidates that fail alike.

    Args:
      search: all candidates. Compiling removes each candidate from its ``programs`` when it starts.
      compile_programs: `compile_all` with the options that all calls share.
      most: the maximum number of programs to compile; None for all.
      time_limit: the seconds after which no more programs are compiled.

    Raises:
      ValueError: no candidate can be traced.
      SearchInterrupted: Ctrl-C. The result of this error is the plan by what was compiled until
        then.
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
        search.finish(interrupt.result)
        raise SearchInterrupted(_result(search, interrupt.result, INTERRUPTED)) from None
    search.finish(compiled)
    failures = _failures_to_trace(compiled.reports)
    if failures and len(failures) == len(compiled.reports):
        _give_warnings(search, failures)  # they may say why
        raise _error_of_step(failures, search)
    return compiled


def _why_left(compiled: Comparison, search: Search, time_limit: float | None) -> str:
    """Returns the reason why other candidates were not compiled.

    Args:
      compiled: the reports of the candidates that were compiled.
      search: has the maximum number of programs to compile (``most``).
      time_limit: the argument of `plan`.
    """
    count = len(compiled.reports) - len(_failures_to_trace(compiled.reports))
    # If fewer programs than ``most`` were compiled, the time limit ended the search.
    if time_limit is not None and count != search.most:
        return f"not compiled within {time_limit} s"
    if search.maximize:  # larger batches that are left would be better if they fit
        return f"not among the {count} that were compiled (most={search.most})"
    return f"before any was compiled, {count} others were predicted to be better"


def _with_modules_of_best(
    comparison: Comparison, search: Search, compile_programs: Callable[..., Comparison]
) -> Comparison:
    """Adds memory and cost by module to the report of the best candidate, if one fits.

    The candidate is compiled again for that.

    Args:
      comparison: the reports of the candidates that were compiled, with the times of those that
        were measured.
      compile_programs: `compile_all` with the options that all calls share.
    """
    best = next(iter(_ranked(comparison, search).reports), None)
    if best is None or not comparison.fits(best):
        return comparison
    lower = {best: search.entries[best].lower}
    detailed = compile_programs("modules of the best", lower, by_module=True).compiled
    return dataclasses.replace(comparison, reports={**comparison.reports, **detailed})


def _measured(comparison: Comparison, search: Search, count: int, *, quiet: bool) -> Comparison:
    """Runs the best ``count`` candidates that fit; returns all reports, ranked, with the times.

    A candidate that fails while it runs gets the reason instead of its report. If ``count`` is 0,
    this returns ``comparison``.
    """
    if not count:
        return comparison
    ranked = _ranked(comparison, search)
    runners: dict[str, Runner] = {}
    for name in ranked.fitting[:count]:
        entry = search.entries[name]
        variant = entry.variant
        runners[name] = Runner.of(entry.candidate, variant.fun, entry.args, variant.options)
    with warnings_collected() as warned:  # the steps are traced again
        seconds, failures = medians(run_in_rounds(runners, quiet=quiet))
    known = {warning for warnings in search.warned.values() for warning in warnings}
    for category, text_of_warning in warned:
        if (category, text_of_warning) not in known:
            warn_or_raise(category, text_of_warning, strict=False)
    return dataclasses.replace(ranked, reports={**ranked.reports, **failures}, measured=seconds)


def _ranked(comparison: Comparison, search: Search) -> Comparison:
    """Returns the same reports, best candidate first (`_rank`)."""
    rankings = _rankings(comparison)
    ranks = {
        name: _rank(name, comparison, search, rankings.get(name, {})) for name in comparison.reports
    }
    reports = {name: comparison.reports[name] for name in sorted(ranks, key=ranks.__getitem__)}
    return dataclasses.replace(comparison, reports=reports)


def _failures_to_trace(reports: Mapping[str, ProgramReport | Failure]) -> dict[str, Failure]:
    """Selects the failures of the step or of a strategy, by name; leaves out compiler errors."""
    return {
        name: report
        for name, report in reports.items()
        if isinstance(report, Failure) and not is_of_compiler(report)
    }


def _error_of_step(failures: Mapping[str, Failure], search: Search) -> ValueError:
    """Returns the error for a step that could not be traced for any candidate.

    Args:
      failures: the failure of each candidate that was to be compiled; at least one.
      search: has the reasons why the other candidates were ruled out.
    """
    # `FAILS_ALIKE` is left out because it says nothing new. The number of candidates with this
    # reason depends on which program ended first, so the message would not always be the same.
    ruled_out = {name: why for name, why in search.ruled_out.items() if why != FAILS_ALIKE}
    reasons = {name: failure.error for name, failure in failures.items()} | ruled_out
    error = ValueError(listed_once("plan: no candidate can be lowered:", reasons))
    first_failure, *_ = failures.values()
    error.__cause__ = first_failure.exception  # the traceback leads into the step
    return error


def _rank(
    name: str, comparison: Comparison, search: Search, ranking: Mapping[RankedBy, float | None]
) -> tuple[Any, ...]:
    """Returns the sort key of a candidate; the smallest is best. Unknown figures come last.

    Candidates that fit have ``(False, -rows, measured, roofline, at least, bytes sent, peak)``,
    where the rows are 0 unless the search is for the largest batch. Candidates that do not fit have
    ``(True, peak)``, so they come after all others, the smallest peak first.

    Args:
      ranking: the figures of the candidate (`_rankings`); empty if it was not compiled.
    """
    if not comparison.fits(name):
        # `memory_need` also knows the memory of programs that the compiler refused.
        memory = search.memory_need(name, comparison.reports)
        peak = None if memory is None else memory.peak
        return (True, math.inf if peak is None else peak)
    rows = search.entries[name].candidate.rows if search.maximize else 0
    figures = (math.inf if figure is None else figure for figure in ranking.values())
    return (False, -rows, *figures)


def _rankings(comparison: Comparison) -> dict[str, dict[RankedBy, float | None]]:
    """Returns the figures by which each compiled candidate is ranked, the most important first."""
    at_least = comparison.at_least
    return {
        name: {
            "measured": figures["measured"],
            "roofline": figures["roofline"],
            "at_least": at_least[name]["roofline"],
            "bytes_sent": figures["bytes_sent"],
            "peak": figures["peak"],
        }
        for name, figures in comparison.figures.items()
    }


def _result(search: Search, comparison: Comparison, why_left: str) -> PlanningResult:
    """Makes the result: the reports, the reasons against the other candidates, and the bounds.

    Args:
      comparison: the reports of the candidates that were compiled.
      why_left: the reason why no more candidates were compiled.
    """
    reports, entries = comparison.reports, search.entries
    left = [name for name in entries if name not in reports and name not in search.ruled_out]
    ruled_out = search.ruled_out | dict.fromkeys(left, why_left)
    ranked = dataclasses.replace(_ranked(comparison, search), ruled_out=ruled_out)
    predicted = {}
    for name, entry in entries.items():
        if entry.least is not None:  # the products and the hardware are known
            sending = entry.seconds["interconnect"]
            others = max(entry.seconds["compute"], entry.seconds["memory"])
            # The pair: if the others hide all communication, and if they hide none.
            predicted[name] = (max(others, sending), others + sending)
    warned = {name: tuple(dict.fromkeys(search.warned[name])) for name in ranked.reports}
    result = PlanningResult(
        comparison=ranked,
        candidates={name: entries[name].candidate for name in ranked.reports},
        least=_least_of_others(search, comparison, left),
        predicted=predicted,
        remedies=() if comparison.fitting else tuple(remedies(search, reports)),
        warned={name: tuple(text for _, text in x) for name, x in warned.items() if x},
        maximize="batch" if search.maximize else None,
        left={name: entries[name].candidate for name in left},
    )
    best = result.best
    _give_warnings(search, warned if best is None else [best.name])
    return result


def _give_warnings(search: Search, names: Iterable[str]) -> None:
    """Gives the warnings for some candidates, each once, behind the names of its candidates."""
    candidates: dict[Warned, list[str]] = {}
    for name in names:
        for warning in dict.fromkeys(search.warned[name]):
            candidates.setdefault(warning, []).append(name)
    for (category, text_of_warning), listed in candidates.items():
        others = "" if len(listed) == 1 else f" and {len(listed) - 1} more"
        warn_or_raise(category, f"plan: {listed[0]}{others}: {text_of_warning}", strict=False)


def _least_of_others(search: Search, comparison: Comparison, left: Sequence[str]) -> float | None:
    """Returns ``PlanningResult.least``: a lower bound of all times that are not known.

    Args:
      search: all candidates, each with the bound by its products (``least``).
      comparison: the reports of the candidates that were compiled.
      left: the names of the candidates that may fit, but were not compiled.

    Returns:
      The bound in seconds; infinity if all times are known; None if no bound can be given.
    """
    # A search for the largest batch does not rank by time, and without hardware there are no rates.
    if search.maximize or search.hardware is None:
        return None
    # A measured time and an estimate cannot be compared, so if there are measured times, only these
    # count as known.
    timed = {*comparison.measured}
    if not timed:
        for name, report in comparison.compiled.items():
            if getattr(report.roofline, "seconds", None) is not None:
                timed.add(name)
    # `fits` is None if the memory of a program is unknown. Such a program may fit.
    untimed = [
        name
        for name in comparison.compiled
        if comparison.fits(name) is not False and name not in timed
    ]
    bounds: list[float] = []
    for name in (*left, *untimed):
        least = search.entries[name].least
        if least is None:
            return None
        bounds.append(least)
    return min(bounds, default=math.inf)
