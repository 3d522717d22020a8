"""`shoal bench staleness`: how learning depends on the age of what is trained on, by objective; exact ages, no network."""
