"""Figures of what clients saw: percentiles, and requests within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from bench.sim.router import Seen

TTFT_MS, ITL_MS = 300.0, 25.0
"""Bounds of a request that counts: of its first token, and of 99 % of its gaps."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run: ms, as percentiles of requests (gaps: of gaps), and requests a second."""

    requests: int
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    itl_p50: float
    itl_p99: float
    second_p50: float
    second_p90: float
    second_most: float
    late_second: float
    """Share of requests whose second token came later than the bound of gaps."""
    rate: float
    """Requests a second, from the first to the last that came."""
    goodput: float
    """Of them, those within both bounds."""
    late_first: float
    """Share of requests whose first token was late."""
    late_gaps: float
    """Share of requests with more than a hundredth of their gaps over the bound."""

    def row(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


def figures(seen: Sequence[Seen], *, ttft_ms: float = TTFT_MS, itl_ms: float = ITL_MS) -> Figures:
    """Return the figures of requests that have ended. Raises ValueError for none."""
    if not seen:
        raise ValueError("no request has ended: there is nothing to sum up")
    first = np.array([each.times[0] - each.sent for each in seen]) * 1e3
    gaps = [np.diff(each.times) * 1e3 for each in seen]
    several = [each for each in gaps if len(each)]
    every = np.concatenate(several) if several else np.zeros(1)
    second = np.array([each[0] for each in several] or [0.0])
    tpot = np.array([each.mean() for each in several] or [0.0])
    late = first > ttft_ms
    uneven = np.array([(each > itl_ms).sum() > max(1, 0.01 * len(each)) for each in gaps])
    sent = [each.sent for each in seen]
    span = max(max(sent) - min(sent), 1e-9)
    good = int((~late & ~uneven).sum())
    return Figures(
        requests=len(seen),
        ttft_p50=float(np.percentile(first, 50)),
        ttft_p90=float(np.percentile(first, 90)),
        tpot_p50=float(np.percentile(tpot, 50)),
        itl_p50=float(np.percentile(every, 50)),
        itl_p99=float(np.percentile(every, 99)),
        second_p50=float(np.percentile(second, 50)),
        second_p90=float(np.percentile(second, 90)),
        second_most=float(second.max()),
        late_second=float((second > itl_ms).mean()),
        rate=len(seen) / span,
        goodput=good / span,
        late_first=float(late.mean()),
        late_gaps=float(uneven.mean()),
    )
