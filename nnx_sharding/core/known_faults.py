"""What JAX or XLA is known to compute wrong: dodged, warned about, or refused.

From other modules:

    Replacements   writes the equations of a jaxpr again, without the convolutions of ``is_grouped``
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType

from .. import _compat
from ..errors import WrongGradientWarning, message, warn_or_raise
from ..specs.fitting import axes_of_type
from .convolutions import Replacements, is_grouped

T = TypeVar("T")


def work_around_faults(mesh: AbstractMesh | None, *, name: str, strict: bool, nested: bool) -> None:
    """Replaces what XLA would compute wrong in the current trace, or warns about it.

    In a nested trace, too: a gradient around it would make convolutions with groups.

    Args:
      mesh: the mesh of the arrays; None if they are on none.
      name: of the transform, in messages.
      strict: whether a warning is an error.
      nested: whether the trace is part of another, which warns.
    """
    if mesh is None:
        return
    # The axes over which XLA divides arrays: what is manual it does not partition.
    divided = frozenset(axis for axis, size in mesh.shape.items() if size > 1)
    divided -= axes_of_type(mesh, AxisType.Manual)
    if not divided:
        return
    auto = divided & axes_of_type(mesh, AxisType.Auto)
    has_groups = False  # whether there are convolutions with groups
    lines = list[str]()
    for *outer, eqn in _suspects(_compat.trace_equations()):  # ``outer`` are those around it
        if is_grouped(eqn):
            has_groups = True
        elif auto and any(x.sharding.spec.reduced for x in _compat.operand_types(eqn)):
            module_path = path_of([*outer, eqn])
            place = f"{module_path}: {_REDUCED}" if module_path else _REDUCED
            lines.append(f"  {place}: {', '.join(map(repr, sorted(auto)))}. {_REMEDY}")
    if has_groups:
        _compat.replace_equations(Replacements(divided).of)
    if lines and not nested:  # the outer trace has these operations, too
        head = f"{name}: by known faults of XLA, these gradients may be multiplied by the sizes of"
        text = message(f"{head} mesh axes:", lines)
        warn_or_raise(WrongGradientWarning, text, strict=strict, anchor="wrong-gradient")


def refuse_gradients_of_varying(tree: T, *, name: str) -> T:
    """Returns what goes into a map without ``check_vma``; its gradients are an error if it varies.

    That is over Manual axes around the map. JAX gives the results a type that does not vary over
    them, so that an outer map which checks that counts gradients wrongly. Values are right.

    Args:
      tree: a pytree of arrays.
      name: of the function that maps, in messages.
    """

    def mark(x: Any) -> Any:
        axes = _compat.varying_axes(x)
        return _refuse_gradient(name, tuple(sorted(axes, key=str)), x) if axes else x

    return jax.tree.map(mark, tree)  # type: ignore[no-any-return]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _refuse_gradient(name: str, axes: tuple[Any, ...], x: jax.Array) -> jax.Array:
    """Returns an array; JAX asks for the derivative only where something differentiates it."""
    return x


@_refuse_gradient.defjvp
def _raise_no_gradient(
    name: str, axes: tuple[Any, ...], primals: object, tangents: object
) -> NoReturn:
    over = " and ".join(map(repr, axes))
    raise ValueError(
        f"{name} maps with check_vma=False, in a shard_map over {over} with check_vma=True. JAX "
        f"forgets there that results vary over {over}: gradients would be wrong. Pass "
        "check_vma=False to the outer shard_map, too."
    )


_REDUCED = "reduced operand of a product"
_REMEDY = "Reshard it before, to a spec that is not reduced."


def _suspects(
    eqns: Iterable[Any], outer: tuple[Any, ...] = (), innocent: set[int] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yields products and grouped convolutions, each after the equations that it is in.

    Args:
      eqns: the equations in which to look, and in the jaxprs of these.
      outer: the equations that these are in.
      innocent: the ids of jaxprs that were found to have none, which are not looked through again:
        most layers of a model share the jaxpr of ``gelu``, for example.
    """
    innocent = set() if innocent is None else innocent
    for eqn in eqns:
        if eqn.primitive.name == "dot_general" or is_grouped(eqn):
            yield *outer, eqn
        for inner in _compat.jaxprs_of(eqn) if eqn.params else ():
            if id(inner) not in innocent:
                suspects = [*_suspects(inner.eqns, (*outer, eqn), innocent)]
                yield from suspects
                if not suspects:
                    innocent.add(id(inner))


def path_of(eqns: Iterable[Any]) -> str:
    """Returns the path of the module in the names of equations, each inside the previous one."""
    # What is in a custom_jvp_call also has the names around that call.
    kept = [eqn for eqn in eqns if not eqn.primitive.name.startswith("custom_jvp")]
    stacks = (str(eqn.source_info.name_stack) for eqn in kept)
    parts = (part for stack in stacks for part in stack.split("/") if part and "(" not in part)
    return ".".join(parts).replace(".[", "[")
