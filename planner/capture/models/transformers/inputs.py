"""Complete the inputs of a transformers model.

The names of its forward method's arguments decide them. Inputs that the job names are unchanged. The mask and
the labels follow the length of the text, and the labels' shape follows the model's class.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from planner.capture.models.transformers.build import TransformersClass
from planner.capture.models.transformers.contents import (
    SEVERAL_IMAGES,
    image_tokens,
    is_detector,
    is_list_of_patches,
    takes_images_in_text,
    takes_masks,
    takes_patches,
)
from planner.errors import UsageError
from planner.jobs import Job, Loss, Mode, TensorSpec, nearest, shown

TEXT_TOKENS = 128
_DETECTED = (800, 1066)  # COCO's most frequent size, resized as DetrImageProcessor does
_SQUARE = (640, 640)  # the size to which RTDetrImageProcessor resizes
_OF_PATCHES = 448  # pixels a side, or 256 tokens, for Qwen2-VL, which takes images of any size
_BESIDE_TEXT = (
    "blip",
    "git",
    "grounding-dino",
    "mm-grounding-dino",
)  # models that attend from a text to a separate image
_OF_SQUARES = ("rt_detr", "d_fine", "deim")
AUDIO_SAMPLES = 160_000  # 10 s at 16 kHz
_TEXT, _IMAGE, _SOUND, _SPECTROGRAM = "input_ids", "pixel_values", "input_values", "input_features"
_MAIN = (_TEXT, _IMAGE, _SPECTROGRAM, _SOUND)
_PARTS = ("vision_config", "text_config", "audio_config", "encoder")  # configurations within a configuration
_LABELS = (
    *("labels", "start_positions", "end_positions", "next_sentence_label", "mask_labels", "class_labels"),
    "sentence_order_label",
)

# Ends of the names of classes whose labels are one for each token, or one for each sample.
_PER_TOKEN = (
    *("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification"),
    *("ForPreTraining", "ForCTC", "WithLMHeadModel", "ForSpeechSeq2Seq"),
)
_PER_SAMPLE = (
    *("ForSequenceClassification", "ForImageClassification", "ForVideoClassification"),
    *("ForAudioClassification", "ForMultipleChoice", "ForNextSentencePrediction"),
)


def complete_inputs(job: Job, choice: TransformersClass) -> Job:
    """Return the job with all inputs that the model needs, each with a keyword.

    Inputs of the job are kept, except labels outside of training. The loss becomes `sum` if the model returns
    no loss. Raises UsageError for inputs that the model does not take, and for required arguments without an
    input.
    """
    given = _by_keyword(job, choice)
    specs = {name: spec for name, spec in given.items() if job.loop.mode is Mode.TRAIN or name not in _LABELS}
    inputs = _main_inputs(choice, specs) | specs
    inputs |= _mask(choice, inputs)
    inputs |= _prompts(choice, inputs)
    name = choice.model_class.__name__
    of_objects = is_detector(name) or takes_masks(name)
    if job.loop.mode is Mode.TRAIN and job.loop.loss is Loss.OUTPUT and not of_objects:
        labels = _labels(choice, inputs)
        inputs |= {name: spec for name, spec in labels.items() if name not in inputs}
        if not labels and "return_loss" not in choice.parameters and not set(inputs) & set(_LABELS):
            job = job.replace(loss=Loss.SUM)
    inputs |= _decoder_inputs(choice, inputs)
    _check_required(choice, inputs)
    return job.replace(inputs=tuple(replace(spec, keyword=name) for name, spec in inputs.items()))


def _check_required(choice: TransformersClass, inputs: Mapping[str, TensorSpec]) -> None:
    """Raise UsageError if a required argument of the forward method has no input."""
    for name, parameter in choice.parameters.items():
        plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if plain and parameter.default is parameter.empty and name not in ("self", *inputs):
            raise UsageError(
                f"{choice.model_class.__name__}: needs {name}, whose size is not known here; give one sample "
                f"of it, such as --input {name}=77:int64"
            )


def _by_keyword(job: Job, choice: TransformersClass) -> dict[str, TensorSpec]:
    """Return the job's inputs, keyed by keyword.

    An input without a keyword is taken as a main input. Raises UsageError for a keyword that the model does
    not take, or that is given twice.
    """
    names = [name for name in choice.parameters if name not in ("self", "kwargs", "args")]
    given: dict[str, TensorSpec] = {}
    for spec in job.samples.inputs:
        name = spec.keyword or _main_of(choice, spec)
        if name not in names:
            near = nearest(name, names)
            hint = f"the nearest: {near}" if near else f"it takes {', '.join(names[:8])}"
            raise UsageError(f"--input {spec}: {choice.model_class.__name__} takes no {shown(name)}; {hint}")
        if name in given:
            raise UsageError(f"--input {spec}: {name} is given twice; name the others, as labels=128:int64")
        given[name] = spec
    return given


def _mains(choice: TransformersClass) -> list[str]:
    """Return the name of a model's main input (text, image or sound), or the names of text and image."""
    mains = [name for name in _MAIN if name in choice.parameters]
    if {_TEXT, _IMAGE} <= set(mains) and _takes_both(choice):
        return [_TEXT, _IMAGE]
    own = getattr(choice.model_class, "main_input_name", _TEXT)
    return [own] if own in mains else mains[:1]


