"""Static attributes and metadata: part of the structure, by content and type."""

from __future__ import annotations

import dataclasses
import datetime
from collections import OrderedDict, defaultdict, deque
from decimal import Decimal
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from types import CellType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

import nnx_sharding
from nnx_sharding import split
from nnx_sharding.core.flatten import flatten


class Holder(nnx.Module):
    def __init__(self, static: Any):
        self.static = nnx.static(static)
        self.w = nnx.Param(jnp.ones(2))


@dataclasses.dataclass
class Config:
    scale: Any = 1


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    scale: Any = 1


class Equal:
    """Comparable, but without a hash."""

    def __init__(self, number: int):
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


class Lax:
    """Claims to be equal to all others."""

    def __init__(self, number: int):
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lax)

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Hidden:
    scale: int = dataclasses.field(compare=False)


class Size(tuple):
    pass


class Tagged(list):
    pass


class Day(datetime.date):
    """Has a ``__dict__``, but its content is hidden in C."""


class Scaled(FrozenConfig):
    def __init__(self, scale: Any, factor: float):
        super().__init__(scale)
        object.__setattr__(self, "factor", factor)


class Rate(np.float64):
    pass


class Folder(PurePosixPath):
    pass


def with_factor(kind: Any, factor: float) -> Any:
    value = kind(1) if kind is Rate else kind("a")
    value.factor = factor
    return value


def tagged(tag: Any, items: Any = ()) -> Tagged:
    words = Tagged(items)
    words.tag = tag
    return words


F8 = ml_dtypes.float8_e4m3fn


@jax.tree_util.register_pytree_node_class
class Aux:
    """A pytree whose node data can be changed."""

    def __init__(self, value: Any, config: Any):
        self.value, self.config = value, config

    def tree_flatten(self):
        return (self.value,), self.config

    @classmethod
    def tree_unflatten(cls, config, children):
        return cls(*children, config)


VALUES = {
    "list": lambda: [1, 2],
    "dict": lambda: {"a": [1]},
    "set": lambda: {1, 2},
    "tuple": lambda: (1, [2]),
    "array": lambda: np.arange(3),
    "config": lambda: Config([1]),
    "frozen_config": lambda: FrozenConfig([1]),
    "no_hash": lambda: Equal(3),
}
OTHERS = {
    "list": ([1, 2], [1, 2.0]),
    "list_and_tuple": ([1], (1,)),
    "dict": ({"a": 1}, {"a": True}),
    "set": ({1}, {True}),
    "frozenset": (frozenset({0}), frozenset({False})),
    "config": (Config(1), Config(1.0)),
    "frozen_config": (FrozenConfig(1), FrozenConfig(True)),
    "no_hash": (Equal(1), Equal(2)),
    "number": (1, True),
    "zero": (0.0, -0.0),
    "numpy_zero": (np.float32(0.0), np.float32(-0.0)),
    "order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "ordered_dict": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    "factory": (defaultdict(int), defaultdict(float)),
    "deque": (deque([2]), deque([2.0])),
    "bound_of_deque": (deque([2], 3), deque([2], 4)),
    "namespace": (SimpleNamespace(a=2), SimpleNamespace(a=2.0)),
    "list_subclass": (tagged(1), tagged(2)),
    "list_subclass_item": (tagged(1, [2]), tagged(1, [2.0])),
    "field_without_compare": (Hidden(1), Hidden(2)),
    "partial": (partial(max, 1), partial(max, True)),
    "claims_to_be_equal": (Lax(1), Lax(2)),
    "hidden_in_c": (Day(2026, 1, 1), Day(2026, 1, 2)),
    "date": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    # Equal for Python, all the same different.
    "decimal": (Decimal("1"), Decimal("1.00")),
    "moment": tuple(
        datetime.datetime(
            2026, 1, 1, hour, tzinfo=datetime.timezone(datetime.timedelta(hours=hour))
        )
        for hour in (0, 1)
    ),
    "windows_path": (PureWindowsPath("a"), PureWindowsPath("A")),
    "union": (int | str, str | int),
    "range": (range(0, 3, 2), range(0, 4, 2)),
    "dtype_metadata": (np.dtype("i4", metadata={"a": 1}), np.dtype("i4", metadata={"a": 2})),
    "child_of_frozen": (Scaled(1, 2.0), Scaled(1, 3.0)),
    "scalar_subclass": (with_factor(Rate, 2.0), with_factor(Rate, 3.0)),
    "path_subclass": (with_factor(Folder, 2.0), with_factor(Folder, 3.0)),
    "cell": (CellType([1]), CellType([1.0])),
}
# Flax refuses arrays as attributes, not as metadata.
OTHER_METADATA = {
    "float8": tuple(np.array([1, 2], kind) for kind in (F8, ml_dtypes.float8_e4m3fnuz)),
    "float8_with_equal_bytes": (np.zeros(2, F8), np.zeros(2, ml_dtypes.float8_e5m2)),
    "int4": (np.array([1], ml_dtypes.int4), np.array([1], ml_dtypes.uint4)),
    "structured": tuple(
        np.array([(1, 2)], [(one, "i4"), (other, "i4")]) for one, other in ("ab", "ba")
    ),
    "weak_type": (jnp.float32(2), jnp.asarray(2.0)),
    "mask": tuple(np.ma.array([1.0, 2.0], mask=mask) for mask in ([0, 1], [1, 0])),
    "shape": (np.zeros((1, 2)), np.zeros((2, 1))),
    "objects": (np.array([1, None], object), np.array([True, None], object)),
}


