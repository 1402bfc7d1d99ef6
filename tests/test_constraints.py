"""Constraints and mesh queries, case by case, on Auto, Explicit and Manual meshes."""

from __future__ import annotations

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from flax.errors import TraceContextError
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import StateSharding
from nnx_sharding.compat import eformer as c
from nnx_sharding.compat.eformer import NoContextMeshError
from nnx_sharding.compat.eformer import with_sharding_constraint as constrain
from nnx_sharding.errors import CorrectedSpecWarning, NoMeshError, StrictError, UnusedFilterWarning
from nnx_sharding.partition import make_mesh
from zoo import MLP, compilations, fails, mesh_of, mlp_specs

U = P.UNCONSTRAINED
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SIZES = {"a": 2, "b": 4}
MESHES = {
    name: mesh_of((2, 4), ("a", "b"), kinds)
    for name, kinds in {
        "auto": (AUTO, AUTO),
        "explicit": (EXPLICIT, EXPLICIT),
        "mixed": (AUTO, EXPLICIT),
    }.items()
}
MESH = MESHES["auto"]


@contextlib.contextmanager
def legacy(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


def ones(*shape):
    return jnp.arange(float(np.prod(shape))).reshape(shape)


def put(x, spec, mesh=MESH):
    return jax.device_put(x, NamedSharding(mesh, spec))


def placed(x, spec, mesh=MESH) -> bool:
    x = x.get_raw_value() if isinstance(x, nnx.Variable) else x
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


class MakeMeshTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"data": -1, "model": 4}, (2, 4)),
        ({"data": -1}, (8,)),
        ({"data": -1, "model": 8}, (1, 8)),
        ({"data": np.int64(4), "model": 2}, (4, 2)),
    )
    def test_sizes(self, axes, sizes):
        names = tuple(dict(axes))
        plain = jax.make_mesh(sizes, names)
        assert make_mesh(axes) == plain

    def test_devices_and_types(self):
        devices = jax.devices()[2:6]
        mesh = make_mesh({"a": 2, "b": -1}, (EXPLICIT, AUTO), devices=devices)
        assert set(mesh.devices.flat) == set(devices) and mesh.axis_types == (EXPLICIT, AUTO)
        assert make_mesh({"a": 8}, axis_types=AUTO).axis_types == (AUTO,)

    @parameterized.parameters(
        ({"a": 3, "b": -1}, {}, ValueError, "(3, -1)", "8 devices", "may be -1"),
        ({"a": 2, "b": 2}, {}, ValueError, "(2, 2)", "8 devices"),
        ({"a": 16}, {}, ValueError, "(16,)", "8 devices"),
        ({"a": 16, "b": -1}, {}, ValueError, "(16, -1)", "8 devices"),
        ({"a": -1, "b": -1}, {}, ValueError, "(-1, -1)", "8 devices"),
        ({"a": 0, "b": -2}, {}, ValueError, "(0, -2)", "8 devices"),
        ({"a": -2, "b": -4}, {}, ValueError, "(-2, -4)", "8 devices"),
        ({}, {}, ValueError, "()", "8 devices"),
        ({"a": 8}, {"axis_types": (AUTO, AUTO)}, ValueError, "axis_types=(Auto, Auto)"),
        ((2, 4), {}, TypeError, "sizes by name", "got (2, 4)", "jax.make_mesh"),
    )
    def test_mistakes(self, axes, options, error, *parts):
        with fails(error, *parts):
            make_mesh(axes, **options)


class ContextTest(parameterized.TestCase):
    def test_both_ways_to_set_a_mesh(self):
        for context in (jax.set_mesh(MESH), legacy(MESH)):
            with context:
                assert c.get_incontext_mesh() == MESH
                assert c.names_in_current_mesh("b", "a") and c.names_in_current_mesh()
                assert not c.names_in_current_mesh("a", "z")
                assert c.get_mesh_axis_names() == ["a", "b"]
                sizes = jax.eval_shape(lambda: jnp.zeros(c.get_axes_size_in_mesh(("a", "b"))))
                assert sizes.shape == (8,)

    def test_without_a_mesh(self):
        empty = c.get_incontext_mesh(raise_error=False)
        assert empty.empty and empty.axis_names == ()
        assert not c.names_in_current_mesh("a") and c.names_in_current_mesh()
        questions = (
            c.get_incontext_mesh,
            c.get_mesh_axis_names,
            lambda: c.get_axes_size_in_mesh("a"),
        )
        for question in questions:
            for error in (AssertionError, NoMeshError):
                with fails(error, "no mesh in context"):
                    question()

    def test_sizes_of_axes(self):
        mesh = AbstractMesh((2, 4), ("data", "model"))
        assert c.get_mesh_axis_names(mesh) == ["data", "model"]
        assert c.get_axes_size_in_mesh("model", mesh) == 4
        assert c.get_axes_size_in_mesh(["data", "model"], mesh) == 8
        assert c.get_axes_size_in_mesh((), mesh) == 1
        with fails(KeyError, "'modle'; did you mean 'model'", "'data', 'model'"):
            c.get_axes_size_in_mesh(("data", "modle"), mesh)

    @parameterized.parameters((("a", "b"),), (("b", "a"),), (["b"],), ("a",), ((),))
    def test_inside_a_mapped_function(self, names):
        seen = []

        def f():
            seen.append(c.get_mesh_axis_size(names))
            return jnp.asarray(c.get_submesh_device_index(names)).reshape(1, 1)

        index = jax.shard_map(f, mesh=MESH, in_specs=(), out_specs=P("a", "b"), check_vma=False)()
        want, size = np.zeros((2, 4), int), 1
        for name in names:
            want = want * SIZES[name] + np.indices((2, 4))["ab".index(name)]
            size *= SIZES[name]
        np.testing.assert_array_equal(index, want)
        assert seen[-1] == size and type(seen[-1]) is int

    def test_no_names(self):
        assert c.get_mesh_axis_size(()) == 1 and c.get_submesh_device_index(()) == 0
        with fails(NameError, "a"):
            c.get_mesh_axis_size("a")


