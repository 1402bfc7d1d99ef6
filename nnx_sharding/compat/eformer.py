"""The names of ``eformer.escale.partition.constraints`` (0.0.101), on top of this library.

Programs that import these change one line. Each function is a thin layer over one of this library,
whose errors it raises; what differs is that specs that do not fit are corrected, with a warning.
``mesh=None`` is the mesh in context, of ``jax.set_mesh`` or the older ``with mesh:``. A *rule* is a
regular expression for paths such as ``blocks/3/up/kernel``, and a spec (a ``PartitionSpec``).

Results differ from eformer's in these places:

* `with_sharding_constraint` replicates with ``P()``, and places NumPy arrays; eformer changes
  neither. Axes that do not fit are left out, with a warning.
* `get_corrected_named_sharding` has one entry for each dimension where eformer gives ``P()``.
* `match_partition_rules` gives None for leaves without a shape, such as strings, and ``P()`` for
  small arrays and shapes such as ``(1, 1)``.
* `get_partition_spec` gives ``P()`` for NumPy arrays and arrays on one device; eformer raises.
* The functions of `make_shard_and_gather_fns` place NumPy arrays.
"""

# Helpers of this library that most functions use:
#
# * `fit_sharding` returns the part of a spec that fits a mesh and a shape (``sharding``), with what
#   was dropped (``corrections``) and what cannot be (``problems``).
# * `assign_shardings` does so for a tree and a prefix of specs: it returns the name and the
#   sharding of each array, None for one that stays. `apply_shardings` moves the arrays, in a trace
#   constrains them, and `rebuild` puts them into the tree.
# * `variables` lists the Variables and bare arrays of a module as `NamedVariable`, each with the
#   ``path``, the ``name`` for messages, the ``variable`` and the ``arrays`` in it.
# * `read_patterns` returns rules as pairs of a filter and a spec. A filter is a function of a path,
#   as a tuple, and a Variable; it returns whether the rule matches.
# * `flatten` lists the arrays of a tree as ``leaves``. `is_shardable` says whether a leaf is an
#   array that can be sharded, and `sharding_of` returns its sharding or None.
# * `mesh_in_trace` returns a mesh with the axis types that it has in the current trace, such as
#   Manual in a ``shard_map``. `replace_spec` replaces the spec of a sharding, and `spec_axes`
#   yields the mesh axes that a spec names.
# * `check_specs` raises a TypeError for leaves that are no specs. `with_entries` returns a spec
#   with other entries, and the same unreduced and reduced axes.
# * `parameter_table` lists arrays with their specs and sizes, a row for each, and `device_bytes`
#   sums the bytes of rows by the id of the device.
# * `raise_if_any` raises an error with a line for each item, and does nothing without items.

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..analysis.parameters import ParameterRow, device_bytes, parameter_table
from ..core.constrain import (
    apply_shardings,
    given_mesh,
    is_shardable,
    mesh_in_trace,
    sharding_of,
)
from ..core.flatten import Flat, flatten
from ..core.prefixes import Specs, check_specs
from ..core.problems import warn_of_corrections
from ..core.rebuild import rebuild
from ..core.tree_shardings import assign_shardings
from ..errors import NoMeshError, UnusedFilterWarning, by_kind, message, raise_if_any, warn_or_raise
from ..partition.rules import from_rules, read_patterns
from ..partition.variables import NamedVariable, variables
from ..specs.fitting import (
    Fit,
    Mismatch,
    axes_of,
    describe,
    fit_sharding,
    keep_axes,
    pad_entries,
    replace_spec,
    spec_and_mesh,
    spec_axes,
    suggestion,
    too_long,
    with_entries,
)
from ..specs.paths import path_key, plain_key
from ..specs.state_sharding import StateSharding, is_single_spec
from ..specs.types import AnyMesh, Spec

