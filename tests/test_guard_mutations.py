"""Each condition of the guard is needed: without it, some change goes unnoticed."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_sharding
from machine import SCENARIOS, run_scenario
from machine.mutations import new_at
from nnx_sharding import _compat
from nnx_sharding.core.guard import recorder
from nnx_sharding.core.guard import store as guards
from nnx_sharding.core.guard.recipe import Opcode
from nnx_sharding.core.guard.store import Guards
from nnx_sharding.core.guard.walk import OPENERS, PythonWalk
from nnx_sharding.core.transform import Transform

# In each merge, since a method that is renamed has to be renamed here.
Patch = Callable[[pytest.MonkeyPatch], None]


def conditions(function: Any) -> list[str]:
    """The tests after which a function gives up: ``if <test>: return None``, or ``continue``."""
    return [ast.unparse(node.test) for node in ast.walk(_parse(function)) if _gives_up(node)]


def without(function: Any, condition: str) -> Any:
    """The function with one of these tests never true."""

    class Remove(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST:
            self.generic_visit(node)
            if _gives_up(node) and ast.unparse(node.test) == condition:
                node.test = ast.Constant(value=False)
            return node

    tree = ast.fix_missing_locations(Remove().visit(_parse(function)))
    namespace = dict(function.__globals__)
    exec(compile(tree, inspect.getfile(function), "exec"), namespace)
    return namespace[function.__name__]


def _parse(function: Any) -> ast.Module:
    return ast.parse("from __future__ import annotations\n" + _source(function))


def _source(function: Any) -> str:
    return textwrap.dedent(inspect.getsource(function))


def _gives_up(node: ast.AST) -> bool:
    if not isinstance(node, ast.If) or len(node.body) != 1 or node.orelse:
        return False
    only = node.body[0]
    is_none = isinstance(only, ast.Return) and ast.unparse(only) == "return None"
    return is_none or isinstance(only, ast.Continue)


def walk_without(method: str, condition: str) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        broken = without(getattr(PythonWalk, method), condition)
        monkeypatch.setattr(guards, "FastestWalk", type("Broken", (PythonWalk,), {method: broken}))

    return patch


def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static objects are not opened."""
    monkeypatch.setattr(
        recorder.WalkRecorder, "open_static", lambda *_: itertools.repeat(recorder.UNRECORDED)
    )


class Whatever:
    """Names that are always as expected."""

    def __ne__(self, other: object) -> bool:
        return False


def opening(opcode: Opcode, opener: Callable[[Any], Any]) -> Patch:
    """Items of one kind are opened by another function."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(OPENERS, opcode, opener)
        monkeypatch.setattr(guards, "FastestWalk", PythonWalk)

    return patch


def without_names(opcode: Opcode) -> Patch:
    """Neither names nor lengths of items of one kind are compared."""
    opener = OPENERS[opcode]
    return opening(opcode, lambda item: (opener(item)[0], Whatever()))


def without_slot(opcode: Opcode) -> Patch:
    """What is in one slot of Flax's objects is not compared."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        record = recorder.WalkRecorder._open_fields
        # Of traces, those of other models are compared with the current one.
        same = _compat.SLOTS["TRACE"].__get__(nnx.Param(0)) if opcode is Opcode.TRACE else None

        def broken(self: Any, fields: Any, position: int, values: Any) -> range:
            pairs = zip(fields, values, strict=True)
            values = [same if field.opcode is opcode else x for field, x in pairs]
            return record(self, fields, position, values)

        monkeypatch.setattr(recorder.WalkRecorder, "_open_fields", broken)
        opening(opcode, lambda _: ((same,), None))(monkeypatch)

    return patch


any_keys_in_dicts = opening(Opcode.DICT, lambda mapping: (mapping.values(), (*mapping,)))


def any_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "are_current", lambda states: True)


def nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "watch", lambda *_: ())


