"""The guard: it holds only where splitting again would give the same, and both walks agree."""

import gc
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_sharding
from graphs import NODES, OPERATIONS, VALUES, Graph, Node, assign, build, graphs, reachable
from nnx_sharding import _compat
from nnx_sharding.core.flatten import Flat, flatten
from nnx_sharding.core.guard import known, native, store
from nnx_sharding.core.guard.guard import check, match
from nnx_sharding.core.guard.recipe import Opcode
from nnx_sharding.core.guard.recorder import WalkRecorder
from nnx_sharding.core.guard.store import make_walk
from nnx_sharding.core.guard.walk import PythonWalk, Walk

HAS_C_WALK = importlib.util.find_spec("nnx_sharding.core.guard._native") is not None
WALKS: list[Any] = [PythonWalk]
if HAS_C_WALK:
    from nnx_sharding.core.guard._native import Walk as CWalk

    WALKS.append(CWalk)


def take(*args: Any, **kwargs: Any) -> None:
    """Only its arguments matter."""


class Watched:
    """Arguments with a guard of each kind."""

    def __init__(self, *args: Any, graph: bool = True, **kwargs: Any):
        self.args, self.kwargs = args, kwargs
        self.lifted = nnx_sharding.jit(take, graph=graph, graph_updates=graph)
        self.arguments = (*args, *kwargs.values())
        flat = self.lifted._split(args, kwargs, record=True)[1]
        self.flat = flat._replace(recorder=None)
        walk, self.walks = None, []
        if isinstance(flat.recorder, WalkRecorder):
            walk = make_walk(flat.recorder, self.arguments, "f")
        if walk is not None:
            self.recipe = walk.recipe
            # Two of each kind: one walks again only when it is asked.
            self.walks = [kind(self.recipe) for kind in WALKS * 2]

    def check(self) -> Flat | None:
        """What the guards say, which must be the same, and true."""
        answers = [self.answer(walk) for walk in self.walks]
        held = [answer is not None for answer in answers]
        matched = [self.matches(walk) for walk in self.walks]
        assert len(set(held)) <= 1 and len(set(matched)) <= 1, f"{WALKS}: {held}, {matched}"
        assert held <= matched, "a guard recognizes its own graph"
        for answer in answers:
            if answer is not None:
                self.assert_true(answer)
        return answers[0]

    def answer(self, walk: Walk) -> Flat | None:
        return check(walk, self.flat.structure, self.arguments)

    def matches(self, walk: Walk) -> bool:
        """Whether the graph has the structure of the walk, maybe with other objects."""
        matched = match(walk, self.flat.structure, self.arguments)
        if matched is not None:
            self.assert_true(matched[0])
        return matched is not None

    def assert_true(self, answer: Flat) -> None:
        now = self.lifted._split(self.args, self.kwargs)[1]
        assert now.structure == answer.structure == self.flat.structure
        assert hash(now.structure) == hash(self.flat.structure)
        assert_same_objects(answer.leaves, now.leaves)
        assert_same_objects(answer.objects, now.objects)


def assert_same_objects(one: Sequence[Any], two: Sequence[Any]) -> None:
    assert len(one) == len(two)
    assert all(a is b for a, b in zip(one, two, strict=True))


numbers = st.integers(0, 7)
operations = st.tuples(st.sampled_from(sorted(OPERATIONS)), numbers, numbers, numbers)


