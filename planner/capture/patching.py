"""Replace attributes of torch and of libraries while a context is open, for the threads of the plan alone."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from planner.capture.cuda.threads import beside_other_threads


def patched(holder: Any, name: str, new: Any, *, create: bool = False) -> AbstractContextManager[object]:
    """Return a context in which an attribute of a module, a class or an object is `new`.

    Threads that run already call the function from before. With `create` the attribute need not exist.
    """
    plain = getattr(holder, name, None)
    return mock.patch.object(holder, name, beside_other_threads(new, plain), create=create)


@contextmanager
def all_patched(holder: Any, attributes: Mapping[str, Any], *, create: bool = False) -> Iterator[None]:
    """Replace several attributes of one holder while open, as `patched` replaces one."""
    with ExitStack() as stack:
        for name, new in attributes.items():
            stack.enter_context(patched(holder, name, new, create=create))
        yield
