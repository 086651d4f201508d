"""Rows of the board *P/D*: prefixes that workers pull from each other, and agents of nodes."""

from scripts.dashboards.panels import POD, Row, gauge, panel, quantile, rate

_PULL = "tandem:kv_prefix_pull"
_AGENT = "tandem:kv_agent"


def _of_agents(name: str, by: str = POD) -> str:
    # Agents are of nodes, and of no service: where one is chosen, they are shown all the same.
    return f"sum by ({by}) (rate({_AGENT}_{name}_total[$__rate_interval]))"


PULLS = Row(
    "Pulled prefixes",
    (
        panel(
            "Prompts by pull",
            "short",
            "A second, by worker that computes them: with a start that came from a peer, "
            "and such that were to and were computed. Mostly the latter: the reasons are "
            "beside.",
            (rate(f"{_PULL}s_total", POD), "pulled {{pod}}"),
            (rate(f"{_PULL}_fallbacks_total", POD), "computed {{pod}}"),
        ),
        panel(
            "Computed after all, by reason",
            "short",
            "gone: peers keep less than the router believes, or lend no more "
            "(0.3 of its blocks are lent). timeout: links are slower than forecasts. no_link: more "
            "--kv-pull-peers. Others: causes of hand-offs' failures.",
            (rate(f"{_PULL}_fallbacks_total", "reason"), "{{reason}}"),
        ),
        panel(
            "Tokens pulled and lent",
            "short",
            "A second, by worker. One that lends to all others while it is busy: its "
            "engine answers them between steps.",
            (rate("tandem:kv_prefix_pulled_tokens_total", POD), "pulled {{pod}}"),
            (rate("tandem:kv_prefix_lent_tokens_total", POD), "lent {{pod}}"),
        ),
        panel(
            "Time of a pull",
            "s",
            "From asking a peer to having the prefix. What it costs beyond computing "
            "ends as timeout; near that, lenders are busy or links slow.",
            *(
                (quantile(share, f"{_PULL}_seconds", ""), word)
                for share, word in ((0.5, "half"), (0.95, "95 %"))
            ),
        ),
        panel(
            "Loans declined",
            "short",
            "A second, at who was asked. evicted: its cache is too small for what comes "
            "back; quota: 0.3 of its blocks are lent.",
            (rate("tandem:kv_prefix_loans_declined_total", "reason"), "{{reason}}"),
        ),
        panel(
            "Blocks lent",
            "short",
            "Not evicted while they are. At 0.3 of the blocks, loans are declined. They stay while "
            "nobody asks: a peer that neither ends nor goes.",
            (gauge("tandem:kv_prefix_lent_blocks", POD), "{{pod}}"),
        ),
        panel(
            "Requests that pull",
            "short",
            "By worker that computes them: waiting for a peer's answer, or running behind it.",
            (gauge("tandem:kv_prefix_pulls_open", POD), "{{pod}}"),
        ),
    ),
)

AGENTS = Row(
    "Agents of nodes",
    (
        panel(
            "Bytes a second of each agent",
            "Bps",
            "KV copied between workers of a node that see their own GPU alone. Zero with "
            "traffic on the node: links go another way, see Transports and runbook "
            "TandemLinksFell.",
            (_of_agents("copied_bytes"), "{{pod}}"),
        ),
        panel(
            "Workers of each agent",
            "short",
            "Registered ones. Fewer than the node has: their folder, group or version; "
            "the agent's log has the reason.",
            (f"sum by (pod, role) ({_AGENT}_workers)", "{{pod}} {{role}}"),
        ),
        panel(
            "Copies without an answer",
            "short",
            "Waiting for their turn, or under way. Waiting all the time: one node's "
            "hand-offs are more than its copy engines do.",
            (f"sum by (pod, state) ({_AGENT}_copies_pending)", "{{pod}} {{state}}"),
        ),
        panel(
            "Refused and sent away",
            "short",
            "A second. Some at restarts of workers are right. stranger: somebody of "
            "another group tries; garbage, rejected: another version; full: more workers "
            "than an agent serves.",
            (_of_agents("refused", "pod, reason"), "copy {{reason}} {{pod}}"),
            (_of_agents("callers_lost", "pod, reason"), "caller {{reason}} {{pod}}"),
        ),
    ),
)
