"""Random graphs of NNX objects, random programs over them, and snapshots to compare them.

A graph and a program are plain data (tuples of names and small numbers), so that the same
graph can be built any number of times, and the same program run eagerly and under a
transform. Numbers that choose something are taken modulo the number of things there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st


class Node(nnx.Module):
    """A module without attributes."""


class Other(nnx.Module):
    """Another type of module."""


class Loose(nnx.Module, pytree=False):
    """A module that only graph mode accepts."""


class Tag(nnx.Variable):
    """A user-defined Variable type."""


NODES: dict[str, Callable[[], Any]] = {
    "node": Node,
    "other": Other,
    "loose": Loose,
    "list": nnx.List,
    "dict": nnx.Dict,
}
VARIABLES = (nnx.Param, nnx.BatchStat, Tag)
OLD_FLAX = tuple(map(int, flax.__version__.split(".")[:3])) < (0, 12, 12)
VALUES = ("array", "pair", "ref", "hijax", "hijax pair", "hijax ref")
KEYS = ("a", "b", "c", "d")
STATICS = (0, 1, 1.0, True, False, None, "one", (1, "two"), -0.0, 0.0)


# Snapshots


def snapshot(tree: Any) -> list[Any]:
    """Everything that is observable in a graph: types, values, statics, metadata, sharing.

    Objects are numbered in the order of discovery, so two graphs have equal snapshots if and
    only if their content and their sharing are equal.
    """
    numbers: dict[int, int] = {}
    contents: list[Any] = []
    keep_alive: list[Any] = []

    def of(x: Any) -> Any:
        if isinstance(x, nnx.Variable | nnx.Pytree) or is_ref(x):
            if id(x) not in numbers:
                keep_alive.append(x)
                numbers[id(x)] = len(contents)
                contents.append(None)
                contents[numbers[id(x)]] = (type(x).__name__, content(x))
            return f"#{numbers[id(x)]}"
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return ("key", str(x.dtype), of(jax.random.key_data(x)))
        if isinstance(x, jax.Array | np.ndarray):
            return ("array", str(x.dtype), x.shape, np.asarray(x).tolist())
        if isinstance(x, list | tuple):
            return (type(x).__name__, *map(of, x))
        if isinstance(x, dict):
            return ("dict", *((key, of(x[key])) for key in sorted(x)))
        return (type(x).__name__, repr(x))

    def content(x: Any) -> Any:
        if is_ref(x):
            return of(x[...])
        if isinstance(x, nnx.Variable):
            metadata = sorted((key, repr(value)) for key, value in x.get_metadata().items())
            return tuple(metadata), of(x.get_raw_value())
        return tuple(
            (key, sorted(value.items()) if key == "_pytree__nodes" else of(value))
            for key, value in sorted(vars(x).items())
            if key != "_pytree__state"
        )

    return [of(tree), contents]


def is_ref(x: Any) -> bool:
    return isinstance(x, jax.Ref)


class Memory:
    """The exact state of objects: the Python objects that they hold, and their content."""

    def __init__(self, *trees: Any):
        self.trees = trees
        self.held = [(x, self._holds(x)) for x in reachable(trees)]
        self.content = snapshot(trees)

    @staticmethod
    def _holds(x: Any) -> dict[str, Any]:
        if isinstance(x, nnx.Variable):
            return {"value": x.get_raw_value(), **x.get_metadata()}
        return dict(vars(x))

    def assert_unchanged(self) -> None:
        for x, before in self.held:
            after = self._holds(x)
            assert after.keys() == before.keys(), (x, after.keys(), before.keys())
            for key, value in before.items():
                assert after[key] is value, f"{type(x).__name__}.{key} is another object"
        assert snapshot(self.trees) == self.content


def reachable(tree: Any) -> list[Any]:
    """All modules and Variables, each once, in an order that depends on content alone."""
    contents: list[Any] = []

    def visit(x: Any) -> None:
        if isinstance(x, nnx.Variable | nnx.Pytree):
            if not any(x is y for y in contents):
                contents.append(x)
                if isinstance(x, nnx.Pytree):
                    for key in sorted(vars(x)):
                        if not key.startswith("_pytree__"):
                            visit(vars(x)[key])
        elif isinstance(x, list | tuple):
            for part in x:
                visit(part)
        elif isinstance(x, dict):
            for key in sorted(x):
                visit(x[key])

    visit(tree)
    return contents


# Graphs


class Graph(NamedTuple):
    """A recipe for the arguments of a function.

    Attributes:
      variables: for each Variable its type, kind of value, and value.
      nodes: for each module its kind.
      edges: what modules hold: ``(node, key, kind, what)``.
      roots: the arguments: ``(kind, what)``.
    """

    variables: tuple[tuple[int, str, int], ...]
    nodes: tuple[str, ...]
    edges: tuple[tuple[int, int, str, int], ...]
    roots: tuple[tuple[str, int], ...]


def build(graph: Graph, scale: int = 1) -> tuple[Any, ...]:
    """The arguments that a recipe describes, made of new objects; values times ``scale``."""
    variables = [_variable(*recipe, scale) for recipe in graph.variables]
    nodes = [NODES[kind]() for kind in graph.nodes]
    objects = [*nodes, *variables]
    for node, key, kind, what in graph.edges:
        put(nodes[node % len(nodes)], key, _thing(kind, what, objects, scale))
    return tuple(_root(kind, what, objects, scale) for kind, what in graph.roots)


def _variable(type_index: int, kind: str, value: int, scale: int) -> nnx.Variable:
    variable_type = VARIABLES[type_index % len(VARIABLES)]
    array = _array(value, scale)
    options = {"hijax": True} if kind.startswith("hijax") else {}
    if kind.endswith("pair"):
        return variable_type({"x": array, "y": _array(value + 1, scale)}, **options)
    return variable_type(array, ref=kind.endswith("ref"), mark=value, **options)


def _array(value: int, scale: int) -> jax.Array:
    return jnp.asarray(value * scale, jnp.int32 if value % 3 == 0 else jnp.float32)


def _thing(kind: str, what: int, objects: Sequence[Any], scale: int) -> Any:
    chosen, second = objects[what % len(objects)], objects[(what + 1) % len(objects)]
    match kind:
        case "object":
            return chosen
        case "array":
            return _array(what, scale)
        case "numpy":
            return np.asarray(what * scale, np.float32)
        case "static":
            return STATICS[what % len(STATICS)]
        case "box":
            return [chosen, (second, _array(what, scale))]
    raise AssertionError(kind)


def _root(kind: str, what: int, objects: Sequence[Any], scale: int) -> Any:
    if kind == "nested":
        two = objects[(what + 1) % len(objects)]
        return {"one": objects[what % len(objects)], "more": (two, _array(what, scale))}
    return objects[what % len(objects)]


def put(node: Any, key: int, value: Any) -> None:
    """Sets an attribute, an element or an item, whatever was there before."""
    if not isinstance(node, nnx.List):
        assign(node, KEYS[key % len(KEYS)], value)
    elif (index := key % (len(node) + 1)) == len(node):
        node.append(nnx.data(value) if _is_data(value) else value)
    else:
        assign(node, str(index), value)


def assign(node: Any, name: str, value: Any) -> None:
    """``setattr`` that may turn a static attribute into data and data into a static attribute."""
    data = _is_data(value)
    if isinstance(node, Loose):
        setattr(node, name, value)
    else:
        if name in vars(node) and node._pytree__nodes[name] != data:
            delattr(node, name)
        setattr(node, name, nnx.data(value) if data else value)


def _is_data(value: Any) -> bool:
    # Flax takes a tracer in a new attribute as static, unless it is marked as data.
    return isinstance(value, list | jax.Array) or nnx.is_data(value)


def graphs(
    *, nodes: Sequence[str] = tuple(NODES), values: Sequence[str] = ("array", "array", "pair")
) -> st.SearchStrategy[Graph]:
    """Random recipes with few objects and many links between them."""
    small = st.integers(0, 7)
    things = st.sampled_from(["object"] * 4 + ["array"] * 3 + ["numpy", "static", "box"])
    return st.builds(
        Graph,
        variables=_tuples(st.tuples(small, st.sampled_from(values), small), 1, 4),
        nodes=_tuples(st.sampled_from(nodes), 1, 4),
        edges=_tuples(st.tuples(small, small, things, small), 2, 10),
        roots=_tuples(st.tuples(st.sampled_from(["object", "object", "nested"]), small), 1, 3),
    )


def _tuples(elements: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[Any]:
    return st.lists(elements, min_size=least, max_size=most).map(tuple)


# Programs


Operation = tuple[str, int, int, int]


class Program:
    """A function that changes its arguments, and returns some objects of them."""

    def __init__(self, operations: Sequence[Operation]):
        self.operations = operations

    def __repr__(self) -> str:
        return f"Program({self.operations!r})"

    def __call__(self, *roots: Any) -> list[Any]:
        objects = reachable(roots)
        results: list[Any] = []
        for name, *numbers in self.operations:
            OPERATIONS[name](objects, results, *numbers)
        return results


def _nodes(objects: list[Any]) -> list[Any]:
    return [x for x in objects if not isinstance(x, nnx.Variable)]


def _variables(objects: list[Any]) -> list[Any]:
    return [x for x in objects if isinstance(x, nnx.Variable)]


def _choose(things: list[Any], number: int) -> Any:
    return things[number % len(things)] if things else None


def _names(node: Any) -> list[str]:
    return [key for key in sorted(vars(node)) if key in KEYS or key.isdigit()]


def _set_value(variable: Any, value: Any) -> None:
    if is_ref(variable.get_raw_value()):
        variable[...] = value
    else:
        variable.set_value(value)


def _scale_variable(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    if (variable := _choose(_variables(objects), a)) is not None:
        _set_value(variable, jax.tree.map(lambda x: x * 2 + b, variable.get_value()))


def _mix_variables(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    if (variable := _choose(_variables(objects), a)) is not None:
        other = sum(jax.tree.leaves(_choose(_variables(objects), b).get_value()))
        _set_value(
            variable, jax.tree.map(lambda x: x + other.astype(x.dtype), variable.get_value())
        )


def _exchange_values(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    # Python leaves an array of NumPy, where a trace makes one of JAX.
    arrays = (jax.Array, np.ndarray)
    variables = [v for v in _variables(objects) if isinstance(v.get_value(), arrays)]
    if variables:
        one, two = _choose(variables, a), _choose(variables, b)
        first, second = one.get_value(), two.get_value()
        _set_value(one, second.astype(first.dtype))
        _set_value(two, first.astype(second.dtype))


def _reverse_pair(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    pairs = [v for v in _variables(objects) if isinstance(v.get_value(), dict)]
    if (pair := _choose(pairs, a)) is not None:
        value = pair.get_value()
        pair.set_value({"x": value["y"], "y": value["x"]})


def _change_kind(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    """A Variable's array becomes a pair, its pair an array."""
    plain = [v for v in _variables(objects) if not is_ref(v.get_raw_value())]
    if (variable := _choose(plain, a)) is not None:
        value = variable.get_value()
        is_pair = isinstance(value, dict)
        variable.set_value(value["x"] if is_pair else {"x": value, "y": value + 1})


