"""Which parameter is which: static, donated, named, and which spec belongs to it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from .. import _compat
from ..fitting import suggestion


class Signature(NamedTuple):
    """The roles of the arguments for one way of calling: so many positional, these keywords.

    Attributes:
      names: a name for each positional argument, as in the signature (``args[2]`` beyond it).
      keywords: the keyword arguments, sorted.
      static: positions that are static.
      static_keywords: keyword arguments that are static.
      donated: positions that are donated.
      donated_keywords: keyword arguments that are donated.
    """

    names: tuple[str, ...]
    keywords: tuple[str, ...]
    static: frozenset[int]
    static_keywords: frozenset[str]
    donated: frozenset[int]
    donated_keywords: frozenset[str]

    @property
    def dynamic(self) -> tuple[int, ...]:
        """Positions that are not static."""
        return tuple(i for i in range(len(self.names)) if i not in self.static)

    @property
    def static_names(self) -> list[str]:
        """The names of static arguments in their order: positional ones first."""
        return [*(self.names[i] for i in sorted(self.static)), *sorted(self.static_keywords)]

    @property
    def dynamic_keywords(self) -> tuple[str, ...]:
        """Keyword arguments that are not static."""
        return tuple(k for k in self.keywords if k not in self.static_keywords)


class Parameters:
    """The parameters of a function with the roles that the user gave them.

    ``argnums`` and ``argnames`` complete each other by the signature in the way of
    ``jax.jit``: where only one of the two is given, the other is inferred.

    Args:
      fun: the function.
      static_argnums: positions of static arguments; negative ones count from the end.
      static_argnames: names of static arguments.
      donate_argnums: positions of donated arguments.
      donate_argnames: names of donated arguments.
      bound: how many leading parameters are filled by a bound object; positions count
        without them.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        bound: int = 0,
    ):
        self.bound = bound
        self.positional: tuple[str, ...] = ()
        self.var_positional: str | None = "args"
        self.var_keyword: str | None = "kwargs"
        self.keyword_only: tuple[str, ...] = ()
        self._by_keyword: frozenset[str] = frozenset()
        try:
            signature = inspect.signature(fun)
        except (ValueError, TypeError):
            pass
        else:
            self._read(signature)
        self.has_signature = self.var_positional != "args" or bool(self.positional)
        self.static = self._complete(static_argnums, static_argnames)
        self.donated = self._complete(donate_argnums, donate_argnames)
        self._signatures: dict[tuple[int, tuple[str, ...]], Signature] = {}

    def _read(self, signature: inspect.Signature) -> None:
        kinds = inspect.Parameter
        parameters = signature.parameters.values()
        self.positional = tuple(
            p.name
            for p in parameters
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        )
        self._by_keyword = frozenset(
            p.name for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD
        )
        self.keyword_only = tuple(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY)
        self.var_positional = next(
            (p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None
        )
        self.var_keyword = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), None)

    def _complete(
        self, argnums: int | Sequence[int] | None, argnames: str | Iterable[str] | None
    ) -> tuple[tuple[int, ...], frozenset[str]]:
        """Positions and names of a role, each completed by the other."""
        nums = None if argnums is None else _index_tuple(argnums)
        names = None if argnames is None else _name_tuple(argnames)
        own = self.positional[self.bound :]
        if nums is None and names is not None:
            nums = tuple(i for i, n in enumerate(own) if n in names and n in self._by_keyword)
        elif names is None and nums is not None:
            wanted = {n if n >= 0 else n + len(own) for n in nums}
            names = tuple(n for i, n in enumerate(own) if i in wanted and n in self._by_keyword)
        return nums or (), frozenset(names or ())

    def signature(self, num_positional: int, keywords: tuple[str, ...]) -> Signature:
        """The roles for a call with so many positional arguments and these keywords.

        Counts include the bound objects.
        """
        key = (num_positional, keywords)
        found = self._signatures.get(key)
        if found is None:
            found = self._signatures[key] = self._make_signature(num_positional, keywords)
        return found

    def _make_signature(self, num_positional: int, keywords: tuple[str, ...]) -> Signature:
        rest = self.var_positional or "args"
        named = len(self.positional)
        names = tuple(
            self.positional[i] if i < named else f"{rest}[{i - named}]"
            for i in range(num_positional)
        )

        own = num_positional - self.bound

        def positions(nums: tuple[int, ...], role: str) -> frozenset[int]:
            # As in JAX: what lies beyond the call was not passed; but from the end, all count.
            if any(n + own < 0 for n in nums):
                raise ValueError(
                    f"{role}={nums} counts from the end beyond the {own} positional arguments of "
                    "this call."
                )
            inside = (n if n >= 0 else n + own for n in nums)
            return frozenset(n + self.bound for n in inside if n < own)

        sorted_keywords = tuple(sorted(keywords))
        return Signature(
            names,
            sorted_keywords,
            positions(self.static[0], "static_argnums"),
            self.static[1].intersection(keywords),
            positions(self.donated[0], "donate_argnums"),
            self.donated[1].intersection(keywords),
        )