__all__ = [
    "analyze_sharding_strategy",
    "create_pattern_based_partition_spec",
    "extract_sharding_structure",
    "extract_shardings",
    "get_axes_size_in_mesh",
    "get_corrected_named_sharding",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "get_shardings_with_structure",
    "get_submesh_device_index",
    "make_shard_and_gather_fns",
    "match_partition_rules",
    "names_in_current_mesh",
    "with_sharding_constraint",
]

AxisNames: TypeAlias = str | tuple[str, ...] | list[str]


class NoContextMeshError(NoMeshError, AssertionError):
    """No mesh is in context; also an ``AssertionError``, as in eformer."""


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh:
    """Returns the mesh in context, from ``jax.set_mesh`` or the older ``with mesh:``.

    Without one it raises a NoContextMeshError, or returns an empty mesh if not ``raise_error``.
    """
    mesh = _compat.context_mesh()
    if mesh is None and raise_error:
        text = "no mesh in context. Use `with jax.set_mesh(mesh):`, or pass mesh=..."
        raise NoContextMeshError(text)
    # An empty mesh is returned as by eformer, because its callers ask `mesh.empty`.
    return Mesh(np.empty((), dtype=object), ()) if mesh is None else mesh


def names_in_current_mesh(*names: str) -> bool:
    """Whether the mesh in context has all of these axes; without a mesh it has none."""
    return set(names) <= set(get_incontext_mesh(raise_error=False).axis_names)


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """Returns the names of the axes of a mesh."""
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_axes_size_in_mesh(axis_names: AxisNames, mesh: AnyMesh | None = None) -> int:
    """Returns the product of the sizes of axes of a mesh; a KeyError if it does not have them."""
    shape = (get_incontext_mesh() if mesh is None else mesh).shape
    names = axes_of(axis_names)
    # The error is a KeyError as in eformer, but names all unknown axes.
    unknown = [f"{n!r}{suggestion(n, shape)}" for n in names if n not in shape]
    if unknown:
        axes = ", ".join(map(repr, shape))
        raise KeyError(f"the mesh has no axis {', '.join(unknown)} (its axes are {axes})")
    return math.prod(shape[name] for name in names)


def get_mesh_axis_size(axis_names: AxisNames) -> int:
    """Returns the product of the sizes of axes over which a ``shard_map`` maps the function."""
    return math.prod(int(jax.lax.axis_size(name)) for name in axes_of(axis_names))


def get_submesh_device_index(axis_names: AxisNames) -> jax.Array | int:
    """Returns the index of this shard along axes of a ``shard_map``, the first one major."""
    return jax.lax.axis_index(axes_of(axis_names)) if axis_names else 0


def get_corrected_named_sharding(
    shape: Sequence[int],
    partition_spec: PartitionSpec,
    raise_mesh_error: bool = True,
    mesh: AnyMesh | None = None,
) -> NamedSharding:
    """Returns the sharding that :func:`with_sharding_constraint` gives an array of this shape.

    Args:
      shape: the shape of the array.
      partition_spec: its spec; axes that the mesh does not have, or that do not divide their
        dimension, are dropped with a warning.
      raise_mesh_error: whether a missing mesh is an error; otherwise the sharding is on an empty
        mesh.
      mesh: the mesh; None for the one in context.
    """
    name = "get_corrected_named_sharding"
    check_specs(name, PartitionSpec, partition_spec=Specs(partition_spec))
    # In a `shard_map`, the mapped axes are Manual and can no longer be used, so `fit_sharding`
    # drops them.
    mesh = mesh_in_trace(get_incontext_mesh(raise_mesh_error) if mesh is None else mesh)
    if mesh.empty:
        return NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    fit = _fit_leniently(partition_spec, mesh, shape, on_indivisible="drop")
    if fit.problems:  # for example, an axis is named twice
        raise_if_any(ValueError, f"{name}:", [fit.line("array")])
    if fit.corrections:
        head = f"{name}: this spec does not fit"
        warn_of_corrections(head, [fit.line("array")], strict=False)
    return NamedSharding(mesh, fit.sharding)  # `fit.sharding` of a spec is a spec


