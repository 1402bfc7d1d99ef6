"""Optimizers of Optax on a mesh: the numbers of one device, their state sharded like parameters."""

from __future__ import annotations

import functools
import itertools
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx
from optax import contrib

from nnx_sharding import jit, stack
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.partition import (
    from_rules,
    fsdp,
    optimizer_sharding,
    sharded_init,
    specs_by_path,
    tensor_parallel,
)
from nnx_sharding.placement import place
from nnx_sharding.training import fetched, offload
from zoo import STRATEGIES, P, assert_close, assert_placed, mesh_of, misfits

RATE = 1e-2


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params)


def stacked_matrices(params):
    numbers = contrib.MuonDimensionNumbers(1, 2)
    return jax.tree.map(lambda x: numbers if x.ndim == 3 else None, params)


def lookahead():
    """Optax's takes pairs of parameters: here the slow ones are in the state."""
    tx = optax.lookahead(optax.adam(RATE), sync_period=2, slow_step_size=0.5)

    def init(params):
        return tx.init(optax.LookaheadParams.init_synced(params)), params

    def update(updates, state, params):
        inner, slow = state
        updates, inner = tx.update(updates, inner, optax.LookaheadParams(params, slow))
        return updates.fast, (inner, optax.apply_updates(slow, updates.slow))

    return optax.GradientTransformation(init, update)


def with_value(tx, **further):
    """A transformation that is also given the loss."""

    def update(updates, state, params):
        return tx.update(updates, state, params, value=jnp.float32(0.5), **further)

    return optax.GradientTransformation(tx.init, update)


def objective(params):
    return sum(jnp.sum(jnp.sin(3 * x) ** 2) for x in jax.tree.leaves(params)) / 1000


def optimizers():
    """Those of Optax: with gradients and parameters, some with the loss or its function."""
    by_rate = """adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage
    lamb lars lion nadam nadamw novograd optimistic_adam_v2 optimistic_gradient_descent
    radam rmsprop rprop sgd sign_sgd signum sm3 yogi"""
    contributed = """acprop ademamix adopt dadapt_adamw dowg galore madgrad muon schedule_free_adamw
    schedule_free_sgd simplified_ademamix"""
    adam, sgd = optax.adam(RATE), optax.sgd(RATE, momentum=0.9)
    factored = optax.adafactor(RATE, min_dim_size_to_factor=8, momentum=0.9)
    found = {name: getattr(optax, name)(RATE) for name in by_rate.split()}
    found |= {name: getattr(contrib, name)(RATE) for name in contributed.split()}
    return found | {
        "adafactor": factored,
        "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.1), sgd),
        "apply_if_finite": optax.apply_if_finite(adam, 3),
        "centered": optax.chain(optax.centralize(), optax.add_decayed_weights(0.1), sgd),
        "clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
        "cocob": contrib.cocob(),
        "dog": contrib.dog(1.0),
        "ema": optax.chain(sgd, optax.ema(0.9)),
        "flatten": optax.flatten(adam),
        "galore of low rank": contrib.galore(RATE, rank=4),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(RATE),
        "lbfgs": optax.lbfgs(RATE, linesearch=None),
        "lookahead": lookahead(),
        "masked": optax.masked(adam, is_matrix),
        "mechanize": contrib.mechanize(adam),
        "multi_transform": optax.multi_transform({"matrix": factored, "other": sgd}, labels),
        "MultiSteps": optax.MultiSteps(adam, 2),
        "MultiSteps of muon": optax.MultiSteps(contrib.muon(RATE), 2),
        "muon of stacks": contrib.muon(RATE, muon_weight_dimension_numbers=stacked_matrices),
        "noisy_sgd": optax.noisy_sgd(RATE, key=jax.random.key(0)),
        "normalize": optax.chain(contrib.normalize(), sgd),
        "partition": optax.partition({"matrix": contrib.muon(RATE), "other": adam}, labels),
        "prodigy": contrib.prodigy(),
        "sam": contrib.sam(sgd, optax.sgd(0.01), sync_period=2),
        "schedule": optax.adam(optax.cosine_decay_schedule(RATE, 10)),
        "reduce_on_plateau": with_value(optax.chain(sgd, contrib.reduce_on_plateau(patience=1))),
        "momo": with_value(contrib.momo(RATE)),
        "momo_adam": with_value(contrib.momo_adam(RATE)),
        "schedule_free": contrib.schedule_free(adam, RATE),
        "sophia": with_value(contrib.sophia(RATE), obj_fn=objective),
        "split_real_and_imaginary": contrib.split_real_and_imaginary(adam),
    }


