"""Checkpoints of models and optimizers, in the format of Orbax, and weights in safetensors files.

``names`` names arrays, ``stored`` reads and ``restore`` places those of checkpoints that ``files``
saves, for training ``steps``; ``tensor_files`` and ``tensor_rules`` are for ``safetensors``.
"""

from .files import ModelRestore, ModelSave, restore, save
from .safetensors import load_safetensors, save_safetensors
from .steps import Checkpoints
from .stored import contents
from .tensor_rules import Tensor

__all__ = [
    "Checkpoints",
    "ModelRestore",
    "ModelSave",
    "Tensor",
    "contents",
    "load_safetensors",
    "restore",
    "save",
    "save_safetensors",
]
