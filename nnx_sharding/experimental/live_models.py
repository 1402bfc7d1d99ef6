"""``transfer`` copies the weights of a live model into another one with other names and shardings.

    rules ── tensor_matching ──► a goal for each array of the target: its sources, how it is built
    goals ── by devices, size ──► steps: one program builds arrays, ``place_arrays`` moves them

Both models are flattened first: a ``Flat`` has their structure and the list of their arrays. The
*slot* of an array is its index in the list of its own model. A ``NamedArray`` is an array with its
path and its slot.

JAX computes only on the devices of the sources, in their main memory. So a program builds an array
there, sharded as the target needs it, or as much like it as these devices allow. The built array is
*final* if it is where the target needs it. Otherwise it is moved there as by ``place``. An array
that equals its source needs no program. NumPy builds arrays that come from the host or go to it.

A *step* moves some arrays of the target together, with one program or with none. A *plan* is the
steps for two structures with their shapes, dtypes and shardings. It has no arrays, so it is used
again for each pair of such models. Steps are as large as the memory for copies allows (see
``_steps``). With *donation*, each array of the source is deleted after the last step that uses it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    may_wrap,
    named_arrays,
    selected,
)
from ..checkpoint.safetensors import WEIGHTS
from ..checkpoint.tensor_files import Region
from ..checkpoint.tensor_layouts import Placement, boxes
from ..checkpoint.tensor_matching import fill_by_rules
from ..checkpoint.tensor_rules import Rule, read_rules
from ..core.bounded import make_room
from ..core.constrain import is_shardable, sharding_of
from ..core.fingerprint import fingerprint_of
from ..core.flatten import Flat
from ..core.guard.known import flatten_known
from ..core.interrupts import signals_deferred
from ..core.memory import main_memory
from ..core.place import finish_on_cpu, obstacle, place_arrays
from ..core.rebuild import rebuild
from ..errors import raise_if_any
from ..specs.fitting import axes_of_type

Array: TypeAlias = jax.Array | np.ndarray[Any, Any]

# The rules if the user gives none: each path is the same in both models.
_SAME: Mapping[str, Rule] = {"(.+)": "{0}"}

# The plans of earlier calls, the newest ones at the end.
_PLANS: dict[Any, _Plan] = {}
_MOST_PLANS = 64

# The bytes of memory that a program may always take.
_SMALL = 2**24

# The bytes of old values that may stay next to the new ones. Few old values are not released first,
# because the allocator of CPUs would return them to the system, and touching new pages takes as
# long as copying.
_MOST_KEPT = 2**28


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

    The models may differ in names, in the layout of arrays, in the mesh and in memory, such as a
    trainer and the server that samples for it. Arrays get their layout and dtype by compiled
    programs on their devices, whose temporary memory is at most that of the largest array or 16
    MiB. Arrays that go to other devices or memories are then moved there as by ``place``, in steps
    of at most the largest array, a sixteenth of all bytes, or 16 MiB, whichever is most. The
    programs are reused when models of these structures and shardings are passed again.

    An error leaves the target as it was. Once all programs are compiled, and what NumPy arrays
    become is there, its old values are released if they have more than 256 MiB, so that each device
    has the new ones only.

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
        copy is handed over, if no other array of the target needs it.

    Returns:
      ``target``, with arrays outside of modules and Variables in new containers.

    Raises:
      CheckpointError: arrays of either model are left, or have other shapes or dtypes, all in one
        message.
      ValueError: rules cannot be understood, ``only`` selects nothing, or arrays cannot be moved.
        If the memory of devices is exhausted, ``target`` may be left without values.

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
    flat_source, flat_target = flatten_known(source), flatten_known(target)
    plan = _cached_plan(flat_source, flat_target, rules, reverse, cast, only, donate)
    # NumPy builds its arrays now and not in the steps, because everything that a user's mistake can
    # make fail comes before the target loses its values.
    on_host = [_build_on_host(step, flat_source.leaves) for step in plan.steps]
    # Signals are deferred only if old values are deleted, because otherwise a signal loses nothing,
    # and to defer signals takes 70 µs.
    deletes_nothing = not (donate or plan.releases_first)
    with contextlib.nullcontext() if deletes_nothing else signals_deferred():
        if plan.releases_first:
            # `flat_target` is assigned, so that this function does not keep the old values alive.
            flat_target = _without_values(flat_target, plan.steps)
        return _run(plan.steps, on_host, flat_source.leaves, flat_target, donate)


def _cached_plan(
    source: Flat,
    target: Flat,
    rules: Mapping[str, Rule] | None,
    reverse: bool,
    cast: bool,
    only: Any,
    donate: bool,
) -> _Plan:
    """Returns the plan of an earlier call with equal arguments, or else a new one, and keeps it.

    The arguments are those of :func:`_plan`; ``rules`` is None if the paths are the same.
    """
    options = reverse, cast, only, donate
    key = _plan_key(source, target, rules, *options)
    try:
        plan = None if key is None else _PLANS.get(key)
    except TypeError:  # the key is not hashable (a filter may be a list): each call makes a plan
        key = plan = None
    if plan is None:
        plan = _plan(source, target, _SAME if rules is None else rules, *options)
        if key is not None:
            _PLANS[key] = plan
            make_room(_PLANS, _MOST_PLANS)  # removes the oldest plans
    return plan


def _plan_key(
    source: Flat, target: Flat, rules: Mapping[str, Rule] | None, *options: Any
) -> tuple[Any, ...] | None:
    """Returns all that a plan depends on, as a key; None if the plan must not be used again.

    The key has no values of arrays, because no plan reads them.
    """
    *_, only, _ = options
    # A filter of the user may read something that changes later, such as a list of names. The
    # fingerprint is None if it cannot tell whether that has changed.
    read_by_filter = () if only is WEIGHTS else fingerprint_of([only])
    if read_by_filter is None:
        return None
    table = None  # differs from an empty table: the paths are the same in both models
    if rules is not None:
        table = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in rules.items())
    signatures = [tuple(map(_signature, flat.leaves)) for flat in (source, target)]
    return source.structure, target.structure, *signatures, table, *options, read_by_filter


# The attributes of an array that decide how it is moved.
_SIGNATURE_NAMES = "shape", "dtype", "weak_type", "sharding", "committed"
_signature_of_array = operator.attrgetter(*_SIGNATURE_NAMES)


def _signature(leaf: Any) -> tuple[Any, ...]:
    """Returns the properties of an array on which a plan depends."""
    if type(leaf) is _compat.ArrayImpl:  # has all of these attributes
        signature: tuple[Any, ...] = _signature_of_array(leaf)
        return signature
    return type(leaf), *(getattr(leaf, name, None) for name in _SIGNATURE_NAMES)


class _Goal(NamedTuple):
    """One array of the target, and how it is made.

    Without ``build``, the source is moved as it is. With ``build``, a program builds the array on
    the devices of the sources; NumPy builds it if the sources or the array are on the host.
    """

    array: NamedArray  # abstract, with the shape, dtype and slot in the target
    sources: tuple[int, ...]  # the slots of the arrays of the source from which it is built
    # Makes the array from its sources; None if it equals its only source.
    build: Callable[..., Array] | None
    sharding: Sharding | None  # the sharding in the target; None for a NumPy array
    # The sharding in the program; None if the compiler chooses it, or NumPy builds the array.
    built_as: Sharding | None

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes, each element counted once."""
        return array_bytes(self.array.leaf.shape, self.array.leaf.dtype)

    @property
    def is_final(self) -> bool:
        """Whether a program would put the array where it belongs; False for a NumPy array."""
        return self.sharding is not None and bool(self.built_as == self.sharding)

    def make(self, sources: Sequence[Array]) -> Array:
        """Returns the array: its only source as it is, or what ``build`` makes of the sources."""
        return sources[0] if self.build is None else self.build(*sources)