def _fit_leniently(
    sharding: Spec, mesh: AnyMesh | None, shape: Sequence[int], **options: Any
) -> Fit:
    """Fits a sharding by `fit_sharding`, after corrections that only eformer makes.

    Entries beyond the rank are dropped, and axes that may not be named: those that the mesh does
    not have, or over which an enclosing ``shard_map`` maps. Both are among the ``corrections``.

    ``options`` are those of `fit_sharding`.
    """
    pair = spec_and_mesh(sharding, mesh)
    if pair is None:  # a sharding without a spec
        return fit_sharding(sharding, mesh, shape, **options)
    declared, mesh = pair
    corrections: list[Mismatch] = []
    # Entries beyond the rank are dropped first, so that their axes do not matter. An entry that
    # names no axis is dropped without a correction.
    if any(map(axes_of, declared.partitions[len(shape) :])):
        corrections.append(too_long(declared, shape))
    spec = with_entries(declared, pad_entries(declared, len(shape)))
    # Without a shape, only the axes are checked. With refused axes, all other problems about them
    # are dropped, such as repetitions.
    refused = [problem for problem in fit_sharding(spec, mesh).problems if problem.is_about_mesh]
    if refused:
        dropped = {axis for problem in refused for axis in problem.axes}
        spec = keep_axes(spec, set(mesh.axis_names) - dropped)
    fit = fit_sharding(replace_spec(sharding, spec), mesh, shape, **options)
    all_corrections = (*corrections, *refused, *fit.corrections)
    return fit._replace(declared=sharding, corrections=all_corrections)


def _assign_leniently(
    flat: Flat, sharding: object, mesh: AnyMesh | None, *, strict: bool = False
) -> tuple[list[str], list[Any]]:
    """Returns what `assign_shardings` returns, with corrected specs.

    A ``PartitionSpec`` is ignored if there is no mesh: its array stays as it is.
    """
    mesh = given_mesh("with_sharding_constraint", mesh)

    def ignored_without_mesh(spec: Any, _: object) -> Any:
        is_without_mesh = isinstance(spec, PartitionSpec) and spec_and_mesh(spec, mesh) is None
        return None if is_without_mesh else spec

    return assign_shardings(
        flat,
        sharding,
        mesh=mesh,
        strict=strict,
        on_indivisible="drop",
        adapt=ignored_without_mesh,
        fit_spec=_fit_leniently,
    )


_LOG = logging.getLogger("nnx_sharding")
_YES = ("1", "true", "yes", "on")


@_compat.api_boundary
def with_sharding_constraint(
    tree: object,
    sharding: object,
    *,
    mesh: AnyMesh | None = None,
    strict: bool = False,
    log: bool | None = None,
) -> Any:
    """Corrects specs that do not fit, and then shards arrays.

    Otherwise it is :func:`nnx_sharding.partition.with_sharding_constraint`.

    A spec is padded or truncated to the rank of its array; axes that the mesh does not have, over
    which an enclosing ``shard_map`` is mapped, or that do not divide their dimension are dropped.
    One warning lists all corrections, or with ``strict`` an error. Without a mesh, arrays with a
    ``PartitionSpec`` are not changed. With ``log``, or if it is None and the environment variable
    ``LOG_SHARDING_MOVE`` is set to 1 or true, arrays that get another sharding are logged.
    """
    flat = flatten(tree)
    names, shardings = _assign_leniently(flat, sharding, mesh, strict=strict)
    if log is None:
        log = os.environ.get("LOG_SHARDING_MOVE", "").lower() in _YES
    if log:
        for name, leaf, new in zip(names, flat.leaves, shardings, strict=True):
            old = sharding_of(leaf)
            # In a trace nothing moves yet, and the old sharding is not known.
            if new is not None and new != old and not isinstance(leaf, jax.core.Tracer):
                was = "host memory" if old is None else describe(old)
                # The tree may be a single array, which has no name.
                _LOG.warning("%s: from %s to %s", name or "array", was, describe(new))
    return rebuild(flat, apply_shardings(flat.leaves, shardings))


