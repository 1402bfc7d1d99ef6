"""What is worked out once per structure, and what each call does with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from .. import _compat
from ..diagnostics.specs import FitOptions, check_arrays, check_axes, fitted, shape_of, uses_of
from ..diagnostics.trace_log import TraceLog
from ..fitting import OnIndivisible
from . import unflatten as merge
from .flatten import Flat
from .pure import Pure, Rules
from .resolve import FilterUse, NamedLocation, reach, resolve, slot_names
from .signature import Call, Parameters, Signature, align_specs
from .specs import Specs, Target, argument_targets
from .structure import RefEntry, Structure, VariableEntry

# What is done with what is committed to another sharding than declared: it is an error; it is laid
# out anew, on the same devices or wherever it is; or its own sharding counts.
OnCommitted: TypeAlias = Literal["error", "relayout", "move", "leave"]


class Transform(Rules, Protocol):
    """What ``jit`` and ``shard_map`` each decide for themselves."""

    @property
    def in_name(self) -> str:
        """The name of its option for the specs of inputs."""

    @property
    def in_specs(self) -> Specs:
        """The specs of inputs as the user wrote them."""

    @property
    def on_committed(self) -> OnCommitted:
        """What is done with what is committed to another sharding than declared."""

    @property
    def terms(self) -> FitOptions:
        """What it says about fitting specs to arrays."""

    @property
    def passes_shardings(self) -> bool:
        """Whether JAX hears of the shardings of inputs by an option, and not by their types."""

    def sort_call(
        self,
        parameters: Parameters,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
    ) -> Call:
        """The arguments of a call by their roles, which a transform may refine."""

    def key(self, leaves: Sequence[Any]) -> Hashable:
        """What a plan depends on besides the call's structure, such as the mesh in context."""

    @property
    def has_key(self) -> bool:
        """Whether :meth:`key` is not always the same."""

    def in_context(self) -> Transform:
        """This transform with the mesh in context filled in, if it needs one."""

    def slot_specs(self, specs: list[Any], leaves: Sequence[Any]) -> list[Any]:
        """The specs of all inputs, those filled in that the user left open."""

    def sharding_of(self, spec: Any) -> jax.sharding.Sharding | None:
        """The sharding that a Variable with this final spec is brought to and kept in."""

    def compile(
        self,
        pure: Callable[..., Any],
        in_specs: Sequence[Any],
        out_specs: Sequence[Any],
        donated: tuple[int, ...],
    ) -> Program:
        """The JAX form of a pure function whose outputs come in groups of one spec each."""


class Program(NamedTuple):
    """A pure function made ready by JAX.

    Attributes:
      staged: the form with ``trace``, ``lower`` and ``eval_shape``.
      top_level: what a call executes outside of any trace.
      inline: what a call executes inside another trace.
    """

    staged: Any
    top_level: Callable[..., Any]
    inline: Callable[..., Any]


class Plan(NamedTuple):
    """All that a call needs after its arguments were split.

    Attributes:
      fun_name: the name of the function.
      structure: the structure of the arguments that the plan serves.
      signature: the roles of the arguments.
      targets: the dynamic arguments, taken apart.
      names: for each slot what the user would write to reach it.
      program: the pure function in JAX's hands.
      shardings: for each slot the sharding that is declared for it, or None.
      placed_slots: the slots that are laid out as declared before the function runs: those of
        Variables, and all where what is committed may be moved.
      placed_shardings: these shardings.
      pick_placed: picks these slots from all arrays.
      declared: the slots whose type says the sharding where nothing else does.
      on_committed: what is done with what is committed to another sharding.
      terms: what the transform says about fitting specs to arrays.
      specs: the spec of each slot.
      out_specs: all specs that outputs can have.
      donated: the slots whose arrays are donated.
      fun: the function, held weakly.
      log: what is remembered of the traces of the function.
    """

    fun_name: str
    structure: Structure
    signature: Signature
    targets: list[Target]
    names: list[str]
    program: Program
    shardings: tuple[jax.sharding.Sharding | None, ...]
    placed_slots: tuple[int, ...]
    placed_shardings: list[jax.sharding.Sharding]
    pick_placed: Callable[[Sequence[Any]], Sequence[Any]]
    declared: frozenset[int]
    on_committed: OnCommitted
    terms: FitOptions
    specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    donated: frozenset[int]
    fun: Callable[[], Any]
    log: TraceLog


