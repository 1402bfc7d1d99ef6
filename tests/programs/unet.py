"""A diffusion U-Net with time embeddings and an average of its parameters.

https://github.com/jax-ml/bonsai/blob/main/bonsai/models/unet
https://github.com/lanl/scico/blob/main/scico/flax/diffusion
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class ModelCfg:
    features: tuple[int, ...] = (8, 16)
    groups: int = 4
    act: Callable[[jax.Array], jax.Array] = nnx.silu


class Schedule:
    """The noise of each time step: an ordinary object, without ``__eq__``."""

    def __init__(self, num_steps):
        self.num_steps = num_steps
        self.alphas = np.cumprod(1 - np.linspace(1e-4, 0.02, num_steps), dtype=np.float32)

    def add_noise(self, x, noise, t):
        alpha = jnp.asarray(self.alphas)[t][:, None, None, None]
        return jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise


class TimeEmbedding(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.frequencies = jnp.exp(-jnp.log(10_000) * jnp.arange(dim // 2) / (dim // 2))
        self.mlp = nnx.Sequential(
            nnx.Linear(dim, 2 * dim, rngs=rngs), nnx.gelu, nnx.Linear(2 * dim, dim, rngs=rngs)
        )

    def __call__(self, t):
        angles = t[:, None] * self.frequencies
        return self.mlp(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))


class ResnetBlock(nnx.Module):
    def __init__(self, cfg, inputs, outputs, *, rngs):
        self.cfg = cfg
        self.norm = nnx.GroupNorm(inputs, num_groups=cfg.groups, rngs=rngs)
        self.conv = nnx.Conv(inputs, outputs, (3, 3), padding="SAME", rngs=rngs)
        self.time_proj = nnx.Linear(cfg.features[0], outputs, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        same = inputs == outputs
        self.shortcut = None if same else nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x, time):
        y = self.conv(self.cfg.act(self.norm(x))) + self.time_proj(time)[:, None, None]
        return self.dropout(y) + (x if self.shortcut is None else self.shortcut(x))


class UNet(nnx.Module):
    def __init__(self, cfg, schedule, *, rngs):
        small, large = cfg.features
        self.cfg, self.rngs = cfg, rngs
        self.schedules = [schedule, None]  # a list of ordinary objects
        self.time_embedding = TimeEmbedding(small, rngs=rngs)
        self.inc = nnx.Conv(1, small, (3, 3), rngs=rngs)
        self.maxpool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
        self.down_blocks = nnx.List([ResnetBlock(cfg, small, large, rngs=rngs)])
        self.middle = ResnetBlock(cfg, large, large, rngs=rngs)
        self.up = nnx.ConvTranspose(large, small, (2, 2), (2, 2), rngs=rngs)
        self.up_blocks = nnx.List([ResnetBlock(cfg, small + large, small, rngs=rngs)])
        self.layers = nnx.data({"out": nnx.Conv(small, 1, (1, 1), rngs=rngs)})

    def __call__(self, x, t):
        time = self.time_embedding(t)
        x, skips = self.inc(x), []
        for block in self.down_blocks:
            x = block(x, time)
            skips.append(x)
            x = self.maxpool(x)
        x = nnx.remat(ResnetBlock.__call__)(self.middle, x, time)
        for block in self.up_blocks:
            x = block(jnp.concatenate([skips.pop(), self.up(x)], -1), time)
        return self.layers["out"](x)

    def loss(self, x):
        schedule = self.schedules[0]
        t = jax.random.randint(self.rngs.time(), (len(x),), 0, schedule.num_steps)
        noise = jax.random.normal(self.rngs.noise(), x.shape)
        return jnp.mean((self(schedule.add_noise(x, noise, t), t) - noise) ** 2)


def make():
    rngs = nnx.Rngs(0, dropout=1, noise=2, time=3)
    model = UNet(ModelCfg(), Schedule(50), rngs=rngs)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graphdef, state = nnx.split(model)
    return model, optimizer, nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def batch(step):
    return (jax.random.normal(jax.random.key(step), (8, 8, 8, 1)),)


def train_step(model, optimizer, ema, images):
    loss, grads = nnx.value_and_grad(lambda model: model.loss(images))(model)
    optimizer.update(model, grads)
    old, new = nnx.state(ema, nnx.Param), nnx.state(model, nnx.Param)
    nnx.update(ema, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, old, new))
    return loss


def sample(model, key, num_steps):
    def denoise(i, carry):
        model, x = carry
        t = jnp.full(len(x), num_steps - 1 - i)
        return model, x - model(x, t) / num_steps

    carry = model, jax.random.normal(key, (2, 8, 8, 1))
    return nnx.fori_loop(0, num_steps, denoise, carry)[1]


def train(jit, objects, steps):
    step_fn = jit(train_step, **OPTIONS)
    losses = [step_fn(*objects, *batch(step)) for step in range(steps)]
    model = nnx.view(objects[2], deterministic=True)
    sample_fn = jit(sample, static_argnames="num_steps")
    return losses, [sample_fn(model, jax.random.key(step), num_steps=4) for step in range(2)]


def shardings(strategy, model, optimizer, ema):
    return strategy(model), strategy(optimizer, model), strategy(ema)


OPTIONS = {"donate_argnums": (0, 1, 2)}
RULES = {r"(conv|inc|middle)/kernel$": P(None, None, None, "model"), r"mlp/": P("model")}
