"""A graph convolutional network with segment sums.

https://github.com/google-deepmind/jraph
https://github.com/jax-ml/bonsai/blob/main/bonsai/models/gat
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import PartitionSpec as P

AGGREGATE = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max}


class GraphsTuple(NamedTuple):
    nodes: jax.Array
    senders: jax.Array
    receivers: jax.Array


@struct.dataclass
class Masks:
    train: jax.Array
    test: jax.Array
    name: str = struct.field(pytree_node=False, default="cora")


class GraphConvolution(nnx.Module):
    def __init__(self, inputs, outputs, aggregate="sum", *, rngs):
        self.aggregate = aggregate
        self.update_node_fn = nnx.Linear(inputs, outputs, rngs=rngs)
        self.normalize = lambda degree: jax.lax.rsqrt(jnp.maximum(degree, 1.0))

    def __call__(self, graph):
        num_nodes = len(graph.nodes)
        nodes = self.update_node_fn(graph.nodes)
        segment = functools.partial(AGGREGATE[self.aggregate], num_segments=num_nodes)
        ones = jnp.ones(len(graph.senders))
        degrees = (jax.ops.segment_sum(ones, ends, num_nodes) for ends in graph[1:])
        send, receive = map(self.normalize, degrees)
        messages = (nodes * send[:, None])[graph.senders]
        return graph._replace(nodes=segment(messages, graph.receivers) * receive[:, None])


class GCN(nnx.Module):
    def __init__(self, sizes, dropout, *, rngs):
        self.sizes = sizes
        self.layers = nnx.List([])
        for inputs, outputs in itertools.pairwise(sizes):
            self.layers.append(GraphConvolution(inputs, outputs, rngs=rngs))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, graph):
        for i, layer in enumerate(self.layers):
            graph = layer(graph._replace(nodes=self.dropout(graph.nodes)))
            if i < len(self.layers) - 1:
                graph = graph._replace(nodes=nnx.relu(graph.nodes))
        return graph.nodes


def make():
    model = GCN([16, 32, 8], 0.5, rngs=nnx.Rngs(0))
    tx = optax.adamw(optax.exponential_decay(1e-2, 10, 0.9), weight_decay=5e-4)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def batch(step):
    keys = jax.random.split(jax.random.key(step), 4)
    ends = (jax.random.randint(key, (64,), 0, 32) for key in keys[:2])
    graph = GraphsTuple(jax.random.normal(keys[2], (32, 16)), *ends)
    train = jnp.arange(32) % 2 == 0
    return graph, jax.random.randint(keys[3], (32,), 0, 8), Masks(train, ~train)


def evaluate(model, graph, labels, masks, split):
    logits = model(graph)
    mask = getattr(masks, split)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * mask).sum() / mask.sum(), (logits.argmax(-1) == labels).mean(where=mask)


def train_step(model, optimizer, graph, labels, masks):
    grad_fn = nnx.value_and_grad(evaluate, has_aux=True)
    (loss, accuracy), grads = grad_fn(model, graph, labels, masks, "train")
    optimizer.update(model, grads)
    return loss, accuracy


def train(jit, objects, steps):
    model, _ = objects
    step_fn, results = jit(train_step), []
    test_fn = jit(evaluate, static_argnames="split")
    eval_model = nnx.view(model, deterministic=True)
    for step in range(steps):
        results.append(step_fn(*objects, *batch(step)))
        results.append(test_fn(eval_model, *batch(step), split="test"))
    return results


RULES = {r"layers/0/.*kernel$": P("data", "model"), r"layers/1/.*kernel$": P("model", "data")}
