"""Parts of samplers; nothing here is public."""
