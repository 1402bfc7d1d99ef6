"""``vmap`` for functions that take and return NNX objects.

The *pure function* of a call takes all arrays of the arguments, and returns all arrays of the
result, in groups of one axis each. `jax.vmap` maps it, with an axis for each array: its *spec*
(``mapped_axes.py``). A *slot* is the position of an array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..core.constrain import retype, shape_of, type_as_in_jit, type_mesh, type_spec
from ..core.memory import is_keys
from ..core.plan import Plan
from ..core.problems import array_line
from ..errors import message, raise_if_any
from ..specs.fitting import axes_of, axes_of_type, pad_entries, spec_axes, with_entries
from ..specs.types import CARRY, Axis
from .in_trace import Function, Inner, call_on_slots, replace_slots, type_text
from .lifted import lift
from .mapped_axes import Mapped, axes_specs, jax_options


@_compat.api_boundary
def vmap(
    f: Callable[..., object] | None = None,
    *,
    in_axes: object = 0,
    out_axes: object = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable = None,
    transform_metadata: Mapping[Any, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Vectorizes a function whose arguments and results may be NNX objects.

    A mapped Variable has one more dimension outside the function than inside. Values that the
    function writes to it are stacked along the same axis, and so are new Variables. A Variable that
    is not mapped has to be the same for all elements after the call.

    Args:
      f: the function.
      in_axes: the axis along which each argument is mapped, None for an argument that is not: one
        for all of them, a tuple with one for each positional parameter, or a mapping from parameter
        names; each a pytree prefix of its argument, with :class:`~nnx_sharding.StateAxes` allowed
        for a module. Other keyword-only parameters are not mapped.
      out_axes: the axes of the result, in the same form.
      axis_name: a name for the axis, for collectives.
      axis_size: the size of the axis, if nothing is mapped.
      spmd_axis_name: the mesh axis over which it is sharded, for constraints in the function.
      transform_metadata: metadata of Variables for the axis, as ``flax.nnx.vmap`` takes them:
        ``{nnx.PARTITION_NAME: "layers"}`` names it in their logical axes.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that maps ``f``.

    Raises:
      TypeError: something is not an axis, or ``Carry``; at a call, arguments do not fit the
        signature of ``f``.
      ValueError: at a call, axes do not fit the arguments or the results, mapped arrays have
        different sizes, or something that is not mapped differs between the elements.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import vmap
      >>> make = nnx.split_rngs(splits=3)(vmap(lambda rngs: nnx.Linear(2, 4, rngs=rngs)))
      >>> models = make(nnx.Rngs(0))
      >>> models.kernel.shape
      (3, 2, 4)
      >>> vmap(lambda model, x: model(x), in_axes=(0, None))(models, jnp.ones(2)).shape
      (3, 4)

    The semantics are those of ``jax.vmap`` and ``flax.nnx.vmap``.
    """
    # The specs are pytrees of `Axis` and `CARRY` in place of the user's axes; ``written`` lists all
    # of them.
    in_specs, out_specs = axes_specs("in_axes", in_axes), axes_specs("out_axes", out_axes)
    # A user who turns a `scan` into a `vmap` may have kept its axes.
    if CARRY in (*in_specs.written, *out_specs.written):
        raise TypeError("vmap: Carry is for scan; the elements of vmap are independent.")
    transform = _Vmap(
        in_specs=in_specs,
        out_specs=out_specs,
        options=jax_options(  # hashable, because they are in the key of a plan
            axis_name=axis_name, axis_size=axis_size, spmd_axis_name=spmd_axis_name
        ),
        metadata=tuple((transform_metadata or {}).items()),
    )

    def decorate(f: Callable[..., object]) -> Any:
        return lift(Inner, f, transform, graph, graph_updates)

    return decorate if f is None else decorate(f)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vmap(Mapped):
    """The options of ``vmap``, and what they decide: the mapped function, and checks of results.

    ``options`` are those of `jax.vmap`, as pairs of a name and a `Static` with the value.
    """

    name: str = "vmap"

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        """Returns a function of all arrays that calls ``jax.vmap`` of the pure function.

        Args:
          plan: has an axis for each array (``specs``) and each group of outputs (``out_specs``).
          function: the pure function, of the arrays of one element.
        """
        # The user's options of `jax.vmap` are kept as hashable pairs.
        options: dict[str, Any] = {key: option.value for key, option in self.options}
        # The last axis is for the outcome.
        options["out_axes"] = (*(axis.index for axis in plan.out_specs), None)
        in_axes = tuple(axis.index for axis in plan.specs)

        def call_mapped(*leaves: object) -> Any:
            leaves = _shard_alike(leaves, in_axes, plan.names)
            # JAX refuses an unmapped argument that is sharded over the mapped mesh axis, such as a
            # parameter that a layer gathers, but accepts it as a constant that the function
            # captures. So unmapped arrays whose types are sharded are captured.
            slots = []  # of the arrays that are not captured
            for slot, (leaf, axis) in enumerate(zip(leaves, in_axes, strict=True)):
                is_captured = axis is None and any(spec_axes(type_spec(leaf) or PartitionSpec()))
                if not is_captured:
                    slots.append(slot)
            # Without captured arrays, errors of JAX can name the arguments.
            if len(slots) == len(leaves):
                try:
                    return jax.vmap(function, in_axes, **options)(*leaves)
                except Exception as error:
                    # Adds a note to JAX's error if it is about the keys of all elements.
                    _explain_stacked_keys(error, plan, leaves)
                    raise
            axes = tuple(in_axes[slot] for slot in slots)
            mapped = functools.partial(jax.vmap, in_axes=axes, **options)
            return call_on_slots(mapped, function, leaves, slots)

        return call_mapped

    def stacks_captured(self, array: object) -> bool:
        """Whether a captured array is stacked: unless it is equal for all elements."""
        return _compat.varies_in_vmap(array)

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Sequence[object], specs: Sequence[Axis]
    ) -> None:
        """Raises a ``ValueError`` for results that cannot be stacked, or differ without an axis.

        Args:
          names: the expression for each result, such as ``output[0]`` or ``model.count``.
        """
        super().check_outputs(fun_name, names, leaves, specs)  # raises for axes that do not fit
        lines = [
            f"  {name}, {type_text(leaf)}"
            for name, leaf, spec in zip(names, leaves, specs, strict=True)
            if spec.index is None and _compat.varies_in_vmap(leaf)
        ]
        raise_if_any(
            ValueError,
            f"vmap: these are not mapped (axis None), but {fun_name} makes them differ between "
            "the elements:",
            lines,
            "Give each an axis in in_axes or out_axes, in a module by StateAxes, or reduce it, as "
            "in jax.lax.pmean with axis_name.",
            anchor="differs-between-elements",
        )


