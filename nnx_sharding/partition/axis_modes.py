"""``auto_axes`` and ``explicit_axes`` for functions that take and return NNX objects.

Both flatten the arguments, give the arrays the types that they have on the other mesh, call the
function, and give the results the types of the mesh outside:

    auto_axes       in: the sharding is kept, but not in the type    out: ``out_sharding``
    explicit_axes   in: ``in_sharding``                              out: the compiler chooses

Variables of the arguments have the types after the call that they had before, or their old values,
if the function raises an error. To *retype* an array is to give it the same values with another
sharding in its type, on the inner or the outer mesh: these have the same devices and other axis
types (``AxisTypeChange``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.arguments import Argument, Specs, check_specs, split_argument, split_arguments
from ..core.constrain import mesh_of_types, retype, type_mesh
from ..core.flatten import Flat, flatten
from ..core.problems import array_line
from ..core.rebuild import rebuild
from ..core.resolve import NamedLocation, locate, resolve, slot_names
from ..core.retyping import AxisTypeChange, RetypedArrays, call_retyped
from ..core.signature import ArgTree, Parameters, Roles, align_specs
from ..core.tree_shardings import fit_shardings
from ..core.unflatten import restore
from ..errors import NoMeshError, raise_listed
from ..specs.fitting import axes_of
from ..specs.types import Objects
from ..transforms.lifted import unbind


def auto_axes(
    fun: Callable[..., object] | None = None,
    /,
    *,
    axes: str | tuple[str, ...] | None = None,
    out_sharding: object = None,
) -> Any:
    """Runs a function with mesh axes Auto that are Explicit outside it.

    ``jax.sharding.auto_axes``, for functions and methods whose arguments and results may hold
    modules. The compiler then chooses how values are sharded in the function, for example where JAX
    cannot type an operation. Variables of modules among the arguments are converted like arrays.
    After the call they have their previous types; an exception leaves all of them unchanged. What
    the function captures is not converted: pass it as an argument.

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

    ``jax.sharding.explicit_axes``, for functions and methods whose arguments and results may hold
    modules: JAX then knows in the function how each value is sharded over these axes, and refuses
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
    kind: AxisType, fun: Callable[..., object], option: str, specs: object, axes: object
) -> Callable[..., Any]:
    """Returns a function that runs with mesh axes of another type.

    Args:
      kind: the type of the axes while the function runs.
      fun: the user's function, method or callable module.
      option: the name of the option with the specs, for messages.
      specs: the user's specs; None if they are given at each call.
      axes: the axes that change their type; None for all.
    """
    name = f"{kind.name.lower()}_axes"
    is_object = _compat.is_graph_object(fun)
    # A callable module and the object of a method are arguments: their Variables are converted.
    function, bound = (type(fun).__call__, (fun,)) if is_object else unbind(fun)
    parameters = Parameters(function, Roles(), len(bound))
    mode = _AxisMode(
        kind, name, option, function, parameters, None if axes is None else axes_of(axes)
    )
    declared = None if specs is None else mode.check(specs)

    @functools.wraps(fun, updated=() if is_object else functools.WRAPPER_UPDATES)
    @_compat.api_boundary
    def call(*args: object, **kwargs: object) -> Any:
        if declared is None and option not in kwargs:
            raise TypeError(f"{name}: {option} is missing.")
        specs = mode.check(kwargs.pop(option)) if declared is None else declared
        return mode.call((*bound, *args), kwargs, specs)

    return call


