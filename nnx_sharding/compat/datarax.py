"""``ArraySharder``: batches laid out on devices, as a module with the names of Datarax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.device_bytes import device_bytes
from ..analysis.parameters import parameter_table
from ..core.flatten import flatten
from ..partition.apply import apply_shardings, rebuilt, sharding_of
from ..partition.constrain import is_array
from ..partition.logical import LogicalRules
from ..paths import path_string
from ..placement.place import Rules, assigned
from ..shard_map import shard_map


@dataclasses.dataclass(frozen=True, eq=False)
class SharderModuleConfig:
    """What an :class:`ArraySharder` is made with.

    Configurations are equal, and the same static value to ``jit``, if all in them is.

    Attributes:
      batch_stats_fn: makes statistics of a batch: a function of it to a dict, or a module.
      precomputed_stats: statistics that are known from the start, instead.
      sharding_rules: pairs, or a mapping, of a logical name of a dimension and the mesh axis (or
        axes) that cut it, as :class:`~nnx_sharding.partition.LogicalRules` takes them; kept as a
        tuple of pairs. Without them logical names are those of mesh axes.
      cacheable: accepted for configurations of Datarax; a sharder caches nothing, there as here.

    Raises:
      TypeError: the rules are no pairs, or the statistics no mapping.
      ValueError: a rule is none, or both kinds of statistics are given.

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
                "Statistics are either computed or known."
            )
        if self.batch_stats_fn is not None and not callable(self.batch_stats_fn):
            raise TypeError(f"batch_stats_fn is a function, not {self.batch_stats_fn!r}.")
        if self.precomputed_stats is not None:
            object.__setattr__(self, "precomputed_stats", _statistics(self.precomputed_stats))
        if self.sharding_rules is not None:
            object.__setattr__(self, "sharding_rules", LogicalRules(self.sharding_rules).rules)

    @property
    def rules(self) -> LogicalRules | None:
        """The rules, ready for use; None if there are none."""
        return LogicalRules(self.sharding_rules) if self.sharding_rules else None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SharderModuleConfig)
            and self._key == other._key
            and _are_equal(self.precomputed_stats, other.precomputed_stats)
        )

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
    """Lays batches out on devices, inside and outside of functions that JAX traces.

    Where a method takes a sharding, that is all that :func:`~nnx_sharding.placement.place` takes:
    a ``PartitionSpec`` (of the mesh in context), a ``Sharding``, a ``StateSharding``, or a prefix
    of the batch with these as leaves. A spec is cut to the rank of its array, so ``P("data",
    None)`` is for images and labels. What is no array is kept. Where JAX traces, arrays are
    constrained or resharded as in :func:`~nnx_sharding.partition.with_sharding_constraint`.

    Where it takes logical names, that is a tuple (or a list) of the names of dimensions (or None,
    or several), a ``PartitionSpec``, which is taken as it is, or dicts and lists of these. A list
    with a name in it is a list of names.

    What it counts is state as any other, on the devices that computed it last: after the first
    call of a function for a mesh JAX finds it elsewhere, and traces once more. ``place(sharder,
    P(), mesh)`` before that, or ``in_shardings``, spares it.

    Args:
      config: the rules for logical names, and statistics.
      rngs: random streams for :meth:`create_sharded_param`.
      name: a name, for whoever reads it.

    Raises:
      TypeError: ``config`` is no :class:`SharderModuleConfig`.

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
        self.applied = OperationCount(_zero())
        self.skipped = OperationCount(_zero())
        self.statistics = BatchStatistics(_statistics(config.precomputed_stats))

    def shard(self, batch: Any, sharding: Any) -> Any:
        """Lays out the arrays of a batch.

        Args:
          batch: any pytree; modules in it are changed in place.
          sharding: for all arrays, or a prefix of the batch.

        Returns:
          The batch with its arrays laid out.

        Raises:
          NoMeshError: a ``PartitionSpec`` has no mesh.
          TypeError: something is no sharding.
          ValueError: the shardings are no prefix of the batch, or do not fit it.
        """
        result = _shard("ArraySharder.shard", batch, sharding)
        self._count(batch)
        return result

    @staticmethod
    def shard_static(batch: Any, sharding: Any) -> Any:
        """As :meth:`shard`, without a sharder, and without being counted."""
        return _shard("ArraySharder.shard_static", batch, sharding)

    def shard_with_info(self, batch: Any, sharding: Any, info: dict[str, Any] | None = None) -> Any:
        """As :meth:`shard`, and tells about it.

        Args:
          batch: any pytree.
          sharding: for all arrays, or a prefix of the batch.
          info: gets ``batch_pre_sharding`` and ``batch_post_sharding``: each a dict with the
            ``structure`` of the batch and the ``shapes`` of its arrays, None for what is none;
            the second also with their ``shardings``, and ``bytes_per_device``, by the id of the
            device (its position in the mesh where JAX traces).

        Returns:
          The batch with its arrays laid out.
        """
        result = self.shard_with_info_static(batch, sharding, info)
        self._count(batch)
        return result

    @staticmethod
    def shard_with_info_static(
        batch: Any, sharding: Any, info: dict[str, Any] | None = None
    ) -> Any:
        """As :meth:`shard_with_info`, without a sharder, and without being counted."""
        found: dict[str, Any] = {"batch_pre_sharding": _described(batch)}
        result = _shard("ArraySharder.shard_with_info", batch, sharding)
        after = found["batch_post_sharding"] = _described(result)
        after["shardings"] = _map_arrays(sharding_of, result)
        after["bytes_per_device"] = device_bytes(parameter_table(_map_arrays(_abstract, result)))
        if info is not None:
            info.update(found)
        return result

    def shard_with_logical_names(
        self, batch: Any, mesh: Mesh | AbstractMesh, logical_spec: Any
    ) -> Any:
        """As :meth:`shard`, by the logical names of dimensions.

        Raises:
          ValueError: a name has no rule; the names that have one are in the message.
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
        """Calls a function once for each shard of a batch, by ``shard_map``.

        The program is kept for the next call with the same function, mesh and specs, as long as
        it is among the last 128; so pass the function itself, not a new lambda each time.

        Args:
          batch: any pytree of arrays.
          transform_fn: takes a shard of the batch and returns one of the result.
          mesh: the mesh.
          in_spec: logical names for the batch.
          out_spec: logical names for the result; None for those of the batch, ``P()`` for a
            result that is the same on each device.

        Returns:
          The result, put together from those of the shards.
        """
        in_specs = self.get_partition_spec(in_spec)
        out_specs = in_specs if out_spec is None else self.get_partition_spec(out_spec)
        result = _parallel(transform_fn, mesh, _Specs(in_specs), _Specs(out_specs))(batch)
        self._count(batch)
        return result

    def parallel_transform(
        self,
        batch: Any,
        transform_fn: Callable[[Any], Any],
        mesh: Mesh | AbstractMesh,
        in_spec: Any,
        out_spec: Any = None,
    ) -> Any:
        """Another name of :meth:`apply_parallel_transform`."""
        return self.apply_parallel_transform(batch, transform_fn, mesh, in_spec, out_spec)

    def create_sharded_param(
        self,
        init_fn: Callable[..., Any],
        shape: Sequence[int],
        logical_spec: Any,
        *,
        mesh: Mesh | None = None,
    ) -> nnx.Param[Any]:
        """Makes a parameter where it stays, never whole on one device.

        Args:
          init_fn: takes a key of the stream ``params`` and the shape.
          shape: the shape.
          logical_spec: the logical names of its dimensions.
          mesh: the mesh; None for that in context. Without one it is made unsharded.

        Returns:
          A parameter with the logical names as ``out_sharding`` in its metadata, and the rules
          as ``sharding_rules``, as ``nnx.get_partition_spec`` reads them.

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
        make = init_fn
        metadata: dict[str, Any] = {"out_sharding": tuple(logical_spec)}
        if mesh is not None:
            abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
            rules = Rules("create_sharded_param", mesh)
            [sharding] = assigned(abstract, flatten(abstract), spec, rules)
            if isinstance(sharding.mesh, Mesh):
                make = jax.jit(init_fn, static_argnums=1, out_shardings=sharding)
            metadata["mesh"] = mesh
        if self.config.sharding_rules and not isinstance(logical_spec, PartitionSpec):
            metadata["sharding_rules"] = self.config.sharding_rules
        value = make(self.rngs.params(), shape)
        if mesh is not None:
            # In a trace, out_shardings may have no effect, or leave a sharding without a spec.
            [value] = apply_shardings([value], [sharding])
        param = nnx.Param(value)
        # As an argument of Param it would be laid out once more.
        param.set_metadata(metadata)
        return param

    def get_partition_spec(self, logical_spec: Any) -> Any:
        """The partition spec of logical names: by the first rule for each whose axes are free.

        Raises:
          ValueError: a name has no rule; the names that have one are in the message.

        Example:
          >>> from jax.sharding import PartitionSpec as P
          >>> from nnx_sharding.compat.datarax import ArraySharder, SharderModuleConfig
          >>> rules = {"batch": ("replica", "data"), "embed": None}
          >>> sharder = ArraySharder(SharderModuleConfig(sharding_rules=rules))
          >>> sharder.get_partition_spec(("batch", "embed")) == P(("replica", "data"), None)
          True
        """
        rules = self.config.rules

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
        """The sharding on a mesh of logical names, as :meth:`get_partition_spec` reads them."""
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            self.get_partition_spec(logical_spec),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def get_operation_stats(self) -> dict[str, Any]:
        """How many batches were laid out, and how many had no array.

        Waits for the devices that count. Where JAX traces, the counts are traced.

        Returns:
          ``{"applied_count": …, "skipped_count": …}``, two integers.
        """
        counts = {"applied_count": self.applied[...], "skipped_count": self.skipped[...]}
        traced = any(isinstance(count, jax.core.Tracer) for count in counts.values())
        return counts if traced else {name: int(count) for name, count in counts.items()}

    def reset_operation_stats(self) -> None:
        """Sets both counts to 0."""
        self.applied[...] *= 0  # where they are, so that no function is traced anew
        self.skipped[...] *= 0

    def _count(self, batch: Any) -> None:
        counter = self.applied if any(map(is_array, flatten(batch).leaves)) else self.skipped
        counter[...] += 1

    def compute_statistics(self, data: Any) -> dict[str, Any] | None:
        """Makes statistics of a batch by ``config.batch_stats_fn``, and keeps them.

        Returns:
          The statistics; None if there is no such function.

        Raises:
          TypeError: it returned no mapping.
        """
        function = self.batch_stats_module or self.config.batch_stats_fn
        if function is None:
            return None
        self.set_statistics(function(data))
        return self.get_statistics()

    def get_statistics(self) -> dict[str, Any] | None:
        """The statistics that were computed, set or known from the start; None if none are."""
        return _statistics(self.statistics.get_value())

    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        """Replaces the statistics.

        Raises:
          TypeError: it is no mapping.
        """
        if stats is None:
            raise TypeError("statistics are a mapping; reset_statistics() forgets them.")
        self.statistics.set_value(_statistics(stats))

    def reset_statistics(self) -> None:
        """Forgets the statistics, also those that were known from the start."""
        self.statistics.set_value(None)

    def copy(
        self,
        *,
        config: SharderModuleConfig | None = None,
        rngs: nnx.Rngs | None = None,
        name: str | None = None,
    ) -> ArraySharder:
        """A new sharder with what is given, and otherwise the settings of this one.

        It shares the random streams, and counts from 0. Its statistics are those of its config.
        """
        return type(self)(
            self.config if config is None else config,
            rngs=self.rngs if rngs is None else rngs,
            name=self.name if name is None else name,
        )

    def clone(self) -> ArraySharder:
        """The same sharder once more, with its counts, statistics and streams, sharing nothing."""
        return nnx.clone(self)

    def get_state(self) -> dict[str, Any]:
        """All that changes, and the rules, as nested dicts for a checkpoint.

        Later changes of the sharder do not reach it.
        """
        state: dict[str, Any] = _own(nnx.to_pure_dict(nnx.state(self)))
        if self.config.sharding_rules:
            state[_RULES] = self.config.sharding_rules
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes up what :meth:`get_state` gave.

        Neither ``state`` nor a config that other sharders have is changed, now or later: arrays
        of NumPy are copied, and other rules make a new config. Statistics may be there that were
        not before.

        Raises:
          TypeError: ``state`` is no mapping.
          ValueError: something is missing, unknown, or of another shape or dtype; all is named,
            and nothing was changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a dict, not a {type(state).__name__}.")
        new = {key: value for key, value in state.items() if key != _RULES}
        variables = dict(nnx.to_flat_state(nnx.state(self)))
        problems = _state_problems(variables, new)
        if problems:
            raise ValueError("this is no state of the sharder:\n" + "\n".join(problems))
        if _RULES in state:
            rules = state[_RULES]
            config = dataclasses.replace(self.config, sharding_rules=rules)
            self.config = config
        nnx.update(self, nnx.from_flat_state({p: _own(_at(new, p)) for p in variables}))

    def requires_rng_streams(self) -> list[str] | None:
        """The random streams without which the sharder cannot do; None for none."""
        return None

    def ensure_rng_streams(self, stream_names: Sequence[str]) -> None:
        """Checks that there is each stream of :meth:`requires_rng_streams`.

        Raises:
          ValueError: some are missing; all are named.
        """
        missing = [s for s in self.requires_rng_streams() or () if s not in stream_names]
        if missing:
            raise ValueError(
                f"these random streams are required and missing: {', '.join(map(repr, missing))}. "
                f"There are {', '.join(map(repr, stream_names)) or 'none'}."
            )


_RULES = "sharding_rules"


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _shard(caller: str, batch: Any, sharding: Any) -> Any:
    flat = flatten(batch)
    shardings = assigned(batch, flat, sharding, Rules(caller, None, trims=True))
    return rebuilt(flat, apply_shardings(flat.leaves, shardings), caller)


def _statistics(stats: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A copy of statistics, its arrays of NumPy included."""
    if stats is not None and not isinstance(stats, Mapping):
        raise TypeError(f"statistics are a mapping of names, not {stats!r}.")
    return None if stats is None else _own(dict(stats))


