"""Two examples in the same processes; ``+`` is between their arguments."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import resnet
import train_lm

if __name__ == "__main__":
    words, end = sys.argv[1:], sys.argv.index("+")
    train_lm.main(words[: end - 1])
    del os.environ["JAX_COORDINATOR_ADDRESS"]  # they have joined
    resnet.main(words[end:])
