"""The stages between a function and its execution, in the names of the user's own arguments.

They mirror ``jax.stages``, with every pytree in the form of the user's arguments and result:
``(positional, keywords)`` for inputs, without static arguments, and the function's own result for
outputs. In both a module is an ``nnx.State`` by path, and a bare Variable is its value. Variables
that the function did not change are not outputs of the program: where the result holds them, the
information is that of the input. Whatever a backend does not provide is None.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from .. import _compat
from ..activations.calls import Recorder
from ..analysis.activation_table import ActivationTable, activation_rows
from ..analysis.collectives import Collectives, collectives_of
from ..analysis.cost import COMPILED, LOWERED, Cost, cost_of
from ..analysis.hardware import Hardware
from ..analysis.hlo import Module, parse
from ..analysis.instructions import padded_bytes
from ..analysis.loops import with_loops
from ..analysis.memory import Memory, memory_of
from ..analysis.meshes import MeshDescription
from ..analysis.parameters import ParameterTable, argument_row, mesh_of, variable_type
from ..analysis.purposes import inputs_of
from ..analysis.roofline import Roofline, roofline_of
from ..core.call import failed, guarded, run
from ..core.call_context import Caller, called_by
from ..core.failures import explained, raise_instead
from ..core.guard.store import Guards
from ..core.outcome import Outcome
from ..core.plan import Plan
from ..core.slot_pytree import user_tree
from ..diagnostics.progress import progress
from .lifted_function import LiftedFunction
from .stage_checks import check_structure, misfit, with_statics

if TYPE_CHECKING:
    from ..report.program import ProgramReport

S = TypeVar("S", bound="Stage")


class Stage:
    """What all stages have in common.

    Methods and attributes that are not listed here, such as ``cost_analysis()``, are those of JAX's
    stage.
    """

    def __init__(
        self,
        stage: Any,
        lifted: LiftedFunction[..., Any],
        plan: Plan,
        statics: tuple[Any, ...],
        recorder: Recorder,
    ):
        self._stage = stage
        self._lifted = lifted
        self._plan = plan
        self._statics = statics  # the static arguments
        self._recorder = recorder  # knows the calls of modules
        self._guards = Guards(None, lambda _: _compat.direct_form(stage))
        # Python puts the static arguments in.
        routes = [] if statics else self._guards.routes
        self._direct = (routes, lifted._bound, None, None)
        empty = [None] * stage.out_tree.num_leaves
        self._outcome: Outcome = jax.tree_util.tree_unflatten(stage.out_tree, empty)[-1]

    @property
    def args_info(self) -> Any:
        """The aval of each argument array, and whether it is donated (``jax.stages.ArgInfo``)."""
        return self._inputs(self._stage.args_info)

    @property
    def in_tree(self) -> jax.tree_util.PyTreeDef:
        """The tree structure of ``(positional, keywords)``."""
        return jax.tree_util.tree_structure(self.args_info)

    @property
    def in_avals(self) -> Any:
        """The aval of each argument array."""
        return self._inputs(self._stage.in_avals)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Which leaves of ``in_tree`` are donated."""
        infos = jax.tree_util.tree_leaves(self.args_info)
        return tuple(i for i, info in enumerate(infos) if info.donated)

    @property
    def out_info(self) -> Any:
        """Shape, dtype and, if known, sharding of each array of the result."""
        return self._outputs(self._stage.out_info, [map(_shape_of, self._stage.args_info[0])])

    @property
    def out_tree(self) -> jax.tree_util.PyTreeDef:
        """The tree structure of the result."""
        outcome = self._outcome
        result = user_tree(outcome.structure, [0] * len(outcome.sources))
        return jax.tree_util.tree_structure(result)

    @property
    def updates_info(self) -> Any:
        """Shape and dtype of the arrays that the call writes back, in the form of the inputs.

        It has only changed Variables, not the objects that the call adds.
        """
        before, outcome = self._plan.structure, self._outcome
        arrays = outcome.arrays([None] * before.num_leaves, self._stage.out_info[:-1])
        found: dict[int, Any] = {}
        for index in (*outcome.values, *outcome.metadata):
            slots = zip(before.slots[index], outcome.structure.slots[index], strict=False)
            found |= {old: arrays[new] for old, new in slots if arrays[new] is not None}
        values = [found.get(slot) for slot in range(before.num_leaves)]
        return user_tree(before, values, keep=lambda slots: not found.keys().isdisjoint(slots))

    def activations(self) -> ActivationTable:
        """How what modules return is sharded, in the order in which they return it.

        A module that is called several times with equal results has one row. Calling this for the
        first time traces the function once more. Under ``shard_map`` there are none.
        """
        return activation_rows(self._recorder.calls)

    def _next(self, kind: type[S], stage: Any) -> S:
        """The next stage."""
        return kind(stage, self._lifted, self._plan, self._statics, self._recorder)

    def _reported(self) -> AbstractContextManager[None]:
        """Attributes what JAX reports within the block to this plan."""
        return called_by(Caller(None, (), plan=self._plan, leaves=self._recorder.leaves))

    def _run(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the stage of JAX for the user's arguments; ``kind``: what was done for them.

        Raises:
          TypeError: their structure differs from that for which the function was ``kind``.
          ValueError: their shardings differ from those for which it was compiled.
        """
        plan, lifted, stage = self._plan, self._lifted, self._stage
        bound = lifted._bound
        args, kwargs = with_statics(plan.signature, self._statics, len(bound), args, kwargs)
        args, is_top = (*bound, *args), _compat.trace_is_clean()
        found = self._guards.find(args, kwargs) if is_top else None
        if found is None:
            call, flat = lifted._split(args, kwargs, record=is_top)
            check_structure(plan, kind, call, flat)
            if is_top:
                self._guards.add(plan, flat, args, kwargs, is_new=True)
        else:
            _, flat = found
        if not is_top:
            return run(plan, flat, stage)
        try:
            return run(plan, flat, _compat.direct_form(stage))
        except (ValueError, TypeError) as error:
            raise_instead(error, functools.partial(misfit, plan, flat.leaves, stage, error))
            raise

    @_compat.api_boundary
    def _failed(self, plan: Plan, leaves: Sequence[Any], error: BaseException) -> None:
        failed(plan, leaves, error)
        if isinstance(error, ValueError | TypeError):
            raise_instead(error, functools.partial(misfit, plan, leaves, self._stage, error))

    def _inputs(self, per_argument: Any) -> Any:
        return user_tree(self._plan.structure, per_argument[0])

    def _outputs(self, per_output: Any, per_argument: Any) -> Any:
        """What JAX reports for its outputs and arguments, in the form of the result."""
        values = self._outcome.arrays([*per_argument[0]], per_output[:-1])
        return user_tree(self._outcome.structure, values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"<nnx_sharding.stages.{type(self).__name__} of {self._plan.fun_name}>"


class Traced(Stage):
    """A function traced for certain argument types; ready to be lowered.

    Attributes:
      jaxpr: the jaxpr over flat arrays; its arguments are in the order of ``arg_names``.
      fun_name: the name of the function.
    """

    @property
    def arg_names(self) -> tuple[str, ...]:
        """The expression for each argument of the jaxpr, such as ``model.up.kernel``."""
        return tuple(self._plan.names)

    @property
    def out_avals(self) -> Any:
        """The aval of each array of the result."""
        return self._outputs(self._stage.out_avals, self._stage.in_avals)

    @_compat.api_boundary
    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, **unknown: Any
    ) -> Lowered:
        """Lowers to the compiler's input.

        Args:
          lowering_platforms: platforms such as ``("tpu",)``; None for the current one.
          **unknown: other options, as ``jax.export.export`` passes, raise a ``TypeError``.
        """
        if unknown:
            raise TypeError(
                f"{self._plan.fun_name}.lower has no option {', '.join(sorted(unknown))}. "
                "If this comes from jax.export.export: it takes functions of arrays only; use "
                "nnx_sharding.export.export in the same way."
            )
        leaves = list(map(_shape_of, self._stage.in_avals[0]))
        options = {"lowering_platforms": lowering_platforms}
        with self._reported():
            lowered = explained(self._plan, leaves, lambda *_: self._stage.lower(**options))
        return self._next(Lowered, lowered)

    @_compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the jaxpr for these arguments, and updates modules in place."""
        return self._run("traced", args, kwargs)


class Lowered(Stage):
    """A function lowered to the compiler's input (StableHLO); ready to be compiled.

    ``as_text(dialect=None, *, debug_info=False)``, ``compiler_ir(dialect=None)`` and
    ``cost_analysis()``, the estimates made before optimisation, are those of JAX.
    """

    @_compat.api_boundary
    def compile(
        self,
        compiler_options: dict[str, Any] | None = None,
        *,
        device_assignment: Sequence[jax.Device] | None = None,
    ) -> Compiled:
        """Compiles for the devices of the shardings.

        Args:
          compiler_options: options for XLA.
          device_assignment: the devices to compile for, where the shardings name none.
        """
        options = {} if device_assignment is None else {"device_assignment": device_assignment}
        with progress(f"compile {self._plan.fun_name}"), self._reported():
            program = self._stage.compile(compiler_options, **options)
        return self._compiled_to(program)

    def _compiled_to(self, program: Any) -> Compiled:
        """The compiled function with this program of JAX."""
        compiled = self._next(Compiled, program)
        compiled._lowered = self._stage
        return compiled

    def cost(self) -> Cost | None:
        """What all devices together compute, before optimisation; None if unavailable."""
        return _lowered_cost(self._stage)


class Compiled(Stage):
    """A compiled function. Calling it updates modules in place, like the function itself.

    ``as_text()``, the optimised program, ``cost_analysis()``, ``memory_analysis()`` of one device
    and ``runtime_executable()`` are those of JAX; each returns None if it is unavailable.
    """

    _lowered: Any

    @_compat.api_boundary
    def _flattened(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Static arguments may be given, or left out.

        Raises:
          TypeError: structure, statics, shapes or dtypes differ from those that were lowered.
          ValueError: arrays are committed to other shardings than those that were lowered.
        """
        return self._run("compiled", args, kwargs)

    __call__ = guarded(_flattened)

    @staticmethod
    def call(compiled: Compiled, /, *args: Any, **kwargs: Any) -> Any:
        """The call as a function of the compiled object."""
        return compiled(*args, **kwargs)

    @property
    def input_shardings(self) -> Any:
        """The sharding of each argument array; None for one that the program does not use."""
        return self._inputs(self._stage.input_shardings)

    @property
    def output_shardings(self) -> Any:
        """The sharding of each array of the result."""
        return self._outputs(self._stage.output_shardings, self._stage.input_shardings)

    @property
    def input_formats(self) -> Any:
        """The ``Format`` (layout and sharding) of each argument array."""
        return self._inputs(self._stage.input_formats)

    input_layouts = input_formats  # the older name

    @property
    def output_formats(self) -> Any:
        """The ``Format`` of each array of the result."""
        return self._outputs(self._stage.output_formats, self._stage.input_formats)

    def cost(self, *, loops: bool = True) -> Cost | None:
        """What one device computes in a call, after optimisation; None if unavailable.

        Args:
          loops: whether to count the body of a loop as often as it runs; XLA counts it once. The
            ``stage`` of the result says what remains open, such as loops of unknown length.
        """
        if loops:
            return self._cost
        return cost_of(self._stage.cost_analysis(), COMPILED)

    @functools.cached_property
    def _cost(self) -> Cost | None:
        cost = self.cost(loops=False)
        return with_loops(cost, self._module) if cost else None

    def lowered_cost(self) -> Cost | None:
        """What all devices compute in a call, before optimisation; None if unavailable."""
        return _lowered_cost(self._lowered)

    def memory(self) -> Memory | None:
        """The memory that the program takes on one device; None if unavailable."""
        used = [row for row in self.parameters() if row.used]
        by_path = {row.path: row.bytes_per_device for row in used}
        analysis = self._stage.memory_analysis()
        if getattr(analysis, "argument_size_in_bytes", None) not in (None, sum(by_path.values())):
            inputs = inputs_of(self._module, used)  # whose layouts have the tiles of TPUs
            by_path |= {
                r.path: padded_bytes(i.shape_text) for r, i in zip(used, inputs, strict=False)
            }
        return memory_of(analysis, by_path)

    def collectives(self) -> Collectives | None:
        """What the devices exchange, with bytes and mesh axes; None if that is unknown."""
        return self._collectives

    @functools.cached_property
    def _module(self) -> Module:
        """The parsed program."""
        return parse(self._stage.as_text() or "")

    @functools.cached_property
    def _collectives(self) -> Collectives | None:
        return collectives_of(self._module, mesh_of(self.shardings()), self.parameters())

    @functools.cached_property
    def _report(self) -> ProgramReport:
        # Imported here, as the only module that is further up.
        from ..report.program import describe

        return describe(self, self._plan.fun_name, self._stage.as_text())

    def roofline(self, hardware: Hardware | str) -> Roofline:
        """The time of a call at peak rates; loop bodies are counted as often as they run.

        Args:
          hardware: the peak figures of a device, or a key of
            :data:`nnx_sharding.analysis.HARDWARE`, such as ``"TPU v5e"``.
        """
        mesh = mesh_of(self.shardings())
        described = None if mesh is None else MeshDescription.of(mesh)
        return roofline_of(self.cost(), self.collectives(), hardware, described)

    def report(
        self, name: str | None = None, *, hardware: Hardware | str | None = None
    ) -> ProgramReport:
        """All of this in one object, which can be printed, saved as JSON and compared.

        The first call traces the function once more, for the activations.

        Args:
          name: the name in the report; None for the name of the function.
          hardware: as for :meth:`roofline`; None for the devices that it was compiled for; if the
            table does not have these, the roofline is None.
        """
        report = self._report if hardware is None else self._report.with_roofline(hardware)
        return report if name is None else dataclasses.replace(report, name=name)

    def parameters(self) -> ParameterTable:
        """How each argument array is sharded, including those that the program does not use."""
        plan, rows = self._plan, ParameterTable()
        shardings = zip(self._stage.input_shardings[0], plan.shardings, strict=True)
        infos = self._stage.args_info[0]
        kinds: list[str | None] = [None] * len(infos)
        for index, slots in enumerate(plan.structure.slots):
            for slot in slots:
                kinds[slot] = variable_type(plan.structure, index)
        for path, info, kind, (actual, declared) in zip(
            plan.names, infos, kinds, shardings, strict=True
        ):
            # A hijax Variable is a list of the arrays in it.
            arrays = jax.tree_util.tree_leaves(info, is_leaf=lambda x: hasattr(x, "shape"))
            each = actual if isinstance(actual, list | tuple) else [actual] * len(arrays)
            rows += [
                argument_row(path, array, used or declared, used=used is not None, variable=kind)
                for array, used in zip(arrays, each, strict=True)
            ]
        return rows

    def shardings(self) -> list[Any]:
        """The shardings of all arrays that the program is given and returns."""
        inputs = [*self._stage.input_shardings[0], *self._plan.shardings]
        try:
            return [*inputs, *jax.tree_util.tree_leaves(self._stage.output_shardings)]
        except ValueError:  # JAX counts refs as outputs, and then finds too many
            return inputs


def _shape_of(aval: Any) -> Any:
    """The shape and dtype of an aval; itself for a hijax Variable, which has none."""
    try:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    except AttributeError:
        return aval


def _lowered_cost(stage: Any) -> Cost | None:
    """The cost before optimisation, which devices without a runtime do not have."""
    try:
        return cost_of(stage.cost_analysis(), LOWERED)
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None
