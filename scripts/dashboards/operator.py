"""Board *Operator*: services as the operator sees them, and the operator itself."""

from scripts.dashboards.panels import OPERATED, Board, Row, gauge, panel, quantile, rate

_OWN = "llmservice_namespace, llmservice"
_NAMED = "{{llmservice_namespace}}/{{llmservice}}"
_PREFIX = "tandem_operator:"
_RELEASE = "namespace, service"

BOARD = Board(
    "operator",
    "Tandem: Operator",
    "Conditions and rollouts of services; reconciles, errors and the leader.",
    (
        Row(
            "Services",
            (
                panel(
                    "Ready",
                    "short",
                    "1 ready, 0 not, -1 unknown. Not: kubectl describe llm has the reason.",
                    (
                        gauge(
                            f"{_PREFIX}service_condition",
                            f"{_OWN}, reason",
                            f'{OPERATED},type="Ready"',
                            "max",
                        ),
                        f"{_NAMED} {{{{reason}}}}",
                    ),
                    states=True,
                ),
                panel(
                    "Conditions",
                    "short",
                    "All conditions with their reasons; docs/resource.md has what to do for each.",
                    (
                        gauge(
                            f"{_PREFIX}service_condition", f"{_OWN}, type, reason", OPERATED, "max"
                        ),
                        f"{_NAMED} {{{{type}}}} {{{{reason}}}}",
                    ),
                    states=True,
                ),
                panel(
                    "Replicas",
                    "short",
                    "Desired, ready and draining by role. Ready below desired for long: runbook "
                    "TandemServiceDegraded.",
                    (
                        gauge(f"{_PREFIX}service_replicas", f"{_OWN}, role, state", OPERATED),
                        f"{_NAMED} {{{{role}}}} {{{{state}}}}",
                    ),
                ),
                panel(
                    "Links",
                    "short",
                    "Healthy KV links beside all pairs. Apart: board P/D.",
                    (
                        gauge(f"{_PREFIX}service_links", f"{_OWN}, state", OPERATED),
                        f"{_NAMED} {{{{state}}}}",
                    ),
                ),
                panel(
                    "Restarts",
                    "short",
                    "Of containers, a second. Any for long: runbook TandemPodsRestarting.",
                    (
                        rate(f"{_PREFIX}service_restarts_total", f"{_OWN}, role", OPERATED),
                        f"{_NAMED} {{{{role}}}}",
                    ),
                ),
                panel(
                    "Age of keys",
                    "s",
                    "Since the newest keys were published. Older than your rule: rotate them by "
                    "spec.security.keyRotationID.",
                    (
                        f"time() - {_PREFIX}service_keys_published_timestamp_seconds{{{OPERATED}}}",
                        _NAMED,
                    ),
                ),
            ),
        ),
        Row(
            "The operator",
            (
                panel(
                    "Leaders",
                    "short",
                    "One of each release, always. None: runbook TandemOperatorWithoutLeader.",
                    (f"sum by ({_RELEASE}) ({_PREFIX}leader)", "{{namespace}}/{{service}}"),
                    number=True,
                ),
                panel(
                    "Since the last good look",
                    "s",
                    "Minutes with services there: runbook TandemOperatorStale.",
                    (
                        f"time() - max by ({_RELEASE}) ({_PREFIX}last_success_timestamp_seconds)",
                        "{{namespace}}/{{service}}",
                    ),
                    number=True,
                ),
                panel(
                    "Services",
                    "short",
                    "Listed, and those beyond the number that have series of their own.",
                    (f"max({_PREFIX}services)", "services"),
                    (f"max({_PREFIX}services_not_shown)", "not shown"),
                ),
                panel(
                    "Looks a second",
                    "short",
                    "A storm: something edits children again and again, see repairs.",
                    (rate(f"{_PREFIX}reconcile_seconds_count", "pod", ""), "{{pod}}"),
                ),
                panel(
                    "Time of a look",
                    "s",
                    "Slowest twentieth. Seconds: the API server is slow.",
                    (quantile(0.95, f"{_PREFIX}reconcile_seconds", "pod", ""), "{{pod}}"),
                ),
                panel(
                    "Errors by status",
                    "short",
                    "Failed looks. Runbook TandemOperatorErrors.",
                    (rate(f"{_PREFIX}reconcile_errors_total", "status", ""), "{{status}}"),
                ),
                panel(
                    "Waiting services",
                    "short",
                    "Services whose look is due or planned. Grows without end: looks hang.",
                    (f"max({_PREFIX}queue_depth)", "waiting"),
                ),
                panel(
                    "Repairs and lists",
                    "short",
                    "Children put right, and periodic lists by outcome. Repairs for long: "
                    "somebody fights with the operator.",
                    (rate(f"{_PREFIX}repairs_total", "kind", ""), "repairs {{kind}}"),
                    (rate(f"{_PREFIX}lists_total", "outcome", ""), "lists {{outcome}}"),
                ),
            ),
        ),
    ),
)
