"""Groups of devices as HLO writes them, and the mesh axes over which they run.

XLA writes groups in three forms. The last two stand for an array of device numbers:

    {{0,1},{2,3}}                            lists
    [2,4]<=[4,2]T(1,0)                       range(8) as (4, 2), transposed, as 2 groups of 4
    mesh['data'=2,'model'=4] {'model'}       a mesh, and the axes along which groups run

A group runs over the axes in which the positions of its devices in the mesh differ, if it has all
combinations of these positions, and if all groups run over the same. On a mesh of data 2 × model 4,
device 6 is at (1, 2), and {1,5} runs over data.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import NamedTuple, TypeAlias

import numpy as np

Groups: TypeAlias = tuple[tuple[int, ...], ...]  # the numbers of the devices in each group
Sizes: TypeAlias = tuple[tuple[str, int], ...]  # the name and size of each mesh axis


class AxisPart(NamedTuple):
    """How much of a mesh axis each group of devices covers: pairs on an axis of 4 are (2, 4)."""

    covered: int  # the number of positions of a group along the axis
    size: int


class _Axis(NamedTuple):
    """A mesh axis as an array (before, part, after). Groups run along the part.

    Along an axis of size 8, ``:(2)4`` is (2, 4, 1): the groups are 0 to 3 and 4 to 7. ``:(1)4`` is
    (1, 4, 2): they are 0, 2, 4, 6 and 1, 3, 5, 7.
    """

    before: int  # the size of what varies more slowly; each of its positions has own groups
    part: int  # 1 if groups do not run along the axis
    after: int  # the size of what varies faster; each of its positions has own groups, too


# mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(1)2,'b'}
_MESH = re.compile(
    r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<devices>.*)\))? *\{(?P<axes>[^{}]*)\}"
)
# More devices than any program has: the text is damaged, and must not allocate memory for them.
_MAX_DEVICES = 1 << 22


@functools.lru_cache(maxsize=1024)
def read_groups(text: str) -> Groups | None:
    """Reads groups in all forms of XLA; None for other text.

    Empty groups mean that all devices form one group.
    """
    try:
        if text.startswith("mesh["):  # mesh['data'=2,'model'=4] {'model'}
            return _mesh_groups(text)
        if "<=" in text:  # [4,2]<=[2,4]T(1,0)
            sizes, _, numbers = text.partition("<=")
            return _tuples(_iota(numbers).reshape(_numbers(sizes)))  # (groups, devices of each)
        return number_lists(text)
    except (KeyError, ValueError):  # KeyError: an axis that the mesh does not have
        return None


def number_lists(text: str) -> Groups:
    """Reads ``{{0,1},{2,3}}`` as ((0, 1), (2, 3)), without empty groups."""
    groups = map(_numbers, re.findall(r"\{([\d,\s]*)\}", text))
    return tuple(group for group in groups if group)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", text))


def _iota(text: str) -> np.ndarray:
    """Reads ``[2,4]T(1,0)``: ``arange(8)`` in the shape (2, 4), transposed to (4, 2)."""
    dims, _, permutation = text.partition("T")
    sizes = _numbers(dims)
    count = math.prod(sizes)
    if not 0 < count <= _MAX_DEVICES:
        raise ValueError(f"{count} devices")
    numbers = np.arange(count).reshape(sizes)
    return numbers.transpose(_numbers(permutation)) if permutation else numbers


def _mesh_groups(text: str) -> Groups:
    """Reads ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(1)2,'b'}``.

    Groups run along the axes in the last braces. ``'a':(1)2`` stands for a part of the axis ``a``:
    the part has the size 2, and what is before it (`_Axis`) has the size 1. ``device_ids`` are the
    devices in the order of the mesh, as a list or as for `_iota`; without them, the mesh has the
    devices in increasing order. ``mesh['a'=2,'b'=2] {'a'}`` is ((0, 2), (1, 3)).

    Raises:
      KeyError: a group runs along an axis that the mesh does not have.
      ValueError: the text is not understood.
    """
    match = _MESH.match(text)
    if match is None:
        raise ValueError("no mesh")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d{1,9})", match["sizes"])}
    order = match["devices"] or f"[{math.prod(sizes.values())}]"
    devices = _iota(order) if order.startswith("[") else np.array(_numbers(order))
    # At first, groups run along no axis. Named axes are replaced below.
    axes = {name: _Axis(before=size, part=1, after=1) for name, size in sizes.items()}
    named = re.findall(r"'([^']*)'(?::\((\d{1,9})\)(\d{1,9}))?", match["axes"])
    for name, written_before, written_part in named:
        before = int(written_before or 1)
        part = int(written_part or sizes[name])  # A whole axis, such as 'b', has no written part.
        if not before * part or sizes[name] % (before * part):
            raise ValueError(f"{name} is not divisible by {before * part}")
        axes[name] = _Axis(before, part, after=sizes[name] // (before * part))
    dims = [*itertools.chain(*axes.values())]
    array = devices.reshape(dims)  # (before, part, after, before, part, after, …)
    parts = [*range(1, len(dims), 3)]  # the dimensions of parts
    others = [dimension for dimension in range(len(dims)) if dimension not in parts]
    array = array.transpose(others + parts)  # (before, after, before, after, …, part, part, …)
    group_size = math.prod(axis.part for axis in axes.values())
    return _tuples(array.reshape(-1, group_size))  # (groups, devices of a group)


def _tuples(groups: np.ndarray) -> Groups:
    """Returns an array of (groups, devices of each) as tuples."""
    if groups.ndim != 2:
        raise ValueError("groups have two dimensions")
    return tuple(map(tuple, groups.tolist()))


@functools.lru_cache(maxsize=1024)
def axes_of_groups(groups: Groups, sizes: Sizes) -> tuple[str, ...] | None:
    """Finds the mesh axes over which groups run, each of them over all or a part of an axis.

    Returns None if the groups run over different axes, if they are not all combinations of
    positions along these axes, or if they do not have each device of the mesh once. ``groups`` have
    positions in the mesh.
    """
    dims = tuple(size for _, size in sizes)
    if sorted(device for group in groups for device in group) != list(range(math.prod(dims))):
        return None
    # The dimensions of the mesh in which positions differ, or None, for each group. There is at
    # least one group, because each device of the mesh is in one.
    axes, *other_axes = {_axes_of_group(group, dims) for group in groups}
    if other_axes or axes is None:
        return None
    return tuple(sizes[axis][0] for axis in axes)


def _axes_of_group(group: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Finds the dimensions of the mesh, of sizes ``dims``, in which positions of devices differ.

    Returns None unless all combinations of these positions occur: on a mesh of 2 × 4, the devices 0
    and 5 differ in both dimensions, but are not all four combinations. ``group`` has positions in
    the mesh, counted in its order.
    """
    positions = np.unravel_index(np.array(group), dims) if dims else ()  # by dimension
    counts = [len(np.unique(indices)) for indices in positions]
    axes = tuple(axis for axis, count in enumerate(counts) if count > 1)
    # No device is twice in a group, because `axes_of_groups` has refused such groups. So if a group
    # has as many devices as there are combinations, it has all of them.
    return axes if math.prod(counts) == len(group) else None


