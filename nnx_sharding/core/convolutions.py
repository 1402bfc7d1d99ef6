"""Replaces grouped convolutions by products, because XLA partitions grouped convolutions wrong.

Of grouped convolutions drawn at random, in which XLA shards features, windows or groups, one in
twenty has wrong values or does not compile. The gradients of many programs have grouped
convolutions: the gradient of the kernel of a grouped convolution, of any kernel for each example of
a batch, and of a convolution that a pipeline maps over its stages. XLA partitions ungrouped
convolutions and products right.

So XLA gets no grouped convolution to partition: when a trace ends, one of two forms replaces each.
The form with fewer terms is chosen: one for each position k of the kernel in a forward pass, one
for each position t of the output for the gradient of a kernel. With groups g, rows n, and channels
i and o, these are

    out[n, g, o, t] = sum over k of  lhs[n, g, i, t * stride + k * dilation] · rhs[g, o, i, k]
    out[.., t] for each t            = lhs[n, g, i, t * stride + all k * dilation] · rhs[g, o, i, k]

Each term is a strided slice and one product, with the groups as a batch dimension. The *window* is
the spatial shape of the kernel, and its *span* is the number of positions of the input from the
first to the last that it covers.

A *jaxpr* has equations. The parameters of an equation may hold further jaxprs, such as the body of
a loop: each is an open jaxpr, or is in a ``ClosedJaxpr``.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType

from ..specs.fitting import axes_of_type
from ..specs.types import AxisName

# If there are more terms than this, they run in a loop, so that the program stays small.
_MAX_UNROLLED = 64


class _NewEquation(NamedTuple):
    """A new primitive and new parameters for an equation of a jaxpr; its operands stay."""

    primitive: Primitive
    params: dict[str, Any]


class Replacements:
    """Replaces grouped convolutions in the equations of a trace, at any depth.

    The caller asks ``of`` for each equation of the trace. ``of`` goes through the jaxprs in the
    parameters of the equation, and asks itself for the equations there.

    Args:
      axes: the axes of the mesh that have several devices.

    Private attributes:

        _axes     the argument ``axes``
        _jaxprs   by the id of a jaxpr: the jaxpr, so that no other gets its id, and its
                  replacement, which is the jaxpr itself if there is nothing to replace. Both are
                  kept, because layers share many jaxprs
    """

    def __init__(self, axes: frozenset[AxisName]):
        self._axes = axes
        self._jaxprs: dict[int, tuple[Any, Any]] = {}

    def of(self, eqn: Any) -> _NewEquation | None:
        """Returns the primitive and parameters that replace an equation's; None to keep them.

        A grouped convolution becomes a call of products. Any other equation keeps its primitive,
        and gets other parameters if these hold a jaxpr with a grouped convolution.
        """
        if is_grouped(eqn):
            # XLA does not partition over Manual axes. The mesh in the type of an operand says which
            # axes are Manual, or the mesh in the context of the equation if the type has no mesh.
            type_mesh: Any = eqn.invars[0].aval.sharding.mesh
            manual = axes_of_type(type_mesh, AxisType.Manual)
            manual |= axes_of_type(eqn.ctx.cur_abstract_mesh, AxisType.Manual)
            is_partitioned = bool(self._axes - manual)
            return _call_of_products(eqn) if is_partitioned else None
        params = {key: self._in_parameter(value) for key, value in eqn.params.items()}
        is_same = all(value is eqn.params[key] for key, value in params.items())
        return None if is_same else _NewEquation(eqn.primitive, params)

    def _in_parameter(self, value: Any) -> Any:
        """Returns a parameter of an equation, with replacements in all jaxprs that it holds.

        Returns ``value`` itself if there is nothing to replace.
        """
        if isinstance(value, tuple | list):
            items = [self._in_parameter(item) for item in value]
            is_same = all(item is old for item, old in zip(items, value, strict=True))
            # A named tuple is left alone: it is no list of jaxprs, and its class may not take a
            # list of items.
            is_plain = type(value) in (tuple, list)
            return value if is_same or not is_plain else type(value)(items)
        jaxpr = getattr(value, "jaxpr", value)  # a ClosedJaxpr has an attribute ``jaxpr``
        if not hasattr(jaxpr, "eqns"):  # a number, a sharding or a function, for example
            return value
        if id(value) not in self._jaxprs:
            new = self._in_jaxpr(jaxpr)
            if jaxpr is not value:  # a ClosedJaxpr stays if its jaxpr does
                new = value if new is jaxpr else value.replace(jaxpr=new)
            self._jaxprs[id(value)] = value, new
        _, new = self._jaxprs[id(value)]
        return new

    def _in_jaxpr(self, jaxpr: Any) -> Any:
        """Returns an open jaxpr with replacements in its equations; itself if there are none."""
        replacements = [self.of(eqn) for eqn in jaxpr.eqns]
        if not any(replacements):
            return jaxpr
        # The operands and results of a replaced equation stay, so other equations need no change.
        eqns = [
            eqn if new is None else eqn.replace(primitive=new.primitive, params=new.params)
            for eqn, new in zip(jaxpr.eqns, replacements, strict=True)
        ]
        return jaxpr.replace(eqns=eqns)


def is_grouped(eqn: Any) -> bool:
    """Whether an equation is a convolution with groups of channels or of rows."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    params = eqn.params
    return bool(params["feature_group_count"] > 1 or params["batch_group_count"] > 1)


