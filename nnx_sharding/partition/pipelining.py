"""Pipeline parallelism: the layers of a ``Stack`` on stages, through which microbatches pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..activations.calls import Tag
from ..activations.tracing import pass_tags
from ..activations.variables import modules_in
from ..core.constrain import mesh_here
from ..core.flatten import Flat
from ..core.structure import VariableEntry
from ..core.unflatten import perform, update
from ..errors import UnshardedWarning, message, raise_listed, warn_or_raise
from ..specs.activation_sharding import InOutSharding
from ..specs.filters import Paths
from ..specs.fitting import axes_of, axes_of_type, only_axes, padded, spec_axes, with_entries
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import StateSharding
from ..transforms.in_trace import replace_slots
from ..transforms.mapped_axes import Carry, captures
from ..transforms.remat import remat
from ..transforms.scan import scan
from ..transforms.stack import (
    _OPTIONS,
    Stack,
    _built,
    _flat,
    _locations,
    _loop_of_calls,
    _name_axis,
    _unequal,
    stack,
)
from ..transforms.vmap import vmap
from .optimizer import with_optimizer
from .strategies import activations_of, base_specs, mesh_and_axis, shard_largest
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
    """Pipeline parallelism: each stage runs some layers of the model's ``Stack`` or ``nnx.List``.

    In each call of a :class:`~nnx_sharding.Stack` within ``jit``, the batch passes through the
    stages in microbatches, each of which is one slice of every so many rows (``x[i::microbatches]``
    is the i-th). Layers run as if the stack were called with each microbatch in turn: so random
    streams advance, dropout draws, and ``BatchNorm`` normalizes within a microbatch. What is
    outside of the stack runs on all stages alike. ``nnx.capture`` collects what layers sow as
    without a pipeline, if it has the rows in its first dimension.
    :meth:`Stack.scan <nnx_sharding.Stack.scan>` is no pipeline: it gathers layers on Auto axes, and
    JAX refuses it on Explicit ones.

    In a model without a ``Stack``, the equal blocks of each ``nnx.List`` form a pipeline, if each
    is called with what the one before returned, as in ``for block in self.blocks: x = block(x)``.
    Until the last one is called there are no values, and any other use of them is an error, as is
    reading Variables of the blocks that are no parameters. Each Variable of a block is sharded over
    the stages, and moves in each step to the one that runs the block, and its gradient back. A
    ``Stack`` spares that.

    Layers that are called one by one, as by indexing or iterating a ``Stack``, or in a scan by
    hand, are no pipeline: the numbers are the same, but each device computes all layers. That is a
    warning when the call is traced, and so are, here, lists of at least as many blocks as stages
    that form none.

    A loss that layers compute from a whole batch, such as the balance loss of
    :func:`dispatch_to_experts`, is that of each microbatch, and their mean is not that of the
    batch.

    All arrays that a layer gets from the previous one are split along their first dimension, the
    rows. Further arguments are the same for all rows; masks or positions of single rows belong to
    what is passed on from layer to layer, as in ``x, mask = blocks((x, mask))``.

    If the stack has ``remat=True``, only the inputs of a stage are kept for the backward pass.
    Another policy applies to each layer, as without a pipeline.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not, with a ``Stack`` or a list of blocks.
      mesh: the mesh; None for the one in context.
      optimizer: as for :func:`fsdp`.
      base: shardings to start from, such as those of :func:`fsdp` or :func:`tensor_parallel` over
        other axes.
      axis: the mesh axis of the stages.
      microbatches: the number of microbatches; it divides the batch.
      repeats: how often a microbatch passes through all stages (the circular schedule). A stage
        then has ``repeats`` groups of successive layers, which takes less idle time
        (:func:`idle_share`); but the layers of a ``Stack`` are stored in order, so each step moves
        them once to the stages that run them, and their gradients back.
      across_slices: whether the axis may have devices of several TPU slices.

    Returns:
      The spec of each path, with the layers of stacks sharded over the axis.

    Raises:
      ValueError: the model has no ``Stack`` and no list of equal blocks, layers share Variables, or
        the axis times ``repeats`` does not divide their number; ``base`` or the ``Stack`` has
        ``prefetch=1``. In a call within ``jit``: the microbatches do not divide the batch, or there
        are fewer than stages for ``repeats``; blocks of a list are not called in turn; layers sow
        values without rows.

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
    if activations.prefetch or any(getattr(x, "prefetch", 0) for x in stacks.values()):
        raise ValueError(_NOT_AHEAD)
    _report_left_out(model, stacks, schedule)
    specs, lines = base_specs("pipeline", model, base, mesh), list[str]()
    of_blocks = {path: dict[Path, PartitionSpec]() for path in stacks}
    for each in variables(model):
        outer, rest, is_shared = _place(each.path, stacks)
        if outer is None or is_shared:
            continue
        spec, is_list = specs[each.path], isinstance(stacks[outer], nnx.List)
        used = spec_axes(spec) if isinstance(spec, PartitionSpec) else [axis]
        if axis in used or not (is_list or spec.partitions[:1] in ((), (None,))):
            lines.append(f"  {each.name}: {spec}")
        elif is_list:
            specs[each.path] = of_blocks[outer][rest] = shard_largest(spec, each, [axis], mesh)
        else:
            others = padded(spec, len(each.shape or ()))[1:]
            specs[each.path] = with_entries(spec, [axis, *others])
    raise_listed(
        ValueError,
        f"pipeline: specs of base shard layers, or use {axis!r}, in:",
        lines,
        "Leave the first dimension and this axis to the pipeline, in specs without a mesh.",
    )
    filters = {}
    for path, module in stacks.items():
        blocks = len(module) if isinstance(module, nnx.List) else 0
        of_calls = [(*path, number) for number in range(blocks)] or [path]
        own = dataclasses.replace(schedule, blocks=blocks, specs=tuple(of_blocks[path].items()))
        filters[Paths(of_calls)] = InOutSharding(schedule=own)
    return with_optimizer(specs, model, optimizer, activations.extended(filters))


