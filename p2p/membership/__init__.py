"""Who is in the swarm: tickets, admission, bans, handshakes and live links."""
