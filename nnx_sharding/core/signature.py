"""The arguments of a call → which are static or donated, and which spec belongs to which.

As in ``jax.jit``, a *static* argument is a part of the key of the compiled function, and all others
are *dynamic*; the arrays of a *donated* one may be overwritten. An argument is known by its *key*:
its position, or its name if it is passed by keyword. A *bound* parameter, such as ``self``, is
filled by an object before the call; the user's positions and specs count without it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..errors import message, raise_listed, see
from ..specs.fitting import suggestion
from ..specs.types import Spec

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


class Signature(NamedTuple):
    """The roles of the arguments for one number of positional arguments and these keywords."""

    names: tuple[str, ...]  # of positional arguments, as in the signature (args[2] beyond it)
    keywords: tuple[str, ...]  # the keyword arguments, sorted
    static: frozenset[ArgKey]
    donated: frozenset[ArgKey]

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
        """The names of static arguments, in the same order."""
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
            return tuple(p.name for p in parameters if p.kind in kinds)

        kinds = inspect.Parameter
        self.positional = names_of(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self.keyword_only = names_of(kinds.KEYWORD_ONLY)
        self.var_positional = next(iter(names_of(kinds.VAR_POSITIONAL)), None)
        self.var_keyword = next(iter(names_of(kinds.VAR_KEYWORD)), None)
        self.by_keyword = frozenset(names_of(kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY))
        # The names of the parameters that positions may name; None for others.
        unbound = [p.name if p.kind is kinds.POSITIONAL_OR_KEYWORD else None for p in parameters]
        self._unbound = unbound[bound:]
        # With ``*args``, only the call knows where the arguments end.
        self._from_call = from_call or self.var_positional is not None
        self._all_must_be_passed = from_call
        # The declared positions and names of each role.
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
        """Returns the roles of the arguments of a call.

        Args:
          num_positional: the number of its positional arguments, with bound ones.
          keywords: the names of the others.
        """
        key = (num_positional, keywords)
        signature = self._signatures.get(key)
        if signature is None:
            num_beyond = num_positional - len(self.positional)
            beyond = (f"{self.var_positional or 'args'}[{i}]" for i in range(num_beyond))
            signature = self._signatures[key] = Signature(
                (*self.positional[:num_positional], *beyond),
                tuple(sorted(keywords)),
                self._passed("static_argnums", self.static, num_positional, keywords),
                self._passed("donate_argnums", self.donated, num_positional, keywords),
            )
        return signature

    def _passed(
        self,
        option: str,
        declared: tuple[tuple[int, ...], frozenset[str]],
        num_positional: int,
        keywords: tuple[str, ...],
    ) -> frozenset[ArgKey]:
        """Returns the keys of the passed arguments that have a role.

        `jax.checkpoint` refuses any negative position that was not passed, `jax.jit` only if none
        of all positions was.

        Args:
          option: the name of the option that declares the role, for messages.
          declared: the positions and names that the user declared.
          num_positional: the number of positional arguments of the call, with bound ones.
          keywords: the names of its keyword arguments.
        """
        positions, names = declared
        count = num_positional - self.bound
        is_outside = any(i + count < 0 for i in positions)
        none_inside = count > 0 and not any(-count <= i < count for i in positions)
        if is_outside and (self._all_must_be_passed or none_inside):
            line = f"  {option}={positions}, {count} positional arguments"
            raise ValueError(message("these negative positions are out of range:", [line]))
        inside = (i if i >= 0 else i + count for i in positions)
        return frozenset(i + self.bound for i in inside if 0 <= i < count).union(
            names.intersection(keywords)
        )


class SortedCall(NamedTuple):
    """One call by roles: static arguments, positional ones first, and the tree of all others."""

    signature: Signature
    statics: tuple[Any, ...]
    tree: ArgTree


def sort_call(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SortedCall:
    """Sorts the arguments of a call by their roles, and checks the static ones."""
    if not signature.static:
        return SortedCall(signature, (), (args, kwargs))
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    statics = tuple(values[key] for key in signature.static_keys)
    for name, value in zip(signature.static_names, statics, strict=True):
        _check_static(name, value)
    keywords = {name: kwargs[name] for name in signature.dynamic_keywords}
    return SortedCall(signature, statics, (tuple(args[i] for i in signature.dynamic), keywords))


def join_call(
    signature: Signature, statics: Sequence[object], tree: ArgTree
) -> tuple[list[Any], dict[str, Any]]:
    """Inverts :func:`sort_call`: returns all arguments, with static ones in their places."""
    values: dict[Any, Any] = {**dict(zip(signature.dynamic, tree[0], strict=True)), **tree[1]}
    values |= zip(signature.static_keys, statics, strict=True)
    args = [values.pop(i) for i in range(len(signature.names))]
    return args, values


def _check_static(name: str, value: object) -> None:
    """Raises a ``ValueError`` if a static argument is not hashable."""
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

    Args:
      specs: one spec for all arguments; a tuple or list with one for each positional parameter,
        where static parameters are left out or have None; or a mapping from parameter names.
      parameters: of the function.
      signature: the roles of the arguments of the call.
      option: the name of the specs in messages.
      default: the spec of arguments that ``specs`` does not mention.
    """
    if isinstance(specs, Mapping) and all(isinstance(name, str) for name in specs):
        spec_of = _specs_by_name(specs, parameters, option, default)
        return (
            tuple(spec_of(signature.names[i], i) for i in signature.dynamic),
            {name: spec_of(name, None) for name in signature.dynamic_keywords},
        )
    if not isinstance(specs, tuple | list) or hasattr(specs, "_fields"):  # named tuples are trees
        return (specs,) * len(signature.dynamic), dict.fromkeys(signature.dynamic_keywords, specs)
    by_position = _specs_by_position(specs, parameters, signature, option)
    by_name = {
        name: by_position.get(i, default)
        for i, name in enumerate(parameters.positional)
        if name in parameters.by_keyword
    }
    return (
        tuple(by_position[i] for i in signature.dynamic),
        {name: by_name.get(name, default) for name in signature.dynamic_keywords},
    )