def ignore_key(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Guards.__init__
    without_specs = Transform(name="of a mutant", in_name="")  # whose plans depend on nothing
    monkeypatch.setattr(Guards, "__init__", lambda self, _, *rest: init(self, without_specs, *rest))


def variable_moved_to_another_trace() -> None:
    """No user can do this; but a new Variable can have the address of an old one."""

    @nnx_sharding.jit
    def count(model: nnx.Module) -> None:
        model.w[...] += 1

    model = nnx.Module()
    model.w = nnx.Param(jnp.zeros(2))
    for _ in range(3):
        count(model)
    leaked: list[nnx.Variable[Any]] = []
    jax.eval_shape(lambda: leaked.append(nnx.Param(np.zeros(2))))
    nnx.Variable._trace_state.__set__(model.w, leaked[0]._trace_state)
    try:
        count(model)
    except flax.errors.TraceContextError:
        return
    raise AssertionError("a Variable of another trace was updated")


def module_moved_to_another_trace() -> None:
    @nnx_sharding.jit
    def replace(model: nnx.Module) -> None:
        model.raw = model.raw + 1

    model = nnx.Module()
    model.raw = jnp.zeros(2)
    for _ in range(4):
        replace(model)
    leaked: list[nnx.Module] = []
    jax.eval_shape(lambda: leaked.append(nnx.Module()))
    vars(model)["_pytree__state"] = leaked[0]._pytree__state
    try:
        replace(model)
    except flax.errors.TraceContextError:
        return
    raise AssertionError("a module of another trace was updated")


class Label:
    """Compared by identity."""


def keys_seen(argument: Any, keys_of: Callable[[Any], Any], change: Callable[[Any], Any]) -> None:
    """A traced function sees the keys that Python sees, also after a change."""
    jitted = nnx_sharding.jit(lambda x: {str(key): jnp.zeros(()) for key in keys_of(x)})
    for _ in range(3):
        jitted(argument)
    change(keys_of(argument))
    assert [*jitted(argument)] == [*map(str, keys_of(argument))]


def attribute_of_a_static_object_renamed() -> None:
    model = nnx.Module()
    model.label = Label()
    model.label.one = 1
    keys_seen(model, lambda m: vars(m.label), lambda own: own.update(two=own.pop("one")))


def metadata_of_a_hijax_variable_replaced() -> None:
    model = nnx.Module()
    model.w = nnx.Param(jnp.zeros(2), hijax=True, mark="one")
    jitted = nnx_sharding.jit(lambda m: {m.w.mark: jnp.zeros(())})
    for _ in range(3):
        jitted(model)
    model.w = nnx.Param(jnp.zeros(2), hijax=True, mark="two")
    assert [*jitted(model)] == ["two"]


def key_of_a_static_dict_replaced() -> None:
    model = nnx.Module()
    model.note = nnx.static({1: 2.0})
    keys_seen(model, lambda m: m.note, lambda own: own.update({True: own.pop(1)}))


def item_at_the_end_of_a_static_list() -> None:
    model = nnx.Module()
    model.note = nnx.static(["one"])
    keys_seen(model, lambda m: m.note, lambda own: own.append("two"))


def key_of_a_state_renamed() -> None:
    state = nnx.State({"one": jnp.zeros(2)})
    keys_seen(state, lambda own: own, lambda own: own.update(two=own.pop("one")))


def static_object_at_the_address_of_a_dead_one() -> None:
    traces: list[None] = []

    @nnx_sharding.jit
    def count(model: nnx.Module) -> None:
        traces.append(None)

    model = nnx.Module()
    for _ in range(20):
        model.label = Label()
        for _ in range(3):
            count(model)
        address = id(model.label)
        del model.label
        before = len(traces)
        model.label = new_at(address, Label)
        count(model)
        if id(model.label) == address:
            break
    if len(traces) == before:
        raise AssertionError("a new object was taken for the one that is gone")


def double(x: float) -> float:
    return 2 * x


def triple(x: float) -> float:
    return 3 * x


def step(model: nnx.Module) -> jax.Array:
    model.a[...] += 1
    return model.b[...] + 10 * model.c[...] + model.function(model.number)


def small_model() -> nnx.Module:
    model = nnx.Module()
    model.a, model.b = nnx.Param(jnp.array(1.0)), nnx.Param(jnp.array(1.0))
    model.c, model.function, model.number = model.a, double, 1.5
    return model


OTHER_MODELS: tuple[Callable[[nnx.Module], Any], ...] = (
    lambda m: setattr(m, "number", 2.5),
    lambda m: setattr(m, "function", triple),
    lambda m: setattr(m, "b", m.a),
    lambda m: setattr(m, "c", nnx.Param(jnp.array(1.0))),
    lambda m: setattr(m, "c", m.b),
)


def other_models() -> None:
    """A model that has nearly the structure of earlier ones is served as in plain Python."""
    for change in OTHER_MODELS:
        jitted = nnx_sharding.jit(lambda m: step(m))
        for _ in range(3):
            jitted(small_model())
        one, two = small_model(), small_model()
        change(one)
        change(two)
        assert float(jitted(one)) == float(step(two))


def model_of_another_trace() -> None:
    jitted = nnx_sharding.jit(lambda m: step(m))
    for _ in range(3):
        jitted(small_model())
    leaked: list[nnx.Module] = []
    jax.eval_shape(lambda: leaked.append(small_model()))
    for x in (leaked[0].a, leaked[0].b):
        nnx.Variable._raw_value.__set__(x, jnp.array(1.0))
    try:
        jitted(leaked[0])
    except flax.errors.TraceContextError:
        return
    raise AssertionError("a model of another trace was updated")


CHECKS = (
    variable_moved_to_another_trace,
    module_moved_to_another_trace,
    attribute_of_a_static_object_renamed,
    metadata_of_a_hijax_variable_replaced,
    key_of_a_static_dict_replaced,
    item_at_the_end_of_a_static_list,
    key_of_a_state_renamed,
    static_object_at_the_address_of_a_dead_one,
    other_models,
    model_of_another_trace,
)
# What is broken, and scenarios that show it: they are tried first.
METHODS = ("_read", "follow", "match")
SLOTS = (Opcode.VALUE, Opcode.TRACE, Opcode.INITIALIZING, Opcode.IS_SETUP, Opcode.TREEDEF)
# The treedef of a hijax Variable has the number of its leaves.
NAMED = tuple(kind for kind in Opcode if kind not in (*SLOTS, Opcode.LEAVES))
HINTS = {
    "recorded_type": ("class",),
    "names != expected": ("static list", "set", "metadata renamed"),
    "METADATA": ("metadata renamed",),
    "SEQUENCE": ("container grows",),
    "TREE": ("pytree of the user's",),
    "STATIC": ("set", "ordered dict"),
    "frozen": ("static from 1 to True",),
    "mentions": ("alias",),
    "INITIALIZING": ("flag",),
    "IS_SETUP": ("flag",),
    "not opened": ("static list", "in a static tuple", "of a static tuple"),
    "specs": ("mesh_in_context",),
}
BROKEN: dict[str, Patch] = {
    **{
        f"{method}: {test}": walk_without(method, test)
        for method in METHODS
        for test in conditions(getattr(PythonWalk, method))
        if test != "stream is None"  # then the next line raises
    },
    **{f"names of {kind.name}": without_names(kind) for kind in NAMED},
    **{f"slot {kind.name}": without_slot(kind) for kind in SLOTS},
    "static objects are not opened": unopened,
    "keys of dicts are equal, and may be of another type": any_keys_in_dicts,
    "nobody watches static objects": nobody_watches,
    "what specs depend on does not matter": ignore_key,
    "models of other traces are known": any_trace,
}


def ordered(name: str) -> list[str]:
    hints = [hint for key, own in HINTS.items() if key in name for hint in own]
    return sorted(SCENARIOS, key=lambda scenario: not any(hint in scenario for hint in hints))


def survives(scenarios: list[str]) -> bool:
    try:
        for check in CHECKS:
            check()
        for scenario in scenarios:
            run_scenario(scenario)
    except Exception:
        return False
    return True


def test_there_are_conditions():
    numbers = [len(conditions(getattr(PythonWalk, method))) for method in METHODS]
    assert numbers == [3, 3, 4]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_guard_is_caught(name, monkeypatch):
    BROKEN[name](monkeypatch)
    assert not survives(ordered(name))
