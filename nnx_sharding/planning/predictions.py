"""What candidates need, before anything is compiled: from shapes, and from one trace of the step.

**Memory**: the bytes of the arguments, exact except for the padding of tiles. **Compute**: the
matrix products and convolutions in the jaxpr of the step. **Bytes sent**: what one device sends in
a training step, roughly. Let b be the bytes of a parameter, divided by the sizes of the axes that
shard it during the whole step (`model`, `stage`, `expert`). Let s be the number of its shards over
axes of the batch, and n the number of devices along these axes:

    sharded over the batch    3 b (1 - 1/s)            gathered twice, its gradient scattered
    its replicas              2 b/s (1 - s/n)          all-reduce of the gradient's shards
    tensor parallelism        tokens × features × …    activations on both sides of a kernel
    experts                   tokens × features × …    tokens go to two experts and back
    pipeline                  tokens × features × …    between stages, in each tick, both ways; and
                              what is above for the layers of a stage is sent in each tick, too,
                              but with 1F1B what is not sharded over the batch: it is reduced once;
                              blocks of a list move to their stages, and their gradients back
    context                   tokens × features × …    keys and values, or heads for positions,
                              both ways: `CONTEXT_ROUNDS`

Sums over a parameter's axes are first within slices, then between them. What stages send goes over
the slower network if their axis is one along which there are different slices. The number of
features that go between stages, and for attention, is taken to be the number of elements of the
smallest parameter of a layer, such as the scale of a norm.

From other modules: `Arguments` are those of the step (``tokens`` of the batch, ``layers`` of
stacks, ``experts``), `Axes` the names of mesh axes by their roles, a `ShardingRow` says how one
array of a module is sharded, a `Schedule` how a pipeline runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..analysis.flops import elements_in_windows
from ..analysis.hardware import Hardware
from ..experimental.context import OverSequence
from ..partition.mesh import make_mesh
from ..partition.pipeline_schedule import Schedule
from ..partition.variables import listing_of
from ..report.sharding import ShardingRow, sharding_rows
from ..specs.fitting import axes_of, pad_entries, spec_and_mesh
from ..specs.state_sharding import StateSharding
from ..transforms.jit import jit
from .candidates import SHARDING, Arguments, Axes, Candidate, split_name


class Products(NamedTuple):
    """The matrix products and convolutions of a step, on all devices together."""

    flops: float = 0.0  # a conditional counts its largest branch
    accessed: float = 0.0  # the bytes of their operands and results, likewise
    least: float = 0.0  # the flops; a conditional counts its smallest branch
    is_narrow: bool = False  # whether some are of 8-bit numbers

    def times(self, count: float) -> Products:
        """Returns the products of so many runs."""
        return Products(
            self.flops * count, self.accessed * count, self.least * count, self.is_narrow
        )

    def least_seconds(self, devices: int, hardware: Hardware) -> float:
        """Returns a lower bound of a step's time: its products at the peak rate of all devices."""
        narrow = [hardware.int8_flops, hardware.fp8_flops] if self.is_narrow else []
        return self.least / devices / max(filter(None, [hardware.flops, *narrow]))


def products_of(
    fun: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], axes: Axes
) -> Products | None:
    """Traces a step for one device and counts the products whose results are used.

    Args:
      fun: the step.
      args: its arguments.
      options: those of jit.
      axes: the mesh axes that the step may name.

    Returns:
      The products; None if the step cannot be traced for one device.
    """
    for kind in (AxisType.Auto, AxisType.Explicit):  # the step may only be written for one
        sizes = {name: 1 for names in axes for name in names}
        mesh = make_mesh(sizes, kind, devices=jax.devices()[:1])
        try:
            with jax.set_mesh(mesh):
                traced = jit(fun, mesh=mesh, **options).trace(*args)
                return products_in(_compat.used_equations(traced._stage.jaxpr))
        except Exception:  # it may need several devices; each candidate says what fails for it
            continue
    return None


