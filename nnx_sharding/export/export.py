"""A lifted function → an :class:`Exported`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax

from .. import _compat
from .._version import __version__
from ..core.outcome import Outcome
from ..core.plan import Plan, abstract, is_committed
from ..core.statics import Static
from ..core.structure import (
    Child,
    Container,
    NodeEntry,
    RefEntry,
    Structure,
    VariableEntry,
    container_keys,
)
from ..diagnostics.differences import differences, show, show_child
from ..diagnostics.failures import explained
from ..lifted import Lifted
from ..paths import Path, accessor
from .exported import Exported
from .manifest import Argument, ArrayInfo, Manifest, MeshInfo, meshes_of
from .trees import Tree, places, state_tree, tree_of


def export(
    fun: Lifted[..., Any],
    *,
    platforms: str | Sequence[str] | None = None,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., Exported]:
    """Lowers a function to a program that can be kept in a file and called without its code.

    What ``jax.export.export`` is to ``jax.jit``, for functions and methods of
    :func:`~nnx_sharding.jit` and :func:`~nnx_sharding.shard_map`.

    Args:
      fun: the function, or a bound method, as the decorator returned it.
      platforms: the platforms to lower for, of ``"cpu"``, ``"cuda"``, ``"rocm"`` and ``"tpu"``;
        None for the one at hand. The devices need not be there, nor need the mesh: an
        ``AbstractMesh`` in the function's shardings will do.
      disabled_checks: checks of ``jax.export`` to leave out, such as
        ``jax.export.DisabledSafetyCheck.custom_call("name")``.

    Returns:
      A function that takes the arguments of ``fun`` and returns an :class:`Exported`. Arguments
      may be abstract, with the symbolic sizes of ``jax.export.symbolic_shape`` in their shapes.
      Nothing is run, and nothing of the caller's is changed.

    Raises:
      TypeError: ``fun`` is no function of ours; an argument holds a ``jax.Ref`` or a Variable
        made with ``hijax=True``, whose identity no file can keep.
      ValueError: the function does to its arguments what arrays by path cannot tell, such as
        changing a static attribute; a platform is ``"gpu"``, which says too little; and what
        ``lower`` raises.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import export, jit
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> forward = jit(lambda model, x: model(x))
      >>> exported = export.export(forward)(model, jnp.ones((4, 2)))
      >>> output, updates = exported.call(nnx.state(model), jnp.ones((4, 2)))
      >>> output.shape, updates
      ((4, 3), {})
    """
    if not isinstance(fun, Lifted):
        raise TypeError(
            f"export takes what nnx_sharding.jit or shard_map returned, not {fun!r}. For a "
            "function of jax.jit there is jax.export.export."
        )
    names = (platforms,) if isinstance(platforms, str) else platforms
    if names is not None and "gpu" in names:
        raise ValueError("a program is for one kind of GPU: write 'cuda' or 'rocm', not 'gpu'.")

    @_compat.api_boundary
    def for_arguments(*args: Any, **kwargs: Any) -> Exported:
        _, plan, split = fun._planned(args, kwargs)
        _check_refs(plan, split.leaves)
        slots = zip(split.leaves, plan.shardings, plan.specs, strict=True)
        types = [_type_of(*slot) for slot in slots]
        lower = jax.export.export(
            plan.program.staged, platforms=names, disabled_checks=disabled_checks
        )
        with _compat.no_source_locations(), fun._tracing(split):
            lowered = explained(plan, types, lower)
        count = lowered.out_tree.num_leaves
        outcome = jax.tree_util.tree_unflatten(lowered.out_tree, range(count))[-1]
        outputs = _output_positions(lowered.out_tree)
        # Only arrays go into the file; what they mean is in the manifest.
        flat = dataclasses.replace(lowered, out_tree=jax.tree_util.tree_structure((0,) * count))
        _check_expressible(plan, outcome)
        return Exported(_manifest(plan, outcome, outputs, flat), flat)

    return for_arguments


def _check_refs(plan: Plan, leaves: Sequence[Any]) -> None:
    slots = plan.structure.slots_of(RefEntry)
    lines = [
        f"  {name}: {type(leaf).__name__}"
        for slot, (name, leaf) in enumerate(zip(plan.names, leaves, strict=True))
        if slot in slots or _compat.is_ref(leaf)
    ]
    if lines:
        raise TypeError(
            f"{plan.fun_name} cannot be exported with these arguments, whose identity no file can "
            "keep:\n" + "\n".join(lines) + "\nUse Variables that hold arrays."
        )


def _type_of(leaf: Any, layout: Any, spec: Any) -> Any:
    """The type of an argument: laid out as declared; if nothing is declared, as it is."""
    if layout is None and spec is None and is_committed(leaf):
        layout = leaf.sharding
    return abstract(leaf, layout)


def _output_positions(out_tree: Any) -> list[list[int]]:
    """For each group of outputs, where its arrays stand among all."""
    positions = range(out_tree.num_leaves)
    groups = jax.tree_util.tree_unflatten(out_tree, positions)[:-1]
    return [list(group.arrays) for group in groups]


def _check_expressible(plan: Plan, outcome: Outcome) -> None:
    """Refuses changes of the arguments that a State of arrays cannot tell."""
    before, after = plan.structure, outcome.structure
    expressible = not outcome.metadata and all(
        not change.removed
        and all(
            key == _compat.STATUSES
            or _is_expressible(_attribute(before, change.node, key), child, before, after)
            for key, child, _ in change.changed
        )
        for change in outcome.nodes
    )
    expressible = expressible and not outcome.statics
    if expressible:
        return
    arguments = Structure(
        after.entries, before.root, after.slots, before.root_slots, before.statics
    )
    lines = [
        f"  {line}" for line in differences((plan.signature, before), (plan.signature, arguments))
    ]
    raise ValueError(
        f"{plan.fun_name} cannot be exported, because it changes more than arrays:\n"
        + "\n".join(lines)
        + "\nOnly values of Variables, and Variables that are added, can come back from a file. "
        "Make these changes outside of the function, or keep what changes in a Variable."
    )


def _attribute(structure: Structure, index: int, key: Any) -> Child | None:
    entry = structure.entries[index]
    assert isinstance(entry, NodeEntry)
    return dict(zip(entry.keys, entry.children, strict=True)).get(key)


def _is_expressible(old: Child | None, new: Child, before: Structure, after: Structure) -> bool:
    """Whether an attribute that became ``new`` is told by its arrays."""
    if old is not None and old == new:
        return True
    if isinstance(old, int) and isinstance(new, int):
        entries = before.entries[old], after.entries[new]
        return isinstance(entries[0], VariableEntry) and entries[0] == entries[1]
    if isinstance(new, Container):
        return old is None and all(_is_expressible(None, c, before, after) for c in new.children)
    is_new_object = isinstance(new, int) and new >= len(before.entries)
    return old is None and (is_new_object or not isinstance(new, int | Static))


def _manifest(
    plan: Plan, outcome: Outcome, positions: list[list[int]], exported: jax.export.Exported
) -> Manifest:
    def source(slot: int) -> Tree:
        group, position = outcome.sources[slot]
        return {"input": position} if group < 0 else {"output": positions[group][position]}

    arguments = _arguments(plan)
    inputs, outputs = _compat.exported_shardings(exported)
    meshes = meshes_of((*inputs, *outputs))
    result = tree_of(outcome.structure, source)
    updates = _updates(plan, outcome, source)
    labels = [f"output {i}" for i in range(len(exported.out_avals))]
    for name, tree in (("result", result), *updates.items()):
        labels = _labelled(labels, name, tree)
    return Manifest(
        function=plan.fun_name,
        transform=plan.transform.name,
        arguments=tuple(arguments),
        static=_statics(plan),
        inputs=_arrays(plan.names, exported.in_avals, inputs, meshes),
        outputs=_arrays(labels, exported.out_avals, outputs, meshes),
        result=result,
        updates=updates,
        devices=exported.nr_devices,
        meshes=tuple(map(MeshInfo.of, meshes)),
        platforms=tuple(exported.platforms),
        calling_convention=exported.calling_convention_version,
        versions={
            "flax": metadata.version("flax"),
            "jax": jax.__version__,
            "nnx_sharding": __version__,
        },
    )


def _arguments(plan: Plan) -> Iterator[Argument]:
    layout = plan.signature
    (positional, keywords) = tree_of(plan.structure, lambda slot: {"input": slot})["tuple"]
    for index, tree in zip(layout.dynamic, positional["tuple"], strict=True):
        yield Argument(layout.names[index], False, index in layout.donated, tree)
    for name, tree in keywords["dict"]:
        yield Argument(name, True, name in layout.donated_keywords, tree)


def _statics(plan: Plan) -> dict[str, str]:
    found = zip(plan.signature.static_names, plan.structure.statics, strict=True)
    return {name: _text(plan.structure, child) for name, child in sorted(found)}


def _text(structure: Structure, child: Child) -> str:
    """A value in words, the same in each process."""
    value = child.value if isinstance(child, Static) else None
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({{{', '.join(sorted(map(show, value)))}}})"
    return show_child(structure, child)


def _arrays(
    names: Sequence[str], avals: Sequence[Any], shardings: Sequence[Any], meshes: Sequence[Any]
) -> tuple[ArrayInfo, ...]:
    triples = zip(names, avals, shardings, strict=True)
    return tuple(ArrayInfo.of(*triple, meshes) for triple in triples)


def _updates(plan: Plan, outcome: Outcome, source: Callable[[int], Tree]) -> dict[str, Tree]:
    """For each argument its arrays that the function changed or added, by path."""
    layout, root = plan.signature, plan.structure.root
    assert isinstance(root, Container)
    names = [layout.names[i] for i in layout.dynamic]
    found: dict[str, list[tuple[Path, Tree]]] = {}
    for keys, child in zip(container_keys(root.treedef), root.children, strict=True):
        if not isinstance(child, int):
            continue
        name = names[keys[1]] if keys[0] == 0 else str(keys[1])
        for path, slot in _slots_after(plan.structure, outcome.structure, child):
            origin = source(slot)
            if "output" in origin:
                found.setdefault(name, []).append(((*keys[2:], *path), origin))
    return {name: state_tree(items) for name, items in found.items()}


def _slots_after(before: Structure, after: Structure, child: int) -> Iterator[tuple[Path, int]]:
    """The arrays of one object of the arguments after the call, each with its path."""
    described = after.entries[child] is not None
    structure = after if described else before  # without graph updates modules stay as they are
    for place in structure.walk(child, iter(())):
        if place.entry is None:
            if described:
                yield place.path, place.slots[0]
            continue
        entry = after.entries[place.entry]
        value = entry.value if isinstance(entry, VariableEntry) else None
        keys = container_keys(value.treedef) if isinstance(value, Container) else [()]
        for key, slot in zip(keys, after.slots[place.entry], strict=True):
            yield (*place.path, *key), slot


def _labelled(labels: list[str], name: str, tree: Tree) -> list[str]:
    """The labels, with the path in ``tree`` for each output that stands there."""
    labels = list(labels)
    for path, kind, position in places(tree):
        if kind == "output":
            labels[position] = accessor(name, path)
    return labels