ATTRIBUTES = {name: make for name, make in VALUES.items() if name != "array"}


class StaticsTest(parameterized.TestCase):
    def test_static_module_with_a_subclass_of_tuple(self):
        """`nnx.iter_graph` fails for it: Flax takes such a tuple for a pytree, JAX does not."""

        class Settings(nnx.Module):
            def __init__(self):
                self.size = Size((2, 3))

        model = Holder(Config(Settings()))
        f = nnx_sharding.jit(lambda m: m.w * m.static.scale.size[0])
        np.testing.assert_array_equal(f(model), [2.0, 2.0])

    @parameterized.named_parameters(ATTRIBUTES.items())
    def test_works_and_traces_once_as_in_flax(self, make):
        for jit in (nnx_sharding.jit, nnx.jit):
            traces = []

            @jit
            def f(model, traces=traces):
                traces.append(1)
                model.w[...] *= 2
                return model.w[...]

            for _ in range(2):
                model = Holder(make())
                kept = model.static
                np.testing.assert_array_equal(f(model), [2.0, 2.0])
                if (
                    jit is nnx_sharding.jit
                ):  # with Flax every model gets the object of the first one
                    self.assertIs(model.static, kept)
            self.assertLen(traces, 1)

    @parameterized.named_parameters(VALUES.items())
    def test_metadata(self, make):
        model = nnx.Dict(w=nnx.Param(jnp.ones(2), note=make()))
        nnx_sharding.jit(lambda m: m.w.set_value(m.w[...] * 2))(model)
        np.testing.assert_array_equal(model.w[...], [2.0, 2.0])

    @parameterized.named_parameters(ATTRIBUTES.items())
    def test_equal_values_make_equal_structures(self, make):
        one, two = (split(Holder(make()))[0] for _ in range(2))
        self.assertEqual(one, two)
        self.assertEqual(hash(one), hash(two))

    @parameterized.named_parameters((name, *pair) for name, pair in OTHERS.items())
    def test_different_values_make_different_structures(self, one, two):
        self.assertNotEqual(split(Holder(one))[0], split(Holder(two))[0])

    @parameterized.named_parameters((name, *pair) for name, pair in OTHERS.items())
    def test_keys_tell_the_same(self, one, two):
        def key(*values):
            return flatten((), statics=values, keeps_alive=False).structure

        self.assertEqual(key(one, two), key(one, two))
        self.assertNotEqual(key(one), key(two))
        self.assertNotEqual(hash(key(one)), 0)

    @parameterized.named_parameters((name, *pair) for name, pair in OTHER_METADATA.items())
    def test_different_metadata_makes_different_structures(self, one, two):
        structures = [split(nnx.Param(jnp.ones(2), note=note))[0] for note in (one, two)]
        self.assertNotEqual(*structures)

    def test_layers_that_take_lists(self):
        rngs = nnx.Rngs(0)
        conv = nnx.Conv(1, 2, (3, 3), strides=[1, 1], padding=[(1, 1), (1, 1)], rngs=rngs)
        x = jnp.ones((1, 4, 4, 1))
        np.testing.assert_allclose(nnx_sharding.jit(lambda m, x: m(x))(conv, x), conv(x), rtol=1e-6)

    def test_change_in_place_does_not_change_the_structure_of_a_plan(self):
        model = Holder([1, 2])
        f = nnx_sharding.jit(lambda m, x: x * len(m.static))
        f(model, 1.0)
        model.static.append(3)
        # Another shape traces again, with the structure of the first call.
        np.testing.assert_array_equal(f(Holder([1, 2]), jnp.ones(2)), [2.0, 2.0])

    def test_change_inside_is_written_back_to_the_caller_only(self):
        def grow(model):
            model.static = [*model.static, 3]
            model.static.append(4)

        model, f = Holder([1, 2]), nnx_sharding.jit(grow)
        first = model.static
        f(model)
        self.assertEqual((model.static, first), ([1, 2, 3, 4], [1, 2]))
        model.static.append(5)
        again = Holder([1, 2])
        f(again)
        self.assertEqual(again.static, [1, 2, 3, 4])

    def test_merged_graphs_share_an_object_while_it_is_unchanged(self):
        model = Holder([1])
        structure, state = split(model)
        one = nnx_sharding.merge(structure, state)
        self.assertIs(one.static, model.static)  # as with Flax
        one.static.append(2)
        two = nnx_sharding.merge(structure, state)
        self.assertEqual((one.static, two.static), ([1, 2], [1]))


