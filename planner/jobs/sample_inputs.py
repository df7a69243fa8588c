"""The default input, target, loss and arguments of models whose library declares none.

The model's task decides: the usual images for classifiers, crops for segmentation, clips for video, and for
MONAI volumes of 96 voxels a side with two classes.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from planner.jobs.job import Loss


class Sample(Struct, frozen=True):
    """The tensors of one sample, as texts for `parse_tensor_spec`, the loss and the model's arguments."""

    inputs: tuple[str, ...]
    target: str | None = None  # None if the loss has no target
    loss: Loss = Loss.CROSS_ENTROPY
    model_args: tuple[tuple[str, Any], ...] = ()


_CLASS = "scalar:int64"
_PHOTO = Sample(("3x224x224",), _CLASS)

# Patterns for the beginning of SOURCE:NAME, with samples; the first match counts. Images of detectors have
# the most frequent size of COCO. timm's models: see `planner.capture.models.registry.complete_by_library`.
_PATTERNS: tuple[tuple[str, Sample], ...] = (
    (r"torchvision:(quantization\.)?(quantized_)?inception_v3", Sample(("3x299x299",), _CLASS)),
    (
        r"torchvision:(detection\.|\w+_fpn|fcos_|retinanet_|ssd)",
        Sample(("3x480x640",), loss=Loss.SUM),  # in training the model returns its losses
    ),
    (r"torchvision:(segmentation\.|fcn_|deeplabv3_|lraspp_)", Sample(("3x520x520",), "520x520:int64")),
    (r"torchvision:(video\.)?(r3d|mc3|r2plus1d)_", Sample(("3x16x112x112",), _CLASS)),
    (r"torchvision:(video\.)?(s3d|mvit_|swin3d_)", Sample(("3x16x224x224",), _CLASS)),
    (r"torchvision:(optical_flow\.)?raft_", Sample(("3x368x496", "3x368x496"), "2x368x496", Loss.MSE)),
    (r"torchvision:", _PHOTO),
    (r"smp:DPT", Sample(("3x224x224",), "1x224x224", Loss.BCE_WITH_LOGITS)),
    (r"smp:", Sample(("3x256x256",), "1x256x256", Loss.BCE_WITH_LOGITS)),  # one class by default
)


def find_sample(model: str) -> Sample | None:
    """Return the default sample of SOURCE:NAME, or None if there is none.

    The library of some models declares the sample.
    """
    if model.startswith("monai:"):
        return _MONAI.get(model.removeprefix("monai:").lower())
    return next((sample for pattern, sample in _PATTERNS if re.match(pattern, model)), None)


# ---- MONAI: networks of monai.networks.nets, which take their sizes from the caller

_CUBE = (96, 96, 96)
_PLANE = (64, 64)
_PATCH = (16, 16, 16)
_3D = (("spatial_dims", 3),)
_IN_OUT = (("in_channels", 1), ("out_channels", 2))
_LEVELS = (("channels", (16, 32, 64, 128, 256)), ("strides", (2, 2, 2, 2)))
_STAGES = (("channels", (8, 16, 32)), ("strides", (2, 2, 2)))
_NO_WEIGHTS = (("pretrained", False),)
_CLASSES = (("num_classes", 2),)


def _on(
    sample: str, *arguments: tuple[tuple[str, Any], ...], target: str | None = None, **more: Any
) -> Sample:
    """Return a sample whose loss is cross-entropy if there is a target, else the sum of the outputs."""
    kind = Loss.CROSS_ENTROPY if target else Loss.SUM
    given = (*(pair for group in arguments for pair in group), *more.items())
    return Sample(tuple(sample.split()), target, kind, given)


