"""The context of a function while it is traced: the scope that shards its activations.

Models do not know how they are sharded. A :class:`Scope` does: while a function is traced, each
call of a module comes to it (``intercept.py``), and it

    finds      what the user or a strategy declared for the module, by its path (``Tag``)
    gathers    the module's own parameters, as FSDP does, for the duration of the call
    retypes    Explicit axes to Auto in the call, where shardings are inferred (``axis_types.py``)
    constrains what the method takes and returns
    records    what was chosen, for reports (``calls.py``)

Paths belong to the arguments of the function. A module in an inner trace is a copy, which gets the
tag of the original (``pass_tags``).
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
from ..core.call_context import Caller
from ..core.constrain import (
    apply_shardings,
    in_context,
    mesh_here,
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
from ..core.unflatten import Built
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
    only_axes,
    padded,
    spec_and_mesh,
    spec_axes,
    with_entries,
    with_reduced,
)
from ..specs.paths import Path, accessor
from ..specs.state_sharding import StateSharding
from .axis_types import (
    OPEN,
    arrays_in,
    explicit_axes_here,
    first_typed,
    opened,
    output_spec,
    with_auto_axes,
)
from .calls import RECORD, Frame, Shape, Tag, in_call
from .constraints import exact_path, refuse_constraint
from .intercept import handler_here, original_of, with_handler
from .schedules import SCHEDULE_USES, PendingCall, Place, ScheduleUses
from .updates import update
from .variables import is_layer, is_parameter, modules_in, own_variables, replaced_values
from .whole_outputs import WholeOutputs


class _TraceContext:
    """What shards the activations of a trace: equal only to itself, since JAX compares contexts.

    JAX has its contexts in the keys of what it traced, and hashes them for each primitive. So a
    context must not grow with the model, and declarations are hashed once for each trace.
    """

    def __init__(self, batch_axes: frozenset[Any], within_outermost: dict[Hashable, _TraceContext]):
        self.batch_axes = batch_axes
        self.used = set[tuple[int, int]]()  # the filters that matched: of which source, and which
        # The contexts within one outermost trace, by their declarations: equal ones share a
        # context, and so traces.
        self.within_outermost = within_outermost


# Traces of inner functions are not used again in another outermost trace, where filters that
# matched in them would seem to have no effect.
CONTEXT = jax.make_user_context()
# The Variables that a surrounding loop has gathered, by name and path of their module.
PREFETCHED = jax.make_user_context()


def batch_axes_here() -> frozenset[Any]:
    """The axes that shard the first dimension of the data of the current trace, as far as known."""
    context = CONTEXT.value
    return frozenset() if context is None else context.batch_axes


class _Key:
    """Stands for a value in a context of JAX, which hashes that for each primitive of a trace."""

    __slots__ = ("__weakref__",)


_TAGS: Callable[[_Key], AbstractContextManager[None]] = jax.make_user_context()
# Equal values have one key as long as a context or a cache of JAX holds it.
_KEYS = weakref.WeakValueDictionary[Hashable, _Key]()


class Known(dict[int, tuple[Path, Any]]):
    """The modules known to a surrounding ``remat`` with filters: by id, path and module."""

    def __init__(self, modules: Mapping[int, tuple[Path, Any]]):
        super().__init__(modules)
        self.trace = object()  # JAX keeps this, and so must not keep the modules


KNOWN: contextvars.ContextVar[tuple[Known, ...]] = contextvars.ContextVar("KNOWN", default=())


def inherited(objects: Sequence[Any]) -> AbstractContextManager[None]:
    """Where JAX reuses no trace of modules with other tags, or other paths in a ``remat``."""
    tags = tuple(_compat.tag_of(x) if _compat.is_node(x) else None for x in objects)
    paths = tuple((x.trace, *(x.get(id(one), (None,))[0] for one in objects)) for x in KNOWN.get())
    if not paths and not any(tags):
        return contextlib.nullcontext()
    key = _KEYS.get((tags, paths))
    if key is None:
        key = _KEYS[tags, paths] = _Key()
    return _TAGS(key)


def pass_tags(known: Caller | Flat, built: Built | Flat) -> None:
    """Passes the declarations for modules on to copies of them, such as in an inner trace."""
    for old, new in zip(known.objects, built.objects, strict=True):
        if _compat.is_node(old) and (tag := _compat.tag_of(old)) is not None:
            _compat.tag_node(new, tag)


def pass_paths(caller: Caller, built: Built) -> None:
    """Passes the paths of modules known to a surrounding ``remat`` on to an inner trace."""
    for known in KNOWN.get():
        for old, new in zip(caller.objects, built.objects, strict=True):
            if id(old) in known:
                known[id(new)] = known[id(old)][0], new


@contextlib.contextmanager
def sharded_activations(
    plan: Plan, caller: Caller, built: Built, leaves: Sequence[Any]
) -> Iterator[Callable[..., Any]]:
    """Shards the activations of modules in a trace; yields what to call for the user's function."""
    assert isinstance(plan.transform, Sharded)
    pass_paths(caller, built)
    scope = Scope(plan, plan.transform, built, leaves)
    if not scope.is_needed:
        pass_tags(caller, built)
        yield caller.fun
        return
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

    def __init__(self, plan: Plan, transform: Sharded, built: Built, leaves: Sequence[Any]):
        declared = transform.activation_shardings
        sources = () if declared is None else (declared,)
        self._transform, self._plan, self._built = transform, plan, built
        meshes = {jax.typeof(x).sharding.mesh for x in leaves if type_spec(x) is not None}
        self._explicit_axes = {
            axis for mesh in meshes for axis in axes_of_type(mesh, AxisType.Explicit)
        }
        self._mesh = _mesh_of(plan)
        # Those that are not manual; all of them in `jit`.
        manual = transform.usable_axes or ()
        self._axes = frozenset(self._mesh.axis_names if self._mesh else ()).difference(manual)
        self._sources = [*sources]  # those for all arguments, then those of single ones
        self._declared = len(sources)
        self._roots: dict[int, tuple[Tag, Any]] = {}
        # Within another trace, that one explains and records.
        self._observes = handler_here() is None and bool(
            self._explicit_axes or RECORD.value is not None
        )
        self._misfits: dict[str, None] = {}
        self._pending: list[PendingCall] = []  # what calls returned that run later
        self._schedules: dict[Place, CallSchedule] = {}  # by the place of what each runs
        self._whole = WholeOutputs()
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
        return {id(x): i for i, x in enumerate(self._built.objects)}

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to apply, explain or record."""
        return bool(self._sources) or self._observes

    def run(self, fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's function; a module's method is called as a method."""
        named = {x.method for source in self._sources for x in source.shardings}
        name = getattr(fun, "__name__", "")
        if args and isinstance(args[0], nnx.Module):
            method = original_of(inspect.getattr_static(type(args[0]), name, None))
            while method is not None and method is not fun:
                method = original_of(getattr(method, "__wrapped__", None))
            if method is fun:
                bound = functools.partial(fun, args[0])
                fun, args = self, (args[0], name, bound, args[1:], kwargs)
                kwargs = {}
        out = self._with_uses(named, fun, args, kwargs)
        self._check()  # here, as an error at the end of a block would show frames of contextlib
        self._whole.warn(self._transform.name, out, strict=self._transform.strict)
        return out

    def _with_uses(self, named: set[str], fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function, and reports schedules that it did not use."""
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
        plan, built = self._plan, self._built
        parts = [
            (
                argument,
                part,
                part.spec.activations if isinstance(part.spec, StateSharding) else None,
            )
            for argument in plan.graph_arguments
            for part in argument.parts
        ]
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
                    module = built.objects[index]
                    tag = self._tag(name, path, chosen, module)
                    _compat.tag_node(module, tag)
                    if (schedule := self._schedule(tag, module, "__call__")) is not None:
                        self._schedules[name, schedule.module_path(path)] = schedule

    def _tag(
        self, name: str, path: Path, sources: tuple[ActivationSharding, ...], module: Any
    ) -> Tag:
        specs: dict[Path, Any] = {}
        batch = self._plan.batch_axes
        named = (batch if source.gather is True else source.gather or () for source in sources)
        axes = self._axes.intersection(axis for axes in named for axis in axes)
        axes = axes.difference(axis for source in sources for axis in source.kept)
        # Over the stages of a pipeline, layers are sharded, but not what is in them.
        every = (x.schedule for source in sources for x in source.shardings)
        inside = self._axes - axes - {schedule.axis for schedule in every if schedule}
        for own_path, variable in own_variables(module) if axes or self._explicit_axes else ():
            value, index = _compat.get_value(variable), self._indices.get(id(variable))
            slots = () if index is None else self._plan.structure.slots[index]
            declared = self._plan.object_specs.get(slots[0]) if len(slots) == 1 else None
            pair = spec_and_mesh(type_spec(value) if declared is None else declared, self._mesh)
            if pair is not None and isinstance(value, jax.Array):
                shape, kept = jax.typeof(value).shape, only_axes(pair[0], inside)
                whole, outside = (with_entries(x, padded(x, len(shape))) for x in (kept, pair[0]))
                is_gathered = is_parameter(variable) and not axes.isdisjoint(spec_axes(pair[0]))
                specs[own_path] = whole, shape, is_gathered, outside
        return Tag(name, path, sources, axes, specs, self._mesh)

    def __call__(
        self, module: Any, method: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls a method of a module with the shardings chosen for it, or updates an optimizer."""
        tag = _compat.tag_of(module) or self._root_tag(module)
        if isinstance(module, nnx.Optimizer) and method == "update":
            with jax.named_scope(tag.accessor):  # for `by_module`
                return update(module, call, args, kwargs)
        schedule = self._schedule(tag, module, method)
        is_other = schedule is None and method != "__call__"
        unscheduled = self._schedule(tag, module, "__call__") if is_other else None
        if schedule is not None:
            tag, module, args = schedule.redirect(tag, module, args, kwargs)
            if module is None:  # it runs when a later one is called
                self._pending.append(args)
                return args
        if (uses := SCHEDULE_USES.get()) is not None and method == "__call__":
            (uses.call if schedule is None else uses.run)(tag.name, tag.path)
        with in_call(Frame(tag, module, method)) as frame:
            try:
                out = self._called(frame, schedule, call, args, kwargs)
            except _compat.SHARDING_ERRORS as error:
                self._refuse_untyped(frame, (args, kwargs), error)
            except ValueError as error:
                if self._explicit_axes:
                    self._explain(frame, error)
                raise
            frame.returned(out)
        if unscheduled is not None:
            unscheduled.report_other_method(tag, method, args, out)
        return out

    def _explain(self, frame: Frame, error: ValueError) -> None:
        """Says in JAX's error about axis types which module has which, the innermost one first."""
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

    def _schedule(self, tag: Tag, module: Any, method: str) -> CallSchedule | None:
        """How a strategy runs a call of a method, or None."""
        found = (x.find_schedule(tag.path, module, method) for x in tag.sources)
        first = next(filter(None, found), None)
        return None if first is None or first.is_running or self._mesh is None else first

    def _called(
        self,
        frame: Frame,
        schedule: CallSchedule | None,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        if frame.tag.specs:
            self._whole.begin_layer()
        chosen = self._find(frame)
        if chosen.input is not None and args:
            args = (self._constrained(args[0], chosen.input, frame, "input"), *args[1:])
        if schedule is not None and self._mesh is not None:
            ahead = any(source.prefetch for source in frame.tag.sources)
            call = schedule.wrap(frame.module, call, self._mesh, self._plan.batch_axes, ahead)
        with replaced_values(self._gathered(frame)):
            mesh, explicit = jax.sharding.get_abstract_mesh(), explicit_axes_here()
            pair = spec_and_mesh(chosen.output, mesh)
            if explicit and pair is not None and pair[0].unreduced:  # only Explicit axes can be
                kwargs = {**kwargs, "out_sharding": only_axes(pair[0], explicit)}
            axes = self._auto_axes(frame, chosen, explicit, (args, kwargs))

            def constrained(*args: Any, **kwargs: Any) -> Any:
                out = call(*args, **kwargs)
                if chosen.output is not None:
                    return self._constrained(out, chosen.output, frame, "output")
                if explicit and not axes:
                    return out
                shard = functools.partial(self._shard_columns, frame)
                return jax.tree.map(shard, out, is_leaf=_compat.is_graph_object)

            if not axes:
                return constrained(*args, **kwargs)
            frame.is_by_strategy = True
            leave = functools.partial(self._leave_auto_axes, frame, (args, kwargs), axes, mesh)
            inputs = frame.module, args, kwargs
            return with_auto_axes(inputs, lambda x: constrained(*x[1], **x[2]), axes, leave)

    def _shard_columns(self, frame: Frame, x: Any) -> Any:
        """Shards an output of a layer on Auto axes like the columns of its kernel."""
        spec = self._columns(frame, x) if isinstance(x, jax.Array) else None
        if spec is None:
            return x
        self._whole.end_layer(x, spec)
        if self._mesh is None or not any(spec_axes(spec)):
            return x
        [new] = apply_shardings([x], [NamedSharding(mesh_here(self._mesh), spec)])
        return new

    def _leave_auto_axes(
        self,
        frame: Frame,
        inputs: Any,
        axes: frozenset[Any],
        mesh: AbstractMesh,
        x: jax.Array,
    ) -> jax.Array:
        """Gives an output of a module that ran with Auto axes its type on the Explicit ones.

        It is what was chosen for the array; else that of the columns of a layer; and, where these
        say nothing, that of the first input.
        """
        explicit = axes_of_type(mesh, AxisType.Explicit)
        known, like = frame.sharding_of(x), first_typed(inputs)
        spec = opened(type_spec(x)) if known is None else only_axes(known.spec, explicit)
        if spec is None and frame.tag.path and (columns := self._columns(frame, x)):
            spec = only_axes(columns, explicit)
        new: jax.Array = retype(x, mesh, output_spec(x, like, spec))
        if known is not None:
            frame.constrained(new, jax.typeof(new).sharding)
        elif frame.is_outermost:
            sizes = {axis: mesh.shape[axis] for axis in axes - self._plan.batch_axes}
            self._whole.add(frame.tag.accessor, frame.module, new, like, sizes)
        return new

    def _columns(self, frame: Frame, x: jax.Array) -> PartitionSpec | None:
        """The spec of an output whose last dimensions are those of the columns of a kernel."""
        tag = frame.tag
        if not self._explicit_axes or not any(source.infer for source in tag.sources):
            return None
        features = getattr(frame.module, "out_features", None)
        count = len(features) if isinstance(features, tuple) else 1
        for path, variable in own_variables(frame.module):
            shape = getattr(_compat.get_value(variable), "shape", ())
            is_kernel = len(shape) > count < x.ndim and shape[-count:] == x.shape[-count:]
            if is_kernel and path in tag.specs:
                whole = spec_of_slice(*tag.specs[path][:2], shape)
                spec = PartitionSpec(*whole.partitions[-count:])
                # Axes that are Auto around the model are the compiler's, as on Auto axes alone.
                free = only_axes(spec, self._explicit_axes.difference(self._plan.batch_axes))
                return PartitionSpec(*[OPEN] * (x.ndim - count), *free.partitions)
        return None

    def _auto_axes(
        self, frame: Frame, chosen: InOutSharding, explicit: frozenset[Any], inputs: Any
    ) -> frozenset[Any]:
        """The Explicit axes that are Auto in a method: declared so, inferred, or of a layer."""
        if not explicit or first_typed(inputs) is None or inputs[1].get("out_sharding") is not None:
            return frozenset()
        if chosen.axis_types is not None:
            return explicit if chosen.axis_types is AxisType.Auto else frozenset()
        tag, module = frame.tag, frame.module
        for source in tag.sources:
            if any(x.axis_types is AxisType.Explicit for x in source.shardings):
                inside = (((*tag.path, *path), one) for path, one in modules_in(module))
                if any(source.is_explicit(*one) for one in inside):
                    return frozenset()
        infers = any(source.infer for source in tag.sources)
        is_chosen = infers or (chosen.output is not None and is_layer(module))
        return explicit if is_chosen else frozenset()

    def _refuse_untyped(self, frame: Frame, inputs: Any, error: Exception) -> NoReturn:
        """Raises an error that names the innermost module in which JAX cannot type an operation."""
        module, method = frame.module, frame.method
        values = [_compat.get_value(variable) for _, variable in own_variables(module)]
        avals = map(jax.typeof, arrays_in((inputs, values)))
        types = tuple(aval.str_short(short_dtypes=True) for aval in avals)
        spec = type_spec(first_typed(inputs)) or PartitionSpec()
        # Suggests what shards the input, but not its last dimension, the features, which the output
        # need not have, nor trailing dimensions that nothing shards.
        sharded = [i for i, axes in enumerate(spec.partitions[:-1]) if axes]
        entry: Any = PartitionSpec(*spec.partitions[: sharded[-1] + 1 if sharded else 0])
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
            "or from_rules do so for all modules. Or give the operation an out_sharding, or use "
            "jit(..., auto_axes=True), with out_shardings.",
        )
        raise see(ActivationError(text), anchor="output-that-jax-cannot-shard") from None

    def _root_tag(self, module: Any) -> Tag:
        """Tags a module that is not from the arguments, as the root of a path, and all in it."""
        known = self._roots.get(id(module))
        if known is None:
            sources, name = tuple(self._sources), type(module).__name__
            for path, inner in modules_in(module):
                if _compat.tag_of(inner) is None:
                    tag = self._tag(name, path, sources, inner)
                    self._roots.setdefault(id(inner), (tag, inner))
            known = self._roots[id(module)]
        return known[0]

    def _find(self, frame: Frame) -> InOutSharding:
        """The choice of the first source that has one."""
        chosen = None
        for source in frame.tag.sources:
            index, sharding = source.find(frame.tag.path, frame.module, frame.method)
            if sharding is not None and index is not None:
                number = self._sources.index(source)
                self.context.used.add((number, index))
                if chosen is None:
                    chosen, frame.is_strict = sharding, source.strict
                    frame.chosen_by = "user" if number < self._declared else "strategy"
        return chosen or _NOTHING

    def _gathered(self, frame: Frame) -> list[tuple[Any, Any]]:
        """The module's own Variables, with gathered values."""
        tag, axes = frame.tag, frame.tag.axes
        is_explicit = bool(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))
        if not is_explicit and not axes:
            return []
        changes: list[tuple[Any, Any]] = []
        ahead = PREFETCHED.value or ()
        for path, variable in own_variables(frame.module):
            value = _compat.get_value(variable)
            if not isinstance(value, jax.Array) or (tag.name, tag.path, path) in ahead:
                continue
            spec, new = type_spec(value), value
            if spec is not None:
                kept = spec
                if is_parameter(variable) and not axes.isdisjoint(spec_axes(spec)):
                    kept = with_entries(spec, only_axes(spec, self._axes - axes).partitions)
                if spec.reduced:  # of which JAX counts some gradients several times
                    kept = with_reduced(kept, ())
                if kept != spec:
                    goal = NamedSharding(jax.typeof(value).sharding.mesh, kept)
                    new = jax.sharding.reshard(value, goal)
            elif self._mesh is not None and tag.specs.get(path, (None, None, False, None))[2]:
                here = spec_of_slice(*tag.specs[path][:2], value.shape)
                goals = [NamedSharding(mesh_here(self._mesh), here)]
                [new] = apply_shardings([value], goals)
            if new is value:
                continue
            if found := (partial := PARTIAL.get() or {}).get(id(value)):
                partial[id(new)] = new, found[1]
            changes.append((variable, new))
        return changes

    def _constrained(self, tree: Any, prefix: Any, frame: Frame, side: str) -> Any:
        """A pytree of activations with the specs of a prefix."""
        name = f"{side} of {frame.tag.accessor}"
        specs, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=is_activation_spec)
        try:
            parts = treedef.flatten_up_to(tree)  # type: ignore[attr-defined]
        except ValueError as error:
            self._misfits[f"{name}: {error}"] = None
            return tree
        new = [
            jax.tree.map(lambda x, spec=spec: self._constrained_array(x, spec, frame, name), part)
            for part, spec in zip(parts, specs, strict=True)
        ]
        return jax.tree_util.tree_unflatten(treedef, new)

    def _constrained_array(self, x: Any, spec: Any, frame: Frame, name: str) -> Any:
        if spec is None or not isinstance(x, jax.Array):
            return x
        pair = spec_and_mesh(spec, self._mesh)
        if pair is None:
            raise no_mesh(self._transform.name)
        mesh = mesh_here(pair[1])
        action = self._transform.on_indivisible
        fit = fit_sharding(pair[0], mesh, x.shape, on_indivisible=action, usable=self._axes or None)
        if fit.problems:
            if frame.is_strict:
                self._misfits[fit.line(name).strip()] = None
            return x
        spec = fit.sharding
        if AxisType.Auto not in mesh.axis_types:  # there JAX does not support UNCONSTRAINED
            spec = without_unconstrained(spec, x, mesh)
        sharding = NamedSharding(mesh, spec)
        [new] = apply_shardings([x], [sharding])
        frame.constrained(new, sharding)
        return new

    def _check(self) -> None:
        """Refuses specs that did not fit, unused filters, and calls that never ran."""
        name = self._transform.name
        for pending in self._pending:
            pending.check_ran()
        for source in self._sources:
            if self._mesh is not None and isinstance(source.gather, tuple):
                fit = fit_sharding(PartitionSpec(source.gather), self._mesh)
                if fit.problems:
                    self._misfits[fit.line("gather").strip()] = None
        raise_listed(
            ActivationError,
            f"{name}: these activation shardings do not fit:",
            [f"  {x}" for x in self._misfits],
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


def _unused_line(filter_: Any, method: str) -> str:
    of = "" if method == "__call__" else f", method {method!r}"
    hint = glob_hint(filter_) if isinstance(filter_, str) else ""
    return f"  {filter_!r}{of}{hint and '.' + hint}"


def _is_explained(error: Exception) -> bool:
    """Whether a module inside has said already that it runs with Auto axes."""
    return any(_NOTE in note for note in getattr(error, "__notes__", ()))


_NOTE = (
    "runs with Auto axes, because its shardings are inferred. For a method that uses out_sharding, "
    "reshard or a mesh itself, pass"
)
_USES_TYPES = re.compile("of type Auto|only refer to Auto|context mesh", re.IGNORECASE)
_NOTHING = InOutSharding()


def spec_of_slice(spec: PartitionSpec, shape: Shape, inner: Shape) -> PartitionSpec:
    """Returns the spec of a loop's slice of an array.

    Which dimensions were removed is inferred from the shapes; unsharded dimensions are preferred,
    then leading ones.
    """
    choices = [
        kept
        for kept in itertools.combinations(range(len(shape)), len(inner))
        if all(shape[dimension] == size for dimension, size in zip(kept, inner, strict=True))
    ]
    # Of equally many sharded dimensions, `max` takes the first: that which keeps the last ones.
    entries = [[spec.partitions[dimension] for dimension in kept] for kept in reversed(choices)]
    return PartitionSpec(*max(entries, key=_num_sharded, default=()))


def _num_sharded(entries: Sequence[Any]) -> int:
    return sum(map(bool, entries))


def _mesh_of(plan: Plan) -> Any:
    """The mesh of a trace: that of the transform, of a spec, or the one in context."""
    if plan.transform.context is not None:
        return plan.transform.context
    meshes = (spec.mesh for spec in plan.object_specs.values() if isinstance(spec, NamedSharding))
    return next(meshes, None) or _compat.context_mesh()
