"""What a planner chooses from: meshes of named axes, chains of strategies, and their recipes.

A chain is one strategy for the rows of the batch (`OVER_DATA`) and any number of styles for layers,
each over an axis of its own (`STYLES`). Its functions are called one after another, each with the
sharding of the one before as `base`:

    "fsdp + tensor" on data 4 × model 2
    sharding = tensor_parallel(model, mesh=mesh, axis="model")
    sharding = fsdp(model, mesh=mesh, base=sharding, axis="data")

Shardings have no mesh, so that the recipe that is printed works on any mesh of these axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..analysis.parameters import spec_text
from ..errors import raise_listed
from ..experimental import context_parallel, expert_parallel
from ..experimental.context import METHODS
from ..partition import fsdp, pipeline, replicated, tensor_parallel, zero1
from ..partition.mesh import axes_across_slices
from ..partition.pipelining import layers_of
from ..partition.variables import variables
from ..specs.fitting import axes_of, suggestion
from ..specs.state_sharding import StateSharding
from ..training import offload
from ..transforms.stack import Stack

OVER_DATA = ("dp", "zero1", "fsdp", "hsdp")
# Style for layers → the role of its axis (a field of `Axes`), in the order of a chain's name.
STYLES = {
    "expert": "expert",
    "tensor": "model",
    "sequence": "model",
    "context": "context",
    "pipeline": "stage",
}
# One strategy of a chain, with its options.
Call: TypeAlias = tuple[Callable[..., Any], dict[str, Any]]


class Axes(NamedTuple):
    """The names of mesh axes by what they are for (their *roles*), in the order of the mesh."""

    replica: tuple[str, ...] = ("replica",)
    stage: tuple[str, ...] = ("stage",)
    data: tuple[str, ...] = ("data",)
    expert: tuple[str, ...] = ("expert",)
    ring: tuple[str, ...] = ("ring",)
    context: tuple[str, ...] = ("context",)
    model: tuple[str, ...] = ("model",)

    @classmethod
    def of(cls, names: Sequence[str] | Mapping[str, Any]) -> Axes:
        """Reads what a user names: axes by role, or (data, model), or (replica, data, model)."""
        if not isinstance(names, Mapping):
            listed = () if isinstance(names, str) else tuple(names)
            roles = ("data", "model") if len(listed) == 2 else ("replica", "data", "model")
            # The empty role is refused below.
            names = dict(zip(roles, listed, strict=True)) if len(listed) in (2, 3) else {"": names}
        named = {role: axes_of(name) for role, name in names.items()}
        axes = Axes(**{role: x for role, x in named.items() if role in cls._fields})
        every = [*itertools.chain(*axes)]
        wrong = [role for role, x in named.items() if role not in cls._fields or not x]
        wrong += [role for role, x in named.items() if role != "model" and len(x) > 1]
        if wrong or len({*every}) < len(every):
            raise ValueError(
                "plan: axes must be the names of the data and the model axis, as in ('data', "
                "'model'), or different names by role, as in {'data': 'dp', 'model': ('x', 'y')}, "
                f"of which only model may have several: {', '.join(cls._fields)}; got {names!r}."
            )
        return axes

    def in_mesh(self, sizes: Mapping[str, int], *roles: str, least: int = 1) -> tuple[str, ...]:
        """Selects the axes of these roles that a mesh has, with at least so many devices."""
        names = (name for role in roles for name in getattr(self, role))
        return tuple(name for name in names if sizes.get(name, 0) >= least)

    def between_slices(self, mesh: Mesh | AbstractMesh, num_slices: int) -> set[str]:
        """Finds the axes of a mesh along which there are different slices of TPUs.

        Virtual devices have no slices. Those that they stand for are along the first axes: of
        replica 2 × stage 4 and four slices, two along each.
        """
        if crossing := axes_across_slices(mesh):
            return crossing
        remaining = num_slices  # that are along the axes not yet looked at
        for name, size in mesh.shape.items():
            along = math.gcd(size, remaining)
            remaining //= along
            if along > 1:
                crossing.add(name)
        return crossing


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
      strategy: the names of the strategies, such as ``fsdp + tensor``.
      sizes: the sizes of the axes of the mesh by name, major first.
      variant: the options of the strategies and the variant of the step; empty if there are none.
      in_shardings: the sharding of each argument, for :func:`~nnx_sharding.jit`. It has no mesh, so
        it can be used for every mesh with these axes; only what is offloaded names this mesh.
      mesh: the mesh for which the step is compiled, perhaps of devices that this machine does not
        have. To run it, make one of the same ``sizes``.
      recipe: Python code that makes the mesh and ``step``, from the arguments under the names that
        they have in the step. It compiles to the program that was planned. Empty for a function
        of the user's.
      rows: the number of rows of the batch; 0 without a batch.
    """

    strategy: str
    sizes: Mapping[str, int]
    variant: str
    in_shardings: tuple[Any, ...]
    mesh: Mesh = dataclasses.field(repr=False)
    recipe: str = dataclasses.field(default="", repr=False)
    rows: int = dataclasses.field(default=0, repr=False)

    @property
    def name(self) -> str:
        """Strategy, mesh and variant, as in ``fsdp + tensor, data 4 × model 2, remat``."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return ", ".join(part for part in (self.strategy, sizes, self.variant) if part)


class Arguments:
    """The arguments of a step: its models, their optimizers, and the batch.

    The batch are the arrays with the most frequent first dimension. Its largest array says how many
    tokens a step has: all elements of integers, all feature vectors of floats.

    Attributes:
      args: the arguments themselves, abstract.
      parts: modules and other leaves, by the expressions that name them: ``batch['x']``.
      rows: the first dimension of the batch; 0 without one.
      length: the second dimension of its largest array; 1 without one.
      tokens: how many there are in that.
      layers: the numbers of layers of stacks.
      stages: the same, and those of lists of blocks.
      experts: the number of experts; 0 without any.
    """

    def __init__(self, args: Sequence[Any], names: Sequence[str]):
        self.args, self._names = tuple(args), names
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(
            self.args, is_leaf=_compat.is_graph_object
        )
        self.parts: dict[str, Any] = {
            f"{names[keys[0].idx]}{jax.tree_util.keystr(keys[1:])}": part for keys, part in leaves
        }
        arrays = [part for part in self.parts.values() if not _compat.is_graph_object(part)]
        counts = Counter(filter(None, map(_rows, arrays)))
        # Of several first dimensions that are as frequent, the largest is that of the batch.
        self.rows = max(counts, key=lambda rows: (counts[rows], rows), default=0)
        # Other arrays are replicated.
        batch = [array for array in arrays if self.rows and _rows(array) == self.rows]
        largest: Any = max(batch, key=lambda array: math.prod(array.shape), default=None)
        shape = (1,) if largest is None else largest.shape
        self.length: int = (*shape, 1)[1]
        is_vectors = len(shape) > 1 and jax.numpy.issubdtype(largest.dtype, jax.numpy.inexact)
        self.tokens = math.prod(shape[:-1] if is_vectors else shape)
        models = self._models().values()
        layered = [layers for model in models for layers in layers_of(model)[0].values()]
        self.layers = sorted({layers.length for layers in layered if isinstance(layers, Stack)})
        self.stages = sorted({len(layers) for layers in layered})
        self.experts = next(filter(None, map(_experts, models)), 0)
        # Of the first strategies of chains, with which many chains begin.
        self._shardings: dict[Any, StateSharding] = {}

    def _models(self) -> dict[str, nnx.Module]:
        modules = {name: x for name, x in self.parts.items() if _compat.is_graph_object(x)}
        return {name: x for name, x in modules.items() if not isinstance(x, nnx.Optimizer)}

    @functools.cached_property
    def _owners(self) -> dict[str, str]:
        """The model of each optimizer."""
        optimizers = (name for name, x in self.parts.items() if isinstance(x, nnx.Optimizer))
        return {name: self._model_of(name) for name in optimizers}

    def _model_of(self, name: str) -> str:
        """Finds the model of an optimizer: whose arrays its state has most, or else the nearest."""
        optimizer, order = self.parts[name], [*self.parts]
        if hasattr(optimizer, "model"):  # nnx.ModelAndOptimizer
            return f"{name}.model"
        # Paths in Optax's state end in the paths of parameters, so these are all of their ends.
        states = {(x.path[i:], x.shape) for x in variables(optimizer) for i in range(len(x.path))}
        models = self._models()
        if not models:
            raise ValueError("expected the model of its optimizer among the arguments, got none")

        def fit(model: str) -> tuple[int, bool, int]:
            """Ranks by the number of equal arrays; then one before the optimizer, the nearest."""
            arrays = {(x.path, x.shape) for x in variables(models[model])}
            ahead = order.index(name) - order.index(model)
            return len(arrays & states), ahead > 0, -abs(ahead)

        return max(models, key=fit)

    def shard(
        self,
        calls: Sequence[Call],
        mesh: Mesh | AbstractMesh,
        batch: PartitionSpec,
        *,
        offloaded: bool = False,
    ) -> ShardedArguments:
        """Applies a chain of strategies to each model, with its optimizer.

        Args:
          calls: the chain; ``zero1`` is left out for models without an optimizer.
          mesh: the mesh.
          batch: the spec of the batch.
          offloaded: whether the state of optimizers is on the host.
        """
        recipe = _Recipe(mesh, self._shardings)
        owners = self._owners  # optimizer → its model
        models_alone = {name: name for name in self._models() if name not in owners.values()}
        names: dict[str, str] = {}  # part → the name of its sharding in the recipe
        # A model and its optimizer share a sharding, which is made for each optimizer.
        for part, owner in (owners | models_alone).items():
            optimizer = _NamedArgument(part, self.parts[part] if part in owners else None)
            # The model of an `nnx.ModelAndOptimizer` is in that, and no argument of its own.
            value = self.parts.get(owner, getattr(optimizer.value, "model", None))
            has_optimizer = optimizer.value is not None
            chain = [call for call in calls if call[0] is not zero1 or has_optimizer]
            name = recipe.apply(chain, _NamedArgument(owner, value), optimizer)
            names.setdefault(owner, name)
            names[part] = name
            if offloaded and has_optimizer:
                names[part] = recipe.offload(name, optimizer)
        specs = {name: self._spec(part, batch) for name, part in self.parts.items()}
        shardings = [recipe.made[names[x]] if x in names else specs[x] for x in self.parts]
        texts = {name: "None" if spec is None else spec_text(spec) for name, spec in specs.items()}
        expressions = [_Expression((texts | names)[name]) for name in self.parts]
        unflatten = partial(jax.tree_util.tree_unflatten, self._tree)
        return ShardedArguments(
            shardings=unflatten(shardings),
            lines=recipe.lines,
            text=repr(unflatten(expressions)),
        )

    def _spec(self, part: Any, batch: PartitionSpec) -> PartitionSpec | None:
        """Returns the spec of the batch for an array that belongs to it; None for another part.

        An array with another second dimension than the batch's length is sharded over rows only.
        """
        if not self.rows or _rows(part) != self.rows:
            return None
        has_length = len(part.shape) > 1 and part.shape[1] == self.length
        return batch if has_length else PartitionSpec(*batch[:1])

    def with_rows(self, rows: int) -> Arguments:
        """Returns the arguments with another number of rows in the batch."""
        resized = (
            jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype)
            if _rows(part) == self.rows
            else part
            for part in self.parts.values()
        )
        return Arguments(jax.tree_util.tree_unflatten(self._tree, resized), self._names)


class ShardedArguments(NamedTuple):
    """What a chain of strategies makes of arguments."""

    shardings: tuple[Any, ...]  # of each argument
    lines: list[str]  # of a recipe, which make them
    text: str  # the tuple of shardings in the recipe: ``(sharding, P('data'))``


class _NamedArgument(NamedTuple):
    """A model or an optimizer among the arguments of the step."""

    text: str  # the expression for it in a recipe
    value: Any  # None for the optimizer of a model without one


class _Recipe:
    """Makes shardings, and writes the lines that make them.

    ``known`` keeps what strategies returned, by the mesh, the model and the calls so far.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, known: dict[Any, StateSharding]):
        self._mesh, self._known = mesh, known
        self.made: dict[str, Any] = {}  # by their names in the lines
        self.lines: list[str] = []

    def apply(self, chain: Sequence[Call], model: _NamedArgument, optimizer: _NamedArgument) -> str:
        """Applies a chain to a model; returns the name of the sharding.

        Args:
          chain: strategies; the last one is given the optimizer, as its state follows all of them.
          model: the model.
          optimizer: its optimizer; the value is None without one.
        """
        name = f"sharding{len(self.made) + 1 if self.made else ''}"
        chain = chain or [(replicated, {})]
        key: tuple[Any, ...] = (self._mesh, model.text)
        for i, (strategy, options) in enumerate(chain):
            texts, keywords = [model.text, "mesh=mesh"], dict[str, Any]()  # of the arguments
            if i > 0:
                texts.append(f"base={name}")
                keywords["base"] = self.made[name]
            if optimizer.value is not None and i == len(chain) - 1:
                texts.append(f"optimizer={optimizer.text}")
                keywords["optimizer"] = optimizer.value
                key = (*key, optimizer.text)
            texts += [f"{option}={value!r}" for option, value in options.items()]
            key = (*key, strategy, *options.items())
            if key not in self._known:
                self._known[key] = strategy(model.value, mesh=self._mesh, **keywords, **options)
            self.made[name] = self._known[key]
            self.lines.append(f"{name} = {strategy.__name__}({', '.join(texts)})")
        return name

    def offload(self, sharding: str, optimizer: _NamedArgument) -> str:
        """Moves the state of an optimizer to the host; returns the name of the sharding."""
        name = f"{sharding}_on_host"
        self.made[name] = offload(self.made[sharding], optimizer.value, mesh=self._mesh)
        self.lines.append(f"{name} = offload({sharding}, {optimizer.text}, mesh=mesh)")
        return name


