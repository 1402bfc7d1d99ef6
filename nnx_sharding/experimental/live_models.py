"""``transfer``: weights of one live model in another, with other names, layouts and shardings.

    rules ── tensor_matching ──► a goal for each array of the target: its sources, how it is built
    goals ── the way of each ──► steps: arrays that one program or one copy moves together

A plan is the steps for two structures with their shapes, dtypes and shardings; it has no arrays, so
it is used again for each pair of such models. A program builds arrays on the devices of their
sources, because JAX computes only there; from there they are copied to the target's devices. Steps
are as large as the memory for copies allows (see ``_steps``).
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from .. import _compat
from ..analysis.memory import array_bytes
from ..checkpoint.names import (
    NamedArray,
    filled,
    is_key,
    may_wrap,
    named_arrays,
    on_auto_axes,
    selected,
)
from ..checkpoint.safetensors import WEIGHTS
from ..checkpoint.tensor_files import Region
from ..checkpoint.tensor_layouts import Placement, boxes
from ..checkpoint.tensor_matching import match_tensors
from ..checkpoint.tensor_rules import Rule, read_rules
from ..core.bounded import make_room
from ..core.constrain import is_shardable, sharding_of
from ..core.flatten import Flat
from ..core.guard.known_models import KnownModels
from ..core.interrupts import signals_deferred
from ..core.memory import other_memory
from ..core.place import assembled, finish_on_cpu, obstacle, place_arrays
from ..core.rebuild import rebuild
from ..errors import raise_listed
from ..specs.fitting import axes_of_type

Array: TypeAlias = jax.Array | np.ndarray[Any, Any]

_SAME: Mapping[str, Rule] = {"(.+)": "{0}"}

# The plans of earlier calls, the last ones used at the end.
_PLANS: dict[Any, list[_Step]] = {}
_MOST_PLANS = 64
_MODELS = KnownModels("transfer", 2 * _MOST_PLANS)

# The bytes of memory that a program may always take.
_SMALL = 2**24


@_compat.api_boundary
def transfer(
    source: Any,
    target: Any,
    rules: Mapping[str, Rule] | None = None,
    *,
    reverse: bool = False,
    cast: bool = False,
    only: Any = WEIGHTS,
    donate: bool = False,
) -> Any:
    r"""Copies the weights of one live model into another, whose shardings and dtypes they get.

    The models may differ in names, in the layout of arrays, and in the mesh, such as a trainer and
    the server that samples for it. Arrays that stay on their devices, in any order, get their
    layout, dtype and sharding by compiled programs (on CPUs, the sharding by copies), whose
    temporary memory is at most that of the largest array or 16 MiB; those that go to other devices
    are copied there, part by part: at once the largest array, a sixteenth of all, or 16 MiB. The
    old values of the target are released first, so each device has the new ones only. The programs
    are reused when models of these structures and shardings are passed again.

    All processes make the same call. As in ``place``, arrays go to devices of other processes only
    if both models are on the same devices.

    Args:
      source: a model, an ``nnx.State``, or a pytree of arrays.
      target: what to fill, with arrays or abstract (:func:`~nnx_sharding.partition.abstract_init`).
        Modules and Variables are changed in place. Whatever is done to either model later, the
        other keeps its values; devices that are CPUs may share parts of arrays to copy less.
      rules: where each array of the source belongs, as for :func:`load_safetensors`, with the paths
        of the source in the place of the names of tensors. None: the paths are the same.
      reverse: whether the rules lead from ``target`` to ``source``. So one table serves both
        directions, also from a stack of layers to a list of them.
      cast: whether to convert to the dtype of the target: among floats, and from integers to larger
        ones.
      only: an NNX filter for what to copy, in both models. The default is all but the state of
        random streams.
      donate: whether to delete each array of the source once it is copied. An array that needs no
        copy is handed over.

    Returns:
      ``target``, with arrays outside of modules and Variables in new containers.

    Raises:
      CheckpointError: arrays of either model are left, or have other shapes or dtypes, all in one
        message.
      ValueError: rules cannot be understood, ``only`` selects nothing, or arrays cannot be moved.
        If memory is exhausted, ``target`` may be left without values, with its shapes.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import make_mesh, place, stack
      >>> from nnx_sharding.experimental import transfer
      >>> from nnx_sharding.checkpoint import Tensor
      >>> mesh = make_mesh({"model": 8})
      >>> trainer = stack(lambda rngs: nnx.Linear(16, 16, rngs=rngs), 2, rngs=nnx.Rngs(0))
      >>> server = nnx.List(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in (1, 2))
      >>> server = place(server, P("model"), mesh)
      >>> rules = {
      ...     r"(\d+)/kernel": Tensor("layers/kernel", "in out -> {0} in out"),
      ...     r"(\d+)/bias": Tensor("layers/bias", "out -> {0} out"),
      ... }
      >>> _ = transfer(trainer, server, rules, reverse=True)  # from the server's names
      >>> server[0].kernel.sharding.spec
      P('model',)
    """
    given, flat = map(_MODELS.flatten, (source, target))
    key: Any = None
    plan: list[_Step] | None = None
    signatures = [tuple(map(_signature, each.leaves)) for each in (given, flat)]
    table = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in (rules or {}).items())
    options = reverse, cast, only, donate
    try:
        key = (given.structure, flat.structure, *signatures, table, *options)
        plan = _PLANS.pop(key, None)
    except TypeError:  # a filter that is a list
        key = None
    if plan is not None:
        _MODELS.add(source, given)
        _MODELS.add(target, flat)
    flat = flat._replace(recorder=None)  # which holds the old values
    plan = plan or _plan(given, flat, _SAME if rules is None else rules, *options)
    if key is not None:
        _PLANS[key] = plan
        make_room(_PLANS, _MOST_PLANS)
    with signals_deferred():
        flat = _released(flat, plan)  # this function holds the old values no longer
        return _run(plan, given.leaves, flat, donate)


# What decides how an array is moved.
_NAMES = "shape", "dtype", "weak_type", "sharding"
_of_array = operator.attrgetter(*_NAMES)


def _signature(leaf: Any) -> tuple[Any, ...]:
    """Returns what a plan depends on, of one array."""
    if type(leaf) is _compat.ArrayImpl:
        signature: tuple[Any, ...] = _of_array(leaf)
        return signature
    return type(leaf), *(getattr(leaf, name, None) for name in _NAMES)


class _Way(enum.Enum):
    """How an array gets from its sources to where it belongs."""

    # It is what its source is, where that is. One `jax.device_put` copies all such arrays.
    PUT = enum.auto()
    # It is what its source is, on the same CPU devices in other parts, which are copied: quicker
    # than the collectives of a program.
    ASSEMBLE = enum.auto()
    # It is what its source is, and `place_arrays` brings it where it belongs.
    MOVE = enum.auto()
    # A program builds it of its sources on their devices, and shards it there as the target does,
    # or as much like it as these devices allow. In the second case, `place_arrays` is next.
    BUILD = enum.auto()
    # A program builds parts of it on CPU devices, wherever no collective is needed for them; then
    # they are copied as by ASSEMBLE.
    BUILD_PARTS = enum.auto()

    @property
    def has_program(self) -> bool:
        """Whether a program builds the array."""
        return self in (_Way.BUILD, _Way.BUILD_PARTS)


class _Goal(NamedTuple):
    """One array of the target."""

    array: NamedArray  # abstract
    sources: tuple[int, ...]  # their slots
    build: Callable[..., Array]  # makes it of them
    sharding: Sharding | None  # None for a NumPy array
    way: _Way
    place: Sharding | None  # where a program puts it; None if the compiler decides

    @property
    def nbytes(self) -> int:
        """Its size."""
        return array_bytes(self.array.leaf.shape, self.array.leaf.dtype)

    @property
    def is_final(self) -> bool:
        """Whether its program puts it where it belongs."""
        return bool(self.place == self.sharding)


class _Step(NamedTuple):
    """Some arrays of the target, which are moved together."""

    goals: Sequence[_Goal]  # of one way; the programs of all, or of none, are final
    slots: Sequence[int] = ()  # the arguments of the program
    program: Callable[..., list[jax.Array]] | None = None  # compiled; None if none is needed

    @property
    def way(self) -> _Way:
        """The way of all its arrays."""
        return self.goals[0].way


def _released(flat: Flat, steps: Sequence[_Step]) -> Flat:
    """Returns the target without its old values, which nothing refers to any more."""
    empty = list(flat.leaves)
    for slot, abstract in ((g.array.slot, g.array.leaf) for step in steps for g in step.goals):
        if isinstance(empty[slot], jax.Array):
            empty[slot] = abstract
    rebuild(flat, empty, "transfer")
    return flat._replace(leaves=empty)


def _run(steps: Sequence[_Step], source: Sequence[Any], flat: Flat, donate: bool) -> Any:
    """Moves the arrays of the source into the target, and returns it."""
    goals = [goal for step in steps for goal in step.goals]
    uses = Counter(id(source[slot]) for goal in goals if donate for slot in goal.sources)
    values = []
    for step in steps:
        taken = [source[slot] for goal in step.goals if donate for slot in goal.sources]
        uses.subtract(map(id, taken))
        free = [x for x in taken if isinstance(x, jax.Array) and not uses[id(x)]]
        made = _moved(step, source, donate=donate and len(free) == len(taken))
        finish_on_cpu(made)
        for goal, x in zip(step.goals, made, strict=True):
            values.append((goal.array, np.array(x) if goal.sharding is None else x))
        kept = set(map(id, made))
        for x in free:
            if id(x) not in kept and not x.is_deleted():
                x.delete()
    return filled(flat, values, "transfer")


def _moved(step: _Step, source: Sequence[Any], *, donate: bool) -> list[Any]:
    """Returns the arrays of one step where they belong."""
    shardings: list[Any] = [goal.sharding for goal in step.goals]
    made: list[Any]
    if step.program is None:
        made = [goal.build(*(source[slot] for slot in goal.sources)) for goal in step.goals]
    else:
        made = step.program(*(_on_auto_axes(source[slot]) for slot in step.slots))
    if step.way is _Way.PUT:
        return list(jax.device_put(made, shardings, may_alias=False))
    if step.way is _Way.MOVE:
        return place_arrays(made, shardings, donate=donate, alias=False)
    if step.way is _Way.BUILD:
        if not all(goal.is_final for goal in step.goals):
            made = place_arrays(finish_on_cpu(made), shardings)
            jax.block_until_ready(made)  # before the next program takes memory
        return made
    finish_on_cpu(made)
    pairs = zip(made, shardings, strict=True)
    return [assembled(x, sharding, alias=True) for x, sharding in pairs]


def _first(array: Array) -> Array:
    """Builds an array that is its only source."""
    return array


def _plan(
    given: Flat,
    flat: Flat,
    rules: Mapping[str, Rule],
    reverse: bool,
    cast: bool,
    only: Any,
    donate: bool,
) -> list[_Step]:
    """Returns the steps that move the arrays of one structure into those of another."""
    sources, targets = (
        {x.path: x for x in selected("transfer", named_arrays(each), only, is_shardable, "arrays")}
        for each in (given, flat)
    )
    sides = [{path: x.leaf for path, x in each.items()} for each in (sources, targets)]
    named, placed = sides[::-1] if reverse else sides
    paths = {x.path for x in named_arrays(given if reverse else flat)}
    head, nouns = "transfer: the source does not fit the target.", ("source", "array")
    options: Any = {"cast": cast, "reverse": reverse, "nouns": nouns}
    parts = match_tensors(head, read_rules("transfer", rules), named, placed, paths, **options)
    goals, obstacles = [], []
    for path, pairs in parts.items():
        used = [sources[name] for _, name in pairs]
        goals.append(_goal(targets[path], used, [placement for placement, _ in pairs], donate))
        found = dict.fromkeys(_obstacles(used, goals[-1]))
        obstacles += [f"  {path}: {each}" for each in found]
    raise_listed(ValueError, "transfer: these arrays cannot be moved:", obstacles)
    return _steps(goals, given.leaves, donate)


def _goal(
    target: NamedArray,
    sources: Sequence[NamedArray],
    placements: Sequence[Placement],
    donate: bool,
) -> _Goal:
    """Returns how an array of the target is made of its sources."""
    leaf, first = target.leaf, sources[0].leaf
    sharding = _target_sharding(leaf)
    is_weak = bool(getattr(leaf, "weak_type", False))
    kinds = [(x.leaf.dtype, bool(getattr(x.leaf, "weak_type", False))) for x in sources]
    is_same = kinds == [(leaf.dtype, is_weak)] and placements[0].is_identity
    build: Callable[..., Array] = _first
    if not is_same:
        build = functools.partial(_built, tuple(placements), leaf.shape, leaf.dtype, is_weak)
    abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_weak)
    array = target._replace(leaf=abstract, variable=None)  # plans keep no model alive
    slots = tuple(x.slot for x in sources)
    devices = _devices(first)
    if devices is None:  # on the host
        return _Goal(array, slots, build, sharding, _Way.MOVE, None)
    is_here = sharding is not None and devices == _compat.device_assignment(sharding)
    is_here = is_here and not other_memory(sharding)
    place = sharding if is_here else _twin(sharding, devices)
    is_ready = placements[0].is_identity and (
        place is None or place.is_equivalent_to(first.sharding, first.ndim)
    )
    # Copies of parts neither change types nor leave buffers of the source to donate.
    is_cpu = devices[0].platform == "cpu" and isinstance(first, jax.Array)  # not abstract
    is_copied = is_cpu and first.is_fully_addressable and is_here and not (is_weak or donate)
    if is_same:
        may_put = not (donate or is_key(leaf))
        way = _way_of_same(first, sharding, is_here, is_ready, is_copied, may_put)
    elif is_copied and not (is_ready or first.is_fully_replicated):
        way, place = _Way.BUILD_PARTS, None
    else:
        way = _Way.BUILD
    return _Goal(array, slots, build, sharding, way, place)


def _target_sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding that an array of the target has, or gets; None on the host."""
    if isinstance(leaf, np.ndarray | np.generic):
        return None
    sharding = sharding_of(leaf)
    sharding = sharding.sharding if isinstance(sharding, Format) else sharding
    return sharding or SingleDeviceSharding(jax.local_devices()[0])


