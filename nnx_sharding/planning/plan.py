"""``plan``: the search for the mesh, strategies and variant with which a step is fastest."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from .. import _compat
from ..activations.variables import modules_in
from ..analysis.hardware import HARDWARE, Hardware, hardware_of
from ..analysis.tables import Pictured, text
from ..analysis.units import bytes_text, read_bytes, time_text
from ..diagnostics.progress import progress
from ..errors import message, raise_listed
from ..partition.mesh import DEFAULT, on_topology, planning_mesh, topology_devices
from ..report.comparison import Column, Comparison, Failure
from ..report.compiling import Lower, search
from ..report.strategies import Strategy, abstract_of, lowered, unwrapped
from ..specs.paths import accessor
from ..transforms.jit import jit
from ..transforms.stack import Stack
from .candidates import (
    Arguments,
    Axes,
    Candidate,
    applies,
    batch_spec,
    chains,
    check_meshes,
    checked_strategies,
    mesh_sizes,
    strategies_of,
)
from .predictions import Prediction, Work, predict, work_of


@dataclasses.dataclass(frozen=True)
class Plan(Pictured):
    """The result of :func:`plan`. ``print`` shows all candidates, best first, and a recipe.

    Attributes:
      comparison: the reports of the candidates that were compiled, best first, and why the others
        were not. It can be saved, and shown as a page.
      candidates: the candidates that were compiled, by name.
      least: a lower bound, in seconds, of the time of each candidate that may fit, but was not
        compiled, or whose time is unknown: the products of the step at the peak rate of all
        devices. Infinite if there is none; None if the hardware is unknown, or the products are.
      predicted: the time of each candidate that may fit, compiled or not, as it was predicted from
        shapes: in seconds, if all communication is hidden behind compute, and if none is.
    """

    comparison: Comparison
    candidates: Mapping[str, Candidate]
    least: float | None = None
    predicted: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The best candidate that fits, of those whose figures are known; None if none does."""
        figures, fitting = self.comparison.figures, self.comparison.fitting
        timed = any(figures[name]["roofline"] is not None for name in fitting)
        needed: Column = "roofline" if timed else "bytes_sent"
        known = (name for name in fitting if figures[name][needed] is not None)
        return next((self.candidates[name] for name in known), None)

    @property
    def gap(self) -> float | None:
        """At most how much faster another candidate may be: 0.1 for a time that is 10 % shorter.

        A bound; None if there is no best candidate, or the bound of the others is unknown.
        """
        best = None if self.best is None else self.comparison.figures[self.best.name]["roofline"]
        return None if best is None or self.least is None else max(0.0, 1 - self.least / best)

    @property
    def ruled_out(self) -> Mapping[str, str]:
        """Why each of the other candidates was not compiled, by name."""
        return self.comparison.ruled_out

    def summary(self) -> Iterator[str]:
        """Lines with the best candidate, how much faster others may be, and its recipe."""
        if self.best is None:
            yield "best: none fits"
            return
        yield f"best: {self.best.name}"
        if self.gap == 0:
            yield "bound: no other candidate is faster"
        elif self.gap is not None:
            least = f"{time_text(self.least)} ({100 * self.gap:.0f} % less)"
            yield f"bound: by their products alone, others take at least {least}"
        yield from (f"  {line}" for line in self.best.recipe.splitlines())

    def _pictures(self, width: int) -> Iterable[Any]:
        first, *others = self.summary()
        yield from self.comparison._pictures(width)
        yield from (text(first, "bold"), *map(text, others))


class _Variant(NamedTuple):
    """A variant of the step."""

    name: str
    fun: Callable[..., Any]
    options: dict[str, Any]  # of jit
    args: Any
    prefetch: int
    offload: bool
    text: str  # the function, in a recipe
    lines: tuple[str, ...]  # before that

    @property
    def names(self) -> list[str]:
        """The names of the arguments in a recipe."""
        try:
            found = [*inspect.signature(self.fun).parameters.values()]
        except (TypeError, ValueError):
            found = []
        by_position = (x for x in found if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD))
        named = [x.name for x in by_position][: len(self.args)]
        return [*named, *(f"arg{i}" for i in range(len(named), len(self.args)))]


