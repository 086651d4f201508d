"""The chart with values of an earlier release: what they lack is the chart's own.

`helm upgrade --reuse-values` renders a chart with the values of the release that is there, in place
of the chart's. So a copy of the chart is rendered whose values.yaml lacks something.
"""

from __future__ import annotations

import copy
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.manifests import load_manifests
from tests.operator.control_plane import binary
from tests.operator.older_release import CHART as OLDER

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tandem"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
OPEN = ("resources", "podSecurityContext", "labels", "annotations")
"""Maps of which a user may have removed a member."""
EVERYTHING = [
    *("nodeAgent.enabled=true", "workerImage=worker:1", "metrics.serviceMonitor.enabled=true"),
    *("metrics.podMonitor.enabled=true", "metrics.prometheusRule.enabled=true"),
    *("metrics.dashboards.enabled=true", "tracing.endpoint=http://collector:4317"),
    *("nodeAgent.claims[0].name=node", "nodeAgent.claims[0].namespace=llm"),
]
"""Values with which every template has something to say."""
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(binary("helm") is None, reason="helm is not there"),
]


class Chart:
    """A copy of the chart whose own values can be others."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tandem"
        shutil.copytree(CHART, self.path)
        shutil.copy(CHART / "values.yaml", self.path / "defaults.yaml")

    def rendered(self, values: dict[str, Any]) -> list[Any]:
        """All objects, with these values and none of the chart's. Fails with what helm said."""
        (self.path / "values.yaml").write_text(yaml.safe_dump(values))
        sets = [word for each in EVERYTHING for word in ("--set", each)]
        words = [str(binary("helm")), "template", "tandem", str(self.path), "-n", "system", *sets]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return load_manifests(done.stdout)


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    return Chart(tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="module")
def usual(chart: Chart) -> list[Any]:
    """All objects with the chart's own values."""
    return chart.rendered(VALUES)


def nested(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all members of maps whose keys are the chart's."""
    for key, value in values.items():
        if path:
            yield (*path, key)
        if isinstance(value, dict) and key not in OPEN:
            yield from nested(value, (*path, key))


def without(*paths: tuple[str, ...]) -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    for *outer, last in paths:
        place = values
        for key in outer:
            place = place.get(key, {})
        place.pop(last, None)
    return values


BLOCKS = [(each,) for each in VALUES if each != "podSecurityContext"]


@pytest.mark.parametrize("blocks", [BLOCKS[::2], BLOCKS[1::2]], ids=["odd", "even"])
def test_blocks_that_are_missing_are_the_charts_own(
    chart: Chart, usual: list[Any], blocks: list[tuple[str, ...]]
):
    """A release that did not have them is rendered as with the blocks of today."""
    assert chart.rendered(without(*blocks)) == usual


def test_members_that_are_missing_are_the_charts_own(chart: Chart, usual: list[Any]):
    """All of them at once: what is left are empty maps."""
    paths = [each for each in nested(VALUES) if each != ("image", "repository")]  # it is required
    assert chart.rendered(without(*paths)) == usual


def test_nothing_at_all_is_the_charts_own(chart: Chart, usual: list[Any]):
    """Values of which nothing is left."""
    assert chart.rendered({}) == usual


def test_the_values_of_the_release_before_are_enough(chart: Chart, usual: list[Any]):
    """Its own values.yaml, as `--reuse-values` brings it."""
    with tarfile.open(fileobj=io.BytesIO(OLDER.read_bytes())) as archive:
        content = archive.extractfile("tandem/values.yaml")
        assert content is not None
        values = yaml.safe_load(content.read())
    assert chart.rendered(values) == usual


@pytest.mark.parametrize("null", [{"podSecurityContext": None}, {}], ids=["null", "removed"])
def test_a_security_context_that_was_removed_stays_removed(chart: Chart, null: dict[str, Any]):
    """Null in the values of a release that knows it means what it meant."""
    values = {**without(("podSecurityContext",)), **null}
    for each in chart.rendered(values):
        if each["kind"] == "Deployment":
            assert "securityContext" not in each["spec"]["template"]["spec"]


def test_a_limit_that_was_removed_stays_removed(chart: Chart):
    """Members of maps that are the user's are not filled in."""
    values = copy.deepcopy(VALUES)
    del values["resources"]["limits"]
    for each in chart.rendered(values):
        if each["kind"] == "Deployment":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            assert "limits" not in container["resources"]


def test_false_and_empty_values_are_kept(chart: Chart, usual: list[Any]):
    """A value that says no is not a missing one."""
    values = copy.deepcopy(VALUES)
    values["admissionPolicy"]["enabled"] = False
    values["networkPolicy"]["enabled"] = False
    kinds = {each["kind"] for each in chart.rendered(values)}
    assert "ValidatingAdmissionPolicy" in {each["kind"] for each in usual}
    assert "ValidatingAdmissionPolicy" not in kinds


def test_the_defaults_are_the_values():
    """The templates read them from a file that helm gives them, which values.yaml is not. After a
    change of values.yaml: `cp charts/tandem/values.yaml charts/tandem/defaults.yaml`."""
    assert yaml.safe_load((CHART / "defaults.yaml").read_text()) == VALUES


@pytest.mark.parametrize(
    "path", sorted(CHART.glob("templates/**/*.yaml")), ids=lambda each: each.stem
)
def test_every_template_fills_in_what_is_missing(path: Path):
    """A new template would crash where another one has not been rendered before it."""
    first = path.read_text().splitlines()[0]
    assert "tandem.values" in first or "tandem.installsCrd" in first
