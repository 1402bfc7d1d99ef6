"""Runs a call of a ``Stack``, or of the blocks of a list, as a pipeline while it is traced.

The strategy gives a :class:`Schedule` to the modules of a pipeline: a ``Stack``, or each block of a
list. Tracing knows these modules by their *tag* (the argument and the path), and asks the schedule
for each of their calls. The schedule checks the call, and runs the loop of ``pipeline_loop.py``
instead of it. Calls of blocks are collected first (``pipeline_blocks.py``), and run as a ``Stack``
that is made for the call. *Further arguments* are all arguments of the layers but the rows ``x``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from .. import _compat
from ..activations.calls import Tag
from ..activations.trace_keys import pass_tags
from ..activations.variables import modules_in
from ..core.constrain import mesh_in_trace
from ..core.flatten import Flat
from ..core.known_faults import without_gradient
from ..errors import UnshardedWarning, message, raise_if_any, warn_or_raise
from ..specs.activation_sharding import CallSchedule
from ..specs.fitting import axes_of_type
from ..specs.paths import Path, accessor
from ..specs.types import AnyMesh
from ..transforms.mapped_axes import captures
from ..transforms.stack import Stack, stack
from ..transforms.stacked_layers import flatten_layer, locations_of
from .pipeline_blocks import BlockCalls, FurtherLeaf, calls_before, further_leaves
from .pipeline_loop import PipelineLoop
from .pipeline_loss import PIPELINE_CALL
from .staged_layers import RUNNING, Further, PipelineSizes, StagedLayers, write_back

NO_PREFETCH = (
    "pipeline: the layers of a stage gather their own parameters, not ahead. Leave out the option "
    "prefetch=1 of base or of the Stack."
)


class _LayersCall(NamedTuple):
    """A call of layers that are to run in stages."""

    x: Any  # the first layer's input: a pytree of arrays (batch, …)
    further: Further  # the further arguments of the layers
    has_rows: Sequence[bool]  # for each leaf in ``further`` whether it is an array (batch, …)
    mesh: AnyMesh
    row_axes: tuple[str, ...]  # the mesh axes that shard the rows


@dataclasses.dataclass(frozen=True)
class Schedule(PipelineSizes, CallSchedule):
    """Runs the layers of a ``Stack`` or of a list in stages.

    Tracing asks the schedule of a module for each call of the module: `redirect` returns the module
    to call instead, and `wrap` the function that calls it.

    Attributes:
      axis, stages, microbatches, repeats: the sizes of the pipeline, with the mesh axis.
      blocks: the number of blocks of a list; 0 for a Stack.
      specs: the specs of the Variables in a block, by path; empty for a Stack.
      rows: the names of parameters of a layer, after x, that have the rows of the batch.
      interleaves: whether the schedule is 1F1B, which ``accumulate_gradients`` runs.
    """

    blocks: int = 0
    specs: tuple[tuple[Path, PartitionSpec], ...] = ()
    rows: tuple[str, ...] = ()
    interleaves: bool = False

    @property
    def is_running(self) -> bool:
        """Whether a call is within a pipeline."""
        return RUNNING.get()

    def redirect(
        self, tag: Tag, module: nnx.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Tag, nnx.Module | None, Any]:
        """Returns what to call in place of a stack or a block.

        Args:
          tag: says which module this is: the argument and the path, such as ``blocks/3``.
          module: the ``Stack``, or a block of a list.
          args: the positional arguments of the call, the rows ``x`` first.
          kwargs: the other arguments.

        Returns:
          The tag, the module and its ``(args, kwargs)``. All are unchanged for a ``Stack``. For
          the last block of a list, they are the list and the arguments of its first block. For
          other blocks, nothing is to be called: the module is None, and the third item is the
          pending output instead of arguments.
        """
        if not self.blocks:
            return tag, module, (args, kwargs)
        list_path, number = tag.path[:-1], tag.path[-1]  # ``blocks/3`` → ``blocks``, 3
        names = parameters_of(module)
        if not args and names and names[0] in kwargs:  # block(x=x)
            kwargs = {**kwargs}
            args = (kwargs.pop(names[0]),)
        x = args[0] if args else None
        further = args[1:], kwargs
        # Block 0 begins the calls of its list. Another block gets the pending output of the block
        # before, which knows the calls so far.
        if number == 0:
            calls = BlockCalls(tag._replace(path=list_path), self.blocks, x, further)
        else:
            calls = calls_before(tag, list_path, number, x)
        pending = calls.add(tag, module, further)
        if pending is not None:  # None only for the last block
            return tag, None, pending
        # The rows are the first block's input. All blocks have equal further arguments, so the
        # further arguments of the last block, which is being called, stand for all.
        return calls.tag, calls.finish(), ((calls.x, *args[1:]), kwargs)

    def wrap(
        self,
        module: Any,
        call: Callable[..., object],
        mesh: Mesh,
        batch_axes: Iterable[str],
        axes_of_rows: Callable[[jax.Array], Set[Any]],
        prefetch: bool,
    ) -> Callable[..., Any]:
        """Returns a function that runs a stack, or a list of blocks, in stages.

        Args:
          module: the ``Stack``, or the ``nnx.List`` of blocks.
          call: the function that would be called without a pipeline. The function is not used,
            because the stages call the layers.
          mesh: the mesh of the strategy.
          batch_axes: the mesh axes that shard the batch.
          axes_of_rows: returns the mesh axes over which the rows of an array are declared to be
            sharded.
          prefetch: whether parameters are to be gathered ahead, which stages do not do.

        Returns:
          A function of the rows ``x`` and of further arguments, like the module itself.
        """
        if prefetch or getattr(module, "prefetch", False):
            raise ValueError(NO_PREFETCH)

        def run_stages(x: Any, *args: Any, **kwargs: Any) -> Any:
            """Checks a call of the module, and runs its layers in stages."""
            # 1. The mesh of the call, and the sizes of the pipeline on it.
            call_mesh = mesh_in_trace(mesh)
            schedule = self._on_mesh(call_mesh, len(module))
            _check_axis_types(call_mesh, x)  # refuses axes that the loop cannot run with
            # With 1F1B, `accumulate_gradients` traces the loss of one microbatch, so the rows are
            # not split again.
            is_in_accumulation = PIPELINE_CALL.get() is not None
            if is_in_accumulation:
                schedule = dataclasses.replace(schedule, microbatches=1)

            # 2. The rows. The axis of the stages does not shard them, because each stage gets all
            # rows. The (Manual) axes of a `shard_map` around the call do not either, because its
            # rows are those of one device along these axes already.
            axes_without_rows = axes_of_type(call_mesh, AxisType.Manual) | {self.axis}
            row_axes = tuple(axis for axis in batch_axes if axis not in axes_without_rows)
            further = args, kwargs
            layer = module[0] if self.blocks else module.layers
            further_names = parameters_of(layer)[1:]  # the first parameter is `x`
            leaves = further_leaves(further, further_names)
            has_rows = schedule._find_rows(x, leaves, row_axes, axes_of_rows)
            schedule._check_inputs(module, x, leaves, has_rows)

            # 3. The loop. `RUNNING` makes Stacks within a layer be called as usual, not as further
            # pipelines.
            run = schedule._run_blocks if self.blocks else schedule._run_stack
            token = RUNNING.set(True)
            try:
                with _explain_changed_arguments(further):
                    out = run(module, _LayersCall(x, further, has_rows, call_mesh, row_axes))
            finally:
                RUNNING.reset(token)
            # Outside of `accumulate_gradients`, 1F1B ran as GPipe. GPipe returns the same, but it
            # keeps the activations of all microbatches if it is differentiated, so that is refused.
            if self.interleaves and not is_in_accumulation:
                return jax.tree.map(functools.partial(_refuse_gradient, self.microbatches), out)
            return out

        return run_stages

    def _run_stack(self, layers: Stack, call: _LayersCall) -> Any:
        """Runs a ``Stack`` in stages, and returns the output of its last layer.

        With 1F1B, no layer runs here. `accumulate_gradients` first traces the loss, to find its
        parts in front of the pipeline and behind it, and then runs the layers in a loop of its own.
        While it traces, `PIPELINE_CALL` notes this call, and returns arrays that stand for the
        results.
        """
        staged = StagedLayers(
            self,  # the sizes of the pipeline
            layers,
            call.further,
            call.mesh,
            call.row_axes,
            block_specs=dict(self.specs),
        )
        noted_call = PIPELINE_CALL.get()
        if noted_call is not None:
            return noted_call.run(staged, call.x)  # runs no layers
        return PipelineLoop(staged, call.has_rows).run(call.x)

    def _run_blocks(self, blocks: nnx.List[Any], call: _LayersCall) -> Any:
        """Calls the blocks of a list in stages, as a ``Stack`` that is made for the call.

            list     blocks 0 … L-1, each with arrays (…)
              ↓ copy
            Stack    arrays (L, …); running it writes new arrays to some of its Variables
              ↓ row i of each new array
            list     block i

        The model keeps its blocks: only their Variables get new arrays.
        """
        layers = stack([*blocks])
        flat_before = flatten_layer(layers.layers)
        # Modules in the stack are new. These modules get the tags of the first block's modules,
        # because activation shardings know modules by their tags.
        pass_tags(flatten_layer(blocks[0]), flat_before)
        out = self._run_stack(layers, call)
        flat_after = flatten_layer(layers.layers)  # the same objects, some with new arrays
        for number, block in enumerate(blocks):
            _write_row(block, number, flat_before, flat_after)
        return out

    def _find_rows(
        self,
        x: object,
        leaves: Sequence[FurtherLeaf],
        row_axes: Sequence[str],
        axes_of_rows: Callable[[jax.Array], Set[Any]],
    ) -> list[bool]:
        """Returns for each leaf in further arguments whether it is split with the batch.

        Two kinds of arrays are split: those that ``rows`` names, and those with as many rows as x
        whose first dimension is declared to be sharded like the rows of x.

        Args:
          row_axes: the mesh axes that shard the rows of x.
          axes_of_rows: returns the mesh axes over which the first dimension of an array is declared
            to be sharded.
        """
        # The first dimension, as a shape: (batch,), or () without one.
        first_dimension_of_x = next((jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(x)), ())

        def has_rows(leaf: FurtherLeaf) -> bool:
            """Whether one leaf is split with the batch."""
            array = leaf.value
            if not isinstance(array, jax.Array | np.ndarray):
                return False
            first_dimension = array.shape[:1]
            if leaf.parameter in self.rows:
                return first_dimension != (1,)  # with one row for all, an array stays whole
            # The number of rows is compared as well, because the same axes may shard a parameter.
            is_as_long_as_x = first_dimension != () and first_dimension == first_dimension_of_x
            # A NumPy array has no declared sharding.
            if not is_as_long_as_x or not row_axes or isinstance(array, np.ndarray):
                return False
            return axes_of_rows(array) >= {*row_axes}

        return [has_rows(leaf) for leaf in leaves]

    def _on_mesh(self, mesh: AnyMesh, layers: int) -> Schedule:
        """Returns the schedule with as many stages as the mesh of a call has.

        The mesh may have another number of stages than the specs, because a step may also run on
        one device, for comparison.

        Args:
          layers: the number of layers, which stages times repeats have to divide.

        Raises:
          ValueError: the mesh has no axis for the stages, or they do not divide the layers.
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

    def _check_inputs(
        self,
        layers: nnx.Module,
        x: object,
        further: Sequence[FurtherLeaf],
        has_rows: Sequence[bool],
    ) -> None:
        """Raises a ValueError if the inputs cannot be split into microbatches.

        Args:
          layers: the ``Stack``, or the list of blocks.
          has_rows: for each leaf in ``further`` whether it is split with the batch.
        """
        count = self.microbatches
        # The output of the last stage is stored S ticks after a microbatch has entered. With fewer
        # microbatches than stages, the first stage would read it for the next repeat before that.
        if self.repeats > 1 and count < self.stages:
            raise ValueError(
                f"pipeline: microbatches={count} is less than the {self.stages} stages; with "
                "repeats, the last stage would not be done when the first one goes on."
            )
        _check_captures(layers)  # refuses layers that have sown already, and perturbations
        further_with_rows = [*itertools.compress(further, has_rows)]
        leaves, _ = jax.tree_util.tree_flatten_with_path(x)
        shapes = {f"x{jax.tree_util.keystr(keys)}": jnp.shape(leaf) for keys, leaf in leaves}
        shapes |= {leaf.accessor: jnp.shape(leaf.value) for leaf in further_with_rows}
        # The first array that is no scalar tells the size of the batch; 0 if all are scalars.
        batch = next((shape[0] for shape in shapes.values() if shape), 0)
        is_batch_divided = batch > 0 and batch % count == 0
        lines_of_wrong_shapes = [
            f"  {where}: shape {shape}"
            for where, shape in shapes.items()
            if shape[:1] != (batch,) or not is_batch_divided  # scalars are wrong as well
        ]
        raise_if_any(
            ValueError,
            f"pipeline: {count} microbatches cannot be made of the inputs of the layers:",
            lines_of_wrong_shapes,
            "All need the same number of rows, which the microbatches divide. Scalars that layers "
            "only read are further arguments, blocks(x, step); those that they change, such as a "
            "loss, need one value for each row.",
        )
        # One microbatch has as many rows as the batch, so all further arguments fit. In a batch of
        # one row, a first dimension of 1 may say that there are no rows.
        if batch > 1 and count > 1:
            pairs = zip(further, has_rows, strict=True)
            _check_unsplit([leaf for leaf, is_split in pairs if not is_split], batch)

    def module_path(self, path: Path) -> Path:
        """Returns the path of the Stack, or of the list that a block is in."""
        return path[:-1] if self.blocks else path

    def report_unscheduled(self, module: str) -> None:
        """Warns that the layers of a module, given by its name, ran, but not in stages.

        Tracing calls this when the call of the user's function has ended.
        """
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

    def report_other_method(
        self, tag: Tag, method: str, args: tuple[object, ...], out: object
    ) -> None:
        """Warns if blocks of a list are called by another method, which runs without a pipeline.

        Args:
          tag: says which module was called, such as ``blocks/3``.
          method: the name of the method, which is not ``__call__``.
          args: the positional arguments of the method.
          out: the output of the method.
        """
        # The warning is for block 0 only, because all blocks are called alike. A Stack has no
        # blocks.
        if not self.blocks or not tag.path or tag.path[-1] != 0:
            return
        # A method that runs a layer returns arrays like its first arguments, (x, …) → (x, …). A
        # method that does something else, such as making a mask, is no mistake.
        returned_shapes = _shapes(out)
        if not returned_shapes or returned_shapes != _shapes(args)[: len(returned_shapes)]:
            return
        warn_or_raise(
            UnshardedWarning,
            f"pipeline: the blocks of {accessor(tag.name, tag.path[:-1])} are called by {method}, "
            "of which no pipeline is made: each device gathers their parameters, and computes all "
            "of them. Name the method __call__, and call the blocks themselves.",
            strict=False,
        )


