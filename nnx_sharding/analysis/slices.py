"""Collectives between slices of TPUs, which the compiler writes as exchanges with the hosts.

The program is that of one slice. A collective between slices is a `send` to the host and a `recv`
from it, each followed by a `send-done` or `recv-done`; one *rendezvous* names them all, and the
hosts exchange over the network. `with_exchanges` puts an ordinary collective in their place, whose
attribute `between_slices` says which devices of which slices take part (`groups_between`). Other
collectives number the devices of the slice, in all slices alike (`groups_within`).

Exchanges name a device in one of two ways (`Position`): by its id, or by a pair of the number of
its slice, counted from 1 as the compiler does, and its own number in the slice.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import Mesh

from .device_groups import Groups, number_lists
from .instructions import Instruction
from .meshes import MeshDescription
from .values import reached

# How exchanges name a device: by its id, or by its slice, counted from 1, and its number in that.
Position: TypeAlias = "int | tuple[int, int]"


class Placed(NamedTuple):
    """Groups of devices, by their positions in the mesh."""

    groups: Groups
    # Whether the mesh has all of these devices. If it lacks one, the numbers in ``groups`` are no
    # positions, and only tell devices apart.
    in_mesh: bool


_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
# …_xla_megascale_target={1,2}x{0:3},_xla_megascale_transfer_type="ALL_REDUCE"…
_EXCHANGE = re.compile(
    r'_xla_megascale_target="?(?P<groups>[{}x\d,:>-]+?)"?,_xla\w*_type="(?P<kind>\w+)"'
)
# The array of the shape of a `recv`, (f32[8]{0}, u32[], token[]).
_RECEIVED = re.compile(r"\(([^()]+?\{[^{}]*\}|[^(),{}]+), ")


def with_exchanges(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Returns the instructions of a computation with collectives instead of exchanges with hosts.

    Exchanges that are not understood stay as they are, so that the program counts as not read.
    """
    by_name = {instruction.name: instruction for instruction in instructions}
    exchanges: defaultdict[str, list[Instruction]] = defaultdict(list)  # rendezvous → send, recv
    for instruction in instructions:
        if instruction.opcode in ("send", "recv"):
            rendezvous = _RENDEZVOUS.search(instruction.rest)
            if rendezvous is not None:  # Other transfers are no exchanges.
                exchanges[rendezvous[1]].append(instruction)
    replaced: dict[str, Instruction] = {}  # by name
    for transfers in exchanges.values():
        ends = {transfer.opcode: transfer for transfer in transfers}
        if len(transfers) != 2 or len(ends) != 2:
            continue
        send, recv = ends["send"], ends["recv"]
        collective = _collective_of(send, recv, by_name)
        if collective is not None:
            replaced[recv.name] = collective
            # The send becomes an ``after-all``, which does nothing.
            replaced[send.name] = send._replace(opcode="after-all")
    for end in instructions:
        if end.opcode == "send-done" and end.operand_names[0] in replaced:
            replaced[end.name] = end._replace(opcode="after-all")
        if end.opcode == "recv-done" and end.operand_names[0] in replaced:
            # A recv-done returns (array, token), so the collective's result is an item of a tuple.
            replaced[end.name] = end._replace(opcode="tuple")
    return [replaced.get(instruction.name, instruction) for instruction in instructions]


def _collective_of(
    send: Instruction, recv: Instruction, by_name: Mapping[str, Instruction]
) -> Instruction | None:
    """Returns the collective that stands for an exchange; None if the exchange is not understood.

    It has the name of the ``recv``, and the operand of the ``send``::

        %recv = f32[8]{0} all-reduce(%x), between_slices="{1,2}x{0:3}", metadata={op_name="f/dot"}

    ``by_name`` has the instructions of the computation.
    """
    match = _EXCHANGE.search(send.rest)  # The ``recv`` has this text, too.
    shape = _RECEIVED.match(recv.shape_text)
    if match is None or match["kind"] not in _KINDS or shape is None:
        return None
    operation = _operation_of_sent(send, by_name)
    metadata = f', metadata={{op_name="{operation}"}}' if operation else ""
    # ``rest`` is the text behind the bracket that opens the operands.
    rest = f'%{send.operand_names[0]}), between_slices="{match["groups"]}"{metadata}'
    return recv._replace(opcode=_KINDS[match["kind"]], shape_text=shape[1], rest=rest)


