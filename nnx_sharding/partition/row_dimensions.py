"""Finds the dimension of an array that has the rows of a batch, from one operation to the next.

An operation is an equation of a jaxpr. The argument ``rows`` of the functions below has an entry
for each input of an operation: the dimension that has the rows, or None for an array without rows.
`rows_of_outputs` returns the same for the outputs. `summed_dims` returns the dimension of each
input that the operation sums over, if that dimension has the rows:

    dot_general   x (rows, features), w (features, outputs)   → (rows, outputs), rows = 0
    dot_general   x (rows, features), d_y (rows, outputs)     → (features, outputs), a sum over rows

If the parameters of an operation do not tell the dimension, shapes decide. Their answer may be
wrong, for example if two dimensions have the same size, so callers may only use it where any
dimension gives right results.

Each private function is the rule of some operations. It gets the equation, the ``position`` of one
of its inputs, the dimension ``rows`` that has the rows in this input, and the ``shape`` of an
output. It returns the dimension that has the rows in the output; None if there is none, or if it is
not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

# A dimension for each input of an operation; None for an input without such a dimension.
Dims: TypeAlias = Sequence[int | None]
Shape: TypeAlias = tuple[int, ...]

# Operations that run a program once on their own inputs: calls, recomputations, and functions with
# derivatives of their own. Releases of JAX have different names for them.
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call"))
REMAT = frozenset(("checkpoint", "remat", "remat2"))
_WITH_RULES = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"))


def shape_of(variable: Var | Literal) -> Shape:
    """Returns the shape of an input or an output of an operation."""
    shape: Shape = getattr(variable.aval, "shape", ())
    return shape


def rows_of_outputs(equation: JaxprEqn, rows: Dims) -> list[int | None]:
    """Returns the dimension of each output that has the rows; None if it is not known.

    Inputs with rows are tried in their order, and the first answer counts. The rows are followed
    through a program that an operation calls, because its outputs may have other dimensions, as
    those of ``jnp.take`` (in ``nnx.Embed``) and ``jax.nn.one_hot``, which JAX jits.
    """
    name = equation.primitive.name
    if name == "scan":
        return _rows_of_scan(equation, rows)
    program = _program_of(equation)
    if program is not None:
        return _rows_of_program(program, rows)
    # `_keep` is for operations on each element, as most are. It compares shapes, so the outputs of
    # other operations have no rows, unless sizes happen to be the same.
    move = _MOVES.get(name, _keep)
    if name.startswith("reduce_") or name in ("argmax", "argmin"):
        move = _reduce
    rows_of_output: list[int | None] = []
    for shape in map(shape_of, equation.outvars):
        output_dim = None
        for position, dim in enumerate(rows):
            if dim is not None and output_dim is None:
                output_dim = move(equation, position, dim, shape)
                # The rule is the same for all outputs, but an output may have fewer dimensions.
                if output_dim is not None and output_dim >= len(shape):
                    output_dim = None
        rows_of_output.append(output_dim)
    return rows_of_output


def _program_of(equation: JaxprEqn) -> Jaxpr | None:
    """Returns the program that an operation runs once on its own inputs; None for all others."""
    if equation.primitive.name not in CALLS | REMAT | _WITH_RULES:
        return None
    params = equation.params
    program = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    return getattr(program, "jaxpr", program)


def _rows_of_program(jaxpr: Jaxpr, rows: Dims) -> list[int | None]:
    """Returns `rows_of_outputs` of a whole program; ``rows`` is for its inputs."""
    row_dims: dict[Var, int | None] = dict(zip(jaxpr.invars, rows, strict=True))

    def read(atoms: Sequence[Var | Literal]) -> list[int | None]:
        # Literals and constants of the program have no rows.
        return [None if isinstance(x, Literal) else row_dims.get(x) for x in atoms]

    for equation in jaxpr.eqns:
        outputs = rows_of_outputs(equation, read(equation.invars))
        row_dims.update(zip(equation.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def _rows_of_scan(equation: JaxprEqn, rows: Dims) -> list[int | None]:
    """Returns `rows_of_outputs` of a ``scan``: what its body returns in the first step.

    A scanned input and a stacked output have one dimension more outside of the body, in front.
    """
    body: Jaxpr = equation.params["jaxpr"].jaxpr
    rows_in_body: list[int | None] = []
    for variable, inner, dim in zip(equation.invars, body.invars, rows, strict=True):
        is_scanned = len(shape_of(variable)) > len(shape_of(inner))
        # If the scan loops over the rows, a step has none.
        rows_in_body.append((dim - 1 if dim else None) if is_scanned else dim)
    outputs = _rows_of_program(body, rows_in_body)
    rows_of_output: list[int | None] = []
    for output, inner_output, dim in zip(equation.outvars, body.outvars, outputs, strict=True):
        is_stacked = len(shape_of(output)) > len(shape_of(inner_output))
        rows_of_output.append(dim + 1 if is_stacked and dim is not None else dim)
    return rows_of_output


def summed_dims(equation: JaxprEqn, rows: Dims) -> Dims | None:
    """Returns the dimension of each input that an operation sums over, if it sums over rows.

    Args:
      equation: the operation.
      rows: for each input the dimension that has the rows, or None.

    Returns:
      For each input the dimension that is summed over, or None for an input that lacks it. The
      result is None if the operation does not sum over rows, or if that is not known.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        # A matrix product has the contracted dimensions ((1,), (0,)) → (1, 0), and its sum goes
        # over both together. So it is a sum over rows even if only one of the two is known to have
        # the rows.
        for lhs_dim, rhs_dim in zip(*contracted, strict=True):
            if rows[0] == lhs_dim or rows[1] == rhs_dim:
                return (lhs_dim, rhs_dim)
        return None
    if name == "reduce_sum":
        # There is one input, so `rows` is the answer: one entry, the dimension of its rows.
        return rows if rows[0] in params["axes"] else None
    if name == "conv_general_dilated":
        # A convolution sums over the dimensions of input features in lhs and rhs. If it computes
        # the gradient of a kernel, JAX has put the rows of x and d_y into these dimensions.
        numbers = params["dimension_numbers"]
        features = numbers.lhs_spec[1], numbers.rhs_spec[1]
        is_summed = params["feature_group_count"] == 1 and features == tuple(rows)
        return features if is_summed else None
    if name == "scatter-add":
        return _scattered_dims(equation, rows)
    return None


