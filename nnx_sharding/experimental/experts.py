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
from ..errors import raise_if_any
from ..partition.optimizer import with_optimizer
from ..partition.strategies import (
    activations_of,
    base_specs,
    mesh_and_axes,
    remarks_on,
    shard_dimension,
)
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

    Weights of experts are parameters in a module of a class that is not Flax's. Without the
    dimensions of stacked layers, their shape is (experts, in, out); a module that has such a weight
    may also have biases, of shape (experts, out).

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      experts: the number of experts. None infers it from a router: a matrix in the same module as
        the weights, or in a module next to it, with one output for each expert.
      where: an NNX filter that selects the weights instead, such as
        ``nnx.PathContains("experts")``. The first dimension of size ``experts`` is sharded;
        dimensions of stacked layers are tried last.
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
      ValueError: the model has no such weights; an axis does not divide them (all are listed); or
        the number of experts cannot be inferred.

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
    parameters = variables(model)
    specs, problems = base_specs("expert_parallel", parameters, base, mesh), []
    experts = _number_of_experts(model) if experts is None else experts
    # Each weight comes with its dimension that counts experts.
    if where is None:
        weights = [*_weights_by_shape(model, experts)]
    else:
        weights = [*_weights_by_filter(model, experts, where)]
    for weight, dimension in weights:
        spec = shard_dimension(specs[weight.path], weight.shape, dimension, axes, mesh)
        if spec is None:
            text = f"{axes} cannot shard dimension {dimension} of shape {weight.shape}"
            problems.append(f"  {accessor('model', weight.path)}: {text}, {specs[weight.path]}")
        else:
            specs[weight.path] = spec
    raise_if_any(ValueError, "expert_parallel:", problems, "Choose axes that divide the weights.")
    if not weights:
        raise ValueError(
            f"expert_parallel: the model has no weights of {experts} experts: parameters of a "
            f"class of yours with the shape ({experts}, in, out), or what where={where!r} selects."
        )
    # Parameters are gathered over the axes of the batch while they are used, but never over the
    # axes of the experts (``kept``), even if these axes shard the batch too.
    activations = activations_of(base).extended(kept=axes)
    remarks = remarks_on(specs, "expert_parallel", base, parameters, axes)
    return with_optimizer(specs, parameters, optimizer, activations, remarks)


def _weights_by_filter(model: Any, experts: int, where: Any) -> Iterator[tuple[NamedVariable, int]]:
    """Yields the Variables that the user's filter selects, each with its dimension of experts.

    That dimension is the first one with the size ``experts``. A Variable without such a dimension
    is left out.
    """
    is_selected = to_predicate(where)
    for weight in variables(model):
        shape = weight.shape or ()
        # Dimensions of stacked layers come last, because there may be as many layers as experts.
        for dimension in (*weight.layer_dimensions, *weight.layers.dimensions):
            if shape[dimension] == experts:
                if is_selected(weight.path, weight.variable):
                    yield weight, dimension
                break


def _weights_by_shape(model: Any, experts: int) -> Iterator[tuple[NamedVariable, int]]:
    """Yields the weights of experts, each with its dimension of experts.

    A kernel is (experts, in, out) and a bias (experts, out), perhaps after dimensions of stacked
    layers. ``layer_shape`` and ``layer_dimensions`` leave out those.
    """
    # A matrix is a bias only in a module with a kernel. Otherwise it may be anything, such as an
    # embedding of as many words as there are experts.
    stacked = [x for x in _parameters_of_users(model) if x.layer_shape[:1] == (experts,)]
    modules_with_kernels = {x.path[:-1] for x in stacked if len(x.layer_shape) > 2}
    for weight in stacked:
        if len(weight.layer_shape) > 1 and weight.path[:-1] in modules_with_kernels:
            yield weight, weight.layer_dimensions[0]


def _parameters_of_users(model: Any) -> list[NamedVariable]:
    """Lists the parameters of the user's own modules, because no module of Flax has experts.

    The path of a parameter without its last key is that of its module: ``experts/up`` is in
    ``experts``.
    """
    nodes = _compat.iter_graph(model)
    flax_modules = {path for path, node in nodes if type(node).__module__.startswith("flax.")}
    return [
        variable
        for variable in variables(model)
        if isinstance(variable.variable, nnx.Param) and variable.path[:-1] not in flax_modules
    ]


def _number_of_experts(model: Any) -> int:
    """Finds the number of experts: a router near their weights has an output for each expert.

    For example, the weight ``blocks/0/experts/up`` of shape (8, in, out) has 8 experts if a matrix
    below ``blocks/0``, such as ``blocks/0/router/kernel``, has 8 columns.

    Raises:
      ValueError: no router fits, or several with different numbers do.
    """
    matrices = [x for x in variables(model) if len(x.layer_shape) == 2]
    numbers = set()
    for weight in _parameters_of_users(model):
        if len(weight.layer_shape) <= 2:  # no kernel of experts
            continue
        number = weight.layer_shape[0]  # the number of experts, if a router has as many outputs
        parent = weight.path[:-2]  # the module around the weight's own module
        for matrix in matrices:
            is_near = matrix.path[: len(parent)] == parent
            if is_near and matrix.layer_shape[-1] == number:
                numbers.add(number)
    if len(numbers) != 1:
        known = f"may be {' or '.join(map(str, sorted(numbers)))}" if numbers else "is not known"
        raise ValueError(f"expert_parallel: the number of experts {known}. Pass experts=….")
    return numbers.pop()
