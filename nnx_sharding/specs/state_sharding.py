"""``StateSharding``: one sharding for each part of a model, chosen by NNX filters.

A ``StateSharding`` is an ordered list of *filters*, each with a sharding. The first filter that
matches a Variable decides. A filter of NNX is a type of Variables, a tag, a pattern for paths, or a
function.

From ``filters.py`` and ``errors.py``:

    Paths          a filter that lists paths, as strategies make it
    filter_pairs   pairs of filter and sharding, from a mapping or from pairs
    is_opaque      whether a predicate is, or holds, a user's function, which may read shapes
    subject_text   a Variable or array as text: ``Param of shape (2,)``
    shortened      the first ten texts, and how many more there are
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from .. import _compat
from ..errors import raise_if_any, shortened
from .filters import (
    PathPattern,
    Paths,
    Predicate,
    filter_pairs,
    is_opaque,
    subject_text,
    to_predicate,
)
from .fitting import ON_INDIVISIBLE, OnIndivisible, show, suggested_spec
from .paths import Path, path_string
from .types import Axis

if TYPE_CHECKING:  # activation_sharding.py imports this module
    from .activation_sharding import ActivationSharding


class FilterMatch(NamedTuple):
    """The first filter of a ``StateSharding`` that matches a Variable or an array."""

    path: Path  # the path that the filter matches: see `candidates`
    number: int | None  # the number of the filter; None if no filter matches
    sharding: Any  # the user's sharding, which may be None; None if no filter matches


@dataclasses.dataclass(frozen=True, init=False, repr=False, eq=False)
class StateSharding:
    """Shardings of the Variables of an argument, by ordered NNX filters.

    A ``StateSharding`` can be used instead of a sharding or a partition spec. The first filter that
    matches a Variable decides; paths start at the argument (``("up", "kernel")``), as everywhere in
    NNX. In a tuple, list or dict of modules, paths start at the module. If no filter matches such a
    path, filters are tried with the path from the tuple, list or dict (``(0, "up", "kernel")``).

    Args:
      filter_sharding: a mapping from NNX filters to shardings, an iterable of such pairs, or an
        ``nnx.State`` or nested dicts with a sharding at each path. A sharding is a
        ``PartitionSpec``, any ``jax.sharding.Sharding``, a ``jax.experimental.layout.Format``, or
        None, which declares nothing: the array stays as it is, or the compiler chooses. ``P()``
        replicates it; in a ``shard_map``, None does, too.
      on_indivisible: what to do if a sharding does not divide the shape of its Variable:
        ``"error"``; ``"replicate"`` the array; or ``"drop"`` the mesh axes that do not divide.
        Replicating and dropping warn (:class:`~nnx_sharding.errors.CorrectedSpecWarning`). None
        stands for the option of the transform.
      activations: how the activations of the modules in the argument are sharded.

    Attributes:
      filters: the filters in the order in which they are tried. A string is a tag, as everywhere
        in Flax; for paths, use :class:`~nnx_sharding.filters.PathRegex`.
      shardings: the sharding of each filter.

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

    Names and matching rules are those of ``flax.nnx.StateSharding``.
    """

    # Private attributes:
    #   _tests          the predicate of each filter, and for a pattern the search of its regular
    #                   expression, which gets the path as text; None for any other filter
    #   _has_patterns   whether any filter is a pattern
    #   _key            what ``==`` and the hash use; a subclass adds to it

    filters: tuple[Any, ...]
    shardings: tuple[Any, ...]
    on_indivisible: OnIndivisible | None
    activations: ActivationSharding | None
    _tests: list[tuple[Predicate, Callable[[str], Any] | None]]
    _has_patterns: bool

    @_compat.api_boundary
    def __init__(
        self,
        filter_sharding: nnx.State[Any, Any] | Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        /,
        *,
        on_indivisible: OnIndivisible | None = None,
        activations: ActivationSharding | None = None,
    ):
        """Reads the filters and shardings; raises a TypeError that lists all invalid ones."""
        if on_indivisible is not None and on_indivisible not in ON_INDIVISIBLE:
            raise ValueError(
                f"on_indivisible must be one of {ON_INDIVISIBLE} or None, got {on_indivisible!r}."
            )
        pairs = pairs_of("StateSharding", filter_sharding)
        wrong = [
            f"  {_show(filter_)}: {show(sharding)}{suggested_spec(sharding)}"
            for filter_, sharding in pairs
            if not is_single_spec(sharding)
        ]
        head = "StateSharding: expected shardings, got:"
        remedy = (
            "Use a PartitionSpec such as P('data', None), a Sharding, or None. P() replicates; "
            "None declares nothing."
        )
        raise_if_any(TypeError, head, wrong, remedy, "not-a-spec")
        predicates = [to_predicate(filter_) for filter_, _ in pairs]
        # `find` calls predicates. For a pattern, it calls `search` with the path as text instead,
        # because there may be many patterns, and the text is made only once.
        searches = [p.search if isinstance(p, PathPattern) else None for p in predicates]
        # Attributes are set through `vars`, because a frozen class refuses to set them.
        vars(self).update(
            filters=tuple(filter_ for filter_, _ in pairs),
            shardings=tuple(sharding for _, sharding in pairs),
            on_indivisible=on_indivisible,
            activations=activations,
            _tests=list(zip(predicates, searches, strict=True)),
            _has_patterns=any(search is not None for search in searches),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The filters as text."""
        return tuple(map(_show, self.filters))

    @property
    def depends_on_values(self) -> bool:
        """Whether shapes or dtypes matter to a user's predicate or to corrections."""
        action = self.on_indivisible
        return action not in (None, "error") or any(is_opaque(test) for test, _ in self._tests)

    def map_prefix(self, path: tuple[Any, ...], variable: object) -> Any:
        """Returns the sharding of one Variable.

        Args:
          path: the keys from the argument to the Variable.
          variable: the Variable, or the array where the argument holds a bare one.

        Raises:
          ValueError: no filter matches.
        """
        index, sharding = self.find(path, variable)
        if index is not None:
            return sharding
        raise ValueError(
            f"no filter of the {type(self).__name__} matches {path_string(path) or 'the root'}: "
            f"{subject_text(variable)}. {filter_remedy(self, [variable])} The filters are "
            f"{filters_text(self)}."
        )

    def find(self, path: tuple[Any, ...], variable: object) -> tuple[int | None, Any]:
        """Returns the index of the first filter that matches, and its sharding.

        Returns two Nones if no filter matches. The index is needed to tell this from a filter whose
        sharding is None, and to find filters that match nothing.

        Args:
          path: the keys from the argument to the Variable.
          variable: the Variable, or the array where the argument holds a bare one.
        """
        # Only patterns read the text of the path, such as "up/kernel" for ("up", "kernel").
        # Strategies make no patterns, so the text is left out for them.
        path_text = path_string(path) if self._has_patterns else ""
        for index, (predicate, search) in enumerate(self._tests):
            # A pattern has the `search` of its regular expression; other filters have None.
            matches = predicate(path, variable) if search is None else search(path_text)
            if matches:
                return index, self.shardings[index]
        return None, None

    def find_below(self, start: Path, path: Path, variable: object) -> FilterMatch:
        """Finds the first filter that matches one of the paths of a Variable.

        Filters see the path in the module first: ``("up",)``. Only if no filter matches this path,
        they see the path in the tuple, list or dict that holds the module: ``(0, "up")``. If no
        filter matches either path, the number and the sharding of the result are None.

        Args:
          start: the path of the module in a tuple, list or dict; empty without one.
          path: the path of the Variable in the module.
          variable: the Variable, or the array where the argument holds a bare one.
        """
        *earlier_paths, last_path = candidates(start, path)
        for candidate in earlier_paths:
            index, sharding = self.find(candidate, variable)
            if index is not None:
                return FilterMatch(path=candidate, number=index, sharding=sharding)
        index, sharding = self.find(last_path, variable)
        return FilterMatch(path=last_path, number=index, sharding=sharding)

    def __repr__(self) -> str:
        pairs = zip(self.names, self.shardings, strict=True)
        items = ", ".join(f"{name}: {sharding!r}" for name, sharding in pairs)
        action = self.on_indivisible
        option = "" if action is None else f", on_indivisible={action!r}"
        return f"{type(self).__name__}({{{items}}}{option})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateSharding) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.filters, self.shardings, self.on_indivisible, self.activations

    def with_activations(self, activations: ActivationSharding | None) -> StateSharding:
        """Returns a copy with other shardings of activations."""
        pairs = zip(self.filters, self.shardings, strict=True)
        return StateSharding(pairs, on_indivisible=self.on_indivisible, activations=activations)


