"""The arguments of a call → the arrays of the program, found by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from .. import _compat
from ..core.flatten import flatten
from ..core.structure import Container, VariableEntry, container_keys
from ..fitting import suggestion
from ..paths import Path, accessor, path_string, plain_key
from .manifest import Argument, ArrayInfo, Manifest, Place
from .trees import state_from


class Given(NamedTuple):
    """The arguments of one call.

    Attributes:
      arrays: the arrays of the program, by position.
      arguments: what was given for each argument.
      form: for each argument the function that puts arrays by path into the form in which it
        was given.
    """

    arrays: list[Any]
    arguments: dict[str, Any]
    form: dict[str, Callable[[Mapping[Path, Any]], Any]]


def given(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
    """Finds the arrays of a call.

    Raises:
      TypeError: arguments or arrays are missing or unknown, or have other types than the
        program was made for; all of them are listed.
    """
    arguments = _bind(manifest, args, kwargs)
    found: dict[int, tuple[str, Any]] = {}
    problems = _Problems()
    form = {}
    for argument in manifest.arguments:
        own, form[argument.name] = _match(argument, arguments[argument.name], problems)
        for place, leaf in own:
            name, first = found.setdefault(place.position, (place.name, leaf))
            if first is not leaf:
                problems.shared.append(f"  {place.name}: is {name}, given as another array")
    for position, info in enumerate(manifest.inputs):
        if position in found:
            problems.types += _type_problem(*found[position], info)
        else:
            problems.missing.append(f"  {info.name}, {info}")
    problems.check(manifest.function)
    return Given([found[i][1] for i in range(len(manifest.inputs))], arguments, form)


def _bind(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [a.name for a in manifest.arguments]
    positional = [a.name for a in manifest.arguments if not a.keyword]
    bound = dict(zip(positional, args, strict=False))
    lines = []
    if len(args) > len(positional):
        lines.append(f"  {len(args)} positional arguments were given, it takes {len(positional)}")
    for name, value in kwargs.items():
        if name in bound:
            lines.append(f"  {name}: given twice")
        elif name in manifest.static:
            text = manifest.static[name]
            lines.append(f"  {name}: static, and part of the program as {text:.80}; leave it out")
        elif name not in names:
            lines.append(f"  {name}: unknown{suggestion(name, names)}")
        bound[name] = value
    lines += [f"  {name}: missing" for name in names if name not in bound]
    if lines:
        raise TypeError(
            f"{manifest.function} was exported with the arguments ({', '.join(names)}), and cannot "
            "be called with these:\n" + "\n".join(lines)
        )
    return bound


class _Problems:
    """What is wrong with the arrays of a call."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unknown: list[str] = []
        self.types: list[str] = []
        self.shared: list[str] = []

    def check(self, function: str) -> None:
        kinds = {
            "Missing": self.missing,
            "Unknown": self.unknown,
            "Of another type": self.types,
            "One array in the exported function, so to be given once": self.shared,
        }
        listed = ["\n".join([f"{kind}:", *lines]) for kind, lines in kinds.items() if lines]
        if listed:
            raise TypeError(
                "\n".join([f"{function} was exported for other arrays than these.", *listed])
            )


def _match(
    argument: Argument, value: Any, problems: _Problems
) -> tuple[list[tuple[Place, Any]], Callable[[Mapping[Path, Any]], Any]]:
    """The arrays of an argument with their places, and the form in which it was given."""
    found, joined = [], False
    for path, leaf in _arrays(value):
        place = argument.by_keys.get(tuple(map(str, path)))
        if place is None:
            place = argument.by_text.get(path_string(path))
            joined = joined or place is not None
        if place is not None:
            found.append((place, leaf))
            continue
        names = [other.name for other in argument.by_keys.values()]
        where = accessor(argument.name, path)
        problems.unknown.append(f"  {where}{suggestion(where, names)}")
    return found, _form(value, joined)


def _arrays(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each array in what was given, with its path."""
    leaf = _compat.get_value(value) if _compat.is_variable(value) else value
    if isinstance(leaf, _ARRAYS):  # nearly all are: no need to look for parts
        yield path, leaf
        return
    if isinstance(value, Mapping):
        items = value.raw_mapping.items() if isinstance(value, nnx.State) else value.items()
        for key, part in items:
            yield from _arrays(part, (*path, *(key if isinstance(key, tuple) else (key,))))
        return
    flat = flatten(value)
    structure = flat.structure
    for place in structure.walk(structure.root, iter(structure.root_slots)):
        entry = None if place.entry is None else structure.entries[place.entry]
        child = entry.value if isinstance(entry, VariableEntry) else None
        keys = container_keys(child.treedef) if isinstance(child, Container) else [()]
        for key, slot in zip(keys, place.slots, strict=True):
            yield (*path, *map(plain_key, (*place.path, *key))), flat.leaves[slot]


_ARRAYS = (jax.Array, np.ndarray)


def _form(value: Any, joined: bool) -> Callable[[Mapping[Path, Any]], Any]:
    if not isinstance(value, Mapping) or isinstance(value, nnx.State):
        return _as_state
    if any(isinstance(key, tuple) for key in value):
        return dict
    return _as_texts if joined else _as_dicts


def _as_state(arrays: Mapping[Path, Any]) -> Any:
    return arrays[()] if () in arrays else state_from(arrays.items())


def _as_texts(arrays: Mapping[Path, Any]) -> dict[str, Any]:
    return {path_string(path): array for path, array in arrays.items()}


def _as_dicts(arrays: Mapping[Path, Any]) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for path, array in arrays.items():
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = array
    return nested


def _type_problem(name: str, leaf: Any, info: ArrayInfo) -> Iterable[str]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        yield f"  {name}: a ShapeDtypeStruct, which has no values"
        return
    try:
        aval = leaf if isinstance(leaf, jax.Array) else jax.typeof(leaf)
    except TypeError:
        yield f"  {name}: a {type(leaf).__name__}, not {info}"
        return
    shape, dtype = getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval))
    fits = len(shape) == len(info.shape)
    fits = fits and all(
        isinstance(b, str) or a == b for a, b in zip(shape, info.shape, strict=True)
    )
    if fits and dtype == info.dtype:
        return
    needs_x64 = info.dtype in _WIDE and not jax.config.jax_enable_x64
    hint = "; set jax_enable_x64, as where it was exported" if needs_x64 else ""
    sizes = ",".join(map(str, shape))
    expected = f"{info.dtype}[{','.join(map(str, info.shape))}]"
    yield f"  {name}: {dtype}[{sizes}], not {expected}{hint}"


_WIDE = ("float64", "int64", "uint64", "complex128")
