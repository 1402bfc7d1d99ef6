"""Builds sdist and wheel, installs each in a new environment, and tries it there.

Then tries an installation without a C compiler, over an earlier one from the same folder.

``python tools/try_package.py`` (``make package``) needs ``build``, and leaves both in ``dist/``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROGRAM = """
import logging, sys
from importlib.metadata import version
from pathlib import Path

messages = []
logger = logging.getLogger("nnx_sharding")
logger.addFilter(lambda record: messages.append(record.getMessage()))

import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
import nnx_sharding
from nnx_sharding import StateSharding, jit
from nnx_sharding.partition import make_mesh

home = Path(nnx_sharding.__file__).parent
assert Path(sys.prefix) in home.parents, home
assert version("nnx_sharding") == nnx_sharding.__version__
assert (home / "py.typed").is_file()
assert bool(messages) == ("without-compiler" in sys.argv), messages
assert all("without its C extension" in message for message in messages), messages

mesh = make_mesh({"data": 2, "model": 4})
sharding = StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})

@jit(in_shardings=(sharding, P("data")), mesh=mesh)
def predict(model, x):
    return model(x)

model, x = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
np.testing.assert_allclose(predict(model, x), x @ model.kernel[...] + model.bias[...], rtol=1e-6)
assert model.kernel.sharding.spec == P(None, "model")
print("works:", home)
"""


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Runs a command with eight virtual devices, and without this source tree on the path."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    unset = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env = {**unset, **flags, **variables}
    subprocess.run(list(map(str, command)), cwd=cwd, env=env, check=True)


# What README.md names.
NAMED = ("Makefile", "CONTRIBUTING.md", "docs/errors.md", "docs/images/pipeline.svg")
NAMED += ("examples/demo.py", "tests/conftest.py", "benchmarks/__main__.py")

LEFT_OUT = (".git", ".venv*", ".nox", ".*cache", ".hypothesis", "build", "_build", "dist")


def main() -> int:
    """Builds, installs and tries; raises where one of these fails."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # From a copy: other gates may install from this folder meanwhile.
        copy = shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*LEFT_OUT))
        # The wheel is built from the sdist, which is therefore complete.
        run(sys.executable, "-m", "build", "--outdir", dist, copy)
        [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        program = folder / "program.py"
        program.write_text(PROGRAM, encoding="utf-8")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        pip += ("--no-compile",)
        for file, options in ((wheel, ()), (sdist, ("--force-reinstall", "--no-deps"))):
            run(*pip, *options, file, cwd=folder)
            print(f"== {file.name}", flush=True)
            run(python, "-W", "error::DeprecationWarning:__main__", program, cwd=folder)
            run(python, "-m", "nnx_sharding", "--help", cwd=folder)
            run(python.with_name("nnx-sharding"), "explain", "not-divisible", cwd=folder)
        print("== twice from one folder, then without a compiler", flush=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = folder / sdist.name.removesuffix(".tar.gz")
        missing = [name for name in NAMED if not (source / name).is_file()]
        if missing:
            raise SystemExit(f"not in {sdist.name}: {', '.join(missing)}")
        for arguments, variables in (((), {}), (("without-compiler",), {"CC": "false"})):
            options = ("--force-reinstall", "--no-deps")
            run(*pip, *options, source, cwd=folder, **variables)
            run(python, program, *arguments, cwd=folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
