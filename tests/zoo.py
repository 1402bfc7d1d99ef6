"""Models that several test files share, and how what they compute is compared.

A test file takes its models from here, unless what is special about one is what it tests. After
training on a mesh, they have the losses, the parameters and the optimizer state that ``flax.nnx``
gives on one device: :func:`assert_trains_alike`.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from nnx_sharding import Stack, StateSharding, jit, value_and_grad
from nnx_sharding.partition import (
    fsdp,
    replicated,
    specs_by_path,
    tensor_parallel,
    zero1,
)
from nnx_sharding.partition.variables import variables
from nnx_sharding.specs.fitting import fit_sharding
from nnx_sharding.training import fetched

P = PartitionSpec
MESH = AbstractMesh((2, 4), ("data", "model"))


class MLP(nnx.Module):
    """Two layers without biases: ``up`` (4, 16) and ``down`` (16, 4)."""

    def __init__(self, rngs=None, features=4, hidden=16):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.up = nnx.Linear(features, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, features, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Counter(nnx.Module):
    """One Variable that every call increments, and one that no call changes."""

    def __init__(self, value=0):
        self.count = nnx.BatchStat(jnp.array(value))
        self.scale = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        self.count[...] += 1
        return x * self.scale[...] + self.count[...]


class Net(nnx.Module):
    """Parameters, running statistics, random streams and a static flag."""

    def __init__(self, rngs=None, features=8):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.linear = nnx.Linear(features, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(jax.nn.relu(self.linear(x))))


# Models to train. They take numbers (rows, LENGTH, WIDTH), or ids of words (rows, LENGTH).

ROWS, LENGTH, WIDTH, WORDS = 8, 4, 16, 24


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 2


class Normed(nnx.Module):
    """Two layers with biases and a norm between them."""

    def __init__(self, rngs, hidden=32):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(jax.nn.gelu(self.up(x))))


class Block(nnx.Module):
    """A residual layer, wider inside."""

    def __init__(self, rngs, width=WIDTH):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Residual(nnx.Module):
    """A residual layer with a norm and dropout, whose contribution the caller may scale."""

    def __init__(self, *, norm=nnx.BatchNorm, dropout=0.1, hidden=4 * WIDTH, rngs):
        self.norm = norm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, scale=1.0):
        return x + scale * self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Causal(nnx.Module):
    """Residual causal attention by a function."""

    def __init__(self, rngs, function=nnx.dot_product_attention):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, WIDTH, attention_fn=function, decode=False, rngs=rngs
        )

    def __call__(self, x):
        return x + self.attention(self.norm(x), is_causal=True)


class GroupedQuery(nnx.Module):
    """Residual causal attention in which two heads share keys and values."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query = nnx.LinearGeneral(WIDTH, (4, 4), rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, (2, 4), rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, (2, 4), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 4), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        heads = self.query(y), self.key(y), self.value(y)
        return x + self.out(jax.nn.dot_product_attention(*heads, is_causal=True))


class Mixture(nnx.Module):
    """Experts in raw parameters: all run for each token, of which it takes ``k``."""

    def __init__(self, rngs, k=2):
        self.norm, self.k = nnx.RMSNorm(WIDTH, rngs=rngs), k
        self.router = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.up = nnx.Param(normal(1, 4, WIDTH, 2 * WIDTH))
        self.down = nnx.Param(normal(2, 4, 2 * WIDTH, WIDTH))

    def __call__(self, x):
        y = self.norm(x)
        best, chosen = jax.lax.top_k(self.router(y), self.k)
        gates = jax.nn.one_hot(chosen, 4) * jax.nn.softmax(best)[..., None]
        hidden = jnp.tanh(jnp.einsum("btd,edf->btef", y, self.up[...]))
        return x + jnp.einsum("btef,efd,btke->btd", hidden, self.down[...], gates)


class Experts(nnx.Module):
    """Experts in layers of Flax, all of them weighted."""

    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Einsum("btd,edf->ebtf", (4, WIDTH, 32), rngs=rngs)
        self.down = nnx.Einsum("ebtf,efd->ebtd", (4, 32, WIDTH), rngs=rngs)

    def __call__(self, x):
        gates = jax.nn.softmax(self.router(x))
        return jnp.einsum("ebtd,bte->btd", self.down(jax.nn.relu(self.up(x))), gates)


