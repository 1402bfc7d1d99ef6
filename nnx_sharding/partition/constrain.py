"""``with_sharding_constraint`` and ``reshard`` for arrays, pytrees and modules.

Both flatten the tree into its arrays, find a sharding for each array, shard the arrays, and put
them back into the same modules.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.constrain import apply_shardings
from ..core.flatten import flatten
from ..core.prefixes import Specs, check_specs
from ..core.problems import check_options
from ..core.rebuild import rebuild
from ..core.tree_shardings import assign_shardings
from ..specs.fitting import ON_INDIVISIBLE, OnIndivisible


@_compat.api_boundary
def with_sharding_constraint(
    tree: object,
    sharding: object,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    on_indivisible: OnIndivisible = "error",
) -> Any:
    """Shards arrays: by a constraint in a trace, elsewhere by moving them.

    In a trace, Auto axes are constrained (``jax.lax.with_sharding_constraint``) and Explicit ones
    resharded (``jax.sharding.reshard``). Elsewhere arrays are placed, including NumPy arrays; an
    abstract array gets the sharding. ``UNCONSTRAINED`` dimensions are not changed.

    Args:
      tree: an array, or a pytree of arrays and modules. Modules and Variables are updated in
        place, within the trace that they belong to. Leaves that are not arrays are kept, as are
        references (``jax.Ref``, hijax Variables).
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, None
        to change nothing, or a prefix of ``tree`` with these as leaves. For logical names, use
        :meth:`LogicalRules.spec <nnx_sharding.partition.LogicalRules.spec>`.
      mesh: the mesh of a ``PartitionSpec``; None for the mesh in context.
      on_indivisible: what to do where a spec does not divide its array, as in
        :class:`~nnx_sharding.StateSharding`, whose own option has priority. One warning lists all
        corrections.

    Raises:
      ValueError: specs do not fit the mesh or the shapes, or name an axis over which an enclosing
        ``shard_map`` is mapped; all of them are listed.
      NoMeshError: a ``PartitionSpec`` has no mesh.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import make_mesh, with_sharding_constraint
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> with_sharding_constraint(np.ones((8, 16)), P("data"), mesh=mesh).sharding.spec
      P('data',)
    """
    # Options are checked before anything is moved, so that a misspelt one leaves the tree as it is.
    check_options("with_sharding_constraint", on_indivisible=(on_indivisible, ON_INDIVISIBLE))
    flat = flatten(tree)
    _, shardings = assign_shardings(flat, sharding, mesh=mesh, on_indivisible=on_indivisible)
    return rebuild(flat, apply_shardings(flat.leaves, shardings))


@_compat.api_boundary
def reshard(tree: object, out_shardings: object) -> Any:
    """Shards arrays over Explicit axes, in a trace or elsewhere, so that their types show it.

    This is ``jax.sharding.reshard``, but modules and Variables are accepted as well.

    Args:
      tree: as for :func:`~nnx_sharding.partition.with_sharding_constraint`.
      out_shardings: a ``PartitionSpec`` for the mesh in context, a ``NamedSharding``, a
        :class:`~nnx_sharding.StateSharding`, None to change nothing, or a prefix of ``tree`` with
        these as leaves.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding, reshard
      >>> layer = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
      >>> specs = StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})
      >>> with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
      ...     _ = reshard(layer, specs)
      >>> print(jax.typeof(layer.kernel[...]))
      float32[8,16@model]
    """
    specs = Specs(out_shardings)
    # Other shardings, such as a SingleDeviceSharding, are refused, because they have no axes that a
    # type could have.
    check_specs("reshard", (PartitionSpec, NamedSharding), out_shardings=specs)
    flat = flatten(tree)
    # The specs may have Explicit axes only. The first result, the names of the arrays, is not
    # needed here.
    _, shardings = assign_shardings(flat, specs, caller="reshard", explicit=True)
    return rebuild(flat, apply_shardings(flat.leaves, shardings), "reshard")
