"""Random programs on random graphs: ``jit`` does what Python and ``nnx.jit`` do."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from absl.testing import parameterized
from flax import nnx
from hypothesis import HealthCheck, given, settings

import nnx_sharding
from graphs import (
    OPERATIONS,
    VALUE_OPERATIONS,
    Graph,
    Program,
    build,
    graphs,
    programs,
    reachable,
    snapshot,
)

EXAMPLES = max(160, settings().max_examples)
PLAIN = ("node", "other", "list", "dict")


def outcome(function: Callable[..., Any], roots: tuple[Any, ...]) -> Any:
    """All that a caller can observe: the result, the arguments, and all objects in them before."""
    held = reachable(roots)
    result = function(*roots)
    return snapshot({"result": result, "roots": roots, "held": held})


def visible(function: Callable[..., Any], roots: tuple[Any, ...]) -> Any:
    """The result and the arguments: what ``nnx.jit`` keeps up to date."""
    result = function(*roots)
    return snapshot((result, roots))


class RandomProgramsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("any_graph", graphs(), programs()),
        ("modules_only", graphs(nodes=("node",)), programs(most=8)),
        (
            "containers",
            graphs(nodes=("list", "dict", "loose")),
            programs(("link", "box", "remove", "exchange attributes", "rename", "scale variable")),
        ),
        (
            "values",
            graphs(nodes=PLAIN, values=("array", "pair")),
            programs((*VALUE_OPERATIONS, "change kind", "exchange attributes")),
        ),
        (  # nnx.jit cannot change them; nor is a change of their metadata from 0 to False one
            "hijax",
            graphs(nodes=PLAIN, values=("array", "hijax", "hijax pair")),
            programs(sorted(OPERATIONS.keys() - {"set metadata"})),
            0.3,
        ),
    )
    def test_same_as_eager_and_as_nnx_jit(self, graph_strategy, program_strategy, alike=0.8):
        seen = collections.Counter()

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(graph_strategy, program_strategy)
        def check(graph: Graph, program: Program) -> None:
            lifted = nnx_sharding.jit(program.__call__)
            expected = outcome(program, build(graph))
            assert outcome(lifted, build(graph)) == expected
            # The second call has the plan of the first one, and other values.
            assert outcome(lifted, build(graph, 3)) == outcome(program, build(graph, 3))
            seen["examples"] += 1
            try:
                reference = visible(nnx.jit(program.__call__), build(graph))
            except Exception:  # graphs that nnx.jit refuses
                return
            seen["alike"] += reference == visible(program, build(graph))

        check()
        # nnx.jit differs from Python in a few cases, in which Python is right.
        assert seen["alike"] >= alike * EXAMPLES, seen
        assert seen["examples"] >= EXAMPLES, seen
