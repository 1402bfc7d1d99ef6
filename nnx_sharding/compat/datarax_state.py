"""The configuration and the state of an ``ArraySharder``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from ..core.flatten import flatten
from ..errors import raise_listed
from ..partition.constrain import is_array
from ..partition.logical import LogicalRules
from ..paths import Path, path_string


@dataclasses.dataclass(frozen=True, eq=False)
class SharderModuleConfig:
    """The configuration of an :class:`ArraySharder`.

    Configurations with equal contents are the same static value to ``jit``.

    Attributes:
      batch_stats_fn: computes statistics of a batch: a function or module that returns a dict.
      precomputed_stats: instead, statistics that are known from the start.
      sharding_rules: pairs, or a mapping, as for :class:`~nnx_sharding.partition.LogicalRules`;
        kept as a tuple of pairs. Without rules, logical names are those of mesh axes.
      cacheable: accepted for configurations of Datarax; a sharder caches nothing.

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
            raise TypeError(f"batch_stats_fn must be a function, got {self.batch_stats_fn!r}.")
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


class SharderModule(nnx.Module):
    """What an :class:`ArraySharder` keeps: its configuration, counts, statistics and streams.

    The names are those of ``datarax.core.sharder.SharderModule``.
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
            raise TypeError(f"config must be a SharderModuleConfig, got {config!r}.")
        self.config = config
        self.rngs = rngs
        self.name = name
        # A module may change its own state, which it could not as a part of the static config.
        is_module = isinstance(config.batch_stats_fn, nnx.Module)
        self.batch_stats_module = config.batch_stats_fn if is_module else None
        self.applied = OperationCount(jnp.zeros((), jnp.int32))
        self.skipped = OperationCount(jnp.zeros((), jnp.int32))
        self.statistics = BatchStatistics(_statistics(config.precomputed_stats))

    def get_operation_stats(self) -> dict[str, Any]:
        """Returns the number of batches that were sharded, and of those that had no array.

        Waits for the devices that hold the counts. In a traced function the counts are traced.
        """
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
        """Computes, keeps and returns statistics of a batch; None without ``batch_stats_fn``.

        Raises:
          TypeError: the function returned something other than a mapping.
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
        """Replaces the statistics; a TypeError if ``stats`` is not a mapping."""
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
        """Returns a new sharder with these settings; the others are copied from this one.

        It shares the random streams, and counts from 0. Its statistics are those of its config.
        """
        return type(self)(
            self.config if config is None else config,
            rngs=self.rngs if rngs is None else rngs,
            name=self.name if name is None else name,
        )

    def clone(self) -> Self:
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

        Neither ``state`` nor a config that other sharders share is changed, now or later. The state
        may have statistics even if the sharder had none.

        Raises:
          TypeError: ``state`` is not a mapping.
          ValueError: something is missing, unknown, or of another shape or dtype; all of it is
            listed, and nothing is changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state must be a dict, got a {type(state).__name__}.")
        variables = dict(nnx.to_flat_state(nnx.state(self)))
        others = {key: value for key, value in state.items() if key != _RULES}
        values = traverse_util.flatten_dict(others, is_leaf=lambda path, _: path in variables)
        _check_state(variables, values)
        if _RULES in state:
            self.config = dataclasses.replace(self.config, sharding_rules=state[_RULES])
        nnx.update(self, nnx.from_flat_state({p: _copied(values[p]) for p in variables}))

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


def _check_state(variables: Mapping[Path, Any], values: Mapping[Path, Any]) -> None:
    """Raises a ValueError if values do not fit the Variables of a sharder."""
    problems = []
    for path in variables.keys() | values.keys():
        if path not in values:
            problem: str | None = "missing"
        elif path not in variables:
            problem = "unknown"
        else:
            problem = _misfit(variables[path], values[path])
        problems += [f"  {path_string(path)} is {problem}"] if problem else []
    raise_listed(ValueError, "this is not a state of the sharder:", sorted(problems))


def _misfit(variable: Any, new: Any) -> str | None:
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