def _set_metadata(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    variable = _choose(_variables(objects), a)
    # Flax 0.12.8 raises an ImmutableVariableError for a hijax Variable with a ref.
    if variable is None or (OLD_FLAX and variable.hijax and is_ref(variable.get_raw_value())):
        return
    variable.set_metadata(mark=STATICS[b % len(STATICS)])


def _set_static(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    if (node := _choose(_nodes(objects), a)) is not None:
        put(node, b, STATICS[c % len(STATICS)])


def _set_array(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    if (node := _choose(_nodes(objects), a)) is not None:
        leaves = [jax.tree.leaves(v.get_value()) for v in _variables(objects)]
        put(node, b, sum(_choose(leaves, c) or [jnp.ones(())]))


def _link(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    if (node := _choose(_nodes(objects), a)) is not None:
        put(node, b, _choose(objects, c))


def _box(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    if (node := _choose(_nodes(objects), a)) is not None:
        put(node, b, [_choose(objects, c), (jnp.full((), c), _choose(objects, a))])


def _remove(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    node = _choose(_nodes(objects), a)
    if isinstance(node, nnx.List):
        if len(node):
            node.pop()
    elif node is not None and (names := _names(node)):
        delattr(node, _choose(names, b))


def _exchange_attributes(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    node = _choose(_nodes(objects), a)
    if node is not None and (names := _names(node)):
        one, two = _choose(names, b), _choose(names, c)
        first, second = getattr(node, one), getattr(node, two)
        assign(node, one, second)
        assign(node, two, first)


def _rename(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    node = _choose([x for x in _nodes(objects) if not isinstance(x, nnx.List)], a)
    if node is not None and (names := _names(node)):
        name = _choose(names, b)
        value = getattr(node, name)
        delattr(node, name)
        put(node, c, value)


def _new_node(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    new = list(NODES.values())[c % len(NODES)]()
    put(new, 0, nnx.Param(jnp.full((), b)))
    put(new, 1, _choose(objects, a))
    if (node := _choose(_nodes(objects), a)) is not None:
        put(node, b, new)
    objects.append(new)


def _new_variable(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    new = VARIABLES[c % len(VARIABLES)](jnp.full((), c), mark=c)
    if (node := _choose(_nodes(objects), a)) is not None:
        put(node, b, new)
    objects.append(new)


def _return_object(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    results.append({"object": _choose(objects, a)})


def _return_array(objects: list[Any], results: list[Any], a: int, b: int, c: int) -> None:
    if (variable := _choose(_variables(objects), a)) is not None:
        results.append((variable.get_value(), jax.tree.map(lambda x: x + b, variable.get_value())))


OPERATIONS: dict[str, Callable[[list[Any], list[Any], int, int, int], None]] = {
    "scale variable": _scale_variable,
    "mix variables": _mix_variables,
    "exchange values": _exchange_values,
    "reverse pair": _reverse_pair,
    "change kind": _change_kind,
    "set metadata": _set_metadata,
    "set static": _set_static,
    "set array": _set_array,
    "link": _link,
    "box": _box,
    "remove": _remove,
    "exchange attributes": _exchange_attributes,
    "rename": _rename,
    "new node": _new_node,
    "new variable": _new_variable,
    "return object": _return_object,
    "return array": _return_array,
}

VALUE_OPERATIONS = (
    "scale variable", "mix variables", "exchange values", "reverse pair", "set metadata",
    "return object", "return array",
)  # fmt: skip


def programs(
    operations: Sequence[str] = tuple(OPERATIONS), most: int = 6
) -> st.SearchStrategy[Program]:
    """Random programs of a few operations."""
    small = st.integers(0, 7)
    operation = st.tuples(st.sampled_from(operations), small, small, small)
    return _tuples(operation, 1, most).map(Program)