class _Step(NamedTuple):
    """Some arrays of the target, which are moved together."""

    goals: Sequence[_Goal]
    slots: Sequence[int] = ()  # the slots in the source of the program's arguments
    # The compiled program, which returns the arrays of the goals. None if the arrays are sources as
    # they are, or NumPy builds them.
    program: Callable[..., list[jax.Array]] | None = None
    is_final: bool = False  # whether the program puts all arrays where they belong
    is_direct: bool = False  # whether the program takes the sources as they are (`_arguments`)


class _Plan(NamedTuple):
    """All that two models with given shapes, dtypes and shardings need; it has no arrays."""

    steps: Sequence[_Step]
    releases_first: bool  # whether old values of the target are deleted before the new are made


def _build_on_host(step: _Step, source: Sequence[Any]) -> list[Any]:
    """Returns the arrays that a step without a program moves, one for each of its goals.

    They are sources as they are, or arrays that NumPy builds of them. The list is empty for a step
    with a program.
    """
    if step.program is not None:
        return []
    # `make` computes nothing on devices here, because a goal with `build` is in a step without a
    # program only if its sources are on the host.
    return [goal.make([source[slot] for slot in goal.sources]) for goal in step.goals]


def _without_values(target: Flat, steps: Sequence[_Step]) -> Flat:
    """Gives the user's target abstract arrays, so that nothing refers to its old values any more.

    Only arrays that the steps fill become abstract. Returns the target as it is then. An error
    after this leaves the user's model without these values.
    """
    leaves = list(target.leaves)
    for step in steps:
        for goal in step.goals:
            # Only arrays on devices are released, because only the memory of devices is short.
            # Abstract arrays have no values to release.
            if isinstance(leaves[goal.array.slot], jax.Array):
                leaves[goal.array.slot] = goal.array.leaf  # a `jax.ShapeDtypeStruct`
    rebuild(target, leaves, "transfer")  # writes `leaves` into the user's modules and Variables
    return target._replace(leaves=leaves)


