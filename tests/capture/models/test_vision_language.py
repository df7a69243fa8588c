"""Models of images and texts get both, with the values that they need."""

from typing import Any

import pytest

from planner.capture.models.registry import build_model
from planner.capture.models.transformers.contents import OBJECTS, known_contents
from planner.capture.session import record
from planner.errors import UsageError
from planner.jobs import Job, Loss, Mode
from planner.program.events import Alloc, Phase, PhaseStart, Trace
from tests.capture.models.test_transformers import AMPERE, hf_job, inputs_of

SMALL = (
    *("text_config__hidden_size=32", "text_config__num_hidden_layers=1"),
    *("text_config__num_attention_heads=2", "text_config__num_key_value_heads=2"),
    *("text_config__intermediate_size=64", "text_config__vocab_size=100"),
    *("vision_config__hidden_size=32", "vision_config__num_hidden_layers=2"),
    *("vision_config__num_attention_heads=2", "vision_config__intermediate_size=64"),
)


def sizes_of(trace: Trace, op: str) -> list[int]:
    """Sizes of the blocks of an operator."""
    return [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and trace.sites[event.site].op == op
    ]


def llava(*args: str, **options: Any) -> Job:
    """A small LLaVA."""
    return hf_job("LlavaForConditionalGeneration", *SMALL, "image_token_index=99", *args, **options)


@pytest.mark.parametrize(
    ("strategy", "tokens"), [("default", 576), ("full", 577)], ids=["patches", "with the class token"]
)
def test_a_text_has_room_for_the_image(strategy: str, tokens: int) -> None:
    """LLaVA's image of 336 pixels is 24 x 24 patches, in front of 128 tokens of text."""
    job = llava(f"vision_feature_select_strategy={strategy}")
    length = tokens + 128
    assert inputs_of(job) == [
        f"input_ids={length}:int64",
        "pixel_values=3x336x336",
        f"attention_mask={length}:int64",
        f"labels={length}:int64",
    ]


def test_image_tokens_stand_first_in_the_text() -> None:
    """As many as the image has features, so that the model accepts them."""
    job = llava(inputs=("pixel_values=3x56x56", "input_ids=20:int64"))
    text = known_contents(build_model(job), job, 2)["input_ids"]
    assert (text == 99).sum(1).tolist() == [16, 16]
    assert text.shape == (2, 20)


def test_a_model_without_its_image_says_so() -> None:
    """LLaVA-NeXT, whose images are cut into tiles, is planned for text, with a note."""
    job = hf_job("LlavaNextForConditionalGeneration", "text_config__num_hidden_layers=1")
    trace = record(job, 2, AMPERE)
    assert any("sees text alone" in note for note in trace.notes)


def test_the_scores_of_clip_grow_with_the_square_of_the_batch() -> None:
    """Each text is compared with each image: 3 x 3 and 5 x 5 scores of 4 bytes."""
    args = [f"{part}_config__num_hidden_layers=1" for part in ("text", "vision")]
    job = hf_job("CLIPModel", *args, inputs=("pixel_values=3x224x224",))
    for batch in (3, 5):
        assert 4 * batch**2 in sizes_of(record(job, batch, AMPERE), "aten.mm.default")


@pytest.mark.parametrize("model", ["CLIPModel", "SiglipModel"])
def test_evaluations_of_image_text_models_have_their_loss(model: str) -> None:
    """In the evaluation of a training, as in its steps, and not in inference."""
    args = [f"{part}_config__num_hidden_layers=1" for part in ("text", "vision")]
    job = hf_job(model, *args, inputs=("pixel_values=3x224x224",))
    losses = {"aten.nll_loss_forward.default", "aten.log_sigmoid_forward.default"}
    for options, phases in (
        ({"evaluate": True}, {Phase.FORWARD, Phase.EVALUATION}),
        ({"mode": Mode.INFER}, set()),
    ):
        trace = record(job.replace(**options), 3, AMPERE)
        phase, found = Phase.SETUP, set()
        for event in trace.events:
            if isinstance(event, PhaseStart):
                phase = event.phase
            elif isinstance(event, Alloc) and trace.sites[event.site].op in losses:
                found.add(phase)
        assert found == phases


def test_a_detector_is_trained_with_its_own_loss() -> None:
    """DETR gets COCO's usual image, its mask and the objects of each image; the distances of all boxes are
    compared."""
    job = hf_job("DetrForObjectDetection", "encoder_layers=1", "decoder_layers=1")
    assert inputs_of(job) == ["pixel_values=3x800x1066", "pixel_mask=800x1066:int64"]
    assert job.loop.loss is Loss.OUTPUT
    small = hf_job(
        "DetrForObjectDetection", "encoder_layers=1", "decoder_layers=1", inputs=("pixel_values=3x64x64",)
    )
    trace = record(small, 2, AMPERE)
    queries = 100
    assert 4 * (2 * queries) * (2 * OBJECTS) in sizes_of(trace, "aten._cdist_forward.default")
    assert any(f"each image has {OBJECTS} objects" in note for note in trace.notes)


