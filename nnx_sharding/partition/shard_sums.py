"""Gradients as one sum for each shard of the rows, which are added up when a loop is done.

Let D devices hold the rows of a batch. The gradient of a parameter is a sum over rows, such as the
product ``xᵀ @ d_y`` of an (inputs, rows) and a (rows, outputs) array. The compiler gives each
device the sum over its own rows, and adds these at once, by an all-reduce: for each microbatch of
``accumulate_gradients``, or in each tick of a pipeline.

The sum over rows may be split, whatever the layers do, as long as it is added up in the end::

    rows          a b c d e f g h
                  └──┬──┘ └──┬──┘
    shard sums       s_0     s_1       (D, *shape): one on each device, added up in the loop
    gradient         s_0  +  s_1       one all-reduce, after the loop

So the traced backward pass is run anew, operation by operation (`_Evaluation`). Those that sum over
rows, such as ``dot_general``, compute the sums of the shards instead, and operations that are
linear, such as ``transpose``, map over them. Where a value is needed for anything else, the sums
are added up before.

Which dimension has the rows is known of the inputs, and found for all else by the rules of
``row_dimensions.py``. It only says which sums are split: a wrong guess costs time, as each sum may
be split in any dimension. What is not found, such as in a ``shard_map``, is reduced at once, as
without this.

Shard sums are on the devices of their rows. On Explicit axes their type says so
(`ShardSums.with_type`); on Auto axes they are constrained (`ShardSums.constrain`). One backward
pass may have both, as modules of a strategy run with Auto axes. From other modules: `type_mesh` and
`type_spec` are the mesh and the spec in the type of an array, or None; `retype` gives an array
another type; `keep_axes` removes all other axes from a spec. An operation is an *equation* of a
jaxpr, with inputs (``invars``) and outputs (``outvars``).
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
from .row_dimensions import Dims, rows_of_outputs, shape_of, summed_dims

Arrays: TypeAlias = Sequence[Any]
Rest = TypeVar("Rest")


def add_up(sums: jax.Array, axis: int, name: str) -> jax.Array:
    """Adds up the shards' sums of the gradient of a parameter, one all-reduce.

    Args:
      sums: the sums, of the shape of the parameter with one more dimension for the shards.
      axis: this dimension.
      name: the expression for the parameter, such as ``model.up.kernel``.
    """
    enclosing = enclosing_paths(name)  # [model, model.up] of model.up.kernel
    module = enclosing[-1] if enclosing else name
    # Reports take operations with this name for the backward pass of the module. JAX writes it for
    # what it transposes, and the sum is the transpose of using a parameter on each device.
    with jax.named_scope(f"transpose({module})"):
        return sums.sum(axis)


def dtype_of_sums(x: jax.Array, dtype: Any) -> Any:
    """Returns the dtype in which the gradients of an array are added up.

    Args:
      x: the array.
      dtype: the user's; None for that of the array. Complex gradients keep their imaginary part: a
        ``float64`` sums them in ``complex128``, others in ``complex64``.
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
# Linear in one input while the other one stays the same: a · (b + c) = a·b + a·c. A division is so
# in the first input only: (a + b) / c.
_PRODUCTS = frozenset(("mul", "div"))
_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call"))
_REMAT = frozenset(("checkpoint", "remat", "remat2"))


