"""Replace attributes of torch and libraries for a plan's threads, and kernels of torch for all threads.

They are replaced inside a context.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from planner.capture.cuda.threads import restrict_to_plan


def patched(holder: Any, name: str, new: Any, *, create: bool = False) -> AbstractContextManager[object]:
    """Return a context that replaces the attribute `name` of `holder` by `new`.

    `holder` is a module, class or object. Other threads that are already running still call the original
    function. With `create` the attribute need not exist.
    """
    plain = getattr(holder, name, None)
    return mock.patch.object(holder, name, restrict_to_plan(new, plain), create=create)


@contextmanager
def all_patched(holder: Any, attributes: Mapping[str, Any], *, create: bool = False) -> Iterator[None]:
    """Replace several attributes of a holder inside the context, as `patched` does.

    `holder` is a module, class or object.
    """
    with ExitStack() as stack:
        for name, new in attributes.items():
            stack.enter_context(patched(holder, name, new, create=create))
        yield


def always(value: Any) -> Any:
    """Return a function that returns `value` for any arguments."""
    return lambda *_, **__: value


@contextmanager
def kernels_registered(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Register kernels of torch's operators at a dispatch key inside the context."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden, which is the purpose
            for name, kernel in kernels.items():
                library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
