"""Complete the inputs and targets of diffusers' models.

Inputs are latents, timesteps, texts and other conditions. Sizes follow from the configuration, or else from
the pipeline of each model: images of 512 pixels for Stable Diffusion, of 1024 for later models. A text has
the number of tokens to which the pipeline pads it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from planner.capture.models.diffusers.build import DiffusersClass, choose
from planner.errors import UsageError
from planner.jobs import Job, Loss, Mode, TensorSpec, nearest, shown

Config = Mapping[str, Any]
Shapes = dict[str, TensorSpec]

CLIP_TOKENS = 77
MAIN = ("sample", "hidden_states", "x")


class Sample(NamedTuple):
    """The specs of one sample's inputs, by keyword, and the channel axis of the first, the main input."""

    inputs: Shapes
    channel_axis: int | None = 0  # None if the output has another shape, so that its sum is the loss


def complete_diffusers(job: Job, name: str, arguments: Mapping[str, Any]) -> Job:
    """Return the job with all inputs of the model, and a target for an MSE loss.

    The inputs are given by keyword. If the target's shape for an MSE loss is unknown, the loss becomes
    `Loss.SUM`. Raises UsageError for inputs that the model does not take, and if no input is given and the
    default inputs are unknown.
    """
    choice = choose(name, arguments)
    made = _sample_of(choice)
    given = _by_keyword(job, choice)
    if made is None and not given:
        example = "--input hidden_states=4096x64 --input timestep=scalar:int64"
        raise UsageError(
            f"{job.model.name}: its inputs are unknown; give one sample of each by keyword, such as {example}"
        )
    inputs = given if made is None else _resized(made.inputs, given, choice)
    ordered = tuple(replace(spec, keyword=keyword) for keyword, spec in inputs.items())
    job = job.replace(inputs=ordered)
    if job.loop.mode is not Mode.TRAIN or job.loop.loss is not Loss.MSE or job.samples.target is not None:
        return job
    main = next((inputs[keyword] for keyword in MAIN if keyword in inputs), None)
    if made is None or made.channel_axis is None or main is None:
        return job.replace(loss=Loss.SUM)
    return job.replace(target=_target(main, made.channel_axis, choice.config))


def _by_keyword(job: Job, choice: DiffusersClass) -> Shapes:
    given: Shapes = {}
    names = list(choice.inputs)
    for spec in job.samples.inputs:
        name = spec.keyword or names[0]
        if name.partition(".")[0] not in names:
            near = nearest(name, names)
            hint = f"the nearest: {near}" if near else f"it takes {', '.join(names[:8])}"
            raise UsageError(f"--input {spec}: {choice.model_class.__name__} takes no {shown(name)}; {hint}")
        if name in given:
            raise UsageError(f"--input {spec}: {name} is given twice; name the others")
        given[name] = spec
    return given


def _resized(made: Shapes, given: Shapes, choice: DiffusersClass) -> Shapes:
    """Return the default inputs, updated by the given inputs, with a ControlNet image to fit the latents."""
    latents, image = given.get("sample"), made.get("controlnet_cond")
    if latents is not None and image is not None and "controlnet_cond" not in given:
        given = given | {"controlnet_cond": _conditioning_image(choice.config, latents.shape)}
    return made | given


def _target(main: TensorSpec, channel_axis: int, config: Config) -> TensorSpec:
    """Return the target of an MSE loss: the main input's shape, but with the output's number of channels."""
    channels = config.get("out_channels") or config.get("in_channels") or main.shape[channel_axis]
    patch = config.get("patch_size")
    if _is_packed(config, main) and "out_channels" in config and isinstance(patch, int):
        channels *= patch**2  # Qwen-Image names the channels of a latent, and packs patches of it
    shape = list(main.shape)
    shape[channel_axis] = channels
    return TensorSpec(tuple(shape), main.dtype)


def _is_packed(config: Config, main: TensorSpec) -> bool:
    return len(main.shape) == 2 and config.get("patch_size", 1) != 1


def _sample_of(choice: DiffusersClass) -> Sample | None:
    for model_class in choice.model_class.__mro__:
        make = _SAMPLES.get(model_class.__name__)
        if make is not None:
            return make(choice.config)
    required = [name for name, one in choice.inputs.items() if one.default is one.empty]
    is_autoencoder = required == ["sample"] and hasattr(choice.model_class, "encode")
    return _autoencoder(choice.config) if is_autoencoder else None


# ---- one function for each kind


def _floats(*shape: int) -> TensorSpec:
    return TensorSpec(shape)


STEP = TensorSpec((), "int64")  # a step of the noise schedule
TIME = TensorSpec(())  # a time of flow matching, from 0 to 1