class TestSoundness:
    @given(graphs(values=VALUES), st.lists(operations, max_size=6))
    @settings(max_examples=settings().max_examples * 4)
    def test_random_graphs_and_changes(self, graph, changes):
        watched = Watched(*build(graph))
        assert watched.walks
        assert watched.check() is not None, "nothing has changed"
        for name, *own in changes:
            OPERATIONS[name](reachable(watched.args), [], *own)
            watched.check()

    @given(
        graphs(nodes=("node", "other", "list", "dict"), values=("array", "pair", "hijax")),
        st.lists(operations, max_size=3),
    )
    def test_values_alone_do_not_matter(self, graph, changes):
        watched = Watched(*build(graph))
        for x in reachable(watched.args):
            if isinstance(x, nnx.Variable):
                x.set_raw_value(jax.tree.map(lambda leaf: leaf + 1, x.get_raw_value()))
            assert watched.check() is not None

    def test_arrays_and_objects_are_the_present_ones(self):
        model = Node()
        model.w = nnx.Param(jnp.zeros(2))
        watched = Watched(model)
        model.w[...] = new = jnp.ones(2)
        found = watched.check()
        assert found is not None and found.leaves[0] is new

    @pytest.mark.parametrize("kind", sorted(NODES))
    def test_every_kind_of_node_is_guarded(self, kind):
        node = NODES[kind]()
        if kind == "list":
            node.append(nnx.Param(jnp.zeros(2)))
        else:
            node.a = nnx.Param(jnp.zeros(2))
        assert Watched(node).check() is not None

    @pytest.mark.parametrize("kind", VALUES)
    def test_every_kind_of_variable_is_guarded(self, kind):
        [model] = build(Graph(((0, kind, 1),), ("node",), ((0, 0, "object", 1),), (("object", 0),)))
        watched, value = Watched(model), model.a.get_value()
        for _ in range(3):  # what is assigned has a new treedef, if it is a hijax Variable
            assert watched.check() is not None
            if "ref" in kind:
                model.a[...] = value
            else:
                model.a.set_value(jax.tree.map(jnp.array, value))

    def test_metadata_of_hijax_variables(self):
        def schedule() -> None: ...

        class Schedule(NamedTuple):
            scale: float

        for mark in ("one", 1.0, ("a", None), Schedule(1.0)):
            model = Node()
            model.w = nnx.Param(jnp.zeros(2), hijax=True, mark=mark)
            watched = Watched(model)
            assert watched.check() is not None
            model.w.set_metadata(mark=mark)
            assert watched.check() is not None
            model.w.set_metadata(mark="two")
            assert watched.check() is None
            model.w.set_metadata(mark=True)  # Flax would not see this change of 1.0
            assert watched.check() is None
        for mark in (schedule, ["a"], Node()):  # what only their identity tells apart
            assert not Watched(nnx.Param(jnp.zeros(2), hijax=True, mark=mark)).walks


def linear() -> nnx.Linear:
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def optimizer() -> nnx.Optimizer:
    return nnx.Optimizer(linear(), optax.adam(1e-3), wrt=nnx.Param)


seen: list[Any] = []


class AnyAccess(nnx.Param[Any]):
    """Sees which attributes are read."""

    def __getattribute__(self, name: str) -> Any:
        seen.append(name)
        return super().__getattribute__(name)


class OneAccess(nnx.Param[Any]):
    """Has another attribute in front of the slot with the value."""

    @property
    def _raw_value(self) -> Any:
        seen.append("_raw_value")
        return nnx.Variable._raw_value.__get__(self)

    @_raw_value.setter
    def _raw_value(self, value: Any) -> None:
        nnx.Variable._raw_value.__set__(self, value)


class Pair(NamedTuple("Pair", [("one", int), ("two", list[int])])):
    """Has a ``__dict__`` beside its items, as transformations of Optax do."""


