"""``shard_map`` for functions and methods that take and return NNX objects.

`jax.shard_map` maps the *pure function*. The pure function takes all arrays of the arguments, and
returns groups of arrays of one spec each, and an *outcome* without arrays. Every array has a spec,
which is a `PartitionSpec`; Variables hold shards inside the function. The *plan*
(``core/plan.py``) is what is known of a call before the trace. At top level the mapped function is
compiled by `jax.jit`, because JAX would run it operation by operation. Within a trace it becomes
part of the trace. The mesh and axis types in a trace may differ from those that the user gave,
because modules may run with other axis types (:meth:`_ShardMap._inline`).

A map is *manual* over its ``axis_names`` (all axes of the mesh if there are none). Over other axes,
the function sees whole arrays, and the axes keep their types: on Explicit axes, the type of an
array says how it is sharded; on Auto axes, the compiler chooses it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Required, Unpack, overload

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..activations.tracing import sharded_activations
from ..core.call_context import Caller
from ..core.constrain import mesh_in_trace, type_as
from ..core.declared import is_committed
from ..core.known_faults import refuse_gradients_of_varying
from ..core.plan import Plan
from ..core.prefixes import Specs, check_specs
from ..core.problems import array_line, check_mesh, check_options
from ..core.signature import Parameters, Signature, SortedCall
from ..core.static_arguments import with_static_values
from ..core.transform import Dependencies, Program, Sharded
from ..core.unflatten import Unflattened
from ..errors import raise_if_any
from ..specs.activation_sharding import activations
from ..specs.fitting import (
    ON_INDIVISIBLE,
    OnIndivisible,
    axes_of_type,
    explicit_part,
    keep_axes,
    show,
    spec_axes,
)
from ..specs.types import AxisName
from .by_content import compiled_by_content
from .jit import SharedOptions
from .lifted import Lifted, P, R, lift


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ShardMap(Sharded):
    """The options of ``shard_map``, and what they decide about specs, checks and the program.

    The core calls `in_context` before it makes a plan, and goes on with the copy that the method
    returns. In this copy, two fields of `Sharded` are set:

        mesh      the user's mesh, or the concrete mesh in context; None in a trace if the user gave
                  none
        context   the mesh that applies, which may be abstract; None if there is none

    The user's specs are ``in_specs`` and ``out_specs``; their ``tree`` is the prefix as given.
    """

    name: str = "shard_map"
    in_name: str = "in_specs"
    axis_names: frozenset[AxisName]  # the axes over which the function is manual; empty for all
    check_vma: bool  # whether to check what the specs claim about replication
    compiled: bool  # whether a call at top level is compiled

    passes_shardings: ClassVar[bool] = False
    # Results are parts of arrays. A spec joins them, and need not divide their shapes.
    divides_outputs: ClassVar[bool] = False

    @property
    def usable_axes(self) -> frozenset[Any]:
        """The axes over which the function is manual."""
        return self.axis_names or frozenset(self.context.axis_names if self.context else ())

    def sort_call(
        self,
        parameters: Parameters,
        signature: Signature,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> SortedCall:
        """Sorts the arguments of a call into traced and static ones.

        As in ``jax.shard_map``, a Python value whose spec is None is static.

        Args:
          signature: how the call passes its arguments: by position, by name, static or not.
        """
        if not self.in_specs.may_hold_none:
            return super().sort_call(parameters, signature, args, kwargs)
        # A number with the spec None becomes a static argument in the signature. In a pytree it
        # becomes a `Static` value there, which is compared like a static argument.
        specs, option = self.in_specs.tree, self.in_name
        signature, args, kwargs = with_static_values(
            specs, option, parameters, signature, args, kwargs
        )
        return super().sort_call(parameters, signature, args, kwargs)

    @property
    def reads_context(self) -> bool:
        """Whether a plan depends on the mesh in context; all specs need a mesh."""
        return self.mesh is None

    @property
    def infers_specs(self) -> bool:
        """Whether the user gave no ``in_specs``, so that the types of the arrays say them."""
        return self.in_specs.tree is None

    def dependencies(self, leaves: Sequence[object]) -> Dependencies:
        dependencies = super().dependencies(leaves)
        mesh = _compat.context_mesh() if self.mesh is None else self.mesh
        # A missing mesh raises an error in `Sharded.in_context` or in JAX.
        if not self.infers_specs or mesh is None:
            return dependencies
        specs = _specs_in_types(leaves, mesh, self.axis_names)
        return dependencies._replace(specs=tuple(specs))

    def in_context(self) -> _ShardMap:
        """Returns this transform with the mesh that applies now, and the option for its arrays.

        Raises:
          NoMeshError: a spec needs a mesh, and there is none.
          ValueError: ``on_committed`` needs a function that is manual over all axes.
        """
        transform = super().in_context()
        if transform.context is None:  # the missing mesh is an error elsewhere
            return transform
        # If some axes stay automatic, arrays may be sharded over these axes. The specs do not say
        # how, so arrays keep the sharding that they have.
        automatic = [
            axis for axis in transform.context.axis_names if axis not in transform.usable_axes
        ]
        if not automatic:
            return transform
        if self.on_committed != "reshard":
            raise ValueError(
                f"shard_map: on_committed={self.on_committed!r} needs a function that is manual "
                f"over all axes, but axis_names={set(self.axis_names)!r} leaves out "
                f"{', '.join(map(repr, automatic))}, over which arrays keep the sharding that they "
                "have. Leave one of the two options out."
            )
        return dataclasses.replace(transform, on_committed="leave")

    def check_outputs(
        self,
        fun_name: str,
        names: Sequence[str],
        leaves: Sequence[object],
        specs: Sequence[PartitionSpec],
    ) -> None:
        """Raises a ``ValueError`` for results that vary along mesh axes that their specs omit.

        JAX would raise one, too, but without the names of the results.

        Args:
          names: the expression for each result, such as ``output[0].kernel``.
          leaves: the arrays, as tracers whose types say along which axes they vary.
        """
        if not self.check_vma or self.context is None:
            return
        mesh = self.context  # within a trace, the mesh of the trace
        # Manual axes of that mesh belong to an outer `shard_map`, which checks them itself.
        own_axes = frozenset(mesh.axis_names) - axes_of_type(mesh, AxisType.Manual)
        unproven: dict[AxisName, None] = {}  # the axes of all lines, each once, in order
        lines = []
        for name, leaf, spec in zip(names, leaves, specs, strict=True):
            if _compat.is_ref(leaf):
                continue  # a `jax.Ref` is no result: the function updates it in place
            omitted = own_axes.difference(spec_axes(spec))
            if axes := sorted(_compat.varying_axes(leaf) & omitted, key=str):
                along = ", ".join(map(repr, axes))
                lines.append(f"{array_line(name, leaf)}, {spec!r}: varies along {along}")
                unproven |= dict.fromkeys(axes)
        # The message shows the axes as the user writes them in `jax.lax.pmean`: one name, or a
        # tuple of several.
        reduced = repr(next(iter(unproven)) if len(unproven) == 1 else (*unproven,))
        raise_if_any(
            ValueError,
            f"{self.name}: JAX cannot prove that these results of {fun_name} are replicated along "
            "the mesh axes that their specs leave out:",
            lines,
            f"Reduce them in the function, as in jax.lax.pmean(x, {reduced}) or psum, pmax, "
            "all_gather; or name the axis in the spec. If they are equal for reasons that JAX "
            "cannot see, pass check_vma=False.",
            anchor="not-proven-replicated",
        )

    def spec_of(self, spec: object) -> Any:
        if spec is None:
            return PartitionSpec()
        return spec.spec if isinstance(spec, NamedSharding) else spec

    def input_specs(self, specs: list[object], leaves: Sequence[object]) -> list[Any]:
        """Returns a spec for each array.

        Args:
          specs: the user's specs; None for an array without one, which is replicated.
          leaves: the arrays. If the user gave no ``in_specs`` at all, their types say the specs.
        """
        if self.infers_specs and self.context is not None:  # no mesh is an error elsewhere
            return list(_specs_in_types(leaves, self.context, self.axis_names))
        return [PartitionSpec() if spec is None else spec for spec in specs]

    def sharding_of(self, spec: Any) -> jax.sharding.Sharding | None:
        return NamedSharding(self.context, spec) if isinstance(self.context, Mesh) else None

    def tracing(
        self, plan: Plan, caller: Caller, unflattened: Unflattened, leaves: Sequence[object]
    ) -> AbstractContextManager[Callable[..., Any]]:
        return sharded_activations(plan, caller, unflattened, leaves)

    def make_program(self, plan: Plan, function: Callable[..., object]) -> Program:
        """Maps the pure function over shards, and wraps that in ``jax.jit`` for top level.

        Calls at top level go through three functions, each around the one before::

            mapped     `jax.shard_map` of the pure function
            typed      the same for arrays that have no sharding in their types yet
            jitted     compiled

        Args:
          plan: has a spec for each array, and one for each group of results.

        Returns:
          The functions that calls run; see `Program`.
        """
        function = self._with_typed_residuals(function)
        # `map_over` takes ``mesh`` and ``axis_names``, and returns the mapped function.
        map_over = functools.partial(
            jax.shard_map,
            function,
            in_specs=tuple(plan.specs),
            out_specs=(*plan.out_specs, PartitionSpec()),  # the last one for the outcome
            check_vma=self.check_vma,
        )
        # In a trace, the mesh is None if the user gave none. Then JAX takes the one in context,
        # which may have Manual axes.
        mapped = map_over(mesh=self.mesh, axis_names=self.axis_names)
        typed = mapped
        mesh = self.context  # the user's, or the one in context when the plan was made
        options: dict[str, Any] = {}  # for `jax.jit`
        if isinstance(mesh, Mesh):
            inputs = tuple(NamedSharding(mesh, spec) for spec in plan.specs)
            typed = _with_types(mapped, inputs)
            options = self._jit_shardings(plan, mesh, inputs)
        jitted = jax.jit(typed, **options)
        # `typed` itself runs operation by operation outside of a trace.
        top_level: Callable[..., Any] = typed
        traced_each_time: Callable[..., Any] = typed  # for functions that capture arrays
        if self.compiled:  # the user's option ``jit``
            top_level = jitted
            traced_each_time = compiled_by_content(typed, **options)
        if isinstance(mesh, AbstractMesh):
            # An abstract mesh has no devices. They have to be those of the arrays; otherwise an
            # error says so.
            top_level = self.needing_devices(mesh, top_level, from_arrays=True)
            traced_each_time = self.needing_devices(mesh, traced_each_time, from_arrays=True)
        return Program(
            staged=jitted,
            top_level=top_level,
            inline=self._inline(map_over),
            traced_each_time=traced_each_time,
        )

    def _jit_shardings(
        self, plan: Plan, mesh: Mesh, inputs: Sequence[NamedSharding]
    ) -> dict[str, Any]:
        """Returns the shardings for ``jax.jit`` of the mapped function, as its keyword arguments.

        There are none if the function is manual over some axes only: the specs do not say how other
        axes shard the arrays.

        Args:
          plan: has a spec for each group of results.
        """
        if self.usable_axes != frozenset(mesh.axis_names):
            return {}
        # `out_shardings` moves nothing. It makes the results have a NamedSharding, as those of
        # `jax.shard_map` do; a compiled program may return another class without them.
        outputs = [NamedSharding(mesh, spec) for spec in plan.out_specs]
        options: dict[str, Any] = {"out_shardings": (*outputs, None)}  # None for the outcome
        # Over Auto axes, `jax.shard_map` reshards its inputs itself.
        if AxisType.Auto not in mesh.axis_types:
            options["in_shardings"] = inputs
        return options

    def _with_typed_residuals(self, function: Callable[..., object]) -> Callable[..., object]:
        """Returns the function in a form that JAX can differentiate though its axis types change.

        In a map over some axes, other axes may be Explicit. A module under a strategy runs with
        these axes as Auto axes, and saves arrays of Auto axes for its backward pass.
        `jax.shard_map` gives the saved arrays the Explicit axes of the map, so that the backward
        pass of the module, on Auto axes again, refuses them.

        `jax.checkpoint` reads what it has saved with its own types. With `everything_saveable` it
        saves what the function computes, so that no sine or matrix product is computed again. The
        backward pass takes some more additions and products of elements, and what such a module
        saves is gathered over its axes.
        """
        # No ``axis_names``: all axes are manual, so none is Explicit.
        if self.context is None or not self.axis_names:
            return function
        explicit = axes_of_type(self.context, AxisType.Explicit) - self.axis_names
        if not explicit:
            return function

        def run(*leaves: object) -> Any:
            # The function is traced first, because only its operations say whether a module makes
            # the axes Auto.
            program, results = jax.make_jaxpr(function, return_shape=True)(*leaves)
            call = jaxpr_as_fun(program)
            if _makes_auto(program, explicit):  # other programs need not pay for the checkpoint
                everything = jax.checkpoint_policies.everything_saveable
                # Hardly anything is computed twice, so the compiler may merge equal operations:
                # `prevent_cse=False`.
                call = jax.checkpoint(call, policy=everything, prevent_cse=False)
            return jax.tree.unflatten(jax.tree.structure(results), call(*leaves))

        return run

    def _inline(self, map_over: Callable[..., Callable[..., object]]) -> Callable[..., Any]:
        """Returns the mapped function for calls in a trace, whose mesh may have other axis types.

        The user's function may call a module under a strategy, and the module may call the map.
        Then all axes are Auto that are Explicit in the mesh that the user gave for the map, and JAX
        refuses a map over a mesh of other types. Without the user's mesh, JAX takes that of the
        trace.

        Args:
          map_over: ``jax.shard_map`` of the pure function, without a mesh and axis names.
        """

        def inline(*leaves: object) -> Any:
            if not self.check_vma:
                # Within an outer map that does check, JAX would give wrong gradients, so computing
                # gradients raises an error.
                leaves = refuse_gradients_of_varying(leaves, name=self.name)
            names = self.axis_names
            if names:  # an empty set means all axes
                # Under `vmap` with `spmd_axis_name`, JAX wants that axis to be manual as well.
                names |= _compat.spmd_axes()
            return map_over(mesh=self._mesh_for_trace(), axis_names=names)(*leaves)

        return inline

    def _mesh_for_trace(self) -> Mesh | AbstractMesh | None:
        """Returns the user's mesh; with Auto axes, if all of its axes are Auto in the trace.

        None means that the user gave none.
        """
        mesh = self.mesh
        if mesh is None:
            return None
        # The mesh of the trace has the same axes, with the axis types of the trace.
        mesh_of_trace = mesh_in_trace(mesh)
        if frozenset(mesh_of_trace.axis_types) != {AxisType.Auto}:
            return mesh
        # The mesh of a trace is abstract. The devices of the user's mesh are kept, because arrays
        # of the trace may be on none.
        if isinstance(mesh, Mesh):
            return Mesh(mesh.devices, mesh.axis_names, axis_types=mesh_of_trace.axis_types)
        return mesh_of_trace


# The types of specs that `shard_map` takes.
_SPEC_TYPES = (PartitionSpec, NamedSharding)


def _with_types(
    mapped: Callable[..., object], shardings: Sequence[NamedSharding]
) -> Callable[..., Any]:
    """Returns the mapped function for arrays whose types do not say their shardings.

    On Explicit axes, `jax.shard_map` raises an error if the type of an argument, such as
    ``float32[8@data]``, differs from its spec. The type of an array that the user did not shard is
    only ``float32[8]``.

    Args:
      mapped: the result of ``jax.shard_map``, a function of all arrays.
    """

    def with_type(leaf: object, sharding: NamedSharding) -> Any:
        # The user has placed a committed array. If its type differs from the spec, JAX raises an
        # error, so nothing is moved silently.
        if _compat.is_ref(leaf) or is_committed(leaf):
            return leaf
        explicit = explicit_part(sharding)
        is_unsharded = not any(spec_axes(_type_spec(leaf)))
        if explicit is not None and is_unsharded:
            return jax.sharding.reshard(leaf, explicit)
        # An array with axes in its type keeps them, so that JAX compares them with the spec. It
        # only comes to this mesh if it is on one with other axis types.
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        return type_as(leaf, replicated if explicit is None else explicit)

    @functools.wraps(mapped)
    def typed(*leaves: object) -> Any:
        return mapped(*map(with_type, leaves, shardings))

    return typed


def _specs_in_types(
    leaves: Sequence[object], mesh: Mesh | AbstractMesh, axis_names: Set[AxisName]
) -> list[PartitionSpec]:
    """Reads the spec of each array from its type, for a call without ``in_specs``.

    The type of an array says how Explicit axes shard it: ``float32[8@data,4]`` has the spec
    ``P("data", None)``. The type says nothing about other axes.

    Args:
      axis_names: the axes over which the function is manual; empty for all. The specs have no other
        axes.

    Raises:
      TypeError: some of the manual axes are not Explicit.
    """
    manual_axes = axis_names or frozenset(mesh.axis_names)
    explicit_axes = axes_of_type(mesh, AxisType.Explicit)
    not_explicit = [axis for axis in manual_axes if axis not in explicit_axes]
    if not_explicit:
        raise TypeError(
            "shard_map without in_specs infers them from the types of the arguments, which "
            f"needs mesh axes of type Explicit; {', '.join(map(str, not_explicit))} of {mesh} are "
            "not. Give in_specs, or make the mesh with AxisType.Explicit."
        )
    return [keep_axes(_type_spec(leaf), manual_axes) for leaf in leaves]


def _type_spec(leaf: object) -> PartitionSpec:
    """Returns the spec in the type of an array; ``P()`` for anything else."""
    sharding = getattr(jax.typeof(leaf), "sharding", None) if _compat.is_array_like(leaf) else None
    return PartitionSpec() if sharding is None else sharding.spec


class _Mapped(Lifted[P, R]):
    """The class of what ``shard_map`` returns: a :class:`Lifted` whose calls are in Python.

    A map traces again if something that the function can reach has changed, such as a global. The
    call in C, which ``jit`` has, does not look for such changes.
    """

    __call__ = Lifted._flattened


class _Options(SharedOptions, total=False):
    """The options of ``shard_map`` as keyword arguments, for type checkers."""

    out_specs: Required[Any]
    in_specs: Any
    axis_names: Set[AxisName]
    check_vma: bool
    jit: bool
    on_committed: Literal["error", "reshard", "move"]


@overload
def shard_map(f: Callable[P, R], **options: Unpack[_Options]) -> Lifted[P, R]: ...


@overload
def shard_map(**options: Unpack[_Options]) -> Callable[[Callable[P, R]], Lifted[P, R]]: ...


@_compat.api_boundary
def shard_map(
    f: Callable[..., object] | None = None,
    *,
    out_specs: object,
    in_specs: object = None,
    mesh: Mesh | AbstractMesh | None = None,
    activation_shardings: object = None,
    axis_names: Set[AxisName] = frozenset(),
    check_vma: bool = True,
    jit: bool = True,
    on_committed: Literal["error", "reshard", "move"] = "reshard",
    on_indivisible: OnIndivisible = "error",
    strict: bool = False,
    max_traces: int | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Maps a function over shards of its arguments, which may be NNX modules.

    Inside, each Variable holds one device's shard, and collectives such as ``jax.lax.psum``
    communicate with the other devices. Modules as arguments and results work as with
    :func:`~nnx_sharding.jit`. Called at top level, the function is compiled once, not run
    operation by operation.

    Args:
      f: the function.
      out_specs: how the shards of the result are concatenated: a pytree prefix of
        ``PartitionSpec`` and :class:`~nnx_sharding.StateSharding`. None is ``P()``.
      in_specs: how the arguments are sharded, in the form of ``in_shardings`` of
        :func:`~nnx_sharding.jit`. Updated Variables leave with the same specs. A spec None makes
        a Python value static: an argument, or a part of one if None is in a pytree. An array
        or module with spec None is replicated, and so is an argument that ``in_specs`` does not
        mention. Without ``in_specs`` the specs are those in the types of the arrays, on meshes
        whose axes are Explicit.
      mesh: the mesh; without it, the one in context. May be an ``AbstractMesh``.
      activation_shardings: as in :func:`~nnx_sharding.jit`, over the axes that stay automatic.
      axis_names: the axes over which ``f`` is manual; empty means all.
      check_vma: check what the specs claim about replication.
      jit: False runs operation by operation at top level, to debug with prints and breakpoints.
      on_committed: what to do with Variables and arrays of modules that are committed to a
        sharding other than ``in_specs`` declares: ``"reshard"`` them on their devices, as JAX does;
        ``"move"`` to do so for all arrays, also from other devices; or ``"error"``. The last two
        need a function that is manual over all axes: over others, which the specs do not name,
        arrays keep the sharding that they have.
      on_indivisible: as in :func:`~nnx_sharding.jit`, for arguments. The function then sees the
        full dimension instead of a shard.
      strict: make every warning of this library an error.
      max_traces: how often the function may be traced through this wrapper; None for no limit.
      graph: False treats modules as pytrees, without shared references; None uses Flax's flag.
      graph_updates: False updates only values and metadata of Variables; None uses Flax's flag.

    Returns:
      A :class:`~nnx_sharding.Lifted`, with the same staging methods as for ``jit``.

    Raises:
      TypeError: ``f`` is not callable, or the mesh or a spec has another type; at a call, no
        ``in_specs`` on a mesh that is not Explicit.
      ValueError: an option has a value other than those above; at a call, no mesh is in context,
        the specs do not fit the mesh or the arguments, ``axis_names`` leaves axes of the mesh out
        and ``on_committed`` is not ``"reshard"``, or JAX cannot prove that a result is as
        replicated as its spec declares.
      StrictError: at a call, with ``strict``.
      RetraceError: at a call that would have to trace once more than ``max_traces`` allows.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding, shard_map
      >>> mesh = jax.make_mesh((jax.device_count(),), ("model",))
      >>> spec = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P("model", None)})
      >>> @shard_map(mesh=mesh, in_specs=(spec, P()), out_specs=P())
      ... def mlp(model, x):
      ...     return jax.lax.psum(model.down(jax.nn.relu(model.up(x))), "model")
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Dict(
      ...     up=nnx.Linear(2, 16, use_bias=False, rngs=rngs),
      ...     down=nnx.Linear(16, 2, use_bias=False, rngs=rngs),
      ... )
      >>> mlp(model, jnp.ones((4, 2))).shape
      (4, 2)
    """
    # `frozenset("model")` would be the set of its letters.
    if isinstance(axis_names, str):
        raise TypeError("axis_names is a set of names, such as {'model'}, not a string.")
    # Raises if an option has another value than these.
    check_options(
        "shard_map",
        on_committed=(on_committed, ("error", "reshard", "move")),
        on_indivisible=(on_indivisible, ON_INDIVISIBLE),
    )
    check_mesh("shard_map", mesh)  # raises for something else than a mesh or None
    transform = _ShardMap(
        in_specs=Specs(in_specs),
        out_specs=Specs(out_specs),
        mesh=mesh,
        axis_names=frozenset(axis_names),
        check_vma=check_vma,
        compiled=jit,
        on_committed=on_committed,
        on_indivisible=on_indivisible,
        strict=strict,
        activation_shardings=activations(activation_shardings),
    )
    # Raises for a leaf that is not a spec.
    check_specs(
        "shard_map", _SPEC_TYPES, in_specs=transform.in_specs, out_specs=transform.out_specs
    )

    def decorate(f: Callable[..., object]) -> Any:
        if not callable(f):
            raise TypeError(
                f"shard_map: expected a callable, got {show(f)} of type {type(f).__name__}."
            )
        return lift(_Mapped, f, transform, graph, graph_updates, max_traces=max_traces)

    return decorate if f is None else decorate(f)


def _makes_auto(program: Any, explicit: frozenset[AxisName]) -> bool:
    """Whether a traced program computes arrays for which some of these axes are Auto.

    `jax.shard_map` cannot save such an array for a backward pass: see `_with_typed_residuals`.

    Args:
      program: a jaxpr. The jaxprs in its equations, such as the body of a loop, are searched, too.
    """
    values = (x for equation in _compat.equations_in(program) for x in equation.outvars)
    # The sharding in the type of a value may have no mesh.
    meshes = (getattr(x.aval.sharding, "mesh", None) for x in values)
    return any(mesh and explicit & axes_of_type(mesh, AxisType.Auto) for mesh in meshes)