@dataclasses.dataclass(frozen=True)
class _AxisMode:
    """A function that runs with axes of another type.

    Attributes:
      kind: the type of the axes in the function.
      name: the name of the transform, for errors.
      option: its option with the specs, for errors.
      function: the function.
      parameters: those of the function.
      axes: the axes; None for all.
    """

    kind: AxisType
    name: str
    option: str
    function: Callable[..., Any]
    parameters: Parameters
    axes: tuple[str, ...] | None

    def check(self, specs: object) -> Specs:
        """Returns specs in the form of the library; an error for what is none."""
        checked = Specs(specs)
        check_specs(self.name, (PartitionSpec, NamedSharding), **{self.option: checked})
        return checked

    def call(self, args: tuple[object, ...], kwargs: dict[str, object], specs: Specs) -> Any:
        """Calls the function; if it raises an error, the arguments are as they were."""
        flat = flatten((args, kwargs))
        # Arrays that were never placed have no mesh in their types; then a spec may name it.
        named = (x.mesh for x in specs.written if isinstance(x, NamedSharding))
        mesh = mesh_of_types(flat.leaves, next(named, None))
        change = None
        if mesh is not None:
            change = AxisTypeChange.of(mesh, self.axes, self.kind, name=self.name)
        if change is None and self.kind is AxisType.Auto:
            return self.function(*args, **kwargs)
        if mesh is None:
            raise NoMeshError(f"{self.name} has no mesh. Call within `with jax.set_mesh(mesh):`.")
        if change is None:
            # All axes are Explicit already; arguments are still sharded as in_sharding says.
            abstract = getattr(mesh, "abstract_mesh", mesh)
            change = AxisTypeChange(abstract, abstract)
        call = self._call_auto if self.kind is AxisType.Auto else self._call_explicit
        undo = _undo(flat.objects)
        try:
            after, arrays = call((args, kwargs), flat, specs, change)
            return rebuild(after, arrays, foreign=True)
        except BaseException:  # also KeyboardInterrupt: Variables must not keep the inner types
            undo()
            restore(flat.structure, flat.objects, flat.structure.static_indices())
            raise

    def _call_auto(
        self, tree: ArgTree, flat: Flat, specs: Specs, change: AxisTypeChange
    ) -> tuple[Flat, Sequence[Any]]:
        """Calls the function; returns arguments and result after it, and the arrays in them.

        The arrays have types of the outer mesh: of Variables as before, else as the specs say.
        """
        arrays = RetypedArrays.of(change, flat.leaves)
        after = self._call_retyped(flat, arrays)
        arguments = [x.objects_only() for x in self._arguments(tree, flat, None)]
        caller = f"{self.name}: {self.option}"
        output = split_argument("output", specs.tree, None, after.structure.root, caller)
        locations = locate(after.structure, [*arguments, output])
        names, declared = self._fit(locations, after, change.outer)
        options = {"name": self.name, "option": self.option}
        outer = arrays.leave_with_specs(flat.structure, after, declared, names, **options).leaves
        return after, outer

    def _call_explicit(
        self, tree: ArgTree, flat: Flat, specs: Specs, change: AxisTypeChange
    ) -> tuple[Flat, Sequence[Any]]:
        """Does the same as :meth:`_call_auto`, with arguments of the types that the specs say."""
        locations = locate(flat.structure, self._arguments(tree, flat, specs.tree))
        names, declared = self._fit(locations, flat, change.inner)
        raise_listed(
            ValueError,
            f"{self.name}: no spec says how these arguments are sharded on the axes that become "
            "Explicit:",
            [
                array_line(name, x)
                for name, x, spec in zip(names, flat.leaves, declared, strict=True)
                if spec is None and type_mesh(x) is not None and x.ndim
            ],
            "Declare them in in_sharding; P() replicates.",
        )
        pairs = zip(flat.leaves, declared, strict=True)
        inside = [retype(x, change.inner, spec) for x, spec in pairs]
        arrays = RetypedArrays(change, flat.leaves, inside)
        after = self._call_retyped(flat, arrays)
        outer, untyped = arrays.leave(flat.structure, after)
        for slot, x in untyped.items():  # on Auto axes, types name no sharding
            outer[slot] = retype(x, change.outer)
        return after, outer

    def _call_retyped(self, flat: Flat, arrays: RetypedArrays) -> Flat:
        """Calls the function with arrays of inner types; returns arguments and result after it."""
        return call_retyped(flat, arrays, lambda tree: self.function(*tree[0], **tree[1]))

    def _arguments(self, tree: ArgTree, flat: Flat, prefix: object) -> list[Argument]:
        """Returns the arguments, each with its part of a prefix of specs."""
        args, kwargs = tree
        signature = self.parameters.signature(len(args), tuple(kwargs))
        prefixes = align_specs(prefix, self.parameters, signature, self.option)
        caller = f"{self.name}: {self.option}"
        return split_arguments(flat.structure, tree, prefixes, signature.names, caller)

    def _fit(
        self, locations: list[NamedLocation], flat: Flat, mesh: AbstractMesh
    ) -> tuple[Sequence[str], list[PartitionSpec | None]]:
        """Returns the name of each array, and its spec on a mesh, or None."""
        names = slot_names(len(flat.leaves), locations)
        resolved = resolve(locations, flat.objects, flat.leaves, _as_spec)
        fitted = fit_shardings(self.name, names, flat.leaves, resolved, mesh, explicit=True)
        return names, [_as_spec(x) for x in fitted]


def _as_spec(spec: object) -> Any:
    return spec.spec if isinstance(spec, NamedSharding) else spec


def _undo(objects: Objects) -> Callable[[], None]:
    """Returns a function that gives modules and Variables their present content back."""
    # Nodes of other libraries may keep their content elsewhere.
    nodes = [x for x in objects if _compat.is_node(x) and hasattr(x, "__dict__")]
    attributes = [(vars(x), dict(vars(x))) for x in nodes]
    variables = [x for x in objects if _compat.is_variable(x)]
    # With a copy of the metadata, which the function may change in place.
    values = [(x, _compat.get_value(x), dict(_compat.get_metadata(x))) for x in variables]

    def undo() -> None:
        for present, before in attributes:
            present.clear()
            present.update(before)
        for variable, value, metadata in values:
            _compat.set_value(variable, value)
            _compat.set_metadata(variable, metadata)

    return undo
