"""Models are built from every source, weigh nothing, and are those of the seed documents."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.capture.cuda.devices.placement import Placement
from planner.capture.models.meta_init import construct_on_meta, move_to_meta, parameters_on_meta
from planner.capture.models.registry import FINDERS, build_model, complete_by_library, find_constructor
from planner.capture.session import record
from planner.errors import ModelError, UsageError
from planner.jobs import SOURCES, Job, Loss, TensorSpec, resolve_job
from planner.jobs.files.catalogue import load_catalogue
from planner.program.extrapolation.fit import fit_traces

MIB = 2**20


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def count(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def write(folder: Path, text: str) -> Path:
    """A user's file."""
    file = folder / "my_net.py"
    file.write_text("from torch import nn\n" + text)
    return file


def test_every_source_has_a_finder() -> None:
    """Each source that a model's name may have, and a file, can be built from."""
    assert set(FINDERS) == {*SOURCES, "file"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tensor_1gib", 0),
        ("cnn", 985_914),  # the notebook's torchinfo
        ("vgg16_bn", 138_365_992 - 990 * 4097),  # torchvision's published count, less 990 of the 1000 outputs
        ("resnet50", 25_557_032 - 990 * 2049),
        ("vit_b_16", 86_567_656 - 990 * 769),
        ("unetr", 92_685_538),  # MONAI 1.6.1; not in the notebook
        ("basic_unet", 7_787_393),  # the forum thread
        ("smp_unet_resnet18", 14_321_937),  # the forum thread
        ("davenet_audio", 15_965_570),  # the notebook's sum, 60.90 MiB
        ("davenet_image", 14_714_688 + 512 * 1024 * 9 + 1024),  # VGG16's features and one convolution more
        ("conv_pair", 16 * 9 + 16 + 32 * 16 * 9 + 32),
    ],
)
def test_catalogue_models_are_the_seeds(name: str, parameters: int) -> None:
    """A catalogue model has as many parameters as its document states, all on meta."""
    model = build_model(resolve_job(name, load_catalogue()))
    assert count(model) == parameters
    assert all(tensor.is_meta for tensor in tensors(model))


def test_basic_encoder_weighs_what_the_thread_printed() -> None:
    """The encoder's tensors, in blocks of 512 bytes, take the 17.9 MB that the thread printed."""
    model = build_model(resolve_job("basic_encoder", load_catalogue()))
    blocks = sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors(model))
    assert round(blocks / MIB, 2) == 17.90


@pytest.mark.slow
def test_all_torchvision_classifiers_are_built_without_weights() -> None:
    """Every classification model of torchvision is built, wholly on meta, with torchvision's parameter count.

    RegNets read values in their constructor. The published count of GoogLeNet leaves its auxiliary heads out,
    that of ViT-H/14 is for images of 518 x 518.
    """
    build_model(Job.create(model="torchvision:alexnet"))
    from torchvision import models

    names = models.list_models(module=models)
    assert len(names) >= 80
    wrong = {}
    for name in names:
        model = build_model(Job.create(model=f"torchvision:{name}"))
        published = models.get_model_weights(name).DEFAULT.meta["num_params"]
        if count(model) != published or not all(tensor.is_meta for tensor in tensors(model)):
            wrong[name] = count(model) - published
    assert wrong == {"googlenet": 6_379_984, "vit_h_14": (16**2 - 37**2) * 1280}


