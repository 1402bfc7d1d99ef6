"""Gradients that each device sums over its own rows, so that they are reduced only once.

A layer that computes each row by itself is run by ``shard_map`` over the axes of the rows. There
the gradient of a parameter is the sum over the rows of one device. It does not become part of the
gradient of the parameter, which JAX would reduce at once, but of another array, the parameter's
*partial sums*: it has a last dimension for the devices of these axes, sharded over them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..activations.intercept import handler_here, with_handler
from ..activations.variables import own_variables, replaced_values
from ..core.retyping import PARTIAL, type_spec
from ..specs.fitting import axes_of, axes_of_type, only_axes, spec_axes

# Whether a layer computes each row independently, from the layer, the number of dimensions of its
# input, and the other arguments of the call.
ByRows: TypeAlias = Callable[[Any, int, Sequence[Any]], bool]


class PartialSums:
    """The partial sums of parameters in one trace, and the handler of the layers that use them.

    Attributes:
      rows: the entry of specs for the rows: a mesh axis, or a tuple of them.
      axes: these axes.
      gathers: whether layers gather parameters that are sharded over these axes; otherwise their
        gradients are reduced at once.
    """

    def __init__(self, mesh: AbstractMesh, rows: Any, *, gathers: bool = False):
        self.rows, self.gathers, self._mesh = rows, gathers, mesh
        self.axes = frozenset(axes_of(rows))
        self._others = frozenset(mesh.axis_names) - self.axes
        self._size = math.prod(mesh.shape[axis] for axis in self.axes)
        self._outer = handler_here()

    def slots(
        self, objects: Sequence[Any], slots: Sequence[Any], leaves: Sequence[Any]
    ) -> set[int]:
        """The slots of parameters with partial sums: of layers that compute by rows."""
        layers = (x for x in objects if _kind_of(x) is not None)
        own = {id(variable) for layer in layers for _, variable in own_variables(layer)}
        return {
            slot
            for x, some in zip(objects, slots, strict=True)
            if id(x) in own
            for slot in some
            if self._is_usable(leaves[slot]) and jnp.issubdtype(leaves[slot].dtype, jnp.inexact)
        }

    def _is_usable(self, x: Any) -> bool:
        return type_spec(x) is not None if self.gathers else self._is_replicated(x)

    def _is_replicated(self, x: Any) -> bool:
        spec = type_spec(x)
        return spec is not None and self.axes.isdisjoint(spec_axes(spec))

    def _gathered(self, x: Any) -> Any:
        """A parameter or a gradient, replicated over the axes."""
        if self._is_replicated(x) or type_spec(x) is None:
            return x
        sharding = jax.typeof(x).sharding
        return jax.sharding.reshard(x, sharding.update(spec=only_axes(sharding.spec, self._others)))

    def zeros(self, x: Any, dtype: Any = None) -> jax.Array:
        """Partial sums of zero for a parameter."""
        spec = only_axes(jax.typeof(x).sharding.spec, self._others)
        entries = [*spec.partitions, *[None] * x.ndim][: x.ndim]
        sharding = NamedSharding(self._mesh, PartitionSpec(*entries, self.rows))
        return jnp.zeros((*x.shape, self._size), dtype or x.dtype, out_sharding=sharding)

    def with_sum(self, partial: Any, gradient: Any) -> jax.Array:
        """Partial sums, with a gradient that is already reduced added to those of one device."""
        is_first = jax.sharding.reshard(
            jnp.arange(self._size) == 0, NamedSharding(self._mesh, PartitionSpec(self.rows))
        )
        total: jax.Array = partial + jnp.where(is_first, self._gathered(gradient)[..., None], 0)
        return total

    @contextlib.contextmanager
    def known(self, pairs: Iterable[tuple[Any, Any]]) -> Iterator[None]:
        """Within the block, parameters have these partial sums."""
        new = {id(x): (x, partial) for x, partial in pairs}
        token = PARTIAL.set({**(PARTIAL.get() or {}), **new})
        try:
            yield
        finally:
            PARTIAL.reset(token)

    def of(self, x: Any) -> Any:
        """The partial sums of a parameter, or None."""
        return (PARTIAL.get() or {}).get(id(x), (None, None))[1]

    def __call__(
        self, module: Any, method: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls a method of a module; layers are mapped over the axes of the rows."""
        if (kind := _kind_of(module)) is not None and method in METHODS:
            by_rows = BY_ROWS[kind] if method == "__call__" else _last_dimension
            call = functools.wraps(call)(functools.partial(self._mapped, module, by_rows, call))
        if self._outer is None:
            return call(*args, **kwargs)
        return self._outer(module, method, call, args, kwargs)

    def _mapped(
        self, module: Any, by_rows: ByRows, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        variables = [variable for _, variable in own_variables(module)]
        values = [_compat.get_value(variable) for variable in variables]
        partials = [self.of(value) for value in values]
        mesh = jax.sharding.get_abstract_mesh()
        mesh = self._mesh if mesh.empty else mesh
        if self.gathers:
            values = [*map(self._gathered, values)]
        is_known = any(x is not None for x in partials) and all(
            y is not None or self._is_replicated(x) for x, y in zip(values, partials, strict=True)
        )
        if not is_known or not self._takes_rows(mesh, module, by_rows, args, kwargs):
            return call(*args, **kwargs)
        if (out := kwargs.get("out_sharding")) is not None:
            kwargs["out_sharding"] = only_axes(getattr(out, "spec", out), self._others)

        def on_device(x: Any, values: Sequence[Any], partials: Sequence[Any]) -> Any:
            new = map(functools.partial(_local, tuple(self.axes)), values, partials)
            with replaced_values(zip(variables, new, strict=True)):
                return call(x, *args[1:], **kwargs)

        rows = PartitionSpec(self.rows)
        last = [
            None if x is None else PartitionSpec(*[None] * (x.ndim - 1), self.rows)
            for x in partials
        ]
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(rows, PartitionSpec(), last),
            out_specs=rows,
            axis_names=self.axes,
        )(args[0], values, partials)

    def _takes_rows(
        self, mesh: AbstractMesh, module: Any, by_rows: ByRows, args: Any, kwargs: Any
    ) -> bool:
        """Whether a call takes one array, whose first dimension is or can be that of the rows."""
        x, *others = args or (None,)
        arrays = [y for y in jax.tree.leaves((args, kwargs)) if isinstance(y, jax.Array)]
        if not isinstance(x, jax.Array) or len(arrays) > 1 or not x.ndim:
            return False
        if self.axes <= axes_of_type(mesh, AxisType.Auto):
            # The layer is the same for each index, whatever the dimension means.
            is_sharded = x.shape[0] % self._size == 0
        else:
            spec = type_spec(x) or PartitionSpec()
            rest = {axis for entry in spec.partitions[1:] for axis in axes_of(entry)}
            is_sharded = spec.partitions[:1] == (self.rows,) and self.axes.isdisjoint(rest)
        return is_sharded and by_rows(module, x.ndim, others)


