"""`shoal bench codec`: what a version costs in bytes and time, ours beside what others do, on real updates."""
