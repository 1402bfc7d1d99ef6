"""What a training step needs around its gradient."""

from .accumulation import accumulate_gradients
from .offloading import fetched, offload

__all__ = ["accumulate_gradients", "fetched", "offload"]
