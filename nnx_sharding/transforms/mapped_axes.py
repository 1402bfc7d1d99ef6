"""Axes along which arrays are mapped: what users write, and the base of ``vmap`` and ``scan``.

The *specs* of these transforms are axes: :class:`~.types.Axis` with an index, with None for what is
not mapped, or ``CARRY``. They are found like shardings, by prefixes of the arguments and by filters
for the Variables of modules (:class:`StateAxes`), and results are grouped by them.

Variables have one more dimension outside of the function than inside. What a function writes to a
Variable has the axis of the Variable; new Variables of a mapped module have that of the module.
What ``nnx.capture`` collects in a module is *captured*. All objects of the arguments are in a table
(the *structure*), in which each has an *index*; the *slot* of an array is its position in the list
of all arrays. A *plan* has the axes of all arrays, by slot, and of all Variables (``variables``),
by index; *unflattened* has the objects as they are in the trace.

From other modules:

    Specs            what the user wrote, a prefix of the arguments, as a ``tree`` of axes
    Caller           the call that is being traced; ``fun`` is the user's function
    Flat             flattened objects: their structure, ``leaves`` (arrays by slot) and ``objects``
    InnerTransform   the base: becomes part of a surrounding trace
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..core.arguments import split_argument
from ..core.call_context import Caller
from ..core.flatten import Flat, flatten
from ..core.locations import locate
from ..core.plan import Plan
from ..core.prefixes import PathFunction, Specs, leaves_by_path
from ..core.resolve import resolve
from ..core.static_equality import Static
from ..core.structure import NodeEntry, Structure, atoms
from ..core.unflatten import Unflattened
from ..errors import raise_listed
from ..specs.fitting import show
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import StateSharding, pairs_of
from ..specs.types import BROADCAST, CARRY, Axis
from .in_trace import Function, InnerTransform, type_text


class Carry:
    """In the axes of :func:`~nnx_sharding.scan`: each step gets what the previous one returned."""


class StateAxes(StateSharding):
    """Axes of the Variables of a module, by ordered NNX filters, for ``vmap`` and ``scan``.

    Args:
      filter_axes: a mapping from NNX filters to axes, or an iterable of such pairs; the first
        filter that matches a Variable decides. Or an ``nnx.State`` with axes as leaves. An axis is
        a dimension, None for one that is not mapped, or for ``scan``
        :class:`~nnx_sharding.Carry`.

    Raises:
      TypeError: something is not a filter or not an axis.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding import StateAxes
      >>> StateAxes({nnx.Param: 0, ...: None})
      StateAxes({Param: 0, ...: None})
    """

    __slots__ = ()

    def __init__(
        self,
        filter_axes: nnx.State[Any, Any] | Mapping[Any, Any] | Iterable[tuple[object, object]],
        /,
    ):
        pairs = pairs_of("StateAxes", filter_axes)
        super().__init__([(filter_, _axis("StateAxes", axis)) for filter_, axis in pairs])

    def __reduce__(self) -> tuple[Any, ...]:
        return StateAxes, (tuple(zip(self.filters, self.shardings, strict=True)),)


def _axis(place: str, x: object) -> Axis | StateSharding:
    """Reads one entry of a prefix of axes: ``0`` → ``Axis(0)``, ``Carry`` → ``CARRY``.

    ``place`` is the expression for it, for messages, such as ``in_axes[1]``.

    Raises:
      TypeError: it is no axis.
    """
    if isinstance(x, Axis | StateSharding):
        return x
    if x is None or (isinstance(x, int) and not isinstance(x, bool)):
        return Axis(x)
    if is_carry(x):
        return CARRY
    if isinstance(x, nnx.StateAxes):
        return StateAxes(zip(x.filters, x.axes, strict=True))
    if (prefix := _compat.prefix_state(x)) is not None:  # what `nnx.prefix` returns
        # It has axes that are known already, and a function of path and value for all others.
        known = leaves_by_path(prefix.specs, lambda axis: axis is None)
        axes = {path: _axis(place, axis) for path, axis in known.items()}
        return PathFunction(_AxisOf(place, prefix.function), axes)
    raise TypeError(
        f"{place}: expected an axis, got {show(x)}. An axis is a dimension, None for what is not "
        "mapped, Carry (in scan), or StateAxes by NNX filters."
    )


def is_carry(x: object) -> bool:
    """Whether an entry of a prefix of axes is the carry: our own mark, or Flax's."""
    return x is Carry or x is nnx.Carry


