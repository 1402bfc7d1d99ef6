"""Pipeline parallelism: the layers of a ``Stack`` on stages, through which microbatches pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..activations.variables import modules_in
from ..core.flatten import Flat
from ..core.resharding import mesh_here
from ..core.structure import VariableEntry
from ..core.unflatten import perform, update
from ..errors import raise_listed
from ..specs.activation_sharding import InOutSharding
from ..specs.filters import Paths
from ..specs.fitting import axes_of_type, padded, spec_axes, with_entries
from ..specs.paths import Path, accessor
from ..specs.state_sharding import StateSharding
from ..transforms.batching import Carry, vmap
from ..transforms.in_trace import replaced
from ..transforms.loops import scan
from ..transforms.recompute import remat
from ..transforms.stacking import _OPTIONS, Stack, _built, _flat, _loop_of_calls, _name_axis
from .optimizer import with_optimizer
from .strategies import activations_of, base_specs, mesh_and_axis
from .variables import variables


def idle_share(stages: int, microbatches: int, repeats: int = 1) -> float:
    """The share of the time in which a stage of a pipeline has nothing to compute.

    Args:
      stages: the number of stages, S.
      microbatches: the number of microbatches, M.
      repeats: how often each microbatch passes through all stages, R.

    Returns:
      ``(S - 1) / (R·M + S - 1)``.

    Example:
      >>> from nnx_sharding.partition import idle_share
      >>> idle_share(4, 12), idle_share(4, 12, repeats=3)
      (0.2, 0.07692307692307693)

    From GPipe (Huang et al., 2019, arXiv:1811.06965), and, with repeats, Megatron-LM (Narayanan et
    al., 2021, arXiv:2104.04473).
    """
    return (stages - 1) / (repeats * microbatches + stages - 1)


@_compat.api_boundary
def pipeline(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
    axis: str = "stage",
    microbatches: int = 8,
    repeats: int = 1,
    across_slices: bool = True,
) -> StateSharding:
    """Pipeline parallelism: each stage holds and runs some layers of the model's ``Stack``.

    In each call of a :class:`~nnx_sharding.Stack` within ``jit``, the batch passes through the
    stages in microbatches, each of which is one slice of every so many rows (``x[i::microbatches]``
    is the i-th). Layers run as if the stack were called with each microbatch in turn: so random
    streams advance, dropout draws, and ``BatchNorm`` normalizes within a microbatch. What is
    outside of the stack runs on all stages alike. What layers sow cannot be captured.
    :meth:`Stack.scan <nnx_sharding.Stack.scan>` is no pipeline: it gathers layers on Auto axes, and
    JAX refuses it on Explicit ones.

    All arrays that a layer gets from the previous one are split along their first dimension, the
    rows. Further arguments are the same for all rows; masks or positions of single rows belong to
    what is passed on from layer to layer, as in ``x, mask = blocks((x, mask))``.

    If the stack has ``remat=True``, only the inputs of a stage are kept for the backward pass.
    Another policy applies to each layer, as without a pipeline.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not, with at least one ``Stack``.
      mesh: the mesh; None for the one in context.
      optimizer: as for :func:`fsdp`.
      base: shardings to start from, such as those of :func:`fsdp` or :func:`tensor_parallel` over
        other axes.
      axis: the mesh axis of the stages.
      microbatches: the number of microbatches; it divides the batch.
      repeats: how often a microbatch passes through all stages (the circular schedule). A stage
        then has ``repeats`` groups of successive layers, which takes less idle time
        (:func:`idle_share`); but layers are stored in order, so each step moves them once to the
        stages that run them, and their gradients back.
      across_slices: whether the axis may have devices of several TPU slices.

    Returns:
      The spec of each path, with the layers of stacks sharded over the axis.

    Raises:
      ValueError: the model has no ``Stack``, layers share Variables, or the axis times ``repeats``
        does not divide their number; ``base`` or the ``Stack`` has ``prefetch=1``. In a call within
        ``jit``: the microbatches do not divide the batch, or there are fewer than stages for
        ``repeats``.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh
      >>> from nnx_sharding import stack
      >>> from nnx_sharding.partition import pipeline
      >>> blocks = stack(nnx.Linear, 8, 4, 4, rngs=nnx.Rngs(0))
      >>> sharding = pipeline(blocks, mesh=AbstractMesh((4,), ("stage",)))
      >>> sharding.map_prefix(("layers", "kernel"), blocks.layers.kernel)
      P('stage', None, None)

    The schedule is GPipe (Huang et al., 2019, arXiv:1811.06965), written like that of GSPMD (Xu et
    al., 2021, arXiv:2105.04663, section 3.3).
    """
    mesh, axis = mesh_and_axis("pipeline", mesh, axis, across_slices=across_slices)
    counts = {"microbatches": microbatches, "repeats": repeats}
    wrong = [f"  {name}={x!r}" for name, x in counts.items() if type(x) is not int or x < 1]
    raise_listed(ValueError, "pipeline: expected positive integers, got:", wrong)
    schedule = Schedule(axis, mesh.shape[axis], microbatches, repeats)
    stacks, activations = _stacks(model, schedule), activations_of(base)
    if activations.prefetch or any(stack.prefetch for stack in stacks.values()):
        raise ValueError(_NOT_AHEAD)
    specs, lines = base_specs("pipeline", model, base, mesh), list[str]()
    for each in variables(model):
        if _is_stacked(each.path, stacks):
            spec, rank = specs[each.path], len(each.shape or ())
            used = spec_axes(spec) if isinstance(spec, PartitionSpec) else [axis]
            if axis in used or spec.partitions[:1] not in ((), (None,)):
                lines.append(f"  {each.name}: {spec}")
            else:
                specs[each.path] = with_entries(spec, [axis, *padded(spec, rank)[1:]])
    raise_listed(
        ValueError,
        f"pipeline: specs of base shard layers, or use {axis!r}, in:",
        lines,
        "Leave the first dimension and this axis to the pipeline, in specs without a mesh.",
    )
    entry = {Paths(stacks): InOutSharding(schedule=schedule)}
    return with_optimizer(specs, model, optimizer, activations.extended(entry))


def _stacks(model: Any, schedule: Schedule) -> dict[Path, Stack]:
    """The outermost stacks of a model by path, checked."""
    stacks = dict[Path, Stack]()
    for path, module in modules_in(model):
        if isinstance(module, Stack) and not _is_stacked(path, stacks):
            stacks[path] = module
    if not stacks:
        raise ValueError(
            "pipeline: the model has no Stack. Make one of its equal blocks: stack(blocks), or "
            "stack(Block, 24, rngs=rngs)."
        )
    groups = schedule.stages * schedule.repeats
    raise_listed(
        ValueError,
        f"pipeline: {schedule.stages} stages along {schedule.axis!r} times {schedule.repeats} "
        "repeats do not divide the number of layers:",
        [
            f"  {accessor('model', path)}: {stack.length} layers"
            for path, stack in stacks.items()
            if stack.length % groups
        ],
        "Choose a number of layers that they divide, or another mesh.",
    )
    raise_listed(
        ValueError,
        "pipeline: all layers share these Variables, which would be on several stages:",
        [
            f"  {each.name}"
            for each in variables(model)
            if isinstance(each.variable, nnx.Variable)
            for path, stack in stacks.items()
            if each.path[: len(path) + 1] == (*path, "layers")
            and each.path[len(path) + 1 :] in stack.shared
        ],
        "Give each layer its own, or pass their values as an argument of the layers.",
    )
    return stacks


def _is_stacked(path: Path, stacks: Mapping[Path, Stack]) -> bool:
    """Whether a path is to something with a dimension for the layers of a stack."""
    return any(
        path[: len(outer) + 1] == (*outer, "layers") and path[len(outer) + 1 :] not in stack.shared
        for outer, stack in stacks.items()
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Runs a ``Stack`` in stages over a mesh axis.

    At tick t, stage s computes item t - s, if there is one: item i is microbatch i mod M in repeat
    i div M. After each tick, the results move on to the next stage, and those of the last one to
    the first, which keeps them in place of the microbatches that it has read, as inputs of the next
    repeat and as outputs.
    """

    axis: str
    stages: int
    microbatches: int
    repeats: int

    @property
    def ticks(self) -> int:
        """How often a stage computes, or waits."""
        return self.repeats * self.microbatches + self.stages - 1

    def of(
        self,
        module: Any,
        _: Callable[..., Any],
        mesh: Any,
        batch_axes: Sequence[Any],
        prefetch: bool,
    ) -> Callable[..., Any]:
        """What is called in place of a stack."""
        if prefetch or module.prefetch:
            raise ValueError(_NOT_AHEAD)
        rows = tuple(axis for axis in batch_axes if axis != self.axis)

        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            here = mesh_here(mesh)
            if axes_of_type(here, AxisType.Explicit):
                raise ValueError(
                    "pipeline: a Stack that is declared to run with Explicit axes cannot be a "
                    "pipeline. Leave it and its layers out of activation_shardings, or use Auto "
                    "axes."
                )
            self._check(module, x, (args, kwargs))
            return self._run(module, x, args, kwargs, here, rows)

        return call

    def _check(self, stack: Stack, x: Any, further: Any) -> None:
        """Refuses what cannot be split into microbatches."""
        count = self.microbatches
        if self.repeats > 1 and count < self.stages:
            raise ValueError(
                f"pipeline: microbatches={count} is less than the {self.stages} stages; with "
                "repeats, the last stage would not be done when the first one goes on."
            )
        if any(hasattr(inner, _compat.CAPTURES) for _, inner in modules_in(stack)):
            raise ValueError(
                "pipeline: nnx.capture has no order for what layers of a pipeline sow. Capture "
                "without the pipeline, or from modules outside of the Stack; or return the values "
                "from layer to layer, with a dimension for the rows."
            )
        leaves, _ = jax.tree_util.tree_flatten_with_path(x)
        shapes = {jax.tree_util.keystr(keys): jnp.shape(leaf) for keys, leaf in leaves}
        batch = next((shape[0] for shape in shapes.values() if shape), 0)
        raise_listed(
            ValueError,
            f"pipeline: {count} microbatches cannot be made of the inputs of the layers:",
            [
                f"  x{where}: shape {shape}"
                for where, shape in shapes.items()
                if not shape or shape[0] != batch or not batch or batch % count
            ],
            "All need the same number of rows, which the microbatches divide. Scalars that layers "
            "only read are further arguments, blocks(x, step); those that they change, such as a "
            "loss, need one value for each row.",
        )
        arrays, _ = jax.tree_util.tree_flatten_with_path(further)
        raise_listed(
            ValueError,
            f"pipeline: further arguments of the layers with {batch} rows, as many as the batch:",
            [
                f"  {jax.tree_util.keystr(keys)}: shape {jnp.shape(leaf)}"
                for keys, leaf in arrays
                if isinstance(leaf, jax.Array) and leaf.ndim and leaf.shape[0] == batch > 1
            ],
            "They are the same for all microbatches. Give them a first dimension of 1, or, if they "
            "belong to the rows, pass them on from layer to layer: blocks((x, mask)).",
        )

    def _run(
        self,
        stack: Stack,
        x: Any,
        args: Any,
        kwargs: Any,
        mesh: Any,
        rows: tuple[Any, ...],
    ) -> Any:
        """Calls the layers; ``rows`` are the axes of the batch."""
        stages, count, repeats = self.stages, self.microbatches, self.repeats
        depth = stack.length // (stages * repeats)
        flat = _flat(stack.layers)
        slots = stack._stacked_slots(flat)
        policy = False if stack.remat is True else stack.remat
        run_layers = _loop_of_calls(stack._axes, depth, stack.unroll, policy)
        batch_axes = [rows] if rows else []

        def sharded(x: Any, *entries: Any) -> Any:
            rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1 - len(entries))
            spec = PartitionSpec(self.axis, *entries, *rest)
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        # The gradient of `jnp.roll` would be two permutations.
        to_next = [(i, (i + 1) % stages) for i in range(stages)]
        shift: Any = jax.shard_map(
            lambda x: jax.lax.ppermute(x, self.axis, to_next),
            mesh=mesh,
            in_specs=PartitionSpec(self.axis),
            out_specs=PartitionSpec(self.axis),
            axis_names={self.axis},
        )

        def by_stage(leaf: Any) -> Any:
            groups = leaf.reshape(repeats, stages, depth, *leaf.shape[1:])
            return sharded(jnp.swapaxes(groups, 0, 1))

        def in_order(leaf: Any) -> Any:
            return sharded(jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[3:]))

        def split(leaf: Any) -> Any:  # rows stay on their devices
            parts = jnp.swapaxes(leaf.reshape(-1, count, *leaf.shape[1:]), 0, 1)
            return sharded(jnp.broadcast_to(parts, (stages, *parts.shape)), None, *batch_axes)

        def stage(layers: Any, x: Any, number: Any, tick: Any) -> Any:
            item = tick - number
            repeat = jnp.clip(item // count, 0, repeats - 1)
            whole = _flat(layers)
            own = {slot: _at(whole.leaves[slot], repeat, 0) for slot in slots}
            group = _copy(whole, own, stack, nnx.spmd.remove_axis)
            y = run_layers(group, x, args, kwargs)
            is_active = (item >= 0) & (item < repeats * count)

            def written(slot: int, new: Any) -> Any:
                return _put(whole.leaves[slot], jnp.where(is_active, new, own[slot]), repeat, 0)

            _update(whole, _flat(group), own, written)
            return y

        if stack.remat is True:
            stage = remat(stage, prevent_cse=False, **_GRAPH)
        axes: Any = (stack._axes, 0, 0, None)
        all_stages = vmap(stage, in_axes=axes, spmd_axis_name=self.axis, **_OPTIONS)

        def step(layers: Any, carry: Any, tick: Any) -> Any:
            kept, moving = carry
            numbers = jnp.arange(stages)

            def entered(kept: Any, x: Any) -> Any:
                is_first = numbers.reshape(-1, *[1] * (x.ndim - 1)) == 0
                return sharded(jnp.where(is_first, _at(kept, tick % count, 1), x), *batch_axes)

            def left(kept: Any, x: Any) -> Any:
                done = tick - (stages - 1)
                x = jnp.where(done >= 0, x, _at(kept, done % count, 1))
                return sharded(_put(kept, x, done % count, 1), None, *batch_axes)

            y = all_stages(layers, jax.tree.map(entered, kept, moving), numbers, tick)
            moved = jax.tree.map(lambda x: sharded(shift(x), *batch_axes), y)
            return jax.tree.map(left, kept, moved), moved

        staged = _copy(flat, {s: by_stage(flat.leaves[s]) for s in slots}, stack, nnx.spmd.add_axis)
        before = _flat(staged)
        kept = jax.tree.map(split, x)
        # Stages that wait compute with rows of the batch, as zeros might have no finite gradient.
        carry = kept, jax.tree.map(lambda parts: parts[:, 0], kept)
        ticks = scan(step, in_axes=(None, Carry, 0), out_axes=Carry, **_OPTIONS)
        kept, _ = ticks(staged, carry, jnp.arange(self.ticks))
        old = {slot: before.leaves[slot] for slot in slots}
        _update(flat, _flat(staged), old, lambda _, leaf: in_order(leaf))
        return jax.tree.map(lambda x: jnp.swapaxes(x[0], 0, 1).reshape(-1, *x.shape[3:]), kept)


_NOT_AHEAD = (
    "pipeline: the layers of a stage gather their own parameters, not ahead. Leave out the option "
    "prefetch=1 of base or of the Stack."
)
_GRAPH: Any = {"graph": True, "graph_updates": True}


def _at(x: Any, index: Any, axis: int) -> Any:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def _put(x: Any, part: Any, index: Any, axis: int) -> Any:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, axis)


