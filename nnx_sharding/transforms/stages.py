"""The stages of lifted functions: what :mod:`nnx_sharding.stages` makes public, and how it is made.

They translate between the arrays by slot of JAX's stages and the form of the user's arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from flax import nnx

from .. import _compat
from ..activations.calls import Recorder
from ..analysis.by_module import MemoryOverTime, ModuleTable
from ..analysis.collectives import Collectives, collectives_of
from ..analysis.cost import COMPILED, LOWERED, Cost, cost_of
from ..analysis.hardware import HARDWARE, Hardware, hardware_of
from ..analysis.hlo import Module, parse
from ..analysis.instructions import padded_bytes
from ..analysis.memory import Memory, memory_of
from ..analysis.meshes import MeshDescription
from ..analysis.parameters import ActivationTable, ParameterTable, mesh_of
from ..analysis.program import ProgramReport, describe
from ..analysis.purposes import inputs_of
from ..analysis.roofline import Roofline, roofline_of
from ..analysis.work import with_loops
from ..core.call import failed, guarded, run
from ..core.call_context import Caller, called_by
from ..core.failures import explained, raise_misfit
from ..core.flatten import Flat
from ..core.guard.store import Guards
from ..core.outcome import Outcome
from ..core.plan import Plan
from ..core.signature import Call
from ..core.static_equality import Static
from ..core.structure import LEAF, Child, Container, StaticObject, Structure
from ..core.unflatten import value_at
from ..diagnostics.differences import arguments_of, differences
from ..diagnostics.progress import progress
from ..errors import message, see
from ..specs.paths import plain_key
from .module_memory import CompileWith, Dumped, argument_rows, dumped, explain_memory

S = TypeVar("S", bound="Stage")


class Stage:
    """What all stages have in common.

    Methods and attributes that are not listed here, such as ``cost_analysis()``, are those of JAX's
    stage.
    """

    def __init__(
        self,
        stage: Any,
        lifted: Any,  # a Lifted
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
        # Without duplicates, as from a loop that is traced twice.
        return ActivationTable(dict.fromkeys(self._recorder.calls))

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
        plan, stage, is_top = self._plan, self._stage, _compat.trace_is_clean()
        args, kwargs = self._with_statics(args, kwargs)
        found = self._guards.find(args, kwargs) if is_top else None
        if found is None:
            call, flat = self._lifted._split(args, kwargs, record=is_top)
            self._check_structure(kind, call, flat)
            if is_top:
                self._guards.add(plan, flat, args, kwargs, is_new=True)
        else:
            _, flat = found
        if not is_top:
            return run(plan, flat, stage)
        try:
            return run(plan, flat, _compat.direct_form(stage))
        except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
            self._explain(plan, flat.leaves, error)
            raise

    @_compat.api_boundary
    def _failed(
        self, plan: Plan, leaves: Sequence[Any], error: BaseException, objects: Sequence[Any]
    ) -> None:
        failed(plan, leaves, error)
        self._explain(plan, leaves, error)

    def _explain(self, plan: Plan, leaves: Sequence[Any], error: BaseException) -> None:
        raise_misfit(plan, leaves, self._stage, error)

    def _with_statics(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of a call: with bound objects, and static ones that were left out."""
        signature, bound = self._plan.signature, self._lifted._bound
        statics: dict[Any, Any] = dict(zip(signature.static_order, self._statics, strict=True))
        keywords = {name: statics.pop(name) for name in signature.static_keywords}
        missing = [i for i in sorted(statics) if i >= len(bound)]
        args = (*bound, *args)
        if missing and len(args) == len(signature.names) - len(missing):
            for position in missing:
                args = (*args[:position], statics[position], *args[position:])
        return args, {**keywords, **kwargs}

    def _check_structure(self, kind: str, call: Call, flat: Flat) -> None:
        """Raises a ``TypeError`` for arguments of another structure than those of the plan."""
        plan = self._plan
        before, after = (plan.signature, plan.structure), (call.signature, flat.structure)
        if before == after:
            return
        changes = differences(before, after)
        if before[0] != after[0]:
            changes.insert(0, f"arguments {arguments_of(before[0])} → {arguments_of(after[0])}")
        head = f"{plan.fun_name} was {kind} for other arguments than it is called with now:"
        text = message(head, [f"  {change}" for change in changes], "Lower it again for these.")
        raise see(TypeError(text), anchor="compiled-for-another-structure")

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

        def compile_with(stage: Any, more: Mapping[str, Any]) -> Any:
            with progress(f"compile {self._plan.fun_name}"), self._reported():
                return stage.compile({**(compiler_options or {}), **more} or None, **options)

        try:
            program = compile_with(self._stage, {})
        except jax.errors.JaxRuntimeError as error:
            explain_memory(error, self._plan, lambda: self._recorder, compile_with)
            raise
        return self._compiled_to(program, compile_with)

    def _compiled_to(self, program: Any, compile_with: CompileWith) -> Compiled:
        """The compiled function with this program of JAX, and what compiles it again."""
        compiled = self._next(Compiled, program)
        compiled._compile_with = compile_with
        return compiled

    def cost(self) -> Cost | None:
        """What all devices together compute, before optimisation; None if unavailable."""
        try:
            return cost_of(self._stage.cost_analysis(), LOWERED)
        except (NotImplementedError, jax.errors.JaxRuntimeError):  # devices without a runtime
            return None


