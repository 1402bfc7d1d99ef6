"""What calls leave behind (nothing), what they wait for (nothing), and that guards hold.

A guard lets a call skip the split of its arguments. It must keep no object of the user's alive,
and the number of guards has a bound.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx

import nnx_sharding
from graphs import Loose, Node, reachable
from libraries import node, param
from nnx_sharding import StateSharding, _compat
from nnx_sharding.core import call as run
from nnx_sharding.core.guard import native, walk
from nnx_sharding.core.guard import store as guards
from nnx_sharding.core.guard.guard import Guard, check
from nnx_sharding.transforms import lifted
from zoo import MLP, P, mesh_of, mlp_specs


def array(value: float = 1.0) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def increment(variable: nnx.Variable) -> None:
    variable[...] += 1


class Model(nnx.Module):
    """A layer, a Variable that every call increments, and a mode."""

    def __init__(self, w: float = 2.0):
        self.layer = node(w=param(w), name="layer")
        self.count = nnx.BatchStat(array(0))
        self.mode = "train"

    def __call__(self, x):
        if self.mode == "train":
            self.count[...] += 1
        return self.layer.w[...] * x + self.count[...]

    @nnx_sharding.jit
    def step(self, x):
        return self(x)

    @nnx_sharding.jit(static_argnames="power")
    def scaled(self, x, power):
        return self(x) * 2**power

    @classmethod
    @nnx_sharding.jit
    def of_class(cls, model, x):
        return model(x)

    @staticmethod
    @nnx_sharding.jit
    def of_none(model, x):
        return model(x)

    def plain(self, x, scale=1.0):
        return self(x) * scale


def call(model, x):
    return model(x)


class Splits:
    """Counts how often arguments are split."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[Splits]:
        def flatten(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        original = lifted.flatten
        with mock.patch.object(lifted, "flatten", flatten):
            yield self


def records(own: guards.Guards) -> list[Any]:
    """What is known of each set of arguments."""
    return [*own._guards.values()]


def num_guards(own: guards.Guards) -> int:
    return sum(len(record.guards) for record in records(own))


# Ways to use a model once: how it is made, how it is called, and where its guards are.


class Use(NamedTuple):
    make: Callable[[], tuple[Any, ...]]
    call: Callable[..., Any]
    guards: guards.Guards


def fresh(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as an object of its own, whose guards nobody shares."""
    return lambda *args: fun(*args)


def lift(make: Callable[[], tuple[Any, ...]], fun: Callable[..., Any], **options: Any) -> Use:
    own = nnx_sharding.jit(fresh(fun), **options)
    return Use(make, own, own._guards)


def plain_models():
    return lift(lambda: (Model(), array()), call)


def nested_models():
    def make():
        return (node(a=node(b=Model()), c=nnx.List([Model(), 1])),)

    return lift(make, lambda m: m.a.b(1.0) + m.c[0](2.0))


def shared_variables():
    def make():
        w = param()
        return node(a=node(w=w), b=node(w=w)), w

    return lift(make, lambda m, w: increment(m.a.w))


def in_a_dict():
    return lift(lambda: ({"model": Model(), "x": array()},), lambda args: args["model"](args["x"]))


def in_a_tuple():
    return lift(lambda: ((Model(), [array()]),), lambda args: args[0](args[1][0]))


def two_models():
    return lift(lambda: (Model(), Model(), array()), lambda a, b, x: a(x) + b(x))


def by_keyword():
    own = nnx_sharding.jit(lambda *, x, model: model(x))
    return Use(lambda: (Model(), array()), lambda m, x: own(x=x, model=m), own._guards)


def decorated_method():
    return Use(lambda: (Model(), array()), lambda m, x: m.step(x), Model.step._guards)


def bound_method():
    fun = nnx_sharding.jit(Model().plain)
    return Use(lambda: (Model(), array()), lambda m, x: nnx_sharding.jit(m.plain)(x), fun._guards)


def compiled():
    own = nnx_sharding.jit(fresh(call)).lower(Model(), array()).compile()
    return Use(lambda: (Model(), array()), own, own._guards)


def in_shard_map():
    own = nnx_sharding.shard_map(
        fresh(call), mesh=mesh_of((2,), ("data",)), in_specs=(P(), P("data")), out_specs=P("data")
    )
    x = jnp.ones(8)
    return Use(lambda: (Model(), x), own, own._guards)


def laid_out():
    mesh = mesh_of((2,), ("model",))
    specs = StateSharding({nnx.Param: P("model"), ...: P()})

    def model():
        return (node(w=nnx.Param(jnp.ones(8)), count=nnx.BatchStat(array(0))),)

    def step(m):
        increment(m.count)
        return m.w.sum()

    return lift(model, step, in_shardings=(specs,), mesh=mesh)


def donated():
    return lift(lambda: (Model(), array()), call, donate_argnums=0)


def train_and_eval():
    own = nnx_sharding.jit(fresh(call))

    def both(model, x):
        model.mode = "train"
        own(model, x)
        model.mode = "eval"
        return own(model, x)

    return Use(lambda: (Model(), array()), both, own._guards)


def many_modes():
    own = nnx_sharding.jit(fresh(call))

    def each(model, x):
        for mode in ("train", "a", "b"):
            model.mode = mode
            own(model, x)

    return Use(lambda: (Model(), array()), each, own._guards)


def attributes_added():
    def step(m):
        m.new = node(w=m.layer.w, up=None)
        increment(m.count)

    return lift(lambda: (Model(),), step)


def cycles():
    def make():
        parent, child = node(w=param()), node(w=param())
        parent.child, child.parent, child.me = child, parent, child
        return (parent,)

    return lift(make, lambda m: increment(m.child.parent.w))


def bare_variables():
    return lift(lambda: (param(),), increment)


def bare_variables_in_a_list():
    return lift(lambda: ([param(), param()],), lambda pair: increment(pair[0]))


_ADAM = optax.adam(1e-3)


def train_step(model, optimizer, x):
    loss, gradient = nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(model)
    optimizer.update(model, gradient)
    return loss


def optimizers():
    def make():
        model = Model()
        return model, nnx.Optimizer(model, _ADAM, wrt=nnx.Param), array()

    return lift(make, train_step)


WITHOUT_CYCLES = (
    plain_models, shared_variables, in_a_dict, in_a_tuple, two_models, decorated_method, compiled,
    in_shard_map, laid_out, donated, train_and_eval, attributes_added, optimizers,
)  # fmt: skip
MORE = (nested_models, by_keyword, bound_method, many_modes)
VARIABLES = (bare_variables, bare_variables_in_a_list)


def named(makers: Sequence[Callable[..., Any]]) -> Any:
    return parameterized.named_parameters((make.__name__, make) for make in makers)


# Live objects


class Census:
    """How much there is that is alive."""

    def __init__(self) -> None:
        gc.collect()
        self.blocks = sys.getallocatedblocks()
        self.arrays = len(jax.live_arrays())
        self.objects = collections.Counter(map(type, gc.get_objects()))

    def growth(self, before: Census) -> dict[str, int]:
        more = self.objects - before.objects
        kinds = {named_type(kind): n for kind, n in more.items()}
        arrays, blocks = self.arrays - before.arrays, self.blocks - before.blocks
        return {"arrays": arrays, "blocks": blocks, **kinds}


def drop(use: Use, count: int) -> None:
    """Makes models, calls each until it is guarded, and drops them."""
    for _ in range(count):
        arguments = use.make()
        for _ in range(3):
            use.call(*arguments)


def named_type(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def num_variables() -> int:
    return sum(nnx.Variable in type(x).__mro__ for x in gc.get_objects())


def arrays_of(x: Any) -> list[jax.Array]:
    own = x.get_raw_value() if is_variable(x) else [*vars(x).values()]
    leaves = jax.tree.leaves(own, is_leaf=lambda part: isinstance(part, nnx.Pytree | nnx.Variable))
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


def small_tables() -> Any:
    """Lets records of what cannot be watched, which stay until there are too many, be few."""
    return mock.patch.multiple(guards, MAX_ARGUMENTS=16, MAX_GUARDS=2)


class MemoryTestCase(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # These tests ignore earlier objects, which would take long to inspect.
        gc.collect()
        gc.freeze()
        cls.addClassCleanup(gc.unfreeze)


class DroppedModelsTest(MemoryTestCase):
    """Models that are made, called and dropped, while the jitted function lives on."""

    MODELS = 1000
    WARM = 200

    @named((*WITHOUT_CYCLES, *VARIABLES, cycles))
    def test_nothing_is_left(self, maker):
        use = maker()
        if maker in VARIABLES:
            self.enter_context(small_tables())
        drop(use, self.WARM)
        before = Census()
        drop(use, self.MODELS - self.WARM)
        growth = Census().growth(before)
        # An array, an object or a block of memory for each model would be twice as many.
        many = (self.MODELS - self.WARM) // 2
        assert growth["arrays"] <= 0 and max(growth.values()) < many, growth
        assert not growth.keys() & {named_type(nnx.Param), named_type(Node), named_type(Model)}
        limit = guards.MAX_ARGUMENTS * guards.MAX_GUARDS if maker in VARIABLES else 0
        assert num_guards(use.guards) <= limit

    @named((plain_models, many_modes, in_a_dict, bare_variables, cycles))
    def test_no_memory_is_taken(self, maker):
        use = maker()
        if maker in VARIABLES:
            self.enter_context(small_tables())
        # Watching memory makes all of this several times as slow, so there are fewer models.
        drop(use, 20)
        # What measures coverage keeps each line that it sees for the first time.
        self.addCleanup(sys.settrace, sys.gettrace())
        sys.settrace(None)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        drop(use, 80)
        before = self.memory()
        drop(use, 300)
        # The smallest object, a float, takes 24 bytes.
        assert self.memory() - before < 300 * 24

    @staticmethod
    def memory() -> int:
        gc.collect()
        # JAX keeps a few small objects for each of the first arrays, as it does without us.
        of_jax = tracemalloc.Filter(False, os.path.join(os.path.dirname(jax.__file__), "*"))
        traces = tracemalloc.take_snapshot().filter_traces([of_jax]).statistics("filename")
        return sum(statistic.size for statistic in traces)

    @named((*WITHOUT_CYCLES, *MORE, *VARIABLES, cycles))
    def test_models_in_use_are_guarded(self, maker):
        # Else the other tests here would show nothing.
        use, splits = maker(), Splits()
        arguments = use.make()
        for _ in range(3):
            use.call(*arguments)
        assert num_guards(use.guards) > 0
        with splits.watch():
            use.call(*arguments)
        assert splits.count == 0 or maker is attributes_added  # with other objects each time


class ReleaseTest(MemoryTestCase):
    """Nothing waits for the garbage collector."""

    def setUp(self):
        super().setUp()
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    @named((*WITHOUT_CYCLES, *MORE))
    def test_model_goes_with_its_last_reference(self, maker):
        use = maker()
        drop(use, 2)
        gc.collect()
        arrays, variables = len(jax.live_arrays()), num_variables()
        arguments = use.make()
        for _ in range(3):
            use.call(*arguments)
        objects = reachable(arguments)
        watched = [weakref.ref(x) for x in objects if not isinstance(x, nnx.Variable)]
        watched += [weakref.ref(leaf) for x in objects for leaf in arrays_of(x)]
        assert num_guards(use.guards) > 0 and None not in [watch() for watch in watched]
        del objects
        gc.collect()  # what the lines above this left behind
        del arguments
        assert [watch() for watch in watched] == [None] * len(watched)
        assert (len(jax.live_arrays()), num_variables()) == (arrays, variables)
        assert num_guards(use.guards) == 0

    def test_first_model_is_not_kept_by_the_trace(self):
        own = nnx_sharding.jit(fresh(call))
        model = Model()
        own(model, array())
        own(model, array())
        watched = weakref.ref(model)
        del model
        gc.collect()
        assert watched() is None

    def test_arrays_are_replaced(self):
        own = nnx_sharding.jit(fresh(call))
        model = Model()
        own(model, array(3))
        for _ in range(5):
            x = array(3)
            watched = weakref.ref(x), weakref.ref(model.count.get_raw_value())
            result = weakref.ref(own(model, x))
            del x
            assert [watch() for watch in (*watched, result)] == [None] * 3

    @parameterized.named_parameters(
        ("attribute", lambda m: setattr(m, "mode", "eval")),
        ("module", lambda m: setattr(m, "layer", node(w=param(1), name="layer"))),
        ("variable", lambda m: setattr(m, "count", nnx.BatchStat(array(1)))),
        ("metadata", lambda m: m.count.set_metadata(note="new")),
    )
    def test_changed_model(self, change):
        own = nnx_sharding.jit(fresh(call))
        for _ in range(2):
            model = Model()
            parts = weakref.ref(model), weakref.ref(model.layer)
            for _ in range(3):
                own(model, array())
            change(model)
            for _ in range(3):
                own(model, array())
            del model
            gc.collect()
            assert [part() for part in parts] == [None, None]

    def test_failing_function(self):
        own = nnx_sharding.jit(lambda m, x: m(x).reshape(3))
        model = Model()
        for _ in range(3):
            own(model, jnp.ones(3))
        watched = weakref.ref(model)
        for _ in range(3):
            with pytest.raises(TypeError, match="reshape"):
                own(model, jnp.ones(2))
        own(model, jnp.ones(3))
        del model
        gc.collect()
        assert watched() is None

    def test_function_and_its_guards(self):
        own = nnx_sharding.jit(fresh(call))
        model = Model()
        for _ in range(3):
            own(model, array())
        watched = weakref.ref(own), weakref.ref(own._guards)
        del own
        gc.collect()
        assert [watch() for watch in watched] == [None, None]
        assert float(model.step(array())) == 2 + 4


class BoundsTest(parameterized.TestCase):
    def test_more_models_than_records(self):
        own = nnx_sharding.jit(fresh(call))
        models = [Model(i) for i in range(guards.MAX_ARGUMENTS + 40)]
        for turn in range(1, 4):
            for i, model in enumerate(models):
                assert float(own(model, array(10))) == 10 * i + turn
                assert len(records(own._guards)) <= guards.MAX_ARGUMENTS
        assert [float(model.count[...]) for model in models] == [3] * len(models)
        del models, model
        gc.collect()
        assert num_guards(own._guards) == 0

    def test_more_pairs_than_records(self):
        own = nnx_sharding.jit(lambda a, b, x: a(x) - b(x))
        models = [Model(i) for i in range(6)]
        with mock.patch.object(guards, "MAX_ARGUMENTS", 20):
            for _ in range(3):
                for a, b in itertools.permutations(models, 2):
                    difference = float(a.layer.w[...] - b.layer.w[...])
                    difference += float(a.count[...] - b.count[...])
                    assert float(own(a, b, array())) == difference
                    assert len(records(own._guards)) <= 20

    def test_more_structures_than_guards(self):
        own = nnx_sharding.jit(lambda m, x: x * m.mode + m.layer.w[...])
        model = Model()
        for _ in range(3):
            for mode in range(guards.MAX_GUARDS + 4):
                model.mode = mode
                assert float(own(model, array(2))) == 2 * mode + 2
                assert len(records(own._guards)) == 1
                assert num_guards(own._guards) <= guards.MAX_GUARDS

    def test_more_types_than_records(self):
        own = nnx_sharding.jit(lambda m, **more: sum(more.values()) + m(1.0))
        model = Model()
        with mock.patch.object(guards, "MAX_ARGUMENTS", 4):
            for turn in range(3):
                for i in range(8):
                    result = own(model, **{f"x{i}": array(i), "more": np.float32(1)})
                    assert float(result) == i + 1 + 2 + (8 * turn + i + 1)
                    assert len(records(own._guards)) <= 4

    def test_clear_cache(self):
        traces = []

        def counted(model, x):
            traces.append(1)
            return model(x)

        own = nnx_sharding.jit(counted)
        compiled = own.lower(Model(), array()).compile()
        model = Model()
        for turn in range(1, 4):
            del traces[:]
            for i in range(3):
                assert float(own(model, array(10))) == 20 + 4 * (turn - 1) + i + 1
            assert len(traces) == (turn > 1) and num_guards(own._guards) == 1
            own.clear_cache()
            assert not records(own._guards)
            # What is compiled is the user's own, and stays.
            assert float(compiled(model, array(10))) == 20 + 4 * turn
        assert num_guards(compiled._guards) == 1


def arrays(model: Any) -> list[jax.Array]:
    return [leaf for x in reachable(model) for leaf in arrays_of(x)]


class DonationTest(parameterized.TestCase):
    """Buffers of donated models are given away by guarded calls as by others."""

    def check(self, model, own):
        splits = Splits()
        own(model, array())
        for i in range(2, 6):
            old = arrays(model)
            with splits.watch():
                result = own(model, array(10))
            assert [x.is_deleted() for x in old] == [True] * len(old)
            assert [x.is_deleted() for x in arrays(model)] == [False] * len(old)
            assert float(result) == 20 + i and float(model.count[...]) == i
        assert splits.count == 0

    @parameterized.named_parameters(
        ("by_number", {"donate_argnums": 0}),
        ("by_name", {"donate_argnames": "model"}),
        ("kept_unused", {"donate_argnums": 0, "keep_unused": True}),
    )
    def test_model(self, options):
        self.check(Model(), nnx_sharding.jit(call, **options))

    def test_method(self):
        class Giving(Model):
            @nnx_sharding.jit(donate_argnums=0)
            def give(self, x):
                return self(x)

        self.check(Giving(), lambda model, x: model.give(x))

    def test_compiled(self):
        own = nnx_sharding.jit(fresh(call), donate_argnums=0)
        self.check(Model(), own.lower(Model(), array()).compile())

    def test_on_a_mesh(self):
        mesh = mesh_of((8,), ("data",))
        own = nnx_sharding.jit(
            fresh(call), in_shardings=(StateSharding({...: P()}), P()), mesh=mesh, donate_argnums=0
        )
        self.check(Model(), own)

    def test_raw_arrays_and_containers(self):
        def step(model):
            pair = model.pair.get_value()
            model.pair.set_value({"x": pair["y"] + 1, "y": pair["x"]})
            model.raw = model.raw * 2

        model = node(pair=nnx.Param({"x": array(1), "y": array(2)}), raw=array(3))
        own = nnx_sharding.jit(step, donate_argnums=0)
        for _ in range(4):
            old = [*jax.tree.leaves(model.pair.get_value()), model.raw]
            own(model)
            assert [x.is_deleted() for x in old] == [True] * 3
        assert jax.tree.map(float, model.pair.get_value()) == {"x": 3, "y": 4}
        assert float(model.raw) == 48

    def test_nothing_is_kept(self):
        own = nnx_sharding.jit(fresh(call), donate_argnums=0)
        model, x = Model(), array()
        own(model, x)
        gc.collect()
        before = len(jax.live_arrays())
        for _ in range(20):
            own(model, x)
        assert len(jax.live_arrays()) <= before

    def test_others_keep_their_arrays(self):
        own = nnx_sharding.jit(lambda a, b, x: a(x) + b(x), donate_argnums=0)
        given, kept, x = Model(), Model(), array()
        for _ in range(4):
            old = arrays(given), arrays(kept)
            own(given, kept, x)
            assert [a.is_deleted() for a in old[0]] == [True, True]
            assert [a.is_deleted() for a in (*old[1], x)] == [False] * 3


class Gate:
    """Arrays that are not ready before the gate is opened."""

    TIMEOUT = 20.0

    def __init__(self, mesh: jax.sharding.Mesh):
        self._opened = threading.Event()
        self._opened.set()
        self._late = False

        def wait(x: Any) -> Any:
            self._late |= not self._opened.wait(self.TIMEOUT)
            return np.asarray(x)

        def pass_through(x: Any) -> Any:
            return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        # On one device JAX itself waits for a program with a callback; on two it does not, and
        # on all of them no thread would be left to launch anything else.
        specs: Any = {"in_specs": P("data"), "out_specs": P("data")}
        mapped = jax.shard_map(pass_through, mesh=mesh, check_vma=False, **specs)
        self._make = jax.jit(mapped)

    def array(self) -> jax.Array:
        """Eight ones, spread over the devices."""
        return self._make(jnp.ones(8))

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        self._opened.clear()
        try:
            yield
            assert not self._late, "the gate was waited for"
        finally:
            self._opened.set()


class AsynchronyTest(parameterized.TestCase):
    """A call returns before the device has done it: its input is not even there."""

    def setUp(self):
        super().setUp()
        # On virtual CPU devices every 16th program is waited for.
        self.enter_context(mock.patch.object(run, "is_bounded", return_value=False))
        self.mesh = mesh_of((2,), ("data",))
        self.gate = Gate(self.mesh)

    def one(self) -> jax.Array:
        """An array on one device."""
        return self.gate.array().addressable_shards[0].data

    def check(self, own, make, model=None, *, guarded=True):
        model = model or Model()
        for _ in range(3):
            jax.block_until_ready(own(model, make()))
        splits = Splits()
        with self.gate.shut(), splits.watch():
            x = make()
            assert not x.is_ready(), "the gate does not hold"
            results = [own(model, x) for _ in range(3)]
            ready = [y.is_ready() for y in (*results, model.count.get_raw_value())]
        assert not any(ready)
        assert splits.count == 0 or not guarded
        assert [float(y.reshape(-1)[0]) for y in results] == [6, 7, 8]
        assert float(model.count[...].reshape(-1)[0]) == 6

    def test_control(self):
        # What follows says something only if JAX itself does not wait.
        pure = jax.jit(lambda count, x: (count + x[0], 2 * x + count))
        jax.block_until_ready(pure(array(), self.one()))
        with self.gate.shut():
            results = pure(array(), self.one())
            assert not any(y.is_ready() for y in results)
        assert float(results[0]) == 2

    @parameterized.named_parameters(
        ("plain", {}), ("donated", {"donate_argnums": 0}), ("tree", {"graph": False})
    )
    def test_jit(self, options):
        self.check(nnx_sharding.jit(fresh(add_first), **options), self.one)

    def test_method(self):
        class Own(Model):
            @nnx_sharding.jit
            def add_first(self, x):
                return add_first(self, x)

        self.check(lambda model, x: model.add_first(x), self.one, Own())

    def test_laid_out(self):
        specs = (StateSharding({...: P()}), P("data"))
        own = nnx_sharding.jit(fresh(add_first), in_shardings=specs, mesh=self.mesh)
        self.check(own, self.gate.array)

    def test_compiled(self):
        own = nnx_sharding.jit(fresh(add_first)).lower(Model(), self.one()).compile()
        self.check(own, self.one)

    def test_shard_map(self):
        self.check(self.mapped(), self.gate.array)

    def test_compiled_shard_map(self):
        replicated = jax.NamedSharding(self.mesh, P())
        model = jax.device_put(Model(), replicated)
        own = self.mapped().lower(model, self.gate.array()).compile()
        self.check(own, self.gate.array, model)

    def mapped(self):
        def add_mean(model, x):
            model.count[...] += jax.lax.pmean(x, "data")[0]
            return model.layer.w[...] * x + model.count[...]

        specs: Any = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        return nnx_sharding.shard_map(add_mean, mesh=self.mesh, **specs)

    def test_first_call(self):
        own, model = nnx_sharding.jit(fresh(add_first)), Model()
        with self.gate.shut():
            result = own(model, self.one())
            assert not result.is_ready() and not model.count.get_raw_value().is_ready()
        assert float(result[0]) == 3

    def test_changed_model_is_split_without_waiting(self):
        def own(model, x):
            model.mode = {"train": "eval", "eval": "other", "other": "train"}[model.mode]
            with mock.patch.object(guards, "MAX_GUARDS", 1):
                return jitted(model, x)

        jitted = nnx_sharding.jit(fresh(add_first))
        self.check(own, self.one, guarded=False)

    def test_training(self):
        model = Model()
        optimizer = nnx.Optimizer(model, _ADAM, wrt=nnx.Param)
        own = nnx_sharding.jit(lambda m, o, x: train_step(m, o, x[0]))
        for _ in range(3):
            own(model, optimizer, self.one())
        with self.gate.shut():
            x = self.one()
            losses = [own(model, optimizer, x) for _ in range(3)]
            variables = [v for v in reachable((model, optimizer)) if is_variable(v)]
            waiting = [v for v in variables if not v.get_raw_value().is_ready()]
            assert not any(loss.is_ready() for loss in losses)
        # All but the learning rate and the like depends on the gate, some through the loss alone.
        assert model.layer.w in waiting and len(waiting) >= 3
        assert int(optimizer.step[...]) == 6


def add_first(model, x):
    model.count[...] += x[0]
    return model.layer.w[...] * x + model.count[...]


# Ordinary uses. Each makes a function without arguments, which is called several times.


def use_method_with_static():
    model = Model()
    return lambda: (model.scaled(array(), 3), model.scaled(array(), power=2))


def use_bound_method():
    own = nnx_sharding.jit(Model().plain)
    return lambda: own(array(), scale=2.0)


def use_static_arguments():
    model = Model()
    own = nnx_sharding.jit(lambda m, x, a, b: m(x) * a[0] * len(b), static_argnums=(2, 3))
    # Equal, but not identical in each call.
    return lambda: own(model, array(), (float("2.5"), "a"), "".join(["b", "c"]))


def use_optimizer():
    model = MLP()
    schedule = optax.cosine_decay_schedule(1e-3, 10)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
    own = nnx_sharding.jit(train_step)
    return lambda: own(model, optimizer, jnp.ones((2, 4)))


def use_sharded_optimizer():
    model = MLP()
    optimizer = nnx.Optimizer(model, _ADAM, wrt=nnx.Param)
    specs = StateSharding(
        {
            nnx.PathContains("up"): P(None, "model"),
            nnx.PathContains("down"): P("model", None),
            ...: P(),
        }
    )
    mesh = mesh_of((2, 4), ("data", "model"))
    own = nnx_sharding.jit(train_step, in_shardings=(specs, specs, P("data")), mesh=mesh)
    return lambda: own(model, optimizer, jnp.ones((8, 4)))


def use_list():
    models = [Model(i) for i in range(3)]
    own = nnx_sharding.jit(lambda models, x: sum(model(x) for model in models))
    return lambda: own(list(models), array())


def use_many_models():
    models, own = [Model(i) for i in range(20)], nnx_sharding.jit(fresh(call))
    return lambda: [own(model, array()) for model in models]


def use_several_functions():
    model, own = Model(), [nnx_sharding.jit(fresh(call)) for _ in range(3)]
    return lambda: [one(model, array()) for one in own]


def use_mesh_in_context():
    mesh, model = mesh_of((2, 4), ("data", "model")), MLP()
    own = nnx_sharding.jit(fresh(call), in_shardings=(mlp_specs(), P("data")))

    def in_context():
        with jax.set_mesh(mesh):
            own(model, np.ones((8, 4), np.float32))

    return in_context


def use_sharding_metadata():
    mesh = mesh_of((2, 4), ("data", "model"))
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0))
    own = nnx_sharding.jit(fresh(call))
    return lambda: own(model, np.ones((2, 8), np.float32))


def use_compiled():
    own = nnx_sharding.jit(lambda m, x, k: m(x) * k, static_argnums=2)
    model = Model()
    compiled = own.lower(model, array(), 2).compile()
    return lambda: (compiled(model, array()), compiled(model, array(), 2))


def use_compiled_method():
    model = Model()
    compiled = model.step.lower(array()).compile()
    return lambda: compiled(array())


def use_compiled_shard_map():
    mesh, model = mesh_of((8,), ("data",)), Model()
    specs: Any = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    own = nnx_sharding.shard_map(fresh(call), mesh=mesh, **specs)
    compiled = own.lower(model, jnp.ones(8)).compile()
    return lambda: compiled(model, jnp.ones(8))


def use_traced():
    model = Model()
    traced = nnx_sharding.jit(fresh(call)).trace(model, array())
    return lambda: traced(model, array())


def use_attention_cache():
    model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=True)
    model.init_cache((2, 8, 8))
    own = nnx_sharding.jit(fresh(call))
    return lambda: own(model, jnp.ones((2, 1, 8)))


def use_containers():
    rngs = nnx.Rngs(0)
    model = node(
        list=nnx.List([nnx.Linear(4, 4, rngs=rngs), 3]),
        dict=nnx.Dict(a=param(), b="text"),
        chain=nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu),
        boxed=nnx.data([node(w=param()), (param(), {"k": param()})]),
        numbers=(1, 2.5, ("a", None)),
        names=["a", "b"],
    )

    def step(m, x):
        increment(m.dict.a)
        increment(m.boxed[1][1]["k"])
        return m.chain(m.list[0](x)) * m.dict.a[...]

    own = nnx_sharding.jit(step)
    return lambda: own(model, jnp.ones((2, 4)))


def use_metrics():
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    update = nnx_sharding.jit(
        lambda m: m.update(loss=jnp.ones(3), logits=jnp.eye(3), labels=jnp.array([0, 1, 0]))
    )
    compute = nnx_sharding.jit(lambda m: m.compute())
    return lambda: (update(metrics), compute(metrics), metrics.reset())


def use_metrics_in_training():
    model, metrics = MLP(), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    optimizer = nnx.Optimizer(model, _ADAM, wrt=nnx.Param)

    @nnx_sharding.jit
    def step(model, optimizer, metrics, x):
        metrics.update(loss=train_step(model, optimizer, x))

    return lambda: step(model, optimizer, metrics, jnp.ones((2, 4)))


def use_raw_arrays():
    def step(m, x):
        m.raw = m.raw + x
        m.rest[1] = m.rest[0] + m.raw

    model = node(raw=array(), rest=nnx.data([array(), array(), np.ones(2, np.float32)]))
    own = nnx_sharding.jit(step)
    return lambda: own(model, array())


def use_variables_with_containers():
    def step(m):
        value = m.v.get_value()
        m.v.set_value({"y": value["x"][0], "x": (value["y"], value["x"][1])})

    model = node(v=nnx.Param({"y": array(1), "x": (array(2), array(3))}))
    own = nnx_sharding.jit(step)
    return lambda: own(model)


def use_jit_anew():
    def step(m, x, k):
        return m(x) * k

    model, mesh = Model(), mesh_of((8,), ("data",))
    options = {"in_shardings": (P(), P("data")), "mesh": mesh, "static_argnums": 2}
    return lambda: nnx_sharding.jit(step, **options)(model, jnp.ones(8), 3)


def use_shard_map_anew():
    fun, model, mesh = fresh(call), Model(), mesh_of((8,), ("data",))
    specs: Any = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return lambda: nnx_sharding.shard_map(fun, mesh=mesh, **specs)(model, jnp.ones(8))


def use_partial_of_a_bound_method():
    own = nnx_sharding.jit(functools.partial(Model().plain, scale=3.0))
    return lambda: own(array())


def use_partial_as_decorator():
    @functools.partial(nnx_sharding.jit, static_argnames=("k",))
    def own(m, x, k):
        return m(x) * k

    model = Model()
    return lambda: own(model, array(), k=2)


def use_ref_variables():
    model, stat = node(w=nnx.Param(array(1), ref=True)), nnx.BatchStat(array(2), ref=True)

    def step(m, s):
        increment(m.w)
        s[...] = m.w[...] * 10

    own = nnx_sharding.jit(step)
    return lambda: own(model, stat)


def use_returned_model():
    model, own = Model(), nnx_sharding.jit(lambda m, x: (m(x), m, Model()))
    return lambda: own(model, array())


def use_split_model():
    graphdef, state = nnx.split(MLP())
    own = nnx_sharding.jit(lambda g, s, x: nnx.merge(g, s)(x), static_argnums=0)
    return lambda: own(graphdef, state, jnp.ones((2, 4)))


def use_changed_values():
    model, own = Model(), nnx_sharding.jit(fresh(call))

    def change():
        model.layer.w[...] = array(5)
        model.count.set_value(np.float32(1) * array())
        return own(model, array())

    return change


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 1
    sizes: tuple[int, ...] = (1, 2)


def use_dataclass_attribute():
    model, own = Model(), nnx_sharding.jit(fresh(call))

    def change():
        model.config = Config()
        return own(model, array())

    return change


def again(model: Any, *values: Callable[[], Any], fun: Any = call, **options: Any) -> Any:
    """Calls a function of a model, with values that are made anew for each call."""
    own = nnx_sharding.jit(fresh(fun), **options)
    return lambda: own(model, *(make() for make in values))


def again_on_a_mesh(rules: StateSharding) -> Any:
    mesh = mesh_of((2, 4), ("data", "model"))
    return again(MLP(), lambda: jnp.ones((8, 4)), in_shardings=(rules, P("data")), mesh=mesh)


def updated_average(average: Any, model: Any) -> None:
    states = nnx.state(average), nnx.state(model)
    nnx.update(average, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, *states))


def loose_model() -> Loose:
    model = Loose()
    model.blocks, model.flag = [node(w=param())], True
    return model


def add(m: Any, *numbers: Any) -> Any:
    return sum(numbers, start=m(1.0))


ROWS = functools.partial(jnp.ones, (2, 4))
IS_UP = StateSharding({lambda path, x: "up" in path and x.ndim == 2: P(None, "model"), ...: P()})
ORDINARY = {
    "without_state": lambda: again(MLP(), ROWS),
    "state_sharding": lambda: again_on_a_mesh(mlp_specs()),
    "state_sharding_with_predicate": lambda: again_on_a_mesh(IS_UP),
    "numpy": lambda: again(Model(), lambda: np.ones(3, np.float32), np.float32, fun=add),
    "numbers": lambda: again(Model(), lambda: float("1.5"), lambda: int("3"), bool, fun=add),
    "random_key": lambda: again(
        Model(), lambda: jax.random.key(0), fun=lambda m, key: m(jax.random.uniform(key))
    ),
    "rngs": lambda: again(nnx.Rngs(params=0, dropout=1), fun=lambda r: r.dropout.uniform(())),
    "dropout": lambda: again(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), ROWS),
    "batch_norm": lambda: again(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), ROWS),
    "recurrent": lambda: again(
        nnx.RNN(nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0))), lambda: jnp.ones((2, 3, 4))
    ),
    "tree_mode": lambda: again(Model(), array, graph=False),
    "no_graph_updates": lambda: again(Model(), array, graph_updates=False),
    "moving_average": lambda: again(MLP(), functools.cache(MLP), fun=updated_average),
    "class_method": lambda: functools.partial(Model.of_class, Model(), array()),
    "static_method": lambda: functools.partial(Model.of_none, Model(), array()),
    "default_arguments": lambda: again(Model(), fun=lambda m, x=2.0, more=None: m(x)),
    "loose": lambda: again(loose_model(), fun=lambda m: increment(m.blocks[0].w)),
    **{name[4:]: make for name, make in globals().items() if name.startswith("use_")},
}


class GuardedUsesTest(parameterized.TestCase):
    @parameterized.named_parameters((name, make) for name, make in ORDINARY.items())
    def test_third_call_splits_nothing(self, make):
        use = make()
        use()
        use()
        splits = Splits()
        with splits.watch():
            use()
            use()
        assert splits.count == 0


class ThreadsTest(parameterized.TestCase):
    """One jitted function in many threads, while others make and drop models."""

    THREADS = 8
    TIMES = 150

    def setUp(self):
        super().setUp()
        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)

    def run_all(self, work: Callable[[int], None], own: Callable[..., Any]) -> None:
        done = threading.Event()

        def come_and_go() -> None:
            while not done.is_set():
                models = [Model(7) for _ in range(3)]
                for turn in range(1, 4):
                    assert [float(own(m, array())) for m in models] == [7 + turn] * 3

        with concurrent.futures.ThreadPoolExecutor(self.THREADS + 2) as pool:
            others = [pool.submit(come_and_go) for _ in range(2)]
            own_work = [pool.submit(work, i) for i in range(self.THREADS)]
            concurrent.futures.wait(own_work)
            done.set()
        for future in (*own_work, *others):
            future.result()

    def test_modes_of_their_own(self):
        own = nnx_sharding.jit(fresh(call))

        def work(i: int) -> None:
            model, count = Model(i), 0
            for turn in range(self.TIMES):
                model.mode = ("train", "eval", f"mode {turn % 3}")[turn % 3]
                count += model.mode == "train"
                assert float(own(model, array())) == i + count

        self.run_all(work, own)

    def test_clear_cache_meanwhile(self):
        own = nnx_sharding.jit(fresh(call))

        def work(i: int) -> None:
            model = Model(i)
            for turn in range(1, 21):
                if i == 0 and turn % 8 == 0:
                    own.clear_cache()
                assert float(own(model, array())) == i + turn

        self.run_all(work, own)


# The walk in C counts references itself.

WALKS = {"fast": (native.FastestWalk, 10_000), "python": (walk.PythonWalk, 2_000)}


class Moody:
    """A static without content, so that its own comparison counts, which may fail."""

    __slots__ = ()
    fails = False

    def __eq__(self, other: object) -> bool:
        if Moody.fails:
            raise RuntimeError("not now")
        return isinstance(other, Moody)

    def __hash__(self) -> int:
        return 1


@jax.tree_util.register_pytree_node_class
class Box:
    """A pytree that only JAX can open."""

    def __init__(self, content: Any, tag: Any = "tag"):
        self.content, self.tag = content, tag

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.content,), self.tag

    @classmethod
    def tree_unflatten(cls, tag: Any, children: Any) -> Box:
        return cls(*children, tag)


NAMES = tuple(f"name{i}" for i in range(10))  # more than the fast walk is ready to compare


def everything() -> tuple[Any, ...]:
    """Arguments with something for each step of a walk, as new objects."""
    model = Model()
    model.moody, model.list, model.pair = Moody(), nnx.List([param(), 3]), (1, "a", None)
    model.boxed = nnx.data([Box(param()), {"k": array(), "p": param()}])
    model.numbers, model.noted = [1, 2], nnx.Param(array(), note=("n", 1.5))
    model.value, model.ref = nnx.Param({"a": (array(), array())}), nnx.Param(array(), ref=True)
    model.tied, model.flag, model.none = model.layer.w, True, None
    for name in NAMES:
        setattr(model, name, (name, 1))
    state = nnx.state(node(w=param(), v=param()))
    return model, {"x": array(), "more": [array(), (np.float32(1), 2)], "state": state}, "static"


def step_everything(model, args, text):
    increment(model.tied)
    increment(model.ref)
    return model(args["x"]) * len(text)


@functools.cache
def stepping_everything() -> Any:
    return nnx_sharding.jit(step_everything, static_argnums=2)


CHANGES: dict[str, Callable[..., Any]] = {
    "nothing": lambda m, args: None,
    "equal static": lambda m, args: setattr(m, "pair", (int("1"), "".join("a"), None)),
    "many equal statics": lambda m, args: [setattr(m, name, (name, int("1"))) for name in NAMES],
    "static": lambda m, args: setattr(m, "mode", "eval"),
    "mutable static": lambda m, args: m.numbers.append(3),
    "static that raises": lambda m, args: setattr(Moody, "fails", True),
    "equal static that raises": lambda m, args: (
        setattr(m, "moody", Moody()), setattr(Moody, "fails", True)
    ),
    "attribute added": lambda m, args: setattr(m, "more", 1),
    "attribute removed": lambda m, args: delattr(m, "none"),
    "module": lambda m, args: setattr(m, "layer", node(w=m.tied, name="layer")),
    "type of module": lambda m, args: object.__setattr__(m.layer, "__class__", nnx.Module),
    "variable": lambda m, args: setattr(m, "tied", param()),
    "metadata": lambda m, args: m.noted.set_metadata("note", 2),
    "metadata added": lambda m, args: m.noted.set_metadata("other", 2),
    "value": lambda m, args: m.noted.set_raw_value(1),
    "container in a variable": lambda m, args: m.value.set_raw_value({"b": array()}),
    "pytree": lambda m, args: setattr(m.boxed[0], "tag", "other"),
    "key": lambda m, args: m.boxed[1].update({"n": m.boxed[1].pop("k")}),
    "length": lambda m, args: m.boxed.append(array()),
    "argument": lambda m, args: args.update(x=1),
    "key of an argument": lambda m, args: args.update(y=args.pop("x")),
    "state in an argument": lambda m, args: args["state"].update(w=args["state"].pop("v")),
    "length in an argument": lambda m, args: args["more"].append(array()),
    "length of a tuple": lambda m, args: args["more"].__setitem__(1, (1,)),
}  # fmt: skip


NO_CHANGES = ("nothing", "equal static")
TOO_CAREFUL = ("many equal statics", "static that raises")  # a guard may fail where it need not


def parts_of(*arguments: Any) -> list[Any]:
    """All that a walk over the arguments touches."""
    found: dict[int, Any] = {}

    def visit(x: Any) -> None:
        if id(x) in found:
            return
        found[id(x)] = x
        if isinstance(x, dict):
            for part in (*x, *x.values()):
                visit(part)
        elif isinstance(x, list | tuple):
            for part in x:
                visit(part)
        elif is_variable(x):
            visit(_compat.get_metadata(x))
            visit(x.get_raw_value())
            visit(_compat.get_trace_state(x))
        elif isinstance(x, nnx.Pytree | nnx.State | Box | Moody):
            visit(type(x))
            visit(getattr(x, "__dict__", {}))

    visit(arguments)
    return list(found.values())


MODES = [("mode", i) for i in range(2 * guards.MAX_GUARDS)]
COMMON = (str, int, float, bool, type(None), type)


def walks(cases: Iterable[str] = ()) -> Any:
    return parameterized.named_parameters(
        (f"{case} {name}".strip().replace(" ", "_"), *filter(None, [case]), *kind)
        for case in cases or [""]
        for name, kind in WALKS.items()
    )


class ReferenceCountsTest(MemoryTestCase):
    def assert_stable(
        self, run: Callable[[], Any], *watched: Any, times: int, slack: int = 0
    ) -> None:
        """Many times the same leaves all counts of references as they were."""
        few = max(times // 4, 200)
        for _ in range(20):
            run()
        things = parts_of(*watched)
        gc.collect()
        before = [sys.getrefcount(x) for x in things]
        blocks = sys.getallocatedblocks()
        for _ in range(times):
            run()
        gc.collect()
        assert sys.getallocatedblocks() - blocks < few
        after = [sys.getrefcount(x) for x in things]
        left = set(map(id, parts_of(*watched)))  # arrays of Variables may be others now
        for x, a, b in zip(things, before, after, strict=True):
            if id(x) in left:
                # What everybody refers to moves a little by itself.
                assert abs(a - b) <= (few if isinstance(x, COMMON) else slack), (x, a, b)

    def guarded(self, kind: type) -> tuple[Any, tuple[Any, ...], Guard]:
        """A function, arguments that are guarded by this kind of walk, and their guard."""
        own, arguments = stepping_everything(), everything()
        own._guards.clear()
        with mock.patch.object(guards, "FastestWalk", kind):
            for _ in range(3):
                own(*arguments)
        ((guard,),) = [record.guards for record in records(own._guards)]
        assert isinstance(guard.walk, kind)
        return own, arguments, guard

    @walks()
    def test_guarded_calls(self, kind, times):
        own, arguments, _ = self.guarded(kind)
        model = arguments[0]
        splits = Splits()
        statics = model.moody, model.pair, model.numbers, model.mode, model.noted.note
        objects = model, model.layer, model.list, model.noted, arguments[1]
        with splits.watch():
            watched = (*statics, vars(model.layer), *objects)
            self.assert_stable(lambda: own(*arguments), *watched, times=times)
        assert splits.count == 0

    @walks(CHANGES)
    def test_guards_that_fail(self, change, kind, times):
        _, arguments, guard = self.guarded(kind)

        def follow():
            return check(guard.walk, guard.plan.structure, arguments)

        assert follow() is not None
        self.addCleanup(setattr, Moody, "fails", False)
        CHANGES[change](*arguments[:2])
        if change not in TOO_CAREFUL:
            assert (follow() is not None) == (change in NO_CHANGES)
        self.assert_stable(follow, arguments, guard.walk.recipe.statics, times=times)

    @walks()
    def test_walks_that_are_dropped(self, kind, times):
        own, arguments, _ = self.guarded(kind)
        recipe = own._split(arguments, {}, record=True)[1].recorder.recipe()

        def run() -> None:
            kind(recipe)

        self.assert_stable(run, recipe, times=times // 5)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        run()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(500):
            run()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 500 * 20

    @walks()
    def test_calls_that_split(self, kind, times):
        model, x = Model(), array()
        with mock.patch.object(guards, "FastestWalk", kind):
            own = nnx_sharding.jit(fresh(call))

            def run() -> None:
                for i in range(2 * guards.MAX_GUARDS):
                    model.mode = MODES[i]
                    own(model, x)

            # Now and then there is a new guard for one of them.
            self.assert_stable(run, model, *MODES, x, times=times // 200, slack=10)

    @walks()
    def test_calls_that_fail(self, kind, times):
        model, x = Model(), array()
        moods = Moody(), Moody()
        self.addCleanup(setattr, Moody, "fails", False)
        with mock.patch.object(guards, "FastestWalk", kind):
            own = nnx_sharding.jit(fresh(call))
            model.moody = moods[0]
            own(model, x)
            count = float(model.count[...])

            def run() -> None:
                model.moody, Moody.fails = moods[1], True
                with contextlib.suppress(RuntimeError):
                    own(model, x)
                Moody.fails = False

            self.assert_stable(run, model, *moods, x, times=times // 40)
        assert float(model.count[...]) == count
        model.moody = moods[0]
        assert float(own(model, x)) == 2 + count + 1
