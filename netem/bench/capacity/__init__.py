"""What the capacity model says of real processes on emulated links: `shoal bench capacity`."""
