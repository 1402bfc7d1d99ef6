"""Axes along which arrays are mapped: the user's forms, and the base of ``vmap`` and ``scan``.

The *specs* of these transforms are axes: ``Axis(0)`` for the first dimension, ``BROADCAST`` (an
``Axis`` with the index None) for arrays that are not mapped, or ``CARRY``. They are found like
shardings, by prefixes of the arguments and by filters for the Variables of modules
(:class:`StateAxes`), and results are grouped by them.

A *mapped* array or Variable has one more dimension outside of the function than inside. Inside it
is one element (of ``vmap``) or slice (of ``scan``). The results of all elements are *stacked*: they
get a dimension when they leave the function. A value that a function writes to a Variable has the
axis of the Variable; a new Variable of a mapped module has the axis of the module. Values that
modules ``sow`` while they run are *captured*: they are in Variables that ``nnx.capture`` has made
in the modules, empty at first. They differ between the elements even if the module is the same for
all, so they are stacked in this case, too.

All objects of the arguments are in a table (the *structure*), each at an *index*; the *slot* of an
array is its position in the list of all arrays. A *plan* has the axes of all arrays, by slot, and
of all Variables (``variables``), by index, with their names; *unflattened* has the objects as they
are in the trace.
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
from ..errors import raise_if_any
from ..specs.fitting import show
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import StateSharding, pairs_of
from ..specs.types import BROADCAST, CARRY, Axis
from .in_trace import Function, InnerTransform, type_text


class Carry:
    """Marks the carry in the axes of :func:`~nnx_sharding.scan`.

    Each step gets the carry that the previous one returned.
    """


class StateAxes(StateSharding):
    """Axes of the Variables of a module, by ordered NNX filters, for ``vmap`` and ``scan``.

    Args:
      filter_axes: a mapping from NNX filters to axes, or an iterable of such pairs; the first
        filter that matches a Variable decides. An ``nnx.State`` with axes as leaves may be given
        instead. An axis is a dimension, None if the Variable is not mapped, or for ``scan``
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

    ``place`` is the expression for the entry, for messages, such as ``in_axes[1]``.

    Raises:
      TypeError: the entry is no axis.
    """
    if isinstance(x, Axis | StateSharding):
        return x
    if x is None or (isinstance(x, int) and not isinstance(x, bool)):
        return Axis(x)
    if is_carry(x):
        return CARRY
    if isinstance(x, nnx.StateAxes):  # Flax's class; ours reads each of its axes by `_axis`
        return StateAxes(zip(x.filters, x.axes, strict=True))
    prefix = _compat.prefix_state(x)  # None unless `nnx.prefix` has returned ``x``
    if prefix is not None:
        # A prefix has a pytree of known axes, in which None is an axis, and a function of path and
        # value for all other paths.
        known_axes = leaves_by_path(prefix.specs, is_leaf=lambda axis: axis is None)
        axes = {path: _axis(place, axis) for path, axis in known_axes.items()}
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

    It is a class because two prefixes of equal functions have to be equal specs.
    """

    place: str  # the expression for the prefix, for messages
    function: Callable[[Path, Any], Any]  # takes a path and a value; returns an axis of Flax

    def __call__(self, path: Path, value: object) -> Axis | StateSharding:
        return _axis(self.place, self.function(path, value))


