"""Checkpoints of models and optimizers, in the format of Orbax.

Read in this order: ``names`` gives each array of a tree its name, ``save`` writes the arrays,
``read`` reads them, ``restore`` puts them into a tree, ``steps`` manages those of a training run.
"""

from .read import StoredArray, contents
from .restore import restore
from .safetensors import load_safetensors
from .safetensors_save import save_safetensors
from .save import save
from .steps import Checkpoints
from .tensor_rules import Tensor

__all__ = [
    "Checkpoints",
    "StoredArray",
    "Tensor",
    "contents",
    "load_safetensors",
    "restore",
    "save",
    "save_safetensors",
]
