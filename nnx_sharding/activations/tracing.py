"""The context of a function while it is traced: the scope that shards its activations.

Models do not know how they are sharded. A :class:`Scope` does: while a function is traced, each
call of a module comes to it (``intercept.py``), and it

    finds      what the user or a strategy declared for the module, by its path (``Tag``)
    gathers    the module's own parameters, as FSDP does, for the duration of the call
    retypes    Explicit axes to Auto in the call, where shardings are inferred (``axis_types.py``)
    constrains what the method takes and returns
    records    what was chosen, for reports (``calls.py``)

Paths belong to the arguments of the function. A module in an inner trace is a copy, which gets the
tag of the original (``pass_tags``). A *source* is one ``ActivationSharding``, of the user or of a
strategy: filters for modules, each with shardings. A *schedule* runs calls in another order, as a
pipeline does. The *plan* is what is known of the function before its trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.arguments import Argument, Part
from ..core.call_context import Caller
from ..core.constrain import (
    apply_shardings,
    in_context,
    mesh_in_trace,
    retype,
    type_spec,
    without_unconstrained,
)
from ..core.flatten import Flat
from ..core.plan import Plan
from ..core.problems import no_mesh
from ..core.retyping import PARTIAL
from ..core.structure import NodeEntry
from ..core.transform import Sharded
from ..core.unflatten import Unflattened
from ..errors import ActivationError, message, raise_listed, see
from ..specs.activation_sharding import (
    ActivationSharding,
    CallSchedule,
    InOutSharding,
    is_activation_spec,
)
from ..specs.filters import glob_hint
from ..specs.fitting import (
    axes_of_type,
    fit_sharding,
    keep_axes,
    pad_entries,
    spec_and_mesh,
    spec_axes,
    with_entries,
    with_reduced,
)
from ..specs.paths import Path, accessor
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyArray, Arrays, AxisName, Objects
from .axis_types import (
    OPEN,
    arrays_in,
    explicit_axes_in_context,
    first_with_explicit_spec,
    input_like,
    opened,
    output_spec,
    with_auto_axes,
)
from .calls import RECORD, Frame, Shape, Tag, VariableSpecs, in_call
from .constraints import exact_path, refuse_constraint
from .intercept import Call, Keywords, current_handler, original_of, with_handler
from .schedules import SCHEDULE_USES, PendingCall, Place, ScheduleUses
from .updates import update
from .variables import (
    Variable,
    is_layer,
    is_parameter,
    modules_in,
    own_variables,
    replaced_values,
)
from .whole_outputs import WholeOutputs


class _TraceContext:
    """What shards the activations of a trace: equal only to itself, since JAX compares contexts.

    JAX has its contexts in the keys of what it traced, and hashes them for each primitive. So a
    context must not grow with the model, and declarations are hashed once for each trace.
    """

    def __init__(
        self, batch_axes: frozenset[AxisName], within_outermost: dict[Hashable, _TraceContext]
    ):
        """Makes what the calls of modules in one trace share.

        Args:
          batch_axes: the mesh axes over which the rows of the data are sharded.
          within_outermost: the contexts within one outermost trace, by their declarations. Equal
            declarations share a context, and so traces.
        """
        self.batch_axes = batch_axes
        self.used = set[tuple[int, int]]()  # the filters that matched: number of source, of filter
        self.within_outermost = within_outermost


# Traces of inner functions are not used again in another outermost trace, where filters that
# matched in them would seem to have no effect.
CONTEXT = jax.make_user_context()
# The Variables that a surrounding loop has gathered, by name and path of their module.
PREFETCHED = jax.make_user_context()


def current_batch_axes() -> frozenset[AxisName]:
    """Returns the axes that shard the rows of the data of the current trace, as far as known."""
    context = CONTEXT.value
    return frozenset() if context is None else context.batch_axes


class _Key:
    """Stands for a value in a context of JAX, which hashes that for each primitive of a trace."""

    __slots__ = ("__weakref__",)


_TAGS: Callable[[_Key], AbstractContextManager[None]] = jax.make_user_context()
# Equal values have one key as long as a context or a cache of JAX holds it.
_KEYS = weakref.WeakValueDictionary[Hashable, _Key]()


class Known(dict[int, tuple[Path, object]]):
    """The modules known to a surrounding ``remat`` with filters: by id, path and module."""

    def __init__(self, modules: Mapping[int, tuple[Path, object]]):
        super().__init__(modules)
        self.trace = object()  # stands for this object in keys of JAX, which outlive the modules


KNOWN: contextvars.ContextVar[tuple[Known, ...]] = contextvars.ContextVar("KNOWN", default=())


def key_traces_by_tags(objects: Objects) -> AbstractContextManager[None]:
    """Returns a context in which JAX uses only traces of modules with the same tags and paths.

    A trace depends on the tags of modules, and on their paths within a ``remat`` with filters. JAX
    sees neither in the arguments of the function, so both are made a part of its trace key.

    Args:
      objects: the objects among the arguments of the function.
    """
    tags = tuple(_compat.tag_of(x) if _compat.is_node(x) else None for x in objects)
    paths = tuple(
        (modules.trace, *(modules.get(id(x), (None,))[0] for x in objects))
        for modules in KNOWN.get()
    )
    if not paths and not any(tags):
        return contextlib.nullcontext()
    key = _KEYS.get((tags, paths))
    if key is None:
        key = _KEYS[tags, paths] = _Key()
    return _TAGS(key)


def pass_tags(known: Caller | Flat, unflattened: Unflattened | Flat) -> None:
    """Gives copies of modules, such as the modules of an inner trace, the tags of the originals."""
    for old, new in zip(known.objects, unflattened.objects, strict=True):
        if _compat.is_node(old) and (tag := _compat.tag_of(old)) is not None:
            _compat.tag_node(new, tag)


def pass_paths(caller: Caller, unflattened: Unflattened) -> None:
    """Makes the modules of an inner trace known by the paths that a surrounding ``remat`` knows."""
    for known in KNOWN.get():
        for old, new in zip(caller.objects, unflattened.objects, strict=True):
            if id(old) in known:
                known[id(new)] = known[id(old)][0], new


@contextlib.contextmanager
def sharded_activations(
    plan: Plan, caller: Caller, unflattened: Unflattened, leaves: Arrays
) -> Iterator[Call]:
    """Shards the activations of modules in a trace; yields what to call for the user's function.

    Args:
      plan: what is known of the function.
      caller: the call that is traced.
      unflattened: the objects of the trace.
      leaves: its arrays.
    """
    assert isinstance(plan.transform, Sharded)
    pass_paths(caller, unflattened)
    scope = Scope(plan, plan.transform, unflattened, leaves)
    if not scope.is_needed:
        pass_tags(caller, unflattened)
        yield caller.fun
        return
    # If none is in context, that in the types of the arrays, for what modules ask of it.
    types = (jax.typeof(x).sharding.mesh for x in leaves if type_spec(x) is not None)
    mesh = next(types, None) if jax.sharding.get_abstract_mesh().empty else None
    try:
        with CONTEXT(scope.context), in_context(mesh):
            yield functools.partial(scope.run, caller.fun)
    except _compat.SHARDING_ERRORS as error:
        if not hasattr(error, "__notes__"):
            error.add_note(
                "The operation is outside of modules, so nothing was inferred for it. Shard its "
                "inputs with activation_shardings={...} for the module that returns them, give the "
                "operation an out_sharding, or let the compiler choose with jit(..., "
                "auto_axes=True), with out_shardings."
            )
        see(error, "operation-outside-of-modules")
        raise
    except ValueError as error:
        if not _is_explained(error):
            refuse_constraint(error, plan.transform.name)
        raise


class Scope:
    """The handler of the calls of modules during one trace."""

    def __init__(self, plan: Plan, transform: Sharded, unflattened: Unflattened, leaves: Arrays):
        """Reads what is declared for activations, and tags the modules in the arguments.

        Args:
          plan: the plan of the call.
          transform: its transform, with the mesh that applies.
          unflattened: the arguments in the trace.
          leaves: their arrays.
        """
        declared = transform.activation_shardings
        sources = () if declared is None else (declared,)
        self._transform, self._plan, self._unflattened = transform, plan, unflattened
        meshes = {jax.typeof(x).sharding.mesh for x in leaves if type_spec(x) is not None}
        self._explicit_axes = {
            axis for mesh in meshes for axis in axes_of_type(mesh, AxisType.Explicit)
        }
        self._mesh = _mesh_of(plan)
        # The mesh axes that are not manual; in `jit`, all axes.
        manual = transform.usable_axes or ()
        self._axes = frozenset(self._mesh.axis_names if self._mesh else ()).difference(manual)
        self._sources = [*sources]  # declared for all arguments, then for single ones
        self._num_declared = len(sources)  # by the user; strategies declare the others
        # Tags of modules that the function has from elsewhere, by id, with the module itself, so
        # that no other one gets its id.
        self._foreign_tags: dict[int, tuple[Tag, object]] = {}
        # Within another trace, that one explains and records.
        self._observes = current_handler() is None and bool(
            self._explicit_axes or RECORD.value is not None
        )
        self._mismatches: dict[str, None] = {}  # lines for an error, in order, each once
        self._pending: list[PendingCall] = []  # what calls returned that run later
        self._schedules: dict[Place, CallSchedule] = {}  # by the place of what each runs
        self._whole_outputs = WholeOutputs()
        self._tag_arguments(sources)
        self.context = self._context()

    def _context(self) -> _TraceContext:
        """The context of this trace: one for equal declarations in the same outermost trace."""
        outer: _TraceContext | None = CONTEXT.value
        contexts = {} if outer is None else outer.within_outermost
        key = tuple(self._sources), self._plan.batch_axes
        if key not in contexts:
            contexts[key] = _TraceContext(self._plan.batch_axes, contexts)
        return contexts[key]

    @functools.cached_property
    def _indices(self) -> dict[int, int]:
        """The index of each object, by its id."""
        return {id(x): i for i, x in enumerate(self._unflattened.objects)}

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to apply, explain or record."""
        return bool(self._sources) or self._observes

    def run(self, fun: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's function, with this scope as the handler of the calls of modules in it.

        If the function is itself a method of its first argument, its call is one of a module, too.
        """
        named = {x.method for source in self._sources for x in source.shardings}
        name = getattr(fun, "__name__", "")
        if args and isinstance(args[0], nnx.Module):
            # The function within decorators.
            method = original_of(inspect.getattr_static(type(args[0]), name, None))
            while method is not None and method is not fun:
                method = original_of(getattr(method, "__wrapped__", None))
            if method is fun:  # such as `jit(Model.__call__)(model, x)`
                bound = functools.partial(fun, args[0])
                fun = self
                args = (args[0], name, bound, args[1:], kwargs)
                kwargs = {}
        out = self._with_uses(named, fun, args, kwargs)
        self._check()  # here, as an error at the end of a block would show frames of contextlib
        self._whole_outputs.warn(self._transform.name, out, strict=self._transform.strict)
        return out

    def _with_uses(
        self, named: set[str], fun: Call, args: tuple[Any, ...], kwargs: Keywords
    ) -> Any:
        """Calls a function with this handler, and reports schedules that it did not use.

        ``named`` are the methods to intercept though their names are private.
        """
        outer = SCHEDULE_USES.get()
        if outer is not None or not self._schedules:
            return with_handler(self, named, fun, *args, **kwargs)
        uses = ScheduleUses()
        token = SCHEDULE_USES.set(uses)
        try:
            out = with_handler(self, named, fun, *args, **kwargs)
        finally:
            SCHEDULE_USES.reset(token)
        uses.report(self._schedules)
        return out

    def _tag_arguments(self, sources: Sequence[ActivationSharding]) -> None:
        """Tags the modules in all arguments, and records the schedules that are given for them.

        ``sources`` are declared for all arguments; an argument may have one of its own.
        """
        plan, unflattened = self._plan, self._unflattened
        parts: list[tuple[Argument, Part, ActivationSharding | None]] = []
        for argument in plan.graph_arguments:
            for part in argument.parts:
                has_own = isinstance(part.spec, StateSharding)
                parts.append((argument, part, part.spec.activations if has_own else None))
        if not (sources or self._observes or any(own is not None for *_, own in parts)):
            return
        tagged = set[int]()
        for argument, part, own in parts:
            if own is not None and own not in self._sources:
                self._sources.append(own)
            chosen = (*sources, *([] if own is None else [own]))
            name = accessor(argument.name, part.keys)
            for index, [path] in plan.structure.paths_to_objects([((), part.child)]).items():
                if isinstance(plan.structure.entries[index], NodeEntry) and index not in tagged:
                    tagged.add(index)
                    module = unflattened.objects[index]
                    tag = self._tag(name, path, chosen, module)
                    _compat.tag_node(module, tag)
                    if (schedule := self._schedule(tag, module, "__call__")) is not None:
                        self._schedules[name, schedule.module_path(path)] = schedule

    def _tag(
        self, name: str, path: Path, sources: tuple[ActivationSharding, ...], module: object
    ) -> Tag:
        """Makes the tag of a module, with the specs of its own Variables.

        Args:
          name: the name of the argument that the module is in.
          path: the path of the module in it.
          sources: what the user and strategies declare for the module.
          module: the module in the trace.
        """
        specs: dict[Path, VariableSpecs] = {}
        batch = self._plan.batch_axes
        # The axes over which parameters are gathered while the module runs.
        gathered: set[AxisName] = set()
        for source in sources:
            gathered.update(batch if source.gather is True else source.gather or ())
        for source in sources:
            gathered.difference_update(source.kept)
        axes = self._axes.intersection(gathered)
        # Over the stages of a pipeline, layers are sharded, but not what is in them.
        schedules = (x.schedule for source in sources for x in source.shardings)
        inside = self._axes - axes - {schedule.axis for schedule in schedules if schedule}
        for own_path, variable in own_variables(module) if axes or self._explicit_axes else ():
            value = _compat.get_value(variable)
            # The spec that is declared for its array, by the position of that among all arrays.
            index = self._indices.get(id(variable))
            slots = () if index is None else self._plan.structure.slots[index]
            declared = self._plan.object_specs.get(slots[0]) if len(slots) == 1 else None
            pair = spec_and_mesh(type_spec(value) if declared is None else declared, self._mesh)
            if pair is not None and isinstance(value, jax.Array):
                shape = jax.typeof(value).shape
                kept = keep_axes(pair[0], inside)
                whole = with_entries(kept, pad_entries(kept, len(shape)))
                outside = with_entries(pair[0], pad_entries(pair[0], len(shape)))
                is_gathered = is_parameter(variable) and not axes.isdisjoint(spec_axes(pair[0]))
                specs[own_path] = VariableSpecs(whole, shape, is_gathered, outside)
        return Tag(name, path, sources, axes, specs, self._mesh)

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
          What the method returns, sharded as declared.
        """
        tag = _compat.tag_of(module) or self._tag_foreign(module)
        if isinstance(module, nnx.Optimizer) and method == "update":
            with jax.named_scope(tag.accessor):  # for `by_module`
                return update(module, call, args, kwargs)
        schedule = self._schedule(tag, module, method)
        is_other = schedule is None and method != "__call__"
        unscheduled = self._schedule(tag, module, "__call__") if is_other else None
        if schedule is not None:
            tag, module, redirected = schedule.redirect(tag, module, args, kwargs)
            if module is None:  # it runs when a later one is called
                self._pending.append(redirected)
                return redirected
            args, kwargs = redirected
        if (uses := SCHEDULE_USES.get()) is not None and method == "__call__":
            note = uses.call if schedule is None else uses.run
            note(tag.name, tag.path)
        with in_call(Frame(tag, module, method)) as frame:
            try:
                out = self._call_sharded(frame, schedule, call, args, kwargs)
            except _compat.SHARDING_ERRORS as error:
                self._refuse_untyped(frame, (args, kwargs), error)
            except ValueError as error:
                if self._explicit_axes:
                    self._explain(frame, error)
                raise
            frame.record(out)
        if unscheduled is not None:
            unscheduled.report_other_method(tag, method, args, out)
        return out

    def _explain(self, frame: Frame, error: ValueError) -> None:
        """Adds to JAX's error about axis types which module has which, the innermost one first."""
        if _is_explained(error):
            return
        path, name = frame.tag.path, frame.tag.accessor
        here = jax.sharding.get_abstract_mesh()
        if axes_of_type(here, AxisType.Explicit) and not frame.is_by_strategy:
            refuse_constraint(error, self._transform.name, name, path)
        elif _USES_TYPES.search(str(error)):
            as_written = InOutSharding(method=frame.method, axis_types=AxisType.Explicit)
            entry = {exact_path(path): as_written}
            error.add_note(f"{name} {_NOTE} activation_shardings={entry!r}.")

    def _schedule(self, tag: Tag, module: object, method: str) -> CallSchedule | None:
        """Returns how a strategy runs a call of a method, or None."""
        found = (x.find_schedule(tag.path, module, method) for x in tag.sources)
        first = next(filter(None, found), None)
        return None if first is None or first.is_running or self._mesh is None else first

    def _call_sharded(
        self,
        frame: Frame,
        schedule: CallSchedule | None,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Keywords,
    ) -> Any:
        """Calls a method with the shardings of its input, parameters, axis types and output.

        Args:
          frame: the call, with the tag of the module.
          schedule: what runs the module in a special order, such as a pipeline; None for a plain
            call.
          call: the bound method.
          args: the positional arguments of the call.
          kwargs: its keyword arguments.
        """
        if frame.tag.specs:
            self._whole_outputs.begin_layer()
        chosen = self._find(frame)
        if chosen.input is not None and args:
            args = (self._constrain_tree(args[0], chosen.input, frame, "input"), *args[1:])
        if schedule is not None and self._mesh is not None:
            ahead = any(source.prefetch for source in frame.tag.sources)
            call = schedule.wrap(frame.module, call, self._mesh, self._plan.batch_axes, ahead)
        with replaced_values(self._gather_variables(frame)):
            mesh, explicit = jax.sharding.get_abstract_mesh(), explicit_axes_in_context()
            pair = spec_and_mesh(chosen.output, mesh)
            if explicit and pair is not None and pair[0].unreduced:
                # Only Explicit axes can be, and only the layer itself can leave out the sum.
                kwargs = {**kwargs, "out_sharding": keep_axes(pair[0], explicit)}
            axes = self._auto_axes(frame, chosen, explicit, (args, kwargs))

            def call_and_constrain(*args: Any, **kwargs: Any) -> Any:
                out = call(*args, **kwargs)
                if chosen.output is not None:
                    return self._constrain_tree(out, chosen.output, frame, "output")
                if explicit and not axes:
                    return out  # its types say how it is sharded
                shard = functools.partial(self._shard_columns, frame)
                return jax.tree.map(shard, out, is_leaf=_compat.is_graph_object)

            if not axes:
                return call_and_constrain(*args, **kwargs)
            frame.is_by_strategy = True
            leave = functools.partial(self._leave_auto_axes, frame, (args, kwargs), axes, mesh)
            # The module, too, as it holds arrays with types.
            inputs = frame.module, args, kwargs
            return with_auto_axes(
                inputs, lambda inside: call_and_constrain(*inside[1], **inside[2]), axes, leave
            )

    def _shard_columns(self, frame: Frame, x: AnyArray) -> AnyArray:
        """Shards an output of a layer on Auto axes like the columns of its kernel."""
        spec = self._spec_of_columns(frame, x) if isinstance(x, jax.Array) else None
        if spec is None:
            return x
        self._whole_outputs.end_layer(x, spec)
        if self._mesh is None or not any(spec_axes(spec)):
            return x
        [new] = apply_shardings([x], [NamedSharding(mesh_in_trace(self._mesh), spec)])
        return new

    def _leave_auto_axes(
        self,
        frame: Frame,
        inputs: object,
        axes: frozenset[AxisName],
        mesh: AbstractMesh,
        x: jax.Array,
    ) -> jax.Array:
        """Gives an output of a module that ran with Auto axes its type on the Explicit ones.

        The sharding is the one that was chosen for the array; otherwise the sharding of the columns
        of a layer; otherwise that of an input of its shape and dtype, or of the first one.

        Args:
          frame: the call of the module.
          inputs: the arguments of the call.
          axes: the axes that were Auto.
          mesh: the mesh on which they are Explicit.
          x: the output.
        """
        explicit = axes_of_type(mesh, AxisType.Explicit)
        known = frame.sharding_of(x)
        like = input_like(x, inputs)
        assert like is not None  # or no axis of the module would be Auto
        spec = opened(type_spec(x)) if known is None else keep_axes(known.spec, explicit)
        if spec is None and frame.tag.path and (columns := self._spec_of_columns(frame, x)):
            spec = keep_axes(columns, explicit)
        new: jax.Array = retype(x, mesh, output_spec(x, like, spec))
        if known is not None:
            frame.note_sharding(new, jax.typeof(new).sharding)
        elif frame.is_outermost:
            sizes = {axis: mesh.shape[axis] for axis in axes - self._plan.batch_axes}
            self._whole_outputs.add(frame, new, like, sizes)
        return new

    def _spec_of_columns(self, frame: Frame, x: jax.Array) -> PartitionSpec | None:
        """Returns the spec of an output whose last dimensions are the columns of a kernel.

        A kernel (…, in, out) makes (batch, …, out): its last dimensions have the specs of the
        kernel's, and all others are open. None if the module has no such kernel.
        """
        tag = frame.tag
        if not self._explicit_axes or not any(source.infer for source in tag.sources):
            return None
        features = getattr(frame.module, "out_features", None)
        count = len(features) if isinstance(features, tuple) else 1  # of dimensions of columns
        for path, variable in own_variables(frame.module):
            shape = getattr(_compat.get_value(variable), "shape", ())
            is_kernel = len(shape) > count < x.ndim and shape[-count:] == x.shape[-count:]
            if is_kernel and path in tag.specs:
                stacked = tag.specs[path]
                whole = spec_of_slice(stacked.inside, stacked.shape, shape)
                spec = PartitionSpec(*whole.partitions[-count:])
                # Axes that are Auto around the model are the compiler's, as on Auto axes alone.
                free = keep_axes(spec, self._explicit_axes.difference(self._plan.batch_axes))
                return PartitionSpec(*[OPEN] * (x.ndim - count), *free.partitions)
        return None

    def _auto_axes(
        self,
        frame: Frame,
        chosen: InOutSharding,
        explicit: frozenset[AxisName],
        inputs: tuple[tuple[Any, ...], Keywords],
    ) -> frozenset[AxisName]:
        """Returns which Explicit axes are Auto in a method: all or none of them.

        They are Auto if that is declared, and by default where shardings are inferred, and in a
        layer with a declared output. Methods that get no array with a sharding in its type, or that
        are told the sharding of their output, run unchanged.

        Args:
          frame: the call of the method.
          chosen: the shardings that are declared for it.
          explicit: the Explicit axes of the mesh.
          inputs: the positional and keyword arguments of the call.
        """
        if (
            not explicit
            or first_with_explicit_spec(inputs) is None
            or inputs[1].get("out_sharding") is not None
        ):
            return frozenset()
        if chosen.axis_types is not None:
            return explicit if chosen.axis_types is AxisType.Auto else frozenset()
        tag, module = frame.tag, frame.module
        for source in tag.sources:
            if any(x.axis_types is AxisType.Explicit for x in source.shardings):
                # Declared for a module inside, which could not run as written on Auto axes.
                inside = (((*tag.path, *path), inner) for path, inner in modules_in(module))
                if any(source.is_explicit(path, inner) for path, inner in inside):
                    return frozenset()
        infers = any(source.infer for source in tag.sources)
        is_chosen = infers or (chosen.output is not None and is_layer(module))
        return explicit if is_chosen else frozenset()

    def _refuse_untyped(self, frame: Frame, inputs: object, error: Exception) -> NoReturn:
        """Raises an error that names the innermost module in which JAX cannot type an operation."""
        module, method = frame.module, frame.method
        values = [_compat.get_value(variable) for _, variable in own_variables(module)]
        avals = map(jax.typeof, arrays_in((inputs, values)))
        types = tuple(aval.str_short(short_dtypes=True) for aval in avals)
        spec = type_spec(first_with_explicit_spec(inputs)) or PartitionSpec()
        # Suggests what shards the input, but not its last dimension, the features, which the output
        # need not have, nor trailing dimensions that nothing shards.
        sharded = [i for i, axes in enumerate(spec.partitions[:-1]) if axes]
        entry: PartitionSpec | InOutSharding
        entry = PartitionSpec(*spec.partitions[: sharded[-1] + 1 if sharded else 0])
        if not is_layer(module):
            entry = InOutSharding(entry, method=method, axis_types=AxisType.Auto)
        elif method != "__call__":
            entry = InOutSharding(entry, method=method)
        reason = str(error).partition(". ")[0].partition("\n")[0]
        line = f"  {frame.tag.accessor}: {type(module).__name__} of {', '.join(types)}"
        text = message(
            f"{self._transform.name}: on these Explicit axes JAX cannot know how a module shards "
            "the result of an operation:",
            [f"{line}\n    {reason}"],
            "Declare its output: jit(..., activation_shardings="
            f"{{{exact_path(frame.tag.path)!r}: {entry!r}}}); within the module, the compiler then "
            "chooses. Patterns such as r'blocks/\\d+/up$' match several. Strategies such as fsdp "
            "or from_rules do so for all modules in arguments. Or give the operation an "
            "out_sharding, or use jit(..., auto_axes=True), with out_shardings.",
        )
        raise see(ActivationError(text), anchor="output-that-jax-cannot-shard") from None

    def _tag_foreign(self, module: object) -> Tag:
        """Returns the tag of a module that is not from the arguments: the root of a path.

        All modules in it get tags, too. They are kept here, because what the function has captured
        or made is not to be changed.
        """
        if id(module) not in self._foreign_tags:
            sources = tuple(self._sources)
            name = type(module).__name__
            for path, inner in modules_in(module):
                if _compat.tag_of(inner) is None:
                    tag = self._tag(name, path, sources, inner)
                    self._foreign_tags.setdefault(id(inner), (tag, inner))
        tag, _ = self._foreign_tags[id(module)]
        return tag

    def _find(self, frame: Frame) -> InOutSharding:
        """Returns what the first source that has a filter for the call chooses.

        Filters of all sources that match count as used.
        """
        chosen = None
        for source in frame.tag.sources:
            index, sharding = source.find(frame.tag.path, frame.module, frame.method)
            if sharding is not None and index is not None:
                number = self._sources.index(source)
                self.context.used.add((number, index))
                if chosen is None:
                    chosen, frame.is_strict = sharding, source.strict
                    frame.chosen_by = "user" if number < self._num_declared else "strategy"
        return chosen or _NOTHING

    def _gather_variables(self, frame: Frame) -> list[tuple[Variable, jax.Array]]:
        """Returns the module's own Variables that have another value while it runs, with the value.

        A Variable has a new value if its array is gathered over the axes of the module's tag.
        """
        tag = frame.tag
        is_explicit = bool(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))
        if not is_explicit and not tag.axes:
            return []
        changes: list[tuple[Variable, jax.Array]] = []
        ahead = PREFETCHED.value or ()  # what the loop around this has gathered already
        for path, variable in own_variables(frame.module):
            value = _compat.get_value(variable)
            if not isinstance(value, jax.Array) or (tag.name, tag.path, path) in ahead:
                continue
            new = self._gather(tag, path, variable, value)
            if new is value:
                continue
            # The gradient of the new value goes to the same partial sum (`partial_sums.py`).
            partial_sums = PARTIAL.get() or {}
            if id(value) in partial_sums:
                _, sums = partial_sums[id(value)]
                partial_sums[id(new)] = new, sums
            changes.append((variable, new))
        return changes

    def _gather(self, tag: Tag, path: Path, variable: Variable, value: jax.Array) -> jax.Array:
        """Returns a Variable's value as its module uses it, whole over the axes of the tag.

        On Explicit axes it is resharded, on Auto axes constrained. The same array if it is so
        already.
        """
        spec = type_spec(value)
        if spec is not None:  # on Explicit axes
            kept = spec
            if is_parameter(variable) and not tag.axes.isdisjoint(spec_axes(spec)):
                kept = with_entries(spec, keep_axes(spec, self._axes - tag.axes).partitions)
            if spec.reduced:  # JAX counts some gradients of such arrays several times
                kept = with_reduced(kept, ())
            if kept == spec:
                return value
            target = NamedSharding(jax.typeof(value).sharding.mesh, kept)
            gathered: jax.Array = jax.sharding.reshard(value, target)
            return gathered
        known = tag.specs.get(path)
        if self._mesh is None or known is None or not known.is_gathered:
            return value
        inside = spec_of_slice(known.inside, known.shape, value.shape)
        [gathered] = apply_shardings([value], [NamedSharding(mesh_in_trace(self._mesh), inside)])
        return gathered

    def _constrain_tree(self, tree: Any, prefix: object, frame: Frame, side: str) -> Any:
        """Constrains what a method takes or returns to the specs declared for it.

        Args:
          tree: a pytree of activations.
          prefix: a pytree prefix of it, with specs as leaves; None leaves activations unchanged.
          frame: the call.
          side: ``input`` or ``output``, for messages.

        Returns:
          The same pytree with constrained arrays. A prefix of another structure is recorded, for
          the error at the end of the trace that lists all.
        """
        name = f"{side} of {frame.tag.accessor}"
        specs, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=is_activation_spec)
        try:
            parts = treedef.flatten_up_to(tree)  # type: ignore[attr-defined]
        except ValueError as error:
            self._mismatches[f"{name}: {error}"] = None
            return tree
        new = [
            jax.tree.map(lambda x, spec=spec: self._constrain_array(x, spec, frame, name), part)
            for part, spec in zip(parts, specs, strict=True)
        ]
        return jax.tree_util.tree_unflatten(treedef, new)

    def _constrain_array(
        self, x: AnyArray, spec: PartitionSpec | NamedSharding | None, frame: Frame, name: str
    ) -> AnyArray:
        """Constrains an activation to a spec, or to the part of it that fits its shape.

        A spec that does not fit is recorded for the error at the end of the trace; ``name`` is the
        expression for the activation in it.
        """
        if spec is None or not isinstance(x, jax.Array):
            return x
        pair = spec_and_mesh(spec, self._mesh)
        if pair is None:
            raise no_mesh(self._transform.name)
        mesh = mesh_in_trace(pair[1])
        action = self._transform.on_indivisible
        fit = fit_sharding(pair[0], mesh, x.shape, on_indivisible=action, usable=self._axes or None)
        if fit.problems:
            # What a strategy declares is for models of any shape, so there it is no error.
            if frame.is_strict:
                self._mismatches[fit.line(name).strip()] = None
            return x
        fitted: Any = fit.sharding
        if AxisType.Auto not in mesh.axis_types:  # there JAX does not support UNCONSTRAINED
            fitted = without_unconstrained(fitted, x, mesh)
        sharding = NamedSharding(mesh, fitted)
        [new] = apply_shardings([x], [sharding])
        frame.note_sharding(new, sharding)
        return new

    def _check(self) -> None:
        """Raises errors at the end of a trace: for specs that did not fit, and unused filters.

        Also for calls that a schedule was to run later, and never did.
        """
        name = self._transform.name
        for pending in self._pending:
            pending.check_ran()
        for source in self._sources:
            if self._mesh is not None and isinstance(source.gather, tuple):
                fit = fit_sharding(PartitionSpec(source.gather), self._mesh)
                if fit.problems:
                    self._mismatches[fit.line("gather").strip()] = None
        raise_listed(
            ActivationError,
            f"{name}: these activation shardings do not fit:",
            [f"  {x}" for x in self._mismatches],
            "Correct the specs, or use on_indivisible for those that do not divide a shape.",
            anchor="activation-specs-that-do-not-fit",
        )
        unused = [
            _unused_line(source.filters[index], sharding.method)
            for number, source in enumerate(self._sources)
            for index, sharding in enumerate(source.shardings)
            if source.strict and (number, index) not in self.context.used
        ]
        raise_listed(
            ActivationError,
            f"{name}: these filters of activation_shardings match no called module:",
            unused,
            "Strings are regular expressions for the paths of modules within the argument, such as "
            "blocks/3/up. Correct the filters, or pass ActivationSharding(..., strict=False).",
            anchor="unused-filter-for-activations",
        )


