"""Functions for training steps: gradients of microbatches, and state in host memory."""

from .accumulation import accumulate_gradients
from .offloading import fetched, offload

__all__ = ["accumulate_gradients", "fetched", "offload"]
