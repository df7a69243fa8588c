"""Users' spellings of tensors, arguments and models, and the completion of a job from defaults."""

from pathlib import Path

import pytest

from planner.errors import DataFileError, UsageError
from planner.jobs import (
    CatalogueEntry,
    Job,
    Loss,
    Mode,
    Optimizer,
    TensorSpec,
    ZeroGrad,
    load_catalogue,
    parse_model_arg,
    parse_tensor_spec,
    resolve_job,
    split_model,
)

IMAGE = TensorSpec((3, 224, 224))
LABEL = TensorSpec((), "int64")
CATALOGUE = {
    "cnn": CatalogueEntry(
        Job.create(
            model="cnn",
            source="zoo:CNN",
            model_args=(("channels", 3), ("height", 224)),
            inputs=(IMAGE,),
            target=TensorSpec((10,)),
        ),
        batch=128,
        about="A test.",
    ),
    "encoder": CatalogueEntry(
        Job.create(
            model="encoder",
            source="zoo:BasicEncoder",
            inputs=(TensorSpec((1, 256, 256)),),
            loss=Loss.SUM,
            mode=Mode.FORWARD,
            steps=1,
        ),
        batch=4,
        about="A test.",
    ),
}


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("3x224x224", TensorSpec((3, 224, 224), "float32", None)),
        ("10", TensorSpec((10,), "float32", None)),
        ("128:int64", TensorSpec((128,), "int64", None)),
        ("scalar:int64", TensorSpec((), "int64", None)),
        ("scalar", TensorSpec((), "float32", None)),
        ("input_ids=128:int64", TensorSpec((128,), "int64", "input_ids")),
        ("mask=scalar:bool", TensorSpec((), "bool", "mask")),
        ("1x1099511627776:uint8", TensorSpec((1, 2**40), "uint8", None)),
    ],
)
def test_tensor_text_is_read_and_written(text: str, spec: TensorSpec) -> None:
    """A tensor's text is read whole, and writing the tensor gives the same text again."""
    assert (parse_tensor_spec(text), str(spec)) == (spec, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3x0x224", "tensor '3x0x224': a size is 0; every size of one sample must be at least 1"),
        ("-3x4", "tensor '-3x4': write positive sizes joined by x, such as 3x224x224, or scalar:int64"),
        ("3,4", "tensor '3,4': write positive sizes joined by x, such as 3x224x224, or scalar:int64"),
        ("3xx4", "tensor '3xx4': write positive sizes joined by x, such as 3x224x224, or scalar:int64"),
        ("", "tensor '': write positive sizes joined by x, such as 3x224x224, or scalar:int64"),
        (":int64", "tensor ':int64': write positive sizes joined by x, such as 3x224x224, or scalar:int64"),
        (
            "3x1099511627776",
            "tensor '3x1099511627776': more than 2**40 elements in one sample; make it smaller",
        ),
        ("9" * 5000, f"tensor '{'9' * 57}...': more than 2**40 elements in one sample; make it smaller"),
        (
            "1 2=3",
            "tensor '1 2=3': '1 2' is no argument name; write it like input_ids=128:int64, "
            "or batch.image=3x224x224 for an entry",
        ),
        (
            "=3",
            "tensor '=3': '' is no argument name; write it like input_ids=128:int64, "
            "or batch.image=3x224x224 for an entry",
        ),
        (
            "3:int",
            "tensor '3:int': unknown dtype 'int'; use one of float32, float64, float16, bfloat16, int64, "
            "int32, int16, int8, uint8, bool, complex64, complex128",
        ),
    ],
)
def test_senseless_tensor_is_refused(text: str, problem: str) -> None:
    """A tensor that cannot be is refused in one line that quotes it and states what to write."""
    with pytest.raises(UsageError) as error:
        parse_tensor_spec(text)
    assert str(error.value) == problem


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("num_classes=10", ("num_classes", 10)),
        ("rate=0.5", ("rate", 0.5)),
        ("rate=1e-3", ("rate", 0.001)),
        ("limit=.inf", ("limit", float("inf"))),
        ("aux_logits=false", ("aux_logits", False)),
        ("weights=null", ("weights", None)),
        ("weights=None", ("weights", None)),
        ('weights="None"', ("weights", "None")),
        ("weights=", ("weights", None)),
        ("norm=a=b", ("norm", "a=b")),
        ("img_size=[64, [1, x], 64]", ("img_size", (64, (1, "x"), 64))),
    ],
)
def test_model_argument_is_read(text: str, argument: tuple[str, object]) -> None:
    """A model argument is a name and a YAML scalar or list, lists being held as tuples."""
    assert parse_model_arg(text) == argument


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("num_classes", "--model-arg 'num_classes': write KEY=VALUE, such as num_classes=10"),
        ("a-b=1", "--model-arg 'a-b=1': write KEY=VALUE, such as num_classes=10"),
        ("lambda=1", "--model-arg 'lambda=1': write KEY=VALUE, such as num_classes=10"),
        ("a=[1", "--model-arg 'a=[1': the value is no YAML; quote it, or write a list as [1, 2]"),
        (
            "a=!!python/name:os.system",
            "--model-arg 'a=!!python/name:os.system': the value is no YAML; quote it, "
            "or write a list as [1, 2]",
        ),
        ("a=.nan", "--model-arg 'a=.nan': nan is no number; remove the argument, or write one"),
        (
            "a={b: 1}",
            "--model-arg 'a={b: 1}': a dict is neither a scalar nor a list; for an hf: model give the values "
            "within a one by one, as --model-arg a__NAME=VALUE",
        ),
        (
            "a=2024-01-01",
            "--model-arg 'a=2024-01-01': a date is neither a scalar nor a list; write a number, a text, "
            "or a list as [1, 2]",
        ),
    ],
)
def test_senseless_model_argument_is_refused(text: str, problem: str) -> None:
    """A model argument that is no KEY=VALUE of plain data is refused in one line; nothing is executed."""
    with pytest.raises(UsageError) as error:
        parse_model_arg(text)
    assert str(error.value) == problem


