"""Makes the shardings of a candidate, and writes the Python code that makes them.

A chain is a list of calls of strategies. The functions of a chain are called one after another,
each with the sharding that the previous one returned as `base`:

    "fsdp + tensor" on data 4 × model 2
    sharding = tensor_parallel(model, mesh=mesh, axis="model")
    sharding = fsdp(model, mesh=mesh, base=sharding, axis="data")

Shardings have no mesh, so that the recipe that is printed works on any mesh of these axes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import AbstractMesh, AxisType, Mesh

from ..errors import ShardingWarning, warn_or_raise, warnings_collected
from ..partition import replicated
from ..specs.state_sharding import StateSharding
from ..training import offload
from ..transforms.jit import jit

# A call of a chain: the strategy and its options.
Call: TypeAlias = tuple[Callable[..., Any], dict[str, Any]]
# A warning that was collected: its category and its text.
Warned: TypeAlias = tuple[type[ShardingWarning], str]


class MadeSharding(NamedTuple):
    """What a call of a strategy returned."""

    sharding: StateSharding
    warned: list[Warned]  # the warnings of the call


class NamedArgument(NamedTuple):
    """A model or an optimizer among the arguments of the step."""

    text: str  # the expression for it in a recipe
    value: Any


class Recipe:
    """Makes shardings, and writes the statements that make them.

    Args:
      mesh: the mesh.
      cache: the shardings that strategies returned before, for the same models, with the warnings
        of the strategies. The key is the mesh, the model and all calls that led to the sharding, so
        that chains that begin alike share their first shardings. This adds to the dict.

    Attributes:
      made: the shardings so far, by their names in the lines. A name is assigned again by each
        call of a chain, so it stands for the sharding by the last call.
      lines: the statements that make these shardings.
      _mesh: the mesh.
      _cache: the shardings that strategies returned, by the mesh, the model and the calls.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, cache: dict[Any, MadeSharding]):
        self._mesh, self._cache = mesh, cache
        self.made: dict[str, Any] = {}
        self.lines: list[str] = []

    def apply(
        self, chain: Sequence[Call], model: NamedArgument, optimizer: NamedArgument | None
    ) -> str:
        """Applies a chain to a model; returns the name that the sharding has in ``made``.

        Args:
          chain: the calls; empty replicates the model. Only the last call gets the optimizer,
            because the sharding of its state follows from all calls.
          optimizer: the optimizer of the model; None without one.
        """
        # The number in the name counts the shardings in `made`, so each name is new.
        name = f"sharding{len(self.made) + 1}" if self.made else "sharding"
        chain = chain or [(replicated, {})]
        key: tuple[Any, ...] = (self._mesh, model.text)  # the loop appends the calls so far
        for i, (strategy, options) in enumerate(chain):
            keywords: dict[str, Any] = {}  # the options of the call that are not in `options`
            texts = [model.text, "mesh=mesh"]  # all arguments of the call, as code
            if i > 0:  # each statement of a chain assigns to the same name, as `made` does
                keywords["base"] = self.made[name]
                texts.append(f"base={name}")
            if optimizer is not None and i == len(chain) - 1:
                keywords["optimizer"] = optimizer.value
                texts.append(f"optimizer={optimizer.text}")
                key = (*key, optimizer.text)
            texts += [f"{option}={value!r}" for option, value in options.items()]
            key = (*key, strategy, *options.items())
            if key not in self._cache:
                with warnings_collected() as warned:
                    sharding = strategy(model.value, mesh=self._mesh, **keywords, **options)
                self._cache[key] = MadeSharding(sharding, warned)
            self.made[name], warned = self._cache[key]
            for category, text in warned:  # each chain with this call gets its warnings
                warn_or_raise(category, text, strict=False)
            self.lines.append(f"{name} = {strategy.__name__}({', '.join(texts)})")
        return name

    def offload(self, sharding: str, optimizer: NamedArgument) -> str:
        """Makes a sharding with the optimizer state on the host; returns its name in ``made``."""
        name = f"{sharding}_on_host"
        self.made[name] = offload(self.made[sharding], optimizer.value, mesh=self._mesh)
        self.lines.append(f"{name} = offload({sharding}, {optimizer.text}, mesh=mesh)")
        return name


class Expression(str):
    """An expression that is its own ``repr``, so that a tree of expressions is printed as code."""

    __repr__ = str.__str__


def recipe_text(
    mesh: Mesh | AbstractMesh,
    *,
    step: str,
    options: Mapping[str, Any],
    lines: Sequence[str],
    shardings: str,
) -> str:
    """Returns the Python code that makes the mesh, the shardings and the step, with its imports.

    Args:
      step: the expression for the step.
      options: the options of ``jit`` besides the mesh and the shardings of arguments.
      shardings: the expression for ``in_shardings``.
    """
    types = ""
    if {*mesh.axis_types} != {AxisType.Explicit}:  # the default of make_mesh
        kinds = ", ".join(f"AxisType.{kind.name}" for kind in mesh.axis_types)
        types = f", axis_types=({kinds},)"
    jit_parameters = inspect.signature(jit).parameters
    options_text = "".join(
        f", {key}={value!r}"
        for key, value in options.items()
        if key not in jit_parameters or value != jit_parameters[key].default
    )
    head = f"mesh = make_mesh({dict(mesh.shape)}{types})"
    last = f"step = jit({step}, in_shardings={shardings}, mesh=mesh{options_text})"
    code = "\n".join([head, *lines, last])
    return "\n".join([*_imports(code), code])


def _imports(code: str) -> list[str]:
    """Returns the lines that import what the code of a recipe uses, besides the user's objects."""
    words = {*re.findall(r"\w+", code)}
    lines = []
    if "functools" in words:
        lines.append("import functools")
    for module, names in _RECIPE_NAMES.items():
        used = [text for name, text in names.items() if name in words]
        if used:
            lines.append(f"from {module} import {', '.join(used)}")
    return lines


# Module → the names in recipes, and how they are imported.
_RECIPE_NAMES: dict[str, dict[str, str]] = {
    "jax.sharding": {"AxisType": "AxisType", "P": "PartitionSpec as P"},
    "nnx_sharding": {
        name: name
        for name in (
            "fsdp",
            "jit",
            "make_mesh",
            "replicated",
            "tensor_parallel",
            "zero1",
        )
    },
    "nnx_sharding.experimental": {name: name for name in ("context_parallel", "expert_parallel")},
    "nnx_sharding.partition": {"pipeline": "pipeline"},
    "nnx_sharding.planning.variants": {"with_remat": "with_remat"},
    "nnx_sharding.training": {"offload": "offload"},
}