# What is known in the trace of a loss whose gradient is accumulated.
PARTIAL_SUMS: contextvars.ContextVar[PartialSums | None] = contextvars.ContextVar(
    "PARTIAL_SUMS", default=None
)


def with_sums(sums: PartialSums | None, fun: Callable[..., Any], /, *args: Any) -> Any:
    """Calls a function in which layers add to partial sums where they can."""
    if sums is None:
        return fun(*args)
    token = PARTIAL_SUMS.set(sums)
    try:
        return with_handler(sums, (), fun, *args)
    finally:
        PARTIAL_SUMS.reset(token)


def _local(axes: tuple[Any, ...], value: Any, partial: Any) -> Any:
    """A parameter on one device, whose gradient goes to the device's partial sum, if it has one."""
    if partial is None:
        return value
    varying = jax.lax.pcast(value, axes, to="varying")
    return _summed_in(jax.lax.stop_gradient(varying), partial)


@jax.custom_vjp
def _summed_in(value: Any, partial: Any) -> Any:
    return value


_summed_in.defvjp(
    lambda value, partial: (value, None),
    lambda _, gradient: (jnp.zeros_like(gradient), gradient[..., None]),
)


def _last_dimension(module: Any, ndim: int, _: Any) -> bool:
    return ndim > 1


