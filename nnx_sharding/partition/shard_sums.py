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
another type; `keep_axes` removes all other axes from a spec.
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


# Operations whose output is linear in all of their inputs.
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
# Linear in one input, if the other one is fixed. A division is in the first one only.
_PRODUCTS = frozenset(("mul", "div"))
_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call"))
_REMAT = frozenset(("checkpoint", "remat", "remat2"))


@dataclasses.dataclass(frozen=True)
class ShardSums:
    """Splits sums over rows by the shards of these.

    Attributes:
      mesh: the mesh.
      axes: the mesh axes that shard the rows.
    """

    mesh: AnyMesh
    axes: tuple[str, ...]

    @property
    def shards(self) -> int:
        """The number of shards of the rows."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def zeros(self, x: jax.Array, dtype: Any, *entries: object) -> jax.Array:
        """Returns shard sums of zero for an array.

        Args:
          x: the array.
          dtype: that of the sums; None for that of the array.
          *entries: of a spec: they shard the first dimensions of the array, on Auto axes.
        """
        sums = jnp.zeros((self.shards, *x.shape), dtype or x.dtype)
        return self.constrain(self.with_type_like(sums, x), *entries)

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
        """
        if not wanted:
            return function(inputs)
        closed, results = jax.make_jaxpr(function, return_shape=True)(inputs)
        dimensions = jax.tree.leaves(rows, is_leaf=lambda x: x is None)
        pairs = zip(jax.tree.leaves(inputs), dimensions, strict=True)
        values = [_Value(x, dimension) for x, dimension in pairs]
        gradients, rest = results
        # In the order in which JAX flattens the results.
        is_wanted = [number in wanted for number in sorted(gradients)]
        is_wanted += [False] * len(jax.tree.leaves(rest))
        evaluation = _Evaluation(self)
        values = evaluation.run(closed, values, is_wanted)
        outputs = [
            evaluation.split(x) if wants else evaluation.add_up(x)
            for x, wants in zip(values, is_wanted, strict=True)
        ]
        found: tuple[dict[int, Any], Rest]
        found = jax.tree.unflatten(jax.tree.structure(results), outputs)
        return found

    def with_type(self, sums: jax.Array, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
        """Gives shard sums, (shards, *shape), a type with Explicit axes.

        The axes of the rows shard the first dimension, and so none of the others any more.

        Args:
          sums: the sums.
          mesh: the mesh of the type.
          spec: that of the value, (*shape).
        """
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
          *entries: of a spec, for the dimensions after the first one; the compiler chooses how the
            rest is sharded.
        """
        mesh = self._mesh_of(sums)
        auto = axes_of_type(mesh, AxisType.Auto)
        if not entries and auto.isdisjoint(self.axes):
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

    Methods that run something take its inputs, and for each output whether it is *wanted* as shard
    sums. That is a wish: where no sum over rows leads to an output, it is a whole value.
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
        """Runs a jaxpr, closed or not."""
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
        arrays = [self.add_up(x) for x in inputs]
        outputs = _compat.run_equation(equation, arrays)
        rows = rows_of_outputs(equation, [x.rows for x in inputs])
        return [_Value(x, dim) for x, dim in zip(outputs, rows, strict=True)]

    def _run_with_sums(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value] | None:
        """Runs an operation that may return shard sums; None for one that cannot."""
        name = equation.primitive.name
        if _called(equation) is not None:
            return self.run(equation.params["jaxpr"], inputs, wanted)
        if name in _REMAT:
            # The backward pass with the forward pass that it recomputes: a barrier keeps the
            # compiler from computing that only once, in the forward pass.
            arrays = jax.lax.optimization_barrier([self.add_up(x) for x in inputs])
            inputs = [_Value(x, old.rows) for x, old in zip(arrays, inputs, strict=True)]
            return self.run(equation.params["jaxpr"], inputs, wanted)
        if name == "scan":
            return self._run_scan(equation, inputs, wanted)
        if _is_linear(equation, inputs):
            return self._map(equation, inputs)
        dims = summed_dims(equation, [x.rows for x in inputs])
        if dims is None:
            return None
        sizes = [
            shape_of(variable)[dim]
            for variable, dim in zip(equation.invars, dims, strict=True)
            if dim is not None
        ]
        is_divisible = all(size % self._sums.shards == 0 for size in sizes)
        return self._split_sum(equation, inputs, dims) if is_divisible else None

    def _map(self, equation: JaxprEqn, inputs: Sequence[_Value]) -> list[_Value]:
        """Runs a linear operation on each shard sum."""
        name = equation.primitive.name
        if name in ("sharding_constraint", "reshard"):
            return [_Value(self._shard_like_value(inputs[0].array, equation), is_split=True)]
        if name == "add_any":  # a sum of sums: all operands have to be split alike
            arrays = [self.split(x) for x in inputs]
            mapped: list[int | None] = [0] * len(inputs)
        else:
            arrays = [x.array for x in inputs]
            mapped = [0 if x.is_split else None for x in inputs]
        return [_Value(x, is_split=True) for x in _run_mapped(equation, arrays, mapped)]

    def _shard_like_value(self, sums: jax.Array, equation: JaxprEqn) -> jax.Array:
        """Shards sums, (shards, *shape), as a sharding operation shards their value, (*shape).

        The axes of the rows shard the sums already. A ``reshard`` may also change to the types of
        another mesh.
        """
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if not isinstance(sharding, NamedSharding):
            return sums
        mesh, spec = sharding.mesh, sharding.spec
        if equation.primitive.name == "reshard":
            return self._sums.constrain(self._sums.with_type(sums, mesh, spec))
        entries = self._sums.without_rows(spec, mesh).partitions
        unconstrained = PartitionSpec.UNCONSTRAINED
        return self._sums.constrain(sums, *(entry or unconstrained for entry in entries))

    def _split_sum(self, equation: JaxprEqn, inputs: Sequence[_Value], dims: Dims) -> list[_Value]:
        """Runs an operation that sums over rows once for each shard of these.

        Args:
          equation: the operation.
          inputs: its inputs.
          dims: for each of these the dimension that is summed over; None for one that has none.
        """
        arrays = [self.add_up(x) for x in inputs]
        mesh = next(filter(None, map(type_mesh, arrays)), self._sums.mesh)
        # JAX cannot type all operations that map over an Explicit axis, such as convolutions.
        auto = mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(axes_of_type(mesh, AxisType.Explicit), AxisType.Auto)
        )
        arrays = [retype(x, auto) for x in arrays]
        mapped = [None if dim is None else int(dim) for dim in dims]  # from NumPy's integers
        with jax.sharding.use_abstract_mesh(auto):
            for i, dim in enumerate(mapped):
                if dim is not None:  # (…, rows, …) → (…, shards, rows / shards, …)
                    shape = arrays[i].shape
                    split = (*shape[:dim], self._sums.shards, -1, *shape[dim + 1 :])
                    arrays[i] = arrays[i].reshape(split)
            if equation.primitive.name == "scatter-add":
                # What is added to counts once, not for each shard.
                arrays[0], mapped[0] = self._sums.of_sum(arrays[0]), 0
            [out] = _run_mapped(equation, arrays, mapped, auto)  # (shards, *shape)
        out = self._sums.constrain(out)
        if auto != mesh.abstract_mesh:
            spec = equation.outvars[0].aval.sharding.spec  # type: ignore[attr-defined]
            out = self._sums.with_type(out, mesh, spec)
        return [_Value(out, is_split=True)]

    def _run_scan(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value]:
        """Runs a ``scan``: its carry and what it stacks are shard sums where they are wanted."""
        params = equation.params
        constants, carried, scanned = _inputs_of_scan(equation, inputs)
        num_carried = len(carried)
        # Added up here, and not in each step.
        constants = [_Value(self.add_up(x), x.rows) for x in constants]
        # What has rows is no sum over these, though sums of a later operation are linear in it.
        carries_sums = [
            wants and x.rows is None for x, wants in zip(carried, wanted[:num_carried], strict=True)
        ]
        wanted = [*carries_sums, *wanted[num_carried:]]

        def carry_of(values: Sequence[_Value]) -> list[Any]:
            return [
                self.split(x) if is_split else self.add_up(x)
                for x, is_split in zip(values, carries_sums, strict=True)
            ]

        outputs = list[_Value]()  # of the body, as it was traced last

        def body(carry: Arrays, xs: Arrays) -> tuple[list[Any], list[Any]]:
            values = [
                _Value(x, old.rows, is_split)
                for x, old, is_split in zip(carry, carried, carries_sums, strict=True)
            ]
            # Without the first dimension, that of the steps.
            values += [
                _Value(x, old.rows - 1 if old.rows else None)
                for x, old in zip(xs, scanned, strict=True)
            ]
            outputs[:] = self.run(params["jaxpr"], [*constants, *values], wanted)
            return carry_of(outputs[:num_carried]), [x.array for x in outputs[num_carried:]]

        carry, stacked = jax.lax.scan(
            body,
            carry_of(carried),
            [self.add_up(x) for x in scanned],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        results = [
            _Value(x, last.rows, is_split)
            for x, last, is_split in zip(carry, outputs[:num_carried], carries_sums, strict=True)
        ]
        pairs = zip(stacked, outputs[num_carried:], strict=True)
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

    Outputs are the carry and what is stacked. Scanned and stacked are the arrays that have one
    dimension more outside of the body than in it, and both come last.
    """
    jaxpr = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])

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
      mesh: the mesh of the inputs, whose axes are Auto; None for that of the operation.
    """
    if mesh is not None and equation.params.get("out_sharding") is not None:
        equation = equation.replace(params={**equation.params, "out_sharding": None})

    def run(*arrays: Any) -> list[Any]:
        return _compat.run_equation(equation, arrays, mesh)

    outputs: list[Any] = jax.vmap(run, in_axes=tuple(mapped))(*arrays)
    return outputs


def _variables_that_lead_to(jaxpr: Jaxpr, wanted: Sequence[bool]) -> set[Any]:
    """Returns the variables of which wanted outputs are linear functions, and these."""
    chosen: set[Any] = {
        x for x, wants in zip(jaxpr.outvars, wanted, strict=True) if wants and isinstance(x, Var)
    }
    for equation in reversed(jaxpr.eqns):
        wants = [x in chosen for x in equation.outvars]
        if not any(wants):
            continue
        if equation.primitive.name in _LINEAR | _PRODUCTS:
            chosen.update(x for x in equation.invars if isinstance(x, Var))
        elif (inner := _called(equation)) is not None:
            inside = _variables_that_lead_to(inner, wants)
            pairs = zip(equation.invars, inner.invars, strict=True)
            chosen.update(x for x, y in pairs if y in inside and isinstance(x, Var))
    return chosen


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """Returns what an operation calls once, with its own inputs; None for all other operations."""
    name, params = equation.primitive.name, equation.params
    # What is recomputed behind a barrier is no part of what is around it.
    if name in _CALLS or (name in _REMAT and not params["prevent_cse"]):
        return getattr(params["jaxpr"], "jaxpr", params["jaxpr"])  # type: ignore[no-any-return]
    return None


def _is_linear(equation: JaxprEqn, inputs: Sequence[_Value]) -> bool:
    """Whether an operation is linear in the inputs that are shard sums, and is run on each."""
    name = equation.primitive.name
    pairs = zip(equation.invars, inputs, strict=True)
    sizes = [math.prod(shape_of(variable)) for variable, x in pairs if x.is_split]
    # Sums that are broadcast, as to all rows, are added up before: they take less memory so.
    out_sizes = [math.prod(shape_of(x)) for x in equation.outvars]
    if not sizes or max(out_sizes) > max(sizes):
        return False
    if name in _PRODUCTS:
        first, second = (x.is_split for x in inputs)
        return first != second and not (name == "div" and second)
    return name in _LINEAR