# These amplify rounding: by 1e5 and more in float32, so they are compared in float64, where they
# differ by less than 1e-11. The gradient of a bias here has equal elements, of which galore takes
# a singular value decomposition that is not unique; lbfgs divides by differences of gradients.
AMPLIFYING = ("galore", "galore of low rank", "lbfgs")
OPTIMIZERS = optimizers()
NAMES = ("fsdp", "zero1", "tensor", "both", "zero1 both", "offload")


class Model(nnx.Module):
    def __init__(self, rngs, dtype):
        options = {"rngs": rngs, "param_dtype": dtype}
        self.up = nnx.Linear(16, 32, **options)
        self.norm = nnx.LayerNorm(32, **options)
        self.blocks = stack(nnx.Linear, 8, 8, 16, **options)
        self.down = nnx.Linear(32, 16, **options)


def makes(names):
    def make():
        pairs = {}
        for name in names:
            model = Model(nnx.Rngs(0), jnp.float64 if name in AMPLIFYING else jnp.float32)
            pairs[name] = model, nnx.Optimizer(model, OPTIMIZERS[name], wrt=nnx.Param)
        return pairs

    return make


def flat_state(optimizer_or_model):
    """The arrays by path; parts that an optimizer masks have none."""
    flat = nnx.to_flat_state(nnx.state(optimizer_or_model))
    return {path: x for path, x in flat if isinstance(x.get_raw_value(), jax.Array)}


def arrays_of(tree):
    """Those with dimensions, which can be offloaded."""
    return [x for x in jax.tree.leaves(nnx.state(tree)) if hasattr(x, "ndim") and x.ndim]


def offloadable(path, variable):
    return path[0] == "opt_state"


def step(pairs):
    for model, optimizer in pairs.values():
        gradients = jax.tree.map(lambda x: jnp.cos(9 * x) / 4, nnx.state(model, nnx.Param))
        with fetched(optimizer):  # what a sharding has offloaded
            optimizer.update(model, gradients)


@functools.cache
def on_one_device(*names):
    """The state of each model and optimizer after three steps."""
    plain, run = nnx.jit(makes(names))(), nnx.jit(step)
    for _ in range(3):
        run(plain)
    return {name: flat_state(pair) for name, pair in plain.items()}


