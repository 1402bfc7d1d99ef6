"""The sizes of the meshes that a plan tries, and checks of the meshes that a user names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import raise_if_any
from .arguments import Arguments
from .axes import Axes
from .chains import STYLES, split_name


def mesh_sizes(
    count: int, num_slices: int, axes: Axes, strategy: str, arguments: Arguments
) -> Iterator[dict[str, int]]:
    """Yields the sizes of all meshes of ``count`` devices that have the axes of a strategy.

    The meshes of 8 devices for ``fsdp + tensor`` are ``{"data": 1, "model": 8}``, ``{"data": 2,
    "model": 4}``, …. Slices are along the axis for replicas, or along the axis for stages, because
    a pipeline sends least. Positions in sequences are sharded over the axis ``context``, or over
    ``ring`` and ``context``.

    Args:
      count: the number of devices.
      num_slices: the number of TPU slices that the devices are on.
      axes: the names of axes by their roles.
      strategy: the name of the chain.
      arguments: the arguments of the step. The sizes of some axes have to divide their shapes.

    Raises:
      ValueError: the devices cannot be divided into so many slices.
    """
    if count % num_slices:
        raise ValueError(f"plan: num_slices={num_slices} does not divide the {count} devices.")
    data, styles = split_name(strategy)
    roles = {"data", *(STYLES[style] for style in styles)}
    if data == "hsdp" and num_slices == 1:
        roles.add("replica")
    if "context" in roles:
        roles.add("ring")
    ranges = _axis_ranges(roles, axes, arguments)
    # `Axes.of` has checked that each of these roles has exactly one axis.
    [replica], [stage], [expert], [ring] = axes.replica, axes.stage, axes.expert, axes.ring
    # Each slice is a replica; or there are no replicas, and each slice has some stages.
    choices = (num_slices, 1) if num_slices > 1 and "stage" in roles else (num_slices,)
    for replicas in choices:
        for sizes in _factorizations(count // replicas, ranges):
            contexts = math.prod(sizes[axis] for axis in axes.in_mesh(sizes, "ring", "context"))
            if arguments.length % contexts:
                continue
            # Without replicas, no stage may be on two slices.
            if replicas < num_slices and sizes[stage] % num_slices:
                continue
            all_sizes = dict(sizes)
            if all_sizes.get(ring) == 1:  # the positions are over `context` alone
                del all_sizes[ring]
            if replicas > 1:
                all_sizes[replica] = replicas
            if arguments.experts:  # the model may name this axis even in chains without experts
                all_sizes.setdefault(expert, 1)
            yield {name: all_sizes[name] for name in itertools.chain(*axes) if name in all_sizes}


class _AxisRange(NamedTuple):
    """The name of a mesh axis, and the sizes that it may have."""

    name: str
    least: int  # the smallest size
    dividend: int  # a number that the size has to divide; all sizes divide 0


def _axis_ranges(roles: Collection[str], axes: Axes, arguments: Arguments) -> list[_AxisRange]:
    """Lists the mesh axes of some roles, and the sizes that each axis may have.

    An axis has at least two devices, because the chain without the style of the axis is another
    candidate. But ``data`` may have one device, because every chain has this axis. The axis
    ``ring`` and the second axis for ``model`` may have one device, too, because the first axis of
    the style may be enough.

    Args:
      arguments: the arguments of the step. The sizes of some axes have to divide their shapes.
    """
    # Role → the number that the size of its axis has to divide.
    dividends = {
        "stage": math.gcd(*arguments.stages),  # 0 without layers
        "expert": arguments.experts,
        "context": arguments.length,
        "ring": arguments.length,
    }
    ranges = []
    for role in Axes._fields:
        if role not in roles:
            continue
        for i, name in enumerate(getattr(axes, role)):
            least = 1 if i > 0 or role in ("data", "ring") else 2
            ranges.append(_AxisRange(name, least, dividends.get(role, 0)))
    return ranges


def _factorizations(count: int, axes: Sequence[_AxisRange]) -> Iterator[dict[str, int]]:
    """Yields the sizes of axes, by name, whose product is ``count``: 2 × 4, 4 × 2, …."""
    if not axes:
        if count == 1:
            yield {}
        return
    axis, *inner_axes = axes
    for size in range(axis.least, count + 1):
        if count % size == 0 and axis.dividend % size == 0:
            for sizes in _factorizations(count // size, inner_axes):
                yield {axis.name: size} | sizes


def check_meshes(
    meshes: Sequence[Mapping[str, int]], devices: int | None, axes: Axes, *, has_chains: bool
) -> None:
    """Raises a ValueError for meshes of the user with unknown axes or another number of devices.

    Args:
      meshes: for each mesh, name of an axis → its size.
      devices: the number of devices that each mesh must have; None for any number.
      axes: the names that strategies of this library use.
      has_chains: whether some strategies are chains of this library. A function of the user may
        use axes of any name.
    """
    wrong = [] if meshes else ["  meshes=[] has none"]
    names = [*itertools.chain(*axes)]
    for sizes in meshes:
        if has_chains and not {*names}.issuperset(sizes):
            wrong.append(
                f"  {dict(sizes)}: strategies of this library use the axes {', '.join(names)}; "
                "name those of your mesh, as in axes={'data': 'dp', 'model': 'tp'}"
            )
    for sizes in meshes:
        count = math.prod(sizes.values())
        if devices is not None and count != devices:
            wrong.append(f"  {dict(sizes)}: {count} devices, not {devices}")
    raise_if_any(ValueError, "plan: these meshes cannot be used:", wrong)