def _way_of_same(
    first: jax.Array,
    sharding: Sharding | None,
    is_here: bool,  # the target is on the same devices, in the same order
    is_ready: bool,  # it is sharded there like the source
    is_copied: bool,  # copies of parts can shard it
    may_put: bool,
) -> _Way:
    """Returns how an array gets to the target that has the shape and dtype of its only source."""
    if is_ready and is_here:
        return _Way.PUT if may_put else _Way.MOVE
    is_direct = sharding is None or first.sharding.device_set == sharding.device_set
    if is_ready or other_memory(first.sharding) or (is_direct and not is_here):
        return _Way.MOVE
    if is_copied:
        # A replicated source has each part on each device already.
        return _Way.PUT if first.is_fully_replicated and may_put else _Way.ASSEMBLE
    return _Way.BUILD


def _built(
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: np.dtype[Any],
    is_weak: bool,
    *arrays: Array,
) -> Array:
    """Builds an array of the target of its sources, in a program or on the host."""
    is_host = isinstance(arrays[0], np.ndarray)
    _, regions = boxes(placements)
    pieces = []
    for source, placement, region in zip(arrays, placements, regions, strict=True):
        x: Any = source
        if not is_host and dtype.itemsize < x.dtype.itemsize:
            # Converted first, so that fewer bytes are sent; the barrier keeps the compiler from
            # converting later.
            x = jax.lax.optimization_barrier(_compat.converted(x, dtype, is_weak))
        if not is_host and placement.is_partial:
            # The compiler fails if some slices of one array get different shardings.
            x = jax.lax.optimization_barrier(x)
        x = placement.arranged(x)
        pieces.append((region, x.reshape([end - start for start, end in region])))
    joined: Any = _joined(pieces, 0, np if is_host else jnp).reshape(shape)
    if is_host:
        joined = joined.astype(dtype)
    elif joined.dtype != dtype or is_weak:
        joined = _compat.converted(joined, dtype, is_weak)
    result: Array = joined
    return result


