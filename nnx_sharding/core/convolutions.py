"""Grouped convolutions as products, because XLA partitions them wrong.

Drawn at random, one in twenty grouped convolutions of which XLA shards features, windows or groups
has wrong values or does not compile. The gradients of many programs have such ones: that of the
kernel of a grouped convolution, of any kernel for each example of a batch, and of a convolution
that a pipeline maps over its stages. Ungrouped convolutions and products are partitioned right.

So when a trace ends, XLA gets no grouped convolution to partition: each is replaced by one of two
sums, whichever has fewer terms (positions k of the kernel in a forward pass, positions t of the
output for the gradient of a kernel), with groups g, rows n, and channels i and o:

    out[n, g, o, t] = sum over k of  lhs[n, g, i, t * stride + k * dilation] · rhs[g, o, i, k]
    out[.., t] for each t            = lhs[n, g, i, t * stride + all k * dilation] · rhs[g, o, i, k]

Each term is a strided slice and one product, with the groups as a batch dimension. The *window* is
the spatial shape of the kernel, and its *span* the positions of the input from first to last.
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

# More terms than these run in a loop, so that the program stays small.
_MAX_UNROLLED = 64


class _NewEquation(NamedTuple):
    """What an equation of a jaxpr gets instead of its own primitive; its operands stay."""

    primitive: Primitive
    params: dict[str, Any]


class _ReplacedJaxpr(NamedTuple):
    """A jaxpr that was met before, kept alive so that its id stays, and what replaces it."""

    old: Any
    new: Any


class Replacements:
    """Replaces grouped convolutions in the equations of a trace, at any depth.

    ``axes`` are those of the mesh that have several devices.
    """

    def __init__(self, axes: frozenset[AxisName]):
        self._axes = axes
        self._jaxprs: dict[int, _ReplacedJaxpr] = {}  # by the id of the old one: layers share many

    def of(self, eqn: Any) -> _NewEquation | None:
        """Returns the primitive and parameters that replace an equation's; None to keep them."""
        if is_grouped(eqn):
            meshes: Any = (eqn.invars[0].aval.sharding.mesh, eqn.ctx.cur_abstract_mesh)
            manual = frozenset().union(*(axes_of_type(mesh, AxisType.Manual) for mesh in meshes))
            # XLA does not partition over Manual axes.
            return _call_of_products(eqn) if self._axes - manual else None
        params = {key: self._in_parameter(value) for key, value in eqn.params.items()}
        is_same = all(value is eqn.params[key] for key, value in params.items())
        return None if is_same else _NewEquation(eqn.primitive, params)

    def _in_parameter(self, value: object) -> Any:
        """Returns a parameter of an equation, with replacements in the jaxprs that it holds."""
        if isinstance(value, tuple | list):
            items = [self._in_parameter(item) for item in value]
            is_same = all(item is old for item, old in zip(items, value, strict=True))
            is_plain = type(value) in (tuple, list)
            return value if is_same or not is_plain else type(value)(items)
        jaxpr = getattr(value, "jaxpr", value)  # open, or in a ClosedJaxpr
        if not hasattr(jaxpr, "eqns"):
            return value
        if id(value) not in self._jaxprs:
            self._jaxprs[id(value)] = _ReplacedJaxpr(value, self._in_jaxpr(value, jaxpr))
        return self._jaxprs[id(value)].new

    def _in_jaxpr(self, value: Any, jaxpr: Any) -> Any:
        """Returns a jaxpr with replacements; ``value`` is the same, or what closes it."""
        replacements = [self.of(eqn) for eqn in jaxpr.eqns]
        if not any(replacements):
            return value
        eqns = [
            eqn if new is None else eqn.replace(primitive=new.primitive, params=new.params)
            for eqn, new in zip(jaxpr.eqns, replacements, strict=True)
        ]
        replaced = jaxpr.replace(eqns=eqns)
        return replaced if jaxpr is value else value.replace(jaxpr=replaced)


