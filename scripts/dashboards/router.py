"""Board *Router*: queue, placement, the ladder, and what routers know of workers."""

from scripts.dashboards.panels import (
    ROUTER,
    SERVED,
    Board,
    Row,
    gauge,
    panel,
    quantile,
    rate,
)

BOARD = Board(
    "router",
    "Tandem: Router",
    "Queue, placement and its forecasts, attempts and the ladder, workers as routers see them.",
    (
        Row(
            "Admission",
            (
                panel(
                    "Oldest in the queue",
                    "s",
                    "How long the oldest request waits. Runbook TandemQueueOld.",
                    (gauge("tandem:router_oldest_queued_seconds", "pod", how="max"), "{{pod}}"),
                ),
                panel(
                    "Queue",
                    "short",
                    "Requests that wait, by router. One alone: clients stick to one router.",
                    (gauge("vllm:num_requests_waiting", "pod", ROUTER), "{{pod}}"),
                ),
                panel(
                    "Dispatched",
                    "short",
                    "Requests with workers. Flat at max_inflight_requests while workers are "
                    "idle: the bound is too low.",
                    (gauge("vllm:num_requests_running", "pod", ROUTER), "{{pod}}"),
                ),
            ),
        ),
        Row(
            "Placement",
            (
                panel(
                    "Attempts by shape",
                    "short",
                    "By hand-off or whole on one worker. Whole for all: no prefill worker or no "
                    "link, board P/D.",
                    (rate("tandem:router_attempts_total", "shape"), "{{shape}}"),
                ),
                panel(
                    "Attempts after the first, by kind",
                    "short",
                    "Attempts after the first. Many: see their failures beside.",
                    (
                        rate("tandem:router_attempts_total", "kind", f'{SERVED},kind!="first"'),
                        "{{kind}}",
                    ),
                ),
                panel(
                    "Failed attempts",
                    "short",
                    "Refused or failed, and why. Each is tried elsewhere; clients see failures "
                    "only on the board Service.",
                    (
                        rate("tandem:router_attempt_failures_total", "kind, reason"),
                        "{{kind}} {{reason}}",
                    ),
                ),
                panel(
                    "Error of forecasts",
                    "s",
                    "How far first tokens came from what placement had forecast, at half. Large: "
                    "times of steps changed. Empty unless placement goes by forecasts.",
                    (
                        quantile(0.5, "tandem:router_forecast_error_seconds", "way"),
                        "{{way}}",
                    ),
                ),
                panel(
                    "First tokens by leg",
                    "short",
                    "Which worker said token 1 first. Mostly decode: P's frames come late.",
                    (rate("tandem:router_first_token_total", "source"), "{{source}}"),
                ),
                panel(
                    "Known blocks",
                    "short",
                    "Hashes of all workers' caches. A fall: a worker was lost.",
                    (gauge("tandem:router_prefix_index_blocks", "pod"), "{{pod}}"),
                ),
            ),
        ),
        Row(
            "Workers",
            (
                panel(
                    "Workers",
                    "short",
                    "By role and state. Fewer than replicas: board Operator.",
                    (
                        gauge("tandem:router_workers", "role, state", how="max"),
                        "{{role}} {{state}}",
                    ),
                ),
                panel(
                    "Links to workers",
                    "short",
                    "Addresses by state. Some never up: NetworkPolicy, keys or version.",
                    (gauge("tandem:router_links", "pod, state"), "{{pod}} {{state}}"),
                ),
                panel(
                    "Dropped frames",
                    "short",
                    "Frames that fit nowhere. A few after a cancel are right.",
                    (rate("tandem:router_frames_dropped_total", "reason"), "router {{reason}}"),
                    (rate("tandem:link_frames_dropped_total", "reason"), "worker {{reason}}"),
                ),
                panel(
                    "Contradictions",
                    "short",
                    "Requests failed since two workers disagreed. Any: runbook "
                    "TandemAnswersContradict.",
                    (rate("tandem:router_contradictions_total", "pod"), "{{pod}}"),
                ),
                panel(
                    "Discovery failures",
                    "short",
                    "Lists or watches of pods that failed: API server or rights.",
                    (rate("tandem:router_discovery_failures_total", "pod"), "{{pod}}"),
                ),
            ),
        ),
    ),
)
