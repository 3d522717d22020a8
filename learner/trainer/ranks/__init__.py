"""One trainer in several processes, each with a device of its own and its part of the model."""
