"""``trace``, ``lower``, ``compile``: all of ``jax.stages``, in the trees of the user."""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, SingleDeviceSharding

from nnx_sharding import StateSharding, jit, shard_map, stages, testing
from nnx_sharding.transforms import figures
from zoo import (
    MLP,
    Counter,
    Net,
    P,
    assert_same,
    assert_same_state,
    compilations,
    fails,
    mesh_of,
    mlp_specs,
    values,
)

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def mesh8():
    return mesh_of((8,), ("model",))


def apply(model, x):
    return {"y": model(x)}


def flat_apply(model, x):
    """The same program on a State-shaped pytree of arrays."""
    hidden = jax.nn.relu(x @ model["up"]["kernel"])
    return {"y": hidden @ model["down"]["kernel"]}


def state():
    model = MLP()
    return nnx.State(
        {"up": {"kernel": model.up.kernel[...]}, "down": {"kernel": model.down.kernel[...]}}
    )


def train(model, x, n):
    """Updates one Variable, leaves one alone, adds one; ``n`` is static."""
    model.up.kernel[...] += n
    return model(x) * n


def names_of(stage):
    return [name for name in dir(stage) if not name.startswith("_")]


def stages_of(fun, *args, **kwargs):
    traced = fun.trace(*args, **kwargs)
    lowered = traced.lower()
    return {"Traced": traced, "Lowered": lowered, "Compiled": lowered.compile()}


class NamesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{kind}_{stage}", kind, stage)
        for kind, stage in itertools.product(
            ("jit", "shard_map"), ("Traced", "Lowered", "Compiled")
        )
    )
    def test_every_public_name_of_jax_exists_and_answers(self, kind, name):
        if kind == "jit":
            fun = jit(apply)
        else:
            fun = shard_map(apply, mesh=mesh8(), in_specs=(P(), P("model")), out_specs=P("model"))
        ours = stages_of(fun, MLP(), X)[name]
        self.assertIsInstance(ours, getattr(stages, name))
        theirs = stages_of(jax.jit(flat_apply), state(), X)[name]
        missing = [n for n in names_of(getattr(jax.stages, name)) if not hasattr(ours, n)]
        self.assertEqual(missing, [])
        for attribute in names_of(theirs):
            value = getattr(theirs, attribute)
            self.assertEqual(callable(getattr(ours, attribute)), callable(value), attribute)


def strip(aval):
    """Shape, dtype and weak type, for whatever JAX describes an array with."""
    return (tuple(aval.shape), np.dtype(aval.dtype), getattr(aval, "weak_type", None))