@pytest.mark.parametrize(
    "text",
    ["!!bool maybe", "!!timestamp soon", '!!int ""', "9" * 5000, "1" + ":1" * 250 + ".0", "&a [*a]"],
)
def test_values_on_which_yaml_stumbles_are_refused(text: str, tmp_path: Path) -> None:
    """Such a value is one line on the command line and in a file alike."""
    with pytest.raises(UsageError, match="the value is no YAML"):
        parse_model_arg(f"a={text}")
    file = tmp_path / "models.yaml"
    file.write_text(f"net:\n  source: torchvision:resnet18\n  about: A test.\n  args: {{a: {text}}}\n")
    with pytest.raises(DataFileError, match=r"line 4, net\.args\.a: "):
        load_catalogue(file)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("cnn", ("", "cnn")),
        ("torchvision:resnet50", ("torchvision", "resnet50")),
        ("torchvision:segmentation.fcn_resnet50", ("torchvision", "segmentation.fcn_resnet50")),
        ("nets/my_net.py:Net", ("file", "nets/my_net.py:Net")),
        ("C:\\nets\\net.py:Net", ("file", "C:\\nets\\net.py:Net")),
    ],
)
def test_model_name_is_taken_apart(model: str, parts: tuple[str, str]) -> None:
    """A model's name is a catalogue name, SOURCE:NAME or FILE.py:NAME, also where the path has a colon."""
    assert split_model(model) == parts


WHICH_OF_FILE = (
    "say which name in the file is the model, the training step or the Trainer, such as net.py:train_step"
)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("net.py", f"model 'net.py': {WHICH_OF_FILE}"),
        ("net.py:", f"model 'net.py:': {WHICH_OF_FILE}"),
        ("n\udce9.py:Net", r"model 'n\udce9.py:Net': the name is no UTF-8; rename the file"),
        ("timm:", "model 'timm:': say which model of timm: timm:NAME"),
        (
            "keras:resnet50",
            "model 'keras:resnet50': unknown source 'keras'; use torchvision:NAME, timm:NAME, hf:NAME, "
            "diffusers:NAME, "
            "monai:NAME, smp:NAME, nnunet:NAME, zoo:NAME or FILE.py:NAME",
        ),
        (
            "cnn2",
            "model 'cnn2' is unknown; the nearest in the catalogue: cnn; others are written SOURCE:NAME "
            "or FILE.py:NAME",
        ),
        (
            "resnet18",
            "model 'resnet18' is unknown; the catalogue has cnn, encoder; torchvision's own is written "
            "torchvision:resnet18",
        ),
        ("net.py:Net", "net.py:Net: there is no file 'net.py'; check the path"),
        ("monai:DiNTS", "monai:DiNTS: its inputs are unknown; give one sample, such as --input 3x224x224"),
    ],
)
def test_unusable_model_name_is_refused(model: str, problem: str) -> None:
    """A model that no source has, or that lacks its inputs, is refused with a line on what to write."""
    with pytest.raises(UsageError) as error:
        resolve_job(model, CATALOGUE)
    assert str(error.value) == problem


