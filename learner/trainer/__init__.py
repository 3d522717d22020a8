"""The trainer process (torch): packing, losses, optimizer steps, checkpoints."""
