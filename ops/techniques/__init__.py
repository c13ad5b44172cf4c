"""The ways of saving memory, each in a file of its own, and their order.

Advice, ``headroom.fit``, ``headroom.retry_on_oom``, the command line and the integrations ask them.
"""

from .frozen import Frozen
from .fused_loss import FusedLoss
from .levels import Levels
from .micro_batches import MicroBatches
from .offload import Offload, StateBudget
from .optimizer import ReplacedOptimizer
from .release import Release
from .streamed import StreamedWeights
from .technique import TECHNIQUES
from .weights16 import Weights16

TECHNIQUES[:] = [
    Frozen(),  # of weights that have all their bits
    Weights16(),
    ReplacedOptimizer(),
    FusedLoss(),
    Levels(),
    Offload(),
    StateBudget(),
    StreamedWeights(),
    MicroBatches(),
    Release(),
]
