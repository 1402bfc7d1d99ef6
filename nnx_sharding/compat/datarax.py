"""``ArraySharder``: a module that shards batches, with the names of Datarax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.parameters import device_bytes, parameter_table
from ..core.flatten import flatten
from ..core.specs import Specs
from ..partition.apply import apply_shardings, rebuilt, sharding_of
from ..partition.constrain import is_array
from ..partition.logical import LogicalRules
from ..paths import path_string
from ..placement.place import shardings_for, trimmed
from ..shard_map import shard_map


@dataclasses.dataclass(frozen=True, eq=False)
class SharderModuleConfig:
    """The configuration of an :class:`ArraySharder`.

    Configurations with equal contents are equal, and the same static value to ``jit``.

    Attributes:
      batch_stats_fn: computes statistics of a batch: a function of it that returns a dict, or a
        module.
      precomputed_stats: statistics that are known from the start, instead.
      sharding_rules: pairs, or a mapping, of a logical name of a dimension and the mesh axis (or
        axes) that shard it, as for :class:`~nnx_sharding.partition.LogicalRules`; kept as a tuple
        of pairs. Without rules, logical names are those of mesh axes.
      cacheable: accepted for configurations of Datarax; a sharder caches nothing, neither there nor
        here.

    Raises:
      TypeError: the rules are not pairs, or the statistics are not a mapping.
      ValueError: a rule is invalid, or both kinds of statistics are given.

    Example:
      >>> from nnx_sharding.compat.datarax import SharderModuleConfig
      >>> SharderModuleConfig(sharding_rules={"batch": "data"}).sharding_rules
      (('batch', 'data'),)

    The names are those of ``datarax.core.sharder.SharderModuleConfig``.
    """

    batch_stats_fn: Callable[[Any], Mapping[str, Any]] | nnx.Module | None = None
    precomputed_stats: Mapping[str, Any] | None = None
    sharding_rules: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None
    cacheable: bool = False

    def __post_init__(self) -> None:
        if self.batch_stats_fn is not None and self.precomputed_stats is not None:
            raise ValueError(
                "SharderModuleConfig: batch_stats_fn and precomputed_stats are both given. "
                "Statistics are either computed or precomputed."
            )
        if self.batch_stats_fn is not None and not callable(self.batch_stats_fn):
            raise TypeError(f"batch_stats_fn is a function, not {self.batch_stats_fn!r}.")
        if self.precomputed_stats is not None:
            object.__setattr__(self, "precomputed_stats", _statistics(self.precomputed_stats))
        if self.sharding_rules is not None:
            object.__setattr__(self, "sharding_rules", LogicalRules(self.sharding_rules).rules)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SharderModuleConfig) or self._key != other._key:
            return False
        ours, theirs = (jax.tree.flatten(config.precomputed_stats) for config in (self, other))
        same_form: bool = ours[1] == theirs[1]  # type: ignore[operator]
        return same_form and all(map(np.array_equal, ours[0], theirs[0]))

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Any:
        return (type(self), self.batch_stats_fn, self.sharding_rules, self.cacheable)


class OperationCount(nnx.Variable[Any]):
    """How often an :class:`ArraySharder` did something: an int32 scalar."""


class BatchStatistics(nnx.Variable[Any]):
    """The statistics that an :class:`ArraySharder` holds: a dict, or None."""


class ArraySharder(nnx.Module):
    """Shards batches, inside and outside of traced functions.

    Where a method takes a sharding, that is anything that :func:`~nnx_sharding.placement.place`
    takes: a ``PartitionSpec`` (of the mesh in context), a ``Sharding``, a ``StateSharding``, or a
    pytree prefix of the batch with these as leaves. A spec is truncated to the rank of its array:
    ``P("data", None)`` is valid for images and labels. What is not an array is kept. In a traced
    function, arrays are constrained or resharded as by
    :func:`~nnx_sharding.partition.with_sharding_constraint`.

    Where it takes logical names, that is a tuple (or a list) with a name, several names or None for
    each dimension, a ``PartitionSpec``, which is used as it is, or dicts and lists of these. A list
    that contains a name is a list of names.

    The counts of a sharder are state like any other, on the devices that computed them last: after
    the first call of a function on a mesh they are on other devices, and JAX traces once more.
    ``place(sharder, P(), mesh)`` before that, or ``in_shardings``, avoids it.

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

    def __init__(
        self,
        config: SharderModuleConfig | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        name: str | None = None,
    ):
        config = SharderModuleConfig() if config is None else config
        if not isinstance(config, SharderModuleConfig):
            raise TypeError(f"config is a SharderModuleConfig, not {config!r}.")
        self.config = config
        self.rngs = rngs
        self.name = name
        # A module may change what it holds; as a part of the static config it could not.
        is_module = isinstance(config.batch_stats_fn, nnx.Module)
        self.batch_stats_module = config.batch_stats_fn if is_module else None
        self.applied = OperationCount(jnp.zeros((), jnp.int32))
        self.skipped = OperationCount(jnp.zeros((), jnp.int32))
        self.statistics = BatchStatistics(_statistics(config.precomputed_stats))

    def shard(self, batch: Any, sharding: Any) -> Any:
        """Shards the arrays of a batch.

        Args:
          batch: any pytree; modules in it are changed in place.
          sharding: for all arrays, or a pytree prefix of the batch.

        Returns:
          The batch with its arrays sharded.

        Raises:
          NoMeshError: a ``PartitionSpec`` has no mesh.
          TypeError: ``sharding`` contains something else than shardings.
          ValueError: the shardings are not a prefix of the batch, or do not fit it.
        """
        result = _shard("ArraySharder.shard", batch, sharding)
        self._count(batch)
        return result

    @staticmethod
    def shard_static(batch: Any, sharding: Any) -> Any:
        """Does the same as :meth:`shard` without a sharder, so it is not counted."""
        return _shard("ArraySharder.shard_static", batch, sharding)

    def shard_with_info(self, batch: Any, sharding: Any, info: dict[str, Any] | None = None) -> Any:
        """Does the same as :meth:`shard`, and describes the batch before and after.

        Args:
          batch: any pytree.
          sharding: for all arrays, or a pytree prefix of the batch.
          info: gets ``batch_pre_sharding`` and ``batch_post_sharding``: each a dict with the
            ``structure`` of the batch and the ``shapes`` of its arrays (None for what is not one);
            the second also with their ``shardings`` and ``bytes_per_device``, by the id of the
            device (its position in the mesh in a traced function).

        Returns:
          The batch with its arrays sharded.
        """
        result = self.shard_with_info_static(batch, sharding, info)
        self._count(batch)
        return result

    @staticmethod
    def shard_with_info_static(
        batch: Any, sharding: Any, info: dict[str, Any] | None = None
    ) -> Any:
        """Does the same as :meth:`shard_with_info` without a sharder, so it is not counted."""
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
        """Does the same as :meth:`shard`, by the logical names of dimensions.

        Raises:
          ValueError: a name has no rule; the message lists the names that have one.
        """
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

        The compiled program is kept for the next call with the same function, mesh and specs, among
        the last 128; so pass the function itself, not a new lambda for each call.

        Args:
          batch: any pytree of arrays.
          transform_fn: takes a shard of the batch and returns a shard of the result.
          mesh: the mesh.
          in_spec: logical names for the batch.
          out_spec: logical names for the result; None for those of the batch, ``P()`` for a
            replicated result.

        Returns:
          The result, assembled from those of the shards.
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

        Args:
          init_fn: takes a key of the stream ``params`` and the shape.
          shape: the shape.
          logical_spec: the logical names of its dimensions.
          mesh: the mesh; None for the one in context. Without one the parameter is not sharded.

        Returns:
          A parameter with the logical names as ``out_sharding`` in its metadata, and the rules as
          ``sharding_rules``, as ``nnx.get_partition_spec`` reads them.

        Raises:
          ValueError: there are no ``rngs``, a name has no rule, or the spec does not fit.
        """
        if self.rngs is None:
            raise ValueError(
                "create_sharded_param draws from a random stream: make the sharder with "
                "ArraySharder(config, rngs=nnx.Rngs(0))."
            )
        spec = self.get_partition_spec(logical_spec)
        mesh = _compat.context_mesh() if mesh is None else mesh  # type: ignore[assignment]
        shape = tuple(shape)
        make, sharding = init_fn, None
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
        # Given to Param as arguments, they would shard the value once more.
        param.set_metadata(metadata)
        return param

    def get_partition_spec(self, logical_spec: Any) -> Any:
        """Returns the partition spec of logical names: by the first rule whose axes are free.

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
        rules = LogicalRules(self.config.sharding_rules) if self.config.sharding_rules else None

        def is_names(x: Any) -> bool:
            if isinstance(x, list):
                return any(isinstance(name, str) for name in x)
            return isinstance(x, tuple) and not isinstance(x, PartitionSpec)

        def spec(names: Any) -> Any:
            if not is_names(names):
                return names
            return PartitionSpec(*names) if rules is None else rules.spec(names)

        return jax.tree.map(
            spec,
            logical_spec,
            is_leaf=lambda x: x is None or isinstance(x, PartitionSpec) or is_names(x),
        )

    def get_named_sharding(self, mesh: Mesh | AbstractMesh, logical_spec: Any) -> Any:
        """Returns the sharding on a mesh of logical names; see :meth:`get_partition_spec`."""
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            self.get_partition_spec(logical_spec),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def get_operation_stats(self) -> dict[str, Any]:
        """Returns the number of batches that were sharded, and of those that had no array.

        Waits for the devices that count. In a traced function the counts are traced.

        Returns:
          ``{"applied_count": …, "skipped_count": …}``, two integers.
        """
        counts = {"applied_count": self.applied[...], "skipped_count": self.skipped[...]}
        traced = any(isinstance(count, jax.core.Tracer) for count in counts.values())
        return counts if traced else {name: int(count) for name, count in counts.items()}

    def reset_operation_stats(self) -> None:
        """Sets both counts to 0."""
        self.applied[...] *= 0  # on the same devices, so that no function is traced again
        self.skipped[...] *= 0

    def _count(self, batch: Any) -> None:
        counter = self.applied if any(map(is_array, flatten(batch).leaves)) else self.skipped
        counter[...] += 1

    def compute_statistics(self, data: Any) -> dict[str, Any] | None:
        """Computes statistics of a batch by ``config.batch_stats_fn``, and keeps them.

        Returns:
          The statistics; None if there is no such function.

        Raises:
          TypeError: the function returned something else than a mapping.
        """
        function = self.batch_stats_module or self.config.batch_stats_fn
        if function is None:
            return None
        self.set_statistics(function(data))
        return self.get_statistics()

    def get_statistics(self) -> dict[str, Any] | None:
        """Returns the statistics that were computed, set or precomputed; None without any."""
        return _statistics(self.statistics.get_value())

    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        """Replaces the statistics.

        Raises:
          TypeError: ``stats`` is not a mapping.
        """
        if stats is None:
            raise TypeError("statistics are a mapping; reset_statistics() removes them.")
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
    ) -> ArraySharder:
        """Returns a new sharder with these settings, and otherwise those of this one.

        It shares the random streams, and counts from 0. Its statistics are those of its config.
        """
        return type(self)(
            self.config if config is None else config,
            rngs=self.rngs if rngs is None else rngs,
            name=self.name if name is None else name,
        )

    def clone(self) -> ArraySharder:
        """Returns a copy, with counts, statistics and streams, that shares nothing."""
        return nnx.clone(self)

    def get_state(self) -> dict[str, Any]:
        """Returns the state and the rules, as nested dicts for a checkpoint.

        Later changes of the sharder do not affect them.
        """
        state: dict[str, Any] = _copied(nnx.to_pure_dict(nnx.state(self)))
        if self.config.sharding_rules:
            state[_RULES] = self.config.sharding_rules
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`get_state` returned.

        Neither ``state`` nor a config that other sharders share is changed, now or later: NumPy
        arrays are copied, and other rules make a new config. The state may have statistics where
        the sharder had none.

        Raises:
          TypeError: ``state`` is not a mapping.
          ValueError: something is missing, unknown, or of another shape or dtype; all problems are
            named, and nothing was changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a dict, not a {type(state).__name__}.")
        variables = dict(nnx.to_flat_state(nnx.state(self)))
        values = traverse_util.flatten_dict(
            {key: value for key, value in state.items() if key != _RULES},
            is_leaf=lambda path, _: path in variables,
        )
        problems = [
            f"  {path_string(path)} is missing" for path in variables.keys() - values.keys()
        ]
        problems += [
            f"  {path_string(path)} is unknown" for path in values.keys() - variables.keys()
        ]
        for path in variables.keys() & values.keys():
            problem = _state_problem(variables[path], values[path])
            problems += [f"  {path_string(path)} is {problem}"] if problem else []
        if problems:
            lines = "\n".join(sorted(problems))
            raise ValueError(f"this is not a state of the sharder:\n{lines}")
        if _RULES in state:
            self.config = dataclasses.replace(self.config, sharding_rules=state[_RULES])
        nnx.update(self, nnx.from_flat_state({p: _copied(values[p]) for p in variables}))

    def requires_rng_streams(self) -> list[str] | None:
        """Returns the names of required random streams; None if there are none."""
        return None

    def ensure_rng_streams(self, stream_names: Sequence[str]) -> None:
        """Checks that all streams of :meth:`requires_rng_streams` are among these.

        Raises:
          ValueError: some are missing; all of them are named.
        """
        missing = [s for s in self.requires_rng_streams() or () if s not in stream_names]
        if missing:
            raise ValueError(
                f"these random streams are required and missing: {', '.join(map(repr, missing))}. "
                f"There are {', '.join(map(repr, stream_names)) or 'none'}."
            )