def _run(
    steps: Sequence[_Step],
    on_host: Sequence[list[Any]],
    source: Sequence[Any],
    target: Flat,
    donate: bool,
) -> Any:
    """Moves the arrays of the source into the target, and returns the user's target.

    Args:
      on_host: for each step without a program, the arrays that it moves; else an empty list.
      donate: whether to delete each array of the source once no step needs it.
    """
    donation = _Donation(steps, source) if donate else None
    leaves, moved = list(target.leaves), list[Any]()
    for step, arrays in zip(steps, on_host, strict=True):
        reusable = donation.reusable(step) if donation else ()
        new = _run_step(step, arrays, source, reusable)
        if donation or len(steps) > 1:
            # This step has to end first for two reasons. With donation, no computation may still
            # read the arrays that are freed below. And the next step would take memory while this
            # one still has its temporary arrays.
            jax.block_until_ready(new)
        moved += new
        for goal, x in zip(step.goals, new, strict=True):
            leaves[goal.array.slot] = x
        if donation:
            donation.free(step, new)
    # `rebuild` calls `finish` before it changes the target. Devices compute asynchronously, so a
    # computation that fails has to fail while the target is still as it was.
    finish = functools.partial(jax.block_until_ready, moved)
    return rebuild(target, leaves, "transfer", finish=finish)


class _Donation:
    """Counts how often the target needs each array of the source, to reuse or delete arrays.

    Arrays are told apart by their ids, which stay valid because ``source`` keeps the arrays alive.
    An array may be in several slots of the source, and several arrays of the target may be made of
    it.

    Attributes:
      source: the arrays of the source, by slot.
      total: id of an array → the number of its uses in all steps.
      pending: id of an array → the number of its uses in steps that did not run yet.
    """

    def __init__(self, steps: Sequence[_Step], source: Sequence[Any]) -> None:
        """Counts the uses of arrays."""
        self.source = source
        used = [x for step in steps for x in self._sources_of(step)]
        self.total = Counter(map(id, used))
        self.pending = self.total.copy()  # `free` subtracts the uses of each step that ran

    def _sources_of(self, step: _Step) -> list[Any]:
        """Returns the sources of a step's goals; a source of several goals is returned as often."""
        return [self.source[slot] for goal in step.goals for slot in goal.sources]

    def reusable(self, step: _Step) -> set[int]:
        """Returns the ids of sources that may become arrays of the target without a copy.

        These are the sources that are used once in all steps. If a source is used twice, the target
        gets two copies, so that a later donation of one copy leaves the other.
        """
        return {id(x) for x in self._sources_of(step) if self.total[id(x)] == 1}

    def free(self, step: _Step, new: Sequence[Any]) -> None:
        """Deletes the sources of a step that ran, except those that a later step or the target has.

        Args:
          new: the arrays that the target got from the step.
        """
        used, kept = self._sources_of(step), set(map(id, new))
        self.pending.subtract(map(id, used))
        for x in used:  # a source may occur twice; to delete it again does nothing
            if isinstance(x, jax.Array) and not self.pending[id(x)] and id(x) not in kept:
                x.delete()


