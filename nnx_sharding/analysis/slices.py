"""Collectives between slices of TPUs, which the compiler writes as exchanges with the hosts.

The program is that of one slice: other collectives number the devices of a slice in the order of
the mesh. A host exchange has the kind of the collective and its groups in its frontend attributes:
``{1,2}x{0:3}`` for each of the devices 0 to 3 of the slices 1 and 2, or ids of devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .device_groups import Groups, number_lists
from .instructions import Instruction
from .meshes import MeshDescription

Position: TypeAlias = "int | tuple[int, int]"  # the id of a device, or slice and number in it

_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_EXCHANGE = re.compile(r'_xla_megascale_target="?([{}x\d,:>-]+?)"?,_xla\w*_type="(\w+)"')
_RECEIVED = re.compile(r"\(([^()]+?\{[^{}]*\}|[^(),{}]+), ")


def with_exchanges(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of a computation, with collectives in place of exchanges with hosts."""
    sends = {
        match[1]: one
        for one in instructions
        if one.opcode == "send" and (match := _RENDEZVOUS.search(one.rest))
    }
    by_name = {one.name: one for one in instructions}
    done: dict[str, str] = {}  # the opcodes of what ends those that were replaced
    found = []
    for one in instructions:
        match, exchange = _RENDEZVOUS.search(one.rest), _EXCHANGE.search(one.rest)
        shape = _RECEIVED.match(one.shape_text)
        send = sends.get(match[1]) if match else None
        if send is not None and exchange and exchange[2] in _KINDS and shape:
            if one.opcode == "send":
                done[one.name] = "after-all"
                one = one._replace(opcode="after-all")
            else:
                done[one.name] = "tuple"
                rest = f'%{send.operand_names[0]}), between_slices="{exchange[1]}"'
                if operation := _operation(send, by_name):
                    rest += f', metadata={{op_name="{operation}"}}'
                one = Instruction(one.name, _KINDS[exchange[2]], shape[1], rest, one.is_root)
        elif one.opcode in ("send-done", "recv-done") and one.operand_names[0] in done:
            one = one._replace(opcode=done[one.operand_names[0]])
        found.append(one)
    return found


def _operation(one: Instruction, by_name: Mapping[str, Instruction]) -> str | None:
    """The operation that made what is sent; exchanges themselves have none."""
    seen: set[str] = set()
    while one.operation is None and one.operand_names and one.name not in seen:
        seen.add(one.name)
        one = by_name.get(one.operand_names[0], one)
    return one.operation


def positions_of(mesh: Any) -> dict[Position, int]:
    """The positions of devices in a mesh of several slices; empty for any other mesh."""
    if not hasattr(mesh, "devices"):
        return {}
    slices = MeshDescription.of(mesh).coordinates.get("slice", ())
    counts: Counter[int] = Counter()
    positions: dict[Position, int] = {}
    for position, (device, number) in enumerate(zip(mesh.devices.flat, slices, strict=False)):
        positions[device.id] = positions[number + 1, counts[number]] = position
        counts[number] += 1
    return positions if len(counts) > 1 else {}


def groups_between(text: str, positions: Mapping[Position, int]) -> Groups:
    """The groups, or pairs of a permutation, in an exchange, with what is not in the mesh as it is."""
    slices, _, places = text.partition("x")
    keys: list[list[Any]] = [list(group) for group in number_lists(text.replace("->", ","))]
    if places:
        first, _, last = places.strip('{}"').partition(":")
        numbers = range(int(first), int(last or first) + 1)
        keys = [[(n, place) for n in number_lists(slices)[0]] for place in numbers]
    return tuple(tuple(positions.get(key, key) for key in group) for group in keys)


def groups_within(groups: Groups, positions: Mapping[Position, int]) -> Groups:
    """Groups of devices of one slice, for all slices."""
    slices = sorted({key[0] for key in positions if isinstance(key, tuple)})
    return tuple(
        tuple(positions[number, place] for place in group) for number in slices for group in groups
    )
