"""A variational autoencoder that keeps a loss in a layer, as in Flax's example.

https://github.com/google/flax/blob/main/examples/nnx_toy_examples/05_vae.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P


class Loss(nnx.Variable):
    pass


class Encoder(nnx.Module):
    def __init__(self, din, dmid, dout, *, rngs):
        self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
        self.linear_mean = nnx.Linear(dmid, dout, rngs=rngs)
        self.linear_std = nnx.Linear(dmid, dout, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        x = jax.nn.relu(self.linear1(x.reshape(len(x), -1)))
        mean, std = self.linear_mean(x), jnp.exp(self.linear_std(x))
        self.kl_loss = Loss(0.5 * jnp.mean(-jnp.log(std**2) - 1.0 + std**2 + mean**2))
        return mean + std * jax.random.normal(self.rngs.noise(), mean.shape)


class Decoder(nnx.Module):
    def __init__(self, din, dmid, dout, *, rngs):
        self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
        self.linear2 = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, z):
        return self.linear2(jax.nn.relu(self.linear1(z)))


class VAE(nnx.Module):
    def __init__(self, hidden_size, latent_size, output_shape, *, rngs):
        size = int(np.prod(output_shape))
        self.output_shape = output_shape  # a list
        self.encoder = Encoder(size, hidden_size, latent_size, rngs=rngs)
        self.decoder = Decoder(latent_size, hidden_size, size, rngs=rngs)

    def __call__(self, x):
        return self.decoder(self.encoder(x)).reshape(-1, *self.output_shape)


def make():
    model = VAE(32, 8, [8, 8], rngs=nnx.Rngs(0, noise=1))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def batch(step):
    return (np.asarray(np.random.default_rng(step).random((8, 8, 8)) > 0.5, np.float32),)


def train_step(model, optimizer, x):
    def loss_fn(model):
        logits = model(x)
        kl_loss = sum(jax.tree.leaves(nnx.pop(model, Loss)), 0.0)
        return optax.sigmoid_binary_cross_entropy(logits, x).mean() + 0.1 * kl_loss

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def forward(model, x):
    y = jax.nn.sigmoid(model(x))
    nnx.pop(model, Loss)
    return y


def train(jit, objects, steps):
    model, _ = objects

    class Generator(nnx.Module):
        def __init__(self, vae):
            self.vae = vae

        @jit
        def __call__(self, z):
            return nnx.sigmoid(self.vae.decoder(z).reshape(-1, *self.vae.output_shape))

    step_fn, forward_fn, generate = jit(train_step), jit(forward), Generator(model)
    losses = [step_fn(*objects, *batch(step)) for step in range(steps)]
    z = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    return losses, forward_fn(model, *batch(0)), [generate(z) for _ in range(2)]


RULES = {
    r"encoder/linear1/kernel$": P("data", "model"),
    r"encoder/linear_(mean|std)/kernel$": P("model"),
    r"decoder/linear1/kernel$": P(None, "model"),
    r"decoder/linear2/kernel$": P("model", "data"),
}
