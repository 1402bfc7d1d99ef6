"""What is not understood of a compiled program is unknown, and not zero, wherever it is shown."""

from __future__ import annotations

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from nnx_sharding import jit
from nnx_sharding.analysis import Cost, collectives_of, roofline_of
from nnx_sharding.analysis.hlo import parse
from nnx_sharding.analysis.work import with_loops
from nnx_sharding.report import Comparison, ProgramReport, diff
from nnx_sharding.testing import (
    assert_bytes_sent_below,
    assert_collectives,
    assert_no_collective,
    assert_no_resharding,
)
from zoo import P, mesh_of

MESH = mesh_of((8,), ("data",))


@functools.cache
def compiled():
    def fun(x):
        return lax.scan(lambda x, _: (jnp.tanh(x) * x.sum(0), None), x, None, length=3)[0]

    fun = jit(fun, in_shardings=P("data"), out_shardings=P("data"), mesh=MESH)
    return fun.lower(jax.ShapeDtypeStruct((64, 16), "float32")).compile()


@functools.cache
def text():
    return compiled().as_text()


def lines_of_computations():
    """The numbers of the lines of instructions."""
    lines = text().splitlines()
    return [i for i, line in enumerate(lines) if re.match(r"  (ROOT )?%\S+ = ", line)]


def is_unknown(program):
    module = parse(program)
    found = collectives_of(module, MESH), with_loops(Cost(1.0, 1.0, 1.0, "s"), module)
    assert (found == (None, None)) == bool(module.unread)
    return found == (None, None)


def test_what_is_understood():
    assert not is_unknown(text())
    assert not is_unknown("%a = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add")


IN_BODY = {
    "an_operation_of_tomorrow": "%a = f32[8]{0} all-to-some(%x), replica_groups={{0,1}}",
    "its_start": "%a = (f32[8]{0}, f32[8]{0}) all-to-some-start(%x)",
    "another_syntax": "%a : f32[8] <- all-reduce[%x]",
    "shape": "%a = f32<8> all-reduce(%x), to_apply=%add",
    "shape_that_does_not_end": "%a = (f32[8]{0}, f32[8]{0} all-reduce(%x, %y), to_apply=%add",
    "numbers_of_tomorrow": "%a = quad[8]{0} all-reduce(%x), to_apply=%add",
    "groups": "%a = f32[8]{0} all-reduce(%x), replica_groups=some{0,1}of[8]<=, to_apply=%add",
    "groups_of_a_start": "%a = f32[8]{0} all-reduce-start(%x), replica_groups=[8]<=[8]",
    "computation_that_is_not_there": "%a = f32[8]{0} fusion(%x), kind=kLoop, calls=%nowhere",
    "loop_that_is_not_there": "%a = f32[8]{0} while(%x), condition=%nowhere, body=%nowhere",
    "send_to_a_device": "%a = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1",
    "send_to_a_slice": (
        "%a = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}'
    ),
    "kernel_that_sends": (
        '%a = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"has_communication": true}}'
    ),
}


@pytest.mark.parametrize("line", IN_BODY.values(), ids=IN_BODY)
def test_one_line(line):
    program = text().splitlines()
    for number in lines_of_computations():
        assert is_unknown("\n".join([*program[:number], f"  {line}", *program[number:]])), number
        break
    assert parse(f"%main {{\n  {line}\n}}").unread
    assert any(line.split()[0].lstrip("%") in part for part in parse(f"%m {{\n{line}\n}}").unread)


@pytest.mark.parametrize(
    "line",
    [
        "%a = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true",
        '%a = f32[8]{0} custom-call(%x), custom_call_target="mine"',
        "%a = f32[8]{0} reduce(%x, %z), dimensions={0}, to_apply=%add",
    ],
)
def test_nothing_to_other_devices(line):
    assert len(collectives_of(f"%main {{\n  {line}\n}}")) == 0


@pytest.mark.parametrize(
    "program",
    [
        "",
        "HloModule jit_f, num_partitions=8\n",
        "HloModule jit_f\n\n%main {\n  %a = f32[] constant(0)\n}\n",  # no entry
        "%main {\n  %a = f32[] constant(0)\n",
        "%a {\n  %w = f32[] call(%x), to_apply=%a\n}\n",
        "module @jit_f { stablehlo.all_reduce }",
        "\x00\x01",
    ],
)
def test_texts(program):
    assert is_unknown(program)