def match_partition_rules(
    rules: Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]],
    tree: object,
    min_size: int | None = 0,
    strict: bool = True,
    *,
    mesh: AnyMesh | None = None,
) -> Any:
    """Chooses specs by regular expressions that are searched for in paths; the first one wins.

    Paths are written ``blocks/3/up/kernel`` and end at the Variable. All paths without a rule are
    in one error, and all rules that match nothing, or only what earlier ones match, in one warning
    (:class:`~nnx_sharding.errors.UnusedFilterWarning`), except a last rule that matches everything.

    Args:
      rules: pairs, or a mapping, of a regular expression and a spec (None: JAX chooses).
      tree: arrays or modules, also abstract ones.
      min_size: arrays with fewer elements get ``P()``, as scalars do. None for the environment
        variable ``MIN_SHARDING_SIZE``, or 16384.
      strict: whether specs are truncated to the rank; if not, every leaf gets its spec unchanged.
      mesh: the mesh that the specs have to fit; None for no check.

    Returns:
      A prefix of specs, with an ``nnx.State`` for a module, a spec for an array or a Variable.
    """
    name = "match_partition_rules"
    pairs = read_patterns(name, rules)
    if strict:
        StateSharding(pairs)  # made only for its error, if there is anything else than specs
    if min_size is None:  # read at each call, as eformer does
        min_size = int(os.environ.get("MIN_SHARDING_SIZE", 16384))
    # The chooser returns the spec of each Variable, and collects problems for one error below.
    chooser = _SpecChooser(pairs, min_size, strict, mesh)
    result = _map_variables(tree, chooser.choose)
    problems = {
        "no rule matches": chooser.unmatched,
        "these specs do not fit the mesh": chooser.mismatches,
    }
    # `by_kind` leaves out kinds without lines, so no error is raised if there are none.
    raise_if_any(ValueError, f"{name}:", by_kind(problems))
    _warn_of_unused(name, pairs, chooser.matches)
    return result


@dataclasses.dataclass
class _SpecChooser:
    """Chooses the spec of each Variable by rules, and collects problems for one error.

    Attributes:
      pairs: the rules, each a filter and a spec.
      min_size: arrays with fewer elements are replicated, if ``strict``.
      strict: whether specs are truncated to the rank of their arrays, small arrays get ``P()`` and
        empty Variables None, as by eformer. Otherwise each Variable gets the spec of its rule
        unchanged.
      mesh: the mesh that specs have to fit; None for no check.
      matches: for each Variable, the numbers of all rules that match it. The first one decides. The
        others are needed to warn of rules that decide nothing.
      unmatched: lines about Variables without a rule.
      mismatches: lines about specs that do not fit the mesh.
    """

    pairs: Sequence[tuple[Any, Any]]
    min_size: int
    strict: bool
    mesh: AnyMesh | None
    matches: list[list[int]] = dataclasses.field(default_factory=list)
    unmatched: list[str] = dataclasses.field(default_factory=list)
    mismatches: list[str] = dataclasses.field(default_factory=list)

    def choose(self, variable: NamedVariable) -> Any:
        """Returns the spec of a Variable, or of an array outside of Variables; None for no spec.

        A Variable may hold a pytree of several arrays, which all get the same spec. A Variable that
        no rule matches, or whose spec does not fit the mesh, is noted in ``unmatched`` or
        ``mismatches``.
        """
        arrays = [x for x in variable.arrays if hasattr(x, "shape") or isinstance(x, Number)]
        shapes = [np.shape(array) for array in arrays]
        if self.strict and not shapes:  # the Variable holds nothing that could be sharded
            return None
        matching = [
            number
            for number, (is_match, _) in enumerate(self.pairs)
            if is_match(variable.path, variable.variable)
        ]
        # Rules of a small array count as well, because they are not unused.
        self.matches.append(matching)
        # The least is 2, because an array of one element has nothing to shard.
        least = max(self.min_size, 2)
        # A Variable with several arrays has one spec, so a large one among them decides.
        if self.strict and all(math.prod(shape) < least for shape in shapes):
            return PartitionSpec()
        if not matching:
            shape_text = f", shape {shapes[0]}" if shapes else ""
            self.unmatched.append(f"  {variable.name}{shape_text}")
            return None
        _, spec = self.pairs[matching[0]]
        if spec is not None and self.strict:
            rank = min(len(shape) for shape in shapes)
            spec = with_entries(spec, spec.partitions[:rank])
        if self.mesh is not None:
            fits = (fit_sharding(spec, self.mesh, shape) for shape in shapes)
            mismatch = next((fit for fit in fits if fit.problems), None)
            if mismatch is not None:  # one line for each Variable is enough
                self.mismatches.append(mismatch.line(variable.name))
        return spec


