"""What several programs have in common."""

import jax.numpy as jnp


def apply_rope(x, positions):
    """Rotary position embeddings of an array [batch, length, heads, features]."""
    timescale = 10_000 ** (jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (positions[..., None] / timescale)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
