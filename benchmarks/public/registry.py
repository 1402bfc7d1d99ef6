"""The models: how each is made at a size, with a batch and a loss.

An adapter imports a public package, or a source folder on the path, and changes only sizes. Layers
and widths of `Size.SMALL` are such that numbers can be computed; those of `Size.REAL` are the
authors', and `Size.WIDE` has two of its layers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.resources
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Size(enum.Enum):
    """How large a model is made."""

    SMALL = "small"
    WIDE = "two layers of the real size"
    REAL = "real"


@dataclasses.dataclass(frozen=True)
class Program:
    """A model of one size, and how it is trained.

    Attributes:
      make: makes the model.
      example: the shape and dtype of one row of a batch.
      loss: from a model and a batch.
      annotated: makes the model with the authors' own shardings for a mesh of the axes ``fsdp`` and
        ``tp``, in parameters and activations; None if they wrote none.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    example: jax.ShapeDtypeStruct
    loss: Callable[[Any, jax.Array], jax.Array]
    annotated: Callable[[nnx.Rngs], nnx.Module] | None = None


@dataclasses.dataclass(frozen=True)
class PublicModel:
    """A model of a package.

    Attributes:
      name: the name in the table.
      source: the package, or the repository whose folder has to be on the path.
      program: makes the program of a size.
      sequences: whether a batch is of tokens, which context parallelism may shard.
      rows: as for ``pipeline``.
    """

    name: str
    source: str
    program: Callable[[Size], Program]
    sequences: bool = False
    rows: tuple[str, ...] = ()


_FEW_LAYERS = 2  # where the authors' number is not taken
# Tokens of a row, for the real widths and for numbers.
_LENGTH, _SMALL_LENGTH = 1024, 16


def _tokens(size: Size) -> jax.ShapeDtypeStruct:
    length = _SMALL_LENGTH if size is Size.SMALL else _LENGTH
    return jax.ShapeDtypeStruct((length,), jnp.int32)


