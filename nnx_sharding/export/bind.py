"""From the arguments of a call to the arrays of the program, matched by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from .. import _compat
from ..core.flatten import flatten
from ..errors import by_kind, raise_listed
from ..specs.fitting import suggestion
from ..specs.paths import Path, accessor, path_string
from .manifest import ArrayInfo, Manifest, leaves_of, tree_of

# Puts arrays by path into the form in which an argument was passed.
Form: TypeAlias = Callable[[Mapping[Path, Any]], Any]


def bind(
    manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Form]]:
    """The arrays of a call by position, and the form of each argument."""
    arguments = _arguments(manifest, args, kwargs)
    arrays: dict[int, tuple[str, Any]] = {}
    forms: dict[str, Form] = {}
    shared = "One array in the exported function, to be passed once"
    faults = {kind: list[str]() for kind in ("Missing", "Unknown", "Of another type", shared)}
    for argument in manifest.arguments:
        is_flat = False
        for path, array in _arrays(arguments[argument.name]):
            leaf = argument.by_path.get(tuple(map(str, path)))
            if leaf is None:
                leaf = argument.by_path.get(path_string(path))
                is_flat |= leaf is not None
            if leaf is None:
                name = accessor(argument.name, path)
                names = [other.name for other in argument.leaves]
                faults["Unknown"].append(f"{name}{suggestion(name, names)}")
                continue
            name, first = arrays.setdefault(leaf.position, (leaf.name, array))
            if first is not array:
                faults[shared].append(f"{leaf.name}: is {name}, passed as another array")
        forms[argument.name] = _form(arguments[argument.name], is_flat)
    for position, info in enumerate(manifest.inputs):
        if position in arrays:
            faults["Of another type"] += filter(None, [_type_fault(*arrays[position], info)])
        else:
            faults["Missing"].append(f"{info.name}, {info}")
    lines = by_kind({kind: [f"  {fault}" for fault in found] for kind, found in faults.items()})
    head = f"{manifest.function} was exported for other arrays than these."
    raise_listed(TypeError, head, lines)
    return [arrays[i][1] for i in range(len(manifest.inputs))], forms


def _arguments(
    manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = [argument.name for argument in manifest.arguments]
    positional = [argument.name for argument in manifest.arguments if not argument.keyword]
    bound = dict(zip(positional, args, strict=False))
    lines = []
    if len(args) > len(positional):
        lines.append(f"  got {len(args)} positional arguments, it takes {len(positional)}")
    for name, value in kwargs.items():
        if name in bound:
            lines.append(f"  {name}: passed twice")
        elif name in manifest.static:
            text = manifest.static[name]
            lines.append(f"  {name}: static, and part of the program as {text:.80}; leave it out")
        elif name not in names:
            lines.append(f"  {name}: unknown{suggestion(name, names)}")
        bound[name] = value
    lines += [f"  {name}: missing" for name in names if name not in bound]
    raise_listed(
        TypeError,
        f"{manifest.function} was exported with the arguments ({', '.join(names)}), and cannot be "
        "called with these:",
        lines,
    )
    return bound


def _arrays(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each array of an argument, with its path."""
    leaf = _compat.get_value(value) if _compat.is_variable(value) else value
    if isinstance(leaf, jax.Array | np.ndarray):  # the usual case
        yield path, leaf
    elif isinstance(value, Mapping):
        items = value.raw_mapping.items() if isinstance(value, nnx.State) else value.items()
        for key, part in items:
            yield from _arrays(part, (*path, *(key if isinstance(key, tuple) else (key,))))
    else:
        flat = flatten(value)
        for inner, _, slot in leaves_of(tree_of(flat.structure, lambda slot: {"input": slot})):
            yield path + inner, flat.leaves[slot]


def _form(value: Any, is_flat: bool) -> Form:
    if not isinstance(value, Mapping) or isinstance(value, nnx.State):
        return lambda arrays: arrays[()] if () in arrays else nnx.from_flat_state(arrays)
    if any(isinstance(key, tuple) for key in value):
        return dict
    if is_flat:
        return lambda arrays: {path_string(path): array for path, array in arrays.items()}
    return unflatten_dict


def _fits(size: int | str, exported: int | str) -> bool:
    """Whether a size can be the exported one; for most symbolic ones JAX decides."""
    if isinstance(exported, int) or isinstance(size, str):
        return size == exported or isinstance(exported, str)
    multiple = re.fullmatch(r"(?:(\d+)\*)?[A-Za-z_]\w*", exported)
    return multiple is None or (size > 0 and size % int(multiple[1] or 1) == 0)


def _type_fault(name: str, leaf: Any, info: ArrayInfo) -> str | None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return f"{name}: a ShapeDtypeStruct, which has no values"
    try:
        actual = ArrayInfo.of(name, leaf if isinstance(leaf, jax.Array) else jax.typeof(leaf), None)
    except (AttributeError, TypeError):
        return f"{name}: a {type(leaf).__name__}, not {info}"
    if (
        actual.dtype == info.dtype
        and len(actual.shape) == len(info.shape)
        and all(map(_fits, actual.shape, info.shape))
    ):
        return None
    is_wide = info.dtype in ("float64", "int64", "uint64", "complex128")
    needs_x64 = is_wide and not jax.config.jax_enable_x64
    hint = "; set jax_enable_x64, as where it was exported" if needs_x64 else ""
    return f"{name}: {actual.type}, not {info.type}{hint}"
