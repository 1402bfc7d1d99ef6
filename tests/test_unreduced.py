"""Unreduced and reduced axes in specs: the numbers and types of plain JAX, everywhere."""

from __future__ import annotations

import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import NamedSharding

from nnx_sharding import ActivationSharding, StateSharding, auto_axes, jit, reshard, shard_map
from nnx_sharding.analysis import parameter_table
from nnx_sharding.analysis.json_codec import as_data
from nnx_sharding.analysis.json_codec import read as read_json
from nnx_sharding.checkpoint import restore, save
from nnx_sharding.compat import eformer
from nnx_sharding.compat.eformer import get_names_from_partition_spec, match_partition_rules
from nnx_sharding.errors import CorrectedSpecWarning
from nnx_sharding.export import export
from nnx_sharding.partition import (
    LogicalRules,
    from_arrays,
    from_metadata,
    from_rules,
    fsdp,
    optimizer_sharding,
    override,
    tensor_parallel,
    with_sharding_constraint,
)
from nnx_sharding.placement import place, process_rows
from nnx_sharding.report import ProgramReport, check_sharding
from nnx_sharding.specs.fitting import fit_sharding, possible_corrections
from zoo import P, assert_close, fails, mesh_of

X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.arange(64, dtype=np.float32).reshape(8, 8) / 8
X2 = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8)
SUMMANDS = P(None, "y", unreduced={"x"})
COPIES = P(None, None, reduced={"x"})


def mesh24(kind="explicit"):
    return mesh_of((2, 4), ("x", "y"), kind)


def put(x, *entries):
    return jax.device_put(x, P(*entries))


def columns():
    return put(X, None, "x")


def rows():
    return put(W, "x", "y")


def partial_product(x, w):
    return jnp.einsum("ab,bc->ac", x, w, out_sharding=SUMMANDS)


def summands():
    return jax.jit(partial_product)(columns(), rows())


def copies():
    return jax.sharding.reshard(put(W, None, None), COPIES)


def batch():
    return put(np.ones((8, 8), np.float32), "x", None)


def total(u):
    return jax.sharding.reshard(u, P(None, "y"))


def seen(tree):
    """The type of each array, and what each device holds of it."""
    return [
        (jax.typeof(x).str_short(True), x.sharding, [np.asarray(s.data).tolist() for s in shards])
        for x in jax.tree.leaves(tree)
        for shards in [x.addressable_shards]
    ]


def scattered_gradient(x, w, jit):
    """FSDP: the weights are gathered as reduced, so that their gradient is scattered once."""

    def loss(w, x):
        return jnp.sum((x @ jax.sharding.reshard(w, COPIES)) ** 2)

    return jit(jax.value_and_grad(loss), in_shardings=P("x", None))(w, x)


@jax.custom_vjp
def gathered(w):
    return jax.lax.all_gather(w, "x", tiled=True, to="reduced")


def _gathered_forward(w):
    return gathered(w), None