def _unused_line(filter_: object, method: str) -> str:
    """Returns a line about a filter that matched no call, with a hint if it looks like a glob."""
    of = "" if method == "__call__" else f", method {method!r}"
    hint = glob_hint(filter_) if isinstance(filter_, str) else ""
    return f"  {filter_!r}{of}{hint and '.' + hint}"


def _is_explained(error: Exception) -> bool:
    """Returns whether a module inside has said already that it runs with Auto axes."""
    return any(_NOTE in note for note in getattr(error, "__notes__", ()))


_NOTE = (
    "runs with Auto axes, because its shardings are inferred. For a method that uses out_sharding, "
    "reshard or a mesh itself, pass"
)
# Messages of JAX about arrays on Auto axes where it wants Explicit ones.
_USES_TYPES = re.compile("of type Auto|only refer to Auto|context mesh", re.IGNORECASE)
_NOTHING = InOutSharding()


def spec_of_slice(spec: PartitionSpec, shape: Shape, inner: Shape) -> PartitionSpec:
    """Returns the spec of a loop's slice of an array.

    Which dimensions were removed is inferred from the shapes; unsharded dimensions are preferred,
    then leading ones.
    """
    # Each choice is the dimensions of the array that the slice may have kept.
    choices = [
        kept
        for kept in itertools.combinations(range(len(shape)), len(inner))
        if all(shape[dimension] == size for dimension, size in zip(kept, inner, strict=True))
    ]
    # Of equally many sharded dimensions, `max` takes the first: that which keeps the last ones.
    entries = [[spec.partitions[dimension] for dimension in kept] for kept in reversed(choices)]
    return PartitionSpec(*max(entries, key=_num_sharded, default=()))


def _num_sharded(entries: Sequence[object]) -> int:
    return sum(map(bool, entries))


def _mesh_of(plan: Plan) -> Any:
    """Returns the mesh of a trace: from the transform, from a spec, or from the context."""
    if plan.transform.context is not None:
        return plan.transform.context
    meshes = (spec.mesh for spec in plan.object_specs.values() if isinstance(spec, NamedSharding))
    return next(meshes, None) or _compat.context_mesh()
