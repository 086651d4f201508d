"""Boards of the chart: as the scripts make them, about series that exist, every panel explained."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from scripts.dashboards import __main__ as made
from scripts.dashboards import boards, lint
from scripts.dashboards.panels import OURS
from scripts.rules import chart, expressions
from tests.manifests import load_manifests
from tests.observability.test_rules import TARGET, known
from tests.operator.control_plane import binary

FILES = made.files()


def test_the_chart_holds_what_the_scripts_make():
    """`make dashboards` was run, and nothing is left over."""
    there = {path.name: path.read_text() for path in made.FOLDER.iterdir()}
    assert there == FILES


def test_panels_name_series_that_there_are():
    """Names and labels are those of the registries, of the scrape, or recorded."""
    labels = known()
    for where, expression in boards.queries():
        named = expressions.read(expression)
        assert named.selectors, where
        mine = set(TARGET)
        for selector in named.selectors:
            family = [name for name in expressions.family(selector.name) if name in labels]
            assert family, f"{where}: {selector.name}"
            assert set(selector.labels) <= labels[family[0]] | TARGET, where
            mine |= labels[family[0]]
        assert named.grouped <= mine, where


def test_panels_show_no_series_of_a_plain_vllm():
    """The choice "All" of a board matches an empty label, so each selector excludes it."""
    for board, panel in boards.panels():
        for query in panel.queries:
            for selector in expressions.read(query.expression).selectors:
                if not selector.name.startswith("tandem"):
                    assert OURS in query.expression, (board.title, panel.title, selector.name)
    for name, text in FILES.items():
        for variable in json.loads(text)["templating"]["list"]:
            if variable["type"] == "query":
                assert OURS in variable["query"], name


def test_legends_use_labels_of_their_expression():
    """A label that was summed away would leave a hole in the legend."""
    for board, panel in boards.panels():
        for query in panel.queries:
            words = {part.split("}}")[0] for part in query.legend.split("{{")[1:]}
            named = expressions.read(query.expression)
            allowed = named.grouped | {"llmservice_namespace", "llmservice", "tandem_dev_service"}
            assert words <= allowed, (board.title, panel.title)


def test_every_panel_says_what_to_do():
    """Six boards, of fifty panels and more; each panel explained, and no title twice on a board."""
    panels = list(boards.panels())
    assert len(boards.BOARDS) == 6
    assert len(panels) >= 50
    assert len({(board.name, panel.title) for board, panel in panels}) == len(panels)
    for board, panel in panels:
        assert len(panel.description) > 20, (board.title, panel.title)
        for word in panel.description.replace(".", " ").split():
            assert not word.startswith("Tandem") or word in chart.alerts(), (panel.title, word)


def test_boards_lead_to_one_another():
    """Links to all boards keep variables and time; panels read the chosen source."""
    for name, text in FILES.items():
        board = json.loads(text)
        (link,) = board["links"]
        assert link["includeVars"], name
        assert link["keepTime"], name
        assert set(link["tags"]) <= set(board["tags"]), name
        variables = [each["name"] for each in board["templating"]["list"]]
        assert variables[:3] == ["datasource", "namespace", "service"]
        flat = [p for p in board["panels"] if p["type"] != "row"]
        inner = [p for row in board["panels"] for p in row.get("panels") or []]
        assert len(flat) + len(inner) >= 9, name
        for panel in (*flat, *inner):
            assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.skipif(binary("helm") is None, reason="helm is not there")
def test_the_chart_renders_them():
    """A ConfigMap a board with the sidecar's label, small enough for Kubernetes; none without."""
    command = [str(binary("helm")), "template", "tandem", str(chart.CHART)]
    on = [*command, "--set", "metrics.dashboards.enabled=true"]
    found: dict[str, str] = {}
    for arguments in (command, on):
        text = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
        for each in load_manifests(text.stdout):
            if each and "-board-" in each["metadata"]["name"]:
                assert arguments is on
                assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
                found |= each["data"]
    assert found == {f"tandem-{name}": text for name, text in FILES.items()}
    assert sum(map(len, found.values())) < 500_000


@pytest.mark.skipif(lint.find() is None, reason="dashboard-linter is not there")
@pytest.mark.parametrize("name", sorted(FILES))
def test_grafanas_linter_has_nothing_to_say(name: str):
    """Strictly, but for the rules that scripts/dashboards/lint.yaml names with a reason."""
    program = lint.find()
    assert program is not None
    assert lint.complaints(program, made.FOLDER / name) == ""


@pytest.mark.skipif(lint.find() is None, reason="dashboard-linter is not there")
def test_grafanas_linter_sees_a_panel_without_words(tmp_path: Path):
    """It can fail: a panel's description taken away is an error."""
    program = lint.find()
    assert program is not None
    board = json.loads(next(iter(FILES.values())))
    panels = [each for each in board["panels"] if each["type"] != "row"]
    panels += [each for row in board["panels"] for each in row.get("panels") or []]
    del panels[0]["description"]
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(board))
    assert "description" in lint.complaints(program, bad)
