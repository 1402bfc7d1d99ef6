"""``cond``, ``switch``, ``while_loop`` and ``fori_loop`` for functions of NNX objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..activations.variables import resharded
from ..core.arguments import Specs, named_parts
from ..core.call_context import Caller, called_by, caller_here
from ..core.functions import name_of
from ..core.outcome import Outcome, OutputGroup, union
from ..core.plan import Plan
from ..core.signature import Roles
from ..core.unflatten import Built, kept_places
from ..errors import raise_listed
from ..specs.state_sharding import BROADCAST, CARRY
from .in_trace import (
    Fixed,
    Function,
    Functions,
    Inner,
    InnerTransform,
    at_top_level,
    described,
    fixed_of,
    form,
    is_array,
    is_kept,
    is_traced,
)
from .scan import Loop, Scan, check_carry, differences
from .vmap import options_of


def _call(
    functions: Functions, transform: Any, modes: tuple[bool | None, bool | None], *args: Any
) -> Any:
    graph, updates = _compat.graph_mode(*modes)
    lifted: Any = Inner(functions, transform, Roles(), graph=graph, updates=updates)
    return lifted(*args)


def _scalar(name: str, argument: str, value: Any, kinds: str, expected: str) -> Any:
    """The value of a scalar argument, which may be that of a Variable."""
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    is_array = _compat.is_array_like(value)
    if not is_array or jnp.shape(value) != () or jnp.result_type(value).kind not in kinds:
        raise TypeError(f"{name}: {argument} must be {expected}, got {described(value)}.")
    return value


# cond and switch


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Switch(InnerTransform):
    """What ``cond`` and ``switch`` decide.

    Attributes:
      labels: the names of the branches in messages.
      bound: for each branch, what it is bound to, by its place in the second argument.
    """

    compiles_at_top_level: ClassVar[bool] = True

    in_name: str = "operands"
    labels: tuple[str, ...]
    bound: tuple[tuple[int, ...], ...]

    def applied(
        self, plan: Plan, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        # JAX traces again for each new function, so branches are kept, but no objects of the user.
        @functools.lru_cache(maxsize=64)
        def kept(fixed: Fixed, types: Any, context: Any) -> _Branches:
            return _Branches(self, plan, function, fixed)

        def call(*leaves: Any) -> Any:
            fixed, operands = fixed_of(leaves), [*filter(is_traced, leaves)]
            if is_kept(fixed) and not any(map(_compat.is_ref, operands)):
                types = tuple(map(jax.typeof, operands))
                branches = kept(fixed, types, _compat.context_key())
            else:
                branches = _Branches(self, plan, function, fixed)
            if self.name == "cond":
                results = jax.lax.cond(operands[0], *branches.functions, operands)
            else:
                results = jax.lax.switch(operands[0], branches.functions, operands)
            return branches.output(results)

        return at_top_level(call)


class _Branches:
    """The branches for operands of some types, and what each does, as its last trace shows.

    A branch returns the array in each slot, changed or not; JAX makes no output of those that no
    branch changes. Branches that are the same function are traced once.
    """

    def __init__(self, transform: _Switch, plan: Plan, function: Function, fixed: Fixed):
        self._name, self._labels = transform.name, transform.labels
        self._plan, self._function, self._fixed = plan, function, dict(fixed)
        # By the number of the branch: what it returns, in words, and the types of its arrays.
        self._outcomes: dict[int, Outcome] = {}
        self._forms: dict[int, str] = {}
        self._types: dict[int, list[tuple[str, Any]]] = {}
        functions = map(id, caller_here().fun.functions)  # type: ignore[union-attr]
        pairs = [*zip(functions, transform.bound, strict=True)]
        own = {pair: self._function_of(pairs.index(pair)) for pair in {*pairs}}
        self.functions = [own[pair] for pair in pairs]

    def _function_of(self, number: int) -> Function:
        return lambda operands: self._branch(number, operands)

    def _branch(self, number: int, operands: Sequence[Any]) -> list[Any]:
        """One branch, as a function of the arrays that are operands."""
        arrays, count = iter(operands), len(self._plan.names)
        every = [self._fixed[s].value if s in self._fixed else next(arrays) for s in range(count)]
        *groups, outcome = self._outputs(number, every)
        self._outcomes[number] = outcome
        self._check_structures(number)
        results: list[Any] = outcome.arrays(every, groups)
        for index, own in enumerate(self._plan.structure.slots):
            kept = kept_places(self._plan.structure, outcome.structure, index) if own else ()
            for slot, old in kept:  # as elsewhere, with the sharding of the old array
                if is_traced(every[old]) and not _compat.is_ref(every[old]):
                    results[slot] = resharded(results[slot], every[old])
        # JAX cannot pass on refs, nor values of a hijax type.
        kept = [x for x in operands if not _compat.is_plain_array(x)]
        results = [
            None if not is_traced(x) or _compat.is_ref(x) or any(x is y for y in kept) else x
            for x in results
        ]
        labels = [*(group.names for group in groups), self._plan.names]
        self._types[number] = [
            (labels[group][position], None if x is None else jax.typeof(x))
            for x, (group, position) in zip(results, outcome.sources, strict=True)
        ]
        self._check_types(number)
        return results

    def _outputs(self, number: int, every: Sequence[Any]) -> Any:
        caller = caller_here()
        assert caller is not None
        function = caller.fun.which(number)

        def called(which: Any, *args: Any) -> Any:
            out = function(*args)
            self._forms[number] = form(out)
            return out

        with called_by(caller._replace(fun=called)):
            return self._function(*every)

    def output(self, results: Sequence[Any]) -> tuple[OutputGroup, Outcome]:
        """What the chosen branch did: the arrays that some branch changes, and the outcome."""
        outcome = union(self._plan.structure, [*self._outcomes.values()])
        slots = [slot for slot, (group, _) in enumerate(outcome.sources) if group >= 0]
        arrays = [results[slot] for slot in slots]
        return OutputGroup(("",) * len(arrays), arrays), outcome

    def _check_structures(self, number: int) -> None:
        """Checks that a branch leaves the same objects as the first one."""
        one, other = self._outcomes[0], self._outcomes[number]
        if one.structure == other.structure:
            return
        labels = self._labels[0], self._labels[number]
        forms = self._forms[0], self._forms[number]
        found = [("output", *forms)] if forms[0] != forms[1] else []
        starts = named_parts(self._plan.graph_arguments)
        sides = one.structure, other.structure
        names, others = (side.names([*starts, ("output", side.root)]) for side in sides)
        same = {index: name for index, name in names.items() if others.get(index) == name}
        found += differences(same, *sides)
        lines = [
            f"  {place}: {x} in {labels[0]}, {y} in {labels[1]}" for place, x, y in found if x != y
        ]
        raise_listed(
            ValueError,
            f"{self._name}: the branches return different structures, or change the structure of "
            "their operands differently:",
            lines or ["  the objects that they make"],
            "Let each branch return the same structure, and set the same attributes; arrays may "
            "differ.",
            anchor="branches-that-differ",
        )

    def _check_types(self, number: int) -> None:
        lines = [
            f"  {name}: {_type(x)} in {self._labels[0]}, {_type(y)} in {self._labels[number]}"
            for (name, x), (_, y) in zip(self._types[0], self._types[number], strict=True)
            if x != y and _type(x) != _type(y)
        ]
        raise_listed(
            TypeError,
            f"{self._name}: the branches return, or write to the operands, arrays of different "
            "types:",
            lines,
            "Cast or reshape them in the branches, so that all agree.",
            anchor="branches-that-differ",
        )


def _type(aval: Any) -> str:
    return "none" if aval is None else aval.str_short(short_dtypes=False)


@_compat.api_boundary
def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls one of several functions, chosen by a number while the program runs.

    A branch may be a function, a bound method, or a callable module; what it changes in its
    operands, or in the object that it is bound to, is changed for the caller. Branches may change
    different Variables: all are outputs. They have to return the same structure, with arrays of the
    same types, and to leave the same structure in what they are given.

    Args:
      index: the number of the branch, an integer scalar; those out of range count as the nearest.
      branches: the functions.
      *operands: their arguments, of which flags (``bool``) stay as they are. All are traced.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      What the branch returns.

    Raises:
      TypeError: ``index`` is no integer scalar, or the branches return arrays of different types.
      ValueError: the branches leave or return different structures.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import switch
      >>> experts = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)]
      >>> switch(jnp.int32(1), experts, jnp.ones((1, 2))).shape
      (1, 2)

    The semantics are those of ``jax.lax.switch`` and ``flax.nnx.switch``.
    """
    if not isinstance(branches, Sequence):
        raise TypeError(f"switch: branches must be a sequence of functions, got {branches!r:.200}.")
    if not branches:
        raise ValueError("switch: branches is empty; it needs at least one function.")
    index = _scalar("switch", "index", index, "iu", "an integer scalar")
    functions = {f"branches[{number}]": branch for number, branch in enumerate(branches)}
    return _switched("switch", index, functions, operands, (graph, graph_updates))