def _run_step(
    step: _Step, on_host: Sequence[Any], source: Sequence[Any], reusable: Collection[int]
) -> list[Any]:
    """Returns the arrays of a step's goals where they belong; devices may still compute them.

    Args:
      on_host: the arrays that the step moves if it has no program.
      reusable: the ids of arrays of the source that the target may get without a copy.
    """
    if step.program is not None and step.is_final:  # nothing has to be moved afterwards
        return step.program(*_arguments(step, source))
    shardings = [goal.sharding for goal in step.goals]
    if step.program is None:
        moved = _copied(on_host, shardings, reusable)
    else:
        computed = step.program(*_arguments(step, source))
        # On CPUs, the program has to end before another one moves arrays, because both might
        # deadlock.
        moved = place_arrays(finish_on_cpu(computed), shardings)
    pairs = zip(moved, shardings, strict=True)
    # If the sharding is None, the target has a NumPy array, and `place_arrays` moved nothing.
    return [np.array(x) if sharding is None else x for x, sharding in pairs]


def _arguments(step: _Step, source: Sequence[Any]) -> list[jax.Array]:
    """Returns the arguments of a program: in main memory, where it computes, on Auto axes."""
    arrays = [source[slot] for slot in step.slots]
    if step.is_direct:  # all arrays are in main memory and on Auto axes already
        return arrays
    fetched = place_arrays(arrays, [main_memory(x.sharding) for x in arrays])
    return list(map(_on_auto_axes, fetched))


def _copied(
    arrays: Sequence[Array], shardings: Sequence[Sharding | None], reusable: Collection[int]
) -> list[Any]:
    """Returns copies of arrays with these shardings, each an array of its own.

    An array that is given several times is copied as often. `place_arrays` would make one copy for
    all, so each round moves every array once.

    Args:
      shardings: the sharding of each copy; None leaves an array as it is.
      reusable: the ids of arrays that need not be copied. Each of them is given once.
    """
    result: list[Any] = list(arrays)
    for round_positions in _rounds(arrays):
        for may_reuse in (False, True):
            positions = [i for i in round_positions if (id(arrays[i]) in reusable) is may_reuse]
            if not positions:
                continue
            old, wanted = [arrays[i] for i in positions], [shardings[i] for i in positions]
            # With `donate`, arrays that have their sharding already are returned as they are.
            # Without `donate` and `alias`, they are copied.
            new = place_arrays(old, wanted, donate=may_reuse, alias=False)
            for i, x in zip(positions, new, strict=True):
                result[i] = x
    return result


def _rounds(arrays: Sequence[Array]) -> list[list[int]]:
    """Splits positions into rounds with every array at most once: (a, b, a) → [[0, 1], [2]]."""
    rounds: list[list[int]] = []
    count_by_id = Counter[int]()
    for position, x in enumerate(arrays):
        round_number = count_by_id[id(x)]
        count_by_id[id(x)] += 1
        if round_number == len(rounds):
            rounds.append([])
        rounds[round_number].append(position)
    return rounds


