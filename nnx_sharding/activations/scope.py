"""Handles the calls of modules while one function is traced."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.problems import no_mesh
from ..core.pure import Pure
from ..core.resharding import apply_shardings, mesh_here, without_unconstrained
from ..core.retyping import retyped, type_spec, with_reduced
from ..core.structure import NodeEntry
from ..core.transform import Sharded
from ..core.unflatten import Built
from ..errors import ActivationError, message, raise_listed, see
from ..specs.activation_sharding import Activation, ActivationSharding, is_activation_spec
from ..specs.fitting import (
    axes_of,
    axes_of_type,
    fit_sharding,
    only_axes,
    spec_and_mesh,
    spec_axes,
    with_entries,
)
from ..specs.paths import Path, accessor, path_string
from ..specs.state_sharding import StateSharding
from .calls import RECORD, Frame, in_call
from .convolution import with_right_gradient
from .explicit import (
    OPEN,
    arrays_in,
    explicit_axes_here,
    first_typed,
    is_reduced,
    opened,
    output_spec,
    reduces_inside,
    summed_axes,
    with_auto_axes,
)
from .intercept import handler_here
from .tags import DECLARATIONS, Declaration, Shape, Tag
from .variables import Replaced, is_layer, modules_in, own_variables


class Scope:
    """The handler of the calls of modules during one trace."""

    def __init__(
        self,
        pure: Pure,
        transform: Sharded,
        built: Built,
        leaves: Sequence[Any],
    ):
        self._transform, self._pure, self._built = transform, pure, built
        self._is_explicit = any(type_spec(leaf) is not None for leaf in leaves)
        self._mesh = _mesh_of(pure)
        # Those that are not manual; all of them in `jit`.
        manual = transform.usable_axes or ()
        self._axes = frozenset(self._mesh.axis_names if self._mesh else ()).difference(manual)
        declared = transform.activation_shardings
        sources = () if declared is None else (declared,)
        self._sources = [*sources]  # those for all arguments, then those of single ones
        self._declared = len(sources)
        self._roots: dict[int, tuple[Tag, Any]] = {}
        # Within another trace, that one explains and records.
        self._observes = handler_here() is None and (self._is_explicit or RECORD.value is not None)
        self._misfits: dict[str, None] = {}
        self._variables = {id(x): i for i, x in enumerate(built.objects)}
        self._tag_arguments(sources)
        self._key = tuple(self._sources), pure.batch_axes
        self.declaration = DECLARATIONS.setdefault(self._key, Declaration())

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to apply, explain or record."""
        return bool(self._sources) or self._observes

    @property
    def named_methods(self) -> frozenset[str]:
        """The methods that filters name."""
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
        specs: dict[Path, Any] = {}
        axes = self._gathered_axes(sources)
        for own_path, variable in own_variables(module) if axes or self._is_explicit else ():
            index = self._variables.get(id(variable))
            slots = () if index is None else self._pure.structure.slots[index]
            spec = self._pure.object_specs.get(slots[0]) if len(slots) == 1 else None
            value = _compat.get_value(variable)
            pair = spec_and_mesh(type_spec(value) if spec is None else spec, self._mesh)
            if pair is not None and isinstance(value, jax.Array):
                shape, kept = jax.typeof(value).shape, only_axes(pair[0], self._axes - axes)
                entries = [*kept.partitions, *[None] * len(shape)][: len(shape)]
                is_gathered = not axes.isdisjoint(spec_axes(pair[0]))
                specs[own_path] = with_entries(kept, entries), shape, is_gathered
        return Tag(name, path, sources, axes, specs)

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
                out = self._called(tag, frame, module, method, call, args, kwargs)
            except _compat.SHARDING_ERRORS as error:
                self._refuse_untyped(tag, module, (args, kwargs), error)
            except ValueError as error:
                if self._is_explicit and _USES_TYPES.search(str(error)):
                    notes = getattr(error, "__notes__", ())
                    if not any(_NOTE in note for note in notes):  # it is the innermost module
                        entry = {path_string(tag.path): Activation(axis_types=AxisType.Explicit)}
                        error.add_note(f"{tag.accessor} {_NOTE} activation_shardings={entry!r}.")
                raise
            frame.returned(module, method, out)
        return out

    def _called(
        self,
        tag: Tag,
        frame: Frame,
        module: Any,
        method: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        chosen, strict = self._find(tag, frame, module, method)
        if chosen.input is not None and args:
            first = self._constrained(args[0], chosen.input, tag, frame, "input", strict)
            args = (first, *args[1:])
        call = with_right_gradient(module, call, self._pure.batch_axes)
        with Replaced(self._gathered(tag, module, (args, kwargs))):
            mesh, explicit = jax.sharding.get_abstract_mesh(), explicit_axes_here()
            pair = spec_and_mesh(chosen.output, mesh) if explicit else None
            if pair is not None and pair[0].unreduced:  # only Explicit axes can be
                kwargs = {**kwargs, "out_sharding": only_axes(pair[0], explicit)}
            axes = self._auto_axes(tag, chosen, module, explicit, (args, kwargs))

            def constrained(*args: Any, **kwargs: Any) -> Any:
                out = call(*args, **kwargs)
                if chosen.output is not None:
                    return self._constrained(out, chosen.output, tag, frame, "output", strict)
                if explicit and not axes:
                    return out
                columns = functools.partial(self._with_columns, tag, module)
                return jax.tree.map(columns, out, is_leaf=_compat.is_graph_object)

            def leave(x: jax.Array) -> jax.Array:
                known, like = frame.sharding_of(x), first_typed((args, kwargs))
                spec = opened(type_spec(x)) if known is None else only_axes(known.spec, explicit)
                if spec is None and tag.path:
                    spec = self._columns(tag, module, x)
                new: jax.Array = retyped(x, mesh, output_spec(x, like, spec))
                if known is not None:
                    frame.constrained(new, jax.typeof(new).sharding)
                return new

            if not axes:
                return constrained(*args, **kwargs)
            frame.is_by_strategy = True
            return with_auto_axes(module, constrained, args, kwargs, axes, leave)

    def _columns(self, tag: Tag, module: Any, x: jax.Array) -> PartitionSpec | None:
        """The spec of an output whose last dimensions are those of the columns of a kernel."""
        if not self._is_explicit or not any(source.infer for source in tag.sources):
            return None
        features = getattr(module, "out_features", None)
        count = len(features) if isinstance(features, tuple) else 1
        for path, variable in own_variables(module):
            shape = getattr(_compat.get_value(variable), "shape", ())
            is_kernel = len(shape) > count < x.ndim and shape[-count:] == x.shape[-count:]
            if is_kernel and path in tag.specs:
                spec = PartitionSpec(
                    *_spec_of_slice(*tag.specs[path][:2], shape).partitions[-count:]
                )
                free = only_axes(spec, {*spec_axes(spec)}.difference(self._pure.batch_axes))
                return PartitionSpec(*[OPEN] * (x.ndim - count), *free.partitions)
        return None

    def _with_columns(self, tag: Tag, module: Any, x: Any) -> Any:
        """An output, on Auto axes sharded like the columns of a kernel."""
        spec = self._columns(tag, module, x) if isinstance(x, jax.Array) else None
        if spec is None or self._mesh is None or not any(spec_axes(spec)):
            return x
        return apply_shardings([x], [NamedSharding(mesh_here(self._mesh), spec)])[0]

    def _auto_axes(
        self, tag: Tag, chosen: Activation, module: Any, explicit: frozenset[Any], inputs: Any
    ) -> frozenset[Any]:
        """The Explicit axes that are Auto while a method runs.

        All of them if it is declared so, if a strategy infers, or for a layer with a declared
        output. None in modules that are declared to be Explicit, and those that hold such modules
        or layers with reduced parameters, whose gradients JAX counts several times on Auto axes.
        """
        if not explicit or first_typed(inputs) is None or inputs[1].get("out_sharding") is not None:
            return frozenset()
        if chosen.axis_types is not None:
            return explicit if chosen.axis_types is AxisType.Auto else frozenset()
        for source in tag.sources:
            if any(x.axis_types is AxisType.Explicit for x in source.activations):
                inside = (((*tag.path, *path), one) for path, one in modules_in(module))
                if any(source.is_explicit(*one) for one in inside):
                    return frozenset()
        infers = any(source.infer for source in tag.sources) or is_reduced(module)
        is_chosen = infers or (chosen.output is not None and is_layer(module))
        return explicit if is_chosen and not reduces_inside(module) else frozenset()

    def _refuse_untyped(self, tag: Tag, module: Any, inputs: Any, error: Exception) -> NoReturn:
        """Raises an error that names the innermost module in which JAX cannot type an operation."""
        values = [_compat.get_value(variable) for _, variable in own_variables(module)]
        avals = map(jax.typeof, arrays_in((inputs, values)))
        types = tuple(aval.str_short(short_dtypes=True) for aval in avals)
        spec = type_spec(first_typed(inputs)) or PartitionSpec()
        count = max((i for i, x in enumerate(spec.partitions[:-1], 1) if x), default=0)
        entry: Any = PartitionSpec(*spec.partitions[:count])
        if not is_layer(module):
            entry = Activation(entry, axis_types=AxisType.Auto)
        reason = str(error).partition(". ")[0].partition("\n")[0]
        text = message(
            f"{self._transform.name}: on these Explicit axes JAX cannot know how a module shards "
            "the result of an operation:",
            [f"  {tag.accessor}: {type(module).__name__} of {', '.join(types)}\n    {reason}"],
            "Declare its output: jit(..., activation_shardings="
            f"{{{path_string(tag.path)!r}: {entry!r}}}); within the module, the compiler then "
            "chooses. Patterns such as 'blocks/*/up' match several. Strategies such as fsdp or "
            "from_rules do so for all modules. Or give the operation an out_sharding, or use "
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

    def _find(self, tag: Tag, frame: Frame, module: Any, method: str) -> tuple[Activation, bool]:
        """The choice of the first source that has one, and whether that source is strict."""
        choices = []
        for source in tag.sources:
            index, activation = source.find(tag.path, module, method)
            if activation is not None and index is not None:
                number = self._sources.index(source)
                self.declaration.used.add((number, index))
                choices.append((activation, source.strict))
                if len(choices) == 1:
                    frame.chosen_by = "user" if number < self._declared else "strategy"
        return choices[0] if choices else (_NOTHING, False)

    def _gathered(self, tag: Tag, module: Any, inputs: Any) -> list[tuple[Any, Any]]:
        """The module's own Variables, with gathered values."""
        axes = tag.axes
        is_explicit = bool(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))
        if not is_explicit and not axes:
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
            elif self._mesh is not None and tag.specs.get(path, (None, None, False))[2]:
                here = _spec_of_slice(*tag.specs[path][:2], value.shape)
                [value] = apply_shardings([value], [NamedSharding(mesh_here(self._mesh), here)])
                changes.append((variable, value))
        return changes

    def _constrained(
        self, tree: Any, prefix: Any, tag: Tag, frame: Frame, side: str, strict: bool
    ) -> Any:
        """A pytree of activations with the specs of a prefix."""
        specs, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=is_activation_spec)
        try:
            parts = treedef.flatten_up_to(tree)  # type: ignore[attr-defined]
        except ValueError as error:
            self._misfits[f"  {side} of {tag.accessor}: {error}"] = None
            return tree
        name = f"{side} of {tag.accessor}"
        new = [
            jax.tree.map(lambda x, s=spec: self._constrained_array(x, s, frame, name, strict), part)
            for part, spec in zip(parts, specs, strict=True)
        ]
        return jax.tree_util.tree_unflatten(treedef, new)

    def _constrained_array(self, x: Any, spec: Any, frame: Frame, name: str, strict: bool) -> Any:
        if spec is None or not isinstance(x, jax.Array):
            return x
        pair = spec_and_mesh(spec, self._mesh)
        if pair is None:
            raise no_mesh(self._transform.name)
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
        frame.constrained(new, sharding)
        return new

    def forget(self) -> None:
        """Keeps JAX from reusing traces of inner functions, whose problems would go unnoticed."""
        DECLARATIONS.pop(self._key, None)

    def check(self) -> None:
        """Checks for specs that did not fit, and unused filters.

        Raises:
          ValueError: there are any.
        """
        name = self._transform.name
        for source in self._sources:
            if self._mesh is not None and isinstance(source.gather, tuple):
                fit = fit_sharding(PartitionSpec(source.gather), self._mesh)
                self._misfits |= dict.fromkeys([fit.line("gather")] if fit.problems else ())
        raise_listed(
            ActivationError,
            f"{name}: these activation shardings do not fit:",
            [f"  {x.strip()}" for x in self._misfits],
            "Correct the specs, or use on_indivisible for those that do not divide a shape.",
            anchor="activation-specs-that-do-not-fit",
        )
        unused = [
            f"  {filter_!r}"
            for number, source in enumerate(self._sources)
            for index, filter_ in enumerate(source.filters)
            if source.strict and (number, index) not in self.declaration.used
        ]
        raise_listed(
            ActivationError,
            f"{name}: these filters of activation_shardings match no called module:",
            unused,
            "Paths are those of modules within the argument, such as blocks/*/up. Correct the "
            "filters, or pass ActivationSharding(..., strict=False).",
            anchor="unused-filter-for-activations",
        )


_NOTE = (
    "runs with Auto axes, because its shardings are inferred. For a method that uses out_sharding, "
    "reshard or a mesh itself, pass"
)
_USES_TYPES = re.compile("of type Auto|only refer to Auto|context mesh", re.IGNORECASE)
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
