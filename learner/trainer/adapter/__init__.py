"""LoRA: a frozen base model, and what is trained and published in its place."""
