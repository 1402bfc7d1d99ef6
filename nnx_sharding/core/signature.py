"""The arguments of a call → which are static or donated, and which spec belongs to which."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import message, raise_listed, see
from ..specs.fitting import suggestion

ArgTree = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments, keyword arguments


class Roles(NamedTuple):
    """Which parameters are static or donated, as the user declared, in hashable form."""

    static_argnums: tuple[int, ...] | None = None
    static_argnames: tuple[str, ...] | None = None
    donate_argnums: tuple[int, ...] | None = None
    donate_argnames: tuple[str, ...] | None = None

    @classmethod
    def of(cls, *given: object) -> Roles:
        """Returns the roles that the options of ``jax.jit`` with these names declare."""
        return cls(*map(_as_tuple, given))


def _as_tuple(given: Any) -> tuple[Any, ...] | None:
    if given is None:
        return None
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    return tuple(x if isinstance(x, str) else operator.index(x) for x in several)


class Signature(NamedTuple):
    """The roles of the arguments for one number of positional arguments and these keywords."""

    names: tuple[str, ...]  # of positional arguments, as in the signature (args[2] beyond it)
    keywords: tuple[str, ...]  # the keyword arguments, sorted
    static: frozenset[int]  # positions that are static
    static_keywords: frozenset[str]  # keyword arguments that are static
    donated: frozenset[int]  # positions that are donated
    donated_keywords: frozenset[str]  # keyword arguments that are donated

    @property
    def dynamic(self) -> tuple[int, ...]:
        """The positions of dynamic arguments."""
        return tuple(i for i in range(len(self.names)) if i not in self.static)

    @property
    def static_order(self) -> list[int | str]:
        """The positions and keywords of static arguments, in their order."""
        return [*sorted(self.static), *sorted(self.static_keywords)]

    @property
    def static_names(self) -> list[str]:
        """The names of static arguments, in the same order."""
        return [self.names[x] if isinstance(x, int) else x for x in self.static_order]

    @property
    def dynamic_keywords(self) -> tuple[str, ...]:
        """Keyword arguments that are not static."""
        return tuple(k for k in self.keywords if k not in self.static_keywords)


class Parameters:
    """The parameters of a function with the roles that the user gave them.

    If only one of ``argnums`` and ``argnames`` is given, the signature gives the other, as in
    ``jax.jit``. The first ``bound`` parameters are filled by bound objects; positions count without
    them. With ``from_call``, negative ones count from the end of a call, as in ``jax.checkpoint``,
    not from that of the signature.
    """

    def __init__(
        self, fun: Callable[..., Any], roles: Roles, bound: int = 0, *, from_call: bool = False
    ):
        self.bound = bound
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):  # some functions written in C
            parameters = list(inspect.signature(lambda *args, **kwargs: None).parameters.values())

        def named(*kinds: object) -> tuple[str, ...]:
            return tuple(p.name for p in parameters if p.kind in kinds)

        kinds = inspect.Parameter
        self.positional = named(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self.keyword_only = named(kinds.KEYWORD_ONLY)
        self.var_positional = next(iter(named(kinds.VAR_POSITIONAL)), None)
        self.var_keyword = next(iter(named(kinds.VAR_KEYWORD)), None)
        self.by_keyword = frozenset(named(kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY))
        # The names of the parameters that positions may name; None for others.
        unbound = [p.name if p.kind is kinds.POSITIONAL_OR_KEYWORD else None for p in parameters]
        self._unbound = unbound[bound:]
        self._from_call = from_call or self.var_positional is not None
        self._all_must_be_passed = from_call
        self.static = self._complete(roles.static_argnums, roles.static_argnames)
        donated, names = self._complete(roles.donate_argnums, roles.donate_argnames)
        self.donated = tuple(i for i in donated if i >= 0), names  # as in JAX, after *args
        self._signatures: dict[tuple[int, tuple[str, ...]], Signature] = {}

    def _complete(
        self, positions: tuple[int, ...] | None, names: tuple[str, ...] | None
    ) -> tuple[tuple[int, ...], frozenset[str]]:
        """Completes the positions and names of a role, each by the other."""
        if positions is None and names is not None:
            positions = tuple(i for i, name in enumerate(self._unbound) if name in names)
        elif names is None and positions is not None:
            # As in JAX, negative ones count all parameters here, and below only positional ones.
            pairs = enumerate(self._unbound)
            names = tuple(
                name for i, name in pairs if name and {i, i - len(self._unbound)} & {*positions}
            )
        count = len(self.positional) - self.bound
        if not self._from_call and count:
            positions = tuple(i % count if i < 0 else i for i in positions or ())
        return positions or (), frozenset(names or ())

    def signature(self, num_positional: int, keywords: tuple[str, ...]) -> Signature:
        """Returns the roles for a call with so many positional arguments, with bound ones."""
        key = (num_positional, keywords)
        signature = self._signatures.get(key)
        if signature is None:
            rest, beyond = self.var_positional or "args", num_positional - len(self.positional)
            signature = self._signatures[key] = Signature(
                (*self.positional[:num_positional], *(f"{rest}[{i}]" for i in range(beyond))),
                tuple(sorted(keywords)),
                self._positions("static_argnums", self.static[0], num_positional),
                self.static[1].intersection(keywords),
                self._positions("donate_argnums", self.donated[0], num_positional),
                self.donated[1].intersection(keywords),
            )
        return signature

    def _positions(
        self, option: str, declared: tuple[int, ...], num_positional: int
    ) -> frozenset[int]:
        """Returns the positions in a call, without those that were not passed, as in JAX.

        `jax.checkpoint` refuses any negative one that was not passed, `jax.jit` if no position was.
        """
        count = num_positional - self.bound
        is_outside = [i + count < 0 for i in declared]
        none_inside = count > 0 and not any(-count <= i < count for i in declared)
        if any(is_outside) and (self._all_must_be_passed or none_inside):
            line = f"  {option}={declared}, {count} positional arguments"
            raise ValueError(message("these negative positions are out of range:", [line]))
        inside = (i if i >= 0 else i + count for i in declared)
        return frozenset(i + self.bound for i in inside if 0 <= i < count)


class SortedCall(NamedTuple):
    """One call by roles: static arguments, positional ones first, and the tree of all others."""

    signature: Signature
    statics: tuple[Any, ...]
    tree: ArgTree


def sort_call(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SortedCall:
    """Sorts the arguments of a call by their roles, and checks the static ones."""
    if not signature.static and not signature.static_keywords:
        return SortedCall(signature, (), (args, kwargs))
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    statics = tuple(values[which] for which in signature.static_order)
    for name, value in zip(signature.static_names, statics, strict=True):
        _check_static(name, value)
    keywords = {k: kwargs[k] for k in signature.dynamic_keywords}
    return SortedCall(signature, statics, (tuple(args[i] for i in signature.dynamic), keywords))


def join_call(
    signature: Signature, statics: Sequence[object], tree: ArgTree
) -> tuple[list[Any], dict[str, Any]]:
    """Inverts :func:`sort_call`: returns all arguments, with static ones in their places."""
    values: dict[Any, Any] = {**dict(zip(signature.dynamic, tree[0], strict=True)), **tree[1]}
    values |= zip(signature.static_order, statics, strict=True)
    args = [values.pop(i) for i in range(len(signature.names))]
    return args, values


def _check_static(name: str, value: object) -> None:
    try:
        hash(value)
    except Exception as error:
        text = message(
            "static arguments must be hashable:",
            [f"  argument {name!r} of type {type(value).__name__} ({error})"],
            "They are part of the key of the compiled function: pass a hashable value, such as a "
            "tuple instead of a list.",
        )
        raise see(ValueError(text), anchor="static-argument-that-is-not-hashable") from None


def align_specs(
    specs: object, parameters: Parameters, signature: Signature, option: str, default: object = None
) -> ArgTree:
    """Returns the spec of each dynamic argument: positional ones, and by keyword.

    ``specs`` is one spec for all arguments; a tuple or list with one for each positional parameter,
    where static parameters are left out or have None; or a mapping from parameter names. What it
    does not mention has the ``default``. ``option`` is its name in messages.
    """
    if isinstance(specs, Mapping) and all(isinstance(name, str) for name in specs):
        spec_of = _specs_by_name(specs, parameters, option, default)
        return (
            tuple(spec_of(signature.names[i], i) for i in signature.dynamic),
            {k: spec_of(k, None) for k in signature.dynamic_keywords},
        )
    if not isinstance(specs, tuple | list) or hasattr(specs, "_fields"):
        return (specs,) * len(signature.dynamic), dict.fromkeys(signature.dynamic_keywords, specs)
    specs = [None] * parameters.bound + list(specs)  # the user counts without the bound object
    by_name = {i for i, n in enumerate(parameters.positional) if n in signature.static_keywords}
    # Including those that this call left out: entries are for parameters, not for arguments.
    declared = {i + parameters.bound for i in parameters.static[0] if i >= 0}
    static = signature.static | by_name | declared
    names = max(signature.names, parameters.positional, key=len)
    dynamic = [i for i in range(len(names)) if i not in static]
    may_have_static = all(specs[i] is None for i in static if i < len(specs))
    if len(specs) > len(dynamic) and may_have_static:
        by_position = dict(enumerate(specs))
    else:
        by_position = dict(zip(dynamic, specs, strict=False))
    missing = [signature.names[i] for i in signature.dynamic if i not in by_position]
    is_open = parameters.var_positional is not None
    if missing or len(specs) > len(names) or (len(by_position) < len(specs) and not is_open):
        static_names = [names[i] for i in sorted(static) if i < len(names)]
        count, given = len(specs) - parameters.bound, names[parameters.bound :]
        lines = [
            f"{count} {'entry' if count == 1 else 'entries'} for {len(given)} positional "
            f"parameters: {', '.join(given)}",
            *(f"{name}: static, needs no entry, or None" for name in static_names),
            *(f"{name}: no entry" for name in missing),
            f"Give one entry for each of ({', '.join(x for x in given if x not in static_names)}), "
            "or a mapping from parameter names.",
        ]
        head = f"{option}: the number of entries does not match the parameters:"
        raise see(ValueError(message(head, ["  " + "\n  ".join(lines)])), anchor="number-of-specs")
    keywords = {
        name: by_position.get(i, default)
        for i, name in enumerate(parameters.positional)
        if name in parameters.by_keyword
    }
    return (
        tuple(by_position[i] for i in signature.dynamic),
        {k: keywords.get(k, default) for k in signature.dynamic_keywords},
    )


def _specs_by_name(
    specs: Mapping[str, Any], parameters: Parameters, option: str, default: object
) -> Callable[[str, int | None], Any]:
    """Returns a function that finds the spec of an argument by its name and position."""
    named = (*parameters.positional, *parameters.keyword_only)
    rest = [n for n in (parameters.var_positional, parameters.var_keyword) if n is not None]
    unknown = [name for name in specs if name not in named and name not in rest]
    if parameters.var_keyword is None:
        known = (*named, *rest)
        listed = f" (parameters: {', '.join(map(repr, known))})"
        lines = [f"  {name!r}{suggestion(name, known)}{listed}" for name in unknown]
        head = f"{option}: these are not parameters of the function:"
        raise_listed(ValueError, head, lines, anchor="unknown-parameter")

    def spec_of(name: str, position: int | None) -> Any:
        if position is not None or name in parameters.by_keyword or name not in named:
            if name in specs:
                return specs[name]
            if name in named:
                return default
        if position is None:
            others = specs.get(parameters.var_keyword or "", default)
            return others.get(name, default) if isinstance(others, Mapping) else others
        others = specs.get(parameters.var_positional or "", default)
        index = position - len(parameters.positional)
        return others[index] if isinstance(others, tuple | list) else others

    return spec_of
