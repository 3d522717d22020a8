"""What each peer's record lets it do: how much it may hold, whether it is proven or checked, whether it may come."""
