"""`tandem bench KIND`: measures a server, an engine or kernels. Flags are named as in vLLM."""

from __future__ import annotations

import importlib
import sys

KINDS = {
    "serve": "Measure a server with an OpenAI API: latency, throughput, goodput.",
    "throughput": "Measure an engine in this process with many prompts at once.",
    "kernels": "Measure each kernel of a decoder layer against its roofline.",
}


def usage() -> str:
    """Return the text of `tandem bench --help`."""
    rows = "\n".join(f"  {name:<11} {text}" for name, text in KINDS.items())
    what = __doc__.splitlines()[0]
    return f"usage: tandem bench KIND [--help] [options]\n\n{what}\n\nkinds:\n{rows}"


def run(argv: list[str]) -> int:
    """Run one kind; its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in KINDS:
        print(
            f"tandem bench: {argv[0]!r} is not a kind; see `tandem bench --help`", file=sys.stderr
        )
        return 2
    module = importlib.import_module(f"tandem.cli.bench.{argv[0]}")
    return int(module.run(argv[1:]))
