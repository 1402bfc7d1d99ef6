"""``ArraySharder``: a module that shards batches, with the names of Datarax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.parameters import device_bytes, parameter_table
from ..apply import apply_shardings, rebuilt, sharding_of
from ..core.flatten import flatten
from ..core.specs import Specs
from ..partition.constrain import is_array
from ..partition.logical import LogicalRules
from ..placement.place import shardings_for, trimmed
from ..shard_map import shard_map
from .datarax_state import BatchStatistics, OperationCount, SharderModule, SharderModuleConfig

__all__ = [
    "ArraySharder",
    "BatchStatistics",
    "OperationCount",
    "SharderModule",
    "SharderModuleConfig",
]


class ArraySharder(SharderModule):
    """Shards batches, inside and outside of traced functions.

    A sharding is anything that :func:`~nnx_sharding.placement.place` takes. A spec is truncated to
    the rank of its array: ``P("data", None)`` is valid for images and labels. Everything else
    is kept. In a traced function, arrays are constrained or resharded as by
    :func:`~nnx_sharding.partition.with_sharding_constraint`.

    Logical names are a tuple (or a list) with a name, several names or None for each dimension, a
    ``PartitionSpec``, which is used unchanged, or dicts and lists of these.

    The counts are on the devices that last computed them, so JAX retraces after the first call of a
    function on a mesh. ``place(sharder, P(), mesh)`` before that call avoids it.

    Args:
      config: the rules for logical names, and statistics.
      rngs: random streams for :meth:`create_sharded_param`.
      name: a name, for the reader.

    Raises:
      TypeError: ``config`` is not a :class:`SharderModuleConfig`.

    Example:
      >>> import numpy as np
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.compat.datarax import ArraySharder, SharderModuleConfig
      >>> sharder = ArraySharder(SharderModuleConfig(sharding_rules=[("batch", "data")]))
      >>> batch = {"image": np.ones((16, 8, 8)), "label": np.zeros(16, int), "split": "train"}
      >>> batch = sharder.shard_with_logical_names(batch, make_mesh({"data": 8}), ("batch",))
      >>> batch["image"].sharding.shard_shape((16, 8, 8)), batch["split"]
      ((2, 8, 8), 'train')
      >>> sharder.get_operation_stats()
      {'applied_count': 1, 'skipped_count': 0}

    The names are those of ``datarax.sharding.ArraySharder``.
    """

    def shard(self, batch: Any, sharding: Any) -> Any:
        """Shards the arrays of a batch.

        Args:
          batch: any pytree; modules in it are changed in place.
          sharding: for all arrays, or a pytree prefix of the batch.

        Raises:
          NoMeshError: a ``PartitionSpec`` has no mesh.
          TypeError: ``sharding`` contains something other than shardings.
          ValueError: the shardings are not a prefix of the batch, or do not fit it.
        """
        result = _shard("ArraySharder.shard", batch, sharding)
        self._count(batch)
        return result

    @staticmethod
    def shard_static(batch: Any, sharding: Any) -> Any:
        """Does the same as :meth:`shard` without a sharder, and is not counted."""
        return _shard("ArraySharder.shard_static", batch, sharding)

    def shard_with_info(self, batch: Any, sharding: Any, info: dict[str, Any] | None = None) -> Any:
        """Does the same as :meth:`shard`, and describes the batch before and after.

        ``info`` gets ``batch_pre_sharding`` and ``batch_post_sharding``: each a dict with the
        ``structure`` of the batch and the ``shapes`` of its arrays (None for other leaves); the
        second also with their ``shardings`` and ``bytes_per_device``, by device id (in a traced
        function, by position in the mesh).
        """
        result = self.shard_with_info_static(batch, sharding, info)
        self._count(batch)
        return result

    @staticmethod
    def shard_with_info_static(
        batch: Any, sharding: Any, info: dict[str, Any] | None = None
    ) -> Any:
        """Does the same as :meth:`shard_with_info` without a sharder, and is not counted."""
        before = _described(batch)
        result = _shard("ArraySharder.shard_with_info", batch, sharding)
        after = _described(result)
        after["shardings"] = _map_arrays(sharding_of, result)
        after["bytes_per_device"] = device_bytes(parameter_table(_map_arrays(_abstract, result)))
        if info is not None:
            info |= {"batch_pre_sharding": before, "batch_post_sharding": after}
        return result

    def shard_with_logical_names(
        self, batch: Any, mesh: Mesh | AbstractMesh, logical_spec: Any
    ) -> Any:
        """Does the same as :meth:`shard`, with the shardings of :meth:`get_named_sharding`."""
        return self.shard(batch, self.get_named_sharding(mesh, logical_spec))

    def apply_parallel_transform(
        self,
        batch: Any,
        transform_fn: Callable[[Any], Any],
        mesh: Mesh | AbstractMesh,
        in_spec: Any,
        out_spec: Any = None,
    ) -> Any:
        """Applies a function to each shard of a batch, by ``shard_map``.

        The last 128 compiled programs are kept, so pass the same function each time.

        Args:
          batch: any pytree of arrays.
          transform_fn: takes a shard of the batch and returns a shard of the result.
          mesh: the mesh.
          in_spec: logical names for the batch.
          out_spec: logical names for the result; None to use those of the batch.
        """
        in_specs = self.get_partition_spec(in_spec)
        out_specs = in_specs if out_spec is None else self.get_partition_spec(out_spec)
        result = _parallel(transform_fn, mesh, Specs(in_specs), Specs(out_specs))(batch)
        self._count(batch)
        return result

    parallel_transform = apply_parallel_transform

    def create_sharded_param(
        self,
        init_fn: Callable[..., Any],
        shape: Sequence[int],
        logical_spec: Any,
        *,
        mesh: Mesh | None = None,
    ) -> nnx.Param[Any]:
        """Creates a parameter in its sharding, never fully on one device.

        Its metadata contain the logical names as ``out_sharding`` and the rules as
        ``sharding_rules``, for ``nnx.get_partition_spec``.

        Args:
          init_fn: takes a key of the stream ``params`` and the shape.
          shape: the shape.
          logical_spec: the logical names of its dimensions.
          mesh: the mesh; None for the one in context. Without one the parameter is not sharded.

        Raises:
          ValueError: ``rngs`` is missing, a name has no rule, or the spec does not fit.
        """
        if self.rngs is None:
            raise ValueError(
                "create_sharded_param draws from a random stream: make the sharder with "
                "ArraySharder(config, rngs=nnx.Rngs(0))."
            )
        spec = self.get_partition_spec(logical_spec)
        mesh = _compat.context_mesh() if mesh is None else mesh  # type: ignore[assignment]
        shape, make, sharding = tuple(shape), init_fn, None
        metadata: dict[str, Any] = {"out_sharding": tuple(logical_spec)}
        if mesh is not None:
            abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
            [sharding] = shardings_for(abstract, spec, mesh, "create_sharded_param")
            if isinstance(sharding.mesh, Mesh):
                make = jax.jit(init_fn, static_argnums=1, out_shardings=sharding)
            metadata["mesh"] = mesh
        if self.config.sharding_rules and not isinstance(logical_spec, PartitionSpec):
            metadata["sharding_rules"] = self.config.sharding_rules
        # In a trace, out_shardings may have no effect, or leave a sharding without a spec.
        [value] = apply_shardings([make(self.rngs.params(), shape)], [sharding])
        param = nnx.Param(value)
        # Passed to Param as arguments, they would shard the value once more.
        param.set_metadata(metadata)
        return param

    def get_partition_spec(self, logical_spec: Any) -> Any:
        """Returns the partition spec for logical names, by the first rule whose axes are free.

        Raises:
          ValueError: a name has no rule; the message lists the names that have one.

        Example:
          >>> from jax.sharding import PartitionSpec as P
          >>> from nnx_sharding.compat.datarax import ArraySharder, SharderModuleConfig
          >>> rules = {"batch": ("replica", "data"), "embed": None}
          >>> sharder = ArraySharder(SharderModuleConfig(sharding_rules=rules))
          >>> sharder.get_partition_spec(("batch", "embed")) == P(("replica", "data"), None)
          True
        """
        rules = self.config.sharding_rules
        spec_of = LogicalRules(rules).spec if rules else lambda names: PartitionSpec(*names)
        return jax.tree.map(
            lambda x: spec_of(x) if _is_names(x) else x,
            logical_spec,
            is_leaf=lambda x: x is None or isinstance(x, PartitionSpec) or _is_names(x),
        )

    def get_named_sharding(self, mesh: Mesh | AbstractMesh, logical_spec: Any) -> Any:
        """Returns the sharding on a mesh for logical names; see :meth:`get_partition_spec`."""
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            self.get_partition_spec(logical_spec),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )


def _is_names(x: Any) -> bool:
    if isinstance(x, list):
        return any(isinstance(name, str) for name in x)
    return isinstance(x, tuple) and not isinstance(x, PartitionSpec)


def _shard(caller: str, batch: Any, sharding: Any) -> Any:
    flat = flatten(batch)
    shardings = shardings_for(batch, sharding, None, caller, flat=flat, adapt=trimmed)
    return rebuilt(flat, apply_shardings(flat.leaves, shardings), caller)


def _map_arrays(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with the results of a function of its arrays, and None for everything else."""
    return jax.tree.map(lambda x: function(x) if is_array(x) else None, batch)


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x))


def _described(batch: Any) -> dict[str, Any]:
    shapes = _map_arrays(lambda x: tuple(x.shape), batch)
    return {"structure": jax.tree.structure(batch), "shapes": shapes}


@functools.lru_cache(128)
def _parallel(function: Any, mesh: Any, in_specs: Specs, out_specs: Specs) -> Any:
    return shard_map(function, mesh=mesh, in_specs=(in_specs.tree,), out_specs=out_specs.tree)
