"""One payload broadcast over an emulated network by players of several systems, and judged."""