_volume = partial(_on, "1x96x96x96", target="96x96x96:int64")  # for a network that segments a volume
_classes = partial(_on, "1x96x96x96", target=_CLASS)  # for a network that classifies a volume
_VOLUME = _volume(_3D, _IN_OUT)
_DENSE = _classes(_3D, _IN_OUT)
_SQUEEZED = _classes(_3D, _CLASSES, in_channels=1)
_RESIDUAL = _classes(_3D, _CLASSES, n_input_channels=1)
_EFFICIENT = (*_NO_WEIGHTS, *_3D, ("in_channels", 1), ("model_name", "efficientnet-b0"))
_BLOCKS = (
    *("r1_k3_s11_e1_i32_o16_se0.25", "r2_k3_s22_e6_i16_o24_se0.25", "r2_k5_s22_e6_i24_o40_se0.25"),
    *("r3_k3_s22_e6_i40_o80_se0.25", "r3_k5_s11_e6_i80_o112_se0.25", "r4_k5_s22_e6_i112_o192_se0.25"),
    "r1_k3_s11_e6_i192_o320_se0.25",
)
_SPATIAL_2D = (("spatial_dims", 2), ("in_channels", 1), ("out_channels", 1))
_LABELS = (("label_nc", 3),)
_TOKENS = (("num_tokens", 256), ("max_seq_len", 256))
_LAYERS = (("attn_layers_dim", 512), ("attn_layers_depth", 12), ("attn_layers_heads", 8))

