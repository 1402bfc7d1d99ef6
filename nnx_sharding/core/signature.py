"""The arguments of a call → which of them are static, and which are donated.

As in ``jax.jit``, a *static* argument is a part of the key of the compiled function, and all others
are *dynamic*; the arrays of a *donated* one may be overwritten. These are the *roles* of arguments,
which the user declares by ``static_argnums``, ``donate_argnames`` and so on. An argument is known
by its *key*: its position, or its name if it is passed by keyword. A *bound* parameter, such as
``self``, is filled by an object before the call; the user's positions count without it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ..errors import message, raise_listed, see
from ..specs.fitting import suggestion

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
        """Returns the roles that the options of ``jax.jit`` with these names declare."""
        return cls(*map(_as_tuple, options))


def _as_tuple(option: Any) -> tuple[Any, ...] | None:
    """Returns the positions or names of an option; the user may give one or a sequence."""
    if option is None:
        return None
    several = option if isinstance(option, Iterable) and not isinstance(option, str) else (option,)
    return tuple(x if isinstance(x, str) else operator.index(x) for x in several)


class Declared(NamedTuple):
    """The parameters that have one role, such as static: each by its position, by name, or both."""

    positions: tuple[int, ...]  # without bound parameters; negative ones count from a call's end
    names: frozenset[str]


class Signature(NamedTuple):
    """The roles of the arguments for one number of positional arguments and these keywords."""

    names: tuple[str, ...]  # of positional arguments, as in the signature (args[2] beyond it)
    keywords: tuple[str, ...]  # the keyword arguments, sorted
    static: frozenset[ArgKey]  # the keys of the static arguments
    donated: frozenset[ArgKey]  # the keys of the donated ones

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
        """The static arguments in their order, positional ones first."""
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
        not from that of the signature.

    Attributes:
      positional, keyword_only, by_keyword: the names of such parameters.
      var_positional, var_keyword: those of ``*args`` and ``**kwargs``, or None.
      static, donated: the parameters with these roles.

    ``_unbound`` has, by the user's positions, the name of each parameter that may be passed by
    position or by keyword, and None for others. ``_from_call`` says whether negative positions can
    only be understood when the number of arguments is known. ``_all_must_be_passed`` says whether
    each negative position has to be that of an argument, as in ``jax.checkpoint``, not only one.
    """

    def __init__(
        self, fun: Callable[..., Any], roles: Roles, bound: int = 0, *, from_call: bool = False
    ):
        """Reads the signature of the function."""
        self.bound = bound
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):  # some functions written in C
            parameters = list(inspect.signature(lambda *args, **kwargs: None).parameters.values())

        def names_of(*kinds: object) -> tuple[str, ...]:
            return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)

        kinds = inspect.Parameter
        self.positional = names_of(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self.keyword_only = names_of(kinds.KEYWORD_ONLY)
        self.var_positional = next(iter(names_of(kinds.VAR_POSITIONAL)), None)
        self.var_keyword = next(iter(names_of(kinds.VAR_KEYWORD)), None)
        self.by_keyword = frozenset(names_of(kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY))
        # For f(self, x, *, flag) with ``self`` bound: ["x", None]. With ``flag`` in its place, so
        # that negative positions count as JAX counts them.
        names = [
            parameter.name if parameter.kind is kinds.POSITIONAL_OR_KEYWORD else None
            for parameter in parameters
        ]
        self._unbound = names[bound:]
        # With ``*args``, only the call knows where the arguments end.
        self._from_call = from_call or self.var_positional is not None
        self._all_must_be_passed = from_call  # `jax.checkpoint` does both
        self.static = self._complete(roles.static_argnums, roles.static_argnames)
        donated = self._complete(roles.donate_argnums, roles.donate_argnames)
        # As in JAX, negative positions donate nothing if there are ``*args``.
        self.donated = donated._replace(positions=tuple(i for i in donated.positions if i >= 0))
        self._signatures: dict[tuple[int, tuple[str, ...]], Signature] = {}

    def check_names(self, option: str, names: Iterable[object]) -> None:
        """Raises a ``ValueError`` if some of the names in an option are not those of parameters.

        Args:
          option: the option, such as ``static_argnames``, in messages.
          names: what the user gave there; what is not a string is refused elsewhere.
        """
        if self.var_keyword is not None:  # takes any name
            return
        known = [*self.positional, *self.keyword_only]
        if self.var_positional is not None:  # JAX accepts the name of ``*args``, without effect
            known.append(self.var_positional)
        listed = f" (parameters: {', '.join(map(repr, known))})"
        unknown = [name for name in names if isinstance(name, str) and name not in known]
        lines = [f"  {name!r}{suggestion(name, known)}{listed}" for name in unknown]
        head = f"{option}: these are not parameters of the function:"
        raise_listed(ValueError, head, lines, anchor="unknown-parameter")

    def _complete(
        self, positions: tuple[int, ...] | None, names: tuple[str, ...] | None
    ) -> Declared:
        """Returns the parameters with a role; what the user left out follows from the other.

        For f(x, y), the positions (-1,) become (1,), and the names follow: ``y``. So ``f(1, y=2)``
        has the role as well. Negative positions stay if they count from the end of each call.

        Args:
          positions: the user's positions of parameters with the role; None if he gave none.
          names: the names that he gave, likewise.
        """
        if positions is None and names is not None:
            positions = tuple(i for i, name in enumerate(self._unbound) if name in names)
        elif names is None and positions is not None:
            # Which name -1 means: that of the last of all parameters, in JAX's
            # `infer_argnums_and_argnames`, which this repeats.
            total = len(self._unbound)
            names = tuple(
                name
                for i, name in enumerate(self._unbound)
                if name is not None and (i in positions or i - total in positions)
            )
        # Which argument -1 means: the last that is passed by position. So for f(x, *, flag), -1 has
        # no name, but is the position of x.
        num_positional = len(self.positional) - self.bound
        if not self._from_call and num_positional:
            positions = tuple(i % num_positional if i < 0 else i for i in positions or ())
        return Declared(positions or (), frozenset(names or ()))

    def signature(self, num_positional: int, keywords: tuple[str, ...]) -> Signature:
        """Returns the roles of the arguments of a call; the same object for equal calls.

        Args:
          num_positional: the number of its positional arguments, with bound ones.
          keywords: the names of its keyword arguments.
        """
        key = (num_positional, keywords)  # not sorted, which would take time in each call
        signature = self._signatures.get(key)
        if signature is None:
            num_in_args = num_positional - len(self.positional)  # arguments in ``*args``
            in_args = (f"{self.var_positional or 'args'}[{i}]" for i in range(num_in_args))
            signature = self._signatures[key] = Signature(
                names=(*self.positional[:num_positional], *in_args),
                keywords=tuple(sorted(keywords)),  # so that their order in a call has no effect
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

        The positions in keys count bound arguments, those of the user do not. A position from the
        number of arguments on has no argument in this call, and is left out.

        Args:
          option: the name of the option that declares the role, for messages.
          declared: the parameters that have it.
          num_positional: the number of positional arguments of the call, with bound ones.
          keywords: the names of its keyword arguments.

        Raises:
          ValueError: a negative position is before the first argument.
        """
        positions = declared.positions
        count = num_positional - self.bound  # as the user counts
        # -3 of two arguments is before the first one. `jax.checkpoint` refuses that in any case;
        # `jax.jit` only if no position is that of an argument, and there are arguments.
        any_before_first = any(i + count < 0 for i in positions)
        none_inside = count > 0 and not any(-count <= i < count for i in positions)
        if any_before_first and (self._all_must_be_passed or none_inside):
            line = f"  {option}={positions}, {count} positional arguments"
            raise ValueError(message("these negative positions are out of range:", [line]))
        from_start = (i + count if i < 0 else i for i in positions)
        passed = frozenset(i + self.bound for i in from_start if 0 <= i < count)
        return passed | declared.names.intersection(keywords)


class SortedCall(NamedTuple):
    """The arguments of one call, by their roles."""

    signature: Signature  # which argument has which role
    statics: tuple[Any, ...]  # the static ones, in the order of ``signature.static_keys``
    tree: ArgTree  # all others


def sort_call(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SortedCall:
    """Sorts the arguments of a call by their roles; a ``ValueError`` for unhashable static ones.

    Args:
      signature: the roles of the arguments of this call.
      args: the positional arguments.
      kwargs: those by keyword.
    """
    if not signature.static:  # most calls: all arguments are dynamic
        return SortedCall(signature, (), (args, kwargs))
    # By key: the position of an argument, or its name if it is passed by keyword.
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    statics = tuple(values[key] for key in signature.static_keys)
    for name, value in zip(signature.static_names, statics, strict=True):  # names for messages
        _check_static(name, value)
    positional = tuple(args[i] for i in signature.dynamic)
    keywords = {name: kwargs[name] for name in signature.dynamic_keywords}
    return SortedCall(signature, statics, (positional, keywords))


def join_call(
    signature: Signature, statics: Sequence[object], tree: ArgTree
) -> tuple[list[Any], dict[str, Any]]:
    """Inverts :func:`sort_call`: returns all arguments, with static ones in their places.

    Args:
      signature: says which argument has which role.
      statics: the static arguments, in the order of ``signature.static_keys``.
      tree: all others.

    Returns:
      The positional arguments, and those by keyword.
    """
    dynamic_args, dynamic_kwargs = tree
    values: dict[Any, Any] = dict(zip(signature.dynamic, dynamic_args, strict=True))
    values |= dynamic_kwargs
    values |= zip(signature.static_keys, statics, strict=True)
    args = [values.pop(i) for i in range(len(signature.names))]
    return args, values


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
