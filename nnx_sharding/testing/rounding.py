"""How far two right computations of one step may be apart: a bound without guessed constants.

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

Values that modules exchange say what precision is meant. A cast to bfloat16 between them is no
reason for more: this is how a sum in a lower precision is found.
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
QUANTILE = 6.442  # of Student's t with 8 degrees of freedom at 0.9999, two-sided 0.0002


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The relative rounding errors of a step."""

    longest_sum: int
    devices: int
    tolerance: float | None = None  # of the user, instead of that of an array's own last sum

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
        """Returns the error of an array's own last sum, relative to its largest element.

        Infinities, NaN, and numbers that stand for infinity, such as ``finfo.min`` in masks,
        do not count: with them any error of the others would be allowed.
        """
        if not is_inexact(x):
            return 0.0
        relative = self.relative(x.dtype) if self.tolerance is None else self.tolerance
        wide = np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)
        sizes = np.abs(wide)
        most = float(jnp.finfo(x.dtype).max) / 2  # type: ignore[no-untyped-call]
        return float(relative * sizes.max(initial=0, where=sizes < most))


def rounded(x: jax.Array, error: jax.Array) -> jax.Array:
    """Returns an array whose elements are changed by ±error of their size; as it is if that is 0.

    A small element may be what is left of large terms, so its size counts as at least the mean of
    all. Two kinds of elements stay as they are: zeros, which are masked or padded more often than
    computed; and numbers that stand for infinity, such as ``finfo.min`` in masks, which would
    become infinite, and would make the mean infinite.

    The signs are a hash of the elements. As the inputs of each run differ by their errors, so do
    the signs, and no random state has to be passed.
    """
    size = jnp.abs(x)
    # From here on, a number stands for infinity.
    most = min(float(jnp.finfo(x.dtype).max) / 4, 1e30)  # type: ignore[no-untyped-call]
    size = jnp.where(size < most, size, 0)  # 0 for what stays
    scale = jnp.where(size == 0, 0, jnp.maximum(size, size.mean()))
    # Of a complex number, the bits of its real part are enough.
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

    In a ``scan`` of length 10 it is 80, since the gradient of what all iterations use is a sum over
    them. A ``while`` loop counts as one iteration, as its number is not known.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        # Of the first operand.
        shape = getattr(equation.invars[0].aval, "shape", ()) if equation.invars else ()
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]  # dimensions of the first operand
            yield math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            yield math.prod(equation.invars[1].aval.shape)  # of the kernel: a bound
        elif name in ("reduce_sum", "cumsum", "scatter-add"):
            yield math.prod(shape)  # at most; for scatter-add, a guess: as many as it has elements
        iterations = params.get("length", 1) if name == "scan" else 1
        for inner in _compat.jaxprs_of(equation):
            yield from (iterations * count for count in _sums(inner))