def _call_of_products(eqn: Any) -> _NewEquation:
    """Returns the replacement for a convolution in a jaxpr: a call of ``as_products``.

    ``eqn`` is the convolution. Its operands and results are those of the call as well.
    """
    out = eqn.outvars[0].aval.sharding  # a sharding on the mesh of the operands
    products: Callable[..., Any] = functools.partial(as_products, **eqn.params)
    explicit = axes_of_type(out.mesh, AxisType.Explicit)
    if explicit:
        # On Explicit axes, JAX has to know the sharding of each intermediate array, and does not
        # know it for slices and reshapes of sharded dimensions. On Auto axes, XLA chooses.
        products = jax.sharding.auto_axes(products, axes=tuple(explicit), out_sharding=out)

    # With `jax.checkpoint`, a gradient of this program makes the slices again, instead of keeping
    # all of them. It does not matter if XLA finds that the forward pass makes equal slices, so
    # barriers are not needed.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def convolution(lhs: object, rhs: object) -> Any:
        return products(lhs, rhs)

    with eqn.ctx.manager:  # the context in which the equation was traced, such as its mesh
        traced = jax.make_jaxpr(jax.jit(convolution))(*(x.aval for x in eqn.invars))
    [call] = traced.jaxpr.eqns  # the only equation is the call of the jitted function
    return _NewEquation(call.primitive, call.params)


