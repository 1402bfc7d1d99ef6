"""Finds projections to heads whose spec splits a head, if the model says how many heads it has.

A layer ``k_proj`` with 2 heads of 64 features has 128 outputs. Over 4 devices, each has half a
head: numbers are right, but the attention gathers the keys again. Shapes alone do not show that,
because 128 outputs may be any number of heads. The module around the layer, or its configuration,
often has the number:

    num_kv_heads = 2                      the heads of keys and values
    num_heads = 8, head_dim = 64          the heads of queries, and the features of each head

`QUERIES` and `KEYS` match names of projections: ``q_proj``, ``query``; ``k_proj``, ``value``.

Parameters are listed as ``NamedVariable``: ``path``, ``shapes`` of its arrays, and
``layer_dimensions``, the dimensions that are not stacked layers. ``Listing.modules`` yields the
path and the index of each module of a flattened model (``flat``), whose ``objects`` are by index.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from ..specs.fitting import axes_of, pad_entries
from ..specs.paths import KEYS, QUERIES, WRAPPERS, Path
from ..specs.types import AnyMesh
from .variables import Listing, SpecsByPath

# Names of attributes with the number of heads, or the size of a head, and of configurations.
_NUM_QUERY_HEADS = re.compile("(num|n)_(attention_|query_|q_)?heads?|heads")
_NUM_KEY_HEADS = re.compile("((num|n)_)?(kv|key_value|k|key)_heads?")
_HEAD_SIZE = re.compile("head_(dim|size|features)")
_CONFIGURATIONS = ("config", "cfg", "configuration", "args", "options")


def notes_of_split_heads(listing: Listing, specs: SpecsByPath, mesh: AnyMesh) -> dict[Path, str]:
    """Returns a note for each kernel whose spec splits heads, by its path: what that costs.

    Such a kernel is a projection, (inputs, heads · size): attention splits its outputs into heads.

    Args:
      listing: the model.
      specs: the specs of its parameters, by path.
      mesh: the mesh of the specs.
    """
    modules: dict[Path, object] = {}  # by path; filled at the first projection, if there is one
    notes = {}
    for parameter in listing.variables:
        spec = specs[parameter.path]
        dimensions = parameter.layer_dimensions  # without the dimensions of stacked layers
        # A kernel (inputs, heads, size) is left out, because a shard of its heads has whole heads.
        if len(dimensions) != 2 or not isinstance(spec, PartitionSpec):
            continue
        name, module_path = _projection(parameter.path)  # ("k_proj", the path of the attention)
        if not name:  # the parameter is no projection to heads
            continue
        if not modules:
            modules = {path: listing.flat.objects[index] for path, index in listing.modules()}
        module = modules.get(module_path)
        if not isinstance(module, nnx.Module):
            continue
        shape = parameter.shapes[0]
        output_dimension = dimensions[-1]
        axes = axes_of(pad_entries(spec, len(shape))[output_dimension])
        devices = math.prod(mesh.shape[axis] for axis in axes)
        # The number of heads; None if the module does not say it.
        heads = _num_heads(module, name, size=shape[output_dimension])
        if heads and heads % devices:  # without axes there is one device, which divides all
            over = ", ".join(map(repr, axes))
            notes[parameter.path] = (
                f"its {heads} heads are split within a head over {over} ({devices}), so attention "
                "gathers them. To keep heads whole, replicate it over this axis before other "
                f"strategies add theirs: base=override(tensor_parallel(...), {{'{name}': P()}})"
            )
    return notes


def _projection(path: Path) -> tuple[str, Path]:
    """Returns the name of a projection to heads, and the path of the module around it.

    For the kernel ``blocks/0/attention/k_proj/kernel`` these are ``k_proj`` and
    ``blocks/0/attention``. For a parameter that is no projection, the name is "", the path ().
    """
    # The name is the last key of a parameter ``wk``, and the last but one of ``k_proj/kernel``.
    # `WRAPPERS` do not count: ``k_proj/base_module/kernel`` is the kernel of ``k_proj``. Lists and
    # other wrappers have one more key: ``k_proj/inner/kernel``.
    indices = [index for index, key in enumerate(path) if key not in WRAPPERS]
    for index in reversed(indices[-3:]):
        name = str(path[index])
        if QUERIES.fullmatch(name) or KEYS.fullmatch(name):
            return name, path[:index]
    return "", ()


def _num_heads(module: nnx.Module, name: str, size: int) -> int | None:
    """Returns the number of heads of a projection; None if the module does not say it.

    Args:
      name: the name of the projection, which `QUERIES` or `KEYS` matches.
    """
    is_query = bool(QUERIES.fullmatch(name))
    pattern = _NUM_QUERY_HEADS if is_query else _NUM_KEY_HEADS
    numbers = _numbers(module)
    # The module has the number of heads, or the size of a head, from which the number follows.
    counts = {n for key, n in numbers.items() if pattern.fullmatch(key)}
    if not counts:
        head_sizes = {n for key, n in numbers.items() if _HEAD_SIZE.fullmatch(key)}
        counts = {size // n for n in head_sizes if size % n == 0}
    if len(counts) != 1:  # no number, or several that contradict each other
        return None
    [count] = counts
    # The number counts something else if it does not divide the outputs. The same holds if there
    # were as many heads as outputs, because each would have one feature.
    if count == 0 or size % count or size <= count:
        return None
    return count


def _numbers(module: nnx.Module) -> dict[str, int]:
    """Returns the positive integers in the attributes of a module and its configuration, by name.

    A configuration is an attribute that is a dataclass, or a dict or an object with one of the
    names in ``_CONFIGURATIONS``, such as ``config``.
    """
    attributes = vars(module)
    configurations = [
        value
        for name, value in attributes.items()
        if name in _CONFIGURATIONS
        or (dataclasses.is_dataclass(value) and not isinstance(value, type | nnx.Module))
    ]
    numbers = dict[str, int]()
    # The attributes of the module come last, because they override those of a configuration.
    for holder in (*configurations, attributes):
        for name, value in _items(holder):
            if type(value) is int and value > 0:  # `type` excludes True, which is an int as well
                numbers[str(name)] = value
    return numbers


def _items(holder: object) -> Iterable[tuple[Any, Any]]:
    """Returns the items of a dict, or the attributes of an object with their names."""
    if isinstance(holder, Mapping):
        return holder.items()
    if dataclasses.is_dataclass(holder):  # one with slots has no `__dict__`
        return [(x.name, getattr(holder, x.name, None)) for x in dataclasses.fields(holder)]
    return vars(holder).items() if hasattr(holder, "__dict__") else ()
