"""The timetable of 1F1B, a pipeline whose stages run one forward and one backward pass in turn.

Stage s of S computes microbatch i forward at tick ``i + s``, and backward at tick
``i + 2 (S-1) - s``. For S = 3 and M = 5, with A for the backward pass of microbatch a::

    tick      0   1   2   3   4   5   6   7   8
    stage 0   a   b   c   d   eA  .B  .C  .D  .E
    stage 1   .   a   b   cA  dB  eC  .D  .E  .
    stage 2   .   .   aA  bB  cC  dD  eE  .   .
              └ warm ─┘──── steady ────┘─ cool ┘
              forward        both       backward

An *item* is the number of a microbatch. A stage whose item is not in 0 … M-1 is idle. A stage has
at most K = 2S - 1 items in flight, so the values that its backward pass needs are in a *ring* of K
slots: the forward pass of tick t writes slot t mod K.

The schedule is the one of PipeDream with flushes (Narayanan et al., 2021, arXiv:2006.09503).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Timetable(NamedTuple):
    """The items of the stages at each tick.

    For S = 3, the item of each stage::

        tick          0   1   2   3   4   5
        forward  0    0   1   2   3   4   5     entering: the first line
                 1   -1   0   1   2   3   4
                 2   -2  -1   0   1   2   3     leaving, with its loss
        backward 2   -2  -1   0   1   2   3     leaving, with the gradient of the loss
                 1   -3  -2  -1   0   1   2
                 0   -4  -3  -2  -1   0   1     returning to where it entered
    """

    stages: int  # S
    microbatches: int  # M

    @property
    def delay(self) -> int:
        """The ticks that an item takes from the first stage to the last one, or back."""
        return self.stages - 1

    @property
    def slots(self) -> int:
        """The length of a ring, which is the largest number of items that a stage has in flight."""
        return 2 * self.delay + 1

    @property
    def is_first(self) -> jax.Array:
        """Whether a stage is the first one, (S,)."""
        return jnp.arange(self.stages) == 0

    @property
    def is_last(self) -> jax.Array:
        """Whether a stage is the last one, (S,)."""
        return jnp.arange(self.stages) == self.delay

    def forward(self, tick: jax.Array) -> jax.Array:
        """Returns the items of the forward passes, (S,)."""
        return tick - jnp.arange(self.stages)

    def backward(self, tick: jax.Array) -> jax.Array:
        """Returns the items of the backward passes, (S,)."""
        return self.returning(tick) + jnp.arange(self.stages)

    def leaving(self, tick: jax.Array) -> jax.Array:
        """Returns the item that leaves the last stage, and starts its way back."""
        return tick - self.delay

    def returning(self, tick: jax.Array) -> jax.Array:
        """Returns the item whose backward pass ends in the first stage."""
        return tick - 2 * self.delay

    def is_busy(self, items: jax.Array) -> jax.Array:
        """Whether items are microbatches, so that a stage with such an item is not idle."""
        return (items >= 0) & (items < self.microbatches)

    def slot(self, tick: jax.Array) -> jax.Array:
        """Returns the slot of a ring that the forward passes of a tick write.

        The tick is also the number of the item that enters the first stage, so the slot of an item
        in the ring of the first stage is found in the same way.
        """
        return tick % self.slots

    def slots_on_stages(self, items: jax.Array) -> jax.Array:
        """Returns the slot in which each stage has what it kept of its item, (S,)."""
        # Stage s computed item i forward at tick i + s.
        return self.slot(items + jnp.arange(self.stages))