class EqualToJaxTest(parameterized.TestCase):
    """What a stage says is what JAX says of the same program over a State of arrays."""

    OPTIONS = {
        "plain": {},
        "donated": {"donate_argnums": 0},
        "kept": {"keep_unused": True},
    }

    def both(self, name, options="plain"):
        options = self.OPTIONS[options]
        ours = stages_of(jit(apply, **options), MLP(), X)[name]
        theirs = stages_of(jax.jit(flat_apply, **options), state(), X)[name]
        return ours, theirs

    STAGES = ("Traced", "Lowered", "Compiled")

    @parameterized.parameters(*STAGES)
    def test_trees(self, name):
        ours, theirs = self.both(name)
        self.assertEqual(ours.in_tree, theirs.in_tree)
        self.assertEqual(ours.out_tree, theirs.out_tree)

    @parameterized.parameters(*itertools.product(STAGES, ("plain", "kept")))
    def test_args_info(self, name, options):
        ours, theirs = self.both(name, options)
        self.assertEqual(jax.tree.structure(ours.args_info), jax.tree.structure(theirs.args_info))
        for a, b in zip(
            jax.tree.leaves(ours.args_info), jax.tree.leaves(theirs.args_info), strict=False
        ):
            self.assertEqual((a.shape, a.dtype, a.donated), (b.shape, b.dtype, b.donated))

    @parameterized.parameters(*STAGES)
    def test_donated(self, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX finds no output that could reuse the buffers
            theirs = stages_of(jax.jit(flat_apply, donate_argnums=0), state(), X)[name]
        ours = stages_of(jit(apply, donate_argnums=0), MLP(), X)[name]
        self.assertEqual(ours.donate_argnums, theirs.donate_argnums)
        donated = jax.tree.map(lambda info: info.donated, ours.args_info)
        self.assertEqual(jax.tree.leaves(donated[0][0]), [True, True])
        self.assertEqual(jax.tree.leaves(donated[0][1]), [False])

    @parameterized.parameters(*STAGES)
    def test_avals_and_out_info(self, name):
        ours, theirs = self.both(name)
        for attribute in ("in_avals", "out_info") + (("out_avals",) if name == "Traced" else ()):
            a, b = getattr(ours, attribute), getattr(theirs, attribute)
            self.assertEqual(jax.tree.structure(a), jax.tree.structure(b), attribute)
            self.assertEqual(
                [strip(x) for x in jax.tree.leaves(a)],
                [strip(x) for x in jax.tree.leaves(b)],
                attribute,
            )
            self.assertEqual(
                {type(x) for x in jax.tree.leaves(a)}, {type(x) for x in jax.tree.leaves(b)}
            )

    def test_names_of_the_traced(self):
        ours, theirs = self.both("Traced")
        self.assertEqual(ours.fun_name, "apply")
        self.assertEqual(theirs.fun_name, "flat_apply")
        self.assertEqual(sorted(ours.arg_names), ["model.down.kernel", "model.up.kernel", "x"])

    def test_jaxpr(self):
        ours, theirs = self.both("Traced")
        count = lambda jaxpr: [e.primitive.name for e in jaxpr.jaxpr.eqns]  # noqa: E731
        self.assertEqual(
            [n for n in count(ours.jaxpr) if n == "dot_general"],
            [n for n in count(theirs.jaxpr) if n == "dot_general"],
        )
        self.assertIs(type(ours.jaxpr), type(theirs.jaxpr))
        self.assertLen(ours.jaxpr.jaxpr.invars, len(ours.arg_names))

    def test_jaxpr_arguments_are_in_the_order_of_the_names(self):
        traced = jit(lambda model, x: None).trace(MLP(hidden=32), X)
        shapes = dict(
            zip(traced.arg_names, (v.aval.shape for v in traced.jaxpr.jaxpr.invars), strict=False)
        )
        self.assertEqual(
            shapes, {"model.up.kernel": (4, 32), "model.down.kernel": (32, 4), "x": (8, 4)}
        )

    @parameterized.parameters(None, "stablehlo", "hlo")
    def test_text_of_the_lowered(self, dialect):
        ours, theirs = self.both("Lowered")
        for text in (ours.as_text(dialect), theirs.as_text(dialect)):
            self.assertEqual(text.count("stablehlo.dot_general") or text.count("dot("), 2)

    def test_unknown_dialect(self):
        for lowered in self.both("Lowered"):
            with self.assertRaises((ValueError, NotImplementedError)):
                lowered.as_text("cobol")

    def test_debug_info_has_the_users_names(self):
        ours, _ = self.both("Lowered")
        text = ours.as_text(debug_info=True)
        for name in ("model.up.kernel", "model.down.kernel", '"x"', "test_stages.py"):
            self.assertIn(name, text)
        self.assertNotIn("test_stages.py", ours.as_text())

    @parameterized.parameters(None, "stablehlo", "hlo")
    def test_compiler_ir(self, dialect):
        ours, theirs = self.both("Lowered")
        self.assertIs(type(ours.compiler_ir(dialect)), type(theirs.compiler_ir(dialect)))

    def test_cost_analysis(self):
        for name in ("Lowered", "Compiled"):
            ours, theirs = self.both(name)
            costs = [stage.cost_analysis() for stage in (ours, theirs)]
            own, other = (cost and cost["flops"] for cost in costs)  # None: before, on GPUs
            self.assertEqual(own, other)

    def test_memory_analysis(self):
        ours, theirs = self.both("Compiled")
        for field in ("argument_size_in_bytes", "output_size_in_bytes"):
            self.assertEqual(
                getattr(ours.memory_analysis(), field), getattr(theirs.memory_analysis(), field)
            )

    def test_text_of_the_compiled(self):
        ours, theirs = self.both("Compiled")
        self.assertEqual(ours.as_text().count(" dot("), theirs.as_text().count(" dot("))

    def test_runtime_executable(self):
        ours, theirs = self.both("Compiled")
        self.assertIs(type(ours.runtime_executable()), type(theirs.runtime_executable()))

    def test_the_program_is_parsed_once(self):
        compiled = jit(apply, in_shardings=(mlp_specs("model"), None), mesh=mesh8())
        compiled = compiled.lower(MLP(), X).compile()
        with absltest.mock.patch.object(figures, "parse", wraps=figures.parse) as parse:
            collectives, cost = compiled.collectives(), compiled.cost()
            roofline = compiled.roofline("TPU v5e")
            testing.assert_no_collective(compiled, "all-to-all")
            testing.assert_bytes_sent_below(compiled, "1 GiB")
            named = compiled.report("named", hardware="TPU v5e")
        self.assertEqual(parse.call_count, 1)
        self.assertEqual((named.collectives, named.cost), (collectives, cost))
        self.assertEqual((named.name, named.roofline), ("named", roofline))
        self.assertEqual((compiled.report().name, compiled.report().roofline), ("apply", None))
        compiled.parameters().clear()
        self.assertLen(compiled.report().parameters, 3)

    def test_layouts(self):
        ours, theirs = self.both("Compiled")
        for attribute in ("input_shardings", "output_shardings", "input_formats", "output_formats"):
            self.assertEqual(getattr(ours, attribute), getattr(theirs, attribute), attribute)

    def test_declared_layouts(self):
        mesh = mesh8()
        up, down, r = (NamedSharding(mesh, s) for s in (P(None, "model"), P("model", None), P()))
        ours = jit(apply, in_shardings=(mlp_specs(), None), out_shardings=P(), mesh=mesh)
        specs = nnx.State({"up": {"kernel": up}, "down": {"kernel": down}})
        theirs = jax.jit(flat_apply, in_shardings=(specs, None), out_shardings=r)
        a, b = (f.lower(m, X).compile() for f, m in ((ours, MLP()), (theirs, state())))
        self.assertEqual(a.input_shardings, b.input_shardings)
        self.assertEqual(a.output_shardings, b.output_shardings)
        self.assertEqual(a.input_formats, b.input_formats)
        self.assertEqual(a.output_formats, b.output_formats)

    def test_unused_arguments(self):
        for keep in (True, False):
            ours = jit(lambda m, x: x, keep_unused=keep).lower(MLP(), X).compile()
            theirs = jax.jit(lambda m, x: x, keep_unused=keep).lower(state(), X).compile()
            self.assertEqual(ours.input_shardings, theirs.input_shardings)
            self.assertEqual(ours.args_info[0][0]["up"]["kernel"].shape, (4, 16))

    def test_out_info_with_layout(self):
        mesh = mesh8()
        sharding = NamedSharding(mesh, P("model"))
        for fun, args in ((jit, (MLP(), X)), (jax.jit, (state(), X))):
            body = apply if fun is jit else flat_apply
            info = fun(body, out_shardings=sharding).lower(*args).out_info
            self.assertEqual(info["y"].sharding, sharding)

    @parameterized.parameters("cuda", "tpu", "cpu")
    def test_other_platforms(self, platform):
        ours = jit(apply).trace(MLP(), X).lower(lowering_platforms=(platform,))
        theirs = jax.jit(flat_apply).trace(state(), X).lower(lowering_platforms=(platform,))
        self.assertEqual(ours.as_text().count("dot_general"), theirs.as_text().count("dot_general"))

    def test_several_platforms(self):
        lowered = jit(apply).trace(MLP(), X).lower(lowering_platforms=("cpu", "tpu"))
        self.assertIn("platform", lowered.as_text())

    def test_compiler_options(self):
        lowered = jit(apply).lower(MLP(), X)
        compiled = lowered.compile({"xla_embed_ir_in_executable": True})
        np.testing.assert_allclose(compiled(MLP(), X)["y"], MLP()(X), rtol=1e-5)
        with self.assertRaisesRegex(Exception, "no_such_option"):
            lowered.compile(compiler_options={"no_such_option": 1})

    def test_an_operation_that_cannot_be_lowered(self):
        """The error is that of the operation, and says nothing of the arguments."""
        operation = Primitive("operation")
        operation.def_abstract_eval(lambda x: x)

        def refuse(context, x):
            raise TypeError("no attribute of this type")

        mlir.register_lowering(operation, refuse)
        traced = jit(operation.bind).trace(X)
        with self.assertRaisesRegex(TypeError, "^no attribute of this type$"):
            traced.lower()

    def test_device_assignment(self):
        mesh = jax.sharding.AbstractMesh((8,), ("model",))
        x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("model")))
        body = lambda x: x * 2  # noqa: E731
        ours, theirs = (
            d(body)
            .trace(x)
            .lower(lowering_platforms=("cpu",))
            .compile(device_assignment=tuple(jax.devices()))
            for d in (jit, jax.jit)
        )
        self.assertEqual(ours.input_shardings, theirs.input_shardings)

    def test_wrong_compile_arguments(self):
        lowered = jit(apply).lower(MLP(), X)
        with self.assertRaises(TypeError):
            lowered.compile(no_such_argument=1)


