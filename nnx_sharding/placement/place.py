"""``place``: a model, or any pytree, sharded by a prefix of shardings.

There are four steps, each a function of the core:

    flatten             tree → arrays (``flat.leaves``), and a description of everything else
    assign_shardings    prefix of specs → sharding of each array (None: the array stays where it
                        is); one error lists all specs that do not fit
    apply_shardings     moves the arrays; an array that is placed already is returned itself
    rebuild             puts the arrays into the caller's modules, after all arrays have been moved
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.constrain import apply_shardings, is_shardable
from ..core.flatten import flatten
from ..core.interrupts import signals_deferred
from ..core.memory import copied
from ..core.problems import check_options
from ..core.rebuild import rebuild
from ..core.tree_shardings import assign_shardings
from ..core.unflatten import unflatten
from ..specs.fitting import ON_INDIVISIBLE, OnIndivisible, with_entries


@_compat.api_boundary
def place(
    tree: Any,
    sharding: Any,
    mesh: Mesh | None = None,
    *,
    copy: bool = False,
    donate: bool = False,
    on_indivisible: OnIndivisible = "error",
    strict: bool = False,
) -> Any:
    """Places a model, or any pytree, on devices with the given shardings.

    The arrays may be NumPy arrays, on one device, on another mesh, or in host memory
    (``NamedSharding(mesh, spec, memory_kind="pinned_host")``). Numbers become arrays. If anything
    is wrong, nothing is moved, and one error lists all problems. Needs memory for the old and the
    new arrays; ``donate=True`` avoids that.

    Every process makes the same call. An array that one process alone can address is assumed to
    have the same value in each; this is not verified.

    Args:
      tree: a module, an optimizer, a Variable, an array, or a pytree of them. Abstract arrays
        (``jax.ShapeDtypeStruct``) only get the sharding.
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, or a
        pytree prefix of ``tree`` with these as leaves; None leaves a part unchanged.
      mesh: the mesh of each ``PartitionSpec``; None for the mesh in context.
      copy: whether to leave ``tree`` unchanged and return a copy of the graph, which shares no
        memory with it, except for any ``jax.Ref``.
      donate: whether to delete the old JAX arrays, unless ``tree`` still holds them elsewhere, so
        that buffers of shards of the same size are reused.
      on_indivisible: what to do where a spec does not divide a shape, unless a ``StateSharding``
        decides: ``"error"``, ``"replicate"`` the array, or ``"drop"`` the axes.
      strict: whether warnings are errors.

    Returns:
      ``tree``, with the same modules and Variables, changed in place, in new containers.
      With ``copy``, all of it is new.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      TypeError: a leaf with a sharding is not an array.
      ValueError: the shardings are not a pytree prefix, no filter matches, specs do not fit the
        mesh or the shapes, or an array cannot be placed.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import make_mesh, place
      >>> model = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
      >>> model = place(model, P("model"), make_mesh({"model": -1}))
      >>> model.kernel.sharding.shard_shape(model.kernel.shape)
      (2, 64)
    """
    if not _compat.trace_is_clean():
        raise RuntimeError(
            "place moves data, which a traced function cannot do. Place the arrays before they are "
            "passed in, or use nnx_sharding.partition.with_sharding_constraint."
        )
    if copy and donate:
        raise ValueError("place: copy=True keeps the old arrays, donate=True deletes them.")
    check_options("place", on_indivisible=(on_indivisible, ON_INDIVISIBLE))
    flat = flatten(tree)
    _, shardings = assign_shardings(
        flat,
        sharding,
        mesh=mesh,
        caller="place",
        on_indivisible=on_indivisible,
        strict=strict,
        # UNCONSTRAINED is refused, because there is no compiler that could choose a sharding.
        whole=True,
    )
    # Signals are deferred if arrays are donated, because the model would have no values if this was
    # interrupted after the old arrays are deleted.
    with signals_deferred() if donate else contextlib.nullcontext():
        # ``alias`` says whether a new array may share memory with the old one.
        leaves = apply_shardings(flat.leaves, shardings, donate=donate, alias=not copy)
        if not copy:
            return rebuild(flat, leaves, "place")
    copies = []
    for old, new in zip(flat.leaves, leaves, strict=True):
        # An array that stays where it is was returned itself, so it is copied here, even an array
        # of strings. A `jax.Ref` is not shardable, and stays shared. Python numbers have no `copy`,
        # and need none.
        is_array = is_shardable(old) or isinstance(old, np.ndarray)
        needs_copy = new is old and is_array and hasattr(old, "copy")
        copies.append(copied(new) if needs_copy else new)
    return unflatten(flat.structure, copies).root


def trim_to_rank(spec: Any, leaf: Any) -> Any:
    """Returns a spec without entries beyond the rank of an array; None if the leaf is no array.

    ``P("data", "model")`` becomes ``P("data")`` for an array of shape (8,). None, and shardings
    without a spec, such as a ``SingleDeviceSharding``, are returned unchanged.
    """
    if not is_shardable(leaf):
        return None
    if isinstance(spec, NamedSharding):
        return spec.update(spec=trim_to_rank(spec.spec, leaf))  # mesh and memory stay the same
    if isinstance(spec, PartitionSpec):
        return with_entries(spec, spec.partitions[: len(leaf.shape)])
    return spec
