"""Any change between two calls is seen: random sequences of changes and calls, and each alone.

Calls that may skip the split of their arguments are compared with calls that never do, and with
plain Python; see ``machine.py``.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from absl.testing import parameterized
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from graphs import Node, graphs
from machine import (
    FAMILIES,
    SCENARIOS,
    UNCOUNTED,
    Failure,
    Functions3,
    Worlds,
    X,
    attempt,
    guarded,
    make_graph,
    make_one,
    reborn,
    run_scenario,
    step,
    uncached,
)

# Eight families and a light one: 10,080 steps, which take minutes. `make test-guard` does all of
# them, other runs of the tests a quarter.
SHARE = 1 if os.environ.get("NNX_SHARDING_GUARD_STEPS") == "all" else 4
STEPS = 1200 // SHARE
LENGTH = 50
# Of the examples, Hypothesis makes the first one minimal.
EXAMPLES = 2 + STEPS // (LENGTH - 1) * max(100, settings().max_examples) // 100


def ids_in(answer: Any) -> Any:
    """The ids of all objects in the answer of a walk; None if it has none."""
    if answer is None or isinstance(answer, Failure):
        return None
    return [
        ids_in(x) if isinstance(x, tuple | list) else x if isinstance(x, bytes) else id(x)
        for x in answer
    ]


@contextmanager
def watching_guards() -> Iterator[collections.Counter[str]]:
    """Counts the calls for which a guard held; both walks must agree on that."""
    seen: collections.Counter[str] = collections.Counter()
    if importlib.util.find_spec("nnx_sharding.core.guard.store") is None:
        yield seen
        return
    from nnx_sharding.core.guard import native, store, walk
    from nnx_sharding.core.guard.store import Guards

    find = Guards.find

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = find(self, *args, **kwargs)
        seen["asked"] += 1
        seen["held"] += found is not None
        return found

    class BothWalks:
        def __init__(self, recipe: Any):
            self.recipe = recipe
            self.walks = [kind(recipe) for kind in (native.FastestWalk, walk.PythonWalk)]

        def follow(self, arguments: Any) -> Any:
            return agreeing([own.follow for own in self.walks])(arguments)

        def match(self, arguments: Any) -> Any:
            found = agreeing([own.match for own in self.walks])(arguments)
            seen["matched"] += found is not None
            return found

    def agreeing(functions: list[Any]) -> Any:
        def call(arguments: Any) -> Any:
            answers = [attempt(functools.partial(function, arguments)) for function in functions]
            one, two = map(ids_in, answers)
            seen["disagreements"] += one != two
            return None if isinstance(answers[0], Failure) else answers[0]

        return call

    with (
        mock.patch.object(Guards, "find", count),
        mock.patch.object(store, "FastestWalk", BothWalks),
    ):
        yield seen
    assert not seen["disagreements"], "the walk in C and the one in Python"


def machine_of(name: str, seen: collections.Counter[str]) -> type[RuleBasedStateMachine]:
    """The state machine of one family. It notes in ``seen`` what it did."""
    family = FAMILIES[name]
    small = st.integers(0, 11)
    # As many calls as changes. Hypothesis likes the first one, so that should be a call.
    calls = [*family.calls] * (1 + len(family.mutations) // len(family.calls))
    actions = st.sampled_from([*calls, *family.mutations])
    functions: list[Functions3] = []

    class Machine(RuleBasedStateMachine):
        worlds: Worlds

        @initialize(graph=graphs() if name == "graphs" else st.none())
        def start(self, graph: Any) -> None:
            # Traces serve later examples, too; but one that failed must fail again.
            if not functions or seen["failing"]:
                functions[:] = [Functions3.new(family.truth)]
            seen["failing"] = 1
            make = family.make if graph is None else make_graph(graph)
            self.worlds = Worlds(functions[0], make)
            seen["failing"] = 0

        @rule(action=actions, a=small, b=small, c=small, times=st.integers(1, 3))
        def act(self, action: str, a: int, b: int, c: int, times: int) -> None:
            seen["failing"] = 1
            if action in family.mutations:
                mutate = family.mutations[action]
                self.worlds.mutate(lambda world: mutate(world, a, b, c))
            else:
                call = family.calls[action]
                for _ in range(times):
                    self.worlds.call(lambda world: call(world, a, b, c), action not in UNCOUNTED)
            seen["failing"] = 0
            seen["steps"] += 1
            seen[action] += 1

    return Machine


class GuardMachineTest(parameterized.TestCase):
    @parameterized.named_parameters((name, name) for name in FAMILIES)
    def test_random_changes_and_calls(self, name: str):
        family = FAMILIES[name]
        seen: collections.Counter[str] = collections.Counter()
        self.addCleanup(jax.clear_caches)  # thousands of programs take gigabytes
        with watching_guards() as hits:
            run_state_machine_as_test(
                machine_of(name, seen),
                settings=settings(
                    max_examples=math.ceil(EXAMPLES * family.weight),
                    stateful_step_count=LENGTH,
                    deadline=None,
                    phases=set(Phase) - {Phase.explain},  # which takes minutes
                    suppress_health_check=list(HealthCheck),
                ),
            )
        assert seen["steps"] >= int(STEPS * min(1, family.weight)), seen
        missing = [action for action in (*family.mutations, *family.calls) if not seen[action]]
        assert not missing or SHARE > 1, missing
        assert not hits or hits["held"] >= hits["asked"] / 8, hits

    @parameterized.named_parameters((name.replace(" ", "_"), name) for name in SCENARIOS)
    def test_one_change(self, name: str):
        with watching_guards():
            run_scenario(name)


class MachineTest(parameterized.TestCase):
    """What the tests above rely on."""

    def worlds(self) -> Worlds:
        return Worlds(Functions3.new(), make_one)

    def test_guards_hold_where_they_may(self):
        with watching_guards() as hits:
            worlds = self.worlds()
            for _ in range(5):
                worlds.call(lambda w: w.f["step"](w.model, X))
        if not hits:
            self.skipTest("built without guards")
        assert hits["held"] >= 3, hits
        assert hits["asked"] == 5, f"the calls to compare with use guards: {hits}"

    @parameterized.named_parameters(
        ("value", lambda w: w.model.v.set_raw_value(w.array() + w.mode)),
        ("static", lambda w: setattr(w.model, "k", w.mode)),
        ("metadata", lambda w: w.model.v.set_metadata(mark=w.mode)),
        ("order", lambda w: w.mode and w.model.__dict__.update(k=w.model.__dict__.pop("k"))),
        ("identity", lambda w: w.mode and setattr(w.model, "v", w.model.v.copy())),
    )
    def test_a_difference_between_worlds_is_seen(self, mutate: Any):
        worlds = self.worlds()
        kept = worlds.worlds[0].model.v, worlds.worlds[1].model.v
        for number, world in enumerate(worlds.worlds[:2]):
            world.kept.append(kept[number])
            world.mode = number
            mutate(world)
        with self.assertRaises(AssertionError):
            worlds.call(lambda w: w.f["step"](w.model, X))

    def test_a_stale_trace_is_seen(self):
        worlds = self.worlds()
        one, two = (wrap(lambda tree, x: step(tree, x)) for wrap in (guarded, uncached))
        worlds.call(lambda w: (one if w is worlds.worlds[0] else two)(w.model, X))
        stale = one(worlds.worlds[0].model, X), two(worlds.worlds[1].model, X)

        def call(w: Any) -> Any:
            w.model.k = 2
            return stale[0] if w is worlds.worlds[0] else two(w.model, X)

        with self.assertRaises(AssertionError):
            worlds.call(call)

    def test_addresses_are_used_again(self):
        node, again = Node(), 0
        for _ in range(20):
            node.child = Node()
            address = id(node.child)
            reborn(node, "child", Node)
            again += id(node.child) == address
        assert again >= 10

    def test_a_failure_is_compared(self):
        worlds = self.worlds()
        with self.assertRaises(AssertionError):
            worlds.call(lambda w: w.f["step" if w is worlds.worlds[0] else "fail"](w.model, X))
        assert Failure("a", "b") == Failure("a", "b")
