"""Make values that transformers' models check in their inputs: image tokens in texts, objects in images.

A model refuses a text with too few image tokens, and a detector compares its boxes with lists of labels, so
sizes alone are not enough.
"""

from collections.abc import Callable, Mapping
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor

from planner.jobs import Job, Loss, Mode, TensorSpec

OBJECTS = 8  # per image; COCO has 7.7 on average (Lin et al., Microsoft COCO, 2014)
_TEXT, _IMAGE, _MASK = "input_ids", "pixel_values", "attention_mask"
_DETECTOR = "ForObjectDetection"
_SEGMENTERS = ("ForUniversalSegmentation", "ForInstanceSegmentation")


def known_contents(model: object, job: Job, batch: int) -> dict[str, Any]:
    """Return CPU values of inputs that a model checks (image tokens, patches, labels), by keyword."""
    config = getattr(model, "config", None)
    specs = {spec.keyword: spec for spec in job.samples.inputs}
    contents: dict[str, Any] = {}
    if takes_patches(config) and _IMAGE in specs and _TEXT in specs:
        contents |= _patches_and_types(config, specs, batch)
    if config is None or not hasattr(config, "model_type") or _IMAGE not in specs:
        return contents
    if _TEXT in specs:
        tokens, number = image_token(config), image_tokens(config, specs[_IMAGE])
        if tokens is not None and number is not None:
            text = torch.zeros((batch, *specs[_TEXT].shape), dtype=getattr(torch, specs[_TEXT].dtype))
            text[:, :number] = tokens
            contents[_TEXT] = text
    if job.loop.mode is not Mode.TRAIN or job.loop.loss is not Loss.OUTPUT:
        return contents
    name = type(model).__name__
    if is_detector(name):
        contents["labels"] = [_objects() for _ in range(batch)]
    elif takes_masks(name):
        size = specs[_IMAGE].shape[-2:]
        contents["mask_labels"] = [torch.ones(OBJECTS, *size) for _ in range(batch)]
        contents["class_labels"] = [torch.zeros(OBJECTS, dtype=torch.int64) for _ in range(batch)]
    return contents


def _patches_and_types(config: Any, specs: Mapping[str | None, TensorSpec], batch: int) -> dict[str, Any]:
    """Return the inputs that Qwen2-VL's processor makes for one image per sample.

    The inputs are the patches of all images in one list, each image's rows and columns of patches, the type
    of each token (1 for an image's), and the attention mask if the job has one.
    """
    image, text = specs[_IMAGE], specs[_TEXT]
    rows, columns = _grid(config, image)
    of_type = torch.zeros((batch, *text.shape), dtype=torch.int64)
    of_type[:, : image_tokens(config, image)] = 1
    grid = torch.tensor([[1, rows, columns]] * batch)
    patches = torch.empty(batch * rows * columns, _patch_values(config), dtype=getattr(torch, image.dtype))
    known = {_IMAGE: patches, "image_grid_thw": grid, "mm_token_type_ids": of_type}
    return known | ({_MASK: torch.ones_like(of_type)} if _MASK in specs else {})


def _grid(config: Any, image: TensorSpec) -> tuple[int, int]:
    """Return the rows and columns of an image's patches, which are multiples of the merge size.

    The sides of an image are rounded to them. A list of patches gets the squarest grid.
    """
    merged = config.vision_config.spatial_merge_size
    if len(image.shape) == 3:
        of_tokens = merged * config.vision_config.patch_size
        height, width = (max(1, round(side / of_tokens)) for side in image.shape[-2:])
        return height * merged, width * merged
    tokens = image.shape[0] // merged**2
    rows = next(one for one in range(isqrt(tokens), 0, -1) if tokens % one == 0)
    return rows * merged, tokens // rows * merged


def _patch_values(config: Any) -> int:
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)


def is_list_of_patches(config: Any, image: TensorSpec) -> bool:
    """Return whether an input has the shape of Qwen2-VL patches.

    The patches must merge without a remainder.
    """
    merged = config.vision_config.spatial_merge_size**2
    return image.shape[1:] == (_patch_values(config),) and image.shape[0] % merged == 0


def takes_patches(config: Any) -> bool:
    """Return whether a model takes images as lists of patches.

    The Qwen-VL models do, with the grids of the patches.
    """
    return getattr(config, "model_type", "") in _OF_PATCHES


def is_detector(name: str) -> bool:
    """Return whether a class of this name is a detector. A detector's labels are a dict for each image."""
    return name.endswith(_DETECTOR)


def takes_masks(name: str) -> bool:
    """Return whether a class of this name is trained on masks.

    Its labels are two lists: each image's masks and its classes.
    """
    return name.endswith(_SEGMENTERS)


def _objects() -> dict[str, Tensor]:
    """Return a detector's labels for one image: classes, and boxes with relative centres and sizes."""
    place = torch.arange(1, OBJECTS + 1) / (OBJECTS + 1)
    size = (1 + torch.arange(OBJECTS) % 4) / 16
    return {
        "class_labels": torch.zeros(OBJECTS, dtype=torch.int64),
        "boxes": torch.stack((place, place, size, size), 1),
    }


def image_token(config: Any) -> int | None:
    """Return the token id of image parts in a text, or None if there is none."""
    for name in ("image_token_id", "image_token_index"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def image_tokens(config: Any, image: TensorSpec) -> int | None:
    """Return the number of text tokens for a sample's images, or None if it is unknown."""
    count = _TOKENS.get(getattr(config, "model_type", ""))
    if count is None or takes_patches(config):
        return None if count is None else count(config, image)
    return prod(image.shape[:-3]) * count(config, image)


def _patches(config: Any, image: TensorSpec) -> int:
    patch = config.vision_config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else patch
    return (image.shape[-2] // height) * (image.shape[-1] // width)


def _of_llava(config: Any, image: TensorSpec) -> int:
    whole = getattr(config, "vision_feature_select_strategy", "default") == "full"
    return _patches(config, image) + whole  # with the class token


def _of_grid(config: Any, image: TensorSpec) -> int:
    return prod(_grid(config, image)) // int(config.vision_config.spatial_merge_size) ** 2


_OF_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_TOKENS: Mapping[str, Callable[[Any, TensorSpec], int]] = {
    **dict.fromkeys(_OF_PATCHES, _of_grid),
    "llava": _of_llava,
    "vipllava": _patches,
    "paligemma": _patches,
    "gemma3": lambda config, image: int(config.mm_tokens_per_image),
    "internvl": lambda config, image: int(_patches(config, image) * config.downsample_ratio**2),
    "blip-2": lambda config, image: int(config.num_query_tokens),
    "idefics3": lambda config, image: _patches(config, image) // config.scale_factor**2,
    "smolvlm": lambda config, image: _patches(config, image) // config.scale_factor**2,
    "aya_vision": lambda config, image: _patches(config, image) // config.downsample_factor**2,
}
SEVERAL_IMAGES = ("idefics3", "smolvlm")  # models whose samples hold a list of images


def takes_images_in_text(config: Any) -> bool:
    """Return whether a model takes images as tokens of its text.

    The model type in its configuration decides.
    """
    return getattr(config, "model_type", "") in _TOKENS
