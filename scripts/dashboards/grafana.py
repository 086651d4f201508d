"""A board as Grafana's JSON: variables, links that keep them, and panels in rows."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)
from scripts.dashboards.panels import OURS, Board, Panel

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "tandem"
_Made = stat.Panel | statetimeline.Panel | timeseries.Panel
_HEIGHT, _WIDTH, _NUMBER_WIDTH = 8, 8, 4


def text_of(board: Board) -> str:
    """The JSON that the chart holds."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"tandem-{board.name}")
        .description(board.description)
        .tags([_TAG])
        .readonly()  # it comes again with the chart: what is changed in place would be lost
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(_choice("namespace", "Namespace", "namespace"))
        .with_variable(_choice("service", "Service", "tandem_dev_service"))
        .link(
            dashboard.DashboardLink("Tandem")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    if board.prices:
        for name, label, default in (
            ("gpu_hour_price", "Price of an accelerator's hour", "2.50"),
            ("gpus", "Accelerators", "1"),
        ):
            made.with_variable(dashboard.TextBoxVariable(name).label(label).default_value(default))
    for row in board.rows:
        made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def _choice(name: str, label: str, metric_label: str) -> dashboard.QueryVariable:
    query = f"label_values(vllm:num_requests_running{{{OURS}}}, {metric_label})"
    everything = VariableOption(text="All", value="$__all", selected=True)
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(everything)
    )


def _kind(panel: Panel) -> _Made:
    if panel.states:
        words = (("1", "true", "blue"), ("0", "false", "orange"), ("-1", "unknown", "text"))
        found = {value: ValueMappingResult(text, colour) for value, text, colour in words}
        return statetimeline.Panel().mappings([ValueMap(found)]).merge_values(True)
    return stat.Panel() if panel.number else timeseries.Panel()


def _panel(panel: Panel) -> _Made:
    made = _kind(panel)
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    made.height(_HEIGHT).span(_NUMBER_WIDTH if panel.number else _WIDTH)
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        made.with_target(target.ref_id(chr(ord("A") + number)).datasource(_SOURCE))
    return made
