"""Checks what the packages of the crates contain, and that `cargo publish` would take them all. Uploads and builds nothing.

Needs the registry's index, as every build does.
"""

import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Every package has these, beside its sources.
REQUIRED = {"Cargo.toml", "README.md", "LICENSE-APACHE", "LICENSE-MIT", "src/lib.rs"}
ADDED_BY_CARGO = {"Cargo.lock", "Cargo.toml.orig", ".cargo_vcs_info.json"}
METADATA = ["description", "license", "keywords", "categories", "rust_version", "readme"]


def run(*command, **options):
    return subprocess.run(command, cwd=ROOT, check=True, text=True, **options)


wrong = []
metadata = json.loads(run("cargo", "metadata", "--no-deps", "--format-version", "1", stdout=subprocess.PIPE).stdout)
published = {p["name"]: p for p in metadata["packages"] if p["publish"] is None}
wrong += [f"{name}: no {key}" for name, package in published.items() for key in METADATA if not package[key]]
with tempfile.TemporaryDirectory() as target:
    # Packages of a tree that is being worked on, too.
    run("cargo", "publish", "--workspace", "--dry-run", "--no-verify", "--allow-dirty", "--locked", "--quiet", "--target-dir", target)
    for name, package in published.items():
        stem = f"{name}-{package['version']}"
        crate = next(pathlib.Path(target, "package").rglob(f"{stem}.crate"))
        with tarfile.open(crate) as archive:
            files = {member.name.removeprefix(f"{stem}/"): member for member in archive.getmembers()}
        wrong += [f"{stem}: {file} is missing" for file in sorted(REQUIRED - set(files))]
        wrong += [f"{stem}: {file} is empty or a link" for file in REQUIRED & set(files) if not (files[file].isfile() and files[file].size)]
        extra = [file for file in files if file not in REQUIRED | ADDED_BY_CARGO and not (file.startswith("src/") and file.endswith(".rs"))]
        wrong += [f"{stem}: {file} should not be published" for file in sorted(extra)]
        print(f"{stem}: {len(files)} files, {crate.stat().st_size >> 10} KiB")
print("\n".join(wrong) or f"{len(published)} packages, none with more or less than it should have")
sys.exit(bool(wrong))