def _gathered_backward(_, g):
    return (jax.lax.psum_scatter(g, "x", tiled=True),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def mapped_loss(shard_map, gather):
    return shard_map(
        lambda x, w: jax.lax.psum(((x @ gather(w)) ** 2).sum(), "x"),
        in_specs=(P("x"), P("x")),
        out_specs=P(),
    )


# Each takes `jit` and `shard_map`: those of JAX, or ours.
PROGRAMS = {
    "made by a product": lambda jit, _: jit(partial_product)(columns(), rows()),
    "into jit": lambda jit, _: jit(total)(summands()),
    "in_shardings": lambda jit, _: jit(total, in_shardings=SUMMANDS)(summands()),
    "in_shardings with a mesh": lambda jit, _: jit(
        total, in_shardings=NamedSharding(jax.sharding.get_mesh(), SUMMANDS)
    )(summands()),
    "reduced in_shardings": lambda jit, _: jit(lambda w: w + w, in_shardings=COPIES)(copies()),
    "out_shardings": lambda jit, _: jit(partial_product, out_shardings=SUMMANDS)(columns(), rows()),
    "reduced out_shardings": lambda jit, _: jit(
        lambda w: jax.sharding.reshard(w, COPIES), out_shardings=COPIES
    )(put(W, None, None)),
    "sums of them": lambda jit, _: jit(lambda u: u + u)(summands()),
    "psum": lambda _, shard_map: shard_map(
        lambda u: jax.lax.psum(u, "x"), in_specs=SUMMANDS, out_specs=P(None, "y")
    )(summands()),
    "psum_scatter": lambda _, shard_map: shard_map(
        lambda u: jax.lax.psum_scatter(u, "x", tiled=True), in_specs=SUMMANDS, out_specs=P("x", "y")
    )(summands()),
    "inferred": lambda _, shard_map: shard_map(
        lambda u: jax.lax.psum(u, "x"), out_specs=P(None, "y")
    )(summands()),
    "pcast to unreduced": lambda _, shard_map: shard_map(
        lambda x, w: jax.lax.pcast(x @ w, "x", to="unreduced"),
        in_specs=(P(None, "x"), P("x", "y")),
        out_specs=SUMMANDS,
    )(columns(), rows()),
    "pcast to reduced": lambda _, shard_map: shard_map(
        lambda w: jax.lax.pcast(w, "x", to="reduced"), in_specs=P(None, None), out_specs=COPIES
    )(put(W, None, None)),
    "all_gather to reduced": lambda _, shard_map: shard_map(
        lambda w: jax.lax.all_gather(w, "x", tiled=True, to="reduced"),
        in_specs=P("x", None),
        out_specs=COPIES,
    )(put(W, "x", None)),
    "reduced in_specs": lambda _, shard_map: shard_map(
        lambda x, w: x @ w, in_specs=(P("x"), COPIES), out_specs=P("x")
    )(batch(), copies()),
    "gradient of FSDP": lambda jit, _: scattered_gradient(batch(), put(W, "x", None), jit),
    "gradient of FSDP, mapped": lambda jit, shard_map: jit(
        jax.value_and_grad(
            mapped_loss(shard_map, lambda w: jax.lax.all_gather(w, "x", tiled=True, to="reduced")),
            argnums=1,
        )
    )(batch(), put(W, "x", None)),
    "gradient of FSDP, custom_vjp": lambda jit, shard_map: jit(
        jax.value_and_grad(mapped_loss(shard_map, gathered), argnums=1)
    )(batch(), put(W, "x", None)),
    "gradient of reduced in_specs": lambda jit, shard_map: jit(
        jax.value_and_grad(
            lambda w: (
                shard_map(lambda x, w: x @ w, in_specs=(P("x"), COPIES), out_specs=P("x"))(
                    batch(), w
                )
                ** 2
            ).sum()
        )
    )(copies()),
    "gradient of reduced out_specs": lambda jit, shard_map: jit(
        jax.value_and_grad(
            lambda w: (
                (
                    batch()
                    @ shard_map(
                        lambda w: jax.lax.all_gather(w, "x", tiled=True, to="reduced"),
                        in_specs=P("x", None),
                        out_specs=COPIES,
                    )(w)
                )
                ** 2
            ).sum()
        )
    )(put(W, "x", None)),
}
ERRORS = {
    "sin": lambda jit, _: jit(jnp.sin)(summands()),
    "sin in shard_map": lambda _, shard_map: shard_map(
        jnp.sin, in_specs=SUMMANDS, out_specs=SUMMANDS
    )(summands()),
}


class EqualToJaxTest(parameterized.TestCase):
    @parameterized.named_parameters((name, program) for name, program in PROGRAMS.items())
    def test_program(self, program):
        with jax.set_mesh(mesh24()):
            self.assertEqual(seen(program(jit, shard_map)), seen(program(jax.jit, jax.shard_map)))

    @parameterized.named_parameters((name, program) for name, program in ERRORS.items())
    def test_error(self, program):
        with jax.set_mesh(mesh24()):
            with self.assertRaises(Exception) as theirs:
                program(jax.jit, jax.shard_map)
            with self.assertRaises(type(theirs.exception)) as ours:
                program(jit, shard_map)
        self.assertEqual(str(ours.exception), str(theirs.exception))

    def test_microbatches(self):
        def step(jit):
            def microbatches(w, xs):
                def add(total, x):
                    grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
                    return total + grads, None

                start = jax.sharding.reshard(jnp.zeros_like(w), P(unreduced={"x"}))
                return jax.sharding.reshard(jax.lax.scan(add, start, xs)[0], P())

            xs = put(np.ones((3, 8, 8), np.float32), None, "x", None)
            return jit(microbatches, in_shardings=(COPIES, P(None, "x", None)))(copies(), xs)

        with jax.set_mesh(mesh24()):
            self.assertEqual(seen(step(jit)), seen(step(jax.jit)))


class Block(nnx.Module):
    """Layers with kernels only, or with scales and biases, too."""

    def __init__(self, bias):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, 16, use_bias=bias, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs) if bias else jnp.tanh
        self.down = nnx.Linear(16, 8, use_bias=bias, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(self.up(x)))


