"""``jit`` for functions and methods that take and return NNX objects.

:func:`jit` checks the options and makes a :class:`~.lifted.Lifted` with a :class:`Jit`, which says
what `jax.jit` gets: the pure function of a plan, with a sharding for each array of the arguments
and for each group of outputs. Calls, stages and caches are those of `Lifted`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, TypedDict, Unpack, overload

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from .. import _compat
from ..activations.tracing import sharded_activations
from ..core.call_context import Caller
from ..core.constrain import in_context
from ..core.declared import as_declared
from ..core.plan import Plan
from ..core.prefixes import Specs, check_specs
from ..core.problems import check_mesh, check_options
from ..core.signature import Roles
from ..core.transform import Program, Sharded
from ..core.unflatten import Unflattened
from ..specs.activation_sharding import activations
from ..specs.fitting import ON_INDIVISIBLE, OnIndivisible, axes_of_type
from .lifted import Lifted, P, R, lift


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jit(Sharded):
    """The options of ``jit``: their defaults, and the part that goes to ``jax.jit``."""

    # The trace does not depend on these options, so functions that differ in them alone share it.
    untraced: ClassVar[frozenset[str]] = Sharded.untraced | {
        *("on_committed", "keep_unused", "device", "backend", "inline", "compiler_options")
    }

    name: str = "jit"
    in_name: str = "in_shardings"
    keep_unused: bool = False
    device: jax.Device | None = None
    backend: str | None = None
    inline: bool = False
    compiler_options: tuple[tuple[str, Any], ...] | None = None
    # A program keeps what the function captures, as in `jax.jit`, because a check would cost time.
    keeps_captures: bool = True  # type: ignore[misc]

    def tracing(
        self, plan: Plan, caller: Caller, unflattened: Unflattened, leaves: Sequence[object]
    ) -> AbstractContextManager[Callable[..., Any]]:
        """Puts the mesh into context, and shards activations, while the function is traced."""
        return _in_mesh(self.context, sharded_activations(plan, caller, unflattened, leaves))

    def make_program(self, plan: Plan, function: Callable[..., object]) -> Program:
        """Wraps the pure function in ``jax.jit``, with a sharding or None for each spec.

        The same jitted function is lowered (``staged``), and runs in a trace (``inline``). Calls at
        top level need devices; if the mesh has none, a check comes first.
        """
        has_deprecated = self.device is not None or self.backend is not None
        # `catch_warnings` makes Python forget which warnings it has shown already, so it is entered
        # only if the user has given a deprecated option.
        with warnings.catch_warnings() if has_deprecated else contextlib.nullcontext():
            if has_deprecated:  # JAX has warned the user when the function was decorated
                warnings.simplefilter("ignore", DeprecationWarning)
            jitted = jax.jit(function, **self._jax_options(plan))
        top_level: Callable[..., Any] = jitted
        # An abstract mesh has no devices. It may be in the shardings of inputs or of results.
        input_mesh = _abstract_mesh(plan.specs)
        mesh = input_mesh or _abstract_mesh(plan.out_specs)
        if mesh is not None:
            # A program of an abstract mesh finds its devices at each call: those of the mesh in
            # context or, without shardings of inputs, the devices of the arrays.
            top_level = self.needing_devices(mesh, jitted, from_arrays=input_mesh is None)
        # `jit` keeps what its function has captured, as `jax.jit` does, so it asks for no program
        # that is traced each time.
        return Program(
            staged=jitted, top_level=top_level, inline=jitted, traced_each_time=top_level
        )

    def _jax_options(self, plan: Plan) -> dict[str, Any]:
        """Returns the keyword arguments of ``jax.jit`` for a plan.

        Options that the user did not give are left out, because to JAX ``in_shardings=None`` is
        given, and excludes ``device``.
        """
        options: dict[str, Any] = {"keep_unused": self.keep_unused, "inline": self.inline}
        if any(spec is not None for spec in plan.specs):
            options["in_shardings"] = tuple(plan.specs)
        if any(spec is not None for spec in plan.out_specs):
            # The last one is for the outcome, which holds no arrays.
            options["out_shardings"] = (*plan.out_specs, None)
        if self.compiler_options is not None:
            options["compiler_options"] = dict(self.compiler_options)
        if self.device is not None:
            options["device"] = self.device
        if self.backend is not None:
            options["backend"] = self.backend
        if plan.donated:
            options["donate_argnums"] = tuple(sorted(plan.donated))
        return options


def _axis_names(axes: bool | str | Iterable[str]) -> bool | tuple[str, ...]:
    """Returns the option ``auto_axes`` in hashable form: ``"data"`` → ``("data",)``."""
    if isinstance(axes, bool):
        return axes
    return (axes,) if isinstance(axes, str) else tuple(axes)


@contextlib.contextmanager
def _in_mesh(
    mesh: Mesh | AbstractMesh | None, tracing: AbstractContextManager[Callable[..., object]]
) -> Iterator[Callable[..., Any]]:
    """Puts a mesh of Auto axes into context, unless there is one, around another context.

    With the mesh in context, code of the function that asks JAX for a mesh gets the one that the
    user gave to ``jit``, for example `jax.lax.with_sharding_constraint` with a spec. On Explicit
    axes JAX sets the mesh itself, because it is in the types of the arrays.

    Args:
      mesh: the mesh that applies; None if there is none.
      tracing: a context that yields the function that a trace calls as the user's. It is entered
        last, because it reads the mesh in context.
    """
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    is_needed = mesh is not None and not has_mesh and not axes_of_type(mesh, AxisType.Explicit)
    with in_context(mesh if is_needed else None), tracing as user_function:
        yield user_function


def _abstract_mesh(specs: Sequence[object]) -> AbstractMesh | None:
    """Returns the first mesh without devices in some shardings; None if there is none."""
    meshes = (spec.mesh for spec in specs if isinstance(spec, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, AbstractMesh)), None)


class SharedOptions(TypedDict, total=False):
    """The options that ``jit`` and ``shard_map`` share, for type checkers."""

    mesh: Mesh | AbstractMesh | None
    activation_shardings: Any
    on_indivisible: OnIndivisible
    strict: bool
    max_traces: int | None
    graph: bool | None
    graph_updates: bool | None


class _Options(SharedOptions, total=False):
    """The options of ``jit``, for type checkers."""

    in_shardings: Any
    out_shardings: Any
    auto_axes: bool | str | Iterable[str]
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: jax.Device | None
    backend: str | None
    inline: bool
    compiler_options: dict[str, Any] | None
    on_committed: Literal["error", "move"]


@overload
def jit(fun: Callable[P, R], **options: Unpack[_Options]) -> Lifted[P, R]: ...


@overload
def jit(**options: Unpack[_Options]) -> Callable[[Callable[P, R]], Lifted[P, R]]: ...


@_compat.api_boundary
def jit(
    fun: Callable[..., object] | None = None,
    *,
    in_shardings: object = None,
    out_shardings: object = None,
    mesh: Mesh | AbstractMesh | None = None,
    activation_shardings: object = None,
    auto_axes: bool | str | Iterable[str] = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: jax.Device | None = None,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    on_committed: Literal["error", "move"] = "error",
    on_indivisible: OnIndivisible = "error",
    strict: bool = False,
    max_traces: int | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Compiles a function whose arguments and results may be NNX modules.

    Modules, optimizers, metrics, ``nnx.Rngs`` and bare Variables may be anywhere in the
    arguments and in the result, alongside arrays. Changes that the function makes to them are made
    to the caller's own objects: updated Variables, changed static attributes, added and removed
    submodules. Shared references and cycles are kept. A function without NNX objects behaves as
    under ``jax.jit``.

    Use it as ``jit(f)``, ``@jit`` or ``@jit(...)``: on a function, on a method in a class
    body (``model.method.lower(x)`` then works), or on a bound method (``jit(model.method)``),
    whose positions and specs do not count ``self``.

    Args:
      fun: the function.
      in_shardings: the shardings of the arguments. One spec for all; a tuple with one for each
        positional parameter (static ones left out, or None); or a mapping from parameter
        names. Each is a pytree prefix of its argument, in which modules and Variables are
        leaves. A spec is a ``Sharding``, a ``PartitionSpec``, a
        :class:`~nnx_sharding.StateSharding` or an ``nnx.State`` of specs for a module, or None
        to keep the sharding of the argument. Uncommitted Variables are placed as declared at
        the first call, and keep that sharding.
      out_shardings: the shardings of the result, in the same form, where None leaves the choice to
        the compiler. A new module is created sharded.
      mesh: resolves every ``PartitionSpec``; without it, the mesh in context does. While the
        function is traced, a mesh of Auto axes is in context, so that constraints to a
        ``PartitionSpec`` work. Without any sharding, the program runs on the default device.
      activation_shardings: how the inputs and outputs of modules are sharded: an
        :class:`~nnx_sharding.ActivationSharding`, or a mapping from filters to specs, such as
        ``{"up$": P("data", "model")}``. It has priority over the ``activations`` of an
        argument's :class:`~nnx_sharding.StateSharding`.
      auto_axes: Explicit axes of the mesh that are Auto while the function runs, so that the
        compiler chooses how values are sharded over them: one or several names, or True for all.
        For the caller nothing changes: arguments and Variables keep their types, and results get
        the types that ``out_shardings`` declares. It has to cover all results except scalars, which
        are replicated.
      static_argnums: positions of static arguments, hashable and part of the cache key.
      static_argnames: names of static arguments. One of the two options implies the other, as in
        ``jax.jit``.
      donate_argnums: positions of arguments whose buffers may be reused. All Variables of a
        donated module hold new arrays after the call.
      donate_argnames: names of such arguments.
      keep_unused: keep arguments that the function does not use.
      device: deprecated in JAX; cannot be combined with shardings.
      backend: deprecated in JAX; cannot be combined with shardings.
      inline: inline into enclosing jaxprs.
      compiler_options: passed to XLA.
      on_committed: what to do with arrays that are committed to a sharding other than
        ``in_shardings`` declares: ``"error"``, as in JAX, or ``"move"`` to move them. Variables and
        attributes of modules then hold the moved arrays; others are moved at each call.
      on_indivisible: what to do with specs that do not divide the shape of an array:
        ``"error"``; ``"replicate"`` the array; or ``"drop"`` the mesh axes that do not divide it.
        The latter two warn with a list of the corrections. A
        :class:`~nnx_sharding.StateSharding` may override it for its part.
      strict: raise errors instead of the warnings of this library, and for donated buffers that
        cannot be reused.
      max_traces: how often the function may be traced through this wrapper: a call that would trace
        it once more raises an error that says what differs. Tracing again for the same arguments,
        as after ``jax.clear_caches()``, does not count. None for no limit.
      graph: None uses Flax's global flag at decoration time. False treats modules as pytrees:
        shared references are an error, and only the values of Variables are updated.
      graph_updates: None uses Flax's global flag at decoration time. False keeps shared references,
        but updates only the values and metadata of Variables: what is returned are new modules.

    Returns:
      A :class:`~nnx_sharding.Lifted`, which is the function with ``trace``, ``lower``,
      ``eval_shape`` and ``clear_cache``.

    Raises:
      TypeError: ``fun`` cannot be compiled (not callable, a generator, …), as from ``jax.jit``,
        or something that is not a spec is given as one; at a call, an argument is not an array.
      ValueError: an option has a value other than those above; at a call, a static argument is
        not hashable or holds arrays, specs do not fit the arguments or the mesh, a
        ``PartitionSpec`` has no mesh, or arrays cannot be placed as declared.
      StrictError: at a call, with ``strict``.
      RetraceError: at a call that would have to trace once more than ``max_traces`` allows.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import jit
      >>> class Counter(nnx.Module):
      ...     def __init__(self):
      ...         self.count = nnx.Variable(jnp.array(0))
      ...     @jit
      ...     def __call__(self, x):
      ...         self.count[...] += 1
      ...         return x * self.count[...]
      >>> counter = Counter()
      >>> float(counter(2.0)), float(counter(2.0)), int(counter.count[...])
      (2.0, 4.0, 2)
    """
    has_shardings = in_shardings is not None or out_shardings is not None
    jax_options = _deprecated_options(has_shardings, device=device, backend=backend)
    check_mesh("jit", mesh)  # raises for something else than a mesh or None
    # Raises if an option has another value than these.
    check_options(
        "jit",
        on_committed=(on_committed, ("error", "move")),
        on_indivisible=(on_indivisible, ON_INDIVISIBLE),
    )
    transform = Jit(
        in_specs=Specs(in_shardings),
        out_specs=Specs(out_shardings),
        mesh=mesh,
        keep_unused=keep_unused,
        device=device,
        backend=backend,
        inline=inline,
        compiler_options=None if compiler_options is None else tuple(compiler_options.items()),
        on_committed=on_committed,
        on_indivisible=on_indivisible,
        strict=strict,
        activation_shardings=activations(activation_shardings),
        auto_axes=_axis_names(auto_axes),
    )
    # Raises for a leaf that is not a spec.
    check_specs("jit", in_shardings=transform.in_specs, out_shardings=transform.out_specs)
    roles = Roles.of(static_argnums, static_argnames, donate_argnums, donate_argnames)

    def decorate(fun: Callable[..., object]) -> Any:
        options: dict[str, Any] = {"max_traces": max_traces, "jax_options": jax_options}
        return lift(Lifted, fun, transform, graph, graph_updates, roles=roles, **options)

    return decorate if fun is None else decorate(fun)


