#!/usr/bin/env bash
# A stand-in for the LLVM that CubeCL's build downloads: `XDG_DATA_HOME=DIR tests/gpu/llvm_stand_in.sh`, then build with the same variable
# and `burn-ddp-tests/nvrtc`. It defines all functions of LLVM that CubeCL calls; they abort. With `nvrtc` none is called, since CUDA's own
# compiler compiles the kernels. Needs no LLVM; works with every C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo fetch --quiet --locked
crate() { # prints the folder of a crate that Cargo.lock names
  cargo metadata --format-version 1 --locked --all-features |
    python3 -c 'import json, os, sys
for p in json.load(sys.stdin)["packages"]:
    if p["name"] == sys.argv[1]: print(os.path.dirname(p["manifest_path"]))' "$1"
}
llvm_sys=$(crate llvm-sys)
bundler=$(crate tracel-llvm-bundler)
[ -n "$llvm_sys" ] && [ -n "$bundler" ] || { echo "$0: CubeCL does not use llvm-sys and tracel-llvm-bundler any more" >&2; exit 1; }
dir=${XDG_DATA_HOME:?name a folder for the stand-in: XDG_DATA_HOME=DIR $0}/tracel/tracel-llvm-${bundler##*-bundler-}
# Made only once: a new file would make cargo rebuild all crates that depend on it.
[ -e "$dir/.tracel-llvm-installed" ] && exit
rm -rf "$dir"
mkdir -p "$dir"/{bin,lib,include/llvm-c,include/llvm/{Bitcode,IR,Linker,Support}}

# LLVM's C functions, as llvm-sys declares them.
{
  cat <<'C'
#include <stdio.h>
#include <stdlib.h>
static void *none(const char *name) {
  fprintf(stderr, "%s: this program was built without LLVM, for CUDA's own compiler (NVRTC)\n", name);
  abort();
}
C
  { grep -rhoP 'pub (unsafe )?fn \KLLVM[A-Z]\w+' "$llvm_sys/src"; grep -oE 'LLVMInitialize\w+' "$bundler/wrappers/target.c"; } | sort -u |
    sed 's/.*/void *&(void) { return none("&"); }/'
} >"$dir/stub.c"
${CC:-cc} -O1 -fPIC -w -c "$dir/stub.c" -o "$dir/stub.o"
${AR:-ar} rcs "$dir/lib/libllvm_stand_in.a" "$dir/stub.o"

# Headers for the C++ and C files that CubeCL compiles against LLVM's headers (`cubecl-llvm/src/shared/cpp_shims`, `target.c`).
cat >"$dir/include/llvm-c/Core.h" <<'C'
#pragma once
typedef struct LLVMOpaqueModule *LLVMModuleRef;
C
{
  echo '#pragma once'
  echo 'typedef int LLVMBool;'
  grep -oE 'LLVMInitialize\w+' "$bundler/wrappers/target.c" | sort -u | sed 's/.*/LLVMBool &(void);/'
} >"$dir/include/llvm-c/Target.h"
cat >"$dir/include/llvm/stand_in.h" <<'C'
#pragma once
#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <llvm-c/Core.h>
namespace llvm {
struct Context {};
struct Module { Context &getContext() { abort(); } };
inline Module *unwrap(LLVMModuleRef) { abort(); }
struct StringRef { StringRef(const char *, size_t) {} };
struct MemoryBufferRef {};
struct MemoryBuffer {
  static std::unique_ptr<MemoryBuffer> getMemBuffer(StringRef, const char *, bool RequiresNullTerminator = true) { abort(); }
  MemoryBufferRef getMemBufferRef() { abort(); }
};
struct Error {};
inline std::string toString(Error) { abort(); }
struct Expected {
  explicit operator bool() { abort(); }
  std::unique_ptr<Module> operator*() { abort(); }
  Error takeError() { abort(); }
};
inline Expected parseBitcodeFile(MemoryBufferRef, Context &) { abort(); }
struct Linker {
  enum Flags { LinkOnlyNeeded };
  static bool linkModules(Module &, std::unique_ptr<Module>, Flags) { abort(); }
};
namespace cl {
struct Option { bool addOccurrence(unsigned, const char *, const char *) { abort(); } };
inline std::map<std::string, Option *> &getRegisteredOptions() { abort(); }
}
}
C
for header in Bitcode/BitcodeReader IR/Module Linker/Linker Support/Error Support/MemoryBuffer Support/CommandLine; do
  echo '#include <llvm/stand_in.h>' >"$dir/include/llvm/$header.h"
done

cat >"$dir/bin/llvm-config" <<C
#!/bin/sh
case "\$*" in
  *--libdir*) echo '$dir/lib' ;;
  *--includedir*) echo '$dir/include' ;;
  *--system-libs*) ;;
  *--libs*) echo -lllvm_stand_in ;;
  *--cxxflags*) echo '-I$dir/include -std=c++17' ;;
  *--cflags*) echo '-I$dir/include' ;;
  *--version*) echo 23.1.0 ;;
  *) echo "the stand-in for llvm-config knows no \$*" >&2; exit 1 ;;
esac
C
chmod +x "$dir/bin/llvm-config"
touch "$dir/.tracel-llvm-installed"
