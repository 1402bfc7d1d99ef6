"""``ArraySharder`` is a module that shards batches, with the names of ``datarax.sharding``.

Pipelines of Datarax are made of modules with a state: counts of batches, statistics, random
streams. `ArraySharder` has the same state under the same names, and shards with this library:
`assign_shardings` turns a prefix of specs into the sharding of each array, `apply_shardings` moves
the arrays (in a trace: constrains them), and `rebuild` puts them into the caller's tree.
"""

# The state of a sharder is in these attributes, besides the streams ``rngs``:
#
#     _applied_count, _skipped_count
#                      Variables with the numbers of batches that were sharded, and of batches that
#                      had no array
#     _computed_stats  a Variable with the statistics, a dict; None without any
#     batch_stats_module
#                      ``config.batch_stats_fn`` if it is a module; otherwise None

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.parameters import device_bytes, parameter_table
from ..core.constrain import apply_shardings, is_shardable, sharding_of
from ..core.flatten import flatten
from ..core.rebuild import rebuild
from ..core.tree_shardings import assign_shardings
from ..errors import raise_if_any
from ..partition.rules import LogicalRules
from ..placement.place import trim_to_rank
from ..transforms.shard_map import shard_map

__all__ = ["ArraySharder", "SharderModuleConfig"]


