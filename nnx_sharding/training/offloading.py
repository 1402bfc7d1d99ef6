"""State in host memory: shardings for it, and its transfer to the device and back.

``offload`` changes the ``memory_kind`` of shardings, so that a part of a model or an optimizer is
in the memory of the host between steps. ``fetched`` moves it to the device in a step that uses it.

A *memory* (`memory_of`, `move`) is a name such as ``"pinned_host"``; in a trace it is JAX's memory
space. None is the main memory of the device, in which programs compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.flatten import flatten
from ..core.memory import Memory, memory_of, move
from ..partition.rules import override
from ..partition.strategies import needed_mesh
from ..partition.variables import SpecsByPath, from_paths, specs_by_path, variables
from ..specs.filters import to_predicate
from ..specs.state_sharding import StateSharding


def offload(
    sharding: StateSharding,
    tree: Any,
    filter_: Any = ...,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    memory_kind: str = "pinned_host",
) -> StateSharding:
    """Returns the same shardings, with a part of a model or an optimizer in host memory.

    An example is the state of the optimizer, which a step needs only for the update. In the
    function, :func:`fetched` moves it to the device and back. On CPUs there is only one memory:
    programs are the same, but ``Compiled.memory()`` counts all of it as device memory.

    Args:
      sharding: the shardings to start from. Paths that are not offloaded keep theirs.
      tree: the model or the optimizer, abstract or not.
      filter_: an NNX filter for the Variables of ``tree`` to offload. Scalars, and arrays without a
        ``PartitionSpec`` or ``NamedSharding``, stay where they are.
      mesh: the mesh; None for the one in context.
      memory_kind: the memory.

    Returns:
      The shardings.

    Raises:
      NoMeshError: there is no mesh.
      ValueError: the filter matches no array that can be offloaded.

    Example:
      >>> import jax, optax
      >>> from flax import nnx
      >>> from nnx_sharding.partition import fsdp
      >>> from nnx_sharding.training import offload
      >>> model = nnx.Linear(128, 256, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> sharding = fsdp(model, mesh=mesh, optimizer=optimizer)
      >>> sharding = offload(sharding, optimizer, mesh=mesh)
      >>> sharding.map_prefix(("opt_state", 0, "mu", "kernel"), None).memory_kind
      'pinned_host'
    """
    mesh = needed_mesh("offload", mesh)
    predicate = to_predicate(filter_)
    specs = specs_by_path(tree, sharding)  # None for a path without a spec
    new_shardings: SpecsByPath = {}  # the new shardings, by path
    for named in variables(tree):
        spec = specs[named.path]
        if isinstance(spec, NamedSharding):
            spec = spec.spec
        is_chosen = predicate(named.path, named.variable)
        is_array = bool(named.shape)  # scalars have the shape (), which is false like None
        if is_chosen and is_array and isinstance(spec, PartitionSpec):
            new_shardings[named.path] = NamedSharding(mesh, spec, memory_kind=memory_kind)
    if not new_shardings:
        raise ValueError(f"offload: no array of the {type(tree).__name__} matches {filter_!r}.")
    # `from_paths` makes rules, each a filter and a sharding. They have priority over the rules of
    # ``sharding``.
    on_host = from_paths(new_shardings, by="offload")
    return override(sharding, zip(on_host.filters, on_host.shardings, strict=True))


@contextlib.contextmanager
def fetched(*trees: Any) -> Iterator[None]:
    """Moves arrays of modules and optimizers to device memory within the block.

    After the block, arrays that were in host memory before are there again, with their new values.

    Args:
      *trees: pytrees of modules, optimizers and Variables. Arrays outside of them are not changed.

    Example:
      >>> import jax, optax
      >>> from flax import nnx
      >>> from nnx_sharding import jit, value_and_grad
      >>> from nnx_sharding.training import fetched
      >>> @jit
      ... def step(model, optimizer, x):
      ...     loss, gradient = value_and_grad(lambda model: model(x).mean())(model)
      ...     with fetched(optimizer):
      ...         optimizer.update(model, gradient)
      ...     return loss
    """
    # Each pair has a Variable with arrays in host memory, and the memory of each array by path.
    offloaded: list[tuple[Any, dict[Any, Memory]]] = []
    for variable in filter(_compat.is_variable, flatten(trees).objects):
        leaves, _ = jax.tree_util.tree_flatten_with_path(_compat.get_value(variable))
        memories = {path: memory_of(leaf) for path, leaf in leaves if isinstance(leaf, jax.Array)}
        is_offloaded = any(memories.values())  # None is device memory
        if is_offloaded:
            offloaded.append((variable, memories))
    to_device_memory: dict[Any, Memory] = {}  # `_move` puts an array without an entry there
    try:
        for variable, _ in offloaded:
            _move(variable, to_device_memory)
        # The block gives these Variables new values. If it replaces a Variable by another one, for
        # example in a new optimizer, the new Variable is not moved.
        yield
    finally:  # arrays go back after an error, too, so that the caller's state is where it was
        for variable, memories in offloaded:
            _move(variable, memories)


def _move(variable: Any, memories: Mapping[Any, Memory]) -> None:
    """Moves the arrays of a Variable.

    Args:
      memories: the memory of each array, by its path in the value. An array without an entry goes
        to the main memory of the device.
    """

    def moved(path: Any, x: Any) -> Any:
        return move(x, memories.get(path)) if isinstance(x, jax.Array) else x

    value = jax.tree_util.tree_map_with_path(moved, _compat.get_value(variable))
    _compat.set_value(variable, value)