class TestChanges:
    def test_an_equal_static_is_no_change(self):
        model = linear()
        model.note = ("a", 1.5)
        watched = Watched(model)
        model.note = ("a", float("1.5"))
        assert watched.check() is not None
        model.note = ("a", 2.5)
        assert watched.check() is None

    def test_beside_an_equal_static_that_python_compares(self):
        """It is compared in each walk, and what is beside it is read again with it."""
        model, level = linear(), frozenset({1})
        model.note = nnx.static((frozenset({1}), (frozenset({1}), [1])))
        model.level = level
        watched = Watched(model)
        for _ in range(3):
            vars(model)["level"] = frozenset({1})
            assert watched.check() is not None
        inner = (frozenset({1}), model.note[1][1])
        vars(model)["note"] = (frozenset({1}), inner)
        for _ in range(3):
            vars(model)["level"] = frozenset({1})
            assert watched.check() is not None
        inner[1].append(2)
        assert watched.check() is None

    def test_stores_of_a_hot_loop(self):
        """CPython specialises the instruction that stores an attribute."""
        model = linear()
        watched, held = Watched(model), []

        def store(value: Any) -> None:
            model.use_bias = value

        for i in range(200):
            vars(model)  # the attributes get a dict, into which the store goes then
            store(i % 3 == 0)
            held.append(watched.check() is not None)
        assert held == [i % 3 == 0 for i in range(200)]

    def test_named_tuple_with_attributes(self):
        model = linear()
        model.pair = nnx.static(Pair(1, [2]))
        watched = Watched(model)
        assert watched.check() is not None
        for change, undo in (
            (lambda: setattr(model.pair, "more", 1), lambda: delattr(model.pair, "more")),
            (lambda: model.pair.two.append(3), lambda: model.pair.two.pop()),
        ):
            change()
            assert watched.check() is None
            undo()
            assert watched.check() is not None
        vars(model)["pair"] = Pair(1, [2])
        assert watched.check() is None, "another list"

    def test_what_an_optimizer_holds_is_read_without_python(self):
        watched = Watched(optimizer())
        assert watched.check() is not None
        assert max(watched.recipe.rows().T[0]) < Opcode.TREE

    def test_state_with_more_than_its_items(self):
        state = nnx.State({"a": nnx.Param(jnp.zeros(2))})
        watched = Watched(state)
        assert watched.check() is not None
        object.__setattr__(state, "__orig_class__", nnx.State)
        watched.check()
        other = Watched(state)
        assert other.check() is not None
        state["b"] = state["a"]
        assert watched.check() is None and other.check() is None

    @pytest.mark.parametrize("store", [setattr, lambda m, name, x: vars(m).update({name: x})])
    @pytest.mark.parametrize(
        "make",
        [
            lambda x: ("a", x / 2),
            lambda x: x / 2,
            lambda x: int(f"{x}000"),
            lambda x: f"number {x}",
        ],
        ids=["tuple", "float", "int", "str"],
    )
    def test_another_static_at_the_address_of_an_equal_one(self, make, store):
        model = linear()
        model.note = make(3)
        notes: list[Any] = []
        noted = nnx_sharding.jit(lambda m: notes.append(m.note))
        noted(model)
        store(model, "note", make(3))
        for _ in range(3):
            noted(model)
        old = id(model.note)
        store(model, "note", None)
        others = [make(number) for number in range(4, 2000)]
        other = next((x for x in others if id(x) == old), None)
        if other is None:
            pytest.skip("this allocator does not use an address again")
        store(model, "note", other)
        noted(model)
        assert notes[-1] == other

    def test_a_static_that_changes_back(self):
        """Python code compares some of the statics, and then needs all of them."""
        model = linear()
        model.level, model.note, model.tree = frozenset({1}), "a" * 30, nnx.static({2: frozenset()})
        watched = Watched(model)
        for _ in range(3):
            for note in ("".join(["a"] * 30), "b"):
                old, vars(model)["note"] = model.note, note
                assert (watched.check() is None) == (note == "b")
                vars(model)["note"] = old
                del old, note
                assert watched.check() is not None
                vars(model)["level"] = frozenset({1})
                assert watched.check() is not None
                vars(model)["level"] = frozenset({2})
                assert watched.check() is None
                vars(model)["level"] = frozenset({1})

    def test_class_that_is_equal_to_another(self):
        class ByName(type):
            def __eq__(cls, other: object) -> bool:
                return isinstance(other, ByName) and cls.__name__ == other.__name__

            def __hash__(cls) -> int:
                return hash(cls.__name__)

        model = linear()
        model.label = ByName("Label", (), {})()
        model.label.text = "x"
        watched = Watched(model)
        assert watched.check() is not None
        model.label.__class__ = ByName("Label", (), {})
        assert watched.check() is None

    @pytest.mark.parametrize("kind", [AnyAccess, OneAccess])
    def test_variable_that_watches_access(self, kind):
        model = linear()
        model.bias = kind(jnp.zeros(3))
        watched = Watched(model)
        seen.clear()
        for walk in watched.walks:
            assert watched.answer(walk) is not None
        assert not seen
        model.bias.set_metadata(extra=1)
        assert watched.check() is None

    def test_comparison_that_raises(self):
        class Angry:
            def __eq__(self, other: object) -> bool:
                raise RuntimeError

            def __hash__(self) -> int:
                return 0

        model = linear()
        model.note = Angry()
        watched = Watched(model)
        model.note = Angry()
        assert watched.check() is None

    def test_last_attribute_of_one_module_becomes_the_next_ones_first(self):
        outer, first, second = Node(), Node(), Node()
        outer.x, outer.y = first, second
        first.a, first.b = 1, 2
        second.c = 3
        watched = Watched(outer)
        assert watched.check() is not None
        for node in (first, second):
            del node.__dict__["_pytree__nodes"]
        nodes = {"a": False, "b": False, "c": False}
        first.__dict__["_pytree__nodes"] = second.__dict__["_pytree__nodes"] = nodes
        watched = Watched(outer)
        assert watched.check() is not None
        value = first.__dict__.pop("b")
        second.__dict__.update({"b": value, "c": second.__dict__.pop("c")})
        assert watched.check() is None

    def test_new_object_with_the_id_of_the_old_one(self):
        for _ in range(50):  # whether an address is used again is up to Python
            model = Node()
            model.child = Node()
            model.child.a = 1
            watched = Watched(model)
            watched.flat = watched.flat._replace(leaves=(), objects=())  # lets the child go
            old = id(model.child)
            del model.child
            many = [Node() for _ in range(200)]
            found = [node for node in many if id(node) == old]
            if found:
                break
        [model.child] = found
        model.child.a = 2
        assert watched.check() is None