@dataclasses.dataclass(frozen=True)
class SharderModuleConfig:
    """The configuration of an :class:`ArraySharder`.

    Attributes:
      cacheable: accepted as by Datarax; a sharder caches nothing.
      batch_stats_fn: a function, or a module, from a batch to a dict of statistics.
      precomputed_stats: statistics that are known from the start, instead of ``batch_stats_fn``.
      sharding_rules: pairs, or a mapping, as for :class:`~nnx_sharding.partition.LogicalRules`;
        kept as a tuple of pairs. Without rules, logical names are names of mesh axes.
    """

    cacheable: bool = False
    batch_stats_fn: Callable[[Any], Mapping[str, Any]] | None = None
    precomputed_stats: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    sharding_rules: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None

    def __post_init__(self) -> None:
        """Checks the options, makes the rules hashable, and copies the statistics.

        The statistics need no hash, because they are not compared.
        """
        function, stats = self.batch_stats_fn, self.precomputed_stats
        # Both together are refused as in Datarax, because `precomputed_stats` would never be read.
        if function is not None and stats is not None:
            raise ValueError("batch_stats_fn and precomputed_stats are both given: leave one out.")
        if function is not None and not callable(function):
            raise TypeError(f"batch_stats_fn must be a function, got {function!r}.")
        if stats is not None:
            object.__setattr__(self, "precomputed_stats", _statistics(stats))
        if self.sharding_rules is not None:
            # The rules become a tuple, so that configurations with equal rules are equal and
            # hashable.
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
      config: the rules for logical names, and statistics.
      rngs: random streams for :meth:`create_sharded_param`.
      name: a name for it.

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
        """Makes a sharder with the options of Datarax.

        Args:
          config: see the class; None for no rules and no statistics.
          rngs: random streams for :meth:`create_sharded_param`.
          name: not used.
        """
        self.config = SharderModuleConfig() if config is None else config
        if not isinstance(self.config, SharderModuleConfig):
            raise TypeError(f"config must be a SharderModuleConfig, got {config!r}.")
        self.rngs, self.name = rngs, name
        # The config is static, so changes of a module in it would be lost in a traced function. The
        # sharder therefore has that module as an attribute, too.
        stats_fn = self.config.batch_stats_fn
        self.batch_stats_module = stats_fn if isinstance(stats_fn, nnx.Module) else None
        # The attributes have the names of Datarax, because states that Datarax saved have to fit.
        # They are Variables, so that a traced function returns their changes. The counts have the
        # dtype that they have in such a state.
        self._applied_count = nnx.Variable(jnp.zeros((), jnp.int32))
        self._skipped_count = nnx.Variable(jnp.zeros((), jnp.int32))
        # The statistics are copied, because all sharders of one config share it.
        self._computed_stats = nnx.Variable(_copied(self.config.precomputed_stats))

    def shard(self, batch: object, sharding: object) -> Any:
        """Shards the arrays of a batch by a sharding, or a pytree prefix of shardings."""
        result = self.shard_static(batch, sharding)
        self._count(batch)
        return result

    @staticmethod
    def shard_static(batch: object, sharding: object) -> Any:
        """Does the same as :meth:`shard` without a sharder, and is not counted."""
        name = "ArraySharder.shard"  # messages of all methods name this one
        flat = flatten(batch)
        # `whole`: UNCONSTRAINED dimensions are refused. `adapt`: a spec may be longer than the
        # rank.
        _, shardings = assign_shardings(flat, sharding, caller=name, whole=True, adapt=trim_to_rank)
        return rebuild(flat, apply_shardings(flat.leaves, shardings), name)

    def shard_with_info(
        self, batch: object, sharding: object, info: dict[str, Any] | None = None
    ) -> Any:
        """Shards a batch as :meth:`shard` does, and describes it before and after in ``info``.

        ``info["batch_pre_sharding"]`` and ``info["batch_post_sharding"]`` are dicts with the
        ``structure`` of the batch, the ``shapes`` of its arrays and their ``shardings``; the second
        also has ``bytes_per_device``, by the id of the device (in a trace: the position in the
        mesh).
        """
        result = self.shard_with_info_static(batch, sharding, info)
        self._count(batch)
        return result

    @staticmethod
    def shard_with_info_static(
        batch: object, sharding: object, info: dict[str, Any] | None = None
    ) -> Any:
        """Does the same as :meth:`shard_with_info` without a sharder, and is not counted."""
        result = ArraySharder.shard_static(batch, sharding)
        if info is not None:
            # The table is made only for `info`, because it goes through all arrays.
            held = device_bytes(parameter_table(result))
            info["batch_pre_sharding"] = _described(batch)
            info["batch_post_sharding"] = _described(result) | {"bytes_per_device": held}
        return result

    def shard_with_logical_names(
        self, batch: object, mesh: Mesh | AbstractMesh, logical_spec: object
    ) -> Any:
        """Does the same as :meth:`shard`, with the shardings of :meth:`get_named_sharding`."""
        return self.shard(batch, self.get_named_sharding(mesh, logical_spec))

    def apply_parallel_transform(
        self,
        batch: object,
        transform_fn: Callable[[Any], Any],
        mesh: Mesh | AbstractMesh,
        in_spec: object,
        out_spec: object = None,
    ) -> Any:
        """Applies a function to each shard of a batch, by ``shard_map``; the batch is counted.

        Args:
          batch: a pytree of arrays.
          transform_fn: a function of a shard of it. What is compiled is kept with the function, so
            pass the same one each time.
          mesh: the mesh of the shards.
          in_spec: logical names for the dimensions of the batch, as for :meth:`get_partition_spec`.
          out_spec: likewise for the result; None for the same ones.
        """
        in_specs = self.get_partition_spec(in_spec)
        out_specs = in_specs if out_spec is None else self.get_partition_spec(out_spec)
        # A new wrapper in each call causes no new trace, because JAX keeps traces with the
        # function.
        apply = shard_map(transform_fn, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs)
        result = apply(batch)
        self._count(batch)
        return result

    parallel_transform = apply_parallel_transform

    def create_sharded_param(
        self,
        init_fn: Callable[..., object],
        shape: Sequence[int],
        logical_spec: Any,
        *,
        mesh: Mesh | None = None,
    ) -> nnx.Param[Any]:
        """Creates a parameter in its sharding, never fully on one device.

        Its metadata contain the logical names as ``out_sharding`` and the rules as
        ``sharding_rules``, for ``nnx.get_partition_spec``.

        Args:
          init_fn: a function of a key, from the stream ``params``, and the shape.
          shape: the shape of the parameter.
          logical_spec: logical names for its dimensions, or a ``PartitionSpec``.
          mesh: the mesh; None for the one in context, without which nothing is sharded.
        """
        if self.rngs is None:
            text = "draws from a random stream: make the sharder with rngs=nnx.Rngs(0)."
            raise ValueError(f"create_sharded_param {text}")
        make = init_fn
        shape = tuple(shape)  # a static argument has to be hashable
        sharding = None
        metadata: dict[str, Any] = {"out_sharding": tuple(logical_spec)}  # the entries of a spec
        mesh_or_context = _compat.context_mesh() if mesh is None else mesh
        if mesh_or_context is not None:
            sharding = self._sharding_of(shape, logical_spec, mesh_or_context)
            # An abstract mesh has no devices on which the parameter could be made sharded.
            if isinstance(sharding.mesh, Mesh):
                # A compiled program makes only its shard on each device.
                make = jax.jit(init_fn, static_argnums=1, out_shardings=sharding)
            metadata["mesh"] = mesh_or_context  # Flax makes shardings from the names on this mesh
        # Rules are for logical names. They do not apply to a spec, because it names mesh axes.
        if self.config.sharding_rules and not isinstance(logical_spec, PartitionSpec):
            metadata["sharding_rules"] = self.config.sharding_rules
        # The value is constrained to its sharding, because in a trace JAX may ignore out_shardings,
        # or return a sharding of a kind that has no spec.
        [value] = apply_shardings([make(self.rngs.params(), shape)], [sharding])
        param = nnx.Param(value)
        # Metadata are set afterwards, because as arguments of Param they would shard the value once
        # more.
        param.set_metadata(metadata)
        return param

    def _sharding_of(
        self, shape: tuple[int, ...], logical_spec: object, mesh: Mesh | AbstractMesh
    ) -> NamedSharding:
        """Returns the sharding of an array by its logical names; raises an error if none fits."""
        spec = self.get_partition_spec(logical_spec)
        # An abstract array serves to check the spec, because shapes are all that matters.
        abstract = jax.ShapeDtypeStruct(shape, "float32")  # any dtype would do
        # ``whole`` refuses UNCONSTRAINED dimensions, because a compiler would choose their axes.
        options: Any = {"mesh": mesh, "caller": "create_sharded_param", "whole": True}
        _, [sharding] = assign_shardings(flatten(abstract), spec, **options)
        checked: NamedSharding = sharding
        return checked

    def get_partition_spec(self, logical_spec: object) -> Any:
        """Returns the partition spec for logical names, by the first rule whose axes are free.

        ``("batch", None)`` is ``P("data", None)`` by the rule ``("batch", "data")``. Without rules,
        names are those of mesh axes.

        Args:
          logical_spec: the names of the dimensions of one array, a tuple or a list with a text; a
            ``PartitionSpec``, which is returned unchanged; or a pytree of these, for which the same
            pytree of specs is returned.
        """
        rules = self.config.sharding_rules

        def spec_of(part: Any) -> Any:
            if not _is_names(part):  # a ``PartitionSpec``
                return part
            return LogicalRules(rules).spec(part) if rules else PartitionSpec(*part)

        return jax.tree.map(spec_of, logical_spec, is_leaf=_is_names)

    def get_named_sharding(self, mesh: Mesh | AbstractMesh, logical_spec: object) -> Any:
        """Returns the sharding on a mesh for logical names; see :meth:`get_partition_spec`."""
        specs = self.get_partition_spec(logical_spec)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def get_operation_stats(self) -> dict[str, Any]:
        """Returns the numbers of batches that were sharded, and that had no array."""
        names = "applied_count", "skipped_count"
        counts = {name: getattr(self, f"_{name}")[...] for name in names}
        return {n: x if isinstance(x, jax.core.Tracer) else int(x) for n, x in counts.items()}

    def reset_operation_stats(self) -> None:
        """Sets both counts to 0."""
        self._applied_count[...] *= 0  # on the same devices, to avoid retraces
        self._skipped_count[...] *= 0

    def _count(self, batch: object) -> None:
        """Counts a batch as applied, or as skipped if it has no array."""
        # Datarax counts a batch as skipped if it has nothing but texts.
        has_arrays = any(map(is_shardable, flatten(batch).leaves))
        counter = self._applied_count if has_arrays else self._skipped_count
        counter[...] += 1

    def compute_statistics(self, data: object) -> Any:
        """Computes, keeps and returns statistics of a batch; None without ``batch_stats_fn``."""
        # The sharder's own module is called, because the module in the config is static and would
        # not be updated.
        function = self.batch_stats_module or self.config.batch_stats_fn
        if function is None:
            return None
        self.set_statistics(function(data))
        return self.get_statistics()

    def get_statistics(self) -> Any:
        """Returns the statistics that were computed, set or precomputed last; None without any."""
        return _copied(self._computed_stats.get_value())

    def set_statistics(self, stats: Mapping[str, object]) -> None:
        """Replaces the statistics."""
        self._computed_stats.set_value(_statistics(stats))

    def reset_statistics(self) -> None:
        """Removes the statistics, including the statistics in the config."""
        self._computed_stats.set_value(None)

    def copy(
        self,
        *,
        config: SharderModuleConfig | None = None,
        rngs: nnx.Rngs | None = None,
        name: str | None = None,
    ) -> Self:
        """Returns a new sharder with these settings; the others are the settings of this one."""
        return type(self)(config or self.config, rngs=rngs or self.rngs, name=name or self.name)

    def clone(self) -> Self:
        """Returns a copy, with counts, statistics and streams, that shares nothing."""
        return nnx.clone(self)

    def get_state(self) -> dict[str, Any]:
        """Returns the state, and the rules if there are any, as nested dicts for a checkpoint."""
        state: dict[str, Any] = _copied(nnx.to_pure_dict(nnx.state(self)))
        if self.config.sharding_rules:
            state["sharding_rules"] = self.config.sharding_rules
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`get_state` returned, here or in Datarax.

        Raises:
          ValueError: the state has other entries, shapes or dtypes. Nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state must be a dict, got a {type(state).__name__}.")
        values = {key: value for key, value in state.items() if key != "sharding_rules"}
        own = nnx.state(self)
        # The dtype and shape of each array, as text by its path.
        expected, given = _types(nnx.to_pure_dict(own)), _types(values)
        all_paths = sorted({*expected, *given})
        lines = [
            f"  {path}: {given.get(path, 'missing')}, expected {expected.get(path, 'nothing')}"
            for path in all_paths
            if given.get(path) != expected.get(path)
        ]
        # An error is raised only if there are lines. All statements that may raise an error come
        # before the first statement that changes the sharder.
        raise_if_any(ValueError, "this is not a state of the sharder:", lines)
        # Statistics are set by themselves, because they may have any form, and Flax would require
        # the form of the present ones.
        stats = values.pop("_computed_stats", None)
        if stats is not None:
            stats = _statistics(stats)
        rules = state.get("sharding_rules", self.config.sharding_rules)
        config = dataclasses.replace(self.config, sharding_rules=rules)
        nnx.replace_by_pure_dict(own, _copied(values))  # changes `own`, not yet the sharder
        nnx.update(self, own)  # the first change
        self._computed_stats.set_value(stats)
        self.config = config

    def requires_rng_streams(self) -> list[str] | None:
        """Returns the names of the random streams that it needs; None: it needs none."""
        return None

    def ensure_rng_streams(self, stream_names: Sequence[str]) -> None:
        """Raises a ValueError if streams of :meth:`requires_rng_streams` are not among these."""
        missing = [x for x in self.requires_rng_streams() or () if x not in stream_names]
        if missing:
            raise ValueError(f"the random streams {missing} are missing; got {stream_names!r}.")


