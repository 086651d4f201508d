"""What a step has to say to routers, until the engine takes it along."""

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineCoreOutput, Failed


class Outbox:
    """Outputs and failures by router incarnation, in the order in which they happened."""

    def __init__(self) -> None:
        self.outputs: dict[bytes, list[EngineCoreOutput]] = {}
        self.failed: dict[bytes, list[Failed]] = {}

    def emit(self, router: bytes, output: EngineCoreOutput) -> None:
        """Tokens of one choice."""
        self.to(router).append(output)

    def to(self, router: bytes) -> list[EngineCoreOutput]:
        """What a router is to hear, to be added to until the next ``take``."""
        told = self.outputs.get(router)
        if told is None:
            told = self.outputs[router] = []
        return told

    def fail(self, key: RequestKey, cause: FailCause, message: str) -> None:
        """The attempt ended without an answer."""
        failed = Failed(key.request, key.attempt, cause, message)
        self.failed.setdefault(key.router, []).append(failed)

    def take(self) -> tuple[dict[bytes, list[EngineCoreOutput]], dict[bytes, list[Failed]]]:
        """Everything since the last call."""
        taken = self.outputs, self.failed
        self.outputs, self.failed = {}, {}
        return taken