class TreesTest(parameterized.TestCase):
    """The trees of the user: modules are States by path, everything else is itself."""

    def test_several_modules_and_containers(self):
        fun = jit(lambda tree, *, scale: tree["m"][0](X) * scale)
        traced = fun.trace({"m": [MLP(), nnx.Param(jnp.ones(3))], "none": None}, scale=2.0)
        args, kwargs = traced.args_info
        self.assertEqual(args[0]["m"][0]["up"]["kernel"].shape, (4, 16))
        self.assertIsInstance(args[0]["m"][0], nnx.State)
        self.assertEqual(args[0]["m"][1].shape, (3,))
        self.assertIsNone(args[0]["none"])
        self.assertEqual(kwargs["scale"].shape, ())

    def test_statics_are_no_inputs(self):
        for options in ({"static_argnums": 2}, {"static_argnames": "n"}):
            ours = jit(train, **options).trace(MLP(), X, 2)
            theirs = jax.jit(lambda m, x, n: x, static_argnums=2).trace(state(), X, 2)
            self.assertEqual(ours.in_tree, theirs.in_tree)

    def test_new_module_as_output(self):
        traced = jit(lambda: {"model": MLP(), "x": 1.0}).trace()
        self.assertIsInstance(traced.out_info["model"], nnx.State)
        self.assertEqual(traced.out_info["model"]["up"]["kernel"].shape, (4, 16))
        self.assertEqual(traced.out_avals["x"].shape, ())
        self.assertEqual(traced.out_tree, jax.tree.structure(traced.out_info))

    def test_returned_input(self):
        mesh = mesh8()
        model = jit(lambda: MLP(), out_shardings=mlp_specs(), mesh=mesh)()
        compiled = jit(lambda m, x: (m, m.up(x))).lower(model, X).compile()
        info, _ = compiled.out_info
        self.assertEqual(info["up"]["kernel"].shape, (4, 16))
        self.assertEqual(
            compiled.output_shardings[0]["up"]["kernel"], NamedSharding(mesh, P(None, "model"))
        )

    def test_updates_info(self):
        traced = jit(train, static_argnums=2).trace(MLP(), X, 2)
        updates = traced.updates_info
        self.assertEqual(updates[0][0]["up"]["kernel"].shape, (4, 16))
        self.assertEqual(len(jax.tree.leaves(updates)), 1)

    def test_updates_of_pytrees(self):
        """Also where a Variable has no array, or only some of its arrays change."""

        def replace_last(model, x):
            model.pair.set_value((model.pair.get_value()[0], x))

        model = nnx.Dict(none=nnx.Variable(None), pair=nnx.Variable((X, X)))
        (info, _), _ = jit(replace_last).trace(model, X).updates_info
        self.assertEqual(list(info), ["pair"])
        self.assertIsNone(info["pair"][0])
        self.assertEqual(info["pair"][1].shape, X.shape)

    def test_nothing_as_output(self):
        traced = jit(lambda m: None).trace(MLP())
        self.assertIsNone(traced.out_info)
        self.assertEqual(traced.out_tree, jax.tree.structure(None))

    def test_rngs(self):
        traced = jit(lambda rngs: jax.random.normal(rngs(), (2,))).trace(nnx.Rngs(0))
        self.assertIn("rngs.default.count", traced.arg_names)
        self.assertIn("rngs.default.key", traced.arg_names)

    def test_repr_says_what_it_is(self):
        for name, stage in stages_of(jit(apply), MLP(), X).items():
            self.assertIn(name, repr(stage))
            self.assertIn("apply", repr(stage))