def products_in(equations: Iterable[JaxprEqn]) -> Products:
    """Sums the products of equations and of what they call, with loops of known length.

    All else is left out, as products dominate the time of a model.
    """
    parts = list[Products]()
    for equation in equations:
        name, params = equation.primitive.name, equation.params
        operands: list[Any] = [x.aval for x in equation.invars]
        results: list[Any] = [x.aval for x in equation.outvars]
        if flops := _product_flops(name, params, [*operands, *results]):
            parts.append(
                Products(
                    flops=flops,
                    accessed=sum(_size(array) for array in (*operands, *results)),
                    least=flops,
                    is_narrow=all(array.dtype.itemsize == 1 for array in operands[:2]),
                )
            )
            continue
        called = [products_in(jaxpr.eqns) for jaxpr in _compat.jaxprs_of(equation)]
        if called and name == "cond":
            largest = max(called, key=lambda branch: branch.flops)
            called = [largest._replace(least=min(branch.least for branch in called))]
        parts += [part.times(params.get("length", 1)) for part in called]  # of a scan
    return Products(
        flops=sum(part.flops for part in parts),
        accessed=sum(part.accessed for part in parts),
        least=sum(part.least for part in parts),
        is_narrow=any(part.is_narrow for part in parts),
    )


def _size(aval: Any) -> int:
    """Returns the bytes of a value; 0 for one that is no array, such as a token."""
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


def _product_flops(name: str, params: Mapping[str, Any], arrays: Sequence[Any]) -> float:
    """Counts the flops of a primitive that is a product; 0 for others.

    Args:
      name: the name of the primitive.
      params: its parameters.
      arrays: the avals of its operands and then of its result.
    """
    if name == "dot_general":
        lhs, *_, result = arrays
        (summed, _), _ = params["dimension_numbers"]  # of lhs
        return float(2 * math.prod(result.shape) * math.prod(lhs.shape[d] for d in summed))
    if name == "conv_general_dilated":
        return _convolution_flops(params, *(array.shape for array in arrays))
    if name.startswith("ragged_dot"):
        lhs, _, group_sizes, *_, result = arrays
        numbers = params["ragged_dot_dimension_numbers"]
        (summed, _), _ = numbers.dot_dimension_numbers
        # Groups of a dimension that is summed over divide it; other groups divide the result.
        groups = group_sizes.shape[-1] if {*numbers.lhs_ragged_dimensions} <= {*summed} else 1
        contracted = math.prod(lhs.shape[d] for d in summed)
        return float(2 * math.prod(result.shape) * contracted / groups)
    return 0.0


def _convolution_flops(
    params: Mapping[str, Any], lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]
) -> float:
    """Counts the flops of a convolution, by its parameters and the shapes of its arrays.

    Products with padding, and with the zeros of a dilated input, do not count.
    """
    # Each spec has the dimension of the batch (of outputs, for the kernel), of features, and then
    # of each spatial axis.
    numbers = params["dimension_numbers"]
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    products = batch * features * rhs[numbers.rhs_spec[1]]
    for i, stride in enumerate(params["window_strides"]):
        in_window = elements_in_windows(
            size=lhs[numbers.lhs_spec[i + 2]],
            kernel=rhs[numbers.rhs_spec[i + 2]],
            outputs=out[numbers.out_spec[i + 2]],
            stride=stride,
            low=params["padding"][i][0],
            dilation=params["lhs_dilation"][i],
            spacing=params["rhs_dilation"][i],
        )
        products *= int(in_window.sum())
    return float(2 * products)


class BytesSent(NamedTuple):
    """The bytes that one device sends in a step."""

    within_slices: float
    between_slices: float


class Prediction(NamedTuple):
    """What a candidate needs on one device."""

    arguments: int  # bytes, without the padding of tiles
    sent: BytesSent
    idle: float  # the time of a step compared with one in which no stage of a pipeline waits
    key: Any  # equal for candidates that shard everything alike

    def seconds(
        self, products: Products | None, devices: int, hardware: Hardware
    ) -> dict[str, float]:
        """Predicts the seconds that a step takes for each resource alone.

        The largest is the time of a step if all communication is hidden, the sum if none is.

        Args:
          products: those of the step, on all devices together; None if they are unknown.
          devices: the number of devices.
          hardware: the rates.
        """
        products = products or Products()
        within = self.sent.within_slices / hardware.interconnect_bandwidth
        # Arguments are read and written once.
        accessed = 2 * self.arguments + products.accessed / devices
        return {
            "compute": products.flops / devices * self.idle / hardware.flops,
            "memory": accessed / hardware.memory_bandwidth,
            "interconnect": max(within, self.seconds_between_slices(hardware)),
        }

    def seconds_between_slices(self, hardware: Hardware) -> float:
        """Predicts how long slices send to each other."""
        bandwidth = hardware.network_bandwidth or hardware.interconnect_bandwidth
        return self.sent.between_slices / bandwidth


