"""The state of an optimizer, sharded like the parameters that it belongs to.

Optax keeps copies of the ``nnx.State`` of the parameters (moments, averages, …). Each array of such
a copy belongs to one parameter, its *owner*. The path tells the owner: ``opt_state/0/mu/up/kernel``
is the state of ``up/kernel``. State *follows* its owner: the shape of the state tells which of the
owner's dimensions it has, and these dimensions get the same entries of a spec:

    owner     kernel (256, 1024)   P("data", "model")
    moments   mu     (256, 1024)   P("data", "model")    factor   v_row (256,)   P("data")

Parameters and state are listed as ``NamedVariable``: ``path``, ``variable``, ``shapes`` of its
arrays (``shape``, None if they differ), and ``layers``, the dimensions that are stacked layers.

Helpers in this file: `_with_owners` pairs each state with its owner. `_follow_entries` takes a
value for each dimension of the owner, and returns one for each dimension of the state, or () if
shapes do not tell them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..errors import UnshardedWarning, message, raise_if_any, warn_or_raise
from ..specs.activation_sharding import ActivationSharding
from ..specs.fitting import axes_of, describe, pad_entries, replace_spec, show
from ..specs.paths import Path, path_key, path_string, plain_key
from ..specs.state_sharding import StateSharding
from ..specs.types import Spec
from .layers import Stacked
from .variables import (
    FOLLOWING,
    NO_REMARKS,
    NamedVariable,
    Remarks,
    Shape,
    SpecsByPath,
    from_paths,
    variables,
)


@_compat.api_boundary
def optimizer_sharding(
    optimizer: object, sharding: StateSharding, *, model: object = None
) -> StateSharding:
    """Shards the state of an optimizer like its parameters.

    Optax keeps copies of the ``nnx.State`` of the parameters, such as ``opt_state/0/mu``. The path
    of a Variable in a copy starts, after the copy, with the path of the parameter that it belongs
    to, such as ``up/kernel``. Of a dict of optimizers, with a dict of models that has the same
    keys, each optimizer belongs to the model with its key. A Variable outside of copies belongs to
    the parameter with the longest path that its own path ends with. The spec of the Variable
    depends on its shape:

    * the parameter's shape (moments, traces, averages, gradients): the same spec;
    * the parameter's shape with some dimensions of size 1 or left out (the factors of
      ``adafactor``): the entries of the dimensions that remain;
    * the parameter's shape with more dimensions in front (the memory of ``lbfgs``): the dimensions
      in front are replicated;
    * any other shape, such as placeholders, counts and schedules: ``P()``.

    Copies of parameters that the model does not have stay replicated with an
    :class:`~nnx_sharding.errors.UnshardedWarning`. The optimizer of a part, ``model.head``, is
    passed in a dict with the path of the part, ``{"head": optimizer}``.

    State is never ``reduced`` or ``unreduced``, even if its parameter is: Optax computes it from
    summed gradients, and JAX cannot add an array that is not reduced to one that is.

    Args:
      optimizer: an ``nnx.Optimizer``, an ``nnx.ModelAndOptimizer`` or any pytree with state of
        Optax, abstract (``nnx.eval_shape``) or not.
      sharding: the shardings of the model; a parameter without one counts as ``P()``.
      model: the model of the optimizer, abstract or not; not needed for an
        ``nnx.ModelAndOptimizer``.

    Returns:
      The spec of each path of the optimizer, which divides the shape if the parameter's spec does.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import from_rules, optimizer_sharding
      >>> model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> sharding = from_rules({"kernel": P(None, "model")}, default=P())
      >>> state = optimizer_sharding(optimizer, sharding, model=model)
      >>> state.map_prefix(("opt_state", 0, "mu", "kernel"), None)
      P(None, 'model')
    """
    if not isinstance(sharding, StateSharding):
        raise TypeError(
            f"optimizer_sharding: sharding must be a StateSharding, got {show(sharding)}."
        )
    states = _states_of(optimizer)
    if model is None:
        if not isinstance(optimizer, nnx.ModelAndOptimizer):
            raise ValueError(
                "optimizer_sharding: the shapes of the parameters are needed. Pass model=..., "
                "which may be abstract."
            )
        model = optimizer.model
    parameters = variables(model)
    parameter_specs: SpecsByPath = {}
    for parameter in parameters:
        filter_index, spec = sharding.find(parameter.path, parameter.variable)
        parameter_specs[parameter.path] = PartitionSpec() if filter_index is None else spec
    specs = _follow_all(optimizer, states, parameter_specs, parameters)
    return from_paths(specs, by="optimizer_sharding")


def optimizer_specs(
    optimizer: object, specs: SpecsByPath, parameters: Sequence[NamedVariable]
) -> SpecsByPath:
    """Returns the sharding of each path of an optimizer, which follows the owner's.

    Args:
      optimizer: the optimizer, which may be abstract.
      specs: the sharding of each parameter, by its path in the model. A missing parameter is
        ``P()``.
      parameters: the parameters of the model.
    """
    states = _states_of(optimizer)
    parameter_specs = {x.path: specs.get(x.path, PartitionSpec()) for x in parameters}
    return _follow_all(optimizer, states, parameter_specs, parameters)


def _states_of(optimizer: object) -> Sequence[NamedVariable]:
    """Lists the Variables of an optimizer.

    Raises:
      TypeError: the optimizer has no array, or has leaves that are neither arrays nor numbers. An
        ``optax.GradientTransformation``, which users pass by mistake, is a tuple of two functions.
    """
    states = variables(optimizer)
    leaves = [(state, leaf) for state in states for leaf in state.arrays]
    foreign = [f"  {x.name}: {show(leaf)}" for x, leaf in leaves if not _compat.is_array_like(leaf)]
    num_numbers = sum(isinstance(leaf, int | float | complex) for _, leaf in leaves)
    if len(leaves) == len(foreign) + num_numbers:  # there is no array
        raise TypeError(
            f"optimizer_sharding: {type(optimizer).__name__} holds no state. Pass "
            "nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
    raise_if_any(
        TypeError,
        "optimizer_sharding: these parts of the optimizer are no arrays:",
        foreign,
        "Pass nnx.Optimizer(model, tx, wrt=nnx.Param), or a pytree with state only.",
    )
    return states


def _follow_all(
    optimizer: object,
    states: Iterable[NamedVariable],
    specs: SpecsByPath,
    parameters: Iterable[NamedVariable],
) -> SpecsByPath:
    """Returns the sharding of each state of an optimizer, by its path.

    Args:
      specs: the sharding of each parameter, by its path in the model.
    """
    # State without an owner is replicated. If the shardings of all parameters have the same mesh,
    # it is replicated on this mesh.
    all_specs = specs.values()
    meshes = {spec.mesh if isinstance(spec, NamedSharding) else None for spec in all_specs}
    mesh = meshes.pop() if len(meshes) == 1 else None
    replicated = PartitionSpec()
    ownerless = replicated if mesh is None else NamedSharding(mesh, replicated)
    state_specs: SpecsByPath = {}
    copies = _Copies(optimizer)
    orphans = []  # state in a copy of parameters which the model does not have
    for state, owner in _with_owners(copies, states, parameters):
        if owner is not None:
            state_specs[state.path] = _follow(state, owner, specs[owner.path])
            continue
        state_specs[state.path] = ownerless
        # State in a copy belongs to a parameter, so the model lacks this one. Outside of copies,
        # counts and placeholders belong to none.
        if copies.length_around(state.path) is not None and state.shape != ():
            orphans.append(state)
    if orphans and any(map(_is_sharded, all_specs)):
        _warn_of_orphans(orphans)
    return state_specs


def _is_sharded(sharding: Spec) -> bool:
    """Whether a sharding has a spec that names a mesh axis."""
    spec = getattr(sharding, "spec", sharding)
    return isinstance(spec, PartitionSpec) and any(map(axes_of, spec.partitions))


def _warn_of_orphans(orphans: Sequence[NamedVariable]) -> None:
    """Warns of state in copies of parameters that are not in the model, which is replicated."""
    lines = [f"  {state.name}, shape {state.shape}" for state in orphans]
    warn_or_raise(
        UnshardedWarning,
        message(
            "this state of the optimizer belongs to no parameter of the model, so it is "
            "replicated:",
            lines,
            "If the optimizer updates a part of the model, pass it in a dict with the path of this "
            'part, such as {"head": optimizer} for model.head.',
        ),
        strict=False,
    )


def optimizer_variables(
    optimizer: object, parameters: Iterable[NamedVariable]
) -> list[NamedVariable]:
    """Lists the Variables of an optimizer, with their dimensions of stacked layers.

    The dimensions of a parameter are known from the layer of Flax or the ``Stack`` that holds it.
    An optimizer has neither, so state has the dimensions of its owner. If the layers are the first
    dimension of a kernel (8, 256, 1024), they are the first dimension of its moments, and of a
    factor (8, 256).
    """
    state_variables = []
    for state, owner in _with_owners(_Copies(optimizer), variables(optimizer), parameters):
        if owner is not None:
            state = state._replace(layers=_follow_layers(state, owner))
        state_variables.append(state)
    return state_variables


class _Copies:
    """The copies of the parameters' State that Optax keeps in an optimizer, as ``opt_state/0/mu``.

    The copies are in pytrees of Optax, so they are found by their type.

    Its private attributes: ``_paths`` has the paths of the copies, and ``_lengths`` the numbers of
    keys in these paths, sorted.
    """

    def __init__(self, optimizer: object):
        """Finds the copies in an optimizer."""
        # The ids of modules that were visited. The ids are compared because the model in an
        # optimizer may refer to itself.
        seen = set[int]()

        def is_leaf(x: object) -> bool:
            """Whether x is a State, or a module that was visited before; fills ``seen``."""
            is_seen = _compat.identity(x) in seen
            if _compat.is_node(x):
                seen.add(_compat.identity(x))
            return is_seen or isinstance(x, nnx.State)

        leaves, _ = jax.tree_util.tree_flatten_with_path(optimizer, is_leaf=is_leaf)
        self._paths = {
            tuple(plain_key(path_key(key)) for key in keys)
            for keys, leaf in leaves
            if isinstance(leaf, nnx.State)
        }
        self._lengths = sorted({len(path) for path in self._paths})

    def length_around(self, path: Path) -> int | None:
        """Returns the number of keys that lead to the copy around a state; None outside of copies.

        There is one copy at most, because the State of a model has no other State in it.
        """
        return next((n for n in self._lengths if path[:n] in self._paths), None)


def _with_owners(
    copies: _Copies, states: Iterable[NamedVariable], parameters: Iterable[NamedVariable]
) -> Iterator[tuple[NamedVariable, NamedVariable | None]]:
    """Yields each Variable of an optimizer with its owner; None if it belongs to no parameter."""
    owners = {parameter.path: parameter for parameter in parameters}
    for state in states:
        candidates = _possible_owners(state.path, copies.length_around(state.path))
        owner = next((owners[path] for path in candidates if path in owners), None)
        yield state, owner


def _possible_owners(path: Path, copy_length: int | None) -> Iterator[Path]:
    """Yields the paths that the owner of state may have; the first one that exists is the owner's.

    Args:
      path: the path of the state in the optimizer.
      copy_length: the number of keys at the start of the path that lead to a copy of the
        parameters; None if the state is in no copy.
    """
    length = len(path)
    if copy_length is None:
        # Outside of a copy, the owner's path may be any end of the path; the longest comes first.
        # ``model/up/kernel`` of an nnx.ModelAndOptimizer belongs to ``up/kernel``.
        for start in range(length + 1):
            yield path[start:]
        return
    # In a copy, the owner's path starts at the copy, and the last keys may be left out. In ``mu``,
    # the state ``up/kernel/0`` belongs to ``up/kernel``. Keys in front of the optimizer come first
    # if the model has them, too: ``gen/opt_state/0/mu/up/kernel`` belongs to ``gen/up/kernel`` of
    # the models {"gen": …, "disc": …}.
    for end in range(length, copy_length - 1, -1):
        for num_in_front in range(copy_length, -1, -1):
            yield path[:num_in_front] + path[copy_length:end]


def _follow_layers(state: NamedVariable, owner: NamedVariable) -> Stacked:
    """Returns which dimensions of state are stacked layers, from its owner's dimensions."""
    if state.shape is None or owner.shape is None or not owner.layers.dimensions:
        return Stacked()
    # `_follow_entries` gets a flag for each dimension of the owner instead of an entry of a spec.
    is_layer = [d in owner.layers.dimensions for d in range(len(owner.shape))]
    followed = _follow_entries(state.shape, owner.shape, is_layer, state.path)
    dimensions = tuple(d for d, is_layer_of_state in enumerate(followed) if is_layer_of_state)
    return owner.layers._replace(dimensions=dimensions)


