"""Models that are created sharded, and the same without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from .. import _compat
from ..fitting import axes_of_type
from ..jit import jit


@_compat.api_boundary
def sharded_init(
    make_model: Callable[..., Any],
    sharding: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Creates a model with each parameter on its own devices, never whole on one of them.

    The constructor is compiled with ``out_shardings``, as with ``nnx.jit`` in Flax. The random
    bits are those of plain ``jit`` as long as ``jax_threefry_partitionable`` is on, its default;
    else they depend on how an array is cut. XLA may round what is computed from them otherwise.

    The constructor sees the axes of a mesh as Auto, also if they are Explicit as in what it
    makes: it would compute whole parameters, were they typed. If it cannot do with Auto axes,
    since it passes ``out_sharding`` to JAX itself, it sees the mesh as it is.

    Args:
      make_model: a class or function that makes the model, or any pytree, such as ``(model,
        optimizer)``; references shared between its parts stay shared.
      sharding: all that ``out_shardings`` of :func:`~nnx_sharding.jit` takes, such as a
        :class:`~nnx_sharding.StateSharding`; or a function from the abstract model to that; or
        None, for the metadata of each Variable, as ``nnx.get_partition_spec`` reads it.
      mesh: resolves partition specs, and is in context while the constructor runs; None for
        the one that is in context.
      *args: passed to ``make_model``: arrays, pytrees of them and NNX objects (``nnx.Rngs``) as
        traced values; all else, such as sizes and configurations, as it is.
      **kwargs: likewise.

    Returns:
      What ``make_model`` returned.

    Raises:
      NoMeshError: partition specs have no mesh.
      ValueError: no filter matches some Variables, specs do not fit the mesh or the shapes, or
        the mesh is abstract.
      TypeError: ``make_model`` is not callable, or ``sharding`` is none of the above.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import sharded_init
      >>> mesh = jax.make_mesh((jax.device_count(),), ("model",))
      >>> rules = StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})
      >>> model = sharded_init(lambda: nnx.Linear(4, 64, rngs=nnx.Rngs(0)), rules, mesh)
      >>> model.kernel.sharding.spec == P(None, "model")
      True
    """
    mesh = _compat.context_mesh() if mesh is None else mesh
    if isinstance(mesh, AbstractMesh) and _compat.trace_is_clean():
        raise ValueError(f"{mesh} has no devices to create arrays on. Use abstract_init.")
    return _make(make_model, sharding, mesh, (args, kwargs), is_abstract=False)


@_compat.api_boundary
def abstract_init(
    make_model: Callable[..., Any],
    sharding: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes what :func:`sharded_init` would, but without data: to restore a checkpoint into.

    Args:
      make_model: as there, and so are the others.
      sharding: where it says None for an array, JAX chooses, and its choice is not known here.
      mesh: may be an ``AbstractMesh``, of devices that are not here.
      *args: objects among them are not changed.
      **kwargs: likewise.

    Returns:
      The same, with a ``jax.ShapeDtypeStruct`` with a sharding in the place of each array.

    Raises:
      NoMeshError: as there, and so are ValueError and TypeError.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import abstract_init
      >>> mesh = AbstractMesh((256,), ("model",))
      >>> rules = StateSharding({...: P("model")})
      >>> model = abstract_init(lambda: nnx.Param(jax.numpy.zeros(1024)), rules, mesh)
      >>> model.shape, model.sharding.shard_shape(model.shape)
      ((1024,), (4,))
    """
    mesh = _compat.context_mesh() if mesh is None else mesh
    return _make(make_model, sharding, mesh, (args, kwargs), is_abstract=True)


def _make(
    make_model: Callable[..., Any], sharding: Any, mesh: Any, given: Any, *, is_abstract: bool
) -> Any:
    build, arrays = _closed(make_model, given)
    with _in_context(_mesh_inside(build, arrays, mesh)):
        if sharding is None or callable(sharding):
            abstract = jit(build).eval_shape(*arrays)
            sharding = _from_metadata(abstract) if sharding is None else sharding(abstract)
        made = jit(build, out_shardings=sharding, mesh=mesh)
        return made.eval_shape(*arrays) if is_abstract else made(*arrays)


def _from_metadata(abstract: Any) -> Any:
    """For each object of a pytree the specs that its Variables carry."""

    def specs(part: Any) -> Any:
        found = nnx.get_partition_spec(nnx.state(part) if _compat.is_node(part) else part)
        return found.get_raw_value() if isinstance(found, nnx.Variable) else found

    return jax.tree.map(specs, abstract, is_leaf=_compat.is_graph_object)


def _closed(make_model: Callable[..., Any], given: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The constructor as a function of the arrays and objects it is given, and these."""
    if not callable(make_model):
        raise TypeError(f"make_model is no function or class: {make_model!r}.")
    leaves, treedef = jax.tree.flatten(given, is_leaf=_compat.is_graph_object)
    if not leaves and not isinstance(make_model, type):
        return make_model, []
    traced = [place for place, leaf in enumerate(leaves) if _is_traced(leaf)]
    fixed = [None if _is_traced(leaf) else leaf for leaf in leaves]  # arrays are not captured

    def make(*arrays: Any) -> Any:
        found = dict(zip(traced, arrays, strict=True))
        filled = [found.get(place, leaf) for place, leaf in enumerate(fixed)]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        return make_model(*args, **kwargs)

    return make, [leaves[place] for place in traced]


def _is_traced(x: Any) -> bool:
    is_number = isinstance(x, int | float | complex | np.generic)
    return _compat.is_graph_object(x) or (not is_number and _compat.is_array_like(x))


def _mesh_inside(build: Callable[..., Any], arrays: list[Any], mesh: Any) -> Any:
    """The mesh that the constructor sees: with Auto axes, if it can do with them."""
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return mesh
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    try:
        with _in_context(auto):
            jit(build).eval_shape(*arrays)
    except ValueError:  # so says JAX of `out_sharding` with Auto axes; other errors come again
        return mesh
    return auto


def _in_context(mesh: Any) -> AbstractContextManager[Any]:
    use = jax.sharding.use_abstract_mesh
    return contextlib.nullcontext() if mesh is None else use(mesh.abstract_mesh)