def layers_of(model: Any) -> tuple[dict[Path, Any], list[str]]:
    """The outermost stacks of a model by path, else its lists of equal blocks; why not others."""
    nodes, found, lines = dict(modules_in(model)), dict[Path, Any](), list[str]()
    for path, module in nodes.items():
        if isinstance(module, Stack) and not any(path[: len(x)] == x for x in found):
            found[path] = module
    if found:
        return found, lines
    for path, module in nodes.items():
        is_inside = any(path[: len(x)] == x for x in found)
        blocks = [*module] if isinstance(module, nnx.List) and not is_inside else []
        if len(blocks) > 1 and all(isinstance(x, nnx.Module) and callable(x) for x in blocks):
            names = [accessor("model", (*path, i)) for i in range(len(blocks))]
            differences = _unequal([*map(_flat, blocks)], names.__getitem__)
            found |= {} if differences else {path: module}
            lines += differences
    return found, lines


def _stacks(model: Any, schedule: Schedule) -> dict[Path, Any]:
    """What forms a pipeline, checked."""
    found, lines = layers_of(model)
    if not found:
        head = "pipeline: the model has neither a Stack nor an nnx.List of equal blocks"
        raise ValueError(
            message(
                f"{head}; compared with the first one:" if lines else f"{head}.",
                lines,
                "Make a Stack of its equal blocks: stack(blocks), or stack(Block, 24, rngs=rngs).",
            )
        )
    groups = schedule.stages * schedule.repeats
    raise_listed(
        ValueError,
        f"pipeline: {schedule.stages} stages along {schedule.axis!r} times {schedule.repeats} "
        "repeats do not divide the number of layers:",
        [
            f"  {accessor('model', path)}: {len(layers)} layers"
            for path, layers in found.items()
            if len(layers) % groups
        ],
        "Choose a number of layers that they divide, or another mesh.",
    )
    blocks = [block for x in found.values() if isinstance(x, nnx.List) for block in x]
    held = Counter(id(x) for block in blocks for x in _flat(block).objects)
    raise_listed(
        ValueError,
        "pipeline: layers share these Variables, which would be on several stages:",
        [
            f"  {each.name}"
            for each in variables(model)
            if isinstance(each.variable, nnx.Variable)
            if held[id(each.variable)] > 1 or _place(each.path, found)[-1]
        ],
        "Give each layer its own, or pass their values as an argument of the layers.",
    )
    return found


