"""Gradients that each device sums over its own rows, so that they are reduced only once.

Let D devices hold the rows ``x = [x_0; x_1; …]``, and each a copy of the kernel of ``y = x @ w``.
The gradient is a sum over the devices, ``d_w = Σ_d x_dᵀ @ d_y_d``, and JAX computes that sum, an
all-reduce, wherever a layer uses ``w``: once for each microbatch, if gradients are accumulated.

Here the layer runs in a ``shard_map`` over the axes of the rows, and takes one more array: the
*partial sums* ``s`` of the parameter, of shape ``(*w.shape, D)``, whose last dimension is sharded
over these axes. It adds nothing to the result; it only takes the gradient in place of ``w``::

    device d:     y_d = x_d @ use(w, s[..., d])    where  use(w, s) = w,  d_w = 0,  d_s = d_use

                  device 0      device 1      device 2
    d_s           x_0ᵀ d_y_0    x_1ᵀ d_y_1    x_2ᵀ d_y_2    added up on each device, in the loop
    d_s.sum(-1)        └─────────── + ────────────┘         one all-reduce, after the loop

This is right for layers of which row i of the output depends on row i of the input only
(``BY_ROWS``), and for parameters that are replicated over the *axes of the rows*, the mesh axes
that shard the batch. All other uses of a parameter add to its usual gradient, which JAX reduces at
once, and which :meth:`PartialSums.add` puts into the sum of the first device.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..activations.intercept import current_handler, with_handler
from ..activations.variables import own_variables, replaced_values
from ..core.constrain import type_spec
from ..core.retyping import PARTIAL, PartialSum
from ..specs.fitting import axes_of, axes_of_type, keep_axes, pad_entries, spec_axes

# Whether a layer computes each row by itself, from the layer (whose attributes are those of its
# class), the rank of its input, and the other positional arguments of the call.
ByRows: TypeAlias = Callable[[Any, int, Sequence[object]], bool]


class PartialSums:
    """The partial sums of parameters in one trace, and the handler of the layers that use them.

    Attributes:
      rows: the entry of specs for the rows: a mesh axis, or a tuple of them.
      axes: these axes.
    """

    def __init__(self, mesh: AbstractMesh, rows: str | tuple[str, ...]):
        self.rows, self._mesh = rows, mesh
        self.axes = frozenset(axes_of(rows))
        self._other_axes = frozenset(mesh.axis_names) - self.axes
        self._num_shards = math.prod(mesh.shape[axis] for axis in self.axes)
        self._outer = current_handler()

    def slots(
        self,
        objects: Sequence[object],
        slots_of_objects: Sequence[Sequence[int]],
        leaves: Sequence[Any],
    ) -> set[int]:
        """Returns the parameters that get partial sums, by their positions among all arrays.

        They belong to layers that compute by rows, are replicated and can be differentiated.

        Args:
          objects: the modules and Variables of the arguments.
          slots_of_objects: for each of these, the slots of its own arrays.
          leaves: the arrays of the arguments, by slot.
        """
        # A parameter that is used elsewhere as well has partial sums of its uses in these layers.
        layers = [x for x in objects if _layer_class(x) is not None]
        parameters = {id(variable) for layer in layers for _, variable in own_variables(layer)}
        candidates = [
            slot
            for variable, slots in zip(objects, slots_of_objects, strict=True)
            if id(variable) in parameters
            for slot in slots
        ]
        return {
            slot
            for slot in candidates
            if self._is_replicated(leaves[slot]) and jnp.issubdtype(leaves[slot].dtype, jnp.inexact)
        }

    def _is_replicated(self, x: jax.Array) -> bool:
        """Whether an array is replicated over the axes of the rows."""
        spec = type_spec(x)
        return spec is not None and self.axes.isdisjoint(spec_axes(spec))

    def zeros(self, parameter: jax.Array, dtype: Any = None) -> jax.Array:
        """Returns partial sums of zero, of shape ``(*parameter.shape, shards of the rows)``."""
        spec = keep_axes(jax.typeof(parameter).sharding.spec, self._other_axes)
        entries = pad_entries(spec, parameter.ndim)
        sharding = NamedSharding(self._mesh, PartitionSpec(*entries, self.rows))
        shape = (*parameter.shape, self._num_shards)
        return jnp.zeros(shape, dtype or parameter.dtype, out_sharding=sharding)

    def add(self, partial: jax.Array, gradient: jax.Array) -> jax.Array:
        """Adds a gradient that is reduced already to the partial sums, on the first device only."""
        is_first = jax.sharding.reshard(
            jnp.arange(self._num_shards) == 0, NamedSharding(self._mesh, PartitionSpec(self.rows))
        )
        total: jax.Array = partial + jnp.where(is_first, gradient[..., None], 0)
        return total

    @contextlib.contextmanager
    def with_partials(self, pairs: Iterable[tuple[jax.Array, jax.Array]]) -> Iterator[None]:
        """Within the block, :meth:`find` knows the partial sums of parameters, given as pairs."""
        new = {id(parameter): PartialSum(parameter, partial) for parameter, partial in pairs}
        token = PARTIAL.set({**(PARTIAL.get() or {}), **new})
        try:
            yield
        finally:
            PARTIAL.reset(token)

    def find(self, parameter: object) -> jax.Array | None:
        """Finds the partial sums of a parameter; None if it has none."""
        partial = (PARTIAL.get() or {}).get(id(parameter))
        return None if partial is None else partial.sums

    def __call__(
        self,
        module: Any,
        method: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls a method of a module in the place of Flax; layers run in a ``shard_map``.

        Args:
          module: the module.
          method: the name of the method.
          call: the method, bound to the module.
          args: its positional arguments.
          kwargs: its keyword arguments.
        """
        layer_class = _layer_class(module)
        if layer_class is not None and method in METHODS:
            # `Embed.attend` is a product, like `Linear`.
            by_rows = BY_ROWS[layer_class] if method == "__call__" else _has_rows
            mapped = functools.partial(self._call_by_rows, module, by_rows, call)
            call = functools.wraps(call)(mapped)
        if self._outer is None:
            return call(*args, **kwargs)
        return self._outer(module, method, call, args, kwargs)

    def _call_by_rows(
        self,
        module: nnx.Module,
        by_rows: ByRows,
        call: Callable[..., object],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a layer in a ``shard_map`` over the rows, if all of its parameters allow it.

        There its gradients go to the partial sums. ``by_rows`` says whether such a layer computes
        each row by itself, ``call`` is the method.
        """
        variables = [variable for _, variable in own_variables(module)]
        values = [_compat.get_value(variable) for variable in variables]
        partials = [self.find(value) for value in values]  # None for a parameter without sums
        mesh = jax.sharding.get_abstract_mesh()
        mesh = self._mesh if mesh.empty else mesh
        # Each parameter is whole on each device, with partial sums or without.
        pairs = zip(values, partials, strict=True)
        is_possible = all(x is not None or self._is_replicated(value) for value, x in pairs)
        if all(x is None for x in partials) or not is_possible:
            return call(*args, **kwargs)
        if not self._takes_rows(mesh, module, by_rows, args, kwargs):
            if by_rows is _looks_up and "out_sharding" not in kwargs:
                spec = _looked_up_sharding(mesh, module, args)
                if spec is not None:  # JAX cannot infer it
                    kwargs = {**kwargs, "out_sharding": spec}
            return call(*args, **kwargs)
        if (out := kwargs.get("out_sharding")) is not None:
            # Within, the axes of the rows are manual, which specs do not name.
            kwargs["out_sharding"] = keep_axes(getattr(out, "spec", out), self._other_axes)

        def call_on_device(
            x: jax.Array, values: Sequence[object], partials: Sequence[jax.Array | None]
        ) -> Any:
            """Calls the layer with its rows of ``x``, and its slice of each partial sum."""
            local = map(functools.partial(_use_locally, tuple(self.axes)), values, partials)
            with replaced_values(zip(variables, local, strict=True)):
                return call(x, *args[1:], **kwargs)

        rows = PartitionSpec(self.rows)
        sums_specs = [  # (*parameter, shards of the rows)
            None if x is None else PartitionSpec(*[None] * (x.ndim - 1), self.rows)
            for x in partials
        ]
        return jax.shard_map(
            call_on_device,
            mesh=mesh,
            in_specs=(rows, PartitionSpec(), sums_specs),
            out_specs=rows,
            axis_names=self.axes,
        )(args[0], values, partials)

    def _takes_rows(
        self,
        mesh: AbstractMesh,
        module: nnx.Module,
        by_rows: ByRows,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> bool:
        """Whether the only array that a call takes has the rows of the batch as first dimension.

        On Auto axes the type does not say so; there a dimension that they divide will do.

        Args:
          mesh: the mesh of the trace.
          module: the layer.
          by_rows: whether such a layer computes each row by itself.
          args: the positional arguments of the call.
          kwargs: its keyword arguments.
        """
        x, *others = args or (None,)
        arrays = [y for y in jax.tree.leaves((args, kwargs)) if isinstance(y, jax.Array)]
        if not isinstance(x, jax.Array) or len(arrays) > 1 or not x.ndim:
            return False
        if self.axes <= axes_of_type(mesh, AxisType.Auto):
            # The layer is the same for each index, whatever the dimension means.
            is_sharded = x.shape[0] % self._num_shards == 0
        else:
            spec = type_spec(x) or PartitionSpec()
            rest = {axis for entry in spec.partitions[1:] for axis in axes_of(entry)}
            is_sharded = spec.partitions[:1] == (self.rows,) and self.axes.isdisjoint(rest)
        return is_sharded and by_rows(module, x.ndim, others)


# What is known in the trace of a loss whose gradient is accumulated.
PARTIAL_SUMS: contextvars.ContextVar[PartialSums | None] = contextvars.ContextVar(
    "PARTIAL_SUMS", default=None
)


def with_sums(sums: PartialSums | None, fun: Callable[..., object], /, *args: object) -> Any:
    """Calls a function in which layers add to partial sums where they can."""
    if sums is None:
        return fun(*args)
    token = PARTIAL_SUMS.set(sums)
    try:
        return with_handler(sums, (), fun, *args)
    finally:
        PARTIAL_SUMS.reset(token)


def _use_locally(axes: tuple[str, ...], value: object, partial: jax.Array | None) -> Any:
    """Returns a parameter on one device, whose gradient goes to that device's partial sum."""
    if partial is None:
        return value
    # Without the cast, JAX would reduce the gradient of what is equal on all devices.
    varying = jax.lax.pcast(value, axes, to="varying")
    return _use(jax.lax.stop_gradient(varying), partial)


@jax.custom_vjp
def _use(value: jax.Array, partial: jax.Array) -> jax.Array:
    return value


_use.defvjp(
    lambda value, partial: (value, None),
    # A device's part of the partial sums is (*value.shape, 1).
    lambda _, d_use: (jnp.zeros_like(d_use), d_use[..., None]),
)


def _has_rows(module: object, ndim: int, _: Sequence[object]) -> bool:
    """For a product with the last dimension: whether there is another one before it."""
    return ndim > 1


def _normalizes_rows(module: Any, ndim: int, _: Sequence[object]) -> bool:
    """For normalization: whether each row has its own statistics."""
    reduced = module.reduction_axes
    features = getattr(module, "feature_axes", -1)
    given = [(x,) if isinstance(x, int) else x for x in (reduced, features) if x is not None]
    axes = {axis % ndim for group in given for axis in group}
    return ndim > 1 and 0 not in axes and module.axis_name is None


def _contracts_others(module: Any, ndim: int, _: Sequence[object]) -> bool:
    """For `LinearGeneral`: whether the first dimension is neither contracted nor of the kernel."""
    return not module.batch_axis and 0 not in {axis % ndim for axis in module.axis}


def _looks_up(module: Any, *_: object) -> bool:
    """For an embedding: XLA cannot partition the look-up over other axes within a ``shard_map``."""
    spec = type_spec(_compat.get_value(module.embedding))
    mesh = jax.sharding.get_abstract_mesh()
    auto = [axis for axis in axes_of_type(mesh, AxisType.Auto) if mesh.shape[axis] > 1]
    return spec is not None and not any(spec_axes(spec)) and not auto


def _looked_up_sharding(
    mesh: AbstractMesh, module: Any, args: Sequence[object]
) -> PartitionSpec | None:
    """Returns the spec of what an embedding looks up; None where JAX finds it.

    JAX does not type a look-up by sharded indices on a mesh that has Auto axes as well, even if all
    of the table is on each device. The axes of the rows may be Explicit only because gradients are
    accumulated over them.
    """
    indices = type_spec(args[0]) if len(args) == 1 else None
    table = type_spec(_compat.get_value(module.embedding))
    if indices is None or table is None or any(spec_axes(table)):
        return None
    if not axes_of_type(mesh, AxisType.Auto) or not any(spec_axes(indices)):
        return None
    return PartitionSpec(*pad_entries(indices, jnp.ndim(args[0])), None)  # type: ignore[arg-type]


def _convolves_rows(module: Any, ndim: int, _: Sequence[object]) -> bool:
    """For a convolution: whether there is a dimension before the spatial ones and the features."""
    return ndim > len(module.kernel_size) + 1 and module.mask is None


def _keeps_the_first(module: Any, ndim: int, others: Sequence[Any]) -> bool:
    """For an einsum: whether the input's first dimension is the output's first, and no other."""
    text = (module.einsum_str or (others[0] if others else "")).replace(" ", "")
    inputs, _, out = text.partition("->")
    x, _, kernel = inputs.partition(",")
    if x.startswith("..."):
        return out.startswith("...") and "..." not in kernel and ndim > len(x) - 3
    return x[:1].isalpha() and x[0] == out[:1] and x.count(x[0]) == 1 and x[0] not in kernel


def _adapts_rows(module: Any, ndim: int, _: Sequence[object]) -> bool:
    """For LoRA: the module that it wraps may be one that mixes rows."""
    return ndim > 1 and module.base_module is None


# Layers that compute each row of their input independently, with what this depends on.
BY_ROWS: dict[type, ByRows] = {
    nnx.Linear: _has_rows,
    nnx.LinearGeneral: _contracts_others,
    nnx.Einsum: _keeps_the_first,
    nnx.Conv: _convolves_rows,
    nnx.ConvTranspose: _convolves_rows,
    nnx.Embed: _looks_up,
    nnx.LayerNorm: _normalizes_rows,
    nnx.RMSNorm: _normalizes_rows,
    nnx.GroupNorm: _normalizes_rows,
    nnx.LoRA: _adapts_rows,
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


def _default_functions(layer_class: type) -> dict[str, object]:
    """Returns the functions that a class of layers calls unless the user gives others."""
    parameters = inspect.signature(vars(layer_class)["__init__"]).parameters
    return {name: parameters[name].default for name in _FUNCTIONS if name in parameters}


_DEFAULTS: dict[type, dict[str, object]] = {
    layer_class: _default_functions(layer_class) for layer_class in BY_ROWS
}


def _layer_class(module: object) -> type | None:
    """Returns the class of ``BY_ROWS`` that defines the methods of a module.

    None if a subclass overrides them, or the user gave the layer a function of his own.
    """
    if not isinstance(module, nnx.Module):
        return None
    # The class that defines each method, as a user's subclass may replace it.
    call_class, attend_class = (
        next((base for base in type(module).__mro__ if name in vars(base)), None)
        for name in METHODS
    )
    if call_class not in _DEFAULTS or attend_class not in (None, call_class):
        return None
    defaults = _DEFAULTS[call_class].items()
    # Attributes that a class does not have count as the default.
    is_default = all(getattr(module, name, default) is default for name, default in defaults)
    return call_class if is_default else None
