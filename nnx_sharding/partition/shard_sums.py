"""Gradients as one sum for each shard of the rows; the sums are added up when a loop is done.

Let D devices hold the rows of a batch. The gradient of a parameter is a sum over rows, such as the
product ``xᵀ @ d_y`` of an (inputs, rows) and a (rows, outputs) array. The compiler gives each
device the sum over its own rows, and adds these at once, by an all-reduce: for each microbatch of
``accumulate_gradients``, or in each tick of a pipeline.

The sum over rows may be split, whatever the layers do, if its parts are added up in the end::

    rows          a b c d e f g h
                  └──┬──┘ └──┬──┘
    shard sums       s_0     s_1       (D, *shape): one on each device, added up in the loop
    gradient         s_0  +  s_1       one all-reduce, after the loop

So the traced backward pass is run anew, operation by operation (`_Evaluation`). Operations that sum
over rows, such as ``dot_general``, compute the sums of the shards instead. Linear operations, such
as ``transpose``, map over these sums. If any other operation needs a value, its shard sums are
added up before.

The dimension of the rows is known for the inputs, and the rules of ``row_dimensions.py`` find it
for other values. The dimension only decides which sums are split. A sum may be split in any
dimension, so a wrong guess costs time, but the result is right. If no dimension is found, for
example in a ``shard_map``, the sum is reduced at once, as it would be without this module.

Shard sums are on the devices of their rows. On Explicit axes their type says so
(`ShardSums.with_type`); on Auto axes they are constrained (`ShardSums.constrain`). One backward
pass may have both, because modules of a strategy run with Auto axes. An operation is an *equation*
of a jaxpr, with inputs (``invars``) and outputs (``outvars``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.constrain import in_context, retype, type_mesh, type_spec
from ..specs.fitting import axes_of_type, keep_axes
from ..specs.paths import enclosing_paths
from ..specs.types import AnyMesh
from .row_dimensions import CALLS, REMAT, Dims, rows_of_outputs, shape_of, summed_dims

Arrays: TypeAlias = Sequence[Any]
Rest = TypeVar("Rest")


def add_up(sums: jax.Array, axis: int, name: str) -> jax.Array:
    """Adds up the shards' sums of the gradient of a parameter, by one all-reduce.

    Args:
      sums: the sums, with the shape of the parameter and one more dimension for the shards.
      axis: the dimension of the shards.
      name: the expression for the parameter, such as ``model.up.kernel``.
    """
    enclosing = enclosing_paths(name)  # [model, model.up] of model.up.kernel
    module = enclosing[-1] if enclosing else name
    # Reports count operations in this scope as the backward pass of the module. JAX uses the same
    # name for operations that it transposes, and the sum is the transpose of using a parameter on
    # each device.
    with jax.named_scope(f"transpose({module})"):
        return sums.sum(axis)


def dtype_of_sums(x: jax.Array, dtype: Any) -> Any:
    """Returns the dtype in which the gradients of an array are added up.

    Args:
      x: the array.
      dtype: the user's dtype; None for the dtype of the array. Complex gradients keep their
        imaginary part: they are summed in ``complex128`` for ``float64``, and in ``complex64`` for
        other dtypes.
    """
    if dtype is None:
        return x.dtype
    return jnp.promote_types(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype


# Operations whose output is linear in all of their inputs together: f(a + b) = f(a) + f(b).
_LINEAR = frozenset(
    (
        "add_any",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "neg",
        "reduce_sum",
        "reshape",
        "reshard",
        "sharding_constraint",
        "slice",
        "squeeze",
        "transpose",
    )
)
# Operations that are linear in one input while the other stays the same: a · (b + c) = a·b + a·c. A
# division is linear in the first input only: (a + b) / c.
_PRODUCTS = frozenset(("mul", "div"))


@dataclasses.dataclass(frozen=True)
class ShardSums:
    """Splits sums over rows by the shards of the rows.

    Attributes:
      mesh: the mesh, for arrays whose types name none.
      axes: the mesh axes that shard the rows.
    """

    mesh: AnyMesh
    axes: tuple[str, ...]

    @property
    def shards(self) -> int:
        """The number of shards of the rows."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def zeros(self, x: jax.Array, dtype: Any, *entries: object) -> jax.Array:
        """Returns shard sums of zero for an array, to add its gradients to.

        Args:
          x: the array.
          dtype: the dtype of the sums.
          *entries: the first entries of a spec for the array, with Auto axes, such as ``"stage"``
            for an array (stages, …).
        """
        sums = jnp.zeros((self.shards, *x.shape), dtype)
        # The type is for Explicit axes, the constraint for Auto axes. The mesh may have both.
        typed = self.with_type_like(sums, x)
        return self.constrain(typed, *entries)

    def evaluate(
        self,
        function: Callable[[Any], tuple[dict[int, Any], Rest]],
        inputs: Any,
        rows: Any,
        wanted: Collection[int],
    ) -> tuple[dict[int, Any], Rest]:
        """Runs a function that computes gradients, and returns some of them as shard sums.

        Args:
          function: a function of one pytree of arrays. The function returns a pair: gradients by
            number, and a pytree of further results.
          inputs: the argument of the function.
          rows: a tree like ``inputs``, with the dimension of the rows of each array; None for an
            array without rows.
          wanted: the numbers of the gradients that are to be shard sums, (shards, *shape).

        Returns:
          The pair that the function returns, with the wanted gradients as shard sums.
        """
        if not wanted:
            return function(inputs)
        closed, result_types = jax.make_jaxpr(function, return_shape=True)(inputs)
        row_dims = jax.tree.leaves(rows, is_leaf=lambda x: x is None)
        pairs = zip(jax.tree.leaves(inputs), row_dims, strict=True)
        input_values = [_Value(x, rows=dim) for x, dim in pairs]
        # The flags are put into the same tree as the results, so that its leaves are in the order
        # of the outputs.
        gradient_types, further_types = result_types
        gradient_flags = {i: i in wanted for i in gradient_types}
        further_flags = jax.tree.map(lambda _: False, further_types)
        is_wanted = jax.tree.leaves((gradient_flags, further_flags))
        evaluation = _Evaluation(self)
        output_values = evaluation.run(closed, input_values, is_wanted)
        # A wanted gradient is a whole value if no sum over rows leads to it, and is split here.
        outputs = evaluation.split_or_add_up(output_values, is_wanted)
        results: tuple[dict[int, Any], Rest]
        results = jax.tree.unflatten(jax.tree.structure(result_types), outputs)
        return results

    def with_type(self, sums: jax.Array, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
        """Gives shard sums, (shards, *shape), a type with Explicit axes.

        For rows over ``"data"`` and a value with the spec ``P("data", "model")``, the spec of the
        sums is ``P("data", None, "model")``, because an axis shards one dimension only.

        Args:
          sums: the sums.
          mesh: the mesh of the type.
          spec: the spec of the value, (*shape).
        """
        # A type has no Auto axes. Over Auto axes, `constrain` shards the first dimension.
        explicit = axes_of_type(mesh, AxisType.Explicit)
        explicit_row_axes = tuple(axis for axis in self.axes if axis in explicit)
        value_entries = self.without_rows(spec, mesh).partitions
        sums_spec = PartitionSpec(explicit_row_axes or None, *value_entries)
        return cast(jax.Array, retype(sums, mesh, sums_spec))

    def with_type_like(self, sums: jax.Array, value: jax.Array) -> jax.Array:
        """Gives shard sums a type like that of their value.

        Without Explicit axes, they are returned unchanged.
        """
        mesh = self._mesh_of(value)
        if not axes_of_type(mesh, AxisType.Explicit):
            return sums
        return self.with_type(sums, mesh, type_spec(value) or PartitionSpec())

    def constrain(self, sums: jax.Array, *entries: object) -> jax.Array:
        """Constrains shard sums on Auto axes to the devices of their rows.

        Args:
          sums: the sums, (shards, *shape).
          *entries: the entries of a spec for the dimensions after the dimension of the shards. The
            compiler chooses how further dimensions are sharded.
        """
        mesh = self._mesh_of(sums)
        auto = axes_of_type(mesh, AxisType.Auto)
        # Nothing is to be constrained, because the type has all axes of the rows.
        if not entries and auto.isdisjoint(self.axes):
            return sums
        free_entries = [PartitionSpec.UNCONSTRAINED] * (sums.ndim - 1 - len(entries))
        spec = keep_axes(PartitionSpec(self.axes, *entries, *free_entries), auto)
        with in_context(mesh):
            sums = jax.lax.with_sharding_constraint(sums, NamedSharding(mesh, spec))
        return sums

    def _mesh_of(self, x: jax.Array) -> AnyMesh:
        """Returns the mesh in the type of an array, with its axis types; else ``mesh``."""
        return type_mesh(x) or self.mesh

    def without_rows(self, spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
        """Returns the spec of a value without the axes of the rows."""
        return keep_axes(spec, {*mesh.axis_names}.difference(self.axes))

    def of_sum(self, value: jax.Array) -> jax.Array:
        """Returns shard sums of a whole sum: the value for the first shard, 0 for all others."""
        with in_context(type_mesh(value)):
            is_first = jnp.arange(self.shards).reshape(-1, *[1] * jnp.ndim(value)) == 0
            sums = jnp.where(is_first, value, jnp.zeros_like(value))  # (shards, *shape)
        return self.constrain(self.with_type_like(sums, value))


@dataclasses.dataclass(frozen=True)
class _Value:
    """An array, or its shard sums, and the dimension that has the rows."""

    array: Any  # the array, (*shape), or the shard sums, (shards, *shape)
    rows: int | None = None  # the dimension; None for an array without rows, and for shard sums
    is_split: bool = False  # whether ``array`` has shard sums


class _Evaluation:
    """Runs a traced function anew, operation by operation, on values that may be shard sums.

    A `_Value` is an array, with the dimension of its rows, if any, or shard sums (``is_split``).
    Methods that run an operation or a program take the values of its inputs, and for each output
    whether it is *wanted* as shard sums. An output may be whole although it is wanted, if no sum
    over rows leads to it. `ShardSums` (``_sums``) has the number of shards, and puts sums on the
    devices of their rows.
    """

    def __init__(self, sums: ShardSums):
        self._sums = sums

    def add_up(self, value: _Value) -> Any:
        """Returns the array of a value, (*shape); shard sums are added up."""
        if not value.is_split:
            return value.array
        with in_context(type_mesh(value.array)):
            return value.array.sum(0)

    def split(self, value: _Value) -> jax.Array:
        """Returns the shard sums of a value, (shards, *shape)."""
        if value.is_split:
            return self._sums.constrain(value.array)
        return self._sums.of_sum(value.array)

    def split_or_add_up(self, values: Sequence[_Value], wanted: Sequence[bool]) -> list[Any]:
        """Returns the arrays of values: as shard sums if they are wanted so, else whole."""
        pairs = zip(values, wanted, strict=True)
        return [self.split(x) if wants else self.add_up(x) for x, wants in pairs]

    def run(self, closed: Any, inputs: Sequence[_Value], wanted: Sequence[bool]) -> list[_Value]:
        """Runs a program, and returns the values of its outputs.

        Args:
          closed: the program: a jaxpr, or a closed jaxpr with its constants.
          wanted: for each output whether it is wanted as shard sums.
        """
        jaxpr: Jaxpr = getattr(closed, "jaxpr", closed)
        constants = [_Value(x) for x in getattr(closed, "consts", ())]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Var, _Value] = dict(zip(variables, [*constants, *inputs], strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if isinstance(atom, Literal) else values[atom]

        # If an output is wanted as shard sums, so are the values that it is linear in.
        wanted_variables = _variables_that_lead_to(jaxpr, wanted)
        for equation in jaxpr.eqns:
            wants = [variable in wanted_variables for variable in equation.outvars]
            operands = [read(x) for x in equation.invars]
            # The scope sets the named scopes of the equation, and its place in the source.
            with _compat.in_scope_of(equation):
                outputs = self._run_equation(equation, operands, wants)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _run_equation(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value]:
        """Runs one operation: on shard sums if these are wanted and possible, else on arrays."""
        if any(wanted):
            outputs = self._run_with_sums(equation, inputs, wanted)  # None: nothing has run
            if outputs is not None:
                return outputs
        # The operation runs on arrays, because all other operations need whole values.
        arrays = [self.add_up(x) for x in inputs]
        outputs = _compat.run_equation(equation, arrays)
        rows = rows_of_outputs(equation, [x.rows for x in inputs])
        return [_Value(x, dim) for x, dim in zip(outputs, rows, strict=True)]

    def _run_with_sums(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value] | None:
        """Runs an operation that may return shard sums; None for any other, which is not run.

        There are three kinds of such operations: those that have a program in them, in which sums
        may be split; those that are linear in shard sums; and those that sum over rows.
        """
        name = equation.primitive.name
        if _called(equation) is not None:  # a call, or a recomputation without a barrier
            return self.run(equation.params["jaxpr"], inputs, wanted)
        if name in REMAT:  # with a barrier, because `_called` returned None
            # The program is a backward pass with the forward pass that it recomputes. The barrier
            # is needed because the compiler would otherwise merge the recomputation with the
            # original forward pass, and keep its results.
            arrays = jax.lax.optimization_barrier([self.add_up(x) for x in inputs])
            inputs = [_Value(x, rows=old.rows) for x, old in zip(arrays, inputs, strict=True)]
            return self.run(equation.params["jaxpr"], inputs, wanted)
        if name == "scan":
            return self._run_scan(equation, inputs, wanted)
        if _can_run_on_sums(equation, inputs):
            return self._run_linear(equation, inputs)
        dims = summed_dims(equation, [x.rows for x in inputs])
        if dims is None:  # no sum over rows, or not known to be one
            return None
        for variable, dim in zip(equation.invars, dims, strict=True):
            # The shards have to be equally large: (rows,) → (shards, rows / shards).
            if dim is not None and shape_of(variable)[dim] % self._sums.shards:
                return None
        return self._split_sum(equation, inputs, dims)

    def _run_linear(self, equation: JaxprEqn, inputs: Sequence[_Value]) -> list[_Value]:
        """Runs a linear operation on each shard sum; its only output is shard sums."""
        name = equation.primitive.name
        # The shardings of these operations have no entry for the dimension of the shards.
        if name in ("sharding_constraint", "reshard"):
            return [_Value(self._shard_like_value(inputs[0].array, equation), is_split=True)]
        if name == "add_any":
            # All operands are split, because a whole operand would be added to each shard sum, and
            # so count several times.
            arrays = [self.split(x) for x in inputs]
            mapped: list[int | None] = [0] * len(inputs)
        else:  # a factor that is not split is the same for all shards
            arrays = [x.array for x in inputs]
            mapped = [0 if x.is_split else None for x in inputs]
        return [_Value(x, is_split=True) for x in _run_mapped(equation, arrays, mapped)]

    def _shard_like_value(self, sums: jax.Array, equation: JaxprEqn) -> jax.Array:
        """Shards sums as an operation shards their value.

        The axes of the rows shard the first dimension of the sums, so they shard no other one.

        Args:
          sums: the sums, (shards, *shape).
          equation: a ``reshard``, which gives the value, (*shape), a type on the Explicit axes of
            any mesh, or a ``sharding_constraint``, which is for Auto axes.
        """
        # The parameter has another name in each of the two operations.
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if not isinstance(sharding, NamedSharding):
            return sums
        mesh, spec = sharding.mesh, sharding.spec  # the spec of the value
        if equation.primitive.name == "reshard":
            return self._sums.constrain(self._sums.with_type(sums, mesh, spec))
        entries = self._sums.without_rows(spec, mesh).partitions
        # A dimension that is left without axes may be sharded as the compiler likes, because the
        # sums need not be gathered even if the value is.
        unconstrained = PartitionSpec.UNCONSTRAINED
        return self._sums.constrain(sums, *(entry or unconstrained for entry in entries))

    def _split_sum(self, equation: JaxprEqn, inputs: Sequence[_Value], dims: Dims) -> list[_Value]:
        """Runs an operation that sums over rows once for each shard of the rows.

        Args:
          equation: the operation, such as a product: (inputs, rows) · (rows, outputs).
          dims: for each input the dimension that is summed over; None for an input without it.

        Returns:
          A list with the value of the only output, as shard sums.
        """
        # The inputs are factors or terms of the sum, so they have to be whole.
        arrays = [self.add_up(x) for x in inputs]
        # 1. The operation runs on Auto axes, because JAX cannot type all operations, such as
        # convolutions, if they are mapped over a dimension that an Explicit axis shards.
        meshes = (type_mesh(x) for x in arrays)
        mesh = next((mesh for mesh in meshes if mesh is not None), self._sums.mesh)
        auto = mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(axes_of_type(mesh, AxisType.Explicit), AxisType.Auto)
        )
        arrays = [retype(x, auto) for x in arrays]
        # 2. The rows are split by shards: (…, rows, …) → (…, shards, rows / shards, …).
        # `vmap` gets Python integers, because `dims` may have integers of NumPy.
        mapped = [None if dim is None else int(dim) for dim in dims]
        with jax.sharding.use_abstract_mesh(auto):
            for i, dim in enumerate(mapped):
                if dim is not None:
                    shape = arrays[i].shape
                    split_shape = (*shape[:dim], self._sums.shards, -1, *shape[dim + 1 :])
                    arrays[i] = arrays[i].reshape(split_shape)
            if equation.primitive.name == "scatter-add":
                # The rows are added to the first input, which would count once for each shard. So
                # the sum of the first shard starts with it, and the other sums start at 0.
                arrays[0], mapped[0] = self._sums.of_sum(arrays[0]), 0
            # 3. The operation runs for each shard, and its output gets a type on Explicit axes.
            [out] = _run_mapped(equation, arrays, mapped, auto)  # (shards, *shape)
        out = self._sums.constrain(out)
        if auto != mesh.abstract_mesh:
            spec = equation.outvars[0].aval.sharding.spec  # type: ignore[attr-defined]
            out = self._sums.with_type(out, mesh, spec)
        return [_Value(out, is_split=True)]

    def _run_scan(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value]:
        """Runs a ``scan`` whose carry and stacked outputs are shard sums where they are wanted."""
        params = equation.params
        constants, carried, scanned = _inputs_of_scan(equation, inputs)
        num_carried = len(carried)
        # Constants are added up here, once, because the body would do so in each step.
        constants = [_Value(self.add_up(x), rows=x.rows) for x in constants]
        # A carry with rows, such as the gradient of activations, stays whole. Such a carry may be
        # wanted as shard sums, because gradients are linear in it, but it is not a sum over rows
        # itself.
        carries_sums = [
            wants and x.rows is None for x, wants in zip(carried, wanted[:num_carried], strict=True)
        ]
        wanted_in_step = [*carries_sums, *wanted[num_carried:]]

        # Tracing the body fills this list with the values of its outputs: the dimension of the
        # rows, and whether they are split. The values have no arrays, because arrays must not be
        # held when the body's trace has ended.
        body_outputs = list[_Value]()

        def body(carry: Arrays, xs: Arrays) -> tuple[list[Any], list[Any]]:
            """Runs one step; fills ``body_outputs``."""
            carried_values = [
                _Value(x, rows=first_value.rows, is_split=is_split)
                for x, first_value, is_split in zip(carry, carried, carries_sums, strict=True)
            ]
            scanned_values = [*map(_value_of_step, xs, scanned)]
            values = [*constants, *carried_values, *scanned_values]
            outputs = self.run(params["jaxpr"], values, wanted_in_step)
            body_outputs[:] = [dataclasses.replace(x, array=None) for x in outputs]
            new_carry = self.split_or_add_up(outputs[:num_carried], carries_sums)
            to_stack = [x.array for x in outputs[num_carried:]]  # arrays or shard sums
            return new_carry, to_stack

        carry, stacked = jax.lax.scan(
            body,
            self.split_or_add_up(carried, carries_sums),
            [self.add_up(x) for x in scanned],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        carried_outputs, stacked_outputs = body_outputs[:num_carried], body_outputs[num_carried:]
        results = []
        for x, output, is_split in zip(carry, carried_outputs, carries_sums, strict=True):
            results.append(_Value(x, rows=output.rows, is_split=is_split))
        for x, output in zip(stacked, stacked_outputs, strict=True):
            results.append(self._stacked(x, output))
        return results

    def _stacked(self, array: jax.Array, step: _Value) -> _Value:
        """Returns the value of an output that a ``scan`` has stacked, (length, …).

        ``step`` is the value of the output in one step, without its array.
        """
        if not step.is_split:
            return _Value(array, None if step.rows is None else step.rows + 1)
        with in_context(type_mesh(array)):
            sums = jnp.swapaxes(array, 0, 1)  # (length, shards, …) → (shards, length, …)
        return _Value(self._sums.constrain(sums), is_split=True)


def _value_of_step(array: Any, scanned: _Value) -> _Value:
    """Returns what one step of a scan gets of a scanned input: ``array``, and where its rows are.

    A step has no first dimension, so dimension 2 is dimension 1 there. If the rows are in dimension
    0, the scan loops over them, and a step has no dimension of rows.
    """
    return _Value(array, rows=scanned.rows - 1 if scanned.rows else None)


def _inputs_of_scan(
    equation: JaxprEqn, inputs: Sequence[_Value]
) -> tuple[Sequence[_Value], Sequence[_Value], Sequence[_Value]]:
    """Returns the inputs of a ``scan`` in three groups: constants, the first carry, scanned arrays.

    The outputs are the carry and stacked arrays. Releases of JAX have the numbers of each in
    different parameters, so the arrays are compared: a scanned or stacked array has one dimension
    more outside of the body than in it, and comes last.
    """
    body = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])

    def count_scanned(scan_variables: Arrays, body_variables: Arrays) -> int:
        pairs = zip(scan_variables, body_variables, strict=True)
        return sum(x.aval.ndim > y.aval.ndim for x, y in pairs)

    num_carried = len(body.outvars) - count_scanned(equation.outvars, body.outvars)
    first_scanned = len(inputs) - count_scanned(equation.invars, body.invars)
    first_carried = first_scanned - num_carried
    return inputs[:first_carried], inputs[first_carried:first_scanned], inputs[first_scanned:]


def _run_mapped(
    equation: JaxprEqn, arrays: Arrays, mapped: Dims, mesh: AbstractMesh | None = None
) -> list[Any]:
    """Runs an operation for each shard, and stacks the outputs: (shards, *shape).

    Args:
      mapped: for each input the dimension of the shards; None for an input without it.
      mesh: the mesh of the inputs, if it has Auto axes in place of Explicit ones; None for the mesh
        that the operation was traced with.
    """
    # An operation that was traced on Explicit axes may have the sharding of its output, which JAX
    # refuses on Auto axes. The sharding is removed, and the caller gives the output its type.
    if mesh is not None and equation.params.get("out_sharding") is not None:
        equation = equation.replace(params={**equation.params, "out_sharding": None})

    def run(*arrays: Any) -> list[Any]:
        """Runs the operation for one shard."""
        return _compat.run_equation(equation, arrays, mesh)

    outputs: list[Any] = jax.vmap(run, in_axes=tuple(mapped))(*arrays)
    return outputs


def _variables_that_lead_to(jaxpr: Jaxpr, wanted: Sequence[bool]) -> set[Any]:
    """Returns the wanted outputs of a program, and the variables that they are linear in.

    If such a variable is a sum over rows, it may be shard sums, and so may the outputs. Both
    factors of a product are returned, because it is only known when the product runs which of them
    is a sum. Integers and booleans are left out, because rounding each shard's sum is not rounding
    the whole sum.

    Args:
      wanted: for each of its outputs whether it is wanted as shard sums.
    """
    wanted_variables: set[Any] = {
        x for x, wants in zip(jaxpr.outvars, wanted, strict=True) if wants and isinstance(x, Var)
    }
    for equation in reversed(jaxpr.eqns):  # from the outputs back to the inputs
        wants = [x in wanted_variables for x in equation.outvars]
        if not any(wants):
            continue
        if equation.primitive.name in _LINEAR | _PRODUCTS:
            for x in equation.invars:
                if isinstance(x, Var) and _is_inexact(x):
                    wanted_variables.add(x)
            continue
        # The inputs of a call are the inputs of the program in it. A `scan` is not a call in this
        # sense: when it runs, its inputs are added up, or split as its carry is.
        inner = _called(equation)
        if inner is not None:
            wanted_in_call = _variables_that_lead_to(inner, wants)
            for x, inner_x in zip(equation.invars, inner.invars, strict=True):
                if isinstance(x, Var) and inner_x in wanted_in_call:
                    wanted_variables.add(x)
    return wanted_variables


def _is_inexact(variable: Var) -> bool:
    """Whether a variable has floating-point or complex numbers."""
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))  # type: ignore[attr-defined]


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """Returns the program that an operation, such as a ``jit``, calls once with its own inputs.

    None for all other operations. None as well for a ``remat`` behind a barrier (``prevent_cse``),
    because its operations may not be run among the operations around it.
    """
    name, params = equation.primitive.name, equation.params
    if name in CALLS or (name in REMAT and not params["prevent_cse"]):
        return getattr(params["jaxpr"], "jaxpr", params["jaxpr"])  # type: ignore[no-any-return]
    return None


def _can_run_on_sums(equation: JaxprEqn, inputs: Sequence[_Value]) -> bool:
    """Whether an operation may run on each shard sum, so that its output is shard sums.

    At least one input has to be shard sums, and the operation has to be linear in all such inputs.
    """
    name = equation.primitive.name
    pairs = zip(equation.invars, inputs, strict=True)
    split_sizes = [math.prod(shape_of(variable)) for variable, x in pairs if x.is_split]
    # If the operation broadcasts sums, for example to all rows, they are added up before, because
    # they take less memory then.
    out_sizes = [math.prod(shape_of(x)) for x in equation.outvars]
    if not split_sizes or max(out_sizes) > max(split_sizes):
        return False
    if name in _PRODUCTS:
        is_first_split, is_second_split = (x.is_split for x in inputs)
        # A division is linear in the first input only. Of a product, only one factor may be split,
        # because each shard sum would be multiplied with the sum of the same shard only.
        if name == "div":
            return is_first_split and not is_second_split
        return is_first_split != is_second_split
    return name in _LINEAR