class CallTest(parameterized.TestCase):
    """A compiled function does what the function does."""

    @parameterized.parameters("Traced", "Compiled")
    def test_updates_in_place(self, name):
        model, plain = Counter(), Counter()
        stage = stages_of(jit(lambda m, x: m(x)), model, 1.0)[name]
        self.assertEqual(int(model.count[...]), 0)
        for _ in range(3):
            self.assertEqual(float(stage(model, 1.0)), float(plain(1.0)))
        self.assertEqual(int(model.count[...]), 3)

    def test_equals_the_jitted_call(self):
        fun = jit(lambda net, x: net(x))
        one, two = Net(), Net()
        x = jnp.ones((8, 8))
        compiled = fun.lower(one, x).compile()
        for _ in range(2):
            np.testing.assert_allclose(compiled(one, x), fun(two, x), rtol=1e-6)
        assert_same_state(self, one, two, rtol=1e-6)

    def test_structural_updates(self):
        def grow(model):
            model.extra = nnx.Param(jnp.ones(3))
            model.flag = "set"
            del model.down
            return model

        model = MLP()
        compiled = jit(grow).lower(model).compile()
        self.assertFalse(hasattr(model, "extra"))
        self.assertIs(compiled(model), model)
        self.assertEqual(model.flag, "set")
        self.assertFalse(hasattr(model, "down"))
        np.testing.assert_array_equal(model.extra[...], np.ones(3))

    def test_kwargs(self):
        compiled = jit(apply).lower(MLP(), x=X).compile()
        np.testing.assert_allclose(compiled(MLP(), x=X)["y"], MLP()(X), rtol=1e-5)
        with self.assertRaises(TypeError):
            compiled(MLP(), X)

    @parameterized.named_parameters(
        ("given", lambda c, m: c(m, X, 2)),
        ("left_out", lambda c, m: c(m, X)),
    )
    def test_positional_statics(self, call):
        for options in ({"static_argnums": 2}, {"static_argnames": "n"}):
            compiled = jit(train, **options).lower(MLP(), X, 2).compile()
            one, two = MLP(), MLP()
            np.testing.assert_allclose(call(compiled, one), jit(train, **options)(two, X, 2))
            assert_same_state(self, one, two)

    @parameterized.named_parameters(
        ("given", lambda c, m: c(m, X, n=2)), ("left_out", lambda c, m: c(m, X))
    )
    def test_keyword_statics(self, call):
        compiled = jit(train, static_argnames="n").lower(MLP(), X, n=2).compile()
        np.testing.assert_allclose(call(compiled, MLP()), train(MLP(), X, 2), rtol=1e-5)

    def test_first_static_left_out(self):
        fun = jit(lambda n, x: x * n, static_argnums=0)
        ours = fun.lower(3, X).compile()
        theirs = jax.jit(lambda n, x: x * n, static_argnums=0).lower(3, X).compile()
        assert_same(self, ours(X), theirs(X))
        assert_same(self, ours(3, X), theirs(X))

    def check_refused(self, names, compiled, *args, **kwargs):
        with fails(TypeError, *names):
            compiled(*args, **kwargs)

    def test_another_static_argument_is_refused(self):
        compiled = jit(train, static_argnums=2).lower(MLP(), X, 2).compile()
        self.check_refused(["n", "2", "3"], compiled, MLP(), X, 3)
        compiled = jit(train, static_argnames="n").lower(MLP(), X, n=2).compile()
        self.check_refused(["n", "2", "3"], compiled, MLP(), X, n=3)

    def test_another_static_attribute_is_refused(self):
        net = Net()
        compiled = jit(lambda net, x: net(x)).lower(net, np.ones((8, 8))).compile()
        net.dropout.deterministic = True
        before = values(net)
        self.check_refused(
            ["net.dropout.deterministic", "False", "True"], compiled, net, np.ones((8, 8))
        )
        for path, value in values(net).items():
            np.testing.assert_array_equal(value, before[path])

    def test_another_structure_is_refused(self):
        compiled = jit(apply).lower(MLP(), X).compile()
        model = MLP()
        model.extra = nnx.Param(jnp.ones(1))
        self.check_refused(["model.extra"], compiled, model, X)
        self.check_refused(["model"], compiled, Counter(), X)
        self.check_refused([], compiled, MLP())
        self.check_refused([], compiled, MLP(), X, 1)
        self.check_refused([], compiled, MLP(), X, z=1)

    def test_other_metadata_is_refused(self):
        compiled = jit(apply).lower(MLP(), X).compile()
        model = MLP()
        model.up.kernel.set_metadata(note="new")
        self.check_refused(["model.up.kernel", "note"], compiled, model, X)

    def test_other_sharing_is_refused(self):
        fun = jit(lambda a, b: a[...] + b[...])
        compiled = fun.lower(nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))).compile()
        variable = nnx.Param(jnp.ones(2))
        self.check_refused(["b"], compiled, variable, variable)

    @parameterized.named_parameters(
        ("shape", jnp.ones((5, 16))),
        ("rank", jnp.ones((4, 16, 1))),
        ("dtype", jnp.ones((4, 16), jnp.bfloat16)),
    )
    def test_other_shapes_are_refused(self, kernel):
        compiled = jit(apply).lower(MLP(), X).compile()
        model = MLP()
        model.up.kernel.set_raw_value(kernel)
        self.check_refused(["model.up.kernel"], compiled, model, X)

    def test_other_shape_of_an_array_is_refused(self):
        compiled = jit(apply).lower(MLP(), X).compile()
        self.check_refused(["x"], compiled, MLP(), X[:4])

    def test_inside_of_a_trace_is_refused_as_in_jax(self):
        ours, theirs = (d(lambda x: x * 2).lower(1.0).compile() for d in (jit, jax.jit))
        for compiled in (ours, theirs):
            with self.assertRaises(TypeError):
                jax.jit(compiled)(1.0)

    def test_layouts_are_brought_about(self):
        mesh = mesh8()
        compiled = jit(apply, in_shardings=(mlp_specs(), None), mesh=mesh).lower(MLP(), X).compile()
        model = MLP()
        np.testing.assert_allclose(compiled(model, X)["y"], MLP()(X), rtol=1e-5, atol=1e-6)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(mesh, P(None, "model")))
        model.down.kernel.set_raw_value(
            jax.device_put(model.down.kernel[...], NamedSharding(mesh, P()))
        )
        with self.assertRaises(ValueError):
            compiled(model, X)

    def test_call_as_a_function(self):
        compiled = jit(lambda x: x * 2).lower(1.0).compile()
        self.assertEqual(float(type(compiled).call(compiled, 3.0)), 6.0)