class Attention(nnx.Module):
    def __init__(self, rngs, heads=4):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, WIDTH, 4 * heads, normalize_qk=True, decode=False, rngs=rngs
        )
        self.mlp = Normed(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class ResNet(nnx.Module):
    """Takes the tokens as rows of an image with 4 channels."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(8, rngs=rngs)
        self.back = nnx.ConvTranspose(8, 4, (2, 2), rngs=rngs)
        self.head = nnx.Linear(4, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.conv1(x.reshape(-1, 4, 4, 4))
        y = self.norm2(self.conv2(jax.nn.relu(self.norm1(x))))
        return self.head(self.back(jax.nn.relu(x + y)).mean((1, 2)))


class Recurrent(nnx.Module):
    def __init__(self, rngs, cell=nnx.LSTMCell):
        self.rnn = nnx.RNN(cell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.rnn(x)[:, -1]


class Adapted(nnx.Module):
    """LoRA as a layer and around one."""

    def __init__(self, rngs):
        self.up = nnx.LoRALinear(WIDTH, 32, lora_rank=4, rngs=rngs)
        down = nnx.Linear(32, WIDTH, rngs=rngs)
        self.down = nnx.LoRA(32, 4, WIDTH, base_module=down, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Words(nnx.Module):
    """An embedding that no axis divides, layers over several dimensions, a stack by vmap."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.odd = nnx.Embed(5, WIDTH, rngs=rngs)
        self.split = nnx.Einsum("btd,dhk->bthk", (WIDTH, 4, 3), (4, 3), rngs=rngs)
        self.join = nnx.LinearGeneral((4, 3), WIDTH, axis=(-2, -1), rngs=rngs)
        rows = rngs.split(3)
        self.stack = nnx.vmap(lambda r: nnx.Linear(WIDTH, WIDTH, rngs=r), graph=True)(rows)
        self.own = nnx.Param(jnp.ones((WIDTH,)))

    def __call__(self, words):
        x = self.embed(words) + self.odd(words % 5)
        x = self.join(self.split(x))
        for kernel, bias in zip(self.stack.kernel[...], self.stack.bias[...], strict=True):
            x = jnp.tanh(x @ kernel + bias)
        return self.embed.attend(x * self.own[...])


class Tied(nnx.Module):
    """A language model whose embedding is also its last layer."""

    def __init__(self, rngs, blocks=lambda rngs: nnx.List([Block(rngs)])):
        self.tokens = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = blocks(rngs)

    def __call__(self, words):
        x = self.tokens(words) + self.positions(jnp.arange(words.shape[1]))
        return self.tokens.attend(run_layers(self.blocks, x))


def layer(rngs, attention=Causal, mlp=Block):
    """A layer of a transformer."""
    return nnx.Sequential(attention(rngs), mlp(rngs))


def run_layers(layers, x, *args, **kwargs):
    """The layers of a Stack or of a list, one after the other."""
    if isinstance(layers, Stack):
        return layers(x, *args, **kwargs)
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


MODELS = {
    "mlp": Normed,
    "attention": Attention,
    "grouped query": GroupedQuery,
    "resnet": ResNet,
    "lstm": Recurrent,
    "gru": functools.partial(Recurrent, cell=nnx.GRUCell),
    "optimized lstm": functools.partial(Recurrent, cell=nnx.OptimizedLSTMCell),
    "simple": functools.partial(Recurrent, cell=nnx.SimpleCell),
    "lora": Adapted,
    "words": Words,
    "tied": Tied,
    "mixture": Mixture,
    "experts": Experts,
}


def loss_of(name):
    """What a model of the table is trained for."""
    return cross_entropy if name in ("words", "tied") else mean_square


def mlp_specs(axis="model"):
    """The megatron layout of an :class:`MLP`."""
    return StateSharding({nnx.PathContains("up"): P(None, axis), ...: P(axis, None)})


def mesh_of(shape, names, kind="auto"):
    """A mesh over the first devices; ``kind`` is auto, explicit, or a tuple of axis types."""
    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    types = kind if isinstance(kind, tuple) else (kinds[kind],) * len(names)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=types)


