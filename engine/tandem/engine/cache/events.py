"""What changed in the prefix cache since the last frame, net, for the routers' index."""

from tandem.protocol.ids import BlockHash
from tandem.protocol.outputs import BlockEvents


class BlockEventLog:
    """Collects changes; ``drain`` makes them one message whose parts do not contradict."""

    def __init__(self) -> None:
        self._last: dict[BlockHash, bool] = {}
        """Hash to whether it is cached now, for hashes that changed."""
        self._cleared = False

    def stored(self, digest: BlockHash) -> None:
        """A block can be found under ``digest``."""
        self._last[digest] = True

    def removed(self, digest: BlockHash) -> None:
        """No block can be found under ``digest`` any more."""
        self._last[digest] = False

    def cleared(self) -> None:
        """No block can be found at all any more."""
        self._last.clear()
        self._cleared = True

    def drain(self) -> BlockEvents | None:
        """Changes since the last call, or None."""
        if not self._last and not self._cleared:
            return None
        events = BlockEvents(
            stored=tuple(digest for digest, cached in self._last.items() if cached),
            removed=tuple(digest for digest, cached in self._last.items() if not cached),
            cleared=self._cleared,
        )
        self._last.clear()
        self._cleared = False
        return events
