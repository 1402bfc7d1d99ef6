"""Chooses which candidate of a plan is compiled next, and rules out candidates.

`Search.add` makes the candidates of a strategy on a mesh, and predicts what each needs;
`Search.pick` chooses among them, given the reports of those that were compiled so far. `plan.py`
describes the whole search.

A *candidate* is a chain of strategies on a mesh, for a *variant* of the step and perhaps with some
option of the chain, such as a number of microbatches. A *family* is the set of candidates that only
differ in such options and in the rows of the batch.

`Products` are the matrix products of a step, which are the same for all candidates of a variant.
The time that the products take at the peak rate of all devices is a lower bound of the time of the
step (``least``). A *resource* limits a step: ``compute``, ``memory`` or ``interconnect``.
Communication that compute does not hide is *exposed*.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from ..analysis.hardware import HARDWARE, Hardware
from ..analysis.program import ProgramReport
from ..analysis.units import bytes_text, time_text
from ..errors import warnings_collected
from ..report.comparison import Comparison, Failure
from ..report.compiling import Devices, Lower
from ..report.strategies import Strategy, lowered
from .arguments import Arguments
from .axes import Axes
from .candidates import Candidate
from .chains import batch_spec, chains, split_name
from .corrections import Corrections, PredictedCandidate
from .memory import MemoryNeed, memory_need
from .predictions import Prediction, Products, predict, products_of
from .recipes import Warned, recipe_text
from .variants import Variant, microbatches_of, with_less_memory, with_prefetch

FAILS_ALIKE = "fails like others with its strategy, on other meshes"


class Needs(NamedTuple):
    """What a candidate needs on each device."""

    candidate: Candidate
    variant: Variant
    memory: MemoryNeed  # predicted bytes, with ``rest`` None, if the candidate was not compiled
    prediction: Prediction


@dataclasses.dataclass
class Search:
    """Holds all candidates, and chooses which of them is compiled next.

    Attributes:
      variants: the variants that the user asks for; the search adds others.
      functions: strategies by name: a function of the user, or None for a chain of this library.
      axes: the names of mesh axes by their roles.
      hardware: the rates for predictions; None if they are unknown.
      limit: the bytes of a device; None if they are unknown.
      most: the maximum number of candidates to compile; None for all.
      maximize: whether the search is for the largest batch instead of the shortest step.
      num_slices: the number of slices of TPUs that the devices are on.
      compile_on: the devices that other processes compile for; None if this process compiles.
      entries: name → candidate, for all candidates that may be compiled or were compiled.
      programs: name → the function that lowers the step, for all entries still to be compiled.
      ruled_out: name → the reason why the candidate is not compiled.
      warned: name → the warnings that the strategy and the trace of the candidate gave, as pairs of
        a category and a text.
      smallest: the candidate with the smallest arguments and the bytes of these, whether they fit
        or not. None until a candidate was predicted.
      _added: name → variant, for the variants that the search has added.
      _varied: the names of the candidates that `_claim_variation` was called for.
      _first_of: the statements, the rows and the shardings of a program → the name of the first
        candidate with these. Later candidates with these are ruled out.
      _families: (strategy, mesh, variant) → rows of the batch → the names of the candidates that
        `add` did not rule out. An empty list says that these rows were tried in vain.
      _products: variant → its products; None if the step cannot be traced for one device.
    """

    variants: Sequence[Variant]
    functions: Mapping[str, Callable[..., Any] | None]
    axes: Axes
    hardware: Hardware | None
    limit: int | None
    most: int | None
    maximize: bool
    num_slices: int = 1
    compile_on: Devices | None = None
    entries: dict[str, PredictedCandidate] = dataclasses.field(default_factory=dict)
    programs: dict[str, Lower] = dataclasses.field(default_factory=dict)
    ruled_out: dict[str, str] = dataclasses.field(default_factory=dict)
    warned: dict[str, list[Warned]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Starts without candidates."""
        # The attributes below are notes of the search itself, so they are no fields.
        self.smallest: Needs | None = None
        self._added: dict[str, Variant] = {}
        self._varied = set[str]()
        self._first_of: dict[tuple[Any, ...], str] = {}
        self._families: dict[tuple[str, Mesh, Variant], dict[int, list[str]]] = {}
        self._products: dict[Variant, Products | None] = {}

    def add(self, strategy: str, mesh: Mesh, variant: Variant, rows: int = 0) -> None:
        """Adds the candidates of a strategy for a variant, or sets why they are ruled out.

        Args:
          strategy: the name of the strategy.
          mesh: the mesh.
          variant: the variant of the step.
          rows: the number of rows of the batch if the search is for the largest batch; 0 for the
            rows of the batch that the user has given.
        """
        arguments, growth, batch_text = variant.arguments, 1.0, ""
        if self.maximize and arguments.rows:
            rows = rows or arguments.rows
            batch_text = f"batch {rows}"
            growth = rows / arguments.rows  # the products grow with the batch
            arguments = arguments.with_rows(rows)
        # `_sharded` adds the shardings to this candidate, and the loop below its full variant.
        start = Candidate(
            strategy=strategy,
            sizes=dict(mesh.shape),
            variant=variant.name,
            in_shardings=(),
            mesh=mesh,
            step=variant.fun,
            rows=arguments.rows,
        )
        family = self._families.setdefault((strategy, mesh, variant), {})
        # The entry stays empty if no candidate is added, so that these rows are not tried again.
        family[start.rows] = []
        try:
            with warnings_collected() as warned:
                candidates = [*self._sharded(start, arguments, variant, mesh)]
        except Exception as error:  # the strategy may be a function of the user, so any error
            self.ruled_out[start.name] = f"{type(error).__name__}: {error}"
            return
        for options, candidate in candidates:
            # The text of the variant has the form "8 microbatches, remat=True, batch 64".
            texts = (options, variant.name, batch_text)
            candidate = dataclasses.replace(candidate, variant=", ".join(filter(None, texts)))
            prediction = self._predict_or_rule_out(candidate, variant, arguments)
            if prediction is None:  # the candidate is in `ruled_out`
                continue
            products = self._products_of(variant)
            if products is not None:
                products = products.times(growth)
            self.warned[candidate.name] = [*warned]
            self._add_predicted(candidate, variant, arguments.args, prediction, products)
            family[start.rows].append(candidate.name)

    def _predict_or_rule_out(
        self, candidate: Candidate, variant: Variant, arguments: Arguments
    ) -> Prediction | None:
        """Predicts what a candidate needs; rules it out, and returns None, if that says why.

        Also notes the candidate with the smallest arguments in ``smallest``.

        Args:
          arguments: the arguments of the step, with the rows of the candidate.
        """
        try:
            prediction = predict(
                candidate, arguments, self.axes, self.num_slices, microbatches_of(variant)
            )
        except Exception as error:
            self.ruled_out[candidate.name] = f"{type(error).__name__}: {error}"
            return None
        argument_bytes = prediction.arguments
        # A candidate that does not fit counts, too, because `remedies` starts from the one that
        # needs least.
        if self.smallest is None or argument_bytes < self.smallest.memory.arguments:
            self.smallest = Needs(candidate, variant, MemoryNeed(argument_bytes), prediction)
        # Equal shardings of equal steps compile to equal programs.
        program = (variant.text, candidate.rows, prediction.key)
        first_name = self._first_of.setdefault(program, candidate.name)
        if first_name != candidate.name:
            self.ruled_out[candidate.name] = f"shards everything like {first_name}"
            return None
        if self.limit is not None and argument_bytes > self.limit:
            why = f"the arguments take {bytes_text(argument_bytes)} on each device"
            self.ruled_out[candidate.name] = why
            return None
        return prediction

    def _add_predicted(
        self,
        candidate: Candidate,
        variant: Variant,
        args: tuple[Any, ...],
        prediction: Prediction,
        products: Products | None,
    ) -> None:
        """Adds a candidate to ``entries``, and the function that lowers it to ``programs``.

        Args:
          prediction: the predicted bytes and traffic of the candidate.
          products: the products of the step; None if they are unknown.
        """
        num_devices = candidate.mesh.size
        # If the hardware is unknown, the rates of some accelerator order candidates about right.
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
        lower = partial(lowered, in_shardings_and_mesh, variant.fun, args, variant.options)
        entry = PredictedCandidate(
            candidate=candidate,
            variant=variant,
            prediction=prediction,
            args=args,
            seconds=seconds,
            exposed=exposed,
            least=least,
            lower=partial(self._lower, candidate.name, lower),
        )
        self.entries[candidate.name] = entry
        self.programs[candidate.name] = entry.lower

    def _lower(self, name: str, lower: Lower) -> Any:
        """Lowers a candidate, and keeps the warnings of its trace in ``warned``."""
        with warnings_collected() as warned:
            try:
                return lower()
            finally:
                self.warned[name] += warned

    def _products_of(self, variant: Variant) -> Products | None:
        """Returns the products of a variant; None if they are unknown.

        Tracing a step takes long, so each variant is traced once.
        """
        if variant not in self._products:
            self._products[variant] = products_of(
                variant.fun, variant.args, variant.options, self.axes
            )
        return self._products[variant]

    def predicted_with(
        self, needs: Needs, *, rows: int = 0, offload: bool = False
    ) -> Prediction | None:
        """Predicts a changed candidate.

        Returns None if the strategy refuses the mesh, a spec does not fit, or the devices do not
        divide the rows of the batch.

        Args:
          needs: the candidate and its variant. Of the candidate, only the strategy and the sizes of
            the mesh are used, so there may be no devices for these sizes, unless ``offload`` is
            set.
          rows: the number of rows of the batch; 0 for the batch of the candidate.
          offload: whether the state of the optimizer is on the host. If this is False, it is where
            the variant has it.
        """
        candidate, variant = needs.candidate, needs.variant
        # Shardings on the host name the devices of their mesh, so they need a mesh of devices. All
        # other shardings follow from shapes.
        mesh: Mesh | AbstractMesh = candidate.mesh
        if offload or variant.offload:
            if candidate.sizes != dict(mesh.shape):
                return None
        else:
            mesh = AbstractMesh(tuple(candidate.sizes.values()), tuple(candidate.sizes))
        arguments = variant.arguments
        if (rows or candidate.rows) != arguments.rows:
            arguments = arguments.with_rows(rows or candidate.rows)
        if offload:
            variant = dataclasses.replace(variant, offload=True)
        try:
            # The options of a chain, such as microbatches, do not change the bytes of the
            # arguments, so the first candidate is enough.
            _, sharded = next(self._sharded(candidate, arguments, variant, mesh))
            return predict(sharded, arguments, self.axes)
        except ValueError:
            return None

    def _sharded(
        self,
        start: Candidate,
        arguments: Arguments,
        variant: Variant,
        mesh: Mesh | AbstractMesh,
    ) -> Iterator[tuple[str, Candidate]]:
        """Yields pairs: the text of a choice of options, and a candidate with shardings and recipe.

        A chain has one candidate for each choice of options, such as ``"8 microbatches"``, and the
        text is empty if there is nothing to choose. A function of the user has one candidate, which
        has no recipe.

        Args:
          mesh: the mesh of the candidate, or a mesh of the same sizes without devices, which is
            enough to predict what chains of this library need.

        Raises:
          TypeError: a function of the user returns something else than a tuple of shardings, one
            for each argument.
          ValueError: the batch cannot be divided over the mesh, or a strategy refuses the mesh.
        """
        function = self.functions.get(start.strategy)
        # A function of the user finds the mesh in the context.
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
        by_options = chains(start.strategy, start.sizes, self.axes, arguments, variant.prefetch)
        for options, calls in by_options.items():
            sharded = arguments.shard(calls, mesh, batch, offloaded=variant.offload)
            recipe = recipe_text(
                mesh,
                step=variant.text,
                options=variant.options,
                lines=sharded.lines,
                shardings=sharded.text,
            )
            shardings = sharded.shardings
            yield options, dataclasses.replace(start, in_shardings=shardings, recipe=recipe)

    def pick(self, reports: Mapping[str, ProgramReport | Failure]) -> str | None:
        """Chooses the next program to compile: the fastest by estimate of those that may fit.

        First, this rules out some candidates and adds others, by what the reports show.

        Args:
          reports: the reports of the programs that were compiled so far, by name.

        Returns:
          The name of the program; None if no program is left, unless a later call adds some by the
          reports of programs that are still being compiled.
        """
        # 1. Rule out candidates, and add others. This changes `programs` and `entries`.
        self.rule_out_failing(reports)
        is_any_fitting = False
        if reports:
            comparison = Comparison(reports, self.limit)
            is_any_fitting = bool(comparison.fitting)
            self._adapt(comparison)
        if not self.programs:
            return None
        # 2. Choose. If nothing fits although half of the programs that may be compiled were
        # started, the candidate with the smallest arguments is next, whatever its time.
        corrections = Corrections(self.entries, reports)
        by_memory = not is_any_fitting and self._has_started_half

        def order(name: str) -> tuple[float, ...]:
            """Returns the sort key of a candidate; the smallest is compiled first.

            Large batches come first, then candidates that may fit, then short times, then small
            arguments.
            """
            entry = self.entries[name]
            argument_bytes = entry.prediction.arguments
            rows = entry.candidate.rows if self.maximize else 0
            if by_memory:
                return -rows, argument_bytes
            least_bytes = argument_bytes + corrections.bytes(entry)
            is_too_large = self.limit is not None and least_bytes > self.limit
            time_of_step, time_of_all_resources = corrections.seconds(entry)
            return -rows, is_too_large, time_of_step, time_of_all_resources, argument_bytes

        # `min` returns the candidate that was added first if several are equal.
        return min(self.programs, key=order)

    def _adapt(self, comparison: Comparison) -> None:
        """Rules out candidates, and adds others, by the programs that were compiled so far."""
        if self.maximize:
            self._add_batches(comparison)
            return
        self._rule_out_slow(comparison)
        if comparison.fitting:
            self._add_prefetch(comparison)
        else:
            self._add_less_memory(comparison)

    @property
    def _has_started_half(self) -> bool:
        """Whether half of the programs that may be compiled (``most``) were started.

        A program that is started is removed from ``programs``. Candidates that were ruled out after
        they were added are removed as well, so they count as started.
        """
        started = len(self.entries) - len(self.programs)
        return self.most is not None and 2 * started >= self.most

    def _add_less_memory(self, comparison: Comparison) -> None:
        """Adds variants that need less memory, because nothing fits so far.

        The candidates that the user asked for come first. This adds nothing until half of the
        programs that may be compiled were started, or until no program is left to compile.
        """
        if self.programs and not self._has_started_half:
            return
        for name in comparison.reports:
            # `add` rules out candidates whose arguments do not fit, so here the activations do not
            # fit, and a variant with fewer activations may.
            memory = self.memory_need(name, comparison.reports)  # None for other failures
            if memory is not None and self._claim_variation(name):
                entry = self.entries[name]
                rows = entry.prediction.rows
                self._add_variants(entry, with_less_memory(entry.variant, rows))

    def memory_need(
        self, name: str, reports: Mapping[str, ProgramReport | Failure]
    ) -> MemoryNeed | None:
        """Returns the memory of a candidate by its report, or by the error of the compiler.

        Returns None if the memory is unknown, if the candidate was not compiled, or if it failed
        for another reason than memory.
        """
        if name not in reports:
            return None
        return memory_need(reports[name], self.entries[name].prediction.arguments)

    def _add_prefetch(self, comparison: Comparison) -> None:
        """Adds the best candidate that fits with ``prefetch``, if its step waits for communication.

        Only ``fsdp`` and ``hsdp`` can gather layers ahead. Most of what they send are gathers, so
        this takes all communication that compute does not hide for gathers.
        """
        figures = comparison.figures
        best = min(comparison.fitting, key=lambda name: figures[name]["roofline"] or math.inf)
        entry, roofline = self.entries[best], comparison.compiled[best].roofline
        if not roofline or not roofline.estimate:
            return
        exposed_seconds = roofline.exposed_s or 0.0  # communication that compute does not hide
        data, _ = split_name(entry.candidate.strategy)
        # The variant would be one of the few programs that may be compiled, so a gain of less than
        # a twentieth of the step is not worth it.
        waits_long = exposed_seconds > roofline.estimate / 20
        can_prefetch = data in ("fsdp", "hsdp")
        if waits_long and can_prefetch and self._claim_variation(best):
            prefetching = with_prefetch(entry.variant)
            if prefetching is not None:  # None: no Stack to gather layers of, or the user chose
                self._add_variants(entry, [prefetching])

    def _claim_variation(self, name: str) -> bool:
        """Returns True in the first call for a candidate with a variant of the user, else False.

        The search asks this before it adds variants of a candidate, so it adds them only once, and
        adds no variants of the variants that it has added itself.
        """
        is_new = self.entries[name].variant in self.variants and name not in self._varied
        self._varied.add(name)
        return is_new

    def _add_variants(self, entry: PredictedCandidate, variants: Iterable[Variant]) -> None:
        """Adds candidates with the strategy and mesh of ``entry``, for variants that have none."""
        strategy, mesh = entry.candidate.strategy, entry.candidate.mesh
        user_variants = {variant.name: variant for variant in self.variants}
        for new in variants:
            # Variants are equal only if they are the same object, so the first object with a name
            # replaces later ones. Then it is traced once, and `_families` has it as a key.
            variant = user_variants.get(new.name) or self._added.setdefault(new.name, new)
            if (strategy, mesh, variant) not in self._families:
                self.add(strategy, mesh, variant)

    def _rule_out(self, name: str, why: str) -> None:
        """Moves a candidate from the programs to compile to the ones that are ruled out."""
        del self.programs[name]
        self.ruled_out[name] = why

    def _rule_out_slow(self, comparison: Comparison) -> None:
        """Rules out candidates whose products alone take as long as the best step that fits.

        The time of the best step is an estimate (``roofline``). The time of the products is a lower
        bound (``least``), so such a candidate cannot be faster than the estimate.
        """
        times = (comparison.figures[name]["roofline"] for name in comparison.fitting)
        best = min((time for time in times if time is not None), default=math.inf)
        for name in [*self.programs]:
            least = self.entries[name].least
            if least is not None and least >= best:
                self._rule_out(name, f"takes {time_text(least)} or more by its products (bound)")

    def rule_out_failing(self, reports: Mapping[str, ProgramReport | Failure]) -> None:
        """Rules out candidates whose strategy and variant failed alike on two meshes.

        If a step cannot be traced on two meshes, with the same error, then the error does not
        depend on the mesh. Errors of the compiler do not count, because they often depend on the
        mesh: a step that lacks memory on one mesh may fit on another.
        """
        # ((variant, strategy), error) → the meshes. This is a set because a chain may have failed
        # with several options on one mesh.
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

    def finish(self, comparison: Comparison) -> None:
        """Adds and rules out candidates by the last programs, as `pick` does before each program.

        Then ``entries`` also has the larger batches for which no time was left.
        """
        self.rule_out_failing(comparison.reports)
        if self.maximize and comparison.reports:
            self._add_batches(comparison)

    def _add_batches(self, comparison: Comparison) -> None:
        """Adds larger batches to families of which one fits, and smaller ones while nothing fits.

        Candidates with a smaller batch than the largest that fits are ruled out, because the
        largest batch is sought.
        """
        fitting = {*comparison.fitting}
        best = max((self.entries[name].candidate.rows for name in fitting), default=0)
        for (strategy, mesh, variant), names_by_rows in [*self._families.items()]:
            if not variant.arguments.rows:  # the arguments of this step have no batch
                continue
            is_ruled_out = True  # whether `add` has ruled out all candidates of the last batch
            while is_ruled_out:
                # 0 if this family has no chance to fit a larger batch than ``best``.
                rows = self._next_rows(
                    names_by_rows, comparison=comparison, fitting=fitting, best=best
                )
                if not rows or rows in names_by_rows:
                    break
                # `add` changes `_families`, so the loop goes over a copy.
                self.add(strategy, mesh, variant, rows)
                # The list is empty, for example, if arguments alone exceed the memory. Then
                # `_next_rows` may return fewer rows.
                is_ruled_out = names_by_rows.get(rows) == []
        for name in [*self.programs]:  # a copy, because `_rule_out` changes `programs`
            if self.entries[name].candidate.rows < best:
                self._rule_out(name, f"a batch of {best} fits others")

    def _next_rows(
        self,
        names_by_rows: Mapping[int, list[str]],
        *,
        comparison: Comparison,
        fitting: set[str],
        best: int,
    ) -> int:
        """Returns the batch that a family of candidates tries next; 0 if it has no chance.

        While nothing fits, the batch is halved: 64, 32, 16. Once a batch of this family fits, the
        next batch is the one that is predicted to just fill the memory. If only other families fit,
        this family tries ``best``, the largest batch of the others.

        Args:
          names_by_rows: rows → the names of the candidates of this family with so many rows.
          comparison: the reports of the programs that were compiled.
          best: the rows of the largest batch that fits in any family; 0 while nothing fits.
        """
        largest_fitting, smallest_failing = 0, math.inf
        fitting_name = ""
        for rows, names in names_by_rows.items():
            # `add` lists no candidate that it rules out. Those that were ruled out later are never
            # compiled, so the reports need not have them.
            eligible = {*names} - self.ruled_out.keys()
            are_all_compiled = bool(eligible) and eligible.issubset(comparison.reports)
            fitting_names = sorted({*names} & fitting)
            if fitting_names and rows > largest_fitting:
                largest_fitting, fitting_name = rows, fitting_names[0]
            # Rows fail only if all of their options were compiled and none fits.
            elif not fitting_names and are_all_compiled:
                smallest_failing = min(smallest_failing, rows)
        next_rows: float
        if not best:
            next_rows = smallest_failing // 2 if smallest_failing % 2 == 0 else 0
        elif largest_fitting and self.limit is not None:
            memory = comparison.compiled[fitting_name].memory
            next_rows = largest_fitting * _growth_in_memory(memory, self.limit)
            # Rows with an empty list are skipped: `add` has ruled out their candidates.
            while next_rows >= smallest_failing or names_by_rows.get(int(next_rows)) == []:
                next_rows //= 2
        else:
            next_rows = best
        is_between = largest_fitting < next_rows < smallest_failing
        if not is_between or next_rows < best:
            return 0
        return int(next_rows)


def _growth_in_memory(memory: Any, limit: int) -> int:
    """Returns how many times the rows of a batch are predicted to fit: a power of two, 2 or more.

    All memory but the arguments is taken to grow with the batch. The result is 2 even if twice the
    rows seem not to fit, because this is an estimate.

    Args:
      memory: the memory in the report of a program that fits, so its ``peak`` is known.
      limit: the bytes of a device.
    """
    argument_bytes = memory.arguments or 0
    available, growing = limit - argument_bytes, memory.peak - argument_bytes
    growth = max(available, 1) / max(growing, 1)
    return int(2 ** max(1, int(math.log2(growth))))


def is_of_compiler(failure: Failure) -> bool:
    """Reports whether the compiler failed, and not the step or a strategy."""
    return isinstance(failure.exception, jax.errors.JaxRuntimeError)