def describe(x):
    """All that can be seen of an array except its numbers."""
    if not isinstance(x, jax.Array):
        return type(x)
    aval = jax.typeof(x)
    return (aval.shape, aval.dtype, aval.weak_type, x.committed, x.sharding, str(aval))


def numbers(x):
    """The numbers of an array or key as NumPy, of a type that NumPy can compare."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x if x.dtype.kind in "biufc" else x.astype(np.float32)


def assert_same(test, ours, theirs, rtol=0):
    """Two outputs are the same pytree of the same arrays, with the same shardings."""
    test.assertEqual(jax.tree.structure(ours), jax.tree.structure(theirs))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        test.assertEqual(describe(a), describe(b))
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=rtol, atol=rtol)


def values(module):
    """The numbers of every Variable of a module, by path."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {path: numbers(v.get_raw_value()) for path, v in flat}


def assert_same_state(test, ours, theirs, rtol=0):
    """Two modules hold the same numbers under the same paths."""
    a, b = values(ours), values(theirs)
    test.assertEqual(list(a), list(b))
    for path in a:
        np.testing.assert_allclose(a[path], b[path], rtol=rtol, atol=rtol, err_msg=str(path))


def pointers(x):
    """Where the shards of an array, or of all Variables of a module, are in memory."""
    if isinstance(x, jax.Array):
        return tuple(s.data.unsafe_buffer_pointer() for s in x.addressable_shards)
    flat = nnx.to_flat_state(nnx.state(x))
    return {path: pointers(v.get_raw_value()) for path, v in flat}


