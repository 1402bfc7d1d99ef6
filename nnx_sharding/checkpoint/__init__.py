"""Checkpoints of models and optimizers, in the format of Orbax, and weights in safetensors files.

Read in this order: ``names`` gives each array of a tree its name, ``stored`` lists and reads the
arrays of a checkpoint, ``restore`` finds those that a tree needs and puts them into it. ``files``
saves and restores single checkpoints, ``steps`` those of a training run. ``tensor_files`` and
``tensor_rules`` are for ``safetensors``, the rules also for ``transfer`` between live models.
"""

from .files import ModelRestore, ModelSave, restore, save
from .live_models import transfer
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
    "transfer",
]
