"""The variants of a step that ``plan`` compares: functions of the user, with values of options.

A *recipe* is the Python code that runs a candidate, which ``plan`` prints; so a variant has the
expression for its function, and the statements that come before. Options are ``remat`` of each
`Stack` (layers that run as a scan), ``prefetch`` of ``fsdp``, ``offload`` of the state of the
optimizer, and keyword arguments of the step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from flax import nnx

from ..activations.variables import modules_in
from ..report.strategies import abstract_of, unwrapped
from ..specs.paths import accessor
from ..transforms.stack import Stack
from .candidates import Arguments


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A variant of the step.

    Attributes:
      name: such as ``microbatches=2, remat=True``.
      fun: the step, with the chosen keyword arguments.
      options: those of jit.
      args: the arguments, abstract.
      prefetch: of fsdp: how many layers are gathered ahead.
      offload: whether the state of the optimizer is on the host.
      text: the expression for the function in a recipe.
      lines: the statements of a recipe before that.
      chosen: the values of options, chosen by the user or by the search.
      vary: makes a variant of the same function with other values of options (``chosen``), as the
        search does.
    """

    name: str
    fun: Callable[..., Any]
    options: dict[str, Any]
    args: tuple[Any, ...]
    prefetch: int
    offload: bool
    text: str
    lines: tuple[str, ...]
    chosen: Mapping[str, Any]
    vary: Callable[[Mapping[str, Any]], Variant]

    @functools.cached_property
    def arguments(self) -> Arguments:
        """The arguments, with what is known of their batch and models."""
        return Arguments(self.args, self._names)

    @property
    def _names(self) -> list[str]:
        """The names of the arguments in a recipe: as in the function, as far as known."""
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
      step: a function; or by name functions, or tuples of a function and its own arguments.
      args: the arguments of functions without their own.
      grid: values of options; all combinations are tried. See ``variants`` of ``plan``.
      options: of jit, for all.
    """
    if wrong := [name for name, values in grid.items() if isinstance(values, str) or not [*values]]:
        raise ValueError(f"plan: variants: expected lists of values for {', '.join(wrong)}.")
    variants = []
    steps = step if isinstance(step, Mapping) else {"": step}  # one function needs no name
    for name, entry in steps.items():
        fun, *own_args = entry if isinstance(entry, tuple) else (entry, *args)
        # The function in a `jit`, without its mesh and shardings, and its other options with these.
        fun, jit_options = unwrapped("plan", fun, options)
        if isinstance(step, Mapping):
            expression = f"steps[{name!r}]"
        else:  # a name of Python, which "<lambda>" is not
            expression = getattr(fun, "__name__", "step").replace("<lambda>", "step")
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            variants.append(_variant(str(name), fun, expression, own_args, jit_options, chosen))
    if not variants:
        raise ValueError("plan: expected at least one variant of the step, got none.")
    return variants


def with_less_memory(variant: Variant, rows: int) -> Iterator[Variant]:
    """Yields variants that keep fewer activations, by options that the user did not choose.

    These are ``remat`` of each ``Stack``, and the parameter ``microbatches`` of the step, if it has
    one with a default: two, four and eight times as many, as far as they divide the ``rows`` of the
    batch.
    """
    parameters = _parameters(variant.fun)
    parameter = parameters.get("microbatches")
    default = getattr(parameter, "default", None)
    counts = [default]
    if "microbatches" not in variant.chosen and type(default) is int and default > 0 and rows:
        counts += [default * times for times in (2, 4, 8) if rows % (default * times) == 0]
    policies: list[Any] = [None]  # None leaves those of the user
    if "remat" not in variant.chosen and any(not stack.remat for _, stack in _stacks(variant)):
        policies.append(True)
    for count, policy in itertools.product(counts, policies):
        changes = {} if count == default else {"microbatches": count}
        changes |= {} if policy is None else {"remat": policy}
        if changes:
            yield variant.vary({**variant.chosen, **changes})


def with_prefetch(variant: Variant) -> Variant | None:
    """Returns the variant that gathers layers one ahead; None if it has none, or it was chosen."""
    can_prefetch = "prefetch" not in variant.chosen and any(_stacks(variant))
    return variant.vary({**variant.chosen, "prefetch": 1}) if can_prefetch else None


def _parameters(fun: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; none of one written in C, say."""
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
      fun: the function.
      text: the expression for it in a recipe.
      args: its arguments.
      options: those of jit.
      chosen: the value of each option.
    """
    vary = partial(_variant, name, fun, text, args, options)  # which `with_prefetch` calls
    words = [name] if name else []
    words += [f"{option}={value}" for option, value in chosen.items()]
    # All but the options of this library are keyword arguments of the step.
    keywords = {key: x for key, x in chosen.items() if key not in ("remat", "prefetch", "offload")}
    if keywords:
        fun = partial(fun, **keywords)
        given = "".join(f", {key}={value!r}" for key, value in keywords.items())
        text = f"functools.partial({text}{given})"
    variant = Variant(
        name=", ".join(words),
        fun=fun,
        options=options,
        args=abstract_of(args),  # copies of the modules, so that each variant can set its policy
        prefetch=chosen.get("prefetch", 0),
        offload=bool(chosen.get("offload", False)),
        text=text,
        lines=(),
        chosen=chosen,
        vary=vary,
    )
    if "remat" not in chosen:
        return variant
    # Only the variant knows how the recipe names the stacks in its arguments.
    lines = _set_remat(variant, chosen["remat"])
    return dataclasses.replace(variant, lines=lines)


def _set_remat(variant: Variant, policy: Any) -> tuple[str, ...]:
    """Sets the policy of all stacks in the arguments; returns the statements that do so."""
    stacks = [*_stacks(variant)]
    if not stacks:
        raise ValueError("plan: variants: remat is that of a Stack, and no argument has one.")
    for _, module in stacks:
        module.remat = policy
    return tuple(f"{expression}.remat = {policy!r}" for expression, _ in stacks)


def _stacks(variant: Variant) -> Iterator[tuple[str, Any]]:
    """Yields each stack in the arguments once, after the expression for it: ``model.layers``."""
    seen = set()
    for name, part in variant.arguments.parts.items():  # by their expressions: ``model``
        if not isinstance(part, nnx.Module):  # an array: in pytrees, all modules are parts
            continue
        for path, module in modules_in(part):
            if isinstance(module, Stack) and id(module) not in seen:
                seen.add(id(module))
                yield accessor(name, path), module
