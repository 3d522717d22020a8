"""The head (service) and the trainer (torch): ledger, dispatch, tasks, losses. Never imports `node`."""
