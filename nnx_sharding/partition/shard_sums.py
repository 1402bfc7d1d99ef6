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

So the traced backward pass is run anew, operation by operation. Those that sum over rows, such as
``dot_general``, compute the sums of the shards instead, and operations that are linear, such as
``transpose``, map over them. Where a value is needed for anything else, the sums are added up
before.

What has rows is known from the dimensions of the inputs that have them. It is found by shapes, and
only says which sums are split: a wrong guess costs time, as each sum may be split in any dimension.
What is not found, such as in a ``shard_map``, is reduced at once, as without this.

Shard sums are on the devices of their rows. On Explicit axes their type says so, from where a value
is split on (`ShardSums._type`); on Auto axes they are constrained (`ShardSums._constrain`). One
backward pass may have both, as modules of a strategy run with Auto axes.
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
class _Value:
    """An array, or its shard sums, and which of its dimensions has the rows."""

    array: Any  # of the shape of the value; (shards, *shape) for shard sums
    rows: int | None = None
    is_split: bool = False


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
        return self._constrain(self._type_like(sums, x), *entries)

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
        outputs = [
            self._split(x) if wants else self._whole(x)
            for x, wants in zip(self._run(closed, values, is_wanted), is_wanted, strict=True)
        ]
        found: tuple[dict[int, Any], Rest]
        found = jax.tree.unflatten(jax.tree.structure(results), outputs)
        return found

    def _type(self, sums: jax.Array, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
        """Types shard sums of a value with this spec on the Explicit axes of a mesh.

        The axes of the rows shard the first dimension, and so none of the others any more.
        """
        explicit = axes_of_type(mesh, AxisType.Explicit)
        rows = tuple(axis for axis in self.axes if axis in explicit)
        others = self._without_rows(spec, mesh).partitions
        return cast(jax.Array, retype(sums, mesh, PartitionSpec(rows or None, *others)))

    def _type_like(self, sums: jax.Array, value: jax.Array) -> jax.Array:
        """Types shard sums of this value; without Explicit axes, they stay as they are."""
        mesh = self._mesh_of(value)
        if not axes_of_type(mesh, AxisType.Explicit):
            return sums
        return self._type(sums, mesh, type_spec(value) or PartitionSpec())

    def _constrain(self, sums: jax.Array, *entries: object) -> jax.Array:
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

    def _without_rows(self, spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
        """Returns a spec without the axes of the rows."""
        return keep_axes(spec, {*mesh.axis_names}.difference(self.axes))

    def _whole(self, value: _Value) -> Any:
        """Adds up shard sums: (shards, *shape) → shape."""
        if not value.is_split:
            return value.array
        with in_context(type_mesh(value.array)):
            return value.array.sum(0)

    def _split(self, value: _Value) -> jax.Array:
        """Returns shard sums: those of a sum that is known already are 0, but for the first one."""
        if value.is_split:
            return self._constrain(value.array)
        with in_context(type_mesh(value.array)):
            is_first = jnp.arange(self.shards).reshape(-1, *[1] * jnp.ndim(value.array)) == 0
            sums = jnp.where(is_first, value.array, jnp.zeros_like(value.array))
        return self._constrain(self._type_like(sums, value.array))

    def _run(self, closed: Any, inputs: Sequence[_Value], wanted: Sequence[bool]) -> list[_Value]:
        """Runs a jaxpr; outputs that are wanted are shard sums where that is possible."""
        jaxpr: Jaxpr = getattr(closed, "jaxpr", closed)
        constants = [_Value(x) for x in getattr(closed, "consts", ())]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Var, _Value] = dict(zip(variables, [*constants, *inputs], strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if isinstance(atom, Literal) else values[atom]

        chosen = _sums_that_lead_to(jaxpr, wanted)
        for equation in jaxpr.eqns:
            wants = [variable in chosen for variable in equation.outvars]
            with _compat.in_scope_of(equation):
                outputs = self._run_equation(equation, [read(x) for x in equation.invars], wants)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _run_equation(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value]:
        """Runs one operation; outputs that are wanted are shard sums where that is possible."""
        name = equation.primitive.name
        if any(wanted):
            if _called(equation) is not None:
                return self._run(equation.params["jaxpr"], inputs, wanted)
            if name in _REMAT:
                # The backward pass with the forward pass that it recomputes: a barrier keeps the
                # compiler from computing that only once, in the forward pass.
                arrays = jax.lax.optimization_barrier([self._whole(x) for x in inputs])
                inputs = [_Value(x, old.rows) for x, old in zip(arrays, inputs, strict=True)]
                return self._run(equation.params["jaxpr"], inputs, wanted)
            if name == "scan":
                return self._run_scan(equation, inputs, wanted)
            if _is_linear(equation, inputs):
                return self._map(equation, inputs)
            if dims := self._summed_dims(equation, inputs):
                return self._split_sum(equation, inputs, dims)
        inputs = [dataclasses.replace(x, array=self._whole(x), is_split=False) for x in inputs]
        outputs = _compat.run_equation(equation, [x.array for x in inputs])
        return [_Value(x, _rows_of_output(equation, inputs, x.shape)) for x in outputs]

    def _map(self, equation: JaxprEqn, inputs: Sequence[_Value]) -> list[_Value]:
        """Runs a linear operation on each shard sum."""
        name = equation.primitive.name
        if name in ("sharding_constraint", "reshard"):
            return [_Value(self._shard_like_value(inputs[0].array, equation), is_split=True)]
        if name == "add_any":
            arrays = [self._split(x) for x in inputs]
            dims: list[int | None] = [0] * len(inputs)
        else:
            arrays = [x.array for x in inputs]
            dims = [0 if x.is_split else None for x in inputs]
        return [_Value(x, is_split=True) for x in _run_mapped(equation, arrays, dims)]

    def _shard_like_value(self, sums: jax.Array, equation: JaxprEqn) -> jax.Array:
        """Shards sums as an operation shards their value, (*shape).

        The axes of the rows shard the sums already. A ``reshard`` may also change to the types of
        another mesh.
        """
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if not isinstance(sharding, NamedSharding):
            return sums
        if equation.primitive.name == "reshard":
            return self._constrain(self._type(sums, sharding.mesh, sharding.spec))
        entries = self._without_rows(sharding.spec, sharding.mesh).partitions
        return self._constrain(sums, *(entry or PartitionSpec.UNCONSTRAINED for entry in entries))

    def _split_sum(
        self, equation: JaxprEqn, inputs: Sequence[_Value], dims: Sequence[int | None]
    ) -> list[_Value]:
        """Runs an operation that sums over rows once for each shard of these, on Auto axes.

        Args:
          equation: the operation.
          inputs: its inputs.
          dims: for each of these the dimension that is summed over; None for one that has none.
        """
        whole = [self._whole(x) for x in inputs]
        meshes = (type_mesh(x) for x in whole)
        mesh = next(filter(None, meshes), self.mesh)
        # JAX cannot type all operations that map over an Explicit axis, such as convolutions.
        auto = mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(axes_of_type(mesh, AxisType.Explicit), AxisType.Auto)
        )
        arrays = [retype(x, auto) for x in whole]
        in_axes = [None if dim is None else int(dim) for dim in dims]  # from NumPy's integers
        with jax.sharding.use_abstract_mesh(auto):
            for i, dim in enumerate(in_axes):
                if dim is not None:  # (…, rows, …) → (…, shards, rows / shards, …)
                    shape = arrays[i].shape
                    split = (*shape[:dim], self.shards, -1, *shape[dim + 1 :])
                    arrays[i] = arrays[i].reshape(split)
            if equation.primitive.name == "scatter-add":
                # What is added to counts once.
                arrays[0], in_axes[0] = self._split(_Value(arrays[0])), 0
            [out] = _run_mapped(equation, arrays, in_axes, auto)
        out = self._constrain(out)
        if auto != mesh.abstract_mesh:
            spec = equation.outvars[0].aval.sharding.spec  # type: ignore[attr-defined]
            out = self._type(out, mesh, spec)
        return [_Value(out, is_split=True)]

    def _summed_dims(
        self, equation: JaxprEqn, inputs: Sequence[_Value]
    ) -> Sequence[int | None] | None:
        """Returns the dimension of each input over whose rows an operation sums; None if none."""
        name, params = equation.primitive.name, equation.params
        dims: tuple[int | None, ...] | None = None
        if name == "dot_general":
            contracted = zip(*params["dimension_numbers"][0], strict=True)
            x, y = (value.rows for value in inputs)
            dims = next((pair for pair in contracted if x == pair[0] or y == pair[1]), None)
        elif name == "reduce_sum" and inputs[0].rows in params["axes"]:
            dims = (inputs[0].rows,)
        elif name == "conv_general_dilated":
            # The rows are the input features of a convolution that returns a kernel's gradient.
            numbers, groups = params["dimension_numbers"], params["feature_group_count"]
            dims = numbers.lhs_spec[1], numbers.rhs_spec[1]
            if groups > 1 or dims != tuple(x.rows for x in inputs):
                dims = None
        elif name == "scatter-add":
            dims = _scattered_rows(params["dimension_numbers"], inputs)
        sizes = [
            jnp.shape(x.array)[dim + x.is_split]
            for x, dim in zip(inputs, dims or (), strict=dims is not None)
            if dim is not None
        ]
        return dims if sizes and all(size % self.shards == 0 for size in sizes) else None

    def _run_scan(
        self, equation: JaxprEqn, inputs: Sequence[_Value], wanted: Sequence[bool]
    ) -> list[_Value]:
        """Runs a ``scan`` whose outputs are shard sums where they are wanted."""
        params = equation.params
        jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        # Inputs are constants, carry and what is scanned; outputs the carry and what is stacked.
        count = len(jaxpr.outvars) - _count_scanned(equation.outvars, jaxpr.outvars)
        end = len(inputs) - _count_scanned(equation.invars, jaxpr.invars)
        starts = end - count, end
        # Added up here, and not in each step.
        constants = [_Value(self._whole(x), x.rows) for x in inputs[: starts[0]]]
        carried, scanned = inputs[slice(*starts)], inputs[starts[1] :]
        # What has rows is no sum over these, though sums of a later operation are linear in it.
        are_sums = [x.rows is None for x in carried] + [True] * (len(wanted) - count)
        wanted = [wants and is_sum for wants, is_sum in zip(wanted, are_sums, strict=True)]
        init = [
            self._split(x) if wants else self._whole(x)
            for x, wants in zip(carried, wanted[:count], strict=True)
        ]
        outputs = list[_Value]()

        def body(carry: Arrays, xs: Arrays) -> tuple[list[Any], list[Any]]:
            values = [
                _Value(x, old.rows, wants)
                for x, old, wants in zip(carry, carried, wanted[:count], strict=True)
            ]
            # Without the dimension that is scanned.
            values += [
                _Value(x, old.rows - 1 if old.rows else None)
                for x, old in zip(xs, scanned, strict=True)
            ]
            outputs[:] = self._run(params["jaxpr"], [*constants, *values], wanted)
            new = [
                self._split(x) if wants else self._whole(x)
                for x, wants in zip(outputs[:count], wanted[:count], strict=True)
            ]
            return new, [x.array for x in outputs[count:]]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(body, init, [self._whole(x) for x in scanned], **options)
        results = [
            _Value(x, old.rows, wants)
            for x, old, wants in zip(carry, outputs[:count], wanted[:count], strict=True)
        ]
        for x, step in zip(stacked, outputs[count:], strict=True):
            if step.is_split:  # (length, shards, …) → (shards, length, …)
                with in_context(type_mesh(x)):
                    swapped = jnp.swapaxes(x, 0, 1)
                results.append(_Value(self._constrain(swapped), is_split=True))
            else:
                results.append(_Value(x, None if step.rows is None else step.rows + 1))
        return results


def _run_mapped(
    equation: JaxprEqn,
    arrays: Arrays,
    dims: Sequence[int | None],
    mesh: AbstractMesh | None = None,
) -> list[Any]:
    """Runs an operation over these dimensions of its inputs; None for those that stay whole.

    With a mesh, on that one, whose axes are Auto.
    """
    if mesh is not None and equation.params.get("out_sharding") is not None:
        equation = equation.replace(params={**equation.params, "out_sharding": None})

    def run(*arrays: Any) -> list[Any]:
        return _compat.run_equation(equation, arrays, mesh)

    outputs: list[Any] = jax.vmap(run, in_axes=tuple(dims))(*arrays)
    return outputs


def _count_scanned(outside: Arrays, inside: Arrays) -> int:
    """Counts the arrays that have one dimension more outside of the body of a ``scan``."""
    return sum(x.aval.ndim > y.aval.ndim for x, y in zip(outside, inside, strict=True))


def _sums_that_lead_to(jaxpr: Jaxpr, wanted: Sequence[bool]) -> set[Any]:
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
            inside = _sums_that_lead_to(inner, wants)
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
    sizes = [math.prod(x.array.shape[1:]) for x in inputs if x.is_split]
    # Sums that are broadcast, as to all rows, are added up before: they take less memory so.
    shapes = [getattr(x.aval, "shape", ()) for x in equation.outvars]
    if not sizes or any(math.prod(shape) > max(sizes) for shape in shapes):
        return False
    if name in _PRODUCTS:
        first, second = (x.is_split for x in inputs)
        return first != second and not (name == "div" and second)
    return name in _LINEAR


def _scattered_rows(numbers: Any, inputs: Sequence[_Value]) -> tuple[int | None, ...] | None:
    """Returns the dimensions of the rows in the operand, indices and updates of a scatter."""
    rows = inputs[2].rows
    # The dimensions of the updates that are no window are those of the indices, in order.
    others = [i for i in range(jnp.ndim(inputs[2].array)) if i not in numbers.update_window_dims]
    if rows not in others:
        return None
    index = others.index(rows)
    return None if index in numbers.scatter_indices_batching_dims else (None, index, rows)


def _rows_of_output(
    equation: JaxprEqn, inputs: Sequence[_Value], shape: tuple[int, ...]
) -> int | None:
    """Returns which dimension of an operation's output has the rows, as far as shapes say so."""
    name, params = equation.primitive.name, equation.params
    for position, value in enumerate(inputs):
        if value.rows is None:
            continue
        before = jnp.shape(value.array)
        rows = _moved_rows(name, params, position, value.rows, inputs, before, shape)
        if rows is not None and rows < len(shape):
            return rows
    return None


def _moved_rows(
    name: str,
    params: dict[str, Any],
    position: int,
    rows: int,
    inputs: Sequence[_Value],
    before: tuple[int, ...],
    shape: tuple[int, ...],
) -> int | None:
    """Returns where an operation moves the rows of one of its inputs."""
    if name == "dot_general":
        contracted, batched = (pair[position] for pair in params["dimension_numbers"])
        if rows in batched:
            return batched.index(rows)  # type: ignore[no-any-return]
        free = [i for i in range(len(before)) if i not in (*contracted, *batched)]
        if rows not in free:
            return None
        first = jnp.ndim(inputs[0].array) - len(contracted) if position else len(batched)
        return first + free.index(rows)
    if name == "transpose":
        return params["permutation"].index(rows)  # type: ignore[no-any-return]
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][rows]  # type: ignore[no-any-return]
    if name == "gather":
        if position == 0:
            return None
        others = [i for i in range(len(shape)) if i not in params["dimension_numbers"].offset_dims]
        return others[rows] if rows < len(others) else None
    if name == "reshape" or name == "squeeze":
        # As many elements are before the rows, which may have been joined with what follows.
        size = math.prod(before[:rows])
        same = (i for i in range(len(shape)) if math.prod(shape[:i]) == size)
        return next((i for i in same if shape[i] % before[rows] == 0), None)
    if name.startswith("reduce_") or name in ("argmax", "argmin"):
        axes = params.get("axes", ())
        return None if rows in axes else rows - sum(axis < rows for axis in axes)
    # Operations on each element, and those that change another dimension.
    is_kept = len(shape) == len(before) and shape[rows] == before[rows]
    return rows if is_kept else None