@pytest.mark.parametrize(
    ("arguments", "norm", "trained"),
    [
        ((), "FrozenBatchNorm2d", 3),
        ((("weights", "COCO_V1"),), "FrozenBatchNorm2d", 3),
        ((("weights_backbone", None),), "BatchNorm2d", 5),
        ((("trainable_backbone_layers", 1),), "FrozenBatchNorm2d", 1),
    ],
)
def test_detectors_are_built_as_with_weights_but_none_are_read(
    arguments: tuple[tuple[str, object], ...], norm: str, trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a detector's backbone has weights: its norms are frozen and three of five stages trained."""
    load, fetch = nn.Module.load_state_dict, torch.hub.load_state_dict_from_url
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    model = build_model(Job.create(model="torchvision:fasterrcnn_resnet50_fpn", model_args=arguments))
    body = model.backbone.body
    assert type(body.bn1).__name__ == norm
    stages = (body.conv1, body.layer1, body.layer2, body.layer3, body.layer4)
    assert sum(any(weight.requires_grad for weight in stage.parameters()) for stage in stages) == trained
    assert all(weight.is_meta for weight in model.parameters())
    assert (nn.Module.load_state_dict, torch.hub.load_state_dict_from_url) == (load, fetch)


@pytest.mark.parametrize(
    ("model", "args", "parameters"),
    [
        ("torchvision:segmentation.fcn_resnet50", (("aux_loss", True),), 35_322_218),
        ("torchvision:resnet18", (("num_classes", 10),), 11_689_512 - 990 * 513),
        ("timm:resnet18.a1_in1k", (), 11_689_512),
        ("monai:UNETR", (("in_channels", 1), ("out_channels", 2), ("img_size", (64, 64, 64))), 92_685_538),
    ],
)
def test_named_models_are_built(model: str, args: tuple[tuple[str, object], ...], parameters: int) -> None:
    """A model is built by its name in torchvision, timm or MONAI, with arguments, and downloads nothing."""
    assert count(build_model(Job.create(model=model, model_args=args))) == parameters


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torchvision:resnet5", "torchvision has no model 'resnet5'; the nearest: resnet50, "),
        ("torchvision:nets.resnet50", "torchvision has no model 'nets.resnet50'; the nearest: resnet50, "),
        ("torchvision:x", "torchvision has no model 'x'; it has alexnet, convnext_base, "),
        ("timm:resnet5o", "timm has no model 'resnet5o'; the nearest: resnet50, "),
        ("monai:UNETRR", "monai has no model 'UNETRR'; the nearest: UNETR, "),
        ("smp:Unett", "smp has no model 'Unett'; the nearest: Unet, "),
        ("zoo:cnns", "zoo has no model 'cnns'; the nearest: CNN"),
        ("cnn", "model 'cnn': no source is named; write SOURCE:NAME or FILE.py:NAME"),
        ("none.py:Net", "model 'none.py:Net': there is no file 'none.py'; check the path"),
    ],
)
def test_unknown_name_lists_the_nearest(model: str, message: str) -> None:
    """A name that its source does not have is refused in one line, the nearest name first."""
    with pytest.raises(UsageError) as error:
        build_model(Job.create(model=model))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_library_that_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a library is not installed, the line states which extra brings it."""
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModelError) as error:
        build_model(Job.create(model="timm:resnet18"))
    assert str(error.value) == "timm is not installed; pip install 'gpu-batch-planner[timm]'"


def test_file_is_built_with_its_neighbours(tmp_path: Path) -> None:
    """FILE.py:NAME imports files beside it, inside the function as well, and leaves sys.path as it was."""
    (tmp_path / "my_width.py").write_text("WIDTH = 7\n")
    file = write(
        tmp_path, "def make(depth=1):\n    from my_width import WIDTH\n    return nn.Linear(WIDTH, depth)\n"
    )
    before = list(sys.path)
    model = build_model(Job.create(model=f"{file}:make", model_args=(("depth", 3),)))
    assert str(model) == "Linear(in_features=7, out_features=3, bias=True)"
    assert all(tensor.is_meta for tensor in tensors(model))
    assert sys.path == before


def test_files_of_two_folders_have_their_own_neighbours(tmp_path: Path) -> None:
    """Each file gets the module of that name beside it, whichever came before."""
    for width in (3, 5):
        folder = tmp_path / str(width)
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "widths.py").write_text(f"WIDTH = {width}\n")
        (folder / "model.py").write_text(
            "from torch import nn\nfrom parts import widths\n\ndef build():\n"
            "    from parts.widths import WIDTH\n    return nn.Linear(WIDTH, widths.WIDTH)\n"
        )
    constructors = {
        width: find_constructor(Job.create(f"{tmp_path}/{width}/model.py:build")) for width in (3, 5)
    }
    for width in (3, 5, 3):
        assert tuple(constructors[width]().weight.shape) == (width, width)


def test_model_that_a_file_has_made_is_taken(tmp_path: Path) -> None:
    """FILE.py:NAME may name a model instead of a callable; it is moved to meta."""
    model = build_model(Job.create(model=f"{write(tmp_path, 'net = nn.Linear(2, 3)')}:net"))
    assert [(tuple(tensor.shape), tensor.is_meta) for tensor in tensors(model)] == [
        ((3, 2), True),
        ((3,), True),
    ]


def test_lists_reach_the_constructor_as_lists(tmp_path: Path) -> None:
    """The tuples that a job holds are the lists that the user wrote again when the constructor is called."""
    file = write(
        tmp_path, "def make(sizes):\n    assert sizes == [2, [3]], sizes\n    return nn.Identity()\n"
    )
    assert isinstance(
        build_model(Job.create(model=f"{file}:make", model_args=(("sizes", (2, (3,))),))), nn.Identity
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "net = 1 / 0\n",
            "{file}:2: importing the file fails: ZeroDivisionError: division by zero; mend the file",
        ),
        ("raise SystemExit(2)\n", "{file}:2: importing the file fails: SystemExit: 2; mend the file"),
        (
            "import no_such\n",
            "{file}:2: importing the file fails: ModuleNotFoundError: No module named 'no_such'; "
            "install no_such, or remove that import for the plan",
        ),
        (
            "def net():\n    return 5\n",
            "{model}: gives an int, not an nn.Module; name a callable that returns one",
        ),
        (
            "def net():\n    raise ValueError('no\\nway')\n",
            "{model}: its constructor fails: ValueError: no; check --model-arg, or see the traceback "
            "with --debug",
        ),
        (
            "net = 5\n",
            "{model}: its constructor fails: TypeError: 'int' object is not callable; check --model-arg, "
            "or see the traceback with --debug",
        ),
    ],
)
def test_file_that_makes_no_model_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    """A file that fails, or gives no model, is reported in one line."""
    file = write(tmp_path, text)
    with pytest.raises(ModelError) as error:
        build_model(Job.create(model=f"{file}:net"))
    assert str(error.value) == problem.format(file=file.name, model=f"{file}:net")


def test_name_that_a_file_lacks_is_an_error(tmp_path: Path) -> None:
    """A callable that the file does not define is reported with the nearest that it does."""
    file = write(tmp_path, "def make_net():\n    return nn.Identity()\n")
    with pytest.raises(UsageError) as error:
        build_model(Job.create(model=f"{file}:makenet"))
    assert str(error.value) == "my_net.py has no model 'makenet'; the nearest: make_net"


def test_interrupts_pass(tmp_path: Path) -> None:
    """Ctrl-C while a model is built is no error of the model."""
    with pytest.raises(KeyboardInterrupt):
        build_model(Job.create(model=f"{write(tmp_path, 'def net(): raise KeyboardInterrupt')}:net"))


@pytest.mark.parametrize(
    ("model", "args", "inputs", "loss"),
    [
        ("timm:resnet18", (), ["3x224x224"], Loss.CROSS_ENTROPY),
        ("timm:inception_v3", (), ["3x299x299"], Loss.CROSS_ENTROPY),
        ("timm:vit_base_patch16_siglip_384", (), ["3x384x384"], Loss.SUM),  # features, no classes
        ("timm:vit_base_patch16_siglip_384", (("num_classes", 7),), ["3x384x384"], Loss.CROSS_ENTROPY),
        ("timm:vit_tiny_patch16_224", (("img_size", 96), ("in_chans", 1)), ["1x96x96"], Loss.CROSS_ENTROPY),
    ],
)
def test_timm_gives_the_image(
    model: str, args: tuple[tuple[str, object], ...], inputs: list[str], loss: Loss
) -> None:
    """A model of timm gets the image of its own configuration, and a loss that fits what it returns."""
    job = complete_by_library(resolve_job(model, {}, model_args=args))
    assert ([str(spec) for spec in job.samples.inputs], job.loop.loss) == (inputs, loss)


def test_image_that_is_given_counts() -> None:
    """An image that the user names is left as it is."""
    given = (TensorSpec((3, 160, 160)),)
    assert complete_by_library(resolve_job("timm:resnet18", {}, inputs=given)).samples.inputs == given


def test_libraries_know_the_inputs_of_an_evaluation_too() -> None:
    """The length of a text sets those of its mask and labels; other inputs than the model's are refused."""
    pytest.importorskip("transformers")
    job = complete_by_library(resolve_job("hf:GPT2LMHeadModel", {}, eval_input="512:int64"))
    names = ("input_ids", "attention_mask", "labels")
    assert job.loop.evaluate and job.loop.eval_input == tuple(f"{name}=512:int64" for name in names)
    image = resolve_job("timm:resnet18", {}, eval_input="3x512x512:uint8")
    with pytest.raises(UsageError, match="takes 3x224x224; give the same inputs, of other sizes"):
        complete_by_library(image)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "args", "mode"),
    [
        ("timm:sam2_hiera_tiny", (), "train"),
        ("monai:BasicUNet", (), "train"),
        ("monai:VQVAE", (), "train"),
        ("monai:SPADENet", (), "infer"),
        ("monai:MILModel", (), "infer"),
        ("smp:Segformer", (("encoder_name", "mit_b0"),), "train"),
        ("torchvision:optical_flow.raft_small", (), "infer"),
        ("torchvision:mvit_v1_b", (), "infer"),
    ],
)
def test_models_trace_with_the_defaults_of_their_source(
    model: str, args: tuple[tuple[str, object], ...], mode: str
) -> None:
    """A model of each kind traces with nothing but its name, and two batch sizes give one line for all."""
    job = resolve_job(model, {}, mode=mode, model_args=args).replace(steps=1)
    assert fit_traces(record(job, 2, (8, 6)), record(job, 3, (8, 6))).events