class _Expression(str):
    """An expression, which is its own representation: a tree of them is printed as code."""

    __repr__ = str.__str__


def _rows(part: Any) -> int:
    """Returns the first dimension of an array; 0 for a scalar and for what is not an array."""
    shape = () if _compat.is_graph_object(part) else getattr(part, "shape", ())
    return int(shape[0]) if shape else 0


def _experts(model: nnx.Module) -> int:
    """Finds the number of experts: of outputs of a router, and of matrices in one parameter.

    0 if no number is both, for parameters that `expert_parallel` can shard.
    """
    shapes = [variable.layer_shape for variable in variables(model)]
    outputs = {shape[1] for shape in shapes if len(shape) == 2}  # of matrices, as a router has
    stacked = [shape[0] for shape in shapes if len(shape) == 3 and shape[0] in outputs]
    for number, _ in Counter(stacked).most_common():
        try:
            expert_parallel(model, experts=number, mesh=AbstractMesh((1,), ("expert",)))
        except ValueError:  # matrices of other layers, such as heads
            continue
        return number
    return 0


def split_name(strategy: str) -> tuple[str, tuple[str, ...]]:
    """Splits the name of a chain: ``fsdp + tensor + expert`` into fsdp and (tensor, expert)."""
    data, *styles = strategy.split(" + ")
    return data, tuple(styles)


