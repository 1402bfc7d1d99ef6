"""The variants of a step that ``plan`` compares: functions of the user, with values of options."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from flax import nnx

from ..activations.variables import modules_in
from ..report.strategies import abstract_of, unwrapped
from ..specs.paths import accessor
from ..transforms.stack import Stack
from .candidates import Arguments


class Variant(NamedTuple):
    """A variant of the step."""

    name: str
    fun: Callable[..., Any]
    options: dict[str, Any]  # of jit
    args: tuple[Any, ...]
    prefetch: int  # of fsdp
    offload: bool  # whether the state of the optimizer is on the host
    text: str  # the function, in a recipe
    lines: tuple[str, ...]  # before that

    @property
    def names(self) -> list[str]:
        """The names of the arguments in a recipe: as in the function, as far as known."""
        try:
            parameters = [*inspect.signature(self.fun).parameters.values()]
        except (TypeError, ValueError):  # of a function written in C, say
            parameters = []
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in by_position]
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
    for name, entry in (step if isinstance(step, Mapping) else {"": step}).items():
        fun, *own_args = entry if isinstance(entry, tuple) else (entry, *args)
        fun, kept = unwrapped("plan", fun, options)
        # A recipe has to be Python.
        text = getattr(fun, "__name__", "step").replace("<lambda>", "step")
        text = f"steps[{name!r}]" if isinstance(step, Mapping) else text
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            variants.append(_variant(str(name), fun, text, own_args, chosen, kept))
    if not variants:
        raise ValueError("plan: expected at least one variant of the step, got none.")
    return variants


def _variant(
    name: str,
    fun: Callable[..., Any],
    text: str,
    args: Sequence[Any],
    chosen: Mapping[str, Any],
    options: dict[str, Any],
) -> Variant:
    """Makes the variant of a function with one value of each option."""
    words = [name] if name else []
    full_name = ", ".join([*words, *(f"{option}={value}" for option, value in chosen.items())])
    # Options of this library; others are keyword arguments of the step.
    keywords = {key: x for key, x in chosen.items() if key not in ("remat", "prefetch", "offload")}
    if keywords:
        fun = partial(fun, **keywords)
        given = "".join(f", {key}={value!r}" for key, value in keywords.items())
        text = f"functools.partial({text}{given})"
    prefetch, offload = chosen.get("prefetch", 0), bool(chosen.get("offload", False))
    # Abstract copies of the modules, so that each variant can have its own policy.
    copies = abstract_of(args)
    variant = Variant(full_name, fun, options, copies, prefetch, offload, text, ())
    if "remat" in chosen:
        variant = variant._replace(lines=tuple(_set_remat(variant, chosen["remat"])))
    return variant


def _set_remat(variant: Variant, policy: Any) -> Iterator[str]:
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
