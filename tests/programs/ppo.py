"""PPO: an actor and a critic with an optimizer each, trained in one step.

https://github.com/jinPrelude/minimal-rl-nnx/blob/main/ppo.py
https://github.com/keraJLi/rejax
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass
class Args:
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    update_epochs: int = 1
    num_minibatches: int = 2
    max_grad_norm: float = 0.5


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    returns: jax.Array


def layer_init(features, outputs, scale, *, rngs):
    init = nnx.initializers.orthogonal(scale)
    return nnx.Linear(features, outputs, kernel_init=init, rngs=rngs)


class Normalizer(nnx.Module):
    """Running mean and variance of the observations."""

    def __init__(self, size):
        self.mean = nnx.BatchStat(jnp.zeros(size))
        self.var = nnx.BatchStat(jnp.ones(size))
        self.count = nnx.Variable(1e-4)  # a Python number

    def __call__(self, x):
        return (x - self.mean[...]) / jnp.sqrt(self.var[...] + 1e-8)

    def update(self, x):
        total = self.count.get_value() + len(x)
        weight = len(x) / total
        self.mean[...] += weight * (x.mean(0) - self.mean[...])
        self.var[...] += weight * (x.var(0) - self.var[...])
        self.count.set_value(total)


class Actor(nnx.Module):
    def __init__(self, *, rngs):
        sizes = [(4, 32, 2**0.5), (32, 32, 2**0.5), (32, 2, 0.01)]
        self.layers = nnx.List([layer_init(*size, rngs=rngs) for size in sizes])
        self.log_std = nnx.Param(jnp.zeros(2))
        self.activation = jnp.tanh

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x), self.log_std[...]


def log_prob(mean, log_std, action):
    return -0.5 * jnp.sum(((action - mean) / jnp.exp(log_std)) ** 2 + 2 * log_std, -1)


class Agent(nnx.Module):
    def __init__(self, args, *, rngs):
        self.args, self.rngs = args, rngs
        self.normalizer = Normalizer(4)
        critic = [layer_init(4, 32, 1.0, rngs=rngs), nnx.tanh, layer_init(32, 1, 1.0, rngs=rngs)]
        self.networks = nnx.Dict(actor=Actor(rngs=rngs), critic=nnx.Sequential(*critic))

    def act(self, obs):
        mean, log_std = self.networks["actor"](self.normalizer(obs))
        action = mean + jnp.exp(log_std) * jax.random.normal(self.rngs.action(), mean.shape)
        return action, log_prob(mean, log_std, action)


def make():
    agent = Agent(Args(), rngs=nnx.Rngs(params=0, action=1, permutation=2))
    tx = optax.chain(optax.clip_by_global_norm(agent.args.max_grad_norm), optax.adam(3e-3))
    optimizers = {
        name: nnx.Optimizer(network, tx, wrt=nnx.Param) for name, network in agent.networks.items()
    }
    return agent, optimizers


def batch(step):
    keys = jax.random.split(jax.random.key(step), 4)
    obs, action = (jax.random.normal(key, (16, n)) for key, n in zip(keys, (4, 2), strict=False))
    others = (jax.random.normal(key, (16,)) for key in keys[2:])
    return (Transition(obs, action, jnp.full(16, -2.0), *others),)


def train_step(agent, optimizers, rollout):
    args = agent.args
    agent.normalizer.update(rollout.obs)

    def actor_loss(actor, batch):
        mean, log_std = actor(agent.normalizer(batch.obs))
        ratio = jnp.exp(log_prob(mean, log_std, batch.action) - batch.log_prob)
        clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        loss = -jnp.minimum(ratio * batch.advantage, clipped * batch.advantage).mean()
        return loss - args.ent_coef * log_std.sum(), ratio.mean()

    def critic_loss(critic, batch):
        return jnp.mean((critic(agent.normalizer(batch.obs))[:, 0] - batch.returns) ** 2)

    losses = []
    for _ in range(args.update_epochs):
        order = jax.random.permutation(agent.rngs.permutation(), len(rollout.obs))
        for rows in order.reshape(args.num_minibatches, -1):
            batch = jax.tree.map(lambda x: x[rows], rollout)
            actor, critic = agent.networks["actor"], agent.networks["critic"]
            (loss, ratio), grads = nnx.value_and_grad(actor_loss, has_aux=True)(actor, batch)
            optimizers["actor"].update(actor, grads)
            value_loss, grads = nnx.value_and_grad(critic_loss)(critic, batch)
            optimizers["critic"].update(critic, grads)
            losses.append({"policy": loss, "value": value_loss, "ratio": ratio})
    return jax.tree.map(lambda *x: jnp.stack(x).mean(), *losses)


def train(jit, objects, steps):
    agent, _ = objects
    act, step_fn, results = jit(Agent.act), jit(train_step), []
    for step in range(steps):
        (rollout,) = batch(step)
        action, log_prob = act(agent, rollout.obs)
        rollout = rollout._replace(action=action, log_prob=log_prob)
        results.append(step_fn(*objects, rollout))
    return results


def shardings(strategy, agent, optimizers):
    networks = agent.networks
    return strategy(agent), {name: strategy(optimizers[name], networks[name]) for name in networks}


BATCH = (None,)  # as the actions of `act` are
RULES = {r"layers/1/kernel$": P("data", "model"), r"kernel$": P(None, None)}
