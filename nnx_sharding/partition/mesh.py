"""Meshes by the names and sizes of their axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..fitting import suggestion


def make_mesh(
    axes: Mapping[str, int] | Iterable[tuple[str, int]],
    *,
    devices: Sequence[jax.Device] | None = None,
    axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
) -> Mesh:
    """Makes a mesh from the names and sizes of its axes.

    ``jax.make_mesh`` chooses the order of the devices.

    Args:
      axes: the size of each axis, major first. One may be -1, for the devices that the others
        leave.
      devices: the devices, all of which are used; None for all there are.
      axis_types: the type of all axes, or of some by name; the others are then Auto.

    Raises:
      ValueError: a name occurs twice, a size is neither positive nor -1, two are -1, the product
        of the sizes is not the number of devices, or ``axis_types`` names an unknown axis.
      TypeError: a size is not an integer, or an axis type is not an ``AxisType``.

    Example:
      >>> from nnx_sharding.partition import make_mesh
      >>> dict(make_mesh({"data": -1, "model": 4}).shape)
      {'data': 2, 'model': 4}
    """
    pairs = list(axes.items() if isinstance(axes, Mapping) else axes)
    names = tuple(name for name, _ in pairs)
    devices = jax.devices() if devices is None else list(devices)
    sizes = _sizes(pairs, len(devices))
    types = _types(names, axis_types)
    return jax.make_mesh(tuple(sizes), names, axis_types=types, devices=devices)


def _sizes(pairs: Sequence[tuple[str, Any]], count: int) -> list[int]:
    """The sizes of the axes, with the number of remaining devices for -1."""
    wrong = [f"{name!r}: {size!r}" for name, size in pairs if not _is_integer(size)]
    if wrong:
        raise TypeError(f"make_mesh: these sizes are not integers: {', '.join(wrong)}.")
    names = [name for name, _ in pairs]
    twice = [repr(name) for name in dict.fromkeys(names) if names.count(name) > 1]
    problems = [f"these axes occur more than once: {', '.join(twice)}"] if twice else []
    problems += [
        f"axis {name!r} has size {size}; write a positive number, or -1 for the rest"
        for name, size in pairs
        if size < 1 and size != -1
    ]
    rest = [repr(name) for name, size in pairs if size == -1]
    if len(rest) > 1:
        problems.append(f"one axis only can be -1, not {', '.join(rest)}")
    if problems:
        raise ValueError("make_mesh: " + "; ".join(problems) + ".")
    known = math.prod(size for _, size in pairs if size != -1)
    if count % known or not (rest or count == known):
        product = " × ".join(f"{name!r} ({size})" for name, size in pairs if size != -1)
        relation = "does not divide" if rest else "is not"
        hint = "other sizes" if rest else "one axis with -1"
        raise ValueError(
            f"make_mesh: {product or 'no axis'} = {known} {relation} the number of devices, "
            f"{count}. Use {hint}, or choose the devices: devices=jax.devices()[:n]."
        )
    return [int(count // known if size == -1 else size) for _, size in pairs]


def _is_integer(size: Any) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool)


def _types(names: Sequence[str], axis_types: Any) -> tuple[AxisType, ...]:
    """The type of each axis."""
    by_name = axis_types if isinstance(axis_types, Mapping) else dict.fromkeys(names, axis_types)
    unknown = [f"{name!r}{suggestion(name, names)}" for name in by_name if name not in names]
    if unknown:
        raise ValueError(f"make_mesh: axis_types names axes that do not exist: {unknown[0]}.")
    wrong = [kind for kind in by_name.values() if not isinstance(kind, AxisType)]
    if wrong:
        raise TypeError(f"make_mesh: {wrong[0]!r} is not a jax.sharding.AxisType.")
    return tuple(by_name.get(name, AxisType.Auto) for name in names)
