"""Which dimension of an array has the rows of a batch, found from one operation to the next.

An operation is an equation of a jaxpr. Of each of its inputs it is known which dimension has the
rows, or None for an array without rows; in that order these are the ``rows`` of the functions
here. `rows_of_outputs` says the same of the outputs, and `summed_dims` which dimension of each
input the operation sums over, if that is the one with the rows:

    dot_general   x (rows, features), w (features, outputs)   → (rows, outputs), rows = 0
    dot_general   x (rows, features), d_y (rows, outputs)     → (features, outputs), a sum over rows

Shapes decide where the parameters of an operation do not say it. That may be wrong, as where two
dimensions have the same size, so only what is right for any dimension may depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

# For each input of an operation a dimension; None if it has none.
Dims: TypeAlias = Sequence[int | None]
Shape: TypeAlias = tuple[int, ...]


def shape_of(variable: Var | Literal) -> Shape:
    """Returns the shape of an input or an output of an operation."""
    shape: Shape = getattr(variable.aval, "shape", ())
    return shape


def rows_of_outputs(equation: JaxprEqn, rows: Dims) -> list[int | None]:
    """Returns which dimension of each output has the rows: those of the first input that tells."""
    name = equation.primitive.name
    move = _MOVES.get(name, _keep)
    if name.startswith("reduce_") or name in ("argmax", "argmin"):
        move = _reduce
    outputs = []
    for shape in map(shape_of, equation.outvars):
        moved = (
            move(equation, position, dim, shape)
            for position, dim in enumerate(rows)
            if dim is not None
        )
        outputs.append(next((dim for dim in moved if dim is not None and dim < len(shape)), None))
    return outputs


def summed_dims(equation: JaxprEqn, rows: Dims) -> Dims | None:
    """Returns the dimension of each input over whose rows an operation sums.

    None if it does not, and for an operation of which that is not known.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _) = params["dimension_numbers"]
        # Pairs of dimensions, one of each operand, over which the product sums.
        pairs = zip(*contracted, strict=True)
        return next((pair for pair in pairs if rows[0] == pair[0] or rows[1] == pair[1]), None)
    if name == "reduce_sum":
        return rows if rows[0] in params["axes"] else None
    if name == "conv_general_dilated":
        # The rows are the input features of a convolution that returns a kernel's gradient.
        numbers = params["dimension_numbers"]
        features = numbers.lhs_spec[1], numbers.rhs_spec[1]
        is_summed = params["feature_group_count"] == 1 and features == tuple(rows)
        return features if is_summed else None
    if name == "scatter-add":
        return _scattered_dims(equation, rows)
    return None


def _scattered_dims(equation: JaxprEqn, rows: Dims) -> Dims | None:
    """Returns the dimensions of the rows in the operand, indices and updates of a scatter.

    The operand has none: what all rows add to is the same array.
    """
    numbers = equation.params["dimension_numbers"]
    num_dims = len(shape_of(equation.invars[2]))  # of the updates
    # The dimensions of the updates that are no window are those of the indices, in order.
    others = [i for i in range(num_dims) if i not in numbers.update_window_dims]
    if rows[2] not in others:
        return None
    index = others.index(rows[2])
    is_batched = index in numbers.scatter_indices_batching_dims  # then each row has its own array
    return None if is_batched else (None, index, rows[2])


# Each of the following functions returns which dimension of the output has the rows that input
# number `position` has in dimension `rows`; None if the output has none, or if that is not known.


def _keep(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For operations on each element, and those that change other dimensions."""
    before = shape_of(equation.invars[position])
    is_kept = len(shape) == len(before) and shape[rows] == before[rows]
    return rows if is_kept else None


def _reduce(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    axes = equation.params.get("axes", ())
    return None if rows in axes else rows - sum(axis < rows for axis in axes)


def _multiply(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For a product, of shape (batch dimensions, other ones of lhs, other ones of rhs)."""
    ndims = [len(shape_of(operand)) for operand in equation.invars]
    contracted, batched = (dims[position] for dims in equation.params["dimension_numbers"])
    if rows in batched:
        return batched.index(rows)  # type: ignore[no-any-return]
    others = [i for i in range(ndims[position]) if i not in (*contracted, *batched)]
    if rows not in others:
        return None
    # Those of rhs are behind all that lhs has, but for what is summed over.
    first = len(batched) if position == 0 else ndims[0] - len(contracted)
    return first + others.index(rows)


def _transpose(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    return equation.params["permutation"].index(rows)  # type: ignore[no-any-return]


def _broadcast(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    return equation.params["broadcast_dimensions"][rows]  # type: ignore[no-any-return]


def _gather(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For what has rows in its indices, as an embedding of tokens."""
    if position == 0:  # the operand, of which each index may take any row
        return None
    offsets = equation.params["dimension_numbers"].offset_dims
    # The dimensions of the output that are no window are those of the indices, in order.
    others = [i for i in range(len(shape)) if i not in offsets]
    return others[rows] if rows < len(others) else None


def _reshape(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For (…, rows, features) → (…, rows · features), and the like."""
    before = shape_of(equation.invars[position])
    # As many elements are before the rows, which may have been joined with what follows.
    size = math.prod(before[:rows])
    same = (i for i in range(len(shape)) if math.prod(shape[:i]) == size)
    return next((i for i in same if shape[i] % before[rows] == 0), None)


_MOVES: dict[str, Callable[[JaxprEqn, int, int, Shape], int | None]] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _multiply,
    "gather": _gather,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
}