@dataclasses.dataclass
class Options:
    """A common form of configuration: a mutable dataclass."""

    act: Any = nnx.relu
    scale: float = 1.0
    sizes: Any = dataclasses.field(default_factory=list)


def traced(function):
    """The function under `jit`, and a list that grows with each trace."""
    traces = []

    def counted(*args, **kwargs):
        traces.append(1)
        return function(*args, **kwargs)

    return nnx_sharding.jit(counted, graph=True, graph_updates=True), traces


class ConfigurationTest(parameterized.TestCase):
    """Functions get the user's static objects, not copies of them."""

    def model(self, **options):
        return nnx.Dict(
            w=nnx.Param(jnp.ones(())),
            **{name: nnx.static(value) for name, value in options.items()},
        )

    def test_one_trace_until_the_caller_changes_it(self):
        options = Options()
        model = self.model(c=options)
        call, traces = traced(lambda m: m.c.act(m.w[...]) * m.c.scale)
        for _ in range(5):
            self.assertEqual(float(call(model)), 1.0)
        self.assertLen(traces, 1)
        self.assertIs(model.c, options)
        options.scale = 5.0
        self.assertEqual(float(call(model)), 5.0)
        options.sizes.append(1)
        call(model)
        self.assertLen(traces, 3)

    def test_split_and_merge(self):
        model = self.model(c=Options(), f=partial(max, 1), g=jax.jit(len))
        structure = split(model)[0]
        self.assertEqual(split(nnx_sharding.merge(*split(model)))[0], structure)

    def test_a_list_that_an_object_without_eq_holds_too(self):
        class Schedule:
            sizes = None

        schedule, sizes = Schedule(), [1]
        schedule.sizes = sizes  # an attribute of an object that is compared by identity
        model = self.model(a=schedule)
        model.b = self.model(c=sizes)
        call, _ = traced(lambda m, x: x * len(m.b.c))
        self.assertEqual(float(call(model, 1.0)), 1.0)
        sizes.append(2)
        self.assertEqual(float(call(model, 1.0)), 2.0)

    def test_split_and_merge_of_node_data_in_the_value_of_a_variable(self):
        options = Options()
        structure, state = split(nnx.Dict(v=nnx.Param(Aux(jnp.ones(()), options))))
        merged = nnx_sharding.merge(structure, state)
        self.assertIs(merged.v.get_raw_value().config, options)

    def test_a_change_in_the_function_is_written_back(self):
        def step(model):
            model.a.c.scale += 1
            return model.b.c.scale * model.w[...]

        def shared():
            options = Options()
            model = self.model()
            model.a, model.b = self.model(c=options), self.model(c=options)
            return model

        call, traces = traced(step)
        mine, python = shared(), shared()
        for _ in range(3):
            self.assertEqual(float(call(mine)), float(step(python)))
        self.assertIs(mine.a.c, mine.b.c)
        self.assertEqual(mine.a.c, python.a.c)
        self.assertLen(traces, 3)
        again = shared()
        call(again)
        self.assertLen(traces, 3)
        self.assertEqual(again.a.c.scale, 2.0)  # written back by a trace for another object

    def test_a_function_that_fails_changes_nothing(self):
        def fails(model):
            model.c.scale = 9.0
            model.c.sizes.append(9)
            raise RuntimeError("no")

        model = self.model(c=Options(sizes=[1]))
        with self.assertRaisesRegex(RuntimeError, "no"):
            nnx_sharding.jit(fails)(model)
        self.assertEqual(model.c, Options(sizes=[1]))

    @parameterized.parameters({"graph": False}, {"graph": True, "graph_updates": False})
    def test_without_graph_updates_a_change_is_refused(self, **modes):
        def change(model):
            model.c.scale = 9.0

        model = self.model(c=Options())
        with self.assertRaisesRegex(ValueError, r"static objects.*\n  model\.c: Options"):
            nnx_sharding.jit(change, **modes)(model)
        self.assertEqual(model.c.scale, 1.0)

    def test_node_data_of_pytrees_changed_in_place(self):
        model = nnx.Dict(box=nnx.data(Aux(jnp.ones(()), Options())))
        call, _ = traced(lambda m: m.box.value * m.box.config.scale)
        self.assertEqual(float(call(model)), 1.0)
        options = model.box.config
        options.scale = 3.0
        self.assertEqual(float(call(model)), 3.0)
        self.assertIs(model.box.config, options)

    def test_static_arguments(self):
        @dataclasses.dataclass(frozen=True)
        class Frozen:
            sizes: Any

            def __hash__(self):
                return 1

        frozen = Frozen([1])
        call = nnx_sharding.jit(lambda x, c: x * len(c.sizes), static_argnames="c")
        self.assertEqual(float(call(1.0, frozen)), 1.0)
        frozen.sizes.append(2)
        self.assertEqual(float(call(1.0, frozen)), 2.0)
        self.assertEqual(float(call(1.0, c=Frozen([1]))), 1.0)

    def test_no_copy_or_comparison_method_of_the_user_is_called(self):
        class Guarded:
            def __init__(self):
                self.scale = 2.0

            def __deepcopy__(self, _):
                raise AssertionError

            __eq__ = __hash__ = __copy__ = __deepcopy__

        model = self.model(c=Guarded())
        call, traces = traced(lambda m: m.w[...] * m.c.scale)
        for _ in range(3):
            self.assertEqual(float(call(model)), 2.0)
        self.assertLen(traces, 1)


class TreeModeOutputTest(absltest.TestCase):
    def test_shared_outputs_are_refused_as_in_flax(self):
        def make():
            variable = nnx.Param(jnp.ones(2))
            return variable, variable

        for jit in (nnx_sharding.jit, nnx.jit):
            with self.assertRaises(ValueError):
                jit(make, graph=False)()
            with self.assertRaises(ValueError):
                jit(lambda model: make(), graph=False)(Holder(1))


class KeywordTest(absltest.TestCase):
    def test_the_function_by_keyword_as_in_flax(self):
        self.assertEqual(float(nnx_sharding.jit(fun=lambda x: x + 1)(1.0)), 2.0)
        mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")
        mapped = nnx_sharding.shard_map(f=lambda x: x + 1, mesh=mesh, in_specs=spec, out_specs=spec)
        np.testing.assert_array_equal(mapped(jnp.ones(8)), jnp.ones(8) + 1)
