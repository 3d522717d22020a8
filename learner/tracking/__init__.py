"""A run's metrics for Weights & Biases, TensorBoard and trackio, each fed by a process of its own."""