class _Entry(NamedTuple):
    """A candidate before it is compiled."""

    candidate: Candidate
    prediction: Prediction
    seconds: dict[str, float]
    least: float | None
    lower: Lower
    alike: tuple[Any, ...]  # predictions of these are as far off


@_compat.api_boundary
def plan(
    step: Callable[..., Any] | Mapping[str, Any],
    *args: Any,
    devices: int | None = None,
    topology: str | None = None,
    num_slices: int = 1,
    axes: Sequence[str] | Mapping[str, Any] = ("data", "model"),
    meshes: Iterable[Mapping[str, int] | Mesh | AbstractMesh] | None = None,
    strategies: Iterable[str] | Mapping[str, Any] | None = None,
    variants: Mapping[str, Sequence[Any]] | None = None,
    maximize: Literal["batch"] | None = None,
    memory_limit: int | str | None = None,
    hardware: Hardware | str | None = None,
    most: int | None = 16,
    time_limit: float | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    by_module: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Plan:
    """Searches for the mesh and strategies with which a step fits into memory and is fastest.

    Each chain of strategies is tried on each mesh that the devices can form. What can be ruled out
    is not compiled: candidates whose arguments alone exceed the memory, those that shard everything
    like another one, those that raise an error, and those whose products alone take longer than
    what was compiled. The others are compiled side by side, those predicted to be fastest first;
    what was compiled corrects the predictions of the others.

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
      devices.

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
        that for the stages of a pipeline.
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
        ``HARDWARE``; None uses those of the topology.
      most: the maximum number of programs to compile; None for all.
      time_limit: seconds after which no more are compiled; all are predicted, though.
      cache_dir: a folder for reports, as for :func:`~nnx_sharding.report.compare`.
      by_module: whether the report of the best candidate has memory and cost by module, for which
        it is compiled again.
      quiet: whether to show no progress on terminals.
      **options: for :func:`~nnx_sharding.jit`, the same for all: ``donate_argnums``, ….

    Returns:
      The candidates, ranked by the estimate of their roofline, then by the bytes sent, then by
      memory; without known hardware by the last two. Those that do not fit come last, the smallest
      peak first, and those that failed. ``gap`` says how much faster others may be. The estimate
      contains the communication that a compiler for accelerators has not hidden behind compute; for
      virtual CPU devices, all of it counts as hidden.

    Raises:
      ValueError: no candidate can fit or be lowered: each reason is listed once; or the arguments
        of the search are wrong.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding.planning import plan
      >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
      >>> x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> found = plan(lambda model, x: model(x), model, x, devices=8, memory_limit="5 MiB")
      >>> found.best.name
      'dp + tensor, data 1 × model 8'
      >>> print(found.best.recipe)
      mesh = make_mesh({'data': 1, 'model': 8})
      sharding = tensor_parallel(model, mesh=mesh, axis='model')
      step = jit(step, in_shardings=(sharding, P('data')), mesh=mesh)
    """
    start = time.monotonic()
    where = {"devices": devices, "topology": topology, "num_slices": num_slices}
    tried = {"axes": axes, "meshes": meshes, "strategies": strategies, "variants": variants}
    aim = {"maximize": maximize, "memory_limit": memory_limit, "hardware": hardware, "most": most}
    chosen, compiled_for = predicted(step, args, options, **where, **tried, **aim, quiet=quiet)
    time_left = None if time_limit is None else time_limit - (time.monotonic() - start)
    limit, peak = chosen.limit, chosen.hardware
    compiler = {"cache_dir": cache_dir, "devices": compiled_for, "quiet": quiet}
    judged: dict[str, Any] = {"memory_limit": limit, "hardware": peak, **compiler}
    found = search("plan", chosen.programs, chosen.pick, most=most, time_limit=time_left, **judged)
    mistakes = {
        name: failure
        for name, failure in found.reports.items()
        if isinstance(failure, Failure)
        and not isinstance(failure.exception, jax.errors.JaxRuntimeError)  # of the compiler
    }
    if len(mistakes) == len(found.reports):
        reasons = {name: failure.error for name, failure in mistakes.items()} | chosen.ruled_out
        cause = next(iter(mistakes.values())).exception
        raise ValueError(_reasons("plan: no candidate can be lowered:", reasons)) from cause
    candidates = {name: chosen.entries[name].candidate for name in found.reports}
    order = sorted(candidates, key=partial(_rank, found, candidates if maximize else None))
    reports = {name: found.reports[name] for name in order}
    if by_module and found.fits(order[0]):
        again = {order[0]: chosen.entries[order[0]].lower}
        reports |= search("modules of the best", again, by_module=True, **judged).compiled
    left = [name for name in chosen.entries if name not in reports and name not in chosen.ruled_out]
    compiled = len(reports) - len(mistakes)
    why = f"the {compiled} compiled are predicted to be better"
    why = f"not compiled within {time_limit} s" if time_limit and compiled != most else why
    ruled_out = chosen.ruled_out | dict.fromkeys(left, why)
    unknown = [
        name
        for name, report in found.compiled.items()
        if found.fits(name) is not False and getattr(report.roofline, "seconds", None) is None
    ]
    bounds = [chosen.entries[name].least for name in left + unknown]
    least = min((bound or 0.0 for bound in bounds), default=math.inf)
    is_known = not maximize and peak is not None and None not in bounds
    ranked = dataclasses.replace(found, reports=reports, ruled_out=ruled_out)
    predicted_seconds = {
        name: (max(entry.seconds.values()), float(sum(entry.seconds.values())))
        for name, entry in chosen.entries.items()
        if entry.least is not None  # the products and the hardware are known
    }
    in_order = {name: candidates[name] for name in order}
    return Plan(ranked, in_order, least if is_known else None, predicted_seconds)


def predicted(
    step: Any,
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    devices: Any = None,
    topology: Any = None,
    num_slices: Any = 1,
    axes: Any = ("data", "model"),
    meshes: Any = None,
    strategies: Any = None,
    variants: Any = None,
    maximize: Any = None,
    memory_limit: Any = None,
    hardware: Any = None,
    most: Any = None,
    quiet: bool = False,
) -> tuple[Search, Any]:
    """The candidates with their predictions, and the devices to compile for; as for ``plan``."""
    _check_counts(topology, devices=devices, num_slices=num_slices, most=most)
    if maximize not in (None, "batch"):
        raise ValueError(f"plan: maximize={maximize!r}: expected 'batch' or None.")
    every, named = _variants(step, args, variants or {}, options), Axes.of(axes)
    functions = _strategies(strategies)
    with on_topology(topology, num_slices):
        on = DEFAULT.get()
        count = devices or (jax.device_count() if on is None else len(topology_devices(*on)))
        arguments = Arguments(every[0].args, every[0].names)
        functions = functions or dict.fromkeys(strategies_of(arguments, count))
        pairs: list[tuple[str, Mesh]] = []
        made: dict[Any, Mesh] = {}
        if meshes is not None:
            given = [*meshes]
            sizes_of = [x.shape if isinstance(x, Mesh | AbstractMesh) else x for x in given]
            check_meshes(sizes_of, devices, named, are_ours=None in functions.values())
            pairs = [*itertools.product(functions, map(planning_mesh, given))]
        for strategy, function in functions.items() if meshes is None else ():
            # A function of the user may use the axes of both.
            for each in [strategy] if function is None else ["dp", "dp + tensor"]:
                for sizes in mesh_sizes(count, num_slices, named, each, arguments):
                    key = tuple(sizes.items())
                    made[key] = mesh = made.get(key) or planning_mesh(sizes)
                    pairs.append((strategy, mesh))
    pairs = [(s, m) for s, m in pairs if functions[s] is not None or applies(s, m.shape, named)]
    if not pairs:
        raise ValueError(
            f"plan: no mesh of {count} devices has the axes of {', '.join(functions)}, with sizes "
            "that divide layers, experts and the batch."
        )
    first = pairs[0][1].devices.flat[0]
    is_cpu = all(mesh.devices.flat[0].platform == "cpu" for _, mesh in pairs)
    compiled_for = max(mesh.size for _, mesh in pairs) if on is None and is_cpu else on
    peak = HARDWARE.get(first.device_kind) if hardware is None else hardware_of(hardware)
    limit = None if peak is None else peak.memory_bytes
    limit = limit if memory_limit is None else read_bytes(memory_limit)
    if maximize and (limit is None or not arguments.rows):
        raise ValueError(
            "plan: maximize='batch' needs a batch, and memory_limit=... or hardware=..."
        )
    chosen = Search(every, functions, named, peak, limit, most, maximize is not None)
    with progress("plan: predicting", len(pairs), quiet=quiet) as advance:
        for strategy, mesh in pairs:
            for index in range(len(every)):
                chosen.add(strategy, mesh, index)
            advance(strategy)
    if not chosen.programs:
        raise ValueError(_reasons("plan: no candidate can fit:", chosen.ruled_out))
    return chosen, compiled_for


@dataclasses.dataclass
class Search:
    """The candidates, and which of them is compiled next."""

    variants: Sequence[_Variant]
    functions: Mapping[str, Any]
    axes: Axes
    hardware: Hardware | None
    limit: Any  # bytes, or None
    most: int | None
    maximize: bool
    entries: dict[str, _Entry] = dataclasses.field(default_factory=dict)
    programs: dict[str, Lower] = dataclasses.field(default_factory=dict)  # still to be compiled
    ruled_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen: dict[Any, str] = {}
        # The names of candidates by strategy, mesh and variant, and by the rows of their batches.
        self._families: dict[tuple[str, Mesh, int], dict[int, list[str]]] = {}
        self._arguments = [Arguments(each.args, each.names) for each in self.variants]
        self._work: dict[int, Work | None] = {}

    def add(self, strategy: str, mesh: Mesh, index: int, rows: int = 0) -> None:
        """Adds the candidates of a strategy for a variant, or says why they are ruled out."""
        variant, arguments = self.variants[index], self._arguments[index]
        given, args, size = arguments.rows, variant.args, ""
        if self.maximize:
            rows = rows or given
            args = arguments.with_rows(rows)
            arguments, size = Arguments(args, variant.names), f"batch {rows}"
        start = Candidate(strategy, dict(mesh.shape), variant.name, (), mesh, rows=arguments.rows)
        sizes = self._families.setdefault((strategy, mesh, index), {})
        names = sizes[start.rows] = list[str]()
        try:
            found = [*self._sharded(start, arguments, variant, args)]
        except Exception as error:
            self.ruled_out[start.name] = f"{type(error).__name__}: {error}"
            return
        for text_, candidate, lower in found:
            full = ", ".join(filter(None, (text_, variant.name, size)))
            candidate = dataclasses.replace(candidate, variant=full)
            name = candidate.name
            try:
                prediction = predict(candidate, args, arguments, self.axes)
            except Exception as error:
                self.ruled_out[name] = f"{type(error).__name__}: {error}"
                continue
            key = variant.text, variant.lines, candidate.rows, prediction.key
            same = self._seen.setdefault(key, name)
            if same != name:
                self.ruled_out[name] = f"shards everything like {same}"
            elif self.limit is not None and prediction.arguments > self.limit:
                taken = bytes_text(prediction.arguments)
                self.ruled_out[name] = f"the arguments take {taken} on each device"
            else:
                work, peak = self._work_of(index), self.hardware
                work = work and work.times(rows / given if rows else 1)
                bound = work.least_seconds(mesh.size, peak) if work and peak else None
                seconds = prediction.seconds(work, mesh.size, peak or HARDWARE["TPU v5e"])
                alike = (variant.name, strategy)
                self.entries[name] = _Entry(candidate, prediction, seconds, bound, lower, alike)
                self.programs[name] = lower
                names.append(name)

    def _work_of(self, index: int) -> Work | None:
        """The products of a variant, which is traced once."""
        if index not in self._work:
            one = self.variants[index]
            self._work[index] = work_of(one.fun, one.args, one.options, self.axes)
        return self._work[index]

    def _sharded(
        self, start: Candidate, arguments: Arguments, variant: _Variant, args: Any
    ) -> Iterator[tuple[str, Candidate, Lower]]:
        """The candidates with shardings and programs, and the options that differ."""
        mesh, function = start.mesh, self.functions[start.strategy]

        def lower(shardings: Any) -> Lower:
            return partial(lowered, Strategy(shardings, mesh), variant.fun, args, variant.options)

        if function is not None:
            with jax.set_mesh(mesh):
                shardings = function(*args)
            if not isinstance(shardings, tuple) or len(shardings) != len(args):
                raise TypeError(
                    f"expected a tuple of {len(args)} shardings, as many as arguments, got "
                    f"{shardings!r}"
                )
            yield "", dataclasses.replace(start, in_shardings=shardings), lower(shardings)
            return
        rows = batch_spec(start.sizes, self.axes, arguments)
        calls = chains(start.strategy, start.sizes, self.axes, arguments, variant.prefetch)
        given = inspect.signature(jit).parameters
        more = "".join(
            f", {key}={value!r}"
            for key, value in variant.options.items()
            if key not in given or value != given[key].default
        )
        kinds = ", ".join(f"AxisType.{kind.name}" for kind in mesh.axis_types)
        is_default = {*mesh.axis_types} == {AxisType.Explicit}
        types = "" if is_default else f", axis_types=({kinds},)"
        for options, chain in calls.items():
            shardings, lines, text_ = arguments.shard(chain, mesh, rows, offloaded=variant.offload)
            head = f"mesh = make_mesh({dict(start.sizes)}{types})"
            last = f"step = jit({variant.text}, in_shardings={text_}, mesh=mesh{more})"
            recipe = "\n".join([head, *variant.lines, *lines, last])
            found = dataclasses.replace(start, in_shardings=shardings, recipe=recipe)
            yield options, found, lower(shardings)

    def pick(self, reports: Mapping[str, Any]) -> str | None:
        """The next program: the one with the shortest estimated time that may fit."""
        self._rule_out_failing(reports)
        found = None if not reports else Comparison(reports, self.limit)
        fitting = () if found is None else found.fitting
        if self.maximize and found is not None:
            self._resize(found)
        figures = {} if found is None else found.figures
        times = [figures[name]["roofline"] for name in fitting]
        best = min((x for x in times if x is not None), default=math.inf)
        for name in [] if self.maximize else [*self.programs]:
            least = self.entries[name].least
            if least is not None and least >= best:
                del self.programs[name]
                self.ruled_out[name] = f"takes {time_text(least)} or more by its products (bound)"
        if not self.programs:
            return None
        started = len(self.entries) - len(self.programs)
        # While nothing fits, the second half goes to those with the smallest arguments.
        by_memory = self.most is not None and not fitting and 2 * started >= self.most
        ratios, excess = self._corrections(found)

        def order(name: str) -> tuple[Any, ...]:
            entry = self.entries[name]
            alike = (ratios[x] for x in (entry.alike, entry.alike[:1], ()) if x in ratios)
            ratio = next(alike, {})
            times = {key: s * ratio.get(key, 1.0) for key, s in entry.seconds.items()}
            waits = times["interconnect"] * ratio.get("exposed", 0.0)
            step = max(*times.values(), max(times["compute"], times["memory"]) + waits)
            held = entry.prediction.arguments
            least = held + excess.get(entry.alike[0], 0)
            exceeds = self.limit is not None and least > self.limit
            rows = entry.candidate.rows if self.maximize else 0
            return (-rows, held) if by_memory else (-rows, exceeds, step, sum(times.values()), held)

        return min(self.programs, key=order)

    def _rule_out_failing(self, reports: Mapping[str, Any]) -> None:
        """Rules out what two others with the same strategy and variant could not be traced for.

        They were on different meshes, so their common error does not depend on the mesh.
        """
        errors = {
            (self.entries[name].alike, failure.error, str(self.entries[name].candidate.sizes))
            for name, failure in reports.items()
            if isinstance(failure, Failure)
            and not isinstance(failure.exception, jax.errors.JaxRuntimeError)  # of the compiler
        }
        counts = Counter((alike, error) for alike, error, _ in errors)
        failing = {alike for (alike, _), count in counts.items() if count > 1}
        for name in [*self.programs]:
            if self.entries[name].alike in failing:
                del self.programs[name]
                self.ruled_out[name] = "fails like others with its strategy, on other meshes"

    def _resize(self, found: Comparison) -> None:
        """Adds larger batches of candidates that fit one, smaller ones while none does."""
        fitting = {*found.fitting}
        best = max((self.entries[name].candidate.rows for name in fitting), default=0)
        for family, sizes in [*self._families.items()]:
            fits = {rows: {*names} & fitting for rows, names in sizes.items()}
            failed = [
                n for n, names in sizes.items() if not fits[n] and found.reports.keys() >= {*names}
            ]
            low = max((rows for rows, names in fits.items() if names), default=0)
            high = min(failed, default=math.inf)
            wanted: float = best
            if not best:
                wanted = high // 2 if high % 2 == 0 else 0
            elif low:
                memory: Any = found.compiled[fits[low].pop()].memory  # of one that fits, so known
                held = memory.arguments or 0
                spare, more = self.limit - held, memory.peak - held
                wanted = low * 2 ** max(1, int(math.log2(max(spare, 1) / max(more, 1))))
                while wanted >= high:
                    wanted //= 2
            if low < wanted < high and wanted >= best and wanted not in sizes:
                self.add(*family, int(wanted))
        for name in [*self.programs]:
            if self.entries[name].candidate.rows < best:
                del self.programs[name]
                self.ruled_out[name] = f"a batch of {best} fits others"

    def _corrections(
        self, found: Comparison | None
    ) -> tuple[dict[Any, dict[str, float]], dict[Any, float]]:
        """How far predictions were off, for candidates alike; and the least that a variant adds."""
        ratios: dict[Any, dict[str, list[float]]] = {}
        excess: dict[Any, float] = {}
        for name, report in {} if found is None else found.compiled.items():
            entry, memory = self.entries[name], report.memory
            if memory and memory.peak is not None and memory.arguments is not None:
                more, variant = memory.peak - memory.arguments, entry.alike[0]
                excess[variant] = min(excess.get(variant, more), more)
            roofline = report.roofline
            off: dict[str, float] = {
                resource: seconds / entry.seconds[resource]
                for resource, seconds in (roofline.times if roofline else {}).items()
                if seconds and entry.seconds[resource]
            }
            if roofline and roofline.interconnect_s and roofline.exposed_s is not None:
                off["exposed"] = roofline.exposed_s / roofline.interconnect_s
            for key, ratio in off.items():
                for count in range(len(entry.alike) + 1):
                    ratios.setdefault(entry.alike[:count], {}).setdefault(key, []).append(ratio)
        means = {
            alike: {key: _MEANS.get(key, statistics.geometric_mean)(x) for key, x in of.items()}
            for alike, of in ratios.items()
        }
        return means, excess


_MEANS: dict[str, Any] = {"exposed": statistics.fmean}  # shares, which may be 0


def _check_counts(topology: str | None, **counts: Any) -> None:
    wrong = [
        f"  {name}={count!r}: expected a number of at least 1"
        for name, count in counts.items()
        if (count is not None or name == "num_slices")
        and (isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1)
    ]
    if topology is not None and counts["devices"] is not None:
        wrong.append(f"  devices={counts['devices']!r}: topology={topology!r} has its own devices")
    raise_listed(ValueError, "plan: these arguments cannot be used:", wrong)


def _reasons(head: str, reasons: Mapping[str, str]) -> str:
    """A message in which each reason is named once, with the candidates that it holds for."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    of_one = {reason: f"{'; '.join(of)}: " * (len(names) > 1) for reason, of in names.items()}
    return message(head, [f"  {of}{reason}" for reason, of in of_one.items()])


def _variants(
    step: Any, args: Sequence[Any], grid: Mapping[str, Sequence[Any]], options: Mapping[str, Any]
) -> list[_Variant]:
    """The variants of a step: those of the user, with all combinations of options."""
    found = []
    if wrong := [name for name, of in grid.items() if isinstance(of, str) or not [*of]]:
        raise ValueError(f"plan: variants: expected lists of values for {', '.join(wrong)}.")
    for name, entry in (step if isinstance(step, Mapping) else {"": step}).items():
        fun, *own = entry if isinstance(entry, tuple) else (entry, *args)
        fun, kept = unwrapped("plan", fun, options)
        text_ = getattr(fun, "__name__", "step").replace("<lambda>", "step")
        text_ = f"steps[{name!r}]" if isinstance(step, Mapping) else text_
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            full = ", ".join([*[str(name)] * bool(name), *(f"{k}={v}" for k, v in chosen.items())])
            policy, prefetch = chosen.pop("remat", None), chosen.pop("prefetch", 0)
            offloaded = bool(chosen.pop("offload", False))
            given = "".join(f", {key}={value!r}" for key, value in chosen.items())
            one = _Variant(
                full,
                partial(fun, **chosen) if chosen else fun,
                kept,
                abstract_of(own),
                prefetch,
                offloaded,
                f"functools.partial({text_}{given})" if chosen else text_,
                (),
            )
            if "remat" in grid:
                one = one._replace(lines=tuple(_set_remat(one, policy)))
            found.append(one)
    if not found:
        raise ValueError("plan: expected at least one variant of the step, got none.")
    return found


def _set_remat(variant: _Variant, policy: Any) -> Iterator[str]:
    """Sets the policy of all stacks in the arguments; yields the statements that do so."""
    seen = set()
    for name, part in Arguments(variant.args, variant.names).parts.items():
        for path, module in modules_in(part) if isinstance(part, nnx.Module) else ():
            if isinstance(module, Stack) and id(module) not in seen:
                seen.add(id(module))
                module.remat = policy
                yield f"{accessor(name, path)}.remat = {policy!r}"
    if not seen:
        raise ValueError("plan: variants: remat is that of a Stack, and no argument has one.")


def _strategies(strategies: Any) -> dict[str, Any]:
    """The user's functions by name, with None for strategies of this library; empty for all."""
    if strategies is None:
        return {}
    if isinstance(strategies, Mapping):
        for name, function in strategies.items():
            if not callable(function):
                raise TypeError(
                    f"plan: strategies[{name!r}]: expected a function, got {function!r}."
                )
    if not strategies or not isinstance(strategies, Iterable):
        raise ValueError(
            f"plan: strategies={strategies!r}: expected names as in 'fsdp + tensor', or functions."
        )
    if isinstance(strategies, Mapping):
        return {str(name): function for name, function in strategies.items()}
    names = [strategies] if isinstance(strategies, str) else [*strategies]
    return dict.fromkeys(checked_strategies(names))


def _rank(found: Comparison, batches: Mapping[str, Candidate] | None, name: str) -> tuple[Any, ...]:
    """The sort key of a candidate; unknown figures come last."""
    figures = found.figures.get(name, {})
    if not found.fits(name):
        return (True, figures.get("peak") or math.inf)  # the one that nearly fits first
    rows = -batches[name].rows if batches else 0
    known = (figures[column] for column in _RANKED_BY)
    return (False, rows, *(math.inf if figure is None else figure for figure in known))


_RANKED_BY: tuple[Column, ...] = ("roofline", "bytes_sent", "peak")
