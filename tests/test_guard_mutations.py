"""Each condition of the guard is needed: without it, some change goes unnoticed."""

import ast
import inspect
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
from nnx_sharding.core.guard import record as guard
from nnx_sharding.core.guard import store as guards
from nnx_sharding.core.guard.store import Guards
from nnx_sharding.core.guard.walk import PythonWalk

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


def follow_without(condition: str) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken(PythonWalk):
            __slots__ = ()
            follow = without(PythonWalk.follow, condition)

        monkeypatch.setattr(guard, "Walk", Broken)

    return patch


def in_builder(name: str) -> Patch:
    """A method of the builder of guards that does nothing."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guard._Builder, name, lambda *_: None)

    return patch


def nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_watch", lambda *_: None)


def ignore_key(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Guards.__init__
    monkeypatch.setattr(Guards, "__init__", lambda self, key_of=None: init(self))


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


class Label:
    """Compared by identity."""


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


# What is broken, and scenarios that show it: they are tried first.
HINTS = {
    "types))": ("class",),
    "keys": ("metadata renamed",),
    "lengths": ("container grows",),
    "treedefs": ("pytree of the user's",),
    "frozen": ("static from 1 to True",),
    "mentions": ("alias",),
    "leaf_types": ("raw array becomes",),
    "flags": ("flag",),
    "not opened": ("static list", "in a static tuple", "of a static tuple"),
    "kinds": ("set", "ordered dict"),
    "specs": ("mesh_in_context",),
}
BROKEN: dict[str, Patch] = {
    **{f"follow: {test}": follow_without(test) for test in conditions(PythonWalk.follow)},
    "static objects are not opened": in_builder("_open_static"),
    "what holds static objects is not opened": in_builder("_add_group"),
    "nobody watches static objects": nobody_watches,
    "what specs depend on does not matter": ignore_key,
}


def ordered(name: str) -> list[str]:
    hints = [hint for key, own in HINTS.items() if key in name for hint in own]
    return sorted(SCENARIOS, key=lambda scenario: not any(hint in scenario for hint in hints))


def survives(scenarios: list[str]) -> bool:
    try:
        variable_moved_to_another_trace()
        static_object_at_the_address_of_a_dead_one()
        for scenario in scenarios:
            run_scenario(scenario)
    except Exception:
        return False
    return True


def test_there_are_conditions():
    assert len(conditions(PythonWalk.follow)) >= 10


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_guard_is_caught(name, monkeypatch):
    BROKEN[name](monkeypatch)
    assert not survives(ordered(name))
