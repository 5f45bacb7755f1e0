"""Read a checkpoint: verified against the config, memory-mapped, tensor by tensor."""

from tinfer.checkpoint.expected import expected_tensors
from tinfer.checkpoint.reader import Checkpoint, open_checkpoint
from tinfer.checkpoint.shard import CheckpointError, TensorSpec

__all__ = ["Checkpoint", "CheckpointError", "TensorSpec", "expected_tensors", "open_checkpoint"]