def filters_text(rules: StateSharding) -> str:
    """Returns the first filters, for messages; fewer if a strategy made them, which lists paths."""
    names = [*rules.names]
    if any(isinstance(filter_, Paths) for filter_ in rules.filters) and len(names) > 4:
        return f"{', '.join(names[:3])}, … {len(names) - 3} more"
    return ", ".join(shortened(names)) or "none"


def filter_remedy(
    rules: StateSharding, subjects: Iterable[object], added: Sequence[Path] = ()
) -> str:
    """Returns the end of an error about Variables or arrays that no filter matches: what to do.

    Args:
      rules: the filters.
      subjects: the Variables or arrays.
      added: the paths of Variables or arrays that a jitted function has added to its arguments.
    """
    if not any(isinstance(filter_, Paths) for filter_ in rules.filters):
        # The user wrote the filters, and may have forgotten a last one for all other Variables.
        is_of_axes = any(isinstance(sharding, Axis) for sharding in rules.shardings)
        default = "None" if is_of_axes else "PartitionSpec()"
        return f"Add one for these, or a last entry `...: {default}`."
    # A strategy made the filters. They list all paths of the model that the strategy was given.
    if added:
        entries = ", ".join(shortened(f"'^{path_string(path)}$': P()" for path in added))
        return (
            "The function adds these, after the sharding was chosen: create them with the model, "
            f"or pass nnx_sharding.partition.override(sharding, {{{entries}}}) with the spec of "
            "each; P() replicates."
        )
    remedy = "call the strategy again for this model"
    types = list(dict.fromkeys(map(type, subjects)))
    if types and all(issubclass(subject_type, nnx.OptState) for subject_type in types):
        return (
            "They are state of an optimizer: pass it to the strategy, as in fsdp(model, mesh=mesh, "
            "optimizer=optimizer)."
        )
    # An override by type is for all Variables of the type. `Param: P()` would also replace the
    # shardings that the strategy chose for the other parameters.
    if all(issubclass(x, nnx.Variable) and not issubclass(x, nnx.Param) for x in types):
        entries = ", ".join(f"{subject_type.__name__}: P()" for subject_type in types)
        remedy += f", or add nnx_sharding.partition.override(sharding, {{{entries}}})"
    return (
        "The sharding lists the paths of another model, or of an earlier structure of this one: "
        f"{remedy}."
    )