def _follow(state: NamedVariable, owner: NamedVariable, sharding: Spec) -> Any:
    """Returns the sharding of a Variable of an optimizer, from the sharding of its owner.

    If the owner has a ``NamedSharding``, the result is on the same mesh. The result is ``P()`` if
    shapes do not tell which dimensions the state has.
    """
    # The state may be the parameter itself, which an `nnx.ModelAndOptimizer` holds.
    if sharding is None or state.variable is owner.variable:
        return sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if state.shape == owner.shape and state.shape is not None:  # moments, averages, …
        if isinstance(spec, PartitionSpec) and (spec.unreduced or spec.reduced):
            # State is no partial sum, because Optax computes it from gradients that were summed.
            return replace_spec(sharding, PartitionSpec(*spec.partitions))
        return sharding
    # Nothing can be followed from a sharding without a spec, an owner with several shapes, or a
    # spec with more entries than its array has dimensions.
    if not isinstance(spec, PartitionSpec) or owner.shape is None or len(spec) > len(owner.shape):
        return PartitionSpec()
    entries = pad_entries(spec, len(owner.shape))
    choices = {_follow_entries(shape, owner.shape, entries, state.path) for shape in state.shapes}
    # A Variable with several arrays has only one spec, so it is whole if they differ.
    if len(choices) > 1:
        return replace_spec(sharding, PartitionSpec())
    followed = choices.pop() if choices else ()
    # The spec of a whole array is P(), not P(None, None), as in all strategies.
    is_sharded = any(followed)
    return replace_spec(sharding, PartitionSpec(*followed) if is_sharded else PartitionSpec())


