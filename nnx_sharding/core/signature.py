"""The arguments of a call → which are static or donated, and which spec belongs to which."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from .. import _compat
from .problems import Problem, refuse

ArgTree = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments, keyword arguments


class Roles(NamedTuple):
    """Which parameters are static or donated, as the user declared, in hashable form."""

    static_argnums: tuple[int, ...] | None = None
    static_argnames: tuple[str, ...] | None = None
    donate_argnums: tuple[int, ...] | None = None
    donate_argnames: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
    ) -> Roles:
        """The roles that the options of ``jax.jit`` with these names declare."""
        return cls(
            _indices(static_argnums),
            _names(static_argnames),
            _indices(donate_argnums),
            _names(donate_argnames),
        )


def _indices(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(map(operator.index, value if isinstance(value, Iterable) else (value,)))


def _names(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


class Signature(NamedTuple):
    """The roles of the arguments for one number of positional arguments and these keywords.

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

    If only one of ``argnums`` and ``argnames`` is given, the signature gives the other, as in
    ``jax.jit``.

    Args:
      fun: the function.
      roles: which parameters are static or donated.
      bound: how many leading parameters are filled by a bound object; positions count
        without them.
      from_call: whether negative positions count from the end of a call, as in
        ``jax.checkpoint``, not from that of the signature.
    """

    def __init__(
        self, fun: Callable[..., Any], roles: Roles, bound: int = 0, *, from_call: bool = False
    ):
        self.bound = bound
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):  # some functions written in C
            parameters = list(inspect.signature(lambda *args, **kwargs: None).parameters.values())

        def named(*kinds: Any) -> tuple[str, ...]:
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
        self.static = self._complete(roles.static_argnums, roles.static_argnames)
        donated, names = self._complete(roles.donate_argnums, roles.donate_argnames)
        self.donated = tuple(i for i in donated if i >= 0), names  # as in JAX, after *args
        self._signatures: dict[tuple[int, tuple[str, ...]], Signature] = {}

    def _complete(
        self, positions: tuple[int, ...] | None, names: tuple[str, ...] | None
    ) -> tuple[tuple[int, ...], frozenset[str]]:
        """Positions and names of a role, each completed by the other."""
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
        """The roles for a call with this many positional arguments, including bound ones."""
        key = (num_positional, keywords)
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = self._make_signature(*key)
        return signature

    def _make_signature(self, num_positional: int, keywords: tuple[str, ...]) -> Signature:
        count = num_positional - self.bound
        rest = (f"{self.var_positional or 'args'}[{i}]" for i in range(num_positional))
        beyond = max(0, num_positional - len(self.positional))

        def positions(declared: tuple[int, ...], option: str) -> frozenset[int]:
            # As in JAX: what is beyond the call was not passed.
            if any(i + count < 0 for i in declared):
                refuse(Problem.POSITION_OUT_OF_RANGE, [(option, declared, count)])
            inside = (i if i >= 0 else i + count for i in declared)
            return frozenset(i + self.bound for i in inside if i < count)

        return Signature(
            (*self.positional[:num_positional], *(next(rest) for _ in range(beyond))),
            tuple(sorted(keywords)),
            positions(self.static[0], "static_argnums"),
            self.static[1].intersection(keywords),
            positions(self.donated[0], "donate_argnums"),
            self.donated[1].intersection(keywords),
        )


class Call(NamedTuple):
    """One call by roles: static arguments, positional ones first, and the tree of all others."""

    signature: Signature
    statics: tuple[Any, ...]
    tree: ArgTree


def sort_call(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Sorts the arguments of a call by their roles.

    Raises:
      ValueError: a static argument is not hashable, or holds arrays.
    """
    if not signature.static and not signature.static_keywords:
        return Call(signature, (), (args, kwargs))
    static_values = [args[i] for i in sorted(signature.static)]
    static_values += [kwargs[k] for k in sorted(signature.static_keywords)]
    for name, value in zip(signature.static_names, static_values, strict=True):
        _check_static(name, value)
    positional = tuple(args[i] for i in signature.dynamic)
    keywords = {k: kwargs[k] for k in signature.dynamic_keywords}
    return Call(signature, tuple(static_values), (positional, keywords))