class ReadsBuffer(nn.Module):
    """Reads a value of a plain tensor while it is built, as torchvision's RegNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(int(torch.arange(5).max()), 3)
        self.register_buffer("scale", torch.ones(2))


class ReadsParameter(ReadsBuffer):
    """Reads a value of a parameter while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.first = float(self.layers.weight.flatten()[0])


class Tied(ReadsBuffer):
    """Two modules share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(4, 3))
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 4)
        self.one.weight = shared
        self.two.weight = shared


@pytest.mark.parametrize("kind", [ReadsBuffer, ReadsParameter, Tied])
def test_constructor_that_reads_values_is_built(kind: type[nn.Module]) -> None:
    """A constructor that reads values of tensors, parameters included, still gives a model on meta."""
    model = construct_on_meta(kind)
    assert isinstance(model, kind)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in kind().state_dict().items()
    }
    assert all(tensor.is_meta for tensor in tensors(model))


def test_shared_parameters_stay_shared() -> None:
    """A parameter of two modules is one tensor on meta as well, whichever way it got there."""
    with parameters_on_meta():
        redirected = Tied()
    moved = Tied()
    move_to_meta(moved, Placement())
    assert redirected.one.weight is redirected.two.weight
    assert moved.one.weight is moved.two.weight


def test_parameters_are_ordinary_again_afterwards() -> None:
    """The redirection of parameters ends with its context, also after an error."""
    with pytest.raises(ValueError, match="stop"), parameters_on_meta():
        raise ValueError("stop")
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_constructor_that_fails_is_called_once() -> None:
    """An error that does not come from meta tensors is not tried again on the CPU."""
    calls: list[str] = []

    def construct() -> object:
        calls.append(torch.get_default_device().type)
        raise ValueError("wrong argument")

    with pytest.raises(ValueError, match="wrong argument"):
        construct_on_meta(construct)
    assert calls == ["meta"]


@pytest.mark.slow
def test_torchvision_is_importable_beside_any_torch() -> None:
    """After `prepare_torchvision`, once or twice, torchvision can be imported in a fresh process."""
    code = (
        "from planner.capture.models.torchvision.shim import prepare_torchvision\n"
        "prepare_torchvision()\n"
        "prepare_torchvision()\n"
        "import torchvision\n"
        "prepare_torchvision()\n"
        "print(torchvision.models.resnet18.__name__)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("resnet18\n", "")