def test_sam_gets_a_box_for_each_image() -> None:
    """A prompt is what a mask is made for."""
    assert inputs_of(hf_job("SamModel")) == ["pixel_values=3x1024x1024", "input_boxes=1x4"]


def test_segmentation_is_trained_with_masks_of_objects() -> None:
    """MaskFormer gets the masks and classes of the objects of each image, and gives its own loss."""
    job = hf_job("MaskFormerForInstanceSegmentation", inputs=("pixel_values=3x32x32",))
    assert (inputs_of(job), job.loop.loss) == (["pixel_values=3x32x32"], Loss.OUTPUT)
    contents = known_contents(build_model(job), job, 3)
    assert [one.shape for one in contents["mask_labels"]] == [(OBJECTS, 32, 32)] * 3
    assert [one.shape for one in contents["class_labels"]] == [(OBJECTS,)] * 3


def test_sizes_of_models_with_prompts_are_those_of_their_backbones() -> None:
    """SAM 2 sees images of 1024 pixels; Grounding DINO an image with a text."""
    assert inputs_of(hf_job("Sam2Model"))[0] == "pixel_values=3x1024x1024"
    names = [text.partition("=")[0] for text in inputs_of(hf_job("GroundingDinoForObjectDetection"))]
    assert names == ["input_ids", "pixel_values", "attention_mask", "pixel_mask"]


def test_an_input_whose_size_is_unknown_is_asked_for() -> None:
    """OneFormer's task is a text of its own."""
    with pytest.raises(UsageError, match="needs task_inputs, whose size is not known here; give one sample"):
        hf_job("OneFormerForUniversalSegmentation")


PATCHES = (
    *("text_config__hidden_size=256", "text_config__num_hidden_layers=1", "text_config__vocab_size=100"),
    *("text_config__num_attention_heads=2", "text_config__num_key_value_heads=2"),
    *("text_config__intermediate_size=64", "image_token_id=99", "vision_config__depth=1"),
)
SIZES = {
    "Qwen2VLForConditionalGeneration": ("embed_dim=32", "hidden_size=256", "num_heads=2"),
    "Qwen2_5_VLForConditionalGeneration": ("hidden_size=32", "out_hidden_size=256", "num_heads=2"),
    "Qwen3VLForConditionalGeneration": (
        *("hidden_size=32", "out_hidden_size=256", "num_heads=2", "deepstack_visual_indexes=[0]"),
    ),
}


def qwen(name: str, *inputs: str) -> Job:
    """A small Qwen-VL."""
    return hf_job(name, *PATCHES, *(f"vision_config__{one}" for one in SIZES[name]), inputs=inputs)


@pytest.mark.parametrize("name", SIZES)
def test_qwen_sees_an_image_as_a_list_of_patches(name: str) -> None:
    """The images of a batch are one list of patches, twice each since frames come in pairs,
    of which four make a token."""
    job = qwen(name, "pixel_values=3x112x224", "input_ids=64:int64")
    model = build_model(job)
    side = 16 if "Qwen3" in name else 14
    rows, columns = (2 * round(pixels / (2 * side)) for pixels in (112, 224))
    known = known_contents(model, job, 2)
    assert known["pixel_values"].shape == (2 * rows * columns, 3 * 2 * side**2)
    assert known["image_grid_thw"].tolist() == [[1, rows, columns]] * 2
    assert (known["input_ids"] == 99).sum(1).tolist() == [rows * columns // 4] * 2
    trace = record(job, 2, AMPERE)
    assert 4 * 2 * rows * columns * 3 * 2 * side**2 in {
        e.size_bytes for e in trace.events if isinstance(e, Alloc)
    }
    assert not any("sees text alone" in note for note in trace.notes)


def test_a_text_without_room_for_its_image_says_so() -> None:
    """An image of 448 pixels is 256 tokens of Qwen2-VL."""
    with pytest.raises(UsageError, match="takes 256 tokens of the text; give --input input_ids=384:int64"):
        inputs_of(qwen("Qwen2VLForConditionalGeneration", "input_ids=128:int64"))


def test_a_list_of_other_patches_is_refused() -> None:
    """A patch of Qwen2-VL is 1,176 numbers."""
    with pytest.raises(UsageError, match="takes an image, such as pixel_values=3x448x448"):
        inputs_of(qwen("Qwen2VLForConditionalGeneration", "pixel_values=100x1000"))
