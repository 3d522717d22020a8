"""The verbs `shoal netem`, `bench`, `simulate` and `plan`: flags in, printed results out."""
