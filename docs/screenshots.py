"""Remakes the pictures of ``docs/images``: ``python docs/screenshots.py``.

Needs Playwright for Python and a Chromium, whose path may be given in ``CHROMIUM``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# Read by the CPU backend when JAX starts it.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from playwright.sync_api import Browser, sync_playwright

from nnx_sharding import StateSharding, jit
from nnx_sharding.partition import fsdp, replicated, tensor_parallel
from nnx_sharding.report import Comparison, ProgramReport
from nnx_sharding.report.page import write_html

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "examples"))

from transformer import Config, make, train_step  # noqa: E402

# Width, height and colours of each picture.
PICTURES = {
    "report-desktop": ("report", 1280, 1560, "light"),
    "report-phone": ("report", 390, 1500, "dark"),
    "comparison-desktop": ("comparison", 1280, 660, "dark"),
}


def shardings(model: Any, optimizer: Any, mesh: Mesh) -> dict[str, StateSharding]:
    """Four ways to shard the same model."""
    tensor = tensor_parallel(model, mesh=mesh)
    options = {"min_size": 0, "optimizer": optimizer}
    return {
        "data parallel": replicated(model, optimizer=optimizer),
        "fsdp": fsdp(model, mesh=mesh, **options),
        "tensor parallel": tensor_parallel(model, mesh=mesh, optimizer=optimizer),
        "fsdp + tensor parallel": fsdp(model, mesh=mesh, base=tensor, **options),
    }


def reports() -> dict[str, ProgramReport]:
    """The training step of the example, compiled with each sharding."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    config = Config(features=128, layers=4)
    model, optimizer = nnx.eval_shape(lambda: make(config))
    tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), "int32")
    compiled_reports = {}
    for name, sharding in shardings(model, optimizer, mesh).items():
        options = {"mesh": mesh, "donate_argnames": ("model", "optimizer")}
        step = jit(train_step, in_shardings=(sharding, sharding, P("data")), **options)
        compiled = step.lower(model, optimizer, tokens).compile()
        compiled_reports[name] = compiled.report(hardware="TPU v5e")
    return compiled_reports


def picture(browser: Browser, page: Path, image: Path, size: tuple[int, int], colours: str) -> None:
    """Opens a page and keeps what its top looks like."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if colours == "dark" else "light",
    )
    with context:
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.screenshot(path=image)


def main() -> None:
    """Makes all pictures."""
    by_name = reports()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = {name: Path(folder, f"{name}.html") for name in ("report", "comparison")}
        write_html(pages["report"], by_name["fsdp + tensor parallel"])
        write_html(pages["comparison"], Comparison(by_name, memory_limit=24 * 2**20))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (page, width, height, colours) in PICTURES.items():
            image = IMAGES / f"{name}.png"
            picture(browser, pages[page], image, (width, height), colours)
            print(f"{image.relative_to(ROOT)}: {image.stat().st_size // 1000} kB")
        browser.close()


if __name__ == "__main__":
    main()
