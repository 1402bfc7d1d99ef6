"""Records of traces and compilations, and in what two of them differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from ..core.structure import Structure
from ..fitting import describe, describe_both
from .differences import Facts, Side, arguments_of, compare, show

if TYPE_CHECKING:
    from ..core.pure import Pure

MAX_COMPARED = 64  # a comparison goes through all static values of the model


class Trace(NamedTuple):
    """One trace of a function, without references to arrays or to the function."""

    number: int
    pure: Pure
    names: Sequence[str]
    avals: tuple[Any, ...]
    context: dict[str, Any]  # the part of JAX's configuration on which a trace depends
    key: tuple[Any, ...]  # all on which the trace depends
    nested: bool


class Compilation(NamedTuple):
    """A compilation in a call of a function. ``number`` is that of the latest trace then."""

    number: int
    structure: Structure
    names: Sequence[str]
    avals: tuple[Any, ...]
    shardings: tuple[jax.sharding.Sharding | None, ...]  # None: not committed

    def is_like(self, other: Compilation) -> bool:
        """Whether the arguments of both differ at most in their shardings."""
        return self.avals == other.avals and self.structure == other.structure

    def changes_from(self, old: Compilation) -> list[str]:
        """In which shardings the arguments differ from those of an earlier compilation."""
        changes = []
        for name, a, b in zip(self.names, old.shardings, self.shardings, strict=True):
            if a is not None and b is not None and a != b:
                changes.append(f"{name}: sharding {_both(a, b)}")
            elif a != b:
                texts = ("not committed" if x is None else describe(x) for x in (a, b))
                changes.append(f"{name}: sharding {' → '.join(texts)}")
        return changes


def nearest(
    new: Trace, earlier: Sequence[Trace], cache: dict[Side, Facts]
) -> tuple[Trace, list[str]] | None:
    """The earlier trace with the fewest differences to a new one, and these differences."""
    best: tuple[Trace, list[str]] | None = None
    for old in reversed(earlier[-MAX_COMPARED:]):
        lines = _differences(old, new, cache)
        if best is None or len(lines) < len(best[1]):
            best = old, lines
        if not lines:
            break
    return best


def _differences(old: Trace, new: Trace, cache: dict[Side, Facts]) -> list[str]:
    if old.key == new.key:
        return []
    a, b = old.pure, new.pure
    calls = arguments_of(a.signature), arguments_of(b.signature)
    lines = [f"arguments {calls[0]} → {calls[1]}"] * (calls[0] != calls[1])
    if a.structure != b.structure:
        lines += compare((a.signature, a.structure), (b.signature, b.structure), cache)
    lines += [*_arrays(old, new), *_options(old, new)]
    return lines or ["the structure of the arguments, in a part without a name"]


def _arrays(old: Trace, new: Trace) -> Iterator[str]:
    before = dict(zip(old.names, old.avals, strict=True))
    shape = "shape of each shard" if new.pure.rules.name == "shard_map" else "shape"
    for name, aval in zip(new.names, new.avals, strict=True):
        if before.get(name, aval) == aval:
            continue
        parts = []
        for key in ("shape", "dtype", "weak_type"):
            a, b = (getattr(x, key, None) for x in (before[name], aval))
            if a != b:
                parts.append(f"{shape if key == 'shape' else key} {a} → {b}")
        if not parts:
            a, b = (getattr(x, "sharding", None) for x in (before[name], aval))
            parts = [f"type {before[name]} → {aval}" if a == b else f"sharding {_both(a, b)}"]
        yield f"{name}: {', '.join(parts)}"


def _options(old: Trace, new: Trace) -> Iterator[str]:
    yield from _transforms(old.pure.rules, new.pure.rules)
    before = _facts(old)
    for label, value in _facts(new).items():
        if before.get(label, value) != value:
            yield f"{label} {_both(before[label], value)}"


def _transforms(old: Any, new: Any) -> Iterator[str]:
    if old.name != new.name:
        yield f"{old.name} → {new.name}"
    elif old.trace_key != new.trace_key:
        for field in dataclasses.fields(new):
            before, after = getattr(old, field.name), getattr(new, field.name)
            changed: Any = dataclasses.replace(old, **{field.name: after})
            if before != after and changed.trace_key != old.trace_key:
                is_jit = new.name == "jit" and field.name == "out_specs"
                yield f"{'out_shardings' if is_jit else field.name}: {_both(before, after)}"


def _facts(trace: Trace) -> dict[str, Any]:
    """What a trace depends on besides the arguments and the transform, with labels."""
    pure, names, signature = trace.pure, trace.names, trace.pure.signature
    arguments = (*signature.names, *signature.keywords)
    return {
        **{f"argument {name}: static": name in signature.static_names for name in arguments},
        **{f"spec of {names[slot]}:": spec for slot, spec in pure.object_specs.items()},
        **{f"{name}: donated": slot in pure.donated for slot, name in enumerate(names)},
        "graph:": pure.graph,
        "graph_updates:": pure.updates,
        **{f"{_CONTEXTS.get(key, key)}:": value for key, value in trace.context.items()},
    }


_CONTEXTS = {
    "abstract_mesh_context_manager": "mesh in context",
    "mesh_context_manager": "mesh in context (`with mesh:`)",
    "axis_env_state": "named axes in context",
}


def _both(old: Any, new: Any) -> str:
    """Two values that differ, in the shortest form that shows it."""
    if isinstance(old, jax.sharding.Sharding) and isinstance(new, jax.sharding.Sharding):
        return " → ".join(describe_both(old, new))
    meshes = [value is None or hasattr(value, "axis_types") for value in (old, new)]
    if all(meshes) and _mesh(old) != _mesh(new):
        return f"{_mesh(old)} → {_mesh(new)}"
    return f"{show(old)} → {show(new)}"


def _mesh(mesh: Any) -> str:
    if mesh is None or mesh.empty:
        return "none"
    return f"({', '.join(f'{name!r}: {size}' for name, size in mesh.shape.items())})"
