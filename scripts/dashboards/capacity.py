"""Board *Capacity*: how much more fits, and which role is short."""

from scripts.dashboards.panels import (
    OPERATED,
    SERVED,
    SERVICE,
    WORKER,
    Board,
    Row,
    gauge,
    panel,
    rate,
)

_NAMED = "{{tandem_dev_service}}"
_BUSY = "vllm:request_prefill_time_seconds_sum"

BOARD = Board(
    "capacity",
    "Tandem: Capacity",
    "Load beside what there is: the ratio of prefill to decode, room in KV, what caches save.",
    (
        Row(
            "Load",
            (
                panel(
                    "Requests",
                    "reqps",
                    "Of each service. Compare the peak with that of the last load test.",
                    (f"tandem:requests:rate5m{{{SERVED}}}", _NAMED),
                ),
                panel(
                    "Prompt to answer tokens",
                    "short",
                    "Prompt tokens for each answer token. Rises: more prefill workers are wanted "
                    "for the same requests.",
                    (
                        (
                            f"tandem:prompt_tokens:rate5m{{{SERVED}}}"
                            f" / tandem:generation_tokens:rate5m{{{SERVED}}}"
                        ),
                        _NAMED,
                    ),
                ),
                panel(
                    "KV moved",
                    "Bps",
                    "From prefill to decode workers. Near the network's rate: more links or nodes.",
                    (f"tandem:kv_handoff_bytes:rate5m{{{SERVED}}}", _NAMED),
                ),
            ),
        ),
        Row(
            "Roles",
            (
                panel(
                    "Replicas had",
                    "short",
                    "Ready workers by role.",
                    (
                        gauge(
                            "tandem_operator:service_replicas",
                            "llmservice, role",
                            f'{OPERATED},role!="router",state="ready"',
                        ),
                        "{{llmservice}} {{role}}",
                    ),
                ),
                panel(
                    "Prompts in work at once",
                    "short",
                    "Seconds of prefill a second, by worker: how many prompts each has in work. "
                    "Growing on prefill workers while decode has room: add prefill replicas.",
                    (rate(_BUSY, "pod", WORKER), "{{pod}}"),
                ),
                panel(
                    "Answers in work at once",
                    "short",
                    "Seconds of decoding a second, by worker. Near --max-num-seqs: add decode "
                    "replicas.",
                    (rate("vllm:request_decode_time_seconds_sum", "pod", WORKER), "{{pod}}"),
                ),
            ),
        ),
        Row(
            "Room",
            (
                panel(
                    "Free KV",
                    "percentunit",
                    "Share of free blocks of a service's workers. Under a tenth at the peak: the "
                    "next burst is preempted.",
                    (f"1 - {gauge('vllm:kv_cache_usage_perc', SERVICE, WORKER, 'avg')}", _NAMED),
                ),
                panel(
                    "Hits of the prefix cache",
                    "percentunit",
                    "Tokens that were not computed. Falls with fewer blocks: an offload tier "
                    "(--kv-offloading-size) brings some back.",
                    (f"tandem:prefix_cache_hits:ratio_rate5m{{{SERVED}}}", _NAMED),
                ),
                panel(
                    "Most hits that there could be",
                    "percentunit",
                    "Of the prompts' blocks of the last 12 to 24 hours, as a cache without bounds "
                    "would have found them. Near the hits beside: more cache brings nothing; far "
                    "above: more blocks or an offload tier.",
                    (gauge("tandem:router_prefix_hit_ceiling", SERVICE, how="max"), _NAMED),
                ),
                panel(
                    "Hits of host memory",
                    "short",
                    "Tokens a second that came back from host memory. None with a tier that is "
                    "full: it is too small for the prompts' order.",
                    (rate("tandem:kv_offload_hit_tokens_total", SERVICE, WORKER), _NAMED),
                ),
            ),
        ),
    ),
)
