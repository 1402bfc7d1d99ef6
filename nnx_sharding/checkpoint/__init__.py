"""Checkpoints of models and optimizers, in the format of Orbax.

Read in this order: ``named`` gives each array of a tree its name, ``saving`` writes them,
``stored`` reads what is there, ``restoring`` puts it into a tree, ``steps`` keeps those of a
training.
"""

from .restoring import restore
from .saving import save
from .steps import Checkpoints
from .stored import StoredArray, contents

__all__ = ["Checkpoints", "StoredArray", "contents", "restore", "save"]