ENTRIES = st.sampled_from([None, "a", "b", ("a", "b"), ("b", "a"), "gone", ("gone", "a"), U])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16]), max_size=4).map(tuple)


def axes_in(entry) -> list:
    return [] if entry in (None, U) else list(entry) if type(entry) is tuple else [entry]


class CorrectionTest(parameterized.TestCase):
    @parameterized.parameters(
        ((8, 8), P("a"), P("a", None)),
        ((8,), P("a", None), P("a")),
        ((), P(), P()),
        ((8, 8), P(U, "b"), P(U, "b")),
        ((0, 8), P("a", "b"), P("a", "b")),
        ((8, 8), P(None, ("a", "b")), P(None, ("a", "b"))),
    )
    def test_what_fits_is_silent(self, shape, spec, want):
        sharding = c.get_corrected_named_sharding(shape, spec, mesh=MESH)
        assert sharding.spec == want and sharding.mesh == MESH

    @parameterized.parameters(*MESHES)
    def test_specs_longer_than_the_rank(self, kind):
        mesh = MESHES[kind]
        for spec in (P("a", None), P("a", None, None)):
            sharding = NamedSharding(mesh, spec)
            with jax.set_mesh(mesh):
                for transform in (lambda f: f, jax.jit, nnx_sharding.jit):
                    assert placed(
                        transform(lambda x: constrain(x, sharding))(ones(8)), P("a"), mesh
                    )

    @parameterized.parameters(
        ((8,), P("a", "b"), P("a"), "the spec has 2 entries, the array 1 dimension"),
        ((), P("a"), P(), "a scalar has no dimension"),
        ((8, 8), P("c", "b"), P(None, "b"), "no axis 'c'"),
        ((8, 8), P(("c", "a")), P("a", None), "no axis 'c'"),
        ((3, 8), P("a", "b"), P(None, "b"), "size 3 is not divisible"),
        ((6, 8), P(("a", "b")), P("a", None), "dimension 0 of size 6"),
        ((4, 8), P(("b", "a"), U), P("b", U), "dimension 0 of size 4"),
        ((2, 8), P(("b", "a")), P(None, None), "dimension 0 of size 2"),
    )
    def test_what_does_not_fit_is_reported(self, shape, spec, want, why):
        with pytest.warns(CorrectedSpecWarning, match=why) as caught:
            sharding = c.get_corrected_named_sharding(shape, spec, mesh=MESH)
        assert sharding.spec == want and len(caught) == 1 and caught[0].filename == __file__

    def test_axes_of_size_one_stay(self):
        mesh = mesh_of((1, 8), ("a", "b"))
        assert c.get_corrected_named_sharding((3, 8), P("a", "b"), mesh=mesh).spec == P("a", "b")

    def test_without_a_mesh(self):
        with fails(NoContextMeshError):
            c.get_corrected_named_sharding((8,), P("a"))
        assert c.get_corrected_named_sharding((8,), P("a"), raise_mesh_error=False).spec == P(None)
        with jax.set_mesh(MESH):
            assert c.get_corrected_named_sharding((8,), P("a")).mesh == MESH

    def test_mistakes(self):
        with fails(TypeError, "write P('a')"):
            c.get_corrected_named_sharding((8,), "a", mesh=MESH)
        with fails(ValueError, "'a' is used 2 times"):
            c.get_corrected_named_sharding((8, 8), P("a", "a"), mesh=MESH)

    @given(st.lists(ENTRIES, max_size=3), SHAPES)
    def test_the_result_is_the_longest_part_that_jax_takes(self, entries, shape):
        axes = [axis for entry in entries for axis in axes_in(entry)]
        if any(axes.count(name) > 1 for name in SIZES):
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = c.get_corrected_named_sharding(shape, P(*entries), mesh=MESH).spec
        assert len(found) == len(shape)
        padded = (*entries, *[None] * len(shape))
        for size, entry, own in zip(shape, padded, found, strict=False):
            assert (entry is U) == (own is U)
            wanted = [axis for axis in axes_in(entry) if axis in SIZES]
            parts = np.cumprod([1, *(SIZES[axis] for axis in wanted)])
            assert axes_in(own) == wanted[: max(n for n, k in enumerate(parts) if size % k == 0)]
        assert bool(caught) == (axes != [axis for entry in found for axis in axes_in(entry)])