class GradientTest(parameterized.TestCase):
    """Layers with parameters that are declared as reduced."""

    def gradients(self, bias, reduced, activations):
        """The gradients of 4 microbatches, accumulated."""
        spec = P(reduced={"x"}) if reduced else P()

        def accumulated(model, xs):
            graphdef, params = nnx.split(model)

            def add(total, x):
                def loss(params):
                    return jnp.sum(nnx.merge(graphdef, params)(x) ** 2)

                return jax.tree.map(jnp.add, total, jax.grad(loss)(params)), None

            start = P(unreduced={"x"}) if reduced else P()
            zeros = reshard(jax.tree.map(jnp.zeros_like, params), start)
            return reshard(jax.lax.scan(add, zeros, xs)[0], P())

        specs = StateSharding({...: spec}, activations=activations)
        function = jit(accumulated, in_shardings=(specs, P(None, "x")))
        model, xs = Block(bias), np.sin(np.arange(256, dtype=np.float32)).reshape(4, 8, 8)
        return function(model, xs)

    @parameterized.product(bias=(False, True), gather=(False, True))
    def test_microbatches(self, bias, gather):
        layers = ActivationSharding(gather=("x",) if gather else (), infer=True)
        with jax.set_mesh(mesh24()):
            want = self.gradients(bias, reduced=False, activations=None)
            ours = self.gradients(bias, reduced=True, activations=layers)
        assert_close(ours, want, 1e-5, 1e-4)

    def test_biases_without_the_choices_of_modules(self):
        """JAX adds no reduced bias; broadcast by a product, its gradient stays unreduced."""

        def loss(b, x):
            rows = jax.sharding.reshard(jnp.ones((8, 1)), P("x", None))
            return jnp.sum((x + jnp.dot(rows, b[None], out_sharding=P("x", None))) ** 2)

        with jax.set_mesh(mesh24()):
            b = jax.sharding.reshard(W[0], P(reduced={"x"}))
            with self.assertRaisesRegex(Exception, "another input is reduced"):
                jit(lambda b, x: x + b)(b, batch())
            ours = jit(jax.grad(loss))(b, batch())
            self.assertEqual(seen(ours), seen(jax.jit(jax.grad(loss))(b, batch())))
            self.assertEqual(jax.typeof(ours).str_short(True), "f32[8]{U:x}")


def model_of(value):
    return nnx.Dict(w=nnx.Param(value))


