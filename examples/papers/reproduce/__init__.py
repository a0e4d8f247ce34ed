"""What the reproductions share: command lines, kept results, tables and pictures."""
