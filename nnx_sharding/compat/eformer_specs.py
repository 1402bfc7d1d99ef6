"""Shardings and specs read off trees of arrays, under the names of eformer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..fitting import spec_axes
from ..partition.apply import sharding_of
from ..partition.constrain import is_array
from ..partition.variables import NamedVariable, map_variables
from ..state_sharding import StateSharding
from .eformer_mesh import get_incontext_mesh


def extract_sharding_structure(pytree: Any) -> Any:
    """The ``NamedSharding`` of each array, None for arrays that have none.

    Returns:
      The tree with shardings in the place of arrays: an ``nnx.State`` for a module, a sharding
      for a Variable.

    Example:
      >>> import numpy as np
      >>> from nnx_sharding.constraints import extract_sharding_structure
      >>> extract_sharding_structure({"x": np.ones(3)})
      {'x': None}
    """
    return _extracted(pytree, _named)


get_shardings_with_structure = extract_sharding_structure


def extract_shardings(tree: Any, mesh: Mesh | AbstractMesh | None = None) -> Any:
    """Like :func:`extract_sharding_structure`, with each ``PartitionSpec`` as a sharding.

    Args:
      tree: arrays, modules or specs; a leaf may also have a spec as its attribute ``sharding``.
      mesh: the mesh of the specs.
    """

    def read(leaf: Any) -> Any:
        spec = leaf if isinstance(leaf, PartitionSpec) else sharding_of(leaf)
        if isinstance(spec, PartitionSpec):
            return NamedSharding(get_incontext_mesh() if mesh is None else mesh, spec)
        return _named(leaf)

    return _extracted(tree, read)


def get_partition_spec(tree: Any) -> Any:
    """The ``PartitionSpec`` of each array: ``P()`` for numbers and what is on one device.

    Raises:
      ValueError: leaves are something else, or have several devices and no ``NamedSharding``.
    """

    def read(leaf: Any) -> Any:
        sharding = sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            return sharding.spec
        one_device = isinstance(sharding, Sharding) and sharding.num_devices == 1
        is_known = hasattr(leaf, "dtype") or isinstance(leaf, int | float)
        return PartitionSpec() if is_known and (sharding is None or one_device) else _MISSING

    return _extracted(tree, read)


_MISSING = object()


def _named(leaf: Any) -> NamedSharding | None:
    sharding = sharding_of(leaf)
    return sharding if isinstance(sharding, NamedSharding) else None


def _extracted(tree: Any, read: Callable[[Any], Any]) -> Any:
    """The tree with the result of ``read`` for each leaf."""
    missing: list[str] = []

    def choose(each: NamedVariable) -> Any:
        results = list(dict.fromkeys(map(read, each.arrays)))
        if len(results) > 1 or _MISSING in results:
            shardings = [sharding_of(leaf) if is_array(leaf) else leaf for leaf in each.arrays]
            missing.append(
                f"  {each.name or 'the root'}: {'; '.join(dict.fromkeys(map(str, shardings)))}"
            )
        return results[0] if results else None

    result = map_variables(tree, choose)
    if missing:
        raise ValueError(
            "expected numbers and arrays with a NamedSharding, the same one for all arrays of a "
            "Variable, got:\n"
            + "\n".join([*missing, "Place arrays with with_sharding_constraint."])
        )
    return result


def get_names_from_partition_spec(specs: Any) -> list[str]:
    """The mesh axes that specs name, each once, in the order of their first occurrence.

    Args:
      specs: a spec, a sharding, a ``StateSharding``, a name, None, or any nesting of tuples,
        lists and mappings of them.

    Raises:
      TypeError: ``specs`` contains anything else.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import get_names_from_partition_spec
      >>> get_names_from_partition_spec({"up": P(None, ("fsdp", "model")), "down": P("model")})
      ['fsdp', 'model']
    """
    return list(dict.fromkeys(_names(specs)))


def _names(specs: Any) -> Iterator[str]:
    if specs is None or specs is PartitionSpec.UNCONSTRAINED:
        return
    specs = specs.spec if isinstance(specs, NamedSharding) else specs
    if isinstance(specs, str):
        yield specs
    elif isinstance(specs, PartitionSpec):
        yield from spec_axes(specs)
    else:
        parts = specs.shardings if isinstance(specs, StateSharding) else specs
        parts = parts.values() if isinstance(parts, Mapping | nnx.State) else parts
        if parts is specs and not isinstance(specs, tuple | list):
            raise TypeError(f"{specs!r} is not a PartitionSpec or a pytree of them.")
        for part in parts:
            yield from _names(part)