def predict(
    candidate: Candidate, arguments: Arguments, axes: Axes, num_slices: int = 1
) -> Prediction:
    """Predicts what a candidate needs on one device.

    Args:
      candidate: the candidate, with its shardings.
      arguments: those of the step.
      axes: the names of mesh axes by their roles.
      num_slices: the number of slices of TPUs that the devices are on.

    Raises:
      ValueError: a spec does not fit.
    """
    sums = _Sums(candidate, arguments, axes, num_slices)

    def is_single(sharding: Any) -> bool:
        return sharding is None or isinstance(sharding, StateSharding)

    jax.tree.map(sums.add, candidate.in_shardings, arguments.args, is_leaf=is_single)
    return Prediction(
        arguments=sums.bytes,
        sent=BytesSent(
            within_slices=sum((sent.within_slices for sent in sums.sent), 0.0),
            between_slices=sum((sent.between_slices for sent in sums.sent), 0.0),
        ),
        idle=1.0 if sums.schedule is None else _time_ratio(sums.schedule),
        key=tuple(sums.key),
    )


class _Sums:
    """The sums over all arguments; the formulas are at the top of this file.

    A *row* (`ShardingRow`) is one array of a module: its ``path``, ``shape``, ``spec``, and its
    ``bytes_total``, and ``bytes_per_device``.

    Attributes:
      arguments: those of the step, with what is known of their batch and models.
      axes: the names of mesh axes by their roles.
      styles: those of the candidate's strategy for layers, such as ``tensor``.
      mesh: a mesh of the candidate's sizes, without devices.
      bytes: of the arguments on one device.
      sent: the bytes that one device sends, for each of the formulas and arrays.
      key: what the shardings are, for comparisons.
      sizes: of the mesh axes with more than one device.
      crossing: the mesh axes along which there are different slices.
      tokens: of the batch, on one device.
      schedule: that of a pipeline, if there is one.
    """

    def __init__(self, candidate: Candidate, arguments: Arguments, axes: Axes, num_slices: int):
        self.arguments, self.axes = arguments, axes
        _, self.styles = split_name(candidate.strategy)
        names, sizes = zip(*candidate.sizes.items(), strict=True)
        # Without devices, which shapes do not need.
        self.mesh = AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
        self.sizes = {axis: size for axis, size in candidate.sizes.items() if size > 1}
        self.crossing = axes.between_slices(candidate.mesh, num_slices)
        self.bytes, self.sent = 0, list[BytesSent]()
        self.schedule: Schedule | None = None
        self.key: list[Any] = [tuple(self.sizes.items())]
        self.tokens = arguments.tokens / self._num_devices("replica", *SHARDING)

    def _num_devices(self, *roles: str) -> int:
        """Counts the devices along the axes of these roles."""
        return self._product(self.axes.in_mesh(self.sizes, *roles))

    def _product(self, axes: Iterable[str]) -> int:
        """Multiplies the sizes of axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def add(self, sharding: StateSharding | Sharding | PartitionSpec | None, part: Any) -> None:
        """Adds an argument, or a part of one that has its own sharding.

        Args:
          sharding: of a module or an optimizer, or of arrays outside of them; None to replicate.
          part: the argument.
        """
        if not isinstance(sharding, StateSharding):
            self._add_arrays(sharding, part)
            return
        rows = sharding_rows(listing_of(part).flat, sharding, self.mesh)
        if faults := [f"{row.path}: {row.why}" for row in rows if row.is_fault]:
            raise ValueError("these specs do not fit: " + "; ".join(faults))
        self.bytes += sum(row.bytes_per_device for row in rows if not _is_on_host(row))
        self.key += [tuple((*self._axes_of_row(row), row.memory_kind) for row in rows)]
        self.key.append(sharding.activations)  # candidates may differ in these only
        if isinstance(part, nnx.Optimizer):  # its state is updated where it is
            return
        self._add_layers(sharding, rows)  # before parameters, which are sent in each tick
        for row in rows:
            self._add_parameter(row)

    def _add_arrays(self, sharding: Sharding | PartitionSpec | None, part: Any) -> None:
        """Adds arrays outside of modules, such as the batch, which are not sent."""
        spec, mesh = spec_and_mesh(sharding, self.mesh) or (PartitionSpec(), self.mesh)
        for array in jax.tree.leaves(part):
            if hasattr(array, "shape"):
                shape = NamedSharding(mesh, spec).shard_shape(array.shape)
                self.key.append((*self._axes_by_dimension(spec, shape), _is_on_host(sharding)))
                if not _is_on_host(sharding):
                    self.bytes += math.prod(shape) * array.dtype.itemsize

    def _add_layers(self, sharding: StateSharding, rows: Sequence[ShardingRow]) -> None:
        """Adds what goes from layer to layer in a pipeline, and for attention over a sequence.

        Args:
          sharding: that of a model, which declares how its modules run.
          rows: those of its parameters.
        """
        declared = sharding.activations.shardings if sharding.activations else ()
        schedules = [x.schedule for x in declared]
        pipeline = next((x for x in schedules if isinstance(x, Schedule)), None)
        in_stacks = [row for row in rows if row.shape[:1] and row.shape[0] in self.arguments.layers]
        parameters = [row.bytes_total / row.shape[0] for row in in_stacks]  # bytes in a layer
        moved: list[float] = []  # of blocks of a list, from where they are to their stages
        if pipeline is not None and not in_stacks:
            stages = {*self.axes.in_mesh(self.sizes, "stage")}
            of_blocks = [
                row
                for row in rows
                if not stages.isdisjoint(itertools.chain(*self._axes_of_row(row)))
            ]
            moved = parameters = [row.bytes_total for row in of_blocks]
        # The bytes of a token between two layers: as many as the smallest parameter of a layer.
        per_token = min(parameters, default=0.0)
        if pipeline is not None:
            self.schedule = pipeline
            self._add_stages(pipeline, per_token, sum(moved))
        method = next((x.method for x in schedules if isinstance(x, OverSequence)), "ring")
        self._add_contexts(method, per_token)

    def _add_stages(self, schedule: Schedule, per_token: float, moved: float) -> None:
        """Adds what the stages of a pipeline send each other.

        Args:
          schedule: that of the pipeline.
          per_token: the bytes of a token between two layers.
          moved: the bytes of parameters that move to their stages, and whose gradients move back.
        """
        sent = 2 * moved / schedule.stages * (1 - 1 / schedule.stages)
        # In each tick forward and backward; and what leaves the stages, and its gradient.
        sent += 2 * self.tokens * per_token * (_time_ratio(schedule) + 1)
        is_between_slices = bool({*self.axes.in_mesh(self.sizes, "stage")} & self.crossing)
        self.sent.append(BytesSent(0.0, sent) if is_between_slices else BytesSent(sent, 0.0))

    def _add_contexts(self, method: str, per_token: float) -> None:
        """Adds what attention over a sharded sequence sends.

        Args:
          method: how it exchanges keys and values, a key of `CONTEXT_ROUNDS`.
          per_token: the bytes of a token between two layers.
        """
        devices = self._num_devices("context")
        if devices == 1:
            return
        layers = sum(self.arguments.layers[-1:])  # of the longest stack, if there is one
        # All-to-all may be within one axis, and a ring over another.
        rounds = CONTEXT_ROUNDS[method](devices)
        rounds += CONTEXT_ROUNDS["ring"](self._num_devices("ring"))
        self.sent.append(BytesSent(2 * self.tokens * per_token * rounds * layers, 0.0))

    def _axes_of_row(self, row: ShardingRow) -> tuple[tuple[str, ...], ...]:
        """Lists the axes that shard each dimension, without those of size 1."""
        spec = row.spec if isinstance(row.spec, PartitionSpec) else PartitionSpec()
        return self._axes_by_dimension(spec, row.shape)

    def _axes_by_dimension(
        self, spec: PartitionSpec, shape: Sequence[int]
    ) -> tuple[tuple[str, ...], ...]:
        """Lists the axes of a spec for each dimension of a shape, without those of size 1."""
        entries = pad_entries(spec, len(shape))
        return tuple(tuple(axis for axis in axes_of(x) if axis in self.sizes) for x in entries)

    def _add_parameter(self, row: ShardingRow) -> None:
        """Adds what is sent for one parameter, and for the activations around a kernel.

        Names are those of the formulas at the top of this file: ``held`` is b, ``shards`` is s and
        ``devices`` is n.
        """
        if "float" not in row.dtype or not row.shape:  # it has no gradient, or hardly one
            return
        axes_of_dims = self._axes_of_row(row)
        over = {axis for axes in axes_of_dims for axis in axes}  # all axes that shard it
        # Those that shard it during the whole step. An axis for experts may also be one for data.
        expert = {
            axis
            for axes, size in zip(axes_of_dims, row.shape, strict=True)
            for axis in axes
            if "expert" in self.styles
            and size == self.arguments.experts
            and axis in self.axes.expert
        }
        stage, model = {*self.axes.stage} & over, {*self.axes.model} & over
        held: float = row.bytes_total / self._product(expert | stage | model)
        # The axes along which devices use the same parameter for different tokens, and so reduce
        # its gradient.
        data = {*self.axes.in_mesh(self.sizes, "replica", *SHARDING)} - expert
        sent = []
        for axes in (data - self.crossing, data & self.crossing):  # within slices, then between
            shards, devices = self._product(axes & over), self._product(axes)
            sent.append(3 * held * (1 - 1 / shards) + 2 * held / shards * (1 - shards / devices))
            held /= shards
        times = 1
        if self.schedule is not None and stage:  # in each tick, for the layers of a stage
            is_reduced_once = self.schedule.interleaves and data.isdisjoint(over)
            times = 1 if is_reduced_once else self.schedule.ticks
        self.sent.append(BytesSent(times * sent[0], times * sent[1]))
        if len(row.shape) > 1 and (expert or model):
            self._add_activations(row, axes_of_dims, expert=expert, model=model, stage=stage)

    def _add_activations(
        self,
        row: ShardingRow,
        axes_of_dims: Sequence[tuple[str, ...]],
        *,
        expert: set[str],
        model: set[str],
        stage: set[str],
    ) -> None:
        """Adds the activations on both sides of a kernel that axes for layers shard.

        Args:
          row: the kernel.
          axes_of_dims: the axes that shard each of its dimensions.
          expert: the axes for experts that shard it.
          model: the axes for tensor parallelism that do.
          stage: the axes for stages of a pipeline that do.
        """
        layers = 1.0
        dims = [*zip(row.shape, axes_of_dims, strict=True)]  # (size, axes)
        if row.shape[0] in self.arguments.layers:
            layers = row.shape[0] / self._product(stage)
            dims = dims[1:]
        element_bytes = row.bytes_total / math.prod(row.shape)
        if expert:
            # A token goes to two experts and back, forward and backward, which is eight times; an
            # expert has three kernels, of which each counts a third.
            elements = 8 / 3 * min(size for size, _ in dims[-2:])
        else:
            # The features that are not sharded, in an all-reduce, which sends twice its bytes.
            elements = 2 * max((size for size, axes in dims if model.isdisjoint(axes)), default=1)
        per_token = layers * element_bytes * elements
        sent = self.tokens * per_token * (1 - 1 / self._product(expert or model))
        self.sent.append(BytesSent(sent, 0.0))


def _time_ratio(schedule: Schedule) -> float:
    """Returns the time of a step compared with one in which no stage waits."""
    return schedule.ticks / schedule.microbatches


def _is_on_host(sharding: Any) -> bool:
    """Tells whether a sharding, or a row, is for the memory of the host."""
    return "host" in (getattr(sharding, "memory_kind", None) or "")


# How often keys and values, or as many bytes, are sent in a step by so many devices.
CONTEXT_ROUNDS: dict[str, Callable[[int], float]] = {
    # Forward, and backward again, with their gradients.
    "ring": lambda devices: 3 * (devices - 1),
    # Queries, keys, values and outputs, which are twice as much, and the gradients of all.
    "all_to_all": lambda devices: 2 * 2 * (1 - 1 / devices),
    # Keys and values forward, and their gradients backward.
    "all_gather": lambda devices: 2 * (devices - 1),
}