def _scattered_dims(equation: JaxprEqn, rows: Dims) -> Dims | None:
    """Returns the dimensions of a scatter's inputs with the rows that are added up, or None.

    The inputs are operand, indices and updates. In the gradient of an embedding, they are the table
    (words, features), indices (rows, positions, 1) and updates (rows, positions, features), and the
    result is (None, 0, 0). The operand has no rows, because all rows add to the same array.
    """
    numbers = equation.params["dimension_numbers"]
    update_rows = rows[2]
    num_dims = len(shape_of(equation.invars[2]))
    # Each index adds a window, such as (features,). The other dimensions of the updates are the
    # dimensions of the indices, in the same order.
    index_dims = [i for i in range(num_dims) if i not in numbers.update_window_dims]
    # Without rows, or with rows in the window, nothing is summed over rows.
    if update_rows not in index_dims:
        return None
    rows_of_indices = index_dims.index(update_rows)
    # Along a batching dimension, each row adds to an array of its own in the operand.
    if rows_of_indices in numbers.scatter_indices_batching_dims:
        return None
    return (None, rows_of_indices, update_rows)


# Each of the following functions is for some operations. Input number `position` has the rows in
# dimension `rows`, and an output has the shape `shape`. The functions return the dimension of the
# output that has these rows; None if the output has no rows, or the dimension is not known.


def _keep(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For operations on each element, and operations that change other dimensions than the rows."""
    input_shape = shape_of(equation.invars[position])
    is_kept = len(shape) == len(input_shape) and shape[rows] == input_shape[rows]
    return rows if is_kept else None


def _reduce(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For operations that remove the dimensions ``axes``."""
    axes = equation.params.get("axes", ())
    if rows in axes:
        return None
    removed_before = [axis for axis in axes if axis < rows]
    return rows - len(removed_before)


def _multiply(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For a product of two inputs, lhs (number 0) and rhs (1).

    The product has (batch dimensions, free dimensions of lhs, free dimensions of rhs). Dimensions
    that are summed over are *contracted*; the *free* ones are neither contracted nor batched.
    """
    contracted_of_both, batched_of_both = equation.params["dimension_numbers"]
    contracted, batched = contracted_of_both[position], batched_of_both[position]
    if rows in batched:
        return batched.index(rows)  # type: ignore[no-any-return]
    lhs_ndim, rhs_ndim = (len(shape_of(operand)) for operand in equation.invars)
    ndim = (lhs_ndim, rhs_ndim)[position]
    free = [i for i in range(ndim) if i not in (*contracted, *batched)]
    if rows not in free:  # the rows are summed over
        return None
    # The free dimensions of lhs begin after the batch dimensions, and those of rhs after these.
    first_free = len(batched) if position == 0 else lhs_ndim - len(contracted)
    return first_free + free.index(rows)


def _transpose(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For a transposition: dimension i of the output is ``permutation[i]`` of the input."""
    return equation.params["permutation"].index(rows)  # type: ignore[no-any-return]


def _broadcast(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For a broadcast: dimension i of the input is ``broadcast_dimensions[i]`` of the output."""
    return equation.params["broadcast_dimensions"][rows]  # type: ignore[no-any-return]


def _gather(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """Finds the rows after a gather whose indices have rows, such as an embedding of tokens.

    The inputs are the table (words, features) and indices (rows, positions, 1), whose last
    dimension is one index. The output has a window of the table for each index, (rows, positions,
    features), where (features,) is the window.
    """
    # Rows of the table are not rows of the output, because each index may take any of them.
    if position == 0:
        return None
    window_dims = equation.params["dimension_numbers"].offset_dims  # dimensions of the output
    # The other dimensions of the output are the dimensions of the indices, in the same order.
    index_dims = [i for i in range(len(shape)) if i not in window_dims]
    return index_dims[rows] if rows < len(index_dims) else None


def _reshape(equation: JaxprEqn, position: int, rows: int, shape: Shape) -> int | None:
    """For (…, rows, features) → (…, rows · features), and similar changes of shape."""
    input_shape = shape_of(equation.invars[position])
    # The dimensions before the rows have as many elements in the output as in the input. The rows
    # may have been joined with the dimension after them, so their number has to divide the size.
    size_before = math.prod(input_shape[:rows])
    possible = (i for i in range(len(shape)) if math.prod(shape[:i]) == size_before)
    return next((i for i in possible if shape[i] % input_shape[rows] == 0), None)


# By the name of an operation, the function for it. `_keep` is for operations that are missing here,
# and `_reduce` for reductions.
_MOVES: dict[str, Callable[[JaxprEqn, int, int, Shape], int | None]] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _multiply,
    "gather": _gather,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
}
