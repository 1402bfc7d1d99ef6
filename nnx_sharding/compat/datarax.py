"""``ArraySharder``: a module that shards batches, with the names of ``datarax.sharding``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.flatten import flatten
from ..core.resharding import apply_shardings, rebuilt
from ..core.targets import Specs
from ..partition.constrain import is_array
from ..partition.logical import LogicalRules
from ..placement.place import shardings_for, trimmed
from ..transforms.shard_map import shard_map

__all__ = ["ArraySharder", "SharderModuleConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharderModuleConfig:
    """The configuration of an :class:`ArraySharder`.

    Attributes:
      sharding_rules: pairs, or a mapping, as for :class:`~nnx_sharding.partition.LogicalRules`;
        kept as a tuple of pairs. Without rules, logical names are those of mesh axes.
    """

    sharding_rules: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.sharding_rules is not None:
            object.__setattr__(self, "sharding_rules", LogicalRules(self.sharding_rules).rules)


class ArraySharder(nnx.Module):
    """Shards batches, inside and outside of traced functions.

    A sharding is anything that :func:`~nnx_sharding.placement.place` takes. A spec is truncated to
    the rank of its array: ``P("data", None)`` is valid for images and labels.

    Logical names are a tuple (or a list) with a name, several names or None for each dimension, a
    ``PartitionSpec``, which is used unchanged, or dicts and lists of these.

    The counts are on the devices that last computed them, so JAX retraces after the first call of a
    function on a mesh. ``place(sharder, P(), mesh)`` before that call avoids it.

    Args:
      config: the rules for logical names.
      rngs: random streams for :meth:`create_sharded_param`.

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
    """

    def __init__(self, config: SharderModuleConfig | None = None, *, rngs: nnx.Rngs | None = None):
        self.config = SharderModuleConfig() if config is None else config
        if not isinstance(self.config, SharderModuleConfig):
            raise TypeError(f"config must be a SharderModuleConfig, got {config!r}.")
        self.rngs = rngs
        self.applied = nnx.Variable(jnp.zeros((), jnp.int32))
        self.skipped = nnx.Variable(jnp.zeros((), jnp.int32))

    def shard(self, batch: Any, sharding: Any) -> Any:
        """Shards the arrays of a batch by a sharding, or a pytree prefix of shardings."""
        result = self.shard_static(batch, sharding)
        self._count(batch)
        return result

    @staticmethod
    def shard_static(batch: Any, sharding: Any) -> Any:
        """Does the same as :meth:`shard` without a sharder, and is not counted."""
        name, flat = "ArraySharder.shard", flatten(batch)
        shardings = shardings_for(batch, sharding, None, name, flat=flat, adapt=trimmed)
        return rebuilt(flat, apply_shardings(flat.leaves, shardings), name)

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

        The specs are logical names; ``out_spec`` is ``in_spec`` if it is None. The last 128
        compiled programs are kept, so pass the same function each time.
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
        ``sharding_rules``, for ``nnx.get_partition_spec``. ``init_fn`` takes a key of the stream
        ``params`` and the shape. Without a mesh, given or in context, nothing is sharded.
        """
        if self.rngs is None:
            text = "draws from a random stream: make the sharder with rngs=nnx.Rngs(0)."
            raise ValueError(f"create_sharded_param {text}")
        make, shape = init_fn, tuple(shape)
        shardings: list[Any] = [None]
        metadata: dict[str, Any] = {"out_sharding": tuple(logical_spec)}
        onto = _compat.context_mesh() if mesh is None else mesh
        if onto is not None:
            spec = self.get_partition_spec(logical_spec)
            abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
            shardings = shardings_for(abstract, spec, onto, "create_sharded_param")
            if isinstance(shardings[0].mesh, Mesh):
                make = jax.jit(init_fn, static_argnums=1, out_shardings=shardings[0])
            metadata["mesh"] = onto
        if self.config.sharding_rules and not isinstance(logical_spec, PartitionSpec):
            metadata["sharding_rules"] = self.config.sharding_rules
        # In a trace, out_shardings may have no effect, or leave a sharding without a spec.
        [value] = apply_shardings([make(self.rngs.params(), shape)], shardings)
        param = nnx.Param(value)
        # Passed to Param as arguments, they would shard the value once more.
        param.set_metadata(metadata)
        return param

    def get_partition_spec(self, logical_spec: Any) -> Any:
        """Returns the partition spec for logical names, by the first rule whose axes are free."""
        rules = self.config.sharding_rules
        spec_of = LogicalRules(rules).spec if rules else lambda names: PartitionSpec(*names)
        return jax.tree.map(
            lambda x: spec_of(x) if _is_names(x) else x, logical_spec, is_leaf=_is_names
        )

    def get_named_sharding(self, mesh: Mesh | AbstractMesh, logical_spec: Any) -> Any:
        """Returns the sharding on a mesh for logical names; see :meth:`get_partition_spec`."""
        specs = self.get_partition_spec(logical_spec)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def get_operation_stats(self) -> dict[str, Any]:
        """Returns the number of batches that were sharded, and of those that had no array."""
        counts = {"applied_count": self.applied[...], "skipped_count": self.skipped[...]}
        return {n: x if isinstance(x, jax.core.Tracer) else int(x) for n, x in counts.items()}

    def reset_operation_stats(self) -> None:
        """Sets both counts to 0."""
        self.applied[...] *= 0  # on the same devices, to avoid retraces
        self.skipped[...] *= 0

    def _count(self, batch: Any) -> None:
        counter = self.applied if any(map(is_array, flatten(batch).leaves)) else self.skipped
        counter[...] += 1


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) or (isinstance(x, list) and any(isinstance(n, str) for n in x))


@functools.lru_cache(128)
def _parallel(function: Any, mesh: Any, in_specs: Specs, out_specs: Specs) -> Any:
    return shard_map(function, mesh=mesh, in_specs=(in_specs.tree,), out_specs=out_specs.tree)
