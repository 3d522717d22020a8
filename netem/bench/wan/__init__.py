"""One update of a real model over an emulated wide-area network, from the optimizer step to the last node's first token."""