def as_products(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
    preferred_element_type: Any,
    **_: Any,
) -> jax.Array:
    """Returns the result of ``jax.lax.conv_general_dilated_p`` with these parameters, by products.

    This either adds up a product for each position of the kernel, or makes a product for each
    position of the output, whichever are fewer. In this function rows come first, then channels,
    then spatial dimensions.

    Args:
      lhs: the input.
      rhs: the kernel.
      window_strides: the distance of windows in the input, for each spatial dimension.
      padding: how many zeros come before and after the input, for each spatial dimension.
      lhs_dilation: the distance that the positions of the input get by zeros between them.
      rhs_dilation: the distance of the positions of one window in the input.
      dimension_numbers: the order of the dimensions of ``lhs``, ``rhs`` and the result.
      feature_group_count: the number of groups of channels.
      batch_group_count: the number of groups of rows.
      precision: that of the products.
      preferred_element_type: the type of the result; None for that of the operands.
    """
    groups = feature_group_count * batch_group_count  # one of the two is 1, or JAX refuses them
    x = lax.transpose(lhs, dimension_numbers.lhs_spec)  # (rows, channels, *spatial)
    # The groups are of rows in the gradient of a kernel, and of channels otherwise.
    x = _split_groups(x, 0 if batch_group_count > 1 else 1, groups)
    # x: (groups, rows, channels, *spatial)
    # For each spatial dimension: how many zeros to add before, after and between its positions. If
    # padding is negative, `lax.pad` cuts positions off, as the convolution does.
    edges = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + edges)
    kernel = lax.transpose(rhs, dimension_numbers.rhs_spec)  # (features, channels, *window)
    kernel = _split_groups(kernel, 0, groups)  # (groups, features, channels, *window)

    features = groups * kernel.shape[1]
    window = kernel.shape[3:]
    outputs = _output_shape(x.shape[3:], window, window_strides, rhs_dilation)
    out_type = preferred_element_type or jnp.result_type(x, kernel)
    # 16-bit types are added up with 32 bits, because a convolution rounds once, and not after each
    # term.
    is_half = jnp.issubdtype(out_type, jnp.floating) and jnp.dtype(out_type).itemsize < 4
    sum_type = jnp.float32 if is_half else out_type
    product = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=sum_type
    )
    terms = _Terms(x, kernel, outputs, window_strides, rhs_dilation, product)
    if 0 in (*outputs, *window):  # the gradient of a convolution without outputs has no window
        out = jnp.zeros((groups, x.shape[1], kernel.shape[1], *outputs), sum_type)
    elif math.prod(window) <= math.prod(outputs):
        # (groups, rows, *outputs, features) → (groups, rows, features, *outputs)
        out = jnp.moveaxis(_sum(terms.of_kernel_position, window), -1, 2)
    else:
        out = _stacked(terms.of_output, outputs)
    # (groups, rows, features, *outputs) → (rows, groups * features, *outputs)
    out = jnp.moveaxis(out, 0, 1).reshape(x.shape[1], features, *outputs).astype(out_type)
    # ``out_spec`` says where rows, features and spatial dimensions go. `lax.transpose` takes the
    # inverse permutation: for each dimension of the result, the number of our dimension.
    out_spec = dimension_numbers.out_spec
    return lax.transpose(out, [out_spec.index(dimension) for dimension in range(out.ndim)])


class _Terms(NamedTuple):
    """The operands of a convolution with groups, which computes the products of their parts."""

    x: jax.Array  # (groups, rows, channels, *spatial), padded
    kernel: jax.Array  # (groups, features, channels, *window)
    outputs: Sequence[int]  # the spatial shape of the result
    strides: Sequence[int]  # the distance of windows in the input
    dilation: Sequence[int]  # the distance of the positions of one window in the input
    product: Callable[..., jax.Array]  # `lax.dot_general` in the type of the sum

    def of_kernel_position(self, position: Sequence[Any]) -> jax.Array:
        """Returns the term that one position of the kernel adds to all outputs.

        ``position`` has an index for each spatial dimension. The indices are tracers in a loop.
        """
        # Position k of the kernel meets the input at k * dilation + t * stride, for all outputs t.
        starts = [index * step for index, step in zip(position, self.dilation, strict=True)]
        part = _slice(self.x, starts, sizes=self.outputs, steps=self.strides)
        # part: (groups, rows, channels, *outputs)
        ones = [1] * len(position)
        kernel = _slice(self.kernel, position, sizes=ones, steps=ones)
        kernel = kernel.reshape(self.kernel.shape[:3])
        # kernel: (groups, features, channels, 1, …) → (groups, features, channels)
        groups, channels = ((0,), (0,)), ((2,), (2,))  # the dimensions of ``part`` and ``kernel``
        # result: (groups, rows, *outputs, features)
        return self.product(part, kernel, dimension_numbers=(channels, groups))

    def of_output(self, position: Sequence[Any]) -> jax.Array:
        """Returns one output: all of a window times all of the kernel.

        ``position`` has an index for each spatial dimension. The indices are tracers in a loop.
        """
        # Output t meets the input at t * stride + k * dilation, for all positions k of the kernel.
        starts = [index * step for index, step in zip(position, self.strides, strict=True)]
        part = _slice(self.x, starts, sizes=self.kernel.shape[3:], steps=self.dilation)
        # part: (groups, rows, channels, *window); kernel: (groups, features, channels, *window)
        channels_and_window = tuple(range(2, part.ndim))  # the dimensions that are summed over
        summed, groups = (channels_and_window, channels_and_window), ((0,), (0,))
        # result: (groups, rows, features)
        return self.product(part, self.kernel, dimension_numbers=(summed, groups))


