"""The bytes of a store, for a comparison with those of another."""

from pathlib import Path

__all__ = ["files"]


def files(folder: Path) -> dict[str, bytes]:
    """All files of a store, but for locks and checkpoints, by their path in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pt" and "lock" not in path.name
    }
