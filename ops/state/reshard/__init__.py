"""Loads sharded optimizer states on another number of ranks.

torch.distributed.checkpoint reshards tensors by itself. It cannot do so with the scales of 8-bit
moments whose blocks are local to a shard: other shards have other blocks. Here codes are read as
the new shards need them, with all old scales, and blocks that lie across several old ones are
quantized again.
"""

from .load import load_sharded
from .report import Recut, ReshardReport

__all__ = ["Recut", "ReshardReport", "load_sharded"]
