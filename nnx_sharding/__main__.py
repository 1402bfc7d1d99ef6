"""The command line: ``python -m nnx_sharding``."""

import sys

from .command.main import main

sys.exit(main())