@functools.lru_cache(maxsize=1024)
def axis_parts(groups: Groups, sizes: Sizes, axes: tuple[str, ...]) -> tuple[AxisPart, ...]:
    """Returns how much of each of its axes a group covers; empty if it covers all of each.

    Of groups of different sizes, the one that covers most of an axis counts.

    Args:
      groups: positions in the mesh.
      sizes: the mesh.
      axes: what `axes_of_groups` returned for them.
    """
    positions = [np.unravel_index(np.array(group), [size for _, size in sizes]) for group in groups]
    parts = tuple(
        AxisPart(max(len(np.unique(indices[axis])) for indices in positions), size)
        for axis, (name, size) in enumerate(sizes)
        if name in axes
    )
    return () if all(part.covered == part.size for part in parts) else parts


@functools.lru_cache(maxsize=1024)
def axes_of_pairs(pairs: Groups, sizes: Sizes) -> tuple[str, ...] | None:
    """Finds the mesh axes along which a permutation sends; None if the mesh lacks a device.

    ``pairs`` are (source, target). An axis counts if these differ in it for one of the pairs.
    """
    dims = tuple(size for _, size in sizes)
    if any(device >= math.prod(dims) for pair in pairs for device in pair):
        return None
    if not pairs or not dims:
        return ()
    positions = np.unravel_index(np.array(pairs), dims)  # by dimension, each (pairs, 2)
    return tuple(
        name
        for (name, _), indices in zip(sizes, positions, strict=True)
        if (indices[:, 0] != indices[:, 1]).any()
    )


def connected(pairs: Groups) -> Groups:
    """Joins pairs to the sets of devices that they connect: (0, 1), (1, 2) become (0, 1, 2)."""
    # Device → its group. All devices of a group share the same set.
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        merged = set(pair).union(*(group_of.get(device, ()) for device in pair))
        # All devices of the groups that this pair joins get the merged set.
        group_of.update(dict.fromkeys(merged, merged))
    distinct = {id(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(distinct.values())
