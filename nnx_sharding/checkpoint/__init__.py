"""Checkpoints of models and optimizers, in the format of Orbax, and weights in safetensors files.

- Checkpoints: ``files`` saves them, ``stored`` opens and reads them, ``restore`` fills a model, and
  ``steps`` has those of a training run. ``names`` lists the arrays of a model by name.
- Weights: ``safetensors`` loads and saves, by what ``tensor_rules`` (which array),
  ``tensor_matching`` (what fits), ``tensor_layouts`` (how dimensions become others) and
  ``tensor_files`` (which bytes) say.
  ``tensor_inference`` writes such rules, by ``tensor_links`` and ``tensor_names`` (which mean the
  same) and ``tensor_candidates`` (in which ways they fit), as the text that ``tensor_table`` reads.
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
