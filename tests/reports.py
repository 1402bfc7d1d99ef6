"""Reports in their JSON form, made by hand, for several test files."""

from __future__ import annotations

import copy
import math

# Texts that must not become markup, a placeholder, an escape sequence or an end of script.
NASTY = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    '"><svg onload="window.hacked = 1">',
    "<!-- <script>",
    "--> ]]> &lt;b&gt; &amp;",
    "{{data}} {{script}} ${window.hacked = 1}",
    "line\u2028separator\u2029and\u0085more\x00\x1b[31m",
    "[red]rich[/] [/] [bold",
    "javascript:window.hacked=1",
    "__proto__",
    "\u202eright to left",
    "\ud800 alone",
)

HLO = """HloModule jit_step, entry_computation_layout={(f32[8,64]{1,0})->f32[8,64]{1,0}}

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  ROOT %all-gather.7 = f32[8,64]{1,0} all-gather(%p), replica_groups={{0,4},{1,5}}
}

ENTRY %main.9 (a: f32[8,64]) -> f32[8,64] {
  %a = f32[8,64]{1,0} parameter(0)
  %call = f32[8,64]{1,0} call(%a), to_apply=%body
  ROOT %all-reduce.3 = f32[8,64]{1,0} all-reduce(%call), to_apply=%add.1
}
"""