def _write_row(block: nnx.Module, number: int, flat_before: Flat, flat_after: Flat) -> None:
    """Writes to a block its row of the arrays that have changed in a stack of blocks.

    Args:
      block: the block. Its objects and arrays have the same numbers as in the stack, because the
        stack was made of equal blocks.
      number: the index of the block in the stack.
      flat_before: the stack as it was made, with arrays (L, …).
    """

    def row(slot: int, stacked: jax.Array) -> jax.Array:
        return stacked[number]  # (L, …) → (…)

    flat = flatten_layer(block)
    # An array has changed if the stack now holds another object in its slot.
    write_back(flat, flat_after, dict(enumerate(flat_before.leaves)), in_form=row)
    # `captures` returns the indices of the Variables of `nnx.capture`, which hold the sown values,
    # (L, …). `write_back` leaves them out, because they were not there before.
    for index in captures(flat.structure):
        sown = _compat.get_value(flat_after.objects[index])
        _compat.set_value(flat.objects[index], jax.tree.map(lambda x: x[number], sown))


def _check_unsplit(leaves: Sequence[FurtherLeaf], batch: int) -> None:
    """Raises a ValueError for further arguments that have rows, although they are not split.

    An array with as many rows as the batch is most likely a mask or the like, which would not fit
    the rows of a microbatch.

    Args:
      leaves: the leaves in the further arguments that all microbatches get as they are.
    """
    arrays = [leaf for leaf in leaves if isinstance(leaf.value, jax.Array)]
    raise_if_any(
        ValueError,
        f"pipeline: further arguments of the layers with {batch} rows, as many as the batch:",
        [
            f"  {leaf.accessor}: shape {leaf.value.shape}"
            for leaf in arrays
            if leaf.value.shape[:1] == (batch,)
        ],
        "They are the same for all microbatches. Give them a first dimension of 1; or, if they "
        "belong to the rows, name them, as in pipeline(model, rows=('mask',)), or constrain "
        "them, as in with_sharding_constraint(mask, P('data')), where the layers are called.",
    )


