"""How often loops run, where only their conditions say so."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from jax import lax

from nnx_sharding.analysis.hlo import parse

LOOP = """HloModule jit_f

%test (p.1: (s32[], f32[8], s32[])) -> pred[] {
  %p.1 = (s32[], f32[8], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n.1 = s32[] get-tuple-element(%p.1), index=2
  %limit = s32[] constant(LIMIT)
  ROOT %c = pred[] compare(TEST
}

%once (p.2: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p.2 = (s32[], f32[8], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %x.2 = f32[8]{0} get-tuple-element(%p.2), index=1
  %n.2 = s32[] get-tuple-element(%p.2), index=2
  %step = s32[] constant(STEP)
  %next = s32[] NEXT
  %y = f32[8]{0} tanh(%x.2)
  ROOT %r = (s32[], f32[8], s32[]) tuple(%next, %y, %n.2)
}

ENTRY %main (x: f32[8], k: s32[]) -> (s32[], f32[8], s32[]) {
  %x = f32[8]{0} parameter(0)
  %k = s32[] parameter(1)
  %zero = s32[] constant(FIRST)
  %start = s32[] copy(%zero)
  %n = s32[] constant(20)
  %t = (s32[], f32[8], s32[]) tuple(%start, %x, NUMBER)
  ROOT %w = (s32[], f32[8], s32[]) while(%t), condition=%test, body=%once
}
"""


def count(**parts):
    text = LOOP
    defaults = {
        "TEST": "%i.1, %limit), direction=LT",
        "NEXT": "add(%i.2, %step)",
        "LIMIT": 12,
        "STEP": 1,
        "FIRST": 0,
        "NUMBER": "%n",
    }
    for name, part in (defaults | parts).items():
        text = text.replace(name, str(part))
    module = parse(text)
    assert module.unread == []
    return module.trip_counts.get("w")


class TripCountTest(parameterized.TestCase):
    @parameterized.parameters(
        (12, {}),
        (9, {"FIRST": 3}),
        (0, {"FIRST": 30}),
        (4, {"STEP": 3}),
        (5, {"STEP": 3, "FIRST": -1}),
        (13, {"TEST": "%i.1, %limit), direction=LE"}),
        (12, {"TEST": "%i.1, %limit), direction=NE"}),
        (12, {"TEST": "%limit, %i.1), direction=GT"}),
        (13, {"TEST": "%limit, %i.1), direction=GE"}),
        (8, {"TEST": "%i.1, %limit), direction=GT", "FIRST": 20, "STEP": -1}),
        (8, {"TEST": "%i.1, %limit), direction=GT", "FIRST": 20, "NEXT": "subtract(%i.2, %step)"}),
        (5, {"TEST": "%i.1, %limit), direction=GE", "FIRST": 20, "STEP": -2}),
        (20, {"TEST": "%i.1, %n.1), direction=LT"}),  # what the loop carries unchanged
        (12, {"NEXT": "add(%step, %i.2)"}),
    )
    def test_known(self, expected, parts):
        assert count(**parts) == expected

    @parameterized.parameters(
        {"TEST": "%i.1, %n.1), direction=LT", "NUMBER": "%k"},  # an argument
        {"NEXT": "multiply(%i.2, %step)"},
        {"NEXT": "subtract(%step, %i.2)"},
        {"STEP": 0},
        {"STEP": -1},
        {"TEST": "%i.1, %limit), direction=NE", "STEP": 5},
        {"TEST": "%limit, %limit), direction=LT"},
        {"TEST": "%n.1, %limit), direction=LT"},
        {"TEST": "%i.1, %limit), direction=EQ"},
        {"FIRST": "{...}"},
        # Damaged text, in which the condition is a copy of itself.
        {"TEST": "%i.1, %limit), direction=LT\n  ROOT %c = pred[] copy(%c)"},
    )
    def test_unknown(self, **parts):
        assert count(**parts) is None

    def test_called_from_two_places(self):
        loop = "ROOT %w = (s32[], f32[8], s32[]) while(%t), condition=%test, body=%once\n}"
        for first, expected in ((0, 12), (5, None)):
            calls = (
                f"%f = s32[] constant({first})\n  %u = (s32[], f32[8], s32[]) tuple(%f, %x, %n)\n"
                "  %a = (s32[], f32[8], s32[]) call(%t), to_apply=%loop\n"
                "  ROOT %b = (s32[], f32[8], s32[]) call(%u), to_apply=%loop\n}"
            )
            called = (
                "%loop (t: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {\n"
                "  %t.1 = (s32[], f32[8], s32[]) parameter(0)\n  "
                + loop.replace("(%t)", "(%t.1)")
                + "\n\nENTRY"
            )
            text = LOOP.replace(loop, calls).replace("ENTRY", called)
            text = text.replace("TEST", "%i.1, %limit), direction=LT").replace("LIMIT", "12")
            text = text.replace("NEXT", "add(%i.2, %step)").replace("STEP", "1")
            module = parse(text.replace("FIRST", "0").replace("NUMBER", "%n"))
            assert module.unread == []
            assert module.trip_counts.get("w") == expected

    def test_those_that_xla_writes_are_found_without_them(self):
        def inner(x, _):
            return jnp.tanh(x), None

        def outer(x, length):
            x = lax.scan(inner, x, None, length=3)[0]
            return lax.fori_loop(2, 9, lambda i, x: x * i, x) + length, None

        def fun(x, n):
            x = lax.scan(outer, x, jnp.arange(5.0))[0]
            x = lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x)
            return lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, x)

        x, n = jax.ShapeDtypeStruct((64,), "float32"), jax.ShapeDtypeStruct((), "int32")
        text = jax.jit(fun).lower(x, n).compile().as_text()
        written = parse(text).trip_counts
        assert sorted(written.values()) == [3, 5, 7]
        assert len(re.findall(r" while\(", text)) == 5
        without = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
        assert "known_trip_count" not in without
        assert parse(without).trip_counts == written


def test_loops_in_loops_take_no_time():
    text = LOOP[LOOP.index("%test") : LOOP.index("ENTRY")]
    parts = {"TEST": "%i.1, %limit), direction=LT", "NEXT": "add(%i.2, %step)"}
    for name, part in (parts | {"LIMIT": "12", "STEP": "1"}).items():
        text = text.replace(name, part)
    texts = ["HloModule jit_f\n\n"]
    for depth in range(40):
        one = re.sub(r"%([\w.]+)", rf"%\1_{depth}", text)
        call = f"while(%p.2_{depth}), condition=%test_{depth}, body=%once_{depth}"
        following = call.replace(f"test_{depth}", f"test_{depth + 1}")
        following = following.replace(f"once_{depth}", f"once_{depth + 1}")
        line = f"  %w_{depth} = (s32[], f32[8], s32[]) {following}\n  ROOT"
        texts.append(one.replace(f"  ROOT %r_{depth}", f"{line} %r_{depth}") if depth < 39 else one)
    entry = LOOP[LOOP.index("ENTRY") :].replace("FIRST", "0").replace("NUMBER", "%n")
    texts.append(entry.replace("%test", "%test_0").replace("%once", "%once_0"))
    module = parse("".join(texts))
    assert module.unread == []
    assert module.trip_counts["w"] == 12
