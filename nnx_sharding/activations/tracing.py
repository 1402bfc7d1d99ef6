"""The context of a function while it is traced: the scope that shards its activations.

Models do not know how they are sharded. A :class:`Scope` knows it. While a function is traced, the
scope gets each call of a module (``intercept.py``), and it

    finds      what the user or a strategy declared for the module (``declarations.py``), by its
               path (``tagging.py``)
    gathers    the module's own parameters, as FSDP does, for the duration of the call
               (``gathering.py``)
    retypes    Explicit axes to Auto in the call, if shardings are inferred (``axis_types.py``)
    constrains what the method takes and returns (``constraining.py``)
    infers     how outputs are sharded for which nothing is declared (``inferred_outputs.py``)
    records    what was chosen, for reports (``calls.py``)

Paths belong to the arguments of the function. A module in an inner trace is a copy, which gets the
tag of the original (``trace_keys.py``). A *source* is one ``ActivationSharding`` of the user or of
a strategy: filters for modules, each with shardings. A *schedule* runs calls in another order, for
example in a pipeline. The *plan* is what is known of the function before its trace; its
``batch_axes`` are the mesh axes that shard the rows of the data.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.call_context import Caller
from ..core.constrain import in_context, type_spec
from ..core.plan import Plan
from ..core.structure import NodeEntry
from ..core.transform import Sharded
from ..core.unflatten import Unflattened
from ..errors import ActivationError, raise_if_any
from ..specs.activation_sharding import ActivationSharding, CallSchedule
from ..specs.fitting import axes_of_type, fit_sharding, keep_axes, spec_and_mesh
from ..specs.paths import accessor
from ..specs.state_sharding import StateSharding
from ..specs.types import Arrays
from .axis_types import inferred_axes, with_auto_axes
from .calls import RECORD, Frame, Tag, in_call
from .constraining import Constrainer
from .declarations import Declarations
from .explanations import (
    add_hint_outside,
    explain,
    is_explained,
    raise_if_constraint,
    refuse_untyped,
)
from .gathering import gathered_values
from .inferred_outputs import InferredOutputs
from .intercept import Call, Keywords, current_handler, original_of, with_handler
from .rows import DeclaredRows
from .schedules import SCHEDULE_USES, PendingCall, Place, ScheduleUses
from .tagging import Tagger
from .trace_keys import CONTEXT, pass_paths, pass_tags
from .updates import update
from .variables import replaced_values
from .whole_outputs import WholeOutputs


@contextlib.contextmanager
def sharded_activations(
    plan: Plan, caller: Caller, unflattened: Unflattened, leaves: Arrays
) -> Iterator[Call]:
    """Shards the activations of modules while a function is traced.

    Args:
      plan: what is known of the function before its trace, such as the specs of its arguments.
      caller: the call for which it is traced: the user's function, and the objects that it got.
      unflattened: the copies of these objects that the traced function gets, in the same order.
      leaves: the tracers that the copies hold.

    Yields:
      The function to call in place of the user's, with the same arguments. It is the user's own if
      nothing is declared for activations and nobody records them.
    """
    assert isinstance(plan.transform, Sharded)
    pass_paths(caller, unflattened)
    scope = Scope(plan, plan.transform, unflattened, leaves)
    if not scope.is_needed:
        # The function may be traced within another one, whose scope knows modules by their tags.
        # The scope of this function has tagged no copies, so they get the tags of the originals.
        pass_tags(caller, unflattened)
        yield caller.fun
        return
    # Modules ask for the mesh in context. Without one, the mesh in the types of the arrays is set.
    mesh = None
    if jax.sharding.get_abstract_mesh().empty:
        meshes = (jax.typeof(x).sharding.mesh for x in leaves if type_spec(x) is not None)
        mesh = next(meshes, None)
    # The caller's block traces the function, so its errors arrive here. Among them are errors of
    # the user's code, which leave as they are.
    try:
        # JAX uses a trace again only if `CONTEXT` holds the same object as when it was made.
        with CONTEXT(scope.declarations.context), in_context(mesh):
            yield functools.partial(scope.run, caller.fun)
    except _compat.SHARDING_OR_VALUE_ERRORS as error:
        if _compat.is_sharding_error(error):  # an operation outside of modules raised it
            add_hint_outside(error)
        # An error of a module has a note already, with the module's name.
        elif not is_explained(error):
            raise_if_constraint(error, plan.transform.name)  # returns for any other error
        raise


def declared_rows(x: object) -> NamedSharding | None:
    """Returns the sharding that is declared in this trace for the first dimension of an array.

    A declaration is for one array, such as a batch, and does not pass on to its microbatches. Code
    that makes microbatches constrains them by the sharding that this returns for the batch. The
    result is None outside of a trace with a strategy, or if nothing is declared.
    """
    scope = current_handler()
    # The handler may be another transform's, such as that of a `remat` with filters.
    if not isinstance(scope, Scope) or not isinstance(x, jax.Array):
        return None
    return scope.rows.sharding(x)


class Scope:
    """The handler of the calls of modules during one trace.

    `run` calls the user's function; within it, each call of a module becomes a call of the scope
    itself.

    Attributes:
      declarations: the sources, of the user and of strategies.
      rows: tells how the rows of an array are declared to be sharded.

    Its private attributes:

        _plan            what is known of the function: shardings of arguments, axes of the batch
        _transform       the transform of the plan, with its name and options
        _unflattened     the arguments in the trace: copies of the objects of the call
        _leaves          the tracers of the arguments, by slot (their position)
        _mesh            the mesh of the trace; None if there is none
        _axes            the axes of this mesh, except those that are Manual in a `shard_map`
        _explicit_axes   the Explicit axes in the types of the arguments
        _outer           the handler around this scope; None if there is none
        _observes        whether it handles calls even if nothing is declared
        _tagger          makes the tags of modules
        _constrainer     constrains activations, and collects specs that do not fit (``mismatches``)
        _whole_outputs   warns of outputs that are gathered for operations outside of modules
        _outputs         chooses the shardings of outputs for which nothing is declared
        _schedules       the schedules for modules in the arguments, by name and path of the module
        _pending         the results of calls that a schedule runs later, with the last of them;
                         ``check_ran`` of one raises an error if that has not happened
    """

    def __init__(self, plan: Plan, transform: Sharded, unflattened: Unflattened, leaves: Arrays):
        """Reads what is declared for activations, and tags the modules in the arguments.

        Args:
          plan: the plan of the call.
          transform: its transform, with the mesh that applies.
          unflattened: the arguments in the trace.
          leaves: their arrays.
        """
        self._plan, self._transform = plan, transform
        self._unflattened, self._leaves = unflattened, leaves
        self._pending: list[PendingCall] = []
        self._schedules: dict[Place, CallSchedule] = {}
        self._whole_outputs = WholeOutputs()

        meshes = {jax.typeof(x).sharding.mesh for x in leaves if type_spec(x) is not None}
        self._explicit_axes = frozenset(
            axis for mesh in meshes for axis in axes_of_type(mesh, AxisType.Explicit)
        )
        self._mesh = _mesh_of(plan)
        axes_of_map = transform.usable_axes or ()  # the Manual axes of a `shard_map`; none in `jit`
        self._axes = frozenset(self._mesh.axis_names if self._mesh else ()).difference(axes_of_map)

        self._outer = current_handler()
        self._observes = self._has_to_observe()

        # `_tag_arguments` adds the declarations for single arguments.
        self.declarations = Declarations(transform.activation_shardings, plan.batch_axes)
        self.rows = DeclaredRows(plan, leaves, self._mesh, self._axes)
        self._constrainer = Constrainer(transform, self._mesh, self._axes)
        self._outputs = InferredOutputs(
            self._mesh, self._explicit_axes, plan.batch_axes, self._whole_outputs
        )
        self._tagger = Tagger(plan, unflattened, self._mesh, self._axes, self._explicit_axes)
        self._tag_arguments()

    def _has_to_observe(self) -> bool:
        """Returns whether this scope handles calls even if nothing is declared.

        It does so to explain JAX's errors about Explicit axes, and to record calls for a report.
        The scope of a trace around this one does both already.
        """
        if self._outer is not None:
            return False
        # The mesh in context counts because captured arrays may be on it though no argument is.
        mesh_in_context = jax.sharding.get_abstract_mesh()
        has_explicit = self._explicit_axes or axes_of_type(mesh_in_context, AxisType.Explicit)
        is_recorded = RECORD.value is not None
        return bool(has_explicit or is_recorded)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to apply, explain or record."""
        return bool(self.declarations.sources) or self._observes

    def run(self, fun: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's function, with this scope as the handler of the calls of modules in it.

        If the function is a method of its first argument, a module, its call is handled, too.
        Raises an error if something that is declared does not fit or is not used.
        """
        out = self._run(fun, args, kwargs)
        # Errors are raised here, because at the end of the caller's block they would show frames
        # of contextlib.
        self._check()
        self._whole_outputs.warn(self._transform, out)  # warns of gathered outputs
        return out

    def _run(self, fun: Call, args: tuple[Any, ...], kwargs: Keywords) -> Any:
        """Calls the user's function with this handler, and returns its result unchecked.

        If the function is a method of its first argument, its own call passes through the handler,
        like the calls in it.
        """
        if not args or not isinstance(args[0], nnx.Module):
            return self._call_handled(fun, args, kwargs)
        # A method of the module's class may be given as ``fun``: `jit(Model.__call__)(model, x)`.
        # The class may hold it within decorators, each of which has the next one in `__wrapped__`.
        name = getattr(fun, "__name__", "")
        method = original_of(inspect.getattr_static(type(args[0]), name, None))
        while method is not None and method is not fun:
            method = original_of(getattr(method, "__wrapped__", None))
        if method is None:
            return self._call_handled(fun, args, kwargs)
        # ``fun`` is the plain function, which no descriptor of the class intercepts. So this calls
        # the scope as the handler of that call, as a descriptor would do.
        module, *other_args = args
        bound = functools.partial(fun, module)
        return self._call_handled(self, (module, name, bound, tuple(other_args), kwargs), {})

    def _call_handled(self, fun: Call, args: tuple[Any, ...], kwargs: Keywords) -> Any:
        """Calls a function with this handler, and reports schedules that it did not use.

        `with_handler` turns calls of modules in the function into calls of this scope. A schedule
        counts as used if its module is called, because then the schedule runs.
        """
        # Public methods are intercepted in any case. Declared ones may have private names.
        sources = self.declarations.sources
        declared_methods = {x.method for source in sources for x in source.shardings}
        is_inner = SCHEDULE_USES.get() is not None  # True: the outermost trace reports schedules
        if is_inner or not self._schedules:
            return with_handler(self, declared_methods, fun, *args, **kwargs)
        uses = ScheduleUses()
        token = SCHEDULE_USES.set(uses)
        try:
            out = with_handler(self, declared_methods, fun, *args, **kwargs)
        finally:
            SCHEDULE_USES.reset(token)
        uses.report(self._schedules)  # warns of schedules that did not run
        return out

    def _tag_arguments(self) -> None:
        """Tags the modules in all arguments, and records the schedules that are given for them.

        An argument whose ``in_shardings`` are a strategy has a source of its own, which is added to
        the sources that are declared for all arguments.
        """
        for_all = tuple(self.declarations.sources)
        # A part is an object in an argument, such as a module: ``part.child`` is its index, and
        # ``part.keys`` its path.
        parts = [
            (argument, part, _own_source(part.spec))
            for argument in self._plan.graph_arguments
            for part in argument.parts
        ]
        # Explanations and records name modules by their tags, so they need tags as well.
        has_own_sources = any(own_source is not None for *_, own_source in parts)
        if not (for_all or self._observes or has_own_sources):
            return
        structure = self._plan.structure
        tagged = set[int]()  # the indices of modules; a shared module keeps its first path
        for argument, part, own_source in parts:
            if own_source is not None:
                self.declarations.add(own_source)
            sources = for_all if own_source is None else (*for_all, own_source)
            name = accessor(argument.name, part.keys)  # for example, ``models[0]``
            # `paths` has one path to each object in the part, by its index: the shortest path.
            paths = structure.paths_to_objects([((), part.child)])
            for index, [path] in paths.items():
                is_module = isinstance(structure.entries[index], NodeEntry)
                if not is_module or index in tagged:
                    continue
                tagged.add(index)
                module = self._unflattened.objects[index]
                tag = self._tagger.tag(name, path, sources, module)
                _compat.tag_node(module, tag)
                schedule = self._schedule(tag, module, "__call__")
                if schedule is not None:
                    # Each layer of a list may have the schedule, which runs at the list's path.
                    self._schedules[name, schedule.module_path(path)] = schedule

    def __call__(
        self, module: Any, method: str, call: Call, args: tuple[Any, ...], kwargs: Keywords
    ) -> Any:
        """Calls a method of a module with the shardings chosen for it, or updates an optimizer.

        Args:
          module: the module or optimizer.
          method: the name of the method.
          call: the bound method.
          args: the positional arguments of the call.
          kwargs: its keyword arguments.

        Returns:
          The result of the method, sharded as declared.
        """
        # A module that is in no argument has no tag yet, for example if the function makes it.
        tag = _compat.tag_of(module) or self._tagger.tag_foreign(
            module, tuple(self.declarations.sources)
        )
        # A module that the function captures from a trace around this one has the tag of that
        # trace. The declarations of that trace are for it, so the outer handler gets the call.
        is_ours = all(source in self.declarations.sources for source in tag.sources)
        if not is_ours and self._outer is not None:
            return self._outer(module, method, call, args, kwargs)
        if isinstance(module, nnx.Optimizer) and method == "update":
            with jax.named_scope(tag.accessor):  # tables by module read this name
                return update(module, call, args, kwargs)
        schedule = self._schedule(tag, module, method)
        if schedule is not None:
            # Layers of a pipeline are called one by one; the last call runs all of them.
            tag, module, redirected = schedule.redirect(tag, module, args, kwargs)
            if module is None:  # a later call will run it; ``redirected`` stands for its result
                self._pending.append(redirected)
                return redirected
            args, kwargs = redirected
        if method == "__call__" and (uses := SCHEDULE_USES.get()) is not None:
            uses.note_call((tag.name, tag.path), by_schedule=schedule is not None)
        with in_call(Frame(tag, module, method)) as frame:
            try:
                out = self._call_sharded(frame, schedule, call, args, kwargs)
            except _compat.SHARDING_OR_VALUE_ERRORS as error:
                self._explain(error, frame, (args, kwargs))
                raise
            frame.record(out)  # for reports; does nothing in any other trace
        if schedule is None and method != "__call__":
            # A pipeline of ``__call__`` does not run in other methods, which may be a mistake.
            unused = self._schedule(tag, module, "__call__")
            if unused is not None:
                unused.report_other_method(tag, method, args, out)
        return out

    def _explain(self, error: Exception, frame: Frame, inputs: tuple[object, ...]) -> None:
        """Explains JAX's errors about types of axes: raises another one, or adds a note.

        Returns for any other error.

        Args:
          frame: the call of a module that raised it.
          inputs: the positional and keyword arguments of the call.

        Raises:
          ActivationError: JAX cannot type an operation of the method, or the method passes specs to
            ``with_sharding_constraint`` that need Auto axes.
        """
        if _compat.is_sharding_error(error):
            refuse_untyped(error, self._transform.name, frame, inputs)  # always raises
        if self._explicit_axes:
            explain(error, self._transform.name, frame)

    def _schedule(self, tag: Tag, module: object, method: str) -> CallSchedule | None:
        """Returns the schedule by which a strategy runs a call of a method; None for a plain call.

        Args:
          tag: the tag of the module, with what is declared for it.
        """
        schedules = (source.find_schedule(tag.path, module, method) for source in tag.sources)
        schedule = next((x for x in schedules if x is not None), None)
        # A schedule that runs calls the layers itself, and these calls are plain ones.
        if schedule is None or schedule.is_running:
            return None
        # Without a mesh there are no stages: all layers are on one device.
        return None if self._mesh is None else schedule

    def _call_sharded(
        self,
        frame: Frame,
        schedule: CallSchedule | None,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Keywords,
    ) -> Any:
        """Calls a method with the shardings of its input, parameters, axis types and output.

        The input is constrained first, because a schedule divides its rows. The module's own
        parameters are gathered for as long as its method runs, or the schedule in its place.

        Args:
          frame: the call, with the tag of the module.
          schedule: runs the module in a special order, for example in a pipeline; None for a plain
            call.
        """
        has_specs = bool(frame.tag.specs)  # not empty: the module has Variables of its own
        if has_specs:
            self._whole_outputs.begin_layer()
        self.declarations.choose(frame)
        if frame.declared.input is not None and args:
            spec = frame.declared.input
            first_arg = self._constrainer.constrain(args[0], spec, frame, side="input")
            args = (first_arg, *args[1:])
        if schedule is not None and self._mesh is not None:
            # The new function takes the same arguments, and runs the module's layers in stages.
            call = schedule.wrap(
                frame.module,
                call,
                mesh=self._mesh,
                batch_axes=self._plan.batch_axes,
                axes_of_rows=self.rows.axes,
                prefetch=any(source.prefetch for source in frame.tag.sources),
            )
        gathered = gathered_values(frame.module, frame.tag, self._mesh, self._axes)
        with replaced_values(gathered):
            return self._call_typed(frame, call, args, kwargs)

    def _call_typed(self, frame: Frame, call: Call, args: tuple[Any, ...], kwargs: Keywords) -> Any:
        """Calls a method, on Auto axes if shardings are inferred in it, and shards its result.

        Args:
          frame: the call, with the tag of the module, and the specs that are declared for it.
        """
        mesh = jax.sharding.get_abstract_mesh()
        explicit = axes_of_type(mesh, AxisType.Explicit)
        # None if no single spec is declared.
        spec_on_mesh = spec_and_mesh(frame.declared.output, mesh)
        if explicit and spec_on_mesh is not None:
            spec, _ = spec_on_mesh
            # Over `unreduced` axes each device keeps its own summand of the output. Such axes have
            # to be Explicit. Only the layer itself can leave out the sum, if it gets this option.
            if spec.unreduced:
                kwargs = {**kwargs, "out_sharding": keep_axes(spec, explicit)}
        # `auto_axes` are the Explicit axes that are Auto while the method runs: all or none.
        auto_axes = inferred_axes(frame, explicit, (args, kwargs))
        if not auto_axes:
            out = call(*args, **kwargs)
            if explicit and frame.declared.output is None:
                return out  # the types of its arrays say how it is sharded
            return self._shard_output(out, frame)
        frame.is_by_strategy = True

        def call_on_auto_axes(inputs: tuple[object, tuple[Any, ...], Keywords]) -> Any:
            """Calls the method with retyped arguments, on the mesh that ``with_auto_axes`` sets."""
            _, args, kwargs = inputs
            return self._shard_output(call(*args, **kwargs), frame)

        def type_output(x: jax.Array) -> jax.Array:
            """Gives a new array of the result its type on the caller's mesh."""
            inputs = (args, kwargs)
            return self._outputs.type_output(x, frame, inputs, auto_axes=auto_axes, outer=mesh)

        # The module is an input as well, because it holds arrays with types.
        inputs = (frame.module, args, kwargs)
        return with_auto_axes(inputs, call_on_auto_axes, auto_axes, type_output)

    def _shard_output(self, out: Any, frame: Frame) -> Any:
        """Shards the result of a method: as declared, or else like the columns of its kernel."""
        if frame.declared.output is not None:
            return self._constrainer.constrain(out, frame.declared.output, frame, side="output")
        shard = functools.partial(self._outputs.shard_columns, frame)
        return jax.tree.map(shard, out, is_leaf=_compat.is_graph_object)

    def _check(self) -> None:
        """Raises errors at the end of a trace.

        An error is for calls that a schedule was to run later and never ran, for specs that did not
        fit, or for filters that matched no call.
        """
        name = self._transform.name
        for pending in self._pending:
            pending.check_ran()  # raises if the schedule has not run it

        mismatches = self._constrainer.mismatches  # the lines are keys, so each is there once
        for source in self.declarations.sources:
            # The axes that the user names for gathering have to be axes of the mesh.
            if self._mesh is not None and isinstance(source.gather, tuple):
                fit = fit_sharding(PartitionSpec(source.gather), self._mesh)
                if fit.problems:
                    mismatches[fit.line("gather").strip()] = None
        raise_if_any(
            ActivationError,
            f"{name}: these activation shardings do not fit:",
            [f"  {x}" for x in mismatches],
            "Correct the specs, or use on_indivisible for those that do not divide a shape.",
            anchor="activation-specs-that-do-not-fit",
        )
        self.declarations.raise_if_unused(name)


def _own_source(spec: object) -> ActivationSharding | None:
    """Returns what the specs of an argument declare for activations, if a strategy made them."""
    return spec.activations if isinstance(spec, StateSharding) else None


def _mesh_of(plan: Plan) -> Any:
    """Returns the mesh of a trace; None if there is none.

    The first of these that exists is taken: the mesh of the transform, the mesh of the spec of an
    array in a module or Variable (``object_specs``, by slot), and the mesh in context.
    """
    if plan.transform.context is not None:
        return plan.transform.context
    meshes = (spec.mesh for spec in plan.object_specs.values() if isinstance(spec, NamedSharding))
    return next(meshes, None) or _compat.context_mesh()
