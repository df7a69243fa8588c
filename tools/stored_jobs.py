"""The jobs whose convolutions have stored answers: common models, and the options that differ."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

Options = dict[str, Any]
_PLANS = Path(__file__).parents[1] / "tests/programs/nnunet"
_EXTENTS = (64, 96, 128)
_UNET = {"channels": [16, 32, 64, 128, 256], "strides": [2, 2, 2, 2]}
_WIDE_UNET = {"channels": [32, 64, 128, 256, 512], "strides": [2, 2, 2, 2]}
_DYN_UNET = {"kernel_size": [3] * 5, "strides": [1, 2, 2, 2, 2], "upsample_kernel_size": [2] * 4}
_NNU_NET = {
    **{"kernel_size": [3] * 6, "strides": [1, 2, 2, 2, 2, 2], "upsample_kernel_size": [2] * 5},
    **{"filters": [32, 64, 128, 256, 320, 320], "deep_supervision": False},
}
# MONAI's networks with their own arguments, beside channels of the input and classes.
_VOLUMES: tuple[tuple[str, Options, int, int], ...] = (
    ("BasicUNet", {}, 1, 2),
    ("BasicUNet", {}, 4, 3),
    ("UNet", {**_UNET, "num_res_units": 2}, 1, 2),
    ("UNet", {**_WIDE_UNET, "num_res_units": 2}, 1, 14),
    ("UNet", {**_UNET, "num_res_units": 0}, 4, 3),
    ("SegResNet", {"init_filters": 8}, 1, 2),
    ("SegResNet", {"init_filters": 16}, 4, 3),
    ("SegResNet", {"init_filters": 32}, 1, 14),
    ("DynUNet", _DYN_UNET, 1, 3),
    ("DynUNet", _NNU_NET, 4, 3),
    ("VNet", {}, 1, 2),
    ("AttentionUnet", {"channels": [16, 32, 64, 128], "strides": [2, 2, 2]}, 1, 2),
    ("AttentionUnet", {"channels": [32, 64, 128, 256, 512], "strides": [2, 2, 2, 2]}, 4, 3),
    ("UNETR", {}, 1, 14),
    ("UNETR", {}, 4, 3),
    ("SwinUNETR", {"feature_size": 24}, 1, 14),
    ("SwinUNETR", {"feature_size": 48}, 1, 14),
    ("SwinUNETR", {"feature_size": 48}, 4, 3),
)
# Frames and extent of the clips of torchvision's video models.
_CLIPS = ((16, 112), (8, 112), (32, 112), (16, 224))
_VIDEO_MODELS = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")
# The patches that nnU-Net's planner gives to public datasets for 8 to 40 GB.
_PATCHES = (
    *((128, 128, 128), (96, 160, 160), (64, 192, 192), (80, 192, 160), (112, 160, 128), (160, 128, 112)),
    *((64, 192, 160), (64, 160, 160), (80, 160, 160), (56, 192, 160), (48, 192, 192), (40, 56, 40)),
    *((96, 96, 96), (64, 64, 64), (160, 160, 160), (96, 224, 192), (112, 256, 256), (160, 192, 160)),
    *((192, 192, 192), (128, 320, 320)),
)
_THICK_PATCHES = (
    (20, 320, 256),
    (20, 256, 224),
    (28, 256, 256),
    (16, 320, 320),
    (24, 320, 320),
    (40, 224, 224),
)


def volume_jobs() -> Iterator[tuple[str, Options]]:
    """Yield the model and the options of each job with three-dimensional convolutions."""
    for name, (frames, extent) in product(_VIDEO_MODELS, _CLIPS):
        yield f"torchvision:{name}", {"input": f"3x{frames}x{extent}x{extent}", "target": "scalar:int64"}
    for (name, own, channels, classes), extent in product(_VOLUMES, _EXTENTS):
        yield f"monai:{name}", _monai_options(name, own, channels, classes, extent)
    yield from map(_patch_job, product(("SizesPlans", "SizesResEncPlans"), ("3d_fullres",), _PATCHES))
    yield from map(_patch_job, product(("SizesPlans",), ("3d_thick",), _THICK_PATCHES))


def _monai_options(name: str, own: Options, channels: int, classes: int, extent: int) -> Options:
    arguments = {"in_channels": channels, "out_channels": classes, **own}
    if "UNETR" not in name:
        arguments["spatial_dims"] = 3
    if name == "UNETR":
        arguments["img_size"] = extent
    extents = "x".join([str(extent)] * 3)
    target = f"{classes}x{extents}"
    return {
        "input": f"{channels}x{extents}",
        "target": target,
        "loss": "bce_with_logits",
        "model_arg": arguments,
    }


def _patch_job(chosen: tuple[str, str, tuple[int, int, int]]) -> tuple[str, Options]:
    plans, configuration, patch = chosen
    arguments = {"configuration": configuration, "patch_size": list(patch), "replan": True}
    return f"nnunet:{_PLANS / plans}.json", {"model_arg": arguments}


def classifier_jobs() -> Iterator[tuple[str, Options]]:
    """Yield torchvision's classifiers, each with its own options."""
    from planner.capture import prepare_torchvision

    prepare_torchvision()
    import torchvision

    for name in torchvision.models.list_models(module=torchvision.models):
        yield f"torchvision:{name}", {}


