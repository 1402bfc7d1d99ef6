"""The stages of lifted functions: what :mod:`nnx_sharding.stages` makes public.

JAX's stages know flat arrays: the arrays of the arguments, each in a *slot* (its position), and the
arrays of the results, in groups of one sharding each. Each class here holds the stage of JAX, and
translates both into the user's pytrees (:func:`user_tree`). For that it has the *plan* and the
*outcome*. The plan holds the `Structure` of the arguments, which describes modules as a treedef
describes pytrees. The outcome says for each array after the call whether it is an output or an
argument. A *guard* recognizes the arguments of an earlier call, so that they need not be flattened
again. Calls begin in C (`guarded`), which tries the guards. A call whose arguments no guard knows
continues in ``_flattened``, and an error of a call in C is given to ``_failed``.

Figures of compiled programs are in `figures.py`, which is imported when one is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
from flax import nnx
from jax.sharding import Sharding

from .. import _compat
from .._compat import cached_property
from ..activations.calls import Recorder
from ..core.call import run
from ..core.call_context import Caller, called_by
from ..core.compiled_mismatches import raise_mismatch
from ..core.failures import raise_explained
from ..core.flatten import Flat
from ..core.guard.direct import failed, guarded
from ..core.guard.store import Guards
from ..core.outcome import Outcome
from ..core.plan import Plan
from ..core.signature import SortedCall
from ..core.structure import LEAF, Child, Container, StaticObject, Structure
from ..core.transform import Transform
from ..core.unflatten import value_at
from ..diagnostics.differences import arguments_of, differences
from ..diagnostics.progress import progress
from ..errors import message, see
from ..specs.paths import Path, plain_key
from .out_of_memory import CompileWith, explain_memory

if TYPE_CHECKING:  # `analysis` takes long to import, and no call needs it
    from ..analysis.by_line import LineTable
    from ..analysis.by_module import ModuleTable
    from ..analysis.collectives import Collective, Collectives
    from ..analysis.cost import Cost
    from ..analysis.hardware import Hardware
    from ..analysis.measured import Profile
    from ..analysis.memory import Memory
    from ..analysis.parameters import ActivationTable, ParameterTable
    from ..analysis.program import ProgramReport
    from ..analysis.reasons import Reason
    from ..analysis.roofline import Roofline
    from .figures import Figures
    from .lifted import Lifted

S = TypeVar("S", bound="Stage")
JaxStage: TypeAlias = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled


class Stage:
    """The parts that all stages have in common.

    A method or attribute that is not listed here, such as ``cost_analysis()``, is the one of JAX's
    stage.
    """

    # Private attributes:
    #   _stage      the stage of JAX, whose results are groups of arrays, then the outcome
    #   _outcome    what the call does to objects
    #   _lifted     the function that it was made from; its ``_bound`` are the objects of a method
    #   _plan       the plan for the arguments
    #   _statics    the static arguments for which it was made
    #   _recorder   traces the function again when a report asks
    #   _guards     find the flattened arguments of earlier calls of this stage
    #   _direct     what the call in C reads; see ``__init__``. Only `Compiled` is called in C

    def __init__(
        self,
        stage: Any,  # a `JaxStage`: each subclass declares the class of its own
        lifted: Lifted[..., Any],
        plan: Plan,
        statics: tuple[object, ...],
        recorder: Recorder,
    ):
        """Wraps a stage of JAX.

        Args:
          stage: the stage of JAX.
          lifted: the function that it was made from.
          plan: the plan for the arguments.
          statics: the static arguments.
          recorder: traces the function again when a report asks for the calls of modules.
        """
        self._stage = stage
        self._lifted = lifted
        self._plan = plan
        self._statics = statics
        self._recorder = recorder
        # Guards ask a transform what else a plan depends on, such as the mesh in context, and what
        # to execute. The plan of a stage is fixed, so this transform depends on nothing.
        depends_on_nothing = Transform(name="stage", in_name="")
        self._guards = Guards(depends_on_nothing, execute=lambda _: _compat.direct_form(stage))
        # The call in C reads this tuple by position: guards, bound objects, the user's function,
        # and the observer of traces. The last two are None, because a stage traces no more.
        # The user may leave out static arguments, which only Python code adds (`_with_statics`), so
        # a stage with static arguments has no guards for C.
        guards_for_c = [] if statics else self._guards.recent
        function = observer = None
        self._direct = (guards_for_c, lifted._bound, function, observer)
        # The pure function returns (*groups of arrays, outcome). The outcome has no arrays, so JAX
        # keeps it in the tree structure of the results.
        no_arrays = [None] * stage.out_tree.num_leaves
        *_, outcome = jax.tree_util.tree_unflatten(stage.out_tree, no_arrays)
        self._outcome: Outcome = outcome

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
        """The positions of the donated leaves in ``in_tree``."""
        infos = jax.tree_util.tree_leaves(self.args_info)
        return tuple(i for i, info in enumerate(infos) if info.donated)

    @property
    def out_info(self) -> Any:
        """Shape, dtype and, if known, sharding of each array of the result."""
        inputs = map(_shape_of, self._stage.args_info[0])
        return self._outputs(self._stage.out_info, [inputs])

    @property
    def out_tree(self) -> jax.tree_util.PyTreeDef:
        """The tree structure of the result."""
        outcome = self._outcome
        # Only the structure counts, so any leaf will do in place of arrays.
        result = user_tree(outcome.structure, values=[0] * len(outcome.sources))
        return jax.tree_util.tree_structure(result)

    @property
    def updates_info(self) -> Any:
        """Shape and dtype of the arrays that the call writes back, in the form of the arguments.

        It has only changed Variables, not the objects that the call adds.
        """
        arguments, outcome = self._plan.structure, self._outcome
        *groups, _outcome = self._stage.out_info
        # Each slot after the call has the shape and dtype of an output, or None if it holds an
        # input, because the call leaves an input unchanged.
        unchanged = [None] * arguments.num_leaves
        infos_after = outcome.arrays(unchanged, groups)
        new_infos: dict[int, Any] = {}  # by slot before the call
        for index in (*outcome.values, *outcome.metadata):  # the changed Variables
            # Nearly every Variable holds one array before and after. A pytree in one may have more
            # or fewer leaves after the call; then the first ones are paired.
            slots = zip(arguments.slots[index], outcome.structure.slots[index], strict=False)
            for slot_before, slot_after in slots:
                if infos_after[slot_after] is not None:
                    new_infos[slot_before] = infos_after[slot_after]

        def is_written(slots: tuple[int, ...]) -> bool:
            """Whether a Variable with arrays in these slots, or one of its arrays, is shown."""
            return not new_infos.keys().isdisjoint(slots)

        values = [new_infos.get(slot) for slot in range(arguments.num_leaves)]
        return user_tree(arguments, values, keep=is_written)

    def activations(self) -> ActivationTable:
        """Lists how the outputs of modules are sharded, in the order in which modules return them.

        A module that is called several times with equal results has one row. The first call of this
        method traces the function once more. In a ``shard_map``, a row has the part on one device.
        """
        from ..analysis.parameters import ActivationTable, activation_row

        rows = (
            activation_row(
                call.aval,
                call.sharding,
                call.chosen_by,
                is_part=call.is_part,
                path=call.path,
                module=call.module,
                method=call.method,
                output=call.output,
            )
            for call in self._recorder.calls
        )
        # A dict drops duplicates, which appear if a loop is traced twice.
        table = ActivationTable(dict.fromkeys(rows))
        table.of_trace = True
        return table

    def _make_next(self, cls: type[S], stage: JaxStage) -> S:
        """Makes the next stage, from the next stage of JAX."""
        return cls(stage, self._lifted, self._plan, self._statics, self._recorder)

    def _attribute_reports(self) -> AbstractContextManager[None]:
        """Attributes what JAX reports within the block, such as compile times, to this plan."""
        return called_by(Caller(None, (), plan=self._plan, leaves=self._recorder.leaves))

    def _run(self, done: str, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the stage of JAX with the user's arguments, and updates modules in them.

        Args:
          done: the verb for messages: ``traced`` or ``compiled``.

        Raises:
          TypeError: the arguments have another structure than the stage was made for.
          ValueError: the arguments have other shardings than the function was compiled for.
        """
        plan = self._plan
        stage = self._stage
        args, kwargs = self._with_statics(args, kwargs)
        flat = self._flatten(done, args, kwargs)
        if not _compat.trace_is_clean():  # the call is part of a trace
            return run(plan, flat, stage)
        try:
            # The form in C is faster, but takes no tracers. Calls with tracers return above.
            return run(plan, flat, _compat.direct_form(stage))
        except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
            # Raises another error if it can explain this one; otherwise it returns.
            self._raise_explained(plan, flat.leaves, error)
            raise

    def _flatten(self, done: str, args: tuple[object, ...], kwargs: dict[str, Any]) -> Flat:
        """Returns the flattened arguments of a call; a guard knows those of earlier calls.

        Args:
          done: the verb for messages: ``traced`` or ``compiled``.

        Raises:
          TypeError: the arguments have another structure than the stage was made for.
        """
        # The arguments of a call in a trace hold tracers, and no later call has the same ones, so
        # there is no guard for them.
        has_guards = _compat.trace_is_clean()
        earlier_call = self._guards.find(args, kwargs) if has_guards else None
        if earlier_call is not None:
            _, flat = earlier_call  # the plan of a stage is always the same
            return flat
        call, flat = self._lifted._split(args, kwargs, record=has_guards)
        self._check_structure(done, call, flat)  # raises unless the structure is the plan's
        if has_guards:
            # A user who makes a stage calls it again, so its guard is made at once.
            self._guards.add(self._plan, flat, args, kwargs, is_new=True)
        return flat

    @_compat.api_boundary
    def _failed(
        self,
        plan: Plan,
        leaves: Sequence[object],
        error: BaseException,
        objects: Sequence[object],
    ) -> None:
        """Explains an error that a program has raised in a guarded call, which is in C.

        Like `_run`, it raises another error that explains it. If it returns, it knows no
        explanation, and the call in C raises the given error.

        Args:
          objects: the caller's objects. Only functions that trace (`Lifted._failed`) need them.
        """
        failed(plan, leaves, error)  # raises an explanation that holds for any program
        self._raise_explained(plan, leaves, error)  # raises an explanation particular to a stage

    def _raise_explained(self, plan: Plan, leaves: Sequence[object], error: BaseException) -> None:
        """Raises an error that names the arguments that differ from those of the stage, if any do.

        Returns if none do. `Compiled` extends this, because its program may also be too large for
        the memory.
        """
        raise_mismatch(plan, leaves, self._stage, error)  # returns if it finds no difference

    def _with_statics(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns all arguments of a call, with bound objects, and static ones that were left out.

        A stage was made for certain static arguments, so callers need not pass them again, as in
        JAX: a stage of ``f(x, mode, y)`` with a static ``mode`` takes ``(x, mode, y)`` and
        ``(x, y)``. The user passes all static arguments that are given by position, or none: with
        some of them, the number of arguments would not say which are missing.
        """
        signature, bound = self._plan.signature, self._lifted._bound
        # The keys say how the stage's static arguments were passed: a position, which counts bound
        # objects, or a name.
        by_key = dict(zip(signature.static_keys, self._statics, strict=True))
        keywords = {key: value for key, value in by_key.items() if isinstance(key, str)}
        by_position = {key: value for key, value in by_key.items() if isinstance(key, int)}
        # A bound object, such as the class of a classmethod, may be static. `args` always has it.
        positions = [position for position in sorted(by_position) if position >= len(bound)]
        all_args = [*bound, *args]
        num_positional = len(signature.names)  # when the stage was made, with bound objects
        are_left_out = len(all_args) == num_positional - len(positions)
        if are_left_out:
            for position in positions:  # ascending, so that the later positions are right
                all_args.insert(position, by_position[position])
        return tuple(all_args), {**keywords, **kwargs}

    def _check_structure(self, done: str, call: SortedCall, flat: Flat) -> None:
        """Raises a ``TypeError`` for arguments that differ in more than arrays from the plan's.

        Args:
          done: the verb for messages: ``traced`` or ``compiled``.
          call: the arguments of this call, by their roles.
        """
        plan = self._plan
        stage_form = (plan.signature, plan.structure)
        call_form = (call.signature, flat.structure)
        if stage_form == call_form:
            return
        changes = differences(stage_form, call_form)  # one text for each difference
        if plan.signature != call.signature:
            old_form, new_form = arguments_of(plan.signature), arguments_of(call.signature)
            # The form comes first, because all other differences may follow from it.
            changes.insert(0, f"arguments {old_form} → {new_form}")
        head = f"{plan.fun_name} was {done} for other arguments than it is called with now:"
        text = message(head, [f"  {change}" for change in changes], "Lower it again for these.")
        raise see(TypeError(text), anchor="compiled-for-another-structure")

    def _inputs(self, per_argument: Any) -> Any:
        """Puts reports of JAX for each argument array into the form of the user's arguments.

        ``per_argument`` is a pair of JAX: the arrays, which are all positional, and no keywords.
        """
        return user_tree(self._plan.structure, per_argument[0])

    def _outputs(self, per_output: Any, per_argument: Any) -> Any:
        """Puts reports of JAX for each output array into the form of the user's result.

        Args:
          per_output: the reports for the results of the pure function: ``(*groups, outcome)``,
            where a group has one item for each of its arrays. An item may be anything.
          per_argument: the reports for its arguments: ``(positional, …)``, with one item for
            each array. An array that a call returns unchanged is not an output of JAX's program, so
            the result has the argument's item for it.
        """
        *groups, _outcome = per_output
        by_slot, *_keywords = per_argument
        values = self._outcome.arrays([*by_slot], groups)  # by slot after the call
        return user_tree(self._outcome.structure, values)

    def __getattr__(self, name: str) -> Any:
        # A private name is not JAX's; while the object is unpickled, `_stage` itself is missing.
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

    _stage: jax.stages.Traced

    @property
    def arg_names(self) -> tuple[str, ...]:
        """The expression for each argument of the jaxpr, such as ``model.up.kernel``."""
        return tuple(self._plan.names)

    @property
    def out_avals(self) -> Any:
        """The aval of each array of the result."""
        return self._outputs(self._stage.out_avals, self._stage.in_avals)

    def by_line(self) -> LineTable:
        """Lists the types of the values that each line of the user's code makes.

        Specs are over Explicit axes. On Auto axes the compiler chooses the shardings, so
        :meth:`Compiled.by_line` has them. The first call traces the function once more.

        Returns:
          The table, in which all figures of cost are None.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from nnx_sharding import jit
          >>> model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
          >>> table = jit(lambda model, x: model(x)).trace(model, jnp.ones((4, 8))).by_line()
          >>> table.rows[0].types[0].dtype, table.rows[0].types[0].shape
          ('float32', (4, 16))
        """
        from ..analysis.line_attribution import typed_table
        from ..analysis.traced_values import made_values

        paths = {call.path for call in self._recorder.calls}
        return typed_table(made_values(self._recorder.traced, paths))

    @_compat.api_boundary
    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, **unknown: object
    ) -> Lowered:
        """Lowers to the compiler's input.

        Args:
          lowering_platforms: platforms such as ``("tpu",)``; None for the current one.
          **unknown: other options, as ``jax.export.export`` passes, raise a ``TypeError``.

        Returns:
          The lowered function, ready to be compiled.

        Raises:
          TypeError: an option is unknown.
        """
        if unknown:
            raise TypeError(
                f"{self._plan.fun_name}.lower has no option {', '.join(sorted(unknown))}. "
                "If this comes from jax.export.export: it takes functions of arrays only; use "
                "nnx_sharding.export.export in the same way."
            )
        # The explanation of an error needs only shapes, and the arrays may be gone.
        leaves = list(map(_shape_of, self._stage.in_avals[0]))
        options: Any = {"lowering_platforms": lowering_platforms}

        with self._attribute_reports():  # JAX reports how long it takes
            try:
                lowered = self._stage.lower(**options)
            except TypeError:  # raised by an operation, since wrong types fail before, in the trace
                raise
            except Exception as error:
                raise_explained(self._plan, leaves, error)  # returns if it knows no explanation
                raise
        return self._make_next(Lowered, lowered)

    @_compat.api_boundary
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Evaluates the jaxpr for these arguments, and updates modules in place."""
        return self._run("traced", args, kwargs)


class Lowered(Stage):
    """A function lowered to the compiler's input (StableHLO); ready to be compiled.

    ``as_text(dialect=None, *, debug_info=False)``, ``compiler_ir(dialect=None)`` and
    ``cost_analysis()``, the estimates made before optimisation, are those of JAX.
    """

    _stage: jax.stages.Lowered

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
          device_assignment: the devices to compile for, if the shardings name none.

        Returns:
          The compiled function.

        Raises:
          jax.errors.JaxRuntimeError: the compiler fails. If the program does not fit into memory,
            the message says which modules hold it.
        """
        devices = {} if device_assignment is None else {"device_assignment": device_assignment}

        # The compiled function keeps this for reports, which compile again with other options.
        def compile_with(stage: Any, further_options: Mapping[str, Any]) -> Any:
            options = {**(compiler_options or {}), **further_options}
            with progress(f"compile {self._plan.fun_name}"), self._attribute_reports():
                return stage.compile(options or None, **devices)

        try:
            program = compile_with(self._stage, {})
        except jax.errors.JaxRuntimeError as error:
            # `explain_memory` raises another error if the program does not fit into memory. Only
            # then does it ask for the recorder. A function gives it, because a call, which shares
            # this interface, has to make a recorder first.
            explain_memory(error, self._plan, lambda: self._recorder, compile_with)
            raise
        return self._compiled_to(program, compile_with)

    def _compiled_to(self, program: jax.stages.Compiled, compile_with: CompileWith) -> Compiled:
        """Makes the compiled function.

        Args:
          compile_with: compiles the function once more, with further options, for reports.
        """
        compiled = self._make_next(Compiled, program)
        compiled._compile_with = compile_with
        return compiled

    def cost(self) -> Cost | None:
        """Returns what all devices together compute, before optimisation; None if unavailable."""
        from ..analysis.cost import cost_of_lowered

        return cost_of_lowered(self._stage)


class Compiled(Stage):
    """A compiled function. Calling it updates modules in place, like the function itself.

    ``as_text()``, the optimised program, ``cost_analysis()``, ``memory_analysis()`` of one device
    and ``runtime_executable()`` are those of JAX; each returns None if it is unavailable.
    """

    _stage: jax.stages.Compiled
    # Compiles a lowered stage with the options of this program and further ones. `Lowered` sets it.
    _compile_with: CompileWith

    @_compat.api_boundary
    def _flattened(self, *args: object, **kwargs: object) -> Any:
        """Runs the program if the call in C cannot: it flattens the arguments in Python.

        Static arguments may be given, or left out.

        Raises:
          TypeError: structure, statics, shapes or dtypes differ from those that were lowered.
          ValueError: arrays are committed to other shardings than those that were lowered.
        """
        return self._run("compiled", args, kwargs)  # the message says "was compiled for other …"

    __call__ = guarded(_flattened)

    def _raise_explained(self, plan: Plan, leaves: Sequence[object], error: BaseException) -> None:
        """Raises an error for other arguments, or for a program that does not fit into memory."""
        super()._raise_explained(plan, leaves, error)  # raises for other arguments, or returns
        # Raises if the program does not fit into memory; otherwise it returns.
        explain_memory(error, plan, lambda: self._recorder, self._compile_with)

    @staticmethod
    def call(compiled: Compiled, /, *args: object, **kwargs: object) -> Any:
        """Calls a compiled function; a counterpart of ``jax.stages.Compiled.call``."""
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

    @property
    def output_formats(self) -> Any:
        """The ``Format`` of each array of the result."""
        return self._outputs(self._stage.output_formats, self._stage.input_formats)

    @cached_property
    def _figures(self) -> Figures:
        """Answers all questions about the program; is made when the first one is asked."""
        # The import is here because calls need nothing of `analysis`, which takes long to import.
        from .figures import Figures

        return Figures(self)

    def cost(self, *, loops: bool = True) -> Cost | None:
        """Returns the cost of a call on one device, after optimisation; None if unavailable.

        Args:
          loops: whether to count the body of a loop as often as it runs; XLA counts it once. The
            ``stage`` of the result says what remains open, such as loops of unknown length.

        Returns:
          The cost.
        """
        return self._figures.cost if loops else self._figures.cost_by_xla()

    def memory(self) -> Memory | None:
        """Returns the memory that the program takes on one device; None if unavailable.

        Printing it says what holds the peak. For that it compiles like :meth:`by_module`.
        """
        return self._figures.memory

    def by_module(
        self,
        depth: int | None = None,
        *,
        hardware: Hardware | str | None = None,
        profile: Profile | None = None,
    ) -> ModuleTable:
        """Attributes memory and cost to modules: what each holds at the peak, computes and sends.

        The first call traces and compiles the function once more, which takes as long as
        ``compile``: with the paths of modules in the names of operations, and with the XLA option
        ``xla_dump_to``, for the files in which the compiler says where it puts each array.

        Args:
          depth: how many attributes or keys below an argument modules are listed. Modules further
            down count for the modules that hold them. None lists all.
          hardware: the peak figures for the column of seconds, as for :meth:`roofline`; None for
            the devices for which it was compiled.
          profile: a profile of calls of this function, to measure each module, as for
            :meth:`by_line`.

        Returns:
          The table. Its memory is None if the compiler writes no such files; ``why`` says so.

        Raises:
          ValueError: the function is another program now, because something that it captures, or a
            setting of JAX, has changed since it was compiled.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from nnx_sharding import jit
          >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jnp.tanh)
          >>> compiled = jit(lambda model, x: model(x)).lower(model, jnp.ones((4, 8))).compile()
          >>> table = compiled.by_module()
          >>> table.total("model.layers[0]").flops
          1088.0
          >>> table.total("model").at_peak["parameters"]
          576
        """
        return self._figures.by_module(depth, hardware, profile)

    def by_line(
        self, *, hardware: Hardware | str | None = None, profile: Profile | None = None
    ) -> LineTable:
        """Attributes types, cost and memory to the lines of the user's code that make them.

        A line that runs in several modules, or in both passes, has one row. Flops, bytes and
        collectives add up to those of the program: the last row is for those that no line causes.
        The first call traces and compiles the function once more, as for :meth:`by_module`.

        Args:
          hardware: the peak figures for the column of seconds, as for :meth:`by_module`.
          profile: a profile of calls of this function, to measure each line: a
            ``jax.profiler.ProfileData``, or the folder given to ``jax.profiler.trace``, or a file
            in it. The mean of the devices and calls is in ``measured``.

        Returns:
          The table. ``print`` shows one type and one collective of each line, ``full()`` all.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from nnx_sharding import jit
          >>> model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
          >>> compiled = jit(lambda model, x: model(x)).lower(model, jnp.ones((4, 8))).compile()
          >>> table = compiled.by_line()
          >>> sum(row.flops for row in table.rows) == compiled.cost().flops
          True
        """
        return self._figures.by_line(hardware, profile)

    def collectives(self) -> Collectives | None:
        """Lists the data that devices exchange, with bytes and mesh axes; None if unknown."""
        return self._figures.collectives

    def activations(self) -> ActivationTable:
        """Lists how the outputs of modules are sharded, as for a trace, and by the compiler.

        A sharding that the compiler chose is shown as inferred. If there is such a row, the first
        call compiles like :meth:`by_module`, to read it from the program before it is partitioned.
        """
        return self._figures.activations(compile_again=True)

    def _traced_activations(self) -> ActivationTable:
        """Returns the table of a trace, for `Figures`, which adds what the compiler chose."""
        return super().activations()

    def why(self, subject: str | Collective) -> Reason:
        """Says why an argument is sharded as it is, or why a collective is there.

        Args:
          subject: the path of an argument, as :meth:`parameters` has it, such as
            ``model.layers[3].attn.q.kernel``, or of a module with arguments, such as
            ``model.layers[3].attn``; or one of :meth:`collectives`, or its name.

        Returns:
          The reason, for ``print``: the rule that decides, what is overridden and what divides; or
          the two shardings that meet, each with its line and module; and what to write instead.

        Raises:
          ValueError: the program has no such argument, module or collective.

        Example:
          >>> import jax
          >>> from flax import nnx
          >>> from jax.sharding import PartitionSpec as P
          >>> from nnx_sharding import jit
          >>> from nnx_sharding.partition import fsdp, make_mesh
          >>> mesh = make_mesh({"data": 8})
          >>> model = nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
          >>> specs = fsdp(model, mesh=mesh, min_size=32), P("data")
          >>> fun = jit(lambda model, x: model(x), in_shardings=specs, mesh=mesh)
          >>> compiled = fun.lower(model, jax.ShapeDtypeStruct((8, 8), "float32")).compile()
          >>> print(compiled.why("model.bias"))
          model.bias: replicated, 64 B on each device
            fsdp leaves it replicated: fewer than min_size=32.
            'data' (8) would divide dimension 0.
            instead: nnx_sharding.partition.override(sharding, {r"bias$": P('data')})
        """
        return self._figures.why(subject)

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def roofline(self, hardware: Hardware | str) -> Roofline:
        """Computes the time of a call at peak rates, with loop bodies as often as they run.

        Args:
          hardware: the peak figures of a device, or a key of
            :data:`nnx_sharding.analysis.HARDWARE`, such as ``"TPU v5e"``.

        Returns:
          The times for computing, for memory and for collectives.

        Raises:
          ValueError: the table has no such device.
        """
        return self._figures.roofline(hardware)

    def report(
        self,
        name: str | None = None,
        *,
        hardware: Hardware | str | None = None,
        by_module: bool = False,
    ) -> ProgramReport:
        """Collects all of this in one object, which can be printed, saved as JSON and compared.

        The first call traces the function once more, for the activations. Further calls use the
        same report.

        Args:
          name: the name in the report; None for the name of the function.
          hardware: the peak figures, as for :meth:`roofline`; None for the devices for which it was
            compiled. If the table does not have these, the roofline is None.
          by_module: whether it has the tables of :meth:`by_module` and :meth:`by_line`, for which
            the program is compiled once more, and the reasons of :meth:`why`.

        Returns:
          The report.
        """
        report = self._figures.report  # a cached property
        if hardware is not None:
            report = report.with_roofline(hardware)
        if by_module:
            # The second compilation also says what the compiler chose for activations.
            report = dataclasses.replace(
                report,
                by_module=self.by_module(hardware=hardware),
                by_line=self.by_line(hardware=hardware),
                activations=tuple(self.activations()),
                reasons=self._figures.reasons(),
            )
        return report if name is None else dataclasses.replace(report, name=name)

    def parameters(self) -> ParameterTable:
        """Lists how each argument array is sharded, including unused arrays."""
        return self._figures.parameters()

    def shardings(self) -> Sequence[Sharding | None]:
        """Lists the shardings of all arrays that the program is given and returns."""
        inputs = [*self._stage.input_shardings[0], *self._plan.shardings]
        try:
            return [*inputs, *jax.tree_util.tree_leaves(self._stage.output_shardings)]
        except ValueError:  # JAX counts refs as outputs, and so finds too many outputs
            return inputs


def _shape_of(aval: Any) -> Any:
    """Returns the shape and dtype of an aval; the aval itself if it is of a hijax Variable.

    The type of a hijax Variable has neither a shape nor a dtype.
    """
    try:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    except AttributeError:
        return aval


def user_tree(
    structure: Structure,
    values: Sequence[object],
    keep: Callable[[tuple[int, ...]], bool] = lambda _: True,
    objects: Sequence[object] | None = None,
) -> Any:
    """Puts values by slot into a pytree like the user's, with an ``nnx.State`` for each module.

    Static values in it are None. For ``(model, x)`` with one Variable ``kernel`` in ``model``, the
    values ``[a, b]`` become ``(nnx.State({"kernel": a}), b)``.

    Args:
      structure: describes what the user passed or got. Its root is a tree of containers (lists,
        tuples and dicts), whose leaves are a mark (`LEAF`) for each array, a description of each
        static value, and the index of each object.
      values: a value for each slot.
      keep: whether to keep the values in these slots. A value that is not kept becomes None, or is
        left out of a state.
      objects: the Variables to put into states, by index in the structure; None to put the values
        there.
    """
    # The slots of the arrays outside of objects, in the order of the tree: each `LEAF` takes one.
    root_slots = iter(structure.root_slots)

    def build(child: Child) -> Any:
        """Returns the user's tree for one part of the structure's root."""
        if child is LEAF:
            slot = next(root_slots)
            return values[slot] if keep((slot,)) else None
        if isinstance(child, Container):
            parts = [build(part) for part in child.children]
            return jax.tree_util.tree_unflatten(child.treedef, parts)
        if not isinstance(child, int):  # a static value, in place of an object's index
            return None
        if isinstance(structure.entries[child], StaticObject):
            return None
        state: dict[Path, Any] = {}
        # Arrays in an object have slots of their own, so this takes none of the root.
        for location in structure.walk(child, iter(())):
            if not keep(location.slots):
                continue
            path = tuple(map(plain_key, location.path))
            index = location.object_index  # the Variable's; None for an array in a module itself
            if objects is None or index is None:
                state[path] = value_at(structure, location, values)
            else:
                state[path] = objects[index]
        # A bare Variable has the empty path.
        return state[()] if () in state else nnx.from_flat_state(state)

    return build(structure.root)
