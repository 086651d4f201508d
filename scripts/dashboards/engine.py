"""Board *Engine*: batches, the KV cache and what requests wait for inside workers."""

from scripts.dashboards.panels import POD, WORKER, Board, Row, gauge, panel, quantile, rate

_FLOPS = "vllm:estimated_flops_per_gpu_total"
_READ = "vllm:estimated_read_bytes_per_gpu_total"
_WRITTEN = "vllm:estimated_write_bytes_per_gpu_total"
_MOVED = f"{rate(_READ, POD, WORKER)} + {rate(_WRITTEN, POD, WORKER)}"
_PEAK_FLOPS = gauge("tandem:device_peak_flops_per_second", POD, WORKER)
_PEAK_BYTES = gauge("tandem:device_peak_bytes_per_second", POD, WORKER)

BOARD = Board(
    "engine",
    "Tandem: Engine",
    "Inside the workers: batches, KV, preemptions, prefix hits and host memory.",
    (
        Row(
            "Batches",
            (
                panel(
                    "Sequences in the batch",
                    "short",
                    "By worker. One far above its like: placement, see board Router.",
                    (gauge("vllm:num_requests_running", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Sequences that wait",
                    "short",
                    "`capacity` waits for KV, `deferred` for a hand-off or a grammar. Capacity "
                    "that grows: more decode replicas.",
                    (
                        gauge("vllm:num_requests_waiting_by_reason", "pod, reason", WORKER),
                        "{{pod}} {{reason}}",
                    ),
                ),
                panel(
                    "Steps a second",
                    "short",
                    "Zero with sequences in the batch: the worker hangs, delete its pod.",
                    (rate("vllm:iteration_tokens_total_count", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Tokens in a step",
                    "short",
                    "At half. Small batches at full load: the host or the hand-off is the bound.",
                    (quantile(0.5, "vllm:iteration_tokens_total", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Tokens drawn",
                    "short",
                    "A second, by worker. Compare with its like on the same hardware.",
                    (rate("vllm:generation_tokens_total", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Operations of the device",
                    "flops",
                    "A second, needed by the model's shape. Low on a prefill worker under load: "
                    "steps are small, or the host is the bound.",
                    (rate(_FLOPS, POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Memory of the device",
                    "Bps",
                    "Weights and KV read and written. Low on a decode worker under load: batches "
                    "are small, or the host is the bound.",
                    (_MOVED, "{{pod}}"),
                ),
                panel(
                    "Share of the device's operations (MFU)",
                    "percentunit",
                    "Of what its data sheet says for 16 bits; empty where the device is not known, "
                    "as a CPU. What is usual: docs/performance.md.",
                    (f"{rate(_FLOPS, POD, WORKER)} / {_PEAK_FLOPS}", "{{pod}}"),
                ),
                panel(
                    "Share of the device's memory pace (MBU)",
                    "percentunit",
                    "Of what its data sheet says; empty where the device is not known. A decode "
                    "worker near 1 is as fast as the device lets it.",
                    (
                        f"({_MOVED}) / {_PEAK_BYTES}",
                        "{{pod}}",
                    ),
                ),
                panel(
                    "Prompt tokens by source",
                    "short",
                    "Computed here, found in the cache, or handed over. Much local_compute on a "
                    "decode worker: hand-offs fail or are not worth it, board P/D.",
                    (rate("vllm:prompt_tokens_by_source_total", "source", WORKER), "{{source}}"),
                ),
            ),
        ),
        Row(
            "Times",
            (
                panel(
                    "Until the first step",
                    "s",
                    "Slowest twentieth. High: the batch is full, see KV use.",
                    (quantile(0.95, "vllm:request_queue_time_seconds", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Prefill",
                    "s",
                    "From the first step to the first token, slowest twentieth. Grows with prompts "
                    "and with what shares the step.",
                    (quantile(0.95, "vllm:request_prefill_time_seconds", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Between tokens",
                    "s",
                    "Slowest twentieth by worker. One alone is high: its GPU or node.",
                    (quantile(0.95, "vllm:inter_token_latency_seconds", POD, WORKER), "{{pod}}"),
                ),
            ),
        ),
        Row(
            "KV cache",
            (
                panel(
                    "KV use",
                    "percentunit",
                    "Share of blocks held. At 1 with preemptions: runbook TandemKVFullPreempting.",
                    (gauge("vllm:kv_cache_usage_perc", POD, WORKER, "max"), "{{pod}}"),
                ),
                panel(
                    "Preemptions",
                    "short",
                    "A second. Any for long: the service is too small for its requests.",
                    (rate("vllm:num_preemptions_total", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Blocks promised to peers",
                    "short",
                    "Blocks that hand-offs hold on P. High for long: D is behind, board P/D.",
                    (gauge("tandem:kv_blocks_held", POD, WORKER), "{{pod}}"),
                ),
                panel(
                    "Prefix hits",
                    "percentunit",
                    "Share of looked-for tokens that the cache had. A fall after a rollout is "
                    "right; without one, prompts have changed.",
                    (
                        (
                            f"{rate('vllm:prefix_cache_hits_total', POD, WORKER)}"
                            f" / {rate('vllm:prefix_cache_queries_total', POD, WORKER)}"
                        ),
                        "{{pod}}",
                    ),
                ),
                panel(
                    "Host memory",
                    "Bps",
                    "KV copied to and from host memory, where there is an offload tier. Much out "
                    "and little back: the tier is too small to help.",
                    (
                        rate("vllm:kv_offload_total_bytes_total", "transfer_type", WORKER),
                        "{{transfer_type}}",
                    ),
                ),
                panel(
                    "Draft tokens",
                    "short",
                    "Drafts that were verified, and those that were accepted. Few accepted: the "
                    "text does not repeat itself, and drafts pause.",
                    (
                        rate("tandem:spec_decode_num_draft_tokens_total", POD, WORKER),
                        "drafted {{pod}}",
                    ),
                    (
                        rate("tandem:spec_decode_num_accepted_tokens_total", POD, WORKER),
                        "accepted {{pod}}",
                    ),
                ),
                panel(
                    "Wasted and repeated tokens",
                    "short",
                    "Drawn for sequences that had ended, or drawn again on resume. `agreed false` "
                    "is a worker that computes differently: runbook TandemAnswersContradict.",
                    (rate("tandem:discarded_tokens_total", POD, WORKER), "discarded {{pod}}"),
                    (
                        rate("tandem:resume_replayed_tokens_total", "agreed", WORKER),
                        "agreed {{agreed}}",
                    ),
                ),
            ),
        ),
    ),
)
