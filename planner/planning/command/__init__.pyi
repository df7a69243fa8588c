from .explained import ExplainedRun as ExplainedRun, explain_run as explain_run
from .largest_batch import CommandPlan as CommandPlan, find_largest_batch as find_largest_batch
