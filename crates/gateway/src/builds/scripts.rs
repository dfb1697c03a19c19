//! What steps do in the sandbox where no command of the tenant's is run: scripts for any POSIX shell, which are given what they are about as
//! arguments, so that no name in them is taken for a command. All are run as root.

/// Runs a command as users of E2B's templates expect it: by bash, as a login shell, if there is one. `$1` is the command.
pub(super) const RUN: &str = r#"if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; fi; exec sh -c "$1""#;

/// Makes a directory, with those above it. `$1` is the directory, `$2` whose it is to be; what was there keeps its owner.
pub(super) const WORKDIR: &str = r#"
set -e
first=
at=$1
while [ ! -d "$at" ]; do
    first=$at
    at=$(dirname -- "$at")
done
[ -n "$first" ] || exit 0
mkdir -p -- "$1"
case $2 in *:*) owner=$2 ;; *) owner=$2:$(id -g -- "$2" 2>/dev/null || echo "$2") ;; esac
chown -hR -- "$owner" "$first"
"#;

/// Makes a user if there is none of this name. `$1` is the name.
pub(super) const USER: &str = r#"
case $1 in *[!0-9]*) ;; *) exit 0 ;; esac
id -u -- "$1" >/dev/null 2>&1 && exit 0
shell=/bin/sh
[ ! -x /bin/bash ] || shell=/bin/bash
if command -v useradd >/dev/null; then
    exec useradd -m -s "$shell" -- "$1"
fi
exec adduser -D -s "$shell" "$1"
"#;

/// Makes a directory for an archive, on the disk, and tells its path.
pub(super) const UNPACK: &str = r#"
for base in /var/tmp /tmp /; do
    [ ! -d "$base" ] || exec mktemp -d "${base%/}/basalt-copy.XXXXXX"
done
"#;

/// Moves what was unpacked to its place. `$1` is the directory that was made for the archive, `$2` what of it, `$3` where to, `$4` whose it
/// becomes, `$5` its mode or nothing. A directory is merged into one that is there, which stays as it is.
pub(super) const COPY: &str = r#"
trap 'rm -rf -- "$unpacked"' EXIT
unpacked=$1
fail() {
    echo "$1" >&2
    exit 1
}
merge() {
    for one in "$1"/* "$1"/.[!.]* "$1"/..?*; do
        [ -e "$one" ] || [ -L "$one" ] || continue
        if [ -d "$2/${one##*/}" ] && { [ ! -d "$one" ] || [ -L "$one" ]; }; then
            fail "$2/${one##*/} is a directory, and what is copied there is none"
        elif [ -d "$2/${one##*/}" ]; then
            merge "$one" "$2/${one##*/}"
        else
            mv -f -- "$one" "$2/${one##*/}" || exit 1
        fi
    done
}
from=$1${2:+/$2}
[ -e "$from" ] || [ -L "$from" ] || fail "there is no $2 in what was uploaded"
case $4 in *:*) owner=$4 ;; *) owner=$4:$(id -g -- "$4" 2>/dev/null || echo "$4") ;; esac
chown -hR -- "$owner" "$from" || exit 1
if [ -n "$5" ] && [ ! -L "$from" ]; then
    chmod -R -- "$5" "$from" || exit 1
fi
if [ -d "$from" ] && [ ! -L "$from" ]; then
    if [ ! -d "$3" ]; then
        mkdir -p -- "$3" && chown -- "$owner" "$3" || exit 1
        [ -z "$5" ] || chmod -- "$5" "$3" || exit 1
    fi
    merge "$from" "$3"
else
    case $3 in
    */) mkdir -p -- "$3" || exit 1 ;;
    *) mkdir -p -- "$(dirname -- "$3")" || exit 1 ;;
    esac
    mv -f -- "$from" "$3" || exit 1
fi
"#;