def _shard_alike(
    leaves: tuple[Any, ...], in_axes: Sequence[int | None], names: Sequence[str]
) -> tuple[Any, ...]:
    """Returns the arrays with their mapped dimensions sharded over the same Explicit axes.

    JAX refuses mapped dimensions that are sharded differently. A replicated dimension, for example
    of keys that the user's function has split, is sharded like the mapped dimension of the other
    arrays, as on Auto axes: nothing is sent.

    Args:
      in_axes: the axis along which each array is mapped; None if it is not mapped.
      names: the expression for each array, such as ``x`` or ``model.kernel``.

    Raises:
      ValueError: mapped dimensions are sharded over different axes.
    """
    dimensions = _mapped_dimensions(leaves, in_axes)
    # JAX has an error of its own for dimensions of different sizes.
    sizes = {leaves[slot].shape[dimension] for slot, dimension in dimensions.items()}
    given_specs = [type_spec(leaves[slot]) or PartitionSpec() for slot in dimensions]
    are_sharded = [any(spec_axes(spec)) for spec in given_specs]
    if len(sizes) != 1 or not any(are_sharded):
        return leaves
    aligned = [*_put_on_mesh(leaves, [*dimensions])]
    # The mesh axes that shard each mapped dimension, by slot; empty if it is replicated.
    specs = {slot: type_spec(aligned[slot]) or PartitionSpec() for slot in dimensions}
    mesh_axes = {}
    for slot, dimension in dimensions.items():
        entry = pad_entries(specs[slot], dimension + 1)[dimension]
        mesh_axes[slot] = axes_of(entry)
    # All mapped dimensions get the axes of the first one that is sharded.
    wanted_axes = next(filter(None, mesh_axes.values()), ())
    unlike_slots = set[int]()
    for slot, dimension in dimensions.items():
        spec, leaf = specs[slot], aligned[slot]
        # An array that is on no mesh is left as it is.
        if mesh_axes[slot] == wanted_axes or type_mesh(leaf) is None:
            continue
        # A mesh axis that shards another dimension of the array cannot shard this one, too.
        if mesh_axes[slot] or not set(wanted_axes).isdisjoint(spec_axes(spec)):
            unlike_slots.add(slot)
            continue
        aligned[slot] = _shard_dimension(leaf, dimension, wanted_axes)
    lines = []
    if unlike_slots:
        # The error shows all dimensions that are sharded, and those that cannot be sharded alike.
        for slot, dimension in dimensions.items():
            if slot in unlike_slots or mesh_axes[slot]:
                lines.append(f"  {names[slot]}, {type_text(leaves[slot])}, axis {dimension}")
    raise_if_any(
        ValueError,
        "vmap: the mapped dimensions of these arguments are sharded over different axes:",
        lines,
        "Shard them alike before the call, as by nnx_sharding.reshard(x, spec).",
    )
    return tuple(aligned)