class OutsideOfTracesTest(parameterized.TestCase):
    @parameterized.product(
        kind=list(MESHES), spec=[P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P()]
    )
    def test_it_is_device_put(self, kind, spec):
        mesh = MESHES[kind]
        for x in (ones(8, 8), np.ones((8, 8), "int8"), jax.random.split(jax.random.key(0), (8, 8))):
            got, want = constrain(x, spec, mesh=mesh), put(x, spec, mesh)
            assert placed(got, spec, mesh) and got.committed
            assert jax.typeof(got) == jax.typeof(want) and bool((got == want).all())

    def test_every_kind_of_sharding(self):
        x, device = ones(8, 8), SingleDeviceSharding(jax.devices()[3])
        assert constrain(x, device).sharding == device
        assert constrain(x, SingleDeviceSharding(jax.devices()[0])).committed and not x.committed
        host = NamedSharding(MESH, P("a"), memory_kind="pinned_host")
        for f in (lambda x: constrain(x, host), jax.jit(lambda x: constrain(x, host))):
            assert f(x).sharding.is_equivalent_to(host, 2)
        assert constrain(x, None, mesh=MESH) is x

    def test_a_mesh_in_context_is_taken(self):
        for context in (jax.set_mesh(MESH), legacy(MESH)):
            with context:
                assert placed(constrain(ones(8, 8), P("a")), P("a"))
                assert placed(jax.jit(lambda x: constrain(x, P("b")))(ones(8, 8)), P("b"))

    def test_without_a_mesh_nothing_changes(self):
        x = ones(8, 8)
        assert constrain({"x": x}, P("a"))["x"] is x

    @parameterized.parameters(*MESHES)
    def test_unconstrained_is_what_it_was(self, kind):
        mesh = MESHES[kind]
        x = put(ones(8, 8), P(None, "b"), mesh)
        assert placed(constrain(x, P("a", U), mesh=mesh), P("a", "b"), mesh)
        assert placed(constrain(x, P("b", U), mesh=mesh), P("b", None), mesh)
        assert placed(constrain(np.ones((8, 8)), P("b", U), mesh=mesh), P("b", None), mesh)

    def test_arrays_with_the_sharding_are_kept(self):
        x = constrain(ones(8, 8), P("a", None), mesh=MESH)
        assert constrain(x, P("a"), mesh=MESH) is x

    def test_pytrees(self):
        tree = {"x": ones(8, 8), "y": [np.ones(8), "text", 3, None], "z": np.array(["s"])}
        got = constrain(tree, {"x": P("a", "b"), "y": P("b"), "z": P("a")}, mesh=MESH)
        assert placed(got["x"], P("a", "b")) and placed(got["y"][0], P("b"))
        assert got["y"][1:] == ["text", 3, None] and got["z"] is tree["z"]
        with fails(ValueError, "with_sharding_constraint: these specs are not a tree", "'x'"):
            constrain(tree, {"y": P(), "z": P()}, mesh=MESH)

    def test_abstract_arrays_get_the_sharding(self):
        mesh = AbstractMesh((2, 4), ("a", "b"))
        x = jax.ShapeDtypeStruct((8, 8), "float32")
        assert constrain(x, P("a"), mesh=mesh).sharding == NamedSharding(mesh, P("a", None))
        model = nnx.eval_shape(MLP)
        constrain(model, mlp_specs("b"), mesh=mesh)
        assert model.up.kernel.get_raw_value().sharding.spec == P(None, "b")
        with fails(ValueError, "tree, shape (8,)", "abstract, without devices"):
            constrain(ones(8), P("a"), mesh=mesh)

    @parameterized.product(wrong=["a", 3, ("a",), ["a", None], {"x": "a"}, object()])
    def test_a_wrong_type_is_an_error(self, wrong):
        for mesh in (MESH, None):
            with fails(TypeError, "expected a sharding spec"):
                constrain(ones(8), wrong, mesh=mesh)
        with fails(TypeError, "mesh must be a Mesh"):
            constrain(ones(8), P("a"), mesh="a")

    def test_all_corrections_in_one_warning(self):
        tree = {"x": ones(3, 8), "y": [ones(8)], "z": ones(8, 8)}
        with pytest.warns(CorrectedSpecWarning) as caught:
            constrain(tree, P("a", "b"), mesh=MESH)
        text = str(caught[0].message)
        assert "tree['x'], shape (3, 8)" in text and "tree['y'][0], shape (8,)" in text
        assert "['z']" not in text and caught[0].filename == __file__ and len(caught) == 1
        with fails(StrictError, "'x'"):
            constrain(tree, P("a", "b"), mesh=MESH, strict=True)
        with fails(ValueError, "['x']", "used 2 times", "['y'][0]", "used 2 times"):
            constrain({"x": ones(8, 8), "y": [ones(8, 8)]}, P("a", "a"), mesh=MESH)

    @parameterized.parameters((None, "", 0), (None, "1", 1), (False, "1", 0), (True, "", 1))
    def test_moves_are_logged_when_asked(self, log, value, lines):
        expected = self.assertLogs if lines else self.assertNoLogs
        with pytest.MonkeyPatch.context() as patch, expected("nnx_sharding") as logs:
            patch.setenv("LOG_SHARDING_MOVE", value)
            x = constrain(np.ones((8, 8)), P("a"), mesh=MESH, log=log)
        if lines:
            assert "from host memory to P('a'" in logs.output[0]
        with self.assertNoLogs("nnx_sharding"):
            constrain(x, P("a", None), mesh=MESH, log=True)