def _chain_name(data: str, styles: Collection[str]) -> str:
    return " + ".join([data, *(style for style in STYLES if style in styles)])


def strategies_of(arguments: Arguments, devices: int) -> list[str]:
    """Lists the names of all chains for some arguments, those with the fewest styles first."""
    choices: list[tuple[str, ...]] = [("", "tensor", "sequence")]  # one of each tuple
    if arguments.experts:
        choices.append(("", "expert"))
    # Without enough rows for all devices, some of them share a row.
    if arguments.length > 1 and 0 < arguments.rows < devices:
        choices.append(("", "context"))
    if arguments.stages:
        choices.append(("", "pipeline"))
    combined = sorted(itertools.product(*choices), key=lambda styles: len([*filter(None, styles)]))
    return [_chain_name(data, styles) for styles in combined for data in OVER_DATA]


def checked_strategies(names: Sequence[str]) -> list[str]:
    """Returns the names of chains with their parts in our order; raises for unknown ones."""
    wrong, checked = [], []
    for name in names:
        data, styles = split_name(name)
        known = {data: OVER_DATA} | dict.fromkeys(styles, tuple(STYLES))
        wrong += [
            f"  {name!r}: {part!r}{suggestion(part, choices)}; expected one of {', '.join(choices)}"
            for part, choices in known.items()
            if part not in choices
        ]
        if len({STYLES.get(style) for style in styles}) < len(styles):
            wrong.append(f"  {name!r}: two styles over one axis")
        checked.append(_chain_name(data, styles))
    raise_listed(ValueError, "plan: unknown strategies:", wrong)
    return checked


