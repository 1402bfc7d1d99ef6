"""Avoids, warns about, or refuses operations that JAX or XLA is known to compute wrong.

    grouped convolutions     XLA partitions them wrong. At the end of a trace, products replace them
                             (``convolutions.py``)
    *reduced* operands       The spec of an array may say that it is reduced over mesh axes: its
                             gradient is then a sum over these. If the array is an operand of a
                             product on Auto axes, XLA may count the gradient once for each device.
                             This gives a warning
    maps without check_vma   In an outer map that has ``check_vma``, JAX forgets that the results of
                             an inner map without it *vary* (differ between devices). Gradients of
                             such results raise an error

``tests/test_known_faults.py`` has programs that show them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType

from .. import _compat
from ..errors import WrongGradientWarning, message, see, warn_or_raise
from ..specs.fitting import axes_of_type
from .convolutions import Replacements, is_grouped

T = TypeVar("T")


def work_around_faults(mesh: AbstractMesh | None, *, name: str, strict: bool, nested: bool) -> None:
    """Replaces grouped convolutions in the current trace, and warns about reduced operands.

    Convolutions are also replaced in a nested trace. An ungrouped convolution there may get groups
    by a gradient around the trace, and is replaced when the outer trace ends.

    Args:
      mesh: the mesh of the arrays; None if they are on no mesh.
      name: the name of the transform, in messages.
      strict: whether a warning is an error.
      nested: whether the trace is part of another one, which gives the warning.
    """
    if mesh is None:
        return
    # The axes over which XLA divides arrays. It does not partition over Manual axes.
    divided = frozenset(axis for axis, size in mesh.shape.items() if size > 1)
    divided -= axes_of_type(mesh, AxisType.Manual)
    if not divided:
        return
    auto = divided & axes_of_type(mesh, AxisType.Auto)
    # Each item is a product or grouped convolution behind its enclosing equations: (call, loop,
    # product).
    chains = [*_products_and_grouped(_compat.trace_equations())]
    # The lines are made first, because replacing changes equations in place.
    lines = _lines_for_reduced(chains, auto) if auto else []
    if any(is_grouped(eqn) for *_, eqn in chains):
        _compat.replace_equations(Replacements(divided).of)
    if lines and not nested:  # the outer trace has these operations as well, and warns
        head = f"{name}: by known faults of XLA, these gradients may be multiplied by the sizes of"
        text = message(f"{head} mesh axes:", lines)
        warn_or_raise(WrongGradientWarning, text, strict=strict, anchor="wrong-gradient")


def _lines_for_reduced(chains: Iterable[tuple[Any, ...]], auto: frozenset[Any]) -> list[str]:
    """Returns a line of the warning for each product with a reduced operand.

    Args:
      chains: the products and grouped convolutions, each behind its enclosing equations.
      auto: the Auto axes over which XLA divides arrays, at least one.
    """
    lines = []
    for chain in chains:
        eqn = chain[-1]
        if is_grouped(eqn):
            continue
        if any(operand.sharding.spec.reduced for operand in _compat.operand_types(eqn)):
            module_path = path_of(chain)  # ``blocks[0].mlp``, for example, or ""
            place = f"{module_path}: {_REDUCED}" if module_path else _REDUCED
            lines.append(f"  {place}: {', '.join(map(repr, sorted(auto)))}. {_REMEDY}")
    return lines


def refuse_gradients_of_varying(tree: T, *, name: str) -> T:
    """Returns the inputs of a map without ``check_vma``, whose gradients are refused if they vary.

    In an outer map with ``check_vma``, the type of an array says over which axes the array
    *varies*, that is, differs between devices. An inner map without ``check_vma`` returns arrays
    whose types do not say this, although they vary like the inputs. So the outer map counts
    gradients wrongly. The values are right, so only asking for a gradient raises an error.

    Args:
      tree: a pytree of arrays, the inputs of the inner map.
      name: the name of the function that maps, in messages.
    """

    def mark(x: Any) -> Any:
        axes = _compat.varying_axes(x)
        if not axes:
            return x
        over = " and ".join(map(repr, sorted(axes, key=str)))
        return without_gradient(
            f"{name} maps with check_vma=False, in a shard_map over {over} with check_vma=True. "
            f"JAX forgets there that results vary over {over}: gradients would be wrong. Pass "
            "check_vma=False to the outer shard_map, too.",
            "",
            x,
        )

    return jax.tree.map(mark, tree)  # type: ignore[no-any-return]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def without_gradient(text: str, anchor: str, x: jax.Array) -> jax.Array:
    """Returns an array unchanged, such that differentiating it raises a ValueError.

    JAX asks for the derivative (`_raise_no_gradient`) only if the array depends on what is
    differentiated. So an evaluation runs, and a gradient is refused whatever transform takes it.

    Args:
      text: the text of the error.
      anchor: the section of ``docs/errors.md`` about it; "" for none.
      x: the array.
    """
    return x


@without_gradient.defjvp
def _raise_no_gradient(text: str, anchor: str, primals: object, tangents: object) -> NoReturn:
    """Raises the error for a derivative of ``without_gradient(text, anchor, x)``."""
    raise see(ValueError(text), anchor)


_REDUCED = "reduced operand of a product"
_REMEDY = "Reshard it before, to a spec that is not reduced."


def _products_and_grouped(
    eqns: Iterable[Any], outer: tuple[Any, ...] = (), without: set[int] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yields each product and grouped convolution, behind its enclosing equations.

    A product in a loop in a call is yielded as ``(call, loop, product)``. The enclosing equations
    tell in which module the product is.

    Args:
      eqns: the equations that are searched, with the jaxprs that they call.
      outer: the equations that enclose these, the outermost first.
      without: the ids of jaxprs without such equations. These are not searched again, because most
        layers of a model share jaxprs, such as that of ``gelu``.
    """
    without = set() if without is None else without
    for eqn in eqns:
        if eqn.primitive.name == "dot_general" or is_grouped(eqn):
            yield *outer, eqn
        if not eqn.params:  # most equations have none
            continue
        for inner in _compat.jaxprs_of(eqn):
            if id(inner) in without:
                continue
            inner_chains = [*_products_and_grouped(inner.eqns, (*outer, eqn), without)]
            yield from inner_chains
            if not inner_chains:
                without.add(id(inner))


def path_of(eqns: Iterable[Any]) -> str:
    """Returns the path of the module of an equation, from its enclosing equations and itself.

    Returns "" if the names of the equations name no module.
    """
    names: list[str] = []
    for eqn in eqns:
        # A custom_jvp_call is left out, because the equations in it also have the names around it.
        if eqn.primitive.name.startswith("custom_jvp"):
            continue
        # A name such as ``jit(step)`` is that of a transformed function, and no part of a path.
        stack = str(eqn.source_info.name_stack).split("/")
        names += [name for name in stack if name and "(" not in name]
    return ".".join(names).replace(".[", "[")  # ``blocks.[0]`` becomes ``blocks[0]``
