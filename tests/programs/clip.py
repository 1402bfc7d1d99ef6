"""CLIP: a vision transformer and a text transformer, as in jimm.

https://github.com/pythoncrazy/jimm/blob/main/src/jimm/models/clip
https://github.com/pythoncrazy/jimm/blob/main/examples/clip_training_nnxjit.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

WIDTH, CONTEXT = 16, 6


def quickgelu(x):
    return x * jax.nn.sigmoid(1.702 * x)


def partitioned(*names):
    return nnx.with_partitioning(nnx.initializers.xavier_uniform(), names)


class TransformerEncoder(nnx.Module):
    def __init__(self, width, attn_mask=None, use_quick_gelu=False, *, rngs):
        linear = functools.partial(nnx.Linear, rngs=rngs)
        self.attn_mask = attn_mask  # an array or None
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        inits = partitioned("embed", "heads", None), partitioned("heads", None, "embed")
        init = dict(zip(("kernel_init", "out_kernel_init"), inits, strict=True))
        self.attn = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs, **init)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = nnx.Sequential(
            linear(width, 2 * width, kernel_init=partitioned("embed", "mlp")),
            quickgelu if use_quick_gelu else functools.partial(jax.nn.gelu, approximate=False),
            nnx.Dropout(0.1, rngs=rngs),
            linear(2 * width, width, kernel_init=partitioned("mlp", "embed")),
        )

    def __call__(self, x):
        x = x + self.attn(self.norm1(x), mask=self.attn_mask)
        return x + self.mlp(self.norm2(x))


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scan_forward(x, layer):
    return layer(x)


class Transformer(nnx.Module):
    def __init__(self, num_layers, *, rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create_block(rngs):
            return TransformerEncoder(WIDTH, use_quick_gelu=True, rngs=rngs)

        self.num_layers, self.layers = num_layers, create_block(rngs)

    def __call__(self, x):
        return scan_forward(x, self.layers)


class VisionModel(nnx.Module):
    def __init__(self, *, rngs=nnx.Rngs(0)):  # noqa: B008
        self.patch_embedding = nnx.Conv(3, WIDTH, (4, 4), (4, 4), use_bias=False, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.cls_token = nnx.Param(init(rngs.params(), (1, 1, WIDTH)))
        self.position_embeddings = nnx.Param(init(rngs.params(), (1, 5, WIDTH)))
        self.transformer = Transformer(2, rngs=rngs)
        self.visual_projection = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, image):
        x = self.patch_embedding(image).reshape(len(image), -1, WIDTH)
        cls = jnp.broadcast_to(self.cls_token[...], (len(image), 1, WIDTH))
        x = jnp.concatenate([cls, x], 1) + self.position_embeddings[...]
        return self.visual_projection(self.transformer(x)[:, 0])


class TextModel(nnx.Module):
    def __init__(self, *, rngs):
        self.attn_mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT)))
        init = partitioned("vocab", "embed")
        self.token_embedding = nnx.Embed(32, WIDTH, embedding_init=init, rngs=rngs)
        self.position_ids = np.arange(CONTEXT)
        self.positional_embedding = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.transformer = TransformerEncoder(WIDTH, attn_mask=self.attn_mask, rngs=rngs)
        self.ln_final = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.text_projection = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, text):
        x = self.token_embedding(text) + self.positional_embedding(self.position_ids)
        x = self.ln_final(self.transformer(x))
        return x[jnp.arange(len(x)), text.argmax(-1)] @ self.text_projection.kernel[...]


class CLIP(nnx.Module):
    def __init__(self, *, rngs):
        self._original_config = None
        self.vision_model = VisionModel(rngs=rngs)
        self.text_model = TextModel(rngs=rngs)
        self.logit_scale = nnx.Param(jnp.ones(()), out_sharding=())

    def __call__(self, images, texts):
        features = self.vision_model(images), self.text_model(texts)
        image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in features)
        return jnp.exp(self.logit_scale[...]) * image @ text.T


@nnx.use_eager_sharding(False)
def make():
    model = CLIP(rngs=nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


def batch(step):
    one, two = jax.random.split(jax.random.key(step))
    return jax.random.normal(one, (8, 8, 8, 3)), jax.random.randint(two, (8, CONTEXT), 0, 32)


def clip_loss(model, images, texts):
    logits, cross_entropy = model(images, texts), optax.softmax_cross_entropy_with_integer_labels
    labels = jnp.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)).mean() / 2


def train_step(model, optimizer, images, texts):
    loss, grads = nnx.value_and_grad(clip_loss)(model, images, texts)
    optimizer.update(model, grads)
    return loss


def train(jit, objects, steps):
    model, optimizer = objects
    step_fn, eval_fn, losses = jit(train_step), jit(clip_loss), []
    for step in range(steps):
        model.train()
        losses.append(step_fn(model, optimizer, *batch(step)))
        model.eval()
        losses.append(eval_fn(model, *batch(100)))
    return losses


LOGICAL = {"vocab": "model", "embed": "data", "heads": "model", "mlp": "model", "layers": None}
RULES = {
    r"layers/mlp/.*kernel$": P(None, "data", "model"),
    r"layers/attn/(query|key|value)/kernel$": P(None, None, None, "model"),
}