def _warn_of_unused(
    name: str, pairs: Sequence[tuple[object, object]], matches: Sequence[Sequence[int]]
) -> None:
    """Warns of rules, each a filter and a spec, that decide for no Variable.

    ``matches`` has for each Variable the numbers of the rules that match it; the first one decides.
    ``name`` is the function that the user called.
    """
    deciding = {numbers[0] for numbers in matches if numbers}
    # A last rule that matches everything is for the remaining Variables. It is not unused if there
    # are none.
    last = len(pairs) - 1
    if all(last in numbers for numbers in matches):
        deciding.add(last)
    unused = [
        f"  {getattr(filter_, 'text', filter_)!r}"
        for number, (filter_, _) in enumerate(pairs)
        if number not in deciding
    ]
    if unused:
        head = f"{name}: these rules match nothing, or only what earlier rules match:"
        warn_or_raise(UnusedFilterWarning, message(head, unused), strict=False)


def create_pattern_based_partition_spec(
    pattern: str, mesh: AnyMesh | None = None, default_spec: PartitionSpec | None = None
) -> Callable[[str, Any], PartitionSpec]:
    """Returns a function of a name and an array, from rules like ``"up|gate->data,norm->None"``.

    A rule is a regular expression that is searched for in the name, ``->``, and the axes of the
    dimensions with dots between them: ``None`` replicates a dimension, ``data+model`` shards it
    over both. Axes after a comma without an ``->`` belong to the rule before it. The first rule
    that is found decides, else ``default_spec`` or ``P()``. Specs are truncated to the rank of the
    array; the mesh, if given, must have their axes.

    Raises:
      ValueError: a rule has another form, or the mesh lacks an axis.

    Example:
      >>> import numpy as np
      >>> from nnx_sharding.compat.eformer import create_pattern_based_partition_spec
      >>> spec_of = create_pattern_based_partition_spec("up|gate->None.model, norm->None")
      >>> spec_of("blocks/0/up", np.ones((2, 4)))
      P(None, 'model')
    """
    specs = {regex: PartitionSpec(*entries) for regex, entries in _read_rules(pattern).items()}
    # A pair is a filter and a spec. A filter is called with a path, which is a tuple, and a value.
    pairs = read_patterns("create_pattern_based_partition_spec", specs)
    # The default comes last, so that some rule always matches.
    pairs.append((lambda *_: True, default_spec or PartitionSpec()))
    problems = [
        f"  {problem}" for _, spec in pairs for problem in fit_sharding(spec, mesh).problems
    ]
    raise_if_any(ValueError, f"{pattern!r} does not fit the mesh:", problems)

    def spec_of(name: str, array: Any) -> PartitionSpec:
        path = (name,)
        spec = next(spec for matches, spec in pairs if matches(path, array))
        return with_entries(spec, spec.partitions[: np.ndim(array)])

    return spec_of


