"""What candidates need, before anything is compiled: from shapes, and from a trace of the step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.hardware import Hardware
from ..analysis.work import positions
from ..partition.mesh import make_mesh
from ..partition.pipelining import Schedule
from ..report.sharding import ShardingRow, check_sharding
from ..specs.fitting import axes_of, padded, spec_and_mesh
from ..specs.state_sharding import StateSharding
from ..transforms.jit import jit
from .candidates import SHARDING, Arguments, Axes, Candidate, split_name


class Work(NamedTuple):
    """The matrix products and convolutions of a step, on all devices together."""

    flops: float = 0.0  # of a conditional those of the largest branch
    accessed: float = 0.0  # the bytes of their operands and results, likewise
    least: float = 0.0  # the flops, of a conditional those of the smallest branch
    is_narrow: bool = False  # whether some are of 8-bit numbers

    def times(self, count: float) -> Work:
        """The products of so many runs."""
        more = self.flops * count, self.accessed * count, self.least * count
        return Work(*more, self.is_narrow)

    def least_seconds(self, devices: int, hardware: Hardware) -> float:
        """A lower bound of the time of a step: its products at the peak rate of all devices."""
        narrow = [hardware.int8_flops, hardware.fp8_flops] if self.is_narrow else []
        return self.least / devices / max(filter(None, [hardware.flops, *narrow]))


def work_of(
    fun: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], axes: Axes
) -> Work | None:
    """The products of a step traced for one device, of which the results are used, if it can be."""
    for kind in (AxisType.Auto, AxisType.Explicit):  # the step may only be written for one
        mesh = make_mesh({name: 1 for of in axes for name in of}, kind, devices=jax.devices()[:1])
        try:
            with jax.set_mesh(mesh):
                traced = jit(fun, mesh=mesh, **options).trace(*args)
                return _work(_compat.used_equations(traced._stage.jaxpr))
        except Exception:  # it may need several devices; each candidate says what fails for it
            continue
    return None


def _work(equations: Any) -> Work:
    parts = list[Work]()
    for one in equations:
        name, shapes = one.primitive.name, [x.aval for x in (*one.invars, *one.outvars)]
        if flops := _product_flops(name, one.params, shapes):
            size = sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes if hasattr(x, "shape"))
            is_narrow = all(x.dtype.itemsize == 1 for x in shapes[:2])
            parts.append(Work(flops, size, flops, is_narrow))
        elif inner := [_work(program.eqns) for program in _inside(one.params.values())]:
            if name == "cond":
                largest = max(inner)
                inner = [largest._replace(least=min(part.least for part in inner))]
            parts += [part.times(one.params.get("length", 1)) for part in inner]
    flops, accessed, least = (sum(part[i] for part in parts) for i in range(3))
    return Work(flops, accessed, least, any(part.is_narrow for part in parts))


def _inside(values: Any) -> Iterator[Any]:
    """The programs among the parameters of an equation."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inside(value)
        elif hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
            yield inner


