"""``scan`` for functions that take and return NNX objects."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from .. import _compat
from ..core.call_context import Caller
from ..core.naming import name_of
from ..core.pure import Pure
from ..core.signature import Roles
from ..core.static_equality import Static
from ..core.unflatten import Built
from ..errors import raise_listed, see
from ..specs.mapped_axis import BROADCAST, CARRY
from ..specs.paths import accessor, path_key
from .axis_prefixes import Carry, Mapped, axes_specs, frozen_metadata
from .in_trace import Function, Inner, described
from .lifted import lift, unbind
from .scan_loop import Loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scan(Mapped):
    """What ``scan`` decides, and the options that it passes to ``jax.lax.scan``.

    Attributes:
      carried: the position or the name of the argument that is the carry; None without one.
      returned: the position of the carry in what the function returns; None if it is all of it.
      options: those of ``jax.lax.scan``.
    """

    name: str = "scan"
    carried: int | str | None
    returned: int | None
    options: tuple[tuple[str, Static], ...]

    @contextlib.contextmanager
    def tracing(
        self, pure: Pure, caller: Caller, built: Built, leaves: Sequence[Any]
    ) -> Iterator[Callable[..., Any]]:
        with super().tracing(pure, caller, built, leaves) as fun:

            def checked(*args: Any, **kwargs: Any) -> Any:
                out = fun(*args, **kwargs)
                if self.carried is not None:
                    given = _argument(caller.fun, self.carried, args, kwargs)
                    self._check_carry(name_of(caller.fun), given, out)
                return out

            yield checked

    def _check_carry(self, fun_name: str, given: Any, out: Any) -> None:
        """Checks that the returned carry has the form of the given one."""
        if self.returned is not None:
            if not isinstance(out, tuple) or len(out) <= self.returned:
                error = TypeError(
                    f"scan: {fun_name} must return a tuple whose item {self.returned} is the "
                    f"carry (out_axes={self.out_specs}), got {_form(out)}."
                )
                raise see(error, anchor="carry-of-another-form")
            out = out[self.returned]
        flattened: Any = [
            jax.tree_util.tree_flatten_with_path(x, is_leaf=_compat.is_graph_object)
            for x in (given, out)
        ]
        (before, old), (after, new) = flattened
        if old != new:
            error = TypeError(
                f"scan: {fun_name} returns a carry of a different structure than it was given:\n"
                f"  given: {_form(given)}\n  returned: {_form(out)}"
            )
            raise see(error, anchor="carry-of-another-form")
        others = [
            f"  carry{accessor('', tuple(map(path_key, path)))}: {type(one).__name__}"
            for (path, one), (_, other) in zip(before, after, strict=True)
            if one is not other and (_compat.is_graph_object(one) or _compat.is_graph_object(other))
        ]
        head = f"scan: {fun_name} returns different objects in the carry than it was given:"
        remedy = "Change the module that it was given, and return that."
        raise_listed(ValueError, head, others, remedy)

    def passes_sums(self, spec: Any) -> bool:
        # A step may write to what is not mapped, and has no sums for the new value. The last
        # dimension of sums is an additional one.
        return spec.index is not None and spec.index >= 0

    def carried_objects(self, pure: Pure) -> frozenset[int]:
        parts = [part for target in pure.targets for part in target.parts if part.spec is CARRY]
        return frozenset(pure.structure.paths_to_objects([((), part.child) for part in parts]))

    def applied(
        self, pure: Pure, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        return Loop(self.options, pure, function, in_specs, out_specs)


class _Text(str):
    __slots__ = ()
    __repr__ = str.__str__


def _form(tree: Any) -> str:
    """A pytree with the types of its leaves."""
    is_leaf = _compat.is_graph_object
    form = jax.tree.map(lambda x: _Text(described(x)), tree, is_leaf=is_leaf)
    return textwrap.shorten(repr(form), 300)


def _argument(fun: Any, which: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One argument of a call, by position or by name."""
    if isinstance(which, int) and which < len(args):
        return args[which]
    arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    return arguments[which] if isinstance(which, str) else [*arguments.values()][which]