def _check_axis_types(mesh: AnyMesh, x: object) -> None:
    """Raises a ValueError for a call on a mesh with axes that the loop cannot run with."""
    inputs = jax.tree.leaves(x)
    varying = set().union(*map(_compat.varying_axes, inputs))
    if varying:
        raise ValueError(
            "pipeline: JAX cannot map over the stages in a shard_map over "
            f"{' and '.join(map(repr, sorted(varying)))} with check_vma=True. Pass "
            "check_vma=False to it."
        )
    # The loop constrains arrays to their stages, which is for Auto axes only.
    if not axes_of_type(mesh, AxisType.Explicit):
        return
    # Without a declaration, a Stack keeps Explicit axes only if no input of it is on the mesh.
    if all(jax.typeof(leaf).sharding.mesh.empty for leaf in inputs):
        raise ValueError(
            "pipeline: the input of the Stack is on no mesh. Declare a sharding for the batch "
            "(`P()` replicates it), or use Auto axes."
        )
    raise ValueError(
        "pipeline: a Stack that is declared to run with Explicit axes cannot be a "
        "pipeline. Leave it and its layers out of activation_shardings, or use Auto "
        "axes."
    )


def parameters_of(layer: object) -> list[str]:
    """Returns the names of the parameters of a layer's ``__call__``, without ``self``.

    Positional parameters come before keyword-only ones.
    """
    parameters = inspect.signature(type(layer).__call__).parameters.values()
    return [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)][1:]


