"""`shoal bench audit`: what the checks of seeded draws find, after how many tokens, and how often they are wrong."""
