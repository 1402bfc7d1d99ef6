"""The arguments of a step that is planned: its models, their optimizers, and the batch."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..analysis.parameters import spec_text
from ..experimental import expert_parallel
from ..experimental.context import has_replaceable_attention
from ..partition import zero1
from ..partition.pipelining import layers_of
from ..partition.variables import variables
from ..transforms.stack import Stack
from .recipes import Call, Expression, MadeSharding, NamedArgument, Recipe


class Arguments:
    """Holds the arguments of a step: its models, their optimizers, and the batch.

    The batch consists of the arrays with the most frequent first dimension. The largest array of
    the batch says how many tokens a step has: if it has integers, each element is a token; if it
    has floats, each feature vector is a token.

    Args:
      args: the arguments, abstract.
      names: the name of each argument in the step.

    Attributes:
      args: the arguments, abstract.
      parts: modules and other leaves, by the expressions that name them: ``batch['x']``. The parts
        are in the order of the leaves of ``args`` as a pytree, in which modules are leaves.
      rows: the first dimension of the batch; 0 without a batch.
      length: the second dimension of the largest array of the batch; 1 if there is none.
      tokens: the number of tokens in the largest array of the batch.
      layers: the different numbers of layers of stacks, in increasing order.
      stages: the different numbers of layers of stacks and of lists of blocks, in increasing order:
        a pipeline divides these numbers.
      experts: the number of experts; 0 without experts.
      has_replaceable_attention: whether a method of attention over sharded sequences changes
        anything.
      _names: the name of each argument in the step.
      _tree: the treedef of ``args``, in which modules are leaves.
      _shardings: the cache of `Recipe`: what strategies returned for these models.
    """

    def __init__(self, args: Sequence[Any], names: Sequence[str]):
        """Finds the batch in the arguments, and the layers and experts of the models in them."""
        self.args, self._names = tuple(args), names
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(
            self.args, is_leaf=_compat.is_graph_object
        )
        self.parts: dict[str, Any] = {}
        for (index, *keys), part in leaves:  # the first key is the position among the arguments
            self.parts[f"{names[index.idx]}{jax.tree_util.keystr(tuple(keys))}"] = part

        # Find the batch. All other arrays are replicated.
        arrays = [part for part in self.parts.values() if not _compat.is_graph_object(part)]
        arrays_with_rows = [array for array in arrays if _rows(array) > 0]
        counts = Counter(map(_rows, arrays_with_rows))  # first dimension → how many arrays have it
        # If several first dimensions are equally frequent, the largest one is that of the batch.
        self.rows = max(counts, key=lambda rows: (counts[rows], rows), default=0)
        batch = [array for array in arrays_with_rows if _rows(array) == self.rows]
        largest: Any = max(batch, key=lambda array: math.prod(array.shape), default=None)
        shape: tuple[int, ...] = (1,) if largest is None else largest.shape
        self.length: int = shape[1] if len(shape) > 1 else 1
        is_vectors = len(shape) > 1 and jax.numpy.issubdtype(largest.dtype, jax.numpy.inexact)
        self.tokens = math.prod(shape[:-1] if is_vectors else shape)

        # Find the layers of the models: stacks, or else lists of equal blocks.
        models = self._models().values()
        layered: list[Any] = []
        for model in models:
            by_path, _ = layers_of(model)
            layered += by_path.values()
        self.layers = sorted({layers.length for layers in layered if isinstance(layers, Stack)})
        self.stages = sorted({len(layers) for layers in layered})
        # The first model with experts tells their number.
        self.experts = next((number for number in map(_experts, models) if number), 0)
        self.has_replaceable_attention = any(map(has_replaceable_attention, models))
        # All recipes share this cache, because many chains begin with the same calls.
        self._shardings: dict[Any, MadeSharding] = {}

    def _models(self) -> dict[str, nnx.Module]:
        """Returns the modules that are not optimizers, by their names in ``parts``."""
        modules = {name: x for name, x in self.parts.items() if _compat.is_graph_object(x)}
        return {name: x for name, x in modules.items() if not isinstance(x, nnx.Optimizer)}

    @functools.cached_property
    def _model_of_optimizer(self) -> dict[str, str]:
        """The name of each optimizer → the name of its model."""
        optimizers = (name for name, x in self.parts.items() if isinstance(x, nnx.Optimizer))
        return {name: self._find_model(name) for name in optimizers}

    def _find_model(self, name: str) -> str:
        """Returns the name of an optimizer's model: the one with the most arrays like its state's.

        Of several such models, the one that is nearest among the arguments is chosen, first among
        the models before the optimizer.

        Args:
          name: the name of the optimizer in ``parts``.

        Raises:
          ValueError: no argument is a model.
        """
        optimizer, order = self.parts[name], [*self.parts]
        if hasattr(optimizer, "model"):  # nnx.ModelAndOptimizer
            return f"{name}.model"
        models = self._models()
        if not models:
            raise ValueError("expected the model of its optimizer among the arguments, got none")
        # The moments of Adam have paths such as opt_state/0/mu/up/kernel, which end in the path of
        # the parameter, up/kernel. The number of keys before that path differs between optimizers,
        # so all ends of a path are compared.
        ends = {(x.path[i:], x.shape) for x in variables(optimizer) for i in range(len(x.path))}

        def rank(model: str) -> tuple[int, bool, int]:
            """Returns the sort key of a model; the largest wins."""
            arrays = {(x.path, x.shape) for x in variables(models[model])}
            distance = order.index(name) - order.index(model)  # > 0: before the optimizer
            return len(arrays & ends), distance > 0, -abs(distance)

        return max(models, key=rank)

    def shard(
        self,
        calls: Sequence[Call],
        mesh: Mesh | AbstractMesh,
        batch: PartitionSpec,
        *,
        offloaded: bool = False,
    ) -> ShardedArguments:
        """Applies a chain of strategies to each model and its optimizer, and shards the batch.

        Args:
          calls: the chain. For models without an optimizer, ``zero1`` is left out, because it only
            shards the state of an optimizer.
          mesh: the mesh.
          batch: the spec of the batch.
          offloaded: whether the state of optimizers is on the host.
        """
        recipe = Recipe(mesh, self._shardings)
        names: dict[str, str] = {}  # part → the name of its sharding in the recipe
        for model_name, optimizer_name in self._models_with_optimizers():
            optimizer: NamedArgument | None = None
            chain = calls
            if optimizer_name is None:
                chain = [call for call in calls if call[0] is not zero1]
            else:
                optimizer = NamedArgument(optimizer_name, self.parts[optimizer_name])
            # The model of an `nnx.ModelAndOptimizer` is a part of the optimizer, not of `parts`.
            model = self.parts.get(model_name)
            if model is None and optimizer is not None:
                model = optimizer.value.model
            name = recipe.apply(chain, NamedArgument(model_name, model), optimizer)
            # If a model has several optimizers, the sharding with its first one is used.
            names.setdefault(model_name, name)
            if optimizer is not None:
                names[optimizer.text] = recipe.offload(name, optimizer) if offloaded else name

        # `parts` has the order of the leaves of the arguments, so these lists can be unflattened.
        shardings: list[Any] = []
        expressions = []
        for name, part in self.parts.items():
            if name in names:
                shardings.append(recipe.made[names[name]])
                expressions.append(Expression(names[name]))
            else:
                spec = self._spec_of_array(part, batch)
                shardings.append(spec)
                expressions.append(Expression("None" if spec is None else spec_text(spec)))
        return ShardedArguments(
            shardings=jax.tree_util.tree_unflatten(self._tree, shardings),
            lines=recipe.lines,
            text=repr(jax.tree_util.tree_unflatten(self._tree, expressions)),
        )

    def _models_with_optimizers(self) -> list[tuple[str, str | None]]:
        """Lists pairs of names: each optimizer after its model, and each other model with None.

        A model with several optimizers is in several pairs.
        """
        pairs: list[tuple[str, str | None]] = []
        for optimizer, model in self._model_of_optimizer.items():
            pairs.append((model, optimizer))
        with_optimizer = {*self._model_of_optimizer.values()}
        pairs += [(model, None) for model in self._models() if model not in with_optimizer]
        return pairs

    def _spec_of_array(self, array: Any, batch: PartitionSpec) -> PartitionSpec | None:
        """Returns the spec of an array outside of modules; None replicates it.

        Arrays that do not belong to the batch are replicated. ``batch`` is the spec of the largest
        array of the batch. If ``batch`` names axes for the second dimension, this dimension has the
        positions in sequences. An array with another second dimension, for example labels of rows,
        has no such positions, so only its rows are sharded.
        """
        if not self.rows or _rows(array) != self.rows:
            return None
        has_length = len(array.shape) > 1 and array.shape[1] == self.length
        return batch if has_length else PartitionSpec(*batch[:1])

    def with_rows(self, rows: int) -> Arguments:
        """Returns the arguments with another number of rows in the batch, if there is a batch."""
        if not self.rows:
            return self
        parts = []
        for part in self.parts.values():
            if _rows(part) == self.rows:  # modules have 0 rows
                part = jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype)
            parts.append(part)
        return Arguments(jax.tree_util.tree_unflatten(self._tree, parts), self._names)


class ShardedArguments(NamedTuple):
    """The shardings of arguments by a chain of strategies, and the code that makes them."""

    shardings: tuple[Any, ...]  # the sharding of each argument
    lines: list[str]  # the statements of a recipe that make the shardings
    text: str  # the tuple of shardings in the recipe: ``(sharding, P('data'))``


def _rows(part: Any) -> int:
    """Returns the first dimension of an array; 0 for a scalar and for what is not an array."""
    shape = () if _compat.is_graph_object(part) else getattr(part, "shape", ())
    return int(shape[0]) if shape else 0


def _experts(model: nnx.Module) -> int:
    """Finds the number of experts of a model; 0 without experts.

    A model has n experts if it has a parameter of n matrices, (experts, in, out), and a router,
    which is a matrix (in, experts), and `expert_parallel` accepts n. The router has the inputs of
    the experts, because both read the same tokens. Kernels of heads also have three dimensions, and
    some matrix of the model usually has as many outputs as their first.
    """
    shapes = [variable.layer_shape for variable in variables(model)]  # without stacked layers
    matrices = {shape for shape in shapes if len(shape) == 2}
    kernels = [shape for shape in shapes if len(shape) == 3]
    numbers = [experts for experts, inputs, _ in kernels if (inputs, experts) in matrices]
    for number, _ in Counter(numbers).most_common():
        # This call only tests whether the strategy takes the matrices for experts, so its result is
        # not used.
        try:
            expert_parallel(model, experts=number, mesh=AbstractMesh((1,), ("expert",)))
        except ValueError:  # the matrices belong to other layers, for example to heads
            continue
        return number
    return 0
