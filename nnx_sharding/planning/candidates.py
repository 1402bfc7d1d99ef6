"""What a planner chooses from: meshes of named axes, chains of strategies, and their recipes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..analysis.parameters import spec_text
from ..errors import raise_listed
from ..experimental import context_parallel, expert_parallel
from ..partition import fsdp, pipeline, replicated, tensor_parallel, zero1
from ..partition.pipelining import layers_of
from ..partition.variables import variables
from ..specs.fitting import axes_of, suggestion
from ..training import offload
from ..transforms.stack import Stack

# What a strategy does over the axes of the batch; and with layers, over an axis of its own.
OVER_DATA = ("dp", "zero1", "fsdp", "hsdp")
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
    """The names of mesh axes by what they are for, in the order of the mesh."""

    replica: tuple[str, ...] = ("replica",)
    stage: tuple[str, ...] = ("stage",)
    data: tuple[str, ...] = ("data",)
    expert: tuple[str, ...] = ("expert",)
    context: tuple[str, ...] = ("context",)
    model: tuple[str, ...] = ("model",)

    @classmethod
    def of(cls, names: Any) -> Axes:
        """Those that a user names: by role, or for data and model, or for replica and these."""
        if not isinstance(names, Mapping):
            listed = () if isinstance(names, str) else tuple(names)
            roles = ("data", "model") if len(listed) == 2 else ("replica", "data", "model")
            names = dict(zip(roles, listed, strict=True)) if len(listed) in (2, 3) else {"": names}
        named = {role: axes_of(name) for role, name in names.items()}
        found = Axes(**{role: x for role, x in named.items() if role in cls._fields})
        count = len([*itertools.chain(*found)])
        wrong = [role for role, x in named.items() if role not in cls._fields or not x]
        wrong += [role for role, x in named.items() if role != "model" and len(x) > 1]
        if wrong or len({*itertools.chain(*found)}) < count:
            raise ValueError(
                "plan: axes must be the names of the data and the model axis, as in ('data', "
                "'model'), or different names by role, as in {'data': 'dp', 'model': ('x', 'y')}, "
                f"of which only model may have several: {', '.join(cls._fields)}; got {names!r}."
            )
        return found

    def in_mesh(self, sizes: Mapping[str, int], *roles: str, least: int = 1) -> tuple[str, ...]:
        """The axes of these roles that a mesh has, with at least so many devices."""
        names = (name for role in roles for name in getattr(self, role))
        return tuple(name for name in names if sizes.get(name, 0) >= least)


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
    """The arguments of a step: its models, their optimizers, and the batch."""

    def __init__(self, args: Sequence[Any], names: Sequence[str]):
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(
            tuple(args), is_leaf=_compat.is_graph_object
        )
        # Modules and other leaves, by the expressions that name them.
        self.parts = {
            f"{names[keys[0].idx]}{jax.tree_util.keystr(keys[1:])}": x for keys, x in leaves
        }
        # Arrays with the most frequent first dimension, of several the largest, are the batch.
        arrays = [x for x in self.parts.values() if not _compat.is_graph_object(x)]
        counts = Counter(filter(None, map(_rows, arrays)))
        self.rows = max(counts, key=lambda rows: (counts[rows], rows), default=0)
        batch = [x for x in arrays if self.rows and _rows(x) == self.rows]
        largest: Any = max(batch, key=lambda x: math.prod(x.shape), default=None)
        shape = (1,) if largest is None else largest.shape
        self.length: int = (*shape, 1)[1]  # the second dimension
        is_vectors = len(shape) > 1 and jax.numpy.issubdtype(largest.dtype, jax.numpy.inexact)
        self.tokens = math.prod(shape[:-1] if is_vectors else shape)  # feature vectors
        layered = [x for model in self._models().values() for x in layers_of(model)[0].values()]
        self.layers = sorted({x.length for x in layered if isinstance(x, Stack)})
        self.stages = sorted({len(x) for x in layered})  # lists of blocks as well
        self.experts = next(filter(None, map(_experts, self._models().values())), 0)

    def _models(self) -> dict[str, Any]:
        nodes = {name: x for name, x in self.parts.items() if _compat.is_graph_object(x)}
        return {name: x for name, x in nodes.items() if not isinstance(x, nnx.Optimizer)}

    def _model_of(self, name: str) -> str:
        """The model of an optimizer: whose arrays its state has most, of several the nearest."""
        optimizer, order = self.parts[name], [*self.parts]
        if hasattr(optimizer, "model"):
            return f"{name}.model"
        states = {(x.path[i:], x.shape) for x in variables(optimizer) for i in range(len(x.path))}
        models = self._models()
        if not models:
            raise ValueError("expected the model of its optimizer among the arguments, got none")

        def fit(model: str) -> tuple[int, bool, int]:
            own = {(x.path, x.shape) for x in variables(models[model])}
            ahead = order.index(name) - order.index(model)
            return len(own & states), ahead > 0, -abs(ahead)

        return max(models, key=fit)

    def shard(
        self, calls: Sequence[Call], mesh: Mesh, rows: Any, *, offloaded: bool = False
    ) -> tuple[tuple[Any, ...], list[str], str]:
        """The shardings of all arguments, the lines of a recipe that make them, and its result."""
        lines, made, texts = list[str](), dict[str, Any](), dict[str, str]()
        optimizers = [name for name, x in self.parts.items() if isinstance(x, nnx.Optimizer)]
        owners = {name: self._model_of(name) for name in optimizers}
        alone = {name: name for name in self._models() if name not in owners.values()}
        for part, owner in (owners | alone).items():
            optimizer = self.parts[part] if part in owners else None
            model = self.parts[owner] if owner in self.parts else getattr(optimizer, "model", None)
            variable = f"sharding{len(made) + 1 if made else ''}"
            made[variable] = None
            own = [call for call in calls if call[0] is not zero1 or optimizer is not None]
            own = own or [(replicated, {})]
            for i, (strategy, options) in enumerate(own):
                given = [owner, "mesh=mesh", *[f"base={variable}"] * (i > 0)]
                more: dict[str, Any] = {"base": made[variable]} if i else {}
                if optimizer is not None and i == len(own) - 1:
                    given, more = [*given, f"optimizer={part}"], more | {"optimizer": optimizer}
                given += [f"{key}={value!r}" for key, value in options.items()]
                made[variable] = strategy(model, mesh=mesh, **more, **options)
                lines.append(f"{variable} = {strategy.__name__}({', '.join(given)})")
            texts.setdefault(owner, variable)
            texts[part] = variable
            if offloaded and optimizer is not None:
                texts[part] = f"{variable}_on_host"
                made[texts[part]] = offload(made[variable], optimizer, mesh=mesh)
                lines.append(f"{texts[part]} = offload({variable}, {part}, mesh=mesh)")
        spec = {name: self._spec(x, rows) for name, x in self.parts.items()}
        found = [made[texts[name]] if name in texts else spec[name] for name in self.parts]
        texts = {name: "None" if x is None else spec_text(x) for name, x in spec.items()} | texts
        written = [_Text(texts[name]) for name in self.parts]
        shardings = jax.tree_util.tree_unflatten(self._tree, found)
        return shardings, lines, repr(jax.tree_util.tree_unflatten(self._tree, written))

    def _spec(self, x: Any, batch: PartitionSpec) -> PartitionSpec | None:
        """The spec of the batch for a part that belongs to it."""
        if not self.rows or _rows(x) != self.rows:
            return None
        is_whole = len(x.shape) > 1 and x.shape[1] == self.length
        return batch if is_whole else PartitionSpec(*batch[:1])

    def with_rows(self, rows: int) -> tuple[Any, ...]:
        """The same arguments with another number of rows."""
        resized = (
            jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) if _rows(x) == self.rows else x
            for x in self.parts.values()
        )
        return tuple(jax.tree_util.tree_unflatten(self._tree, resized))


class _Text(str):
    """An expression, which is its own representation."""

    __repr__ = str.__str__


def _rows(x: Any) -> int:
    """The first dimension of an array; 0 for a scalar, a module and what is not an array."""
    shape = () if _compat.is_graph_object(x) else getattr(x, "shape", ())
    return int(shape[0]) if shape else 0


def _experts(model: Any) -> int:
    """The number of experts: of outputs of a router, and of matrices in a parameter of a class."""
    found = [x.layer_shape for x in variables(model)]
    outputs = {shape[1] for shape in found if len(shape) == 2}
    stacked = [shape[0] for shape in found if len(shape) == 3 and shape[0] in outputs]
    for number, _ in Counter(stacked).most_common():
        try:
            expert_parallel(model, experts=number, mesh=AbstractMesh((1,), ("expert",)))
        except ValueError:  # matrices of other layers, such as heads
            continue
        return number
    return 0


def split_name(strategy: str) -> tuple[str, tuple[str, ...]]:
    """What a strategy does over the batch and with layers."""
    data, *styles = strategy.split(" + ")
    return data, tuple(styles)


def strategies_of(arguments: Arguments, devices: int) -> list[str]:
    """All strategies for some arguments."""
    choices: list[tuple[str, ...]] = [("", "tensor", "sequence")]
    choices += [("", "expert")] * (arguments.experts > 0)
    # Without enough rows for all devices, some of them share a row.
    choices += [("", "context")] * (arguments.length > 1 and 0 < arguments.rows < devices)
    choices += [("", "pipeline")] * bool(arguments.stages)
    return [
        " + ".join([data, *[style for style in STYLES if style in styles]])
        for styles in sorted(itertools.product(*choices), key=lambda x: len(x) - x.count(""))
        for data in OVER_DATA
    ]


def checked_strategies(names: Sequence[str]) -> list[str]:
    """The names of strategies, in the order of their parts here."""
    wrong, found = [], []
    for name in names:
        data, styles = split_name(name)
        known = {data: OVER_DATA} | dict.fromkeys(styles, tuple(STYLES))
        wrong += [
            f"  {name!r}: {part!r}{suggestion(part, of)}; expected one of {', '.join(of)}"
            for part, of in known.items()
            if part not in of
        ]
        if len({STYLES.get(style) for style in styles}) < len(styles):
            wrong.append(f"  {name!r}: two styles over one axis")
        found.append(" + ".join([data, *[style for style in STYLES if style in styles]]))
    raise_listed(ValueError, "plan: unknown strategies:", wrong)
    return found


def mesh_sizes(
    count: int, num_slices: int, axes: Axes, strategy: str, arguments: Arguments
) -> Iterator[dict[str, int]]:
    """The sizes of meshes that have a strategy's axes; slices are along replicas or stages."""
    if count % num_slices:
        raise ValueError(f"plan: num_slices={num_slices} does not divide the {count} devices.")
    divided = {
        "stage": math.gcd(*arguments.stages),
        "expert": arguments.experts,
        "context": arguments.length,
    }
    data, styles = split_name(strategy)
    roles = {STYLES[style] for style in styles}
    roles |= {"replica"} if data == "hsdp" and num_slices == 1 else set()
    names = [
        (name, role, 1 if i or role == "data" else 2)
        for role in Axes._fields
        for i, name in enumerate(getattr(axes, role))
        if role in roles or role == "data"
    ]

    def split(rest: int, open_: Sequence[tuple[str, str, int]]) -> Iterator[dict[str, int]]:
        (name, role, least), *others = open_
        for size in range(least, rest + 1):
            if rest % size == 0 and divided.get(role, 0) % size == 0:
                if others:
                    yield from ({name: size} | more for more in split(rest // size, others))
                elif size == rest:
                    yield {name: size}

    kept = {axes.expert[0]: 1} if arguments.experts else {}  # the model may name this axis
    for replicas in (num_slices, 1) if num_slices > 1 and "stage" in roles else (num_slices,):
        for found in split(count // replicas, names):
            if replicas == num_slices or found[axes.stage[0]] % num_slices == 0:
                slices = {axes.replica[0]: replicas} if replicas > 1 else {}
                sizes = kept | slices | found
                yield {name: sizes[name] for name in itertools.chain(*axes) if name in sizes}


def check_meshes(
    meshes: Sequence[Mapping[str, int]], devices: int | None, axes: Axes, *, are_ours: bool
) -> None:
    """Raises a ValueError for meshes with other axes than strategies use, or too many devices."""
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
    """Whether a mesh has devices along the axes that a strategy uses, and along no others."""
    data, styles = split_name(strategy)
    used = {STYLES[style] for style in styles}
    needed = {"dp": (), "hsdp": (("replica",), SHARDING)}.get(data, (("replica", *SHARDING),))
    return all(axes.in_mesh(sizes, *roles, least=2) for roles in needed) and all(
        bool(axes.in_mesh(sizes, role, least=2)) == (role in used) for role in STYLES.values()
    )


# The axes that shard the rows of the batch, and those over which parameters are gathered as well.
ROWS, SHARDING = ("replica", "data", "expert"), ("data", "expert", "context")


def batch_spec(sizes: Mapping[str, int], axes: Axes, arguments: Arguments) -> PartitionSpec:
    """How the batch is sharded: its rows, and over the axis for contexts its second dimension."""
    over = axes.in_mesh(sizes, *ROWS)
    count = math.prod(sizes[axis] for axis in over)
    if arguments.rows % count:
        names = " and ".join(name for name in over if sizes[name] > 1)
        raise ValueError(f"{count} devices over {names} do not divide {arguments.rows} rows")
    contexts = axes.in_mesh(sizes, "context", least=2)
    return PartitionSpec(_one_or_all(over) if over else None, *contexts)


def chains(
    strategy: str, sizes: Mapping[str, int], axes: Axes, arguments: Arguments, prefetch: int
) -> dict[str, list[Call]]:
    """The strategies of a chain with their options, by the text of those that are chosen."""
    data, styles = split_name(strategy)
    own, calls = dict[str, Any](), list[Call]()
    if "tensor" in styles or "sequence" in styles:
        own = {"sequence": True} if "sequence" in styles else {}
        calls.append((tensor_parallel, {"axis": _one_or_all(axes.in_mesh(sizes, "model")), **own}))
    if "expert" in styles:
        own = {"experts": arguments.experts, "axis": axes.expert[0]}
        calls.append((expert_parallel, own))
    if "context" in styles:
        calls.append((context_parallel, {"axis": axes.context[0]}))
    over = axes.in_mesh(sizes, *["replica"] * (data != "hsdp"), *SHARDING, least=2)
    last: list[Call] = []
    if data in ("fsdp", "hsdp"):
        own = {"across_slices": True} if axes.replica[0] in over else {}
        own |= {"prefetch": prefetch} if prefetch else {}
        last = [(fsdp, {"axis": _one_or_all(over), **own})]
    if data == "zero1":
        last = [(zero1, {"axis": _one_or_all(over)})]
    if "pipeline" not in styles:
        return {"": calls + last}
    stages = sizes[axes.stage[0]]
    rows = arguments.rows // math.prod(sizes[axis] for axis in axes.in_mesh(sizes, *ROWS))
    counts = sorted({math.gcd(times * stages, rows) for times in (1, 2, 4, 8)})
    own = {"axis": axes.stage[0]}
    return {
        f"{n} microbatches": [*calls, (pipeline, own | {"microbatches": n}), *last] for n in counts
    }


def _one_or_all(names: Sequence[str]) -> Any:
    """A name alone; several as a tuple."""
    return names[0] if len(names) == 1 else tuple(names)
