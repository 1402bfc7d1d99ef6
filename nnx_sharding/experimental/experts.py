"""Mixtures of experts: their weights on a mesh axis.

``expert_parallel`` shards the weights. ``dispatch.py`` sends tokens to the devices of their
experts, and has the picture of how they go there and come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from .. import _compat
from ..errors import raise_listed
from ..partition.optimizer import with_optimizer
from ..partition.strategies import activations_of, base_specs, mesh_and_axes, shard_dimension
from ..partition.variables import NamedVariable, variables
from ..specs.filters import to_predicate
from ..specs.paths import accessor
from ..specs.state_sharding import StateSharding


@_compat.api_boundary
def expert_parallel(
    model: Any,
    *,
    experts: int | None = None,
    where: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
    axis: Any = "expert",
    across_slices: bool = False,
) -> StateSharding:
    """Shards the stacked weights of experts over a mesh axis, for :func:`dispatch_to_experts`.

    They are the parameters of a module of a user's class whose first dimension, after those of
    stacked layers, is the number of experts: those with three dimensions or more, and, beside such
    a one in the same module, those with two (biases).

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      experts: the number of experts; None for that of the outputs of a router: a layer or parameter
        in the same module, or beside it, whose last dimension is the first of such weights.
      where: an NNX filter of the weights instead, such as ``nnx.PathContains("experts")``. Of each
        Variable, the first dimension of this size is sharded; that of stacked layers comes last.
      mesh: the mesh; None for the one in context.
      optimizer: as for :func:`fsdp`.
      base: shardings to start from. Its specs are kept, and the axis comes after those that shard
        the same dimension. With ``base=tensor_parallel(model)``, the hidden features of each expert
        are sharded as well; ``fsdp(model, base=expert_parallel(model))`` shards the experts over
        ``data`` as well, and the rest of the model over ``data``.
      axis: as for :func:`fsdp`.
      across_slices: whether ``axis`` may have devices of several TPU slices, over whose network
        tokens are then sent.

    Returns:
      The spec of each path. All of them divide the shapes.

    Raises:
      ValueError: there are no such weights, or an axis does not divide theirs: all are listed; or
        routers do not tell the number of experts.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh
      >>> from nnx_sharding.experimental import expert_parallel
      >>> from nnx_sharding.partition import tensor_parallel
      >>> class Experts(nnx.Module):
      ...     def __init__(self):
      ...         self.up = nnx.Param(jnp.ones((8, 16, 64)))
      ...         self.down = nnx.Param(jnp.ones((8, 64, 16)))
      >>> model = nnx.eval_shape(Experts)
      >>> mesh = AbstractMesh((2, 4), ("model", "expert"))
      >>> by_layer = tensor_parallel(model, mesh=mesh)
      >>> sharding = expert_parallel(model, experts=8, mesh=mesh, base=by_layer)
      >>> sharding.map_prefix(("down",), model.down)
      P('expert', 'model', None)
    """
    mesh, axes = mesh_and_axes("expert_parallel", mesh, axis, across_slices=across_slices)
    specs, problems = base_specs("expert_parallel", model, base, mesh), []
    experts = _number_of_experts(model) if experts is None else experts
    weights = [*_expert_weights(model, experts, where)]
    for weight, dimension in weights:
        spec = shard_dimension(specs[weight.path], weight.shape, dimension, axes, mesh)
        if spec is None:
            text = f"{axes} cannot shard dimension {dimension} of shape {weight.shape}"
            problems.append(f"  {accessor('model', weight.path)}: {text}, {specs[weight.path]}")
        else:
            specs[weight.path] = spec
    raise_listed(ValueError, "expert_parallel:", problems, "Choose axes that divide the weights.")
    if not weights:
        raise ValueError(
            f"expert_parallel: the model has no weights of {experts} experts: parameters of a "
            f"class of yours with the shape ({experts}, in, out), or what where={where!r} selects."
        )
    return with_optimizer(specs, model, optimizer, activations_of(base).extended(kept=axes))


def _expert_weights(model: Any, experts: int, where: Any) -> Iterator[tuple[NamedVariable, int]]:
    """Finds the weights of experts, each with the dimension of these."""
    if where is not None:
        yield from _chosen_weights(model, experts, where)
        return
    candidates = [x for x in _own_parameters(model) if x.layer_shape[:1] == (experts,)]
    modules = {x.path[:-1] for x in candidates if len(x.layer_shape) > 2}
    for weight in candidates:
        # A matrix of one number for each expert and feature is a bias only beside kernels.
        if weight.path[:-1] in modules and len(weight.layer_shape) > 1:
            yield weight, weight.layer_dimensions[0]


def _chosen_weights(model: Any, experts: int, where: Any) -> Iterator[tuple[NamedVariable, int]]:
    """Finds the weights that a filter of the user selects."""
    is_wanted = to_predicate(where)
    for x in variables(model):
        layers_last = [*x.layer_dimensions, *x.layers.dimensions]
        sized = (d for d in layers_last if (x.shape or ())[d] == experts)
        dimension = next(sized, None)
        if dimension is not None and is_wanted(x.path, x.variable):
            yield x, dimension


def _own_parameters(model: Any) -> list[NamedVariable]:
    """Lists the parameters of modules of a user's class; layers of Flax are no experts."""
    nodes = nnx.iter_graph(model, graph=True)
    of_flax = {path for path, node in nodes if type(node).__module__.startswith("flax.")}
    return [
        x
        for x in variables(model)
        if isinstance(x.variable, nnx.Param) and x.path[:-1] not in of_flax
    ]


def _number_of_experts(model: Any) -> int:
    """Finds the number of experts: the outputs of a router, in or beside the module of weights."""
    routers = [x for x in variables(model) if len(x.layer_shape) == 2]
    sizes = set()
    for weight in _own_parameters(model):
        shape, beside = weight.layer_shape, weight.path[:-2]
        if len(shape) > 2:
            near = (x for x in routers if x.path[: len(beside)] == beside)
            sizes |= {shape[0] for x in near if x.layer_shape[-1] == shape[0]}
    if len(sizes) != 1:
        known = f"may be {' or '.join(map(str, sorted(sizes)))}" if sizes else "is not known"
        raise ValueError(f"expert_parallel: the number of experts {known}. Pass experts=….")
    return sizes.pop()
