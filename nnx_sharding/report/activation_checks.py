"""Whether the activations of a function can be sharded as declared, with all problems listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .. import _compat
from ..analysis.activation_table import ActivationTable, activations_table
from ..analysis.tables import Pictured, text
from ..errors import ActivationError, listed
from ..transforms.jit import jit


@dataclasses.dataclass(frozen=True)
class ActivationReport(Pictured):
    """The result of :func:`check_activations`; ``print`` and notebooks show it as a table.

    Attributes:
      rows: what each module returns; empty if there are problems.
      problems: what is wrong, as lines of text.
    """

    rows: ActivationTable
    problems: list[str]

    @property
    def ok(self) -> bool:
        """Whether it has no problems."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raises an ``ActivationError`` that lists all problems, if there are any."""
        if self.problems:
            raise ActivationError("\n".join(listed(self.problems)))

    def _pictures(self, width: int) -> Iterable[Any]:
        yield from map(text, self.problems)
        if self.ok:
            yield activations_table(self.rows)


@_compat.api_boundary
def check_activations(fun: Callable[..., Any], *args: Any, **options: Any) -> ActivationReport:
    """Checks how a function shards the activations of its modules, without compiling it.

    Lists every module whose output JAX cannot type on Explicit axes, with the specs that would
    work, and every declared spec that does not fit.

    Args:
      fun: the function.
      *args: its arguments, abstract or not.
      **options: for :func:`~nnx_sharding.jit`: ``in_shardings``, ``activation_shardings``, ….

    Returns:
      The activations with their shardings, or the problems.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.report import check_activations
      >>> mesh = jax.make_mesh((8,), ("model",))
      >>> model = nnx.Dict(down=nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
      >>> specs = StateSharding({nnx.PathContains("kernel"): P("model"), ...: P()})
      >>> forward = lambda model, x: model.down(x)
      >>> options = {"mesh": mesh, "in_shardings": (specs, P(None, "model"))}
      >>> report = check_activations(forward, model, jnp.ones((2, 16)), **options)
      >>> report.ok, "model.down: Linear" in report.problems[1]
      (False, True)
    """
    try:
        rows = jit(fun, **options).trace(*args).activations()
    except ActivationError as error:
        return ActivationReport(ActivationTable(), str(error).splitlines())
    return ActivationReport(rows, [])
