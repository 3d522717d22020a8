"""With the packages of other projects, unmodified: environments and trainers (make test-others)."""