def is_grouped(eqn: Any) -> bool:
    """Whether an equation is a convolution with groups of channels or of rows."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    params = eqn.params
    return bool(params["feature_group_count"] > 1 or params["batch_group_count"] > 1)


def _call_of_products(eqn: Any) -> _NewEquation:
    """Returns what replaces a convolution in a jaxpr: a call of ``as_products``."""
    out = eqn.outvars[0].aval.sharding
    products: Callable[..., Any] = functools.partial(as_products, **eqn.params)
    if explicit := axes_of_type(out.mesh, AxisType.Explicit):
        # JAX cannot type slices and reshapes of what is sharded; XLA follows the operands.
        products = jax.sharding.auto_axes(products, axes=tuple(explicit), out_sharding=out)

    # The slices are not kept for a gradient of this program.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def convolution(lhs: object, rhs: object) -> Any:
        return products(lhs, rhs)

    with eqn.ctx.manager:
        traced = jax.make_jaxpr(jax.jit(convolution))(*(x.aval for x in eqn.invars))
    [call] = traced.jaxpr.eqns  # of the `jax.jit`
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
    """Computes what ``jax.lax.conv_general_dilated_p`` does with these parameters, by products.

    Either it adds up a product for each position of the kernel, or it makes one for each position
    of the output, whichever are fewer. ``dimension_numbers`` has the order of the dimensions of
    both operands and of the result; here rows come first, then channels, then spatial ones.
    """
    groups = feature_group_count * batch_group_count  # JAX refuses two that are not 1
    x = lax.transpose(lhs, dimension_numbers.lhs_spec)  # (rows, channels, *spatial)
    x = _split_groups(x, 0 if batch_group_count > 1 else 1, groups)
    # x: (groups, rows, channels, *spatial)
    # Of each dimension: what to add before, after and between its positions.
    edges = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + edges)
    kernel = lax.transpose(rhs, dimension_numbers.rhs_spec)  # (features, channels, *window)
    kernel = _split_groups(kernel, 0, groups)  # (groups, features, channels, *window)

    features = groups * kernel.shape[1]
    window = kernel.shape[3:]
    spans = map(_span, window, rhs_dilation)
    sizes = zip(x.shape[3:], spans, window_strides, strict=True)
    # There are no outputs for a kernel that is larger than its input.
    outputs = tuple(max(0, (size - span) // stride + 1) for size, span, stride in sizes)
    out_type = preferred_element_type or jnp.result_type(x, kernel)
    # A convolution rounds once, not after each term.
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
    out_spec = dimension_numbers.out_spec
    return lax.transpose(out, [out_spec.index(dimension) for dimension in range(out.ndim)])


class _Terms(NamedTuple):
    """The products that a convolution with groups is the sum, or the list, of."""

    x: jax.Array  # (groups, rows, channels, *spatial), padded
    kernel: jax.Array  # (groups, features, channels, *window)
    outputs: Sequence[int]  # the spatial shape of the result
    strides: Sequence[int]  # the distance of windows in the input
    dilation: Sequence[int]  # the distance of the positions of one window in the input
    product: Callable[..., jax.Array]  # `lax.dot_general` in the type of the sum

    def of_kernel_position(self, position: Sequence[Any]) -> jax.Array:
        """Returns what one position of the kernel adds to all outputs."""
        starts = [index * step for index, step in zip(position, self.dilation, strict=True)]
        part = _slice(self.x, starts, self.outputs, self.strides)
        # part: (groups, rows, channels, *outputs)
        ones = [1] * len(position)
        kernel = _slice(self.kernel, position, ones, ones).reshape(self.kernel.shape[:3])
        # kernel: (groups, features, channels); result: (groups, rows, *outputs, features)
        contracted, batched = ((2,), (2,)), ((0,), (0,))
        return self.product(part, kernel, (contracted, batched))

    def of_output(self, position: Sequence[Any]) -> jax.Array:
        """Returns one output: all of a window times all of the kernel."""
        starts = [index * step for index, step in zip(position, self.strides, strict=True)]
        part = _slice(self.x, starts, self.kernel.shape[3:], self.dilation)
        # part: (groups, rows, channels, *window); result: (groups, rows, features)
        summed = tuple(range(2, part.ndim))
        contracted, batched = (summed, summed), ((0,), (0,))
        return self.product(part, self.kernel, (contracted, batched))


def _split_groups(x: jax.Array, dimension: int, groups: int) -> jax.Array:
    """Splits one of the first two dimensions: (…, groups * size, …) → (groups, …, size, …)."""
    # Not -1, which an array without elements cannot have.
    size = x.shape[dimension] // groups
    shape = (*x.shape[:dimension], groups, size, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x.reshape(shape), dimension, 0)


def _span(size: int, step: int) -> int:
    """Returns the number of positions from the first to the last of ``size`` ones in steps."""
    return (size - 1) * step + 1


def _slice(
    x: jax.Array, starts: Sequence[Any], sizes: Sequence[int], steps: Sequence[int]
) -> jax.Array:
    """Returns a strided slice of the spatial dimensions, the last ones of ``x``.

    Args:
      x: the array.
      starts: the first position in each of these dimensions; a tracer in a loop.
      sizes: the number of positions in each.
      steps: their distances.
    """
    spans = map(_span, sizes, steps)
    first = x.ndim - len(sizes)
    for d, (start, span, step) in enumerate(zip(starts, spans, steps, strict=True), start=first):
        if not isinstance(start, int):  # only the span is static
            x = lax.dynamic_slice_in_dim(x, start, span, axis=d)
            start = 0
        x = lax.slice_in_dim(x, start, start + span, step, axis=d)
    return x


def _sum(term: Callable[[Sequence[Any]], jax.Array], sizes: Sequence[int]) -> jax.Array:
    """Returns the sum of the terms of all positions; adds them in a loop if they are many.

    Args:
      term: returns the term of a position, one index for each dimension.
      sizes: the number of positions in each dimension.
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

    The arguments are those of :func:`_sum`.
    """
    if math.prod(sizes) <= _MAX_UNROLLED:
        terms = jnp.stack([*map(term, itertools.product(*map(range, sizes)))], -1)
    else:
        positions = jnp.arange(math.prod(sizes))
        terms = jnp.moveaxis(lax.map(lambda i: term(jnp.unravel_index(i, sizes)), positions), 0, -1)
    return terms.reshape(*terms.shape[:-1], *sizes)