def join_call(
    signature: Signature, statics: Sequence[Any], tree: ArgTree
) -> tuple[list[Any], dict[str, Any]]:
    """The inverse of :func:`sort_call`: all arguments, with static ones in their places."""
    dynamic, static = iter(tree[0]), iter(statics)
    args = [next(static if i in signature.static else dynamic) for i in range(len(signature.names))]
    return args, {**tree[1], **dict(zip(sorted(signature.static_keywords), static, strict=True))}


def _check_static(name: str, value: Any) -> None:
    try:
        hash(value)
    except Exception as error:
        refuse(Problem.STATIC_NOT_HASHABLE, [(name, value, error)])
    if _compat.is_graph_object(value) and jax.tree_util.tree_leaves(nnx.state(value)):
        refuse(Problem.STATIC_HOLDS_ARRAYS, [(name, value)])


def align_specs(
    specs: Any, parameters: Parameters, signature: Signature, option: str, default: Any = None
) -> ArgTree:
    """The spec of each dynamic argument: positional ones, and by keyword.

    Args:
      specs: one spec for all arguments; a tuple or list with one for each positional
        parameter, where static parameters are left out or have None; or a mapping from
        parameter names.
      parameters: the parameters of the function.
      signature: the roles of the arguments in this call.
      option: the name of the option, for messages.
      default: the spec of what ``specs`` does not mention.

    Raises:
      ValueError: the number of specs does not fit, or a name is not a parameter.
    """
    if isinstance(specs, Mapping) and all(isinstance(name, str) for name in specs):
        spec_of = _specs_by_name(specs, parameters, option, default)
        return (
            tuple(spec_of(signature.names[i], i) for i in signature.dynamic),
            {k: spec_of(k, None) for k in signature.dynamic_keywords},
        )
    if not isinstance(specs, tuple | list) or hasattr(specs, "_fields"):
        return (specs,) * len(signature.dynamic), dict.fromkeys(signature.dynamic_keywords, specs)
    specs = [None] * parameters.bound + list(specs)
    static = _static_parameters(parameters, signature)
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
        bound, statics = parameters.bound, [names[i] for i in sorted(static) if i < len(names)]
        offender = (names[bound:], statics, missing, len(specs) - bound)
        refuse(Problem.WRONG_NUMBER_OF_SPECS, [offender], name=option)
    by_name = {
        name: by_position.get(i, default)
        for i, name in enumerate(parameters.positional)
        if name in parameters.by_keyword
    }
    return (
        tuple(by_position[i] for i in signature.dynamic),
        {k: by_name.get(k, default) for k in signature.dynamic_keywords},
    )


def _specs_by_name(
    specs: Mapping[str, Any], parameters: Parameters, option: str, default: Any
) -> Callable[[str, int | None], Any]:
    """The spec of an argument by its name, and its position if it has one."""
    named = (*parameters.positional, *parameters.keyword_only)
    rest = [n for n in (parameters.var_positional, parameters.var_keyword) if n is not None]
    unknown = [name for name in specs if name not in named and name not in rest]
    if unknown and parameters.var_keyword is None:
        offenders = [(name, (*named, *rest)) for name in unknown]
        refuse(Problem.UNKNOWN_PARAMETER, offenders, name=option)

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


def _static_parameters(parameters: Parameters, signature: Signature) -> frozenset[int]:
    """Positions in the signature that are static, including those that this call left out."""
    by_name = {i for i, n in enumerate(parameters.positional) if n in signature.static_keywords}
    declared = {i + parameters.bound for i in parameters.static[0] if i >= 0}
    return signature.static | by_name | declared