def _read_rules(pattern: str) -> dict[str, list[Any]]:
    """Reads rules: ``{"up": [None, ("data", "model")]}`` from ``"up->None.data+model"``.

    A comma begins another rule, or more axes for the rule before it, so a regular expression cannot
    have a comma. ``"up->None,model"`` is ``"up->None.model"``. A regular expression that occurs
    twice is one rule with the axes of both.

    Returns:
      By regular expression, the entry of the spec for each dimension.
    """
    rules: dict[str, list[Any]] = {}
    regex = ""
    for piece in pattern.split(","):
        # The piece is split at its last arrow, because a regular expression may have an arrow.
        expression, arrow, dimensions = map(str.strip, piece.rpartition("->"))
        if arrow:  # without an arrow, the piece has more axes for the rule before it
            regex = expression
        # "None.data+model" → [("None",), ("data", "model")]
        entries = [tuple(map(str.strip, entry.split("+"))) for entry in dimensions.split(".")]
        has_empty_axis = any("" in axes for axes in entries)
        if not regex or has_empty_axis:
            form = "'up|gate->None.model'"
            raise ValueError(f"expected rules such as {form}, got {piece!r} in {pattern!r}.")
        rules.setdefault(regex, []).extend(None if axes == ("None",) else axes for axes in entries)
    return rules


def analyze_sharding_strategy(
    pytree: object, partition_specs: Any, mesh: AnyMesh | None = None
) -> dict[str, Any]:
    """Counts the arrays and bytes that specs give each device, as ``report.check_sharding`` does.

    Args:
      pytree: arrays or modules, also abstract ones; only shapes and dtypes are read.
      partition_specs: a prefix of specs, or a mapping from paths such as ``blocks/3/up/kernel`` to
        specs; corrected as by :func:`with_sharding_constraint`.
      mesh: the mesh; None for the one in context.

    Returns:
      ``total_parameters`` and ``sharded_parameters``, numbers of elements; ``memory_per_device``,
      bytes by the id of the device (its position in an abstract mesh); ``balance_score``, the mean
      of these over their maximum; ``partition_stats``, by spec the numbers of ``arrays`` and
      ``parameters``, ``bytes`` and ``bytes_per_device``.
    """
    if isinstance(partition_specs, Mapping) and _has_paths(partition_specs, pytree):
        exact = {f"^{re.escape(path)}$": spec for path, spec in partition_specs.items()}
        partition_specs = from_rules(exact)
    mesh = _mesh_of("analyze_sharding_strategy", partition_specs, mesh)
    flat = flatten(pytree)
    # The arrays become abstract, so that `apply_shardings` changes only their shardings and moves
    # no data.
    abstract = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)) if is_shardable(x) else x
        for x in flat.leaves
    ]
    flat = flat._replace(leaves=abstract)
    _, shardings = _assign_leniently(flat, partition_specs, mesh)
    rows = parameter_table(apply_shardings(abstract, shardings))  # a row for each array
    # Devices that hold nothing are listed, because they count in the balance.
    device_ids: Iterable[int] = ()
    if mesh is not None:
        device_ids = mesh.device_ids.flat if isinstance(mesh, Mesh) else range(mesh.size)
    held = dict.fromkeys(device_ids, 0) | device_bytes(rows)  # bytes by device
    most = max(held.values(), default=0)
    mean = sum(held.values()) / max(len(held), 1)
    sharded = [row for row in rows if row.shard_shape != row.shape]
    return {
        "total_parameters": sum(math.prod(row.shape) for row in rows),
        "sharded_parameters": sum(math.prod(row.shape) for row in sharded),
        "memory_per_device": held,
        "balance_score": mean / most if most else 1.0,
        "partition_stats": _sums_by_spec(rows),
    }


def _has_paths(specs: Mapping[Any, Any], tree: object) -> bool:
    """Whether a mapping is from paths to specs, such as ``{"blocks/3/up/kernel": P()}``.

    It may also be a prefix of specs, ``{"up": P(), "down": P()}`` for a tree with these keys. So a
    key is a path if it has a slash, and is no key of the tree.
    """
    keys_of_tree = tree if isinstance(tree, Mapping) else {}
    return any("/" in str(key) and key not in keys_of_tree for key in specs)