def candidates(start: Path, path: Path) -> Sequence[Path]:
    """Returns the paths by which filters find a Variable: from its module, then from the pytree.

    For ``(0,)`` and ``("up",)`` these are ``("up",)`` and ``(0, "up")``. Filters see the first path
    if the module is an argument by itself, so the same filters work for both. By the second path,
    filters can tell several modules apart.

    Args:
      start: the path in a tuple, list or dict, to a module, or to a bare Variable or array.
      path: the path in the module; empty for a bare Variable or array.
    """
    if start and path:
        return path, (*start, *path)
    return (path or start,)  # one of the two is empty, so there is only one path


def _show(filter_: object) -> str:
    """Returns a filter as text, as the user wrote it; a type is shown by its name."""
    if filter_ is ...:
        return "..."
    if type(filter_) is nnx.filterlib.PathIn and len(filter_.paths) > 3:
        return repr(Paths(filter_.paths))  # shows only the first three paths
    return filter_.__name__ if isinstance(filter_, type) else repr(filter_)


def is_single_spec(x: object) -> bool:
    """Whether ``x`` is the sharding of one array; None leaves the choice to JAX."""
    return x is None or isinstance(x, PartitionSpec | Sharding | Format | Axis)


def pairs_of(name: str, given: Any) -> list[tuple[Any, Any]]:
    """Returns the argument of a ``StateSharding`` as pairs of a filter and a sharding.

    Args:
      name: the class, for messages.
      given: a mapping, pairs, or an ``nnx.State`` (or nested dicts) with a sharding at each path.
        All paths with equal shardings in a State or nested dict become one filter.
    """
    if isinstance(given, Mapping) and not isinstance(given, nnx.State):
        # No sharding is a mapping. So a dict of strings with a dict among its values is a nested
        # dict of paths. Any other dict of strings is a mapping from filters: a string is a tag.
        is_nested = any(isinstance(value, Mapping) for value in given.values())
        if is_nested and all(isinstance(key, str | int) for key in given):
            given = nnx.State(given)
    if not isinstance(given, nnx.State):
        return filter_pairs(name, given)
    paths_by_sharding: dict[Any, list[Path]] = {}
    # Pairs whose sharding has no hash, such as a list. The caller refuses these.
    wrong: list[tuple[Any, Any]] = []
    for path, leaf in nnx.to_flat_state(given):
        sharding = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
        if isinstance(sharding, Hashable):
            paths_by_sharding.setdefault(sharding, []).append(path)
        else:
            wrong.append((nnx.filterlib.PathIn(path), sharding))
    pairs = [
        (nnx.filterlib.PathIn(*paths), sharding) for sharding, paths in paths_by_sharding.items()
    ]
    return pairs + wrong
