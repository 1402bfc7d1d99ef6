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
    """Returns which dimension of each output has the rows, or None.

    The first input with rows decides whose rows can be found in the output.
    """
    name = equation.primitive.name
    # Most operations work on each element, as `_keep` assumes; it asks the shapes, so that others
    # have no rows, unless the sizes happen to be the same.
    move = _MOVES.get(name, _keep)
    if name.startswith("reduce_") or name in ("argmax", "argmin"):
        move = _reduce
    rows_of_output: list[int | None] = []
    for shape in map(shape_of, equation.outvars):  # of several outputs, each by the same rule
        found = None
        for position, dim in enumerate(rows):
            if dim is not None and found is None:
                found = move(equation, position, dim, shape)
                if found is not None and found >= len(shape):
                    found = None  # a rule for another output: this one has fewer dimensions
        rows_of_output.append(found)
    return rows_of_output


def summed_dims(equation: JaxprEqn, rows: Dims) -> Dims | None:
    """Returns the dimension of each input over whose rows an operation sums.

    Args:
      equation: the operation.
      rows: for each input the dimension that has the rows, or None.

    Returns:
      For each input the dimension that is summed over, or None for an input that lacks it. None in
      place of all, if the operation does not sum over rows, or if that is not known.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        # ((1,), (0,)) of a matrix product → (1, 0): the sum goes over both dimensions together. So
        # it is one over rows if either of them has the rows, though the other is not known to.
        for lhs_dim, rhs_dim in zip(*contracted, strict=True):
            if rows[0] == lhs_dim or rows[1] == rhs_dim:
                return (lhs_dim, rhs_dim)
        return None
    if name == "reduce_sum":  # of one input, so the dimension of its rows is all there is to return
        return rows if rows[0] in params["axes"] else None
    if name == "conv_general_dilated":
        # A convolution sums over the input features, (…) of lhs and rhs. In the one that computes
        # the gradient of a kernel, JAX puts the rows of x and of d_y there.
        numbers = params["dimension_numbers"]
        features = numbers.lhs_spec[1], numbers.rhs_spec[1]
        is_summed = params["feature_group_count"] == 1 and features == tuple(rows)
        return features if is_summed else None
    if name == "scatter-add":
        return _scattered_dims(equation, rows)
    return None


def _scattered_dims(equation: JaxprEqn, rows: Dims) -> Dims | None:
    """Returns which dimensions of a scatter's inputs have the rows that are added up, or None.

    The inputs are operand, indices and updates. In the gradient of an embedding, they are the table
    (words, features), indices (rows, positions, 1) and updates (rows, positions, features): these
    give (None, 0, 0). The operand has no rows: all of them add to the same array.
    """
    numbers = equation.params["dimension_numbers"]
    update_rows = rows[2]
    num_dims = len(shape_of(equation.invars[2]))
    # Each index adds a window, such as (features,), so the other dimensions of the updates are
    # those of the indices, in the same order.
    index_dims = [i for i in range(num_dims) if i not in numbers.update_window_dims]
    if update_rows not in index_dims:  # no rows, or in the window: nothing is summed over them
        return None
    rows_of_indices = index_dims.index(update_rows)
    # Along a batching dimension, each row adds to an array of its own in the operand.
    if rows_of_indices in numbers.scatter_indices_batching_dims:
        return None
    return (None, rows_of_indices, update_rows)


# Each of the following functions returns which dimension of an output, of this shape, has the rows
# that input number `position` has in dimension `rows`; None if it has none, or that is not known.


def _keep(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For operations on each element, and those that change other dimensions."""
    before = shape_of(equation.invars[position])
    is_kept = len(shape) == len(before) and shape[rows] == before[rows]
    return rows if is_kept else None


def _reduce(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    axes = equation.params.get("axes", ())
    return None if rows in axes else rows - sum(axis < rows for axis in axes)


def _multiply(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For a product of two inputs, lhs (number 0) and rhs (1).

    Its output has (the batch dimensions, the other ones of lhs, the other ones of rhs). Those that
    are summed over, *contracted*, are in neither.
    """
    contracted_of_both, batched_of_both = equation.params["dimension_numbers"]
    contracted, batched = contracted_of_both[position], batched_of_both[position]
    if rows in batched:
        return batched.index(rows)  # type: ignore[no-any-return]
    lhs_ndim, rhs_ndim = (len(shape_of(operand)) for operand in equation.invars)
    ndim = (lhs_ndim, rhs_ndim)[position]
    others = [i for i in range(ndim) if i not in (*contracted, *batched)]
    if rows not in others:  # they are summed over
        return None
    # Where these begin in the output: for rhs, after the batch dimensions and the others of lhs.
    first = len(batched) if position == 0 else lhs_ndim - len(contracted)
    return first + others.index(rows)


def _transpose(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    return equation.params["permutation"].index(rows)  # type: ignore[no-any-return]


def _broadcast(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    return equation.params["broadcast_dimensions"][rows]  # type: ignore[no-any-return]


def _gather(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For what has rows in its indices, such as an embedding of tokens.

    The inputs are the table (words, features) and indices (rows, positions, 1), whose last
    dimension is one index. The output has a window of the table for each, (rows, positions,
    features), where (features,) is the window.
    """
    if position == 0:  # the table, of which each index may take any row
        return None
    window_dims = equation.params["dimension_numbers"].offset_dims  # of the output
    # The other dimensions of the output are those of the indices, in the same order.
    index_dims = [i for i in range(len(shape)) if i not in window_dims]
    return index_dims[rows] if rows < len(index_dims) else None


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
