"""The parts of a trainer for LoRA, as in Tunix.

https://github.com/google/tunix/blob/main/tunix/sft/peft_trainer.py
"""

import flax
import jax
import jax.numpy as jnp
from flax import nnx


class GradientAccumulator(nnx.Module):
    def __init__(self, model, wrt):
        self.grads = nnx.data(jax.tree.map(jnp.zeros_like, nnx.state(model, wrt)))
        self.denom = nnx.Variable(jnp.zeros(()))

    def add(self, grads):
        nnx.update(self.grads, jax.tree.map(jnp.add, self.grads, grads))
        self.denom[...] += 1

    def get(self):
        return jax.tree.map(lambda x: x / self.denom[...], self.grads)

    def reset(self):
        nnx.update(self, jax.tree.map(jnp.zeros_like, nnx.state(self)))


@flax.struct.dataclass
class TrainingInput:
    input_tokens: jax.Array
    temperature: float = flax.struct.field(pytree_node=False, default=2.0)
