from .ci.findings import Finding as Finding, findings_of as findings_of
from .ci.github import annotations as annotations, summary as summary
from .ci.sarif import to_sarif as to_sarif
from .commands.advise import advice_document as advice_document, advice_to_json as advice_to_json
from .commands.cache import cache_document as cache_document, cache_to_json as cache_to_json
from .commands.calibrations.contribution import (
    contribution_document as contribution_document, contribution_to_json as contribution_to_json,
)
from .commands.calibrations.tables import (
    Campaign as Campaign, campaign_document as campaign_document, campaign_to_json as campaign_to_json,
    Folder as Folder, tables_document as tables_document, tables_to_json as tables_to_json,
)
from .commands.calibrations.verify import (
    limit_document as limit_document, limit_to_json as limit_to_json,
    verification_document as verification_document, verification_to_json as verification_to_json,
)
from .commands.check import check_document as check_document, check_to_json as check_to_json
from .commands.fleet.clusters import (
    clusters_document as clusters_document, clusters_to_json as clusters_to_json,
)
from .commands.estimates.compare import (
    comparison_document as comparison_document, comparison_to_json as comparison_to_json,
)
from .commands.fleet.devices import devices_document as devices_document, devices_to_json as devices_to_json
from .commands.estimates.estimate import (
    estimate_document as estimate_document, estimate_to_json as estimate_to_json,
)
from .commands.explain.report import (
    explanation_document as explanation_document, explanation_to_json as explanation_to_json,
)
from .commands.explain.summary import summary_of as summary_of
from .commands.explain.varying import (
    worst_batch_document as worst_batch_document, worst_batch_to_json as worst_batch_to_json,
)
from .commands.fleet.gpus import (
    gpus_document as gpus_document, gpus_to_csv as gpus_to_csv, gpus_to_json as gpus_to_json,
)
from .commands.guard import guard_document as guard_document, guard_to_json as guard_to_json
from .commands.max_batch import plan_document as plan_document, plan_to_json as plan_to_json
from .commands.max_size import max_size_document as max_size_document, max_size_to_json as max_size_to_json
from .commands.diagnose import (
    diagnosis_document as diagnosis_document, diagnosis_to_json as diagnosis_to_json,
)
from .commands.record import record_document as record_document, record_to_json as record_to_json
from .commands.replay import process_document as process_document, process_to_json as process_to_json
from .commands.run import (
    command_plan_document as command_plan_document, command_plan_to_json as command_plan_to_json,
    run_document as run_document, run_summary as run_summary, run_to_json as run_to_json,
)
from .commands.serve import serving_document as serving_document, serving_to_json as serving_to_json
from .commands.estimates.static_estimate import (
    formula_plan_document as formula_plan_document, formula_plan_to_json as formula_plan_to_json,
    static_estimate_document as static_estimate_document, static_estimate_to_json as static_estimate_to_json,
)
from .commands.sweep import (
    sweep_document as sweep_document, sweep_to_csv as sweep_to_csv, sweep_to_json as sweep_to_json,
    sweep_to_parquet as sweep_to_parquet,
)
from .commands.varying.plan import varying_document as varying_document, varying_to_json as varying_to_json
from .commands.varying.advice import (
    varying_advice_document as varying_advice_document, varying_advice_to_json as varying_advice_to_json,
)
from .describe import growth_text as growth_text, short_op as short_op
from .page.page import save_page as save_page
from .plots.comparison import draw_comparison as draw_comparison
from .plots.gpus import draw_gpus as draw_gpus
from .plots.timeline import draw_timeline as draw_timeline
from .result import render as render, Report as Report, report_of as report_of, Result as Result
from .schedulers.formats import FORMATS as FORMATS, scheduler_text as scheduler_text
from .units import is_endless as is_endless, probability_text as probability_text
