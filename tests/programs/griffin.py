"""RG-LRU layers with an associative scan, of which a checkpoint is loaded, as in RecurrentGemma.

https://github.com/google-deepmind/recurrentgemma
https://github.com/jax-ml/bonsai/blob/main/bonsai/models/mamba2
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

ACT2FN = {"silu": nnx.silu, "gelu": nnx.gelu}


@dataclasses.dataclass(frozen=True)
class GriffinConfig:
    vocab_size: int = 64
    width: int = 32
    lru_width: int = 32
    num_layers: int = 1
    hidden_act: Literal["silu", "gelu"] = "gelu"
    initializer_range: tuple[float, float] = (0.9, 0.999)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Cache:
    states: list[jax.Array]
    conv_states: list[jax.Array]

    def tree_flatten(self):
        return (self.states, self.conv_states), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*map(list, children))


class RGLRU(nnx.Module):
    def __init__(self, cfg, *, rngs):
        low, high = cfg.initializer_range
        decay = jax.random.uniform(rngs.params(), (cfg.lru_width,), minval=low, maxval=high)
        self.a_param = nnx.Param(jnp.log(jnp.expm1(-jnp.log(decay))))
        # Linear layers with 4 blocks on the diagonal.
        size = cfg.lru_width // 4
        gate = functools.partial(nnx.Einsum, "BTHI,HIJ->BTHJ", (4, size, size), (4, size))
        self.input_gate, self.a_gate = gate(rngs=rngs), gate(rngs=rngs)

    def __call__(self, x, state):
        blocks = x.reshape(*x.shape[:-1], 4, -1)
        gates = self.a_gate(blocks), self.input_gate(blocks)
        a_gate, input_gate = (nnx.sigmoid(gate).reshape(x.shape) for gate in gates)
        a = jnp.exp(-8.0 * a_gate * nnx.softplus(self.a_param[...]))
        x = jnp.sqrt(1 - a**2 + 1e-6) * input_gate * x
        x = x.at[:, 0].add(a[:, 0] * state)
        _, states = jax.lax.associative_scan(
            lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]), (a, x), axis=1
        )
        return states, states[:, -1]


class Block(nnx.Module):
    def __init__(self, cfg, *, rngs):
        self.cfg = cfg
        self.act = ACT2FN[cfg.hidden_act]
        self.norm = nnx.RMSNorm(cfg.width, rngs=rngs)
        width = cfg.lru_width
        self.linear_x = nnx.Linear(cfg.width, width, rngs=rngs)
        self.linear_y = nnx.Linear(cfg.width, width, rngs=rngs)
        self.conv = nnx.Param(nnx.initializers.normal(0.5)(rngs.params(), (4, width)))
        self.rg_lru = RGLRU(cfg, rngs=rngs)
        self.linear_out = nnx.Linear(width, cfg.width, rngs=rngs)

    def __call__(self, x, state, conv_state):
        y = self.norm(x)
        padded = jnp.concatenate([conv_state, self.linear_x(y)], 1)
        taps = (kernel * padded[:, i : i + x.shape[1]] for i, kernel in enumerate(self.conv[...]))
        z, state = self.rg_lru(sum(taps), state)
        x += self.linear_out(z * self.act(self.linear_y(y)))
        return x, state, padded[:, -3:]


class Griffin(nnx.Module):
    def __init__(self, cfg, *, rngs):
        self.cfg = cfg
        self.embedder = nnx.Embed(cfg.vocab_size, cfg.width, rngs=rngs)
        self.layers = nnx.List([Block(cfg, rngs=rngs) for _ in range(cfg.num_layers)])
        self.lm_head = None  # tied

    def __call__(self, tokens, cache):
        x, states, conv_states = self.embedder(tokens), [], []
        for layer, *state in zip(self.layers, cache.states, cache.conv_states, strict=True):
            x, state, conv_state = layer(x, *state)
            states.append(state)
            conv_states.append(conv_state)
        cache = Cache(states, conv_states)
        return {"logits": self.embedder.attend(x), "cache": cache, "loss": None}

    def init_cache(self, batch):
        shapes = (batch, self.cfg.lru_width), (batch, 3, self.cfg.lru_width)
        return Cache(*([jnp.zeros(shape) for _ in self.layers] for shape in shapes))


def from_checkpoint(cfg, arrays):
    """A model without initialization, filled with arrays by path."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Griffin(cfg, rngs=nnx.Rngs(0))))
    flat = {path: leaf.replace(arrays[path]) for path, leaf in nnx.to_flat_state(abstract)}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def make():
    trained = nnx.to_flat_state(nnx.state(Griffin(GriffinConfig(), rngs=nnx.Rngs(0))))
    model = from_checkpoint(GriffinConfig(), {path: leaf[...] for path, leaf in trained})
    return model, nnx.Optimizer(model, optax.lion(1e-3), wrt=nnx.Param)


def batch(step):
    return (jax.random.randint(jax.random.key(step), (8, 16), 0, 64),)


def train_step(model, optimizer, tokens):
    def loss_fn(model):
        logits = model(tokens, model.init_cache(len(tokens)))["logits"][:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def decode(model, tokens, cache):
    outputs = model(tokens, cache)
    return outputs["logits"][:, -1:].argmax(-1), outputs["cache"], outputs["loss"]


def train(jit, objects, steps):
    model, _ = objects
    step_fn = jit(train_step, **OPTIONS)
    losses = [step_fn(*objects, *batch(step)) for step in range(steps)]
    decode_fn = jit(decode, donate_argnames="cache")
    tokens, cache, generated = jnp.ones((2, 1), int), model.init_cache(2), []
    for _ in range(4):
        tokens, cache, _ = decode_fn(model, tokens, cache)
        generated.append(tokens)
    return losses, generated


OPTIONS = {"donate_argnums": (0, 1)}
RULES = {r"linear_(x|y)/kernel$": P("data", "model"), r"(gate/kernel|embedding)$": P("model")}
