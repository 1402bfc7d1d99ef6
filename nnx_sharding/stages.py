"""The stages between a function and its execution, in the names of the user's own arguments.

They mirror ``jax.stages``, with every pytree in the form of the user's arguments and result:
``(positional, keywords)`` for inputs, without static arguments, and the function's own result for
outputs. In both a module is an ``nnx.State`` by path, and a bare Variable is its value. Variables
that the function did not change are not outputs of the program: where the result holds them, the
information is that of the input. Whatever a backend does not provide is None.
"""

from .transforms.stages import Compiled, Lowered, Stage, Traced

__all__ = ["Compiled", "Lowered", "Stage", "Traced"]