def test_catalogue_entry_is_taken_whole() -> None:
    """A catalogue name alone gives the entry's job."""
    assert resolve_job("cnn", CATALOGUE) == CATALOGUE["cnn"].job


def test_options_win_over_the_catalogue() -> None:
    """Each option replaces the entry's; model arguments are replaced one by one."""
    job = resolve_job(
        "cnn",
        CATALOGUE,
        model_args=[("height", 32), ("classes", 10)],
        inputs=[TensorSpec((3, 32, 224))],
        optimizer="adam",
        zero_grad="after-step",
        steps=5,
        mode=None,
    )
    assert job == Job.create(
        model="cnn",
        source="zoo:CNN",
        model_args=(("channels", 3), ("height", 32), ("classes", 10)),
        inputs=(TensorSpec((3, 32, 224)),),
        target=TensorSpec((10,)),
        optimizer=Optimizer.ADAM,
        zero_grad=ZeroGrad.AFTER_STEP,
        steps=5,
    )


@pytest.mark.parametrize(
    ("model", "sample", "target"),
    [
        ("torchvision:resnet50", "3x224x224", "scalar:int64"),
        ("torchvision:inception_v3", "3x299x299", "scalar:int64"),
        ("torchvision:segmentation.fcn_resnet50", "3x520x520", "520x520:int64"),
        ("torchvision:r3d_18", "3x16x112x112", "scalar:int64"),
        ("torchvision:swin3d_t", "3x16x224x224", "scalar:int64"),
        ("monai:UNet", "1x96x96x96", "96x96x96:int64"),
        ("monai:Unet", "1x96x96x96", "96x96x96:int64"),
        ("monai:DenseNet121", "1x96x96x96", "scalar:int64"),
    ],
)
def test_sources_have_defaults(model: str, sample: str, target: str) -> None:
    """torchvision's and MONAI's models come with a sample of what they are trained on."""
    job = resolve_job(model, CATALOGUE)
    assert (str(job.samples.inputs[0]), str(job.samples.target), job.loop.loss) == (
        sample,
        target,
        Loss.CROSS_ENTROPY,
    )


@pytest.mark.parametrize(
    ("model", "inputs", "target", "loss"),
    [
        ("smp:Unet", ("3x256x256",), "1x256x256", Loss.BCE_WITH_LOGITS),
        ("smp:DPT", ("3x224x224",), "1x224x224", Loss.BCE_WITH_LOGITS),
        ("torchvision:optical_flow.raft_small", ("3x368x496", "3x368x496"), "2x368x496", Loss.MSE),
        ("torchvision:quantized_inception_v3", ("3x299x299",), "scalar:int64", Loss.CROSS_ENTROPY),
        ("torchvision:detection.ssd300_vgg16", ("3x480x640",), "None", Loss.SUM),
        ("monai:VoxelMorph", ("1x96x96x96", "1x96x96x96"), "None", Loss.SUM),
        ("monai:DiffusionModelUNet", ("1x64x64", "timesteps=scalar:int64"), "None", Loss.SUM),
    ],
)
def test_sources_have_losses(model: str, inputs: tuple[str, ...], target: str, loss: Loss) -> None:
    """A model that is no classifier comes with its own loss, and with all the inputs that it takes."""
    job = resolve_job(model, CATALOGUE)
    assert (tuple(map(str, job.samples.inputs)), str(job.samples.target), job.loop.loss) == (
        inputs,
        target,
        loss,
    )


@pytest.mark.parametrize(
    ("model", "given", "target"),
    [
        ("smp:Unet", (TensorSpec((3, 512, 384)),), (1, 512, 384)),
        ("torchvision:segmentation.fcn_resnet50", (TensorSpec((3, 64, 32)),), (64, 32)),
        ("monai:UNet", (TensorSpec((1, 32, 48, 64)),), (32, 48, 64)),
        ("monai:DenseNet121", (TensorSpec((1, 32, 48, 64)),), ()),
        ("torchvision:resnet18", (TensorSpec((3, 512, 512)),), ()),
    ],
)
def test_maps_follow_the_input(model: str, given: tuple[TensorSpec, ...], target: tuple[int, ...]) -> None:
    """A target that is a map as large as the input is resized with it."""
    job = resolve_job(model, CATALOGUE, inputs=given)
    assert job.samples.target is not None
    assert (job.samples.inputs, job.samples.target.shape) == (given, target)


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({}, Loss.CROSS_ENTROPY),
        ({"loss": "sum", "target": None}, Loss.SUM),
        ({"target": TensorSpec((5, 64, 64))}, Loss.BCE_WITH_LOGITS),
    ],
)
def test_integers_as_a_target_are_classes(options: dict[str, object], loss: Loss) -> None:
    """smp's models have one class by default; a target of integers comes with the loss of several classes."""
    given = {"inputs": [TensorSpec((3, 64, 64))], "target": TensorSpec((64, 64), "int64"), **options}
    assert resolve_job("smp:Unet", CATALOGUE, **given).loop.loss is loss  # type: ignore[arg-type]


