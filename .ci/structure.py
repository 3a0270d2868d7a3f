"""Checks of the tree's structure, for every crate of the workspace:

* no import circle of more than 3 files (`use` of one file's items by another; `mod` alone is no import, tests do not count);
* no two files of one basename, but siblings that implement one trait (SIBLINGS) and mod.rs, lib.rs, main.rs, tests.rs;
* no file above 480 lines (data tables and fakes, FREE, and tests do not count);
* no line above 120 columns in code and comments, 140 in Markdown (tables, links and code blocks do not count);
* every file that a table of a mod.rs or lib.rs or the code map names is there.

Run without arguments; exits 1 and says what is wrong. `--sizes` adds the sizes of the crates' files, `--circle` the ways between the files of a circle.
"""

import functools
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Folders whose sub-folders (or files) implement one trait: the same job has the same name in each. At most three.
SIBLINGS = ["burn-ddp/comm/src/engine", "burn-ddp/src/gradients/memory"]
CODE_MAP = "docs/architecture.md"
# Programs and crates that the code map names.
MAPPED_BESIDES = {"burnrun", "burnpack"}
COMMON = {"mod.rs", "lib.rs", "main.rs", "tests.rs"}
FREE = {"fake", "table.rs"}
CIRCLE, LINES, COLUMNS, MARKDOWN = 3, 480, 120, 140


@functools.cache
def tracked(pattern):
    out = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [pathlib.Path(p) for p in out.split("\n") if p and (ROOT / p).exists()]


def crates():
    """Root folder of each crate's sources -> its files."""
    roots = sorted({p.parent / "src" for p in tracked("*Cargo.toml") if (ROOT / p.parent / "src").is_dir()}, reverse=True)
    files = {root: [] for root in roots}
    for path in tracked("*.rs"):
        for root in roots:
            if root in path.parents:
                files[root].append(path)
                break
    return {root: found for root, found in files.items() if found}


def is_test(path):
    return "tests" in (path.stem, *path.parts[:-1]) or path.stem.endswith("_tests")


def code(path):
    """The text without comments, strings and what is compiled for tests only."""
    text = (ROOT / path).read_text(encoding="utf-8")
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text, flags=re.S)
    text = re.sub(r"'(?:\\.|[^'\\])'", "' '", text)
    while match := re.search(r"#\[cfg\((?:all\()?test[^\]]*\]\s*(?:pub(?:\([^)]*\))? )?mod \w+ \{", text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: match.start()] + text[end:]
    return re.sub(r"#\[cfg\((?:all\()?test[^\]]*\]\s*(?:pub(?:\([^)]*\))? )?use [^;]*;", "", text)