def batches(mesh):
    """Batches of every kind that a function may be called with."""
    rows = NamedSharding(mesh, P("data"))
    return {
        "uncommitted": jnp.asarray(X),
        "one_device": jax.device_put(X, mesh.devices.flat[0]),
        "rows": jax.device_put(X, rows),
        "replicated": jax.device_put(X, NamedSharding(mesh, P())),
        "numpy": X,
        "numpy_of_64_bits": X.astype(np.float64),
        "number": 2.0,
        "weak": jnp.asarray(2.0),
        "abstract_rows": jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows),
    }


class AheadOfTimeTest(parameterized.TestCase):
    """What ``lower(...).compile()`` compiles is what a call with these arguments runs."""

    def setUp(self):
        super().setUp()
        self.compiled = self.enterContext(compilations())

    @parameterized.product(
        kind=(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit),
        specs=("none", "model", "all", "auto_axes"),
        donated=(None, (0, 1)),
    )
    def test_a_call_compiles_nothing_more(self, kind, specs, donated):
        mesh = jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2, devices=jax.devices()[:4])
        model_specs = StateSharding(
            {nnx.PathContains("up"): P(None, "model"), nnx.PathContains("down"): P("model", None)}
        )
        options = {"none": {}, "model": {"in_shardings": (model_specs, None), "mesh": mesh}}
        options["all"] = {"in_shardings": (model_specs, P("data")), "mesh": mesh}
        options["auto_axes"] = {**options["all"], "auto_axes": True, "out_shardings": P()}
        activations = {} if specs in ("none", "auto_axes") else {"down": P()}
        for name, batch in batches(mesh).items():
            if np.ndim(batch) == 0 and specs in ("all", "auto_axes"):
                continue  # a scalar has no rows
            if (name == "one_device" and specs != "none") or (
                name == "replicated" and specs in ("all", "auto_axes")
            ):
                continue  # refused
            with self.subTest(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some donated buffers have no use
                model = MLP()
                self.compiled.clear()

                def ahead(model, x):
                    return model(jnp.ones((8, 4)) * x)

                common = {"donate_argnums": donated, "activation_shardings": activations}
                fun = jit(ahead, **common, **options[specs])
                fun.lower(model, batch).compile()
                self.assertEqual(self.compiled.count("jit(ahead)"), 1)
                if isinstance(batch, jax.ShapeDtypeStruct):
                    batch = jax.device_put(X, batch.sharding)
                self.compiled.clear()
                fun(model, batch)
                self.assertNotIn("jit(ahead)", self.compiled)  # placing arrays may compile

    def assert_compiled_ahead(self, transform, model, x):
        def ahead(model, x):
            return model(x)

        fun = transform(ahead)
        compiled = fun.lower(model, x).compile()
        self.compiled.clear()
        y = fun(model, x)
        self.assertNotIn("jit(ahead)", self.compiled)
        np.testing.assert_array_equal(compiled(model, x), y)

    @parameterized.product(
        kind=("auto", "explicit"),
        batch=("uncommitted", "one_device", "rows", "replicated", "numpy", "other_mesh"),
    )
    def test_arrays_that_a_call_moves(self, kind, batch):
        mesh, other = mesh_of((2, 2), ("data", "model"), kind), mesh_of((4,), ("d",), kind)
        elsewhere = jax.device_put(X, NamedSharding(other, P("d")))
        x = {**batches(mesh), "other_mesh": elsewhere}[batch]
        options = {"in_shardings": (P(), P("data")), "mesh": mesh, "on_committed": "move"}
        model = MLP()
        kernel = jax.device_put(model.up.kernel[...], NamedSharding(other, P("d")))
        model.up.kernel.set_value(kernel)
        self.assert_compiled_ahead(jit(**options), model, x)

    @parameterized.product(
        kind=("auto", "explicit"), batch=("uncommitted", "rows", "numpy", "numpy_of_64_bits")
    )
    def test_shard_map(self, kind, batch):
        mesh = mesh_of((2, 2), ("data", "model"), kind)
        transform = shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        self.assert_compiled_ahead(transform, MLP(), batches(mesh)[batch])

    def test_abstract_arguments_with_declared_shardings(self):
        mesh = mesh_of((2, 4), ("data", "model"))
        fun = jit(apply, in_shardings=(P(), P("data")), mesh=mesh)
        abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
        one, other = (
            fun.lower(MLP(), x)
            for x in (abstract, jax.device_put(X, NamedSharding(mesh, P("data"))))
        )
        self.assertEqual(one.as_text(), other.as_text())
        one, other = one.compile(), other.compile()
        self.assertEqual(one.input_shardings, other.input_shardings)
        self.assertEqual(one.output_shardings, other.output_shardings)

    @parameterized.parameters("Auto", "Explicit")
    def test_other_shardings_than_compiled(self, kind):
        kinds = (jax.sharding.AxisType[kind],) * 2
        mesh = jax.make_mesh((2, 4), ("data", "model"), kinds)
        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
        rows = {f"x{i}": x for i in range(7)}
        compiled = jit(lambda model, rows: model(sum(rows.values()))).lower(MLP(), rows).compile()
        moved = jax.device_put(X, NamedSharding(mesh, P(("data", "model"))))
        with self.assertRaises(ValueError) as caught:
            compiled(MLP(), dict.fromkeys(rows, moved))
        text = str(caught.exception)
        self.assertIn("was compiled for other shardings than these arguments have:", text)
        for name in rows:
            self.assertRegex(
                text,
                rf"rows\['{name}'\], .*: is P\(\('data', 'model'\),\), compiled for P\('data',\)",
            )
        np.testing.assert_allclose(compiled(MLP(), dict.fromkeys(rows, X)), MLP()(7 * X), 1e-3)

    def test_another_sharding_than_declared(self):
        mesh = mesh_of((2, 4), ("data", "model"))
        fun = jit(apply, in_shardings=(P(), P("data")), mesh=mesh)
        compiled = fun.lower(MLP(), jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
        with self.assertRaisesRegex(ValueError, r"x, .*: is P\('model',\), declared P\('data',\)"):
            compiled(MLP(), jax.device_put(X, NamedSharding(mesh, P("model"))))


class BoundTest(parameterized.TestCase):
    def test_decorated_method(self):
        class Model(Counter):
            @jit
            def double(self, x):
                return 2 * self(x)

            @jit(static_argnums=2)
            def times(self, x, n):
                return n * self(x)

        model = Model()
        self.assertEqual(float(model.double.lower(1.0).compile()(1.0)), 6.0)
        self.assertEqual(model.double.trace(1.0).fun_name, "double")
        self.assertEqual(model.double.eval_shape(1.0).dtype, jnp.float32)
        compiled = model.times.lower(1.0, 3).compile()
        self.assertEqual(float(compiled(1.0, 3)), 12.0)
        self.assertEqual(float(compiled(1.0)), 15.0)
        self.assertEqual(int(model.count[...]), 3)
        self.assertEqual(float(Model.times(model, 1.0, 1)), 6.0)

    def test_bound_shard_map(self):
        class Model(MLP):
            @shard_map(mesh=mesh8(), in_specs=(mlp_specs(), P()), out_specs=P())
            def mapped(self, x):
                return jax.lax.psum(self(x), "model")

        model = Model()
        compiled = model.mapped.lower(X).compile()
        np.testing.assert_allclose(compiled(X), MLP()(X), rtol=1e-5, atol=1e-6)


class AbstractTest(parameterized.TestCase):
    """Models that exist only as shapes."""

    def abstract(self):
        return nnx.eval_shape(lambda: MLP()), jax.ShapeDtypeStruct((8, 4), jnp.float32)

    def test_with_declared_layouts(self):
        mesh = mesh8()
        model, x = self.abstract()
        fun = jit(apply, in_shardings=(mlp_specs(), None), mesh=mesh)
        compiled = fun.lower(model, x).compile()
        self.assertEqual(
            compiled.input_shardings[0][0]["up"]["kernel"], NamedSharding(mesh, P(None, "model"))
        )
        np.testing.assert_allclose(compiled(MLP(), X)["y"], MLP()(X), rtol=1e-5, atol=1e-6)

    def test_layouts_of_the_abstract_arrays(self):
        mesh = mesh8()
        x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("model")))
        ours, theirs = (d(lambda x: x * 2).lower(x).compile() for d in (jit, jax.jit))
        self.assertEqual(ours.input_shardings, theirs.input_shardings)

    def test_shard_map(self):
        model, x = self.abstract()
        fun = shard_map(
            lambda m, x: jax.lax.psum(m(x), "model"),
            mesh=mesh8(),
            in_specs=(mlp_specs(), P()),
            out_specs=P(),
        )
        compiled = fun.lower(model, x).compile()
        self.assertIn("all-reduce", compiled.as_text())
        np.testing.assert_allclose(compiled(MLP(), X), MLP()(X), rtol=1e-5, atol=1e-6)

    def test_memory_before_anything_is_allocated(self):
        model = nnx.eval_shape(lambda: MLP(features=4096, hidden=65536))
        x = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
        fun = jit(lambda m, x: m(x), in_shardings=(mlp_specs(), None), mesh=mesh8())
        memory = fun.lower(model, x).compile().memory_analysis()
        total = 2 * 4 * 4096 * 65536
        self.assertLess(memory.argument_size_in_bytes, total / 8 * 1.1)
        self.assertGreater(memory.argument_size_in_bytes, total / 8 * 0.9)


