"""A world for the model checker: the running tables, rings and sessions between memory and network.

One producer address and one consumer. Every choice that threads, network, devices or users could
make is a transition with a name. Contents are symbols: what P computed for a key, or junk. Digests
are left out on purpose: the protocol alone must keep junk away from the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.kvtransfer.model.agent import AgentSide, ask, give_up
from tests.kvtransfer.model.blocks import content, copied, home, needed, sign, tag, total
from tests.kvtransfer.model.ends import Ends
from tests.kvtransfer.model.lending import asked, evict
from tests.kvtransfer.model.limits import ends_at_d, finish_at_p
from tests.kvtransfer.model.links import numbers, sign_of
from tests.kvtransfer.model.parts import (
    D_ADDRESS,
    HELLO,
    JUNK,
    KEYS,
    NOW,
    P_ADDRESS,
    TERMS,
    WELCOME,
    Broken,
    Frame,
    InFlight,
    Setup,
    Use,
    Work,
    d_policy,
    p_policy,
)

from tandem.kvtransfer import events
from tandem.kvtransfer.events import Cancelled, Loaded, Ready
from tandem.kvtransfer.handoff.actions import (
    Action,
    EmitEvent,
    Pack,
    QuarantinePeer,
    Read,
    Send,
    Tag,
    Unpack,
    Untag,
)
from tandem.kvtransfer.handoff.export import ConsumerMessage
from tandem.kvtransfer.handoff.messages import Message
from tandem.kvtransfer.handoff.pull import PeerMessage, SlotState
from tandem.kvtransfer.memory.blocks import CLEARED, BlockTags
from tandem.link.session import LinkState, Verdict
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.kv import LoadFailed, Released
from tandem.protocol.link import Header, read_header
from tandem.protocol.messages import Hello, Reset


class World(Ends):
    reads: tuple[InFlight, ...] = ()

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.p_born = self.d_born = 0
        self.faults_left = 0
        self.new_producer()
        self.new_consumer()
        self.to_p: tuple[Frame, ...] = ()
        self.to_d: tuple[Frame, ...] = ()
        self.p_stale = False
        self.connect()
        while self.to_p or self.to_d:
            self.deliver_to_p() if self.to_p else self.deliver_to_d()

    # -- comparing ----------------------------------------------------------------------------

    def sign(self) -> tuple[object, ...]:
        """A hashable value, equal for worlds that behave alike with as many faults left, but for
        collisions of 64 bits."""
        if self.p_sign is None:
            self.p_sign = hash(numbers(self.p_session))
        if self.d_sign is None:
            self.d_sign = hash(numbers(self.d_session))
        if self.agent_sign is None and self.setup.agent:
            self.agent_sign = hash(self.agent.sign())
        return (
            self.p_born,
            self.d_born,
            self.exports_sign,
            self.imports_sign,
            self.p_sign,
            self.d_sign,
            self.work,
            self.use,
            self.packs,
            self.reads,
            self.unpacks,
            self.p_blocks,
            self.p_tags_sign,
            self.seen,
            self.agent_sign,
            self.p_slots,
            self.d_slots,
            self.d_blocks,
            tuple([frame.sign for frame in self.to_p]),
            tuple([frame.sign for frame in self.to_d]),
            self.p_stale,
        )

    # -- processes ----------------------------------------------------------------------------

    @property
    def p(self) -> Incarnation:
        return P_ADDRESS[self.p_born]

    @property
    def d(self) -> Incarnation:
        return D_ADDRESS[self.d_born]

    def new_producer(self) -> None:
        setup = self.setup
        self.p_shared, self.p_sign = False, None
        self.exports = setup.exports(
            p_policy(setup.kinds, setup.p_block), setup.ring(setup.send_slots, setup.send_slots)
        )
        self.exports_sign = sign_of(self.exports)
        self.p_session = None
        self.packs: tuple[Pack, ...] = ()
        self.work: tuple[Work, ...] = (Work(),) * setup.num_keys
        self.p_blocks: tuple[object, ...] = (JUNK,) * total(setup)
        self.retag(setup.tags(total(setup) if setup.direct else 0))
        self.p_slots: tuple[object, ...] = (JUNK,) * setup.send_slots

    def new_consumer(self) -> None:
        setup = self.setup
        self.d_shared, self.d_sign = False, None
        self.imports = setup.imports(
            d_policy(setup.kinds, setup.d_block),
            setup.ring(setup.receive_slots, setup.receive_slots),
        )
        self.imports_sign = sign_of(self.imports)
        self.d_session = None
        self.reads = ()
        self.unpacks: tuple[Unpack, ...] = ()
        self.use: tuple[Use, ...] = (Use(),) * setup.num_keys
        self.d_slots: tuple[object, ...] = (JUNK,) * setup.receive_slots
        self.d_blocks: tuple[object, ...] = (JUNK,) * total(setup)
        self.seen: tuple[tuple[RequestKey, int, tuple[bytes, ...]], ...] = ()
        """Tags of copies that are to be checked, by key and part."""
        self.agent_shared, self.agent_sign = False, None
        self.agent = AgentSide.new(setup)

    # -- network ------------------------------------------------------------------------------

    def connect(self) -> None:
        """D opens a new connection; P may still read what came on the old one."""
        self.to_d = ()
        self.p_stale = True
        self.d_session = self.setup.session(TERMS[self.d])
        head = read_header(self.d_session.greet(0.0))
        self.to_p = (*self.to_p, Frame.of(head, HELLO))

    def _d_says(self, message: Message) -> None:
        if self.d_session is not None:
            self.own_d()
            frame = Frame.of(read_header(self.d_session.seal()), message)
            self.to_p = (*self.to_p, frame)

    def _p_says(self, message: Message) -> None:
        if self.p_session is not None and not self.p_stale:
            self.own_p()
            frame = Frame.of(read_header(self.p_session.seal()), message)
            self.to_d = (*self.to_d, frame)

    def deliver_to_p(self) -> None:
        """P's control thread reads the next frame."""
        self.own_p()
        frame, self.to_p = self.to_p[0], self.to_p[1:]
        message = frame.message
        if isinstance(message, Hello) and frame.header.sequence == 0:
            self.p_loses_link()
            session = self.setup.session(TERMS[self.p])
            self.p_stale = False
            if session.answer(frame.header, message) is None:
                self.p_session = session
                self.at_p("link_up", frame.header.source)
                self._p_says(WELCOME)
            return
        if self.p_session is None and not self.setup.closed_ears:
            self.p_session = self.setup.session(TERMS[self.p])
            self.p_session.peer = frame.header.source
            self.p_session.state = LinkState.UP
            self.at_p("link_up", frame.header.source)
        verdict = Verdict.BROKEN
        if self.p_session is not None:
            verdict = self.p_session.take(frame.header, message, 0.0)
        if verdict is not Verdict.DELIVER:
            self.p_loses_link()
            if verdict is Verdict.BROKEN and not self.p_stale:
                lost = Frame.of(Header(self.p, frame.header.source, 0), Reset("sequence"))
                self.to_d = (*self.to_d, lost)
            return
        asked_for = ConsumerMessage(message.key, frame.header.source, message)  # type: ignore[arg-type, union-attr]
        self.p_does(self.at_p("apply", asked_for, NOW))

    def deliver_to_d(self) -> None:
        """D's control thread reads the next frame."""
        self.own_d()
        frame, self.to_d = self.to_d[0], self.to_d[1:]
        message = frame.message
        if self.d_session is None:
            return
        verdict = self.d_session.take(frame.header, message, 0.0)
        if verdict is Verdict.UP:
            self.at_d("link_up", self.d_session.peer)
            return
        if verdict is not Verdict.DELIVER:
            self.d_loses_link()
            return
        told = PeerMessage(message.key, self.d_session.peer, message)  # type: ignore[arg-type, union-attr]
        self.d_does(self.at_d("apply", told, NOW))

    def p_loses_link(self) -> None:
        """P counts the consumer of its session as lost."""
        self.own_p()
        if self.p_session is not None:
            peer = self.p_session.peer
            self.p_session = None
            self.p_does(self.at_p("link_lost", peer, NOW))

    def d_loses_link(self) -> None:
        """D counts P as lost, closes the connection and opens another."""
        self.own_d()
        if self.d_session is not None:
            peer = self.d_session.peer
            self.d_session = None
            self.d_does(self.at_d("link_lost", peer, "lost", NOW))
            if self.setup.agent:
                give_up(self, peer)
        self.connect()

    # -- what the tables ask for --------------------------------------------------------------

    def p_does(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if self.p_session is not None and self.p_session.peer == action.to:
                    self._p_says(action.message)
            elif isinstance(action, Pack):
                self.packs = (*self.packs, action)
            elif isinstance(action, Tag):
                tags = copied(self.p_tags)
                for at, block in enumerate(action.block_ids, action.first):
                    tags.set(action.key, block, tag(self.setup, action.key, action.group, at))
                self.retag(tags)
            elif isinstance(action, Untag):
                tags = copied(self.p_tags)
                tags.clear(action.key)
                self.retag(tags)
            elif isinstance(action, EmitEvent):
                self._p_hears(action.event)
        for slot, what in enumerate(self.p_slots):  # a free slot is anybody's to overwrite
            if what is not JUNK and self.exports.ring[slot].state is SlotState.FREE:
                self.p_slots = replaced(self.p_slots, slot, JUNK)

    def _p_hears(self, event: object) -> None:
        if isinstance(event, LoadFailed):
            return
        assert isinstance(event, Released | events.Wanted)
        index = KEYS.index(event.key)
        if isinstance(event, events.Wanted):
            self.work = asked(self.work, index)
            return
        work = self.work[index]
        if not work.done or work.released:
            raise Broken(f"{event.key} is released {'twice' if work.released else 'too early'}")
        self.work = replaced(self.work, index, work._replace(released=True))
        if any(self.holds(index, other) for other in range(self.setup.num_keys)):
            return
        for block in (block for table in home(self.setup, index) for block in table):
            if self.setup.direct and self.p_tags.read(block // self.setup.p_block) != CLEARED:
                raise Broken(f"block {block} is free with its tag on")
            self.p_blocks = replaced(self.p_blocks, block, JUNK)  # it is reused at once
        if self.setup.lends:
            evict(self, index)

    def d_does(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if self.d_session is not None and self.d_session.peer == action.to:
                    self._d_says(action.message)
            elif isinstance(action, Read):
                hasty = self.setup.hasty_tags
                seen = self.tags_of(action.remote_blocks) if hasty else None
                read = InFlight.of(action, seen)
                if self.setup.agent:
                    ask(self, read)
                else:
                    self.reads = (*self.reads, read)
            elif isinstance(action, Unpack):
                self.unpacks = (*self.unpacks, action)
            elif isinstance(action, EmitEvent):
                self._d_hears(action.event)
            elif isinstance(action, QuarantinePeer):
                raise Broken(f"a link is blamed: {action.reason}")

    def _d_hears(self, event: object) -> None:
        assert isinstance(event, Ready | Loaded | LoadFailed | Cancelled | Released)
        index = KEYS.index(event.key)
        use = self.use[index]
        if isinstance(event, Ready):
            self.use = replaced(self.use, index, use._replace(ready=True))
            return
        if isinstance(event, Released):
            if use.blocks_free or not use.ended:
                raise Broken(f"{event.key}: blocks are freed twice")
            self.use = replaced(self.use, index, use._replace(blocks_free=True))
            return
        if use.ended:
            raise Broken(f"{event.key} ends twice: {use.ended}, then {event}")
        if isinstance(event, Loaded) and event.usable:
            self._must_be_right(index, use)
        free = event.blocks_free
        if isinstance(event, Loaded) and not event.usable and not ends_at_d(self.setup):
            if not self.setup.false_end:
                raise Broken(f"P ends {event.key}, which D would go on with")
            free = free or self.setup.hasty
        ended = use._replace(ended=type(event).__name__, blocks_free=free)
        self.use = replaced(self.use, index, ended)

    def _must_be_right(self, index: int, use: Use) -> None:
        if finish_at_p(self.setup) is not None:
            raise Broken("loaded although token 1 ended it")
        for mine, theirs in needed(self.setup, index):
            if self.d_blocks[mine] != content(self.setup, index, theirs, use.producer):
                raise Broken(f"D uses {self.d_blocks[mine]} as block {theirs} of key {index}")

    def holds(self, index: int, other: int) -> bool:
        """Whether P's engine or lease still has blocks of key ``index`` for the key ``other``."""
        work = self.work[other]
        same = home(self.setup, other) == home(self.setup, index)
        return same and bool(work.step) and not work.released

    def retag(self, tags: BlockTags) -> None:
        """P's tags are now these, which nobody changes any more; reads under way note new turns."""
        self.reads = tuple(
            each._replace(stale=each.stale or self._turned(tags, each.remote_blocks))
            for each in self.reads
        )
        self.p_tags, self.p_tags_sign = tags, sign(tags)

    def _turned(self, tags: BlockTags, blocks: tuple[int, ...]) -> bool:
        return any(tags.turn(block) != self.p_tags.turn(block) for block in blocks)

    def tags_of(self, blocks: tuple[int, ...]) -> tuple[bytes, ...]:
        return tuple(self.p_tags.read(block) for block in blocks)


def replaced(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])