def _not_the_first(module: Any, ndim: int, _: Any) -> bool:
    """For normalization: whether the statistics are those of single rows."""
    reduced, features = module.reduction_axes, getattr(module, "feature_axes", -1)
    axes = {axis % ndim for x in (reduced, features) if x is not None for axis in _axes(x)}
    return ndim > 1 and 0 not in axes and module.axis_name is None


def _contracts_others(module: Any, ndim: int, _: Any) -> bool:
    return not module.batch_axis and 0 not in {axis % ndim for axis in module.axis}


def _looks_up(module: Any, *_: Any) -> bool:
    """For an embedding: XLA cannot partition the look-up over other axes within a ``shard_map``."""
    spec, mesh = type_spec(_compat.get_value(module.embedding)), jax.sharding.get_abstract_mesh()
    auto = [axis for axis in axes_of_type(mesh, AxisType.Auto) if mesh.shape[axis] > 1]
    return spec is not None and not any(spec_axes(spec)) and not auto


def _spatial(module: Any, ndim: int, _: Any) -> bool:
    return ndim > len(module.kernel_size) + 1 and module.mask is None


def _keeps_the_first(module: Any, ndim: int, others: Sequence[Any]) -> bool:
    """For an einsum: whether the first dimension of the input is only that of the output."""
    text = (module.einsum_str or (others[0] if others else "")).replace(" ", "")
    inputs, _, out = text.partition("->")
    x, _, kernel = inputs.partition(",")
    if x.startswith("..."):
        return out.startswith("...") and "..." not in kernel and ndim > len(x) - 3
    return x[:1].isalpha() and x[0] == out[:1] and x.count(x[0]) == 1 and x[0] not in kernel


def _axes(x: Any) -> tuple[int, ...]:
    return (x,) if isinstance(x, int) else tuple(x)


# Layers that compute each row of their input independently, with what this depends on.
BY_ROWS: dict[Any, ByRows] = {
    nnx.Linear: _last_dimension,
    nnx.LinearGeneral: _contracts_others,
    nnx.Einsum: _keeps_the_first,
    nnx.Conv: _spatial,
    nnx.ConvTranspose: _spatial,
    nnx.Embed: _looks_up,
    nnx.LayerNorm: _not_the_first,
    nnx.RMSNorm: _not_the_first,
    nnx.GroupNorm: _not_the_first,
    nnx.LoRA: lambda module, ndim, _: ndim > 1 and module.base_module is None,
}
# Their methods that use parameters.
METHODS = ("__call__", "attend")
# A user's own function in their place, such as a quantized product, may mix rows.
_FUNCTIONS = (
    "conv_general_dilated",
    "dot_general",
    "dot_general_cls",
    "einsum_op",
    "promote_dtype",
)
_DEFAULTS = {
    kind: {name: parameters[name].default for name in _FUNCTIONS if name in parameters}
    for kind in BY_ROWS
    for parameters in [inspect.signature(kind.__init__).parameters]
}


def _kind_of(module: Any) -> Any:
    """The class of layers by rows whose methods a module has; None if it has others."""
    if not isinstance(module, nnx.Module):
        return None
    kinds = type(module).__mro__
    kind, attend = (next((k for k in kinds if name in vars(k)), None) for name in METHODS)
    if kind not in _DEFAULTS or attend not in (None, kind):
        return None
    is_default = all(getattr(module, k, x) is x for k, x in _DEFAULTS[kind].items())
    return kind if is_default else None
