"""``auto_axes`` and ``explicit_axes`` for functions that take and return NNX objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.problems import array_line
from ..core.resharding import called, rebuilt
from ..core.resolve import NamedLocation, locate, resolve, slot_names
from ..core.retyping import Retyped, Retyping, mesh_of_types, retyped, type_mesh
from ..core.signature import ArgTree, Parameters, Roles, align_specs
from ..core.targets import Specs, Target, argument_targets, check_specs, target
from ..core.unflatten import restore
from ..errors import NoMeshError, raise_listed
from ..specs.fitting import axes_of
from ..transforms.lifted import unbind
from .constrain import fitted


def auto_axes(fun: Any = None, /, *, axes: Any = None, out_sharding: Any = None) -> Any:
    """Runs a function with mesh axes Auto that are Explicit outside it.

    ``jax.sharding.auto_axes``, for functions and methods whose arguments and results may hold
    modules. The compiler then chooses how values are sharded in the function, for example where JAX
    cannot type an operation. The Variables of modules among the arguments, by position or keyword,
    are converted like arrays. After the call they have their previous types, with new values where
    the function changed them; an exception leaves all of them unchanged. What the function captures
    is not converted: pass it as an argument.

    Args:
      fun: the function. Without it, the result is a decorator.
      axes: a name or a tuple of names of mesh axes; None for all. If none of them is Explicit, as
        on a mesh with Auto axes, the function is just called.
      out_sharding: how results are sharded outside: a ``PartitionSpec``, a ``NamedSharding``, a
        :class:`~nnx_sharding.StateSharding`, or a prefix of the result with these as leaves. It has
        to cover all but scalars, which are replicated, and the Variables of arguments. It may also
        be a keyword argument of each call.

    Returns:
      The function with these axes Auto in it.

    Raises:
      TypeError: something is not a spec; at a call, ``out_sharding`` is missing.
      ValueError: at a call, the mesh has no such axis, specs do not fit the results, or there is
        none for a result.

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
    return _Lifted("auto_axes", "out_sharding", out_sharding, axes).of(fun, _on_auto_axes)


def explicit_axes(fun: Any = None, /, *, axes: Any = None, in_sharding: Any = None) -> Any:
    """Runs a function with mesh axes Explicit that are Auto outside it.

    ``jax.sharding.explicit_axes``, for functions and methods whose arguments and results may hold
    modules: JAX then knows in the function how each value is sharded over these axes, and refuses
    to guess. Variables of modules among the arguments, by position or keyword, are converted like
    arrays. After the call they have their previous types, with new values where the function
    changed them; an exception leaves all of them unchanged.

    Args:
      fun: the function. Without it, the result is a decorator.
      axes: a name or a tuple of names of mesh axes; None for all.
      in_sharding: how arguments are sharded in the function, in the form of ``in_shardings`` of
        :func:`~nnx_sharding.jit`: one spec for all, a tuple with one for each positional
        parameter, or a mapping from parameter names. It has to cover all but scalars, which are
        replicated. It may also be a keyword argument of each call.

    Returns:
      The function with these axes Explicit in it. Its results have the axis types of the outer
      mesh.

    Raises:
      TypeError: something is not a spec; at a call, ``in_sharding`` is missing.
      ValueError: at a call, the mesh has no such axis, specs do not fit the arguments, or there is
        none for an argument.
      NoMeshError: at a call, no mesh is given or in context.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import explicit_axes, make_mesh
      >>> @explicit_axes(in_sharding=(P(None, "model"), P("data")))
      ... def call(kernel, x):
      ...     print(jax.typeof(x @ kernel[...]))
      ...     return x @ kernel[...]
      >>> auto = make_mesh({"data": 2, "model": 4}, axis_types=jax.sharding.AxisType.Auto)
      >>> with jax.set_mesh(auto):
      ...     print(jax.typeof(call(nnx.Param(jnp.ones((16, 8))), jnp.ones((4, 16)))))
      float32[4@data,8@model]
      float32[4,8]
    """
    if fun is None:
        return functools.partial(explicit_axes, axes=axes, in_sharding=in_sharding)
    return _Lifted("explicit_axes", "in_sharding", in_sharding, axes).of(fun, _on_explicit_axes)