def _shapes(tree: object) -> list[tuple[int, ...]]:
    """Returns the shapes of the arrays in a pytree, without the arrays in modules."""
    leaves = jax.tree.leaves(tree, is_leaf=_compat.is_graph_object)
    return [x.shape for x in leaves if _compat.is_plain_array(x)]


def _refuse_gradient(microbatches: int, x: jax.Array) -> jax.Array:
    """Returns x, an output of the layers, such that differentiating it is an error.

    ``microbatches`` is their number, for the message.
    """
    text = message(
        'pipeline: schedule="1f1b" has gradients only in accumulate_gradients, which knows the '
        "loss of each microbatch:",
        [
            "  another transform differentiates the call of the layers, and would keep the "
            "activations of all microbatches"
        ],
        f"Write accumulate_gradients(loss, steps={microbatches}) in place of value_and_grad(loss). "
        "Or leave out the schedule.",
    )
    return without_gradient(text, "gradient-outside-of-the-schedule", x)


def _check_captures(layers: nnx.Module) -> None:
    """Raises a ValueError if ``nnx.capture`` cannot collect from these layers in a pipeline.

    There are two such cases. The layers have sown in an earlier call, and the values of both calls
    would have to be merged. Or there are perturbations, which are inputs, so that each microbatch
    would need its rows of them.
    """
    for _, module in modules_in(layers):
        # `nnx.capture` gives each module a tuple of Variables. Each of these Variables holds a dict
        # of sown values, which is empty until the layers have sown, or is a perturbation.
        for variable in getattr(module, _compat.CAPTURES, ()):
            if isinstance(variable, nnx.Perturbation) or _compat.get_value(variable):
                raise ValueError(
                    "pipeline: nnx.capture collects what layers sow in one call of the Stack, and "
                    "no perturbations. Use a nnx.capture for each call, or leave out the pipeline."
                )