def _report_left_out(model: Any, stacks: Mapping[Path, Any], schedule: Schedule) -> None:
    """Warns of lists of at least as many blocks as stages that are in no pipeline."""
    inside, lines = [*stacks], list[str]()
    for path, module in modules_in(model):
        is_inside = any(path[: len(outer)] == outer for outer in inside)
        blocks = [*module] if isinstance(module, nnx.List) and not is_inside else []
        are_modules = all(isinstance(x, nnx.Module) and callable(x) for x in blocks)
        if are_modules and len(blocks) >= max(schedule.stages, 2):
            inside.append(path)
            names = [accessor("model", (*path, i)) for i in range(len(blocks))]
            differences = _unequal([*map(_flat, blocks)], names.__getitem__)
            lines += differences or [f"  {accessor('model', path)}: equal blocks next to a Stack"]
    if lines:
        head = (
            "pipeline: these lists of blocks do not run in stages: each device gathers their "
            "parameters, and computes all of them. Compared with the first block:"
        )
        remedy = "Make a Stack of blocks that differ only in the values of arrays: stack(blocks)."
        warn_or_raise(UnshardedWarning, message(head, lines, remedy), strict=False)


def _place(path: Path, stacks: Mapping[Path, Any]) -> tuple[Path | None, Path, bool]:
    """The stack in whose layers a path is, its rest there, and whether all layers share that."""
    for outer, layers in stacks.items():
        start, key, rest = path[: len(outer)], path[len(outer) :][:1], path[len(outer) + 1 :]
        if start == outer and (isinstance(layers, nnx.List) or key == ("layers",)):
            return outer, rest, rest in getattr(layers, "shared", ())
    return None, path, False


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Runs a ``Stack`` in stages over a mesh axis: at tick t, stage s computes item t - s.

    Item i is microbatch i mod M in repeat i div M. After a tick, results move on to the next stage,
    and those of the last to the first, which keeps them in place of the microbatches that it read.
    """

    axis: str
    stages: int
    microbatches: int
    repeats: int

    blocks: int = 0  # those of a list; 0 for a Stack
    specs: tuple[tuple[Path, PartitionSpec], ...] = ()  # of the Variables in a block

    @property
    def ticks(self) -> int:
        """How often a stage computes, or waits."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def is_running(self) -> bool:
        """Whether a call is within a pipeline."""
        return _RUNNING.get()

    def redirect(self, tag: Tag, module: Any, args: Any, kwargs: Any) -> tuple[Tag, Any, Any]:
        """What to call for a stack or a block; no module before the last block is called."""
        if not self.blocks:
            return tag, module, args
        *where, number = tag.path
        x: Any = args[0] if args else None
        further = args[1:], kwargs
        if number == 0:
            own = tag._replace(path=tuple(where))
            x = _Waiting(_Chain(own, self.blocks, x, further), 0)
        chain: Any = x._chain if type(x) is _Waiting else None
        is_next = chain is not None and x._number == len(chain.calls) == number
        if not is_next or (chain.tag.name, chain.tag.path) != (tag.name, tuple(where)):
            raise ValueError(_IN_A_CHAIN.format(tag.accessor, "gets something else"))
        if not _is_same(chain.further, further):
            raise ValueError(_IN_A_CHAIN.format(tag.accessor, "gets other further arguments"))
        chain.calls.append(_Deferred(module, _flat(module), {}))
        if number + 1 < self.blocks:
            chain.calls[-1].hide(_Waiting(chain, number + 1, _NOT_WRITTEN))
            return tag, None, _Waiting(chain, number + 1)
        for i, call in enumerate(chain.calls):
            if not call.is_as_before():
                raise ValueError(_IN_A_CHAIN.format(f"{chain.tag.accessor}[{i}]", _CHANGED))
        return chain.tag, nnx.List([call.block for call in chain.calls]), (chain.x, *args[1:])

    def wrap(
        self,
        module: Any,
        call: Callable[..., Any],
        mesh: Mesh,
        batch_axes: Iterable[Any],
        prefetch: bool,
    ) -> Callable[..., Any]:
        """What is called in place of a stack, or of a list of blocks."""
        if prefetch or getattr(module, "prefetch", False):
            raise ValueError(_NOT_AHEAD)
        rows = tuple(axis for axis in batch_axes if axis != self.axis)

        def run_stages(x: Any, *args: Any, **kwargs: Any) -> Any:
            here = mesh_here(mesh)
            own = self._on(here, len(module))
            if axes_of_type(here, AxisType.Explicit):
                raise ValueError(
                    "pipeline: a Stack that is declared to run with Explicit axes cannot be a "
                    "pipeline. Leave it and its layers out of activation_shardings, or use Auto "
                    "axes."
                )
            own._check(module, x, (args, kwargs))
            token = _RUNNING.set(True)
            try:
                if not self.blocks:
                    with _explained(args, kwargs):
                        return own._run(module, x, args, kwargs, here, rows)
                layers = stack([*module])
                flat = _flat(layers.layers)
                pass_tags(_flat(module[0]), flat)
                before = dict(enumerate(flat.leaves))
                with _explained(args, kwargs):
                    y = own._run(layers, x, args, kwargs, here, rows)
            finally:
                _RUNNING.reset(token)
            after = _flat(layers.layers)

            def write(number: int, block: Any) -> None:
                flat = _flat(block)
                _update(flat, after, before, lambda _, leaf: leaf[number])
                for index in captures(flat.structure):
                    sown = _compat.get_value(after.objects[index])
                    _compat.set_value(flat.objects[index], jax.tree.map(lambda x: x[number], sown))

            for number, block in enumerate(module):
                write(number, block)
            return y

        return run_stages

    def _on(self, mesh: Mesh | AbstractMesh, layers: int) -> Schedule:
        """The schedule on the mesh of a call, which may have another size than that of the specs.

        So a step is compared with one device by the same specs.
        """
        stages = mesh.shape.get(self.axis, 0)
        if stages == self.stages:
            return self
        if not stages or layers % (stages * self.repeats):
            raise ValueError(
                f"pipeline: the specs are for {self.stages} stages along {self.axis!r}, but the "
                f"mesh of the call has {stages or 'no such axis'}, and {layers} layers. Call "
                "pipeline(model, mesh=...) with the mesh of the call."
            )
        return dataclasses.replace(self, stages=stages)

    def _check(self, layers: Any, x: Any, further: Any) -> None:
        """Refuses what cannot be split into microbatches."""
        count = self.microbatches
        if self.repeats > 1 and count < self.stages:
            raise ValueError(
                f"pipeline: microbatches={count} is less than the {self.stages} stages; with "
                "repeats, the last stage would not be done when the first one goes on."
            )
        every = (getattr(inner, _compat.CAPTURES, ()) for _, inner in modules_in(layers))
        sown = [*itertools.chain(*every)]
        if any(isinstance(x, nnx.Perturbation) or _compat.get_value(x) for x in sown):
            raise ValueError(
                "pipeline: nnx.capture collects what layers sow in one call of the Stack, and no "
                "perturbations. Use a nnx.capture for each call, or leave out the pipeline."
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
        raise_listed(
            ValueError,
            f"pipeline: further arguments of the layers with {batch} rows, as many as the batch:",
            [
                f"  {name}: shape {jnp.shape(leaf)}"
                for name, leaf in _named(*further)
                if isinstance(leaf, jax.Array) and leaf.ndim and leaf.shape[0] == batch > 1
            ],
            "They are the same for all microbatches. Give them a first dimension of 1, or, if they "
            "belong to the rows, pass them on from layer to layer: blocks((x, mask)).",
        )

    def module_path(self, path: Path) -> Path:
        """The path of the Stack, or of the list that a block is in."""
        return path[:-1] if self.blocks else path

    def report_unscheduled(self, module: str) -> None:
        """Warns that layers ran, but not in stages."""
        remedy = "Call its blocks one after the other: for block in blocks: x = block(x)."
        if not self.blocks:
            remedy = (
                "Call the Stack itself, x = blocks(x), rather than its layers one by one, by "
                "index, in a for loop, or in a scan."
            )
        warn_or_raise(
            UnshardedWarning,
            f"pipeline: the layers of {module} do not run in stages: each device gathers their "
            f"parameters, and computes all of them. {remedy}",
            strict=False,
        )

    def report_other_method(self, tag: Tag, method: str, args: Any, out: Any) -> None:
        """Warns if blocks of a list are called by a method of which no pipeline is made."""
        *where, number = tag.path or (None,)
        arrays = [x.shape for x in (out, *args) if _compat.is_plain_array(x)]
        if not self.blocks or number != 0 or arrays[:1] * 2 != arrays[:2]:
            return
        warn_or_raise(
            UnshardedWarning,
            f"pipeline: the blocks of {accessor(tag.name, tuple(where))} are called by {method}, "
            "of which no pipeline is made: each device gathers their parameters, and computes all "
            "of them. Name the method __call__, and call the blocks themselves.",
            strict=False,
        )

    def _run(
        self, stack: Stack, x: Any, args: Any, kwargs: Any, mesh: Any, rows: tuple[Any, ...]
    ) -> Any:
        """Calls the layers; ``rows`` are the axes of the batch."""
        stages, count, repeats = self.stages, self.microbatches, self.repeats
        depth, flat = stack.length // (stages * repeats), _flat(stack.layers)
        slots = stack._stacked_slots(flat)
        policy = False if stack.remat is True else stack.remat
        run_layers = _loop_of_calls(stack._axes, depth, stack.unroll, policy)
        batch_axes = [rows] if rows else []
        rows_of_one = len(jax.tree.leaves(x)[0]) // count

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

        specs = dict(self.specs)
        by_slot = {
            slot: specs.get(x.path, PartitionSpec()) for x in _locations(flat) for slot in x.slots
        }

        def by_stage(slot: int) -> Any:
            leaf, spec = flat.leaves[slot], by_slot[slot]
            groups = jnp.swapaxes(leaf.reshape(repeats, stages, depth, *leaf.shape[1:]), 0, 1)
            axes = {*spec_axes(spec)}
            if self.axis not in axes:
                return sharded(groups)
            [at] = [i for i, entry in enumerate(spec.partitions) if self.axis in axes_of(entry)]
            rest = only_axes(spec, axes - {self.axis})
            move: Any = jax.shard_map(
                lambda x: jax.lax.all_to_all(x, self.axis, 0, at + 1, tiled=True),
                mesh=mesh,
                in_specs=PartitionSpec(None, *spec.partitions),
                out_specs=PartitionSpec(self.axis, *rest.partitions),
                axis_names=axes,
            )
            return sharded(move(groups.reshape(leaf.shape)).reshape(groups.shape))

        def in_order(leaf: Any) -> Any:
            return sharded(jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[3:]))

        def of_all(keys: Any, leaf: Any) -> Any:  # what layers sow: (ticks, stages, depth, rows, …)
            if leaf.shape[3:4] != (rows_of_one,):
                raise ValueError(
                    f"pipeline: layers sow {jax.tree_util.keystr(keys[:1])} of shape "
                    f"{leaf.shape[3:]}, without a first dimension for the {rows_of_one} rows of a "
                    "microbatch. Sow a value for each row, or return it from layer to layer: "
                    "x, loss = blocks((x, loss))."
                )
            own = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=repeats * count)
            items = jax.vmap(own, in_axes=(1, 0))(leaf, jnp.arange(stages))
            items = items.reshape(stages, repeats, count, *items.shape[2:])
            layers = jnp.moveaxis(items, (1, 0, 3, 4, 2), range(5))
            return sharded(layers.reshape(stack.length, rows_of_one * count, *layers.shape[5:]))

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
            stage = remat(stage, prevent_cse=False, graph=True, graph_updates=True)
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

        staged = _copy(flat, {s: by_stage(s) for s in slots}, stack, nnx.spmd.add_axis)
        before = _flat(staged)
        kept = jax.tree.map(split, x)
        # Stages that wait compute with rows of the batch, as zeros might have no finite gradient.
        carry = kept, jax.tree.map(lambda parts: parts[:, 0], kept)
        ticks = scan(step, in_axes=(None, Carry, 0), out_axes=Carry, **_OPTIONS)
        kept, _ = ticks(staged, carry, jnp.arange(self.ticks))
        after, old = _flat(staged), {slot: before.leaves[slot] for slot in slots}
        _update(flat, after, old, lambda _, leaf: in_order(leaf))
        for index in captures(flat.structure):
            sown = _compat.get_value(flat.objects[index])
            sown = jax.tree_util.tree_map_with_path(of_all, sown)
            _compat.set_value(flat.objects[index], sown)
        return jax.tree.map(lambda x: jnp.swapaxes(x[0], 0, 1).reshape(-1, *x.shape[3:]), kept)


