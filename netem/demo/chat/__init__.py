"""What `shoal demo --recipe chat` asks, and what an answer is worth: files as a user of Shoal would write them."""
