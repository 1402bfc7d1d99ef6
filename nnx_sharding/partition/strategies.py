"""Shardings of a model by shapes alone (replicated, FSDP, ZeRO-1), and helpers of all strategies.

A *strategy* reads the paths, shapes and metadata of a model, never its values, and returns a
``StateSharding``. All strategies, including those in other files, have the same steps::

    mesh, axes = mesh_and_axes(name, mesh, axis)         the mesh axes to shard over, checked
    parameters = variables(model)                        flattens the model, once
    specs = base_specs(name, parameters, base, mesh)     path → the spec in `base`, else P()
    …                                                    replaces entries of this dict
    remarks = remarks_on(specs, name, base, …)           texts about each path, for reports
    with_optimizer(specs, parameters, optimizer, …)      the same for the optimizer's state

A *spec* is a ``PartitionSpec``. A spec has an *entry* for each dimension of an array, with the mesh
axes that shard the dimension. ``base`` is the result of an earlier strategy, to which a strategy
adds. ``name`` is the name of the strategy, for messages. A *note* says why an array stays
replicated, or what its spec costs; ``check_sharding`` shows it. A *layer* is one of the layers that
a model stacks in one array (``layers.py``), to loop over them. If equal sizes leave open which
dimension has the layers, the layers are *ambiguous*. Devices are in several TPU *slices* if a
slower network connects them.

A parameter is a ``NamedVariable``: ``path``, ``variable`` (or bare array), ``shapes`` of its
arrays, ``shape`` (None if they differ), ``layers`` (which dimensions are stacked layers),
``layer_dimensions`` (the other dimensions) and ``layer_size`` (the number of elements in one
layer).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..core.constrain import given_mesh
from ..core.flatten import flatten
from ..errors import NoMeshError, UnshardedWarning, raise_if_any, warn_or_raise
from ..specs.activation_sharding import ActivationSharding, checked_prefetch
from ..specs.fitting import (
    axes_of,
    axes_text,
    fit_sharding,
    pad_entries,
    show,
    spec_and_mesh,
    spec_axes,
    with_entries,
)
from ..specs.paths import Path, accessor
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyMesh, AxisName, Spec
from ..transforms.stack import count_layer_dimensions
from .mesh import axes_across_slices
from .optimizer import optimizer_specs, optimizer_variables, union, with_optimizer
from .variables import FOLLOWING, NamedVariable, Remarks, SpecsByPath, from_paths, variables


@_compat.api_boundary
def replicated(
    model: object,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: object = None,
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
    parameters = variables(model)
    specs = base_specs("replicated", parameters, base, given_mesh("replicated", mesh))
    remarks = remarks_on(specs, "replicated", base, parameters)
    return with_optimizer(specs, parameters, optimizer, activations_of(base), remarks)


@_compat.api_boundary
def fsdp(
    model: object,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: object = None,
    base: StateSharding | None = None,
    axis: AxisName | tuple[AxisName, ...] = "data",
    min_size: int = 2**14,
    across_slices: bool = False,
    prefetch: int = 0,
) -> StateSharding:
    """Fully sharded data parallelism: each device keeps a shard of every large array.

    In each array, the largest dimension that the axis divides is sharded. If several dimensions are
    equally large, the last of them is. An array without such a dimension is replicated. So are
    normalization layers, random streams and buffers: the masks, rotary tables and other arrays that
    a model holds outside its Variables. A Variable has one spec, so one with arrays of different
    shapes is replicated, too. In an ``nnx.Cache``, only the first dimension may be sharded: the
    requests, because the batch is sharded alike.

    The dimensions of stacked layers are never sharded, because a loop takes one layer at a time.
    They are found in four ways: a :class:`~nnx_sharding.Stack` has them first; a parameter of a
    layer of Flax has them in addition to the shape for one layer, along any axis of ``vmap``; other
    Variables in the same module have them where its layers of Flax do; or the metadata
    (``out_sharding``) name a dimension ``layers``, as ``nnx.PARTITION_NAME`` declares it. If equal
    sizes leave several candidates, none is sharded.

    With ``base``, its specs are kept and the axis is added to each array: on the largest dimension
    that is not sharded yet, else after the axes of the largest dimension. Arrays that cannot have
    the axis keep their specs. So ``fsdp(model, base=tensor_parallel(model))`` is FSDP and tensor
    parallelism. A ``NamedSharding`` in ``base`` is not changed, and neither is a spec that already
    has the axis.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      optimizer: the optimizer of the model, abstract or not, which the result then covers as
        well; see :func:`~nnx_sharding.partition.optimizer_sharding`.
      base: shardings to start from, corrected first if their ``on_indivisible`` requests it.
      axis: the mesh axis, or a tuple of axes that shard one dimension together; where they divide
        no dimension, only the first of them are used.
      min_size: arrays with fewer elements keep the spec of ``base``.
        :func:`~nnx_sharding.report.check_sharding` lists the arrays that stay replicated for this
        reason. If nothing is sharded because of it, there is an
        :class:`~nnx_sharding.errors.UnshardedWarning`.
      across_slices: whether the axis may have devices of several TPU slices. All parameters are
        then gathered over the network between slices. See :func:`make_mesh` for HSDP, which avoids
        that.
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
    checked_prefetch("fsdp", prefetch)  # raises a ValueError unless it is 0 or 1
    if prefetch and not count_layer_dimensions(flatten(((model,), {}))):  # the model has no Stack
        raise ValueError(
            "fsdp: prefetch=1 gathers the parameters of the next layer of a Stack, and the model "
            "has none. Make one of its layers: stack(blocks)."
        )
    parameters = variables(model)
    specs = base_specs("fsdp", parameters, base, mesh)
    notes = _shard_large("fsdp", specs, parameters, axes, mesh, min_size)  # changes `specs`
    notes |= _notes_of_late_gathers(specs, parameters, axes, mesh)
    remarks = remarks_on(specs, "fsdp", base, parameters, axes, notes=notes)
    # While a module runs, its parameters are gathered over the axes.
    activations = activations_of(base).extended(gather=axes, prefetch=prefetch)
    return with_optimizer(specs, parameters, optimizer, activations, remarks)


