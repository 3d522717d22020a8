"""How a version gets into this node: plan, receive, decode, check, commit."""
