"""Checkpoints of models and optimizers, in the format of Orbax.

Read in this order: ``names`` gives each array of a tree its name, ``stored`` lists and reads the
arrays of a checkpoint, ``sources`` finds those that a tree needs, ``restore`` puts them into it.
``items`` are the arguments of Orbax for that, ``files`` saves and restores single checkpoints,
``steps`` those of a training run.
"""

from .files import restore, save
from .items import DataRestore, DataSave, ModelRestore, ModelSave
from .safetensors import load_safetensors
from .safetensors_save import save_safetensors
from .steps import Checkpoints
from .stored import StoredArray, contents
from .tensor_rules import Tensor

__all__ = [
    "Checkpoints",
    "DataRestore",
    "DataSave",
    "ModelRestore",
    "ModelSave",
    "StoredArray",
    "Tensor",
    "contents",
    "load_safetensors",
    "restore",
    "save",
    "save_safetensors",
]