def _follow_entries(
    shape: Shape, owner_shape: Shape, entries: Sequence[object], path: Path
) -> tuple[Any, ...]:
    """Returns for each dimension of state the entry of the same dimension of its owner.

    Args:
      shape: the shape of the state.
      owner_shape: the shape of the owner.
      entries: a value for each dimension of the owner, such as an entry of a spec.

    Returns:
      One entry for each dimension of ``shape``; None for dimensions that the owner lacks. ``()``,
      which as a spec means whole, for a scalar, for a shape that does not come from the owner's, or
      if dimensions with different entries are possible.
    """
    num_new = len(shape) - len(owner_shape)
    if owner_shape and num_new >= 0 and shape[num_new:] == owner_shape:
        # The memory of lbfgs has a dimension for the last steps in front: (steps, *owner_shape).
        return (*[None] * num_new, *entries)
    if num_new == 0:
        triples = [*zip(shape, owner_shape, entries, strict=True)]
        # The optimizer has reduced over dimensions of size 1.
        if all(size in (owner_size, 1) for size, owner_size, _ in triples):
            return tuple(entry if size == owner else None for size, owner, entry in triples)
    # The optimizer has left out dimensions: the state (256,) of an owner (256, 1024) has dimension
    # 0. There may be several choices of dimensions. Choices with equal entries are one answer.
    possible = {
        tuple(entries[d] for d in dimensions)
        for dimensions in _remaining_dimensions(shape, owner_shape, path)
    }
    return possible.pop() if len(possible) == 1 else ()


