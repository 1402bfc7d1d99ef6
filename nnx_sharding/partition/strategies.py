"""Layouts of a whole model, from shapes alone: replicated, FSDP, ZeRO-1."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..paths import Path
from ..state_sharding import StateSharding
from .cutting import base_specs, cut_largest, mesh_and_axes, union
from .optimizer import optimizer_specs
from .paths import exact, variables


def replicated(model: Any, *, optimizer: Any = None) -> StateSharding:
    """Every device holds the whole of every array: plain data parallelism.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      optimizer: its optimizer, abstract or not, which the result is then for as well.

    Returns:
      ``P()`` for each path.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import replicated
      >>> model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
      >>> replicated(model).map_prefix(("kernel",), model.kernel) == P()
      True
    """
    specs = {found.path: PartitionSpec() for found in variables(model)}
    return with_optimizer(specs, model, optimizer)


def fsdp(
    model: Any,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    axis: Any = "data",
    min_size: int = 2**14,
    base: StateSharding | None = None,
    optimizer: Any = None,
) -> StateSharding:
    """Fully sharded data parallelism: each device keeps a part of every large array.

    Of each array the largest dimension that the axis divides is cut; of equally large ones the
    last. An array with no such dimension is replicated, and so are random streams.

    With ``base``, its specs are kept and the axis is put on top: on the largest dimension that is
    not cut yet, else, where that divides, behind the axes that cut the largest one. So
    ``fsdp(model, mesh, base=tensor_parallel(model, mesh))`` is FSDP and tensor parallelism in
    two dimensions of the mesh. What ``base`` cuts over the axis already, and what it gives as a
    ``NamedSharding``, stays as it is.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      axis: the mesh axis, or a tuple of axes that cut one dimension together; where they do not
        divide any, as many of the first of them as do.
      min_size: arrays with fewer elements than this are left as they are in ``base``.
      base: what is sharded already. With ``on_indivisible`` other than ``"error"`` it is corrected
        first.
      optimizer: the optimizer of the model, abstract or not, which the result is then for as
        well; see :func:`~nnx_sharding.partition.optimizer_sharding`.

    Returns:
      The spec of each path. All of them divide the shapes.

    Raises:
      NoMeshError: there is no mesh.
      TypeError: ``mesh`` or ``base`` is something else.
      ValueError: the mesh has no such axis, or ``base`` does not fit the mesh or the model.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.partition import fsdp
      >>> model = nnx.eval_shape(lambda: nnx.Linear(256, 1024, rngs=nnx.Rngs(0)))
      >>> sharding = fsdp(model, AbstractMesh((8,), ("data",)))
      >>> sharding.map_prefix(("kernel",), model.kernel) == P(None, "data")
      True
      >>> sharding.map_prefix(("bias",), model.bias) == P()
      True

    XLA gets one case wrong (seen with JAX 0.10 and 0.12 on CPU, plain ``jax.jit`` included): the
    gradients of padded convolutions whose output is flattened into a layer that the axis of the
    batch cuts over its inputs, on a mesh with further axes. Average over the image first, or cut
    that layer over its outputs by ``base``.

    The layout is that of ZeRO stage 3 (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    mesh, axes = mesh_and_axes("fsdp", mesh, axis)
    specs = base_specs("fsdp", model, base, mesh)
    for found in variables(model):
        specs[found.path] = cut_largest(specs[found.path], found, axes, mesh, min_size)
    return with_optimizer(specs, model, optimizer)


def zero1(
    model: Any,
    optimizer: Any,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    axis: Any = "data",
    min_size: int = 2**14,
    base: StateSharding | None = None,
) -> StateSharding:
    """Parameters as they are, the state of the optimizer in parts over the data axis.

    The state first follows the parameters, as
    :func:`~nnx_sharding.partition.optimizer_sharding` says; then each large array of it
    is cut once more, as by :func:`fsdp`.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      optimizer: its optimizer, abstract or not. The model that an ``nnx.ModelAndOptimizer`` holds
        stays as in ``base``.
      mesh: the mesh; None for the one in context.
      axis: the mesh axis, or a tuple of axes, over which the state is cut.
      min_size: state with fewer elements than this just follows its parameter.
      base: how the parameters are laid out; None for replicated.

    Returns:
      The spec of each path of both. All of them divide the shapes.

    Raises:
      NoMeshError: there is no mesh.
      TypeError: ``mesh``, ``base`` or ``optimizer`` is something else.
      ValueError: the mesh has no such axis, or ``base`` does not fit the mesh or the model.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.partition import zero1
      >>> model = nnx.Linear(256, 1024, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> sharding = zero1(model, optimizer, AbstractMesh((8,), ("data",)))
      >>> sharding.map_prefix(("kernel",), None) == P()
      True
      >>> sharding.map_prefix(("opt_state", 0, "mu", "kernel"), None) == P(None, "data")
      True

    The layout is that of ZeRO stage 1 (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    mesh, axes = mesh_and_axes("zero1", mesh, axis)
    specs = base_specs("zero1", model, base, mesh)
    state = optimizer_specs(optimizer, exact(specs), model)
    held = "model" if isinstance(optimizer, nnx.ModelAndOptimizer) else None
    for found in variables(optimizer):
        if not found.path or found.path[0] != held:
            state[found.path] = cut_largest(state[found.path], found, axes, mesh, min_size)
    return exact(union(specs, state))


def with_optimizer(specs: dict[Path, Any], model: Any, optimizer: Any) -> StateSharding:
    """The specs of a model, and those of its optimizer, which follow them, if there is one."""
    if optimizer is not None:
        specs = union(specs, optimizer_specs(optimizer, exact(specs), model))
    return exact(specs)
