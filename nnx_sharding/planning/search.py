"""Which candidate of a plan is compiled next, and which never.

`Search.add` makes the candidates of a strategy on a mesh, and predicts what each needs;
`Search.pick` chooses among them, given the reports of those that were compiled so far. `plan.py`
describes the whole search.

A *candidate* is a chain of strategies on a mesh, for a *variant* of the step and perhaps with some
option of the chain, such as a number of microbatches. A *family* are candidates that only differ in
such options and in the rows of the batch.

A `Comparison` has the reports of what was compiled: ``fitting`` are the names of those that fit
into memory, best first, and ``figures`` their times, of which ``roofline`` is the estimate.

`Products` are the matrix products of a step, which are the same for all candidates of a variant. At
the peak rate of all devices, they take a time that bounds that of the step (``least``). A
*resource* is what limits a step: ``compute``, ``memory`` and ``interconnect``. Communication that
compute does not hide is *exposed*.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
from collections import defaultdict
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
from .memory import Memory, memory_of
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

    @property
    def variant_and_strategy(self) -> tuple[str, str]:
        """The names that candidates share whose predictions are about as far off."""
        return self.variant.name, self.candidate.strategy


class Needs(NamedTuple):
    """What a candidate needs on each device."""

    candidate: Candidate
    variant: Variant
    memory: Memory  # whose rest is unknown if it was not compiled


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
        # What the search notes for itself, so no arguments.
        self.smallest: Needs | None = None
        self._added: dict[str, Variant] = {}  # the variants that are not the user's, by name
        self._varied = set[str]()  # the names of candidates that `_claim_variation` has returned
        # The statements, the shardings and the rows of a program → the first candidate with these.
        self._first_of: dict[tuple[Any, ...], str] = {}
        # (strategy, mesh, variant) → rows of the batch → the names of candidates.
        self._families: dict[tuple[str, Mesh, Variant], dict[int, list[str]]] = {}
        self._products: dict[Variant, Products | None] = {}  # None if they are unknown

    def add(self, strategy: str, mesh: Mesh, variant: Variant, rows: int = 0) -> None:
        """Adds the candidates of a strategy for a variant, or says why they are ruled out.

        Args:
          strategy: its name.
          mesh: the mesh.
          variant: the variant of the step.
          rows: the number of rows of the batch if the largest is sought; 0 for those given.
        """
        arguments, growth, batch_text = variant.arguments, 1.0, ""
        if self.maximize and arguments.rows:
            rows = rows or arguments.rows
            batch_text = f"batch {rows}"
            growth = rows / arguments.rows  # products grow with the batch
            arguments = arguments.with_rows(rows)
        start = Candidate(  # which gets its shardings below, and the options of the chain
            strategy=strategy,
            sizes=dict(mesh.shape),
            variant=variant.name,
            in_shardings=(),
            mesh=mesh,
            step=variant.fun,
            rows=arguments.rows,
        )
        family = self._families.setdefault((strategy, mesh, variant), {})
        family[start.rows] = []  # also if nothing is added, so that it is not tried again
        try:
            candidates = [*self._sharded(start, arguments, variant, mesh)]
        except Exception as error:  # of a strategy, which may be the user's
            self.ruled_out[start.name] = f"{type(error).__name__}: {error}"
            return
        for options, candidate in candidates:
            # Such as "8 microbatches, remat=True, batch 64".
            texts = (options, variant.name, batch_text)
            candidate = dataclasses.replace(candidate, variant=", ".join(filter(None, texts)))
            try:
                prediction = predict(candidate, arguments, self.axes, self.num_slices)
            except Exception as error:
                self.ruled_out[candidate.name] = f"{type(error).__name__}: {error}"
                continue
            # Also of those that do not fit: `remedies` starts from the one that needs least.
            if self.smallest is None or prediction.arguments < self.smallest.memory.arguments:
                self.smallest = Needs(candidate, variant, Memory(prediction.arguments))
            # Equal shardings of equal steps compile to equal programs.
            program = (variant.text, candidate.rows, prediction.key)
            first = self._first_of.setdefault(program, candidate.name)
            if first != candidate.name:
                self.ruled_out[candidate.name] = f"shards everything like {first}"
                continue
            held = prediction.arguments
            if self.limit is not None and held > self.limit:
                why = f"the arguments take {bytes_text(held)} on each device"
                self.ruled_out[candidate.name] = why
                continue
            products = self._products_of(variant)
            if products is not None:
                products = products.times(growth)
            self._add_predicted(candidate, variant, arguments.args, prediction, products)
            family[start.rows].append(candidate.name)

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
        # On unknown hardware, those of some accelerator give times in about the right order.
        hardware = self.hardware or HARDWARE["TPU v5e"]
        seconds = prediction.seconds(products, num_devices, hardware)
        # Compute hides what is sent within slices, but hardly what is sent between them. Without
        # this difference, replicas on slices would seem as fast as the stages of a pipeline, whose
        # compiled programs are 1.2 times as fast.
        between = prediction.seconds_between_slices(hardware)
        exposed = between / seconds["interconnect"] if between else 0.0
        least = None
        if products is not None and self.hardware is not None:
            least = products.least_seconds(num_devices, self.hardware)
        in_shardings_and_mesh = Strategy(candidate.in_shardings, candidate.mesh)
        entry = PredictedCandidate(
            candidate=candidate,
            variant=variant,
            prediction=prediction,
            args=args,
            seconds=seconds,
            exposed=exposed,
            least=least,
            lower=partial(lowered, in_shardings_and_mesh, variant.fun, args, variant.options),
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

        Args:
          candidate: its strategy, and the sizes of its mesh, of which there may be no devices.
          variant: its variant of the step.
          rows: the number of rows of the batch; 0 for those given.
          offload: whether the state of the optimizer is on the host.
        """
        # Shardings on the host name the devices of their mesh. All others follow from shapes.
        mesh: Mesh | AbstractMesh = candidate.mesh
        if not offload:
            mesh = AbstractMesh(tuple(candidate.sizes.values()), tuple(candidate.sizes))
        arguments = variant.arguments.with_rows(rows) if rows else variant.arguments
        if offload != variant.offload:
            variant = dataclasses.replace(variant, offload=offload)
        try:
            # The options of a chain, such as microbatches, do not change its arguments: the first
            # of them will do.
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
        """Yields candidates with shardings and recipes, each after the text of its options.

        A chain has one candidate for each choice of options, such as ``"8 microbatches"``, and the
        text is empty if there is nothing to choose.

        Args:
          start: a candidate without shardings.
          arguments: those of its step.
          variant: its variant of the step.
          mesh: its mesh, or one of the same sizes without devices, which is enough to predict what
            chains of this library need.
        """
        function = self.functions.get(start.strategy)
        if function is not None:  # the user's, which gets the mesh by the context
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
        by_options = chains(start.strategy, start.sizes, self.axes, arguments, variant.prefetch)
        for options, calls in by_options.items():
            sharded = arguments.shard(calls, mesh, batch, offloaded=variant.offload)
            recipe = _recipe(mesh, variant, lines=sharded.lines, shardings=sharded.text)
            shardings = sharded.shardings
            yield options, dataclasses.replace(start, in_shardings=shardings, recipe=recipe)

    def pick(self, reports: Mapping[str, ProgramReport | Failure]) -> str | None:
        """Chooses the next program: the one with the shortest estimated time that may fit.

        Before that, it rules out candidates and adds some, by what the reports show.

        Args:
          reports: of what was compiled so far.

        Returns:
          Its name; None if there is none, at least until more is compiled.
        """
        # 1. Rule out, and add.
        self.rule_out_failing(reports)
        found = Comparison(reports, self.limit) if reports else None
        fitting = () if found is None else found.fitting
        if found is not None and self.maximize:
            self._add_batches(found)
        elif found is not None:
            self._rule_out_slow(found)
            if fitting:
                self._add_prefetch(found)
            else:
                self._add_less_memory(found)
        if not self.programs:
            return None
        # 2. Choose. If nothing has fitted once half of the programs that may be compiled were
        # started, times no longer matter, and those with the smallest arguments are next.
        corrections = _Corrections(self.entries, reports)
        by_memory = not fitting and self._has_started_half

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
            time_of_step, time_of_all_resources = corrections.seconds(entry)
            return -rows, exceeds, time_of_step, time_of_all_resources, held

        # The first of those that are equal, as they were added.
        return min(self.programs, key=order)

    @property
    def _has_started_half(self) -> bool:
        """Whether half of the programs that may be compiled (``most``) were started."""
        started = len(self.entries) - len(self.programs)
        return self.most is not None and 2 * started >= self.most

    def _add_less_memory(self, found: Comparison) -> None:
        """Adds variants that need less memory, as nothing fits so far.

        Before that, the candidates that the user named are compiled: half of the programs that may
        be, or all candidates.
        """
        if self.programs and not self._has_started_half:
            return
        for name in found.reports:
            # Only arguments that fit are compiled (`add`), so it is the activations that do not.
            if self.memory_of(name, found.reports) and self._claim_variation(name):
                entry = self.entries[name]
                rows = entry.candidate.rows
                self._add_variants(entry, with_less_memory(entry.variant, rows))

    def memory_of(self, name: str, reports: Mapping[str, ProgramReport | Failure]) -> Memory | None:
        """Returns what a candidate needs by its report, or by the compiler that refused it.

        None if that is unknown, also if it was not compiled or failed for another reason.
        """
        if name not in reports:
            return None
        return memory_of(reports[name], self.entries[name].prediction.arguments)

    def _add_prefetch(self, found: Comparison) -> None:
        """Adds the best that fits with ``prefetch``, if its step waits for communication.

        Only ``fsdp`` can gather layers ahead. Its gathers are most of what it sends, so all
        communication that compute does not hide is taken for them.
        """
        times = found.figures
        best = min(found.fitting, key=lambda name: times[name]["roofline"] or math.inf)
        entry, roofline = self.entries[best], found.compiled[best].roofline
        if not roofline or not roofline.estimate:
            return
        waits = roofline.exposed_s or 0.0  # seconds of communication that no compute hides
        data, _ = split_name(entry.candidate.strategy)
        # Compiling takes one of the few programs: less than a twentieth of a step is not worth it.
        is_worth = waits > roofline.estimate / 20 and data in ("fsdp", "hsdp")
        if is_worth and self._claim_variation(best):
            ahead = with_prefetch(entry.variant)  # None without a Stack, whose layers are gathered
            if ahead is not None:
                self._add_variants(entry, [ahead])

    def _claim_variation(self, name: str) -> bool:
        """Returns True once for each candidate of a variant of the user, and False after that.

        So the search adds variants of a candidate only once, and none of those that it added.
        """
        is_new = self.entries[name].variant in self.variants and name not in self._varied
        self._varied.add(name)
        return is_new

    def _add_variants(self, entry: PredictedCandidate, variants: Iterable[Variant]) -> None:
        """Adds candidates like this one, for these variants of the step, unless they are known."""
        strategy, mesh = entry.candidate.strategy, entry.candidate.mesh
        given = {variant.name: variant for variant in self.variants}
        for new in variants:
            # Variants are equal only if they are one object, so of each name one is used: it is
            # traced once, and is found in `_families`.
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
        Errors of the compiler often do, such as those for memory.
        """
        # (variant, strategy) and the error → the meshes. On one mesh, a chain may have failed with
        # several options.
        meshes_of: defaultdict[tuple[tuple[str, str], str], set[str]] = defaultdict(set)
        for name, failure in reports.items():
            if isinstance(failure, Failure) and not is_of_compiler(failure):
                entry = self.entries[name]
                key = entry.variant_and_strategy, failure.error
                meshes_of[key].add(str(entry.candidate.sizes))
        failing = {
            variant_and_strategy
            for (variant_and_strategy, _), meshes in meshes_of.items()
            if len(meshes) > 1
        }
        for name in [*self.programs]:
            if self.entries[name].variant_and_strategy in failing:
                self._rule_out(name, FAILS_ALIKE)

    def _add_batches(self, found: Comparison) -> None:
        """Adds larger batches for families that fit one, and smaller ones while none does.

        Candidates with a smaller batch than the largest that fits are ruled out, because the
        largest batch is sought.
        """
        fitting = {*found.fitting}
        best = max((self.entries[name].candidate.rows for name in fitting), default=0)
        for (strategy, mesh, variant), names_by_rows in [*self._families.items()]:
            if not variant.arguments.rows:  # the arguments of this step have no batch
                continue
            while True:
                rows = self._next_rows(names_by_rows, found=found, fitting=fitting, best=best)
                if not rows or rows in names_by_rows:
                    break
                self.add(strategy, mesh, variant, rows)  # to the families: this goes over a copy
                # None are left if the arguments alone exceed the memory: then fewer rows are tried.
                if names_by_rows.get(rows) != []:
                    break
        for name in [*self.programs]:  # a copy, too
            if self.entries[name].candidate.rows < best:
                self._rule_out(name, f"a batch of {best} fits others")

    def _next_rows(
        self,
        names_by_rows: Mapping[int, list[str]],
        *,
        found: Comparison,
        fitting: set[str],
        best: int,
    ) -> int:
        """Returns the batch that a family of candidates tries next; 0 if it has no chance.

        While nothing fits, the batch is halved: 64, 32, 16. Once a batch of this family fits, the
        next one is predicted to just fill the memory. A family that did not fit yet, while others
        fit ``best``, tries that.

        Args:
          names_by_rows: the names of the candidates by their rows.
          found: what was compiled.
          fitting: the names of what fits.
          best: the rows of the largest batch that fits any family; 0 while none does.
        """
        largest_fitting, smallest_failing = 0, math.inf
        fitting_name = ""
        for rows, names in names_by_rows.items():
            # Those that are ruled out are the same program as one of another family.
            tried = {*names} - self.ruled_out.keys()
            fits = sorted({*names} & fitting)
            if fits and rows > largest_fitting:
                largest_fitting, fitting_name = rows, fits[0]
            elif not fits and tried and found.reports.keys() >= tried:  # all options were compiled
                smallest_failing = min(smallest_failing, rows)
        next_rows: float
        if not best:
            next_rows = smallest_failing // 2 if smallest_failing % 2 == 0 else 0
        elif largest_fitting and self.limit is not None:
            # All memory but the arguments is taken to grow with the batch. The next batch is the
            # largest power of two times this one that then fits. As this is an estimate, twice the
            # rows are tried even if they seem not to fit.
            memory: Any = found.compiled[fitting_name].memory  # of one that fits, so known
            held = memory.arguments or 0
            available, growing = self.limit - held, memory.peak - held
            growth = max(available, 1) / max(growing, 1)
            next_rows = largest_fitting * 2 ** max(1, int(math.log2(growth)))
            # No candidate has rows with which the arguments alone exceed the memory.
            while next_rows >= smallest_failing or names_by_rows.get(int(next_rows)) == []:
                next_rows //= 2
        else:
            next_rows = best
        is_new = largest_fitting < next_rows < smallest_failing
        return int(next_rows) if is_new and next_rows >= best else 0


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
    return "\n".join([head, *lines, last])


def is_of_compiler(failure: Failure) -> bool:
    """Reports whether the compiler failed, not the step or a strategy."""
    return isinstance(failure.exception, jax.errors.JaxRuntimeError)


class _Corrections:
    """How far predictions were off, learned from what was compiled.

    The time of each resource is multiplied by the mean ratio of compiled to predicted times, over
    candidates with the same variant and strategy; if there are none, with the same variant; else
    over all (`_groups`). The share of communication that is exposed is the mean of these, too.

    Bytes are increased by the least that any candidate of the variant needed besides its arguments.
    The least, since a candidate that fits must not be taken for one that does not.
    """

    def __init__(
        self,
        entries: Mapping[str, PredictedCandidate],
        reports: Mapping[str, ProgramReport | Failure],
    ):
        self._bytes: dict[str, int] = {}  # besides the arguments, by the name of the variant
        # Group of candidates → resource → the ratios of its members.
        ratios: defaultdict[tuple[str, ...], defaultdict[str, list[float]]]
        ratios = defaultdict(lambda: defaultdict(list))
        # Group of candidates → the shares of communication that were exposed.
        shares: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        for name, report in reports.items():
            entry = entries[name]
            memory = memory_of(report, entry.prediction.arguments)
            if memory is not None and memory.rest is not None:
                variant = entry.variant.name
                self._bytes[variant] = min(self._bytes.get(variant, memory.rest), memory.rest)
            roofline = None if isinstance(report, Failure) else report.roofline
            if roofline is None:
                continue
            for group in _groups(entry):
                for resource, seconds in roofline.times.items():
                    if seconds and entry.seconds[resource]:
                        ratios[group][resource].append(seconds / entry.seconds[resource])
                if roofline.interconnect_s and roofline.exposed_s is not None:
                    shares[group].append(roofline.exposed_s / roofline.interconnect_s)
        self._mean_ratios = {
            group: {resource: statistics.geometric_mean(x) for resource, x in by_resource.items()}
            for group, by_resource in ratios.items()
        }
        # Shares may be 0, which a geometric mean cannot have.
        self._mean_shares = {group: statistics.fmean(x) for group, x in shares.items()}

    def bytes(self, entry: PredictedCandidate) -> int:
        """Returns the bytes that a candidate needs at least besides its arguments."""
        return self._bytes.get(entry.variant.name, 0)

    def seconds(self, entry: PredictedCandidate) -> tuple[float, float]:
        """Returns the time of a step, and the sum of the times of its resources."""
        # The closest group in which something was compiled.
        known = self._mean_ratios.keys() | self._mean_shares.keys()
        group = next((group for group in _groups(entry) if group in known), ())
        ratios = self._mean_ratios.get(group, {})
        times = {name: time * ratios.get(name, 1.0) for name, time in entry.seconds.items()}
        exposed = times["interconnect"] * self._mean_shares.get(group, entry.exposed)
        # A step takes as long as its slowest resource. If that is not the interconnect, it also
        # waits for the communication that this does not hide.
        step = max(times["interconnect"], max(times["compute"], times["memory"]) + exposed)
        return step, sum(times.values())


def _groups(entry: PredictedCandidate) -> list[tuple[str, ...]]:
    """Lists the groups that a candidate is in: (variant, strategy), (variant,), and () for all."""
    variant, strategy = entry.variant_and_strategy
    return [(variant, strategy), (variant,), ()]
