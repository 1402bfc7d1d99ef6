"""Lists what a planner chooses from: meshes of named axes, chains of strategies, their recipes.

A chain is one strategy for the rows of the batch (`OVER_DATA`) and any number of styles for layers,
each over an axis of its own (`STYLES`). The functions of a chain are called one after
another, each with the sharding that the previous one returned as `base`:

    "fsdp + tensor" on data 4 × model 2
    sharding = tensor_parallel(model, mesh=mesh, axis="model")
    sharding = fsdp(model, mesh=mesh, base=sharding, axis="data")

Shardings have no mesh, so that the recipe that is printed works on any mesh of these axes.

Each mesh axis has a name that the user may choose, and a *role* (`Axes`), which says what the axis
divides:

    data, replica   rows of the batch; replicas are on different slices of TPUs
    model           features, for ``tensor`` and ``sequence``
    expert          experts, and rows of the batch outside of the experts
    stage           layers, for ``pipeline``
    context, ring   positions in sequences, for ``context``: heads are exchanged along ``context``,
                    keys and values go around ``ring``
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..analysis.parameters import spec_text
from ..errors import ShardingWarning, raise_if_any, warn_or_raise, warnings_collected
from ..experimental import context_parallel, expert_parallel
from ..experimental.context import METHODS, has_replaceable_attention
from ..partition import fsdp, pipeline, replicated, tensor_parallel, zero1
from ..partition.mesh import axes_across_slices
from ..partition.pipelining import layers_of
from ..partition.variables import variables
from ..specs.fitting import axes_of, suggestion
from ..specs.state_sharding import StateSharding
from ..training import offload
from ..transforms.stack import Stack

OVER_DATA = ("dp", "zero1", "fsdp", "hsdp")
# Style for layers → the role of its axis (a field of `Axes`). The name of a chain has this order.
STYLES = {
    "expert": "expert",
    "tensor": "model",
    "sequence": "model",
    "context": "context",
    "pipeline": "stage",
}
# A call of a chain: the strategy and its options.
Call: TypeAlias = tuple[Callable[..., Any], dict[str, Any]]
# A warning that was collected: its category and its text.
Warned: TypeAlias = tuple[type[ShardingWarning], str]


class Axes(NamedTuple):
    """The names of mesh axes by their roles, in the order of the mesh.

    Each role has one axis, and ``model`` may have two.
    """

    replica: tuple[str, ...] = ("replica",)
    stage: tuple[str, ...] = ("stage",)
    data: tuple[str, ...] = ("data",)
    expert: tuple[str, ...] = ("expert",)
    ring: tuple[str, ...] = ("ring",)
    context: tuple[str, ...] = ("context",)
    model: tuple[str, ...] = ("model",)

    @classmethod
    def of(cls, names: Sequence[str] | Mapping[str, Any]) -> Axes:
        """Reads axes by role, or the tuples (data, model) or (replica, data, model), of the user.

        Raises:
          ValueError: a role is unknown, a name is used twice, or the number of names is wrong.
        """
        if not isinstance(names, Mapping):
            roles_by_count = {2: ("data", "model"), 3: ("replica", "data", "model")}
            names_in_order = () if isinstance(names, str) else tuple(names)
            roles = roles_by_count.get(len(names_in_order))
            # The number of names is wrong if `roles` is None, and the error below says so.
            by_role = dict(zip(roles or (), map(axes_of, names_in_order), strict=False))
            is_count_known = roles is not None
        else:
            by_role = {role: axes_of(name) for role, name in names.items()}
            is_count_known = True
        known_roles = {role: axes for role, axes in by_role.items() if role in cls._fields}
        axes = Axes(**known_roles)
        every_name = [*itertools.chain(*axes)]
        are_different = len({*every_name}) == len(every_name)
        # A role without an axis is wrong as well: the user gave it None or ().
        have_right_number = all(
            len(x) == 1 or (role == "model" and len(x) > 1) for role, x in known_roles.items()
        )
        are_known = is_count_known and len(known_roles) == len(by_role)
        if not are_known or not have_right_number or not are_different:
            raise ValueError(
                "plan: axes must be the names of the data and the model axis, as in ('data', "
                "'model'), or different names by role, as in {'data': 'dp', 'model': ('x', 'y')}, "
                f"of which only model may have several: {', '.join(cls._fields)}; got {names!r}."
            )
        return axes

    def in_mesh(self, sizes: Mapping[str, int], *roles: str, least: int = 1) -> tuple[str, ...]:
        """Returns the names of the axes of a mesh that have one of these roles.

        Args:
          sizes: name of an axis of the mesh → its size.
          *roles: fields of this class, such as ``"data"``.
          least: the smallest size that counts: 2 leaves out axes that shard nothing.
        """
        names = (name for role in roles for name in getattr(self, role))
        return tuple(name for name in names if sizes.get(name, 0) >= least)

    def between_slices(self, mesh: Mesh | AbstractMesh, num_slices: int) -> set[str]:
        """Finds the axes of a mesh along which there are different slices of TPUs.

        Virtual devices have no slices. This function takes them to be divided into ``num_slices``
        along the first axes of the mesh: if a mesh replica 2 × stage 4 is on four slices, there are
        two slices along ``replica``, and two along ``stage``.
        """
        crossing = axes_across_slices(mesh)
        if crossing:
            return crossing
        slices_left = num_slices  # the number of slices that later axes have to divide
        for name, size in mesh.shape.items():
            slices_along = math.gcd(size, slices_left)  # the number of slices along this axis
            if slices_along > 1:
                crossing.add(name)
            slices_left //= slices_along
        return crossing


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
      _shardings: the cache of `_Recipe`: what strategies returned for these models.
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
        self._shardings: dict[Any, _MadeSharding] = {}

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
        recipe = _Recipe(mesh, self._shardings)
        names: dict[str, str] = {}  # part → the name of its sharding in the recipe
        for model_name, optimizer_name in self._models_with_optimizers():
            optimizer: _NamedArgument | None = None
            chain = calls
            if optimizer_name is None:
                chain = [call for call in calls if call[0] is not zero1]
            else:
                optimizer = _NamedArgument(optimizer_name, self.parts[optimizer_name])
            # The model of an `nnx.ModelAndOptimizer` is a part of the optimizer, not of `parts`.
            model = self.parts.get(model_name)
            if model is None and optimizer is not None:
                model = optimizer.value.model
            name = recipe.apply(chain, _NamedArgument(model_name, model), optimizer)
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
                expressions.append(_Expression(names[name]))
            else:
                spec = self._spec_of_array(part, batch)
                shardings.append(spec)
                expressions.append(_Expression("None" if spec is None else spec_text(spec)))
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


class _MadeSharding(NamedTuple):
    """What a call of a strategy returned."""

    sharding: StateSharding
    warned: list[Warned]  # the warnings of the call


class _NamedArgument(NamedTuple):
    """A model or an optimizer among the arguments of the step."""

    text: str  # the expression for it in a recipe
    value: Any


class _Recipe:
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

    def __init__(self, mesh: Mesh | AbstractMesh, cache: dict[Any, _MadeSharding]):
        self._mesh, self._cache = mesh, cache
        self.made: dict[str, Any] = {}
        self.lines: list[str] = []

    def apply(
        self, chain: Sequence[Call], model: _NamedArgument, optimizer: _NamedArgument | None
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
                self._cache[key] = _MadeSharding(sharding, warned)
            self.made[name], warned = self._cache[key]
            for category, text in warned:  # each chain with this call gets its warnings
                warn_or_raise(category, text, strict=False)
            self.lines.append(f"{name} = {strategy.__name__}({', '.join(texts)})")
        return name

    def offload(self, sharding: str, optimizer: _NamedArgument) -> str:
        """Makes a sharding with the optimizer state on the host; returns its name in ``made``."""
        name = f"{sharding}_on_host"
        self.made[name] = offload(self.made[sharding], optimizer.value, mesh=self._mesh)
        self.lines.append(f"{name} = offload({sharding}, {optimizer.text}, mesh=mesh)")
        return name


class _Expression(str):
    """An expression that is its own ``repr``, so that a tree of expressions is printed as code."""

    __repr__ = str.__str__


def _rows(part: Any) -> int:
    """Returns the first dimension of an array; 0 for a scalar and for what is not an array."""
    shape = () if _compat.is_graph_object(part) else getattr(part, "shape", ())
    return int(shape[0]) if shape else 0


def _experts(model: nnx.Module) -> int:
    """Finds the number of experts of a model; 0 without experts.

    A model has n experts if it has a parameter of n matrices, (experts, in, out), and a router with
    n outputs, which is a matrix (features, experts), and `expert_parallel` accepts n.
    """
    shapes = [variable.layer_shape for variable in variables(model)]  # without stacked layers
    outputs = {shape[1] for shape in shapes if len(shape) == 2}
    stacked = [shape[0] for shape in shapes if len(shape) == 3 and shape[0] in outputs]
    for number, _ in Counter(stacked).most_common():
        # This call only tests whether the strategy takes the matrices for experts, so its result is
        # not used.
        try:
            expert_parallel(model, experts=number, mesh=AbstractMesh((1,), ("expert",)))
        except ValueError:  # the matrices belong to other layers, for example to heads
            continue
        return number
    return 0


def split_name(strategy: str) -> tuple[str, tuple[str, ...]]:
    """Splits the name of a chain: ``fsdp + tensor + expert`` into fsdp and (tensor, expert).

    Users may also write ``fsdp+tensor``.
    """
    data, *styles = (part.strip() for part in strategy.split("+"))
    return data, tuple(styles)


def _chain_name(data: str, styles: Collection[str]) -> str:
    """Returns the name of a chain, with the styles in the order of `STYLES`."""
    return " + ".join([data, *(style for style in STYLES if style in styles)])


def strategies_of(arguments: Arguments, devices: int) -> list[str]:
    """Lists the names of all chains that suit the arguments, those with the fewest styles first."""
    # A chain has one entry of each tuple; "" stands for no style.
    choices: list[tuple[str, ...]] = [("", "tensor", "sequence")]
    if arguments.experts:
        choices.append(("", "expert"))
    # With fewer rows than devices, several devices share a row, by its positions.
    if arguments.length > 1 and 0 < arguments.rows < devices:
        choices.append(("", "context"))
    if arguments.stages:
        choices.append(("", "pipeline"))
    combinations = [[*filter(None, styles)] for styles in itertools.product(*choices)]
    combinations.sort(key=len)
    return [_chain_name(data, styles) for styles in combinations for data in OVER_DATA]


def checked_strategies(names: Sequence[str]) -> list[str]:
    """Returns the names of chains with their styles in the order of `STYLES`.

    Raises:
      ValueError: a strategy or a style is unknown, or two styles use the same axis.
    """
    wrong, checked = [], []  # lines of the error; the names in order
    for name in names:
        data, styles = split_name(name)  # "fsdp" and ("tensor", "expert")
        parts: list[tuple[str, Collection[str]]] = [(data, OVER_DATA)]
        parts += [(style, STYLES) for style in dict.fromkeys(styles)]
        for part, choices in parts:
            if part not in choices:
                hint = suggestion(part, choices)
                wrong.append(f"  {name!r}: {part!r}{hint}; expected one of {', '.join(choices)}")
        # "tensor" and "sequence" both use the axis "model". A repeated style is an error, too.
        roles = [STYLES[style] for style in styles if style in STYLES]
        if len({*roles}) < len(roles):
            wrong.append(f"  {name!r}: two styles over one axis")
        checked.append(_chain_name(data, styles))
    raise_if_any(ValueError, "plan: unknown strategies:", wrong)
    return checked


def mesh_sizes(
    count: int, num_slices: int, axes: Axes, strategy: str, arguments: Arguments
) -> Iterator[dict[str, int]]:
    """Yields the sizes of all meshes of ``count`` devices that have the axes of a strategy.

    The meshes of 8 devices for ``fsdp + tensor`` are ``{"data": 1, "model": 8}``, ``{"data": 2,
    "model": 4}``, …. Slices are along the axis for replicas, or along the axis for stages, because
    a pipeline sends least. Positions in sequences are sharded over the axis ``context``, or over
    ``ring`` and ``context``.

    Args:
      count: the number of devices.
      num_slices: the number of TPU slices that the devices are on.
      axes: the names of axes by their roles.
      strategy: the name of the chain.
      arguments: the arguments of the step. The sizes of some axes have to divide their shapes.

    Raises:
      ValueError: the devices cannot be divided into so many slices.
    """
    if count % num_slices:
        raise ValueError(f"plan: num_slices={num_slices} does not divide the {count} devices.")
    data, styles = split_name(strategy)
    roles = {"data", *(STYLES[style] for style in styles)}
    if data == "hsdp" and num_slices == 1:
        roles.add("replica")
    if "context" in roles:
        roles.add("ring")
    ranges = _axis_ranges(roles, axes, arguments)
    # `Axes.of` has checked that each of these roles has exactly one axis.
    [replica], [stage], [expert], [ring] = axes.replica, axes.stage, axes.expert, axes.ring
    # Each slice is a replica; or there are no replicas, and each slice has some stages.
    choices = (num_slices, 1) if num_slices > 1 and "stage" in roles else (num_slices,)
    for replicas in choices:
        for sizes in _factorizations(count // replicas, ranges):
            contexts = math.prod(sizes[axis] for axis in axes.in_mesh(sizes, "ring", "context"))
            if arguments.length % contexts:
                continue
            # Without replicas, no stage may be on two slices.
            if replicas < num_slices and sizes[stage] % num_slices:
                continue
            all_sizes = dict(sizes)
            if all_sizes.get(ring) == 1:  # the positions are over `context` alone
                del all_sizes[ring]
            if replicas > 1:
                all_sizes[replica] = replicas
            if arguments.experts:  # the model may name this axis even in chains without experts
                all_sizes.setdefault(expert, 1)
            yield {name: all_sizes[name] for name in itertools.chain(*axes) if name in all_sizes}


class _AxisRange(NamedTuple):
    """The name of a mesh axis, and the sizes that it may have."""

    name: str
    least: int  # the smallest size
    dividend: int  # a number that the size has to divide; all sizes divide 0


def _axis_ranges(roles: Collection[str], axes: Axes, arguments: Arguments) -> list[_AxisRange]:
    """Lists the mesh axes of some roles, and the sizes that each axis may have.

    An axis has at least two devices, because the chain without the style of the axis is another
    candidate. But ``data`` may have one device, because every chain has this axis. The axis
    ``ring`` and the second axis for ``model`` may have one device, too, because the first axis of
    the style may be enough.

    Args:
      arguments: the arguments of the step. The sizes of some axes have to divide their shapes.
    """
    # Role → the number that the size of its axis has to divide.
    dividends = {
        "stage": math.gcd(*arguments.stages),  # 0 without layers
        "expert": arguments.experts,
        "context": arguments.length,
        "ring": arguments.length,
    }
    ranges = []
    for role in Axes._fields:
        if role not in roles:
            continue
        for i, name in enumerate(getattr(axes, role)):
            least = 1 if i > 0 or role in ("data", "ring") else 2
            ranges.append(_AxisRange(name, least, dividends.get(role, 0)))
    return ranges


def _factorizations(count: int, axes: Sequence[_AxisRange]) -> Iterator[dict[str, int]]:
    """Yields the sizes of axes, by name, whose product is ``count``: 2 × 4, 4 × 2, …."""
    if not axes:
        if count == 1:
            yield {}
        return
    axis, *inner_axes = axes
    for size in range(axis.least, count + 1):
        if count % size == 0 and axis.dividend % size == 0:
            for sizes in _factorizations(count // size, inner_axes):
                yield {axis.name: size} | sizes


def check_meshes(
    meshes: Sequence[Mapping[str, int]], devices: int | None, axes: Axes, *, has_chains: bool
) -> None:
    """Raises a ValueError for meshes of the user with unknown axes or another number of devices.

    Args:
      meshes: for each mesh, name of an axis → its size.
      devices: the number of devices that each mesh must have; None for any number.
      axes: the names that strategies of this library use.
      has_chains: whether some strategies are chains of this library. A function of the user may
        use axes of any name.
    """
    wrong = [] if meshes else ["  meshes=[] has none"]
    names = [*itertools.chain(*axes)]
    for sizes in meshes:
        if has_chains and not {*names}.issuperset(sizes):
            wrong.append(
                f"  {dict(sizes)}: strategies of this library use the axes {', '.join(names)}; "
                "name those of your mesh, as in axes={'data': 'dp', 'model': 'tp'}"
            )
    for sizes in meshes:
        count = math.prod(sizes.values())
        if devices is not None and count != devices:
            wrong.append(f"  {dict(sizes)}: {count} devices, not {devices}")
    raise_if_any(ValueError, "plan: these meshes cannot be used:", wrong)


def applies(strategy: str, sizes: Mapping[str, int], axes: Axes) -> bool:
    """Tells whether a mesh has several devices along the axes of a strategy, and no other axes.

    If this is False, the strategy does the same as another strategy, or devices repeat work.
    For example, ``fsdp`` without devices to shard over is ``dp``.
    """
    data, styles = split_name(strategy)

    def has_devices(*roles: str) -> bool:
        """Tells whether an axis of one of these roles has several devices."""
        return bool(axes.in_mesh(sizes, *roles, least=2))

    used_roles = {STYLES[style] for style in styles}
    for role in STYLES.values():
        is_used = role in used_roles
        if has_devices(role) != is_used:
            return False
    if has_devices("ring") and "context" not in used_roles:  # a ring is an option of "context"
        return False
    if data == "dp":  # dp shards no parameters, so it needs no axis
        return True
    if data == "hsdp":  # hsdp shards within replicas, so it needs an axis for each
        return has_devices("replica") and has_devices(*SHARDING)
    return has_devices("replica", *SHARDING)


ROWS = ("replica", "data", "expert")  # the roles of axes that shard the rows of the batch
# The roles of axes along which the devices of a replica have different tokens of the batch.
# Strategies may shard parameters over these axes; devices then gather the parameters.
SHARDING = ("data", "expert", "ring", "context")


def batch_spec(sizes: Mapping[str, int], axes: Axes, arguments: Arguments) -> PartitionSpec:
    """Returns the spec of the batch: ``P("data")``, or with contexts ``P("data", "context")``.

    The first dimension has the rows, and the second dimension the positions in sequences.

    Raises:
      ValueError: the number of rows is not a multiple of the devices along the axes for rows.
    """
    over_rows = axes.in_mesh(sizes, *ROWS)
    count = math.prod(sizes[axis] for axis in over_rows)
    if arguments.rows % count:
        names = " and ".join(name for name in over_rows if sizes[name] > 1)
        raise ValueError(f"{count} devices over {names} do not divide {arguments.rows} rows")
    rows = _one_or_all(over_rows) if over_rows else None
    over_positions = axes.in_mesh(sizes, "ring", "context", least=2)
    if not over_positions:
        return PartitionSpec(rows)
    return PartitionSpec(rows, _one_or_all(over_positions))


def chains(
    strategy: str, sizes: Mapping[str, int], axes: Axes, arguments: Arguments, prefetch: int
) -> dict[str, list[Call]]:
    """Lists the calls of a chain, once for each choice of its options.

    The options are the method of attention over sharded sequences, and the number of microbatches
    of a pipeline: one, two, four or eight for each stage, or else a smaller number that divides the
    rows of a device.

    Returns:
      The calls, by the text that names the choice in the variant of a candidate: for example
      ``{"8 microbatches": [(pipeline, …), (fsdp, …)], "16 microbatches": …}``. If there is no
      choice, the only text is empty.

    Args:
      strategy: the name of the chain.
      sizes: the sizes of the mesh axes.
      axes: the names of axes by their roles.
      arguments: the arguments of the step.
      prefetch: how many layers ``fsdp`` gathers ahead.
    """
    data, styles = split_name(strategy)
    data_calls = _calls_over_data(data, sizes, axes, prefetch)
    layer_calls = _calls_over_layers(styles, sizes, axes, arguments)  # by the method of attention
    if "pipeline" not in styles:
        return {method: calls + data_calls for method, calls in layer_calls.items()}
    [stage] = axes.stage
    rows_of_device = arguments.rows // math.prod(sizes[axis] for axis in axes.in_mesh(sizes, *ROWS))
    # The number of microbatches has to divide these rows, so it is a greatest common divisor: if
    # 8 microbatches are wanted for 12 rows, it is 4.
    counts = sorted({math.gcd(times * sizes[stage], rows_of_device) for times in (1, 2, 4, 8)})
    result: dict[str, list[Call]] = {}
    for method, calls in layer_calls.items():
        for count in counts:
            choice = ", ".join(filter(None, [method, f"{count} microbatches"]))
            pipeline_call: Call = (pipeline, {"axis": stage, "microbatches": count})
            result[choice] = [*calls, pipeline_call, *data_calls]
    return result


def _calls_over_layers(
    styles: Collection[str], sizes: Mapping[str, int], axes: Axes, arguments: Arguments
) -> dict[str, list[Call]]:
    """Lists the calls of all styles but ``pipeline``, for each method of attention.

    Returns:
      The calls, by the name of the method: ``{"ring": …, "all_to_all": …}``. If sequences are not
      sharded, or no attention is replaced, there is no method to choose, and the only name is
      empty.
    """
    calls: list[Call] = []
    [expert], [context] = axes.expert, axes.context
    if "tensor" in styles or "sequence" in styles:
        options: dict[str, Any] = {"axis": _one_or_all(axes.in_mesh(sizes, "model"))}
        if "sequence" in styles:
            options["sequence"] = True
        calls.append((tensor_parallel, options))
    if "expert" in styles:
        calls.append((expert_parallel, {"experts": arguments.experts, "axis": expert}))
    if "context" not in styles:
        return {"": calls}
    rings = axes.in_mesh(sizes, "ring", least=2)
    if rings:
        # Only the method all_to_all can use two axes: devices exchange heads along the first axis,
        # and keys and values go around the second axis.
        options = {"axis": (context, *rings), "method": "all_to_all"}
        name = "all_to_all" if arguments.has_replaceable_attention else ""
        return {name: [*calls, (context_parallel, options)]}
    if not arguments.has_replaceable_attention:
        return {"": [*calls, (context_parallel, {"axis": context})]}
    return {
        method: [*calls, (context_parallel, {"axis": context, "method": method})]
        for method in METHODS
    }


def _calls_over_data(data: str, sizes: Mapping[str, int], axes: Axes, prefetch: int) -> list[Call]:
    """Returns the calls of the strategy ``data``, one of `OVER_DATA`: one call, or none for dp.

    ``dp`` needs no call, because parameters without a call are replicated.
    """
    if data == "dp":
        return []
    # ``hsdp`` is ``fsdp`` within each replica, so it does not shard over replicas.
    roles = SHARDING if data == "hsdp" else ("replica", *SHARDING)
    sharding_axes = axes.in_mesh(sizes, *roles, least=2)
    options: dict[str, Any] = {"axis": _one_or_all(sharding_axes)}
    if data == "zero1":
        return [(zero1, options)]
    [replica] = axes.replica
    # Replicas are on different slices. `fsdp` refuses to shard over slices without this option.
    if replica in sharding_axes:
        options["across_slices"] = True
    if prefetch:
        options["prefetch"] = prefetch
    return [(fsdp, options)]


def _one_or_all(names: Sequence[str]) -> str | tuple[str, ...]:
    """Returns the name itself if there is one name, and a tuple of several names."""
    return names[0] if len(names) == 1 else tuple(names)
