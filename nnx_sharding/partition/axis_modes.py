"""``auto_axes`` and ``explicit_axes`` for functions that take and return NNX objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.arguments import Argument, Specs, check_specs, split_argument, split_arguments
from ..core.constrain import mesh_of_types, retype, type_mesh
from ..core.flatten import Flat, flatten
from ..core.problems import array_line
from ..core.rebuild import rebuild
from ..core.resolve import NamedLocation, locate, resolve, slot_names
from ..core.retyping import AxisTypeChange, RetypedArrays, call_retyped
from ..core.signature import ArgTree, Parameters, Roles, align_specs
from ..core.spec_checks import fit_shardings
from ..core.unflatten import restore
from ..errors import NoMeshError, raise_listed
from ..specs.fitting import axes_of
from ..transforms.lifted import unbind


def auto_axes(fun: Any = None, /, *, axes: Any = None, out_sharding: Any = None) -> Any:
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
    return _decorated(AxisType.Auto, fun, "out_sharding", out_sharding, axes)


def explicit_axes(fun: Any = None, /, *, axes: Any = None, in_sharding: Any = None) -> Any:
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
    """
    if fun is None:
        return functools.partial(explicit_axes, axes=axes, in_sharding=in_sharding)
    return _decorated(AxisType.Explicit, fun, "in_sharding", in_sharding, axes)


def _decorated(kind: AxisType, fun: Any, option: str, given: Any, axes: Any) -> Callable[..., Any]:
    """A function that runs with axes of this type, and specs given here or at each call."""
    name = f"{kind.name.lower()}_axes"
    axes = None if axes is None else axes_of(axes)
    is_object = _compat.is_graph_object(fun)
    function, bound = (type(fun).__call__, (fun,)) if is_object else unbind(fun)
    parameters = Parameters(function, Roles(), len(bound))

    def checked(specs: Any) -> Specs:
        result = Specs(specs)
        check_specs(name, (PartitionSpec, NamedSharding), **{option: result})
        return result

    declared = None if given is None else checked(given)

    @functools.wraps(fun, updated=() if is_object else functools.WRAPPER_UPDATES)
    @_compat.api_boundary
    def call(*args: Any, **kwargs: Any) -> Any:
        if declared is None and option not in kwargs:
            raise TypeError(f"{name}: {option} is missing.")
        specs = checked(kwargs.pop(option)) if declared is None else declared
        tree = (*bound, *args), kwargs
        flat = flatten(tree)
        meshes = (x.mesh for x in specs.written if isinstance(x, NamedSharding))
        mesh = mesh_of_types(flat.leaves, next(meshes, None))
        retyping = None if mesh is None else AxisTypeChange.of(mesh, axes, kind, name=name)
        if kind is AxisType.Auto and retyping is None:
            return function(*tree[0], **kwargs)
        if mesh is None:
            raise NoMeshError(f"{name} has no mesh. Call within `with jax.set_mesh(mesh):`.")
        retyping = retyping or AxisTypeChange(*[getattr(mesh, "abstract_mesh", mesh)] * 2)
        undo = _undo(flat.objects)
        try:
            return enter(tree, flat, specs, retyping)
        except BaseException:
            undo()
            restore(flat.structure, flat.objects, flat.structure.static_indices())
            raise

    def enter(tree: ArgTree, flat: Flat, specs: Specs, retyping: AxisTypeChange) -> Any:
        """Calls the function with arrays of other types."""
        signature = parameters.signature(len(tree[0]), tuple(tree[1]))
        caller = f"{name}: {option}"

        def targets(prefix: Any) -> list[Argument]:
            prefixes = align_specs(prefix, parameters, signature, option)
            return split_arguments(flat.structure, tree, prefixes, signature.names, caller)

        def fit(locations: list[NamedLocation], flat: Flat, mesh: Any) -> tuple[Any, Any]:
            """The name of each array, and its spec or None."""
            names = slot_names(len(flat.leaves), locations)
            resolved = resolve(locations, flat.objects, flat.leaves, _as_spec)
            found = fit_shardings(name, names, flat.leaves, resolved, mesh, explicit=True)
            return names, [_as_spec(each) for each in found]

        if kind is AxisType.Auto:
            arrays = RetypedArrays.of(retyping, flat.leaves)
        else:
            names, declared = fit(locate(flat.structure, targets(specs.tree)), flat, retyping.inner)
            undeclared = [
                array_line(path, x)
                for path, x, spec in zip(names, flat.leaves, declared, strict=True)
                if spec is None and type_mesh(x) is not None and x.ndim
            ]
            raise_listed(
                ValueError,
                f"{name}: no spec says how these arguments are sharded on the axes that become "
                "Explicit:",
                undeclared,
                "Declare them in in_sharding; P() replicates.",
            )
            pairs = zip(flat.leaves, declared, strict=True)
            inside = [retype(x, retyping.inner, spec) for x, spec in pairs]
            arrays = RetypedArrays(retyping, flat.leaves, inside)
        after = call_retyped(flat, arrays, lambda tree: function(*tree[0], **tree[1]))
        if kind is AxisType.Auto:
            arguments = [x.objects_only() for x in targets(None)]
            output = split_argument("output", specs.tree, None, after.structure.root, caller)
            names, declared = fit(
                locate(after.structure, [*arguments, output]), after, retyping.outer
            )
            details = {"name": name, "option": option}
            left = arrays.leave_as(flat.structure, after, declared, names, **details).leaves
        else:
            left, untyped = arrays.leave(flat.structure, after)
            for slot, x in untyped.items():
                left[slot] = retype(x, retyping.outer)
        return rebuild(after, left, foreign=True)

    return call


def _as_spec(spec: Any) -> Any:
    return spec.spec if isinstance(spec, NamedSharding) else spec


def _undo(objects: Sequence[Any]) -> Callable[[], None]:
    """A function that gives modules and Variables their present content back."""
    nodes = [x for x in objects if _compat.is_node(x) and hasattr(x, "__dict__")]
    attributes = [(vars(x), dict(vars(x))) for x in nodes]
    variables = [x for x in objects if _compat.is_variable(x)]
    values = [(x, _compat.get_value(x), dict(_compat.get_metadata(x))) for x in variables]

    def undo() -> None:
        for present, before in attributes:
            present.clear()
            present.update(before)
        for variable, value, metadata in values:
            _compat.set_value(variable, value)
            _compat.set_metadata(variable, metadata)

    return undo