def _sums_by_spec(rows: Iterable[ParameterRow]) -> dict[Any, dict[str, int]]:
    """Returns, for each spec, how many arrays have it, and the sums of their sizes.

    The sizes are in elements (``parameters``), ``bytes``, and ``bytes_per_device``.
    """
    sums: dict[Any, Counter[str]] = {}
    for row in rows:
        of_spec = sums.setdefault(row.spec, Counter())
        of_spec["arrays"] += 1
        of_spec["parameters"] += math.prod(row.shape)
        of_spec["bytes"] += row.bytes_total
        of_spec["bytes_per_device"] += row.bytes_per_device
    return {spec: dict(of_spec) for spec, of_spec in sums.items()}


def make_shard_and_gather_fns(
    partition_specs: object, mesh: AnyMesh | None = None
) -> tuple[Any, ...]:
    """Returns functions that shard arrays by specs, and functions that gather them on the host.

    Args:
      partition_specs: a pytree of specs, shardings and ``StateSharding``.
      mesh: the mesh of the specs; None for the one in context now.

    Returns:
      ``(shard_fns, gather_fns)``, two trees like ``partition_specs``. Each function takes the part
      of a model for one spec; a gather function makes full NumPy arrays, one at a time.
    """
    mesh = _mesh_of("make_shard_and_gather_fns", partition_specs, mesh)

    def shard(spec: object, tree: object) -> Any:
        return with_sharding_constraint(tree, spec, mesh=mesh)

    def gather(spec: Any, tree: object) -> Any:
        """Returns the part of a model for one spec, with NumPy arrays."""
        # The specs of the sharding, or of a `StateSharding`, are replaced by P(), because an array
        # that each device has as a whole can be copied to the host even with several processes.
        full = replace_spec(spec, PartitionSpec())
        return jax.tree.map(
            lambda leaf: jax.device_get(shard(full, leaf)) if is_shardable(leaf) else leaf, tree
        )

    def for_each_spec(function: Callable[[Any, object], Any]) -> Any:
        return jax.tree.map(
            lambda spec: functools.partial(function, spec), partition_specs, is_leaf=_is_leaf
        )

    return for_each_spec(shard), for_each_spec(gather)


def _mesh_of(name: str, partition_specs: object, mesh: AnyMesh | None) -> AnyMesh | None:
    """Returns the given mesh or the mesh in context; None for an empty mesh.

    Without a mesh, a NoContextMeshError is raised if there are specs, because only shardings have a
    mesh of their own. A leaf that is no spec raises a TypeError that begins with ``name``.
    """
    specs = Specs(partition_specs)
    check_specs(name, partition_specs=specs)
    # The argument is whether a missing mesh is an error; if it is not, the mesh is empty.
    given = get_incontext_mesh(specs.has_partition_spec) if mesh is None else mesh
    return None if given.empty else given


def _is_leaf(x: object) -> bool:
    """Whether ``x`` is a leaf of a pytree of specs."""
    return is_single_spec(x) or isinstance(x, StateSharding)


def extract_sharding_structure(pytree: Any, mesh: AnyMesh | None = None) -> Any:
    """Returns the tree with the ``NamedSharding`` of each array; None for arrays without one.

    A module becomes an ``nnx.State``, a Variable a sharding. A leaf that is a spec, or has one as
    its attribute ``sharding``, becomes a sharding on ``mesh``; None for the one in context.
    """

    def read(leaf: object) -> NamedSharding | None:
        sharding = leaf if isinstance(leaf, PartitionSpec) else sharding_of(leaf)
        if isinstance(sharding, PartitionSpec):
            return NamedSharding(mesh or get_incontext_mesh(), sharding)
        return sharding if isinstance(sharding, NamedSharding) else None

    return _map_arrays_of_variables(pytree, read)


get_shardings_with_structure = extract_sharding_structure


def extract_shardings(tree: object, mesh: AnyMesh | None = None) -> Any:
    """Does the same as :func:`extract_sharding_structure`; the first argument has another name."""
    return extract_sharding_structure(tree, mesh)


