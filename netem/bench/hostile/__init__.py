"""A real run of which a third of the capacity is hostile, beside the same run without."""