_NOT_AHEAD = (
    "pipeline: the layers of a stage gather their own parameters, not ahead. Leave out the option "
    "prefetch=1 of base or of the Stack."
)
_RUNNING: ContextVar[bool] = ContextVar("_RUNNING", default=False)


class _Deferred(NamedTuple):
    """A call of a block that runs later, and the block as it was."""

    block: Any
    flat: Flat
    hidden: dict[int, Any]  # the values of Variables that the block may write, by index

    def hide(self, place: Any) -> None:
        """Puts something in place of these values, which refuses to be read."""
        for index, variable in enumerate(self.flat.objects):
            if _compat.is_variable(variable) and not isinstance(variable, nnx.Param):
                self.hidden[index] = _compat.get_value(variable)
                _compat.set_value(variable, place)

    def is_as_before(self) -> bool:
        """Puts the values back; returns whether the block is as it was."""
        for index, value in self.hidden.items():
            if type(_compat.get_value(self.flat.objects[index])) is not _Waiting:
                return False
            _compat.set_value(self.flat.objects[index], value)
        now = _flat(self.block)
        pairs = zip(now.leaves, self.flat.leaves, strict=False)
        return now.structure == self.flat.structure and all(one is two for one, two in pairs)


@dataclasses.dataclass
class _Chain:
    """Calls of the blocks of a list, which run when the last one is called."""

    tag: Tag  # of the list
    length: int
    x: Any
    further: Any
    calls: list[_Deferred] = dataclasses.field(default_factory=list)