def make_plan(
    fun: Callable[..., Any],
    transform: Transform,
    parameters: Parameters,
    call: Call,
    flat: Flat,
    graph: bool,
    updates: bool,
    traced: MutableMapping[Hashable, Callable[..., Any]],
    log: TraceLog,
) -> Plan:
    """Works out the plan for a structure.

    Args:
      fun: the user's function.
      transform: what to do with it.
      parameters: its parameters.
      call: the arguments by their roles.
      flat: the arguments taken apart.
      graph: whether references are kept.
      updates: whether changes of structure reach the caller.
      traced: pure functions of ``fun`` that were made before, by their keys. Options that do
        not matter to the trace, such as compiler options, then do not cost another one.
      log: where the traces are noted.

    Raises:
      ValueError: the specs do not fit the arguments.
      TypeError: an argument is no array.
      StrictError: the transform is strict, and there is something to warn of.
    """
    transform = transform.in_context()
    inputs = _resolved(transform, parameters, call, flat)
    pure = Pure(
        rules=transform,
        signature=call.signature._replace(donated=frozenset(), donated_keywords=frozenset()),
        structure=flat.structure,
        targets=tuple(goal.objects_only() for goal in inputs.targets),
        known=known_variables(inputs.reached, inputs.object_specs),
        object_specs=inputs.object_specs,
        on_indivisible=inputs.on_indivisible,
        donated=inputs.donated.intersection(inputs.object_specs),
        to_use=inputs.donated if transform.terms.strict else frozenset(),
        names=inputs.names,
        uses=inputs.uses,
        graph=graph,
        updates=updates,
    )
    function = traced.get(pure.key)
    if function is None:
        function = traced.setdefault(pure.key, pure.function(fun, log))
    groups = pure.group_specs()
    program = transform.compile(function, inputs.specs, groups, tuple(sorted(inputs.donated)))
    shardings = tuple(map(transform.sharding_of, inputs.specs))
    every_slot = frozenset(range(len(shardings)))
    variables = flat.structure.slots_of(VariableEntry)
    movable = every_slot if transform.on_committed == "move" else variables
    placed = {s: own for s, own in enumerate(shardings) if own is not None and s in movable}
    return Plan(
        fun_name=function.__name__,
        structure=flat.structure,
        signature=call.signature,
        targets=inputs.targets,
        names=inputs.names,
        program=program,
        shardings=shardings,
        placed_slots=tuple(placed),
        placed_shardings=list(placed.values()),
        pick_placed=merge.picker(tuple(placed)),
        declared=variables if transform.passes_shardings else every_slot,
        on_committed=transform.on_committed,
        terms=transform.terms,
        specs=tuple(inputs.specs),
        out_specs=groups,
        donated=inputs.donated,
        fun=_weak(fun),
        log=log,
    )


class _Inputs(NamedTuple):
    """The arguments of a call with their specs.

    Attributes:
      targets: the dynamic arguments, taken apart.
      reached: all places that they reach.
      names: for each slot what the user would write to reach it.
      specs: the final spec of each slot.
      object_specs: those of slots that belong to objects; open ones as the transform reads them.
      on_indivisible: by slot, what the ``StateSharding`` there does on an indivisible spec.
      uses: what each ``StateSharding`` decided about.
      donated: the slots whose arrays are donated.
    """

    targets: list[Target]
    reached: list[NamedLocation]
    names: list[str]
    specs: list[Any]
    object_specs: dict[int, Any]
    on_indivisible: dict[int, OnIndivisible]
    uses: tuple[FilterUse, ...]
    donated: frozenset[int]


def _resolved(transform: Transform, parameters: Parameters, call: Call, flat: Flat) -> _Inputs:
    """Gives every array of the arguments its spec, and checks that it fits."""
    signature, structure, leaves = call.signature, flat.structure, flat.leaves
    specs = align_specs(transform.in_specs.tree, parameters, signature, transform.in_name)
    goals = argument_targets(
        structure, call.tree, specs, [signature.names[i] for i in signature.dynamic]
    )
    reached = reach(structure, goals)
    found_names = slot_names(structure.num_leaves, reached)
    names = [name or f"array {slot}" for slot, name in enumerate(found_names)]
    check_arrays(names, leaves)
    uses = uses_of(reached, flat.objects, leaves)
    check_axes(transform.terms, transform.in_specs, transform.out_specs, uses)
    resolved = resolve(reached, flat.objects, leaves, transform.spec_of)
    final = fitted(
        transform.terms,
        names,
        [shape_of(leaf) for leaf in leaves],
        transform.slot_specs(resolved.slots, leaves),
        resolved.on_indivisible,
    )
    unspecified = transform.spec_of(None)
    object_specs = {
        slot: unspecified if final[slot] is None else final[slot]
        for slots in structure.slots
        for slot in slots
    }
    return _Inputs(
        targets=goals,
        reached=reached,
        names=names,
        specs=list(final),
        object_specs=object_specs,
        on_indivisible=resolved.on_indivisible,
        uses=tuple(resolved.uses),
        donated=_donated_slots(structure, signature, reached),
    )


def _donated_slots(
    structure: Structure, signature: Signature, reached: Sequence[NamedLocation]
) -> frozenset[int]:
    donated = {signature.names[i] for i in signature.donated} | signature.donated_keywords
    places = (found.place for found in reached if found.target.name in donated)
    slots = frozenset(slot for place in places for slot in place.slots)
    return slots - structure.slots_of(RefEntry)


def known_variables(
    reached: Sequence[NamedLocation], object_specs: Mapping[int, Any]
) -> dict[int, tuple[str, Any]]:
    """For each Variable of the arguments its first name and its spec."""
    known: dict[int, tuple[str, Any]] = {}
    for found in reached:
        index, slots = found.place.entry, found.place.slots
        if index is not None and index not in known:
            known[index] = (found.name, object_specs.get(slots[0]) if slots else None)
    return known


def as_declared(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """Arrays to trace with: where their sharding is still open, they have the declared one."""
    return [
        abstract(leaf, sharding) if sharding and slot in plan.declared and _is_open(leaf) else leaf
        for slot, (leaf, sharding) in enumerate(zip(leaves, plan.shardings, strict=True))
    ]


def abstract(leaf: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """The type of an array, with a sharding."""
    if sharding is None and not isinstance(leaf, _DATA):
        return leaf
    aval = jax.typeof(leaf)
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak_type)


_DATA = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def is_committed(leaf: Any) -> bool:
    """Whether ``leaf`` is an array that must stay on its devices."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed


def _is_open(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer) or _compat.is_ref(leaf):
        return False
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is None
    return isinstance(leaf, _DATA) and not is_committed(leaf)


def _weak(fun: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(fun)
    except TypeError:  # some callables of NumPy; nothing is kept for them beyond their callers
        return lambda: fun