def _copy(flat: Flat, new: Mapping[int, Any], stack: Stack, change: Callable[..., Any]) -> Any:
    """Layers with other arrays in some slots, and one more or one less dimension in front."""
    layers = _built(flat, new)
    for old, one in zip(flat.objects, _flat(layers).objects, strict=True):
        if _compat.is_node(old) and (tag := _compat.tag_of(old)) is not None:
            _compat.tag_node(one, tag)
    _name_axis(change, layers, stack.shared)
    return layers


def _update(
    flat: Flat, after: Flat, before: Mapping[int, Any], written: Callable[[int, Any], Any]
) -> None:
    """Updates the Variables of ``flat`` from those of a copy that have changed."""
    if after.structure.num_leaves != flat.structure.num_leaves:
        raise ValueError(
            "pipeline: layers may not make Variables while they run in a pipeline, as by sow. "
            "Return the values, with a dimension for the rows: x, loss = blocks((x, loss))."
        )
    new = {
        slot: written(slot, after.leaves[slot])
        for slot, old in before.items()
        if after.leaves[slot] is not old
    }
    structure = flat.structure
    written_to = [
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry)
        if not new.keys().isdisjoint(slots)
    ]
    leaves = replaced(flat.leaves, new, new.values())
    perform(update(structure, leaves, flat.objects, written_to))
