"""Reference semantics: under ``jit`` a function changes the caller's objects as without it."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

import nnx_sharding
from graphs import Loose, Memory, Node, Tag, snapshot
from libraries import node, param


def array(value: float = 1.0) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def double(variable: nnx.Variable) -> None:
    variable[...] = variable[...] * 2


# Graphs to start with. Each function makes the arguments of a call.


def two_blocks():
    return (node(left=node(w=param(2)), right=node(w=param(3)), size=1),)


def shared_inside():
    block = node(w=param(2))
    return (node(left=block, right=block, w=block.w),)


def shared_across():
    shared = param(2)
    return node(w=shared), {"inner": [node(w=shared)], "bare": shared}


def cycle():
    parent, child = node(w=param(2)), node(w=param(3))
    parent.child, child.parent, child.me = child, parent, child
    return (parent,)


def arrays():
    return (node(one=array(1), two=array(2), rest=nnx.data([array(3), array(4)])),)


def pair():
    return (node(v=nnx.Param({"x": array(1), "y": array(2)})),)


def containers():
    boxed = nnx.data([node(w=param(1)), (param(2), {"k": param(3)})])
    return (node(boxed=boxed, list=nnx.List([param(1), 7]), dict=nnx.Dict(a=param(1), b="s")),)


def loose():
    model = Loose()
    model.blocks = [node(w=param(1)), node(w=param(2))]
    model.flag = True
    return (model,)


def references():
    return node(w=nnx.Param(array(1), ref=True)), nnx.BatchStat(array(2), ref=True)


# Functions that change them. Each is run eagerly, by nnx_sharding.jit and by nnx.jit.


def update_values(m):
    double(m.left.w)
    m.right.w[...] = m.left.w[...] + 1
    return m.left.w[...]


def exchange_values(m):
    m.left.w[...], m.right.w[...] = m.right.w[...], m.left.w[...]


def update_static(m):
    m.size = m.size + 1
    m.left.name = ("new", m.size)
    return m.size


def add(m):
    m.left.extra = nnx.BatchStat(array(7))
    m.third = node(w=param(9), parent=m)
    m.raw = nnx.data(m.left.w[...] * 5)


def remove(m):
    del m.left, m.right.w


def replace(m):
    m.left = node(v=param(5))
    m.right.w = param(6)


def replace_variable_type(m):
    m.left.w = Tag(m.left.w[...] + 1)


def rename(m):
    m.first = m.left
    del m.left


def exchange_modules(m):
    m.left, m.right = m.right, m.left
    double(m.left.w)


def data_becomes_static(m):
    del m.left
    m.left = "gone"


def static_becomes_data(m):
    del m.size
    m.size = param(1)


def alias(m):
    m.right = m.left
    m.tied = m.left.w
    double(m.tied)


def make_cycle(m):
    m.left.up = m
    m.left.me = m.left


def return_input(m):
    double(m.left.w)
    return m, m.left, m.right.w


def return_new(m):
    return node(shared=m.left.w, own=param(4)), nnx.Param(m.left.w[...] * 3)


def return_twice(m):
    new = node(w=param(4))
    return new, [new, new.w]


def set_metadata(m):
    m.left.w.set_metadata("layer", m.size)
    m.left.w.set_metadata(sharding_note=("x", None))


def untie(m):
    m.left = node(w=nnx.Param(m.w[...] + 1))
    double(m.w)


def update_tied(m):
    double(m.left.w)
    double(m.right.w)
    double(m.w)
    return m.left is m.right, m.left.w is m.w


def update_across(m, other):
    double(m.w)
    double(other["inner"][0].w)
    double(other["bare"])
    return jnp.asarray(m.w is other["bare"])


def untie_across(m, other):
    other["inner"][0].w = param(10)
    double(m.w)


def update_cycle(m):
    double(m.child.parent.child.me.w)
    double(m.child.parent.w)
    return m.child.parent is m


def break_cycle(m):
    m.child.parent = None
    del m.child.me


def exchange_arrays(m):
    m.one, m.two = m.two, m.one


def copy_array(m):
    m.one = m.two


def rotate_into_container(m):
    m.one, m.rest = m.rest[0], nnx.data([m.rest[1], m.one])


def reverse_container(m):
    m.rest = nnx.data([m.rest[1], m.rest[0]])


def drop_and_move_arrays(m):
    del m.one
    m.two, m.rest = m.rest[1], nnx.data([m.two])


def reverse_pair(m):
    value = m.v.get_value()
    m.v.set_value({"x": value["y"], "y": value["x"]})


def copy_in_pair(m):
    value = m.v.get_value()
    m.v.set_value({"x": value["y"], "y": value["y"]})


def update_one_of_pair(m):
    m.v.set_value({**m.v.get_value(), "y": array(9)})
    return m.v.get_value()


def pair_becomes_array(m):
    m.v.set_value(m.v.get_value()["y"])


def pair_grows(m):
    m.v.set_value((m.v.get_value(), array(5)))


def change_containers(m):
    first, (second, by_key) = m.boxed
    double(first.w)
    double(by_key["k"])
    m.boxed = nnx.data([second, first, node(w=param(8))])
    m.list.append(m.dict.a)
    m.list[1] = 8
    m.dict.c = m.list
    del m.dict["b"]


def shrink_list(m):
    m.list.pop()
    m.list.pop()


def change_loose(m):
    double(m.blocks[1].w)
    m.blocks.reverse()
    m.blocks.append(node(w=param(5)))
    m.flag = None
    return m.blocks[0]


def nothing(*args):
    return None


PROGRAMS = [
    (two_blocks, [
        update_values, exchange_values, update_static, add, remove, replace, rename, alias,
        replace_variable_type, exchange_modules, data_becomes_static, static_becomes_data,
        make_cycle, return_input, return_new, return_twice, set_metadata, nothing,
    ]),
    (shared_inside, [update_tied, untie, nothing]),
    (shared_across, [update_across, untie_across, nothing]),
    (cycle, [update_cycle, break_cycle, nothing]),
    (arrays, [
        exchange_arrays, copy_array, rotate_into_container, reverse_container,
        drop_and_move_arrays, nothing,
    ]),
    (pair, [
        reverse_pair, copy_in_pair, update_one_of_pair, pair_becomes_array, pair_grows, nothing,
    ]),
    (containers, [change_containers, shrink_list, nothing]),
    (loose, [change_loose, nothing]),
]  # fmt: skip

CASES = [
    (f"{make.__name__}_{change.__name__}", make, change)
    for make, changes in PROGRAMS
    for change in changes
]


def effect(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """All that is observable after a call; booleans and numbers in results become arrays."""
    result = jax.tree.map(
        lambda x: x if isinstance(x, nnx.Module | nnx.Variable) else jnp.asarray(x),
        function(*args),
        is_leaf=lambda x: isinstance(x, nnx.Module | nnx.Variable),
    )
    return snapshot((result, args))


class SameAsPythonTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES)
    def test_one_call(self, make, change):
        assert effect(nnx_sharding.jit(change), make()) == effect(change, make())

    # nnx.jit loses changed metadata; the test above compares that with Python.
    @parameterized.named_parameters(*(case for case in CASES if case[2] is not set_metadata))
    def test_nnx_jit_agrees(self, make, change):
        assert effect(nnx_sharding.jit(change), make()) == effect(nnx.jit(change), make())

    @parameterized.named_parameters(*CASES)
    def test_cached_call_on_other_objects(self, make, change):
        lifted = nnx_sharding.jit(change)
        lifted(*make())
        assert effect(lifted, make()) == effect(change, make())

    @parameterized.named_parameters(
        ("values", two_blocks, update_values),
        ("exchange", two_blocks, exchange_modules),
        ("static", two_blocks, update_static),
        ("add", two_blocks, add),
        ("cycle", two_blocks, make_cycle),
        ("pair", pair, reverse_pair),
        ("loose", loose, change_loose),
    )
    def test_three_calls_on_the_same_objects(self, make, change):
        ours, theirs = make(), make()
        lifted = nnx_sharding.jit(change)
        for _ in range(3):
            assert effect(lifted, ours) == effect(change, theirs)


class IdentityTest(parameterized.TestCase):
    def test_returned_inputs_are_the_callers_objects(self):
        (model,) = two_blocks()
        left, w = model.left, model.right.w
        out = nnx_sharding.jit(return_input)(model)
        assert out[0] is model and out[1] is left and out[2] is w
        assert model.left is left and model.right.w is w

    def test_objects_of_the_caller_move(self):
        (model,) = two_blocks()
        left, right = model.left, model.right
        nnx_sharding.jit(exchange_modules)(model)
        assert model.left is right and model.right is left

    def test_new_module_shares_the_callers_variable(self):
        (model,) = two_blocks()
        new, variable = nnx_sharding.jit(return_new)(model)
        assert new.shared is model.left.w
        assert new.own is not variable and variable is not model.left.w
        new.shared[...] = array(50)
        assert float(model.left.w[...]) == 50

    def test_new_object_that_is_attached_and_returned_is_one_object(self):
        @nnx_sharding.jit
        def attach(m):
            m.new = node(w=param(4), parent=m)
            return m.new

        (model,) = two_blocks()
        new = attach(model)
        assert model.new is new and new.parent is model
        assert isinstance(new, Node) and float(new.w[...]) == 4

    def test_new_objects_can_be_changed_by_the_caller(self):
        new = nnx_sharding.jit(return_twice)(two_blocks()[0])[0]
        new.w[...] = array(1)
        new.name = "mine"
        double(new.w)
        assert float(new.w[...]) == 2

    @parameterized.named_parameters(("removed", remove), ("replaced", replace))
    def test_detached_module_keeps_its_updates(self, detach):
        @nnx_sharding.jit
        def change(m):
            left = m.left
            detach(m)
            double(left.w)
            left.note = "detached"

        (model,) = two_blocks()
        left, w = model.left, model.left.w
        change(model)
        assert getattr(model, "left", None) is not left
        assert left.w is w and float(w[...]) == 4 and left.note == "detached"

    def test_detached_variable_keeps_its_update(self):
        @nnx_sharding.jit
        def change(m):
            old = m.left.w
            m.left.w = param(9)
            double(old)

        (model,) = two_blocks()
        old = model.left.w
        change(model)
        assert float(old[...]) == 4 and float(model.left.w[...]) == 9
        assert model.left.w is not old

    def test_untouched_arrays_stay_the_same_python_objects(self):
        (model,) = two_blocks()
        right = model.right.w.get_raw_value()
        nnx_sharding.jit(lambda m: double(m.left.w))(model)
        assert model.right.w.get_raw_value() is right

    def test_a_call_without_changes_changes_nothing(self):
        args = (*two_blocks(), *cycle(), *arrays(), *containers(), *loose())
        memory = Memory(args)
        nnx_sharding.jit(nothing)(*args)
        memory.assert_unchanged()

    def test_captured_module_that_is_only_read_is_a_constant(self):
        captured = node(w=param(3))
        memory = Memory(captured)
        out = nnx_sharding.jit(lambda v: v[...] * captured.w[...])(param(2))
        assert float(out) == 6
        memory.assert_unchanged()

    def test_numpy_and_python_numbers_stay_what_they_are_when_untouched(self):
        kept = np.ones(2, np.float32)
        model = node(w=param(), kept=kept)
        model.number = nnx.data(3)
        nnx_sharding.jit(lambda m: double(m.w))(model)
        assert model.kept is kept
        assert model.number == 3

    def test_new_array_attribute_is_not_a_leaked_tracer(self):
        def change(m):
            m.raw = m.w[...] * 2

        model = node(w=param(3))
        nnx_sharding.jit(change)(model)
        assert not isinstance(model.raw, jax.core.Tracer)
        assert float(model.raw) == 6


class ReferenceModeTest(parameterized.TestCase):
    """Variables whose value is a ``jax.Ref``."""

    def test_ref_is_updated_in_place(self):
        model, stat = references()
        refs = model.w.get_raw_value(), stat.get_raw_value()

        @nnx_sharding.jit
        def step(m, s):
            m.w[...] += 1
            s[...] = m.w[...] * 10
            return m.w[...]

        assert float(step(model, stat)) == 2
        assert float(step(model, stat)) == 3
        assert model.w.get_raw_value() is refs[0] and stat.get_raw_value() is refs[1]
        assert float(model.w[...]) == 3 and float(stat[...]) == 30

    def test_shared_ref_variable_is_one(self):
        model, _ = references()

        @nnx_sharding.jit
        def step(m, w):
            double(w)
            double(m.w)
            return m.w is w

        assert bool(step(model, model.w))
        assert float(model.w[...]) == 4

    def test_returned_ref_variable_is_the_callers(self):
        model, stat = references()
        out = nnx_sharding.jit(lambda m, s: (m, s))(model, stat)
        assert out[0] is model and out[1] is stat

    def test_new_ref_variable(self):
        new = nnx_sharding.jit(lambda x: nnx.Param(x * 2, ref=True))(array(3))
        assert isinstance(new.get_raw_value(), jax.Ref)
        new[...] += 1
        assert float(new[...]) == 7

    def test_attached_new_ref_variable_works_in_the_next_call(self):
        @nnx_sharding.jit
        def attach(m):
            m.v = nnx.Param(m.w[...] * 2, ref=True)

        model, _ = references()
        attach(model)
        nnx_sharding.jit(lambda m: double(m.v))(model)
        assert float(model.v[...]) == 4

    def test_moved_ref_variable(self):
        model, stat = references()

        @nnx_sharding.jit
        def change(m, s):
            m.stat = s
            double(m.stat)
            del m.w

        change(model, stat)
        assert model.stat is stat and not hasattr(model, "w") and float(stat[...]) == 4


class StateOfLibraryObjectsTest(parameterized.TestCase):
    """Stateful objects of Flax."""

    def compare(self, make: Callable[[], Any], step: Callable[..., Any], calls: int = 3) -> None:
        ours, eager, theirs = make(), make(), make()
        lifted, reference = nnx_sharding.jit(step), nnx.jit(step)
        for _ in range(calls):
            results = lifted(*ours), step(*eager), reference(*theirs)
            for other in results[1:]:
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results[0], other
                )
        for other in (eager, theirs):
            states = nnx.state(ours), nnx.state(other)
            self.assertEqual(*map(jax.tree.structure, states))
            for a, b in zip(*map(jax.tree.leaves, states), strict=True):
                if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                    a, b = jax.random.key_data(a), jax.random.key_data(b)
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_rngs_advance(self):
        def draw(rngs):
            return rngs.params.uniform((2,)), rngs.dropout.uniform((2,)), rngs.params.normal(())

        self.compare(lambda: (nnx.Rngs(params=0, dropout=1),), draw)

    def test_rngs_shared_by_modules(self):
        def make():
            rngs = nnx.Rngs(0)
            return nnx.Dict(a=nnx.Dropout(0.5, rngs=rngs), b=nnx.Dropout(0.5, rngs=rngs)), rngs

        def step(m, rngs):
            return m["b"](m["a"](jnp.ones(8))), rngs.uniform(())

        self.compare(make, step)

    def test_batch_norm_and_dropout(self):
        def make():
            rngs = nnx.Rngs(0)
            return (
                nnx.Sequential(
                    nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.relu,
                    nnx.Dropout(0.5, rngs=rngs),
                ),
            )  # fmt: skip

        self.compare(make, lambda m: m(jnp.arange(6.0).reshape(2, 3)))

    def test_train_and_eval_modes(self):
        lifted = nnx_sharding.jit(lambda m, x: m(x))
        model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        model.eval()
        before = Memory(model)
        lifted(model, jnp.ones((3, 2)))
        before.assert_unchanged()
        model.train()
        lifted(model, jnp.ones((3, 2)))
        np.testing.assert_allclose(model.mean[...], 0.01, rtol=1e-4)
        nnx_sharding.jit(lambda m: m.eval())(model)
        assert model.use_running_average is True

    def test_metrics(self):
        def make():
            return (nnx.MultiMetric(loss=nnx.metrics.Average("loss"), acc=nnx.metrics.Accuracy()),)

        def step(metrics):
            metrics.update(loss=jnp.arange(3.0), logits=jnp.eye(3), labels=jnp.array([0, 1, 0]))
            return metrics.compute()

        self.compare(make, step)

    def test_metrics_reset(self):
        metric = nnx.metrics.Average()
        nnx_sharding.jit(lambda m: m.update(values=jnp.arange(4.0)))(metric)
        assert float(metric.compute()) == 1.5
        nnx_sharding.jit(lambda m: m.reset())(metric)
        assert float(metric.total[...]) == 0 and float(metric.count[...]) == 0


# Methods


class Base(nnx.Module):
    def __init__(self, start=0.0):
        self.count = nnx.BatchStat(array(start))

    @nnx_sharding.jit
    def step(self, x, times=1):
        self.count[...] += x * times
        return self.count[...]

    @staticmethod
    @nnx_sharding.jit
    def shift(x, by):
        return x + by

    @classmethod
    @nnx_sharding.jit
    def create(cls, start):
        return cls(start)

    @nnx_sharding.jit(static_argnums=1, static_argnames="name")
    def label(self, name, x):
        self.name = name
        return x * len(name)

    def plain(self, x, scale=1.0):
        """Adds."""
        self.count[...] += x * scale
        return self.count[...]


class Derived(Base):
    @nnx_sharding.jit
    def step(self, x, times=1):
        self.count[...] += 100
        return super().step(x, times=times)


@nnx_sharding.jit
def module_level(x):
    return x + 1


class MethodTest(parameterized.TestCase):
    def test_method(self):
        model = Base()
        assert float(model.step(2.0)) == 2
        assert float(model.step(2.0, times=3)) == 8
        assert float(model.count[...]) == 8
        assert float(Base.step(model, 1.0)) == 9

    def test_each_object_has_its_own_state(self):
        one, two = Base(1.0), Base(2.0)
        one.step(10.0)
        two.step(20.0)
        assert (float(one.count[...]), float(two.count[...])) == (11, 22)

    def test_static_method(self):
        assert float(Base.shift(1.0, by=2.0)) == 3
        assert float(Base().shift(1.0, 2.0)) == 3

    def test_class_method(self):
        assert type(Base.create(3.0)) is Base
        derived = Derived.create(4.0)
        assert type(derived) is Derived and float(derived.count[...]) == 4
        assert float(derived.step(1.0)) == 105

    def test_inherited_and_super(self):
        model = Derived()
        assert float(model.step(1.0, times=2)) == 102
        assert float(model.count[...]) == 102

    @parameterized.named_parameters(
        ("positional", lambda m: m.label("abc", 2.0)),
        ("keyword", lambda m: m.label(name="abc", x=2.0)),
    )
    def test_static_argument_of_method(self, call):
        model = Base()
        assert float(call(model)) == 6
        assert model.name == "abc"

    def test_bound_method(self):
        model = Base()
        lifted = nnx_sharding.jit(model.plain)
        assert float(lifted(2.0)) == 2
        assert float(lifted(2.0, scale=2.0)) == 6
        assert float(model.count[...]) == 6
        assert lifted.__name__ == "plain" and lifted.__doc__ == "Adds."

    def test_partial_of_bound_method(self):
        model = Base()
        lifted = nnx_sharding.jit(functools.partial(model.plain, scale=3.0))
        assert float(lifted(2.0)) == 6
        assert float(model.count[...]) == 6
        assert float(lifted(1.0, scale=1.0)) == 7

    def test_partial_of_bound_method_with_positional(self):
        model = Base()
        assert float(nnx_sharding.jit(functools.partial(model.plain, 4.0))(scale=2.0)) == 8
        assert float(model.count[...]) == 8

    def test_jit_of_a_jitted_method(self):
        model = Base()
        lifted = nnx_sharding.jit(model.step)
        assert float(lifted(2.0)) == 2
        assert float(lifted(2.0)) == 4
        assert float(model.count[...]) == 4

    @parameterized.named_parameters(
        ("decorated", lambda m: m.step), ("bound", lambda m: nnx_sharding.jit(m.plain))
    )
    def test_stages_of_a_method(self, method):
        model = Base(1.0)
        memory = Memory(model)
        lowered = method(model).lower(array(2))
        assert method(model).eval_shape(array(2)).shape == ()
        memory.assert_unchanged()
        assert "stablehlo" in lowered.as_text()
        assert float(lowered.compile()(array(2))) == 3
        assert float(model.count[...]) == 3

    def test_bound_method_in_a_module_attribute(self):
        class Holder(Base):
            def __init__(self):
                super().__init__()
                self.activation = module_level

            @nnx_sharding.jit
            def run(self, x):
                self.count[...] += 1
                return self.activation(x)

        model = Holder()
        assert float(model.run(1.0)) == 2
        assert model.activation is module_level
        twin = copy.deepcopy(model)
        assert twin.activation is module_level and float(twin.run(1.0)) == 2
        assert (float(twin.count[...]), float(model.count[...])) == (2, 1)

    def test_inside_other_transforms(self):
        model = Base(1.0)

        @nnx.jit
        def outer(m, x):
            return m.step(x) + m.step(x)

        assert float(outer(model, 2.0)) == 3 + 5
        assert float(model.count[...]) == 5

        @nnx_sharding.jit
        def nested(m, x):
            return m.step(x) + Base.shift(m.step(x), 1.0)

        assert float(nested(model, 2.0)) == 7 + 9 + 1
        assert float(model.count[...]) == 9

    def test_gradient_of_a_jitted_loss(self):
        model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
        loss = nnx_sharding.jit(lambda m, x: m(x).sum())
        gradient = nnx.grad(loss)(model, jnp.array([[2.0, 3.0]]))
        np.testing.assert_allclose(gradient.kernel[...], [[2.0], [3.0]])


class CopiesTest(parameterized.TestCase):
    """Copies, pickles and weak references of jitted functions."""

    def test_pickle_by_name(self):
        assert pickle.loads(pickle.dumps(module_level)) is module_level
        assert pickle.loads(pickle.dumps(Base.step)) is Base.step

    def test_pickle_with_options(self):
        lifted = nnx_sharding.jit(plain_function, static_argnums=1, graph_updates=False)
        again = pickle.loads(pickle.dumps(lifted))
        assert float(again(2.0, 3)) == 6
        with pytest.raises(ValueError, match="argument 'scale'"):
            again(2.0, [3])

    def test_copies_are_the_same(self):
        assert copy.copy(module_level) is module_level
        assert copy.deepcopy(module_level) is module_level
        assert copy.deepcopy({"f": module_level})["f"] is module_level

    def test_deepcopy_of_a_bound_method_follows_its_object(self):
        # As in Python: deepcopy([model, model.plain]) binds the method of the copy to the copy.
        model = Base()
        twin, step = copy.deepcopy([model, model.step])
        step(1.0)
        assert (float(twin.count[...]), float(model.count[...])) == (1, 0)

    def test_bound_methods_compare_as_in_python(self):
        model = Base()
        assert model.plain == model.plain
        assert model.step == model.step
        assert hash(model.step) == hash(model.step)
        assert model.step != Base().step

    def test_weak_references(self):
        lifted = nnx_sharding.jit(lambda x: x)
        reference = weakref.ref(lifted)
        assert reference() is lifted
        del lifted
        gc.collect()
        assert reference() is None
        assert weakref.ref(Base.step)() is Base.step


def plain_function(x, scale):
    return x * scale
