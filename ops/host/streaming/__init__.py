"""Lends the weights of blocks to a device while these run, and brings their gradients back.

The parameters of a block are CPU tensors in one slab of an arena. When the block is called, a slot
of the device has a copy of the slab, which the block reads in their place, and the copies for the
blocks after it are under way. No graph of autograd keeps what lies in a slot: it keeps tokens, for
which the backward pass fetches the weights again, in the reverse order. Gradients go down when a
block's backward pass is over, and reach the parameters when they have arrived.

The weights of a block, and what leads from one state to the next:

    anywhere  --settle()-->  in the arena  --Stream.slot(), or as the next of another-->  on the way
                                  ^                                                           |
                                  |  another block needs the memory, or a weight              |
                                  |  was written                                 Slot.wait()  |
                                  +----------------  lent to the modules  <-------------------+
                                                       for one Call

    bring_back() leads from the arena to the device, for good.

The gradients of a call: Fetch's backward pass begins to copy them (Way.down), Arrive's waits for
them (Way.arrive) and hands them to the parameters; Arrival.leave frees what they were copied from.
"""

from .block import StreamedBlock
from .stream import Stream

__all__ = ["Stream", "StreamedBlock"]
