"""Board *P/D*: KV on its way from prefill to decode workers."""

from scripts.dashboards.pair_rows import AGENTS, PULLS
from scripts.dashboards.panels import POD, SERVED, Board, Row, gauge, mean, panel, quantile, rate

_PHASE = "tandem:kv_handoff_phase_seconds"
_CONSUMER = f'{SERVED},role="consumer"'
_PRODUCER = f'{SERVED},role="producer"'

_PROBED = f"tandem:kv_link_probe_bytes_per_second_bucket{{{SERVED}}}"

_LINK = "tandem:router_handoff_link"
_ENDS = "prefill, decode, transport"
"""Routers say the same of a link: the largest of what they say counts."""
_INFO = f"{_LINK}_info{{{SERVED}}}"
_BROKEN = f'{_LINK}_info{{{SERVED},state!="up"}}'

BOARD = Board(
    "pair",
    "Tandem: P/D",
    "The hand-off: links, phases, failures, leases and slots; who waits for whom.",
    (
        Row(
            "Links",
            (
                panel(
                    "Links by state",
                    "short",
                    "As routers hear of them. Any quarantined: runbook TandemLinkQuarantined.",
                    (gauge("tandem:router_handoff_links", "state", how="max"), "{{state}}"),
                ),
                panel(
                    "Links that are not up",
                    "short",
                    "By prefill and decode worker. One prefill worker in all of them is that "
                    "worker, one pair a link; what each state asks for: runbook "
                    "TandemLinkQuarantined.",
                    # All links where every one is up: an empty panel would look like no data.
                    (
                        f"max by ({_ENDS}, state) ({_BROKEN} or 0 * {_INFO})",
                        "{{prefill}} to {{decode}} {{state}}",
                    ),
                ),
                panel(
                    "Pace of each link",
                    "Bps",
                    "KV that came, over the seconds in which some waited. One far below its like: "
                    "that link's network; all of one transport: that transport.",
                    (
                        gauge(f"{_LINK}_bytes_per_second", _ENDS, how="max"),
                        "{{prefill}} to {{decode}} {{transport}}",
                    ),
                ),
                panel(
                    "Pace by transport",
                    "Bps",
                    "The mean over its links. Lower than another's where both are in use: why the "
                    "better one is not taken, see Transports.",
                    (
                        gauge(f"{_LINK}_bytes_per_second", "transport", how="avg"),
                        "{{transport}}",
                    ),
                ),
                panel(
                    "KV to come over each link",
                    "bytes",
                    "Announced by the prefill worker and not here yet. Growing for one link while "
                    "its pace is low: that link is the bound.",
                    (
                        gauge(f"{_LINK}_waiting_bytes", _ENDS, how="max"),
                        "{{prefill}} to {{decode}} {{transport}}",
                    ),
                ),
                panel(
                    "Links of each worker",
                    "short",
                    "Peers that a worker is linked with. One lower than its like: its network.",
                    (gauge("tandem:kv_links", "pod, role"), "{{pod}} {{role}}"),
                ),
                panel(
                    "Links lost or refused",
                    "short",
                    "A second. Lost: network or a worker that stands still; refused: versions, "
                    "fingerprints or keys that do not fit, the log says which.",
                    (rate("tandem:kv_links_lost_total", POD), "lost {{pod}}"),
                    (rate("tandem:kv_links_refused_total", POD), "refused {{pod}}"),
                ),
                panel(
                    "Bytes a second of each worker",
                    "Bps",
                    "KV packed by P and read by D. Flat at the top while hand-offs wait: the "
                    "network or slots are the bound.",
                    (rate("tandem:kv_handoff_bytes_total", "pod, role"), "{{pod}} {{role}}"),
                ),
                panel(
                    "What a new link delivers",
                    "Bps",
                    "Rate of the first pattern over links made since a worker's start, at half. "
                    "Far below the network's: a slow transport, see the next panel.",
                    # Not a rate: links are made seldom, and most minutes have none.
                    (f"histogram_quantile(0.5, sum by ({POD}, le) ({_PROBED}))", "{{pod}}"),
                ),
                panel(
                    "Transports",
                    "short",
                    "Workers by transport; fallback 1 is one that could not have the better. "
                    "Runbook TandemTransportFellBack. Fell: links that go a worse way than that "
                    "one, which fails on them. Runbook TandemLinksFell.",
                    (
                        gauge("tandem:kv_transport_info", "connector, fallback"),
                        "{{connector}} fallback {{fallback}}",
                    ),
                    (gauge("tandem:kv_links_fallen", "connector"), "fell from {{connector}}"),
                ),
            ),
        ),
        Row(
            "Hand-offs",
            (
                panel(
                    "Hand-offs by end",
                    "short",
                    "A second, as D sees them. Failed ones: the causes are beside.",
                    (rate("tandem:kv_handoffs_total", "outcome", _CONSUMER), "{{outcome}}"),
                ),
                panel(
                    "Failures by cause",
                    "short",
                    "A second, by worker. One pod is a worker, one pair a link, all the network. "
                    "Runbook TandemHandoffFailures.",
                    (rate("tandem:kv_handoff_failures_total", "cause, pod"), "{{cause}} {{pod}}"),
                ),
                panel(
                    "Phases, mean",
                    "s",
                    "Where hand-offs spend their time: wait and commit are P, reserve is room at "
                    "D, read the link, unpack D's host.",
                    (mean(_PHASE, "phase"), "{{phase}}"),
                ),
                panel(
                    "Phases, slowest twentieth",
                    "s",
                    "As beside, for the slow ones. `tail` is what a first decode step waits for.",
                    (quantile(0.95, _PHASE, "phase"), "{{phase}}"),
                ),
                panel(
                    "Slow hand-offs by phase",
                    "short",
                    "Hand-offs slow for their link, by what they waited for. Runbook "
                    "TandemHandoffsSlow.",
                    (rate("tandem:kv_slow_handoffs_total", "phase"), "{{phase}}"),
                ),
                panel(
                    "KV announced and not here",
                    "bytes",
                    "What D has still to read. Growing: D or the link is behind P.",
                    (gauge("tandem:kv_waiting_bytes", POD), "{{pod}}"),
                ),
            ),
        ),
        Row(
            "Leases and slots",
            (
                panel(
                    "Leases",
                    "short",
                    "Hand-offs whose blocks P keeps. They stay while none ends: runbook "
                    "TandemLeasesHeld.",
                    (gauge("tandem:kv_leases", POD), "{{pod}}"),
                ),
                panel(
                    "Blocks leased",
                    "short",
                    "Blocks of P promised to D. Near all of P's blocks: prompts wait for D.",
                    (gauge("tandem:kv_leased_blocks", POD), "{{pod}}"),
                ),
                panel(
                    "Slots",
                    "short",
                    "Transfer slots by state. None free: more slots, or a reader that is behind; "
                    "quarantined: runbook TandemSlotsQuarantined.",
                    (gauge("tandem:kv_slots", "role, state"), "{{role}} {{state}}"),
                ),
                panel(
                    "Committed by P",
                    "short",
                    "Hand-offs a second that each prefill worker saw through. One at zero among "
                    "busy ones hangs.",
                    (rate("tandem:kv_handoffs_total", POD, _PRODUCER), "{{pod}}"),
                ),
                panel(
                    "Strange messages",
                    "short",
                    "Late, repeated or garbled. A few after a failure are right; many without "
                    "one are another version or a foreign sender.",
                    (rate("tandem:kv_stray_events_total", "what"), "{{what}}"),
                    (rate("tandem:kv_garbage_frames_total", "port"), "garbage {{port}}"),
                ),
            ),
        ),
        PULLS,
        AGENTS,
    ),
)
