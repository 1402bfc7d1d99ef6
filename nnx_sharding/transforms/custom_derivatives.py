"""``custom_vjp`` and ``custom_jvp``: functions of NNX objects with the user's derivatives.

Both return a wrapper of the user's function, to which the user gives the rules later (``defvjp``,
``defjvp``). A call takes the steps of all transforms: flatten the arguments, find the *plan* for
their structure, run its program and write back what changed. Only the function of the call is
special, because it has its rules with it (:class:`~.custom_rules.Rules`), which take and return
modules, too. ``custom_rules.py`` makes functions and rules of arrays from them, for JAX.

An argument in ``nondiff_argnums`` is not differentiated. In other arguments, all arrays outside of
modules are differentiated, and all Variables, or the Variables that a filter chooses
(``nnx.DiffState``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from .. import _compat
from ..core.fingerprint import fingerprint_of
from ..core.functions import name_of
from .custom_rules import Custom, Rules
from .in_trace import Inner
from .lifted import P, R, lift, unbind


@_compat.api_boundary
def custom_vjp(
    fun: Callable[..., object] | None = None,
    *,
    nondiff_argnums: Sequence[object] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives a function a reverse-mode derivative of your own.

    The result is called like ``fun``, and has ``defvjp(fwd, bwd)``. Changes that ``fun`` or ``fwd``
    makes to its arguments are made to the caller's objects.

    ``fwd`` returns the output and residuals. ``bwd`` gets the residuals and cotangents, ``g``, and
    returns a tuple with a cotangent for each differentiated argument. With graph updates, modules
    have their cotangents in an ``nnx.State``, as in Flax::

        bwd(residuals, (arguments_g, output_g)) → (state or array, ...)

    Here ``arguments_g`` is a tuple with an item for each differentiated argument: the cotangents of
    the Variables that a module has after the call, and None for an array, which no call changes.
    Without graph updates, modules have their cotangents in modules::

        bwd(residuals, output_g) → (module or array, ...)
        bwd(residuals, output_g, *, updates_g) → (module or array, ...)

    If ``bwd`` has a parameter ``updates_g``, it gets a tuple of all arguments, with cotangents in
    the Variables that the call changed, and None in place of other Variables and of arrays.

    Args:
      fun: the function, of positional arguments. In a class, the object is its first argument.
      nondiff_argnums: the positions of arguments that are not differentiated; with graph updates
        also ``nnx.DiffState(position, filter)``, for what *is* differentiated in modules.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The function with ``defvjp``; without ``fun``, a decorator.

    Raises:
      TypeError: the function has no rules yet, or a rule returns no pair, or cotangents of other
        types than the arguments.
      ValueError: ``fun`` and ``fwd`` change different Variables, or cotangents have another
        structure than the arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import custom_vjp, grad
      >>> @custom_vjp(graph_updates=False)
      ... def apply(model, x):
      ...     return model(x)
      >>> def forward(model, x):
      ...     return apply(model, x), (model, x)
      >>> def backward(residuals, g):
      ...     return None, jnp.clip(g @ residuals[0].kernel.T, -1, 1)
      >>> apply.defvjp(forward, backward)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> grad(lambda x: 1e6 * apply(model, x).sum())(jnp.ones((1, 2))).max() <= 1
      Array(True, dtype=bool)

    The semantics are those of ``jax.custom_vjp`` and ``flax.nnx.custom_vjp``.
    """
    return _make(CustomVjp, "custom_vjp", fun, nondiff_argnums, graph, graph_updates)


