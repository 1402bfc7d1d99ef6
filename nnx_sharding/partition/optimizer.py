"""The state of an optimizer, sharded like the parameters that it belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..errors import raise_listed
from ..specs.activation_sharding import ActivationSharding
from ..specs.fitting import describe, like, padded
from ..specs.paths import Path, path_key, path_string, plain_key
from ..specs.state_sharding import StateSharding
from .layers import Stacked
from .variables import FOLLOWING, NamedVariable, from_paths, variables


@_compat.api_boundary
def optimizer_sharding(
    optimizer: Any, sharding: StateSharding, *, model: Any = None
) -> StateSharding:
    """Shards the state of an optimizer like its parameters.

    Optax keeps copies of the ``nnx.State`` of the parameters, such as ``opt_state/0/mu``. A
    Variable in one belongs to the parameter whose path its own starts with there, such as
    ``up/kernel``; any other to that with the longest path that its own ends with. The spec depends
    on its shape:

    * that of the parameter (moments, traces, averages, gradients): the same spec;
    * that shape with some dimensions of size 1 or left out (the factors of ``adafactor``): the
      entries of the dimensions that remain;
    * that shape with more dimensions in front (the memory of ``lbfgs``): those are replicated;
    * any other, such as placeholders, counts and schedules: ``P()``.

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
    return from_paths(optimizer_specs(optimizer, sharding, model))


