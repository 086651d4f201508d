"""`tandem COMMAND`: finds the command's module and runs it. It imports no other command.

As the first process of a container it handles SIGTERM until the command does: the kernel drops the
signal otherwise.
"""

from __future__ import annotations

import os
import signal


def heed_sigterm() -> None:
    """End at SIGTERM while a command is being loaded, if this is the first process."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


heed_sigterm()  # before other imports

import importlib  # noqa: E402
import sys  # noqa: E402

COMMANDS = {
    "up": "Run a whole stack on this machine: router, prefill and decode workers.",
    "serve": "Serve a model without hand-off: a router and one worker.",
    "router": "Run a router (OpenAI HTTP) over running workers.",
    "prefill": "Run a prefill worker.",
    "decode": "Run a decode worker.",
    "node-agent": "Copy KV between workers of this node that see only their own GPU.",
    "operator": "Run the Kubernetes operator.",
    "prepare": "Read or fetch a model, and report its facts.",
    "chat": "Chat with a running server in the terminal.",
    "top": "Show a running server's workers, links, queues and rates, live.",
    "explain": "Show where the time of a call went, or what the operator would do for a service.",
    "run-batch": "Answer all requests of a file, in OpenAI's batch format.",
    "bench": "Measure a server, an engine or kernels.",
}

MODULES = {
    "up": "serve.up",
    "serve": "serve.serve",
    "router": "serve.router",
    "prefill": "serve.prefill",
    "decode": "serve.decode",
    "node-agent": "serve.node_agent",
    "operator": "serve.operator",
    "top": "inspect.top",
    "explain": "inspect.explain",
    "run-batch": "batch.run_batch",
}
"""Modules of commands in ``tandem.cli``, if named differently."""


EXTRAS = {
    "aiohttp": "bench",
    "grpc": "grpc",
    "kopf": "operator",
    "lmformatenforcer": "grammars",
    "nixl_cu13": "nixl",
    "opentelemetry": "tracing",
    "outlines_core": "grammars",
    "xgrammar": "grammars",
}
"""Packages that the default install lacks, by the extra that brings each."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return which package is missing and its remedy, or None for a module of ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "tandem"):
        return None
    extra = EXTRAS.get(package)
    remedy = f"tandem-serving[{extra}]" if extra else "tandem-serving with its dependencies"
    return f"the package {package!r} is not installed; install {remedy}"


def usage() -> str:
    """Return the text of `tandem --help`."""
    rows = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return (
        "usage: tandem COMMAND [--help] [options]\n\n"
        "Serves large language models with prefill and decode on separate workers.\n\n"
        f"commands:\n{rows}\n\n"
        "A flag --some-flag of a server, of prepare or of bench may also be given as\n"
        "TANDEM_SOME_FLAG or in the file of --config; those of chat, top, explain, run-batch\n"
        "and bench kernels may not.\n"
        "`tandem COMMAND --help` lists a command's flags."
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status is its own, 2 for a wrong command or setting."""
    from tandem.cli.serve.children import end_with_parent
    from tandem.protocol.errors import TandemError

    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:
        from tandem.cli.settings.secret_flags import hide_secrets

        hide_secrets(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name = arguments[0]
    if name in ("-V", "--version"):
        from tandem.protocol.link import tandem_version

        print(f"tandem {tandem_version()}")
        return 0
    if name not in COMMANDS:
        print(f"tandem: {name!r} is not a command; see `tandem --help`", file=sys.stderr)
        return 2
    end_with_parent()
    try:
        module = importlib.import_module(f"tandem.cli.{MODULES.get(name, name)}")
        return int(module.run(arguments[1:]) or 0)
    except TandemError as error:
        print(f"tandem {name}: {error}", file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        if (remedy := missing_package(error)) is None:
            raise
        print(f"tandem {name}: {remedy}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tandem {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
