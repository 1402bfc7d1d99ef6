"""``analysis.hlo``: reading HLO text, and robustness against any text."""

from __future__ import annotations

import collections
import functools
import random

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from nnx_sharding.analysis import Cost, collectives_of
from nnx_sharding.analysis.device_groups import read_groups
from nnx_sharding.analysis.hlo import parse
from nnx_sharding.analysis.instructions import Shape, arrays, read_shape
from nnx_sharding.analysis.memory import memory_of
from nnx_sharding.analysis.work import with_loops
from zoo import P, mesh_of

SHAPES = {
    "scalar": ("f32[]", Shape("f32", (), 4)),
    "layout": ("bf16[8,64]{1,0}", Shape("bf16", (8, 64), 1024)),
    "tiles": ("f32[8,128]{1,0:T(8,128)(2,1)}", Shape("f32", (8, 128), 4096)),
    "host": ("f32[8]{0:T(256)S(5)}", Shape("f32", (8,), 32, 5)),
    "packed": ("s4[3,5]{1,0:E(4)}", Shape("s4", (3, 5), 8)),
    "unpacked": ("s4[3,5]{1,0}", Shape("s4", (3, 5), 15)),
    "small_float": ("f8e4m3fn[16]{0}", Shape("f8e4m3fn", (16,), 16)),
    "bool": ("pred[7]", Shape("pred", (7,), 7)),
    "complex": ("c64[2]", Shape("c64", (2,), 16)),
    "bounded": ("f32[<=8,4]", Shape("f32", (8, 4), 128)),
    "token": ("token[]", Shape("token", (), 0)),
    "empty_dimension": ("f32[0,4]", Shape("f32", (0, 4), 0)),
    "tuple": ("(f32[2]{0}, /*index=1*/u32[])", (Shape("f32", (2,), 8), Shape("u32", (), 4))),
    "nested": (
        "((f32[2]{0}), f32[1]{0:T(128)}, u32[])",
        ((Shape("f32", (2,), 8),), Shape("f32", (1,), 4), Shape("u32", (), 4)),
    ),
    "empty_tuple": ("()", ()),
    "nothing": ("", ()),
    "broken": ("((f32[2", ((()),)),
}

GROUPS = {
    "{}": (),
    "{{}}": (),
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "{{0,2,1},{3}}": ((0, 2, 1), (3,)),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[4,2]<=[2,2,2]T(1,0,2)": ((0, 1), (4, 5), (2, 3), (6, 7)),
    "mesh['data'=2,'model'=4] {'model'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['data'=2,'model'=4] {'data'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['z'=8] {'z':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['z'=8] {'z':(2)4}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['z'=8] {'z':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}": ((3, 1), (2, 0)),
    "mesh['z'=8] {'z':(3)2}": None,
    "mesh['z'=8] {'z':(0)2}": None,
    "mesh['a'=2,'b'=2], device_ids=(3,1) {'b'}": None,
    "mesh['a'=999999999,'b'=999999999] {'b'}": None,
    "[2,4]<=[9]": None,
    "[8]<=[8]": None,
    "[2,4]<=[8]T(7)": None,
    "[1,999999999]<=[999999999]": None,
    "[2,4]<=[]": None,
}

LOOPS = """HloModule jit_f, num_partitions=8, replica_count=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

%inner_condition (p.1: f32[8]) -> pred[] {
  ROOT %c = pred[] constant(true)
}

%outer (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %w.1 = f32[8]{0} while(%p.2), condition=%inner_condition, body=%inner, KNOWN_3
  ROOT %again = f32[8]{0} call(%w.1), to_apply=%called
}

%called (p.3: f32[8]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(f32[1]{0} %p.3), dimensions={0}
}

%then (p.4: f32[8]) -> f32[8] {
  ROOT %t = f32[8]{0} collective-permute(%p.4), source_target_pairs={{0,1},{1,0}}
}

%wrapped (p.5: f32[8]) -> f32[1] {
  ROOT %rs = f32[1]{0} reduce-scatter(%p.5), dimensions={0}, to_apply=%add
}

%fused (p.6: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} negate(%p.6)
}

ENTRY %main (x: f32[8], i: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = f32[8]{0} while(%x), condition=%inner_condition, body=%outer, KNOWN_5
  %k = f32[8]{0} conditional(%i, %w, %w), branch_computations={%then, %called}
  %s = ((f32[8]{0}), f32[1]{0}, u32[]) async-start(%k), calls=%wrapped
  %d = f32[1]{0} async-done(%s)
  %l = f32[8]{0} fusion(%k), kind=kLoop, calls=%fused
  ROOT %u = f32[8]{0} while(%l), condition=%inner_condition, body=%then
}
"""
for count in ("3", "5"):
    known = f'backend_config={{"known_trip_count":{{"n":"{count}"}}}}'
    LOOPS = LOOPS.replace(f"KNOWN_{count}", known)

