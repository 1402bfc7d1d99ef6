"""``ArraySharder``: a module that shards batches, with the names of ``datarax.sharding``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.parameters import device_bytes, parameter_table
from ..core.flatten import flatten
from ..core.resharding import apply_shardings, rebuilt, sharding_of
from ..core.targets import Specs
from ..errors import raise_listed
from ..partition.constrain import is_array
from ..partition.logical import LogicalRules
from ..placement.place import shardings_for, trimmed
from ..specs.paths import path_string
from ..transforms.shard_map import shard_map

__all__ = ["ArraySharder", "SharderModuleConfig"]


@dataclasses.dataclass(frozen=True)
class SharderModuleConfig:
    """The configuration of an :class:`ArraySharder`.

    Equality ignores precomputed statistics, which are in the state of the sharder.

    Attributes:
      batch_stats_fn: computes statistics of a batch: a function or module that returns a dict.
      precomputed_stats: instead, statistics that are known from the start.
      sharding_rules: pairs, or a mapping, as for :class:`~nnx_sharding.partition.LogicalRules`;
        kept as a tuple of pairs. Without rules, logical names are those of mesh axes.
      cacheable: accepted for configurations of Datarax; a sharder caches nothing.
    """

    batch_stats_fn: Callable[[Any], Mapping[str, Any]] | nnx.Module | None = None
    precomputed_stats: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    sharding_rules: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None
    cacheable: bool = False

    def __post_init__(self) -> None:
        if self.batch_stats_fn is not None and self.precomputed_stats is not None:
            raise ValueError("batch_stats_fn and precomputed_stats are both given.")
        if self.batch_stats_fn is not None and not callable(self.batch_stats_fn):
            raise TypeError(f"batch_stats_fn must be a function, got {self.batch_stats_fn!r}.")
        object.__setattr__(self, "precomputed_stats", _statistics(self.precomputed_stats))
        if self.sharding_rules is not None:
            object.__setattr__(self, "sharding_rules", LogicalRules(self.sharding_rules).rules)


class _Count(nnx.Variable[Any]):
    """How often a sharder did something: an int32 scalar."""


class _Statistics(nnx.Variable[Any]):
    """The statistics that a sharder holds: a dict, or None."""


class ArraySharder(nnx.Module):
    """Shards batches, inside and outside of traced functions.

    A sharding is anything that :func:`~nnx_sharding.placement.place` takes. A spec is truncated to
    the rank of its array: ``P("data", None)`` is valid for images and labels. In a traced function,
    arrays are constrained or resharded as by
    :func:`~nnx_sharding.partition.with_sharding_constraint`.

    Logical names are a tuple (or a list) with a name, several names or None for each dimension, a
    ``PartitionSpec``, which is used unchanged, or dicts and lists of these.

    The counts are on the devices that last computed them, so JAX retraces after the first call of a
    function on a mesh. ``place(sharder, P(), mesh)`` before that call avoids it.

    Args:
      config: the rules for logical names, and statistics.
      rngs: random streams for :meth:`create_sharded_param`.
      name: a name, for the reader.

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

    def __init__(
        self,
        config: SharderModuleConfig | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        name: str | None = None,
    ):
        self.config = SharderModuleConfig() if config is None else config
        if not isinstance(self.config, SharderModuleConfig):
            raise TypeError(f"config must be a SharderModuleConfig, got {config!r}.")
        self.rngs, self.name = rngs, name
        # A module may change its own state, which it could not as a part of the static config.
        stats_fn = self.config.batch_stats_fn
        self.batch_stats_module = stats_fn if isinstance(stats_fn, nnx.Module) else None
        self.applied = _Count(jnp.zeros((), jnp.int32))
        self.skipped = _Count(jnp.zeros((), jnp.int32))
        self.statistics = _Statistics(_statistics(self.config.precomputed_stats))

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

    def shard_with_info(self, batch: Any, sharding: Any, info: dict[str, Any] | None = None) -> Any:
        """Does the same as :meth:`shard`, and describes the batch before and after.

        ``info`` gets ``batch_pre_sharding`` and ``batch_post_sharding``: each a dict with the
        ``structure`` of the batch and the ``shapes`` of its arrays; the second also with their
        ``shardings`` and ``bytes_per_device``, by device id (in a traced function, by position in
        the mesh).
        """
        result = self.shard_with_info_static(batch, sharding, info)
        self._count(batch)
        return result

    @staticmethod
    def shard_with_info_static(
        batch: Any, sharding: Any, info: dict[str, Any] | None = None
    ) -> Any:
        """Does the same as :meth:`shard_with_info` without a sharder, and is not counted."""
        result = ArraySharder.shard_static(batch, sharding)
        if info is not None:
            abstract = _map_arrays(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), result
            )
            info["batch_pre_sharding"] = _described(batch)
            info["batch_post_sharding"] = _described(result) | {
                "shardings": _map_arrays(sharding_of, result),
                "bytes_per_device": device_bytes(parameter_table(abstract)),
            }
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
        """Returns the partition spec for logical names, by the first rule whose axes are free."""
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

    def get_operation_stats(self) -> dict[str, Any]:
        """Returns the number of batches that were sharded, and of those that had no array."""
        counts = {"applied_count": self.applied[...], "skipped_count": self.skipped[...]}
        traced = any(isinstance(count, jax.core.Tracer) for count in counts.values())
        return counts if traced else {name: int(count) for name, count in counts.items()}

    def reset_operation_stats(self) -> None:
        """Sets both counts to 0."""
        self.applied[...] *= 0  # on the same devices, to avoid retraces
        self.skipped[...] *= 0

    def _count(self, batch: Any) -> None:
        counter = self.applied if any(map(is_array, flatten(batch).leaves)) else self.skipped
        counter[...] += 1

    def compute_statistics(self, data: Any) -> dict[str, Any] | None:
        """Computes, keeps and returns statistics of a batch; None without ``batch_stats_fn``."""
        function = self.batch_stats_module or self.config.batch_stats_fn
        if function is None:
            return None
        self.set_statistics(function(data))
        return self.get_statistics()

    def get_statistics(self) -> dict[str, Any] | None:
        """Returns the statistics that were computed, set or precomputed; None without any."""
        return _statistics(self.statistics.get_value())

    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        """Replaces the statistics by those of a mapping."""
        if stats is None:
            raise TypeError("statistics must be a mapping; reset_statistics() removes them.")
        self.statistics.set_value(_statistics(stats))

    def reset_statistics(self) -> None:
        """Removes the statistics, including precomputed ones."""
        self.statistics.set_value(None)

    def copy(
        self,
        *,
        config: SharderModuleConfig | None = None,
        rngs: nnx.Rngs | None = None,
        name: str | None = None,
    ) -> Self:
        """Returns a new sharder with these settings, which shares the others with this one.

        It counts from 0, and its statistics are those of its config.
        """
        return type(self)(config or self.config, rngs=rngs or self.rngs, name=name or self.name)

    def clone(self) -> Self:
        """Returns a copy, with counts, statistics and streams, that shares nothing."""
        return nnx.clone(self)

    def get_state(self) -> dict[str, Any]:
        """Returns a copy of the state and the rules, as nested dicts for a checkpoint."""
        state: dict[str, Any] = _copied(nnx.to_pure_dict(nnx.state(self)))
        rules = self.config.sharding_rules
        return state | ({_RULES: rules} if rules else {})

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`get_state` returned; if it does not fit, nothing is changed."""
        if not isinstance(state, Mapping):
            raise TypeError(f"the state must be a dict, got a {type(state).__name__}.")
        expected = {path: _type(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(self))}
        others = {key: value for key, value in state.items() if key != _RULES}
        values = traverse_util.flatten_dict(others, is_leaf=lambda path, _: path in expected)
        given = {path: _type(value) for path, value in values.items()}
        lines = [
            f"  {path_string(path)} is {given.get(path, 'missing')}, "
            f"not {expected.get(path, 'known')}"
            for path in sorted(expected | given, key=str)
            if expected.get(path) != given.get(path)
        ]
        raise_listed(ValueError, "this is not a state of the sharder:", lines)
        if _RULES in state:
            self.config = dataclasses.replace(self.config, sharding_rules=state[_RULES])
        nnx.update(self, nnx.from_flat_state({path: _copied(values[path]) for path in expected}))

    def requires_rng_streams(self) -> list[str] | None:
        """Returns the names of required random streams; None if there are none."""
        return None

    def ensure_rng_streams(self, stream_names: Sequence[str]) -> None:
        """Raises a ValueError if streams of :meth:`requires_rng_streams` are not among these."""
        missing = [s for s in self.requires_rng_streams() or () if s not in stream_names]
        if missing:
            raise ValueError(
                f"these random streams are required and missing: {', '.join(map(repr, missing))}. "
                f"There are {', '.join(map(repr, stream_names)) or 'none'}."
            )


_RULES = "sharding_rules"


def _statistics(stats: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A copy of statistics, including their NumPy arrays."""
    if stats is not None and not isinstance(stats, Mapping):
        raise TypeError(f"statistics must be a mapping of names, got {stats!r}.")
    return None if stats is None else _copied(dict(stats))


def _copied(tree: Any) -> Any:
    """A pytree in new containers, with copies of its NumPy arrays, which are mutable."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


def _type(x: Any) -> str:
    if x is None or isinstance(x, Mapping):
        return "a dict or None"
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"of type {type(x).__name__}"


def _is_names(x: Any) -> bool:
    if isinstance(x, list):
        return any(isinstance(name, str) for name in x)
    return isinstance(x, tuple) and not isinstance(x, PartitionSpec)


def _map_arrays(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with the results of a function of its arrays, and None for everything else."""
    return jax.tree.map(lambda x: function(x) if is_array(x) else None, batch)


def _described(batch: Any) -> dict[str, Any]:
    shapes = _map_arrays(lambda x: tuple(x.shape), batch)
    return {"structure": jax.tree.structure(batch), "shapes": shapes}


@functools.lru_cache(128)
def _parallel(function: Any, mesh: Any, in_specs: Specs, out_specs: Specs) -> Any:
    return shard_map(function, mesh=mesh, in_specs=(in_specs.tree,), out_specs=out_specs.tree)
