"""Makes the variants of a step that ``plan`` compares: user functions with values of options.

A *recipe* is the Python code that runs a candidate. ``plan`` prints it, so a variant has the
expression for its function. The function of a variant contains ``remat`` of each `Stack` (layers
that run as a scan) and keyword arguments of the step (`with_remat`, ``partial``). The shardings
contain the other options: ``prefetch`` of ``fsdp``, and ``offload`` of the state of the optimizer.
So a variant changes no model, and runs with any model that the user's program makes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax

from .. import _compat
from ..activations.variables import modules_in
from ..report.strategies import abstract_of, unwrapped
from ..transforms.remat import Policy
from ..transforms.stack import Stack, hashable_policy
from .arguments import Arguments

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A variant of the step.

    Attributes:
      name: the name of the user's function and the options: ``microbatches=2, remat=True``.
      function: the name of the user's function; empty without one.
      fun: the step, with the chosen keyword arguments and policy of stacks.
      options: the options of ``jit``.
      args: the arguments, abstract.
      prefetch: how many layers ``fsdp`` gathers ahead.
      offload: whether the state of the optimizer is on the host.
      text: the expression for the function in a recipe.
      chosen: option → value, chosen by the user or by the search.
      vary: returns a variant of the same function with other values of options (``chosen``). The
        search calls it.
    """

    name: str
    function: str
    fun: Callable[..., Any]
    options: dict[str, Any]
    args: tuple[Any, ...]
    prefetch: int
    offload: bool
    text: str
    chosen: Mapping[str, Any]
    vary: Callable[[Mapping[str, Any]], Variant]

    @functools.cached_property
    def arguments(self) -> Arguments:
        """The arguments, with what is known of their batch and models."""
        return Arguments(self.args, self._names)

    @property
    def without_microbatches(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """The user's name of the function, and all options but the number of microbatches."""
        others = {name: x for name, x in self.chosen.items() if name != "microbatches"}
        return self.function, tuple(sorted(others.items()))

    @property
    def _names(self) -> list[str]:
        """The names of the arguments in a recipe: those of the parameters, else ``arg0``, …."""
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = _parameters(self.fun)
        names = [name for name, parameter in parameters.items() if parameter.kind in by_position]
        names = names[: len(self.args)]
        return [*names, *(f"arg{i}" for i in range(len(names), len(self.args)))]


def variants_of(
    step: Callable[..., Any] | Mapping[str, Any],
    args: Sequence[Any],
    grid: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
) -> list[Variant]:
    """Lists the variants of a step.

    Args:
      step: a function; or a dict by name, of functions or tuples of a function and its arguments.
      args: the arguments of functions without own arguments.
      grid: option → values. All combinations are tried. See ``variants`` of ``plan``.
      options: the options of ``jit`` for all functions.

    Raises:
      ValueError: an option has no list of values; there is no function; or ``remat`` is an option,
        and no argument has a ``Stack``.
    """
    wrong = [name for name, values in grid.items() if isinstance(values, str) or not [*values]]
    if wrong:
        raise ValueError(f"plan: variants: expected lists of values for {', '.join(wrong)}.")
    variants = []
    steps = step if isinstance(step, Mapping) else {"": step}  # one function needs no name
    for name, entry in steps.items():
        fun, *own_args = entry if isinstance(entry, tuple) else (entry, *args)
        # If `fun` is wrapped by `jit`, `unwrapped` returns the inner function, and the options of
        # this `jit` without mesh and shardings, together with `options`.
        fun, jit_options = unwrapped("plan", fun, options)
        if isinstance(step, Mapping):
            expression = f"steps[{name!r}]"
        else:  # "<lambda>" is no name in Python code
            expression = getattr(fun, "__name__", "step").replace("<lambda>", "step")
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            variants.append(_variant(str(name), fun, expression, own_args, jit_options, chosen))
    if not variants:
        raise ValueError("plan: expected at least one variant of the step, got none.")
    return variants


def microbatches_of(variant: Variant, default: int = 1) -> int:
    """Returns the value of the step's parameter ``microbatches``, if it is a number of them.

    The parameter is taken to be the ``steps`` of `accumulate_gradients`. Without such a number, the
    result is ``default``.
    """
    # ``fun`` has the chosen value as the default of its parameter.
    value: Any = getattr(_parameters(variant.fun).get("microbatches"), "default", None)
    # `type` leaves out True, which counts as 1.
    return value if type(value) is int and value > 0 else default


def can_recompute(variant: Variant) -> bool:
    """Tells whether ``remat`` of stacks may save memory: neither chosen nor set in all stacks.

    The answer is True without a ``Stack``, because the user can make one.
    """
    stacks = [*_stacks(variant.args)]
    return "remat" not in variant.chosen and not (stacks and all(x.remat for x in stacks))


def with_less_memory(variant: Variant, rows: int) -> Iterator[Variant]:
    """Yields variants that keep fewer activations, by options that the user did not choose.

    These are ``remat`` of each ``Stack``, and the parameter ``microbatches`` of the step, if it has
    one with a default: two, four and eight times the default, if this number divides the ``rows``
    of the batch that a device has.
    """
    # The default of the parameter; 0 if the step has no such parameter.
    default = microbatches_of(variant, default=0)
    counts = [default]
    if default and rows and "microbatches" not in variant.chosen:
        larger_counts = [2 * default, 4 * default, 8 * default]
        counts += [count for count in larger_counts if rows % count == 0]
    policies: list[Any] = [None]  # None keeps the policies of the user's stacks
    keeps_activations = any(not stack.remat for stack in _stacks(variant.args))
    if keeps_activations and "remat" not in variant.chosen:
        policies.append(True)
    for count, policy in itertools.product(counts, policies):
        changes = {} if count == default else {"microbatches": count}
        changes |= {} if policy is None else {"remat": policy}
        if changes:
            yield variant.vary({**variant.chosen, **changes})


def with_prefetch(variant: Variant) -> Variant | None:
    """Returns the variant with ``prefetch`` of one layer.

    Returns None if the arguments have no `Stack`, or if the user chose ``prefetch``.
    """
    can_prefetch = "prefetch" not in variant.chosen and any(_stacks(variant.args))
    return variant.vary({**variant.chosen, "prefetch": 1}) if can_prefetch else None


def _parameters(fun: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; empty if Python does not know them (C code)."""
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return {}


def _variant(
    name: str,
    fun: Callable[..., Any],
    text: str,
    args: Sequence[Any],
    options: dict[str, Any],
    chosen: Mapping[str, Any],
) -> Variant:
    """Makes the variant of a function with one value of each option.

    Args:
      name: the user's name of the function; empty without one.
      text: the expression for the function in a recipe.
      options: the options of ``jit``.

    Raises:
      ValueError: ``remat`` is chosen, and no argument has a ``Stack``.
    """
    vary = partial(_variant, name, fun, text, args, options)  # with `fun` before the changes below
    words = [name] if name else []
    words += [f"{option}={value}" for option, value in chosen.items()]
    # All options but those of this library are keyword arguments of the step.
    keywords = {key: x for key, x in chosen.items() if key not in ("remat", "prefetch", "offload")}
    if "remat" in chosen:
        if not any(_stacks(args)):
            raise ValueError("plan: variants: remat is that of a Stack, and no argument has one.")
        fun = with_remat(fun, chosen["remat"])
        text = f"with_remat({text}, {chosen['remat']!r})"
    if keywords:
        fun = partial(fun, **keywords)
        keywords_text = "".join(f", {key}={value!r}" for key, value in keywords.items())
        text = f"functools.partial({text}{keywords_text})"
    return Variant(
        name=", ".join(words),
        function=name,
        fun=fun,
        options=options,
        args=abstract_of(args),
        prefetch=chosen.get("prefetch", 0),
        offload=bool(chosen.get("offload", False)),
        text=text,
        chosen=chosen,
        vary=vary,
    )


def with_remat(step: Callable[..., T], remat: Policy | bool = True) -> Callable[..., T]:
    """Returns a step that runs each :class:`~nnx_sharding.Stack` of its arguments with ``remat``.

    While the step runs, this policy replaces the policies that the stacks were made with. Recipes
    of :func:`plan` use this function, because a model that is made again does not know what was
    planned.

    Args:
      step: the function, not yet wrapped by ``jit``.
      remat: as for :func:`~nnx_sharding.stack`.

    Raises:
      ValueError: in a call, no argument has a ``Stack``.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from nnx_sharding import jit, stack
      >>> from nnx_sharding.planning.variants import with_remat
      >>> blocks = stack(nnx.Linear, 4, 8, 8, rngs=nnx.Rngs(0))
      >>> step = jit(with_remat(lambda blocks, x: blocks(x).sum()))
      >>> step(blocks, jax.numpy.ones((2, 8))).shape, blocks.remat
      ((), False)
    """
    policy = hashable_policy(remat)

    @functools.wraps(step)
    def step_with_remat(*args: Any, **kwargs: Any) -> T:
        """Runs the step while the stacks of the arguments have the policy."""
        stacks = [*_stacks((args, kwargs))]
        if not stacks:
            raise ValueError("with_remat: expected an argument with a Stack, got none.")
        policies = [stack.remat for stack in stacks]
        try:
            for stack in stacks:
                stack.remat = policy
            return step(*args, **kwargs)
        finally:  # the models of the caller keep their policies
            for stack, own_policy in zip(stacks, policies, strict=True):
                stack.remat = own_policy

    return step_with_remat


def _stacks(args: Any) -> Iterator[Stack]:
    """Yields each stack in a pytree of modules and arrays once."""
    seen = set()
    for part in jax.tree.leaves(args, is_leaf=_compat.is_graph_object):
        if not _compat.is_graph_object(part):  # an array
            continue
        for _, module in modules_in(part):
            if isinstance(module, Stack) and id(module) not in seen:
                seen.add(id(module))
                yield module