# Networks as people write them, by the names in `own_networks.py`: extents of images, and what differs.
_OWN_NETWORKS = Path(__file__).parents[1] / "benchmarks/emulated/own_networks.py"
_SMALL, _MIDDLE, _LARGE = (28, 32, 64), (96, 128), (224, 256)
_OWN: tuple[tuple[str, tuple[int, ...], Options], ...] = (
    *(("classifier", _SMALL, {"depth": 3, "kernel": kernel, "twice": True}) for kernel in (3, 5)),
    *(("classifier", _SMALL, {"depth": 3, "kernel": kernel}) for kernel in (3, 5)),
    *(("classifier", _MIDDLE + _LARGE, {"depth": 5, "twice": twice}) for twice in (True, False)),
    *(("autoencoder", _SMALL, {"depth": 3, "kernel": kernel}) for kernel in (3, 4)),
    *(("autoencoder", _MIDDLE + _LARGE, {"depth": 4, "kernel": kernel}) for kernel in (3, 4)),
    ("discriminator", (32,), {"depth": 3}),
    ("discriminator", (64, *_MIDDLE, *_LARGE), {"depth": 4}),
    *(("generator", (1,), {"depth": depth}) for depth in (3, 4, 5)),
    ("UNet", _SMALL[1:], {"depth": 3}),
    ("UNet", _MIDDLE + _LARGE, {"depth": 4}),
    ("UNet", (512,), {"depth": 4}),
    ("residual_classifier", _SMALL, {"depth": 3}),
    ("residual_classifier", _SMALL[1:], {"depth": 4}),
    *(("gated_restorer", (128, 256), {"depth": 3}), ("transposed_restorer", (128, 256), {"depth": 3})),
    ("Detector", (320, 640), {"blocks": 2}),
    *(("restorer", _SMALL + _MIDDLE + _LARGE, {"depth": 8, "kernel": kernel}) for kernel in (3, 9)),
    ("translator", _MIDDLE + _LARGE, {"depth": 6}),
)
_WIDTHS = (16, 32, 64)
_LATENT = 100


def own_jobs() -> Iterator[tuple[str, Options]]:
    """Yield networks as people write them, with usual widths and extents."""
    for (name, extents, own), channels, width in product(_OWN, (1, 3), _WIDTHS):
        for extent in extents:
            of_input = _LATENT if name == "generator" else channels
            yield (
                f"{_OWN_NETWORKS}:{name}",
                {
                    "input": f"{of_input}x{extent}x{extent}",
                    "loss": "sum",
                    "model_arg": {"channels": channels, "width": width, **own},
                },
            )
    for channels, width, length, kernel in product((1, 3, 12), _WIDTHS[1:], (128, 1024, 16000), (3, 7)):
        own = {"channels": channels, "width": width, "depth": 5, "kernel": kernel}
        yield (
            f"{_OWN_NETWORKS}:sequence_classifier",
            {"input": f"{channels}x{length}", "loss": "sum", "model_arg": own},
        )


# Torchvision's classifiers at extents that people train at; networks of 101 layers have the shapes of 50.
_EXTENTS_OF_IMAGES = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640)
_CLASSIFIERS = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "vgg16_bn", "convnext_tiny")
_LARGE_CLASSIFIERS = ("resnet18", "resnet50")  # at extents of small and of large images
# Segmentation by encoders of torchvision's classifiers, at their usual extents.
_SEGMENTATION: tuple[tuple[str, Options], ...] = (
    ("torchvision:deeplabv3_resnet50", {}),
    ("torchvision:fcn_resnet50", {}),
    *(
        ("smp:Unet", {"encoder_name": name, "classes": 2})
        for name in ("resnet34", "resnet50", "efficientnet-b0")
    ),
    ("smp:DeepLabV3Plus", {"encoder_name": "resnet50", "classes": 19}),
    ("smp:FPN", {"encoder_name": "resnet34", "classes": 2}),
)
_IMAGES = ((256, 256), (320, 320), (512, 512), (512, 1024))
_PATCHES_OF_IMAGES = (128, 192, 256, 384)  # that Restormer is trained on, one size after the other
# Diffusion: the UNet of pixels, that of latents, and the autoencoder; one sample of each.
_AUTOENCODER = {
    **{"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 4},
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
_DIFFUSION: tuple[tuple[str, Options], ...] = (
    *(("diffusers:UNet2DModel", {"input": f"3x{extent}x{extent}"}) for extent in (32, 64, 128)),
    *(("diffusers:UNet2DConditionModel", {"model_arg": {"sample_size": extent}}) for extent in (32, 64)),
    *(
        ("diffusers:AutoencoderKL", {"input": f"3x{extent}x{extent}", "model_arg": _AUTOENCODER})
        for extent in (256, 512)
    ),
)


def sized_jobs() -> Iterator[tuple[str, Options]]:
    """Yield common models at the extents that people train them at, beside their own."""
    for name, extent in product(_CLASSIFIERS, _EXTENTS_OF_IMAGES):
        if name in _LARGE_CLASSIFIERS or 128 < extent < 640:
            yield f"torchvision:{name}", {"input": f"3x{extent}x{extent}"}
    for (name, arguments), (height, width) in product(_SEGMENTATION, _IMAGES):
        classes = arguments.get("classes", 21)
        target = {
            "input": f"3x{height}x{width}",
            "target": f"{height}x{width}:int64",
            "loss": "cross_entropy",
        }
        yield name, {**target, "model_arg": {"classes": classes, **arguments} if "smp" in name else {}}
    yield from _DIFFUSION
    for extent in _PATCHES_OF_IMAGES:
        own = {"channels": 3, "width": 48, "depth": 3}
        options = {"input": f"3x{extent}x{extent}", "loss": "sum", "model_arg": own}
        yield f"{_OWN_NETWORKS}:transposed_restorer", options