class StrictTest(parameterized.TestCase):
    """``nnx_sharding.with_sharding_constraint``, which corrects nothing unless it is told to."""

    def test_what_does_not_fit_is_an_error(self):
        tree = {"v": ones(8), "w": ones(8, 8), "x": ones(3, 8), "y": ones(8), "z": ones(8, 8)}
        specs = {"v": P("a", None), "w": P("c"), "x": P("a"), "y": P("a", "b"), "z": P("a")}
        faults = ("['v']", "2 entries", "['w']", "no axis 'c'", "['x']", "divisible", "['y']")
        for transform in (lambda f: f, jax.jit, nnx_sharding.jit):
            fun = transform(lambda x: nnx_sharding.with_sharding_constraint(x, specs, mesh=MESH))
            with fails(ValueError, "with_sharding_constraint: these specs cannot be used", *faults):
                fun(tree)
        with fails(NoMeshError, "with_sharding_constraint"):
            nnx_sharding.with_sharding_constraint(tree, P())

    @parameterized.parameters("mesh", "sharding")
    def test_only_the_mesh_knows_the_devices(self, given_as):
        spec = P("a") if given_as == "mesh" else NamedSharding(MESH, P("a"))
        mesh = MESH if given_as == "mesh" else None
        constrain = nnx_sharding.with_sharding_constraint
        fun = nnx_sharding.jit(lambda x: constrain(x, spec, mesh=mesh), mesh=MESH)
        assert placed(fun(ones(8)), P("a"))

    def test_on_indivisible(self):
        x, fun = ones(4, 3), nnx_sharding.with_sharding_constraint
        for action, want in (("drop", P("b", None)), ("replicate", P())):
            with pytest.warns(CorrectedSpecWarning, match="tree, shape"):
                got = fun(x, P(("b", "a"), None), mesh=MESH, on_indivisible=action)
            assert placed(got, want)
        with fails(ValueError, "2 entries"):
            fun(ones(8), P("a", "b"), mesh=MESH, on_indivisible="drop")
        with fails(ValueError, "on_indivisible", "'pad'"):
            fun(x, P(), mesh=MESH, on_indivisible="pad")

    def test_mapped_axes(self):
        def fun(x):
            return nnx_sharding.with_sharding_constraint(x, P("a"))

        with jax.set_mesh(MESH), fails(ValueError, "mapped over 'a'"):
            jax.shard_map(fun, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})(ones(8))


class ModuleTest(parameterized.TestCase):
    def test_in_place(self):
        model = MLP()
        optimizer, kernel = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model.up.kernel
        assert constrain(model, mlp_specs("b"), mesh=MESH) is model and model.up.kernel is kernel
        assert placed(kernel, P(None, "b")) and placed(model.down.kernel, P("b"))
        with pytest.warns(CorrectedSpecWarning, match="step, shape"):
            constrain(optimizer, P("b"), mesh=MESH)
        assert placed(optimizer.opt_state[0].mu.up.kernel, P("b"))

    def test_shared_variables_bare_arrays_and_statics(self):
        model = nnx.Dict(a=nnx.Param(ones(8)), b=ones(8), c="text")
        model.d = model.a
        constrain({"m": model, "x": ones(8)}, {"m": P("a"), "x": P("b")}, mesh=MESH)
        assert model.d is model.a and placed(model.a, P("a")) and placed(model.b, P("a"))
        assert model.c == "text"

    def test_references_are_kept(self):
        tree = {"r": jax.new_ref(ones(8)), "v": nnx.Param(ones(8), hijax=True)}
        got = constrain(tree, P("a"), mesh=MESH)
        assert got["r"] is tree["r"] and got["v"] is tree["v"]
        assert isinstance(tree["r"][...].sharding, SingleDeviceSharding)

    def test_a_variable_of_a_pytree(self):
        variable = nnx.Param({"x": ones(8), "y": ones(8, 2)})
        assert constrain(variable, P("a"), mesh=MESH) is variable
        assert all(placed(x, P("a")) for x in variable.get_raw_value().values())

    def test_state_sharding(self):
        model = nnx.Dict(x=nnx.Param(ones(8)), y=nnx.BatchStat(ones(3)))
        before = model.x.get_raw_value()
        with fails(ValueError, "no filter", "tree.y"):
            constrain(model, StateSharding({nnx.Param: P("a")}), mesh=MESH)
        with fails(ValueError, "tree.y, shape (3,)", "divisible"):
            constrain(model, StateSharding({...: P("a")}, on_indivisible="error"), mesh=MESH)
        assert model.x.get_raw_value() is before
        with pytest.warns(UnusedFilterWarning, match="'y'"):
            rules = {...: P(), nnx.PathContains("y"): P("a")}
            constrain(model, StateSharding(rules), mesh=MESH)

    def test_in_traces(self):
        model = MLP()
        with fails(TraceContextError, "Param"):
            jax.jit(lambda: constrain(model, P("b"), mesh=MESH))()
        assert not isinstance(model.up.kernel.get_raw_value(), jax.core.Tracer)
        same = []
        nnx_sharding.jit(lambda m: same.append(constrain(m, mlp_specs("b"), mesh=MESH) is m))(model)
        assert same == [True] and placed(model.up.kernel, P(None, "b"))