def mesh_sizes(
    count: int, num_slices: int, axes: Axes, strategy: str, arguments: Arguments
) -> Iterator[dict[str, int]]:
    """Yields the sizes of all meshes of so many devices that have a strategy's axes.

    Of 8 devices for ``fsdp + tensor``: ``{"data": 1, "model": 8}``, ``{"data": 2, "model": 4}``, ….
    Slices are along the axis for replicas; or for stages, as a pipeline sends least. Contexts are
    over one axis, or over two, of which one is that for rings.

    Args:
      count: the number of devices.
      num_slices: the number of TPU slices that they are on.
      axes: the names of axes by their roles.
      strategy: the name of the chain.
      arguments: those of the step, whose shapes the sizes of some axes have to divide.
    """
    if count % num_slices:
        raise ValueError(f"plan: num_slices={num_slices} does not divide the {count} devices.")
    data, styles = split_name(strategy)
    roles = {"data", *(STYLES[style] for style in styles)}
    if data == "hsdp" and num_slices == 1:
        roles.add("replica")
    if "context" in roles:
        roles.add("ring")
    used = _axis_ranges(roles, axes, arguments)
    always = {axes.expert[0]: 1} if arguments.experts else {}  # the model may name this axis
    # Slices are replicas, or one after another in a pipeline, without replicas.
    choices = (num_slices, 1) if num_slices > 1 and "stage" in roles else (num_slices,)
    for replicas in choices:
        for sizes in _factorizations(count // replicas, used):
            contexts = math.prod(sizes[axis] for axis in axes.in_mesh(sizes, "ring", "context"))
            if arguments.length % contexts:
                continue
            if sizes.get(axes.ring[0]) == 1:  # contexts over one axis
                del sizes[axes.ring[0]]
            if replicas == num_slices or sizes[axes.stage[0]] % num_slices == 0:
                slices = {axes.replica[0]: replicas} if replicas > 1 else {}
                every = always | slices | sizes
                yield {name: every[name] for name in itertools.chain(*axes) if name in every}


class _AxisRange(NamedTuple):
    """A mesh axis, and which sizes it may have."""

    name: str
    least: int
    multiple: int  # what the size has to divide; 0 for any size


def _axis_ranges(roles: Collection[str], axes: Axes, arguments: Arguments) -> list[_AxisRange]:
    """Lists the mesh axes of some roles, and which sizes each may have.

    An axis has at least two devices, but for those of ``data`` and ``ring``, and for the second
    one of a role.

    Args:
      roles: what the axes are for.
      axes: the names of axes by their roles.
      arguments: those of the step, whose shapes the sizes of some axes have to divide.
    """
    divided = {  # what the size of an axis has to divide, by role
        "stage": math.gcd(*arguments.stages),
        "expert": arguments.experts,
        "context": arguments.length,
        "ring": arguments.length,
    }
    ranges = []
    for role in Axes._fields:
        for i, name in enumerate(getattr(axes, role) if role in roles else ()):
            least = 1 if i > 0 or role in ("data", "ring") else 2
            ranges.append(_AxisRange(name, least, multiple=divided.get(role, 0)))
    return ranges


def _factorizations(count: int, axes: Sequence[_AxisRange]) -> Iterator[dict[str, int]]:
    """Yields the sizes of axes, by name, whose product is ``count``: 2 × 4, 4 × 2, …."""
    axis, *others = axes
    for size in range(axis.least, count + 1):
        if count % size == 0 and axis.multiple % size == 0:
            if others:
                for sizes in _factorizations(count // size, others):
                    yield {axis.name: size} | sizes
            elif size == count:
                yield {axis.name: size}


def check_meshes(
    meshes: Sequence[Mapping[str, int]], devices: int | None, axes: Axes, *, are_ours: bool
) -> None:
    """Raises a ValueError for meshes with other axes than strategies use, or too many devices.

    Args:
      meshes: the sizes of the axes of each, by name.
      devices: how many each must have; None for any number.
      axes: the names that strategies of this library use.
      are_ours: whether some strategies are of this library.
    """
    names = [*itertools.chain(*axes)]
    wrong = [
        f"  {dict(sizes)}: strategies of this library use the axes {', '.join(names)}; name those "
        "of your mesh, as in axes={'data': 'dp', 'model': 'tp'}"
        for sizes in meshes
        if are_ours and not {*names}.issuperset(sizes)
    ]
    wrong += [
        f"  {dict(sizes)}: {math.prod(sizes.values())} devices, not {devices}"
        for sizes in meshes
        if devices is not None and math.prod(sizes.values()) != devices
    ]
    wrong += [] if meshes else ["  meshes=[] has none"]
    raise_listed(ValueError, "plan: these meshes cannot be used:", wrong)


def applies(strategy: str, sizes: Mapping[str, int], axes: Axes) -> bool:
    """Tells whether a mesh has devices along the axes that a strategy uses, and along no others."""
    data, styles = split_name(strategy)
    used = {STYLES[style] for style in styles}  # roles
    # Groups of roles: an axis of one role in each group must have devices.
    needed: list[tuple[str, ...]] = [("replica", *SHARDING)]
    if data == "dp":
        needed = []
    elif data == "hsdp":
        needed = [("replica",), SHARDING]
    if axes.in_mesh(sizes, "ring", least=2) and "context" not in used:
        return False
    return all(axes.in_mesh(sizes, *roles, least=2) for roles in needed) and all(
        bool(axes.in_mesh(sizes, role, least=2)) == (role in used) for role in STYLES.values()
    )


ROWS = ("replica", "data", "expert")  # the roles of axes that shard the rows of the batch
# The roles of axes along which devices have different tokens of the batch, within a replica; so
# parameters may be sharded over them, and are gathered.
SHARDING = ("data", "expert", "ring", "context")


def batch_spec(sizes: Mapping[str, int], axes: Axes, arguments: Arguments) -> PartitionSpec:
    """Returns the spec of the batch: of rows, and over the axes for contexts of positions."""
    over = axes.in_mesh(sizes, *ROWS)
    count = math.prod(sizes[axis] for axis in over)
    if arguments.rows % count:
        names = " and ".join(name for name in over if sizes[name] > 1)
        raise ValueError(f"{count} devices over {names} do not divide {arguments.rows} rows")
    contexts = axes.in_mesh(sizes, "ring", "context", least=2)
    positions = [_one_or_all(contexts)] if contexts else []
    return PartitionSpec(_one_or_all(over) if over else None, *positions)


def chains(
    strategy: str, sizes: Mapping[str, int], axes: Axes, arguments: Arguments, prefetch: int
) -> dict[str, list[Call]]:
    """Lists the calls of a chain with their options, by the text of what varies in these.

    What varies is the method of attention over sharded sequences, and the number of microbatches of
    a pipeline: one, two, four or eight for each stage, as far as they divide the rows of a device.
    For example, ``{"8 microbatches": [(pipeline, …), (fsdp, …)], "16 microbatches": …}``; the key
    is empty if nothing varies.

    Args:
      strategy: the name of the chain.
      sizes: the sizes of the mesh axes.
      axes: the names of axes by their roles.
      arguments: those of the step.
      prefetch: how many layers ``fsdp`` gathers ahead.
    """
    data, styles = split_name(strategy)
    over_data = _calls_over_data(data, sizes, axes, prefetch)
    over_layers = _calls_over_layers(styles, sizes, axes, arguments)  # by the method of attention
    if "pipeline" not in styles:
        return {text: calls + over_data for text, calls in over_layers.items()}
    stages = sizes[axes.stage[0]]
    # The rows of a device.
    rows = arguments.rows // math.prod(sizes[axis] for axis in axes.in_mesh(sizes, *ROWS))
    counts = sorted({math.gcd(times * stages, rows) for times in (1, 2, 4, 8)})
    return {
        ", ".join(filter(None, [text, f"{count} microbatches"])): [
            *calls,
            (pipeline, {"axis": axes.stage[0], "microbatches": count}),
            *over_data,
        ]
        for text, calls in over_layers.items()
        for count in counts
    }


def _calls_over_layers(
    styles: Collection[str], sizes: Mapping[str, int], axes: Axes, arguments: Arguments
) -> dict[str, list[Call]]:
    """Lists the calls of the styles for layers, but of a pipeline, by the method of attention.

    Without sharded sequences, there is no such method, and the key is empty.
    """
    calls: list[Call] = []
    if "tensor" in styles or "sequence" in styles:
        options: dict[str, Any] = {"axis": _one_or_all(axes.in_mesh(sizes, "model"))}
        if "sequence" in styles:
            options["sequence"] = True
        calls.append((tensor_parallel, options))
    if "expert" in styles:
        options = {"experts": arguments.experts, "axis": axes.expert[0]}
        calls.append((expert_parallel, options))
    if "context" not in styles:
        return {"": calls}
    options, methods = {"axis": axes.context[0]}, [*METHODS]
    if rings := axes.in_mesh(sizes, "ring", least=2):
        # Heads are exchanged within the minor axis; keys and values go around the other one.
        options, methods = {"axis": (axes.context[0], *rings)}, ["all_to_all"]
    return {x: [*calls, (context_parallel, options | {"method": x})] for x in methods}


def _calls_over_data(data: str, sizes: Mapping[str, int], axes: Axes, prefetch: int) -> list[Call]:
    """Lists the call of the strategy for the batch, one of `OVER_DATA`; ``dp`` needs none."""
    roles = SHARDING if data == "hsdp" else ("replica", *SHARDING)
    over = axes.in_mesh(sizes, *roles, least=2)
    if data == "zero1":
        return [(zero1, {"axis": _one_or_all(over)})]
    if data not in ("fsdp", "hsdp"):
        return []
    options: dict[str, Any] = {"axis": _one_or_all(over)}
    if axes.replica[0] in over:
        options["across_slices"] = True
    if prefetch:
        options["prefetch"] = prefetch
    return [(fsdp, options)]


def _one_or_all(names: Sequence[str]) -> str | tuple[str, ...]:
    """Returns a single name alone, and several as a tuple."""
    return names[0] if len(names) == 1 else tuple(names)
