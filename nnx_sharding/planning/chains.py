"""Chains of strategies: their names, the meshes that they are of use on, and their calls.

A chain is one strategy for the rows of the batch (`OVER_DATA`) and any number of styles for layers,
each over an axis of its own (`STYLES`), such as ``fsdp + tensor``. `chains` lists the calls of a
chain, which `recipes.py` applies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from ..errors import raise_if_any
from ..experimental import context_parallel, expert_parallel
from ..experimental.context import METHODS
from ..partition import fsdp, pipeline, tensor_parallel, zero1
from ..specs.fitting import suggestion
from .arguments import Arguments
from .axes import ROWS, SHARDING, Axes
from .recipes import Call

OVER_DATA = ("dp", "zero1", "fsdp", "hsdp")
# Style for layers → the role of its axis (a field of `Axes`). The name of a chain has this order.
STYLES = {
    "expert": "expert",
    "tensor": "model",
    "sequence": "model",
    "context": "context",
    "pipeline": "stage",
}


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