def _own(tree: Any) -> Any:
    """A pytree in new containers, with copies of its NumPy arrays, which could be changed."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    same_form: bool = jax.tree.structure(one) == jax.tree.structure(other)  # type: ignore[operator]
    return same_form and all(
        a is b or np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def _map_arrays(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with what a function makes of its arrays, and None for all else."""
    return jax.tree.map(lambda x: function(x) if is_array(x) else None, batch)


def _described(batch: Any) -> dict[str, Any]:
    shapes = _map_arrays(lambda x: tuple(x.shape), batch)
    return {"structure": jax.tree.structure(batch), "shapes": shapes}


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x))


class _Specs:
    """Specs that may stand in dicts, as a key."""

    def __init__(self, tree: Any):
        self.tree = tree
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
        self._key = (tuple(leaves), treedef)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Specs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(128)
def _parallel(function: Any, mesh: Any, in_specs: _Specs, out_specs: _Specs) -> Any:
    return shard_map(function, mesh=mesh, in_specs=(in_specs.tree,), out_specs=out_specs.tree)


def _state_problems(variables: Mapping[Any, Any], state: Mapping[str, Any]) -> list[str]:
    """What is missing in a state, unknown, or of another type than the Variables are."""
    problems = []
    for path, variable in variables.items():
        now, new = variable.get_value(), _at(state, path)
        if new is _MISSING:
            problems.append(f"  {path_string(path)} is missing")
        elif isinstance(variable, BatchStatistics):
            if new is not None and not isinstance(new, Mapping):
                problems.append(f"  {path_string(path)} is a {type(new).__name__}, no dict")
        elif hasattr(now, "dtype"):
            was, is_now = _type_of(now), _type_of(new)
            if was != is_now:
                problems.append(f"  {path_string(path)} is {is_now}, not {was}")
    known = {path[: i + 1] for path in variables for i in range(len(path))}
    return problems + [f"  {path_string(p)} is unknown" for p in _unknown(state, (), known)]


_MISSING = object()


def _at(state: Any, path: Sequence[Any]) -> Any:
    for key in path:
        if not isinstance(state, Mapping) or key not in state:
            return _MISSING
        state = state[key]
    return state


def _unknown(state: Any, path: tuple[Any, ...], known: set[Any]) -> list[tuple[Any, ...]]:
    """The paths of a state that lead nowhere, each as short as can be."""
    if path and path not in known:
        return [path]
    is_inner = any(len(other) > len(path) and other[: len(path)] == path for other in known)
    if not isinstance(state, Mapping) or not is_inner:
        return []
    return [p for key, value in state.items() for p in _unknown(value, (*path, key), known)]


def _type_of(x: Any) -> str:
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    return type(x).__name__ if dtype is None else f"{dtype}{list(shape or ())}"