def _size(config: Config, default: int) -> tuple[int, int]:
    size = config.get("sample_size") or default
    return (size[-2], size[-1]) if isinstance(size, list | tuple) else (size, size)


def _latents(config: Config, default: int) -> TensorSpec:
    channels = config.get("in_channels") or 4
    return _floats(channels, *_size(config, default))


def _first(value: Any) -> int:
    """Return a width as an integer, or the first width of a list, which may be nested.

    A list has one width for each block.
    """
    while isinstance(value, list | tuple):
        value = value[0]
    return int(value)


def _unet(config: Config) -> Sample:
    inputs = {"sample": _latents(config, 64), "timestep": STEP}
    labels, kind = config.get("num_class_embeds"), config.get("class_embed_type")
    if labels is not None or kind == "timestep":
        inputs["class_labels"] = STEP
    return Sample(inputs)


def _conditional_unet(config: Config) -> Sample:
    inputs = _unet(config).inputs
    width = config.get("encoder_hid_dim") or config["cross_attention_dim"]
    inputs["encoder_hidden_states"] = _floats(CLIP_TOKENS, _first(width))
    if config.get("class_embed_type") == "projection":
        inputs["class_labels"] = _floats(config["projection_class_embeddings_input_dim"])
    if config.get("addition_embed_type") == "text_time":  # Stable Diffusion XL: pooled text, sizes and crop
        sizes = 6
        pooled = config["projection_class_embeddings_input_dim"] - sizes * config["addition_time_embed_dim"]
        inputs["added_cond_kwargs.text_embeds"] = _floats(pooled)
        inputs["added_cond_kwargs.time_ids"] = _floats(sizes)
    return Sample(inputs)


def _conditioning_image(config: Config, latents: tuple[int, ...]) -> TensorSpec:
    """Return the spec of a ControlNet's conditioning image for latents of the shape `latents`.

    The network's embedding halves the image between each of its widths and the next.
    """
    halvings = len(config.get("conditioning_embedding_out_channels") or (16, 32, 96, 256)) - 1
    channels = config.get("conditioning_channels") or 3
    return _floats(channels, *(size << halvings for size in latents[-2:]))


def _controlnet(config: Config) -> Sample:
    inputs = _conditional_unet(config).inputs
    inputs["controlnet_cond"] = _conditioning_image(config, inputs["sample"].shape)
    return Sample(inputs, None)


def _video_unet(config: Config) -> Sample:
    inputs = _conditional_unet(config).inputs
    channels, height, width = _latents(config, 32).shape
    return Sample(inputs | {"sample": _floats(channels, 16, height, width)})


def _stable_video(config: Config) -> Sample:
    channels, _, _ = _latents(config, 72).shape
    frames = config.get("num_frames") or 25
    inputs = {
        "sample": _floats(frames, channels, *_size(config, 72)),
        "timestep": STEP,
        "encoder_hidden_states": _floats(1, _first(config["cross_attention_dim"])),
        "added_time_ids": _floats(3),
    }
    return Sample(inputs, 1)


def _waveform(config: Config) -> Sample:
    return Sample({"sample": _floats(config["in_channels"], config["sample_size"]), "timestep": STEP})


def _dit(config: Config) -> Sample:
    return Sample({"hidden_states": _latents(config, 32), "timestep": STEP, "class_labels": STEP})


def _pixart(config: Config) -> Sample:
    size = _size(config, 128)[0]
    tokens = 120 if config.get("use_additional_conditions") or size < 128 else 300  # alpha, sigma
    width = config.get("caption_channels") or config["cross_attention_dim"]
    inputs = {
        "hidden_states": _latents(config, 128),
        "encoder_hidden_states": _floats(tokens, width),
        "timestep": STEP,
        "encoder_attention_mask": TensorSpec((tokens,), "int64"),
    }
    is_micro = config.get("use_additional_conditions")
    if is_micro or (is_micro is None and size == 128):  # pixart_transformer_2d.py
        inputs["added_cond_kwargs.resolution"] = _floats(2)
        inputs["added_cond_kwargs.aspect_ratio"] = _floats(1)
    return Sample(inputs)


def _sd3(config: Config) -> Sample:
    inputs = {
        "hidden_states": _latents(config, 128),
        "encoder_hidden_states": _floats(CLIP_TOKENS + 256, config["joint_attention_dim"]),
        "pooled_projections": _floats(config["pooled_projection_dim"]),
        "timestep": TIME,
    }
    return Sample(inputs)


def _flux(config: Config) -> Sample:
    """Return Flux's inputs for an image and a text.

    The image has 1024 x 1024 pixels, the text 512 tokens of T5. Each latent token stands for a patch of 16 x
    16 pixels.
    """
    inputs = {
        "hidden_states": _floats(4096, config["in_channels"]),
        "encoder_hidden_states": _floats(512, config["joint_attention_dim"]),
    }
    if config.get("pooled_projection_dim"):
        inputs["pooled_projections"] = _floats(config["pooled_projection_dim"])
    inputs["timestep"] = TIME
    if config.get("guidance_embeds"):
        inputs["guidance"] = TIME
    return Sample(inputs, 1)


