"""The C extension, and the page of errors in the package; the rest is in pyproject.toml."""

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Adds docs/errors.md, which `nnx-sharding explain` reads."""

    def run(self):
        """Starts anew: files of an earlier build would be installed as well."""
        if self.editable_mode:  # the files stay in the checkout
            return super().run()
        shutil.rmtree(Path(self.build_lib, "nnx_sharding"), ignore_errors=True)
        super().run()
        target = Path(self.build_lib, "nnx_sharding", "cli", "errors.md")
        if target.parent.is_dir():
            shutil.copyfile("docs/errors.md", target)


class BuildExt(build_ext):
    """Always compiles, and says if that failed."""

    def run(self):
        """Deletes what an earlier build left, so that no old extension is used after a failure."""
        self.force = True
        folder = Path() if self.inplace or self.editable_mode else Path(self.build_lib)
        files = [folder / self.get_ext_filename(extension.name) for extension in self.extensions]
        for file in files:
            file.unlink(missing_ok=True)
        super().run()
        if not all(file.exists() for file in files):
            self.warn(
                "nnx_sharding is installed without its C extension, because it could not be "
                "compiled. Everything works, but calls are slower. To have it, install a C "
                "compiler, then nnx_sharding again."
            )


setup(
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
    # Makes calls faster. Without a compiler it is left out, and Python code does the same.
    ext_modules=[
        Extension(
            "nnx_sharding.core.guard._native",
            sources=["nnx_sharding/core/guard/walk.c", "nnx_sharding/core/guard/call.c"],
            depends=["nnx_sharding/core/guard/native.h"],
            optional=os.environ.get("NNX_SHARDING_BUILD") != "required",
        )
    ],
)