def optimizer_specs(optimizer: Any, sharding: StateSharding, model: Any) -> dict[Path, Any]:
    """The sharding of each path of an optimizer, as :func:`optimizer_sharding` chooses it."""
    if not isinstance(sharding, StateSharding):
        raise TypeError(f"optimizer_sharding: sharding must be a StateSharding, got {sharding!r}.")
    is_transformation = isinstance(optimizer, tuple) and hasattr(optimizer, "init")
    if is_transformation or not any(True for _ in variables(optimizer)):
        raise TypeError(
            f"optimizer_sharding: {type(optimizer).__name__} holds no state. Pass "
            "nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
    if model is None:
        if not isinstance(optimizer, nnx.ModelAndOptimizer):
            raise ValueError(
                "optimizer_sharding: the shapes of the parameters are needed. Pass model=..., "
                "which may be abstract."
            )
        model = optimizer.model
    parameters = {each.path: each for each in variables(model)}
    found = {path: sharding.find(path, each.variable) for path, each in parameters.items()}
    specs = {path: PartitionSpec() if i is None else spec for path, (i, spec) in found.items()}
    meshes = {spec.mesh if isinstance(spec, NamedSharding) else None for spec in specs.values()}
    mesh = meshes.pop() if len(meshes) == 1 else None  # if all parameters agree
    other = PartitionSpec() if mesh is None else NamedSharding(mesh, PartitionSpec())
    result: dict[Path, Any] = {}
    for state, owner in _with_owners(optimizer, parameters):
        result[state.path] = other if owner is None else _following(state, owner, specs[owner.path])
    return result


def optimizer_variables(optimizer: Any, model: Any) -> list[NamedVariable]:
    """The Variables of an optimizer; those of stacked layers are where their parameter has them."""
    parameters = {each.path: each for each in variables(model)}
    return [
        state if owner is None else state._replace(layers=_layers_of(state, owner))
        for state, owner in _with_owners(optimizer, parameters)
    ]


def _with_owners(
    optimizer: Any, parameters: Mapping[Path, NamedVariable]
) -> Iterator[tuple[NamedVariable, NamedVariable | None]]:
    """Each Variable of an optimizer, and the parameter that it belongs to, if any."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(optimizer, is_leaf=_is_state)
    copies = {tuple(plain_key(path_key(key)) for key in keys) for keys, x in leaves if _is_state(x)}
    for state in variables(optimizer):
        path = state.path
        starts = range(len(path) + 1)
        copy = next((start for start in starts if path[:start] in copies), None)
        parts = (path[start:] for start in starts)
        if copy is not None:
            parts = (path[copy:end] for end in reversed(starts[copy:]))
        yield state, next((parameters[part] for part in parts if part in parameters), None)


def _layers_of(state: NamedVariable, parameter: NamedVariable) -> Stacked:
    """The dimensions of layers in a Variable of the optimizer, found like its spec."""
    shape, full, layers = state.shape, parameter.shape, parameter.layers
    if shape is None or full is None or not layers.dimensions:
        return Stacked()
    marks = tuple(d in layers.dimensions for d in range(len(full)))
    found = _entries(shape, full, marks, state.path)
    return layers._replace(dimensions=tuple(d for d, mark in enumerate(found) if mark))


def _is_state(x: Any) -> bool:
    return isinstance(x, nnx.State)


def _following(state: NamedVariable, parameter: NamedVariable, sharding: Any) -> Any:
    """The sharding of a Variable of the optimizer, derived from its parameter's."""
    shape, full = state.shape, parameter.shape
    if sharding is None or state.variable is parameter.variable:
        return sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if shape == full and shape is not None:
        is_summed = isinstance(spec, PartitionSpec) and (spec.unreduced or spec.reduced)
        return like(sharding, PartitionSpec(*spec.partitions)) if is_summed else sharding
    if not isinstance(spec, PartitionSpec) or full is None or len(spec) > len(full):
        return PartitionSpec()
    entries = tuple(padded(spec, len(full)))
    choices = {_entries(shape, full, entries, state.path) for shape in state.shapes}
    common = choices.pop() if len(choices) == 1 else ()
    return like(sharding, PartitionSpec(*(common if any(common) else ())))


def _entries(
    shape: tuple[int, ...], full: tuple[int, ...], entries: tuple[Any, ...], path: Path
) -> tuple[Any, ...]:
    """The entries for the dimensions of ``full`` that an array of another shape still has."""
    further = len(shape) - len(full)
    if full and further >= 0 and shape[further:] == full:
        return (*[None] * further, *entries)
    if not further and all(size in (1, old) for size, old in zip(shape, full, strict=True)):
        both = zip(shape, full, entries, strict=True)
        return tuple(entry if size == old else None for size, old, entry in both)
    choices = [
        dimensions
        for dimensions in itertools.combinations(range(len(full)), len(shape))
        if shape == tuple(full[d] for d in dimensions)
    ]
    # The shape of a factor of Adafactor may be ambiguous; its name is not: all dimensions but the
    # largest in `v_row`, all but the second largest in `v_col` (`optax.scale_by_factored_rms`).
    removed = -1 if "v_row" in path else -2 if "v_col" in path else 0
    if removed and len(full) > 1:
        left_out = np.argsort(full)[removed]  # as Optax sorts them, including ties
        factor = tuple(d for d in range(len(full)) if d != left_out)
        choices = [factor] if factor in choices else choices
    remaining = {tuple(entries[d] for d in dimensions) for dimensions in choices}
    return remaining.pop() if len(remaining) == 1 else ()


def with_optimizer(
    specs: dict[Path, Any],
    model: Any,
    optimizer: Any,
    activations: ActivationSharding = FOLLOWING,
    notes: Mapping[Path, str] = MappingProxyType({}),
) -> StateSharding:
    """The shardings of a model and, following them, of its optimizer if there is one."""
    if optimizer is not None:
        specs = union(specs, optimizer_specs(optimizer, from_paths(specs), model))
    return from_paths(specs, activations, notes)


def union(model: Mapping[Path, Any], optimizer: Mapping[Path, Any]) -> dict[Path, Any]:
    """The shardings of a model and of its optimizer in one table."""
    different = [
        f"  {path_string(path)}: {describe(spec)} and {describe(optimizer[path])}"
        for path, spec in model.items()
        if spec != optimizer.get(path, spec)
    ]
    raise_listed(
        ValueError,
        "the model and the optimizer have these paths in common, with different specs:",
        different,
        "Use one StateSharding for the model and optimizer_sharding(...) for the other.",
    )
    return {**model, **optimizer}
