"""Sorts the arguments of a call by their roles: which are static, and which are donated.

As in ``jax.jit``, a *static* argument is a part of the key of the compiled function, and all other
arguments are *dynamic*. The arrays of a *donated* argument may be overwritten. The user declares
these *roles* by ``static_argnums``, ``donate_argnames`` and so on. The *key* of an argument is its
position, or its name if it is passed by keyword. An object fills a *bound* parameter, such as
``self``, before the call, and the user's positions count without it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ..errors import message, raise_if_any, see
from ..specs.fitting import suggestion
from .functions import name_of

ArgTree = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments, keyword arguments
ArgKey: TypeAlias = int | str


class Roles(NamedTuple):
    """Which parameters are static or donated, as the user declared, in hashable form."""

    static_argnums: tuple[int, ...] | None = None
    static_argnames: tuple[str, ...] | None = None
    donate_argnums: tuple[int, ...] | None = None
    donate_argnames: tuple[str, ...] | None = None

    @classmethod
    def of(cls, *options: object) -> Roles:
        """Returns the roles that the user declares, from the options in the order of the fields."""
        return cls(*map(_as_tuple, options))


NO_ROLES = Roles()  # no static and no donated arguments


def _as_tuple(option: Any) -> tuple[Any, ...] | None:
    """Returns the positions or names of an option; the user may give one or a sequence."""
    if option is None:
        return None
    is_sequence = isinstance(option, Iterable) and not isinstance(option, str)
    items = option if is_sequence else (option,)
    return tuple(item if isinstance(item, str) else operator.index(item) for item in items)


class Declared(NamedTuple):
    """The parameters that have one role, such as static: each by its position, by name, or both."""

    # The positions count without bound parameters. Negative ones count from the end of a call.
    positions: tuple[int, ...]
    names: frozenset[str]


class Signature(NamedTuple):
    """The roles of the arguments for one number of positional arguments and these keywords."""

    names: tuple[str, ...]  # the names of positional arguments; ``args[2]`` for one in ``*args``
    keywords: tuple[str, ...]  # the names of keyword arguments, sorted
    static: frozenset[ArgKey]  # the keys of the static arguments
    donated: frozenset[ArgKey]  # the keys of the donated arguments

    @property
    def dynamic(self) -> tuple[int, ...]:
        """The positions of dynamic arguments."""
        return tuple(i for i in range(len(self.names)) if i not in self.static)

    @property
    def dynamic_keywords(self) -> tuple[str, ...]:
        """The keyword arguments that are dynamic."""
        return tuple(name for name in self.keywords if name not in self.static)

    @property
    def static_keys(self) -> list[ArgKey]:
        """The keys of the static arguments in their order, positional arguments first."""
        return [key for key in (*range(len(self.names)), *self.keywords) if key in self.static]

    @property
    def static_names(self) -> list[str]:
        """The names of static arguments, in the order of ``static_keys``."""
        return [self.names[key] if isinstance(key, int) else key for key in self.static_keys]


class Parameters:
    """The parameters of a function with the roles that the user gave them.

    If only one of ``argnums`` and ``argnames`` is given, the signature gives the other, as in
    ``jax.jit``.

    Args:
      fun: the function.
      roles: which parameters are static or donated.
      bound: the number of leading parameters that are bound.
      from_call: whether negative positions count from the end of a call, as in ``jax.checkpoint``,
        not from the end of the signature.

    Attributes:
      bound: the number of leading parameters that are bound.
      fun_name: the name of the function, in messages.
      positional: the names of parameters that can be passed by position, with bound ones.
      keyword_only: the names of parameters that can only be passed by keyword.
      by_keyword: the names of all parameters that can be passed by keyword.
      var_positional, var_keyword: the names of ``*args`` and ``**kwargs``; None without these.
      static, donated: the parameters with these roles.

    Private attributes:

        _unbound      by the user's positions, the name of each parameter that may be passed by
                      position or by keyword; None for any other parameter
        _from_call    whether negative positions are only known with the number of arguments
        _all_must_be_passed   whether each negative position has to be that of an argument, as in
                      ``jax.checkpoint``; otherwise one such position is enough
        _signatures   the signatures of earlier calls, by the number of positional arguments and the
                      names of keyword arguments in the order of the call
    """

    def __init__(
        self, fun: Callable[..., Any], roles: Roles, bound: int = 0, *, from_call: bool = False
    ):
        """Reads the signature of the function, and finds all parameters that have a role."""
        self.bound = bound
        self.fun_name = name_of(fun)
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):  # some functions written in C have no signature
            any_parameters = inspect.signature(lambda *args, **kwargs: None).parameters
            parameters = list(any_parameters.values())

        def names_of(*kinds: object) -> tuple[str, ...]:
            return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)

        kinds = inspect.Parameter
        self.positional = names_of(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self.keyword_only = names_of(kinds.KEYWORD_ONLY)
        self.var_positional = next(iter(names_of(kinds.VAR_POSITIONAL)), None)
        self.var_keyword = next(iter(names_of(kinds.VAR_KEYWORD)), None)
        self.by_keyword = frozenset(names_of(kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY))
        # For f(self, x, *, flag) with ``self`` bound, ``_unbound`` is ["x", None]. ``flag`` has a
        # place, so that negative positions count as JAX counts them.
        names = [
            parameter.name if parameter.kind is kinds.POSITIONAL_OR_KEYWORD else None
            for parameter in parameters
        ]
        self._unbound = names[bound:]
        # With ``*args``, only the call knows where the arguments end.
        self._from_call = from_call or self.var_positional is not None
        # `jax.checkpoint`, for which ``from_call`` is, refuses positions before the first argument.
        self._all_must_be_passed = from_call
        self.static = self._complete(roles.static_argnums, roles.static_argnames)
        donated = self._complete(roles.donate_argnums, roles.donate_argnames)
        # Negative positions donate nothing if there are ``*args``, as in JAX.
        self.donated = donated._replace(positions=tuple(i for i in donated.positions if i >= 0))
        self._signatures: dict[tuple[int, tuple[str, ...]], Signature] = {}

    def check_names(self, option: str, names: Iterable[object]) -> None:
        """Raises a ``ValueError`` if some of the names in an option are not those of parameters.

        Args:
          option: the option, such as ``static_argnames``, in messages.
          names: the user's values of the option. Values that are not strings are refused elsewhere.
        """
        if self.var_keyword is not None:  # ``**kwargs`` takes any name
            return
        parameters = [*self.positional, *self.keyword_only]
        if self.var_positional is not None:  # JAX accepts the name of ``*args``, without effect
            parameters.append(self.var_positional)
        listed = f" (parameters: {', '.join(map(repr, parameters))})"
        unknown = [name for name in names if isinstance(name, str) and name not in parameters]
        lines = [f"  {name!r}{suggestion(name, parameters)}{listed}" for name in unknown]
        head = f"{option}: these are not parameters of the function:"
        raise_if_any(ValueError, head, lines, anchor="unknown-parameter")

    def _complete(
        self, positions: tuple[int, ...] | None, names: tuple[str, ...] | None
    ) -> Declared:
        """Returns the parameters with a role; what the user left out follows from the other.

        For f(x, y), the positions (-1,) become (1,), and the names follow: ``y``. So ``f(1, y=2)``
        has the role as well. Negative positions stay if they count from the end of each call.

        Args:
          positions: the user's positions of parameters with the role; None if there are none.
          names: the user's names of such parameters; None if there are none.
        """
        if positions is None and names is not None:
            positions = tuple(i for i, name in enumerate(self._unbound) if name in names)
        elif names is None and positions is not None:
            # The name for -1 is that of the last of all parameters, keyword-only ones included, as
            # in JAX's `infer_argnums_and_argnames`.
            total = len(self._unbound)
            names = tuple(
                name
                for i, name in enumerate(self._unbound)
                if name is not None and (i in positions or i - total in positions)
            )
        # The argument for -1 is the last one that is passed by position. So for f(x, *, flag), -1
        # has no name, but is the position of x.
        num_positional = len(self.positional) - self.bound
        if not self._from_call and num_positional:
            positions = tuple(i % num_positional if i < 0 else i for i in positions or ())
        return Declared(positions or (), frozenset(names or ()))

    def signature(self, num_positional: int, keywords: tuple[str, ...]) -> Signature:
        """Returns the roles of the arguments of a call; the same object for equal calls.

        Args:
          num_positional: the number of positional arguments, with bound ones.
          keywords: the names of keyword arguments.
        """
        key = (num_positional, keywords)  # keywords are not sorted, because that takes time
        signature = self._signatures.get(key)
        if signature is None:
            num_in_args = num_positional - len(self.positional)  # arguments in ``*args``
            in_args = (f"{self.var_positional or 'args'}[{i}]" for i in range(num_in_args))
            signature = self._signatures[key] = Signature(
                names=(*self.positional[:num_positional], *in_args),
                keywords=tuple(sorted(keywords)),  # sorted: their order in a call has no effect
                static=self._passed("static_argnums", self.static, num_positional, keywords),
                donated=self._passed("donate_argnums", self.donated, num_positional, keywords),
            )
        return signature

    def _passed(
        self,
        option: str,
        declared: Declared,
        num_positional: int,
        keywords: tuple[str, ...],
    ) -> frozenset[ArgKey]:
        """Returns the keys of the arguments of one call that have a role: positions, or names.

        The positions in keys count bound arguments; the user's positions do not. A position that is
        beyond the arguments of this call is left out.

        Args:
          option: the name of the option that declares the role, for messages.
          num_positional: the number of positional arguments of the call, with bound ones.
          keywords: the names of the keyword arguments of the call.

        Raises:
          ValueError: a negative position is before the first argument.
        """
        positions = declared.positions
        count = num_positional - self.bound  # the number of arguments as the user counts them
        # With two arguments, -3 is before the first one. `jax.checkpoint` always refuses that.
        # `jax.jit` refuses it only if there are arguments, and no position is that of one of them.
        is_any_before_first = any(i + count < 0 for i in positions)
        is_any_passed = any(-count <= i < count for i in positions)
        is_refused_by_jit = count > 0 and not is_any_passed
        if is_any_before_first and (self._all_must_be_passed or is_refused_by_jit):
            line = f"  {option}={positions}, {count} positional arguments"
            raise ValueError(message("these negative positions are out of range:", [line]))
        from_start = (i + count if i < 0 else i for i in positions)
        passed = frozenset(i + self.bound for i in from_start if 0 <= i < count)
        return passed | declared.names.intersection(keywords)


class SortedCall(NamedTuple):
    """The arguments of one call, by their roles."""

    signature: Signature  # the role of each argument
    statics: tuple[Any, ...]  # the static arguments, in the order of ``signature.static_keys``
    tree: ArgTree  # the dynamic arguments


def sort_call(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SortedCall:
    """Sorts the arguments of a call by their roles.

    Args:
      signature: the roles of the arguments of this call.
      args: the positional arguments.
      kwargs: the keyword arguments.

    Raises:
      ValueError: a static argument cannot be hashed.
    """
    if not signature.static:  # most calls: all arguments are dynamic
        return SortedCall(signature, (), (args, kwargs))
    # The key is the position of an argument, or its name if it is passed by keyword.
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    statics = tuple(values[key] for key in signature.static_keys)
    for name, value in zip(signature.static_names, statics, strict=True):
        _check_static(name, value)
    positional = tuple(args[i] for i in signature.dynamic)
    keywords = {name: kwargs[name] for name in signature.dynamic_keywords}
    return SortedCall(signature, statics, (positional, keywords))


def join_call(
    signature: Signature, statics: Sequence[object], tree: ArgTree
) -> tuple[list[Any], dict[str, Any]]:
    """Inverts :func:`sort_call`: returns all arguments, with static ones in their places.

    Args:
      signature: the role of each argument.
      statics: the static arguments, in the order of ``signature.static_keys``.
      tree: the dynamic arguments.

    Returns:
      The positional arguments, and the keyword arguments.
    """
    dynamic_args, dynamic_kwargs = tree
    values: dict[Any, Any] = dict(zip(signature.dynamic, dynamic_args, strict=True))
    values |= dynamic_kwargs
    values |= zip(signature.static_keys, statics, strict=True)
    args = [values.pop(i) for i in range(len(signature.names))]
    return args, values


def check_takes(name: str, fun: Callable[..., Any], call: SortedCall) -> None:
    """Raises a ``TypeError`` if a function cannot take the arguments of a call.

    Python raises one when it calls the function, which is too late if specs are for arguments that
    are missing: they then seem wrong for the others.

    Args:
      name: the name of the transform, in the message.
      fun: the user's function.
      call: the arguments.
    """
    try:
        # The signature of the function itself decides, because a decorator that passes arguments of
        # its own takes others than the function that it wraps.
        signature = inspect.signature(fun, follow_wrapped=False)
    except (ValueError, TypeError):  # some functions written in C have no signature
        return
    args, kwargs = join_call(call.signature, call.statics, call.tree)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = ", ".join(signature.parameters)
        raise TypeError(f"{name}: {name_of(fun)}({parameters}): {error}.") from None


def _check_static(name: str, value: object) -> None:
    """Raises a ``ValueError`` if a static argument is not hashable."""
    try:
        hash(value)
    except Exception as error:
        if isinstance(value, jax.Array | np.ndarray):
            remedy = "for an array, leave its argument out of the static ones."
        else:
            remedy = "pass a hashable value, such as a tuple instead of a list."
        text = message(
            "static arguments must be hashable:",
            [f"  argument {name!r} of type {type(value).__name__} ({error})"],
            f"They are part of the key of the compiled function: {remedy}",
        )
        raise see(ValueError(text), anchor="static-argument-that-is-not-hashable") from None
