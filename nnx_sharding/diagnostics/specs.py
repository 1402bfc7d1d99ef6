"""Whether declared specs fit the mesh and the arrays: all that do not, in one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..core.resolve import FilterUse, NamedLocation, merged
from ..core.specs import Specs
from ..errors import (
    CapturedArrayWarning,
    CorrectedSpecWarning,
    UnusedFilterWarning,
    report,
)
from ..fitting import (
    OnIndivisible,
    axis_problems,
    describe,
    fit,
    shape_problems,
    spec_and_mesh,
)
from ..state_sharding import StateSharding
from .captured import captured_shards, describe_captured, is_sharded
from .differences import show


class FitOptions(NamedTuple):
    """What a transform says about fitting specs to arrays.

    Attributes:
      name: what messages call the transform.
      in_name: the name of its option for the specs of inputs.
      passes_shardings: whether JAX hears of the shardings of inputs by an option, and not by types.
      mesh: the mesh that a bare ``PartitionSpec`` refers to, if it is known.
      usable: the axes of it that specs may name; None for all.
      on_indivisible: what to do with a spec that does not divide a shape.
      divides_outputs: whether specs must divide the arrays that come out.
      strict: whether warnings are errors.
    """

    name: str
    in_name: str
    passes_shardings: bool
    mesh: Any
    usable: frozenset[Any] | None
    on_indivisible: OnIndivisible
    divides_outputs: bool
    strict: bool

    @property
    def out_name(self) -> str:
        """The name of the option for the specs of outputs."""
        return self.in_name.replace("in_", "out_")


def check_arrays(names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Everything that is neither an object nor static has to be an array.

    Raises:
      TypeError: something is not.
    """
    wrong = _no_arrays(names, leaves)
    if wrong:
        raise TypeError(
            "these arguments are no arrays:\n" + "\n".join(wrong) + "\nPass arrays or numbers, or "
            "make the argument static (static_argnums, static_argnames); in a module, a static "
            "attribute (nnx.static)."
        )


