"""What modules take and return while a function is traced, and how it is sharded."""
