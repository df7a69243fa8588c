"""Report findings in SARIF 2.1.0, the format of GitHub's code scanning.

Source: OASIS, sarif-v2.1.0.
"""

from collections.abc import Sequence
from typing import Any

from planner._support.versions import installed_version
from planner.report.ci.findings import Finding

SCHEMA_URI = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = {
    "tight": "The job fits at the confidence, by retries of the allocator or with little left",
    "risky": "The job most likely fits, and not at the confidence",
    "out-of-memory": "The job most likely runs out of memory",
    "not-planned": "The job cannot be planned",
    "memory-regression": "The job takes more memory than with the files of another revision",
}


def to_sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a SARIF log with a result for each finding. All results are in one run."""
    driver = {
        "name": "planner",
        "semanticVersion": installed_version("gpu-batch-planner") or "0.0.0",
        "rules": [{"id": rule, "shortDescription": {"text": text}} for rule, text in _RULES.items()],
    }
    results = [_result(finding) for finding in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": finding.path, "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": finding.line},
    }
    return {
        "ruleId": finding.rule,
        "ruleIndex": list(_RULES).index(finding.rule),
        "level": finding.level,
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"job/v1": finding.key},
    }