class _Lifted:
    """What a decorator was given.

    Attributes:
      name: its name.
      axes: the axes.
    """

    def __init__(self, name: str, option: str, specs: Any, axes: Any):
        self.name, self._option = name, option
        self.axes = None if axes is None else axes_of(axes)
        self._specs = None if specs is None else self._checked(specs)

    def _checked(self, specs: Any) -> Specs:
        checked = Specs(specs)
        check_specs(self.name, (PartitionSpec, NamedSharding), **{self._option: checked})
        return checked

    def of(self, fun: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls are run by ``run``."""
        is_object = _compat.is_graph_object(fun)
        unbound, bound = (type(fun).__call__, (fun,)) if is_object else unbind(fun)
        parameters = Parameters(unbound, Roles(), len(bound))

        @functools.wraps(fun, updated=() if is_object else functools.WRAPPER_UPDATES)
        @_compat.api_boundary
        def call(*args: Any, **kwargs: Any) -> Any:
            specs = self._specs
            if specs is None:
                if self._option not in kwargs:
                    raise TypeError(f"{self.name}: {self._option} is missing.")
                specs = self._checked(kwargs.pop(self._option))
            tree = (*bound, *args), kwargs
            flat = flatten(tree)
            saved = _Saved(flat.objects)
            try:
                return run(self, unbound, parameters, specs, tree, flat)
            except BaseException:
                saved.restore()
                restore(flat.structure, flat.objects)
                raise

        return call

    def mesh(self, flat: Flat, specs: Specs) -> Any:
        """The mesh in context, of the specs, or of the arguments, or None."""
        declared = (x.mesh for x in specs.written if isinstance(x, NamedSharding))
        return mesh_of_types(flat.leaves, next(declared, None))

    def targets(
        self, parameters: Parameters, specs: Any, tree: ArgTree, flat: Flat
    ) -> list[Target]:
        """The arguments with their specs."""
        signature = parameters.signature(len(tree[0]), tuple(tree[1]))
        prefixes = align_specs(specs, parameters, signature, self._option)
        caller = f"{self.name}: {self._option}"
        return argument_targets(flat.structure, tree, prefixes, signature.names, caller)

    def fit(
        self, locations: list[NamedLocation], flat: Flat, mesh: Any
    ) -> tuple[list[str], list[PartitionSpec | None]]:
        """The name of each array, and its spec or None."""
        names = slot_names(len(flat.leaves), locations)
        resolved = resolve(locations, flat.objects, flat.leaves, _as_spec)
        assigned = fitted(self.name, names, flat.leaves, resolved, mesh)
        return names, [_as_spec(each.sharding) for each in assigned]


class _Saved:
    """The content of modules and Variables, to be restored after a call that failed."""

    def __init__(self, objects: Sequence[Any]):
        nodes = [x for x in objects if _compat.is_node(x) and hasattr(x, "__dict__")]
        variables = [x for x in objects if _compat.is_variable(x)]
        self._attributes = [(x, dict(vars(x))) for x in nodes]
        self._values = [(x, _compat.get_value(x), dict(_compat.get_metadata(x))) for x in variables]

    def restore(self) -> None:
        """Undoes what a call changed."""
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for variable, value, metadata in self._values:
            _compat.set_value(variable, value)
            _compat.set_metadata(variable, metadata)


def _as_spec(spec: Any) -> Any:
    return spec.spec if isinstance(spec, NamedSharding) else spec


def _on_auto_axes(
    lifted: _Lifted,
    fun: Callable[..., Any],
    parameters: Parameters,
    specs: Specs,
    tree: ArgTree,
    flat: Flat,
) -> Any:
    mesh = lifted.mesh(flat, specs)
    if mesh is None:
        return fun(*tree[0], **tree[1])
    retyping = Retyping.of(mesh, lifted.axes, AxisType.Auto, name=lifted.name)
    if retyping is None:
        return fun(*tree[0], **tree[1])
    arrays = Retyped.of(retyping, flat.leaves)
    after = called(flat, arrays, lambda tree: fun(*tree[0], **tree[1]))
    arguments = [x.objects_only() for x in lifted.targets(parameters, None, tree, flat)]
    caller = f"{lifted.name}: out_sharding"
    output = target("output", specs.tree, None, after.structure.root, caller)
    locations = locate(after.structure, [*arguments, output])
    names, declared = lifted.fit(locations, after, retyping.outer)
    details = {"name": lifted.name, "option": "out_sharding"}
    left = arrays.leave_as(flat.structure, after, declared, names, **details)
    return rebuilt(after, left.leaves, foreign=True)


def _on_explicit_axes(
    lifted: _Lifted,
    fun: Callable[..., Any],
    parameters: Parameters,
    specs: Specs,
    tree: ArgTree,
    flat: Flat,
) -> Any:
    mesh = lifted.mesh(flat, specs)
    if mesh is None:
        raise NoMeshError("explicit_axes has no mesh. Call within `with jax.set_mesh(mesh):`.")
    retyping = Retyping.of(mesh, lifted.axes, AxisType.Explicit, name=lifted.name)
    retyping = retyping or Retyping(*[getattr(mesh, "abstract_mesh", mesh)] * 2)
    locations = locate(flat.structure, lifted.targets(parameters, specs.tree, tree, flat))
    names, declared = lifted.fit(locations, flat, retyping.inner)
    undeclared = [
        array_line(name, x)
        for name, x, spec in zip(names, flat.leaves, declared, strict=True)
        if spec is None and type_mesh(x) is not None and x.ndim
    ]
    head = f"{lifted.name}: no spec says how these arguments are sharded on the axes that become"
    remedy = "Declare them in in_sharding; P() replicates."
    raise_listed(ValueError, f"{head} Explicit:", undeclared, remedy)
    inside = [
        retyped(x, retyping.inner, spec) for x, spec in zip(flat.leaves, declared, strict=True)
    ]
    arrays = Retyped(retyping, flat.leaves, inside)
    after = called(flat, arrays, lambda tree: fun(*tree[0], **tree[1]))
    left, untyped = arrays.leave(flat.structure, after)
    for slot, x in untyped.items():
        left[slot] = retyped(x, retyping.outer)
    return rebuilt(after, left, foreign=True)