class AsOnOneDeviceTest(parameterized.TestCase):
    def check(self, names, strategy, kind):
        with jax.enable_x64(not set(names).isdisjoint(AMPLIFYING)):
            self.compare(names, strategy, kind)

    def compare(self, names, strategy, kind):
        mesh, make = mesh_of((2, 4), ("data", "model"), kind), makes(names)
        is_offloaded = strategy == "offload"
        shardings = {}
        for name, (model, optimizer) in nnx.eval_shape(make).items():
            chosen = STRATEGIES["fsdp" if is_offloaded else strategy]
            shardings[name] = chosen(model, mesh=mesh, optimizer=optimizer)
            if is_offloaded and arrays_of(optimizer.opt_state):
                shardings[name] = offload(shardings[name], optimizer, offloadable, mesh=mesh)
        ours = sharded_init(make, shardings, mesh)
        run = jit(step, in_shardings=(shardings,), mesh=mesh)
        for _ in range(3):
            run(ours)
        for name in names:
            limit = 1e-9 if name in AMPLIFYING else 2e-3
            assert_close(flat_state(ours[name]), on_one_device(*names)[name], limit, 1e-3 * limit)
            model, optimizer = ours[name]
            for tree in (model, optimizer):
                self.assertEqual(misfits(tree, shardings[name], mesh), [])
                assert_placed(tree, shardings[name], mesh)
            if is_offloaded:
                declared = specs_by_path(optimizer, shardings[name])
                for path, x in flat_state(optimizer).items():
                    kind = getattr(declared[path], "memory_kind", "device")
                    self.assertEqual(x.sharding.memory_kind, kind, path)
            if strategy.startswith("zero1"):
                continue
            specs = specs_by_path(model, shardings[name])
            shapes = {path: x.shape for path, x in nnx.to_flat_state(nnx.state(model))}
            for path, x in flat_state(optimizer.opt_state).items():
                for start in range(len(path)):
                    spec = specs.get(path[start:])
                    if spec is not None and x.shape == shapes[path[start:]]:
                        self.assertEqual(x.sharding.spec, spec, (name, path))

    def test_some(self):
        strategy, kind = random.choice(
            [("fsdp", "explicit"), ("zero1 both", "auto"), ("offload", "auto")]
        )
        self.check([random.choice(sorted(OPTIMIZERS))], strategy, kind)

    def test_constants_in_the_state(self):
        """State that an update sets to a constant; there are loops over stacks beside it."""
        self.check(["optimistic_gradient_descent", "dog"], "zero1", "auto")

    @parameterized.parameters(*range(0, len(OPTIMIZERS), 4))
    def test_all(self, start):
        """Few at once, or devices wait too long for each other."""
        names = sorted(OPTIMIZERS, key=lambda name: name in AMPLIFYING)[start : start + 4]
        for strategy, kind in itertools.product(NAMES, ["auto", "explicit"]):
            with self.subTest(names=names, strategy=strategy, kind=kind):
                self.check(names, strategy, kind)

    @parameterized.product(kind=["auto", "explicit"])
    def test_line_search(self, kind):
        """The loss that it calls has the axis types around the update."""

        def search(model, optimizer, x):
            graphdef, _ = nnx.split(model)

            def loss_of(params):
                return ((nnx.merge(graphdef, params)(x) - 1) ** 2).mean()

            value, gradients = nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).mean())(model)
            further = {"value": value, "grad": nnx.as_pure(nnx.state(gradients))}
            optimizer.update(model, gradients, value_fn=loss_of, **further)
            return value

        def make():
            model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)

        mesh, x = mesh_of((2, 4), ("data", "model"), kind), np.cos(np.arange(128.0, dtype="f4"))
        x = x.reshape(8, 16)
        model, optimizer = nnx.eval_shape(make)
        sharding = fsdp(model, mesh=mesh, min_size=0, optimizer=optimizer)
        ours, plain = sharded_init(make, sharding, mesh), make()
        run = jit(search, in_shardings=(sharding, sharding, P("data")), mesh=mesh)
        for _ in range(3):
            self.assertAlmostEqual(float(run(*ours, x)), float(nnx.jit(search)(*plain, x)), 4)


class UsersObjectTest(parameterized.TestCase):
    def test_an_update_keeps_the_transformation(self):
        """While it is traced, the optimizer has its own one, and keeps new attributes."""
        seen, sgd = [], optax.sgd(RATE)

        class Counting(nnx.Optimizer):
            def update(self, *args, **kwargs):
                self.is_updated = True
                return super().update(*args, **kwargs)

        def update(*args):
            seen.append(isinstance(current[0].tx, optax.GradientTransformation))
            return sgd.update(*args)

        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        tx = optax.GradientTransformation(sgd.init, update)
        optimizer, current = Counting(model, tx, wrt=nnx.Param), []
        mesh = mesh_of((8,), ("data",), "explicit")
        sharding = fsdp(model, mesh=mesh, optimizer=optimizer, min_size=0)

        def step(model, optimizer):
            current[:] = [optimizer]
            optimizer.update(model, nnx.state(model, nnx.Param))

        model, optimizer = place((model, optimizer), (sharding,) * 2, mesh)
        jit(step, in_shardings=(sharding,) * 2, mesh=mesh)(model, optimizer)
        self.assertEqual(set(seen), {True})
        self.assertTrue(optimizer.is_updated)
        self.assertIs(optimizer.tx, tx)
        current.clear()


