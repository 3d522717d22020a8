"""What the owner of a host allows: rates, disk, bytes a day, hours, giving way; and how it is kept."""
