"""Models of libraries are planned without a connection; code of the user's own may open some."""

import logging
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner import estimate
from planner.capture.models.offline import calling_libraries, check_fetching
from planner.errors import UsageError
from planner.jobs import Job

_connections: list[str] = []
_is_listening: list[bool] = []


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_listening and event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        _connections.append(f"{event} {arguments}")


@pytest.fixture(scope="module", autouse=True)
def _hook() -> None:
    """Hear of connections; a hook stays until the process ends."""
    sys.addaudithook(_listen)


@pytest.fixture
def connections() -> Any:
    _connections.clear()
    _is_listening.append(True)
    yield _connections
    _is_listening.clear()


MODELS = {
    "timm:resnet10t": "timm",
    "smp:Unet": "segmentation_models_pytorch",
    "monai:BasicUNet": "monai",
    "torchvision:resnet18": "torchvision",
    "hf:bert": "transformers",
}
INPUTS = {"monai:BasicUNet": "1x32x32x32", "smp:Unet": "3x64x64", "hf:bert": "input_ids=8:int64"}
FETCHING = [
    ("timm:resnet10t", "pretrained", True),
    ("timm:resnet10t", "checkpoint_path", "/somewhere"),
    ("timm:resnet10t", "pretrained_cfg", "resnet18.tv_in1k"),
    ("smp:Unet", "encoder_weights", "imagenet"),
    ("monai:DenseNet121", "pretrained", True),
    ("hf:bert", "attn_implementation", "somebody/kernels"),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_a_library_opens_no_connection(model: str, connections: list[str]) -> None:
    """Planning a model of each source, its import included, asks for no address and connects to none."""
    if find_spec(MODELS[model]) is None:
        pytest.skip(f"needs {MODELS[model]}")
    options: dict[str, Any] = {"input": INPUTS[model], "loss": "sum"} if model in INPUTS else {}
    if model.startswith("monai"):
        options["model_arg"] = ["spatial_dims=3"]
    if model == "torchvision:resnet18":
        options["model_arg"] = ["weights=DEFAULT"]
    assert estimate(model, 1, **options).estimate.process_bytes > 0
    assert connections == []


@pytest.mark.parametrize(("model", "name", "value"), FETCHING)
def test_an_argument_that_fetches_is_refused_by_name(
    model: str, name: str, value: object, connections: list[str]
) -> None:
    """Weights to download, to load from a path, or code of a hub: one line that names the argument."""
    with pytest.raises(UsageError, match=f"^{model}: its argument {name} (fetches weights|names code)"):
        estimate(model, 1, input="3x64x64", loss="sum", model_arg={name: value})
    assert connections == []


def test_arguments_that_fetch_nothing_are_taken() -> None:
    """The values that mean no weights are no reason to refuse."""
    check_fetching(Job.create("timm:resnet10t"), {"pretrained": False, "num_classes": 10})
    check_fetching(Job.create("smp:Unet"), {"encoder_weights": None})
    check_fetching(Job.create("net.py:Net"), {"pretrained": True})


def test_a_library_that_connects_is_refused(connections: list[str]) -> None:
    """Whatever a library tries while its model is planned, no address is asked for and none connected to."""
    with calling_libraries(Job.create("timm:resnet10t")):
        with pytest.raises(ConnectionRefusedError, match="opens no connection"):
            socket.create_connection(("127.0.0.1", 1))
        with socket.socket() as one, pytest.raises(ConnectionRefusedError):
            one.connect(("127.0.0.1", 1))
        with socket.socket() as one, pytest.raises(ConnectionRefusedError):
            one.connect_ex(("127.0.0.1", 1))
    assert connections == []


def test_a_file_of_the_users_own_may_connect(tmp_path: Path) -> None:
    """FILE.py is trusted, and reads its tokenizer or its data from where it likes."""
    with socket.create_server(("127.0.0.1", 0)) as server, calling_libraries(Job.create("net.py:Net")):
        socket.create_connection(server.getsockname()).close()


@pytest.mark.parametrize("model", ["diffusers:UNet2DModel", "net.py:Net"])
def test_libraries_report_errors_alone(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """What a library advises while its code is called is not part of a plan's output; errors are."""
    logger = logging.getLogger("torchao")
    with calling_libraries(Job.create(model)):
        logger.warning("no kernels for this GPU")
        logger.error("broken")
    logger.warning("after the plan")
    assert caplog.messages == ["broken", "after the plan"]
