"""What a training step needs around its gradient."""

from .accumulation import accumulate_gradients

__all__ = ["accumulate_gradients"]