TABLES = """HloModule jit_f

FileNames
1 "/home/me/model.py"
2 "/usr/lib/python3/site-packages/flax/linear.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=2}
2 {file_name_id=2 function_name_id=1 line=400 end_line=400 column=2 end_column=2}

StackFrames
"""


@functools.cache
def program():
    """The text of a compiled program with a loop and collectives."""
    mesh = mesh_of((2, 4), ("data", "model"))

    def block(x):
        x = lax.scan(lambda x, _: (lax.psum(x @ x, "model"), None), x, None, length=3)[0]
        return lax.all_gather(x, "data", tiled=True)

    fun = jax.shard_map(block, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(fun).lower(jnp.ones((8, 8))).compile().as_text()


def read_all(text):
    """Reads everything that a text contains."""
    module = parse(text)
    assert len(instructions(module)) <= text.count("=")
    for computation in module.computations:
        runs = module.runs[computation.name]
        assert runs.times is None or runs.times >= 0
        for one in computation.instructions:
            list(arrays(one.shape))
            assert all(isinstance(name, str) for name in one.operand_names)
            _ = one.attributes, one.operation, one.trip_count, one.replica_groups
            _ = one.source_target_pairs, one.calls, module.source(one)
    _ = module.entry, module.num_devices
    for mesh in (None, {"data": 2, "model": 4}):
        str(collectives_of(module, mesh))
        str(collectives_of(module, mesh, []))
    cost = with_loops(Cost(1.0, 1.0, 0.0, "s"), module)
    assert (cost is None) == (collectives_of(module) is None) == bool(module.unread)
    # Figures are None if the number of steps of a loop was cut off.
    figures = () if cost is None else (cost.flops, cost.bytes_accessed)
    assert all(figure is None or figure >= 1 for figure in figures)
    return module


def instructions(module):
    """The instructions as they were read, in order."""
    found = [one for own in module.computations for one in own.instructions]
    return [(one.name, one.opcode, one.operands, one.is_root) for one in found]


class ReadTest(parameterized.TestCase):
    @parameterized.named_parameters((name, *rest) for name, rest in SHAPES.items())
    def test_shape(self, text, expected):
        assert read_shape(text) == expected

    @parameterized.parameters(*GROUPS.items())
    def test_groups(self, text, expected):
        assert read_groups(text) == expected

    def test_instruction(self):
        text = (
            "  ROOT %dot.1 = f32[4]{0} dot(f32[4,8]{1,0} %a, /*index=1*/%b), "
            "lhs_contracting_dims={1}, metadata={op_name=\"jit(f)/x[\\'up\\']/a, b=(c\" "
            "stack_frame_id=2},"
            ' backend_config={"a":{"b":"),c=d"}}, frontend_attributes={x="{"}'
        )
        module = parse(text)
        [computation] = module.computations
        [one] = computation.instructions
        assert (one.name, one.opcode, one.is_root) == ("dot.1", "dot", True)
        assert one.operands == ("f32[4,8]{1,0} %a", "%b")
        assert one.operand_names == ("a", "b")
        assert list(one.attributes) == [
            "lhs_contracting_dims",
            "metadata",
            "backend_config",
            "frontend_attributes",
        ]
        assert one.attributes["backend_config"] == '{"a":{"b":"),c=d"}}'
        assert one.operation == "jit(f)/x['up']/a, b=(c"
        assert one.trip_count is None

    def test_device_ids_are_a_separate_attribute(self):
        text = (
            "%a = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=4,'b'=2], "
            "device_ids=([2,4]T(1,0)) {'b'}, to_apply=%add"
        )
        [computation] = parse(text).computations
        [one] = computation.instructions
        assert one.replica_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
        assert one.attributes["to_apply"] == "%add"

    def test_computations(self):
        module = parse(LOOPS)
        assert module.name == "jit_f"
        assert module.num_devices == 16
        assert module.entry.name == "main"
        assert [len(one.instructions) for one in module.computations] == [3, 2, 1, 3, 1, 1, 1, 1, 7]
        assert parse("add (a: f32[]) -> f32[] {\n}").computations[0].name == "add"
        assert parse("ENTRY main.5 {\n}").entry.name == "main.5"

    def test_how_often_computations_run(self):
        runs = parse(LOOPS).runs
        assert {name: (one.times, one.in_loop) for name, one in runs.items()} == {
            "main": (1, False),
            "outer": (5, True),
            "inner": (15, True),
            "inner_condition": (None, True),
            "called": (6, True),  # five times from the loop, once from the branch
            "then": (None, True),
            "wrapped": (1, False),
            "add": (16, True),
            "fused": (1, False),
        }
        fused = {name for name, one in runs.items() if one.is_fused}
        assert fused == {"add", "fused"}

    def test_collectives_in_called_computations(self):
        found = {one.name: one for one in collectives_of(LOOPS)}
        assert {name: one.times for name, one in found.items()} == {
            "r": 15,
            "g": 6,
            "t": None,
            "rs": 1,
        }
        # Empty groups mean all devices: 8 partitions of 2 replicas.
        assert found["r"].group_size == 16
        assert found["rs"].bytes == 16 * 4
        assert (found["t"].group_size, found["t"].num_groups) == (2, 1)

    @parameterized.named_parameters(
        (
            "all_gather",
            "(f32[1]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}",
            32,
            28,
        ),
        ("all_reduce", "f32[8]{0} all-reduce-start(%x), replica_groups={{0,1},{2,3}}", 32, 32),
        (
            "several",
            "((f32[1], s8[1]), (f32[8], s8[8])) all-gather-start(%x, %y), "
            "replica_groups=[1,8]<=[8]",
            40,
            35,
        ),
        (
            "permute",
            "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1}}",
            32,
            32,
        ),
        (
            "permute_to_itself",
            "f32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
            32,
            0,
        ),
        ("scatter", "f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}", 32, 24),
        (
            "scatter_start",
            "((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%x), replica_groups={{0,1,2,3}}",
            32,
            24,
        ),
        (
            "exchange_start",
            "((f32[8]{0}), f32[8]{0}, u32[]) all-to-all-start(%x), replica_groups=[2,4]<=[8]",
            32,
            24,
        ),
        ("tuple", "(f32[2], f32[2]) all-to-all(%x, %y), replica_groups={{0,1},{2,3}}", 16, 8),
        ("ragged", "f32[8] ragged-all-to-all(%x, %y), replica_groups={{0,1}}", 32, 32),
        ("broadcast", "f32[8] collective-broadcast(%x), replica_groups={{0,1}}", 32, 32),
        ("alone", "f32[8]{0} all-reduce(%x), replica_groups={{0},{1}}", 32, 0),
        ("of_replicas", "f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0}}", 32, 56),
    )
    def test_bytes(self, text, size, sent):
        [found] = collectives_of(f"%r = {text}", {"x": 8})
        assert (found.bytes, found.bytes_sent) == (size, sent)

    def test_frames(self):
        plain = TABLES + "1 {file_location_id=1}\n2 {file_location_id=2 parent_frame_id=1}\n"
        # As jax 0.10 and 0.12 write it.
        shifted = (
            TABLES + "1 {file_location_id=1 parent_frame_id=1}\n"
            "2 {file_location_id=2 parent_frame_id=2}\n"
        )
        line = '%a = f32[8]{0} all-reduce(%x), metadata={op_name="f" stack_frame_id=2}\n'
        for head in (plain, shifted):
            [found] = collectives_of(f"{head}\n\nENTRY %c {{\n{line}}}\n")
            assert (found.operation, found.source) == ("f", "model.py:12")
        endless = TABLES + "1 {file_location_id=2 parent_frame_id=2}\n"
        endless += "2 {file_location_id=2 parent_frame_id=1}\n"
        [found] = collectives_of(f"{endless}\n\nENTRY %c {{\n{line}}}\n")
        assert found.source == "linear.py:400"
        assert collectives_of(line)[0].source is None

    def test_compiled_program(self):
        module = read_all(program())
        found = collectives_of(module, {"data": 2, "model": 4})
        assert {(one.kind, one.axes, one.times) for one in found} == {
            ("all-reduce", ("model",), 3),
            ("all-gather", ("data",), 1),
        }
        assert module.num_devices == 8
        assert module.entry is not None
        assert all(one.source.startswith("test_hlo.py:") for one in found)

    def test_flops_in_loops(self):
        body = (
            "%c (p: f32[4,8]) -> pred[] {{\n  ROOT %t = pred[] constant(true)\n}}\n"
            "%body (p: f32[4,8]) -> f32[4,8] {{\n  %p = f32[4,8]{{1,0}} parameter(0)\n"
            "  %k = f32[8,8]{{1,0}} constant({{...}})\n"
            "  %half = f32[2,8]{{1,0}} constant({{...}})\n  {}\n}}\n"
            "ENTRY %main (x: f32[4,8]) -> f32[4,8] {{\n  %x = f32[4,8]{{1,0}} parameter(0)\n"
            "  ROOT %w = f32[4,8]{{1,0}} while(%x), condition=%c, body=%body, "
            'backend_config={{"known_trip_count":{{"n":"11"}}}}\n}}\n'
        )
        product, product_bytes = 2 * 4 * 8 * 8, 4 * (32 + 64 + 32)
        for text, flops, accessed in (
            ("%r = f32[4,8]{1,0} dot(%p, %k), lhs_contracting_dims={1}", product, product_bytes),
            (
                '%r = (f32[4,8]{1,0}, s8[4]{0}) custom-call(%p, %k), custom_call_target="gemm", '
                'backend_config={"dot":{"lhs_contracting_dimensions":["1"]}}',
                product,
                product_bytes + 4,
            ),
            (
                "%r = f32[4,8]{1,0} convolution(%p, %k), dim_labels=bf_io->bf",
                product,
                product_bytes,
            ),
            ("%r = f32[4,8]{1,0} dot(%p, %gone), lhs_contracting_dims={1}", 0, 4 * 64),
            ("%r = f32[4,8]{1,0} dot(%p, %k), lhs_contracting_dims={7}", 0, product_bytes),
            ("%r = f32[1,8]{1,0} dynamic-slice(%p, %i, %i)", 0, 2 * 32),
            ("%r = f32[4,8]{1,0} dynamic-update-slice(%p, %half, %i)", 0, 2 * 64),
            ("%r = f32[4,8]{1,0} bitcast(%p)", 0, 0),
        ):
            cost = with_loops(Cost(0.0, 0.0, 0.0, "s"), parse(body.format(text)))
            assert (cost.flops, cost.bytes_accessed) == (11 * flops, 11 * accessed), text
        # The text says what XLA's own estimate does not.
        empty = with_loops(Cost(None, None, None, "s"), parse(body.format("")))
        assert (empty.flops, empty.bytes_accessed) == (0, 0)

    def test_bytes_of_a_fusion_that_replaces_a_slice(self):
        text = (
            "%c (p: f32[4,8]) -> pred[] {\n  ROOT %t = pred[] constant(true)\n}\n"
            "%fused (a: f32[4,8], u: f32[1,8], i: s32[]) -> f32[4,8] {\n"
            "  %a = f32[4,8]{1,0} parameter(0)\n  %u = f32[1,8]{1,0} parameter(1)\n"
            "  %i = s32[] parameter(2)\n"
            "  ROOT %d = f32[4,8]{1,0} dynamic-update-slice(%a, %u, %i, %i)\n}\n"
            "%body (p: f32[4,8]) -> f32[4,8] {\n  %p = f32[4,8]{1,0} parameter(0)\n"
            "  %k = f32[1,8]{1,0} constant({...})\n  %n = s32[] constant(1)\n"
            "  ROOT %r = f32[4,8]{1,0} fusion(%p, %k, %n), kind=kLoop, calls=%fused\n}\n"
            "ENTRY %main (x: f32[4,8]) -> f32[4,8] {\n  %x = f32[4,8]{1,0} parameter(0)\n"
            "  ROOT %w = f32[4,8]{1,0} while(%x), condition=%c, body=%body, "
            'backend_config={"known_trip_count":{"n":"11"}}\n}\n'
        )
        cost = with_loops(Cost(0.0, 0.0, 0.0, "s"), parse(text))
        # It reads the slice and writes it, not the array.
        assert cost.bytes_accessed == 11 * (32 + 32)

    def test_unknown_memory(self):
        assert memory_of(None, {"x": 1}) is None


CHARACTERS = "%=(){}[]<>,:\"'/*\\ \nTROabcdef0189-._→"
WORDS = st.sampled_from(
    [
        "%a", "ROOT ", " = ", "f32[8]{0}", "(", ")", "{", "}", "\n", ", ", "all-reduce(", "while(",
        "body=%a", "condition=%b", "calls=%a", "to_apply=%b", "ENTRY %a {\n", "%b (x: f32[]) {\n",
        "replica_groups=", "[2,4]<=[8]", "mesh['a'=8] {'a'}", "T(1,0)", '"', "metadata={",
        "stack_frame_id=1", "dot(", "lhs_contracting_dims={3}", "fusion(", "parameter(", "0",
        'backend_config={"known_trip_count":{"n":"3"}}', "source_target_pairs={{0,9}}",
        "dynamic-slice(", "dynamic-update-slice(", "HloModule m, num_partitions=0\n",
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n",
    ]
)  # fmt: skip


class AnyTextTest(absltest.TestCase):
    @given(st.text(alphabet=CHARACTERS) | st.text())
    def test_characters(self, text):
        read_all(text)

    @given(st.lists(WORDS, max_size=60).map("".join))
    def test_words(self, text):
        read_all(text)

    @given(st.data())
    def test_truncated(self, data):
        """Each line but the last is read as in the complete text."""
        text = data.draw(st.sampled_from([LOOPS, program()]))
        start = data.draw(st.integers(0, len(text) // 2))
        end = data.draw(st.integers(start, len(text)))
        found, complete = instructions(read_all(text[:end])), instructions(parse(text))
        assert len(found) >= text.count(" = ", 0, text.rfind("\n", 0, end) + 1)
        assert found[:-1] == complete[: len(found)][:-1]
        read_all(text[start:end])

    @given(st.randoms(use_true_random=False))
    def test_shuffled(self, own: random.Random):
        """Each line is read as itself, wherever it is."""
        lines = (LOOPS + program()).splitlines(keepends=True)
        expected = collections.Counter(instructions(parse("".join(lines))))
        own.shuffle(lines)
        lines = lines[: own.randrange(len(lines))]
        found = instructions(read_all("".join(lines)))
        assert len(found) == sum(" = " in line for line in lines)
        assert collections.Counter(found) <= expected

    def test_deep_and_long(self):
        assert read_all("%a = " + "(" * 100_000 + "f32[] add(%b)").unread
        read_all("%a = f32[] add(" + "(" * 100_000)
        [one] = collectives_of("%a = (" + "f32[8], " * 50_000 + ") all-reduce(%x)")
        assert one.bytes == 50_000 * 32
        chain = (
            f"%c{i} {{\n  %i{i} = f32[] call(%x), to_apply=%c{i + 1}\n}}\n" for i in range(5000)
        )
        read_all("".join(chain))
        read_all("%c {\n  %w = f32[] while(%x), body=%c, condition=%c\n}\n")

    def test_numbers_that_are_too_large(self):
        size = "f32[" + ",".join(["9" * 18] * 30) + "]"
        known = f'backend_config={{"known_trip_count":{{"n":"{"9" * 18}"}}}}'
        loops = (
            f"%c{i} {{\n%w = f32[] while(%x), body=%c{i + 1}, {known}\n}}\n" for i in range(30)
        )
        last = (
            f"%c30 {{\n%x = {size} parameter(0)\n%r = {size} all-reduce(%x)\n"
            f"%d = {size} dot(%x, %r), lhs_contracting_dims={{1}}\n}}\n"
        )
        assert collectives_of("".join(loops) + last)[0].times is None
        read_all(last)
        read_all(f"%c0 {{\n%w = f32[] while(%x), body=%c30, {known}\n}}\n{last}")