def _image(size: Size, small: int, real: int, channels: int = 3) -> jax.ShapeDtypeStruct:
    side = small if size is Size.SMALL else real
    return jax.ShapeDtypeStruct((side, side, channels), jnp.float32)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the cross entropy of each next token, of logits (rows, length, vocabulary)."""
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def class_loss(logits: jax.Array) -> jax.Array:
    """Returns the cross entropy for logits (rows, classes), where the i-th row has class i."""
    labels = jnp.arange(len(logits)) % logits.shape[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def square_loss(outputs: jax.Array) -> jax.Array:
    """Returns the mean square of the distance to one, of outputs without a meaning for us."""
    return jnp.square(outputs.astype(jnp.float32) - 1).mean()


# --- Tunix ---------------------------------------------------------------------------------------


def _tunix(folder: str, cls: str, config: str, small: Mapping[str, Any]) -> Callable[..., Program]:
    """Returns the programs of a language model of Tunix.

    Args:
      folder: that of the model in ``tunix.models``.
      cls: the class of the model.
      config: the class method of ``ModelConfig`` that makes the real sizes.
      small: the fields that are replaced for `Size.SMALL`.
    """

    def program(size: Size) -> Program:
        module = importlib.import_module(f"tunix.models.{folder}.model")
        authors = getattr(module.ModelConfig, config)()
        layers: dict[str, Any] = {"num_layers": _FEW_LAYERS} if size is not Size.REAL else {}
        if layers and hasattr(authors, "attention_types"):
            layers["attention_types"] = tuple(authors.attention_types)[:_FEW_LAYERS]
        authors = dataclasses.replace(authors, **layers, **(small if size is Size.SMALL else {}))
        if getattr(authors, "vision_config", None) is not None:
            authors = dataclasses.replace(authors, vision_config=None)  # text alone
        bare = dataclasses.replace(authors.shd_config, **_without_specs(authors.shd_config))
        ours = dataclasses.replace(authors, shd_config=bare)
        build = getattr(module, cls)

        def loss(model: Any, tokens: jax.Array) -> jax.Array:
            rows, length = tokens.shape
            positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
            causal = jnp.broadcast_to(jnp.tri(length, dtype=bool), (rows, length, length))
            logits, _ = model(tokens, positions, None, causal)
            return next_token_loss(logits, tokens)

        def annotated(rngs: nnx.Rngs) -> nnx.Module:
            # On CPU devices the models leave their activations alone, which the authors mean for
            # one device: here they stand for TPUs.
            module.shard = _constrain
            return build(authors, rngs=rngs)

        return Program(lambda rngs: build(ours, rngs=rngs), _tokens(size), loss, annotated)

    return program


def _without_specs(config: Any) -> dict[str, Any]:
    """Returns the fields of a sharding config, without axes."""
    return {
        field.name: (None,) * len(value)
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), tuple | jax.sharding.PartitionSpec)
    }


def _constrain(x: jax.Array, spec: tuple[Any, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))


_SMALL_QWEN = {"vocab_size": 256, "embed_dim": 32, "hidden_dim": 64, "num_heads": 8, "head_dim": 8}
_SMALL_QWEN |= {"num_kv_heads": 4}
_SMALL_GEMMA = {"num_embed": 256, **_SMALL_QWEN}
del _SMALL_GEMMA["vocab_size"]
_SMALL_GEMMA3 = {**_SMALL_GEMMA, "param_dtype": jnp.float32}
_SMALL_MOE = {**_SMALL_QWEN, "num_experts": 8, "num_experts_per_tok": 2}

# --- MaxText -------------------------------------------------------------------------------------
#
# MaxText 0.2.5 names no dependencies outside of its extras. Besides those of Tunix, its decoder
# needs, all without their own dependencies: aqtp, click, drjax, einshape, fastapi, fire, httpcore2,
# httpx2, immutabledict, opentelemetry-api, opentelemetry-sdk, opentelemetry-semantic-conventions,
# pathwaysutils, psutil, pydantic, pydantic-core, starlette, termcolor, tiktoken, tokamax,
# truststore, uvicorn and xprof.


def _on_our_axes(spec: Iterable[Any]) -> jax.sharding.PartitionSpec:
    """Returns a spec of MaxText on the axes ``fsdp`` and ``tp``; its others have one device."""
    names = {"fsdp": "fsdp", "tensor": "tp"}
    groups = [axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    axes = [tuple(names[x] for x in group if x in names) or None for group in groups]
    return jax.sharding.PartitionSpec(*axes)


def _constrain_by_sharding(x: Any, sharding: Any, *args: Any, **options: Any) -> Any:
    return _constrain(x, _on_our_axes(sharding.spec[: x.ndim]))


def _leave(x: Any, *args: Any, **options: Any) -> Any:
    return x


def _maxtext(name: str, small: Mapping[str, Any]) -> Callable[..., Program]:
    """Returns the programs of a language model of MaxText, with its layers in one stack.

    Args:
      name: that of the model in ``maxtext/configs/models``.
      small: the fields that are replaced for `Size.SMALL`.
    """

    def program(size: Size) -> Program:
        pyconfig = importlib.import_module("maxtext.configs.pyconfig")
        models = importlib.import_module("maxtext.models.models")
        shardings = importlib.import_module("maxtext.utils.sharding")
        modules = [shardings, importlib.import_module("maxtext.layers.linears")]
        length = _tokens(size).shape[0]
        fields: dict[str, Any] = {
            "model_name": name, "override_model_config": True, "run_name": "public",
            "hardware": "cpu", "skip_jax_distributed_system": True, "log_config": False,
            "enable_checkpointing": False, "jax_cache_dir": "", "attention": "dot_product",
            "remat_policy": "none", "max_target_length": length,
            "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4,
        }  # fmt: skip
        fields |= {"base_num_decoder_layers": _FEW_LAYERS} if size is not Size.REAL else {}
        fields |= small if size is Size.SMALL else {}
        base = importlib.resources.files("maxtext.configs") / "base.yml"
        config = pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in fields.items())])
        sizes = {"fsdp": 2, "tensor": 4}
        devices = np.array(jax.devices()[:8]).reshape([sizes.get(x, 1) for x in config.mesh_axes])
        mesh = jax.sharding.Mesh(devices, config.mesh_axes)

        def make(rngs: nnx.Rngs, constrain: Callable[..., Any] = _leave) -> nnx.Module:
            for module in modules:  # all constraints of activations, of the authors' mesh
                vars(module)["maybe_shard_with_name"] = constrain
            model: nnx.Module = models.Transformer(config, mesh, None, rngs=rngs)
            return model

        def annotated(rngs: nnx.Rngs) -> nnx.Module:
            # The trainer of the authors sets these, without which all would be replicated.
            flax.linen.set_logical_axis_rules(config.logical_axis_rules)
            model = make(rngs, _constrain_by_sharding)
            # Names stay, since the scan over layers looks for its own; their rules are new.
            rules: dict[str, Any] = {}
            for logical, axes in config.logical_axis_rules:  # the first of a name has priority
                rules.setdefault(logical, _on_our_axes([axes])[0])
            for _, variable in nnx.iter_graph(model):
                if isinstance(variable, nnx.Param):
                    variable.set_metadata("sharding_rules", tuple(rules.items()))
            return model

        def loss(model: Any, tokens: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
            logits = model(tokens, positions, enable_dropout=False)
            return next_token_loss(logits, tokens)

        return Program(make, _tokens(size), loss, annotated)

    return program


_SMALL_MAXTEXT = {
    "base_emb_dim": 32, "base_num_query_heads": 8, "base_num_kv_heads": 4, "head_dim": 8,
    "base_mlp_dim": 64, "vocab_size": 256, "dtype": "float32",
}  # fmt: skip

# --- Bonsai --------------------------------------------------------------------------------------


def _bonsai(
    folder: str,
    cls: str,
    config: Callable[[Any, Size], Any],
    example: Callable[[Size], jax.ShapeDtypeStruct],
    loss: Callable[[Any, Any, jax.Array, Any], jax.Array],
) -> Callable[..., Program]:
    """Returns the programs of a model of Bonsai.

    Args:
      folder: that of the model in ``bonsai.models``.
      cls: the class of the model.
      config: makes the config of a size with the Python module of the model.
      example: a row of a batch.
      loss: from that Python module, the model, a batch and the config.
    """

    def program(size: Size) -> Program:
        module = importlib.import_module(f"bonsai.models.{folder}.modeling")
        sized = config(module, size)
        build = getattr(module, cls)
        return Program(
            lambda rngs: build(sized, rngs=rngs),
            example(size),
            lambda model, batch: loss(module, model, batch, sized),
        )

    return program


def _sized(
    method: str, layers: Iterable[str], small: Mapping[str, Any], **always: Any
) -> Callable[..., Any]:
    """Returns what makes a config: the authors', with few layers, and with the small sizes.

    Args:
      method: the method of the class that makes the authors' config; empty for its defaults.
      layers: the fields with the number of layers.
      small: the fields that are replaced for `Size.SMALL`.
      **always: those that are replaced for every size.
    """

    def config(module: Any, size: Size) -> Any:
        real = getattr(module.ModelConfig, method)() if method else module.ModelConfig()
        real = dataclasses.replace(real, **always)
        if size is Size.REAL:
            return real
        few = dict.fromkeys(layers, _FEW_LAYERS)
        return dataclasses.replace(real, **few, **(small if size is Size.SMALL else {}))

    return config


def _images(small: int, real: int = 224, channels: int = 3) -> Callable[..., Any]:
    return functools.partial(_image, small=small, real=real, channels=channels)


def _classify(_: Any, model: Any, images: jax.Array, __: Any) -> jax.Array:
    return class_loss(model(images))


def _regress(_: Any, model: Any, images: jax.Array, __: Any) -> jax.Array:
    return square_loss(model(images))


def _qwen3_loss(module: Any, model: Any, tokens: jax.Array, config: Any) -> jax.Array:
    cache = module.init_cache(config, *tokens.shape, 0, jnp.float32)
    logits = model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))
    return next_token_loss(logits, tokens)


def _gemma3_config(module: Any, size: Size) -> Any:
    real = module.ModelConfig.gemma3_4b_it(norm_dtype=jnp.float32)
    if size is Size.REAL:
        return real
    text = dataclasses.replace(
        real.text_config,
        num_hidden_layers=_FEW_LAYERS,
        layer_types=real.text_config.layer_types[:_FEW_LAYERS],
    )
    vision = dataclasses.replace(real.vision_config, num_hidden_layers=_FEW_LAYERS)
    if size is Size.SMALL:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
        text = dataclasses.replace(
            text, **sizes, head_dim=8, num_key_value_heads=4, vocab_size=256, sliding_window=8
        )
        vision = dataclasses.replace(vision, **sizes, image_size=56)
    return dataclasses.replace(real, text_config=text, vision_config=vision)


def _gemma3_loss(module: Any, model: Any, tokens: jax.Array, config: Any) -> jax.Array:
    cache = module.init_cache(config, *tokens.shape, 0, jnp.float32)
    ones = jnp.ones_like(tokens)
    logits = model(tokens, None, cache=cache, segment_ids=ones, token_type_ids=jnp.zeros_like(ones))
    return next_token_loss(logits, tokens)


def _mamba2_loss(_: Any, model: Any, tokens: jax.Array, __: Any) -> jax.Array:
    return next_token_loss(model(tokens)["logits"], tokens)


def _vit_loss(_: Any, model: Any, images: jax.Array, __: Any) -> jax.Array:
    return class_loss(model(images, rngs=None))


def _convnext_loss(_: Any, model: Any, images: jax.Array, __: Any) -> jax.Array:
    return class_loss(model(images, rngs=jax.random.key(0)))


def _dinov3_loss(_: Any, model: Any, images: jax.Array, __: Any) -> jax.Array:
    return square_loss(model(images)["pooler_output"])


def _vjepa2_loss(_: Any, model: Any, videos: jax.Array, __: Any) -> jax.Array:
    # Its predictor calls ``int`` with an array, which no jit can trace.
    return square_loss(model(videos, skip_predictor=True)["last_hidden_state"])


def _video(size: Size) -> jax.ShapeDtypeStruct:
    shape = (4, 32, 32, 3) if size is Size.SMALL else (16, 256, 256, 3)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _whisper_loss(_: Any, model: Any, spectrum: jax.Array, config: Any) -> jax.Array:
    """Trains to predict fixed tokens from spectra: the class itself has no ``__call__`` yet."""
    tokens = jnp.broadcast_to(jnp.arange(8) + 1, (len(spectrum), 8))
    hidden = model.encoder(spectrum)
    states = model.decoder(tokens, nnx.make_causal_mask(tokens), hidden, None, decode=False)
    return next_token_loss(model.decoder.embed_tokens.attend(states), tokens)


def _channels_first(size: Size) -> jax.ShapeDtypeStruct:
    side = 32 if size is Size.SMALL else 224
    return jax.ShapeDtypeStruct((3, side, side), jnp.float32)


def _spectrum(size: Size) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((32 if size is Size.SMALL else 3000, 80), jnp.float32)


def _umt5_loss(_: Any, model: Any, tokens: jax.Array, __: Any) -> jax.Array:
    mask = jnp.ones_like(tokens)
    return square_loss(model(tokens, mask, tokens, mask))


_VIT = {"hidden_dim": 32, "num_heads": 4, "mlp_dim": 64, "num_labels": 16, "image_size": (32, 32)}
_DINO = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 32}
_WHISPER = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_WHISPER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64}
_WHISPER |= {"max_source_positions": 16, "max_length": 16}
_VJEPA = {"hidden_size": 48, "num_attention_heads": 4, "pred_hidden_size": 48}
_VJEPA |= {"pred_num_attention_heads": 4, "crop_size": 32, "frames_per_clip": 4}

# --- Jimmy ---------------------------------------------------------------------------------------


def _jimmy(size: Size) -> Program:
    from jimmy.models.vit import DinoV2

    sizes: dict[str, Any] = {"depth": 12 if size is Size.REAL else _FEW_LAYERS}
    if size is Size.SMALL:
        sizes |= {"img_size": 32, "embed_dim": 32, "num_heads": 4}
    return Program(
        lambda rngs: DinoV2(**sizes, rngs=rngs),
        _image(size, 32, 224),
        lambda model, images: square_loss(model(images)),
    )


_LANGUAGE = [
    ("Qwen3 8B", "qwen3", "Qwen3", "qwen3_8b", _SMALL_QWEN),
    ("Qwen3 30B-A3B", "qwen3", "Qwen3", "qwen3_30b_a3b", _SMALL_MOE),
    ("Llama 3.1 8B", "llama3", "Llama3", "llama3p1_8b", _SMALL_QWEN),
    (
        "Gemma 3 4B",
        "gemma3",
        "Gemma3",
        "gemma3_4b_it",
        {**_SMALL_GEMMA, "param_dtype": jnp.float32},
    ),
    ("Gemma 2 2B", "gemma", "Gemma", "gemma2_2b", _SMALL_GEMMA),
    ("Qwen2.5 7B", "qwen2", "Qwen2", "qwen2p5_7b", _SMALL_QWEN),
]
_TUNIX = [
    PublicModel(name, "google-tunix", _tunix(folder, cls, config, small), sequences=True)
    for name, folder, cls, config, small in _LANGUAGE
]
_SMALL_BONSAI = {"vocab_size": 256, "emb_dim": 32, "mlp_dim": 64, "num_heads": 8, "head_dim": 8}
_SMALL_BONSAI |= {"num_kv_heads": 4}
_BONSAI = {
    "Qwen3 8B": _bonsai(
        "qwen3", "Qwen3", _sized("qwen3_8b", ["num_layers"], _SMALL_BONSAI), _tokens, _qwen3_loss
    ),
    "Gemma 3 4B": _bonsai("gemma3", "Gemma3Model", _gemma3_config, _tokens, _gemma3_loss),
    "Mamba 2 130M": _bonsai(
        "mamba2",
        "Mamba2ForCausalLM",
        _sized(
            "",
            ["num_hidden_layers"],
            {"vocab_size": 256, "hidden_size": 32, "state_size": 8, "head_dim": 8, "chunk_size": 8},
        ),
        _tokens,
        _mamba2_loss,
    ),
    "UMT5": _bonsai(
        "umt5",
        "UMT5Model",
        _sized(
            "",
            ["num_layers", "num_decoder_layers"],
            {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4},
            dropout_rate=0.0,
        ),
        _tokens,
        _umt5_loss,
    ),
    "ViT B/16": _bonsai(
        "vit",
        "ViTClassificationModel",
        _sized("vit_p16_224", ["num_layers"], _VIT),
        _images(32),
        _vit_loss,
    ),
    "DINOv3 L/16": _bonsai(
        "dinov3",
        "Dinov3ViTModel",
        _sized("dinov3_vitl16", ["num_hidden_layers"], _DINO),
        _channels_first,
        _dinov3_loss,
    ),
    "V-JEPA 2 L": _bonsai(
        "vjepa2",
        "VJEPA2Model",
        _sized("vitl_fpc64_256", ["num_hidden_layers", "pred_num_hidden_layers"], _VJEPA),
        _video,
        _vjepa2_loss,
    ),
    "Whisper tiny": _bonsai(
        "whisper",
        "Whisper",
        _sized("whisper_tiny", ["encoder_layers", "decoder_layers"], _WHISPER),
        _spectrum,
        _whisper_loss,
    ),
    "ResNet-50": _bonsai(
        "resnet",
        "ResNet",
        _sized("resnet50", [], {"block_layers": [1, 1, 1, 1], "num_classes": 16}),
        _images(32),
        _classify,
    ),
    "DenseNet-121": _bonsai(
        "densenet121",
        "DenseNet",
        _sized(
            "densenet_121",
            [],
            {"dense_block_layers": [1, 1, 1, 1], "num_classes": 16, "growth_rate": 8},
        ),
        _images(32),
        _classify,
    ),
    "ConvNeXt B": _bonsai(
        "convnext",
        "ConvNeXt",
        _sized(
            "convnext_base_224",
            [],
            {"stage_depths": (1, 1, 1, 1), "stage_dims": (8, 16, 32, 64), "num_classes": 16},
        ),
        _images(32),
        _convnext_loss,
    ),
    "VGG-19": _bonsai(
        "vgg19",
        "VGG",
        _sized(
            "vgg_19",
            [],
            {
                "block_layers": [1, 1, 1, 1, 1],
                "channels": [8, 8, 16, 16, 16, 32],
                "num_classes": 16,
            },
        ),
        _images(32),
        _classify,
    ),
    "U-Net": _bonsai(
        "unet",
        "UNet",
        _sized("", [], {"features": (4, 8, 16, 32, 64)}),
        _images(32, 256, 1),
        _regress,
    ),
    "VAE of Stable Diffusion": _bonsai(
        "vae",
        "VAE",
        _sized(
            "stable_diffusion_v1_5",
            [],
            {"block_out_channels": [8, 16, 16, 16], "norm_num_groups": 4},
        ),
        _images(32, 256),
        _regress,
    ),
    "EfficientNet B0": _bonsai(
        "efficientnet",
        "EfficientNet",
        _sized("b0", [], {"num_classes": 16}),
        _images(32),
        _classify,
    ),
}
_TOKENS = ("Qwen3 8B", "Gemma 3 4B", "Mamba 2 130M", "UMT5")
_ROWS = {"Whisper tiny": ("self_mask", "encoder_hidden_states")}

MODELS = [
    *_TUNIX,
    *(
        PublicModel(name, "bonsai", make, name in _TOKENS, _ROWS.get(name, ()))
        for name, make in _BONSAI.items()
    ),
    *(
        PublicModel(title, "maxtext", _maxtext(name, _SMALL_MAXTEXT), sequences=True)
        for title, name in (("Llama 3 8B", "llama3-8b"), ("Gemma 2 2B", "gemma2-2b"))
    ),
    PublicModel("DINOv2 B/16", "jimmy-vision", _jimmy),
]