def _plan(
    source: Flat,
    target: Flat,
    rules: Mapping[str, Rule],
    reverse: bool,
    cast: bool,
    only: Any,
    donate: bool,
) -> _Plan:
    """Returns the plan by which the arrays of one model are moved into those of another.

    Args:
      rules: for each array of the source, the array of the target to which it belongs. With
        ``reverse``, rules lead from the target to the source, as rules for saving do.
      reverse: see ``rules``.
      cast: whether to convert arrays of another dtype.
      only: the NNX filter that selects arrays of both models.
      donate: whether the source gives its arrays up.

    Raises:
      CheckpointError: arrays are left over, or do not fit.
      ValueError: arrays cannot be moved, for example to devices of other processes.
    """
    sources = _arrays_by_path(source, only)
    targets = _arrays_by_path(target, only)
    # Rules lead from the paths of one model to the paths of the other. Usually they lead from the
    # source to the target, as rules for loading lead from the names of tensors in a file. With
    # `reverse` they lead from the target to the source, as rules for saving do, and the source
    # still fills the target.
    if reverse:
        named_by_rules, reached_by_rules, reached_model = targets, sources, source
    else:
        named_by_rules, reached_by_rules, reached_model = sources, targets, target
    # The path of each array of the target is mapped to the sources that fill it. Each source is a
    # pair of a placement (the part of the array that it fills, and the layout) and its path.
    filled_by = fill_by_rules(
        "transfer: the source does not fit the target.",
        read_rules("transfer", rules),
        tensors={path: array.leaf for path, array in named_by_rules.items()},
        arrays={path: array.leaf for path, array in reached_by_rules.items()},
        # All arrays count here, because a rule may name an array that `only` leaves out.
        everything={array.path for array in named_arrays(reached_model)},
        cast=cast,
        reverse=reverse,
        nouns=("source", "array"),  # errors speak of sources and arrays, not of tensors
    )
    goals, obstacles = [], []
    for path, pairs in filled_by.items():
        used = [sources[source_path] for _, source_path in pairs]
        placements = [placement for placement, _ in pairs]
        goal = _goal(targets[path], used, placements)
        goals.append(goal)
        distinct = dict.fromkeys(_obstacles(used, goal, placements))
        obstacles += [f"  {path}: {obstacle}" for obstacle in distinct]
    raise_if_any(ValueError, "transfer: these arrays cannot be moved:", obstacles)
    # Few old values stay until the new ones are there. Many are released first, because they may
    # not fit into memory next to the new ones.
    releases_first = sum(goal.nbytes for goal in goals) > _MOST_KEPT
    return _Plan(_steps(goals, source.leaves, donate), releases_first)


def _arrays_by_path(model: Flat, only: Any) -> dict[str, NamedArray]:
    """Returns the arrays of a flattened model that the filter ``only`` selects, by path."""
    chosen = selected("transfer", named_arrays(model), only, is_shardable, "arrays")
    return {array.path: array for array in chosen}


def _goal(
    target: NamedArray, sources: Sequence[NamedArray], placements: Sequence[Placement]
) -> _Goal:
    """Returns the goal for an array of the target: how it is made of its sources.

    Args:
      sources: the arrays of the source from which it is made.
      placements: for each source, the part of the target that it fills, and the layout.
    """
    leaf, first = target.leaf, sources[0].leaf
    sharding = _target_sharding(leaf)
    is_weak = _is_weak(leaf)
    abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_weak)
    array = target._replace(leaf=abstract, variable=None)  # plans keep no model alive
    slots = tuple(x.slot for x in sources)
    build: Callable[..., Array] | None = functools.partial(
        _built, tuple(placements), leaf.shape, leaf.dtype, is_weak
    )
    # The array equals its source if one source fills it as it is, in the same dtype.
    has_type_of_source = (first.dtype, _is_weak(first)) == (leaf.dtype, is_weak)
    is_source = placements[0].is_identity and has_type_of_source
    if sharding is None or not isinstance(first, jax.Array) or _devices(first) is None:
        # There is no sharding for a program, because no program computes to or from the host. An
        # abstract source without devices is safe here, because `_obstacles` refuses it.
        return _Goal(array, slots, None if is_source else build, sharding, built_as=None)
    built_as = _sharding_in_program(first, sharding)
    if is_source:
        # `place_arrays` moves the array without a program if the devices of the source have the
        # parts that the devices of the target need. Otherwise a program exchanges parts before.
        has_parts = built_as is None or built_as.is_equivalent_to(
            main_memory(first.sharding), first.ndim
        )
        if has_parts or _has_parts_on_host(first):
            build = None
    return _Goal(array, slots, build, sharding, built_as)