def _product_flops(name: str, params: Mapping[str, Any], shapes: Sequence[Any]) -> Any:
    """The flops of a primitive that is a product, as a float; 0 for others."""
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(shapes[-1].shape) * math.prod(shapes[0].shape[d] for d in summed)
    if name == "conv_general_dilated":
        lhs, rhs, out = (x.shape for x in shapes)
        numbers = params["dimension_numbers"]
        outer = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * rhs[numbers.rhs_spec[1]]
        for i, stride in enumerate(params["window_strides"]):
            sides = (lhs, numbers.lhs_spec), (rhs, numbers.rhs_spec), (out, numbers.out_spec)
            sizes = [shape[spec[i + 2]] for shape, spec in sides]
            dilations = params["lhs_dilation"][i], params["rhs_dilation"][i]
            outer *= positions(*sizes, stride, params["padding"][i][0], *dilations)
        return 2.0 * outer
    if name.startswith("ragged_dot"):
        (summed, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        ragged = set(params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions)
        groups = shapes[2].shape[-1] if ragged <= set(summed) else 1
        contracted = math.prod(shapes[0].shape[d] for d in summed)
        return 2.0 * math.prod(shapes[-1].shape) * contracted / groups
    return 0.0


class Prediction(NamedTuple):
    """What a candidate needs on one device."""

    arguments: int  # bytes, without the padding of tiles
    # By a training step within a slice and between slices, roughly: each parameter that is sharded
    # over axes of the batch is gathered twice and its gradient scattered, other gradients are
    # summed, and so are the activations on both sides of each kernel that is sharded over the axis
    # for layers. In a pipeline, activations go between stages with as many features as the smallest
    # parameter of a layer; so do, around the ring, keys and values of a context. Parameters of
    # blocks in a list move to their stages, and gradients back. Tokens go to two experts and back.
    sent: tuple[float, float]
    idle: float  # how often a device computes, compared with one that is never idle
    key: Any  # equal for candidates that shard everything alike

    def seconds(self, work: Work | None, devices: int, hardware: Hardware) -> dict[str, float]:
        """Rough times: the largest bounds a step if all is hidden, the sum if nothing is."""
        flops, accessed = (0.0, 0.0) if work is None else (work.flops, work.accessed)
        network = hardware.network_bandwidth or hardware.interconnect_bandwidth
        within, between = self.sent
        return {
            "compute": flops / devices * self.idle / hardware.flops,
            "memory": (2 * self.arguments + accessed / devices) / hardware.memory_bandwidth,
            "interconnect": max(within / hardware.interconnect_bandwidth, between / network),
        }


def predict(
    candidate: Candidate, args: Sequence[Any], arguments: Arguments, axes: Axes
) -> Prediction:
    """Predicts what a candidate needs; a ValueError if specs do not fit."""
    found = _Sums(candidate, arguments, axes)

    def is_single(x: Any) -> bool:
        return x is None or isinstance(x, StateSharding)

    jax.tree.map(found.add, candidate.in_shardings, tuple(args), is_leaf=is_single)
    return Prediction(found.bytes, (found.within, found.between), found.idle, tuple(found.key))


class _Sums:
    """The sums over all arguments."""

    def __init__(self, candidate: Candidate, arguments: Arguments, axes: Axes):
        self.arguments, self.axes, self.styles = arguments, axes, split_name(candidate.strategy)[1]
        names, sizes = zip(*candidate.sizes.items(), strict=True)
        self.mesh = AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
        self.sizes = {axis: size for axis, size in candidate.sizes.items() if size > 1}
        self.bytes, self.within, self.between, self.idle = 0, 0.0, 0.0, 1.0
        self.key: list[Any] = [tuple(self.sizes.items())]
        self.tokens = arguments.tokens / self._devices("replica", *SHARDING)

    def _devices(self, *roles: str) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes.in_mesh(self.sizes, *roles))

    def add(self, sharding: Any, part: Any) -> None:
        if not isinstance(sharding, StateSharding):
            spec, on = spec_and_mesh(sharding, self.mesh) or (PartitionSpec(), self.mesh)
            is_on_host = "host" in (getattr(sharding, "memory_kind", None) or "")
            for x in [] if is_on_host else jax.tree.leaves(part):
                if hasattr(x, "shape"):
                    shape = NamedSharding(on, spec).shard_shape(x.shape)
                    self.bytes += math.prod(shape) * x.dtype.itemsize
            return
        rows = check_sharding(part, sharding, self.mesh).rows
        if faults := [f"{row.path}: {row.why}" for row in rows if row.is_fault]:
            raise ValueError("these specs do not fit: " + "; ".join(faults))
        on_device = (row for row in rows if "host" not in (row.memory_kind or ""))
        self.bytes += sum(row.bytes_per_device for row in on_device)
        self.key += [tuple((*self._split(row), row.memory_kind) for row in rows)]
        self.key.append(sharding.activations)
        if isinstance(part, nnx.Optimizer):
            return
        declared = sharding.activations.shardings if sharding.activations else ()
        schedule = next((x.schedule for x in declared if isinstance(x.schedule, Schedule)), None)
        layered = [row for row in rows if row.shape[:1] and row.shape[0] in self.arguments.layers]
        per_layer = min((row.bytes_total / row.shape[0] for row in layered), default=0.0)
        if schedule is not None and not layered:  # blocks of a list
            stages = {*self.axes.in_mesh(self.sizes, "stage")}
            moved = [x.bytes_total for x in rows if stages & {*itertools.chain(*self._split(x))}]
            per_layer = min(moved, default=0.0)
            self.within += 2 * sum(moved) / schedule.stages * (1 - 1 / schedule.stages)
        if schedule is not None:
            self.idle = schedule.ticks / schedule.microbatches
            # In each tick forward and backward; and what leaves the stages, and its gradient.
            self.within += 2 * self.tokens * per_layer * (self.idle + 1)
        if (ring := self._devices("context")) > 1:
            blocks = 3 * (ring - 1) * sum(self.arguments.layers[-1:])
            self.within += 2 * self.tokens * per_layer * blocks
        for row in rows:
            self._add_row(row)

    def _split(self, row: ShardingRow) -> tuple[tuple[str, ...], ...]:
        """The axes that shard each dimension, without those of size 1."""
        spec = row.spec if isinstance(row.spec, PartitionSpec) else PartitionSpec()
        entries = padded(spec, len(row.shape))
        return tuple(tuple(axis for axis in axes_of(x) if axis in self.sizes) for x in entries)

    def _add_row(self, row: ShardingRow) -> None:
        if "float" not in row.dtype or not row.shape:  # it has no gradient, or hardly one
            return
        split, sizes = self._split(row), self.sizes
        over = {axis for axes in split for axis in axes}
        experts = self.arguments.experts
        expert = {
            axis
            for axes, size in zip(split, row.shape, strict=True)
            for axis in axes
            if "expert" in self.styles and size == experts and axis in self.axes.expert
        }
        stage = {*self.axes.stage} & over
        model = {*self.axes.model} & over
        held: float = row.bytes_total / math.prod(sizes[axis] for axis in expert | stage | model)
        itemsize = row.bytes_total / math.prod(row.shape)
        # The axes over which the same parameter is used for different tokens.
        others = {*self.axes.in_mesh(sizes, "replica", *SHARDING)} - expert
        sent = []
        for axes in (others.difference(self.axes.replica), others.intersection(self.axes.replica)):
            shards = math.prod(sizes[axis] for axis in axes & over)
            devices = math.prod(sizes[axis] for axis in axes)
            sent.append(3 * held * (1 - 1 / shards) + 2 * held / shards * (1 - shards / devices))
            held /= shards
        self.within, self.between = self.within + sent[0], self.between + sent[1]
        if len(row.shape) < 2 or not (expert or model):
            return
        layers, dims = 1.0, [*zip(row.shape, split, strict=True)]
        if row.shape[0] in self.arguments.layers:
            layers = row.shape[0] / math.prod(sizes[axis] for axis in stage)
            dims = dims[1:]
        per_token = layers * itemsize
        if expert:
            per_token *= 8 / 3 * min(size for size, _ in dims[-2:])
        else:
            per_token *= 2 * max((size for size, axes in dims if model.isdisjoint(axes)), default=1)
        count = math.prod(sizes[axis] for axis in expert or model)
        self.within += self.tokens * per_token * (1 - 1 / count)
