#!/bin/bash
# Builds the guest kernel: `recipe.sh OUT_DIR` fills OUT_DIR with vmlinux, System.map, config and facts.
#
# The source is Debian's linux-source-6.1, the configuration tinyconfig plus config/*.config. The same inputs give the
# same bytes. It does not know the cache, its hashes or who calls it; docs/kernel-policy.md says why things are as they are.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
package=linux-source-6.1
# What building needs beyond a C compiler and make: kconfig (flex, bison), time constants (bc), objtool (libelf), unpacking (xz).
build_needs=(gcc make flex bison bc libelf-dev libc6-dev xz-utils)

say() { printf 'kernel: %s\n' "$*"; }
die() { printf 'kernel: %s\n' "$*" >&2; exit 1; }

# CPU seconds (user and system) of this shell's finished children so far.
cpu_seconds() {
    local tick
    tick=$(getconf CLK_TCK)
    # proc(5): cutime and cstime are fields 16 and 17; the first two go with the command's name.
    awk -v tick="$tick" '{ sub(/^.*\) /, ""); printf "%d\n", ($14 + $15) / tick }' "/proc/$$/stat"
}

install_needs() {
    local missing=() p
    for p in "${build_needs[@]}"; do
        dpkg-query -W -f '${Status}\n' "$p" 2>/dev/null | grep -q ' installed$' || missing+=("$p")
    done
    # A lock timeout, because other recipes may be installing at the same moment.
    local apt=(apt-get -q -o DPkg::Lock::Timeout=600)
    if ! apt-cache show "$package" >/dev/null 2>&1; then
        say "reading package lists"
        "${apt[@]}" update >/dev/null
    fi
    if [ ${#missing[@]} -gt 0 ]; then
        say "installing ${missing[*]}"
        DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null ||
            { "${apt[@]}" update >/dev/null &&
              DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null; } ||
            die "could not install ${missing[*]}: run 'apt-get update' and look at its errors"
    fi
}

# Fetches the source package without installing it (its dependencies are not needed) and unpacks it into $work/src.
unpack_source() {
    say "downloading $package"
    # Not as user _apt: it cannot write into our directory, and apt would print a warning about that.
    (cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$package" >/dev/null) ||
        { apt-get -q update >/dev/null && (cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$package" >/dev/null); } ||
        die "could not download $package: run 'apt-get update' and look at its errors"
    local deb
    deb=$(echo "$work/$package"_*.deb)
    source_version=$(dpkg-deb -f "$deb" Version)
    say "unpacking $package $source_version"
    mkdir "$work/src"
    # Code of other machines is most of the tree and is never read. Kconfig files and Makefiles stay.
    local foreign=() part
    for part in alpha arc arm arm64 csky hexagon ia64 loongarch m68k microblaze mips nios2 openrisc parisc powerpc riscv s390 sh \
        sparc um xtensa; do
        foreign+=("--exclude=*/arch/$part/*.[chS]" "--exclude=*/arch/$part/boot/dts/*")
    done
    # Of network cards some of Intel's have drivers here.
    for part in drivers/gpu drivers/media 'drivers/net/ethernet/[!i]*' drivers/net/wireless drivers/scsi drivers/staging sound; do
        foreign+=("--exclude=*/$part/*.[ch]")
    done
    dpkg-deb --fsys-tarfile "$deb" | tar -xO "./usr/src/$package.tar.xz" | xz -dc |
        tar -x -C "$work/src" --strip-components=1 --wildcards "${foreign[@]}" \
            --exclude='*/Documentation/*.rst' --exclude='*/tools/testing/*' --exclude='*/tools/perf/*'
    rm "$deb"
    patch_source
}

# The few changes to the source; each fails loudly where it no longer finds its place.
patch_source() {
    # Without memory encryption (an AMD feature that is off here) its section is empty, yet the linker script gives it 2 MB
    # of zeroed memory that nobody uses. A page is enough.
    local script=$work/src/arch/x86/kernel/vmlinux.lds.S
    sed -i '/define BSS_DECRYPTED/,/__end_bss_decrypted/s/PMD_SIZE/PAGE_SIZE/' "$script"
    [ "$(sed -n '/define BSS_DECRYPTED/,/__end_bss_decrypted/p' "$script" | grep -c PAGE_SIZE)" -ge 2 ] ||
        die "BSS_DECRYPTED in the linker script has changed: look whether it still wastes 2 MB"
    # Both only test the source, file by file: whether a static symbol is exported, and whether FORTIFY_SOURCE's own test
    # cases fail to compile. Together they are a fourteenth of the build.
    drop_line scripts/Makefile.build 'call cmd,check_local_export' 2
    drop_line lib/Makefile 'subdir-$(CONFIG_FORTIFY_SOURCE) += test_fortify' 1
    drop_exports
}

# Nothing is ever loaded, so nothing needs to be exported. Not by defining __DISABLE_EXPORTS for all: that macro also takes
# the return thunks out of assembler code.
drop_exports() {
    local file
    for file in include/linux/export.h include/asm-generic/export.h; do
        [ "$(grep -c '^#if.*CONFIG_MODULES.*defined(__DISABLE_EXPORTS)' "$work/src/$file")" = 1 ] ||
            die "$file has changed: look where __DISABLE_EXPORTS went"
        sed -i '/^#if.*CONFIG_MODULES/s/defined(__DISABLE_EXPORTS)/1/' "$work/src/$file"
    done
}

# drop_line FILE TEXT COUNT: removes the COUNT lines that hold TEXT.
drop_line() {
    local file=$work/src/$1
    [ "$(grep -cF "$2" "$file")" = "$3" ] || die "$1 has changed: look where '$2' went"
    grep -vF "$2" "$file" >"$work/edited"
    cat "$work/edited" >"$file"
}

# A fragment line is `CONFIG_NAME=value  # reason`. Prints the fragments as kconfig reads them; a line without reason is an error.
fragment_options() {
    awk '
        /^[[:space:]]*(#|$)/ { next }
        !/^CONFIG_[A-Z0-9_]+=[^#]*[^#[:space:]][[:space:]]+# ./ {
            printf "kernel: %s:%d: not \"CONFIG_NAME=value  # reason\": %s\n", FILENAME, FNR, $0 > "/dev/stderr"; bad = 1; next }
        { sub(/[[:space:]]+#.*/, ""); name = $0; sub(/=.*/, "", name)
          if (name in seen) { printf "kernel: %s:%d: %s is already set in %s\n", FILENAME, FNR, name, seen[name] > "/dev/stderr"; bad = 1 }
          seen[name] = FILENAME; print }
        END { exit bad }' "$here"/config/*.config
}

# tinyconfig with the fragments on top, in one pass: what nobody names stays off, also where kconfig's default is on.
configure() {
    fragment_options >"$work/options" || die "fix the fragments named above"
    cat "$work"/src/kernel/configs/tiny-base.config "$work"/src/kernel/configs/tiny.config \
        "$work"/src/arch/x86/configs/tiny.config "$work/options" >"$work/all.config"
    "${make[@]}" KCONFIG_ALLCONFIG="$work/all.config" allnoconfig >"$work/configure.log" 2>&1 ||
        { tail -n 20 "$work/configure.log" >&2; die "kconfig failed"; }
    check_options "$work/options" "$work/src/.config"
}

# kconfig drops silently what it does not know or whose dependencies are missing; here that is an error.
check_options() {
    awk -v wanted="$1" '
        BEGIN { while ((getline line < wanted) > 0) { name = line; sub(/=.*/, "", name); value = line; sub(/^[^=]*=/, "", value); want[name] = value } }
        /^CONFIG_/ { name = $0; sub(/=.*/, "", name); value = $0; sub(/^[^=]*=/, "", value); got[name] = value }
        END {
            for (name in want) {
                value = (name in got) ? got[name] : "n"
                count++
                if (value != want[name]) { printf "kernel: %s=%s was asked for, the configuration has %s\n", name, want[name], value > "/dev/stderr"; bad = 1 }
            }
            if (bad) exit 1
            printf "kernel: all %d options of the fragments are in the configuration\n", count
        }' "$2" || die "the options above did not survive: look for a missing dependency or a changed name"
}

# Starts make in a process group of its own, so that cleaning up can end it with all its compilers.
start_make() {
    set -m
    "${make[@]}" -j"$(nproc)" "$@" >>"$work/build.log" 2>&1 &
    builder=$!
    set +m
}

finish_make() {
    local failed=0
    wait "$builder" || failed=1
    builder=
    # Beside others that went on, what failed may be far up.
    [ "$failed" = 0 ] || {
        { grep -E '(error|No rule to make target|Error [0-9]+$)' "$work/build.log" || tail -n 30 "$work/build.log"; } >&2
        die "the kernel's build failed, see above"
    }
}

# The flags are those of an ordinary file of the kernel and one of the ACPI interpreter, so kbuild compiles these first.
# "asked" is every name that the headers test.
make_common_headers() {
    say "preparing"
    start_make prepare kernel/range.o drivers/acpi/acpica/dsargs.o
    finish_make
    precompile core kernel/.range.o.cmd
    precompile network kernel/.range.o.cmd
    precompile acpica drivers/acpi/acpica/.dsargs.o.cmd
    (cd "$work/src" && cat ../pch/*.d | tr -s ' \\' '\n\n' | grep '\.h$' | sort -u | xargs cat) |
        grep -E '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif)' | grep -oE '[A-Za-z_][A-Za-z0-9_]*' | sort -u >"$work/pch/asked"
    judge_files
    touch "$work/pch/ready"
}

# precompile NAME CMD_FILE: compile/NAME.h with the flags that kbuild noted in CMD_FILE.
precompile() {
    local command
    command=$(sed -n '1{s/^[^=]*:= //;s/;.*//;p}' "$work/src/$2" |
        sed -E 's/-Wp,-MMD,[^ ]*//; s/-include [^ ]*//g; s/-D(__)?KBUILD_[A-Z]+=[^ ]*//g; s/^[^ ]* /gcc /; s/ -c -o .*//')
    (cd "$work/src" && eval "$command -Idrivers/acpi/acpica -MD -MF ../pch/$1.d -x c-header ../pch/$1.h -o ../pch/$1.h.gch") ||
        die "the header does not compile: see kernel/compile/$1.h"
}

# An empty file per verdict, so that cc.sh starts no process to look one up.
judge_files() {
    (cd "$work/src" && find arch/x86 block drivers fs init io_uring ipc kernel lib mm net security -name '*.c' -print0 |
        xargs -0 awk -v names=../pch/asked -f "$here/compile/verdicts.awk") | tr ' ' '.' >"$work/pch/verdict_files"
    mkdir "$work/pch/verdicts"
    (cd "$work/pch/verdicts" && sed 's|/[^/]*$||' ../verdict_files | sort -u | xargs mkdir -p && xargs touch <../verdict_files)
}

build() {
    say "compiling with $(nproc) jobs"
    start_make vmlinux
    local started=$SECONDS last=0 compiled
    while kill -0 "$builder" 2>/dev/null; do
        sleep 1
        if [ $((SECONDS - started - last)) -ge 15 ]; then
            last=$((SECONDS - started))
            compiled=$(grep -c '^  CC ' "$work/build.log" || true)
            say "compiled $compiled files in $last s"
        fi
    done
    finish_make
    # objtool only warns where code escapes a mitigation (a return without its thunk, say); here that is an error.
    if grep 'warning: objtool' "$work/build.log" >&2; then die "objtool found the above: a mitigation would be lost"; fi
}

publish() {
    mkdir -p "$out"
    # The symbol table is System.map's; the VMM needs the loaded segments and the PVH note only.
    objcopy --strip-all "$work/src/vmlinux" "$out/vmlinux"
    cp "$work/src/System.map" "$out/System.map"
    cp "$work/src/.config" "$out/config"
    local sizes
    sizes=$(size -A "$work/src/vmlinux" | awk '
        $1 == ".text" { t = $2 } $1 == ".rodata" { r = $2 } $1 == ".data" { d = $2 } $1 == ".bss" { b = $2 }
        END { printf "text %d kB, rodata %d kB, data %d kB, bss %d kB", t / 1024, r / 1024, d / 1024, b / 1024 }')
    {
        echo "source $package $source_version"
        echo "compiler $(gcc --version | head -n 1)"
        echo "options $(wc -l <"$work/options")"
        echo "sizes $sizes"
        echo "sha256 $(sha256sum <"$out/vmlinux" | cut -d' ' -f1)"
    } >"$out/facts"
    say "$sizes, file $(($(stat -c %s "$out/vmlinux") / 1024)) kB"
}

# Also after Ctrl-C. A compiler that is just ending may still write, hence the second try.
clean_up() {
    if [ -n "$builder" ]; then
        kill -- "-$builder" 2>/dev/null || true
        wait "$builder" 2>/dev/null || true
    fi
    rm -rf "$work" 2>/dev/null || { sleep 1; rm -rf "$work"; }
}

# Trees of runs that were killed outright; the name holds the run's process id.
sweep() {
    local tree pid
    for tree in "$temporary"/basalt-kernel.*; do
        pid=${tree##*/basalt-kernel.}
        pid=${pid%%.*}
        [[ ! $pid =~ ^[0-9]+$ || -e /proc/$pid ]] || rm -rf "$tree"
    done
}

main() {
    [ $# -eq 1 ] || die "usage: recipe.sh OUT_DIR"
    out=$1
    [ "$(id -u)" -eq 0 ] || die "must run as root, because it installs build tools"
    temporary=${TMPDIR:-/tmp}
    sweep
    work=$(mktemp -d "$temporary/basalt-kernel.$$.XXXXXX")
    builder=
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # Host names, user names, dates and paths must not reach the image; nor may a Rust compiler that happens to be there.
    make=(env -i "PATH=$PATH" "HOME=$work" LC_ALL=C TZ=UTC "PCH_DIR=../pch" "PCH_LOG=../pch/plain"
          KBUILD_BUILD_USER=basalt KBUILD_BUILD_HOST=basalt "KBUILD_BUILD_TIMESTAMP=Thu Jan  1 00:00:00 UTC 2026"
          KBUILD_BUILD_VERSION=1 make -C "$work/src" ARCH=x86_64 RUSTC=none "CC=$here/compile/cc.sh")
    mkdir "$work/pch"
    cp "$here"/compile/*.h "$work/pch"
    local started=$SECONDS before
    install_needs
    unpack_source
    before=$(cpu_seconds)
    configure
    [ "${BASALT_KERNEL_PLAIN:-}" = 1 ] || make_common_headers
    build
    publish
    say "built in $((SECONDS - started)) s, $(($(cpu_seconds) - before)) CPU seconds for the build, $(cpu_seconds) in all"
}

# On one line: bash reads a script as it goes, and this one may be edited while it runs.
main "$@"; exit
