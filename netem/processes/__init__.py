"""Programs of ours as child processes of the demo, benches and tests: with output in files, or forked from a warm parent."""