def _specs_by_position(
    specs: Sequence[Any], parameters: Parameters, signature: Signature, option: str
) -> dict[int, Any]:
    """Returns the spec of each positional parameter, by its position.

    Args:
      specs: one for each positional parameter; static parameters are left out, or have None.
      parameters: those of the user's function.
      signature: the roles of the arguments of the call.
      option: the name of the option with the specs, for messages.

    Raises:
      ValueError: the number of specs is wrong.
    """
    specs = [None] * parameters.bound + list(specs)  # the user counts without the bound object
    by_keyword = {i for i, name in enumerate(parameters.positional) if name in signature.static}
    # Including parameters that this call left out: entries are for parameters, not for arguments.
    declared = {i + parameters.bound for i in parameters.static[0] if i >= 0}
    static = {i for i in signature.static if isinstance(i, int)} | by_keyword | declared
    names = max(signature.names, parameters.positional, key=len)
    dynamic = [i for i in range(len(names)) if i not in static]
    # The user may leave out the entries of static parameters, or give None.
    may_have_static = all(specs[i] is None for i in static if i < len(specs))
    if len(specs) > len(dynamic) and may_have_static:
        by_position = dict(enumerate(specs))
    else:
        by_position = dict(zip(dynamic, specs, strict=False))
    missing = [signature.names[i] for i in signature.dynamic if i not in by_position]
    has_surplus = len(by_position) < len(specs) and parameters.var_positional is None
    if not missing and len(specs) <= len(names) and not has_surplus:
        return by_position
    static_names = [names[i] for i in sorted(static) if i < len(names)]
    count = len(specs) - parameters.bound
    unbound = names[parameters.bound :]
    expected = ", ".join(name for name in unbound if name not in static_names)
    lines = [
        f"{count} {'entry' if count == 1 else 'entries'} for {len(unbound)} positional "
        f"parameters: {', '.join(unbound)}",
        *(f"{name}: static, needs no entry, or None" for name in static_names),
        *(f"{name}: no entry" for name in missing),
        f"Give one entry for each of ({expected}), or a mapping from parameter names.",
    ]
    head = f"{option}: the number of entries does not match the parameters:"
    raise see(ValueError(message(head, ["  " + "\n  ".join(lines)])), anchor="number-of-specs")


def _specs_by_name(
    specs: Mapping[str, Any], parameters: Parameters, option: str, default: object
) -> Callable[[str, int | None], Spec]:
    """Returns a function of an argument's name, and position or None, that finds its spec.

    Args:
      specs: the user's specs, by the name of a parameter.
      parameters: those of the user's function.
      option: the name of the option with the specs, for messages.
      default: the spec of parameters without one.

    Raises:
      ValueError: there is no parameter with a name.
    """
    named = (*parameters.positional, *parameters.keyword_only)
    var_names = [x for x in (parameters.var_positional, parameters.var_keyword) if x is not None]
    if parameters.var_keyword is None:
        names = (*named, *var_names)
        listed = f" (parameters: {', '.join(map(repr, names))})"
        unknown = [name for name in specs if name not in names]
        lines = [f"  {name!r}{suggestion(name, names)}{listed}" for name in unknown]
        head = f"{option}: these are not parameters of the function:"
        raise_listed(ValueError, head, lines, anchor="unknown-parameter")

    def spec_of(name: str, position: int | None) -> Any:
        # The name of a positional-only parameter may also be a key of **kwargs.
        if position is not None or name in parameters.by_keyword or name not in named:
            if name in specs:
                return specs[name]
            if name in named:
                return default
        # An argument in *args or **kwargs: one spec for all, or one for each.
        if position is None:
            var_specs = specs.get(parameters.var_keyword or "", default)
            return var_specs.get(name, default) if isinstance(var_specs, Mapping) else var_specs
        var_specs = specs.get(parameters.var_positional or "", default)
        index = position - len(parameters.positional)
        return var_specs[index] if isinstance(var_specs, tuple | list) else var_specs

    return spec_of
