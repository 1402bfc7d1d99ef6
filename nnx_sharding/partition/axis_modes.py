"""``auto_axes`` and ``explicit_axes`` for functions that take and return NNX objects.

Over an Explicit mesh axis, the sharding of an array is a part of its type in a trace; over an
Auto axis, the compiler chooses it. The mesh around the function is the *outer* mesh, and the mesh
inside the function is the *inner* mesh. Both have the same devices, but other axis types
(``AxisTypeChange``). To *retype* an array is to give it the same values with a sharding on the
other mesh in its type. Both transforms retype the arrays of the arguments, call the function, and
retype what it returns:

    auto_axes       in: the sharding is kept, but not in the type    out: ``out_sharding``
    explicit_axes   in: ``in_sharding``                              out: the compiler chooses

After the call, Variables of the arguments have the types that they had before it. If the function
raises an error, they have their old values as well. Modules are flattened for this (``Flat``) into
their arrays, the *leaves*, their ``objects`` (modules, Variables), and a ``structure`` that
describes the rest. A *slot* is the index of a leaf. A *location* is the place of a Variable or
array in an argument or the result, with the part of the user's specs that is for it. The name of a
location is the expression for it, such as ``model.kernel``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.argument_specs import align_specs
from ..core.arguments import Argument, split_argument, split_arguments
from ..core.constrain import mesh_of_types, retype, type_mesh
from ..core.flatten import Flat, flatten
from ..core.locations import NamedLocation, locate, slot_names
from ..core.prefixes import Specs, check_specs
from ..core.problems import array_line
from ..core.rebuild import rebuild
from ..core.resolve import resolve
from ..core.retyping import AxisTypeChange, RetypedArrays, call_retyped
from ..core.signature import NO_ROLES, ArgTree, Parameters
from ..core.tree_shardings import fit_shardings
from ..core.unflatten import restore
from ..errors import NoMeshError, raise_if_any
from ..specs.fitting import axes_of
from ..specs.types import Arrays, Objects
from ..transforms.lifted import unbind


def auto_axes(
    fun: Callable[..., object] | None = None,
    /,
    *,
    axes: str | tuple[str, ...] | None = None,
    out_sharding: object = None,
) -> Any:
    """Runs a function with mesh axes Auto that are Explicit outside it.

    This is ``jax.sharding.auto_axes`` for functions and methods whose arguments and results may
    hold modules. The compiler chooses how values are sharded in the function, for example where JAX
    cannot type an operation. Variables of modules among the arguments are converted like arrays.
    After the call they have their previous types; an exception leaves all of them unchanged. Values
    that the function captures are not converted: pass them as arguments.

    Args:
      fun: the function. Without it, the result is a decorator.
      axes: a name or a tuple of names of mesh axes; None for all. If none of them is Explicit, as
        on a mesh with Auto axes, the function is just called.
      out_sharding: how results are sharded outside: a ``PartitionSpec``, a ``NamedSharding``, a
        :class:`~nnx_sharding.StateSharding`, or a prefix of the result with these as leaves. It has
        to cover all but scalars, which are replicated, and the Variables of arguments. It may also
        be a keyword argument of each call.

    Returns:
      The function, whose results are sharded as ``out_sharding`` says.

    Raises:
      ValueError: no spec says how a result is sharded, or specs do not fit; all are listed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import auto_axes, reshard
      >>> layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
      >>> call = auto_axes(lambda layer, x: layer(x), out_sharding=P("data"))
      >>> with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
      ...     layer = reshard(layer, P("model"))
      ...     print(jax.typeof(call(layer, jnp.ones((4, 16)))))
      float32[4@data,8]
    """
    if fun is None:
        return functools.partial(auto_axes, axes=axes, out_sharding=out_sharding)
    return _decorate(AxisType.Auto, fun, "out_sharding", out_sharding, axes)


def explicit_axes(
    fun: Callable[..., object] | None = None,
    /,
    *,
    axes: str | tuple[str, ...] | None = None,
    in_sharding: object = None,
) -> Any:
    """Runs a function with mesh axes Explicit that are Auto outside it.

    This is ``jax.sharding.explicit_axes`` for functions and methods whose arguments and results may
    hold modules. In the function, JAX knows how each value is sharded over these axes, and refuses
    to guess. Variables among the arguments are converted as by :func:`auto_axes`.

    Args:
      fun: the function. Without it, the result is a decorator.
      axes: a name or a tuple of names of mesh axes; None for all.
      in_sharding: how arguments are sharded in the function, in the form of ``in_shardings`` of
        :func:`~nnx_sharding.jit`: one spec for all, a tuple with one for each positional
        parameter, or a mapping from parameter names. It has to cover all but scalars, which are
        replicated. It may also be a keyword argument of each call.

    Returns:
      The function, whose results have the axis types of the outer mesh.

    Raises:
      ValueError: no spec says how an argument is sharded, or specs do not fit; all are listed.
      NoMeshError: there is no mesh.
    """
    if fun is None:
        return functools.partial(explicit_axes, axes=axes, in_sharding=in_sharding)
    return _decorate(AxisType.Explicit, fun, "in_sharding", in_sharding, axes)


def _decorate(
    kind: AxisType,
    fun: Callable[..., object],
    option: str,
    specs: object,
    axes: str | tuple[str, ...] | None,
) -> Callable[..., Any]:
    """Wraps a function so that each call runs with mesh axes of type ``kind``.

    Args:
      kind: the type of the axes while the function runs.
      option: the name of the option with the specs: ``in_sharding`` or ``out_sharding``.
      specs: the user's specs. None if each call passes them, by a keyword of this name, which the
        function does not get; with specs, it is a keyword like any other.
      axes: the axes that change their type; None for all.
    """
    name = f"{kind.name.lower()}_axes"
    is_module = _compat.is_graph_object(fun)
    # A callable module and the object of a method are arguments: their Variables are retyped.
    function, bound = (type(fun).__call__, (fun,)) if is_module else unbind(fun)
    parameters = Parameters(function, NO_ROLES, len(bound))
    axis_names = None if axes is None else axes_of(axes)
    mode = _AxisMode(kind, name, option, function, parameters, axis_names)
    # The specs are checked here, so that misspelt ones fail when the function is decorated.
    declared = None if specs is None else mode.check(specs)

    # The wrapper gets the name, docstring and attributes of the function. The wrapper does not get
    # the attributes of a module, because they are Variables and submodules.
    @functools.wraps(fun, updated=() if is_module else functools.WRAPPER_UPDATES)
    @_compat.api_boundary
    def call(*args: object, **kwargs: object) -> Any:
        """Calls the function by `_AxisMode.call`, with specs of the decorator or of the call."""
        specs_of_call = declared
        if specs_of_call is None:
            if option not in kwargs:
                raise TypeError(f"{name}: {option} is missing.")
            specs_of_call = mode.check(kwargs.pop(option))
        return mode.call((*bound, *args), kwargs, specs_of_call)

    return call


@dataclasses.dataclass(frozen=True)
class _AxisMode:
    """A function that runs with axes of another type.

    Attributes:
      kind: the type of the axes in the function.
      name: the name of the transform, for errors.
      option: the name of the option with the specs, for errors.
      function: the function.
      parameters: the parameters of the function.
      axes: the axes; None for all.
    """

    kind: AxisType
    name: str
    option: str
    function: Callable[..., Any]
    parameters: Parameters
    axes: tuple[str, ...] | None

    def check(self, specs: object) -> Specs:
        """Returns the user's specs as ``Specs``; raises a TypeError for what is not a spec."""
        checked = Specs(specs)
        check_specs(self.name, (PartitionSpec, NamedSharding), **{self.option: checked})
        return checked

    def call(self, args: tuple[object, ...], kwargs: dict[str, object], specs: Specs) -> Any:
        """Calls the function on the inner mesh; an exception leaves the arguments as they were.

        Args:
          specs: the user's ``in_sharding`` or ``out_sharding``.
        """
        flat = flatten((args, kwargs))
        change = self._change(flat, specs)
        if change is None:  # no axis changes its type
            return self.function(*args, **kwargs)
        call = self._call_auto if self.kind is AxisType.Auto else self._call_explicit
        undo = _record_undo(flat.objects)  # for modules and Variables
        try:
            flat_after, outer_leaves = call((args, kwargs), flat, specs, change)
            # The Variables of the arguments get the outer arrays, although Flax may count the
            # Variables as those of another trace (``foreign``). The result is returned with outer
            # arrays as well.
            return rebuild(flat_after, outer_leaves, foreign=True)
        # KeyboardInterrupt is caught as well, because Variables must not keep the inner types.
        except BaseException:
            undo()
            # Static objects, such as configurations, are restored here, because `undo` only knows
            # modules and Variables.
            restore(flat.structure, flat.objects, flat.structure.static_indices())
            raise

    def _change(self, flat: Flat, specs: Specs) -> AxisTypeChange | None:
        """Finds the mesh of a call, and which of its axes get another type in the function.

        Args:
          flat: the arguments, flattened. The types of their arrays may have a mesh.

        Returns:
          The outer and the inner mesh; None if the function can be called as it is.

        Raises:
          NoMeshError: ``explicit_axes`` has no mesh.
        """
        # The mesh is the one in context, else the mesh of a spec, else the mesh of an array. Arrays
        # that were never placed have no mesh in their types.
        meshes = (spec.mesh for spec in specs.written if isinstance(spec, NamedSharding))
        mesh = mesh_of_types(flat.leaves, default=next(meshes, None))
        if mesh is None:
            if self.kind is AxisType.Auto:  # without a mesh, nothing is sharded by types
                return None
            raise NoMeshError(f"{self.name} has no mesh. Call within `with jax.set_mesh(mesh):`.")
        change = AxisTypeChange.of(mesh, self.axes, self.kind, name=self.name)
        if change is None and self.kind is AxisType.Explicit:
            # All axes are Explicit already. The change is from the mesh to itself, because
            # arguments still have to be sharded as in_sharding says.
            abstract = getattr(mesh, "abstract_mesh", mesh)
            change = AxisTypeChange(outer=abstract, inner=abstract)
        return change

    def _call_auto(
        self, tree: ArgTree, flat: Flat, specs: Specs, change: AxisTypeChange
    ) -> tuple[Flat, Sequence[Any]]:
        """Calls the function with Auto axes, and types its results as ``out_sharding`` says.

        Arrays in Variables of the arguments get the types that they had before the call. Returns
        the arguments and the result after the call, with arrays on the inner mesh, and by slot the
        same arrays on the outer mesh.

        Args:
          tree: the arguments of the call, ``(args, kwargs)``.
          specs: the user's ``out_sharding``.
        """
        # On the inner mesh, arrays keep their sharding, but their types do not have it any more.
        arrays = RetypedArrays.of(change, flat.leaves)
        flat_after = self._call_retyped(flat, arrays)
        # The result has the user's specs; Variables of the arguments have none. The arguments come
        # first, so that errors name a Variable by its argument, not as a part of the result.
        arguments = [
            argument.objects_only() for argument in self._arguments(tree, flat, prefix=None)
        ]
        output = split_argument(
            "output",
            prefix=specs.tree,
            child=flat_after.structure.root,
            caller=f"{self.name}: {self.option}",
        )
        locations = locate(flat_after.structure, [*arguments, output])
        names = slot_names(len(flat_after.leaves), locations)
        declared = self._declared_specs(locations, names, flat_after, change.outer)
        # On the outer mesh, an array has the declared type, or the type of the array that it
        # replaces. An array with neither is an error.
        typed = arrays.with_declared_types(
            flat.structure, flat_after, declared, names, name=self.name, option=self.option
        )
        return flat_after, typed.leaves

    def _call_explicit(
        self, tree: ArgTree, flat: Flat, specs: Specs, change: AxisTypeChange
    ) -> tuple[Flat, Sequence[Any]]:
        """Types the arguments as ``in_sharding`` says, and calls the function with Explicit axes.

        ``specs`` are the user's ``in_sharding``; the other arguments and the result are those of
        :meth:`_call_auto`.
        """
        locations = locate(flat.structure, self._arguments(tree, flat, prefix=specs.tree))
        names = slot_names(len(flat.leaves), locations)
        declared = self._declared_specs(locations, names, flat, change.inner)
        self._check_all_declared(names, flat.leaves, declared)
        # An array without a spec, such as a scalar, keeps the sharding that it has.
        pairs = zip(flat.leaves, declared, strict=True)
        inner_leaves = [retype(leaf, change.inner, spec) for leaf, spec in pairs]
        arrays = RetypedArrays(change, leaves=flat.leaves, inside=inner_leaves)
        flat_after = self._call_retyped(flat, arrays)
        # On the outer mesh, unchanged arrays are the arrays of the arguments again, and a new array
        # in a Variable has the type of the one that it replaces. `outer_leaves` has both, and
        # `untyped` has all other arrays, by slot.
        outer_leaves, untyped = arrays.with_outer_types(flat.structure, flat_after)
        # Untyped arrays need no spec, because a type has no sharding over Auto axes.
        for slot, array in untyped.items():
            outer_leaves[slot] = retype(array, change.outer)
        return flat_after, outer_leaves

    def _check_all_declared(
        self, names: Sequence[str], leaves: Arrays, declared: Sequence[PartitionSpec | None]
    ) -> None:
        """Raises a ValueError that lists the arrays, not scalars, for which there is no spec.

        Args:
          names: the expression for each array, such as ``model.kernel``.
          leaves: the arrays, and other leaves of the arguments.
          declared: the spec for each; None without one.
        """
        lines = []
        for name, leaf, spec in zip(names, leaves, declared, strict=True):
            # A leaf without a mesh in its type needs no spec: it is not an array, or it is not on a
            # mesh yet, and JAX treats it as replicated.
            is_typed = type_mesh(leaf) is not None
            if spec is None and is_typed and leaf.ndim:
                lines.append(array_line(name, leaf))
        head = "no spec says how these arguments are sharded on the axes that become Explicit:"
        remedy = "Declare them in in_sharding; P() replicates."
        raise_if_any(ValueError, f"{self.name}: {head}", lines, remedy)

    def _call_retyped(self, flat: Flat, arrays: RetypedArrays) -> Flat:
        """Calls the function with arrays of inner types; returns arguments and result after it."""
        return call_retyped(flat, arrays, lambda tree: self.function(*tree[0], **tree[1]))

    def _arguments(self, tree: ArgTree, flat: Flat, prefix: object) -> list[Argument]:
        """Splits ``(args, kwargs)`` into named arguments, each with its part of a spec prefix."""
        args, kwargs = tree
        signature = self.parameters.signature(len(args), tuple(kwargs))
        prefixes = align_specs(prefix, self.parameters, signature, self.option)
        caller = f"{self.name}: {self.option}"
        return split_arguments(flat.structure, tree, prefixes, signature.names, caller)

    def _declared_specs(
        self,
        locations: list[NamedLocation],
        names: Sequence[str],
        flat: Flat,
        mesh: AbstractMesh,
    ) -> list[PartitionSpec | None]:
        """Returns the spec that the user declares for each array; None where there is none.

        Args:
          locations: the places of Variables and arrays in the arguments or the result, each with
            the user's spec for its part.
          mesh: the mesh that the specs have to fit.

        Raises:
          ValueError: specs do not fit the mesh or a shape, or differ for a shared Variable.
        """
        # Only the spec of a `NamedSharding` counts, because its mesh may have other axis types.
        resolved = resolve(locations, flat.objects, flat.leaves, spec_of=_as_spec)
        fitted = fit_shardings(self.name, names, flat.leaves, resolved, mesh, explicit=True)
        return [_as_spec(sharding) for sharding in fitted]  # fitted ones are on the mesh


def _as_spec(sharding: object) -> Any:
    """Returns the spec of a NamedSharding; a spec and None as they are."""
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def _record_undo(objects: Objects) -> Callable[[], None]:
    """Records what modules and Variables hold; returns a function that gives it back to them."""
    # Nodes of other libraries without a `__dict__` are left out, because they keep their content in
    # a place that is not known here.
    nodes = [node for node in objects if _compat.is_node(node) and hasattr(node, "__dict__")]
    attributes = [(vars(node), dict(vars(node))) for node in nodes]
    # The metadata is copied, since the function may change it in place.
    variables = [
        (variable, _compat.get_value(variable), dict(_compat.get_metadata(variable)))
        for variable in objects
        if _compat.is_variable(variable)
    ]

    def undo() -> None:
        """Gives modules and Variables the content that they had when it was recorded."""
        for current_attributes, old_attributes in attributes:
            current_attributes.clear()
            current_attributes.update(old_attributes)
        for variable, value, metadata in variables:
            _compat.set_value(variable, value)
            _compat.set_metadata(variable, metadata)

    return undo
