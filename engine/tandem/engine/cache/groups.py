"""From a layout with groups to what the block pool needs to know of it.

Layers that share a block shape are a group. A pool serves one group; sliding windows or draft
layers will be further groups with pools of their own, over the same slab.
"""

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.layout import KVGroup, KVLayout


def only_group(layout: KVLayout) -> KVGroup:
    """The single group of ``layout``; InvalidParameter when there is not exactly one."""
    if len(layout.groups) != 1:
        raise InvalidParameter("layout.groups", len(layout.groups), "exactly one group of layers")
    return layout.groups[0]
