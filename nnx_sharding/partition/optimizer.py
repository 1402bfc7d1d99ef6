"""The state of an optimizer, laid out as the parameters that it belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..fitting import with_entries
from ..paths import Path
from ..state_sharding import StateSharding
from .cutting import like, overridden, shapes_of
from .paths import Found, exact, variables


def optimizer_sharding(
    optimizer: Any, sharding: StateSharding, *, model: Any = None, overrides: Any = None
) -> StateSharding:
    """Lays out the state of an optimizer as its parameters are laid out.

    A Variable of the optimizer belongs to the parameter whose path is the longest one that its
    own path ends with: ``opt_state/0/mu/up/kernel`` to ``up/kernel``. That holds however an
    Optax optimizer is put together, with ``chain``, ``masked``, ``multi_transform``,
    ``MultiSteps`` and so on. The spec depends on the shape of the state:

    * that of the parameter (moments, traces, averages, gradients): the same spec;
    * the same with dimensions of size 1, or with some left out (the factors of ``adafactor``):
      what the spec says of the dimensions that remain;
    * the same behind further dimensions (the memory of ``lbfgs``): those are whole;
    * any other, such as placeholders, counts and schedules: ``P()``.

    So the specs divide the state wherever they divide the parameters.

    Args:
      optimizer: an ``nnx.Optimizer``, an ``nnx.ModelAndOptimizer`` or any pytree with state of
        Optax, abstract (``nnx.eval_shape``) or not.
      sharding: the layout of the model. What it has no spec for counts as ``P()``.
      model: the model of the optimizer, abstract or not. An ``nnx.ModelAndOptimizer`` knows it.
      overrides: filters and specs, as for :class:`~nnx_sharding.StateSharding`, for Variables of
        the optimizer; they go first. One that matches nothing is an ``UnusedFilterWarning``.

    Returns:
      The spec of each path of the optimizer.

    Raises:
      TypeError: ``sharding`` is no ``StateSharding``, or ``optimizer`` holds no state.
      ValueError: ``model`` is needed.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import optimizer_sharding
      >>> model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> sharding = StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})
      >>> state = optimizer_sharding(optimizer, sharding, model=model)
      >>> state.map_prefix(("opt_state", 0, "mu", "kernel"), None) == P(None, "model")
      True
      >>> state.map_prefix(("opt_state", 0, "count"), None) == P()
      True

    That a factor remains of which dimensions is read off ``optax.scale_by_factored_rms``: without
    the largest dimension in ``v_row``, without the second largest in ``v_col``.
    """
    specs = optimizer_specs(optimizer, sharding, model)
    return exact(overridden("optimizer_sharding", "optimizer", optimizer, specs, overrides))


def optimizer_specs(optimizer: Any, sharding: StateSharding, model: Any) -> dict[Path, Any]:
    """The spec of each path of an optimizer, as :func:`optimizer_sharding` chooses it."""
    if not isinstance(sharding, StateSharding):
        raise TypeError(f"optimizer_sharding: sharding is a StateSharding, not {sharding!r}.")
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
    parameters = {found.path: found for found in variables(model)}
    specs = {path: _spec(found, sharding) for path, found in parameters.items()}
    rest = _whole(list(specs.values()))
    result: dict[Path, Any] = {}
    for found in variables(optimizer):
        owner = _owner(found.path, parameters)
        result[found.path] = rest if owner is None else _follow(found, owner, specs[owner.path])
    return result


def _spec(found: Found, sharding: StateSharding) -> Any:
    index, spec = sharding.find(found.path, found.variable)
    return PartitionSpec() if index is None else spec


def _whole(specs: Sequence[Any]) -> Any:
    """The spec of what belongs to no parameter; on their mesh, if all of them name the same."""
    meshes = {spec.mesh if isinstance(spec, NamedSharding) else None for spec in specs}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return PartitionSpec() if mesh is None else NamedSharding(mesh, PartitionSpec())


def _owner(path: Path, parameters: dict[Path, Found]) -> Found | None:
    """The parameter whose path is the longest end of this one."""
    ends = (path[start:] for start in range(len(path) + 1))
    return next((parameters[end] for end in ends if end in parameters), None)


def _follow(state: Found, parameter: Found, sharding: Any) -> Any:
    """The sharding of a Variable of the optimizer, by that of its parameter."""
    shape, whole = state.shape, parameter.shape
    if sharding is None or (shape == whole and shape is not None):
        return sharding
    partition = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(partition, PartitionSpec) or whole is None or len(partition) > len(whole):
        return PartitionSpec()
    entries = (*partition.partitions, *[None] * (len(whole) - len(partition)))
    found = {_entries(own, whole, entries, state.path) for own in shapes_of(state)}
    common = found.pop() if len(found) == 1 else ()
    return like(sharding, with_entries(partition, common if any(common) else ()))


def _entries(
    shape: tuple[int, ...], whole: tuple[int, ...], entries: tuple[Any, ...], path: Path
) -> tuple[Any, ...]:
    """What is left of the entries for ``whole`` in an array of another shape."""
    further = len(shape) - len(whole)
    if whole and further >= 0 and shape[further:] == whole:
        return (*[None] * further, *entries)
    if not further and all(own in (1, size) for own, size in zip(shape, whole, strict=True)):
        both = zip(shape, whole, entries, strict=True)
        return tuple(entry if own == size else None for own, size, entry in both)
    kept = [
        dimensions
        for dimensions in itertools.combinations(range(len(whole)), len(shape))
        if shape == tuple(whole[d] for d in dimensions)
    ]
    factor = _factor(whole, path)
    choices = [factor] if factor in kept else kept
    left = {tuple(entries[d] for d in dimensions) for dimensions in choices}
    return left.pop() if len(left) == 1 else ()


def _factor(whole: tuple[int, ...], path: Path) -> tuple[int, ...] | None:
    """The dimensions that remain in a factor of Adafactor, where the shape alone is ambiguous."""
    removed = -1 if "v_row" in path else -2 if "v_col" in path else 0
    if not removed or len(whole) < 2:
        return None
    left_out = np.argsort(whole)[removed]  # as Optax sorts them: equal sizes in the same order
    return tuple(d for d in range(len(whole)) if d != left_out)
