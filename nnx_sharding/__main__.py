"""The command line: ``python -m nnx_sharding``."""

import sys

from .cli.main import main

sys.exit(main())