class OwnersTest(parameterized.TestCase):
    """To which parameter a part of the state belongs."""

    @parameterized.parameters("adam", "sgd", "masked")
    def test_parameters_with_the_names_of_state(self, tx):
        def make():
            inner = {name: nnx.Param(jnp.zeros((8, 16))) for name in ("kernel", "trace")}
            model = nnx.Dict(**inner, mu=nnx.Dict(inner), trace_=nnx.Dict(inner))
            return model, nnx.Optimizer(model, OPTIMIZERS[tx], wrt=nnx.Param)

        model, optimizer = nnx.eval_shape(make)
        rules = {"^kernel$": P("data"), "^mu/kernel$": P(None, "model")}
        sharding = from_rules(rules, default=P())
        found = specs_by_path(optimizer, optimizer_sharding(optimizer, sharding, model=model))
        for path, spec in found.items():
            if path[-2:] == ("mu", "kernel") and path[-3] in ("mu", "nu", "trace", "params"):
                self.assertEqual(spec, P(None, "model"), path)
            elif path[-1] == "kernel" and isinstance(path[-3], int):
                self.assertEqual(spec, P("data"), path)

    @parameterized.parameters(nnx.Optimizer, nnx.ModelAndOptimizer)
    def test_model_that_refers_to_itself(self, kind):
        model = nnx.Dict(inner=nnx.Dict(up=nnx.Linear(8, 16, rngs=nnx.Rngs(0))))
        model.inner.parent = model
        optimizer = kind(model, optax.adam(RATE), wrt=nnx.Param)
        sharding = tensor_parallel(model, mesh=mesh_of((8,), ("model",)))
        found = specs_by_path(optimizer, optimizer_sharding(optimizer, sharding, model=model))
        self.assertEqual(found["opt_state", 0, "mu", "inner", "up", "kernel"], P(None, "model"))

    @parameterized.parameters(dict, nnx.Dict)  # models for themselves, and parts of one
    def test_an_optimizer_for_each_model(self, kind):
        def make():
            parts = {x: nnx.Dict(up=nnx.Linear(8, 16, rngs=nnx.Rngs(0))) for x in ("gen", "disc")}
            optimizers = {
                x: nnx.Optimizer(part, optax.adam(RATE), wrt=nnx.Param) for x, part in parts.items()
            }
            return kind(parts), optimizers

        models, optimizers = nnx.eval_shape(make)
        rules = {"^gen/up/kernel$": P("data"), "^disc/up/kernel$": P(None, "model")}
        sharding = from_rules(rules, default=P())
        found = specs_by_path(optimizers, optimizer_sharding(optimizers, sharding, model=models))
        for moment in ("mu", "nu"):
            of_gen, of_disc = (
                found[x, "opt_state", 0, moment, "up", "kernel"] for x in ("gen", "disc")
            )
            self.assertEqual((of_gen, of_disc), (P("data"), P(None, "model")))

    # The optimizer of a part, under keys, with what the warning has to name.
    @parameterized.parameters(
        ("adam", None, "opt_state/0/mu/kernel"),
        ("lbfgs", None, "opt_state/0/diff_params_memory/kernel"),
        ("adam", "wrong", "wrong/opt_state/0/nu/kernel"),
        ("adam", "head", None),
        ("lbfgs", "head", None),
    )
    def test_an_optimizer_of_a_part(self, tx, key, named):
        model = nnx.Dict(
            body=nnx.Linear(16, 16, rngs=nnx.Rngs(0)), head=nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        )
        transformation = {"adam": optax.adam(RATE), "lbfgs": optax.lbfgs()}[tx]
        optimizer = nnx.Optimizer(model.head, transformation, wrt=nnx.Param)
        tree = optimizer if key is None else {key: optimizer}
        mesh = mesh_of((8,), ("data",))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharding = fsdp(model, mesh=mesh, optimizer=tree, min_size=0)
        self.assertEqual([w.category for w in caught], [UnshardedWarning] if named else [])
        found = {path: spec for path, spec in specs_by_path(tree, sharding).items() if spec != P()}
        if named:
            self.assertIn(named, str(caught[0].message))
            self.assertEqual(found, {})
        else:
            self.assertTrue(any(path[-1] == "kernel" for path in found))
        with warnings.catch_warnings():  # nothing is lost where nothing is sharded
            warnings.simplefilter("error")
            optimizer_sharding(tree, from_rules({}, default=P()), model=model)


class StackedLayersTest(parameterized.TestCase):
    """Layers stacked by ``nnx.vmap``, as in Flax."""

    def test_layer_dimension_and_norms(self):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.up = nnx.Linear(16, 16, rngs=rngs)
                self.norm = nnx.LayerNorm(16, rngs=rngs)
                self.scale = nnx.Param(jnp.ones((16,)))

        class Net(nnx.Module):
            def __init__(self, rngs):
                make = nnx.vmap(Block, axis_size=64)
                self.layers = nnx.split_rngs(splits=64)(make)(rngs)
                self.head = nnx.Linear(64, 16, rngs=rngs)

        model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
        mesh = mesh_of((2, 4), ("data", "model"))
        for base in (None, tensor_parallel(model, mesh=mesh)):
            found = specs_by_path(model, fsdp(model, mesh=mesh, base=base, min_size=0))
            for path, spec in found.items():
                is_norm = "norm" in path
                self.assertEqual("data" in jax.tree.leaves(tuple(spec)), not is_norm, path)
                self.assertTrue(path[0] == "head" or not spec or spec[0] is None, path)