@dataclasses.dataclass(frozen=True)
class _AxisOf:
    """The function of path and value in what ``nnx.prefix`` returns, with our own axes.

    A class, so that two prefixes of equal functions are equal specs.
    """

    place: str  # the expression for the prefix, for messages
    function: Callable[[Path, Any], Any]  # of a path and a value; returns an axis as Flax has it

    def __call__(self, path: Path, value: object) -> Axis | StateSharding:
        return _axis(self.place, self.function(path, value))


def axes_specs(option: str, prefix: object) -> Specs:
    """Reads a prefix of axes as specs, with an `Axis` in place of each axis.

    Args:
      option: the name of the option, for messages.
      prefix: what the user gave for it, such as ``(0, None)``.
    """
    # Also leaves: None, which is an axis, and what `nnx.prefix` returns, which has several.
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        prefix, is_leaf=lambda x: x is None or _compat.prefix_state(x) is not None
    )
    axes = []
    for path, axis in leaves:
        place = accessor(option, tuple(map(path_key, path)))  # such as `in_axes[0]['mask']`
        axes.append(_axis(place, axis))
    return Specs(jax.tree_util.tree_unflatten(treedef, axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mapped(InnerTransform):
    """What ``vmap`` and ``scan`` decide: the axes of arrays, and the metadata that names them."""

    # What a function captures is stacked along the first dimension, even if no spec says so.
    own_specs: ClassVar[tuple[Axis, ...]] = (Axis(0),)

    in_name: str = "in_axes"
    # The user's `transform_metadata`, as pairs: what Flax adds to the metadata of Variables for a
    # mapped axis, such as (nnx.PARTITION_NAME, "layers").
    metadata: tuple[tuple[Any, Any], ...] = ()
    options: tuple[tuple[str, Static], ...] = ()  # those of JAX's own transform

    def spec_of(self, spec: Axis | None) -> Axis:  # noqa: D102
        return BROADCAST if spec is None else spec

    def input_specs(  # noqa: D102
        self, specs: list[Any], leaves: Sequence[object]
    ) -> list[Any]:
        return [*map(self.spec_of, specs)]

    def written_specs(self, plan: Plan, after: Flat) -> Mapping[int, Axis]:
        """Returns the axes of captured arrays in modules that are not mapped: the first one.

        Args:
          plan: the plan of the call.
          after: the objects after the call, flattened; those of the arguments have the same index.

        Returns:
          An axis for each such array, by its slot after the call.
        """
        specs: dict[int, Axis] = {}
        for index in captures(plan.structure):
            if is_mapped(plan.variables[index].spec):
                continue
            for slot in after.structure.slots[index]:
                if self.is_stacked(plan.structure.slots[index], after.leaves[slot]):
                    specs[slot] = Axis(0)
        return specs

    def is_stacked(self, slots: Sequence[int], leaf: object) -> bool:
        """Whether a captured array is stacked, in a Variable of a module that is not mapped.

        Args:
          slots: the slots of the Variable before the call; none if it was empty.
          leaf: the array.
        """
        return not slots  # what replaces an old value is as little mapped as that

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Sequence[object], specs: Sequence[Axis]
    ) -> None:
        """Raises a ``ValueError`` for results that cannot be stacked along their axes.

        Args:
          fun_name: the name of the user's function.
          names: the expression for each result, such as ``output[0].kernel``.
          leaves: the arrays in the trace.
          specs: the axis of each.
        """
        lines = []
        for name, leaf, spec in zip(names, leaves, specs, strict=True):
            axis = spec.index
            if axis is None or _compat.is_ref(leaf):  # refs are updated in place, and never stacked
                continue
            ndim = getattr(jax.typeof(leaf), "ndim", None)  # None for a hijax type: never stacked
            if ndim is None or not -ndim - 1 <= axis <= ndim:
                lines.append(f"  {name}, {type_text(leaf)}: axis {axis}")
        raise_listed(
            ValueError,
            f"{self.name}: these results of {fun_name} cannot be stacked along the axes that "
            f"{self.out_name} (or {self.in_name}, for modules) gives them:",
            lines,
            "An array of n dimensions can be stacked along the axes 0 to n.",
            anchor="axes-that-arrays-do-not-have",
        )

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns the user's function, during which Variables have no name for the mapped axis.

        The logical axes of a Variable (its metadata) name each dimension. Inside of the function,
        the mapped one is not there.
        """
        fun = super().user_function(plan, caller, unflattened)
        if not self.metadata:
            return fun
        settings = dict(self.metadata)
        # The mapped Variables of the arguments, each with its axis.
        mapped = [
            (unflattened.objects[index], axis.index)
            for index, (_, axis) in plan.variables.items()
            if is_mapped(axis)
        ]

        def without_axis_names(*args: object, **kwargs: object) -> Any:
            change_names(nnx.spmd.remove_axis, mapped, settings)
            try:
                out = fun(*args, **kwargs)
                # What the function made has the axis, and its name, only outside.
                new = self._new_variables(out, plan, unflattened)
                change_names(nnx.spmd.add_axis, new, settings)
                return out
            finally:
                change_names(nnx.spmd.add_axis, mapped, settings)

        return without_axis_names

    def _new_variables(
        self, out: object, plan: Plan, unflattened: Unflattened
    ) -> list[tuple[Any, int]]:
        """Returns the new Variables in the output and the arguments that are stacked.

        Args:
          out: what the user's function returned.
          plan: the plan of the call; ``plan.variables`` has the Variables of the arguments.
          unflattened: the objects of the arguments in the trace.

        Returns:
          Pairs of a Variable and the axis along which it is stacked.
        """
        # The objects of the arguments keep their indices; new ones come after them.
        num_old_objects = len(unflattened.objects)
        flat = flatten(out, first_objects=unflattened.objects)
        caller = f"{self.name}: {self.out_name}"  # for messages
        # The output, in the parts that `out_axes` has an axis or filters for.
        output = split_argument("output", self.out_specs.tree, out, flat.structure.root, caller)
        # Finds the axis of each Variable, by index. The specs of the arguments hold for what was
        # attached to them, those of the output for the rest.
        resolved = resolve(
            locate(flat.structure, [*plan.graph_arguments, output]),
            flat.objects,
            flat.leaves,
            self.spec_of,
            decided=plan.variables,  # known from the call
            decided_arguments={argument.name for argument in plan.graph_arguments},
        )
        return [
            (flat.objects[index], axis.index)
            for index, (_, axis) in resolved.variables.items()
            if index >= num_old_objects and is_mapped(axis)
        ]


def is_mapped(axis: Axis | None) -> bool:
    """Whether an array with this spec has a dimension over which the function is mapped."""
    return axis is not None and axis.index is not None


def captures(structure: Structure) -> set[int]:
    """Returns the indices of the Variables in which ``nnx.capture`` collects what modules sow.

    Each module has an attribute for them, a nested container, which Flax names.
    """
    indices: set[int] = set()
    for entry in structure.entries:
        if not isinstance(entry, NodeEntry) or _compat.CAPTURES not in entry.keys:
            continue
        captured = entry.children[entry.keys.index(_compat.CAPTURES)]
        for index in atoms([captured]):  # the leaves of the container
            if isinstance(index, int):  # the index of a Variable
                variable_type = getattr(structure.entries[index], "type", object)
                # A perturbation is an input too; in a module that is not mapped, the same for all.
                if not issubclass(variable_type, nnx.Perturbation):
                    indices.add(index)
    return indices


def change_names(
    change: Callable[..., Any], mapped: Iterable[tuple[Any, int]], settings: Mapping[Any, Any]
) -> None:
    """Adds or removes the names of axes in the logical axes of Variables.

    Args:
      change: ``nnx.spmd.add_axis`` or ``remove_axis``, which count axes from the front.
      mapped: the Variables as they are without the axis, each with the axis.
      settings: Flax's ``transform_metadata``, with the name of the axis.
    """
    for variable, axis in mapped:
        arrays = jax.tree.leaves(variable) if isinstance(variable, nnx.Variable) else []
        # With empty logical axes, Flax would add no name, but try to remove one.
        if arrays and variable.get_metadata().get("out_sharding") != ():
            # From the front, where the dimension will be: of an array without it.
            change(variable, axis % (jnp.ndim(arrays[0]) + 1), settings)


def jax_options(**options: object) -> tuple[tuple[str, Static], ...]:
    """Returns the options of JAX's own transform in hashable form, for the key of a plan.

    A `Static` compares by type, too: 1 is not True.
    """
    return tuple((key, Static.of(x)) for key, x in options.items())
