"""Folders of the project, and a page, that several tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS, PAPER = ROOT / "notebooks", ROOT / "paper"
DATA = PAPER / "data"
GUIDE = PAPER / "in_your_program.md"
