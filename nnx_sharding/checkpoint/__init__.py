"""Checkpoints of models and optimizers, in the format of Orbax, and weights in safetensors files.

- Checkpoints: ``files`` saves them, ``stored`` opens and reads them, ``restore`` fills a model, and
  ``steps`` manages the steps of a training run. ``names`` lists the arrays of a model by name. If
  these differ from the saved ones, ``renamed`` and ``optimizer_states`` say what to pass.
- Weights: ``safetensors`` loads and saves them. ``tensor_rules`` has the user's rules, which say
  what array a tensor becomes. ``tensor_matching`` checks that all tensors and arrays fit.
  ``tensor_layouts`` says how dimensions of a tensor become dimensions of an array, and
  ``tensor_files`` reads and writes bytes. ``tensor_release`` publishes new files.
- Inferred rules: ``tensor_inference`` writes rules. ``tensor_links`` and ``tensor_names`` find the
  names that mean the same, and ``tensor_candidates`` the ways in which tensors fit.
  ``tensor_table`` writes and reads rules as text.
"""

from typing import TYPE_CHECKING, Any

from ..errors import moved_name
from .files import ModelRestore, ModelSave, restore, save
from .safetensors import load_safetensors, save_safetensors
from .steps import Checkpoints
from .stored import contents
from .tensor_inference import match_tensors
from .tensor_rules import Tensor

__all__ = [
    "Checkpoints",
    "ModelRestore",
    "ModelSave",
    "Tensor",
    "contents",
    "load_safetensors",
    "match_tensors",
    "restore",
    "save",
    "save_safetensors",
]

_MOVED = {"transfer": "nnx_sharding.experimental"}


if not TYPE_CHECKING:  # with it, type checkers would find any name here

    def __getattr__(name: str) -> Any:
        return moved_name(__name__, name, _MOVED)