def _remaining_dimensions(
    shape: Shape, owner_shape: Shape, path: Path
) -> Sequence[tuple[int, ...]]:
    """Lists the dimensions of an owner that its state may have, if the optimizer left out others.

    The state (8, 4) of the owner (8, 8, 4) may have the dimensions (0, 2) or (1, 2).
    """
    choices = [
        dimensions
        for dimensions in itertools.combinations(range(len(owner_shape)), len(shape))
        if shape == tuple(owner_shape[d] for d in dimensions)
    ]
    # The shape of a factor of Adafactor may be ambiguous, but its name is not: `v_row` has all
    # dimensions but the largest, and `v_col` all but the second largest
    # (`optax.scale_by_factored_rms`).
    if len(owner_shape) < 2 or not {"v_row", "v_col"}.intersection(path):
        return choices
    by_size = np.argsort(owner_shape)  # Optax sorts in the same way, so ties are the same
    left_out = by_size[-1] if "v_row" in path else by_size[-2]
    factor = tuple(d for d in range(len(owner_shape)) if d != left_out)
    return [factor] if factor in choices else choices


def with_optimizer(
    specs: SpecsByPath,
    parameters: Sequence[NamedVariable],
    optimizer: object,
    activations: ActivationSharding = FOLLOWING,
    remarks: Remarks = NO_REMARKS,
) -> StateSharding:
    """Makes the result of a strategy: the specs of the model and, if there is one, its optimizer.

    Args:
      specs: the specs of the model, by path, which the state of the optimizer follows.
      parameters: the parameters of the model.
      optimizer: the optimizer, abstract or not; None without one.
      activations: how activations are sharded.
      remarks: texts for reports about the specs of the model.

    Raises:
      ValueError: model and optimizer have a path in common, with different specs.
    """
    if optimizer is not None:
        state = optimizer_specs(optimizer, specs, parameters)
        specs = union(specs, state)
    # ``by`` is for paths without a remark. The remarks cover the model, so these paths are the
    # ones of the optimizer.
    return from_paths(specs, activations, remarks, by="optimizer_sharding")


def union(model: SpecsByPath, optimizer: SpecsByPath) -> SpecsByPath:
    """Joins the specs by path of a model and of its optimizer.

    An ``nnx.ModelAndOptimizer`` and its model may have paths in common.

    Raises:
      ValueError: the two have different specs for a path; all are listed.
    """
    different = [
        f"  {path_string(path)}: {describe(spec)} and {describe(optimizer[path])}"
        for path, spec in model.items()
        if spec != optimizer.get(path, spec)
    ]
    raise_if_any(
        ValueError,
        "the model and the optimizer have these paths in common, with different specs:",
        different,
        "Use one StateSharding for the model and optimizer_sharding(...) for the other.",
    )
    return {**model, **optimizer}
