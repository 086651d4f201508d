"""Board *Service*: what clients get, and what it costs."""

from scripts.dashboards.panels import (
    ROUTER,
    SERVED,
    SERVICE,
    Board,
    Row,
    gauge,
    panel,
    quantile,
    quantiles,
    rate,
)

_TTFT, _ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_DISPATCHED = "tandem:router_request_failures_total"
_NAMED = "{{tandem_dev_service}}"
_OF_COST = "$gpu_hour_price * $gpus / 3600 * 1e6"

BOARD = Board(
    "service",
    "Tandem: Service",
    "What clients get: promises kept, latencies, failures, tokens and their cost.",
    (
        Row(
            "Promises",
            (
                panel(
                    "Not answered",
                    "percentunit",
                    "Share of requests without an answer over an hour. Above the objective: see "
                    "failures by reason below, then the runbook TandemAnswerBudgetFast.",
                    (f"tandem:slo_unanswered:ratio_rate1h{{{SERVED}}}", _NAMED),
                    number=True,
                ),
                panel(
                    "Late first tokens",
                    "percentunit",
                    "Share of first tokens beyond the objective's bound over an hour. High: look "
                    "where prompts wait, on the boards P/D and Router.",
                    (f"tandem:slo_late:ratio_rate1h{{{SERVED}}}", _NAMED),
                    number=True,
                ),
                panel(
                    "Goodput",
                    "reqps",
                    "Requests a second whose first token came in time. Far below all requests: "
                    "capacity is spent on answers that come too late; add prefill replicas.",
                    (
                        (
                            f"tandem:requests:rate5m{{{SERVED}}}"
                            f" * (1 - tandem:slo_late:ratio_rate5m{{{SERVED}}})"
                        ),
                        "in time {{tandem_dev_service}}",
                    ),
                    (f"tandem:requests:rate5m{{{SERVED}}}", "all {{tandem_dev_service}}"),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                panel(
                    "Time to first token",
                    "s",
                    "From arrival at the router. High at 99 % alone: long prompts or one slow "
                    "worker; high at half: too few prefill workers.",
                    *quantiles(_TTFT, ROUTER),
                ),
                panel(
                    "Between tokens",
                    "s",
                    "Gaps within an answer. High: decode batches are too large or preempted; see "
                    "KV use on the board Engine.",
                    *quantiles(_ITL, ROUTER),
                ),
                panel(
                    "Whole requests",
                    "s",
                    "From arrival to the end. Follows the length of answers: compare with tokens "
                    "a request before you blame the workers.",
                    *quantiles("vllm:e2e_request_latency_seconds", ROUTER),
                ),
                panel(
                    "Time a token of a request",
                    "s",
                    "Mean gap of each request after its first token. It rises with the batch; "
                    "add decode replicas where it passes what readers bear.",
                    *quantiles("vllm:request_time_per_output_token_seconds", ROUTER),
                ),
                panel(
                    "First tokens by service",
                    "s",
                    "Slowest twentieth for each service. One alone is high: choose it in the "
                    "variable above and go to its boards.",
                    (quantile(0.95, _TTFT, SERVICE, ROUTER), _NAMED),
                ),
            ),
        ),
        Row(
            "Requests",
            (
                panel(
                    "Answers by end",
                    "reqps",
                    "How choices ended. Much `length`: clients' max_tokens cut answers; much "
                    "`abort`: clients leave, mostly since they wait.",
                    (
                        rate("vllm:request_success_total", "finished_reason", ROUTER),
                        "{{finished_reason}}",
                    ),
                ),
                panel(
                    "Failures by reason",
                    "reqps",
                    "Requests without an answer. The reason names the party: docs/reference/"
                    "errors.md has each word.",
                    (rate(_DISPATCHED, "reason"), "{{reason}}"),
                ),
                panel(
                    "Turned away",
                    "reqps",
                    "Requests that found no room. `max_queue_age`: too slow; `max_num_queued_*`: "
                    "a burst; `large_requests`: long texts kept the threads that tokenize them. "
                    "Runbook TandemRequestsRejected.",
                    (rate("vllm:admission_rejections_total", "reason", ROUTER), "{{reason}}"),
                ),
                panel(
                    "Answers by status",
                    "reqps",
                    "HTTP statuses by path. 5xx are ours; 4xx are clients' requests, 429 limits.",
                    (rate("http_requests_total", "handler, status"), "{{handler}} {{status}}"),
                ),
                panel(
                    "Clients that left",
                    "reqps",
                    "Answers that nobody read to the end. Rises with waiting: see the latencies.",
                    (rate("tandem:router_requests_cancelled_total", SERVICE), _NAMED),
                ),
                panel(
                    "Running and waiting",
                    "short",
                    "Requests dispatched and in the queue. A queue that grows: board Router.",
                    (gauge("vllm:num_requests_running", SERVICE, ROUTER), "running"),
                    (gauge("vllm:num_requests_waiting", SERVICE, ROUTER), "waiting"),
                ),
            ),
        ),
        Row(
            "Tokens and cost",
            (
                panel(
                    "Tokens a second",
                    "short",
                    "Prompt and answer tokens. Falls while requests wait: a worker is away.",
                    (f"tandem:prompt_tokens:rate5m{{{SERVED}}}", "prompt {{tandem_dev_service}}"),
                    (
                        f"tandem:generation_tokens:rate5m{{{SERVED}}}",
                        "answer {{tandem_dev_service}}",
                    ),
                ),
                panel(
                    "Cost of a million answer tokens",
                    "short",
                    "Price of the accelerators' time over tokens, from the variables above. "
                    "High at night: fewer replicas would do.",
                    (f"{_OF_COST} / sum(tandem:generation_tokens:rate5m{{{SERVED}}})", "cost"),
                    number=True,
                ),
                panel(
                    "Tokens a request",
                    "short",
                    "Sizes of prompts and answers at half. A jump explains most of a latency.",
                    (quantile(0.5, "vllm:request_prompt_tokens", "", ROUTER), "prompt"),
                    (quantile(0.5, "vllm:request_generation_tokens", "", ROUTER), "answer"),
                ),
                panel(
                    "Prompt tokens not computed",
                    "percentunit",
                    "Share of prompt tokens whose KV was there. A fall means that prompts differ "
                    "at their beginning, or that KV is lost: board Engine.",
                    (
                        (
                            f"{rate('vllm:prompt_tokens_cached_total', SERVICE, ROUTER)}"
                            f" / {rate('vllm:prompt_tokens_total', SERVICE, ROUTER)}"
                        ),
                        _NAMED,
                    ),
                ),
            ),
        ),
    ),
    prices=True,
)