def get_partition_spec(tree: Any) -> Any:
    """Returns the ``PartitionSpec`` of each array: ``P()`` for numbers and arrays on one device.

    Other leaves, and arrays on several devices without a ``NamedSharding``, raise a ValueError.
    """

    def read(leaf: object) -> Any:
        """Returns the spec of a leaf, or `_NO_RESULT`."""
        sharding = sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            return sharding.spec
        # All specs mean the same on one device.
        is_single = isinstance(sharding, Sharding) and sharding.num_devices == 1
        is_array_or_number = hasattr(leaf, "dtype") or isinstance(leaf, int | float)
        if is_array_or_number and (sharding is None or is_single):
            return PartitionSpec()
        return _NO_RESULT

    return _map_arrays_of_variables(tree, read)


def _map_variables(tree: object, function: Callable[[NamedVariable], object]) -> Any:
    """Returns the tree with the results of a function in place of Variables and bare arrays.

    A module becomes an ``nnx.State`` of the results. A Variable without arrays becomes None,
    because the function is not called for it.
    """
    parts, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_compat.is_graph_object)
    new_parts = []
    for keys, part in parts:  # a module, a Variable or a bare array
        prefix = tuple(plain_key(path_key(key)) for key in keys)  # the path of the part
        results = {}  # by the path in the part; the function gets the path in the tree
        for named in variables(part):
            whole_path = (*prefix, *named.path)
            results[named.path] = function(named._replace(path=whole_path))
        is_module = _compat.is_node(part)
        # A part that is no module is a single Variable or array, and its path in the part is ().
        new_parts.append(nnx.from_flat_state(results) if is_module else results.get(()))
    return jax.tree_util.tree_unflatten(treedef, new_parts)


_NO_RESULT = object()  # the result for an array from which nothing can be read


def _map_arrays_of_variables(tree: object, read: Callable[[Any], Any]) -> Any:
    """Returns the tree with the results of a function in the place of its arrays.

    Args:
      read: a function that returns a result for an array, such as its spec, or ``_NO_RESULT``.

    Raises:
      ValueError: lists the Variables with an array without a result, or with different results.
    """
    missing: list[str] = []

    def choose(variable: NamedVariable) -> Any:
        """Returns the result for the arrays of a Variable; None if it holds none or is wrong."""
        # A Variable has one entry in the new tree, so all its arrays need the same result.
        results = [read(leaf) for leaf in variable.arrays]
        has_all = all(result is not _NO_RESULT for result in results)
        if not has_all or any(result != results[0] for result in results):
            # The error lists the shardings of arrays, and other leaves as they are.
            shown = [sharding_of(leaf) if is_shardable(leaf) else leaf for leaf in variable.arrays]
            distinct = dict.fromkeys(map(str, shown))
            missing.append(f"  {variable.name or 'the root'}: {'; '.join(distinct)}")
            return None
        return results[0] if results else None

    result = _map_variables(tree, choose)
    head = "expected numbers and arrays with a NamedSharding, the same one in each Variable, got:"
    raise_if_any(ValueError, head, missing, "Place arrays with with_sharding_constraint.")
    return result


def get_names_from_partition_spec(specs: object) -> list[str]:
    """Returns the mesh axes that specs name, each once, in the order of their first occurrence.

    For ``{"a": P("data"), "b": P("data", "model")}`` the result is ``["data", "model"]``. ``specs``
    is a pytree of specs, shardings, ``StateSharding``, names and None. Other leaves raise a
    TypeError.
    """
    names: list[str] = []
    for leaf in jax.tree.leaves(specs, is_leaf=_is_leaf):
        match leaf.spec if isinstance(leaf, NamedSharding) else leaf:
            case PartitionSpec() as spec:
                names += spec_axes(spec)
            case StateSharding(shardings=shardings):
                names += get_names_from_partition_spec(shardings)
            case str() as name:
                names.append(name)
            # A name, None and UNCONSTRAINED are entries of specs, which users pass as well.
            case None | PartitionSpec.UNCONSTRAINED:
                pass
            case _:
                raise TypeError(f"{leaf!r} is not a PartitionSpec or a pytree of them.")
    return list(dict.fromkeys(names))
