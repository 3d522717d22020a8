"""What hostile peers and hostile answers try, each with the figure that must hold."""