class TraceTest(parameterized.TestCase):
    @parameterized.product(
        kind=list(MESHES), how=["context", "mesh", "own"], spec=[P("a"), P(None, "b"), P("b", "a")]
    )
    def test_jit(self, kind, how, spec):
        mesh, x = MESHES[kind], ones(8, 8)
        own = NamedSharding(mesh, spec) if how == "own" else spec
        # JAX itself wants the context for Explicit axes.
        bare = how != "context" and kind == "auto"
        with contextlib.nullcontext() if bare else jax.set_mesh(mesh):
            for jit in (jax.jit, nnx_sharding.jit):
                out = jit(lambda x: constrain(x, own, mesh=mesh if how == "mesh" else None) * 2)(x)
                assert placed(out, spec, mesh)
                np.testing.assert_array_equal(out, x * 2)

    def test_the_program_is_that_of_jax(self):
        sharding = NamedSharding(MESH, P("a", U))
        programs = [
            jax.jit(lambda x: operation(x, sharding)).lower(ones(8, 8)).as_text().splitlines()
            for operation in (constrain, jax.lax.with_sharding_constraint)
        ]
        ours, theirs = ([x for x in lines if "sharding_constraint" in x] for lines in programs)
        assert len(ours) == 1 and ours == theirs

    @parameterized.parameters(*MESHES)
    def test_unconstrained(self, kind):
        mesh = MESHES[kind]
        with jax.set_mesh(mesh):
            x = put(ones(8, 8), P(None, "b"), mesh)
            assert placed(jax.jit(lambda x: constrain(x, P("a", U)))(x), P("a", "b"), mesh)

    def test_in_a_mixed_dimension_explicit_axes_come_first(self):
        with jax.set_mesh(MESHES["mixed"]):
            out = jax.jit(lambda x: constrain(x, P(("a", "b"))))(ones(8, 8))
        assert placed(out, P(("b", "a")), MESHES["mixed"])

    @parameterized.parameters("auto", "explicit")
    def test_grad_and_vmap_compiled_or_not(self, kind):
        mesh, x = MESHES[kind], ones(8, 8)
        grad = jax.grad(lambda x: (constrain(x, P("a")) ** 2).sum())
        vmap = jax.vmap(lambda x: constrain(x, P("a")), in_axes=1, out_axes=1)
        with jax.set_mesh(mesh):
            for wrap in (jax.jit, nnx_sharding.jit, lambda f: f):
                np.testing.assert_array_equal(wrap(grad)(x), 2 * x)
                np.testing.assert_array_equal(wrap(vmap)(x), x)
                assert placed(wrap(vmap)(x), P("a"), mesh)

    @parameterized.product(kind=list(MESHES), compiled=[True, False])
    def test_manual_axes_are_left_out(self, kind, compiled):
        mesh, spec = MESHES[kind], P("a", "b")
        x = put(ones(8, 8), spec, mesh)
        f = jax.shard_map(
            lambda x: constrain(x, P(("a", "b"), U)) * 2, mesh=mesh, in_specs=spec, out_specs=spec
        )
        with jax.set_mesh(mesh), pytest.warns(CorrectedSpecWarning, match="mapped over") as caught:
            out = (jax.jit(f) if compiled else f)(x)
        assert len(caught) == 1 and "over 'b'" in str(caught[0].message)
        np.testing.assert_array_equal(out, x * 2)

    @parameterized.product(kind=["auto", "explicit"], given_mesh=[True, False])
    def test_the_other_axes_are_constrained(self, kind, given_mesh):
        mesh = MESHES[kind]
        inside = lambda x: constrain(x, P(None, "b"), mesh=mesh if given_mesh else None)  # noqa: E731
        for shard_map in (jax.shard_map, nnx_sharding.shard_map):
            f = shard_map(inside, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
            with jax.set_mesh(mesh):
                assert placed(jax.jit(f)(put(ones(8, 8), P("a"), mesh)), P("a", "b"), mesh)

    def test_constants_of_the_function(self):
        assert placed(jax.jit(lambda: constrain(np.ones((8, 8)), P("a"), mesh=MESH))(), P("a"))


class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        self.blocks = nnx.List([nnx.Linear(4, 8, rngs=nnx.Rngs(0))])


class MatchTest(parameterized.TestCase):
    rules = [("up/kernel$", P("a", "b")), ("bias", P("b")), (".*", P())]

    def test_pytrees(self):
        abstract = jax.ShapeDtypeStruct((8,), "float32")
        rest = [ones(3), np.float32(1), 2, "text", ones(1, 1)]
        tree = {"up": {"kernel": np.ones((8, 8)), "bias": abstract}, "rest": rest}
        specs = c.match_partition_rules(self.rules, tree)
        assert specs["up"] == {"kernel": P("a", "b"), "bias": P("b")}
        assert specs["rest"] == [P(), P(), P(), None, P()]

    def test_modules(self):
        for model in (Model(), nnx.eval_shape(Model)):
            specs = c.match_partition_rules(self.rules, model)
            assert specs["up"]["kernel"] == P("a", "b") and specs["blocks"][0]["kernel"] == P()
            assert specs["blocks"][0]["bias"] == P("b")
            tree = {"m": nnx.state(model), "v": model.up.bias}
            both = c.match_partition_rules(self.rules[1:], tree)
            assert both["m"]["up"]["bias"] == P("b") and both["v"] == P()
        model = Model()
        constrain(model, c.match_partition_rules(self.rules, model), mesh=MESH)
        assert placed(model.up.kernel, P("a", "b"))
        specs = c.match_partition_rules({"up": P("b"), "": P("a")}, (model, model))
        assert specs[1]["up"]["kernel"] == P("b")

    def test_sizes(self):
        rules, tree = {"": P("a")}, {"x": ones(4), "y": ones(5), "z": ones(200, 100)}
        assert c.match_partition_rules(rules, tree, 5) == {"x": P(), "y": P("a"), "z": P("a")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MIN_SHARDING_SIZE", "5")
            assert c.match_partition_rules(rules, tree)["x"] == P("a")
            assert c.match_partition_rules(rules, tree, None)["x"] == P()
            patch.delenv("MIN_SHARDING_SIZE")
            want = {"x": P(), "y": P(), "z": P("a")}
            assert c.match_partition_rules(rules, tree, None) == want

    def test_long_specs(self):
        assert c.match_partition_rules({"": P(None, "b")}, ones(8)) == P(None)
        unreduced = P(None, "b", unreduced={"a"})
        assert c.match_partition_rules({"": unreduced}, ones(8)).unreduced == {"a"}
        with fails(ValueError, "2 entries"):
            c.match_partition_rules({"": P(None, "b")}, ones(8), strict=False, mesh=MESH)

    def test_without_strict_rules_are_as_they_are(self):
        tree = {"x": ones(8), "y": 2.0, "z": "text", "u": nnx.Param(ones(4))}
        rules = [("x", P(None, "b")), ("y", P("a")), ("z", "any"), ("u", ("a", None))]
        specs = c.match_partition_rules(rules, tree, min_size=100, strict=False)
        assert specs == {"x": P(None, "b"), "y": P("a"), "z": "any", "u": ("a", None)}
        with fails(ValueError, "no rule matches", "  y, shape ()", "  z\n"):
            c.match_partition_rules({"[xu]": P()}, {**tree, "zz": "text"}, strict=False)

    def test_everything_wrong_is_named(self):
        tree = {"w": ones(8), "x": ones(4), "y": ones(3, 8), "z": ones(8), "scalar": ones(1)}
        unmatched = ("no rule matches", "  w, shape (8,)", "  x, shape (4,)")
        with fails(ValueError, *unmatched, "  y, shape (3, 8)", "divisible", "  z", "axis 'c'"):
            c.match_partition_rules({"y": P("a"), "z": P("c")}, tree, mesh=MESH)
        pair = nnx.Param((ones(8), ones(3)))
        with fails(ValueError, "size 3 is not divisible"):
            c.match_partition_rules({"": P("a")}, pair, mesh=MESH)
        with fails(TypeError, "('y'): 'a'", "write P", "('z'): 3"):
            c.match_partition_rules({"y": "a", "z": 3}, tree)
        with fails(ValueError, "'[a'", "'(b'"):
            c.match_partition_rules({"[a": P(), "(b": P()}, tree)
        with fails(TypeError, "pairs"):
            c.match_partition_rules(["up"], tree)

    def test_useless_rules(self):
        rules = [("x", P()), ("[xy]", P()), ("x$", P()), ("z", P()), (".*", P())]
        with pytest.warns(UnusedFilterWarning) as caught:
            c.match_partition_rules(rules, {"x": ones(4), "y": ones(4)})
        lines = str(caught[0].message).splitlines()[1:]
        assert lines == ["  'x$'", "  'z'"] and caught[0].filename == __file__


class ShardAndGatherTest(parameterized.TestCase):
    def test_functions_of_leaves(self):
        specs = {"x": P("a"), "y": [P(None, "b"), NamedSharding(MESH, P("b"))]}
        shard, gather = c.make_shard_and_gather_fns(specs, MESH)
        x = np.ones((8, 8))
        sharded = jax.tree.map(lambda f, x: f(x), shard, {"x": x, "y": [x, x]})
        assert placed(sharded["x"], P("a")) and placed(sharded["y"][0], P(None, "b"))
        assert placed(sharded["y"][1], P("b"))
        full = jax.tree.map(lambda f, x: f(x), gather, sharded)
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(full))
        np.testing.assert_array_equal(full["y"], [x, x])

    def test_a_tree_is_gathered_array_by_array(self):
        _, gather = c.make_shard_and_gather_fns(P("a"), MESH)
        given = {"x": put(ones(8), P("a")), "n": np.ones(8), "s": "text", "v": nnx.Param(ones(8))}
        with compilations() as compiled:
            full = gather(given)
        assert not compiled and full["s"] == "text"  # parts in host memory need no program
        assert all(type(full[key]) is np.ndarray for key in "xn")
        assert type(full["v"].get_raw_value()) is np.ndarray
        np.testing.assert_array_equal(full["x"], ones(8))

    def test_modules(self):
        model = MLP()
        by_rules = c.match_partition_rules({"up": P(None, "b"), "": P("b")}, model)
        for specs in (mlp_specs("b"), by_rules):
            constrain(model, specs, mesh=MESH)
            assert placed(model.up.kernel, P(None, "b"))

    def test_meshes(self):
        with jax.set_mesh(MESH):
            shard, _ = c.make_shard_and_gather_fns(P("a"))
        assert placed(shard(ones(8)), P("a"))
        shard, _ = c.make_shard_and_gather_fns({"x": NamedSharding(MESH, P("a"))})
        assert placed(shard["x"](ones(8)), P("a"))
        with fails(NoContextMeshError):
            c.make_shard_and_gather_fns({"x": P("a")})
        with fails(TypeError, "'x'", "'a'"):
            c.make_shard_and_gather_fns({"x": "a"}, MESH)


class ExtractTest(parameterized.TestCase):
    def test_structure(self):
        named = NamedSharding(MESH, P("a"))
        abstract = jax.ShapeDtypeStruct((8,), "float32", sharding=named)
        others = {"d": ones(8), "n": np.ones(8), "t": jax.ShapeDtypeStruct((8,), "float32")}
        tree = {"p": put(ones(8), P("a")), "q": [abstract], "s": "text", **others}
        known = {"p": named, "q": [named], "s": None}
        extract = (c.extract_sharding_structure, c.get_shardings_with_structure)
        by_name = [
            lambda x: c.extract_shardings(tree=x),
            lambda x: c.extract_shardings(tree=x, mesh=MESH),
        ]
        for function in (*extract, c.extract_shardings, *by_name):
            assert function(tree) == {**known, **dict.fromkeys(others)}

    def test_specs(self):
        tree = {"p": put(ones(8), P("a")), "q": jax.ShapeDtypeStruct((8,), "float32")}
        numbers = {"i": 1, "f": 1.5, "b": True, "n": np.ones(8), "d": ones(8), "none": None}
        specs = dict.fromkeys(numbers, P()) | {"p": P("a"), "q": P(), "none": None}
        assert c.get_partition_spec({**tree, **numbers}) == specs
        with fails(ValueError, "  c: 1j", "  o: <object", "  s: text"):
            c.get_partition_spec({"p": tree["p"], "c": 1j, "s": "text", "o": object()})

    def test_specs_become_shardings(self):
        leaf = type("Leaf", (), {"sharding": P("b")})()
        tree, want = {"x": P("a"), "y": [leaf], "z": ones(8)}, NamedSharding(MESH, P("a"))
        for mesh, context in ((MESH, contextlib.nullcontext()), (None, jax.set_mesh(MESH))):
            with context:
                found = c.extract_shardings(tree, mesh)
            assert found == {"x": want, "y": [NamedSharding(MESH, P("b"))], "z": None}
        for error in (ValueError, AssertionError):
            with fails(error, "no mesh in context"):
                c.extract_shardings(tree)

    def test_modules(self):
        model, other = MLP(), MLP()
        found = c.get_shardings_with_structure(model)
        assert jax.tree.leaves(found) == [] and found["up"]["kernel"] is None
        found = c.get_shardings_with_structure(constrain(model, mlp_specs("b"), mesh=MESH))
        assert found["up"]["kernel"] == NamedSharding(MESH, P(None, "b"))
        assert c.get_partition_spec({"m": model})["m"]["down"]["kernel"] == P("b", None)
        constrain(other, found)
        assert c.extract_sharding_structure(other) == found
        pair = nnx.Param((put(ones(8), P("a")), put(ones(8), P("b"))))
        with fails(ValueError, "the root"):
            c.extract_sharding_structure(pair)

    def test_in_a_trace(self):
        seen = []
        with jax.set_mesh(MESHES["explicit"]):
            jax.jit(lambda x: seen.append(c.get_partition_spec(x)))(constrain(ones(8), P("a")))
        assert seen == [P("a")]

    def test_names(self):
        names = c.get_names_from_partition_spec
        specs = {"x": P(None, ("a", "b"), U), "y": [("c", (None, "a")), "d"], "z": None}
        assert names(specs) == ["a", "b", "c", "d"]
        assert names(P()) == [] and names(NamedSharding(MESH, P("b"))) == ["b"]
        assert names(mlp_specs("m")) == ["m"]
        assert names(c.get_partition_spec(constrain(MLP(), P("b"), mesh=MESH))) == ["b"]
        with fails(TypeError, "3 is not a PartitionSpec"):
            names({"x": 3})


class PatternTest(parameterized.TestCase):
    def test_rules(self):
        spec_of = c.create_pattern_based_partition_spec("attention|mlp->data,hidden->model")
        x = ones(4, 4)
        assert spec_of("layer/attention/q", x) == spec_of("mlp", x) == P("data")
        assert spec_of("hidden", x) == P("model") and spec_of("other", x) == P()
        assert spec_of("mlp", 1.0) == P()
        spec_of = c.create_pattern_based_partition_spec("up->dp.tp,down->None.data+model")
        assert spec_of("up", x) == P("dp", "tp") and spec_of("up", x[0]) == P("dp")
        assert spec_of("down", x) == P(None, ("data", "model"))
        text = "up -> None, data+model , down$->model,None,b"
        spec_of = c.create_pattern_based_partition_spec(text, default_spec=P("z", "y"))
        assert spec_of("up", x) == P(None, ("data", "model")) and spec_of("rest", x[0]) == P("z")
        assert spec_of("down", x) == P("model", None)

    def test_mistakes(self):
        texts = ("", "data", "->data", "up->", "up->data,,", "a,up->data", "up->a+", "up->+")
        for wrong in (*texts, "up->a..b", "up->."):
            with fails(ValueError, "expected rules such as", f"in {wrong!r}"):
                c.create_pattern_based_partition_spec(wrong)
        with fails(ValueError, "no axis 'dtaa'; did you mean 'data'", "'z'"):
            c.create_pattern_based_partition_spec("up->dtaa,x->z", mesh_of((8,), ("data",)))


class AnalysisTest(parameterized.TestCase):
    def test_numbers(self):
        tree = {"x": np.ones((8, 8), "float32"), "y": np.ones(16, "float32"), "z": 1.5, "s": "text"}
        specs = {"x": P("a", "b"), "y": P(), "z": None, "s": None}
        for mesh in (MESH, MESH.abstract_mesh):
            found = c.analyze_sharding_strategy(tree, specs, mesh)
            assert found["total_parameters"] == 81 and found["sharded_parameters"] == 64
            assert found["memory_per_device"] == dict.fromkeys(range(8), 256 // 8 + 64)
            assert found["balance_score"] == 1.0
            stats = {"arrays": 1, "parameters": 64, "bytes": 256, "bytes_per_device": 32}
            assert found["partition_stats"][P("a", "b")] == stats

    def test_a_mapping_from_paths(self):
        model, specs = MLP(), {"up/kernel": P(None, "b"), "down/kernel": P("b")}
        found = c.analyze_sharding_strategy({"m": model}, {f"m/{k}": specs[k] for k in specs}, MESH)
        assert found == c.analyze_sharding_strategy(model, specs, MESH)
        assert found["sharded_parameters"] == found["total_parameters"] == 128
        tree = {"x": ones(8), "y": {"z": ones(8)}}
        half = c.analyze_sharding_strategy(tree, {"x": P("a"), "y/z": None}, MESH)
        assert half["sharded_parameters"] == 8
        assert half == c.analyze_sharding_strategy(tree, {"x": P("a"), "y": {"z": None}}, MESH)
        flat = {"y/x": {"z": ones(8)}}
        assert c.analyze_sharding_strategy(flat, {"y/x": P("a")}, MESH)["sharded_parameters"] == 8
        with fails(ValueError, "tree['y']['z']", "y/w"):
            c.analyze_sharding_strategy(tree, {"x": P("a"), "y/w": None}, MESH)
        with fails(ValueError, "down.kernel"):
            c.analyze_sharding_strategy(model, {"up/kernel": P()}, MESH)

    def test_imbalance(self):
        one = SingleDeviceSharding(jax.devices()[0])
        found = c.analyze_sharding_strategy(ones(16), one, MESH)
        assert found["memory_per_device"] == {0: 64} | dict.fromkeys(range(1, 8), 0)
        assert found["balance_score"] == 1 / 8
        assert c.analyze_sharding_strategy({}, P(), MESH)["balance_score"] == 1.0
        half = NamedSharding(mesh_of((4,), ("c",)), P("c"))
        found = c.analyze_sharding_strategy(
            {"x": ones(16), "y": np.ones(3)}, {"x": half, "y": None}
        )
        assert found["memory_per_device"] == dict.fromkeys(range(4), 16)

    def test_a_model_is_not_touched(self):
        model = nnx.eval_shape(MLP)
        with jax.set_mesh(MESH):
            found = c.analyze_sharding_strategy(model, mlp_specs("b"))
        assert found["sharded_parameters"] == found["total_parameters"] == 128
        assert model.up.kernel.get_raw_value().sharding is None
        with fails(NoContextMeshError):
            c.analyze_sharding_strategy(model, mlp_specs("b"))