def _is_weak(leaf: Any) -> bool:
    """Whether an array, perhaps abstract or on the host, has a weak type."""
    return bool(getattr(leaf, "weak_type", False))


def _sharding_in_program(source: jax.Array, target: Sharding) -> Sharding | None:
    """Returns the sharding of an array that a program builds on the devices of a source.

    If these are the devices of the target, the array has the sharding of the target. On other
    devices, each device gets the part that one device of the target needs, so that the part is only
    copied from device to device.

    Returns:
      The sharding. None if the compiler chooses it: if no sharding gives these devices the same
      parts, or if they are CPUs, where `place_arrays` cuts and joins parts of any sharding.
    """
    devices: Any = _devices(source)
    if devices == _compat.device_assignment(target):
        in_program: Sharding = main_memory(target)  # programs compute in no other memory
        return in_program
    return None if _has_parts_on_host(source) else _with_same_parts(target, devices)


def _has_parts_on_host(array: jax.Array) -> bool:
    """Whether ``place_arrays`` joins parts of an array quicker than a program exchanges them."""
    device: Any = next(iter(array.sharding.device_set))
    return device.platform == "cpu" and array.is_fully_addressable


def _target_sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding that an array of the target has or gets; None for a NumPy array."""
    if isinstance(leaf, np.ndarray | np.generic):
        return None
    sharding = sharding_of(leaf)
    sharding = sharding.sharding if isinstance(sharding, Format) else sharding
    # An abstract array without a sharding goes where JAX puts new arrays.
    return sharding or SingleDeviceSharding(jax.local_devices()[0])


def _built(
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: np.dtype[Any],
    is_weak: bool,
    *arrays: Array,
) -> Array:
    """Builds an array of the target from its sources.

    Sources on the host are NumPy arrays, and so is the result. Other sources are tracers of the
    program that builds the array.

    Args:
      placements: for each source, the part of the array that it fills, and the layout.
      shape: the shape of the array.
      is_weak: whether the array has a weak type.
    """
    if isinstance(arrays[0], np.ndarray):  # all sources are on the host (`_obstacles`)
        return _assembled(arrays, placements, np).reshape(shape).astype(dtype)
    sources = [
        _with_barriers(source, placement, dtype, is_weak)
        for source, placement in zip(arrays, placements, strict=True)
    ]
    array: Any = _assembled(sources, placements, jnp).reshape(shape)
    if array.dtype == dtype and not is_weak:
        return array  # type: ignore[no-any-return]
    return _compat.converted(array, dtype, is_weak)


def _assembled(sources: Sequence[Any], placements: Sequence[Placement], numpy: ModuleType) -> Array:
    """Joins the parts of an array that sources fill.

    The result may have more dimensions than the array; the caller merges them by ``reshape``. If
    sources are placed along named axes, as by Tensor("…", "in (head out) -> …"), the result has a
    dimension for each axis.

    Args:
      placements: for each source, the part that it fills, and the layout.
      numpy: the module that joins, of NumPy or JAX.
    """
    regions = boxes(placements)  # for each part, (start, end) in each dimension
    assert regions is not None  # safe, because `_obstacles` refuses placements without regions
    pieces = []
    for source, placement, region in zip(sources, placements, regions, strict=True):
        part = placement.arranged(source)  # sliced, with the axes in the order of the target
        pieces.append((region, part.reshape([end - start for start, end in region])))
    return _joined(pieces, 0, numpy)


def _with_barriers(source: Any, placement: Placement, dtype: np.dtype[Any], is_weak: bool) -> Any:
    """Returns a source with barriers against a slow choice and a failure of the compiler.

    A conversion to a smaller dtype comes first, so that fewer bytes are sent. It gets a barrier,
    because the compiler may otherwise move the conversion behind the exchange.

    A source that is sliced gets a barrier, because the compiler otherwise fails if slices of one
    array get different shardings.
    """
    if dtype.itemsize < source.dtype.itemsize:
        source = jax.lax.optimization_barrier(_compat.converted(source, dtype, is_weak))
    if any(axis.length != axis.tensor_size for axis in placement.axes.values()):
        source = jax.lax.optimization_barrier(source)
    return source


def _joined(pieces: Sequence[tuple[Region, Array]], dimension: int, numpy: ModuleType) -> Array:
    """Joins pieces that fill an array, from this dimension on.

    The edges of all pieces cut the dimension into slabs. A piece that is in a slab reaches from one
    side of it to the other, so each slab is joined along the next dimension only::

        ┌─────┬───┐        ┌─────┬───┐    along dimension 0, the edges of a, b and c give two
        │  a  │   │        │  a  │   │    slabs; both have a part of b
        ├─────┤ b │   →    ├─────┼───┤
        │  c  │   │        │  c  │   │
        └─────┴───┘        └─────┴───┘

    Args:
      pieces: pairs of a region, (start, end) in each dimension, and the array that fills it.
      dimension: the dimension; along earlier ones, all pieces have the same extent.
      numpy: the module that joins, of NumPy or JAX.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    edges = sorted({edge for region, _ in pieces for edge in region[dimension]})
    earlier, slabs = (slice(None),) * dimension, []
    for start, end in itertools.pairwise(edges):
        slab_pieces = []
        for region, x in pieces:
            piece_start, piece_end = region[dimension]
            if piece_start <= start and end <= piece_end:
                slab_slice = slice(start - piece_start, end - piece_start)
                slab_pieces.append((region, x[(*earlier, slab_slice)]))
        slabs.append(_joined(slab_pieces, dimension + 1, numpy))
    joined: Array = numpy.concatenate(slabs, dimension)
    return joined