def axes_specs(option: str, prefix: object) -> Specs:
    """Reads a prefix of axes as specs: ``(0, None)`` → ``Specs((Axis(0), Axis(None)))``.

    Args:
      option: the name of the option, for messages.
      prefix: the value that the user gave, such as ``(0, None)``.

    Raises:
      TypeError: an entry is no axis.
    """

    def is_leaf(x: object) -> bool:
        """Whether ``_axis`` reads something whole that JAX would take apart or leave out."""
        return x is None or _compat.prefix_state(x) is not None  # not None: from `nnx.prefix`

    leaves, treedef = jax.tree_util.tree_flatten_with_path(prefix, is_leaf)
    axes = []
    for path, axis in leaves:
        # The text is `in_axes[0]['mask']`, for example.
        place = accessor(option, tuple(map(path_key, path)))
        axes.append(_axis(place, axis))
    return Specs(jax.tree_util.tree_unflatten(treedef, axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mapped(InnerTransform):
    """The decisions of ``vmap`` and ``scan``: the axes of arrays, and the metadata that names them.

    Captured arrays and checks of results are here, too. The core calls the methods: `input_specs`
    when it makes a plan; `user_function`, `written_specs` and `check_outputs` in each trace; and
    `spec_of` in both, for the final form of an axis. The user's axes are ``in_specs`` and
    ``out_specs``, whose ``tree`` is the prefix. In messages, these options are ``in_name`` and
    ``out_name``.
    """

    # Results need a group for each axis that they may have. Captured arrays are stacked along the
    # first dimension, even if the user has written no such axis.
    own_specs: ClassVar[tuple[Axis, ...]] = (Axis(0),)

    in_name: str = "in_axes"
    # The user's `transform_metadata`, as pairs: what Flax adds to the metadata of Variables for a
    # mapped axis, such as (nnx.PARTITION_NAME, "layers").
    metadata: tuple[tuple[Any, Any], ...] = ()
    options: tuple[tuple[str, Static], ...] = ()  # the options of JAX's own transform

    def spec_of(self, spec: Axis | None) -> Axis:  # noqa: D102
        return BROADCAST if spec is None else spec

    def input_specs(  # noqa: D102
        self, specs: list[Any], leaves: Sequence[object]
    ) -> list[Any]:
        return [*map(self.spec_of, specs)]

    def written_specs(self, plan: Plan, after: Flat) -> Mapping[int, Axis]:
        """Returns the axes of captured arrays that are stacked though their module is not mapped.

        In a mapped module, a captured array has the axis of the module, like everything new in it.
        In other modules it gets the first axis, the default for results.

        Args:
          plan: the plan of the call.
          after: the objects after the call, flattened. Objects of the arguments keep their index.

        Returns:
          An axis for each such array, by its slot after the call.
        """
        specs: dict[int, Axis] = {}
        for index in captures(plan.structure):
            is_in_mapped_module = is_mapped(plan.variables[index].spec)
            # A value from an earlier call has no dimension for the elements, and neither has the
            # value that replaces it. Only a Variable that was empty has no axis yet.
            was_empty = not plan.structure.slots[index]
            if is_in_mapped_module or not was_empty:
                continue
            for slot in after.structure.slots[index]:
                if self.stacks_captured(after.leaves[slot]):
                    specs[slot] = Axis(0)
        return specs

    def stacks_captured(self, array: object) -> bool:
        """Whether ``scan`` or ``vmap`` stacks an array captured in a module that is not mapped.

        The array is in a Variable that was empty before the call.
        """
        return True

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Sequence[object], specs: Sequence[Axis]
    ) -> None:
        """Raises a ``ValueError`` for results that cannot be stacked along their axes.

        Args:
          fun_name: the name of the user's function.
          names: the expression for each result, such as ``output[0].kernel``.
          leaves: the arrays in the trace.
          specs: the axis of each result: from ``out_axes`` or, for a result in a module of the
            arguments, from ``in_axes`` (the options ``out_name`` and ``in_name``).
        """
        lines = []
        for name, leaf, spec in zip(names, leaves, specs, strict=True):
            axis = spec.index
            if axis is None or _compat.is_ref(leaf):  # a ref is updated in place, and never stacked
                continue
            ndim = getattr(jax.typeof(leaf), "ndim", None)  # None: a hijax type, which has no axes
            # The stacked array has ndim + 1 dimensions: 0 to ndim, or -1 to -(ndim + 1).
            if ndim is None or not -(ndim + 1) <= axis <= ndim:
                lines.append(f"  {name}, {type_text(leaf)}: axis {axis}")
        raise_if_any(
            ValueError,
            f"{self.name}: these results of {fun_name} cannot be stacked along the axes that "
            f"{self.out_name} (or {self.in_name}, for modules) gives them:",
            lines,
            "An array of n dimensions can be stacked along the axes 0 to n.",
            anchor="axes-that-arrays-do-not-have",
        )

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns the user's function, during which Variables have no name for the mapped axis.

        The logical axes of a Variable (its metadata) name each dimension: ``("layers", "embed")``
        outside of the function, and ``("embed",)`` inside, because the mapped dimension is gone.
        """
        fun = super().user_function(plan, caller, unflattened)
        if not self.metadata:
            return fun
        settings = dict(self.metadata)
        # `mapped` has the mapped Variables of the arguments in the trace, each with its axis.
        mapped = [
            (unflattened.objects[index], axis.index)
            for index, (_, axis) in plan.variables.items()
            if is_mapped(axis)
        ]

        def without_axis_names(*args: object, **kwargs: object) -> Any:
            change_names(nnx.spmd.remove_axis, mapped, settings)
            try:
                out = fun(*args, **kwargs)
                # New Variables are stacked when they leave the function, so they need the name.
                new_variables = self._new_variables(out, plan, unflattened)
                change_names(nnx.spmd.add_axis, new_variables, settings)
                return out
            finally:  # the mapped Variables leave with the name that they came with
                change_names(nnx.spmd.add_axis, mapped, settings)

        return without_axis_names

    def _new_variables(
        self, out: object, plan: Plan, unflattened: Unflattened
    ) -> list[tuple[Any, int]]:
        """Returns the new Variables in the output and the arguments that are stacked.

        Args:
          plan: the plan of the call; ``plan.variables`` has the Variables of the arguments.
          unflattened: the objects of the arguments in the trace.

        Returns:
          Pairs of a Variable and the axis along which it is stacked.
        """
        # The objects of the arguments keep their indices; new ones come after them.
        num_old_objects = len(unflattened.objects)
        flat = flatten(out, first_objects=unflattened.objects)
        option = f"{self.name}: {self.out_name}"  # for messages
        # The output is taken in the parts for which `out_axes` has an axis or filters.
        output = split_argument("output", self.out_specs.tree, flat.structure.root, option)
        # `resolve` finds the axis of each Variable, by index. A new Variable that is attached to an
        # argument has the axis that `in_axes` gives there; any other has the axis of `out_axes`.
        resolved = resolve(
            locate(flat.structure, [*plan.graph_arguments, output]),
            flat.objects,
            flat.leaves,
            self.spec_of,
            # The Variables of the arguments have their axes already, so filters are not asked.
            decided=plan.variables,
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

    Each module has an attribute for them, a nested container, whose name is Flax's. Perturbations
    are in the container, too, but not in the result.
    """
    indices: set[int] = set()
    for entry in structure.entries:
        if not isinstance(entry, NodeEntry) or _compat.CAPTURES not in entry.keys:
            continue
        captured = entry.children[entry.keys.index(_compat.CAPTURES)]
        # The atoms of the container are indices of Variables, and values that are no objects.
        for index in atoms([captured]):
            if not isinstance(index, int):
                continue
            variable_type = getattr(structure.entries[index], "type", object)
            # A perturbation is also an input, so in a module that is not mapped it is the same for
            # all elements, like a parameter.
            if not issubclass(variable_type, nnx.Perturbation):
                indices.add(index)
    return indices


def change_names(
    change: Callable[..., Any], mapped: Iterable[tuple[Any, int]], settings: Mapping[Any, Any]
) -> None:
    """Adds or removes the name of the mapped axis in the logical axes of Variables.

    Args:
      change: ``nnx.spmd.add_axis`` or ``remove_axis``.
      mapped: Variables, each with its axis. Their arrays are those of one element, in the trace.
        They have no mapped dimension, whether its name is added or removed.
      settings: Flax's ``transform_metadata``, with the name of the axis.
    """
    for variable, axis in mapped:
        # A ref outside of Variables has no metadata, so it is skipped.
        arrays = jax.tree.leaves(variable) if isinstance(variable, nnx.Variable) else []
        # Flax keeps the logical axes as `out_sharding`. It adds no name to empty ones, but would
        # try to remove one from them, so Variables with empty ones are skipped.
        if not arrays or variable.get_metadata().get("out_sharding") == ():
            continue
        # The axis is counted from the front: -1 becomes 2 if the array has 3 dimensions outside.
        ndim_outside = jnp.ndim(arrays[0]) + 1
        change(variable, axis % ndim_outside, settings)


def jax_options(**options: object) -> tuple[tuple[str, Static], ...]:
    """Returns the options of JAX's own transform in hashable form, for the key of a plan.

    A `Static` compares by type, too: 1 is not True.
    """
    return tuple((key, Static.of(x)) for key, x in options.items())
