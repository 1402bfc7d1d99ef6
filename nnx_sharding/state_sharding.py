"""``StateSharding``: one sharding for each part of a model, chosen by NNX filters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from . import _compat
from .filters import PathPattern, is_opaque, path_name, to_predicate
from .fitting import ON_INDIVISIBLE, OnIndivisible, suggested_spec


@dataclasses.dataclass(init=False, repr=False, frozen=True, slots=True, weakref_slot=True)
class StateSharding:
    """Shardings of the Variables of an argument, by ordered NNX filters.

    It can be used in place of a sharding or a partition spec: in ``in_shardings`` and
    ``out_shardings`` of :func:`~nnx_sharding.jit`, in ``in_specs`` and ``out_specs`` of
    :func:`~nnx_sharding.shard_map`. The first filter that matches a Variable decides; paths
    start at the argument (``("up", "kernel")``), as everywhere in NNX.

    Args:
      filter_sharding: a mapping from filters to shardings, an iterable of such pairs, or an
        ``nnx.State`` or nested dicts with a sharding at each path. A filter is any NNX filter: a
        Variable type, a tag, a predicate ``(path, variable) -> bool``, ``...``, a tuple of
        filters. A sharding is a ``jax.sharding.PartitionSpec``, any ``jax.sharding.Sharding``,
        a ``jax.experimental.layout.Format``, or None to leave the choice to JAX.
      on_indivisible: what to do where a sharding does not divide the shape of its Variable:
        ``"error"``; ``"replicate"`` the array; or ``"drop"`` the mesh axes that do not divide.
        The latter two list their corrections in a warning
        (:class:`~nnx_sharding.errors.CorrectedSpecWarning`). None for that of the transform.

    Attributes:
      filters: the filters in the order in which they are tried.
      shardings: the sharding of each filter.
      on_indivisible: the action where a sharding does not divide a shape.

    Raises:
      TypeError: a filter or a sharding has a wrong type.
      ValueError: ``on_indivisible`` has another value.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> sharding = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
      >>> model = nnx.Dict(up=nnx.Param(0.0), down=nnx.Param(0.0))
      >>> sharding.map_prefix(("up",), model.up) == P(None, "model")
      True
      >>> sharding.map_prefix(("down",), model.down) == P()
      True

    The names and the rule are those of ``flax.nnx.StateSharding``.
    """

    filters: tuple[Any, ...]
    shardings: tuple[Any, ...]
    on_indivisible: OnIndivisible | None
    # The search of a pattern is called directly: there may be many patterns.
    _tests: tuple[tuple[Any, Any], ...] = dataclasses.field(compare=False)

    @_compat.api_boundary
    def __init__(
        self,
        filter_sharding: nnx.State[Any, Any] | Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        /,
        *,
        on_indivisible: OnIndivisible | None = None,
    ):
        if on_indivisible is not None and on_indivisible not in ON_INDIVISIBLE:
            raise ValueError(
                f"on_indivisible is one of {ON_INDIVISIBLE} or None, not {on_indivisible!r}."
            )
        pairs = _pairs(filter_sharding)
        wrong = [
            f"  {_show(filter_)}: {sharding!r}{suggested_spec(sharding)}"
            for filter_, sharding in pairs
            if not is_single_spec(sharding)
        ]
        if wrong:
            raise TypeError(
                "StateSharding: expected shardings, got:\n"
                + "\n".join(wrong)
                + "\nUse a PartitionSpec such as P('data', None), a Sharding, or None."
            )
        predicates = [to_predicate(filter_) for filter_, _ in pairs]
        tests = ((p, p.search if isinstance(p, PathPattern) else None) for p in predicates)
        for name, value in {
            "filters": tuple(filter_ for filter_, _ in pairs),
            "shardings": tuple(sharding for _, sharding in pairs),
            "on_indivisible": on_indivisible,
            "_tests": tuple(tests),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def names(self) -> tuple[str, ...]:
        """The filters as text."""
        return tuple(map(_show, self.filters))

    @property
    def depends_on_values(self) -> bool:
        """Whether shapes or dtypes decide too: in predicates of the user, or for corrections."""
        action = self.on_indivisible
        return action not in (None, "error") or any(is_opaque(test) for test, _ in self._tests)

    def map_prefix(self, path: tuple[Any, ...], variable: Any) -> Any:
        """The sharding of one Variable.

        Args:
          path: the keys from the argument to the Variable.
          variable: the Variable, or the array where the argument holds a bare one.

        Raises:
          ValueError: no filter matches.
        """
        index, sharding = self.find(path, variable)
        if index is not None:
            return sharding
        shape = getattr(variable, "shape", None)
        raise ValueError(
            f"no filter of {self!r} matches {'/'.join(map(str, path)) or 'the root'} "
            f"({type(variable).__name__}{'' if shape is None else f' of shape {shape}'}). "
            "Add a filter for it, or a last entry `...: PartitionSpec()`."
        )

    def find(self, path: tuple[Any, ...], variable: Any) -> tuple[int | None, Any]:
        """The number of the first filter that matches and its sharding; None if none does."""
        name = path_name(path)
        for index, (predicate, search) in enumerate(self._tests):
            if predicate(path, variable) if search is None else search(name):
                return index, self.shardings[index]
        return None, None

    def __repr__(self) -> str:
        pairs = zip(self.names, self.shardings, strict=True)
        inside = ", ".join(f"{name}: {sharding!r}" for name, sharding in pairs)
        action = self.on_indivisible
        option = "" if action is None else f", on_indivisible={action!r}"
        return f"StateSharding({{{inside}}}{option})"

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = tuple(zip(self.filters, self.shardings, strict=True))
        return functools.partial(StateSharding, on_indivisible=self.on_indivisible), (pairs,)


def _show(filter_: Any) -> str:
    """A filter as the user wrote it, types by their name."""
    if filter_ is ...:
        return "..."
    return filter_.__name__ if isinstance(filter_, type) else repr(filter_)


def is_single_spec(x: Any) -> bool:
    """Whether ``x`` is the sharding of one array; None leaves the choice to JAX."""
    return x is None or isinstance(x, PartitionSpec | Sharding | Format)


def _pairs(filter_sharding: Any) -> list[tuple[Any, Any]]:
    """Pairs of filters and shardings, for a state one of all paths with the same sharding."""
    is_state = isinstance(filter_sharding, nnx.State)
    is_mapping = isinstance(filter_sharding, Mapping) and not is_state
    if is_mapping:  # nested dicts are like a State
        is_nested = any(isinstance(value, Mapping) for value in filter_sharding.values())
        is_state = is_nested and all(isinstance(key, str | int) for key in filter_sharding)
    if is_state:
        paths: dict[Any, list[Any]] = {}
        state = nnx.State(filter_sharding) if is_mapping else filter_sharding
        for path, leaf in nnx.to_flat_state(state):
            sharding = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
            paths.setdefault(sharding, []).append(path)
        return [(nnx.filterlib.PathIn(*group), sharding) for sharding, group in paths.items()]
    try:
        items = filter_sharding.items() if is_mapping else filter_sharding
        return [(filter_, sharding) for filter_, sharding in items]
    except (TypeError, ValueError):
        raise TypeError(
            f"StateSharding takes a mapping from filters to shardings, or pairs of both, not "
            f"{filter_sharding!r}."
        ) from None