@_compat.api_boundary
def custom_jvp(
    fun: Callable[..., object] | None = None,
    *,
    nondiff_argnums: Sequence[int] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives a function a derivative of your own, for both modes of differentiation.

    The result is called like ``fun``, and has ``defjvp(rule)``.

    Args:
      fun: the function, as for :func:`custom_vjp`.
      nondiff_argnums: the positions of arguments that are not differentiated.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The function with ``defjvp``; without ``fun``, a decorator.

    Raises:
      TypeError: as for :func:`custom_vjp`.
      ValueError: as for :func:`custom_vjp`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import custom_jvp, grad
      >>> @custom_jvp
      ... def scaled(model, x):
      ...     return model.scale * x
      >>> @scaled.defjvp
      ... def rule(primals, tangents):
      ...     (model, x), (d_model, d_x) = primals, tangents
      ...     return scaled(model, x), d_model.scale * x  # as if x was constant
      >>> model = nnx.LayerNorm(1, rngs=nnx.Rngs(0))
      >>> grad(lambda x: scaled(model, x).sum())(jnp.ones(1))
      Array([0.], dtype=float32)

    The semantics are those of ``jax.custom_jvp``.
    """
    return _make(CustomJvp, "custom_jvp", fun, nondiff_argnums, graph, graph_updates)


@_compat.api_boundary  # a decorator calls this, too, without `custom_vjp` around it
def _make(
    cls: type[_CustomFunction[..., Any]],
    name: str,
    fun: Callable[..., object] | None,
    nondiff_argnums: Sequence[Any],
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    """Makes the wrapper that ``custom_vjp`` or ``custom_jvp`` returns, or a decorator.

    Args:
      fun: the user's function; None for a decorator.
      nondiff_argnums: the user's option: the positions of arguments that are not differentiated,
        and an ``nnx.DiffState`` for each argument in which a filter chooses Variables.
      graph: the user's option; None for Flax's global flag.
      graph_updates: the user's option; None for Flax's global flag.

    Raises:
      TypeError: the positions are not different ints from 0.
      ValueError: a filter is given where none is possible, or ``fun`` is a bound method.
    """
    if fun is None:  # the user writes, for example, `@custom_vjp(graph_updates=False)`
        return lambda fun: _make(cls, name, fun, nondiff_argnums, graph, graph_updates)
    graph, updates = _compat.graph_mode(graph, graph_updates)
    filters = [x for x in nondiff_argnums if isinstance(x, nnx.DiffState)]
    nondiff = [x for x in nondiff_argnums if not isinstance(x, nnx.DiffState)]
    positions = [*nondiff, *(x.argnum for x in filters)]
    is_valid = all(isinstance(x, int) and x >= 0 for x in positions)
    if not is_valid or len({*positions}) < len(positions):
        raise TypeError(
            f"{name}: nondiff_argnums must be different positions from 0, got {positions}."
        )
    # Rules of `custom_vjp` get and return states for modules if graphs are updated, as in Flax.
    # Only a state can leave out a Variable that a filter has not chosen.
    has_states = updates and name == "custom_vjp"
    if filters and not has_states:
        problem = f"{name}: nondiff_argnums holds an nnx.DiffState, which"
        if name == "custom_jvp":
            raise ValueError(f"{problem} only custom_vjp takes.")
        raise ValueError(
            f"{problem} needs graph=True and graph_updates=True. Without them, leave it out: bwd "
            "returns zeros for what is not differentiated."
        )
    _, bound = unbind(fun)  # the objects to which a method is bound
    if bound:  # positions and rules might count the object, or not
        raise ValueError(
            f"{name}: {name_of(fun)} is a bound method. Decorate the function in the class: the "
            "object is then the first argument of the rules, too."
        )
    transform = Custom(
        name=name,
        nondiff=tuple(sorted(nondiff)),
        filters=tuple((x.argnum, x.filter) for x in filters),
        has_states=has_states,
    )
    return lift(cls, fun, transform, graph, updates)


class _CustomFunction(Inner[P, R]):
    """A function with rules for its derivative."""

    _transform: Custom
    # The user's rules: (forward, backward) of `CustomVjp`, one of `CustomJvp`. The tuple is empty
    # before the user has given any.
    _rules: tuple[Callable[..., Any], ...] = ()

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; its changes are made to the caller's own objects."""
        plan, flat = self._find_plan(self._positional_arguments(args, kwargs), {})
        # The trace calls this object instead of the function, and takes the rules from it.
        with_rules = Rules(self._fun, *self._rules)
        # A plan keeps a program for each key, so a trace is used again only if the function and its
        # rules are the same, and can reach the same values.
        key = fingerprint_of([*with_rules.functions, *plan.reached_from(flat.objects)])
        execute = plan.program_for(key).inline
        return self._run(plan, flat, execute, fun=with_rules)  # type: ignore[no-any-return]

    def _positional_arguments(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Any, ...]:
        """Returns all arguments of a call by position, with defaults, because rules get them so.

        The object of a method is the first argument.

        Raises:
          TypeError: the function has no rules yet, or an argument can only be passed by keyword.
          ValueError: a position in ``nondiff_argnums`` is beyond the arguments of the call.
        """
        name = self._transform.name
        fun_name = name_of(self._fun)
        if not self._rules:
            how = "defvjp(fwd, bwd)" if name == "custom_vjp" else "defjvp(rule)"
            raise TypeError(f"{name}: {fun_name} has no rule. Call {fun_name}.{how} first.")
        # JAX's rules know positions only, so defaults and keywords become positional.
        bound_arguments = inspect.signature(self._fun).bind(*self._bound, *args, **kwargs)
        bound_arguments.apply_defaults()
        if bound_arguments.kwargs:
            names = ", ".join(bound_arguments.kwargs)
            raise TypeError(f"{name}: rules get no keyword-only arguments: {fun_name} has {names}.")
        filters = self._transform.filters  # pairs of position and filter
        positions = *self._transform.nondiff, *(position for position, _ in filters)
        if max(positions, default=-1) >= len(bound_arguments.args):
            raise ValueError(
                f"{name}: nondiff_argnums names the positions {positions}, which count from 0, but "
                f"{fun_name} is called with {len(bound_arguments.args)} arguments."
            )
        return bound_arguments.args


class CustomVjp(_CustomFunction[P, R]):
    """The class of what :func:`custom_vjp` returns."""

    def defvjp(self, fwd: Callable[..., object], bwd: Callable[..., object]) -> None:
        """Gives the function its rules.

        Args:
          fwd: is called with the arguments of the function, instead of the function, if a call is
            differentiated. Returns the output, and residuals for ``bwd``: any pytree of modules,
            arrays and other values. It changes the same Variables as the function.
          bwd: is called with the arguments in ``nondiff_argnums``, the residuals and the cotangent
            of the output. Returns a tuple with the cotangent of each other argument, or None for
            zeros.

        There is no ``symbolic_zeros``: cotangents are arrays, because Variables cannot hold others.
        """
        self._rules = fwd, bwd


class CustomJvp(_CustomFunction[P, R]):
    """The class of what :func:`custom_jvp` returns."""

    def defjvp(self, rule: Callable[..., object]) -> Callable[..., Any]:
        """Gives the function its rule, and returns the rule, so that this can be a decorator.

        Args:
          rule: is called with the arguments in ``nondiff_argnums``, a tuple of all other arguments,
            and a tuple of their tangents. In the tangents, modules have tangents in place of their
            arrays. Returns the output and its tangent. The rule may change Variables in the
            arguments, as the function does. Then it also changes the Variable in the tangents,
            whose value when the rule returns is the tangent of the new value.

        Returns:
          The rule.

        There is no ``symbolic_zeros``, as for :func:`custom_vjp`, and no ``defjvps``: rules for
        single arguments could not say what becomes of the tangents of changed Variables.
        """
        self._rules = (rule,)  # a tuple of one rule; `defvjp` sets two
        return rule
