"""In what two traces of a function differ, and which earlier one is the nearest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .differences import Difference, compare, show

if TYPE_CHECKING:
    from ..core.signature import Signature
    from .trace_log import Trace

MAX_COMPARED = 64  # a comparison walks through the whole model
MAX_COUNTED = 1000


def nearest(new: Trace, earlier: Sequence[Trace]) -> tuple[Trace, list[str]] | None:
    """The earlier trace from which ``new`` differs least, and in what; None if there is none."""
    best: tuple[Trace, list[str]] | None = None
    for old in reversed(earlier[-MAX_COMPARED:]):
        enough = MAX_COUNTED if best is None else len(best[1])
        found = [d.text for d in itertools.islice(between(old, new), enough)]
        if best is None or len(found) < len(best[1]):
            best = old, found
        if not best[1]:
            break
    return best


def between(old: Trace, new: Trace) -> Iterator[Difference]:
    """In what two traces differ; nothing if in nothing that we know of."""
    if old.is_like(new):
        return
    differences = itertools.chain(
        _calls(old.pure.signature, new.pure.signature),
        _structures(old, new),
        _arrays(old, new),
        _options(old, new),
        _contexts(old.context, new.context),
    )
    first = next(differences, None)
    yield first or Difference("the structure of the arguments, in something that has no name")
    yield from differences


def _calls(old: Signature, new: Signature) -> Iterator[Difference]:
    one, other = map(arguments_of, (old, new))
    if one != other:
        yield Difference(f"arguments {one} → {other}")
    static = [{x.names[i] for i in x.static} | x.static_keywords for x in (old, new)]
    for name in sorted((static[0] ^ static[1]) & {*old.names, *old.keywords}):
        if name in {*new.names, *new.keywords}:
            change = "static → an array" if name in static[0] else "an array → static"
            yield Difference(f"argument {name}: {change}")


def arguments_of(signature: Signature) -> str:
    """How a function was called: ``(model, x, train=)``."""
    return f"({', '.join((*signature.names, *(f'{k}=' for k in signature.keywords)))})"


def _structures(old: Trace, new: Trace) -> Iterator[Difference]:
    if old.pure.structure != new.pure.structure:
        signatures = old.pure.signature, new.pure.signature
        yield from compare(*zip(signatures, (old.pure.structure, new.pure.structure), strict=True))


def _arrays(old: Trace, new: Trace) -> Iterator[Difference]:
    before = dict(zip(old.names, old.avals, strict=True))
    per_shard = " of each shard" if new.pure.transform.name == "shard_map" else ""
    for name, aval in zip(new.names, new.avals, strict=True):
        if before.get(name, aval) != aval:
            yield Difference(f"{name}: {_aval_change(before[name], aval, per_shard)}")


def _aval_change(old: Any, new: Any, per_shard: str) -> str:
    parts = []
    for key, label in (("shape", f"shape{per_shard}"), ("dtype", "dtype"), ("weak_type", "")):
        before, after = getattr(old, key, None), getattr(new, key, None)
        if before != after and label:
            parts.append(f"{label} {before} → {after}")
        elif before != after:
            kinds = ("a strong type", "a weak type, as Python numbers have")
            parts.append(f"{kinds[bool(before)]} → {kinds[bool(after)]}")
    if not parts and str(old) != str(new):
        parts.append(f"type {old} → {new}")
    if not parts:
        meshes = (getattr(getattr(aval, "sharding", None), "mesh", None) for aval in (old, new))
        parts.append(f"mesh of its sharding {' → '.join(map(_mesh, meshes))}")
    return ", ".join(parts)


def _mesh(mesh: Any) -> str:
    if mesh is None or mesh.empty:
        return "none"
    return f"({', '.join(f'{name!r}: {size}' for name, size in mesh.shape.items())})"


def _options(old: Trace, new: Trace) -> Iterator[Difference]:
    a, b = old.pure, new.pure
    rules_a, rules_b = a.transform, b.transform
    if rules_a.name != rules_b.name:
        yield Difference(f"{rules_a.name} → {rules_b.name}")
    elif rules_a.trace_key != rules_b.trace_key:
        for field in dataclasses.fields(rules_b):
            before, after = (getattr(rules, field.name) for rules in (rules_a, rules_b))
            one: Any = dataclasses.replace(rules_a, **{field.name: after})
            if before != after and one.trace_key != rules_a.trace_key:
                is_sharding = rules_b.name == "jit" and field.name == "out_specs"
                name = "out_shardings" if is_sharding else field.name
                yield Difference(f"{name}: {_show_two(before, after)}")
    specs = {old.names[slot]: spec for slot, spec in a.object_specs.items()}
    for slot, spec in b.object_specs.items():
        if specs.get(new.names[slot], spec) != spec:
            before = show(specs[new.names[slot]])
            yield Difference(f"spec of {new.names[slot]}: {before} → {show(spec)}")
    for name, one, other in (("graph", a.graph, b.graph), ("graph_updates", a.updates, b.updates)):
        if one != other:
            yield Difference(f"{name}: {one} → {other}")
    donated = [{t.names[slot] for slot in t.pure.donated} for t in (old, new)]
    for name in sorted((donated[0] ^ donated[1]) & {*old.names} & {*new.names}):
        change = "donated → not donated" if name in donated[0] else "not donated → donated"
        yield Difference(f"{name}: {change}")


def _contexts(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if before != after:
            yield Difference(f"{_CONTEXTS.get(key, key)}: {_show_two(before, after)}")


def _show_two(old: Any, new: Any) -> str:
    """Two values, meshes in short, unless they look the same then."""
    meshes = [value is None or hasattr(value, "axis_types") for value in (old, new)]
    if all(meshes) and _mesh(old) != _mesh(new):
        return f"{_mesh(old)} → {_mesh(new)}"
    return f"{show(old)} → {show(new)}"


_CONTEXTS = {
    "abstract_mesh_context_manager": "mesh in context",
    "mesh_context_manager": "mesh in context (`with mesh:`)",
    "axis_env_state": "named axes in context",
}
