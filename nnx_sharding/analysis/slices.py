"""Collectives between slices of TPUs, which the compiler writes as exchanges with the hosts.

The program is that of one slice. A collective between slices is a `send` to the host and a `recv`
from it with one rendezvous; the hosts exchange over the network. `with_exchanges` puts an ordinary
collective in their place, whose attribute `between_slices` says which devices of which slices take
part. Other collectives number the devices of the slice, in all slices alike (`groups_within`).

From other modules:

    Groups        the numbers of the devices in each group
    Instruction   one instruction, as written; ``attributes`` by name
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .device_groups import Groups, number_lists
from .instructions import Instruction
from .meshes import MeshDescription
from .values import reached

Position: TypeAlias = "int | tuple[int, int]"  # the id of a device, or slice and number in it

_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_EXCHANGE = re.compile(
    r'_xla_megascale_target="?(?P<groups>[{}x\d,:>-]+?)"?,_xla\w*_type="(?P<kind>\w+)"'
)
_RECEIVED = re.compile(r"\(([^()]+?\{[^{}]*\}|[^(),{}]+), ")


def with_exchanges(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Returns the instructions of a computation with collectives instead of exchanges with hosts.

    Exchanges that are not understood stay as they are, so that the program counts as not read.
    """
    by_name = {instruction.name: instruction for instruction in instructions}
    # The send and the receive of each exchange, which have the name of their rendezvous.
    exchanges: defaultdict[str, list[Instruction]] = defaultdict(list)
    for instruction in instructions:
        is_transfer = instruction.opcode in ("send", "recv")
        if is_transfer and (match := _RENDEZVOUS.search(instruction.rest)):
            exchanges[match[1]].append(instruction)
    opcodes: dict[str, str] = {}  # of what ends those that are replaced
    replaced: dict[str, Instruction] = {}
    for transfers in exchanges.values():
        match = _EXCHANGE.search(transfers[0].rest)
        ends = {transfer.opcode: transfer for transfer in transfers}
        send, recv = ends.get("send"), ends.get("recv")
        if len(transfers) != 2 or send is None or recv is None:
            continue
        if match is None or match["kind"] not in _KINDS:
            continue
        if shape := _RECEIVED.match(recv.shape_text):
            operation = _operation(send, by_name)
            metadata = f', metadata={{op_name="{operation}"}}' if operation else ""
            groups = match["groups"]
            rest = f'%{send.operand_names[0]}), between_slices="{groups}"{metadata}'
            replaced[send.name] = send._replace(opcode="after-all")
            replaced[recv.name] = recv._replace(
                opcode=_KINDS[match["kind"]], shape_text=shape[1], rest=rest
            )
            opcodes |= {send.name: "after-all", recv.name: "tuple"}
    for instruction in instructions:
        is_end = instruction.opcode in ("send-done", "recv-done")
        if is_end and (opcode := opcodes.get(instruction.operand_names[0])):
            replaced[instruction.name] = instruction._replace(opcode=opcode)
    return [replaced.get(instruction.name, instruction) for instruction in instructions]


def _operation(send: Instruction, by_name: Mapping[str, Instruction]) -> str | None:
    """Finds the operation that made what is sent; exchanges themselves have none."""

    def sent(other: Instruction) -> list[Instruction]:
        return [by_name[name] for name in other.operand_names[:1] if name in by_name]

    return next(filter(None, (x.operation for x in reached(send, sent))), None)


def positions_of(mesh: Any) -> dict[Position, int]:
    """Returns the positions of devices in a mesh of several slices; empty for any other mesh."""
    if not hasattr(mesh, "devices"):
        return {}
    slices = MeshDescription.of(mesh).coordinates.get("slice", ())
    counts: Counter[int] = Counter()  # of devices by slice; their order in the mesh numbers them
    positions: dict[Position, int] = {}
    for position, (device, number) in enumerate(zip(mesh.devices.flat, slices, strict=False)):
        positions[device.id] = positions[number + 1, counts[number]] = position
        counts[number] += 1
    return positions if len(counts) > 1 else {}


def groups_between(text: str, positions: Mapping[Position, int]) -> tuple[Groups, bool]:
    """Reads the groups, or pairs, of an exchange, and tells whether the mesh has their devices."""
    # `{1,2}x{0:3}` for each of the devices 0 to 3 of the slices 1 and 2; or ids of devices.
    slices, _, places = text.partition("x")
    keys: list[list[Any]] = [list(group) for group in number_lists(text.replace("->", ","))]
    if places:
        first, _, last = places.strip('{}"').partition(":")
        numbers = range(int(first), int(last or first) + 1)
        keys = [[(n, place) for n in number_lists(slices)[0]] for place in numbers]
    devices = dict.fromkeys(key for group in keys for key in group)
    # The mesh may have other devices than the program.
    is_known = devices.keys() <= positions.keys()
    places_of = positions if is_known else {key: i for i, key in enumerate(devices)}
    return tuple(tuple(places_of[key] for key in group) for group in keys), is_known


def groups_within(groups: Groups, positions: Mapping[Position, int]) -> tuple[Groups, bool]:
    """Repeats groups of one slice for all slices, and tells whether the mesh has their devices."""
    slices = sorted({key[0] for key in positions if isinstance(key, tuple)})
    keys = [tuple((n, place) for place in group) for n in slices for group in groups]
    if not all(key in positions for group in keys for key in group):
        return groups, False
    return tuple(tuple(positions[key] for key in group) for group in keys), True
