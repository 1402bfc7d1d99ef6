"""The shardings of outputs of modules for which nothing is declared, if a strategy infers them.

Modules of a strategy run on Auto axes, where the compiler chooses (``axis_types.py``). An output of
a layer whose last dimensions are the columns of a kernel is sharded like these (``columns.py``).
When a module on Auto axes returns to a caller on Explicit ones, each new array needs a type, which
says how all of its dimensions are sharded (:meth:`InferredOutputs.type_output`).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..core.constrain import apply_shardings, mesh_in_trace, retype, type_spec
from ..specs.fitting import axes_of_type, keep_axes, spec_axes
from ..specs.types import AnyArray, AnyMesh, AxisName
from .axis_types import input_like, opened, output_spec
from .calls import Frame
from .columns import spec_of_columns
from .intercept import Keywords
from .whole_outputs import WholeOutputs


class InferredOutputs:
    """Chooses the shardings of outputs in one trace.

    The private attributes hold the arguments of ``__init__``.
    """

    def __init__(
        self,
        mesh: AnyMesh | None,
        explicit_axes: frozenset[AxisName],
        batch_axes: frozenset[AxisName],
        whole_outputs: WholeOutputs,
    ):
        """Keeps what is known of the trace.

        Args:
          mesh: the mesh of the trace; None if there is none.
          explicit_axes: the Explicit axes in the types of the arguments.
          batch_axes: the mesh axes that shard the rows of the data.
          whole_outputs: gets the outputs that are whole, or known to have sharded columns.
        """
        self._mesh, self._explicit_axes, self._batch_axes = mesh, explicit_axes, batch_axes
        self._whole_outputs = whole_outputs

    def shard_columns(self, frame: Frame, x: AnyArray) -> AnyArray:
        """Shards an output of a layer on Auto axes like the columns of its kernel.

        A value that is no array, or has no known columns, is returned unchanged.
        """
        spec = self._spec_of_columns(frame, x) if isinstance(x, jax.Array) else None
        if spec is None:
            return x
        # The spec is remembered even if no axis shards the columns. Then the columns of the model's
        # output are known to be whole.
        self._whole_outputs.end_layer(x, spec)  # see `WholeOutputs`: it warns of gathered columns
        names_axes = any(spec_axes(spec))
        if self._mesh is None or not names_axes:
            return x
        [constrained] = apply_shardings([x], [NamedSharding(mesh_in_trace(self._mesh), spec)])
        return constrained

    def type_output(
        self,
        x: jax.Array,
        frame: Frame,
        inputs: tuple[tuple[Any, ...], Keywords],
        *,
        auto_axes: frozenset[AxisName],
        outer: AbstractMesh,
    ) -> jax.Array:
        """Types an array that a module made on Auto axes for its caller, who has Explicit ones.

        On the caller's axes, the type of each array says how it is sharded. While the module ran,
        the axes were Auto: the compiler chooses shardings there, and the type of ``x`` says nothing
        of these axes. So this method decides on them, by the first of these that is known:

        1. the sharding that was chosen for this very array: here, or by the user for a module in
           this one;
        2. its type, over axes that stayed Explicit;
        3. the columns of the layer's kernel;
        4. the input of the same shape and dtype, or else the leading dimensions of the first input.

        Args:
          x: the array, typed on the mesh on which the module ran.
          frame: the call of the module, with what was chosen for arrays in it.
          inputs: its positional and keyword arguments, typed on the caller's mesh.
          auto_axes: the axes that were Auto for the call.
          outer: the caller's mesh, on which these axes are Explicit.

        Returns:
          The same array, typed on ``outer``.
        """
        explicit = axes_of_type(outer, AxisType.Explicit)
        chosen_here = frame.sharding_of(x)
        chosen = chosen_here or frame.declared_within(x)
        spec: PartitionSpec | None
        if chosen is not None:
            spec = keep_axes(chosen.spec, explicit)
        elif type_spec(x) is not None:
            spec = opened(type_spec(x))  # leaves dimensions without an axis open
        else:
            # The columns of the model itself (its path is empty) stay whole, because JAX refuses to
            # index sharded columns, and losses index logits.
            is_inner = bool(frame.tag.path)
            columns = self._spec_of_columns(frame, x) if is_inner else None
            spec = None if columns is None else keep_axes(columns, explicit)
        like = input_like(x, inputs)
        assert like is not None  # axes are Auto only for a call with an input on Explicit axes
        # The dimensions that ``spec`` leaves open become like those of ``like``: all of them if the
        # shapes are equal, or else the leading ones.
        typed: jax.Array = retype(x, outer, output_spec(x, like, spec))
        if chosen_here is not None:
            frame.note_sharding(typed, jax.typeof(typed).sharding)  # reports show it
        elif chosen is None and frame.is_outermost:
            # On Auto axes its columns, for example of logits, may be sharded, but its type says
            # that they are whole. So they are gathered, and a warning follows if the function uses
            # them.
            column_axes = auto_axes - self._batch_axes  # the batch axes shard rows
            sizes = {axis: outer.shape[axis] for axis in column_axes}
            self._whole_outputs.add(frame, typed, like, sizes)
        return typed

    def _spec_of_columns(self, frame: Frame, x: jax.Array) -> PartitionSpec | None:
        """Returns the spec of an output whose last dimensions are columns of a kernel, or None.

        The result is None if the user declares all shardings (no source has ``infer``), and on Auto
        axes, because there the compiler alone chooses.
        """
        is_inferred = any(source.infer for source in frame.tag.sources)
        if not self._explicit_axes or not is_inferred:
            return None
        # Axes of the batch shard the rows of the output, so they cannot shard its columns, too.
        axes = self._explicit_axes.difference(self._batch_axes)
        return spec_of_columns(frame.module, frame.tag, x, axes)
