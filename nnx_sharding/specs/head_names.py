"""Names of projections to heads, in Flax's layers and in published models."""

import re

QUERIES = re.compile("query|(to_|w)?q(_proj)?")
KEYS = re.compile("key|value|(to_|w)?[kv](_proj)?")  # projections to keys and to values
