"""Finds the spec of each argument of a call.

A *spec* says how an argument is laid out, such as a ``PartitionSpec`` or the axis of a ``vmap``. As
in ``jax.jit``, the user gives one spec for all arguments, or a tuple with a spec for each
positional parameter. Unlike there, the user may also give a mapping from the names of parameters.
Entries of a tuple are for parameters of the function, so a call need not pass all of them. A tuple
is first turned into such a mapping, and each argument then finds its spec by name. From
``signature.py``:

    Parameters   the parameters of the function. A *static* parameter holds no arrays, so it gets no
                 spec. *Bound* parameters, such as ``self``, come first, and the user does not count
                 them; ``bound`` is their number. ``positional`` has the names of parameters that
                 may be passed by position, ``by_keyword`` the names of those that may be passed by
                 keyword. ``var_positional`` and ``var_keyword`` are the names of ``*args`` and
                 ``**kwargs``, or None. ``static.positions`` has the user's static positions
    Signature    the arguments of one call: ``names`` has the name of each positional argument, such
                 as ``x``, or ``args[0]`` for one in ``*args``; ``static`` has the position or name
                 of each static argument; ``dynamic`` and ``dynamic_keywords`` have the positions
                 and the names of dynamic arguments
    ArgTree      something for each dynamic argument: (by position, by keyword)

From ``errors.py`` and ``specs/``:

    message      the text of an error: a first line, then a list
    see          adds a reference to a section of docs/errors.md to an error, and returns the error
    show         a value as a short text
    StateSharding   specs for the Variables of one module, by filters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import message, see
from ..specs.fitting import show
from ..specs.state_sharding import StateSharding
from .signature import ArgTree, Parameters, Signature


def align_specs(
    specs: object, parameters: Parameters, signature: Signature, option: str, default: object = None
) -> ArgTree:
    """Returns the spec of each dynamic argument of a call: (by position, by keyword).

    Args:
      specs: one spec for all arguments; a tuple or list with one for each positional parameter,
        where static parameters are left out or have None; or a mapping from parameter names.
      parameters: the parameters of the function, and which are static.
      signature: the names and roles of the arguments of this call.
      option: the name of the specs in messages, such as ``in_shardings``.
      default: the spec of arguments that ``specs`` does not mention.

    Raises:
      ValueError: the number of specs is wrong, or there is no parameter with a name.
    """
    if isinstance(specs, Mapping) and all(isinstance(name, str) for name in specs):
        parameters.check_names(option, specs)
        by_name: Mapping[str, Any] = specs
    # A named tuple of specs is left out, because it is a prefix of an argument of its class.
    elif isinstance(specs, tuple | list) and not hasattr(specs, "_fields"):
        by_name = _specs_by_name(specs, parameters, signature, option)
    else:
        return (specs,) * len(signature.dynamic), dict.fromkeys(signature.dynamic_keywords, specs)
    args = [
        _spec_of_positional(by_name, parameters, signature, position, option, default)
        for position in signature.dynamic
    ]
    # An entry of a tuple belongs to a parameter, which this call may have passed by keyword.
    kwargs = {
        name: _spec_of_keyword(by_name, parameters, name, default)
        for name in signature.dynamic_keywords
    }
    return tuple(args), kwargs


def _specs_by_name(
    specs: Sequence[Any], parameters: Parameters, signature: Signature, option: str
) -> dict[str, Any]:
    """Returns the spec of each positional parameter, and of each argument in ``*args``, by name.

    For ``f(self, n, x, y)`` bound to ``self`` and with a static ``n``, the specs ``(a, b)`` and
    ``(None, a, b)`` both give ``a`` to ``x`` and ``b`` to ``y``.

    Args:
      specs: the user's tuple. Static parameters are left out, or have None.
      signature: the names and roles of the arguments of this call.

    Raises:
      ValueError: the number of specs is wrong.
    """
    # The names of all positions. A call may have more positional arguments than there are
    # parameters, because of ``*args``, or fewer, because of defaults and keywords.
    names: Sequence[str] = signature.names
    if len(parameters.positional) > len(names):
        names = parameters.positional
    static = _static_positions(parameters, signature)
    dynamic = [position for position in range(len(names)) if position not in static]
    # The user does not count bound parameters, and these get no spec.
    entries = [None] * parameters.bound + list(specs)
    # The user either leaves static parameters out, or gives them None. Static parameters have
    # entries if there are more entries than dynamic parameters, and None in all static places.
    static_entries = [entries[position] for position in static if position < len(entries)]
    if len(entries) > len(dynamic) and all(entry is None for entry in static_entries):
        by_position = dict(enumerate(entries))
    else:  # zip is not strict, because the number of entries is checked below
        by_position = dict(zip(dynamic, entries, strict=False))
    missing = [
        signature.names[position] for position in signature.dynamic if position not in by_position
    ]
    # Entries for which there is no parameter. With ``*args``, a later call may have more arguments.
    has_surplus = len(by_position) < len(entries) and parameters.var_positional is None
    if missing or len(entries) > len(names) or has_surplus:
        static_names = [names[position] for position in sorted(static) if position < len(names)]
        # The entry of each parameter: the user may have left out another one than the last.
        taken = {names[i]: by_position[i] for i in sorted(by_position) if i < len(names)}
        raise _wrong_number(
            option,
            specs,
            parameters.fun_name,
            names[parameters.bound :],
            static=static_names,
            missing=missing,
            taken=taken,
        )
    return {names[position]: spec for position, spec in by_position.items()}


def _static_positions(parameters: Parameters, signature: Signature) -> set[int]:
    """Returns the positions of all static parameters, including those that a call left out.

    Entries of a tuple of specs are for parameters, not for arguments, so parameters that were not
    passed count. ``signature`` has the static arguments of one call, and ``parameters`` the user's
    declarations for all calls.
    """
    # Static arguments that are passed in this call: by position, or by the name of a parameter that
    # has a position.
    by_position = {key for key in signature.static if isinstance(key, int)}
    positional = enumerate(parameters.positional)
    by_keyword = {position for position, name in positional if name in signature.static}
    # Positions that the user declared; the arguments may not be passed. The user does not count
    # bound parameters. Negative positions count from the end of a call, so they are left out here,
    # and ``signature`` has them.
    declared = {i + parameters.bound for i in parameters.static.positions if i >= 0}
    return by_position | by_keyword | declared


def _wrong_number(
    option: str,
    specs: Sequence[Any],
    fun_name: str,
    names: Sequence[str],
    *,
    static: Sequence[str],
    missing: Sequence[str],
    taken: Mapping[str, Any],
) -> ValueError:
    """Returns the error for a wrong number of specs.

    Args:
      static: the names of parameters that need no spec.
      missing: the names of parameters that need a spec, but have none.
      taken: the spec of each parameter that has one, by name.
    """
    expected = ", ".join(name for name in names if name not in static)
    count = len(specs)
    lines = [
        f"{count} {'entry' if count == 1 else 'entries'} for {len(names)} positional "
        f"parameters of {fun_name}: {', '.join(names)}"
    ]
    for name in names:
        if name in static:
            lines.append(f"{name}: static, needs no entry, or None")
        elif name in missing:
            lines.append(f"{name}: no entry")
        elif name in taken and missing:
            # Filters may be many: the class is enough to see which entry this is.
            entry = taken[name]
            text = type(entry).__name__ if isinstance(entry, StateSharding) else show(entry)
            lines.append(f"{name}: {text}")
    lines.append(f"Give one entry for each of ({expected}), or a mapping from parameter names.")
    head = f"{option}: the number of entries does not match the parameters:"
    return see(ValueError(message(head, ["  " + "\n  ".join(lines)])), anchor="number-of-specs")


def _spec_of_positional(
    specs: Mapping[str, Any],
    parameters: Parameters,
    signature: Signature,
    position: int,
    option: str,
    default: object,
) -> Any:
    """Returns the spec of an argument that is passed by position, from specs by name.

    Args:
      specs: the specs by the names of parameters. If the user gave a tuple, they are also by the
        names of arguments in ``*args``.
      signature: the names of the arguments of this call.
      default: the spec of arguments that ``specs`` does not mention.

    Raises:
      ValueError: there are fewer specs for ``*args`` than arguments in it.
    """
    name = signature.names[position]
    if name in specs or position < len(parameters.positional):
        return specs.get(name, default)
    # The argument is in ``*args``. A mapping of the user has one spec for all such arguments under
    # the name "args", or a tuple with a spec for each. If the function has no ``*args``, Python
    # refuses the call later.
    var_specs = specs.get(parameters.var_positional or "", default)
    if not isinstance(var_specs, tuple | list):
        return var_specs
    number = position - len(parameters.positional)
    if number < len(var_specs):
        return var_specs[number]
    count = len(signature.names) - len(parameters.positional)
    text = (
        f"{option}: {len(var_specs)} {'entry' if len(var_specs) == 1 else 'entries'} for {count} "
        f"arguments in *{parameters.var_positional} of {parameters.fun_name}. "
        "Give one for each, or one spec for all."
    )
    raise see(ValueError(text), anchor="number-of-specs")


def _spec_of_keyword(
    specs: Mapping[str, Any], parameters: Parameters, name: str, default: object
) -> Any:
    """Returns the spec of an argument that is passed by keyword, from specs by name.

    Args:
      name: the name of the argument, of a parameter or in ``**kwargs``.
      default: the spec of arguments that ``specs`` does not mention.
    """
    # In ``f(x, /, **kwargs)``, the key "x" of specs is for the parameter, and an argument ``x=1``
    # is in ``kwargs``, so it does not get that spec.
    is_positional_only = name in parameters.positional and name not in parameters.by_keyword
    if not is_positional_only and (name in specs or name in parameters.by_keyword):
        return specs.get(name, default)
    # The argument is in ``**kwargs``. ``specs`` has one spec for all such arguments under the name
    # "kwargs", or a mapping with a spec for each. If the function has no ``**kwargs``, Python
    # refuses the call later.
    var_specs = specs.get(parameters.var_keyword or "", default)
    return var_specs.get(name, default) if isinstance(var_specs, Mapping) else var_specs