class TestNotGuarded:
    def test_type_registered_by_the_user(self):
        class Own:
            def __init__(self) -> None:
                self.w = nnx.Param(jnp.zeros(2))

        nnx.graphlib.register_graph_node_type(
            Own,
            lambda own: ([("w", own.w)], None),
            lambda own, key, value: setattr(own, key, value),
            lambda own, key: delattr(own, key),
            lambda metadata: Own(),
            lambda own: None,
            lambda own, attributes: own.__dict__.update(attributes),
        )
        assert not Watched(Own()).walks

    def test_module_that_hides_its_content(self):
        class Hidden(nnx.Module):
            def __getattribute__(self, name: str) -> Any:
                own = super().__getattribute__(name)
                return dict(own) if name == "__dict__" else own

        assert not Watched(Hidden()).walks

    def test_module_that_watches_each_access(self):
        class Spy(nnx.Module):
            def __getattribute__(self, name: str) -> Any:
                return super().__getattribute__(name)

        watched = Watched(Spy())
        assert watched.check() is not None
        watched.args[0].extra = 1
        assert watched.check() is None

    def test_variable_of_another_trace(self):
        leaked: list[Any] = []

        @jax.jit
        def leak(x: jax.Array) -> jax.Array:
            leaked.append(nnx.Param(np.zeros(2)))
            return x

        leak(jnp.zeros(2))
        model = Node()
        assign(model, "w", leaked[0])
        assert not Watched(model).walks


class Interrupting:
    """A static value whose comparison runs other code, as another thread would meanwhile."""

    __slots__ = ()  # with state, it would be compared by content
    meanwhile: list[Callable[[], Any]] = []
    texts: dict[int, str] = {}

    def __init__(self, text: str):
        self.texts[id(self)] = text

    @property
    def text(self) -> str:
        return self.texts[id(self)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interrupting) and self.text == other.text

    def __hash__(self) -> int:
        if self.meanwhile:
            self.meanwhile.pop()()
        return hash(self.text)


@pytest.mark.parametrize("text", ["same", "other"])
def test_another_call_during_a_comparison(text):
    model = nnx.Module()
    model.mark, model.w = Interrupting("same"), nnx.Param(jnp.zeros(2))
    watched = Watched(model)
    assert watched.check() is not None
    model.mark = Interrupting(text)
    for walk in watched.walks:
        answers: list[Any] = []
        Interrupting.meanwhile[:] = [lambda w=walk: answers.append(watched.answer(w))]
        answers.append(watched.answer(walk))
        assert [x is not None for x in answers] == [text == "same"] * 2
        assert (watched.answer(walk) is not None) == (text == "same")


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_many_dicts_change(count):
    """More than the walk in C remembers; guards of other graphs still hold."""
    one, others = linear(), [nnx.Param(jnp.zeros(2)) for _ in range(count)]
    watched, watched_others = Watched(one), Watched(others)
    assert watched.check() is not None and watched_others.check() is not None
    for x in (one.kernel, *others):
        _compat.get_metadata(x)["mark"] = 1
    assert watched.check() is None and watched_others.check() is None
    del _compat.get_metadata(one.kernel)["mark"]
    for x in others:
        _compat.get_metadata(x)["mark"] = 2
    assert watched.check() is not None and watched_others.check() is None