class ModelTest(parameterized.TestCase):
    """Variables get the declared shardings and keep them."""

    def setUp(self):
        super().setUp()
        self.enter_context(jax.set_mesh(mesh24()))

    @parameterized.named_parameters(
        ("NumPy", lambda: W),
        ("one device", lambda: jax.device_put(W, jax.devices()[0])),
        ("replicated", lambda: put(W, None, None)),
        ("reduced", copies),
    )
    def test_reduced(self, value):
        model, types = model_of(value()), []

        @jit(in_shardings=(StateSharding({...: COPIES}), P("x", None)), on_committed="move")
        def grads(model, x):
            types.append(jax.typeof(model.w[...]).str_short(True))
            return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(model.w[...])

        ours = grads(model, batch())
        self.assertEqual(types, ["f32[8,8]{R:x}"])
        self.assertEqual(jax.typeof(ours).str_short(True), "f32[8,8]{U:x}")
        theirs = jax.jit(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)))(copies(), batch())
        self.assertEqual(seen(ours), seen(theirs))
        self.assertEqual(seen(model.w[...]), seen(copies()))

    def test_no_error_where_only_the_type_differs(self):
        model = model_of(put(W, None, None))
        jit(lambda model: None, in_shardings=(StateSharding({...: COPIES}),))(model)
        self.assertEqual(model.w.sharding.spec, COPIES)

    @parameterized.parameters(jit, shard_map)
    def test_unreduced(self, transform):
        option = "shardings" if transform is jit else "specs"
        specs = {f"in_{option}": (StateSharding({...: SUMMANDS}),), f"out_{option}": SUMMANDS}
        model = model_of(W)

        @transform(**specs)
        def twice(model):
            model.w[...] = model.w[...] + model.w[...]
            return model.w[...]

        out = twice(model)
        for ours in (out, model.w[...]):
            self.assertEqual(jax.typeof(ours).str_short(True), "f32[8,8@y]{U:x}")
            np.testing.assert_array_equal(jax.sharding.reshard(ours, P()), 2 * W)
        twice(model)
        np.testing.assert_array_equal(jax.sharding.reshard(model.w[...], P()), 4 * W)

    def test_from_and_to_other_devices(self):
        elsewhere = NamedSharding(mesh_of((2,), ("x",), "explicit"), P())
        model = place(model_of(W), StateSharding({...: elsewhere}))
        place(model, StateSharding({...: SUMMANDS}))
        self.assertEqual(model.w.sharding.spec, SUMMANDS)
        place(model, StateSharding({...: elsewhere}))
        np.testing.assert_array_equal(model.w[...], W)
        self.assertEqual(model.w.sharding, elsewhere)

    @parameterized.parameters("reduced", "unreduced")
    def test_checkpoint(self, kind):
        spec = P(None, "y", **{kind: {"x"}})
        model = place(model_of(W), StateSharding({...: spec}))
        with tempfile.TemporaryDirectory() as folder:
            save(f"{folder}/model", model)
            empty = place(model_of(0 * W), StateSharding({...: spec}))
            restore(f"{folder}/model", empty)
        self.assertEqual(empty.w.sharding.spec, spec)
        np.testing.assert_array_equal(jax.sharding.reshard(empty.w[...], P()), W)

    def test_constraint(self):
        for spec in (SUMMANDS, COPIES):
            for value, like in ((W, put(W, None, None)), (put(W, "x", None),) * 2):
                ours = with_sharding_constraint(value, spec)
                self.assertEqual(seen(ours), seen(jax.sharding.reshard(like, spec)))
            traced = jax.jit(lambda x, spec=spec: with_sharding_constraint(x, spec))(put(W, "x"))
            self.assertEqual(seen(traced), seen(ours))
        back = with_sharding_constraint(summands(), P(None, "y"))
        self.assertEqual(seen(back), seen(total(summands())))

    def test_constraint_with_open_dimensions(self):
        spec = P(P.UNCONSTRAINED, None, unreduced={"y"})
        ours = jax.jit(lambda x: with_sharding_constraint(x, spec))(put(W, "x", None))
        self.assertEqual(ours.sharding.spec, P("x", None, unreduced={"y"}))

    def test_corrections(self):
        spec = P("x", "gone", unreduced={"y"}, reduced={"none"})
        with self.assertWarnsRegex(
            CorrectedSpecWarning, "no axis 'gone'; the mesh has no axis\\s+'n"
        ):
            ours = eformer.with_sharding_constraint(W, spec)
        self.assertEqual(ours.sharding.spec, P("x", None, unreduced={"y"}))
        message = "only axes of type Explicit can be .*; 'x' is of type Auto"
        with jax.set_mesh(mesh24("auto")), self.assertWarnsRegex(CorrectedSpecWarning, message):
            ours = eformer.with_sharding_constraint(W, SUMMANDS)
        self.assertEqual(ours.sharding.spec, P(None, "y"))

    def test_indivisible(self):
        spec = P("y", None, reduced={"x"})
        model = model_of(W[:3])
        with self.assertWarns(CorrectedSpecWarning):
            jit(lambda m: None, in_shardings=(StateSharding({...: spec}),), on_indivisible="drop")(
                model
            )
        self.assertEqual(model.w.sharding.spec, COPIES)


class ErrorTest(parameterized.TestCase):
    def test_out_specs_that_leave_it_out(self):
        output = "output, float32[4,2]{V:y, U:x}, P(None, 'y')"
        with jax.set_mesh(mesh24()), fails(ValueError, output):
            shard_map(lambda u: u, in_specs=SUMMANDS, out_specs=P(None, "y"))(summands())

    def test_axes_that_cannot_be(self):
        run = jit(
            lambda x, w: x,
            in_shardings=(P(unreduced={"x"}), P(None, reduced={"z"})),
            mesh=mesh24("auto"),
        )
        unreduced = "x: only axes of type Explicit can be unreduced"
        with fails(ValueError, unreduced, "for w: the mesh has no axis 'z'"):
            run(X, W)

    def test_another_type_than_declared(self):
        with jax.set_mesh(mesh24()):
            for transform, option in ((jit, "shardings"), (shard_map, "specs")):
                specs = {f"in_{option}": P(None, "y"), f"out_{option}": P(None, "y")}
                facts = "x is float32[4,8@y]{U:x}, declared P(None, 'y')", "unreduced={'x'}"
                with fails(ValueError, *facts):
                    transform(lambda x: x, **specs)(summands())


