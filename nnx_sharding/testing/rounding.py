"""Bounds how far two right computations of one step may be apart, without guessed constants.

Let ``u`` be the unit roundoff of a type (2⁻²⁴ for float32, 2⁻⁸ for bfloat16). Summing ``n`` numbers
in another order changes the sum by independent rounding errors, which add up to about ``u √n`` of
its size (Higham and Mary 2019, for random signs). Types of 16 bits are accumulated in float32 and
rounded when a partial sum is stored, once for each of at most ``d`` devices. So one value differs,
relative to its size, by

    error = u √d + u₃₂ √n        n: longest sum of the traced step, d: devices

with ``u₃₂`` the roundoff of the accumulator. What these errors become downstream depends on the
condition of the step, which is measured, not assumed: the step runs K = 8 times on one device with
each input and each value that modules exchange, and its gradient, changed by ±error. The largest
change of an array is a sample with an unknown standard deviation; K samples estimate it as s. The
mesh draws one more sample, so its distance over s follows Student's t with K degrees of freedom:

    limit = error · max|x| + t s        t = 6.44, exceeded with probability 0.0002

The first term is the array's own last sum. The second is large where the step is ill-conditioned:
Adam divides a gradient by its size, so one near zero can move a parameter by a whole step.

The types of the values that modules exchange say which precision is meant. A cast to bfloat16
inside a module does not raise the limit, because a sum in a lower precision has to be found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat

SAMPLES = 8
# The quantile of Student's t with 8 degrees of freedom (one for each sample) at 0.9999, two-sided
# 0.0002.
QUANTILE = 6.442


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The sizes of the rounding errors of a step's arrays."""

    longest_sum: int  # the number of terms in the longest sum of the step
    devices: int  # the number of devices of the mesh
    # The user's relative tolerance, which replaces the error of an array's own last sum.
    tolerance: float | None = None

    @classmethod
    def of(cls, jaxpr: Any, devices: int, tolerance: float | None) -> Self:
        """Reads the longest sum from the jaxpr of the step on one device."""
        return cls(max(_sums(jaxpr), default=1), devices, tolerance)

    def relative(self, dtype: Any) -> float:
        """Returns the error of one value relative to its size; 0 for exact types."""
        if not jnp.issubdtype(dtype, jnp.inexact):
            return 0.0
        unit = _unit(dtype)
        accumulator = min(unit, _unit(np.dtype("float32")))
        return unit * math.sqrt(self.devices) + accumulator * math.sqrt(self.longest_sum)

    def of_array(self, x: Any) -> float:
        """Returns the error of an array's own last sum, as an absolute number; 0 for exact types.

        It is the relative error, or the user's tolerance, times the size of the largest element.
        Infinities, NaN, and numbers that stand for infinity, such as ``finfo.min`` in masks, do not
        count as the largest element, because any error of the other elements would be allowed then.
        """
        if not is_inexact(x):
            return 0.0
        relative = self.relative(x.dtype) if self.tolerance is None else self.tolerance
        wide = np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)
        sizes = np.abs(wide)
        most = float(jnp.finfo(x.dtype).max) / 2  # type: ignore[no-untyped-call]
        return float(relative * sizes.max(initial=0, where=sizes < most))


def rounded(x: jax.Array, error: jax.Array) -> jax.Array:
    """Returns an array whose elements are changed by ±error of their size.

    An error of 0 changes nothing. A small element may be the difference of large terms, so its size
    counts as at least the mean size of all elements. Two kinds of elements stay as they are: zeros,
    because they are masked or padded more often than computed; and numbers that stand for infinity,
    such as ``finfo.min`` in masks, because they would become infinite, and would make the mean
    infinite.

    The signs are a hash of the elements, so no random state has to be passed. The inputs of each
    run differ by their errors, so the signs differ as well.
    """
    size = jnp.abs(x)
    # A number of this size or more stands for infinity.
    most = min(float(jnp.finfo(x.dtype).max) / 4, 1e30)  # type: ignore[no-untyped-call]
    size = jnp.where(size < most, size, 0)  # 0 for elements that stay as they are
    scale = jnp.where(size == 0, 0, jnp.maximum(size, size.mean()))
    # The bits of the real part of a complex number are enough for a sign.
    bits = jax.lax.bitcast_convert_type(jnp.real(x).astype(jnp.float32), jnp.uint32)
    # Multiplicative hashing (Knuth): the highest bit depends on all others.
    mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x9E3779B1)
    signs = jnp.where(mixed >> 31 == 0, 1.0, -1.0)
    return jnp.where(error == 0, x, (x + error * signs * scale).astype(x.dtype))


def is_inexact(x: Any) -> bool:
    """Whether an array has numbers that are rounded."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _unit(dtype: Any) -> float:
    """Returns the unit roundoff: half of the distance from 1 to the next number."""
    return float(jnp.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]


def _sums(jaxpr: Any) -> Iterator[int]:
    """Yields how many terms each sum in a jaxpr has: 8 for the product of (4, 8) and (8, 2).

    In a ``scan`` of length 10 this product counts as 80, because the gradient of a value that all
    iterations use is a sum over the iterations. A ``while`` loop counts as one iteration, because
    the number of its iterations is not known.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        # The shape of the first operand; () if the equation has no operand.
        shape = getattr(equation.invars[0].aval, "shape", ()) if equation.invars else ()
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]  # dimensions of the first operand
            yield math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            # The number of the kernel's elements bounds the number of terms.
            yield math.prod(equation.invars[1].aval.shape)
        elif name in ("reduce_sum", "cumsum", "scatter-add"):
            # The number of the operand's elements bounds the terms of a sum. For scatter-add it is
            # a guess.
            yield math.prod(shape)
        iterations = params.get("length", 1) if name == "scan" else 1
        for inner in _compat.jaxprs_of(equation):
            yield from (iterations * count for count in _sums(inner))
