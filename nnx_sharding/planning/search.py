"""Which candidate of a plan is compiled next, and which never.

`Search.add` makes the candidates of a strategy on a mesh, and predicts what each needs;
`Search.pick` chooses among them, given the reports of those that were compiled so far. `plan.py`
describes the whole search.

A *candidate* is a chain of strategies on a mesh, for a *variant* of the step and perhaps with some
option of the chain, such as a number of microbatches. A *family* are candidates that only differ in
such options and in the rows of the batch. A `Comparison` has the
reports of what was compiled: ``fitting`` are the names of those that fit into memory, best first,
and ``figures`` their times, of which ``roofline`` is the estimate.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..analysis.hardware import HARDWARE, Hardware
from ..analysis.program import ProgramReport
from ..analysis.units import bytes_text, time_text
from ..report.comparison import Comparison, Failure
from ..report.compiling import Lower
from ..report.strategies import Strategy, lowered
from ..transforms.jit import jit
from .candidates import Arguments, Axes, Candidate, batch_spec, chains, split_name
from .predictions import Prediction, Products, predict, products_of
from .variants import Variant, with_less_memory, with_prefetch

FAILS_ALIKE = "fails like others with its strategy, on other meshes"


class PredictedCandidate(NamedTuple):
    """A candidate before it is compiled."""

    candidate: Candidate
    variant: Variant
    prediction: Prediction
    args: tuple[Any, ...]  # those of the variant, or with another number of rows
    seconds: dict[str, float]  # predicted, of each resource alone
    exposed: float  # the share of the interconnect's time that compute may not hide
    least: float | None  # a lower bound of its time, if known
    lower: Lower  # traces and lowers the step
    alike: tuple[str, str]  # variant and strategy: predictions of these are about as far off


class Needs(NamedTuple):
    """What a candidate needs on each device."""

    candidate: Candidate
    variant: Variant
    arguments: int  # bytes
    rest: int  # bytes besides its arguments; 0 if it was not compiled


@dataclasses.dataclass
class Search:
    """The candidates, and which of them is compiled next.

    Attributes:
      variants: those of the user; the search adds others.
      functions: strategies by name: a function of the user, or None for a chain of this library.
      axes: the names of mesh axes by their roles.
      hardware: the rates for predictions; None if they are unknown.
      limit: the bytes of a device; None if they are unknown.
      most: how many candidates are compiled at most; None for all.
      maximize: whether the largest batch is sought, rather than the shortest step.
      num_slices: the number of slices of TPUs that the devices are on.
      entries: by name, all candidates that may be compiled, or were.
      programs: of these, what lowers those that are still to be compiled.
      ruled_out: by name, why a candidate is not compiled.
      smallest: what the candidate with the smallest arguments needs, whether it fits or not.
    """

    variants: Sequence[Variant]
    functions: Mapping[str, Callable[..., Any] | None]
    axes: Axes
    hardware: Hardware | None
    limit: int | None
    most: int | None
    maximize: bool
    num_slices: int = 1
    entries: dict[str, PredictedCandidate] = dataclasses.field(default_factory=dict)
    programs: dict[str, Lower] = dataclasses.field(default_factory=dict)
    ruled_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.smallest: Needs | None = None
        self._added: dict[str, Variant] = {}  # variants that the search added, by name
        self._varied = set[str]()  # the names of candidates for which it did
        self._seen: dict[Any, str] = {}  # what a candidate compiles to → its name
        # (strategy, mesh, variant) → rows of the batch → the names of candidates.
        self._families: dict[tuple[str, Mesh, Variant], dict[int, list[str]]] = {}
        self._products: dict[Variant, Products | None] = {}

    def add(self, strategy: str, mesh: Mesh, variant: Variant, rows: int = 0) -> None:
        """Adds the candidates of a strategy for a variant, or says why they are ruled out.

        Args:
          strategy: its name.
          mesh: the mesh.
          variant: the variant of the step.
          rows: the number of rows of the batch if the largest is sought; 0 for those given.
        """
        arguments, growth, batch = variant.arguments, 1.0, ""
        if self.maximize:
            rows = rows or arguments.rows
            growth, batch = rows / arguments.rows if rows else 1.0, f"batch {rows}"
            arguments = arguments.with_rows(rows)
        start = Candidate(
            strategy=strategy,
            sizes=dict(mesh.shape),
            variant=variant.name,
            in_shardings=(),
            mesh=mesh,
            rows=arguments.rows,
        )
        names = self._families.setdefault((strategy, mesh, variant), {})[start.rows] = []
        try:
            candidates = [*self._sharded(start, arguments, variant, mesh)]
        except Exception as error:  # of a strategy, which may be the user's
            self.ruled_out[start.name] = f"{type(error).__name__}: {error}"
            return
        for options, candidate in candidates:
            texts = (options, variant.name, batch)
            candidate = dataclasses.replace(candidate, variant=", ".join(filter(None, texts)))
            try:
                prediction = predict(candidate, arguments, self.axes, self.num_slices)
            except Exception as error:
                self.ruled_out[candidate.name] = f"{type(error).__name__}: {error}"
                continue
            if self.smallest is None or prediction.arguments < self.smallest.arguments:
                self.smallest = Needs(candidate, variant, prediction.arguments, rest=0)
            why_not = self._why_not(candidate, prediction, variant)
            if why_not is not None:
                self.ruled_out[candidate.name] = why_not
                continue
            products = self._products_of(variant)
            if products is not None:
                products = products.times(growth)
            self._add_predicted(candidate, variant, arguments.args, prediction, products)
            names.append(candidate.name)

    def _why_not(
        self, candidate: Candidate, prediction: Prediction, variant: Variant
    ) -> str | None:
        """Says why a candidate need not be compiled, by its prediction; None if it may be."""
        # Equal shardings compile to equal programs. The first candidate with them has its own name.
        key = variant.text, variant.lines, candidate.rows, prediction.key
        first = self._seen.setdefault(key, candidate.name)
        if first != candidate.name:
            return f"shards everything like {first}"
        if self.limit is not None and prediction.arguments > self.limit:
            return f"the arguments take {bytes_text(prediction.arguments)} on each device"
        return None

    def _add_predicted(
        self,
        candidate: Candidate,
        variant: Variant,
        args: tuple[Any, ...],
        prediction: Prediction,
        products: Products | None,
    ) -> None:
        """Adds a candidate that may be compiled.

        Args:
          candidate: the candidate.
          variant: its variant of the step.
          args: the arguments of the step.
          prediction: what it needs.
          products: those of the step; None if they are unknown.
        """
        num_devices = candidate.mesh.size
        # On unknown hardware the ratios of some accelerator decide the order.
        hardware = self.hardware or HARDWARE["TPU v5e"]
        seconds = prediction.seconds(products, num_devices, hardware)
        between = prediction.seconds_between_slices(hardware)
        least = None
        if products is not None and self.hardware is not None:
            least = products.least_seconds(num_devices, self.hardware)
        strategy = Strategy(candidate.in_shardings, candidate.mesh)
        entry = PredictedCandidate(
            candidate=candidate,
            variant=variant,
            prediction=prediction,
            args=args,
            seconds=seconds,
            # What slices send each other: stages over slices are 1.2 times as fast as replicas.
            exposed=between / seconds["interconnect"] if between else 0.0,
            least=least,
            lower=partial(lowered, strategy, variant.fun, args, variant.options),
            alike=(variant.name, candidate.strategy),
        )
        self.entries[candidate.name] = entry
        self.programs[candidate.name] = entry.lower

    def _products_of(self, variant: Variant) -> Products | None:
        """Returns the products of a variant, which is traced once; None if they are unknown."""
        if variant not in self._products:
            self._products[variant] = products_of(
                variant.fun, variant.args, variant.options, self.axes
            )
        return self._products[variant]

    def arguments_of(
        self, candidate: Candidate, variant: Variant, *, rows: int = 0, offload: bool = False
    ) -> float:
        """Predicts the bytes of a candidate's arguments on each device; infinity if it fails.

        Of a chain with several options, the first ones count.

        Args:
          candidate: its strategy, and the sizes of its mesh.
          variant: its variant of the step.
          rows: the number of rows of the batch; 0 for those given.
          offload: whether the state of the optimizer is on the host.
        """
        mesh: Mesh | AbstractMesh = candidate.mesh
        if not offload:  # which needs devices; shapes do not, and a larger mesh may have none
            mesh = AbstractMesh(tuple(candidate.sizes.values()), tuple(candidate.sizes))
        arguments = variant.arguments.with_rows(rows) if rows else variant.arguments
        if offload != variant.offload:
            variant = dataclasses.replace(variant, offload=offload)
        try:
            _, sharded = next(self._sharded(candidate, arguments, variant, mesh))
            return predict(sharded, arguments, self.axes).arguments
        except ValueError:
            return math.inf

    def _sharded(
        self,
        start: Candidate,
        arguments: Arguments,
        variant: Variant,
        mesh: Mesh | AbstractMesh,
    ) -> Iterator[tuple[str, Candidate]]:
        """Yields candidates with shardings and recipes, each after the options that differ.

        Args:
          start: a candidate without shardings.
          arguments: those of its step.
          variant: its variant of the step.
          mesh: its mesh, or one without devices for predictions only.
        """
        function = self.functions.get(start.strategy)
        if function is not None:
            with jax.set_mesh(start.mesh):
                shardings = function(*arguments.args)
            count = len(arguments.args)
            if not isinstance(shardings, tuple) or len(shardings) != count:
                raise TypeError(
                    f"expected a tuple of {count} shardings, as many as arguments, got "
                    f"{shardings!r}"
                )
            yield "", dataclasses.replace(start, in_shardings=shardings)
            return
        batch = batch_spec(start.sizes, self.axes, arguments)
        chain_of = chains(start.strategy, start.sizes, self.axes, arguments, variant.prefetch)
        for options, chain in chain_of.items():
            sharded = arguments.shard(chain, mesh, batch, offloaded=variant.offload)
            recipe = _recipe(mesh, variant, lines=sharded.lines, shardings=sharded.text)
            yield (
                options,
                dataclasses.replace(start, in_shardings=sharded.shardings, recipe=recipe),
            )

    def pick(self, reports: Mapping[str, ProgramReport | Failure]) -> str | None:
        """Chooses the next program: the one with the shortest estimated time that may fit.

        Args:
          reports: of what was compiled so far.

        Returns:
          Its name; None if there is none, at least until more is compiled.
        """
        self.rule_out_failing(reports)
        found = Comparison(reports, self.limit) if reports else None
        fitting = () if found is None else found.fitting
        if found is not None and self.maximize:
            self._resize(found)
        elif found is not None:
            self._rule_out_slow(found)
            if fitting:
                self._prefetch_best(found)
            else:
                self._save_memory(found)
        if not self.programs:
            return None
        corrections = _Corrections(self.entries, {} if found is None else found.compiled)
        # While nothing fits, the second half goes to those with the smallest arguments.
        by_memory = not fitting and self._is_late

        def order(name: str) -> tuple[float, ...]:
            """Sorts by batch, then those that may fit, then by time, then by memory.

            The smallest tuple is compiled first.
            """
            entry = self.entries[name]
            held = entry.prediction.arguments
            rows = entry.candidate.rows if self.maximize else 0
            if by_memory:
                return -rows, held
            exceeds = self.limit is not None and held + corrections.bytes(entry) > self.limit
            return (-rows, exceeds, *corrections.seconds(entry), held)

        # The first of those that are equal, as they were added.
        return min(self.programs, key=order)

    @property
    def _is_late(self) -> bool:
        """Whether half of what may be compiled was started."""
        started = len(self.entries) - len(self.programs)
        return self.most is not None and 2 * started >= self.most

    def _save_memory(self, found: Comparison) -> None:
        """While nothing fits, adds variants that need less memory.

        What the user named comes first: half of the programs, or all that there are.
        """
        if self.programs and not self._is_late:
            return
        for name, report in found.compiled.items():
            entry, memory = self.entries[name], report.memory
            # By its arguments alone it would fit, so its activations decide.
            if memory and memory.peak is not None and self._is_varied_now(name):
                rows = entry.candidate.rows
                self._add_variants(entry, with_less_memory(entry.variant, rows))

    def _prefetch_best(self, found: Comparison) -> None:
        """Adds the best that fits with ``prefetch``, if it waits for what ``fsdp`` gathers."""
        times = found.figures
        best = min(found.fitting, key=lambda name: times[name]["roofline"] or math.inf)
        entry, roofline = self.entries[best], found.compiled[best].roofline
        if not roofline or not roofline.estimate:
            return
        waits = roofline.exposed_s or 0.0  # seconds of communication that no compute hides
        data, _ = split_name(entry.candidate.strategy)
        # Less than a twentieth of a step is not worth a slot.
        is_worth = waits > roofline.estimate / 20 and data in ("fsdp", "hsdp")
        if is_worth and self._is_varied_now(best):
            ahead = with_prefetch(entry.variant)
            self._add_variants(entry, [ahead] if ahead else [])

    def _is_varied_now(self, name: str) -> bool:
        """Notes that a candidate gets other variants; False if it had them, or has one of them.

        The search varies a candidate once, and only with a variant of the user.
        """
        is_new = self.entries[name].variant in self.variants and name not in self._varied
        self._varied.add(name)
        return is_new

    def _add_variants(self, entry: PredictedCandidate, variants: Iterable[Variant]) -> None:
        """Adds candidates like this one, for these variants of the step, unless they are known."""
        strategy, mesh = entry.candidate.strategy, entry.candidate.mesh
        given = {variant.name: variant for variant in self.variants}
        for new in variants:
            variant = given.get(new.name) or self._added.setdefault(new.name, new)
            if (strategy, mesh, variant) not in self._families:
                self.add(strategy, mesh, variant)

    def _rule_out(self, name: str, why: str) -> None:
        del self.programs[name]
        self.ruled_out[name] = why

    def _rule_out_slow(self, found: Comparison) -> None:
        """Rules out candidates whose products alone take as long as the best that fits."""
        times = (found.figures[name]["roofline"] for name in found.fitting)
        best = min((time for time in times if time is not None), default=math.inf)
        for name in [*self.programs]:
            least = self.entries[name].least
            if least is not None and least >= best:
                self._rule_out(name, f"takes {time_text(least)} or more by its products (bound)")

    def rule_out_failing(self, reports: Mapping[str, ProgramReport | Failure]) -> None:
        """Rules out candidates whose strategy and variant failed alike on two meshes.

        The step could not be traced, with the same error, which then does not depend on the mesh.
        """
        errors = {  # (variant and strategy, error, mesh): on one mesh, the same counts once
            (self.entries[name].alike, failure.error, str(self.entries[name].candidate.sizes))
            for name, failure in reports.items()
            if isinstance(failure, Failure) and not is_of_compiler(failure)
        }
        num_meshes = Counter((alike, error) for alike, error, _ in errors)
        failing = {alike for (alike, _), count in num_meshes.items() if count > 1}
        for name in [*self.programs]:
            if self.entries[name].alike in failing:
                self._rule_out(name, FAILS_ALIKE)

    def _resize(self, found: Comparison) -> None:
        """Adds larger batches of candidates that fit one, smaller ones while none does."""
        fitting = {*found.fitting}
        best = max((self.entries[name].candidate.rows for name in fitting), default=0)
        for (strategy, mesh, variant), names_by_rows in [*self._families.items()]:
            rows = self._next_rows(names_by_rows, found=found, fitting=fitting, best=best)
            if rows and rows not in names_by_rows:
                self.add(strategy, mesh, variant, rows)
        for name in [*self.programs]:
            if self.entries[name].candidate.rows < best:
                self._rule_out(name, f"a batch of {best} fits others")

    def _next_rows(
        self,
        names_by_rows: Mapping[int, list[str]],
        *,
        found: Comparison,
        fitting: set[str],
        best: int,
    ) -> int | None:
        """Returns the batch that a family of candidates tries next, if it may be the largest.

        Args:
          names_by_rows: the names of the candidates by their rows.
          found: what was compiled.
          fitting: the names of what fits.
          best: the rows of the largest batch that fits any family; 0 while none does.
        """
        fits = {rows: {*names} & fitting for rows, names in names_by_rows.items()}
        # Those that are ruled out are the same program as one of another family.
        tried = {rows: {*names} - self.ruled_out.keys() for rows, names in names_by_rows.items()}
        compiled = [
            rows for rows, names in tried.items() if names and found.reports.keys() >= names
        ]
        largest_fitting = max((rows for rows, names in fits.items() if names), default=0)
        smallest_failing = min((rows for rows in compiled if not fits[rows]), default=math.inf)
        rows: float = best
        if not best:
            rows = smallest_failing // 2 if smallest_failing % 2 == 0 else 0
        elif largest_fitting and self.limit is not None:
            # All memory but the arguments grows with the batch: the power of two that just fits.
            fitting_name = fits[largest_fitting].pop()
            memory: Any = found.compiled[fitting_name].memory  # of one that fits, so known
            held = memory.arguments or 0
            available, growing = self.limit - held, memory.peak - held
            growth = max(available, 1) / max(growing, 1)
            rows = largest_fitting * 2 ** max(1, int(math.log2(growth)))
            while rows >= smallest_failing:
                rows //= 2
        is_between = largest_fitting < rows < smallest_failing
        return int(rows) if is_between and rows >= best else None


def _recipe(
    mesh: Mesh | AbstractMesh, variant: Variant, *, lines: Sequence[str], shardings: str
) -> str:
    """Writes the code that makes the mesh, the shardings and the step.

    Args:
      mesh: the mesh.
      variant: the step and its options.
      lines: the statements that make the shardings.
      shardings: the expression for ``in_shardings``.
    """
    types = ""
    if {*mesh.axis_types} != {AxisType.Explicit}:  # the default of make_mesh
        kinds = ", ".join(f"AxisType.{kind.name}" for kind in mesh.axis_types)
        types = f", axis_types=({kinds},)"
    given = inspect.signature(jit).parameters
    options = "".join(
        f", {key}={value!r}"
        for key, value in variant.options.items()
        if key not in given or value != given[key].default
    )
    head = f"mesh = make_mesh({dict(mesh.shape)}{types})"
    last = f"step = jit({variant.text}, in_shardings={shardings}, mesh=mesh{options})"
    return "\n".join([head, *variant.lines, *lines, last])


def is_of_compiler(failure: Failure) -> bool:
    """Reports whether the compiler failed, not the step or a strategy."""
    return isinstance(failure.exception, jax.errors.JaxRuntimeError)


class _Corrections:
    """How far predictions were off, learned from what was compiled.

    Candidates are in groups (`_groups`), from those like it to all. A *resource* is what limits a
    step: ``compute``, ``memory``, ``interconnect``.

    Times are multiplied by the mean ratio of compiled to predicted ones, over candidates with the
    same variant and strategy; if there are none, with the same variant; else over all. Bytes are
    increased by the least that any candidate of the variant needed besides its arguments.
    """

    def __init__(
        self, entries: Mapping[str, PredictedCandidate], compiled: Mapping[str, ProgramReport]
    ):
        self._bytes: dict[str, int] = {}  # besides the arguments, by variant
        # Group of candidates → resource → the ratios of its members.
        ratios: defaultdict[tuple[str, ...], defaultdict[str, list[float]]]
        ratios = defaultdict(lambda: defaultdict(list))
        for name, report in compiled.items():
            entry, memory = entries[name], report.memory
            if memory and memory.peak is not None and memory.arguments is not None:
                variant, _ = entry.alike
                rest = memory.peak - memory.arguments
                self._bytes[variant] = min(self._bytes.get(variant, rest), rest)
            for resource, ratio in _ratios(entry, report).items():
                for group in _groups(entry):
                    ratios[group][resource].append(ratio)
        self._means = {
            # Shares of exposed communication may be 0, which a geometric mean cannot have.
            group: {
                key: statistics.fmean(x) if key == "exposed" else statistics.geometric_mean(x)
                for key, x in of_group.items()
            }
            for group, of_group in ratios.items()
        }

    def bytes(self, entry: PredictedCandidate) -> int:
        """Returns the bytes that a candidate needs at least besides its arguments."""
        return self._bytes.get(entry.alike[0], 0)

    def seconds(self, entry: PredictedCandidate) -> tuple[float, float]:
        """Returns the time of a step, and the sum of the times of its resources."""
        groups = _groups(entry)  # the closest first
        ratios = next((self._means[group] for group in groups if group in self._means), {})
        times = {name: time * ratios.get(name, 1.0) for name, time in entry.seconds.items()}
        # A step takes as long as its slowest resource, and waits for exposed communication.
        exposed = times["interconnect"] * ratios.get("exposed", entry.exposed)
        step = max(*times.values(), max(times["compute"], times["memory"]) + exposed)
        return step, sum(times.values())


def _groups(entry: PredictedCandidate) -> list[tuple[str, ...]]:
    """Lists the groups that a candidate is in: (variant, strategy), (variant,), and () for all."""
    return [entry.alike, entry.alike[:1], ()]


def _ratios(entry: PredictedCandidate, report: ProgramReport) -> dict[str, float]:
    """Divides the compiled times of a candidate by those that were predicted.

    Returns:
      By resource, the ratio; and as ``exposed`` the share of communication that no compute hides.
    """
    roofline = report.roofline
    if roofline is None:
        return {}
    ratios: dict[str, float] = {
        resource: seconds / entry.seconds[resource]
        for resource, seconds in roofline.times.items()
        if seconds and entry.seconds[resource]
    }
    if roofline.interconnect_s and roofline.exposed_s is not None:
        ratios["exposed"] = roofline.exposed_s / roofline.interconnect_s
    return ratios
