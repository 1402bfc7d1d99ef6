"""Forms of collectives that only the TPU compiler writes."""

from __future__ import annotations

from .hlo import OP_NAME, Computation, Instruction, Module
from .purposes import operations


def with_metadata(one: Instruction, computation: Computation, module: Module) -> Instruction:
    """An instruction, with the metadata that the TPU compiler leaves out.

    In a fusion or a loop it is that of the caller. For several arrays the compiler names the
    operation of one; each operand has its own.
    """
    caller, seen = one, {""}
    while caller.operation is None and computation.name in module.callers.keys() - seen:
        seen.add(computation.name)
        computation, caller = module.callers[computation.name]
    names, operands = [caller.operation], {*caller.operand_names}
    if len(operands) > 1 and len(operations(caller.operation or "")) == 1:
        names = [i.operation for i in computation.instructions if i.name in operands] + names
    name = ";".join(dict.fromkeys(filter(None, names)))
    if name == (one.operation or ""):
        return one
    written = caller.attributes.get("metadata", "")
    quoted = name.replace("\\", r"\\").replace('"', r"\"")
    metadata = f'{{op_name="{quoted}" {OP_NAME.sub("", written).strip("{}")}}}'
    rest = one.rest.replace(f", metadata={written}", "") if written else one.rest
    return one._replace(rest=f"{rest}, metadata={metadata}")


def repeated_in_fusions(module: Module) -> set[str]:
    """Collectives that are repeated in fusions that run while they are in progress.

    The TPU compiler writes one in the fusion that starts it, and again in each that continues it.
    """
    starts: dict[str, str | None] = {}
    others: dict[str, str | None] = {}
    for computation in module.computations:
        is_start = any("AsyncCollectiveStart" in one.rest for one in computation.instructions)
        for one in computation.instructions:
            if "async_collective_fusion_config" in one.rest:
                (starts if is_start else others)[one.name] = one.attributes.get("channel_id")
    return {name for name, channel in others.items() if channel in starts.values()}