class EvalShapeTest(parameterized.TestCase):
    def test_layouts_are_kept(self):
        mesh = mesh8()
        model = jit(lambda: MLP(), out_shardings=mlp_specs(), mesh=mesh).eval_shape()
        self.assertEqual(
            model.up.kernel.get_raw_value().sharding, NamedSharding(mesh, P(None, "model"))
        )

    def test_layouts_on_arrays_as_in_jax(self):
        sharding = NamedSharding(mesh8(), P("model"))
        ours, theirs = (
            d(lambda x: x, out_shardings=sharding).eval_shape(np.ones(8)) for d in (jit, jax.jit)
        )
        self.assertEqual(ours, theirs)
        self.assertEqual(ours.sharding, theirs.sharding)

    def test_returned_input_is_a_new_abstract_object(self):
        model = MLP()
        out = jit(lambda m: m).eval_shape(model)
        self.assertIsNot(out, model)
        self.assertIsInstance(out.up.kernel.get_raw_value(), jax.ShapeDtypeStruct)
        self.assertIsInstance(model.up.kernel.get_raw_value(), jax.Array)

    def test_shared_parts_stay_shared(self):
        def make():
            model = MLP()
            return {"a": model, "b": [model.up]}

        out = jit(make).eval_shape()
        self.assertIs(out["a"].up, out["b"][0])

    def test_shard_map(self):
        fun = shard_map(lambda x: x, mesh=mesh8(), in_specs=P("model"), out_specs=P("model"))
        self.assertEqual(fun.eval_shape(jnp.ones((8, 2))).shape, (8, 2))


