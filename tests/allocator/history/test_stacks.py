"""Stacks of functions as torch writes them into a snapshot, innermost first, and the category they tell."""

import pytest

from planner.allocator.history.stacks import Stack
from planner.program import Category, Site

PACKAGES = "/env/lib/python3.12/site-packages"
TRAIN = ("/home/me/train.py", "train")
CLOSURE = ("/home/me/train.py", "closure")
FUNCTION = (f"{PACKAGES}/torch/autograd/function.py", "apply")
CHECKPOINT = (f"{PACKAGES}/torch/utils/checkpoint.py", "unpack_hook")
MODULE = f"{PACKAGES}/torch/nn/modules/module.py"
OPTIMIZER = f"{PACKAGES}/torch/optim/optimizer.py"


def stack(*functions: tuple[str, str]) -> Stack:
    """Return the stack of functions, each its file and its name."""
    return Stack({"filename": path, "name": name, "line": 3} for path, name in functions)


@pytest.mark.parametrize(
    ("category", "functions"),
    [
        (Category.PARAMETER, [(MODULE, "convert"), (MODULE, "_apply"), (MODULE, "to"), TRAIN]),
        (Category.PARAMETER, [(f"{PACKAGES}/torch/nn/modules/linear.py", "__init__"), TRAIN]),
        (Category.PARAMETER, [("/home/me/load.py", "move"), ("/x/modeling_utils.py", "from_pretrained")]),
        (
            Category.ACTIVATION,
            [
                (f"{PACKAGES}/torch/nn/modules/linear.py", "forward"),
                (MODULE, "_call_impl"),
                ("/home/me/net.py", "forward"),
            ],
        ),
        (Category.OPTIMIZER, [(f"{PACKAGES}/torch/optim/adam.py", "_init_group"), TRAIN]),
        (Category.OPTIMIZER, [("/home/me/lion.py", "step"), (OPTIMIZER, "wrapper"), TRAIN]),
        (Category.GRADIENT, [("/home/me/fused.py", "backward"), FUNCTION]),
        (Category.INPUT, [("/x/accelerate/utils/operations.py", "send_to_device"), TRAIN]),
        (None, [TRAIN]),
        # the forward pass within an optimizer's closure is no optimizer state, nor is the loss there
        (Category.ACTIVATION, [(MODULE, "_call_impl"), CLOSURE, (OPTIMIZER, "wrapper")]),
        (None, [("/home/me/train.py", "loss"), CLOSURE, (OPTIMIZER, "wrapper")]),
        # a layer that is computed again in a thread of autograd is an activation
        (Category.ACTIVATION, [(MODULE, "_call_impl"), CHECKPOINT]),
    ],
)
def test_the_innermost_function_with_a_rule_decides(
    category: Category | None, functions: list[tuple[str, str]]
) -> None:
    """Functions of C++ are within those of Python, on the stack of a forward pass too."""
    assert stack(*functions).origin[1] is category
    within = ("??", "torch::autograd::VariableType::empty(c10::SymInt)")
    assert stack(within, *functions).origin[1] is category


def test_autograd_in_cpp_without_python_is_the_backward_pass() -> None:
    """Its threads run no function of Python; another thread of C++ says nothing."""
    engine = ("/pytorch/torch/csrc/autograd/engine.cpp", "torch::autograd::Engine::evaluate_function()")
    assert stack(("??", "at::empty()"), engine).origin == (Site("", ""), Category.GRADIENT)
    assert stack(("??", "at::empty()")).origin == (Site("", ""), None)


def test_paths_of_windows_have_the_same_rules() -> None:
    """Separators of paths are slashes or backslashes."""
    assert stack((r"C:\env\Lib\site-packages\torch\optim\adam.py", "step")).origin[1] is Category.OPTIMIZER
