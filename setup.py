"""The C extension; all else about the package is in pyproject.toml."""

import os

from setuptools import Extension, setup

setup(
    # Makes calls faster. Without a compiler it is left out, and Python code does the same.
    ext_modules=[
        Extension(
            "nnx_sharding.core.guard._walk",
            sources=["nnx_sharding/core/guard/_walk.c"],
            optional=os.environ.get("NNX_SHARDING_BUILD") != "required",
        )
    ],
)
