"""What runs on a remote GPU: receive and install versions, run an engine, stream tokens back. Never imports `learner`."""
