"""A sampler in an ordinary class, whose method is compiled, as in Flax's Gemma example and Tunix.

https://github.com/google/tunix/blob/main/tunix/generate/sampler.py
"""

import flax
import jax
import jax.numpy as jnp
from flax import nnx


@flax.struct.dataclass
class SamplingState:
    step: jax.Array
    tokens: jax.Array
    cache: dict
    seed: jax.Array
    temperature: float = flax.struct.field(pytree_node=False)


class Vocab:
    """A tokenizer: an ordinary object, without ``__eq__``."""

    def pad_id(self):
        return 0


class Sampler:
    def __init__(self, jit, transformer, vocab):
        self.vocab, self.transformer = vocab, transformer
        self._compiled_sample_fn = jit(self._sample_fn)

    def _sample_fn(self, graphdef, params, initial):
        length = initial.tokens.shape[1]

        def sample_step(state):
            now = state.step
            token = jax.lax.dynamic_slice_in_dim(state.tokens, now, 1, 1)
            mask = jnp.broadcast_to(jnp.arange(length) <= now, (len(token), 1, length))
            forward = nnx.capture(nnx.merge(graphdef, params), nnx.Intermediate)
            (logits, cache), _ = forward(token, jnp.full_like(token, now), state.cache, mask)
            key = jax.random.fold_in(state.seed, now)
            new = jax.random.categorical(key, logits[:, -1] / state.temperature)
            old = state.tokens[:, now + 1]
            new = jnp.where(old == self.vocab.pad_id(), new, old)
            return state.replace(
                step=now + 1, tokens=state.tokens.at[:, now + 1].set(new), cache=cache
            )

        return jax.lax.while_loop(lambda state: state.step < length - 1, sample_step, initial)

    def __call__(self, prompts, temperature):
        graphdef, params = nnx.split(self.transformer)
        cache = self.transformer.init_cache(*prompts.shape)
        state = SamplingState(jnp.int32(0), prompts, cache, jax.random.key(0), temperature)
        return self._compiled_sample_fn(graphdef, params, state).tokens
