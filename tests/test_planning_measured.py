"""``plan(measure=...)``: candidates that run, and what running them leaves alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding.analysis import Hardware
from nnx_sharding.planning import plan
from nnx_sharding.planning.measuring import Runner, run_in_rounds
from nnx_sharding.report import Comparison
from nnx_sharding.report.comparison import Failure
from nnx_sharding.report.page import html_page

pytestmark = pytest.mark.usefixtures("compile_here")

# A byte takes a second, so by their rooflines the candidates that send nothing are the fastest.
SLOW_LINKS = Hardware("slow links", 1e12, 2**40, 1e12, 1.0)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 512, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(512, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


def make():
    model = Dropping(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def train_step(model, optimizer, batch, scale, name):
    assert name == "a static argument"
    # In tree mode, Flax takes no gradient of a model with random keys.
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss_of(params):
        return scale * jnp.mean(nnx.merge(graph, params, others, copy=True)(batch["x"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    optimizer.update(model, grads)
    return loss


STATIC = (2.0, "a static argument")
OPTIONS = {"donate_argnums": (0, 1), "static_argnums": (4,), "quiet": True}


def whole(model, optimizer, batch, *_):
    """Each device computes all rows."""
    return P(), P(), P(), None, None


def rows(model, optimizer, batch, *_):
    """Each device computes an eighth of the rows; they send each other the gradients."""
    return P(), P(), P("data"), None, None


def training(measure):
    batch = {"x": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    strategies = {"whole": whole, "rows": rows}
    options = OPTIONS | {"hardware": SLOW_LINKS, "strategies": strategies}
    args = (*nnx.eval_shape(make), batch, *STATIC)
    return plan(train_step, *args, meshes=[{"data": 8}], measure=measure, **options)


def test_measuring_mends_a_wrong_order():
    estimated = training(measure=0)
    assert estimated.best.strategy == "whole"
    assert {x["measured"] for x in estimated.comparison.figures.values()} == {None}
    assert "measured" not in str(estimated)
    live = len(jax.live_arrays())
    found = training(measure=2)
    assert len(jax.live_arrays()) == live
    times = found.comparison.measured
    # Eight times the work, on devices that share their cores.
    assert times["whole, data 8"] > 1.5 * times["rows, data 8"]
    assert found.best.strategy == "rows"
    assert [*found.candidates] == ["rows, data 8", "whole, data 8"]
    estimate = {name: x["roofline"] for name, x in found.comparison.figures.items()}
    assert estimate["rows, data 8"] > estimate["whole, data 8"]
    assert "measured" in str(found).splitlines()[0]
    assert next(x for x in found.summary() if x.startswith("measured: ")).count("the least of 2")
    assert any("whole, data 8: takes" in line for line in found.explained())
    assert found.gap == 0
    again = Comparison.from_json(found.comparison.to_json())
    assert again.measured == times and again.marked["measured"] == "rows, data 8"
    assert again.judged(hardware="TPU v5e").measured == {}
    assert '"measured"' in html_page(again)


def test_those_that_do_not_run_keep_their_estimates():
    found = training(measure=1)
    assert [*found.comparison.measured] == ["whole, data 8"] == [found.best.name]
    assert found.comparison.figures["rows, data 8"]["measured"] is None
    assert any("rows, data 8: not measured" in line for line in found.explained())
    assert 0 < found.gap <= 1  # the other may be as fast as its products alone


def test_a_candidate_that_fails_while_it_runs_loses(monkeypatch):
    def take_turn(self):
        args = self.make_args()
        if args[2]["x"].sharding.spec == P():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return 1.0

    monkeypatch.setattr(Runner, "take_turn", take_turn)
    live = len(jax.live_arrays())
    found = training(measure=2)
    assert found.best.strategy == "rows"
    failure = found.comparison.reports["whole, data 8"]
    assert isinstance(failure, Failure)
    assert failure.error == "while it ran: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert "whole, data 8 does not fit: while it ran" in str(found)
    assert len(jax.live_arrays()) == live  # the error keeps none of them


def test_arguments_are_not_used():
    model, optimizer = make()
    batch = {"x": jnp.ones((64, 256))}
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    count = int(model.dropout.rngs.count[...])
    strategies = {"rows": rows}
    args = model, optimizer, batch, *STATIC
    found = plan(
        train_step, *args, meshes=[{"data": 8}], strategies=strategies, measure=1, **OPTIONS
    )
    assert found.comparison.measured
    after = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(model.dropout.rngs.count[...]) == count
    assert not batch["x"].is_deleted()


def test_donated_arrays_that_the_step_returns():
    def step(state, tokens, key):
        noise = jax.random.normal(key, state["table"].shape)
        return {
            "table": state["table"] + noise + state["table"].at[tokens].get(out_sharding=P()).mean()
        }

    state = {"table": jnp.ones((64, 16))}
    args = state, jax.ShapeDtypeStruct((32,), jnp.int32), jax.random.key(0)
    strategies = {"own": lambda *_: ({"table": P("data")}, P("data"), None)}
    options = {"strategies": strategies, "donate_argnums": 0, "quiet": True}
    found = plan(step, *args, meshes=[{"data": 8}], measure=1, **options)
    assert found.comparison.measured
    assert not state["table"].is_deleted()


class Counting:
    """A runner that notes whose turn it is."""

    def __init__(self, name, turns):
        self.name, self.turns = name, turns

    def take_turn(self):
        self.turns.append(self.name)
        if self.name == "fails":
            raise ValueError("of the step")
        return float(len(self.turns))


def test_all_take_turns():
    turns = []
    runners = {name: Counting(name, turns) for name in ("a", "b", "fails", "c")}
    results = run_in_rounds(runners, 4, quiet=True)
    assert turns.count("fails") == 1
    assert results["fails"] == Failure("while it ran: ValueError: of the step")
    others = [name for name in turns if name != "fails"]
    rounds = [others[i : i + 3] for i in range(0, len(others), 3)]
    assert len(rounds) == 5  # the first is not counted
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({*map(tuple, rounds)}) > 1
    assert all(len(results[name]) == 4 for name in ("a", "b", "c"))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"measure": -1, "devices": 8}, "measure=-1: expected a number of at least 0"),
        ({"measure": None, "devices": 8}, "measure=None: expected"),
        ({"measure": True, "devices": 8}, "measure=True: expected"),
        ({"measure": 3, "devices": 16}, "16 × cpu: this process has 8 × cpu"),
        ({"measure": 3, "meshes": [{"data": 4}, {"data": 16}]}, "without a topology"),
    ],
)
def test_mistakes(options, match):
    with pytest.raises(ValueError, match=match):
        plan(lambda x: x + 1, jax.ShapeDtypeStruct((32, 32), jnp.float32), **options)