@given(st.data())
def test_any_instruction_in_another_syntax(data):
    program = text().splitlines()
    number = data.draw(st.sampled_from(lines_of_computations()))
    name, _, rest = program[number].partition(" = ")
    sign = data.draw(st.sampled_from([" := ", " <- ", "=", ": ", " "]))
    program[number] = f"{name}{sign}{rest}"
    assert is_unknown("\n".join(program))


@given(st.data())
def test_text_that_ends_early(data):
    # After the last bracket only tables of source lines may follow.
    end = data.draw(st.integers(0, text().rindex("}") - 1))
    assert is_unknown(text()[:end])


@given(st.data())
def test_garbage_between(data):
    program = text().splitlines()
    number = data.draw(st.sampled_from(lines_of_computations()))
    alphabet = st.characters(exclude_categories=["Z", "C"])
    garbage = data.draw(st.text(alphabet, min_size=1).filter(lambda x: not x.startswith("}")))
    program.insert(number, garbage)
    assert is_unknown("\n".join(program))


@functools.cache
def unread():
    """A program of which the text is not understood, and its report."""
    program = text().replace(" all-reduce(", " all-to-some(")
    assert program != text()
    another = compiled.__wrapped__()  # which keeps what it has read
    with mock.patch.object(type(another._stage), "as_text", lambda self: program):
        report = another.report(hardware="TPU v5e")
        assert another.collectives() is None
        assert another.cost() is None
        assert another.roofline("TPU v5e") == report.roofline
    return report


@pytest.mark.parametrize(
    "function",
    [
        assert_no_collective,
        assert_no_resharding,
        lambda program: assert_no_collective(program, "all-gather", "data"),
        lambda program: assert_collectives(program, {}),
        lambda program: assert_bytes_sent_below(program, "1 TiB"),
    ],
)
def test_assertions_do_not_pass(function):
    message = r"the collectives of fun are unknown: .*not understood:\n  all-reduce.*all-to-some\("
    with pytest.raises(ValueError, match=message):
        function(unread())
    without = dataclasses.replace(unread(), hlo=None)
    with pytest.raises(ValueError, match="the backend has no text of the compiled program"):
        function(without)


def test_report():
    report = unread()
    assert report.collectives is None and report.cost is None
    assert "collectives: unknown, not understood: all-reduce" in str(report)
    assert "cost: unknown, not understood: all-reduce" in str(report)
    assert "no collectives" not in str(report)
    roofline = report.roofline
    assert (roofline.compute_s, roofline.interconnect_s, roofline.bound_by) == (None, None, None)
    assert ProgramReport.from_json(report.to_json()) == report
    assert report.with_roofline("TPU v5p").roofline.interconnect_s is None


def test_a_kernel_that_sends_is_named():
    [why] = parse(f"%m {{\n{IN_BODY['kernel_that_sends']}\n}}").unread
    assert why == "a (tpu_custom_call) is a kernel that sends to other devices by itself"


def test_comparison():
    comparison = Comparison({"read": compiled().report("read"), "unread": unread()})
    assert comparison.figures["unread"]["bytes_sent"] is None
    assert comparison.figures["unread"]["flops"] is None
    assert comparison.bytes_sent_by_axes["unread"] is None
    assert comparison.bytes_sent_by_axes["read"]["data",] > 0
    assert comparison.marked["bytes_sent"] == "read"
    assert "unread" in str(comparison)
    assert "–" in next(line for line in str(comparison).splitlines() if "unread" in line)  # noqa: RUF001


def test_changes():
    before, after = compiled().report(hardware="TPU v5e"), unread()
    changed = {(one.kind, one.name): (one.before, one.after) for one in diff(before, after)}
    sent = {key: pair for key, pair in changed.items() if key[0] == "collective"}
    assert sent and all(after is None for _, after in sent.values())
    assert [one for one in diff(after, after) if one.kind == "collective"] == []


def test_roofline_of_nothing():
    assert roofline_of(None, None, "TPU v5e").bound_by is None
    sent = compiled().collectives()
    assert roofline_of(None, sent, "TPU v5e").interconnect_s > 0
    assert roofline_of(None, sent, "TPU v5e").bound_by is None
    assert "bound by" in str(roofline_of(None, None, "TPU v5e"))