@pytest.mark.skipif(not HAS_C_WALK, reason="built without a compiler")
class TestKnownModels:
    """``flatten_known`` returns what ``flatten`` does, for any model that comes again."""

    @staticmethod
    def assert_flat(tree: Any) -> Flat:
        flat, plain = known.flatten_known(tree), flatten(tree)
        assert flat.structure == plain.structure
        assert_same_objects(flat.leaves, plain.leaves)
        assert_same_objects(flat.objects, plain.objects)
        return flat

    def test_all_changes(self):
        model = nnx.List([linear(), linear()])
        changes: list[Callable[[], Any]] = [
            lambda: setattr(model[0].kernel, "value", jnp.ones((2, 2))),
            lambda: setattr(model[0], "label", "a"),
            lambda: model[0].kernel.set_metadata(label="a"),
            lambda: setattr(model[1], "kernel", model[0].kernel),
            lambda: model.append(linear()),
        ]
        for change in changes:
            flats = [self.assert_flat(model) for _ in range(3)]
            assert flats[2].updatable  # known
            assert flats[2].structure is flats[1].structure
            change()
            self.assert_flat(model)

    def test_values_do_not_count(self):
        model = linear()
        flats = [self.assert_flat(model) for _ in range(2)]
        model.kernel[...] += 1
        assert self.assert_flat(model).structure is flats[1].structure

    def test_models_are_forgotten(self):
        for _ in range(3):
            model = linear()
            for _ in range(3):
                self.assert_flat(model)
            key = id(model)
            del model
            gc.collect()
            assert key not in known._MODELS

    def test_within_a_trace(self):
        model = linear()
        for _ in range(3):
            self.assert_flat(model)

        @jax.jit
        def traced(x: jax.Array) -> jax.Array:
            assert not self.assert_flat(model).updatable
            self.assert_flat({"x": x})
            return x

        traced(jnp.ones(()))

    def test_what_is_no_module(self):
        for _ in range(3):
            assert not self.assert_flat([jnp.ones(2), linear()]).updatable
            assert not self.assert_flat(nnx.Param(jnp.ones(2))).updatable


class TestCWalk:
    def test_is_used(self):
        import os

        wanted = PythonWalk if os.environ.get("NNX_SHARDING_PURE_PYTHON") else CWalk
        assert store.FastestWalk is wanted

    def test_extension_of_another_version_is_refused(self, monkeypatch):
        from nnx_sharding.core.guard import _native

        words = _native.FIELDS.split()
        for other in (words[:-1], [*words, "more"], [words[1], words[0], *words[2:]]):
            monkeypatch.setattr(_native, "FIELDS", " ".join(other))
            with pytest.raises(RuntimeError, match="another version of nnx_sharding"):
                native._load_walk()
        monkeypatch.delattr(_native, "FIELDS")
        with pytest.raises(RuntimeError, match="build_ext"):
            native._load_walk()

    @pytest.mark.parametrize("pure", ["", "1"])
    @pytest.mark.parametrize("error", [ModuleNotFoundError("No module"), ImportError("undefined")])
    def test_without_the_extension(self, error, pure, monkeypatch, caplog):
        def fail(name, package):
            raise error

        monkeypatch.setenv("NNX_SHARDING_PURE_PYTHON", pure)
        monkeypatch.setattr(native.importlib, "import_module", fail)
        assert native._load_walk() is PythonWalk
        assert ("without its C extension" in caplog.text) == (not pure)
        # One that is there but cannot be loaded has a reason, which says more than we know.
        is_broken = type(error) is ImportError
        assert (
            str(error) in caplog.text if is_broken and not pure else str(error) not in caplog.text
        )

    def test_set_up_needs_slots(self):
        from nnx_sharding.core.guard import _native

        for name, other in (("METADATA", nnx.Linear.__call__), ("METADATA", None), ("x", len)):
            with pytest.raises(TypeError, match=f"{name}: .*not the descriptor of a slot"):
                _native.set_up(**{name: other})

    def test_more_or_fewer_arguments(self):
        watched = Watched(linear(), jnp.zeros(2))
        walk = watched.walks[-1]
        for arguments in [(), watched.arguments[:1], (*watched.arguments, 1)]:
            assert walk.follow(arguments) is None
            assert walk.match(arguments) is None
