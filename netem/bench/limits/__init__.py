"""Whether limits hold on the wire, between real processes."""
