"""``split`` and ``merge``: round trips, groups, errors, and the equality of structures."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import errors, nnx
from hypothesis import given, settings

import nnx_sharding
from graphs import Graph, Loose, Memory, Node, Tag, build, graphs, reachable, snapshot
from libraries import node, param
from nnx_sharding import Structure, merge, split


def small() -> Node:
    block = node(w=param(1), stat=nnx.BatchStat(jnp.zeros(2)), size=3)
    model = node(block=block, tied=block.w, raw=jnp.ones(2), name="small")
    block.parent = model
    return model


class RoundTripTest(parameterized.TestCase):
    @settings(max_examples=200, deadline=None)
    @given(graphs(values=("array", "pair")))
    def test_random_graphs(self, graph: Graph):
        roots = build(graph)
        memory = Memory(roots)
        structure, state = split(roots)
        again = merge(structure, state)
        memory.assert_unchanged()
        assert snapshot(again) == snapshot(roots)
        old = {id(x) for x in reachable(roots)}
        assert not any(id(x) in old for x in reachable(again))
        assert split(again)[0] == structure

    @settings(max_examples=100, deadline=None)
    @given(graphs(), graphs())
    def test_random_graphs_into_others(self, graph: Graph, other: Graph):
        roots, target = build(graph), build(other, 5)
        structure, state = split(roots)
        assert snapshot(merge(structure, state, into=target)) == snapshot(roots)

    def test_model_and_optimizer(self):
        import optax

        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(
            model, optax.chain(optax.clip(1.0), optax.adam(0.1)), wrt=nnx.Param
        )
        structure, params, rest = split((model, optimizer), nnx.Param, ...)
        assert set(params) == {0} and set(rest) == {1}
        new_model, new_optimizer = merge(structure, params, rest)
        gradient = nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(new_model)
        new_optimizer.update(new_model, gradient)
        assert int(new_optimizer.step[...]) == 1 and int(optimizer.step[...]) == 0
        assert not np.array_equal(new_model.kernel[...], model.kernel[...])

    @parameterized.named_parameters(
        ("array", lambda: jnp.arange(3.0)),
        ("number", lambda: 3.5),
        ("variable", lambda: Tag(jnp.arange(2))),
        ("pair", lambda: nnx.Param({"x": jnp.ones(2), "y": (jnp.zeros(1),)})),
        ("empty_variable", lambda: nnx.Variable(None)),
        ("none", lambda: None),
        ("nothing", lambda: {}),
        ("dict", lambda: {"a": param(1), "b": [jnp.ones(1), node(c=param(2))]}),
        ("loose", lambda: _loose()),
        ("empty_dict_variable", lambda: nnx.Variable({})),
        ("list", lambda: nnx.List([param(1), 3, nnx.Dict(a=param(4))])),
        ("boxed", lambda: node(boxed=nnx.data([node(w=param()), {"k": (param(2), jnp.ones(1))}]))),
        ("scalar_data", lambda: _with(3)),
        ("numpy", lambda: node(a=np.arange(3))),
    )
    def test_roots(self, make):
        root = make()
        for filters in ((), (nnx.Param, ...), (..., nnx.Param)):
            assert snapshot(merge(*split(root, *filters))) == snapshot(root), filters

    def test_groups_in_any_order_and_nested_mappings(self):
        model = small()
        structure, params, rest = split(model, nnx.Param, ...)
        assert snapshot(merge(structure, rest, params)) == snapshot(model)
        plain = {"block": {"w": 1.0, "stat": jnp.zeros(2)}, "raw": jnp.ones(2)}
        assert float(merge(structure, plain).block.w.get_raw_value()) == 1.0

    def test_leaves_are_the_arrays_themselves(self):
        model = small()
        _, state = split(model)
        assert state["block"]["w"] is model.block.w.get_raw_value()
        assert state["raw"] is model.raw

    def test_states_of_variables_are_taken(self):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        structure, _ = split(model)
        other = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        again = merge(structure, nnx.state(other))
        np.testing.assert_array_equal(again.kernel[...], other.kernel[...])
        assert isinstance(again.kernel, nnx.Param)

    def test_merging_twice_makes_independent_models(self):
        structure, state = split(small())
        one, two = merge(structure, state), merge(structure, state)
        one.block.w[...] = jnp.asarray(9.0)
        one.block.w.set_metadata(note=1)
        assert float(two.block.w[...]) == 1 and "note" not in two.block.w.get_metadata()


def _loose() -> Loose:
    model = Loose()
    model.blocks = [node(w=param(1)), param(2)]
    return model


def _with(number: Any) -> Node:
    model = Node()
    model.number = nnx.data(number)
    return model


class GroupsTest(parameterized.TestCase):
    def test_first_filter_that_matches(self):
        structure, stats, params, rest = split(small(), nnx.BatchStat, nnx.Param, ...)
        assert _paths(stats) == [("block", "stat")]
        assert _paths(params) == [("block", "w")]
        assert _paths(rest) == [("raw",)]
        assert structure.num_leaves == 3

    @parameterized.named_parameters(
        ("path", nnx.PathContains("block"), [("block", "stat"), ("block", "w")]),
        ("predicate", lambda path, x: path[-1] == "w", [("block", "w")]),
        ("any", nnx.Any(nnx.Param, nnx.BatchStat), [("block", "stat"), ("block", "w")]),
        ("not", nnx.Not(nnx.Param), [("block", "stat"), ("raw",)]),
        ("shape", lambda path, x: x.shape == (), [("block", "w")]),
        ("nothing", nnx.Nothing(), []),
    )
    def test_filters(self, chosen, expected):
        assert _paths(split(small(), chosen, ...)[1]) == expected

    def test_same_groups_as_nnx_split(self):
        model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        _, *ours = split(model, nnx.Param, nnx.BatchStat)
        _, *theirs = nnx.split(model, nnx.Param, nnx.BatchStat)
        assert [_paths(x) for x in ours] == [_paths(x) for x in theirs]

    def test_array_that_no_filter_matches(self):
        model = small()
        memory = Memory(model)
        with pytest.raises(ValueError, match=r"stat: BatchStat of .*\n  raw: array of") as error:
            split(model, nnx.Param)
        assert "block/w" not in str(error.value)
        memory.assert_unchanged()

    def test_not_a_filter(self):
        with pytest.raises(TypeError):
            split(small(), 3.5)


def _paths(state: Any) -> list[Any]:
    return sorted(path for path, _ in nnx.to_flat_state(state))


class MergeErrorsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("missing", lambda s: s["block"].pop("stat"), ["Missing", "block/stat"], ["Unknown"]),
        ("unknown", lambda s: s.update(more=jnp.ones(1)), ["Unknown", "more"], ["Missing"]),
        ("unknown_deep", lambda s: s["block"].update(v={"w": 1.0}), ["Unknown", "block/v/w"], []),
        ("below_an_array", lambda s: s["block"].update(w={"x": 1.0}), ["block/w"], []),
        ("second_path_of_alias", lambda s: s.update(tied=1.0), ["Unknown", "tied"], ["Missing"]),
        (
            "both",
            lambda s: s.update(raw2=s.pop("raw")),
            ["Missing", "  raw\n", "Unknown", "  raw2"],
            [],
        ),
    )
    def test_message_names_paths_and_nothing_changes(self, spoil, named, unnamed):
        model, target = small(), small()
        structure, state = split(model)
        plain = {"block": dict(state["block"]), "raw": state["raw"]}
        spoil(plain)
        memory = Memory(target)
        for options in ({}, {"into": target}):
            with pytest.raises(ValueError, match="do not fit") as error:
                merge(structure, plain, **options)
            for text in named:
                assert text in str(error.value)
            for text in unnamed:
                assert text not in str(error.value)
        memory.assert_unchanged()

    @parameterized.named_parameters(
        ("fewer", {"x": 1.0}),
        ("more", {"x": 1.0, "y": 2.0, "z": 3.0}),
        ("other_keys", {"x": 1.0, "q": 2.0}),
    )
    def test_pytree_value_of_another_form(self, value):
        structure, _ = split(node(v=nnx.Param({"x": jnp.ones(1), "y": jnp.ones(1)})))
        with pytest.raises(ValueError, match="v"):
            merge(structure, {"v": value})

    @parameterized.named_parameters(
        ("graphdef_of_flax", "GraphDef", lambda model: nnx.split(model)),
        ("order", "State", lambda model: split(model)[::-1]),
        ("state_alone", "State", lambda model: (nnx.state(model),)),
        ("model", "Linear", lambda model: (model,)),
    )
    def test_first_argument_is_no_structure(self, name, arguments):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        with pytest.raises(TypeError, match=f"type {name}, not a Structure.*nnx.merge"):
            merge(*arguments(model))

    def test_into_objects_of_another_trace(self):
        target = small()
        memory = Memory(target)

        @jax.jit
        def f(x):
            merge(*split(small()), into=target)
            return x

        with pytest.raises(errors.TraceContextError, match="merge cannot change"):
            f(1.0)
        memory.assert_unchanged()


class MergeIntoTest(parameterized.TestCase):
    def test_same_structure_keeps_every_object(self):
        model, target = small(), small()
        model.block.w[...] = jnp.asarray(7.0)
        before = reachable(target)
        assert merge(*split(model), into=target) is target
        assert all(a is b for a, b in zip(before, reachable(target), strict=True))
        assert snapshot(target) == snapshot(model)

    def test_changed_structure(self):
        model, target = small(), small()
        block, w, stat = target.block, target.block.w, target.block.stat
        del model.raw, model.name
        model.block.size = 4
        model.block.w = Tag(model.block.w[...])
        model.block.new = node(w=param(8))
        model.block.stat.set_metadata(note="x")
        merge(*split(model), into=target)
        assert snapshot(target) == snapshot(model)
        assert target.block is block and block.stat is stat and block.parent is target
        assert block.w is not w and type(block.w) is Tag
        assert not hasattr(target, "raw") and not hasattr(target, "name")
        assert block.new is not model.block.new

    def test_swapped_submodules_keep_their_places(self):
        model = node(a=node(w=param(1)), b=node(w=param(2)))
        target = node(a=node(w=param(3)), b=node(w=param(4)))
        a, b = target.a, target.b
        model.a, model.b = model.b, model.a
        merge(*split(model), into=target)
        assert target.a is a and target.b is b
        assert (float(a.w[...]), float(b.w[...])) == (2, 1)

    def test_root_of_another_type_is_new(self):
        target = nnx.Dict(a=param(1))
        memory = Memory(target)
        new = merge(*split(small()), into=target)
        assert new is not target and isinstance(new, Node)
        memory.assert_unchanged()

    def test_several_roots(self):
        one, two = small(), nnx.List([param(1)])
        out = merge(*split({"a": small(), "b": nnx.List([param(9)])}), into={"a": one, "b": two})
        assert out["a"] is one and out["b"] is two and float(two[0][...]) == 9

    def test_reference_variable_takes_the_new_value(self):
        model, target = (
            node(w=nnx.Param(jnp.ones(()), ref=True)),
            node(w=nnx.Param(jnp.zeros(()), ref=True)),
        )
        merge(*split(model), into=target)
        assert float(target.w[...]) == 1
        target.w[...] = jnp.asarray(5.0)
        assert isinstance(target.w.get_raw_value(), jax.Ref)
        assert float(target.w[...]) == 5

    def test_refs_in_attributes_are_those_of_the_arrays(self):
        model, target = (node(r=jax.new_ref(jnp.asarray(x))) for x in (1.0, 2.0))
        merge(*split(model), into=target)
        assert target.r is model.r


class StructureTest(parameterized.TestCase):
    def test_equal_models(self):
        one, two = split(small())[0], split(small())[0]
        assert one == two and hash(one) == hash(two)
        assert len({one, two}) == 1
        assert isinstance(one, Structure)

    def test_values_shapes_and_dtypes_do_not_matter(self):
        model = small()
        model.block.w[...] = jnp.asarray(2.0)
        model.raw = jnp.arange(7)
        assert split(model)[0] == split(small())[0]

    @parameterized.named_parameters(
        ("static", lambda m: setattr(m.block, "size", 4)),
        ("static_type_float", lambda m: setattr(m.block, "size", 3.0)),
        ("metadata", lambda m: m.block.w.set_metadata(note=1)),
        ("sharing_undone", lambda m: setattr(m, "tied", param(1))),
        ("sharing_made", lambda m: setattr(m.block, "parent", m.block)),
        ("variable_type", lambda m: setattr(m.block, "w", Tag(jnp.ones(())))),
        ("added", lambda m: setattr(m, "more", None)),
        ("removed", lambda m: delattr(m, "name")),
        ("renamed", lambda m: (setattr(m, "title", m.name), delattr(m, "name"))),
        ("kind_of_value", lambda m: m.block.stat.set_value({"a": jnp.ones(1)})),
    )
    def test_different_models(self, change):
        one, two = small(), small()
        change(two)
        assert split(one)[0] != split(two)[0]

    def test_nan_equals_itself(self):
        assert split(node(x=float("nan")))[0] == split(node(x=float("nan")))[0]

    def test_a_cycle_and_its_unrolled_form_are_different(self):
        loop = node(w=param())
        loop.next = loop
        longer = node(w=param(), next=node(w=param()))
        longer.next.next = longer
        assert split(loop)[0] != split(longer)[0]

    @parameterized.named_parameters(
        ("pickle", lambda x: pickle.loads(pickle.dumps(x))),
        ("copy", copy.copy),
        ("deepcopy", copy.deepcopy),
    )
    def test_copies(self, duplicate):
        model = small()
        structure, state = split(model)
        again = duplicate(structure)
        assert again == structure and hash(again) == hash(structure)
        assert snapshot(merge(again, state)) == snapshot(model)

    def test_paths_by_slot(self):
        structure, state = split(small())
        assert sorted(structure.paths()) == [("block", "stat"), ("block", "w"), ("raw",)]
        assert structure.num_leaves == len(structure.paths()) == len(_paths(state))


class AbstractAndTracedTest(parameterized.TestCase):
    def test_abstract_model(self):
        abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        structure, state = split(abstract)
        assert isinstance(state["kernel"], jax.ShapeDtypeStruct)
        model = merge(structure, {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)})
        np.testing.assert_allclose(model(jnp.ones((1, 2))), 2 * np.ones((1, 3)))
        assert merge(structure, state).kernel.shape == (2, 3)

    def test_equal_to_the_structure_of_the_real_model(self):
        def make():
            return nnx.Linear(2, 3, rngs=nnx.Rngs(0))

        assert split(nnx.eval_shape(make))[0] == split(make())[0]

    def test_under_jit(self):
        structure, state = split(small())

        @jax.jit
        def f(state):
            model = merge(structure, state)
            model.tied[...] += 1
            after, state = split(model)
            assert after == structure
            return state

        out = f(state)
        assert float(out["block"]["w"]) == 2
        assert float(state["block"]["w"]) == 1

    def test_structure_as_static_argument(self):
        traced = []

        def f(structure, state):
            traced.append(structure)
            return merge(structure, state).block.w[...] * 2

        jitted = jax.jit(f, static_argnums=0)
        assert float(jitted(*split(small()))) == 2
        assert float(jitted(*split(small()))) == 2
        assert len(traced) == 1

    def test_under_grad(self):
        structure, params, rest = split(small(), nnx.Param, ...)

        def loss(params, rest):
            model = merge(structure, params, rest)
            return (model.tied[...] * model.block.w[...] * 3.0).sum()

        gradient = jax.grad(loss)(params, rest)
        assert _paths(gradient) == [("block", "w")]
        assert float(gradient["block"]["w"]) == 6

    def test_merged_inside_a_trace_can_be_changed_there(self):
        structure, state = split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))

        @jax.jit
        def f(state, x):
            model = merge(structure, state)
            model.flag = "set"
            y = model(x)
            return y, split(model)[1]

        _, after = f(state, jnp.ones((4, 2)))
        np.testing.assert_allclose(after["mean"], [0.01, 0.01], rtol=1e-4)

    def test_structures_are_pytrees_without_leaves(self):
        """As Flax's graph definitions are: in jit, eval_shape, tree.map and loops, with arrays."""
        for library in (nnx, nnx_sharding):
            for transform in (jax.jit, nnx_sharding.jit, nnx.jit):

                def make(library=library):
                    return library.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

                structure, state = jax.tree.map(lambda x: x * 2, transform(make)())
                assert jax.tree.leaves(structure) == []
                assert jax.eval_shape(make)[0] == structure

                def step(carry, x, library=library):
                    return carry, library.merge(*carry)(x)

                (same, _), y = jax.lax.scan(step, (structure, state), jnp.ones((3, 4)))
                assert same == structure

                def apply(structure, state, x, library=library):
                    return library.merge(structure, state)(x)

                z = transform(apply)(structure, state, jnp.ones(4))
                np.testing.assert_allclose(y[0], z, rtol=1e-6)