class Compiled(Stage):
    """A compiled function. Calling it updates modules in place, like the function itself.

    ``as_text()``, the optimised program, ``cost_analysis()``, ``memory_analysis()`` of one device
    and ``runtime_executable()`` are those of JAX; each returns None if it is unavailable.
    """

    _compile_with: CompileWith

    @_compat.api_boundary
    def _flattened(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Static arguments may be given, or left out.

        Raises:
          TypeError: structure, statics, shapes or dtypes differ from those that were lowered.
          ValueError: arrays are committed to other shardings than those that were lowered.
        """
        return self._run("compiled", args, kwargs)

    __call__ = guarded(_flattened)

    def _explain(self, plan: Plan, leaves: Sequence[Any], error: BaseException) -> None:
        super()._explain(plan, leaves, error)
        explain_memory(error, plan, lambda: self._recorder, self._compile_with)

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
        # Compilers for GPUs that are not at hand estimate nothing, but write the program.
        cost = self.cost(loops=False) or Cost(0.0, 0.0, 0.0, COMPILED)
        return with_loops(cost, self._module)

    def memory(self) -> Memory | None:
        """The memory that the program takes on one device; None if unavailable.

        Printing it says what holds the peak, and compiles like :meth:`by_module` for this.
        """
        used = [row for row in self.parameters() if row.used]
        by_path = {row.path: row.bytes_per_device for row in used}
        analysis = self._stage.memory_analysis()
        if getattr(analysis, "argument_size_in_bytes", None) not in (None, sum(by_path.values())):
            inputs = inputs_of(self._module, used)  # whose layouts have the tiles of TPUs
            by_path |= {
                r.path: padded_bytes(i.shape_text) for r, i in zip(used, inputs, strict=False)
            }
        memory = memory_of(analysis, by_path)
        return memory and dataclasses.replace(memory, by_module=self.by_module)

    def by_module(
        self, depth: int | None = None, *, hardware: Hardware | str | None = None
    ) -> ModuleTable:
        """Memory and cost by module: what each holds at the peak, computes and sends.

        The first call traces and compiles the function once more, which takes as long as
        ``compile``: with the paths of modules in the names of operations, and with the XLA option
        ``xla_dump_to``, for the files in which the compiler says where it puts each array.

        Args:
          depth: how many attributes or keys below an argument modules are listed; those further
            down are part of them. None lists all.
          hardware: for the column of seconds, as for :meth:`roofline`; None for the devices that it
            was compiled for.

        Returns:
          The table. Its memory is None where the compiler writes no such files; ``why`` says so.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from nnx_sharding import jit
          >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jnp.tanh)
          >>> compiled = jit(lambda model, x: model(x)).lower(model, jnp.ones((4, 8))).compile()
          >>> table = compiled.by_module()
          >>> table.total("model.layers[0]").flops
          1088
          >>> table.total("model").at_peak["parameters"]
          576
        """
        mesh = mesh_of(self.shardings())
        kind = HARDWARE.get(mesh.devices.flat[0].device_kind) if mesh is not None else None
        peak = kind if hardware is None else hardware_of(hardware)
        table = self._dumped.table(self.parameters(), mesh, peak)
        return table if depth is None else table.at_depth(depth)

    def memory_over_time(self) -> MemoryOverTime:
        """The memory in use over one call, and the module that runs; compiles like `by_module`."""
        return self.by_module().over_time

    @functools.cached_property
    def _dumped(self) -> Dumped:
        return dumped(self._recorder, self._compile_with)

    def collectives(self) -> Collectives | None:
        """What the devices exchange, with bytes and mesh axes; None if that is unknown."""
        return self._collectives

    @functools.cached_property
    def _module(self) -> Module:
        """The parsed program."""
        return parse(self._stage.as_text() or "")

    @functools.cached_property
    def _collectives(self) -> Collectives | None:
        return collectives_of(
            self._module, mesh_of(self.shardings()), self.parameters(), self._updated()
        )

    def _updated(self) -> list[str | None]:
        """The path of the Variable that each array of the result updates, or None."""
        before, outcome, tree = self._plan.structure, self._outcome, self._stage.out_tree
        numbers = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))[:-1]
        arrays = outcome.arrays([None] * before.num_leaves, numbers)
        paths: list[str | None] = [None] * tree.num_leaves
        for index in (*outcome.values, *outcome.metadata):
            for old, new in zip(before.slots[index], outcome.structure.slots[index], strict=False):
                if arrays[new] is not None:
                    paths[arrays[new]] = self._plan.names[old]
        return paths

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    @functools.cached_property
    def _report(self) -> ProgramReport:
        return describe(self, self._plan.fun_name, self._stage.as_text())

    def roofline(self, hardware: Hardware | str) -> Roofline:
        """The time of a call at peak rates; loop bodies are counted as often as they run.

        Args:
          hardware: the peak figures of a device, or a key of
            :data:`nnx_sharding.analysis.HARDWARE`, such as ``"TPU v5e"``.
        """
        mesh, cost, collectives = mesh_of(self.shardings()), self.cost(), self.collectives()
        if mesh is None:
            return roofline_of(cost, collectives, hardware)
        platform = mesh.devices.flat[0].platform
        return roofline_of(cost, collectives, hardware, MeshDescription.of(mesh), platform)

    def report(
        self,
        name: str | None = None,
        *,
        hardware: Hardware | str | None = None,
        by_module: bool = False,
    ) -> ProgramReport:
        """All of this in one object, which can be printed, saved as JSON and compared.

        The first call traces the function once more, for the activations.

        Args:
          name: the name in the report; None for the name of the function.
          hardware: as for :meth:`roofline`; None for the devices that it was compiled for; if the
            table does not have these, the roofline is None.
          by_module: whether it has the table of :meth:`by_module`, for which the program is
            compiled once more.
        """
        report = self._report if hardware is None else self._report.with_roofline(hardware)
        if by_module:
            report = dataclasses.replace(report, by_module=self.by_module(hardware=hardware))
        return report if name is None else dataclasses.replace(report, name=name)

    def parameters(self) -> ParameterTable:
        """How each argument array is sharded, including those that the program does not use."""
        plan = self._plan
        used = self._stage.input_shardings[0]
        return argument_rows(plan, self._stage.args_info[0], used, plan.shardings)

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


def user_tree(
    structure: Structure,
    values: Sequence[Any],
    keep: Callable[[tuple[int, ...]], bool] = lambda _: True,
    objects: Sequence[Any] | None = None,
) -> Any:
    """Values by slot in the form of the structure's root, with None for those not to ``keep``.

    States hold the ``objects`` by entry, or the values of Variables.
    """

    def build(child: Child, slots: Iterator[int]) -> Any:
        if child is LEAF:
            slot = next(slots)
            return values[slot] if keep((slot,)) else None
        if isinstance(child, Container):
            parts = [build(part, slots) for part in child.children]
            return jax.tree_util.tree_unflatten(child.treedef, parts)
        if isinstance(child, Static | StaticObject):
            return None
        assert isinstance(child, int)
        if isinstance(structure.entries[child], StaticObject):
            return None
        flat = {
            tuple(map(plain_key, x.path)): value_at(structure, x, values)
            if objects is None or x.entry is None
            else objects[x.entry]
            for x in structure.walk(child, slots)
            if keep(x.slots)
        }
        return flat[()] if () in flat else nnx.from_flat_state(flat)

    return build(structure.root, iter(structure.root_slots))
