"""What a training step needs around its gradient."""

from .accumulation import accumulate_gradients
from .offloading import fetched, offload
from .partial_gradients import partial_gradients, reduce_gradients

__all__ = [
    "accumulate_gradients",
    "fetched",
    "offload",
    "partial_gradients",
    "reduce_gradients",
]
