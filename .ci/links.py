"""Checks that relative links in the repository's Markdown files lead to files that exist."""

import pathlib
import re
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parent.parent
files = subprocess.run(["git", "ls-files", "*.md"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
dead = []
for name in files:
    text = (root / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target) and not (root / name).parent.joinpath(target).exists():
            dead.append(f"{name}: {target}")
print("\n".join(dead) or f"{len(files)} Markdown files, no dead link")
sys.exit(bool(dead))