def _takes_both(choice: TransformersClass) -> bool:
    """Return whether the model takes both an image and a text. The image may be separate or in the text."""
    is_known = choice.config.model_type in _BESIDE_TEXT or takes_images_in_text(choice.config)
    return "return_loss" in choice.parameters or is_known


def _main_of(choice: TransformersClass, spec: TensorSpec) -> str:
    """Return the name of the main input to which a tensor without a keyword belongs.

    Integers are for the text, other dtypes for another input. Raises UsageError if the model takes no such
    input.
    """
    mains = _mains(choice)
    is_text = "int" in spec.dtype
    fitting = [name for name in mains if (name == _TEXT) == is_text]
    if not fitting:
        example = "128:int64" if _TEXT in mains else str(_main_inputs(choice, {})[mains[0]])
        raise UsageError(
            f"--input {spec}: {choice.model_class.__name__} needs {', '.join(mains)}; write {example}"
        )
    return fitting[0]


def _main_inputs(choice: TransformersClass, given: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    if {"inputs_embeds", "encoder_outputs"} & set(given):
        return {}
    made = {_TEXT: _text, _IMAGE: _image, _SOUND: _sound, _SPECTROGRAM: _spectrogram}
    mains = _mains(choice)
    if takes_images_in_text(choice.config) and {_TEXT, _IMAGE} <= set(mains):
        return _image_in_text(choice, given)
    if not mains:
        raise UsageError(
            f"{choice.model_class.__name__}: its inputs are unknown; give them by keyword, such as "
            "--input input_ids=128:int64"
        )
    return {name: made[name](choice) for name in mains}


def _image_in_text(choice: TransformersClass, given: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the given or default text and image as inputs, and token types if the model needs them.

    A default text has `TEXT_TOKENS` tokens after the image's tokens. Raises UsageError for an image of a
    wrong shape, or a text that is too short for the image's tokens.
    """
    image = given.get(_IMAGE) or _image(choice)
    if takes_patches(choice.config) and not (
        len(image.shape) == 3 or is_list_of_patches(choice.config, image)
    ):
        raise UsageError(
            f"--input {image}: {choice.model_class.__name__} takes an image, such as pixel_values=3x448x448, "
            "which is cut into patches here, or the list of patches that its processor makes of one"
        )
    if choice.config.model_type in SEVERAL_IMAGES and len(image.shape) == 3:
        image = replace(image, shape=(1, *image.shape))
    text = given.get(_TEXT) or TensorSpec(((image_tokens(choice.config, image) or 0) + TEXT_TOKENS,), "int64")
    tokens = image_tokens(choice.config, image) or 0
    if text.shape and text.shape[-1] < tokens:
        raise UsageError(
            f"--input {text}: {choice.model_class.__name__}: {image} takes {tokens} tokens of the text; give "
            f"--input {_TEXT}={tokens + TEXT_TOKENS}:int64, or a smaller image"
        )
    inputs = {_TEXT: text, _IMAGE: image}
    if "token_type_ids" in choice.parameters and choice.config.model_type in ("paligemma", "gemma3"):
        inputs["token_type_ids"] = TensorSpec(text.shape, "int64")  # required for training
    return inputs


def _value(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first value that a configuration has under one of `names`, or else the default.

    Sub-configurations are searched too.
    """
    parts = [getattr(config, part, None) for part in _PARTS]
    for owner in (config, *parts):
        for name in names:
            value = getattr(owner, name, None)
            if value is not None:
                return value
    return default


def _text(choice: TransformersClass) -> TensorSpec:
    most = _value(choice.config, "max_position_embeddings", "n_positions", default=TEXT_TOKENS)
    length = min(TEXT_TOKENS, most) if isinstance(most, int) and most > 0 else TEXT_TOKENS
    if choice.model_class.__name__.endswith("ForMultipleChoice"):
        return TensorSpec((4, length), "int64")
    return TensorSpec((length,), "int64")


def _image(choice: TransformersClass) -> TensorSpec:
    is_bare = is_detector(choice.model_class.__name__)  # a convolutional backbone takes any image
    bare = _SQUARE if choice.config.model_type.startswith(_OF_SQUARES) else _DETECTED
    usual = 1024 if choice.config.model_type == "sam2" else 224
    usual = _OF_PATCHES if takes_patches(choice.config) else usual
    size = _value(choice.config, "image_size", default=bare if is_bare else usual)
    height, width = (size[-2], size[-1]) if isinstance(size, list | tuple) else (size, size)
    if isinstance(size, dict):
        height, width = size.get("height", 224), size.get("width", 224)
    channels = _value(choice.config, "num_channels", "in_channels", default=3)
    frames = _value(choice.config, "num_frames")
    shape = (channels, height, width)
    return TensorSpec((frames, *shape) if isinstance(frames, int) else shape)


def _sound(choice: TransformersClass) -> TensorSpec:
    bins, length = (_value(choice.config, name) for name in ("num_mel_bins", "max_length"))
    spectrogram = isinstance(bins, int) and isinstance(length, int) and not hasattr(choice.config, "conv_dim")
    return TensorSpec((length, bins) if spectrogram else (AUDIO_SAMPLES,))


def _spectrogram(choice: TransformersClass) -> TensorSpec:
    """Return a spectrogram input with two frames per encoder position. For Whisper it lasts 30 s."""
    bins = _value(choice.config, "num_mel_bins", "feature_size", default=80)
    positions = _value(choice.config, "max_source_positions", default=1500)
    return TensorSpec((bins, 2 * positions))


def _prompts(choice: TransformersClass, inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return a pixel mask for a detector, or a box prompt for a model that takes boxes, or {}.

    Returns {} if there is no image, if the model takes neither, or if the input is given.
    """
    name, image = choice.model_class.__name__, inputs.get(_IMAGE)
    if image is None:
        return {}
    if is_detector(name) and "pixel_mask" in choice.parameters and "pixel_mask" not in inputs:
        return {"pixel_mask": TensorSpec(image.shape[-2:], "int64")}
    prompts = ("input_points", "input_boxes", "input_masks")
    if "input_boxes" in choice.parameters and not set(prompts) & set(inputs):
        return {"input_boxes": TensorSpec((1, 4))}
    return {}


def _mask(choice: TransformersClass, inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the spec of an int64 attention mask of the text's shape, or {} if no mask is to be added.

    No mask is added if there is no text, the model takes no mask, or the inputs contain the mask already.
    """
    text = inputs.get(_TEXT)
    if text is None or "attention_mask" not in choice.parameters or "attention_mask" in inputs:
        return {}
    return {"attention_mask": _shaped_as(text)}


def _labels(choice: TransformersClass, inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the specs of the labels for which the model returns a loss, or {} if none are known."""
    name, text = choice.model_class.__name__, inputs.get(_TEXT)
    one = TensorSpec((), "int64")
    if name.endswith("ForQuestionAnswering"):
        return {"start_positions": one, "end_positions": one}
    if "labels" not in choice.parameters:
        return {}
    more = {key: one for key in ("next_sentence_label", "sentence_order_label") if key in choice.parameters}
    if name.endswith("ForSemanticSegmentation") and _IMAGE in inputs:
        return {"labels": _last_two(inputs[_IMAGE])}
    if name.endswith(_PER_SAMPLE):
        return {"labels": one}
    if name.endswith(_PER_TOKEN):
        return {"labels": _shaped_as(text)} | more
    return {}


def _shaped_as(text: TensorSpec | None) -> TensorSpec:
    """Return an int64 input of the text's shape, or of the default length if there is no text."""
    if text is None:
        return TensorSpec((TEXT_TOKENS,), "int64")
    return replace(text, keyword=None, dtype="int64")


def _last_two(image: TensorSpec) -> TensorSpec:
    """Return an int64 spec with an image's height and width. It is for labels of each pixel."""
    return TensorSpec(image.shape[-2:], "int64", smallest=image.smallest[-2:])


def _decoder_inputs(choice: TransformersClass, inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return decoder tokens of the text's shape, or {} if the model needs none.

    It needs none if it does not take them, or has labels or decoder inputs.
    """
    own = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
    if "decoder_input_ids" not in choice.parameters or any(name in inputs for name in own):
        return {}
    text = inputs.get(_TEXT)
    return {"decoder_input_ids": _shaped_as(text)}