def _lines_of_state(further: Further) -> list[str]:
    """Returns a line of an error for each Variable of further arguments that is no parameter."""
    lines = []
    for leaf in further_leaves(further):
        if not _compat.is_graph_object(leaf.value):  # neither a module nor a Variable
            continue
        flat = flatten_layer(leaf.value)
        for location in locations_of(flat):
            if location.object_index is None:  # an array outside of Variables
                continue
            variable = flat.objects[location.object_index]
            if not isinstance(variable, nnx.Param):
                name = accessor(leaf.accessor, location.path)
                lines.append(f"  {name}: {type(variable).__name__}")
    return lines


@contextlib.contextmanager
def _explain_changed_arguments(further: Further) -> Iterator[None]:
    """Within the block, explains Flax's error for a change of a Variable of further arguments.

    Flax refuses to change a Variable of another trace, but its error does not name the Variable. So
    this raises a ValueError that lists all Variables of the further arguments but parameters, which
    layers only read. If there are none, Flax's error is about something else and stays as it is.
    """
    try:
        yield
    except _compat.TraceContextError as error:
        lines = _lines_of_state(further)
        if not lines:
            raise
        head = "pipeline: layers change Variables of their further arguments. Of those, there are:"
        remedy = (
            "Layers of all stages run at once, so they cannot share what they change, such as "
            "random streams and statistics. Give each layer its own, as an attribute."
        )
        raise ValueError(message(head, lines, remedy)) from error


def has_interleaved_pipeline(objects: Iterable[object]) -> bool:
    """Whether a strategy has chosen ``schedule="1f1b"`` for some of these modules.

    A module of the arguments has a tag with its path, and with the activation shardings that may be
    for it (``sources``). One of these may have a schedule for calls of the module.
    """
    for module in objects:
        tag = _compat.tag_of(module) if _compat.is_node(module) else None
        if tag is None:
            continue
        for source in tag.sources:
            schedule = source.find_schedule(tag.path, module, "__call__")
            if isinstance(schedule, Schedule) and schedule.interleaves:
                return True
    return False