def _obstacles(
    sources: Sequence[NamedArray], goal: _Goal, placements: Sequence[Placement]
) -> Iterator[str]:
    """Yields each reason why sources with these placements cannot become the array of a goal."""
    if boxes(placements) is None:  # `_assembled` joins one piece of each source
        names = ", ".join(source.path for source in sources)
        yield f"its rules name different axes for {names}; name the same axes, of the same sizes"
    leaves = [x.leaf for x in sources]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        yield "the source is abstract, without values"
        return
    if len({_devices(leaf) for leaf in leaves}) > 1:
        yield "its sources are on different devices; place them on the same ones"
    for leaf in leaves:
        # An array that becomes a NumPy array has to be readable by this process. This is the case
        # if it could become an array on one of the process's devices.
        place = goal.sharding or SingleDeviceSharding(jax.local_devices()[0])
        if problem := obstacle(leaf, place):
            yield problem
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
    """Groups arrays into steps: one for all on the same devices, or several to limit memory.

    Args:
      donate: whether the source gives its arrays up.
    """
    largest, total = max(goal.nbytes for goal in goals), sum(goal.nbytes for goal in goals)
    # A step may always take the bytes of the largest array, and 16 MiB. It may also take a
    # sixteenth of all bytes, so that many small arrays need about 16 steps at most.
    most_bytes = max(largest, total // 16, _SMALL)
    steps: list[_Step] = []
    for devices, batch in _batches(goals, leaves, donate, most_bytes):
        if devices is None:
            steps.append(_Step(batch))
        else:
            steps += _programs(batch, leaves, largest)
    return steps


def _batches(
    goals: Sequence[_Goal], leaves: Sequence[Any], donate: bool, most_bytes: int
) -> Iterator[tuple[Any, list[_Goal]]]:
    """Splits arrays into batches of arrays that the same devices build and that may be in one step.

    Args:
      donate: whether the source gives its arrays up.
      most_bytes: the bytes of a batch in which arrays are freed after the step.

    Yields:
      The devices of the program that builds the arrays, None if there is no program; and the
      arrays.
    """
    # Goals of one kind, (devices of the program, whether its results are final), are in the same
    # batches. A step either moves all arrays that it builds or none, so the kind says whether
    # results are final.
    batches_by_kind: dict[tuple[Any, bool], list[list[_Goal]]] = {}
    for goal in goals:
        # All sources of a goal are on the same devices (`_obstacles`).
        devices = None if goal.build is None else _devices(leaves[goal.sources[0]])
        batches = batches_by_kind.setdefault((devices, goal.is_final), [[]])
        # Small steps save memory only if arrays are freed after each step: donated sources, or
        # arrays that a program built and that were then moved. Other steps have no limit.
        is_moved_after_program = goal.build is not None and not goal.is_final
        limit = most_bytes if donate or is_moved_after_program else math.inf
        batch_bytes = sum(other.nbytes for other in batches[-1])
        if batches[-1] and batch_bytes + goal.nbytes > limit:
            batches.append([])
        batches[-1].append(goal)
    for (devices, _), batches in batches_by_kind.items():
        for batch in batches:
            yield devices, batch


def _programs(goals: Sequence[_Goal], leaves: Sequence[Any], largest: int) -> list[_Step]:
    """Compiles programs that build some arrays, and returns a step for each program.

    A program whose temporary memory exceeds the largest array and 16 MiB is compiled as two
    programs, each for half of the arrays. A program of one array may take any memory.

    Args:
      goals: the arrays, whose sources are on the same devices.
      largest: the bytes of the largest array of the target.
    """
    slots = sorted({slot for goal in goals for slot in goal.sources})
    inputs = [_abstract_argument(leaves[slot]) for slot in slots]

    def make(*arrays: Any) -> list[Any]:
        array_of_slot = dict(zip(slots, arrays, strict=True))
        return [goal.make([array_of_slot[slot] for slot in goal.sources]) for goal in goals]

    shardings = [goal.built_as for goal in goals]
    compiled: Any = jax.jit(make, out_shardings=shardings).lower(*inputs).compile()
    memory = compiled.memory_analysis()  # None on platforms that do not report memory
    if len(goals) > 1 and memory and memory.temp_size_in_bytes > max(largest, _SMALL):
        halves = goals[: len(goals) // 2], goals[len(goals) // 2 :]
        return [step for half in halves for step in _programs(half, leaves, largest)]
    is_direct = all(map(_is_direct, (leaves[slot] for slot in slots)))
    is_final = all(goal.is_final for goal in goals)
    return [_Step(goals, slots, compiled, is_final=is_final, is_direct=is_direct)]


def _is_direct(x: jax.Array) -> bool:
    """Whether a program takes an array as it is.

    A plan may keep the answer, because the signature of an array determines it.
    """
    sharding = main_memory(x.sharding)
    is_in_main_memory = getattr(x, "committed", False) and sharding is x.sharding
    return is_in_main_memory and _on_auto_axes(x) is x


def _abstract_argument(x: jax.Array) -> Any:
    """Returns the type of an argument of a program, as ``_arguments`` passes it."""
    sharding = main_memory(x.sharding)
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)
    return _on_auto_axes(abstract)


def _on_auto_axes(x: Any) -> Any:
    """Returns an array of the same buffers, or a type, on a mesh whose axes are Auto.

    The axes are Auto, because on Explicit axes JAX refuses operations with an ambiguous sharding,
    such as reshapes. An array without Explicit axes is returned as it is.
    """
    mesh = getattr(x.sharding, "mesh", None)
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return x
    auto = NamedSharding(Mesh(mesh.devices, mesh.axis_names), x.sharding.spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=auto)
    # The array is made of its buffers, because `device_put` might copy. JAX needs only the buffers
    # of this process.
    buffers = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, auto, buffers)


def _with_same_parts(sharding: Sharding, devices: Sequence[Any]) -> NamedSharding | None:
    """Returns a sharding on other devices, which gives them the same parts as a target's sharding.

    A target of 2 devices has parts a and b. On 4 devices the parts are a, a, b and b, because a new
    last mesh axis replicates each part. The result is None if the number of devices is no multiple
    of the target's number, or if its sharding has no mesh.

    Args:
      devices: the devices of the source, in their order.
    """
    if not isinstance(sharding, NamedSharding) or len(devices) % sharding.mesh.size:
        return None
    grid = np.array(devices).reshape(*sharding.mesh.devices.shape, -1)
    return NamedSharding(Mesh(grid, (*sharding.mesh.axis_names, "_copies")), sharding.spec)
