"""Checks that every crate that a build for this platform may use, with whatever features, has a licence that burn-ddp accepts."""

import re
import subprocess
import sys

ACCEPTED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CDLA-Permissive-2.0", "ISC", "LLVM-exception", "MIT",
    "MPL-2.0", "Unicode-3.0", "Zlib",
}


def accepted(expression):
    """An SPDX expression, `/` for OR as older crates write it."""
    words = re.findall(r"[()]|[\w.+-]+", expression.replace("/", " OR "))
    python = {"OR": "or", "AND": "and", "WITH": "and", "(": "(", ")": ")"}
    return bool(words) and eval(" ".join(python.get(word) or str(word in ACCEPTED) for word in words))


tree = ["cargo", "tree", "--locked", "--workspace", "--all-features", "--edges", "normal,build", "--prefix", "none", "--format", "{p};{l}"]
lines = subprocess.run(tree, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
crates = dict(line.removesuffix(" (*)").split(";", 1) for line in lines if ";" in line)
wrong = [f"{crate}: licence {licence or 'not said'!r} is not accepted" for crate, licence in sorted(crates.items()) if not accepted(licence)]
print("\n".join(wrong) or f"{len(crates)} crates, all with accepted licences")
sys.exit(bool(wrong))