class Call(NamedTuple):
    """One call, sorted: what is static, and the pytree of all that is not.

    Attributes:
      signature: the roles of the arguments.
      statics: the static arguments, positional ones first.
      tree: ``(positional, keywords)`` without the static arguments.
    """

    signature: Signature
    statics: tuple[Any, ...]
    tree: tuple[tuple[Any, ...], dict[str, Any]]


def sort_call(
    parameters: Parameters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: Signature | None = None,
) -> Call:
    """Sorts the arguments of a call by their roles: those of ``signature``, if it is given.

    Raises:
      ValueError: a static argument is not hashable.
    """
    signature = signature or parameters.signature(len(args), tuple(kwargs))
    if not signature.static and not signature.static_keywords:
        return Call(signature, (), (args, kwargs))
    statics = [_static_argument(signature.names[i], args[i]) for i in sorted(signature.static)]
    statics += [_static_argument(k, kwargs[k]) for k in sorted(signature.static_keywords)]
    return Call(
        signature,
        tuple(statics),
        (
            tuple(args[i] for i in signature.dynamic),
            {k: kwargs[k] for k in signature.dynamic_keywords},
        ),
    )


def join_call(
    signature: Signature, statics: Sequence[Any], tree: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """The opposite of :func:`sort_call`: all arguments, static ones in their places."""
    dynamic, kwargs = iter(tree[0]), dict(tree[1])
    values = iter(statics)
    args = [
        next(values) if i in signature.static else next(dynamic)
        for i in range(len(signature.names))
    ]
    for name in sorted(signature.static_keywords):
        kwargs[name] = next(values)
    return args, kwargs


def _static_argument(name: str, value: Any) -> Any:
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"argument {name!r} is static, but its value of type {type(value).__name__} is not "
            f"hashable ({error}). Static arguments are part of the key under which the compiled "
            "function is kept: pass a hashable value, such as a tuple instead of a list."
        ) from None
    if _compat.is_graph_object(value) and jax.tree_util.tree_leaves(nnx.state(value)):
        raise ValueError(
            f"argument {name!r} is static, but its value is a {type(value).__name__} with arrays. "
            "They would become constants of the compiled function, which no later change reaches. "
            "Pass it as an ordinary argument: its structure and its static attributes are part of "
            "the key under which the function is kept anyway."
        )
    return value