@_compat.api_boundary
def zero1(
    model: object,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: object,
    base: StateSharding | None = None,
    axis: AxisName | tuple[AxisName, ...] = "data",
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
    # The axes may cross slices, because state is sent once in a step, not with each layer.
    mesh, axes = mesh_and_axes("zero1", mesh, axis, across_slices=True)
    parameters = variables(model)
    specs = base_specs("zero1", parameters, base, mesh)
    # The state gets the specs of its parameters. Then the axes are added to each large array in it.
    state_specs = optimizer_specs(optimizer, specs, parameters)
    state = optimizer_variables(optimizer, parameters)
    # The model in an `nnx.ModelAndOptimizer` is no state, so it keeps its specs.
    if isinstance(optimizer, nnx.ModelAndOptimizer):
        state = [variable for variable in state if variable.path[:1] != ("model",)]
    notes = _shard_large("zero1", state_specs, state, axes, mesh, min_size)  # changes `state_specs`
    # `union` raises an error if both have a path with different specs.
    all_specs = union(specs, state_specs)
    remarks = remarks_on(all_specs, "zero1", base, parameters, axes, notes=notes)
    return from_paths(all_specs, activations_of(base), remarks)


def needed_mesh(name: str, mesh: AnyMesh | None) -> AnyMesh:
    """Returns the mesh, or the one in context.

    Raises:
      NoMeshError: there is none.
    """
    mesh = given_mesh(name, mesh)
    if mesh is None:
        remedy = "Pass mesh=..., or call within `with jax.set_mesh(mesh):`."
        raise NoMeshError(f"{name} has no mesh. {remedy}")
    return mesh


def mesh_and_axes(
    name: str,
    mesh: AnyMesh | None,
    axis: AxisName | tuple[AxisName, ...],
    *,
    across_slices: bool,
) -> tuple[AnyMesh, tuple[AxisName, ...]]:
    """Returns the mesh, or the one in context, and the axes of it that a strategy shards over.

    Args:
      name: the strategy, for errors.
      mesh: the user's mesh; None for the one in context.
      axis: the user's ``axis``: one axis, or several that shard a dimension together.
      across_slices: whether devices along these axes may be in different TPU slices. A strategy
        passes False if it sends much over the axes in each step.

    Raises:
      NoMeshError: there is no mesh.
      ValueError: the mesh lacks an axis; or one crosses TPU slices without ``across_slices``.
    """
    mesh = needed_mesh(name, mesh)
    axes = axes_of(axis)
    reasons = fit_sharding(PartitionSpec(*axes), mesh).reasons if axes else "it names no axis"
    if reasons:
        remedy = f"{axes_text(mesh.shape)} Pass axis=..., one or several of these."
        raise ValueError(f"{name}: axis={axis!r}: {reasons}\n{remedy}")
    # The network between slices is much slower than the links in them.
    crossing = set() if across_slices else axes_across_slices(mesh).intersection(axes)
    if crossing:
        raise ValueError(
            f"{name}: axis={axis!r}: devices along {', '.join(map(repr, sorted(crossing)))} are in "
            "different slices, between which parameters or activations would be sent in each step. "
            "Make a mesh with an axis for the slices, as in make_mesh({'replica': 2, 'data': -1}), "
            "or pass across_slices=True."
        )
    return mesh, axes


def mesh_and_axis(
    name: str, mesh: AnyMesh | None, axis: AxisName, *, across_slices: bool
) -> tuple[AnyMesh, Any]:
    """Returns the mesh, and the one axis that a strategy shards over.

    Arguments and errors are those of :func:`mesh_and_axes`, and several axes are an error.
    """
    mesh, axes = mesh_and_axes(name, mesh, axis, across_slices=across_slices)
    if len(axes) != 1:
        raise ValueError(f"{name}: expected the name of one axis, got axis={axis!r}.")
    return mesh, axes[0]


def base_specs(
    name: str,
    parameters: Iterable[NamedVariable],
    base: StateSharding | None,
    mesh: AnyMesh | None,
) -> SpecsByPath:
    """Returns the sharding that ``base`` has for each path of a model; ``P()`` without one.

    Specs that do not divide their arrays are corrected as ``on_indivisible`` of ``base`` says.

    Args:
      name: the strategy, for errors.
      parameters: the Variables of the model.
      base: the sharding that the strategy adds to; None for ``P()`` everywhere.
      mesh: the mesh that the specs have to fit.

    Raises:
      TypeError: ``base`` is not a ``StateSharding``.
      ValueError: specs do not fit the mesh or a shape, and may not be corrected; all are listed.
    """
    if not isinstance(base, StateSharding | None):
        raise TypeError(f"{name}: base must be a StateSharding, got {show(base)}.")
    if base is None:
        return {variable.path: PartitionSpec() for variable in parameters}
    specs: SpecsByPath = {}
    mismatches = []
    on_indivisible = base.on_indivisible or "error"  # the default of the option
    for variable in parameters:
        spec: Spec
        _, spec = base.find(variable.path, variable.variable)
        # The spec has to fit all arrays of the Variable, so the spec that was corrected for one
        # array is compared with the next one.
        for shape in variable.shapes:
            fit = fit_sharding(spec, mesh, shape, on_indivisible=on_indivisible)
            if fit.problems:
                mismatches.append(fit.line(accessor("model", variable.path)))
                break  # the error has one line for each Variable
            spec = fit.sharding
        specs[variable.path] = PartitionSpec() if spec is None else spec
    head = f"{name}: specs of base do not fit:"
    raise_if_any(ValueError, head, mismatches, "Correct these specs.")
    return specs


def remarks_on(
    specs: SpecsByPath,
    name: str,
    base: StateSharding | None,
    parameters: Iterable[NamedVariable],
    axes: Sequence[AxisName] = (),
    roles: Mapping[Path, str] = MappingProxyType({}),
    notes: Mapping[Path, str] = MappingProxyType({}),
) -> Remarks:
    """Returns texts for reports about the specs of a strategy: its own, and those of ``base``.

    If ``base`` has a note of an array, the result has one of these notes:

    * If base shards the array ("its heads are split"), the strategy's own note, or without one the
      note of base, because it still holds.
    * If base leaves the array whole ("of a normalization layer"), and the strategy neither changes
      the spec nor has a note, the note of base.
    * If base leaves the array whole otherwise, the strategy's own note, if any, followed by the
      note of base, because the two shard over different axes:
      ``fewer than min_size=16384; tensor_parallel leaves it whole: of a normalization layer``.

    Args:
      specs: the specs by path.
      name: the strategy.
      base: the sharding that the strategy adds to. If it shards an array, the strategy in it is
        named first.
      parameters: the Variables of the model.
      axes: the mesh axes that the strategy shards over.
      roles: by path, the part of an array that a device has, such as a ``column``; empty if only
        the sharded dimension is known.
      notes: by path, the notes of the strategy itself.
    """

    def chosen_by(path: Path) -> str:
        """Returns a text that says how the strategy shards an array.

        It is ``column of tensor_parallel``, ``fsdp over dimension 0``, or, for an array that the
        strategy does not shard, only ``fsdp``.
        """
        if roles.get(path):
            return f"{roles[path]} of {name}"
        entries = getattr(specs[path], "partitions", ())  # a NamedSharding stays as it is
        for dimension, entry in enumerate(entries):
            if not set(axes).isdisjoint(axes_of(entry)):
                return f"{name} over dimension {dimension}"
        return name

    remarks = Remarks({**notes}, {path: chosen_by(path) for path in specs})
    if base is None:
        return remarks
    for parameter in parameters:
        path = parameter.path
        # The index of the filter that decides, and its sharding.
        number, base_spec = base.find(path, parameter.variable)
        if number is None:  # base has no filter for this path
            continue
        # A sharding that is not a spec, such as a `NamedSharding`, is the user's choice, so it
        # counts as sharded.
        was_sharded = not isinstance(base_spec, PartitionSpec) or any(
            map(axes_of, base_spec.partitions)
        )
        is_kept = specs[path] == base_spec
        # Filters of strategies have these attributes. Filters of the user do not.
        base_strategy = getattr(base.filters[number], "strategy", "")
        base_note = getattr(base.filters[number], "note", "")
        if base_note:
            remarks.notes[path] = _joined_note(
                notes.get(path),
                base_note,
                base_strategy or "base",
                was_sharded=was_sharded,
                is_kept=is_kept,
            )
        if was_sharded:
            chosen_by_base = base_strategy or base.names[number]  # a strategy, or a user's filter
            if is_kept:
                remarks.strategies[path] = chosen_by_base
            else:
                remarks.strategies[path] = f"{chosen_by_base}, {chosen_by(path)}"
    return remarks


def _joined_note(
    own_note: str | None, base_note: str, base_name: str, *, was_sharded: bool, is_kept: bool
) -> str:
    """Joins the notes that a strategy and its ``base`` have of an array, as `remarks_on` says.

    Args:
      own_note: the note of the strategy; None without one.
      was_sharded: whether base shards the array.
      is_kept: whether the strategy keeps the spec of base.
    """
    if own_note is None and (was_sharded or is_kept):
        return base_note
    if own_note is not None and was_sharded:
        return own_note
    if own_note == base_note:  # a note is not written twice
        return base_note
    why_whole = f"{base_name} leaves it whole: {base_note}"
    return f"{own_note}; {why_whole}" if own_note else why_whole


def activations_of(base: StateSharding | None) -> ActivationSharding:
    """Returns how ``base`` shards activations; `FOLLOWING` without base, or if it does not say."""
    if base is None or base.activations is None:
        return FOLLOWING
    return base.activations


def _shard_large(
    name: str,
    specs: SpecsByPath,
    arrays: Iterable[NamedVariable],
    axes: Sequence[AxisName],
    mesh: AnyMesh,
    min_size: int,
) -> dict[Path, str]:
    """Shards each array with at least ``min_size`` elements over the axes, as FSDP does.

    Warns if nothing is sharded because of ``min_size``. For stacked layers, the elements of one
    layer count, because a loop gathers one layer at a time.

    Args:
      specs: the specs of all arrays by path. The specs of arrays that are sharded are replaced.

    Returns:
      Notes by path, which say why an array stays replicated.
    """
    notes: dict[Path, str] = {}
    too_small: list[NamedVariable] = []  # arrays that min_size alone excludes
    is_any_sharded = False
    for array in arrays:
        old_spec = specs[array.path]
        # `shard_largest` returns `old_spec` if it cannot add the axes.
        new_spec = shard_largest(old_spec, array, axes, mesh)
        if new_spec != old_spec and array.layer_size < min_size:
            new_spec = old_spec
            too_small.append(array)
            if not spec_axes_of(old_spec, mesh):  # an array that `base` shards needs no note
                per_layer = " in each layer" if array.layers.dimensions else ""
                notes[array.path] = f"fewer than min_size={min_size}{per_layer}"
        # Other reasons to leave an array whole are only noted for arrays that are large enough.
        elif not spec_axes_of(new_spec, mesh):
            if array.layers.is_ambiguous:
                notes[array.path] = ambiguous_layers(array)
            elif array.shape is None:
                notes[array.path] = SEVERAL_SHAPES
            elif isinstance(array.variable, nnx.Cache) and array.layer_dimensions:
                requests = array.shape[array.layer_dimensions[0]]
                names = ", ".join(map(repr, axes))
                notes[array.path] = (
                    f"a cache, whose first dimension ({requests}) is not divided by {names}"
                )
        specs[array.path] = new_spec
        if not spec_axes_of(new_spec, mesh).isdisjoint(axes):
            is_any_sharded = True
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    if too_small and not is_any_sharded and num_shards > 1:
        _warn_of_small(name, too_small, axes, min_size)
    return notes


def _warn_of_small(
    name: str, arrays: Iterable[NamedVariable], axes: Sequence[AxisName], min_size: int
) -> None:
    """Warns that nothing is sharded, because all arrays are smaller than ``min_size``.

    The warning is for small models, which users try first, and which would silently stay
    replicated.

    Args:
      arrays: the arrays that could be sharded otherwise; at least one.
    """
    largest = max(arrays, key=lambda array: (array.layer_size, array.name))
    warn_or_raise(
        UnshardedWarning,
        f"{name}: nothing is sharded over {', '.join(map(repr, axes))}: all arrays that could "
        f"be have fewer elements than min_size={min_size}. The largest, {largest.name}, has "
        f"{largest.layer_size}. Pass a smaller min_size, such as min_size=0.",
        strict=False,
    )


def _notes_of_late_gathers(
    specs: SpecsByPath,
    parameters: Iterable[NamedVariable],
    axes: Sequence[AxisName],
    mesh: AnyMesh,
) -> dict[Path, str]:
    """Returns a note for each sharded Variable that is no ``nnx.Param``: where it is gathered.

    A module gathers its own Params as they are stored. Any other Variable is data, such as a cache,
    so the compiler gathers it at its use, where an int8 weight may have become float32.

    Args:
      axes: the mesh axes over which Params are gathered.
    """
    notes = {}
    for parameter in parameters:
        variable = parameter.variable
        if isinstance(variable, nnx.Param | nnx.Cache) or not _compat.is_any_variable(variable):
            continue
        if not spec_axes_of(specs[parameter.path], mesh).isdisjoint(axes):
            notes[parameter.path] = (
                "gathered where it is used, in the dtype of the product, because "
                f"{type(variable).__name__} is not an nnx.Param"
            )
    return notes


# The note of a Variable that holds arrays of different shapes.
SEVERAL_SHAPES = "its arrays have different shapes, and a Variable has one spec: use several"


def spec_axes_of(sharding: Spec, mesh: AnyMesh | None) -> Set[AxisName]:
    """Returns the mesh axes that a sharding uses; none if it has no spec."""
    pair = spec_and_mesh(sharding, mesh)
    return frozenset() if pair is None else frozenset(spec_axes(pair[0]))


def ambiguous_layers(variable: NamedVariable) -> str:
    """Returns the note for a Variable that is stacked along an unknown dimension."""
    return (
        f"its layers are stacked along one of the dimensions {variable.layers.dimensions}, none of "
        "which is sharded. To tell which, name it 'layers' in its out_sharding, or pass base=…"
    )


def shard_dimension(
    spec: Spec,
    shape: Sequence[int] | None,
    dimension: int,
    axes: Sequence[AxisName],
    mesh: AnyMesh,
) -> PartitionSpec | None:
    """Adds mesh axes to one dimension of a spec: ``P("data")`` → ``P("data", "model")``.

    The new axes come after axes that shard the dimension already.

    Args:
      spec: the sharding to add to.
      shape: the shape of the array; None if it is not known.
      dimension: the dimension to shard; may be negative.
      axes: the mesh axes to add.
      mesh: the mesh.

    Returns:
      The new spec. None if the axes cannot be added: the spec uses one of them already or leaves
      the dimension to the compiler, the axes do not divide the size, the shape is not known or has
      no such dimension, or ``spec`` is not a ``PartitionSpec``. A ``NamedSharding`` is not changed.
    """
    if shape is None or not isinstance(spec, PartitionSpec) or len(spec) > len(shape):
        return None
    is_any_axis_used = not set(axes).isdisjoint(spec_axes(spec))
    if is_any_axis_used or not -len(shape) <= dimension < len(shape):
        return None
    entries = pad_entries(spec, len(shape))
    if entries[dimension] is PartitionSpec.UNCONSTRAINED:
        return None
    all_axes = (*axes_of(entries[dimension]), *axes)
    entry = all_axes if len(all_axes) > 1 else all_axes[0]
    if not _divides(entry, mesh, shape[dimension]):
        return None
    entries[dimension] = entry
    return with_entries(spec, entries)


@functools.lru_cache(maxsize=4096)  # a model has few different sizes, so most calls are repeated
def _divides(entry: AxisName | tuple[AxisName, ...], mesh: AnyMesh, size: int) -> bool:
    """Whether a dimension may be sharded over some axes of a mesh."""
    return not fit_sharding(PartitionSpec(entry), mesh, [size]).problems


def shard_largest(
    sharding: Spec, variable: NamedVariable, axes: Sequence[AxisName], mesh: AnyMesh
) -> Any:
    """Adds mesh axes to the largest dimension of an array that they divide, as FSDP shards it.

    Axes that the sharding uses already are left out. If no dimension can have all remaining axes,
    the last axes are left out one by one. If no dimension can have even the first axis, the
    sharding is returned unchanged. The same holds for buffers, normalization layers, random streams
    and a Variable with arrays of different shapes. A cache is sharded along its first dimension,
    the requests, or not at all, because attention reads all positions of a request.

    Args:
      sharding: the sharding of the array so far. Only a ``PartitionSpec`` is added to.
      variable: the array, with its dimensions of stacked layers.
      axes: the mesh axes, the most important first.
      mesh: the mesh.
    """
    shape = variable.shape
    stays_whole = (
        variable.is_buffer or variable.is_norm or isinstance(variable.variable, nnx.RngState)
    )
    if not isinstance(sharding, PartitionSpec) or stays_whole or shape is None:
        return sharding
    # There is an entry for each dimension. A spec that is too long for the shape stays so, and
    # `shard_dimension` does not add to it.
    entries = pad_entries(sharding, max(len(shape), len(sharding)))

    def preference(dimension: int) -> tuple[bool, int, int]:
        """Returns a sorting key: unsharded dimensions first, then larger ones, then later ones."""
        is_sharded = bool(axes_of(entries[dimension]))
        return is_sharded, -shape[dimension], -dimension

    # The dimensions of stacked layers are left out, because a loop takes a slice of these in each
    # step, and the slice would be on one device.
    dimensions = variable.layer_dimensions
    if isinstance(variable.variable, nnx.Cache):
        dimensions = dimensions[:1]
    dimensions = sorted(dimensions, key=preference)
    free_axes = [axis for axis in axes if axis not in spec_axes(sharding)]
    for count in range(len(free_axes), 0, -1):
        for dimension in dimensions:
            spec = shard_dimension(sharding, shape, dimension, free_axes[:count], mesh)
            if spec is not None:
                return spec
    return sharding