@contextlib.contextmanager
def fails(error, *parts):
    """An error whose message has all of these, in this order."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    for part in parts:
        assert part in text, str(caught.value)
        text = text.partition(part)[2]


@contextlib.contextmanager
def compilations():
    """The names of the functions that JAX compiles meanwhile, or gets from its persistent cache."""
    names = []

    def listen(event, duration, *, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# fmt: off
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adamw chain": optax.chain(optax.clip_by_global_norm(1.0),
                               optax.adamw(optax.cosine_decay_schedule(1e-2, 9))),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "masked": optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "multi": optax.multi_transform(
        {True: optax.adamw(1e-2), False: optax.sgd(1e-2, momentum=0.5)},
        lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2),
    "ema": optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
    "sm3": optax.sm3(1e-2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}
# fmt: on
# How to shard a model, and an optimizer if there is one.
STRATEGIES = {
    "replicated": replicated,
    "fsdp": functools.partial(fsdp, min_size=0),
    "fsdp over all": functools.partial(fsdp, min_size=0, axis=("data", "model")),
    "tensor": tensor_parallel,
    "sequence": functools.partial(tensor_parallel, sequence=True),
    "both": lambda model, mesh, **options: fsdp(
        model, mesh=mesh, min_size=0, base=tensor_parallel(model, mesh=mesh), **options
    ),
    "zero1": functools.partial(zero1, min_size=0),
    "zero1 both": lambda model, mesh, **options: zero1(
        model, mesh=mesh, min_size=0, base=tensor_parallel(model, mesh=mesh), **options
    ),
}


def misfits(tree, sharding, mesh):
    """What is wrong with a sharding: paths without a spec, specs that do not fit."""
    wrong = []
    for each in variables(tree):
        index, spec = sharding.find(each.path, each.variable)
        fits = [fit_sharding(spec, mesh, shape) for shape in each.shapes]
        reasons = ["no spec"] if index is None else [fit.reasons for fit in fits if fit.problems]
        wrong += [(each.name, spec, reason) for reason in reasons]
    return wrong


def assert_placed(tree, sharding, mesh):
    """Each array of a model or an optimizer is sharded as a StateSharding declares."""
    for each in variables(tree):
        declared = sharding.find(each.path, each.variable)[1]
        if not isinstance(declared, NamedSharding):  # which may have a kind of memory
            declared = NamedSharding(mesh, declared)
        for array in each.arrays:
            assert array.sharding.is_equivalent_to(declared, array.ndim), (each.name, declared)


def assert_close(found, expected, rtol=1e-5, atol=1e-6, message=""):
    """Two pytrees, which may be modules, have the same structure and nearly the same numbers.

    Terms of a sum may cancel, so ``rtol`` is relative to the largest element of each array.
    """
    ours, theirs = (jax.tree_util.tree_leaves_with_path(_by_name(x)) for x in (found, expected))
    assert len(ours) == len(theirs), (found, expected)
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        one, other = numbers(one), numbers(other)
        name, size = f"{message}{jax.tree_util.keystr(path)}", np.abs(other).max(initial=0)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol + rtol * size, err_msg=name)


def _by_name(tree):
    """The arrays of a module or an optimizer by name; any other pytree itself."""
    is_object = isinstance(tree, nnx.Pytree)
    return {each.name: each.arrays for each in variables(tree)} if is_object else tree


def table(tree, sharding):
    """The specs by name, without those of replicated arrays."""
    specs = {"/".join(map(str, path)): spec for path, spec in specs_by_path(tree, sharding).items()}
    return {name: spec for name, spec in specs.items() if any(spec)}


def mean_square(model, x):
    return ((model(x) - 0.5) ** 2).mean()


def cross_entropy(model, words):
    labels = (5 * words + 3) % WORDS  # elementwise: JAX shifts no dimension with an Explicit axis
    return optax.softmax_cross_entropy_with_integer_labels(model(words), labels).mean()


def batch_of(loss, rows=ROWS, length=LENGTH):
    """Normal numbers, or words if the loss is one of words."""
    draw = np.random.default_rng(0)
    if loss is cross_entropy:
        return draw.integers(0, WORDS, (rows, length)).astype(np.int32)
    return draw.normal(size=(rows, length, WIDTH)).astype(np.float32)


TRAINED = nnx.Any(nnx.Param, nnx.LoRAParam)


def flax_gradient(loss):
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, TRAINED))


def step_of(gradient, *, fetches=False):
    """A training step with this gradient of a loss; it may fetch what an optimizer offloads."""
    around = fetched if fetches else contextlib.nullcontext

    def step(model, optimizer, batch):
        value, gradients = gradient(model, batch)
        with around(optimizer):
            optimizer.update(model, gradients)
        return value

    return step


def with_optimizer(make, tx):
    """A model of the zoo to train, and its optimizer."""
    model = make(nnx.Rngs(0))
    model.train()
    return model, nnx.Optimizer(model, tx, wrt=TRAINED)


@functools.cache
def trained_alone(make, loss, tx, batch, steps):
    """The losses, the model and its optimizer after training with Flax on one device."""
    trees, step = with_optimizer(make, tx), nnx.jit(step_of(flax_gradient(loss)))
    losses = [step(*trees, batch() if batch else batch_of(loss)) for _ in range(steps)]
    return losses, *trees


SGD, DATA = optax.sgd(0.1, momentum=0.9), P("data")


def assert_trains_alike(
    make, strategy, mesh, *, loss=mean_square, tx=SGD, batch=None, step=None, spec=DATA,
    steps=2, rtol=1e-4, atol=1e-6, ahead=False, **options,
):  # fmt: skip
    """Training on a mesh gives the losses, parameters and states of Flax on one device.

    ``strategy`` gets the model, ``mesh=`` and ``optimizer=``; it returns their sharding, or one for
    each. ``step`` runs on the mesh instead of a step with the gradient of ``loss``, compiled ahead
    of the first call or in it. What one device computes is kept for the next call with the same
    functions. Returns what ran and its arguments.
    """
    model, optimizer = with_optimizer(make, tx)
    found = strategy(model, mesh=mesh, optimizer=optimizer)
    shardings = found if isinstance(found, tuple) else (found, found)
    data = jax.device_put(batch() if batch else batch_of(loss), NamedSharding(mesh, spec))
    arguments = model, optimizer, data
    step = step or step_of(value_and_grad(loss, wrt=TRAINED))
    step = jit(step, in_shardings=(*shardings, spec), mesh=mesh, **options)
    if ahead:
        step = step.lower(*arguments).compile()
    losses = [step(*arguments) for _ in range(steps)]
    expected = trained_alone(make, loss, tx, batch, steps)
    for one, other in zip((losses, model, optimizer), expected, strict=True):
        assert_close(one, other, rtol, atol)
    for tree, sharding in zip((model, optimizer), shardings, strict=True):
        assert misfits(tree, sharding, mesh) == []
        assert_placed(tree, sharding, mesh)
    return step, arguments
