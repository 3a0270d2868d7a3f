"""Checks that relative links in the repository's Markdown files lead to files that exist, and docs/security.md's tests to functions."""

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
security = (root / "docs/security.md").read_text(encoding="utf-8")
for row in re.findall(r"^\|(.*)\|$", security.split("## What is protected")[1].split("\n## ")[0], re.M)[2:]:
    tested = row.split("|")[-1]
    for file, names in re.findall(r"`(\w+\.rs)`: ((?:`\w+`(?:, )?)+)", tested):
        found = [path for folder in ("burn-ddp/comm", "tests/tests") for path in (root / folder).rglob(file)]
        sources = "".join(path.read_text(encoding="utf-8") for path in found)
        dead += [f"docs/security.md: no test {name} in {file}" for name in re.findall(r"\w+", names) if f"fn {name}(" not in sources]
    if not re.search(r"`\w+\.rs`: `|`fuzz/run.sh`", tested):
        dead.append(f"docs/security.md: no test for {row.split('|')[0].strip()!r}")
print("\n".join(dead) or f"{len(files)} Markdown files, no dead link")
sys.exit(bool(dead))