def _operation_of_sent(send: Instruction, by_name: Mapping[str, Instruction]) -> str | None:
    """Finds the operation that made what is sent, such as ``jit(f)/mlp/dot_general``.

    Exchanges have no name of an operation themselves, so the first name on the way back from the
    send counts. The way follows first operands, because these are what a send sends, and what a
    copy or a bitcast moves.
    """

    def first_operand(instruction: Instruction) -> list[Instruction]:
        """Lists the instruction that makes the first operand, if the computation has it."""
        return [by_name[name] for name in instruction.operand_names[:1] if name in by_name]

    operations = (instruction.operation for instruction in reached(send, first_operand))
    return next(filter(None, operations), None)


def positions_of(mesh: Any) -> dict[Position, int]:
    """Returns the positions of devices in a mesh of several slices; empty for any other mesh.

    Each device has two keys: its id, and the pair of its slice and its number in that. With the ids
    0 and 1 in one slice and 7 in another: ``{0: 0, (1, 0): 0, 1: 1, (1, 1): 1, 7: 2, (2, 0): 2}``.
    """
    if not isinstance(mesh, Mesh):  # abstract, or the sizes of axes
        return {}
    slices = MeshDescription.of(mesh).coordinates.get("slice", ())  # the slice of each device
    # Slice → the number of its devices so far. Devices of a slice are numbered in mesh order.
    counts: Counter[int] = Counter()
    positions: dict[Position, int] = {}
    for position, (device, number) in enumerate(zip(mesh.devices.flat, slices, strict=False)):
        positions[device.id] = position
        positions[number + 1, counts[number]] = position  # JAX counts slices from 0.
        counts[number] += 1
    return positions if len(counts) > 1 else {}


def groups_between(text: str, positions: Mapping[Position, int]) -> Placed:
    """Reads the groups, or pairs, of an exchange between slices.

    Args:
      text: the attribute ``between_slices``, in one of three forms::

          {1,2}x{0:3}        for each of the devices 0 to 3 of a slice, a group of this device in
                             slice 1 and in slice 2: ((1, 0), (2, 0)), …, ((1, 3), (2, 3));
                             ``{1,2}x{0}`` for a single device
          {0,4},{1,5}        groups of device ids: (0, 4), (1, 5)
          {0->4},{1->5}      pairs of device ids

      positions: from :func:`positions_of`.
    """
    slices, _, places = text.partition("x")  # ``places`` is empty for device ids
    groups: list[list[Position]]
    if places:
        first, _, last = places.strip('{}"').partition(":")
        numbers = range(int(first), int(last or first) + 1)
        slice_numbers = number_lists(slices)[0]
        groups = [[(n, place) for n in slice_numbers] for place in numbers]
    else:
        groups = [list(ids) for ids in number_lists(text.replace("->", ","))]
    devices = dict.fromkeys(device for group in groups for device in group)  # in order
    in_mesh = devices.keys() <= positions.keys()  # False if the program is for other devices.
    # Without positions in the mesh, any numbers do, because they only have to tell devices apart.
    numbering = positions if in_mesh else {device: n for n, device in enumerate(devices)}
    return Placed(tuple(tuple(numbering[d] for d in group) for group in groups), in_mesh)


def groups_within(groups: Groups, positions: Mapping[Position, int]) -> Placed:
    """Repeats groups of devices of one slice for all slices of the mesh.

    With two slices of four devices each, ((0, 1), (2, 3)) becomes ((0, 1), (2, 3), (4, 5), (6, 7)).
    Groups with devices that the mesh lacks are returned as they are, for one slice only.
    """
    # The keys of ``positions`` are ids, and pairs of a slice and a device's number in the slice.
    slices = sorted({key[0] for key in positions if isinstance(key, tuple)})
    in_slices = [tuple((n, place) for place in group) for n in slices for group in groups]
    if not all(device in positions for group in in_slices for device in group):
        return Placed(groups, in_mesh=False)
    return Placed(tuple(tuple(positions[d] for d in group) for group in in_slices), in_mesh=True)
