"""All private names of JAX and Flax that are used, and the texts of messages that are recognized.

What Pythons do in different ways is here, too. The rest of the package uses public names and these
functions.
"""

from .compiling import *  # noqa: F403
from .flax_names import *  # noqa: F403
from .jax_names import *  # noqa: F403
from .programs import *  # noqa: F403
from .python_names import *  # noqa: F403