def align_specs(
    specs: Any, parameters: Parameters, signature: Signature, what: str, other: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The spec of each dynamic argument: positional ones, and by keyword.

    Args:
      specs: one spec for all arguments; a tuple or list with one for each positional
        parameter, where static parameters are left out or have None; or a mapping from
        parameter names. What it does not mention is ``other``.
      parameters: the parameters of the function.
      signature: the roles of the arguments in this call.
      what: the name of the option, for messages.
      other: the spec of what ``specs`` does not mention.

    Raises:
      ValueError: the number of specs does not fit, or a name is no parameter.
    """
    if isinstance(specs, Mapping) and all(isinstance(name, str) for name in specs):
        return _specs_by_name(specs, parameters, signature, what, other)
    if not isinstance(specs, tuple | list) or hasattr(specs, "_fields"):
        return (specs,) * len(signature.dynamic), dict.fromkeys(signature.dynamic_keywords, specs)
    specs = [None] * parameters.bound + list(specs)
    static = _static_parameters(parameters, signature)
    total = max(len(parameters.positional), len(signature.names))
    dynamic = [i for i in range(total) if i not in static]
    beside = [specs[i] for i in static if i < len(specs)]
    if len(specs) > len(dynamic) and all(spec is None for spec in beside):
        by_position = dict(enumerate(specs))
    else:
        by_position = dict(zip(dynamic, specs, strict=False))
    missing = [signature.names[i] for i in signature.dynamic if i not in by_position]
    is_open = parameters.var_positional is not None
    if missing or len(specs) > total or (len(by_position) < len(specs) and not is_open):
        given = len(specs) - parameters.bound
        raise ValueError(_count_message(what, given, parameters, signature, static, missing))
    by_name = {
        parameters.positional[i]: s
        for i, s in by_position.items()
        if i < len(parameters.positional)
    }
    return (
        tuple(by_position[i] for i in signature.dynamic),
        {k: by_name.get(k, other) for k in signature.dynamic_keywords},
    )


def _count_message(
    what: str,
    given: int,
    parameters: Parameters,
    signature: Signature,
    static: frozenset[int],
    missing: Sequence[str],
) -> str:
    names = max(signature.names, parameters.positional, key=len)
    count = len(names) - parameters.bound
    wanted = [name for i, name in enumerate(names) if i >= parameters.bound and i not in static]
    statics = [name for i, name in enumerate(names) if i in static]
    return (
        f"{what} has {given} {'entry' if given == 1 else 'entries'}, the function has {count} "
        f"positional parameters: {', '.join(names[parameters.bound :])}."
        + (f" {', '.join(statics)}: static, and needs no entry, or None." if statics else "")
        + (f" {', '.join(missing)}: no entry." if missing else "")
        + f" Give one entry for each of ({', '.join(wanted)}), or a mapping from parameter names."
    )


def _specs_by_name(
    specs: Mapping[str, Any], parameters: Parameters, signature: Signature, what: str, other: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    known = (*parameters.positional, *parameters.keyword_only)
    extra = [n for n in (parameters.var_positional, parameters.var_keyword) if n]
    unknown = [n for n in specs if n not in known and n not in extra]
    if unknown and parameters.var_keyword is None:
        raise ValueError(
            f"{what} names {', '.join(f'{n!r}{suggestion(n, known)}' for n in unknown)}\nThe "
            f"parameters of the function are {', '.join(map(repr, (*known, *extra)))}."
        )
    rest = specs.get(parameters.var_positional, other) if parameters.var_positional else other
    named = len(parameters.positional)

    def positional(i: int) -> Any:
        if i < named:
            return specs.get(signature.names[i], other)
        return rest[i - named] if isinstance(rest, tuple | list) else rest

    others = specs.get(parameters.var_keyword, other) if parameters.var_keyword else other

    def keyword(name: str) -> Any:
        if name in specs:
            return specs[name]
        if name in known:
            return other
        return others.get(name, other) if isinstance(others, Mapping) else others

    return (
        tuple(positional(i) for i in signature.dynamic),
        {k: keyword(k) for k in signature.dynamic_keywords},
    )


def _static_parameters(parameters: Parameters, signature: Signature) -> frozenset[int]:
    """Positions in the signature that are static, also those that this call left out."""
    names = signature.static_keywords
    by_name = {i for i, name in enumerate(parameters.positional) if name in names}
    nums = {
        n if n >= 0 else n + len(parameters.positional) - parameters.bound
        for n in parameters.static[0]
    }
    return signature.static | by_name | {n + parameters.bound for n in nums}


def _index_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    try:
        return (operator.index(value),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(map(operator.index, value))  # type: ignore[arg-type]


def _name_tuple(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