def _controlled(sample: Sample) -> Sample:
    return Sample(sample.inputs | {"controlnet_cond": sample.inputs["hidden_states"]}, None)


def _chroma(config: Config) -> Sample:
    return Sample({**_flux(config).inputs, "attention_mask": TensorSpec((512 + 4096,), "bool")}, 1)


def _qwen_image(config: Config) -> Sample:
    inputs = _flux(config).inputs
    return Sample(inputs | {"encoder_hidden_states_mask": TensorSpec((512,), "int64")}, 1)


def _captioned(tokens: int, width_of: str, latents: int) -> Callable[[Config], Sample]:
    """Return a function that makes the inputs of a text-to-image transformer.

    The inputs are latents, a text of `tokens` tokens and a time. `width_of` is the configuration's key for
    the text's width; `latents` is the default size of the latents.
    """

    def sample(config: Config) -> Sample:
        text = _floats(tokens, config[width_of])
        return Sample({"hidden_states": _latents(config, latents), "encoder_hidden_states": text} | _TIMED)

    return sample


_TIMED = {"timestep": TIME}


def _masked(sample: Callable[[Config], Sample]) -> Callable[[Config], Sample]:
    def with_mask(config: Config) -> Sample:
        inputs = sample(config).inputs
        tokens = inputs["encoder_hidden_states"].shape[0]
        return Sample(inputs | {"encoder_attention_mask": TensorSpec((tokens,), "int64")})

    return with_mask


def _cogvideox(config: Config) -> Sample:
    """Return CogVideoX's inputs for a video and a text.

    These are latents of the video, the text and a timestep. By default the latents have one frame for each
    four frames of the video.
    """
    ratio = config.get("temporal_compression_ratio") or 4
    frames = (config["sample_frames"] - 1) // ratio + 1
    inputs = {
        "hidden_states": _floats(
            frames, config["in_channels"], config["sample_height"], config["sample_width"]
        ),
        "encoder_hidden_states": _floats(config.get("max_text_seq_length") or 226, config["text_embed_dim"]),
        "timestep": STEP,
    }
    return Sample(inputs, 1)


def _wan(config: Config) -> Sample:
    """Return Wan's inputs for a video and a text.

    These are latents of 81 frames of 480 x 832 pixels, a timestep and 512 text tokens.
    """
    inputs = {
        "hidden_states": _floats(config["in_channels"], 21, 60, 104),
        "timestep": STEP,
        "encoder_hidden_states": _floats(512, config["text_dim"]),
    }
    return Sample(inputs)


def _autoencoder(config: Config) -> Sample:
    return Sample({"sample": _floats(config.get("in_channels") or 3, *_size(config, 256))})


def _video_autoencoder(config: Config) -> Sample:
    height, width = config.get("sample_height") or 480, config.get("sample_width") or 832
    return Sample({"sample": _floats(config.get("in_channels") or 3, 17, height, width)})


def _quantizing_autoencoder(config: Config) -> Sample:
    """Return a quantizing autoencoder's image, with no channel axis, so that the loss is a sum.

    The model also returns a loss of the codes, so an MSE with a target does not apply.
    """
    return Sample(_autoencoder(config).inputs, None)


_SAMPLES: Mapping[str, Callable[[Config], Sample]] = {
    "UNet1DModel": _waveform,
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _conditional_unet,
    "UNet3DConditionModel": _video_unet,
    "UNetMotionModel": _video_unet,
    "UNetSpatioTemporalConditionModel": _stable_video,
    "ControlNetModel": _controlnet,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "SD3ControlNetModel": lambda config: _controlled(_sd3(config)),
    "FluxTransformer2DModel": _flux,
    "FluxControlNetModel": lambda config: _controlled(_flux(config)),
    "ChromaTransformer2DModel": _chroma,
    "QwenImageTransformer2DModel": _qwen_image,
    "SanaTransformer2DModel": _masked(_captioned(300, "caption_channels", 32)),
    "AuraFlowTransformer2DModel": _captioned(256, "joint_attention_dim", 64),
    "Lumina2Transformer2DModel": _masked(_captioned(256, "cap_feat_dim", 128)),
    "CogVideoXTransformer3DModel": _cogvideox,
    "WanTransformer3DModel": _wan,
    "VQModel": _quantizing_autoencoder,
    "AutoencoderKLCogVideoX": _video_autoencoder,
    "AutoencoderKLWan": _video_autoencoder,
}
