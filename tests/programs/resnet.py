"""A residual network with batch norms, metrics and evaluation during the training.

https://github.com/jax-ml/bonsai/blob/main/bonsai/models/resnet
https://github.com/google/flax/blob/main/docs_nnx/mnist_tutorial.ipynb
"""

import dataclasses
from functools import partial

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class ModelCfg:
    block_layers: list[int]  # a list in a frozen configuration
    num_classes: int

    @classmethod
    def resnet_tiny(cls):
        return cls([1, 1], num_classes=8)


class Bottleneck(nnx.Module):
    def __init__(self, inputs, outputs, stride=1, downsample=None, *, rngs):
        conv = partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.conv0, self.bn0 = conv(inputs, outputs, (1, 1)), nnx.BatchNorm(outputs, rngs=rngs)
        self.conv1 = conv(outputs, outputs, (3, 3), strides=stride, padding=1)
        self.bn1 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.conv2 = conv(outputs, 2 * outputs, (1, 1))
        self.bn2 = nnx.BatchNorm(2 * outputs, rngs=rngs)
        self.downsample = downsample

    def __call__(self, x):
        y = nnx.relu(self.bn0(self.conv0(x)))
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(y)))))
        return nnx.relu(y + (x if self.downsample is None else self.downsample(x)))


class BlockGroup(nnx.Module):
    def __init__(self, inputs, outputs, blocks, stride, *, rngs):
        self.blocks = nnx.List()
        downsample = nnx.Sequential(
            nnx.Conv(inputs, 2 * outputs, (1, 1), strides=stride, use_bias=False, rngs=rngs),
            nnx.BatchNorm(2 * outputs, rngs=rngs),
        )
        self.blocks.append(Bottleneck(inputs, outputs, stride, downsample, rngs=rngs))
        for _ in range(1, blocks):
            self.blocks.append(Bottleneck(2 * outputs, outputs, rngs=rngs))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ResNet(nnx.Module):
    def __init__(self, cfg, *, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.max_pool = partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
        self.layer0 = BlockGroup(8, 4, cfg.block_layers[0], 1, rngs=rngs)
        self.layer1 = BlockGroup(8, 8, cfg.block_layers[1], 2, rngs=rngs)
        self.pool = partial(lambda x: x.mean(axis=(1, 2)))
        self.fc = nnx.Linear(16, cfg.num_classes, rngs=rngs)

    def __call__(self, x):
        x = self.max_pool(nnx.relu(self.bn(self.stem(x))))
        return self.fc(self.pool(self.layer1(self.layer0(x))))


def make():
    model = ResNet(ModelCfg.resnet_tiny(), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9, nesterov=True), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def batch(step):
    one, two = jax.random.split(jax.random.key(step))
    images = jax.random.normal(one, (8, 16, 16, 3))
    return ({"image": images, "label": jax.random.randint(two, (8,), 0, 8)},)


def loss_fn(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return loss


def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def train(jit, objects, steps):
    model, _, metrics = objects
    step_fn, eval_fn, history = jit(train_step), jit(eval_step), []
    for step in range(steps):
        model.train()
        history.append(step_fn(*objects, *batch(step)))
        if step % 2 == 1:
            history.append(metrics.compute())
            metrics.reset()
            model.eval()
            eval_fn(model, metrics, *batch(100))
            history.append(metrics.compute())
            metrics.reset()
    return history


def shardings(strategy, model, optimizer, metrics):
    return strategy(model), strategy(optimizer, model), P()


RULES = {
    r"conv[01]/kernel$": P(None, None, "data", "model"),
    r"conv2/kernel$": P(None, None, "model"),
    r"fc/kernel$": P("data", "model"),
}
