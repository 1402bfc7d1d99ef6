"""``grad`` and ``value_and_grad`` for functions that take NNX objects.

`argnums` chooses arguments, the *targets*, and `wrt` Variables in them. A call takes three steps.
It finds the *slots* (positions among all arrays of the arguments) of the arrays that are
differentiated (:meth:`ValueAndGrad.prepare`). It differentiates with respect to these arrays
(:meth:`ValueAndGrad.value_and_gradients`). It puts the gradients into the form of the arguments
(:meth:`PreparedCall.build_gradient`): a state by path for each module, as in Flax. The *plan* is
what is known of all calls with arguments of one structure. A *location* is the place of a Variable
or an array in an argument. `accumulate_gradients` takes the same three steps, with the second one
in a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..core.arguments import Argument
from ..core.flatten import Flat
from ..core.functions import name_of
from ..core.locations import NamedLocation, locate
from ..core.plan import Plan
from ..core.signature import ArgTree, SortedCall
from ..core.structure import Location, Structure
from ..core.unflatten import pytree_of, unflatten, value_at
from ..errors import raise_if_any, see
from ..specs.filters import to_predicate
from ..specs.fitting import suggestion
from ..specs.paths import Path
from .differentiation import Differentiable, Differentiation
from .in_trace import Function, is_array, type_text
from .lifted import P, R, lift
from .tangents import tangent_type, without_tangent


@_compat.api_boundary
def value_and_grad(
    f: Callable[..., object] | None = None,
    *,
    argnums: object = 0,
    wrt: object = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the value of ``f`` and its gradient.

    Modules, optimizers and Variables may be anywhere in the arguments. Changes that ``f`` makes to
    them, such as to BatchNorm statistics and random streams, are made to the caller's own objects.
    A Variable that several arguments share is one input: its gradient covers all its uses, and is
    only in the first place, as in Flax.

    Args:
      f: the function. It returns a scalar or, with ``has_aux``, a pair of a scalar and anything
        else.
      argnums: what to differentiate with respect to: the position or the name of an argument, an
        ``nnx.DiffState`` with a position and a filter, or a sequence of these.
      wrt: an NNX filter for the Variables of modules that are differentiated: by default all
        parameters or, without graph updates, everything. Arrays outside of modules, and bare
        Variables, are differentiated in any case.
      has_aux: whether ``f`` returns auxiliary data besides the scalar.
      holomorphic: whether ``f`` is promised to be holomorphic, as in ``jax.grad``.
      allow_int: whether integers may be differentiated; their gradients have dtype ``float0``.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, gradient)``; the value is what ``f`` returns. The gradient
      has the form of the argument, with an ``nnx.State`` of the differentiated Variables, perhaps
      empty, in place of each module; without graph updates and without a filter it is a new module,
      with gradients in place of the arrays. Optimizers take either. For a sequence of ``argnums``
      it is a tuple.

    Raises:
      TypeError: ``argnums`` holds something else, or ``wrt`` is not a filter; at a call, ``f``
        returns no scalar, or something that is differentiated is not floating-point or complex.
      ValueError: ``argnums`` counts positions of a bound method; at a call, it names unknown
        arguments, or no Variable matches ``wrt``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import value_and_grad
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> @value_and_grad(wrt=nnx.PathContains("bias"))
      ... def loss(model, x):
      ...     return model(x).sum()
      >>> value, gradient = loss(model, jnp.ones((3, 2)))
      >>> gradient["bias"][...]
      Array([3.], dtype=float32)

    The semantics are those of ``jax.value_and_grad`` and ``flax.nnx.value_and_grad``.
    """
    options = {"has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int}
    return _make(
        "value_and_grad", f, argnums, wrt, graph, graph_updates, returns_value=True, **options
    )


@_compat.api_boundary
def grad(
    f: Callable[..., object] | None = None,
    *,
    argnums: object = 0,
    wrt: object = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the gradient of ``f``.

    Args:
      f: the function, as for :func:`value_and_grad`, like all options.
      argnums: what to differentiate with respect to.
      wrt: an NNX filter for the Variables of modules.
      has_aux: whether ``f`` returns auxiliary data.
      holomorphic: whether ``f`` is promised to be holomorphic.
      allow_int: whether integers may be differentiated.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns the gradient; with ``has_aux``, the gradient and the auxiliary data.

    Raises:
      TypeError: as for :func:`value_and_grad`.
      ValueError: as for :func:`value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import grad
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> gradient = grad(lambda model, x: model(x).sum())(model, jnp.ones((3, 2)))
      >>> gradient["kernel"][...].shape
      (2, 1)
    """
    options = {"has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int}
    return _make("grad", f, argnums, wrt, graph, graph_updates, returns_value=False, **options)


def _make(
    name: str,
    fun: Callable[..., object] | None,
    argnums: Any,
    wrt: Any,
    graph: bool | None,
    graph_updates: bool | None,
    **options: Any,
) -> Any:
    """Makes ``grad`` or ``value_and_grad`` of a function, or a decorator if there is none.

    The function's properties, such as the names of its parameters, are checked at a call.

    Args:
      fun: the user's function; None for a decorator.
      argnums: what is differentiated: a position, a name, an ``nnx.DiffState``, or several.
      wrt: the filter for the Variables that are differentiated; None for the default.
      graph: the user's option; None for Flax's global flag.
      graph_updates: the user's option; None for Flax's global flag.
      **options: further fields of :class:`_Gradient`.
    """
    if wrt is not None:
        to_predicate(wrt)  # raises a TypeError if it is not a filter
    # A string is a name, not a sequence of letters.
    is_single = not isinstance(argnums, Sequence) or isinstance(argnums, str)
    keys_and_filters = list[tuple[Any, Any]]()
    for item in [argnums] if is_single else argnums:
        if isinstance(item, nnx.DiffState):  # it has a filter of its own
            keys_and_filters.append((item.argnum, item.filter))
        else:
            keys_and_filters.append((item, wrt))
    keys = [argument for argument, _ in keys_and_filters]
    is_valid = all(isinstance(key, int | str) for key in keys)
    has_duplicates = len({*keys}) < len(keys)
    if not is_valid or has_duplicates:
        raise TypeError(
            f"{name}: argnums must be a position, a name or an nnx.DiffState, or a sequence of "
            f"different ones, got {argnums!r}."
        )
    # The default may match nothing. Then the gradient is an empty state, as in Flax.
    must_match = wrt is not None and wrt is not nnx.Param
    transform = _Gradient(
        name=name,
        wrt=tuple(keys_and_filters),
        is_single=is_single,
        must_match=must_match,
        **options,
    )

    def decorate(function: Callable[..., object]) -> Any:
        lifted = lift(ValueAndGrad, function, transform, graph, graph_updates)
        is_bound_method = bool(lifted._bound)  # `_bound` has the objects to which it is bound
        if is_bound_method and any(isinstance(key, int) for key in keys):
            raise ValueError(
                f"{name}: positions do not count the object of a bound method. Name what is "
                "differentiated, for example argnums='self', or pass the object as an argument."
            )
        return lifted

    return decorate if fun is None else decorate(fun)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gradient(Differentiation):
    """The options of ``grad``: what it differentiates, and how; and the check of the output."""

    in_name: str = "argnums"
    is_reverse: bool = True
    # Each pair has the position or the name of a differentiated argument, and the filter for the
    # Variables in it; None is for the default of the mode.
    wrt: tuple[tuple[int | str, Any], ...]
    must_match: bool  # whether the user chose a filter, which then has to match something
    is_single: bool  # whether the gradient is of one argument, not a tuple
    returns_value: bool  # whether calls return the value, too
    holomorphic: bool  # the option of ``jax.grad``
    allow_int: bool  # the option of ``jax.grad``

    def check_output(self, fun_name: str, out: object) -> None:
        """Raises a ``TypeError`` unless the function returns a scalar that has a gradient.

        ``out`` is the function's result without auxiliary data.
        """
        if not is_array(out) or jnp.shape(out) != ():  # type: ignore[arg-type]
            hint = " Reduce it, for example to its mean." if is_array(out) else ""
            if not self.has_aux and isinstance(out, tuple | list):
                hint = " If it returns (loss, aux), give has_aux=True."
            raise TypeError(
                f"{self.name}: {fun_name} must return a scalar loss, got {type_text(out)}.{hint}"
            )
        kind = "complex" if self.holomorphic else "real"
        expected_dtype = jnp.complexfloating if self.holomorphic else jnp.floating
        if not jnp.issubdtype(jnp.result_type(out), expected_dtype):
            is_complex = jnp.issubdtype(jnp.result_type(out), jnp.complexfloating)
            hint = " Give holomorphic=True, or take its absolute value." if is_complex else ""
            raise TypeError(
                f"{self.name}: {fun_name} must return a {kind} floating-point loss, "
                f"got {type_text(out)}.{hint}"
            )


class Target(NamedTuple):
    """One differentiated argument."""

    argument: Argument
    value: Any  # the value that the caller passed for it
    locations: list[NamedLocation]  # the places of what is differentiated in it
    is_state: bool  # whether its gradient has states in place of modules


class PreparedCall(NamedTuple):
    """A call before it is differentiated."""

    plan: Plan  # the plan of the call
    flat: Flat  # the arguments of the call
    targets: list[Target]  # the arguments that are differentiated
    slots: list[int]  # the slots of the arrays that are differentiated
    is_single: bool  # whether the gradient is of one argument, not a tuple

    def arrays(self) -> list[Any]:
        """The arrays that are differentiated."""
        return [self.flat.leaves[slot] for slot in self.slots]

    def build_gradient(self, arrays: Sequence[object]) -> Any:
        """Puts gradients into the form of the differentiated arguments.

        Args:
          arrays: the gradient of each array in ``slots``.

        Returns:
          A gradient for each target: a pytree like the argument, with a state in place of each
          module, or with a new module that holds gradients. The result is a tuple of gradients, or
          with ``is_single`` the only one.
        """
        by_slot = dict(zip(self.slots, arrays, strict=True))
        # Targets that share a module share its gradients, so all arguments are built together,
        # each as the argument of that name. Gradients in states do not need them.
        all_in_states = all(target.is_state for target in self.targets)
        arguments = {} if all_in_states else self._arguments_with(by_slot)
        gradients: list[Any] = []
        for target in self.targets:
            if target.is_state:
                gradients.append(in_states(self.flat, target, by_slot))
            else:
                gradients.append(arguments[target.argument.name])
        return gradients[0] if self.is_single else tuple(gradients)

    def _arguments_with(self, gradients: Mapping[int, object]) -> dict[str, Any]:
        """Returns all arguments by name as new objects, with gradients in place of the arrays."""
        structure, objects = self.flat.structure, self.flat.objects
        # An array that is not differentiated becomes zeros of ``float0``.
        leaves = [
            gradients.get(slot, without_tangent(x)) for slot, x in enumerate(self.flat.leaves)
        ]
        # Static objects are not copied: a pytree compares some of them by identity, and optimizers
        # map over the model and its gradient together.
        statics = {index: objects[index] for index in structure.static_indices()}
        return _by_name(self.plan, unflatten(structure, leaves, existing=statics).root)


def _has_gradient(structure: Structure, location: Location) -> bool:
    """Whether there is a gradient for a Variable or an array, perhaps an empty one.

    A Variable whose value is an empty pytree has an empty gradient. A Variable whose value is no
    pytree, such as a static value, has none.
    """
    if location.slots:
        return True
    index = location.object_index
    return index is not None and pytree_of(structure.entries[index]) is not None


def in_states(flat: Flat, target: Target, values: Mapping[int, object]) -> Any:
    """Puts gradients into the form of an argument, with an ``nnx.State`` for each module.

    Args:
      flat: all arguments, flattened.
      target: the argument, with the locations of what was differentiated in it.
      values: the gradients, by the slots of the arrays.
    """
    # The first key leads to a part of the argument (a module, Variable or array). The second key is
    # the path of a Variable in the part. The parts are the leaves of the argument, in order.
    states: dict[Path, dict[Path, Any]] = {part.keys: {} for part in target.argument.parts}
    for named in target.locations:
        location = named.location
        gradient: Any = value_at(flat.structure, location, values)  # type: ignore[arg-type]
        if location.object_index is not None:  # the index of the Variable; None for a bare array
            # Optimizers expect a Variable of the same class and metadata. The gradient's is a plain
            # one even if the user's own is a hijax value.
            old_variable = _compat.plain_variable(flat.objects[location.object_index])
            variable = _compat.new_variable(type(old_variable), _compat.get_metadata(old_variable))
            _compat.set_value(variable, gradient)
            gradient = variable
        states[named.part.keys][location.path] = gradient
    parts = []
    for state in states.values():
        # A part that is itself a Variable or an array has the empty path, and no state around it.
        parts.append(state[()] if () in state else nnx.from_flat_state(state))
    treedef = jax.tree_util.tree_structure(target.value, is_leaf=_compat.is_graph_object)
    return jax.tree_util.tree_unflatten(treedef, parts)


def _by_name(plan: Plan, tree: ArgTree) -> dict[str, Any]:
    """Returns the values of the arguments by name.

    ``((model, x), {"y": y})`` → ``{"model": model, "x": x, "y": y}``.
    """
    positional, keywords = tree
    # The order is that of `plan.arguments`.
    values = [*positional, *(keywords[key] for key in sorted(keywords))]
    return dict(zip((argument.name for argument in plan.arguments), values, strict=True))


class ValueAndGrad(Differentiable[P, R]):
    """A function that returns the gradient of another one, or its value and the gradient.

    A call runs `prepare`, `value_and_gradients`, and ``build_gradient`` of the prepared call. From
    `LiftedFunction` it has

        _find_plan    returns the plan of a call and its flattened arguments
        _sort         returns the arguments of a call by their roles, a `SortedCall`
        _updates      whether changes of structure are written back
        _bound        the objects of a bound method, the first arguments of a call
        _implicit     how many leading parameters the user's positions do not count
        _parameters   ``positional`` are the names of the parameters that can be passed by position
    """

    _transform: _Gradient

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Calls and differentiates the function; its changes are made to the caller's own objects.

        Returns:
          ``(value, gradient)`` for ``value_and_grad``. For ``grad`` the gradient or, with
          ``has_aux``, a pair of the gradient and the auxiliary data.
        """
        prepared = self.prepare((*self._bound, *args), kwargs)
        value, arrays = self.value_and_gradients(prepared)
        gradient = prepared.build_gradient(arrays)
        if self._transform.returns_value:
            return value, gradient
        if self._transform.has_aux:
            _, aux = value
            return gradient, aux
        return gradient

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> PreparedCall:
        """Finds the arrays that are differentiated in a call.

        Args:
          args: the positional arguments, bound objects first.
          kwargs: the keyword arguments.
        """
        plan, flat = self._find_plan(args, kwargs)
        # The call has the values of the arguments by name. The plan cannot have them, because it
        # may be that of an earlier call.
        call = self._sort(args, kwargs)
        targets = self._targets(plan, call, flat)
        # The dict is an ordered set, because targets that share an array have its slot twice.
        slots: dict[int, None] = {}
        for target in targets:
            for named in target.locations:
                slots |= dict.fromkeys(named.location.slots)
        return PreparedCall(
            plan=plan,
            flat=flat,
            targets=targets,
            slots=[*slots],
            is_single=self._transform.is_single,
        )

    def value_and_gradients(self, prepared: PreparedCall) -> tuple[Any, list[Any]]:
        """Calls and differentiates the function; its changes are made to the caller's own objects.

        Raises:
          TypeError: an array has no derivative (:meth:`check_types`).

        Returns:
          The result of the function, and the gradient of each array that is differentiated.
        """
        self.check_types(prepared)  # raises for arrays without a derivative
        transform = self._transform
        options: dict[str, Any] = {
            "holomorphic": transform.holomorphic,
            "allow_int": transform.allow_int,
        }

        def gradients_of(function: Function, arrays: list[object]) -> tuple[Any, Any]:
            """Differentiates a function at some arrays, for `differentiate`.

            Args:
              function: takes a list of arrays. Returns the arrays of the user's output, without
                auxiliary data; and all outputs of the program, which JAX does not differentiate.
              arrays: the differentiated arrays, at which it is called.

            Returns:
              The gradients of these arrays, and all outputs.
            """

            def loss(arrays: Sequence[Any]) -> tuple[Any, Any]:
                [value], outputs = function(arrays)  # one, since `check_output` wants a scalar
                return value, outputs

            value_and_gradients = jax.value_and_grad(loss, has_aux=True, **options)
            (_, outputs), gradients = value_and_gradients(arrays)
            return gradients, outputs

        # `differentiate` calls the user's function once, in `gradients_of`, and returns its result
        # and the gradients.
        return self.differentiate(prepared.plan, prepared.flat, prepared.slots, gradients_of)

    def check_types(self, prepared: PreparedCall) -> None:
        """Raises a ``TypeError`` for arrays without a derivative, such as integers.

        JAX would raise an error, too, but it knows neither their paths nor the option ``wrt``.
        """
        if self._transform.allow_int:
            return
        lines = [
            f"  {prepared.plan.names[slot]}: {type_text(array)}"
            for slot, array in zip(prepared.slots, prepared.arrays(), strict=True)
            if tangent_type(array) is None
        ]
        raise_if_any(
            TypeError,
            f"{self._transform.name}: these cannot be differentiated, which takes floating-point "
            "or complex arrays:",
            lines,
            "Leave them out with a filter (wrt=nnx.Param), or give allow_int=True, with which "
            "their gradients have dtype float0.",
        )

    def _targets(self, plan: Plan, call: SortedCall, flat: Flat) -> list[Target]:
        """Returns the arguments that ``argnums`` names, with what is differentiated in each.

        Raises:
          ValueError: ``argnums`` names unknown arguments, or filters match nothing.

        Args:
          plan: the plan of the call, with the names of the arguments.
        """
        arguments = {argument.name: argument for argument in plan.arguments}
        values = _by_name(plan, call.tree)
        # The user's filter for each argument that is differentiated, or None.
        filters_given = self._chosen_filters(call, arguments)
        # The default is Flax's: parameters with graph updates; everything without graph updates,
        # which tree mode never has.
        has_updates = self._updates
        default_filter = nnx.Param if has_updates else ...
        filters = {name: default_filter if x is None else x for name, x in filters_given.items()}
        # The locations of what is differentiated, by the name of the argument.
        locations = self._differentiated(plan, flat, filters)
        is_empty = not any(named.location.slots for x in locations.values() for named in x)
        # A gradient without arrays is an error only if the user has chosen arrays by a filter.
        if is_empty and self._transform.must_match:
            self._refuse_empty(flat, filters)  # always raises
        return [
            Target(
                argument=arguments[name],
                value=values[name],
                locations=locations[name],
                # Without graph updates, a gradient has the form of the whole argument, as in Flax,
                # unless the user gave a filter that says which part.
                is_state=has_updates or filter_ is not None,
            )
            for name, filter_ in filters_given.items()
        ]

    def _chosen_filters(
        self, call: SortedCall, arguments: Mapping[str, Argument]
    ) -> dict[str, Any]:
        """Returns the filter that the user gave for each differentiated argument, or None.

        The keys are the names of the arguments, in the order of ``argnums``. ``arguments`` has all
        arguments of the call by name.

        Raises:
          ValueError: ``argnums`` names an argument twice, or one that the call does not have.
        """
        name, wrt = self._transform.name, self._transform.wrt
        filters = {self._name_of(argument, call): filter_ for argument, filter_ in wrt}
        # A name and a position may mean the same argument. Only a call shows it.
        if len(filters) < len(wrt):
            positions = [argnum for argnum, _ in wrt]
            raise ValueError(f"{name}: argnums names an argument more than once: {positions!r}.")
        unknown = [repr(x) + suggestion(x, arguments) for x in filters if x not in arguments]
        if unknown:
            raise ValueError(
                f"{name}: argnums names unknown arguments: {', '.join(unknown)}. "
                f"The arguments: {', '.join(arguments)}."
            )
        return filters

    def _differentiated(
        self, plan: Plan, flat: Flat, filters: Mapping[str, object]
    ) -> dict[str, list[NamedLocation]]:
        """Finds the Variables and bare arrays that filters choose, by the name of the argument.

        Args:
          filters: the filters, by the names of the differentiated arguments.
        """
        locations: dict[str, list[NamedLocation]] = {name: [] for name in filters}
        predicates = {argument: to_predicate(filter_) for argument, filter_ in filters.items()}
        variables_so_far = set[int]()  # the indices of the Variables found so far
        for named in locate(flat.structure, plan.arguments):
            location = named.location
            index = location.object_index  # None for an array in no Variable
            # The predicate is None if the argument is not differentiated.
            predicate = predicates.get(named.argument.name)
            if predicate is None or not _has_gradient(flat.structure, location):
                continue
            # A shared Variable has its gradient in the first place, as in Flax.
            if index in variables_so_far:
                continue
            # Filters choose in modules. A Variable or an array that is itself an argument or an
            # item of one has the empty path, and `argnums` alone chooses it.
            subject = named.subject(flat.objects, flat.leaves)
            is_in_module = location.path != ()
            if is_in_module and not any(predicate(other, subject) for other in named.paths):
                continue
            locations[named.argument.name].append(named)
            if index is not None:
                variables_so_far.add(index)
        return locations

    def _refuse_empty(self, flat: Flat, filters_by_name: Mapping[str, object]) -> None:
        """Raises an error for filters that match nothing.

        ``filters_by_name`` has the filters by the names of the differentiated arguments.
        """
        # The user can choose from these classes of Variables.
        kinds = {type(x).__name__ for x in flat.objects if isinstance(x, nnx.Variable)}
        filters = (getattr(x, "__name__", repr(x)) for x in filters_by_name.values())
        error = ValueError(
            f"{self._transform.name}: nothing to differentiate in {', '.join(filters_by_name)}: no "
            f"Variable matches {', '.join(dict.fromkeys(filters))}. Give wrt a filter that matches "
            f"some (there are {', '.join(sorted(kinds)) or 'none'}), or argnums other arguments."
        )
        raise see(error, anchor="nothing-to-differentiate")

    def _name_of(self, argnum: int | str, call: SortedCall) -> str:
        """Returns the name of an argument of ``argnums``: a name, or a position among arguments.

        Positions count the arguments of the call; negative positions count from its end. A bound
        object, such as ``self``, comes first among the names of the signature, but is not counted.

        Raises:
          ValueError: the function has no argument at that position.
        """
        if isinstance(argnum, str):
            return argnum
        names = call.signature.names  # the parameters that this call passes by position
        position = argnum + self._implicit if argnum >= 0 else argnum + len(names)
        # A position beyond these names may be the position of a parameter that this call passes by
        # keyword. A negative position counts from the end of the call, so it is none of these.
        if not 0 <= position < len(names):
            names = self._parameters.positional
        if not 0 <= position < len(names):
            error = ValueError(
                f"{self._transform.name}: argnums={argnum}, but {name_of(self._fun)} has the "
                f"arguments {', '.join(names[self._implicit :]) or '()'}."
            )
            raise see(error, anchor="unknown-parameter")
        return names[position]