def test_monai_sets_cublas_workspace() -> None:
    """MONAI sets CUBLAS_WORKSPACE_CONFIG at its import, as of 1.6; the user's own text counts over it."""
    assert resolve_job("monai:UNet", CATALOGUE).environment.cublas_workspace_config == ":4096:8"
    given = resolve_job("monai:UNet", CATALOGUE, cublas_workspace_config=":16:8")
    assert given.environment.cublas_workspace_config == ":16:8"
    assert resolve_job("torchvision:resnet18", CATALOGUE).environment.cublas_workspace_config == ""


@pytest.mark.parametrize(
    ("code", "config"),
    [
        ("from monai.networks.nets import UNet", ":4096:8"),
        ("def net():\n    import monai\n    return monai.networks.nets.UNet()\n", ":4096:8"),
        ("import torch  # not monai\nimport monailabel", ""),
    ],
)
def test_a_file_that_imports_monai_has_its_cublas_workspace(code: str, config: str, tmp_path: Path) -> None:
    """The text of the file decides; a file that is not there is refused where it would be run."""
    (tmp_path / "net.py").write_text(code)
    job = resolve_job(f"{tmp_path}/net.py:net", CATALOGUE, inputs=(TensorSpec((3, 8, 8)),), loss=Loss.SUM)
    assert job.environment.cublas_workspace_config == config
    missing = resolve_job(
        f"{tmp_path}/none.py:net", CATALOGUE, inputs=(TensorSpec((3, 8, 8)),), loss=Loss.SUM
    )
    assert missing.environment.cublas_workspace_config == ""


def test_arguments_are_added_to_the_defaults() -> None:
    """The user's constructor arguments count over those that the source brings, key by key."""
    job = resolve_job("monai:UNet", CATALOGUE, model_args=(("out_channels", 5), ("num_res_units", 2)))
    assert job.model.args == (
        *(("spatial_dims", 3), ("in_channels", 1), ("out_channels", 5)),
        *(("channels", (16, 32, 64, 128, 256)), ("strides", (2, 2, 2, 2)), ("num_res_units", 2)),
    )


@pytest.mark.parametrize(
    "options", [{"mode": "infer"}, {"mode": "forward"}, {"loss": "sum"}, {"loss": "output"}]
)
def test_target_is_dropped_where_nothing_compares_with_it(options: dict[str, str]) -> None:
    """Without a loss that compares, no target is brought to the GPU."""
    assert resolve_job("cnn", CATALOGUE, **options).samples.target is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        ("cnn", {"steps": 0}, "--steps: '0' is refused; use a whole number from 1 to 100"),
        ("cnn", {"steps": 101}, "--steps: '101' is refused; use a whole number from 1 to 100"),
        ("cnn", {"steps": True}, "--steps: 'True' is refused; use a whole number from 1 to 100"),
        ("cnn", {"loss": "l\udce9.py:f"}, r"--loss: 'l\udce9.py:f': the name is no UTF-8; rename the file"),
        (
            "cnn",
            {"mode": "test"},
            "--mode: unknown value 'test'; use one of train, infer, forward, generate, step",
        ),
        (
            "cnn",
            {"loss": "sum", "target": LABEL},
            "cnn: loss sum compares with no target; remove one of the two",
        ),
        (
            "encoder",
            {"mode": "train", "loss": "cross_entropy"},
            "encoder: loss cross_entropy needs a target; give one sample, such as --target scalar:int64",
        ),
        (
            "torchvision:resnet18",
            {"loss": "mse"},
            "torchvision:resnet18: loss mse compares with floats, and the target scalar:int64 has integers; "
            "give floats, shaped as the output, such as --target 1000, or the loss of classes: --loss "
            "cross_entropy",
        ),
    ],
)
def test_senseless_options_are_refused(model: str, options: dict[str, object], problem: str) -> None:
    """Options that make no sense, alone or together, are refused in one line."""
    with pytest.raises(UsageError) as error:
        resolve_job(model, CATALOGUE, **options)  # type: ignore[arg-type]
    assert str(error.value) == problem


def test_jobs_can_be_keys() -> None:
    """A job is hashable, lists among its arguments included."""
    job = resolve_job("cnn", CATALOGUE, model_args=[parse_model_arg("sizes=[1, 2]")])
    assert {job: 1}[job] == 1