_MONAI: Mapping[str, Sample] = {
    **dict.fromkeys(
        ("basicunet", "basicunetplusplus", "highresnet", "segresnet", "segresnetds", "vnet"), _VOLUME
    ),
    **dict.fromkeys(("unet", "attentionunet"), _volume(_3D, _IN_OUT, _LEVELS)),
    "autoencoder": _volume(_3D, _IN_OUT, channels=(16, 32, 64, 128), strides=(2, 2, 2, 2)),
    "ahnet": _on("1x128x128x64", _3D, _IN_OUT, target="128x128x64:int64"),
    "dynunet": _volume(
        _3D, _IN_OUT, kernel_size=(3, 3, 3, 3), strides=(1, 2, 2, 2), upsample_kernel_size=(2, 2, 2)
    ),
    "flexibleunet": _volume(_3D, _IN_OUT, backbone="efficientnet-b0"),
    "flexunet": _volume(_3D, _IN_OUT, backbone="efficientnet-b0"),
    "unetr": _volume(_IN_OUT, img_size=_CUBE),
    "swinunetr": _volume(_IN_OUT),
    "daf3d": _on("1x96x96x96", _IN_OUT),
    "hyenandunetr": _volume(_IN_OUT, hyena_stages=(True, True, True, True)),
    "segresnetvae": _on("1x96x96x96", _3D, _IN_OUT, input_image_size=_CUBE),
    "segresnetds2": _on("1x96x96x96", _3D, _IN_OUT),
    "highresblock": _on("16x48x48x48", _3D, in_channels=16, out_channels=16),
    **{f"mednext{size}": _VOLUME for size in ("", "s", "small", "b", "base", "m", "medium", "l", "large")},
    **dict.fromkeys(("densenet", "densenet121", "densenet169", "densenet201", "densenet264"), _DENSE),
    **{
        f"se{name}": _SQUEEZED
        for name in ("net154", "resnet50", "resnet101", "resnet152", "resnext50", "resnext101")
    },
    "senet": _classes(
        _3D, _CLASSES, in_channels=1, block="se_bottleneck", layers=(3, 4, 6, 3), groups=1, reduction=16
    ),
    **{f"resnet{depth}": _RESIDUAL for depth in (10, 18, 34, 50, 101, 152, 200)},
    "resnet": _classes(
        _3D, _CLASSES, n_input_channels=1, block="basic", layers=(2, 2, 2, 2),
        block_inplanes=(64, 128, 256, 512),
    ),
    **dict.fromkeys(
        ("resnetfeatures", "resnetencoder"),
        _on("1x96x96x96", _3D, _NO_WEIGHTS, model_name="resnet18", in_channels=1),
    ),
    "resnetblock": _on("64x24x24x24", _3D, in_planes=64, planes=64),
    "resnetbottleneck": _on("256x24x24x24", _3D, in_planes=256, planes=64),
    "efficientnet": _classes(_3D, _CLASSES, in_channels=1, blocks_args_str=_BLOCKS),
    "efficientnetbn": _classes(_EFFICIENT, _CLASSES),
    **dict.fromkeys(("efficientnetbnfeatures", "efficientnetencoder"), _on("1x96x96x96", _EFFICIENT)),
    "torchvisionfcmodel": _on("3x224x224", _CLASSES, _NO_WEIGHTS, target=_CLASS, model_name="resnet18"),
    "milmodel": _on("8x3x224x224", _CLASSES, _NO_WEIGHTS, target=_CLASS),
    **dict.fromkeys(
        ("vit", "vitautoenc", "maskedautoencodervit"),
        _on("1x96x96x96", in_channels=1, img_size=_CUBE, patch_size=_PATCH),
    ),
    "autoencoderkl": _on("1x64x64x64", _3D),
    "vqvae": _on("1x64x64x64", _3D, in_channels=1, out_channels=1),
    "varautoencoder": _on(
        "1x64x64", spatial_dims=2, in_shape=(1, *_PLANE), out_channels=1, latent_size=16,
        channels=(16, 32, 64), strides=(1, 2, 2),
    ),
    "spadeautoencoderkl": _on("1x64x64x64 3x64x64x64", _3D, _LABELS),
    "spadenet": _on("3x64x64", _SPATIAL_2D, _LABELS, input_shape=_PLANE, channels=(8, 16, 32), is_vae=False),
    "diffusionmodelunet": _on("1x64x64 timesteps=scalar:int64", _SPATIAL_2D),
    "spadediffusionmodelunet": _on("1x64x64 timesteps=scalar:int64 seg=3x64x64", _SPATIAL_2D, _LABELS),
    "controlnet": _on(
        "1x64x64 timesteps=scalar:int64 controlnet_cond=1x512x512", spatial_dims=2, in_channels=1
    ),
    "decoderonlytransformer": _on("256:int64", _TOKENS, _LAYERS),
    "classifier": _on("1x64x64", _STAGES, target=_CLASS, in_shape=(1, *_PLANE), classes=2),
    **dict.fromkeys(("discriminator", "critic"), _on("1x64x64", _STAGES, in_shape=(1, *_PLANE))),
    "regressor": _on("1x64x64", _STAGES, in_shape=(1, *_PLANE), out_shape=(1,)),
    "generator": _on(
        "64", latent_shape=(64,), start_shape=(64, 8, 8), channels=(64, 32, 16, 1), strides=(2, 2, 2, 1)
    ),
    "patchdiscriminator": _on("1x96x96x96", _3D, channels=32, in_channels=1),
    "multiscalepatchdiscriminator": _on(
        "1x96x96x96", _3D, channels=32, in_channels=1, num_d=2, num_layers_d=2
    ),
    "fullyconnectednet": _on("64", target=_CLASS, in_channels=64, out_channels=2, hidden_channels=(128, 128)),
    "varfullyconnectednet": _on(
        "64", in_channels=64, out_channels=64, latent_size=8, encode_channels=(32, 16),
        decode_channels=(16, 32),
    ),
    "globalnet": _on("2x96x96x96", _3D, in_channels=2, num_channel_initial=16, depth=3, image_size=_CUBE),
    "localnet": _on("2x96x96x96", _3D, in_channels=2, num_channel_initial=16, extract_levels=(0, 1, 2, 3)),
    "regunet": _on("2x96x96x96", _3D, in_channels=2, num_channel_initial=16, depth=3),
    "voxelmorph": _on("1x96x96x96 1x96x96x96"),
    "voxelmorphunet": _on(
        "2x96x96x96", _3D, in_channels=2, unet_out_channels=32, channels=(16, 32, 32, 32, 32, 32),
        final_conv_channels=(16, 16),
    ),
    **dict.fromkeys(("patchmerging", "patchmergingv2"), _on("48x48x48x48", _3D, dim=48)),
    "hovernet": _on("3x256x256"),
    "quicknat": _on("1x256x256"),
    "navit": _on(  # the size of ViT-B; each sample is a list of images
        "1x1x192x192x192", image_size=192, patch_size=16, in_channels=1, num_classes=2, hidden_size=768,
        mlp_dim=3072, num_layers=12, num_heads=12,
    ),
    "vista3d132": _on("1x96x96x96 class_vector=1:int64"),
}  # fmt: skip
