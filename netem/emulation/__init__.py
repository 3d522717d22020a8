"""Networks brought up on this machine, by tc or by a switch in user space."""