def parameter(path, shape, spec, mesh, **more):
    """The JSON form of one row."""
    entries = [*(spec or []), *[None] * len(shape)]
    parts = [
        math.prod(mesh[axis] for axis in ([entry] if isinstance(entry, str) else entry or []))
        for entry, _ in zip(entries, shape, strict=False)
    ]
    shard = [size // count for size, count in zip(shape, parts, strict=True)]
    return {
        "path": path,
        "shape": list(shape),
        "dtype": "float32",
        "spec": spec,
        "shard_shape": shard,
        "bytes_per_device": 4 * math.prod(shard),
        "bytes_total": 4 * math.prod(shape),
        "memory_kind": "device",
        "donated": False,
        "used": True,
        "variable": "Param",
        "role": "parameter",
        **more,
    }


def collective(kind, name, axes, size, **more):
    return {
        "kind": kind,
        "name": name,
        "computation": "main.9",
        "dtype": "f32",
        "shapes": [[8, 64]],
        "bytes": size,
        "bytes_sent": size // 2,
        "group_size": 4,
        "num_groups": 2,
        "axes": axes,
        "axis_parts": [],
        "in_loop": False,
        "conditional": False,
        "times": 1,
        "operation": "jit(step)/mlp/dot_general",
        "source": "model.py:12",
        "purpose": "sum",
        "parameters": [],
        "module": "model.mlp",
        "flops_beside": 0,
        "bytes_beside": 0,
        "beside": [],
        **more,
    }


def traffic(axes, links, bandwidth, size, seconds):
    """The JSON form of what is sent over some links."""
    row = {"axes": axes, "links": links, "bandwidth": bandwidth}
    return {**row, "bytes_sent": size, "seconds": seconds}


def activation(path, shape, spec, mesh, **more):
    """The JSON form of one row; the compiler chooses where no spec is given."""
    row = parameter(path, shape, spec, mesh)
    kept = ("path", "shape", "dtype", "spec", "bytes_total")
    names = {"module": "Linear", "method": "__call__", "output": "", "chosen_by": "strategy"}
    sizes = {name: row[name] for name in ("shard_shape", "bytes_per_device")}
    if spec is None:
        sizes, names = dict.fromkeys(sizes), {**names, "chosen_by": "compiler"}
    return {**{name: row[name] for name in kept}, **sizes, **names, **more}


def module_row(path, backward, at_peak):
    figures = {"flops": 1000, "bytes_accessed": 500, "bytes_sent": 0, "seconds": None}
    return {"path": path, "backward": backward, **figures, "at_peak": at_peak, "measured": None}


def report(layers=3, **more):
    """A report of a model of several layers on 2 × 4 devices."""
    mesh = {"data": 2, "model": 4}
    rows = []
    for i in range(layers):
        rows += [
            parameter(f"model.blocks[{i}].up.kernel", (64, 256), [None, "model"], mesh),
            parameter(f"model.blocks[{i}].up.bias", (256,), ["model"], mesh),
            parameter(f"model.blocks[{i}].down.kernel", (256, 64), ["model", "data"], mesh),
            parameter(f"model.blocks[{i}].norm.scale", (64,), [], mesh),
        ]
    rows += [
        parameter("x", (8, 64), [["data", "model"]], mesh, donated=True),
        parameter("rate", (), None, mesh, used=False, memory_kind=None),
    ]
    sizes = {"arguments": 90_000, "outputs": 4096, "temporaries": 200_000, "aliased": 2048}
    by_path = {row["path"]: row["bytes_per_device"] for row in rows if row["used"]}
    host = {f"host_{name}": 0 for name in (*sizes, "generated_code")}
    cost = {"flops": 4.2e6, "bytes_accessed": 1.5e6, "transcendentals": None}
    cost |= {"optimal_seconds": 1.9e-6, "host_bytes": None, "int8_flops": None, "fp8_flops": None}
    cost |= {"operations": [], "why": None, "at_least": None}
    return {
        "format": "nnx_sharding.report",
        "version": 12,
        "name": "step",
        "made_with": {"nnx_sharding": "0.1", "jax": "0.10.2", "flax": "0.12.8", "python": "3.11"},
        "platform": "cpu",
        "device_kind": "cpu",
        "num_devices": 8,
        "mesh": {
            "axes": mesh,
            "axis_types": dict.fromkeys(mesh, "Auto"),
            "device_ids": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "coordinates": {"slice": [0] * 8, "x": [0, 1] * 4, "y": [0, 0, 1, 1, 2, 2, 3, 3]},
        },
        "parameters": rows,
        "memory": {**sizes, "generated_code": 0, "peak": 292_048, **host, "by_path": by_path},
        "cost": {**cost, "stage": "after optimisation, one device, loops multiplied out"},
        "collectives": [
            collective("all-reduce", "all-reduce.3", ["model"], 2048),
            collective("all-gather", "all-gather.7", ["data"], 4096, times=3, in_loop=True),
            collective("all-gather", "all-gather.8", None, 100, times=None, in_loop=True),
        ],
        "activations": [
            activation("model.blocks[0].up", (8, 256), ["data", "model"], mesh),
            activation("model.blocks[0].down", (8, 64), None, mesh),
            activation("model", (8, 64), ["data", None], mesh, module="Net", method="encode"),
        ],
        "roofline": {
            "hardware": "TPU v5e",
            "compute_s": 2.1e-8,
            "memory_s": 1.8e-6,
            "interconnect_s": 1.4e-7,
            "bound_by": "memory",
            "arithmetic_intensity": 2.8,
            "traffic": [
                traffic(["model"], "ICI x (line of 2) + y (line of 2)", 1e11, 1024, 1.4e-7),
                traffic(["data"], "ICI y (line of 2, 2 apart)", 2.5e10, 6144, 1.3e-7),
                traffic(None, "DCN", None, 50, None),
            ],
            "hidden": None,
            "busy_s": 1.81e-6,
            "exposed_s": 1.2e-7,
            "sources": {"flops": "https://example.org/v5e", "memory_bytes": "a book"},
            "spread": 0.25,
            "why": "the bandwidth of DCN",
            "at_least": None,
        },
        "hlo": HLO,
        "by_module": {
            "rows": [
                module_row("model.blocks[0].up", False, {"parameters": 4096, "activations": 8192}),
                module_row("model.blocks[0].up", True, {"gradients": 2048}),
                module_row("", False, {}),
            ],
            "peak": 16_000,
            "in_use": 15_000,
            "reserved": 1_000,
            "unattributed": 664,
            "over_time": [
                {"start": 0, "path": "model.blocks[0].up", "backward": False, "bytes": 9000},
                {"start": 5, "path": "model.blocks[0].up", "backward": True, "bytes": 15_000},
            ],
            "why": None,
        },
        "by_line": {
            "rows": [
                line_row("/home/me/model.py", 12),
                line_row("/home/me/model.py", 14),
                line_row(),
            ],
            "why": None,
            "why_types": "specs on Auto axes are those of the compiled program",
        },
        "reasons": {
            "x": reason("in_shardings has P(('data', 'model')) for x.", instead="P('data')"),
            "all-reduce.3": reason("Made by dot_general.", "Used by add."),
        },
        **more,
    }


def reason(*facts, instead=""):
    """Why something is as it is."""
    return {"subject": "it", "facts": [*facts], "instead": instead, "rule": ""}


def line_row(file=None, line=None):
    """A row of the table by line."""
    kind = {"dtype": "float32", "shape": [8, 64], "spec": ["data", None], "backward": False}
    sent = {"kind": "all-reduce", "axes": ["model"], "bytes": 2048, "count": 1}
    return {
        "file": file,
        "line": line,
        "code": f"x = self.up(x, {line})" if line else "",
        "types": [{**kind, "count": 2}] if line else [],
        "modules": ["model.blocks[0].up"] if line else [],
        "collectives": [sent] if line else [],
        "flops": 1e6 * (line or 0),
        "bytes": 4096.0,
        "seconds": 1e-6,
        "at_peak": 1024,
        "measured": None,
    }


def comparison(**more):
    """Three strategies, one of which failed."""
    small, large = report(), report()
    large["memory"] = {**large["memory"], "peak": 3 * 2**20}
    large["collectives"] = large["collectives"][:1]
    return {
        "format": "nnx_sharding.comparison",
        "version": 3,
        "ruled_out": {},
        "measured": {},
        "memory_limit": 2**20,
        "seconds": {},
        "best": dict.fromkeys(("peak", "arguments", "bytes_sent", "flops", "roofline"), "tp"),
        "reports": {"tp": small, "dp": large, "pp": {"error": "ValueError: no axis 'stage'"}},
        **more,
    }


def empty(**more):
    """A report in which everything optional is unknown."""
    parts = ("mesh", "memory", "roofline", "hlo", "collectives", "by_module", "by_line")
    lists = {"parameters": [], "activations": []}
    return report(**dict.fromkeys(parts), **lists, cost=None, reasons={}, **more)


def nasty():
    """A report whose texts all try to be markup or code."""
    found = copy.deepcopy(report())
    mesh = {NASTY[0]: 2, NASTY[2]: 4}
    rows = [parameter(f"model.{text}", (8, 4), [NASTY[2], None], mesh) for text in NASTY]
    rows += [parameter(f"{text}", (8, 4), [NASTY[0]], mesh, dtype=text) for text in NASTY]
    found |= {
        "name": NASTY[1],
        "made_with": dict.fromkeys(found["made_with"], NASTY[0]),
        "device_kind": NASTY[2],
        "mesh": {
            "axes": mesh,
            "axis_types": {NASTY[0]: NASTY[3]},
            "device_ids": None,
            "coordinates": {},
        },
        "parameters": rows,
        "collectives": [
            collective(
                "all-reduce",
                text,
                [text],
                8,
                operation=text,
                source=text,
                module=text,
                parameters=[text, text],
            )
            for text in NASTY
        ],
        "activations": [
            activation(text, (8,), [NASTY[0]], mesh, module=text, output=text) for text in NASTY
        ],
        "roofline": {
            **found["roofline"],
            "hardware": NASTY[2],
            "traffic": [traffic([text], text, 1.0, 1, 1.0) for text in NASTY],
            "hidden": [
                {
                    "kind": text,
                    "of": text,
                    "bytes_sent": 1,
                    "seconds": 1.0,
                    "compute_s": 1.0,
                    "behind": [text],
                }
                for text in NASTY
            ],
            "sources": {text: text for text in NASTY},
        },
        "reasons": {text: reason(text, instead=text) for text in (*NASTY, "constructor")},
        "hlo": "\n".join(f"%{text} () -> f32[] {{\n  %x = {text}\n}}" for text in NASTY),
    }
    return found


def large(parameters=5000, hlo_bytes=10_000_000):
    """A report of a very large program."""
    mesh = {"data": 2, "model": 4}
    rows = [
        parameter(f"model.blocks[{i // 10}].part{i % 10}.kernel", (64, 8), [None, "model"], mesh)
        for i in range(parameters)
    ]
    line = "  %fusion.{} = f32[8,64]{{1,0}} fusion(%p), kind=kLoop, calls=%fused.{}\n"
    parts, size = [], 0
    while size < hlo_bytes:
        body = "".join(line.format(len(parts), i) for i in range(100))
        parts.append(f"%fused.{len(parts)} (p: f32[8,64]) -> f32[8,64] {{\n{body}}}\n\n")
        size += len(parts[-1])
    return report(parameters=rows, hlo="HloModule large\n\n" + "".join(parts))
