"""Pipeline parallelism: the layers of a ``Stack``, or of a list, on the stages of a mesh axis.

This module is the strategy: it finds the layers of a model, checks that they can be divided over
the stages, and shards them. ``pipeline_schedule.py`` runs them when they are called, and
``pipeline_loop.py`` has the loop over microbatches, with a picture of its schedule.

A *stack* in this module is the object that has the layers of one pipeline: a ``Stack``, or an
``nnx.List`` whose items, *blocks*, are equal but for the values of arrays. A ``Stack`` has its
layers in one module, the attribute ``layers``, with arrays (L, …). A list has a module for each
layer.

Parameters are listed as ``NamedVariable``: ``path``, ``name`` (the path as a text), ``variable``
(or a bare array), and ``shape`` (None if the shapes of its arrays differ).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..activations.variables import modules_in
from ..errors import UnshardedWarning, message, raise_if_any, warn_or_raise
from ..specs.activation_sharding import InOutSharding
from ..specs.filters import Paths
from ..specs.fitting import pad_entries, spec_axes, suggestion, with_entries
from ..specs.paths import Path, accessor
from ..specs.state_sharding import StateSharding
from ..transforms.stack import Stack
from ..transforms.stacked_layers import flatten_layer, layer_differences
from .optimizer import with_optimizer
from .pipeline_schedule import NO_PREFETCH, Schedule, parameters_of
from .strategies import (
    activations_of,
    base_specs,
    mesh_and_axis,
    remarks_on,
    shard_largest,
)
from .variables import NamedVariable, variables

# The stacks of a model, by path.
_Stacks: TypeAlias = "Mapping[Path, Stack | nnx.List[Any]]"


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
    model: object,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: object = None,
    base: StateSharding | None = None,
    axis: str = "stage",
    microbatches: int = 8,
    repeats: int = 1,
    rows: tuple[str, ...] = (),
    schedule: Literal["gpipe", "1f1b"] = "gpipe",
    across_slices: bool = True,
) -> StateSharding:
    """Pipeline parallelism: each stage runs some layers of the model's ``Stack`` or ``nnx.List``.

    In each call of a :class:`~nnx_sharding.Stack` within ``jit``, the batch passes through the
    stages in microbatches: the i-th one has the rows ``x[i::microbatches]``. Layers run as if the
    stack were called with each microbatch in turn: so random streams advance, dropout draws, and
    ``BatchNorm`` normalizes within a microbatch. What is outside of the stack runs on all stages
    alike. ``nnx.capture`` collects what layers sow as it does without a pipeline; but a value that
    is sown needs the rows of the batch as its first dimension.
    :meth:`Stack.scan <nnx_sharding.Stack.scan>` is no pipeline: it gathers layers on Auto axes, and
    JAX refuses it on Explicit ones.

    In a model without a ``Stack``, the equal blocks of each ``nnx.List`` form a pipeline, if each
    is called with what the one before returned, as in ``for block in self.blocks: x = block(x)``.
    They run when the last one is called. Until then there are no values: it is an error to use them
    in any other way, or to read Variables of the blocks other than parameters. All blocks need the
    same further arguments, or arrays that the same operations make from the same arrays. Each
    Variable of a block is sharded over the stages. In each step it moves to the stage that runs the
    block, and its gradient moves back; a ``Stack`` avoids that.

    Layers that are called one by one, as by indexing or iterating a ``Stack``, or in a scan by
    hand, are no pipeline: the numbers are the same, but each device computes all layers. Tracing
    such a call warns. This function warns of lists of at least as many blocks as stages that form
    no pipeline.

    A loss that layers compute from a whole batch, such as the balance loss of
    :func:`dispatch_to_experts`, is that of each microbatch. Their mean is not that of the batch,
    as a product of two means over tokens differs from it; the same is true of
    :func:`~nnx_sharding.training.accumulate_gradients`.

    All arrays that a layer gets from the previous one are split along their first dimension, the
    rows. Further arguments are the same for all rows, unless ``rows`` names them, or they are
    arrays whose own declared sharding divides as many rows over the same axes: then they are split
    with the batch, as masks, positions or segment ids of its rows.

    With the default schedule, all forward passes come before the first backward pass, so the
    activations of all microbatches are kept. ``schedule="1f1b"`` starts the backward pass of a
    microbatch when its loss is known, with the same share of idle time.

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
      rows: the names of parameters of a layer's ``__call__``, other than the first, that have the
        rows of the batch in their first dimension, such as ``("mask",)``. One with a first
        dimension of 1 is the same for all rows.
      schedule: ``"1f1b"`` to keep the activations of 2S - 1 microbatches for S stages, however many
        there are. The microbatches are those of
        :func:`~nnx_sharding.training.accumulate_gradients`, whose loss calls the layers once. Other
        calls, as in an evaluation, run by ``"gpipe"``; to differentiate one is an error. The whole
        loss runs with Auto axes, as modules do.
      across_slices: whether the axis may have devices of several TPU slices.

    Returns:
      The spec of each path, with the layers of stacks sharded over the axis.

    Raises:
      ValueError: the model has no ``Stack`` and no list of equal blocks, layers share Variables, or
        the axis times ``repeats`` does not divide their number; ``base`` or the ``Stack`` has
        ``prefetch=1``. In a call within ``jit``: the microbatches do not divide the batch, or there
        are fewer than stages for ``repeats``; blocks of a list are not called in turn; layers sow
        values without rows; with 1F1B, a loss cannot be interleaved, or is differentiated outside
        of ``accumulate_gradients``.

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
    al., 2021, arXiv:2105.04663, section 3.3). 1F1B is that of PipeDream with flushes (Narayanan et
    al., 2021, arXiv:2006.09503).
    """
    mesh, axis = mesh_and_axis("pipeline", mesh, axis, across_slices=across_slices)
    # `type(x) is int` leaves out True, which counts as 1.
    counts = {"microbatches": microbatches, "repeats": repeats}
    wrong = [f"  {name}={x!r}" for name, x in counts.items() if type(x) is not int or x < 1]
    raise_if_any(ValueError, "pipeline: expected positive integers, got:", wrong)
    names = (rows,) if isinstance(rows, str) else tuple(rows)
    sizes = Schedule(
        axis,
        stages=mesh.shape[axis],
        microbatches=microbatches,
        repeats=repeats,
        rows=names,
        interleaves=_is_1f1b(schedule, repeats),
    )
    stacks, activations = _find_stacks(model, sizes), activations_of(base)
    _check_names(stacks, names)  # raises an error for an unknown name in `rows`
    # The schedule raises the same error, but only when the first call is traced.
    if activations.prefetch or any(getattr(x, "prefetch", 0) for x in stacks.values()):
        raise ValueError(NO_PREFETCH)
    _warn_of_left_out(model, stacks, sizes)
    # The layers get specs, in `specs`, and calls of the layers get the schedule, in `filters`.
    parameters = variables(model)
    specs = base_specs("pipeline", parameters, base, mesh)
    block_specs = _shard_layers(specs, model, stacks, axis, mesh)  # changes `specs`
    filters = {}
    for path, module in stacks.items():
        blocks = len(module) if isinstance(module, nnx.List) else 0
        # The schedule replaces calls of each block of a list, or of a Stack itself.
        called_paths = [(*path, number) for number in range(blocks)] if blocks else [path]
        # The model of an `nnx.ModelAndOptimizer` is called as `optimizer.model`.
        if isinstance(optimizer, nnx.ModelAndOptimizer):
            called_paths += [("model", *called_path) for called_path in called_paths]
        schedule_of_stack = dataclasses.replace(
            sizes, blocks=blocks, specs=tuple(block_specs[path].items())
        )
        filters[Paths(called_paths)] = InOutSharding(schedule=schedule_of_stack)
    remarks = remarks_on(specs, "pipeline", base, parameters, [axis])
    return with_optimizer(specs, parameters, optimizer, activations.extended(filters), remarks)


def _is_1f1b(schedule: str, repeats: int) -> bool:
    """Whether the schedule is 1F1B, not GPipe.

    Raises:
      ValueError: the name is another one, or there are repeats with 1F1B.
    """
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(f'pipeline: expected schedule="gpipe" or "1f1b", got {schedule!r}.')
    if schedule == "1f1b" and repeats > 1:
        raise ValueError(
            f'pipeline: schedule="1f1b" has no repeats, got repeats={repeats}. Leave out one.'
        )
    return schedule == "1f1b"


def _shard_layers(
    specs: dict[Path, Any],
    model: Any,
    stacks: _Stacks,
    axis: str,
    mesh: Mesh | AbstractMesh,
) -> dict[Path, dict[Path, PartitionSpec]]:
    """Adds the axis of the stages to the specs of all layers, in ``specs``.

    A ``Stack`` is sharded in its dimension of layers. The blocks of a list have no such dimension.
    Each of their Variables is sharded in the largest dimension that the axis divides, if any, and
    moved to the stage that needs it when the layers are called.

    Args:
      specs: the specs of the model by path, which are changed.

    Returns:
      For each stack, by its path, the specs of the Variables in a block, by the path in the block;
      empty for a ``Stack``.

    Raises:
      ValueError: specs shard the layers already, or use the axis; all are listed.
    """
    block_specs = {path: dict[Path, PartitionSpec]() for path in stacks}
    lines = list[str]()
    for x in variables(model):
        place = _place_in(stacks, x.path)
        if place is None or place.is_shared:  # outside of the layers, or the same in all of them
            continue
        spec = specs[x.path]
        is_list = isinstance(stacks[place.stack], nnx.List)
        if not _can_add_axis(spec, axis, is_list=is_list):
            lines.append(f"  {x.name}: {spec}")
        elif is_list:
            sharded = shard_largest(spec, x, [axis], mesh)  # `spec`, if the axis divides nothing
            specs[x.path] = block_specs[place.stack][place.path] = sharded
        else:
            later_entries = pad_entries(spec, len(x.shape or ()))[1:]
            specs[x.path] = with_entries(spec, [axis, *later_entries])
    raise_if_any(
        ValueError,
        f"pipeline: specs of base shard layers, or use {axis!r}, in:",
        lines,
        "Leave the first dimension and this axis to the pipeline, in specs without a mesh.",
    )
    return block_specs


def _can_add_axis(spec: object, axis: str, *, is_list: bool) -> bool:
    """Whether the axis of the stages may be added to the sharding of an array of layers.

    Args:
      is_list: whether the layers are the blocks of a list, not of a ``Stack``.
    """
    # A NamedSharding may not be changed, so it is refused like a spec that uses the axis.
    if not isinstance(spec, PartitionSpec) or axis in spec_axes(spec):
        return False
    # In a Stack, the first dimension has the layers, and the axis needs it for itself.
    return is_list or pad_entries(spec, 1) == [None]


def layers_of(model: object) -> tuple[dict[Path, Any], list[str]]:
    """Finds the outermost ``Stack`` objects of a model, else its outermost lists of equal blocks.

    Returns:
      A pair: the ``Stack`` objects, or the lists, by path; and lines for an error, which say how
      the blocks of other lists differ.
    """
    modules = dict(modules_in(model))  # by path, outer ones first
    stacks = dict[Path, Any]()
    for path, module in modules.items():
        if isinstance(module, Stack) and not _is_inside(path, stacks):
            stacks[path] = module
    if stacks:
        return stacks, []
    lists, differences = dict[Path, Any](), list[str]()
    for path, module in modules.items():
        # Lists in the blocks of a list are left out. `_blocks_of` is empty for most modules.
        blocks = [] if _is_inside(path, lists) else _blocks_of(module)
        if len(blocks) < 2:  # one block alone is no pipeline
            continue
        lines = _differences_of_blocks(path, blocks)
        if lines:
            differences += lines
        else:
            lists[path] = module
    return lists, differences


def _is_inside(path: Path, outer_paths: Mapping[Path, object] | Sequence[Path]) -> bool:
    """Whether a path is one of some outer paths, or below one of them."""
    return any(path[: len(outer)] == outer for outer in outer_paths)


def _blocks_of(module: object) -> list[Any]:
    """Returns the items of a list of modules that can be called; empty for all other objects."""
    if not isinstance(module, nnx.List):
        return []
    # Lists of other things, such as Variables or activations, are no layers.
    blocks = [*module]
    are_layers = all(isinstance(x, nnx.Module) and callable(x) for x in blocks)
    return blocks if are_layers else []


def _differences_of_blocks(path: Path, blocks: Sequence[Any]) -> list[str]:
    """Returns a line of text for each way in which blocks differ from the first one.

    The values of their arrays may differ. ``path`` is the path of the list that holds them.
    """
    names = [accessor("model", (*path, i)) for i in range(len(blocks))]
    return layer_differences([*map(flatten_layer, blocks)], names.__getitem__)


def _find_stacks(model: object, schedule: Schedule) -> dict[Path, Any]:
    """Returns the stacks of a model, by path; never empty.

    Raises:
      ValueError: there are none, stages times repeats do not divide their layers, or layers share
        Variables.
    """
    stacks, differences = layers_of(model)
    if not stacks:
        head = "pipeline: the model has neither a Stack nor an nnx.List of equal blocks"
        raise ValueError(
            message(
                f"{head}; compared with the first one:" if differences else f"{head}.",
                differences,
                "Make a Stack of its equal blocks: stack(blocks), or stack(Block, 24, rngs=rngs).",
            )
        )
    groups = schedule.stages * schedule.repeats  # a stage calls the layers of a group at once
    indivisible = [
        f"  {accessor('model', path)}: {len(layers)} layers"
        for path, layers in stacks.items()
        if len(layers) % groups
    ]
    raise_if_any(
        ValueError,
        f"pipeline: {schedule.stages} stages along {schedule.axis!r} times {schedule.repeats} "
        "repeats do not divide the number of layers:",
        indivisible,
        "Choose a number of layers that they divide, or another mesh.",
    )
    shared = [f"  {x.name}" for x in _shared_variables(model, stacks)]
    raise_if_any(
        ValueError,
        "pipeline: layers share these Variables, which would be on several stages:",
        shared,
        "Give each layer its own, or pass their values as an argument of the layers.",
    )
    return stacks


def _check_names(stacks: _Stacks, rows: Sequence[str]) -> None:
    """Raises a ValueError if ``rows`` has names that are no parameters of a layer after x."""
    layers = [x.layers if isinstance(x, Stack) else x[0] for x in stacks.values()]
    parameter_names = {name for layer in layers for name in parameters_of(layer)[1:]}
    unknown = [name for name in rows if name not in parameter_names]
    raise_if_any(
        ValueError,
        "pipeline: rows names what no layer takes, besides its first argument:",
        [f"  {name!r}{suggestion(name, parameter_names)}" for name in unknown],
        f"They take {', '.join(sorted(parameter_names)) or 'no other argument'}.",
    )


def _shared_variables(model: object, stacks: _Stacks) -> Iterator[NamedVariable]:
    """Yields the Variables that several layers hold: shared in a Stack, or in several blocks."""
    blocks = [block for x in stacks.values() if isinstance(x, nnx.List) for block in x]
    # The number of blocks that hold each object. A flattened block lists an object once, even if
    # the block holds it in several places.
    num_holders = Counter(id(x) for block in blocks for x in flatten_layer(block).objects)
    for x in variables(model):
        if not isinstance(x.variable, nnx.Variable):  # a bare array cannot be shared
            continue
        place = _place_in(stacks, x.path)
        is_shared_in_stack = place is not None and place.is_shared
        if is_shared_in_stack or num_holders[id(x.variable)] > 1:
            yield x


def _warn_of_left_out(model: object, stacks: _Stacks, schedule: Schedule) -> None:
    """Warns of lists of at least as many blocks as stages that are in no pipeline."""
    handled_paths = [*stacks]  # the paths of stacks, and of lists with a warning
    lines: list[str] = []
    for path, module in modules_in(model):
        blocks = [] if _is_inside(path, handled_paths) else _blocks_of(module)
        if len(blocks) < max(schedule.stages, 2):  # one block alone is no pipeline
            continue
        handled_paths.append(path)  # lists in its blocks need no warning of their own
        # The blocks differ, or they are equal and a Stack in the model is the pipeline.
        differences = _differences_of_blocks(path, blocks)
        lines += differences or [f"  {accessor('model', path)}: equal blocks next to a Stack"]
    if lines:
        head = (
            "pipeline: these lists of blocks do not run in stages: each device gathers their "
            "parameters, and computes all of them. Compared with the first block:"
        )
        remedy = "Make a Stack of blocks that differ only in the values of arrays: stack(blocks)."
        warn_or_raise(UnshardedWarning, message(head, lines, remedy), strict=False)


class _Place(NamedTuple):
    """The place of a Variable in the layers of a stack."""

    stack: Path  # the path of the stack in the model
    path: Path  # the path of the Variable in a layer
    is_shared: bool  # whether all layers have the same Variable


def _place_in(stacks: _Stacks, path: Path) -> _Place | None:
    """Returns the place of a Variable in the layers of a stack; None if it is in no layer.

    The kernels ``body/layers/up/kernel`` of a ``Stack`` at ``body`` and ``blocks/3/up/kernel`` of a
    list at ``blocks`` are both ``up/kernel`` in a layer.
    """
    for stack_path, module in stacks.items():
        depth = len(stack_path)
        is_below = path[:depth] == stack_path and len(path) > depth
        if not is_below or (isinstance(module, Stack) and path[depth] != "layers"):
            continue
        path_in_layer = path[depth + 1 :]
        is_shared = isinstance(module, Stack) and path_in_layer in module.shared
        return _Place(stack_path, path_in_layer, is_shared)
    return None
