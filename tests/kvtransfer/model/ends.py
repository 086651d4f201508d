"""The two ends of a world, which worlds share until one of them touches its own."""

from __future__ import annotations

from typing import Self

from tests.kvtransfer.model.agent import AgentSide
from tests.kvtransfer.model.links import Steps, copied_session

from tandem.kvtransfer.handoff.actions import Action
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.link.session import Session


class Ends:
    """Tables, sessions and D's end of the agent."""

    exports: ExportTable
    exports_sign: int
    imports: ImportTable
    imports_sign: int
    p_session: Session | None
    d_session: Session | None
    agent: AgentSide

    def __init__(self) -> None:
        self.p_shared = self.d_shared = self.agent_shared = False
        self.p_sign: int | None = None
        """Of P's session, as long as nobody touches it; most transitions leave it as it was."""
        self.d_sign: int | None = None
        self.agent_sign: int | None = None
        self.steps = Steps()

    def copy(self) -> Self:
        """An independent world in the same state."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.p_shared = other.d_shared = other.agent_shared = True
        return other

    def own_p(self) -> None:
        """Before P's session is touched: no other world may share it."""
        self.p_sign = None
        if self.p_shared:
            self.p_shared = False
            self.p_session = copied_session(self.p_session)

    def own_d(self) -> None:
        """Before D's session is touched: no other world may share it."""
        self.d_sign = None
        if self.d_shared:
            self.d_shared = False
            self.d_session = copied_session(self.d_session)

    def own_agent(self) -> None:
        """Before D's end of the agent is touched: no other world may share it."""
        self.agent_sign = None
        if self.agent_shared:
            self.agent_shared = False
            self.agent = self.agent.copied()

    def at_p(self, name: str, *arguments: object) -> tuple[Action, ...]:
        after = self.steps.of(self.exports, self.exports_sign, name, arguments)
        self.exports, self.exports_sign, actions = after
        return actions

    def at_d(self, name: str, *arguments: object) -> tuple[Action, ...]:
        after = self.steps.of(self.imports, self.imports_sign, name, arguments)
        self.imports, self.imports_sign, actions = after
        return actions