def check_results(name: str, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """What a function returns, and what it leaves in modules, has to be arrays.

    Raises:
      TypeError: something is not.
    """
    wrong = _no_arrays(names, leaves)
    if wrong:
        raise TypeError(
            f"{name}: these results are no arrays:\n" + "\n".join(wrong) + "\nReturn arrays or "
            "numbers only."
        )


def _no_arrays(names: Sequence[str], leaves: Sequence[Any]) -> list[str]:
    return [
        f"  {name}: {show(leaf)} of type {type(leaf).__name__}"
        for name, leaf in zip(names, leaves, strict=True)
        if not _compat.is_array_like(leaf)
    ]


def check_axes(
    terms: FitOptions, inputs: Specs, outputs: Specs, uses: Iterable[tuple[Any, str]]
) -> None:
    """Every axis that specs name is one of the mesh.

    Args:
      terms: what the transform says.
      inputs: the specs of inputs.
      outputs: the specs of outputs.
      uses: pairs of a spec and the name of what it is for.

    Raises:
      ValueError: an axis is not, or a spec uses one twice.
    """
    wrong: dict[Any, list[str]] = {}
    sizes: dict[Any, int] = {}
    for spec in (*inputs.written, *outputs.written):
        own = spec_and_mesh(spec, terms.mesh)
        if own is None:
            continue
        problems = axis_problems(*own, terms.usable)
        if PartitionSpec.UNCONSTRAINED in own[0].partitions:
            options = f"{terms.in_name} and {terms.out_name}"
            problems.append(f"{options} take no UNCONSTRAINED; write None, or an axis")
        if not terms.passes_shardings and own[1].abstract_mesh != terms.mesh.abstract_mesh:
            problems = [f"it is for another mesh, {own[1]}; give the PartitionSpec alone"]
        if problems:
            wrong[spec] = problems
            sizes.update(own[1].shape)
    if not wrong:
        return
    places: dict[Any, list[str]] = {spec: [] for spec in wrong}
    for spec, name in uses:
        if isinstance(spec, PartitionSpec | NamedSharding) and spec in places:
            places[spec].append(name)
    lines = []
    for spec, problems in wrong.items():
        found = places[spec] or [_option_of(terms, spec, inputs)]
        lines.append(f"  {describe(spec)} for {', '.join(found)}: {'; '.join(problems)}")
    sizes.update({} if terms.mesh is None else terms.mesh.shape)
    axes = ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
    raise ValueError(
        f"{terms.name}: these specs do not fit the mesh:\n"
        + "\n".join(lines)
        + f"\nThe mesh has the axes {axes}."
    )


def _option_of(terms: FitOptions, spec: Any, inputs: Specs) -> str:
    return terms.in_name if spec in inputs.written else terms.out_name


def uses_of(
    reached: Sequence[NamedLocation], objects: Sequence[Any], leaves: Sequence[Any]
) -> Iterable[tuple[Any, str]]:
    """Each spec that targets have for what they reach, as written, with the name of that."""
    for found in reached:
        spec, index = found.part.spec, found.place.entry
        if isinstance(spec, StateSharding):
            subject = leaves[found.place.slots[0]] if index is None else objects[index]
            spec = spec.find(found.place.path or found.part.below, subject)[1]
        yield spec, found.name


def check_filters(terms: FitOptions, uses: Iterable[FilterUse]) -> None:
    """Every filter should decide about something; all that do not are in one warning.

    Raises:
      StrictError: one does not, and the transform is strict.
    """
    unused = [line for use in merged(uses) for line in use.unused_lines()]
    if unused:
        message = (
            f"{terms.name}: these filters match nothing that an earlier one had not taken:\n"
            + "\n".join(unused)
            + "\nCorrect or remove them, or put them before the filter that takes all they match."
        )
        report(UnusedFilterWarning, message, strict=terms.strict)


def check_captured(terms: FitOptions, fun: Any, constants: Sequence[Any]) -> None:
    """Sharded arrays should be arguments: those that are captured become replicated constants.

    Args:
      terms: what the transform says.
      fun: the function.
      constants: what its trace has captured.

    Raises:
      StrictError: the function captures some, and the transform is strict.
    """
    if not any(is_sharded(x) for x in constants):
        return
    found = captured_shards(fun, constants)
    if found:
        report(
            CapturedArrayWarning,
            f"{terms.name}: the function captures sharded arrays, which become constants of the "
            f"program, whole on every device:\n{describe_captured(found)}\nPass them as arguments.",
            strict=terms.strict,
        )


def fitted(
    terms: FitOptions,
    names: Sequence[str],
    shapes: Sequence[Sequence[int] | None],
    specs: Sequence[Any],
    on_indivisible: Mapping[int, OnIndivisible],
    *,
    outputs: bool = False,
    before: Mapping[int, Sequence[int] | None] | None = None,
) -> list[Any]:
    """Specs that fit arrays of these shapes: those that are declared, or what divides of them.

    Args:
      terms: what the transform says.
      names: what the user would write to reach each array.
      shapes: their shapes; None for what has none.
      specs: their specs, in final form.
      on_indivisible: by slot, what to do where that is said apart from the transform.
      outputs: whether these are outputs.
      before: for outputs that are updates, the shapes before.

    Raises:
      ValueError: a spec does not fit, and is not to be corrected.
      StrictError: one was corrected, and the transform is strict.
    """
    checked: dict[Any, tuple[list[str], Any]] = {}
    result, wrong, corrected = list(specs), [], []
    for slot, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        if spec is None or shape is None:
            continue
        how = on_indivisible.get(slot, terms.on_indivisible)
        key = (spec, tuple(shape), how)
        if key not in checked:
            checked[key] = _check(terms, spec, shape, how, outputs)
        problems, new = checked[key]
        if not problems:
            continue
        was = before.get(slot) if before else None
        was_text = f" (was {tuple(was)})" if was is not None and tuple(was) != tuple(shape) else ""
        line = f"  {names[slot]}, shape {tuple(shape)}{was_text}, {describe(spec)}"
        if new is None:
            wrong.append(f"{line}: {'; '.join(problems)}")
        else:
            result[slot] = new
            corrected.append(f"{line} → {describe(new)}: {'; '.join(problems)}")
    if wrong:
        is_jaxs = terms.passes_shardings and all("divisible" in line for line in wrong)
        error = _compat.IndivisibleError if is_jaxs else ValueError
        raise error(_misfit_message(terms, wrong, outputs))
    if corrected:
        what = "results" if outputs else "arguments"
        report(
            CorrectedSpecWarning,
            f"{terms.name}: the specs of these {what} do not fit, and were corrected:\n"
            + "\n".join(corrected),
            strict=terms.strict,
        )
    return result


def _check(
    terms: FitOptions, spec: Any, shape: Sequence[int], how: OnIndivisible, outputs: bool
) -> tuple[list[str], Any]:
    """What is wrong with a spec for a shape, and the spec to take instead, if there is one."""
    own = spec_and_mesh(spec, terms.mesh)
    if own is None:
        return _sharding_problems(spec, shape), None
    partition, mesh = own
    too_long = len(partition) > len(shape)
    problems = shape_problems(partition, mesh, shape)
    if not problems or (outputs and not terms.divides_outputs and not too_long):
        return [], None
    if how == "error" or too_long:
        return problems, None
    part = fit(partition, shape, mesh.shape, how)
    if isinstance(spec, NamedSharding):
        return problems, NamedSharding(mesh, part, memory_kind=spec.memory_kind)
    return problems, part


def _sharding_problems(spec: Any, shape: Sequence[int]) -> list[str]:
    """What JAX has to say about a sharding that is not made of a spec and a mesh."""
    if not isinstance(spec, jax.sharding.Sharding):
        return []
    try:
        spec.shard_shape(tuple(shape))
    except ValueError as error:
        return [str(error)]
    return []


def _misfit_message(terms: FitOptions, lines: Sequence[str], outputs: bool) -> str:
    what = "results" if outputs else "arrays"
    hint = (
        "Change the shape (pad it) or the spec; or let the spec be corrected: "
        "on_indivisible='replicate' or 'drop'."
        if any("divisible" in line for line in lines)
        else "Give each a spec with at most one entry for each dimension."
    )
    return f"{terms.name}: the specs of these {what} do not fit their shapes:\n" + "\n".join(
        [*lines, hint]
    )


def committed_message(name: str, lines: Sequence[str]) -> str:
    """The text of the error about arrays that are committed to other layouts than declared."""
    return (
        f"{name}: these arrays are committed to another layout than is declared for them:\n"
        + "\n".join(lines)
        + "\nDeclare what they are, place them with jax.device_put, or let them be moved: "
        "on_committed='move'."
    )


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """The shape of an array or number; None for what has none."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None
