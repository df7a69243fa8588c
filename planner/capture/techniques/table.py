"""The table of all techniques, in the order in which a capture calls their functions."""

from planner.capture.techniques.adapters import ADAPTERS
from planner.capture.techniques.common import ACCELERATE, OPERATORS, PADDING, VALUES
from planner.capture.techniques.compilation import COMPILED, EAGER
from planner.capture.techniques.deepspeed import DEEPSPEED
from planner.capture.techniques.launched_rank import LAUNCHED_RANK
from planner.capture.techniques.liger import LIGER
from planner.capture.techniques.own_step import OWN_STEP
from planner.capture.techniques.quantization import QUANTIZATION
from planner.capture.techniques.recipe import FREEZING, PRECISION, RECIPE
from planner.capture.techniques.sharding import SHARDING
from planner.capture.techniques.technique import Technique
from planner.jobs import Job

TECHNIQUES = (
    ACCELERATE,
    PADDING,
    OWN_STEP,
    DEEPSPEED,
    SHARDING,
    LAUNCHED_RANK,
    PRECISION,
    QUANTIZATION,
    ADAPTERS,
    FREEZING,
    LIGER,
    RECIPE,
    EAGER,
    COMPILED,
    VALUES,
    OPERATORS,
)


def techniques_of(job: Job) -> tuple[Technique, ...]:
    """Return the techniques that a job uses, in the order of the table."""
    return tuple(technique for technique in TECHNIQUES if technique.is_used(job))
