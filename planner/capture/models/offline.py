"""Refuse network connections while a library's model is planned.

Values of weights do not decide memory, so weights need not be fetched.
A model name in a file from somebody else must not cause a connection to an address; a name on the command
line needs no connection either. The user's own code, FILE.py, is trusted and may connect.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from planner.capture.models.libraries import quiet
from planner.capture.patching import all_patched, patched
from planner.errors import UsageError
from planner.jobs import SOURCES, Job, split_model

_FETCHING = (  # arguments that make constructors fetch weights, or load them from a path, if they are set
    *("pretrained", "pretrained_url", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path"),
    *("encoder_weights", "pretrained_model_name_or_path", "cache_dir"),
)
_HUB_CODE = ("attn_implementation", "_attn_implementation", "experts_implementation")
_MAY_FETCH = ("timm", "smp", "monai", "hf", "diffusers")  # torchvision's weights are named and left unread


@contextmanager
def calling_libraries(job: Job) -> Iterator[None]:
    """Silence libraries' logs inside the context, and refuse connections if the model is from a library.

    Log messages of errors are kept. Unix sockets may still be connected.
    """
    with quiet():
        if split_model(job.model.origin).source not in SOURCES:
            yield
            return
        connecting = {name: _refusing(getattr(socket.socket, name)) for name in ("connect", "connect_ex")}
        with all_patched(socket.socket, connecting), patched(socket, "getaddrinfo", _refuse):
            yield


def check_fetching(job: Job, arguments: Mapping[str, object]) -> None:
    """Raise UsageError if an argument makes a library fetch weights or code."""
    source = split_model(job.model.origin).source
    if source not in _MAY_FETCH:
        return
    for name, value in arguments.items():
        if name.rpartition("__")[2] in _FETCHING and value not in (None, False, "", "none"):
            raise UsageError(
                f"{job.model.name}: its argument {name} fetches weights, which no plan does: they decide no "
                "memory; remove it"
            )
        if name.rpartition("__")[2] in _HUB_CODE and "/" in str(value):
            raise UsageError(
                f"{job.model.name}: its argument {name} names code of a hub, which is not run; remove it"
            )


def _refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def connect(self: socket.socket, address: Any) -> Any:
        return plain(self, address) if self.family == getattr(socket, "AF_UNIX", None) else _refuse()

    return connect


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ConnectionRefusedError("a plan of a library's model opens no connection")