def length(path):
    """Lines down to the module of unit tests, which stands last."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.split(r"^#\[cfg\((?:all\()?test[^\n]*\nmod \w+ \{", text, flags=re.M)[0].count("\n")


def expand(tree):
    """`a::{b, c::{d, e as f}}` -> a::b, a::c::d, a::c::e."""
    tree = re.sub(r"\s+", " ", tree.strip())
    if "{" not in tree:
        return [re.sub(r" as \w+$", "", tree)]
    head, rest = tree.split("{", 1)
    inner, depth, parts, current = rest[: rest.rindex("}")], 0, [], ""
    for char in inner:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append(current)
            current = ""
        else:
            current += char
    return [head + leaf for part in parts + [current] if part.strip() for leaf in expand(part)]


def imports(root, files):
    """file -> files whose items it names, by `use` and by paths that begin with crate:: or super::."""
    modules = {}
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        modules[tuple(p for p in parts if p not in ("mod", "lib", "main"))] = path
    texts = {path: code(path) for path in files if not is_test(path)}
    # Re-exports and own modules of a file: `use crate::{Thing}` leads to the file that `pub use`s or defines it.
    exports = {}
    for module, path in modules.items():
        for match in re.finditer(r"pub(?:\([^)]*\))? use ([^;]+);", texts.get(path, "")):
            for leaf in expand(match.group(1)):
                exports[(*module, leaf.split("::")[-1])] = (module, leaf)

    def absolute(module, target):
        names = [n for n in target.split("::") if n]
        if not names:
            return None
        if names[0] == "crate":
            return tuple(names[1:])
        base = list(module)
        if names[0] == "self":
            return (*base, *names[1:])
        if names[0] == "super":
            while names and names[0] == "super":
                base, names = base[:-1], names[1:]
            return (*base, *names)
        return (*base, *names) if (*base, names[0]) in modules else None

    def resolve(target, seen=()):
        for cut in range(len(target), -1, -1):
            prefix = target[:cut]
            export = exports.get(target[: cut + 1]) if cut < len(target) else None
            if export and export not in seen:
                again = absolute(export[0], export[1])
                if again is not None:
                    return resolve((*again, *target[cut + 1 :]), (*seen, export))
            if prefix in modules:
                return modules[prefix]
        return None

    graph = {}
    for module, path in modules.items():
        if path not in texts:
            continue
        text, found = texts[path], set()
        uses = [leaf for m in re.finditer(r"^\s*(pub(?:\([^)]*\))? )?use ([^;]+);", text, flags=re.M) for leaf in expand(m.group(2)) if not m.group(1)]
        uses += re.findall(r"\b((?:crate|super)(?:::\w+)+)", re.sub(r"^\s*(?:pub(?:\([^)]*\))? )?use [^;]+;", "", text, flags=re.M))
        targets = []
        for use in uses:
            target = absolute(module, re.sub(r"::(\*|self)$", "", use))
            if target is None:
                continue
            # `use crate::part;` leads to the files of what is then named as `part::item`.
            items = set(re.findall(rf"(?<!::)\b{target[-1]}::(\w+)", text)) if target in modules and target else ()
            targets += [(*target, item) for item in items] or [target]
        for target in targets:
            leads = resolve(target)
            if leads and leads != path and leads in texts:
                found.add(leads)
        graph[path] = found
    return graph


def circles(graph):
    """Strongly connected components (Tarjan) of more than one file."""
    order, low, stack, found = {}, {}, [], []

    def walk(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                walk(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in order:
            walk(node)
    return sorted(found, key=len, reverse=True)


def basenames(root, files):
    seen = {}
    for path in files:
        if path.name in COMMON or is_test(path) or "bin" in path.relative_to(root).parts:
            continue
        seen.setdefault(path.name, []).append(path)
    for name, paths in sorted(seen.items()):
        siblings = [s for s in SIBLINGS if all(pathlib.Path(s) in p.parents for p in paths)]
        if len(paths) > 1 and not siblings:
            yield f"{root.parent}: {name} stands {len(paths)} times: {', '.join(str(p.relative_to(root)) for p in paths)}"


def there(crate_or_folder):
    paths = [p for p in tracked("*.rs") if crate_or_folder in p.parents]
    return {p.stem for p in paths} | {part for p in paths for part in p.relative_to(crate_or_folder).parts}


def tables():
    """Names of files in the tables of mod.rs files (column `file` or `where`, or the first one) and of lib.rs files (such a column
    alone), and in the code map."""
    for path in tracked("*mod.rs") + tracked("*lib.rs"):
        column = None
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").split("\n"), 1):
            item = path.name == "mod.rs" and re.match(r"//! - `([a-z]\w*)`(?:,|:)", line)
            if item and item.group(1) not in there(path.parent):
                yield f"{path}:{number}: no file {item.group(1)}"
            row = re.match(r"//! \|(.*)\|$", line)
            if not row:
                column = None
                continue
            cells = [cell.strip() for cell in row.group(1).split("|")]
            if column is None:
                named = [cells.index(head) for head in ("file", "where") if head in cells]
                # -1: a table without files.
                column = named[0] if named else 0 if path.name == "mod.rs" else -1
            if column < 0:
                continue
            # Not links, which lead to items.
            for name in set(re.findall(r"(?<!\[)`([a-z]\w*)(?:/|\.rs)?`", cells[column])) - there(path.parent):
                yield f"{path}:{number}: no file {name}"
    folder = None
    for number, line in enumerate((ROOT / CODE_MAP).read_text(encoding="utf-8").split("\n"), 1):
        head = re.match(r"\| `([\w/-]+/src)` \|", line)
        folder = pathlib.Path(head.group(1)) if head else folder if line.startswith("|") else None
        if folder and not head:
            names = set(re.findall(r"`([a-z]\w*)(?:/|\.rs)?`", line))
            for name in sorted(names - there(folder) - MAPPED_BESIDES):
                yield f"{CODE_MAP}:{number}: no file {name}"


def columns():
    for path in tracked("*.rs"):
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").split("\n"), 1):
            if len(line) > COLUMNS and not re.match(r"\s*//[/!] \|", line):
                yield f"{path}:{number}: {len(line)} columns, at most {COLUMNS}"
    for path in tracked("*.md"):
        fence = False
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").split("\n"), 1):
            if line.lstrip().startswith("```"):
                fence = not fence
            if len(line) > MARKDOWN and not fence and not line.lstrip().startswith("|"):
                yield f"{path}:{number}: {len(line)} columns, at most {MARKDOWN}"


def main():
    wrong, sizes, summary = [], [], []
    for root, files in crates().items():
        graph = imports(root, files)
        for circle in circles(graph):
            names = [str(p.relative_to(root)) for p in circle]
            if len(circle) > CIRCLE:
                wrong.append(f"{root.parent}: circle of {len(circle)} files: {' '.join(names)}")
            if "--circle" in sys.argv:
                for path in circle:
                    ways = [str(o.relative_to(root)) for o in sorted(graph[path]) if o in circle]
                    print(f"  {path.relative_to(root)} -> {' '.join(ways)}")
        wrong += basenames(root, files)
        for path in files:
            if is_test(path):
                continue
            lines = length(path)
            sizes.append(lines)
            if lines > LINES and not FREE & set(path.parts):
                wrong.append(f"{path}: {lines} lines, at most {LINES}")
        summary.append(f"{root.parent} {len(files)}")
    wrong += tables()
    wide = list(columns())
    wrong += wide if len(wide) <= 40 or "--columns" in sys.argv else [*wide[:5], f"… {len(wide)} lines too wide in all (--columns)"]
    if "--sizes" in sys.argv:
        print(f"{len(sizes)} files, median {statistics.median(sizes)} lines, largest {max(sizes)}")
    print("\n".join(wrong) or f"{len(sizes)} files, median {statistics.median(sizes):.0f} lines: structure as agreed")
    sys.exit(bool(wrong))


main()