def _split_groups(x: jax.Array, dimension: int, groups: int) -> jax.Array:
    """Splits one of the first two dimensions: (…, groups * size, …) → (groups, …, size, …)."""
    # The size is computed, because `reshape` of an array without elements cannot take -1.
    size = x.shape[dimension] // groups
    shape = (*x.shape[:dimension], groups, size, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x.reshape(shape), dimension, 0)


def _span(size: int, step: int) -> int:
    """Returns the number of positions from the first to the last of ``size`` in steps.

    Three positions in steps of 2 are 0, 2 and 4, so they span 5 positions.
    """
    return (size - 1) * step + 1


def _output_shape(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Returns the number of outputs in each spatial dimension.

    Args:
      sizes: the spatial shape of the padded input.
      window: the spatial shape of the kernel.
      dilation: the distance of the positions of one window in the input.
    """
    outputs = []
    for size, length, stride, step in zip(sizes, window, strides, dilation, strict=True):
        # A kernel that is larger than its input has no outputs.
        outputs.append(max(0, (size - _span(length, step)) // stride + 1))
    return tuple(outputs)


def _slice(
    x: jax.Array, starts: Sequence[Any], sizes: Sequence[int], steps: Sequence[int]
) -> jax.Array:
    """Returns a strided slice of the spatial dimensions, the last ones of ``x``.

    Args:
      starts: the first position in each spatial dimension: an int, or a tracer in a loop.
      sizes: the number of positions in each spatial dimension.
      steps: the distance of positions in each spatial dimension.
    """
    first_dim = x.ndim - len(sizes)
    slices = zip(starts, sizes, steps, strict=True)
    for d, (start, size, step) in enumerate(slices, start=first_dim):
        span = _span(size, step)
        if not isinstance(start, int):
            # A slice with a traced start cannot have steps. So the whole span is taken first; its
            # size is static.
            x = lax.dynamic_slice_in_dim(x, start, span, axis=d)
            start = 0
        x = lax.slice_in_dim(x, start, start + span, step, axis=d)
    return x


def _sum(term: Callable[[Sequence[Any]], jax.Array], sizes: Sequence[int]) -> jax.Array:
    """Returns the sum of the terms of all positions; a loop adds them if they are many.

    Args:
      term: returns the term of a position, which has one index for each dimension.
    """
    if math.prod(sizes) <= _MAX_UNROLLED:
        terms = map(term, itertools.product(*map(range, sizes)))
        return functools.reduce(operator.add, terms)
    first = term([0] * len(sizes))

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + term(jnp.unravel_index(index, sizes))

    total: jax.Array = lax.fori_loop(1, math.prod(sizes), add, first)
    return total


def _stacked(term: Callable[[Sequence[Any]], jax.Array], sizes: Sequence[int]) -> jax.Array:
    """Returns the terms of all positions, in new last dimensions: (…) → (…, *sizes).

    Args:
      term: returns the term of a position, which has one index for each dimension.
      sizes: the number of positions in each dimension. If they are many, a loop makes the terms.
    """
    # Both branches go through the positions in the same order, in which the last index is fastest.
    if math.prod(sizes) <= _MAX_UNROLLED:
        positions = itertools.product(*map(range, sizes))
        terms = jnp.stack([term(position) for position in positions], axis=-1)
    else:
        numbers = jnp.arange(math.prod(sizes))
        terms = lax.map(lambda number: term(jnp.unravel_index(number, sizes)), numbers)
        terms = jnp.moveaxis(terms, 0, -1)
    return terms.reshape(*terms.shape[:-1], *sizes)  # (…, number of positions) → (…, *sizes)