def _mapped_dimensions(leaves: Sequence[Any], in_axes: Sequence[int | None]) -> dict[int, int]:
    """Returns the mapped dimension of each array, by slot, counted from the front.

    The result has neither values of a hijax type nor arrays without that dimension, for which JAX
    has an error of its own.
    """
    dimensions = {}
    for slot, (leaf, axis) in enumerate(zip(leaves, in_axes, strict=True)):
        rank = len(shape_of(leaf) or ())  # `shape_of` is None for a hijax type
        if axis is not None and -rank <= axis < rank:
            dimensions[slot] = axis % rank
    return dimensions


def _shard_dimension(x: jax.Array, dimension: int, axes: tuple[Any, ...]) -> jax.Array:
    """Returns an array with a type in which these mesh axes shard a dimension that was whole."""
    spec = type_spec(x) or PartitionSpec()
    entries = pad_entries(spec, x.ndim)
    entries[dimension] = axes
    sharded: jax.Array = retype(x, type_mesh(x), with_entries(spec, entries))
    return sharded


def _put_on_mesh(leaves: tuple[Any, ...], slots: Sequence[int]) -> Sequence[Any]:
    """Returns the arrays, with those in ``slots`` that are on no mesh replicated on the context's.

    Such arrays are constants and NumPy arrays. Without Explicit axes in context, nothing changes.
    """
    if not axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit):
        return leaves
    typed = type_as_in_jit([leaves[slot] for slot in slots])
    on_mesh = [
        jax.sharding.reshard(x, PartitionSpec()) if isinstance(x, np.ndarray) else x for x in typed
    ]
    return replace_slots(leaves, slots, on_mesh)


def _explain_stacked_keys(error: Exception, plan: Plan, leaves: Sequence[Any]) -> None:
    """Adds a note to an error of JAX for an array of random keys in place of a single one.

    JAX raises it if the function draws from a stream whose keys, one for each element, are not
    mapped. The note names these keys. All other errors are left alone.

    Args:
      error: the exception that was raised in the trace.
      plan: the plan of the call, with the names and axes of its arrays.
    """
    if not _compat.is_of_stacked_key(error):
        return
    lines = [
        array_line(name, leaf)
        for name, leaf, axis in zip(plan.names, leaves, plan.specs, strict=True)
        if axis.index is None and is_keys(leaf) and leaf.ndim
    ]
    if lines:
        head = "vmap: these random keys are stacked, but each element gets all of them:"
        remedy = "Map them, as in StateAxes({nnx.RngState: 0, nnx.Param: 0, ...: None})."
        error.add_note(message(head, lines, remedy))
