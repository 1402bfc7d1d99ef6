"""A candidate of a plan: strategies on a mesh, for a variant of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
      strategy: the names of the strategies, such as ``fsdp + tensor``.
      sizes: the sizes of the axes of the mesh by name, major first.
      variant: the options of the strategies and the variant of the step; empty if there are none.
      in_shardings: the sharding of each argument, for :func:`~nnx_sharding.jit`. Shardings have no
        mesh, so you can use them for every mesh with these axes. Only shardings of an offloaded
        state name this mesh.
      mesh: the mesh for which the step is compiled. It may be of devices that this machine does not
        have: to run the step, make a mesh of the same ``sizes``.
      step: the function that was planned, for :func:`~nnx_sharding.jit`: your function with the
        keyword arguments and the ``remat`` of the variant. Your models need not have this
        ``remat``.
      recipe: Python code that makes the mesh and ``step``, from the arguments under the names that
        they have in the step. The code compiles to the program that was planned. Empty if the
        strategy is a function of the user.
      rows: the number of rows of the batch; 0 without a batch.
    """

    strategy: str
    sizes: Mapping[str, int]
    variant: str
    in_shardings: tuple[Any, ...]
    mesh: Mesh = dataclasses.field(repr=False)
    step: Callable[..., Any] | None = dataclasses.field(default=None, repr=False, compare=False)
    recipe: str = dataclasses.field(default="", repr=False)
    rows: int = dataclasses.field(default=0, repr=False)

    @property
    def name(self) -> str:
        """The strategy, mesh and variant: ``fsdp + tensor, data 4 × model 2, remat=True``."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return ", ".join(part for part in (self.strategy, sizes, self.variant) if part)