class UntouchedTest(parameterized.TestCase):
    """Staging changes nothing of the user's."""

    @parameterized.named_parameters(
        ("trace", lambda f, *a: f.trace(*a)),
        ("lower", lambda f, *a: f.lower(*a)),
        ("compile", lambda f, *a: f.lower(*a).compile()),
        ("eval_shape", lambda f, *a: f.eval_shape(*a)),
    )
    def test_by(self, stage):
        def fun(model, rngs):
            model.up.kernel[...] += 1
            model.new = nnx.Param(jnp.ones(1))
            model.flag = True
            rngs()
            return model

        model, rngs = MLP(), nnx.Rngs(0)
        before = {id(v): v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state((model, rngs)))}
        attributes = dict(vars(model))
        decorators = [
            jit(fun),
            jit(fun, donate_argnums=0),
            jit(fun, in_shardings=P(), mesh=mesh8()),
            shard_map(fun, mesh=mesh8(), in_specs=(P(), P()), out_specs=P()),
        ]
        for decorated in decorators:
            stage(decorated, model, rngs)
            self.assertEqual(dict(vars(model)), attributes)
            for path, variable in nnx.to_flat_state(nnx.state((model, rngs))):
                self.assertIs(variable.get_raw_value(), before[id(variable)], path)
                self.assertFalse(variable.get_raw_value().is_deleted())

    def test_single_device_sharding_places_nothing(self):
        model = MLP()
        sharding = SingleDeviceSharding(jax.devices()[3])
        jit(lambda m: None, in_shardings=StateSharding({...: sharding})).lower(model).compile()
        self.assertEqual(model.up.kernel.devices(), {jax.devices()[0]})
