"""Which spec belongs to which argument of a call.

A *spec* says how an argument is laid out, such as a ``PartitionSpec`` or the axis of a ``vmap``. As
for ``jax.jit``, the user gives one for all arguments or a tuple with one for each positional
parameter; or, unlike there, a mapping from the names of parameters. Entries of a tuple are for
parameters of the function, so a call need not pass all of them. For *static* arguments, and *bound*
ones such as ``self``, see ``signature.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import message, raise_listed, see
from ..specs.fitting import suggestion
from ..specs.types import Spec
from .signature import ArgTree, Parameters, Signature


def align_specs(
    specs: object, parameters: Parameters, signature: Signature, option: str, default: object = None
) -> ArgTree:
    """Returns the spec of each dynamic argument of a call: those by position, those by keyword.

    Args:
      specs: one spec for all arguments; a tuple or list with one for each positional parameter,
        where static parameters are left out or have None; or a mapping from parameter names.
      parameters: those of the function, and which are static.
      signature: the names and roles of the arguments of this call.
      option: the name of the specs in messages, such as ``in_shardings``.
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
    # The call may have more positional arguments (``*args``) than there are parameters, or fewer.
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
    if missing or len(specs) > len(names) or has_surplus:
        unbound = names[parameters.bound :]
        static_names = [names[i] for i in sorted(static) if i < len(names)]
        raise _wrong_number(option, len(specs) - parameters.bound, unbound, static_names, missing)
    return by_position


def _wrong_number(
    option: str, count: int, names: Sequence[str], static: Sequence[str], missing: Sequence[str]
) -> ValueError:
    """Returns the error for ``count`` specs of positional parameters with these names.

    ``static`` and ``missing`` are the names of those that need no spec, and that have none.
    """
    expected = ", ".join(name for name in names if name not in static)
    lines = [
        f"{count} {'entry' if count == 1 else 'entries'} for {len(names)} positional "
        f"parameters: {', '.join(names)}",
        *(f"{name}: static, needs no entry, or None" for name in static),
        *(f"{name}: no entry" for name in missing),
        f"Give one entry for each of ({expected}), or a mapping from parameter names.",
    ]
    head = f"{option}: the number of entries does not match the parameters:"
    return see(ValueError(message(head, ["  " + "\n  ".join(lines)])), anchor="number-of-specs")


def _specs_by_name(
    specs: Mapping[str, Any], parameters: Parameters, option: str, default: object
) -> Callable[[str, int | None], Spec]:
    """Returns a function that finds the spec of an argument by its name and its position.

    The position is None for an argument that is passed by keyword.

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
        # A keyword argument with the name of a positional-only parameter is one of **kwargs.
        is_in_kwargs = position is None and name in named and name not in parameters.by_keyword
        if not is_in_kwargs:
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