class DescriptionTest(absltest.TestCase):
    """Reports, tables and files say it, and strategies keep it."""

    def setUp(self):
        super().setUp()
        self.enter_context(jax.set_mesh(mesh24()))

    def test_report(self):
        compiled = jit(total, in_shardings=SUMMANDS).lower(summands()).compile()
        report = compiled.report()
        [row] = report.parameters
        self.assertEqual(row.spec, SUMMANDS)
        self.assertIn("P(None, 'y', unreduced={'x'})", str(report))
        self.assertEqual(ProgramReport.from_json(report.to_json()), report)
        self.assertEqual(compiled.memory().arguments, row.bytes_per_device)
        [data] = report.as_dict()["parameters"]
        expected = {"partitions": [None, "y"], "unreduced": ["x"], "reduced": []}
        self.assertEqual(data["spec"], expected)

    def test_tables(self):
        table = parameter_table(model_of(summands()))
        self.assertIn("unreduced={'x'}", str(table))
        self.assertIn("unreduced={", table._repr_html_())

    def test_check_sharding(self):
        [row] = check_sharding(model_of(W), StateSharding({...: SUMMANDS})).as_dict()["rows"]
        expected = {"partitions": [None, "y"], "unreduced": ["x"], "reduced": []}
        self.assertEqual(row["spec"], expected)

    def test_export(self):
        exported = export(jit(total, in_shardings=SUMMANDS))(summands())
        self.assertEqual(exported.manifest.inputs[0].spec.unreduced, frozenset({"x"}))
        self.assertIn("unreduced={'x'}", str(exported.manifest))
        np.testing.assert_array_equal(exported.call(summands()).output, X @ W)
        data = as_data(exported.manifest)
        self.assertEqual(read_json(type(exported.manifest), data, ""), exported.manifest)

    def test_strategies(self):
        mesh, base = jax.sharding.get_mesh(), StateSharding({...: COPIES})
        found = fsdp(model_of(W), mesh=mesh, axis="y", min_size=0, base=base)
        self.assertEqual(found.shardings, (P(None, "y", reduced={"x"}),))
        self.assertEqual(fsdp(model_of(W), mesh=mesh, axis="x", base=base).shardings, (COPIES,))
        found = tensor_parallel(Block(False), mesh=mesh, axis="y", base=base).shardings
        self.assertEqual(found, (P("y", None, reduced={"x"}), P(None, "y", reduced={"x"})))
        self.assertIn(COPIES, override(base, {"up/kernel": P(None, "y", reduced={"x"})}).shardings)
        self.assertEqual(from_rules([(".*", COPIES)]).shardings, (COPIES,))
        self.assertEqual(
            from_arrays(model_of(summands())).shardings[0].spec.unreduced, frozenset({"x"})
        )

    def test_activations(self):
        specs = StateSharding({nnx.PathContains("up"): P(None, "y"), ...: P("y", None)})
        summed = P("x", None, unreduced={"y"})
        types = []

        def run(model, x):
            types.append(jax.typeof(model(x)))
            return model(x)

        options = {"in_shardings": (specs, P("x", None)), "on_committed": "move"}
        plain = Block(False)
        plain.norm = jnp.tanh
        ours = jit(run, activation_shardings={"down": summed}, **options)(Block(False), X2)
        self.assertEqual(types[0].str_short(True), "f32[8@x,8]{U:y}")
        np.testing.assert_allclose(reshard(ours, P()), plain(X2), rtol=1e-5, atol=1e-5)
        self.assertNotEqual(
            ActivationSharding({"down": summed}), ActivationSharding({"down": P("x", None)})
        )

    def test_other_kinds_of_reduction(self):
        if not hasattr(jax.sharding, "UnreducedKind"):
            self.skipTest("this release only has sums")
        for kind in jax.sharding.UnreducedKind:
            spec = P(None, unreduced={"x"}, unreduced_kind=kind)
            self.assertEqual(read_json(P, json.loads(json.dumps(as_data(spec))), "spec"), spec)

    def test_auto_axes(self):
        with_sines = auto_axes(jnp.sin, out_sharding=P(None, "y", reduced={"x"}))
        theirs = jax.sharding.auto_axes(jnp.sin, out_sharding=P(None, "y", reduced={"x"}))
        self.assertEqual(seen(jit(with_sines)(summands())), seen(jax.jit(theirs)(summands())))

    def test_specs_are_kept(self):
        spec = P(("x", "y"), None, unreduced={"z"})
        types = (jax.sharding.AxisType.Explicit,) * 3
        mesh = jax.sharding.AbstractMesh((2, 4, 2), ("x", "y", "z"), axis_types=types)
        dropped = fit_sharding(spec, mesh, (2, 2), on_indivisible="drop").sharding
        self.assertEqual(dropped, P("x", None, unreduced={"z"}))
        replicated = fit_sharding(spec, mesh, (3, 2), on_indivisible="replicate").sharding
        self.assertEqual(replicated, P(unreduced={"z"}))
        for part in possible_corrections(spec, "drop"):
            self.assertEqual(part.unreduced, {"z"})
        rules = [(".*", P(None, None, None, reduced={"x"}))]
        self.assertEqual(match_partition_rules(rules, {"w": W})["w"], COPIES)
        names = P("embed", None, reduced={"x"})
        self.assertEqual(LogicalRules({"embed": "y"}).spec(names), P("y", None, reduced={"x"}))
        annotated = nnx.Param(W, out_sharding=P("embed", reduced={"x"}), eager_sharding=False)
        found = from_metadata(nnx.Dict(w=annotated), {"embed": "y"})
        self.assertEqual(found.shardings, (P("y", None, reduced={"x"}),))
        self.assertEqual(get_names_from_partition_spec(SUMMANDS), ["y", "x"])
        self.assertEqual(process_rows(P("y", reduced={"x"}), 8), slice(0, 8))

    def test_optimizer(self):
        """By itself, its state is neither: Adam's moments are of gradients that are summed."""
        spec = P(None, "y", reduced={"x"})
        specs, tx = StateSharding({...: spec}), optax.adam(0.1)

        def loss(w, x):
            return jnp.sum((x @ w) ** 2)

        def plain_step(w, state, x):
            updates, state = tx.update(jax.grad(loss)(w, x), state)
            return optax.apply_updates(w, updates), state

        @jit(in_shardings=(specs, None, P("x", None)), on_committed="move")
        def step(model, optimizer, x):
            gradients = nnx.grad(lambda model: loss(model.w[...], x))(model)
            reshard(model, P(None, "y"))
            optimizer.update(model, reshard(gradients, P(None, "y")))
            reshard(model, spec)

        model = model_of(W)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        found = optimizer_sharding(optimizer, specs, model=model)
        place(optimizer, found)
        w, state = W, tx.init(W)
        for _ in range(2):
            step(model, optimizer, batch())
            w, state = plain_step(w, state, jax.device_get(batch()))
        np.testing.assert_allclose(model.w[...], w, rtol=1e-5)
        self.assertEqual(model.w.sharding.spec, spec)
        for moment in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
            self.assertEqual(moment["w"][...].sharding.spec, P(None, "y"))
        # An update takes reduced state as well, and leaves it without that mark.
        place(moment["w"], spec)
        step(model, optimizer, batch())
        w, state = plain_step(w, state, jax.device_get(batch()))
        np.testing.assert_allclose(model.w[...], w, rtol=1e-5)
        self.assertEqual(moment["w"][...].sharding.spec, P(None, "y"))

    def test_optimizer_that_holds_the_model(self):
        """The parameters in it stay reduced; factors of them are not."""
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        tx = optax.adafactor(1e-3, min_dim_size_to_factor=1)
        optimizer = nnx.ModelAndOptimizer(model, tx)
        spec = P("y", None, reduced={"x"})
        specs = StateSharding({nnx.PathContains("kernel"): spec, ...: P()})
        found = optimizer_sharding(optimizer, specs)
        self.assertEqual(found.find(("model", "kernel"), model.kernel)[1], spec)
        others = [x for x in found.shardings if x != spec]
        self.assertIn(P("y"), others)
        self.assertFalse(any(x.reduced for x in others))
