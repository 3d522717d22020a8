"""What a node generates: the requests that it holds, and its tokens on their way to the head."""
