"""Checks that every public function of the crates that programs name has an example which calls it.

The example stands in the function's own docs, in those of its type or of that type's other functions (one example of a builder can show
all of its setters), or in docs to which its own lead by the words "As in [`…`]". The lint `unreachable_pub` sees to it that what says `pub`
is public. What is hidden from the docs is not looked at.

Run without arguments; exits 1 and lists the functions without one.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Crates, and the types of which the functions are looked at (None: all). Of comm those that programs meet; the others are for engines.
CRATES = {
    "burn-ddp/src": None,
    "burn-ddp/launch/src": None,
    "burn-ddp/comm/src": {"World", "WorldOptions", "Error", "Pending", "ProcessGroup", "Timeline"},
}
HIDDEN = re.compile(r"#\[doc\(hidden\)\]\npub mod (\w+)(?:;| \{(.*?)\n\})", re.S)


def items(path):
    """(type, function or None for the type itself, line, docs) of what is public in a file."""
    text = re.split(r"^#\[cfg\((?:all\()?test[^\n]*\n(?:#\[[^\n]*\n)*mod \w+ \{", path.read_text(encoding="utf-8"), flags=re.M)[0]
    owner, in_trait, docs, hidden = "", False, [], False
    attribute = re.compile(r"^( *)#\[[^\n]*[^\]\n]\n(?:\1 [^\n]*\n)*\1\)\]\n", re.M)
    text = attribute.sub(lambda lines: "//\n" * lines[0].count("\n"), text)
    for number, line in enumerate(text.split("\n"), 1):
        code = line.strip()
        if code.startswith("///"):
            docs.append(code[3:].strip())
            continue
        if code.startswith("#[") or code.startswith("//"):
            hidden |= "doc(hidden)" in code
            continue
        if match := re.match(r"pub (?:struct|enum|trait|type) (\w+)", line):
            if not hidden:
                yield match[1], None, number, docs
            owner, in_trait = match[1], line.startswith("pub trait")
        elif match := re.match(r"(?:unsafe )?impl\b(?:<.*?>(?= ))? ?(?:(.+?) for )?(\w+)", line):
            owner, in_trait = ("" if match[1] else match[2]), False
        elif re.match(r"\w", line) and not re.match(r"(?:pub )?(?:const )?fn ", line):
            owner, in_trait = "", False
        if match := re.match(r"( {0,4})(pub )?(?:const )?(?:unsafe )?fn (\w+)", line):
            method = len(match[1]) == 4
            if not hidden and (match[2] or in_trait and method) and (owner or not method):
                yield owner if method else "", match[3], number, docs
        if code:
            docs, hidden = [], False


def code_of(docs):
    """The lines of code in docs."""
    out, inside = [], False
    for line in docs:
        if line.startswith("```"):
            inside = not inside and re.fullmatch(r"```(rust|no_run|should_panic|compile_fail|,)*", line) is not None
        elif inside:
            out.append(line)
    return "\n".join(out)


def without_example(crate, types):
    """All functions of a crate, and those without an example."""
    paths = sorted((ROOT / crate).rglob("*.rs"))
    modules, names = {"tests"}, set()
    for path in paths:
        for module, inside in HIDDEN.findall(path.read_text(encoding="utf-8")):
            modules.add(module)
            names.update(re.findall(r"\w+", inside))
    paths = [path for path in paths if modules.isdisjoint({path.stem, *path.relative_to(ROOT / crate).parts})]
    found = [(path, *item) for path in paths for item in items(path)]
    examples, functions = {}, []
    for path, owner, name, line, docs in found:
        examples[owner or name] = examples.get(owner or name, "") + "\n" + code_of(docs)
        if name and owner not in names and (types is None or owner in types):
            functions.append((path, owner, name, line, re.findall(r"As in \[`(\w+)", " ".join(docs))))
    missing = []
    for path, owner, name, line, others in functions:
        text = "\n".join(examples.get(key, "") for key in [owner or name, *others])
        if not re.search(rf"\b{name}(?:::<.*?>)?\(", text):
            missing.append(f"{path.relative_to(ROOT)}:{line}: {owner + '::' if owner else ''}{name} has no example")
    return functions, missing


bad = []
for crate, types in CRATES.items():
    functions, missing = without_example(crate, types)
    print("\n".join([*missing, f"{crate}: {len(functions)} functions, {len(missing)} without an example"]))
    bad += missing
sys.exit(bool(bad))
