"""Rules of the chart: about series that exist, each alert tried both ways and with its runbook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest
from scripts.dashboards.panels import OURS
from scripts.reference import metrics
from scripts.rules import cases, chart, expressions, promtool
from tests.manifests import load_manifests
from tests.operator.control_plane import binary

from tandem.router.metrics import RouterMetrics

RUNBOOKS = chart.ROOT / "docs" / "runbooks"
TARGET = {"namespace", "pod", "container", "instance", "job", "service", "endpoint", "le"}
TARGET |= {"tandem_dev_service", "tandem_dev_role", "tandem_dev_revision"}
"""Labels of the scrape, and of buckets."""
OF_PROMETHEUS = {"up": ("tandem_dev_service",)}
RECORDED = ("namespace", "tandem_dev_service")


def known() -> Mapping[str, set[str]]:
    """Labels by the name of every series that there can be."""
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for registry in metrics.registries().values():
        for each in metrics.series(registry):
            found.setdefault(each.name, set()).update(each.labels)
    found.update({name: set(RECORDED) for name in chart.records()})
    return found


def test_rules_name_series_that_there_are():
    """Names and labels are those of the registries, of the scrape, or recorded before."""
    labels = known()
    for rule in chart.rules():
        named = expressions.read(rule["expr"])
        assert named.selectors, rule
        mine = set(TARGET)
        for selector in named.selectors:
            family = [name for name in expressions.family(selector.name) if name in labels]
            assert family, f"{selector.name} of {rule}"
            assert set(selector.labels) <= labels[family[0]] | TARGET, rule
            mine |= labels[family[0]]
        assert named.grouped <= mine, rule


def test_rules_select_no_series_of_a_plain_vllm():
    """Series whose names others use carry the label that only Tandem's targets have."""
    for rule in chart.rules():
        named = expressions.read(rule["expr"])
        for selector in named.selectors:
            if not selector.name.startswith("tandem"):
                assert "tandem_dev_service" in selector.labels, (selector.name, rule)


def test_annotations_use_labels_that_the_alert_has():
    """`{{ $labels.x }}` of a label that was summed away would be empty."""
    for name, rule in chart.alerts().items():
        named = expressions.read(rule["expr"])
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        if named.grouped:
            assert used <= named.grouped, name


def test_every_alert_has_its_runbook_and_every_runbook_its_alert():
    """By name; each says what it means, where to look and what to do."""
    pages = {path.stem: path.read_text() for path in RUNBOOKS.glob("Tandem*.md")}
    assert set(pages) == set(chart.alerts())
    for name, text in pages.items():
        assert text.startswith(f"# {name}\n")
        severity = chart.alerts()[name]["labels"]["severity"]
        for part in ("**Likely cause**", "## Diagnosis", "## Resolution", f"Severity `{severity}`"):
            assert part in text, (name, part)


def test_every_rule_has_its_case():
    """Alerts fire in one and rest in another; recording rules have a value."""
    written = cases.cases()
    assert {each["alert"] for each in written if "alert" in each} == set(chart.alerts())
    assert {each["record"] for each in written if "record" in each} == set(chart.records())
    for each in written:
        assert "record" in each or (each["fires"] and each["rests"])


def test_cases_have_no_hexadecimal_numbers():
    """promtool reads `0x20` as thirty-two; twenty zeros are `0+0x20`."""
    for path in cases.CASES.glob("*.yaml"):
        assert not re.search(r"(?<![\w.+])0x\d", path.read_text()), path.name


def test_first_tokens_in_time_are_a_bucket():
    """Values allow bounds of the router's histogram only."""
    schema = json.loads((chart.CHART / "values.schema.json").read_text())
    settings = schema["definitions"]["rules"]["properties"]["settings"]["properties"]
    text = RouterMetrics("demo").text().decode()
    bounds = set(re.findall(r'vllm:time_to_first_token_seconds_bucket\{le="([^"]+)"', text))
    assert set(settings["firstTokenSeconds"]["enum"]) <= bounds
    assert set(settings) == set(chart.values()["settings"])


def test_answers_without_tokens_are_a_bucket():
    """The smallest one, which is how an alert tells vectors and scores from texts."""
    text = RouterMetrics("demo").text().decode()
    assert 'vllm:request_generation_tokens_bucket{le="1.0",model_name="demo"}' in text
    assert 'engine="",le="1.0"}' in chart.alerts()["TandemNoFirstToken"]["expr"]


def test_requests_for_tokens_are_counted_apart():
    """By a histogram of what only they have, which one alert tells them from others by: whatever
    they say, the router fills it in."""
    metrics = RouterMetrics("demo")
    metrics.request_started(num_prompt=5, num_choices=1, max_tokens=None)
    assert 'vllm:request_params_max_tokens_count{model_name="demo"} 0.0' in metrics.text().decode()
    expression = chart.alerts()["TandemNoFirstToken"]["expr"]
    assert f'vllm:request_params_max_tokens_count{{{OURS},engine=""}}' in expression


@pytest.mark.parametrize(
    ("expression", "names", "grouped"),
    [
        ('sum by (a, b) (rate(x:y_total{c="d e",f=~"g"}[5m])) > 3', [("x:y_total", "c f")], "a b"),
        ("max(time() - m) > 6e2 and on (p) n{} offset 5m", [("m", ""), ("n", "")], "p"),
        ("histogram_quantile(0.9, sum(rate(h_bucket[1m])) by (le))", [("h_bucket", "")], "le"),
    ],
)
def test_expressions_are_read(expression: str, names: list[tuple[str, str]], grouped: str):
    """Series, labels that select, labels of groupings; no functions, numbers or words."""
    named = expressions.read(expression)
    assert [(each.name, " ".join(each.labels)) for each in named.selectors] == names
    assert named.grouped == set(grouped.split())


@pytest.mark.skipif(binary("helm") is None, reason="helm is not there")
def test_the_chart_renders_them():
    """What the template makes is what is tried here, with runbooks and the values' words added."""
    sets = ["metrics.prometheusRule.enabled=true", "metrics.prometheusRule.alertLabels.team=llm"]
    sets += ["metrics.prometheusRule.severities.warning=ticket"]
    sets += ["metrics.prometheusRule.disabledAlerts={TandemKeysOld}"]
    arguments = [part for each in sets for part in ("--set", each)]
    command = [str(binary("helm")), "template", "tandem", str(chart.CHART), *arguments]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    (made,) = (d for d in load_manifests(text) if d["kind"] == "PrometheusRule")
    rendered = {group["name"]: group["rules"] for group in made["spec"]["groups"]}
    expected = chart.groups()
    for group in expected.values():
        group[:] = [rule for rule in group if rule.get("alert") != "TandemKeysOld"]
        for rule in group:
            if "alert" in rule:
                url = f"{chart.values()['runbookBase']}{rule['alert']}.md"
                rule["annotations"]["runbook_url"] = url
                severity = rule["labels"]["severity"].replace("warning", "ticket")
                rule["labels"] |= {"severity": severity, "team": "llm"}
    assert rendered == expected


@pytest.mark.full
@pytest.mark.skipif(promtool.find() is None, reason="promtool is not built (make rules)")
def test_promtool_agrees():
    """Rules parse, and every case comes out as written."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.rules"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
