"""Figures of a traced program by the definitions of its operations: a slow interpreter.

It knows nothing of HLO, nor of the reader in `nnx_sharding.analysis`: loops are run, and windows
are looked at element by element. It counts what one device does: within a `shard_map`, arrays have
the shapes of shards. `NotDefined` is raised where the figures depend on values, or on an algorithm.

    flops            operations on pairs of real numbers: 2·m·k·n for a product, n - 1 for a sum
    transcendentals  exponentials, roots and the like
    accessed         the bytes of operands and results, each operation by itself; slices, and
                     updates in place, count what they touch
    sent             the bytes that a ring of devices sends
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp


class NotDefined(Exception):
    """The figures of an operation follow from no definition."""


class Figures(NamedTuple):
    flops: float = 0
    transcendentals: float = 0
    accessed: float = 0
    sent: float = 0

    def plus(self, other, times=1):
        return Figures(*(a + times * b for a, b in zip(self, other, strict=True)))


ELEMENTWISE = {"abs", "add", "and", "ceil", "clamp", "convert_element_type", "div", "eq", "floor"}
ELEMENTWISE |= {"ge", "gt", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "round"}
ELEMENTWISE |= {"select_n", "sign", "sub", "xor"}
TRANSCENDENTAL = {"cos", "exp", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "sqrt", "tanh"}
# Real operations for one of complex numbers.
COMPLEX = {"add": 2, "sub": 2, "neg": 2, "mul": 6}
MOVES = {"broadcast_in_dim", "concatenate", "copy", "pad", "rev", "transpose"}
SLICES = {"dynamic_slice", "gather", "slice"}
REDUCTIONS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul"}
FREE = {"axis_index", "expand_dims", "iota", "optimization_barrier", "pvary", "pcast", "reshape"}
FREE.add("squeeze")


def figures_of(jaxpr, sizes):
    """Sums the figures of the equations of a jaxpr; ``sizes`` are those of mesh axes by name."""
    total = Figures()
    for equation in jaxpr.eqns:
        total = total.plus(_of_equation(equation, sizes))
    return total


def _of_equation(equation, sizes):
    name, params = equation.primitive.name, equation.params
    inputs, outputs = ([x.aval for x in side] for side in (equation.invars, equation.outvars))
    if name == "scan":
        body = figures_of(params["jaxpr"].jaxpr, sizes)
        total = Figures()
        for _ in range(params["length"]):
            total = total.plus(body)
        return total
    if name == "while":
        raise NotDefined("how often a loop runs depends on values")
    if name == "cond":
        return max((figures_of(x.jaxpr, sizes) for x in params["branches"]), key=lambda x: x.flops)
    if inner := params.get("jaxpr") or params.get("call_jaxpr"):  # jit, shard_map, custom_jvp_call
        return figures_of(getattr(inner, "jaxpr", inner), sizes)
    if name in FREE:
        return Figures()
    read = {id(x): x.aval for x in equation.invars}.values()  # one that is given twice, once
    moved = sum(map(_bytes, (*read, *outputs)))
    if name in MOVES:
        return Figures(accessed=moved)
    if name in SLICES:
        indices = sum(map(_bytes, inputs[1:]))
        return Figures(accessed=2 * _bytes(outputs[0]) + indices)
    if name == "dynamic_update_slice":
        return Figures(accessed=2 * _bytes(inputs[1]))
    if name in ("scatter", "scatter-add"):
        _, indices, updates = inputs
        adds = name == "scatter-add"
        flops = _count(updates) * _per_element("add", updates) if adds else 0
        return Figures(flops, accessed=(3 if adds else 2) * _bytes(updates) + _bytes(indices))
    if name in COLLECTIVES:
        pairs = [*zip(inputs, outputs, strict=True)]
        group = math.prod(sizes[axis] for axis in _axes(params))
        flops = sum(_count(x) * _per_element("add", x) for x in outputs) if name in SUMS else 0
        sent = sum(COLLECTIVES[name](_bytes(x), _bytes(y), group) for x, y in pairs)
        return Figures(flops, accessed=moved, sent=sent)
    flops, transcendentals = _computed(name, params, inputs, outputs)
    return Figures(flops, transcendentals, moved)


def _computed(name, params, inputs, outputs):
    """Counts the flops and the transcendentals of an operation."""
    out = outputs[0]
    if name in ELEMENTWISE:
        return _count(out) * _per_element(name, inputs[-1]), 0
    if name in TRANSCENDENTAL:
        return 0, _count(out)
    if name == "square":
        return _count(out) * _per_element("mul", out), 0
    if name in REDUCTIONS:
        joined = _count(inputs[0]) - _count(out)
        return joined * _per_element(REDUCTIONS[name], out), 0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = inputs[0].shape
        summed = math.prod(shape[d] for d in contracted)
        return 2 * (4 if _is_complex(out) else 1) * _count(out) * summed, 0
    if name == "conv_general_dilated":
        return _convolution(params, *(x.shape for x in (*inputs, out))), 0
    if name in ("reduce_window_max", "reduce_window_sum"):
        return _joined_in_windows(params, inputs[0].shape, out.shape), 0
    if name in ("sort", "top_k"):
        shape = inputs[0].shape
        row = shape[params.get("dimension", -1)]
        return _count(inputs[0]) * math.ceil(math.log2(row)), 0
    if name == "fft":
        points = math.prod(params["fft_lengths"])
        rows = _count(max(inputs[0], out, key=_count)) / points
        is_real = "RFFT" in str(params["fft_type"])
        if is_real:
            rows = round(rows)
        return (2.5 if is_real else 5) * rows * points * math.log2(points), 0
    raise NotDefined(name)


def _convolution(params, lhs, rhs, out):
    """Multiplies each element of the kernel with each of the image below it, and adds it up."""
    numbers = params["dimension_numbers"]
    spatial = len(lhs) - 2
    pairs = 1
    for axis in range(spatial):
        size, kernel, count = (
            shape[spec[axis + 2]]
            for shape, spec in (
                (lhs, numbers.lhs_spec),
                (rhs, numbers.rhs_spec),
                (out, numbers.out_spec),
            )
        )
        pairs *= sum(
            _is_element(
                i * params["window_strides"][axis]
                + k * params["rhs_dilation"][axis]
                - params["padding"][axis][0],
                size,
                params["lhs_dilation"][axis],
            )
            for i, k in itertools.product(range(count), range(kernel))
        )
    features = rhs[numbers.rhs_spec[1]] * out[numbers.out_spec[1]]
    return 2 * pairs * features * out[numbers.out_spec[0]]


def _is_element(place, size, dilation):
    return place >= 0 and place % dilation == 0 and place // dilation < size


def _joined_in_windows(params, shape, out):
    """Joins the elements of each window, one by one."""
    joined = 0
    for corner in itertools.product(*map(range, out)):
        elements = 1
        for axis, start in enumerate(corner):
            places = (
                start * params["window_strides"][axis]
                + k * params["window_dilation"][axis]
                - params["padding"][axis][0]
                for k in range(params["window_dimensions"][axis])
            )
            elements *= sum(
                _is_element(place, shape[axis], params["base_dilation"][axis]) for place in places
            )
        joined += max(elements - 1, 0)
    return joined


# The bytes that a device sends, of (operand, result, devices of a group).
COLLECTIVES = {
    "psum": lambda x, y, n: 2 * x * (n - 1) / n,
    "psum_invariant": lambda x, y, n: 2 * x * (n - 1) / n,
    "pmax": lambda x, y, n: 2 * x * (n - 1) / n,
    "all_gather": lambda x, y, n: y * (n - 1) / n,
    "all_to_all": lambda x, y, n: x * (n - 1) / n,
    "reduce_scatter": lambda x, y, n: x * (n - 1) / n,
    "ppermute": lambda x, y, n: x,
}
SUMS = {"psum", "psum_invariant", "pmax"}


def _axes(params):
    axes = params.get("axes", params.get("axis_name"))
    return axes if isinstance(axes, tuple) else (axes,)


def _count(aval):
    return math.prod(aval.shape)


def _bytes(aval):
    return _count(aval) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


def _is_complex(aval):
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _per_element(name, aval):
    return COMPLEX.get(name, 1) if _is_complex(aval) else 1
