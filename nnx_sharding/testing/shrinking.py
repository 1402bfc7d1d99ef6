"""Finds a smaller configuration with the shardings of a large one, to check it on the true mesh.

The numbers in a configuration are made smaller one after the other. Each becomes its smallest
divisor with which the program can still be traced and every argument keeps its spec. A divisor is
at least 2, or 4 for numbers above 128. Numbers are divided because the heads then still divide the
width, and the stages the layers. At least two layers stay, so values still pass from one layer to
the next. Some numbers can only shrink after another one has, so the rounds go on until a round
changes nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.declared import abstract
from ..core.flatten import flatten
from ..core.structure import Structure, VariableEntry, locations_in
from ..core.unflatten import unflatten
from ..transforms.jit import declared_specs


def shrink(
    build: Callable[[Any], tuple[Any, ...]], config: Any, on_change: Callable[[str], None]
) -> tuple[Any, list[str]]:
    """Returns a smaller configuration, and lines that say which numbers changed.

    Args:
      build: makes a jitted step and its arguments from a configuration.
      config: a mapping, or a dataclass; its integers from 3 on may change.
      on_change: a function that gets a text for each number that became smaller: ``width 1024 to
        4``.

    Returns:
      The configuration, of the same type, and lines such as ``width 1,024 → 4``.
    """
    full, wanted = config, _specs(build, config)
    full_sizes = _sizes(full)
    has_changed = True
    while has_changed:
        has_changed = False
        for name, size in _sizes(config).items():
            for divisor in _divisors(size, full_sizes[name]):  # ascending: the smallest comes first
                smaller = _with_size(build, config, name, divisor, wanted)
                if smaller is not None:
                    config, has_changed = smaller, True
                    on_change(f"{name} {size} to {divisor}")
                    break
    values = _sizes(config, least=1)
    changes = [
        f"{name} {size:,} → {values[name]:,}"
        for name, size in full_sizes.items()
        if size != values[name]
    ]
    return config, changes


def _with_size(
    build: Callable[[Any], tuple[Any, ...]],
    config: Any,
    name: str,
    size: int,
    wanted: Mapping[str, PartitionSpec],
) -> Any:
    """Returns a configuration with another size; None if not all arguments keep their specs.

    Args:
      build: makes a jitted step and its arguments from a configuration.
      wanted: the spec of each argument, by its expression.
    """
    try:
        # The configuration may check its numbers, or compute a number from others.
        smaller = _replaced(config, name, size)
        return smaller if _specs(build, smaller) == wanted else None
    except Exception:  # the model may raise any error for sizes that do not fit
        return None


def _specs(build: Callable[[Any], tuple[Any, ...]], config: Any) -> Mapping[str, PartitionSpec]:
    """Traces the program of a configuration; returns the spec of each argument, by its expression.

    ``build`` returns the step, a function of `jit`, and its arguments. Nothing is computed even if
    it makes whole arrays, because it runs in `eval_shape`. Layers of a list share one expression.
    """
    # `eval_shape` returns arrays only. So the step and its arguments leave it through this list.
    programs: list[tuple[Any, tuple[Any, ...]]] = []

    def add_program() -> None:
        step, *args = build(config)
        # Within `eval_shape`, arrays are tracers. Tracers are invalid afterwards, so only their
        # types are kept: the arguments are taken apart, and put together again with types.
        flat = flatten(tuple(args))  # leaves: the arrays of modules and other arguments
        leaves = [abstract(x) if hasattr(x, "dtype") else x for x in flat.leaves]
        abstract_args = unflatten(flat.structure, leaves).root
        programs.append((step, abstract_args))

    nnx.eval_shape(add_program)
    [(step, args)] = programs
    step.eval_shape(*args)  # fails for sizes that do not fit
    specs = declared_specs(step, *args)  # by the expression for each array
    # ``model.layers[0].up1`` → ``model.layers[*].up*``, because the number of layers may change.
    # Digits in other names are replaced too. This is safe because both configurations have the same
    # names.
    return {re.sub(r"\d+", "*", name): spec for name, spec in specs.items()}


def _sizes(config: Any, least: int = 3) -> dict[str, int]:
    """Returns the numbers of a configuration that are sizes, by name."""
    if isinstance(config, Mapping):
        values = config
    else:  # `vars` would fail for a dataclass with slots
        names = (field.name for field in dataclasses.fields(config))
        values = {name: getattr(config, name) for name in names}
    return {name: x for name, x in values.items() if type(x) is int and x >= least}


def _replaced(config: Any, name: str, value: int) -> Any:
    """Returns a configuration with another value for one of its numbers."""
    if isinstance(config, Mapping):
        return {**config, name: value}
    return dataclasses.replace(config, **{name: value})


def _divisors(size: int, original: int) -> Iterator[int]:
    """Yields the divisors that a size may become, ascending."""
    # A large number may be the length of a sequence. A length of 2 would leave only one position
    # after a shift by one, so the least length is 4.
    least = 4 if original > 128 else 2
    return (divisor for divisor in range(least, size // 2 + 1) if size % divisor == 0)


def with_values(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fills abstract arrays with values: random weights, about 1 for scales, 0 and 1 for tokens.

    Arrays that exist are returned as they are. Variables that are no parameters become zero,
    because the state of an optimizer starts with zeros.
    """
    flat, random = flatten(args), np.random.default_rng(0)
    state = _state_slots(flat.structure)
    leaves = [
        _value(leaf, random, is_state=slot in state)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else leaf
        for slot, leaf in enumerate(flat.leaves)
    ]
    filled: tuple[Any, ...] = unflatten(flat.structure, leaves).root
    return filled


def _state_slots(structure: Structure) -> set[int]:
    """Returns which arrays are in Variables that are no parameters, by their index in ``leaves``.

    An array outside of Variables is no state, because it is an input of the step.
    """
    slots: set[int] = set()
    # A location is a Variable with its arrays, or an array outside of Variables, whose
    # `object_index` is None.
    for location in locations_in(structure):
        if location.object_index is None:
            continue
        entry = structure.entries[location.object_index]  # describes the object
        if isinstance(entry, VariableEntry) and not issubclass(entry.type, nnx.Param):
            slots.update(location.slots)
    return slots


def _value(x: jax.ShapeDtypeStruct, random: np.random.Generator, *, is_state: bool) -> jax.Array:
    """Returns values for an abstract array.

    Args:
      is_state: whether the array is in a Variable that is no parameter; the result is zero then.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # any key will do
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    if is_state:
        return jnp.zeros(x.shape, x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # tokens or labels: 0 and 1 are in any vocabulary
        return jnp.asarray(random.integers(0, 2, x.shape), x.dtype)
    if len(x.shape) < 2:  # a scale, or a bias
        return jnp.asarray(1 + 0.1 * random.standard_normal(x.shape), x.dtype)
    # The shape is (…, inputs, outputs). The values are scaled by the number of inputs, so that
    # outputs are of size 1.
    return jnp.asarray(x.shape[-2] ** -0.5 * random.standard_normal(x.shape), x.dtype)
