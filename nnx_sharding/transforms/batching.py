"""``vmap`` for functions that take and return NNX objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from .. import _compat
from ..core.pure import Pure
from ..core.signature import Roles
from ..errors import raise_listed
from ..specs.mapped_axis import CARRY
from .axis_prefixes import Mapped, axes_specs, frozen_metadata
from .in_trace import Function, Inner, described
from .lifted import lift


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vmap(Mapped):
    """What ``vmap`` decides, and the options that it passes to ``jax.vmap``."""

    name: str = "vmap"
    axis_name: Hashable = None
    axis_size: int | None = None
    spmd_axis_name: Hashable = None

    def passes_sums(self, spec: Any) -> bool:
        return spec.index is None or spec.index >= 0  # the last dimension is an additional one

    def is_stacked(self, slots: Sequence[int], leaf: Any) -> bool:
        return super().is_stacked(slots, leaf) and _compat.varies_in_vmap(leaf)

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[Any]
    ) -> None:
        super().check_outputs(fun_name, names, leaves, specs)
        lines = [
            f"  {name}, {described(leaf)}"
            for name, leaf, spec in zip(names, leaves, specs, strict=True)
            if spec.index is None and _compat.varies_in_vmap(leaf)
        ]
        raise_listed(
            ValueError,
            f"vmap: these are not mapped (axis None), but {fun_name} makes them differ between "
            "the elements:",
            lines,
            "Give each an axis in in_axes or out_axes, in a module by StateAxes, or reduce it, as "
            "in jax.lax.pmean with axis_name.",
            anchor="differs-between-elements",
        )

    def applied(
        self, pure: Pure, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        return jax.vmap(
            function,
            in_axes=tuple(axis.index for axis in in_specs),
            out_axes=(*(axis.index for axis in out_specs), None),
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )


@_compat.api_boundary
def vmap(
    fun: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable = None,
    transform_metadata: Mapping[Any, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Vectorizes a function whose arguments and results may be NNX objects.

    A mapped Variable has one more dimension outside the function than inside. What the function
    writes to it is stacked along the same axis, and so are new Variables. A Variable that is not
    mapped has to be the same for all elements after the call.

    Args:
      fun: the function.
      in_axes: the axis along which each argument is mapped, None for one that is not: one for all
        of them, a tuple with one for each positional parameter, or a mapping from parameter names;
        each a pytree prefix of its argument, with :class:`~nnx_sharding.StateAxes` allowed for a
        module. Other keyword-only parameters are not mapped.
      out_axes: likewise for the result.
      axis_name: a name for the axis, for collectives.
      axis_size: its size, if nothing is mapped.
      spmd_axis_name: the mesh axis over which it is sharded, for constraints in the function.
      transform_metadata: metadata of Variables for the axis, as ``flax.nnx.vmap`` takes them:
        ``{nnx.PARTITION_NAME: "layers"}`` names it in their logical axes.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that maps ``fun``.

    Raises:
      TypeError: something in ``in_axes`` or ``out_axes`` is not an axis.
      ValueError: at a call, the axes do not fit the arguments, or a shared Variable has several
        axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import vmap
      >>> make = nnx.split_rngs(splits=3)(vmap(lambda rngs: nnx.Linear(2, 4, rngs=rngs)))
      >>> models = make(nnx.Rngs(0))
      >>> models.kernel.shape
      (3, 2, 4)
      >>> vmap(lambda model, x: model(x), in_axes=(0, None))(models, jnp.ones(2)).shape
      (3, 4)

    The semantics are those of ``jax.vmap`` and ``flax.nnx.vmap``.
    """
    in_specs, out_specs = axes_specs("in_axes", in_axes), axes_specs("out_axes", out_axes)
    if CARRY in (*in_specs.written, *out_specs.written):
        raise TypeError("vmap: Carry is for scan; the elements of vmap are independent.")
    transform = _Vmap(
        in_specs=in_specs,
        out_specs=out_specs,
        axis_name=axis_name,
        axis_size=axis_size,
        spmd_axis_name=spmd_axis_name,
        metadata=frozen_metadata(transform_metadata),
    )

    def decorate(fun: Callable[..., Any]) -> Any:
        return lift(Inner, fun, transform, Roles(), graph, graph_updates)

    return decorate if fun is None else decorate(fun)
