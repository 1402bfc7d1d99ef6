"""Shardings of a model by shapes alone: replicated, FSDP, ZeRO-1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..core.constrain import given_mesh
from ..core.flatten import flatten
from ..errors import NoMeshError, UnshardedWarning, raise_listed, warn_or_raise
from ..specs.activation_sharding import ActivationSharding, checked_prefetch
from ..specs.fitting import axes_of, fit_sharding, padded, spec_and_mesh, spec_axes, with_entries
from ..specs.paths import Path, accessor
from ..specs.state_sharding import StateSharding
from ..transforms.stack import layer_dimensions
from .mesh import axes_across_slices
from .optimizer import optimizer_specs, optimizer_variables, union, with_optimizer
from .variables import FOLLOWING, NamedVariable, from_paths, variables


@_compat.api_boundary
def replicated(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
) -> StateSharding:
    """Replicates every array on every device: plain data parallelism.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh that ``base`` has to fit; None for the one in context.
      optimizer: its optimizer, abstract or not, which the result then covers as well.
      base: shardings to start from: what it shards stays sharded.

    Returns:
      For each path the spec of ``base``, else ``P()``.
    """
    specs = base_specs("replicated", model, base, given_mesh("replicated", mesh))
    return with_optimizer(specs, model, optimizer, activations_of(base))


@_compat.api_boundary
def fsdp(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
    axis: Any = "data",
    min_size: int = 2**14,
    across_slices: bool = False,
    prefetch: int = 0,
) -> StateSharding:
    """Fully sharded data parallelism: each device keeps a shard of every large array.

    In each array, the largest dimension that the axis divides is sharded; of equally large ones,
    the last. An array without such a dimension is replicated, as are normalization layers, random
    streams and buffers: the masks, rotary tables and other arrays that a model holds outside its
    Variables. The dimensions of stacked layers are never sharded: those of a
    :class:`~nnx_sharding.Stack`; what parameters of Flax's layers have beyond the shape for one
    layer, because ``vmap`` put it there along any axis; such a dimension of the Variables beside
    them; and a dimension named ``layers`` in the metadata (``out_sharding``), as declared by
    ``nnx.PARTITION_NAME``. Where equal sizes leave several candidates, none is sharded.

    With ``base``, its specs are kept and the axis is added: on the largest dimension that is not
    sharded yet, else after the axes of the largest one. The others keep their specs. So
    ``fsdp(model, base=tensor_parallel(model))`` is FSDP and tensor parallelism. A
    ``NamedSharding`` in ``base`` is not changed, nor is what it already shards over the axis.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      optimizer: the optimizer of the model, abstract or not, which the result then covers as
        well; see :func:`~nnx_sharding.partition.optimizer_sharding`.
      base: shardings to start from, corrected first if their ``on_indivisible`` requests it.
      axis: the mesh axis, or a tuple of axes that shard one dimension together; where they divide
        no dimension, only the first of them are used.
      min_size: arrays with fewer elements keep the spec of ``base``; those that stay replicated for
        that reason are noted by :func:`~nnx_sharding.report.check_sharding`. If nothing is sharded
        because of it, there is an :class:`~nnx_sharding.errors.UnshardedWarning`.
      across_slices: whether the axis may have devices of several TPU slices, over whose network
        all parameters are then gathered. See :func:`make_mesh` for HSDP, which does not.
      prefetch: 1 to gather the parameters of the next layer of each :class:`~nnx_sharding.Stack`
        while a layer computes, in the forward and the backward pass; 0 to gather them when the
        layer starts. Results are the same. It takes the memory of one more gathered layer, and
        each pass gathers one layer more.

    Returns:
      The spec of each path. All of them divide the shapes.

    Raises:
      ValueError: specs of ``base`` do not fit, or the axis does not, or crosses slices; or
        ``prefetch`` is neither 0 nor 1, or the model has no ``Stack``.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh
      >>> from nnx_sharding.partition import fsdp
      >>> model = nnx.eval_shape(lambda: nnx.Linear(256, 1024, rngs=nnx.Rngs(0)))
      >>> sharding = fsdp(model, mesh=AbstractMesh((8,), ("data",)))
      >>> sharding.map_prefix(("kernel",), model.kernel)
      P(None, 'data')

    This is ZeRO stage 3 (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    mesh, axes = mesh_and_axes("fsdp", mesh, axis, across_slices=across_slices)
    if checked_prefetch("fsdp", prefetch) and not layer_dimensions(flatten(((model,), {}))):
        raise ValueError(
            "fsdp: prefetch=1 gathers the parameters of the next layer of a Stack, and the model "
            "has none. Make one of its layers: stack(blocks)."
        )
    specs = base_specs("fsdp", model, base, mesh)
    notes = _shard_all("fsdp", specs, variables(model), axes, mesh, min_size)
    activations = activations_of(base).extended(gather=axes, prefetch=prefetch)
    return with_optimizer(specs, model, optimizer, activations, notes)


@_compat.api_boundary
def zero1(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any,
    base: StateSharding | None = None,
    axis: Any = "data",
    min_size: int = 2**14,
) -> StateSharding:
    """Shards the state of the optimizer over the data axis; parameters keep their shardings.

    The state first follows the parameters, as in
    :func:`~nnx_sharding.partition.optimizer_sharding`; then each large array in it is also sharded
    over the axis, as by :func:`fsdp`.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      optimizer: its optimizer, abstract or not. The model that an ``nnx.ModelAndOptimizer`` holds
        keeps the shardings of ``base``.
      base: the shardings of the parameters; None for replicated ones.
      axis: the mesh axis, or a tuple of axes, over which the state is sharded.
      min_size: state with fewer elements only follows its parameter; see :func:`fsdp`.

    Returns:
      The spec of each path of both. All of them divide the shapes.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh
      >>> from nnx_sharding.partition import zero1
      >>> model = nnx.Linear(256, 1024, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> sharding = zero1(model, mesh=AbstractMesh((8,), ("data",)), optimizer=optimizer)
      >>> sharding.map_prefix(("kernel",), None)
      P()
      >>> sharding.map_prefix(("opt_state", 0, "mu", "kernel"), None)
      P(None, 'data')

    This is ZeRO stage 1 (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    mesh, axes = mesh_and_axes("zero1", mesh, axis, across_slices=True)
    specs = base_specs("zero1", model, base, mesh)
    state = optimizer_specs(optimizer, from_paths(specs), model)
    of_model = "model" if isinstance(optimizer, nnx.ModelAndOptimizer) else None
    states = optimizer_variables(optimizer, model)
    own = (each for each in states if not each.path or each.path[0] != of_model)
    notes = _shard_all("zero1", state, own, axes, mesh, min_size)
    return from_paths(union(specs, state), activations_of(base), notes)


def needed_mesh(name: str, mesh: Any) -> Mesh | AbstractMesh:
    """The mesh, or the one in context."""
    if (mesh := given_mesh(name, mesh)) is None:
        remedy = "Pass mesh=..., or call within `with jax.set_mesh(mesh):`."
        raise NoMeshError(f"{name} has no mesh. {remedy}")
    return mesh


def mesh_and_axes(
    name: str, mesh: Any, axis: Any, *, across_slices: bool
) -> tuple[Mesh | AbstractMesh, tuple[Any, ...]]:
    """The mesh, or the one in context, and those of its axes that a strategy uses, checked."""
    mesh = needed_mesh(name, mesh)
    axes = axes_of(axis)
    reasons = fit_sharding(PartitionSpec(*axes), mesh).reasons if axes else "it names no axis"
    if reasons:
        sizes = ", ".join(f"{name!r} ({size})" for name, size in mesh.shape.items())
        raise ValueError(f"{name}: axis={axis!r}: {reasons}\nThe mesh has the axes {sizes}.")
    if not across_slices and (crossing := axes_across_slices(mesh).intersection(axes)):
        raise ValueError(
            f"{name}: axis={axis!r}: devices along {', '.join(map(repr, sorted(crossing)))} are in "
            "different slices, between which parameters or activations would be sent in each step. "
            "Make a mesh with an axis for the slices, as in make_mesh({'replica': 2, 'data': -1}), "
            "or pass across_slices=True."
        )
    return mesh, axes


def mesh_and_axis(
    name: str, mesh: Any, axis: Any, *, across_slices: bool
) -> tuple[Mesh | AbstractMesh, str]:
    """The same for a strategy that uses one axis."""
    mesh, axes = mesh_and_axes(name, mesh, axis, across_slices=across_slices)
    if len(axes) != 1:
        raise ValueError(f"{name}: expected the name of one axis, got axis={axis!r}.")
    return mesh, axes[0]


def base_specs(
    name: str, model: Any, base: StateSharding | None, mesh: Mesh | AbstractMesh | None
) -> dict[Path, Any]:
    """The sharding that ``base`` has for each path of a model; ``P()`` where it has none."""
    if not isinstance(base, StateSharding | None):
        raise TypeError(f"{name}: base must be a StateSharding, got {base!r}.")
    specs: dict[Path, Any] = {}
    lines = []
    for each in variables(model):
        spec = None if base is None else base.find(each.path, each.variable)[1]
        action = (base and base.on_indivisible) or "error"
        for shape in each.shapes:
            fit = fit_sharding(spec, mesh, shape, on_indivisible=action)
            if fit.problems:
                lines.append(fit.line(accessor("model", each.path)))
                break
            spec = fit.sharding
        specs[each.path] = PartitionSpec() if spec is None else spec
    raise_listed(ValueError, f"{name}: specs of base do not fit:", lines, "Correct these specs.")
    return specs


def activations_of(base: StateSharding | None) -> ActivationSharding:
    """The shardings of activations that a strategy starts from."""
    return (base and base.activations) or FOLLOWING


def _shard_all(
    name: str,
    specs: dict[Path, Any],
    arrays: Iterable[NamedVariable],
    axes: Sequence[Any],
    mesh: Any,
    min_size: int,
) -> dict[Path, str]:
    """Shards all but small arrays over the axes, in ``specs``, which it changes.

    Returns:
      Why arrays stay replicated, by path.
    """
    notes: dict[Path, str] = {}
    small: list[tuple[int, str]] = []  # what could be sharded, but for its size
    is_used = False
    for array in arrays:
        before, after = specs[array.path], shard_largest(specs[array.path], array, axes, mesh)
        size = array.layer_size  # 0 if it is unknown
        # One that stays as it is has its reason elsewhere: no dimension that the axes divide.
        if after == before or size >= min_size:
            specs[array.path] = after
            if array.layers.is_ambiguous and not spec_axes_of(after, mesh):
                notes[array.path] = ambiguous_layers(array)
        elif size:
            small.append((size, array.name))
            if not any(map(axes_of, before.partitions)):  # `base` may have sharded it already
                per_layer = " in each layer" if array.layers.dimensions else ""
                notes[array.path] = f"fewer than min_size={min_size}{per_layer}"
        is_used |= not set(axes).isdisjoint(spec_axes_of(specs[array.path], mesh))
    if small and not is_used and math.prod(mesh.shape[axis] for axis in axes) > 1:
        _warn_of_small_arrays(name, axes, max(small), min_size)
    return notes


def _warn_of_small_arrays(
    name: str, axes: Sequence[Any], largest: tuple[int, str], min_size: int
) -> None:
    """Warns that a strategy does nothing, since all arrays are small: else it would be silent."""
    size, path = largest
    warn_or_raise(
        UnshardedWarning,
        f"{name}: nothing is sharded over {', '.join(map(repr, axes))}: all arrays that could "
        f"be have fewer elements than min_size={min_size}. The largest, {path}, has {size}. "
        "Pass a smaller min_size, such as min_size=0.",
        strict=False,
    )


def spec_axes_of(sharding: Any, mesh: Any) -> Set[Any]:
    """The mesh axes that a sharding uses, if it has a spec."""
    pair = spec_and_mesh(sharding, mesh)
    return frozenset() if pair is None else frozenset(spec_axes(pair[0]))


def ambiguous_layers(variable: NamedVariable) -> str:
    """Why a Variable is replicated whose dimension of layers is not known."""
    return (
        f"its layers are stacked along one of the dimensions {variable.layers.dimensions}, none of "
        "which is sharded. To tell which, name it 'layers' in its out_sharding, or pass base=…"
    )


def shard_dimension(
    spec: Any, shape: Sequence[int] | None, dimension: int, axes: Sequence[Any], mesh: Any
) -> PartitionSpec | None:
    """A spec with a dimension sharded over further axes; None where that is not possible."""
    if shape is None or not isinstance(spec, PartitionSpec) or len(spec) > len(shape):
        return None
    if not -len(shape) <= dimension < len(shape) or not set(axes).isdisjoint(spec_axes(spec)):
        return None
    entries = padded(spec, len(shape))
    if entries[dimension] is PartitionSpec.UNCONSTRAINED:
        return None
    together = (*axes_of(entries[dimension]), *axes)
    entries[dimension] = together if len(together) > 1 else together[0]
    new = with_entries(spec, entries)
    alone = PartitionSpec(entries[dimension])
    return None if fit_sharding(alone, mesh, [shape[dimension]]).problems else new


def shard_largest(sharding: Any, variable: NamedVariable, axes: Sequence[Any], mesh: Any) -> Any:
    """A sharding with the largest dimension sharded over axes not used yet, as in ``fsdp``."""
    shape = variable.shape
    is_kept = variable.is_buffer or variable.is_norm or isinstance(variable.variable, nnx.RngState)
    if not isinstance(sharding, PartitionSpec) or is_kept or shape is None:
        return sharding
    is_sharded = [bool(axes_of(entry)) for entry in sharding.partitions] + [False] * len(shape)
    own = variable.layer_dimensions  # a loop slices the others
    order = sorted(own, key=lambda d: (is_sharded[d], -shape[d], -d))
    free = [axis for axis in axes if axis not in spec_axes(sharding)]
    choices = (
        shard_dimension(sharding, shape, dimension, free[:count], mesh)
        for count in range(len(free), 0, -1)
        for dimension in order
    )
    return next((spec for spec in choices if spec is not None), sharding)