def _statistics(stats: object) -> dict[str, Any]:
    """Returns a copy of statistics, or raises an error for anything but a mapping."""
    if not isinstance(stats, Mapping):
        raise TypeError(f"statistics must be a mapping of names, got {stats!r}.")
    copied: dict[str, Any] = _copied(dict(stats))
    return copied


def _copied(tree: object) -> Any:
    """Returns a pytree in new containers, with copies of its NumPy arrays, which are mutable."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


def _types(state: Mapping[str, object]) -> dict[str, str]:
    """Returns the type of each array of a state as text, by its path.

    Statistics are left out, because they may have any form.
    """
    typed_part = {key: value for key, value in state.items() if key != "_computed_stats"}
    types = jax.tree_util.tree_leaves_with_path(jax.tree.map(jax.typeof, typed_part))
    return {jax.tree_util.keystr(path): f"{t.dtype}{[*t.shape]}" for path, t in types}


def _described(batch: object) -> dict[str, Any]:
    """Returns the structure of a batch, and the shape and sharding of each array in it."""
    shapes = jax.tree.map(lambda x: tuple(x.shape) if is_shardable(x) else None, batch)
    shardings = jax.tree.map(lambda x: sharding_of(x) if is_shardable(x) else None, batch)
    return {"structure": jax.tree.structure(batch), "shapes": shapes, "shardings": shardings}


def _is_names(x: object) -> bool:
    """Whether ``x`` has the logical names of one array: a tuple, or a list with a text."""
    return isinstance(x, tuple) or (isinstance(x, list) and any(isinstance(n, str) for n in x))
