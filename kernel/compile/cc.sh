#!/bin/sh
# The kernel build's C compiler: gcc, with a precompiled header where that cannot change the result.
#
# It cannot where the file's own flags differ (gcc tells), where the file defines a macro that a header asks about
# (verdicts.awk finds those), or where gcc prints anything at all; such a file is compiled as kbuild asked.
# recipe.sh makes the headers and calls this; PCH_DIR is where they lie. Knows nothing else of the build.
if [ ! -e "$PCH_DIR/ready" ]; then exec gcc "$@"; fi

source= object= modname=
for arg; do
    case $arg in
        *.c) source=$arg ;;
        -DKBUILD_MODNAME=*) modname=$arg ;;
        -E | -S | -M | -) exec gcc "$@" ;;
    esac
done
if [ -z "$source" ] || [ -z "$modname" ]; then exec gcc "$@"; fi

if [ -e "$PCH_DIR/verdicts/$source.plain" ]; then exec gcc "$@"; fi

# Which of them suits the file changes only the time it takes.
case $source in
    drivers/acpi/acpica/*) header=acpica.h ;;
    net/* | drivers/net/* | kernel/bpf/*) header=network.h ;;
    *) header=core.h ;;
esac

# The arguments again, without the three headers that each header begins with, and with kbuild's names under names.h's.
fast() {
    count=$# skip=
    while [ "$count" -gt 0 ]; do
        arg=$1 count=$((count - 1))
        shift
        if [ -n "$skip" ]; then
            skip=
            case $arg in
                */linux/compiler-version.h | */linux/kconfig.h | */linux/compiler_types.h) continue ;;
                *) set -- "$@" -include "$arg"; continue ;;
            esac
        fi
        case $arg in
            -include) skip=yes ;;
            -DKBUILD_* | -D__KBUILD_*) set -- "$@" "-DFILE_${arg#-D}" ;;
            *) set -- "$@" "$arg" ;;
        esac
    done
    [ -e "$PCH_DIR/verdicts/$source.pr_fmt" ] && set -- -DFILE_HAS_PR_FMT "$@"
    exec gcc -Werror=invalid-pch -Wfatal-errors -include "$PCH_DIR/$header" -include "$PCH_DIR/names.h" "$@"
}

said=$PCH_DIR/said.$$
if (fast "$@") 2>"$said" && [ ! -s "$said" ]; then
    rm -f "$said"
    exit 0
fi
rm -f "$said"
[ -z "${PCH_LOG:-}" ] || echo "$source" >>"$PCH_LOG"
exec gcc "$@"
