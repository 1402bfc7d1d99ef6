"""Packaging: what nnx_sharding needs, and what its tests, docs and demo need on top."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """Reads the version without importing the package, whose dependencies may be missing."""
    text = (ROOT / "nnx_sharding" / "_version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)[1]


EXTRAS = {
    "tests": [
        "absl-py",
        "flatbuffers",
        "hypothesis",
        "optax",
        "playwright",  # drives a browser that is there already
        "pytest>=9",
        "pytest-cov",
        "pytest-xdist",
        "rich",
        "scikit-learn",
        "sybil>=10",  # runs the code blocks of the documentation
    ],
    "docs": [
        "myst-parser>=5",
        "sphinx>=9",
        "sphinx-book-theme>=1.4",  # the theme of the JAX and Flax documentation
    ],
    "bench": [
        "equinox",  # one of the peers
        "optax",
    ],
    "export": ["flatbuffers"],  # jax.export writes and reads programs with it
    "package": ["build"],
    "demo": [
        "optax",
        "rich",
        "scikit-learn",
    ],
    # Ranges end before the next release that may find new faults in unchanged code.
    "lint": [
        "mypy>=2.4,<2.5",
        "ruff>=0.17.5,<0.18",
    ],
}
EXTRAS["dev"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name="nnx_sharding",
    version=version(),
    description="Sharded jit, shard_map and ahead-of-time compilation for Flax NNX models",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["nnx_sharding", "nnx_sharding.*"]),
    package_data={
        "nnx_sharding": ["py.typed"],
        "nnx_sharding.report.page": ["page.*", "script/*.js"],
    },
    # Makes calls faster. Without a compiler the installation goes on, and Python does the same.
    ext_modules=[
        Extension(
            "nnx_sharding.core.guard._walk",
            sources=["nnx_sharding/core/guard/_walk.c"],
            optional=True,
        )
    ],
    install_requires=[
        "flax>=0.12.8",
        "jax>=0.10.2",
        "numpy",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["nnx-sharding = nnx_sharding.cli.main:main"]},
)