class _Waiting:
    """In place of what a block of a list returns or writes, before the last one is called."""

    def __init__(self, chain: _Chain, number: int, problem: str = ""):
        self._chain, self._number = chain, number
        self._problem = problem or "returns what is not passed to the next one"

    def __getattr__(self, name: str) -> Any:
        block = f"{self._chain.tag.accessor}[{self._number - 1}]"
        raise ValueError(_IN_A_CHAIN.format(block, self._problem))

    def _check(self) -> None:
        """Refuses a chain whose last block has not been called."""
        if self._number == len(self._chain.calls) < self._chain.length:
            self._refuse()

    def _refuse(self, *_: Any) -> Any:
        return self.used


# Python looks for these in the class.
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod matmul rmatmul pow "
    "rpow neg pos abs invert eq ne lt le gt ge getitem iter len array float int"
)
for _name in _OPERATORS.split():
    setattr(_Waiting, f"__{_name}__", _Waiting._refuse)

_IN_A_CHAIN = (
    "pipeline: {} {}. The blocks of an nnx.List run when its last one is called: each has to get "
    "what the one before returned, as it is, once, and the same further arguments, as in "
    "`for block in self.blocks: x = block(x, mask)`. Else use a Stack, self.blocks = stack(blocks)."
)
_NOT_WRITTEN = "may write this Variable, which is read before it has run"
_CHANGED = "has changed since it was called, before the last one is"


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The modules, arrays and other leaves in the further arguments of layers, with names."""
    named = {f"argument {i}": x for i, x in enumerate(args, start=2)} | kwargs
    leaves, _ = jax.tree_util.tree_flatten_with_path(named, is_leaf=_compat.is_graph_object)
    return [(accessor(keys[0].key, tuple(map(path_key, keys[1:]))), x) for keys, x in leaves]


@contextlib.contextmanager
def _explained(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Raises an error that names further arguments which layers change."""
    try:
        yield
    except _compat.TraceContextError as error:
        pairs = [(name, _flat(x)) for name, x in _named(args, kwargs) if _compat.is_graph_object(x)]
        lines = [
            f"  {accessor(name, x.path)}: {type(flat.objects[x.entry]).__name__}"
            for name, flat in pairs
            for x in _locations(flat)
            if x.entry is not None and not isinstance(flat.objects[x.entry], nnx.Param)
        ]
        if not lines:
            raise
        head = "pipeline: layers change Variables of their further arguments. Of those, there are:"
        remedy = (
            "Layers of all stages run at once, so they cannot share what they change, such as "
            "random streams and statistics. Give each layer its own, as an attribute."
        )
        raise ValueError(message(head, lines, remedy)) from error