def _joined(pieces: Sequence[tuple[Region, Array]], dimension: int, numpy: ModuleType) -> Array:
    """Joins pieces that fill an array, from this dimension on.

    Their edges cut the dimension into slabs, each of which the same pieces fill from one side to
    the other; a slab is joined along the next dimension.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    edges = sorted({edge for region, _ in pieces for edge in region[dimension]})
    before, slabs = (slice(None),) * dimension, []
    for start, end in itertools.pairwise(edges):
        inside = []
        for region, x in pieces:
            first, last = region[dimension]
            if first <= start and end <= last:
                inside.append((region, x[(*before, slice(start - first, end - first))]))
        slabs.append(_joined(inside, dimension + 1, numpy))
    joined: Array = numpy.concatenate(slabs, dimension)
    return joined


def _obstacles(sources: Sequence[NamedArray], goal: _Goal) -> Iterator[str]:
    """Says why the sources cannot become this array."""
    leaves = [x.leaf for x in sources]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        yield "the source is abstract, without values"
        return
    if len({_devices(leaf) for leaf in leaves}) > 1:
        yield "its sources are on different devices; place them on the same ones"
    for leaf in leaves:
        place = goal.sharding or SingleDeviceSharding(jax.local_devices()[0])
        if problem := obstacle(leaf, place):
            yield problem
        if goal.build is not _first and isinstance(leaf, jax.Array) and other_memory(leaf.sharding):
            yield f"the source is in {leaf.sharding.memory_kind}; place it on its devices"
        old, new = leaf.dtype, goal.array.leaf.dtype
        if may_wrap(old, new):
            yield f"{old} may be out of the range of {new}"


def _devices(leaf: Any) -> tuple[Any, ...] | None:
    """Returns the devices of an array in their order; None on the host."""
    if isinstance(leaf, np.ndarray | np.generic):
        return None
    devices: tuple[Any, ...] | None = _compat.device_assignment(sharding_of(leaf))
    return devices


def _steps(goals: Sequence[_Goal], leaves: Sequence[Any], donate: bool) -> list[_Step]:
    """Groups arrays: one program for all on the same devices; more where it would take memory."""
    largest, total = max(goal.nbytes for goal in goals), sum(goal.nbytes for goal in goals)
    copied: dict[_Way, list[_Goal]] = {}
    built: dict[tuple[Any, ...] | None, list[_Goal]] = {}  # by the devices of the sources
    for goal in goals:
        if goal.way.has_program:
            built.setdefault(_devices(leaves[goal.sources[0]]), []).append(goal)
        else:
            copied.setdefault(goal.way, []).append(goal)
    bins: dict[Any, list[list[_Goal]]] = {}
    for of_devices, group in built.items():
        for goal in _with_places(group, leaves):
            each = bins.setdefault((of_devices, goal.is_final, goal.way), [[]])
            # What one program copies is freed before the next one runs.
            is_freed = donate or not goal.is_final
            most = max(largest, total // 16, _SMALL) if is_freed else math.inf
            if each[-1] and sum(x.nbytes for x in (*each[-1], goal)) > most:
                each.append([])
            each[-1].append(goal)
    steps = [_Step(group) for group in copied.values()]
    for part in itertools.chain(*bins.values()):
        steps += _programs(part, leaves, max(largest, _SMALL))
    return steps


def _with_places(goals: Sequence[_Goal], leaves: Sequence[Any]) -> Sequence[_Goal]:
    """Finds which parts the compiler leaves where the target has them, so that no copy is next."""
    if all(goal.is_final for goal in goals):
        return goals
    *_, compiled = _compiled(goals, leaves)
    result = []
    for goal, place in zip(goals, compiled.output_shardings, strict=True):
        ndim = len(goal.array.leaf.shape)
        if goal.way is _Way.BUILD_PARTS and place.is_equivalent_to(goal.sharding, ndim):
            goal = goal._replace(place=goal.sharding, way=_Way.BUILD)
        result.append(goal)
    return result


def _programs(goals: Sequence[_Goal], leaves: Sequence[Any], most: int) -> list[_Step]:
    """Compiles programs that build some arrays, each in at most ``most`` bytes of temporaries."""
    slots, compiled = _compiled(goals, leaves)
    memory = compiled.memory_analysis()
    if len(goals) > 1 and memory is not None and memory.temp_size_in_bytes > most:
        halves = goals[: len(goals) // 2], goals[len(goals) // 2 :]
        return [step for half in halves for step in _programs(half, leaves, most)]
    return [_Step(goals, slots, compiled)]


def _compiled(goals: Sequence[_Goal], leaves: Sequence[Any]) -> tuple[list[int], Any]:
    """Compiles a program that builds some arrays, and returns it after the slots of arguments."""
    slots = sorted({slot for goal in goals for slot in goal.sources})
    inputs = [
        _on_auto_axes(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)
        )
        for x in (leaves[slot] for slot in slots)
    ]

    def make(*arrays: Any) -> list[Any]:
        given = dict(zip(slots, arrays, strict=True))
        return [goal.build(*map(given.__getitem__, goal.sources)) for goal in goals]

    places = [goal.place for goal in goals]
    return slots, jax.jit(make, out_shardings=places).lower(*inputs).compile()


def _on_auto_axes(x: Any) -> Any:
    """Returns the same buffers on a mesh whose axes are Auto, where any operation is possible."""
    mesh = getattr(x.sharding, "mesh", None)
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return x
    auto = on_auto_axes(x.sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=auto)
    buffers = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, auto, buffers)


def _twin(sharding: Sharding | None, devices: Sequence[Any]) -> NamedSharding | None:
    """Returns a sharding of other devices, each of which holds what a device of the target needs.

    None if there is none: the number of devices is no multiple of that of the target.
    """
    if not isinstance(sharding, NamedSharding) or len(devices) % sharding.mesh.size:
        return None
    grid = np.array(devices).reshape(*sharding.mesh.devices.shape, -1)
    return NamedSharding(Mesh(grid, (*sharding.mesh.axis_names, "_copies")), sharding.spec)