@_compat.api_boundary
def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls one of two functions, chosen by a condition while the program runs.

    Args:
      pred: the condition, a scalar: a bool, or a number that is true unless it is 0.
      true_fun: the function that is called if it is true; as a branch of :func:`switch`.
      false_fun: the function that is called if it is false.
      *operands: their arguments.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      What the function returns.

    Raises:
      TypeError: ``pred`` is no scalar, or the functions return arrays of different types.
      ValueError: the functions leave or return different structures.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import cond
      >>> model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
      >>> cond(x.sum() > 5, model, lambda x: -x, x)
      Array([[-1., -1.]], dtype=float32)

    The semantics are those of ``jax.lax.cond`` and ``flax.nnx.cond``.
    """
    pred = _scalar("cond", "pred", pred, "biuf", "a scalar, a bool or a number")
    functions = {"true_fun": true_fun, "false_fun": false_fun}
    return _switched("cond", pred, functions, operands, (graph, graph_updates))


def _switched(
    name: str,
    which: Any,
    branches: Mapping[str, Callable[..., Any]],
    operands: tuple[Any, ...],
    modes: tuple[bool | None, bool | None],
) -> Any:
    functions = Functions(name, branches, ("which", "branches"), len(operands))
    transform = _Switch(name=name, labels=(*branches,), bound=functions.bound)
    return _call(functions, transform, modes, jnp.asarray(which), functions.objects, *operands)


# while_loop and fori_loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class _While(Scan):
    """What ``while_loop`` and ``fori_loop`` decide.

    Attributes:
      counts: whether a counter is carried as well, as the second argument.
      bound: for each function, what it is bound to, by its place in the first argument.
    """

    remedy: ClassVar[str] = "M"
    counts: bool
    bound: tuple[tuple[int, ...], ...]
    carried: int | str | None = None
    returned: int | None = None

    def is_stacked(self, slots: Sequence[int], leaf: Any) -> bool:
        return False  # the number of steps may be unknown

    def wrapped(self, plan: Plan, caller: Caller, built: Built) -> Function:
        if not isinstance(caller.fun, Functions):  # the condition
            return super().wrapped(plan, caller, built)
        body = caller.fun.which(-1)

        def step(objects: Sequence[Any], *args: Any) -> Any:
            given = args[: 1 + self.counts]
            out = body(objects, *given)
            check_carry(self.name, name_of(body), given[-1], out)
            return (given[0] + 1, out) if self.counts else out

        return step

    def applied(
        self, plan: Plan, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        if self.options:
            return super().applied(plan, function, in_specs, out_specs)
        return at_top_level(_WhileLoop((), plan, function, in_specs, out_specs))


class _WhileLoop(Loop):
    """A loop that runs as long as a condition holds."""

    def _check_lengths(self, leaves: Sequence[Any]) -> None:
        pass  # nothing is mapped

    def _run(
        self, step: Function, carry: OutputGroup, mapped: Sequence[Any], fixed: Fixed
    ) -> tuple[OutputGroup, Any]:
        caller = caller_here()
        assert caller is not None
        transform: Any = self._transform
        condition, outputs = _is_below if transform.counts else caller.fun.which(0), []
        fun_name = name_of(condition)

        def checked(*args: Any) -> Any:
            out = condition(*args)
            if not is_array(out) or jax.typeof(out).str_short() != "bool[]":
                raise TypeError(
                    f"while_loop: {fun_name} must return a bool scalar, got {form(out)}."
                )
            return out

        def holds(carry: OutputGroup) -> Any:
            every = self._every(fixed, carry, mapped)
            with called_by(caller._replace(fun=checked)):
                *groups, outcome = self._function(*every)
            self._check_unchanged(fun_name, outcome)
            return outcome.arrays(every, groups)[outcome.structure.root_slots[0]]

        def body(carry: OutputGroup) -> OutputGroup:
            new: OutputGroup
            new, output = step(carry, mapped)
            outputs.append(output)
            return new

        last = jax.lax.while_loop(holds, body, carry)
        return last, outputs[-1]

    def _check_unchanged(self, fun_name: str, outcome: Outcome) -> None:
        changed = [*outcome.values, *outcome.metadata, *outcome.statics]
        changed += [change.node for change in outcome.nodes]
        raise_listed(
            ValueError,
            f"while_loop: the condition {fun_name} changes these, which only the body can do:",
            [f"  {name}" for name in self._names_of(sorted({*changed})).values()],
            "Change them in body_fun, or call a copy (nnx.clone) in cond_fun.",
        )


def _is_below(objects: Any, i: Any, init_val: Any, upper: Any) -> Any:
    return i < upper


@_compat.api_boundary
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function repeatedly while a condition holds, in one loop of the program.

    Variables that the body does not write are inputs of the loop, and not copied in it.

    Args:
      cond_fun: a function of the carry that returns a bool scalar. It may call modules, but change
        nothing.
      body_fun: a function of the carry that returns the next one: of the same structure, with
        arrays of the same types, and the same modules, which it may change. Either function may be
        a bound method.
      init_val: the first carry.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The last carry.

    Raises:
      TypeError: the carry changes its structure or its types, or ``cond_fun`` returns no bool.
      ValueError: the body replaces modules or changes their structure, or ``cond_fun`` changes
        something.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import while_loop
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> def halve(carry):
      ...     model, x = carry
      ...     model.kernel[...] /= 2
      ...     return model, x / 2
      >>> same, x = while_loop(lambda carry: carry[1] > 1, halve, (model, jnp.float32(5)))
      >>> same is model, x
      (True, Array(0.625, dtype=float32))

    The semantics are those of ``jax.lax.while_loop`` and ``flax.nnx.while_loop``.
    """
    given = {"cond_fun": cond_fun, "body_fun": body_fun}
    functions = Functions("while_loop", given, ("functions", "init_val"), 0)
    transform = _While(
        name="while_loop",
        in_specs=Specs((BROADCAST, CARRY)),
        out_specs=Specs(CARRY),
        counts=False,
        bound=functions.bound,
    )
    return _call(functions, transform, (graph, graph_updates), functions.objects, init_val)