def _deprecated_options(has_shardings: bool, **options: object) -> dict[str, Any]:
    """Returns the deprecated options that are given, for which JAX warns when it jits a function.

    `lift` passes them to ``jax.jit`` at once, because the warning names the user's line, which is
    on the stack then. The jit of a plan is made in a call.

    Raises:
      ValueError: an option is given though there are shardings, which name devices, too.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    if given_options and has_shardings:
        raise ValueError(
            "device and backend cannot be combined with in_shardings or out_shardings: use "
            "shardings on that device."
        )
    return given_options


def unjitted(function: Lifted[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function that `jit` was given, and the options to jit it again on another mesh.

    The options are all but the mesh, ``device`` and ``backend``, which name devices.
    """
    transform: Any = function._transform
    options = {name: getattr(transform, name) for name in _KEPT}
    options |= function._options["roles"]._asdict()  # static and donated arguments
    # The modes that the user chose, or the global flags when the function was decorated. They are
    # left out where the flags of now give the same, because recipes show all options.
    modes = (function._graph, function._updates)
    if modes != _compat.graph_mode(None, None):
        options |= zip(("graph", "graph_updates"), modes, strict=True)
    options["in_shardings"] = transform.in_specs.tree
    options["out_shardings"] = transform.out_specs.tree
    # The transform keeps the compiler's options as pairs, because these are hashable.
    pairs = transform.compiler_options
    options["compiler_options"] = None if pairs is None else dict(pairs)
    # `__wrapped__` is the function that `jit` was given. `_fun` of a bound method has no ``self``.
    return function.__dict__["__wrapped__"], options


# The fields of `Jit` that `unjitted` returns as they are.
_KEPT = (
    *("activation_shardings", "auto_axes", "keep_unused", "inline"),
    *("on_committed", "on_indivisible", "strict"),
)


def declared_specs(function: Lifted[..., Any], *args: Any) -> dict[str, Any]:
    """Returns the declared spec of each array in the arguments, by its path.

    The spec is None for an array without a declared sharding, or whose sharding has no spec.
    """
    plan, flat = function._plan_without_running(args, {})
    shardings = (getattr(leaf, "sharding", None) for leaf in as_declared(plan, flat.leaves))
    specs = (getattr(sharding, "spec", None) for sharding in shardings)
    return dict(zip(plan.names, specs, strict=True))
