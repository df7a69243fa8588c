from .ci.findings import Finding as Finding, findings_of as findings_of
from .ci.github import annotations as annotations, summary as summary
from .ci.sarif import to_sarif as to_sarif
from .commands.calibrations.tables import Campaign as Campaign, Folder as Folder
from .commands.explain.summary import summary_of as summary_of
from .commands.gpus import gpus_to_csv as gpus_to_csv
from .commands.run import run_summary as run_summary
from .commands.sweep import sweep_to_csv as sweep_to_csv, sweep_to_parquet as sweep_to_parquet
from .describe import growth_text as growth_text, short_op as short_op
from .page.page import save_page as save_page
from .plots.comparison import draw_comparison as draw_comparison
from .plots.gpus import draw_gpus as draw_gpus
from .plots.timeline import draw_timeline as draw_timeline
from .schedulers.formats import FORMATS as FORMATS, scheduler_text as scheduler_text
from .result import Result as Result, render as render
from .units import is_endless as is_endless, probability_text as probability_text