@dataclasses.dataclass(frozen=True)
class ShardSums:
    """Splits sums over rows by the shards of these.

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
          dtype: that of the sums.
          *entries: Auto axes that shard the first dimensions of the array, such as ``"stage"`` for
            one of shape (stages, …): the first entries of a spec.
        """
        sums = jnp.zeros((self.shards, *x.shape), dtype)
        # Explicit axes are a matter of the type, Auto axes of a constraint; the mesh may have both.
        typed = self.with_type_like(sums, x)
        return self.constrain(typed, *entries)

    def evaluate(
        self,
        function: Callable[[Any], tuple[dict[int, Any], Rest]],
        inputs: Any,
        rows: Any,
        wanted: Collection[int],
    ) -> tuple[dict[int, Any], Rest]:
        """Runs a function that computes gradients, some of which are returned as shard sums.

        Args:
          function: a function of one pytree of arrays, which returns gradients by number, and
            a pytree of further results.
          inputs: what it gets.
          rows: the same tree with the dimension of the rows of each array; None if it has none.
          wanted: the numbers of the gradients that are to be shard sums, (shards, *shape).

        Returns:
          What the function returns, with these gradients as shard sums.
        """
        if not wanted:
            return function(inputs)
        closed, results = jax.make_jaxpr(function, return_shape=True)(inputs)
        row_dims = jax.tree.leaves(rows, is_leaf=lambda x: x is None)
        pairs = zip(jax.tree.leaves(inputs), row_dims, strict=True)
        values = [_Value(x, rows=dim) for x, dim in pairs]
        # The same tree as the results, so that its leaves are in the order of the outputs.
        gradients, rest = results
        is_wanted_tree = {i: i in wanted for i in gradients}, jax.tree.map(lambda _: False, rest)
        is_wanted = jax.tree.leaves(is_wanted_tree)
        evaluation = _Evaluation(self)
        values = evaluation.run(closed, values, is_wanted)
        # Where no sum over rows leads to a gradient, it is a whole value, which is split here.
        outputs = [
            evaluation.split(x) if wants else evaluation.add_up(x)
            for x, wants in zip(values, is_wanted, strict=True)
        ]
        evaluated: tuple[dict[int, Any], Rest]
        evaluated = jax.tree.unflatten(jax.tree.structure(results), outputs)
        return evaluated

    def with_type(self, sums: jax.Array, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
        """Gives shard sums, (shards, *shape), a type with Explicit axes.

        For the rows over ``"data"`` and a value with the spec ``P("data", "model")``, the spec of
        the sums is ``P("data", None, "model")``: an axis shards one dimension only.

        Args:
          sums: the sums.
          mesh: the mesh of the type.
          spec: that of the value, (*shape).
        """
        # A type says nothing of Auto axes: over these, `constrain` shards the first dimension.
        explicit = axes_of_type(mesh, AxisType.Explicit)
        rows = tuple(axis for axis in self.axes if axis in explicit)
        others = self.without_rows(spec, mesh).partitions
        return cast(jax.Array, retype(sums, mesh, PartitionSpec(rows or None, *others)))

    def with_type_like(self, sums: jax.Array, value: jax.Array) -> jax.Array:
        """Types shard sums of this value; without Explicit axes, they stay as they are."""
        mesh = self._mesh_of(value)
        if not axes_of_type(mesh, AxisType.Explicit):
            return sums
        return self.with_type(sums, mesh, type_spec(value) or PartitionSpec())

    def constrain(self, sums: jax.Array, *entries: object) -> jax.Array:
        """Constrains shard sums on Auto axes to the devices of their rows.

        Args:
          sums: the sums, (shards, *shape).
          *entries: the entries of a spec for the dimensions after that of the shards. How further
            ones are sharded is left to the compiler.
        """
        mesh = self._mesh_of(sums)
        auto = axes_of_type(mesh, AxisType.Auto)
        if not entries and auto.isdisjoint(self.axes):  # all is in the type
            return sums
        rest = [PartitionSpec.UNCONSTRAINED] * (sums.ndim - 1 - len(entries))
        spec = keep_axes(PartitionSpec(self.axes, *entries, *rest), auto)
        with in_context(mesh):
            sums = jax.lax.with_sharding_constraint(sums, NamedSharding(mesh, spec))
        return sums

    def _mesh_of(self, x: jax.Array) -> AnyMesh:
        """Returns the mesh in the type of an array, which says what type each axis has here."""
        return type_mesh(x) or self.mesh

    def without_rows(self, spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
        """Returns the spec of a value without the axes of the rows, which shard its sums."""
        return keep_axes(spec, {*mesh.axis_names}.difference(self.axes))

    def of_sum(self, value: jax.Array) -> jax.Array:
        """Returns shard sums of a sum that is known already: 0 but for the first shard."""
        with in_context(type_mesh(value)):
            is_first = jnp.arange(self.shards).reshape(-1, *[1] * jnp.ndim(value)) == 0
            sums = jnp.where(is_first, value, jnp.zeros_like(value))  # (shards, *shape)
        return self.constrain(self.with_type_like(sums, value))


@dataclasses.dataclass(frozen=True)
class _Value:
    """An array, or its shard sums, and which of its dimensions has the rows."""

    array: Any  # of the shape of the value; (shards, *shape) for shard sums
    rows: int | None = None  # None for an array without rows, and for shard sums
    is_split: bool = False  # whether these are shard sums


class _Evaluation:
    """Runs a traced function anew, operation by operation, on values that may be shard sums.

    A `_Value` is an array, with the dimension of its rows, if any; or shard sums (``is_split``).
    Methods that run something take the values of its inputs, and for each output whether it is
    *wanted* as shard sums. That is a wish: where no sum over rows leads to an output, it is whole.
    `ShardSums` (``_sums``) has the number of shards, and puts sums on the devices of their rows.
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

    def run(self, closed: Any, inputs: Sequence[_Value], wanted: Sequence[bool]) -> list[_Value]:
        """Runs a program, and returns the values of its outputs.

        Args:
          closed: the program: a jaxpr, with its constants if it is a closed one.
          inputs: their values.
          wanted: for each output whether it is wanted as shard sums.
        """
        jaxpr: Jaxpr = getattr(closed, "jaxpr", closed)
        constants = [_Value(x) for x in getattr(closed, "consts", ())]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Var, _Value] = dict(zip(variables, [*constants, *inputs], strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if isinstance(atom, Literal) else values[atom]

        # If an output is wanted as shard sums, so are the values that it is linear in.
        chosen = _variables_that_lead_to(jaxpr, wanted)
        for equation in jaxpr.eqns:
            wants = [variable in chosen for variable in equation.outvars]
            operands = [read(x) for x in equation.invars]
            with _compat.in_scope_of(equation):  # its named scopes, and its place in the source
                outputs = self._run_equation(equation, operands, wants)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _run_equation(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value]:
        """Runs one operation: on shard sums if these are wanted and possible, else on arrays."""
        if any(wanted):
            outputs = self._run_with_sums(equation, inputs, wanted)
            if outputs is not None:
                return outputs
        # On arrays: what else is done with shard sums needs the whole value.
        arrays = [self.add_up(x) for x in inputs]
        outputs = _compat.run_equation(equation, arrays)
        rows = rows_of_outputs(equation, [x.rows for x in inputs])
        return [_Value(x, dim) for x, dim in zip(outputs, rows, strict=True)]

    def _run_with_sums(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value] | None:
        """Runs an operation that may return shard sums; None for one that cannot.

        There are three kinds: those that have a program in them, in which sums may be split; those
        that are linear in shard sums; and those that sum over rows.
        """
        name = equation.primitive.name
        if _called(equation) is not None:
            return self.run(equation.params["jaxpr"], inputs, wanted)
        if name in _REMAT:
            # The backward pass with the forward pass that it recomputes: a barrier keeps the
            # compiler from computing that only once, in the forward pass.
            arrays = jax.lax.optimization_barrier([self.add_up(x) for x in inputs])
            inputs = [_Value(x, rows=old.rows) for x, old in zip(arrays, inputs, strict=True)]
            return self.run(equation.params["jaxpr"], inputs, wanted)
        if name == "scan":
            return self._run_scan(equation, inputs, wanted)
        if _is_linear(equation, inputs):
            return self._map(equation, inputs)
        # The dimension of each input that the operation sums over, if those are the rows.
        dims = summed_dims(equation, [x.rows for x in inputs])
        if dims is None:
            return None
        for variable, dim in zip(equation.invars, dims, strict=True):
            # Each shard has as many rows: (rows,) → (shards, rows / shards).
            if dim is not None and shape_of(variable)[dim] % self._sums.shards:
                return None
        return self._split_sum(equation, inputs, dims)

    def _map(self, equation: JaxprEqn, inputs: Sequence[_Value]) -> list[_Value]:
        """Runs a linear operation on each shard sum; its only output are shard sums."""
        name = equation.primitive.name
        if name in ("sharding_constraint", "reshard"):  # which know nothing of the new dimension
            return [_Value(self._shard_like_value(inputs[0].array, equation), is_split=True)]
        if name == "add_any":
            # A whole operand would be added to each shard sum, and so count several times.
            arrays = [self.split(x) for x in inputs]
            mapped: list[int | None] = [0] * len(inputs)
        else:  # a factor that is no sum is the same for all shards
            arrays = [x.array for x in inputs]
            mapped = [0 if x.is_split else None for x in inputs]
        return [_Value(x, is_split=True) for x in _run_mapped(equation, arrays, mapped)]

    def _shard_like_value(self, sums: jax.Array, equation: JaxprEqn) -> jax.Array:
        """Shards sums as an operation shards their value.

        The axes of the rows shard the first dimension of the sums, so they shard no other one.

        Args:
          sums: the sums, (shards, *shape).
          equation: a ``reshard``, which gives the value, (*shape), a type on Explicit axes, also
            those of another mesh; or a ``sharding_constraint``, which is for Auto axes.
        """
        # The two operations call it differently.
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if not isinstance(sharding, NamedSharding):
            return sums
        mesh, spec = sharding.mesh, sharding.spec  # the spec is that of the value
        if equation.primitive.name == "reshard":
            return self._sums.constrain(self._sums.with_type(sums, mesh, spec))
        entries = self._sums.without_rows(spec, mesh).partitions
        # Without its axes, a dimension may be sharded as the compiler likes: the sums need not be
        # gathered where their value would be.
        unconstrained = PartitionSpec.UNCONSTRAINED
        return self._sums.constrain(sums, *(entry or unconstrained for entry in entries))

    def _split_sum(self, equation: JaxprEqn, inputs: Sequence[_Value], dims: Dims) -> list[_Value]:
        """Runs an operation that sums over rows once for each shard of these.

        Args:
          equation: the operation, such as a product: (inputs, rows) · (rows, outputs).
          inputs: its inputs.
          dims: for each of these the dimension that is summed over; None for one that has none.

        Returns:
          The value of its only output, as shard sums.
        """
        # Its inputs are factors or terms of the sum, so they have to be whole.
        arrays = [self.add_up(x) for x in inputs]
        # 1. On Auto axes: JAX cannot type all operations, such as convolutions, if they are mapped
        # over a dimension that an Explicit axis shards.
        mesh = next(filter(None, map(type_mesh, arrays)), self._sums.mesh)
        auto = mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(axes_of_type(mesh, AxisType.Explicit), AxisType.Auto)
        )
        arrays = [retype(x, auto) for x in arrays]
        # 2. The rows of each shard: (…, rows, …) → (…, shards, rows / shards, …).
        mapped = [None if dim is None else int(dim) for dim in dims]  # from NumPy's integers
        with jax.sharding.use_abstract_mesh(auto):
            for i, dim in enumerate(mapped):
                if dim is not None:
                    shape = arrays[i].shape
                    split = (*shape[:dim], self._sums.shards, -1, *shape[dim + 1 :])
                    arrays[i] = arrays[i].reshape(split)
            if equation.primitive.name == "scatter-add":
                # Its first input, to which the rows are added, would count once for each shard.
                # Here it is in the sum of the first shard, and the others start at 0.
                arrays[0], mapped[0] = self._sums.of_sum(arrays[0]), 0
            # 3. The operation for each shard, and the type on Explicit axes again.
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
        # Added up here, once; in the body it would be done in each step.
        constants = [_Value(self.add_up(x), rows=x.rows) for x in constants]
        # A carry with rows stays whole. It may be wanted as shard sums, since gradients are linear
        # in it, as in that of activations; but it is no sum over rows itself.
        carries_sums = [
            wants and x.rows is None for x, wants in zip(carried, wanted[:num_carried], strict=True)
        ]
        wanted = [*carries_sums, *wanted[num_carried:]]

        def carry_of(values: Sequence[_Value]) -> list[Any]:
            """Returns the arrays of a carry, which are in each step in the form of the first."""
            return [
                self.split(x) if is_split else self.add_up(x)
                for x, is_split in zip(values, carries_sums, strict=True)
            ]

        # What tracing the body says of its outputs, for all steps: which dimension has the rows.
        # Without their arrays, which nobody may hold when the body's trace has ended.
        body_outputs = list[_Value]()

        def body(carry: Arrays, xs: Arrays) -> tuple[list[Any], list[Any]]:
            carried_values = [
                _Value(x, rows=first.rows, is_split=is_split)
                for x, first, is_split in zip(carry, carried, carries_sums, strict=True)
            ]
            # In a step, the first dimension is gone: dimension 2 is 1 there. Rows in dimension 0
            # would be what it loops over, one in each step.
            scanned_values = [
                _Value(x, rows=whole.rows - 1 if whole.rows else None)
                for x, whole in zip(xs, scanned, strict=True)
            ]
            values = [*constants, *carried_values, *scanned_values]
            outputs = self.run(params["jaxpr"], values, wanted)
            body_outputs[:] = [dataclasses.replace(x, array=None) for x in outputs]
            to_stack = [x.array for x in outputs[num_carried:]]  # also as shard sums
            return carry_of(outputs[:num_carried]), to_stack

        carry, stacked = jax.lax.scan(
            body,
            carry_of(carried),
            [self.add_up(x) for x in scanned],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        results = [
            _Value(x, rows=last.rows, is_split=is_split)
            for x, last, is_split in zip(
                carry, body_outputs[:num_carried], carries_sums, strict=True
            )
        ]
        pairs = zip(stacked, body_outputs[num_carried:], strict=True)
        return results + [self._stacked(x, step) for x, step in pairs]

    def _stacked(self, array: jax.Array, step: _Value) -> _Value:
        """Returns the value of what a ``scan`` has stacked, (length, …), given that of one step."""
        if not step.is_split:
            return _Value(array, None if step.rows is None else step.rows + 1)
        with in_context(type_mesh(array)):
            sums = jnp.swapaxes(array, 0, 1)  # (length, shards, …) → (shards, length, …)
        return _Value(self._sums.constrain(sums), is_split=True)


def _inputs_of_scan(
    equation: JaxprEqn, inputs: Sequence[_Value]
) -> tuple[Sequence[_Value], Sequence[_Value], Sequence[_Value]]:
    """Sorts the inputs of a ``scan``: constants, the first carry, and what it scans over.

    The outputs are the carry and what is stacked. How many there are of each, releases of JAX say
    in different parameters, so the arrays are compared: what is scanned or stacked has one
    dimension more outside of the body than in it, and comes last.
    """
    jaxpr = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])  # of the body

    def count_scanned(outside: Arrays, inside: Arrays) -> int:
        return sum(x.aval.ndim > y.aval.ndim for x, y in zip(outside, inside, strict=True))

    num_carried = len(jaxpr.outvars) - count_scanned(equation.outvars, jaxpr.outvars)
    first_scanned = len(inputs) - count_scanned(equation.invars, jaxpr.invars)
    first_carried = first_scanned - num_carried
    return inputs[:first_carried], inputs[first_carried:first_scanned], inputs[first_scanned:]


def _run_mapped(
    equation: JaxprEqn, arrays: Arrays, mapped: Dims, mesh: AbstractMesh | None = None
) -> list[Any]:
    """Runs an operation for each shard, and stacks the outputs: (shards, *shape).

    Args:
      equation: the operation.
      arrays: its inputs.
      mapped: for each of these the dimension of the shards; None for one that has none.
      mesh: the mesh of the inputs, if it has Auto axes in place of Explicit ones; None for the mesh
        that the operation was traced with.
    """
    # On Explicit axes, an operation may say how its output is sharded, which JAX refuses on Auto
    # axes. The caller gives the output its type.
    if mesh is not None and equation.params.get("out_sharding") is not None:
        equation = equation.replace(params={**equation.params, "out_sharding": None})

    def run(*arrays: Any) -> list[Any]:
        """Runs the operation for one shard."""
        return _compat.run_equation(equation, arrays, mesh)

    outputs: list[Any] = jax.vmap(run, in_axes=tuple(mapped))(*arrays)
    return outputs


def _variables_that_lead_to(jaxpr: Jaxpr, wanted: Sequence[bool]) -> set[Any]:
    """Returns the wanted outputs of a program, and the variables that these are linear in.

    If such a variable is a sum over rows, it may be shard sums, and the outputs with it. Both
    factors of a product are returned: only when it runs is it known which of them is a sum.
    Integers and booleans are not: to round each shard's sum is not to round their sum.

    Args:
      jaxpr: the program.
      wanted: for each of its outputs whether it is wanted as shard sums.
    """
    chosen: set[Any] = {
        x for x, wants in zip(jaxpr.outvars, wanted, strict=True) if wants and isinstance(x, Var)
    }
    for equation in reversed(jaxpr.eqns):  # from the outputs back to the inputs
        wants = [x in chosen for x in equation.outvars]
        if not any(wants):
            continue
        if equation.primitive.name in _LINEAR | _PRODUCTS:
            chosen.update(x for x in equation.invars if isinstance(x, Var) and _is_inexact(x))
        elif (inner := _called(equation)) is not None:
            # A call: its inputs are those of the program in it. A `scan` is none: when it runs, its
            # inputs are added up, or split as its carry is.
            inside = _variables_that_lead_to(inner, wants)
            pairs = zip(equation.invars, inner.invars, strict=True)
            chosen.update(x for x, y in pairs if y in inside and isinstance(x, Var))
    return chosen


def _is_inexact(variable: Var) -> bool:
    """Whether a variable has floating-point or complex numbers."""
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))  # type: ignore[attr-defined]


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """Returns the program that an operation calls once, with its own inputs, as of a ``jit``.

    None for all other operations; also for a ``remat`` behind a barrier (``prevent_cse``), whose
    operations may not be run among those around it.
    """
    name, params = equation.primitive.name, equation.params
    if name in _CALLS or (name in _REMAT and not params["prevent_cse"]):
        return getattr(params["jaxpr"], "jaxpr", params["jaxpr"])  # type: ignore[no-any-return]
    return None


def _is_linear(equation: JaxprEqn, inputs: Sequence[_Value]) -> bool:
    """Whether an operation may be run on each shard sum in place of their sum.

    That is possible if it is linear in those of its inputs that are shard sums.
    """
    name = equation.primitive.name
    pairs = zip(equation.invars, inputs, strict=True)
    split_sizes = [math.prod(shape_of(variable)) for variable, x in pairs if x.is_split]
    # Sums that it broadcasts, as to all rows, are added up before, as they take less memory so.
    out_sizes = [math.prod(shape_of(x)) for x in equation.outvars]
    if not split_sizes or max(out_sizes) > max(split_sizes):
        return False
    if name in _PRODUCTS:
        # With two split factors, shards would be multiplied with themselves only.
        first, second = (x.is_split for x in inputs)
        return first != second and not (name == "div" and second)
    return name in _LINEAR
