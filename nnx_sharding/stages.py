"""The stages between a function and its execution, in the names of the user's own arguments.

The stages mirror ``jax.stages``. Pytrees have the form of the user's arguments and result: inputs
are ``(positional, keywords)`` without static arguments, outputs are the function's own result. In
both a module is an ``nnx.State`` by path, and a bare Variable is its value. Variables that the
function did not change are not outputs of the program, so their information in the result is the
information of the input. Figures that a backend does not provide are None.
"""

from .transforms.stages import Compiled, Lowered, Stage, Traced

__all__ = ["Compiled", "Lowered", "Stage", "Traced"]
