"""Names of the layers of models, by what the layers do.

Two readers share these names. Tensor parallelism asks whether a layer is a column or a row
(`partition/layer_styles.py`), and `match_tensors` asks which layer of one model is the same as a
layer of another (`checkpoint/tensor_names.py`). Names that mean a layer only together with the
names around them are `IN` and `OUT`.
"""

from __future__ import annotations

import re

# What layers do → their names.
NAMES = {
    part: frozenset(names.split())
    for part, names in {
        "q": "q query q_proj wq to_q",
        "k": "k key k_proj wk to_k",
        "v": "v value v_proj wv to_v",
        "qkv": "qkv qkv_proj wqkv c_attn",
        "o": "o o_proj wo to_out attn_out",
        "gate": "gate gate_proj w1 wi_0",
        "up": "up up_proj w3 wi wi_1 fc1 fc_in c_fc linear1 dense1",
        "gate_up": "gate_up gate_up_proj",
        "down": "down down_proj w2 fc2 fc_out linear2 dense2",
        "head": "head lm_head unembed classifier logits",
    }.items()
}
IN = frozenset({"in", "in_proj"})  # in attention: q, k and v; in an MLP: up
OUT = frozenset({"out", "out_proj", "output_proj", "c_proj"})  # in attention: o; in an MLP: down

# Parts of a parameter's name that are not the name of its layer: `w_` in `w_up`, `_kernel` in
# `query_kernel`.
AFFIXES = re.compile("^(w|kernel|weight)_|_(w|kernel|weight)$")
