"""``vmap``, prefixes of axes as ``vmap`` and ``scan`` take them, and the base of both."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..core.arguments import PathFunction, Specs, leaves_by_path, split_argument
from ..core.call_context import Caller
from ..core.constrain import type_spec
from ..core.flatten import Flat, flatten
from ..core.plan import Plan
from ..core.resolve import locate, resolve
from ..core.signature import Roles
from ..core.static_equality import Static
from ..core.structure import NodeEntry, Structure, atoms
from ..core.unflatten import Built
from ..errors import raise_listed
from ..specs.fitting import axes_of, padded, spec_axes
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import BROADCAST, CARRY, Axis, StateSharding, pairs_of
from .in_trace import Function, Inner, InnerTransform, described
from .lifted import lift
from .partial_sums import PartialSums


class Carry:
    """In the axes of :func:`~nnx_sharding.scan`: each step gets what the previous one returned."""


class StateAxes(StateSharding):
    """Axes of the Variables of a module, by ordered NNX filters, for ``vmap`` and ``scan``.

    Args:
      filter_axes: a mapping from NNX filters to axes, or an iterable of such pairs; the first
        filter that matches a Variable decides. Or an ``nnx.State`` with axes as leaves. An axis is
        a dimension, None for one that is not mapped, or for ``scan``
        :class:`~nnx_sharding.Carry`.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding import StateAxes
      >>> StateAxes({nnx.Param: 0, ...: None})
      StateAxes({Param: 0, ...: None})
    """

    __slots__ = ()

    def __init__(
        self,
        filter_axes: nnx.State[Any, Any] | Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        /,
    ):
        pairs = pairs_of("StateAxes", filter_axes)
        super().__init__([(filter_, _axis("StateAxes", axis)) for filter_, axis in pairs])

    def __reduce__(self) -> tuple[Any, ...]:
        return StateAxes, (tuple(zip(self.filters, self.shardings, strict=True)),)


def _axis(place: str, x: Any) -> Axis | StateSharding:
    """One entry of a prefix of axes, as the user wrote it."""
    if isinstance(x, Axis | StateSharding):
        return x
    if x is None or (isinstance(x, int) and not isinstance(x, bool)):
        return Axis(x)
    if x is Carry or x is nnx.Carry:
        return CARRY
    if isinstance(x, nnx.StateAxes):
        return StateAxes(zip(x.filters, x.axes, strict=True))
    if (prefix := _compat.prefix_state(x)) is not None:
        axes = leaves_by_path(prefix[1], lambda axis: axis is None)
        axes = {path: _axis(place, axis) for path, axis in axes.items()}
        return PathFunction(_AxisOf(place, prefix[0]), axes)
    raise TypeError(
        f"{place}: expected an axis, got {x!r}. An axis is a dimension, None for what is not "
        "mapped, Carry (in scan), or StateAxes by NNX filters."
    )


@dataclasses.dataclass(frozen=True)
class _AxisOf:
    """The function of path and value in what ``nnx.prefix`` returns, with our own axes."""

    place: str
    function: Callable[[Path, Any], Any]

    def __call__(self, path: Path, value: Any) -> Axis | StateSharding:
        return _axis(self.place, self.function(path, value))


def axes_specs(option: str, prefix: Any) -> Specs:
    """A prefix of axes as specs."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        prefix, is_leaf=lambda x: x is None or _compat.prefix_state(x) is not None
    )
    axes = [_axis(option + accessor("", tuple(map(path_key, path))), x) for path, x in leaves]
    return Specs(jax.tree_util.tree_unflatten(treedef, axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mapped(InnerTransform):
    """What ``vmap`` and ``scan`` decide: the axes of arrays, and the metadata that names them.

    Attributes:
      metadata: what to add, for Flax, to the metadata of Variables for a mapped axis.
      options: those of JAX's own transform.
    """

    own_specs: ClassVar[tuple[Any, ...]] = (Axis(0),)

    in_name: str = "in_axes"
    metadata: tuple[tuple[Any, Any], ...] = ()
    options: tuple[tuple[str, Static], ...] = ()

    def spec_of(self, spec: Any) -> Any:  # noqa: D102
        return BROADCAST if spec is None else spec

    def input_specs(self, specs: list[Any], leaves: Sequence[Any]) -> list[Any]:  # noqa: D102
        return [*map(self.spec_of, specs)]

    def written_specs(self, plan: Plan, after: Flat) -> Mapping[int, Any]:
        """What is captured in a module that is not mapped is stacked along the first dimension."""
        return {
            slot: Axis(0)
            for index in captures(plan.structure)
            if (known := plan.known[index][1]) is None or known.index is None
            for slot in after.structure.slots[index]
            if self.is_stacked(plan.structure.slots[index], after.leaves[slot])
        }

    def is_stacked(self, slots: Sequence[int], leaf: Any) -> bool:
        """Whether an array that is captured is stacked; ``slots`` are those before the call."""
        return not slots

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[Any]
    ) -> None:
        """Checks that results have the axes along which they are stacked."""
        lines = [
            f"  {name}, {described(leaf)}: axis {spec.index}"
            for name, leaf, spec in zip(names, leaves, specs, strict=True)
            if spec.index is not None and not _compat.is_ref(leaf)
            # A value of a hijax type has no dimensions, nor could it get one.
            if not -(ndim := getattr(jax.typeof(leaf), "ndim", -1)) - 1 <= spec.index <= ndim
        ]
        raise_listed(
            ValueError,
            f"{self.name}: these results of {fun_name} cannot be stacked along the axes that "
            f"{self.out_name} (or {self.in_name}, for modules) gives them:",
            lines,
            "An array of n dimensions can be stacked along the axes 0 to n.",
            anchor="axes-that-arrays-do-not-have",
        )

    def wrapped(self, plan: Plan, caller: Caller, built: Built) -> Function:  # noqa: D102
        fun = super().wrapped(plan, caller, built)
        if not self.metadata:
            return fun
        settings = dict(self.metadata)
        mapped = [
            (built.objects[index], axis.index)
            for index, (_, axis) in plan.known.items()
            if axis is not None and axis.index is not None
        ]

        def named(*args: Any, **kwargs: Any) -> Any:
            change_names(nnx.spmd.remove_axis, mapped, settings)
            try:
                out = fun(*args, **kwargs)
                new = self._new_variables(out, plan, built)
                change_names(nnx.spmd.add_axis, new, settings)
                return out
            finally:
                change_names(nnx.spmd.add_axis, mapped, settings)

        return named

    def _new_variables(self, out: Any, plan: Plan, built: Built) -> list[tuple[Any, int]]:
        """The Variables that the function made and returns or attached, each with its axis."""
        flat = flatten(out, known=built.objects)
        caller = f"{self.name}: {self.out_name}"
        output = split_argument("output", self.out_specs.tree, out, flat.structure.root, caller)
        resolved = resolve(
            locate(flat.structure, [*plan.graph_arguments, output]),
            flat.objects,
            flat.leaves,
            self.spec_of,
            known=plan.known,
            settled={each.name for each in plan.graph_arguments},
        )
        return [
            (flat.objects[index], axis.index)
            for index, (_, axis) in resolved.variables.items()
            if index >= len(built.objects) and axis.index is not None
        ]


def captures(structure: Structure) -> set[int]:
    """The Variables in which ``nnx.capture`` collects what is sown."""
    entries = structure.entries
    return {
        index
        for entry in entries
        if isinstance(entry, NodeEntry) and _compat.CAPTURES in entry.keys
        for index in atoms([entry.children[entry.keys.index(_compat.CAPTURES)]])
        # A perturbation is an input too, and in a module that is not mapped the same for all.
        if isinstance(index, int)
        and not issubclass(getattr(entries[index], "type", object), nnx.Perturbation)
    }


def change_names(
    change: Callable[..., Any], mapped: Iterable[tuple[Any, int]], settings: Mapping[Any, Any]
) -> None:
    """Adds or removes the names of axes in the logical axes of Variables.

    ``change`` is ``nnx.spmd.add_axis`` or ``remove_axis``, which count axes from the front;
    ``mapped`` has the Variables as they are without the axis, each with the axis.
    """
    for variable, axis in mapped:
        arrays = jax.tree.leaves(variable) if isinstance(variable, nnx.Variable) else []
        # Flax adds no name to empty logical axes, but removes one.
        if arrays and variable.get_metadata().get("out_sharding") != ():
            change(variable, axis % (jnp.ndim(arrays[0]) + 1), settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vmap(Mapped):
    """What ``vmap`` decides."""

    name: str = "vmap"

    def can_pass_sums(
        self, sums: PartialSums, in_specs: Sequence[Any], leaves: Sequence[Any]
    ) -> bool:
        """Not if it maps the rows: JAX shards nothing else over the axes of what is mapped."""
        mapped = (
            padded(spec, leaf.ndim)[axis.index]
            for axis, leaf in zip(in_specs, leaves, strict=True)
            if axis.index is not None and (spec := type_spec(leaf)) is not None
        )
        return all(sums.axes.isdisjoint(axes_of(entry)) for entry in mapped)

    def passes_sums(self, spec: Any) -> bool:
        return spec.index is None or spec.index >= 0  # the last dimension is an additional one

    def is_stacked(self, slots: Sequence[int], leaf: Any) -> bool:
        return super().is_stacked(slots, leaf) and _compat.varies_in_vmap(leaf)

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[Any]
    ) -> None:
        super().check_outputs(fun_name, names, leaves, specs)
        lines = [
            f"  {name}, {described(leaf)}"
            for name, leaf, spec in zip(names, leaves, specs, strict=True)
            if spec.index is None and _compat.varies_in_vmap(leaf)
        ]
        raise_listed(
            ValueError,
            f"vmap: these are not mapped (axis None), but {fun_name} makes them differ between "
            "the elements:",
            lines,
            "Give each an axis in in_axes or out_axes, in a module by StateAxes, or reduce it, as "
            "in jax.lax.pmean with axis_name.",
            anchor="differs-between-elements",
        )

    def applied(
        self, plan: Plan, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        options: Any = {key: option.value for key, option in self.options}
        options["out_axes"] = (*(axis.index for axis in out_specs), None)

        def mapped(*arrays: Any) -> Any:
            # JAX refuses an unmapped argument that is sharded over the mapped mesh axis, such as a
            # parameter that a layer gathers, but not what the function captures.
            known = [
                axis.index is None and any(spec_axes(type_spec(x) or PartitionSpec()))
                for x, axis in zip(arrays, in_specs, strict=True)
            ]
            if not any(known):  # errors name the arguments
                in_axes = tuple(axis.index for axis in in_specs)
                return jax.vmap(function, in_axes, **options)(*arrays)
            captured = [*itertools.compress(arrays, known)]
            others = [not is_known for is_known in known]

            def call(*rest: Any) -> Any:
                by_kind = {True: iter(captured), False: iter(rest)}
                return function(*(next(by_kind[is_known]) for is_known in known))

            in_axes = tuple(axis.index for axis in itertools.compress(in_specs, others))
            return jax.vmap(call, in_axes, **options)(*itertools.compress(arrays, others))

        return mapped


def options_of(**options: Any) -> tuple[tuple[str, Static], ...]:
    """Options of JAX's own transform, of which 1 is not True."""
    return tuple((key, Static.of(x)) for key, x in options.items())


@_compat.api_boundary
def vmap(
    fun: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable = None,
    transform_metadata: Mapping[Any, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Vectorizes a function whose arguments and results may be NNX objects.

    A mapped Variable has one more dimension outside the function than inside. What the function
    writes to it is stacked along the same axis, and so are new Variables. A Variable that is not
    mapped has to be the same for all elements after the call.

    Args:
      fun: the function.
      in_axes: the axis along which each argument is mapped, None for one that is not: one for all
        of them, a tuple with one for each positional parameter, or a mapping from parameter names;
        each a pytree prefix of its argument, with :class:`~nnx_sharding.StateAxes` allowed for a
        module. Other keyword-only parameters are not mapped.
      out_axes: likewise for the result.
      axis_name: a name for the axis, for collectives.
      axis_size: its size, if nothing is mapped.
      spmd_axis_name: the mesh axis over which it is sharded, for constraints in the function.
      transform_metadata: metadata of Variables for the axis, as ``flax.nnx.vmap`` takes them:
        ``{nnx.PARTITION_NAME: "layers"}`` names it in their logical axes.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that maps ``fun``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import vmap
      >>> make = nnx.split_rngs(splits=3)(vmap(lambda rngs: nnx.Linear(2, 4, rngs=rngs)))
      >>> models = make(nnx.Rngs(0))
      >>> models.kernel.shape
      (3, 2, 4)
      >>> vmap(lambda model, x: model(x), in_axes=(0, None))(models, jnp.ones(2)).shape
      (3, 4)

    The semantics are those of ``jax.vmap`` and ``flax.nnx.vmap``.
    """
    in_specs, out_specs = axes_specs("in_axes", in_axes), axes_specs("out_axes", out_axes)
    if CARRY in (*in_specs.written, *out_specs.written):
        raise TypeError("vmap: Carry is for scan; the elements of vmap are independent.")
    transform = _Vmap(
        in_specs=in_specs,
        out_specs=out_specs,
        options=options_of(axis_name=axis_name, axis_size=axis_size, spmd_axis_name=spmd_axis_name),
        metadata=tuple((transform_metadata or {}).items()),
    )

    def decorate(fun: Callable[..., Any]) -> Any:
        return lift(Inner, fun, transform, Roles(), graph, graph_updates)

    return decorate if fun is None else decorate(fun)