_RULES = "sharding_rules"


def _shard(caller: str, batch: Any, sharding: Any) -> Any:
    flat = flatten(batch)
    shardings = shardings_for(batch, sharding, None, caller, flat=flat, adapt=trimmed)
    return rebuilt(flat, apply_shardings(flat.leaves, shardings), caller)


def _statistics(stats: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A copy of statistics, including their NumPy arrays."""
    if stats is not None and not isinstance(stats, Mapping):
        raise TypeError(f"statistics are a mapping of names, not {stats!r}.")
    return None if stats is None else _copied(dict(stats))


def _copied(tree: Any) -> Any:
    """A pytree in new containers, with copies of its NumPy arrays, which are mutable."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


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


def _state_problem(variable: Any, new: Any) -> str | None:
    """Why a value does not fit a Variable of the sharder, if it does not."""
    if isinstance(variable, BatchStatistics):
        is_valid = new is None or isinstance(new, Mapping)
        return None if is_valid else f"of type {type(new).__name__}, not a dict"
    old = variable.get_value()
    if not hasattr(old, "dtype") or _type_of(old) == _type_of(new):
        return None
    return f"{_type_of(new)}, not {_type_of(old)}"


def _type_of(x: Any) -> str:
    dtype = getattr(x, "dtype", None)
    return type(x).__name__ if dtype is None else f"{dtype}{list(x.shape)}"
