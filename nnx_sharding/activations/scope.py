"""Handles the calls of modules while one function is traced."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..activation_sharding import Activation, ActivationSharding, is_activation_spec
from ..apply import apply_shardings, mesh_here, without_unconstrained
from ..core.axis_types import type_spec, with_reduced
from ..core.problems import Problem, refuse
from ..core.pure import Pure
from ..core.structure import NodeEntry
from ..core.unflatten import Built
from ..fitting import (
    axes_of,
    axes_of_type,
    fit_sharding,
    only_axes,
    spec_and_mesh,
    spec_axes,
    with_entries,
)
from ..paths import Path, accessor, path_string
from ..state_sharding import StateSharding
from .convolution import with_right_gradient
from .explicit import (
    Untyped,
    as_inputs,
    inferred,
    summed_axes,
    takes_out_sharding,
    without_open,
)
from .intercept import is_intercepted
from .record import RECORD, frame_here, in_call
from .tags import DECLARATIONS, Declaration, Shape, Tag
from .variables import Replaced, Saved, is_layer, modules_by_path, own_variables


class Scope:
    """The handler of the calls of modules during one trace."""

    def __init__(
        self,
        pure: Pure,
        built: Built,
        leaves: Sequence[Any],
        sources: Sequence[ActivationSharding],
    ):
        self._transform, self._pure, self._built = pure.transform, pure, built
        self._is_explicit = any(type_spec(leaf) is not None for leaf in leaves)
        self._mesh = _mesh_of(pure)
        # Those that are not manual; all of them in `jit`.
        manual = pure.transform.usable_axes or ()
        self._axes = frozenset(self._mesh.axis_names if self._mesh else ()).difference(manual)
        self._sources = [*sources]  # those for all arguments, then those of single ones
        self._declared = len(sources)
        self._roots: dict[int, tuple[Tag, Any]] = {}
        self._depth = 0  # of calls within calls
        # Within another trace, that one explains and records.
        self._observes = not is_intercepted() and (self._is_explicit or RECORD.value is not None)
        self._misfits: dict[str, None] = {}
        self._untyped: list[tuple[Tag, Untyped]] = []
        self._variables = {id(x): i for i, x in enumerate(built.objects)}
        self._tag_arguments(sources)
        self._key = tuple(self._sources), pure.batch_axes
        self.declaration = DECLARATIONS.setdefault(self._key, Declaration())

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to apply, explain or record."""
        return bool(self._sources) or self._observes

    @property
    def methods(self) -> frozenset[str] | None:
        """The methods to intercept; None for all public ones, which may use parameters."""
        is_general = self._is_explicit or any(source.gather for source in self._sources)
        if is_general or RECORD.value is not None:
            return None
        return frozenset(method for source in self._sources for method in source.methods)

    def _tag_arguments(self, sources: Sequence[ActivationSharding]) -> None:
        pure, built = self._pure, self._built
        parts = [(target, part) for target in pure.targets for part in target.parts]
        has_own = any(_own_source(part.spec) is not None for _, part in parts)
        if not (sources or has_own or self._observes):
            return
        tagged = set[int]()
        for target, part in parts:
            own = _own_source(part.spec)
            if own is not None and own not in self._sources:
                self._sources.append(own)
            chosen = (*sources, *([] if own is None else [own]))
            name = accessor(target.name, part.keys)
            for index, [path] in pure.structure.paths_to_objects([((), part.child)]).items():
                if isinstance(pure.structure.entries[index], NodeEntry) and index not in tagged:
                    tagged.add(index)
                    module = built.objects[index]
                    _compat.tag_node(module, self._tag(name, path, chosen, module))

    def _tag(
        self, name: str, path: Path, sources: tuple[ActivationSharding, ...], module: Any
    ) -> Tag:
        gathered: dict[Path, Any] = {}
        axes = self._gathered_axes(sources)
        for own_path, variable in own_variables(module) if axes else ():
            index = self._variables.get(id(variable))
            slots = () if index is None else self._pure.structure.slots[index]
            spec = self._pure.object_specs.get(slots[0]) if len(slots) == 1 else None
            pair = spec_and_mesh(spec, self._mesh)
            if pair is not None and not axes.isdisjoint(spec_axes(pair[0])):
                shape = jax.typeof(_compat.get_value(variable)).shape
                kept = only_axes(pair[0], self._axes - axes)
                entries = [*kept.partitions, *[None] * len(shape)][: len(shape)]
                gathered[own_path] = with_entries(kept, entries), shape
        return Tag(name, path, sources, axes, gathered)

    def _gathered_axes(self, sources: Iterable[ActivationSharding]) -> frozenset[Any]:
        """The axes over which the parameters of modules are gathered."""
        batch = self._pure.batch_axes
        named = (batch if source.gather is True else source.gather or () for source in sources)
        return self._axes.intersection(axis for axes in named for axis in axes)

    def __call__(
        self,
        module: Any,
        method: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a method of a module with the shardings chosen for it."""
        tag = _compat.tag_of(module) or self._root_tag(module)
        with in_call(tag.accessor, method) as frame:
            try:
                out = self._called(tag, module, method, call, args, kwargs)
            except _compat.SHARDING_ERRORS as error:
                if not hasattr(error, "__notes__"):  # it is the innermost module
                    error.add_note(_NOTE.format(tag.accessor))
                raise
            frame.returned(module, method, out)
        return out

    def _called(
        self,
        tag: Tag,
        module: Any,
        method: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        activation, strict = self._find(tag, module, method)
        if activation.input is not None and args:
            args = (self._constrained(args[0], activation.input, tag, "input", strict), *args[1:])
        call = with_right_gradient(module, call, self._pure.batch_axes)
        self._depth += 1
        try:
            with Replaced(self._gathered(tag, module, (args, kwargs))):
                out = self._typed(tag, activation.output, module, call, args, kwargs)
        finally:
            self._depth -= 1
        if activation.output is not None:
            return self._constrained(out, activation.output, tag, "output", strict)
        is_part = self._depth or (tag.path and is_layer(module))
        if not is_part and any(source.infer for source in tag.sources):
            inside, out = out, as_inputs(out, (args, kwargs), self._pure.batch_axes)
            pairs = zip(jax.tree.leaves(inside), jax.tree.leaves(out), strict=True)
            if (frame := frame_here()) is not None and any(old is not new for old, new in pairs):
                frame.is_by_strategy = True
        return out

    def _root_tag(self, module: Any) -> Tag:
        """Tags a module that is not from the arguments, as the root of a path, and all in it."""
        known = self._roots.get(id(module))
        if known is None:
            sources, name = tuple(self._sources), type(module).__name__
            for path, inner in modules_by_path(module):
                if _compat.tag_of(inner) is None:
                    tag = self._tag(name, path, sources, inner)
                    self._roots.setdefault(id(inner), (tag, inner))
            known = self._roots[id(module)]
        return known[0]

    def _find(self, tag: Tag, module: Any, method: str) -> tuple[Activation, bool]:
        """The choice of the first source that has one, and whether that source is strict."""
        choices = []
        for source in tag.sources:
            index, activation = source.find(tag.path, module, method)
            if activation is not None and index is not None:
                number = self._sources.index(source)
                self.declaration.used.add((number, index))
                choices.append((activation, source.strict))
                if len(choices) == 1 and (frame := frame_here()) is not None:
                    frame.chosen_by = "user" if number < self._declared else "strategy"
        return choices[0] if choices else (_NOTHING, False)

    def _gathered(self, tag: Tag, module: Any, inputs: Any) -> list[tuple[Any, Any]]:
        """The module's own Variables, with gathered values."""
        axes = tag.axes
        is_explicit = bool(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))
        if not is_explicit and not (axes and tag.gathered):
            return []
        changes: list[tuple[Any, Any]] = []
        for path, variable in own_variables(module):
            value = _compat.get_value(variable)
            if not isinstance(value, jax.Array):
                continue
            spec = type_spec(value)
            if spec is not None:
                kept = spec
                if not axes.isdisjoint(axis for x in spec.partitions for axis in axes_of(x)):
                    kept = with_entries(spec, only_axes(spec, self._axes - axes).partitions)
                if spec.reduced:  # kept if possible, so that gradients are reduced only once
                    kept = with_reduced(kept, spec.reduced & summed_axes(module, inputs))
                if kept != spec:
                    goal = NamedSharding(jax.typeof(value).sharding.mesh, kept)
                    changes.append((variable, jax.sharding.reshard(value, goal)))
            elif path in tag.gathered and self._mesh is not None:
                here = _spec_of_slice(*tag.gathered[path], value.shape)
                [value] = apply_shardings([value], [NamedSharding(mesh_here(self._mesh), here)])
                changes.append((variable, value))
        return changes

    def _typed(
        self,
        tag: Tag,
        output: Any,
        module: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a method; on Explicit axes, with the shardings that its operations need."""
        mesh = jax.sharding.get_abstract_mesh()
        explicit = axes_of_type(mesh, AxisType.Explicit)
        if not explicit:
            return call(*args, **kwargs)
        if output is not None:
            pair = spec_and_mesh(output, mesh)
            if pair is not None and takes_out_sharding(call, kwargs):
                saved = Saved((module, args, kwargs))
                spec = without_open(only_axes(pair[0], explicit), module, args, kwargs)
                try:
                    return call(*args, **{**kwargs, "out_sharding": spec})
                except _compat.TYPE_ERRORS:
                    saved.restore()
            return inferred(module, call, args, kwargs)
        infers = any(source.infer for source in tag.sources)
        note = None if infers else functools.partial(self._note_untyped, tag)
        return inferred(module, call, args, kwargs, note)

    def _note_untyped(self, tag: Tag, untyped: Untyped) -> None:
        self._untyped.append((tag, untyped))

    def _constrained(self, tree: Any, prefix: Any, tag: Tag, side: str, strict: bool) -> Any:
        """A pytree of activations with the specs of a prefix."""
        specs, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=is_activation_spec)
        try:
            parts = treedef.flatten_up_to(tree)  # type: ignore[attr-defined]
        except ValueError as error:
            self._misfits[f"  {side} of {tag.accessor}: {error}"] = None
            return tree
        name = f"{side} of {tag.accessor}"
        new = [
            jax.tree.map(lambda x, spec=spec: self._constrained_array(x, spec, name, strict), part)
            for part, spec in zip(parts, specs, strict=True)
        ]
        return jax.tree_util.tree_unflatten(treedef, new)

    def _constrained_array(self, x: Any, spec: Any, name: str, strict: bool) -> Any:
        if spec is None or not isinstance(x, jax.Array):
            return x
        pair = spec_and_mesh(spec, self._mesh)
        if pair is None:
            refuse(Problem.NO_MESH, [], name=self._transform.name)
        mesh = mesh_here(pair[1])
        action = self._transform.on_indivisible
        fit = fit_sharding(pair[0], mesh, x.shape, on_indivisible=action, usable=self._axes or None)
        if fit.problems:
            if strict:
                self._misfits[fit.line(name)] = None
            return x
        # JAX supports UNCONSTRAINED only on meshes with Auto axes.
        is_open = AxisType.Auto in mesh.axis_types
        spec = fit.sharding if is_open else without_unconstrained(fit.sharding, x, mesh)
        sharding = NamedSharding(mesh, spec)
        [new] = apply_shardings([x], [sharding])
        if (frame := frame_here()) is not None:
            frame.constrained(new, sharding)
        return new

    def forget(self) -> None:
        """Keeps JAX from reusing traces of inner functions, whose problems would go unnoticed."""
        DECLARATIONS.pop(self._key, None)

    def check(self) -> None:
        """Checks for layers that cannot be typed, specs that did not fit, and unused filters.

        Raises:
          ValueError: there are any.
        """
        name = self._transform.name
        for source in self._sources:
            if self._mesh is not None and isinstance(source.gather, tuple):
                fit = fit_sharding(PartitionSpec(source.gather), self._mesh)
                self._misfits |= dict.fromkeys([fit.line("gather")] if fit.problems else ())
        if self._misfits:
            refuse(
                Problem.ACTIVATION_DOES_NOT_FIT, [(x.strip(),) for x in self._misfits], name=name
            )
        if self._untyped:
            offenders = [(tag.accessor, path_string(tag.path), *x) for tag, x in self._untyped]
            refuse(Problem.CANNOT_BE_TYPED, offenders, name=name)
        unused = [
            (filter_,)
            for number, source in enumerate(self._sources)
            for index, filter_ in enumerate(source.filters)
            if source.strict and (number, index) not in self.declaration.used
        ]
        if unused:
            refuse(Problem.ACTIVATION_UNUSED, unused, name=name)


_NOTE = (
    "The operation is in {}, which also fails with Auto axes, as a method does that uses "
    "out_sharding itself. Shard the inputs of the operation alike: give each argument a spec, such "
    "as a cache, and use reshard in the method."
)
_NOTHING = Activation()


def _spec_of_slice(spec: PartitionSpec, shape: Shape, inner: Shape) -> PartitionSpec:
    """The spec of an array in a loop over layers, where some dimensions of its shape are gone.

    If several can be, unsharded and first ones are preferred.
    """
    choices = [
        kept
        for kept in itertools.combinations(range(len(shape)), len(inner))
        if all(shape[dimension] == size for dimension, size in zip(kept, inner, strict=True))
    ]
    chosen = [[spec.partitions[dimension] for dimension in kept] for kept in reversed(choices)]
    return PartitionSpec(*max(chosen, key=lambda entries: sum(map(bool, entries)), default=()))


def _own_source(spec: Any) -> ActivationSharding | None:
    """The activation shardings that come with the spec of an argument."""
    return spec.activations if isinstance(spec, StateSharding) else None


def _mesh_of(pure: Pure) -> Any:
    """The mesh of a trace: that of the transform, of a spec, or the one in context."""
    if pure.transform.context is not None:
        return pure.transform.context
    meshes = (spec.mesh for spec in pure.object_specs.values() if isinstance(spec, NamedSharding))
    return next(meshes, None) or _compat.context_mesh()