def _carry_in(in_axes: Any) -> int | str | None:
    """The position or the name of the argument that is the carry."""
    items = in_axes.items() if isinstance(in_axes, Mapping) else enumerate(in_axes)
    found = [key for key, axes in items if _is_carry(axes)]
    if len(found) > 1:
        written = axes_specs("in_axes", in_axes)
        raise ValueError(f"scan: only one argument can be the carry, got in_axes={written}.")
    return found[0] if found else None


def _is_carry(axes: Any) -> bool:
    return axes is Carry or axes is nnx.Carry


@_compat.api_boundary
def scan(
    fun: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: Mapping[Any, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Loops over a function whose arguments and results may be NNX objects.

    An argument is the carry, which each step gets from the previous one; or mapped along an axis,
    so that each step gets its slice; or the same for all steps. What a step writes to a mapped
    Variable is stacked, and so are new Variables of mapped modules. What it writes to Variables
    that are not mapped, such as counters and random streams, is read by the next step, as in a
    Python loop. Variables that no step writes are inputs of the loop and never outputs.

    Args:
      fun: the function.
      length: the number of steps, if nothing is mapped.
      reverse: whether to run from the last slice to the first.
      unroll: how many steps to unroll in one iteration; True for all.
      in_axes: for each argument :class:`~nnx_sharding.Carry` (for one at most), the axis along
        which it is mapped, or None: a tuple with one for each positional parameter, a mapping from
        parameter names, or one for all. Axes are a pytree prefix of their argument, with
        :class:`~nnx_sharding.StateAxes` allowed for a module, in which a Variable may also be
        carried.
      out_axes: ``Carry`` for the carry of the next step, and the axes along which everything else
        is stacked: a tuple, or one for all that the function returns.
      transform_metadata: as in :func:`vmap`.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that runs the loop, and returns the last carry and the stacked results.

    Raises:
      TypeError: something in ``in_axes`` or ``out_axes`` is not an axis; at a call, the returned
        carry differs in structure from the given one.
      ValueError: several arguments are the carry, or ``in_axes`` and ``out_axes`` differ in whether
        there is one; at a call, lengths differ, or a step changes the structure of an object that
        is not mapped.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import Carry, scan, vmap
      >>> make = nnx.split_rngs(splits=3)(vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs)))
      >>> @scan(in_axes=(0, Carry), out_axes=Carry)
      ... def forward(layer, x):
      ...     return layer(x)
      >>> forward(make(nnx.Rngs(0)), jnp.ones((2, 4))).shape
      (2, 4)

    The semantics are those of ``jax.lax.scan`` and ``flax.nnx.scan``.
    """
    in_axes = (in_axes,) if _is_carry(in_axes) else in_axes
    carried = _carry_in(in_axes) if isinstance(in_axes, tuple | list | Mapping) else None
    returned: Any = _carry_in(out_axes) if isinstance(out_axes, tuple) else None
    in_specs, out_specs = axes_specs("in_axes", in_axes), axes_specs("out_axes", out_axes)
    if (carried is None) != (returned is None and not _is_carry(out_axes)):
        raise ValueError(
            "scan: the carry is an argument and a result: give Carry in both in_axes and "
            f"out_axes, or in none, got in_axes={in_specs}, out_axes={out_specs}."
        )
    if BROADCAST in out_specs.written:
        raise ValueError(
            f"scan: what the steps return is stacked, so out_axes cannot be None, got {out_specs}."
        )
    options = {"length": length, "reverse": reverse, "unroll": unroll}

    def decorate(fun: Callable[..., Any]) -> Any:
        bound = len(unbind(fun)[1])
        transform = _Scan(
            in_specs=in_specs,
            out_specs=out_specs,
            carried=carried + bound if isinstance(carried, int) else carried,
            returned=returned,
            options=tuple((key, Static.of(x)) for key, x in options.items()),  # 1 is not True
            metadata=frozen_metadata(transform_metadata),
        )
        return lift(Inner, fun, transform, Roles(), graph, graph_updates)

    return decorate if fun is None else decorate(fun)
