"""Shared parts of the reproductions: command lines, kept results, tables, pictures."""