@_compat.api_boundary
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function for each integer in a range, in one loop of the program.

    Args:
      lower: the first integer; an integer scalar.
      upper: the integer after the last one. With bounds that are known while tracing, the loop is a
        ``scan``, which can be differentiated in reverse mode; else it is a ``while_loop``.
      body_fun: a function of the integer and the carry that returns the next carry, as for
        :func:`while_loop`.
      init_val: the first carry.
      unroll: how many steps to unroll in one iteration; True for all. For known bounds only.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The last carry.

    Raises:
      TypeError: the bounds are not integer scalars of one type, or the carry changes its structure
        or its types.
      ValueError: ``unroll`` for unknown bounds; the body replaces modules or changes their
        structure.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import fori_loop
      >>> count = nnx.BatchStat(jnp.int32(0))
      >>> def add(i, count):
      ...     count[...] += i
      ...     return count
      >>> fori_loop(0, 5, add, count)[...]
      Array(10, dtype=int32)

    The semantics are those of ``jax.lax.fori_loop`` and ``flax.nnx.fori_loop``.
    """
    lower = _scalar("fori_loop", "lower", lower, "iu", "an integer scalar")
    upper = _scalar("fori_loop", "upper", upper, "iu", "an integer scalar")
    is_known = not isinstance(lower, jax.core.Tracer) and not isinstance(upper, jax.core.Tracer)
    options: dict[str, Any] = {}
    if is_known:
        lower, upper = int(lower), int(upper)
        options = {"length": max(upper - lower, 0), "reverse": False, "unroll": unroll or 1}
    elif unroll not in (None, False, 1):
        raise ValueError(
            f"fori_loop: unroll={unroll!r} needs a known number of steps, and lower or upper is "
            "traced. Pass them as static values, or leave unroll out."
        )
    else:
        types = [jax.typeof(x) for x in (lower, upper)]
        strong = {x.dtype for x in types if not x.weak_type} or {jnp.result_type(*types)}
        if len(strong) > 1:
            raise TypeError(
                f"fori_loop: lower and upper must have one type, got {types[0].str_short()} and "
                f"{types[1].str_short()}."
            )
        lower, upper = (jnp.asarray(x, *strong) for x in (lower, upper))
    given = {"body_fun": body_fun}
    functions = Functions("fori_loop", given, ("functions", "i", "init_val", "upper"), 0)
    transform = _While(
        name="fori_loop",
        in_specs=Specs((BROADCAST, CARRY, CARRY, BROADCAST)),
        out_specs=Specs(CARRY),
        counts=True,
        bound=functions.bound,
        options=options_of(**options),
    )
    args = functions.objects, lower, init_val, upper
    return _call(functions, transform, (graph, graph_updates), *args)[1]