def _is_same(one: Any, other: Any) -> bool:
    """Whether further arguments are the same: equal values, or the same arrays."""
    treedef: Any = jax.tree.structure(one)
    if treedef != jax.tree.structure(other):
        return False
    leaves, others = map(jax.tree.leaves, (one, other))
    return all(
        x is y or (type(x) is type(y) and not isinstance(x, jax.Array) and np.array_equal(x, y))
        for x, y in zip(leaves, others, strict=True)
    )


def _at(x: Any, index: Any, axis: int) -> Any:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def _put(x: Any, part: Any, index: Any, axis: int) -> Any:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, axis)


def _copy(flat: Flat, new: Mapping[int, Any], stack: Stack, change: Callable[..., Any]) -> Any:
    """Layers with other arrays in some slots, and one more or one less dimension in front."""
    layers = _built(flat, new)
    copy = _flat(layers)
    pass_tags(flat, copy)
    for old, one in zip(flat.objects, copy.objects, strict=True):
        if sown := vars(old).get(_compat.CAPTURES) if _compat.is_node(old) else None:
            vars(one)[_compat.CAPTURES] = sown
    _name_axis(change, layers, stack.shared)
    return layers


def _update(
    flat: Flat, after: Flat, before: Mapping[int, Any], written: Callable[[int, Any], Any]
) -> None:
    """Updates the Variables of ``flat`` from those of a copy that have changed."""
    structure = flat.structure
    if len(after.structure.entries) != len(structure.entries):
        raise ValueError(
            "pipeline: layers may not make Variables while they run in a pipeline, as by sow. "
            "Return the values, with a dimension for the rows: x, loss = blocks((x, loss))."
        )
    own = {*range(len(structure.slots))}.difference(captures(structure))
    pairs = (zip(structure.slots[i], after.structure.slots[i], strict=True) for i in own)
    leaves_after = {slot: after.leaves[other] for slot, other in itertools.chain(*pairs)}
    new = {
        slot: written(slot, leaves_after[slot])
        for slot, old in before.items()
        if leaves_after[slot] is not old
    }
    written_to = [
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry)
        if not new.keys().isdisjoint(slots)
    ]
    leaves = replace_slots(flat.leaves, new, new.values())
    perform(update(structure, leaves, flat.objects, written_to))
